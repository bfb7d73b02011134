//! The plan: a run file and the facts of its data, resolved once into everything a run needs to know. After this,
//! nothing reads the run file for a size.

use serde::Serialize;

use crate::config::{BatchNorm, Error, Family, LearningRate, Length, Method, RunFile, TicketForm};
use crate::memory::Memory;
use crate::rounds::Rounds;
use crate::schedule::{Name, Options, Schedule};
use crate::spec::custom::custom;
use crate::spec::presets::{self, Gpt, ImageSize};
use crate::spec::{Input, Model};
use crate::stages::{self, Parts};

/// What only the data knows. What does not apply is `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct DataFacts {
    /// Tokens there are: every id is below this.
    pub vocab: Option<usize>,
    /// Rows, columns and colours of an image.
    pub image: Option<ImageSize>,
    /// Kinds of image: every label is below this.
    pub classes: Option<usize>,
}

/// A resolved run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// The run file it was made from.
    pub run: RunFile,
    /// What the data said.
    pub facts: DataFacts,
    /// The model, every size known, all shapes checked.
    pub model: Model,
    /// Samples that a rank runs at a time.
    pub micro_batch: usize,
    /// The rate with its peak for this batch.
    pub learning_rate: LearningRate,
    /// Numbers that are trained.
    pub parameters: u64,
    /// Flops of one step, forward and backward, recomputation included.
    pub step_flops: f64,
    /// Predicted bytes of a rank, the most that any has of each category.
    pub memory: Memory,
    /// Predicted bytes of all stages together: what one replica takes where its ranks share a machine.
    pub replica_memory: Memory,
    /// The blocks of each part of the pipeline.
    pub parts: Parts,
}

impl Plan {
    /// Resolves a run, or says what in it does not fit the data or itself.
    pub fn new(run: RunFile, facts: DataFacts) -> Result<Plan, Error> {
        let mut model = build(&run, facts)?;
        model.check()?;
        model.group_batch_norms(run.train.batch_norm_group);
        check_pruning(&run, &model)?;
        if run.parallel.batch_norm == BatchNorm::Synchronised && model.buffers().is_empty() {
            let why = format!("with `model.name` = \"{}\", which has no batch norm", run.model.name);
            return Err(Error::NoEffect { field: "parallel.batch_norm".into(), why });
        }
        if run.train.batch_norm_group > 0 && model.buffers().is_empty() {
            let why = format!("with `model.name` = \"{}\", which has no batch norm", run.model.name);
            return Err(Error::NoEffect { field: "train.batch_norm_group".into(), why });
        }
        let parts = stages::parts(&model, &run)?;
        check_ties(&run, &model, &parts)?;
        let train = &run.train;
        let (micro_batch, recompute) = (run.micro_batch(), train.recompute);
        let (memory, replica_memory) = match &run.parallel.pipeline {
            None => {
                let memory = Memory::predict(&model, &run, micro_batch)?;
                (memory, memory)
            }
            Some(pipeline) => {
                // Enough batches that one that never ends has come into its stride.
                let batches = if pipeline.is_asynchronous() { 2 + pipeline.stages } else { 1 };
                let schedule = pipeline.schedule(train.micro_batches, batches)?;
                Memory::predict_stages(&model, &parts, &schedule, &run, micro_batch)?
            }
        };
        Ok(Plan {
            parameters: model.parameter_count(),
            step_flops: model.train_flops(train.batch, recompute)?,
            memory,
            replica_memory,
            learning_rate: run.learning_rate.for_batch(train.batch),
            micro_batch,
            parts,
            model,
            facts,
            run,
        })
    }

    /// What the ranks of a pipeline do for so many batches in a row; without one, what the only rank does.
    pub fn schedule(&self, batches: usize) -> Result<Schedule, Error> {
        let micro_batches = self.run.train.micro_batches;
        match &self.run.parallel.pipeline {
            Some(pipeline) => pipeline.schedule(micro_batches, batches),
            None => {
                let options = Options { batches, ..Options::new(1, micro_batches) };
                Name::OneFOneB.schedule(&options).map_err(|error| Error::Ranks(error.to_string()))
            }
        }
    }

    /// Steps of the whole run when there are so many training samples.
    pub fn total_steps(&self, samples: usize) -> usize {
        self.run.train.length.steps(samples, self.run.train.batch)
    }
}

/// The model that the run file names, with the sizes that the data decides.
fn build(run: &RunFile, facts: DataFacts) -> Result<Model, Error> {
    let image = || {
        facts.image.ok_or_else(|| Error::Conflict {
            field: "data.kind".into(),
            problem: format!("gives no images, but the model {} takes them", run.model.name),
        })
    };
    let classes = |written| at_least("model.classes", written, facts.classes, "classes");
    let vocab = |field, written| at_least(field, written, facts.vocab, "tokens");
    Ok(match run.model.family {
        Family::Gpt { layers, heads, width, context, vocab: written, dropout, tied, norm, activation } => {
            let vocab = vocab("model.vocab", written)?;
            let dropout = dropout as f32;
            let shape = Gpt { layers, width, heads, context, vocab, dropout, tied, norm, activation };
            presets::gpt(&run.model.name, &shape)
        }
        Family::GptPreset { context, vocab: written, dropout } => {
            let vocab = vocab("model.vocab", Some(written))?;
            let size = Gpt::preset(&run.model.name).expect("the name was checked when it was read");
            presets::gpt(&run.model.name, &Gpt { context, vocab, dropout: dropout as f32, ..size })
        }
        Family::Mlp { ref hidden, classes: written } => presets::mlp(image()?, hidden, classes(written)?),
        Family::SimpleCnn { classes: written } => presets::simple_cnn(image()?, classes(written)?),
        Family::Resnet8 { classes: written } => presets::resnet8(image()?, classes(written)?),
        Family::ResNet { net, classes: written, form } => {
            let image = image()?;
            presets::resnet(net, image, classes(written)?, form.form(image))
        }
        Family::Vgg { net, classes: written, form, batch_norm } => {
            let image = image()?;
            presets::vgg(net, image, classes(written)?, form.form(image), batch_norm)
        }
        Family::Custom { classes: written, context: Some(seq), ref layers } => {
            let vocab = vocab("model.classes", written)?;
            custom(Input::Tokens { seq, vocab }, vocab, layers)?
        }
        Family::Custom { classes: written, context: None, ref layers } => {
            let (height, width, channels) = image()?;
            custom(Input::Image { height, width, channels }, classes(written)?, layers)?
        }
    })
}

/// A weight on two stages of an asynchronous pipeline would have two values.
fn check_ties(run: &RunFile, model: &Model, parts: &Parts) -> Result<(), Error> {
    let Some(pipeline) = run.parallel.pipeline.as_ref().filter(|pipeline| pipeline.is_asynchronous()) else {
        return Ok(());
    };
    let (mut seen, tensors) = (vec![0; model.parameters().len()], model.block_tensors());
    let used = parts.iter().flat_map(|part| tensors.parameters(part.clone()));
    used.for_each(|place| seen[place] += 1);
    let Some(twice) = seen.iter().position(|parts| *parts > 1) else { return Ok(()) };
    let problem = format!(
        "ties {} to two stages, which \"{}\" updates at different times: set `model.tied` to false",
        model.parameters()[twice].name,
        pipeline.schedule
    );
    Err(Error::Conflict { field: "model".into(), problem })
}

/// What a pruning method needs of the model and of the length of the run.
fn check_pruning(run: &RunFile, model: &Model) -> Result<(), Error> {
    let Some(prune) = &run.prune else { return Ok(()) };
    let parameters = model.parameters();
    for part in &prune.exclude {
        if !parameters.iter().any(|parameter| parameter.name.contains(part.as_str())) {
            let why = format!("for \"{part}\", which is in no name of {}'s parameters", model.name);
            return Err(Error::NoEffect { field: "prune.exclude".into(), why });
        }
    }
    if !parameters.iter().any(|parameter| prune.covers(parameter)) {
        let problem = format!("is \"{}\", but nothing of {} is left to prune", prune.name(), model.name);
        let hint = match prune.exclude.is_empty() {
            true => ": it has no weight of two dimensions but embeddings",
            false => ": see `prune.exclude`",
        };
        return Err(Error::Conflict { field: "prune.method".into(), problem: problem + hint });
    }
    if let Method::EarlyBird { form: TicketForm::Channels, .. } = prune.method
        && !model.scaled_channels().iter().any(|channels| prune.covers_channels(channels))
    {
        let problem = format!(
            "is \"channels\", but the model {} has no candidate convolution with a batch norm behind it: \
             \"weights\" needs none",
            model.name
        );
        return Err(Error::Conflict { field: "prune.form".into(), problem });
    }
    // How many steps an epoch has, only the data knows.
    let Length::Steps(steps) = run.train.length else { return Ok(()) };
    prune.check_length(steps)?;
    Rounds::of(model, prune).map_or(Ok(()), |rounds| rounds.trainings(run, steps).map(|_| ()))
}

/// A number of logits: what is written, or else what the data has; never fewer than that.
fn at_least(field: &str, written: Option<usize>, data: Option<usize>, what: &str) -> Result<usize, Error> {
    match (written, data) {
        (Some(n), Some(least)) if n < least => {
            let problem = format!("is {n}, but the data has {least} {what}");
            Err(Error::Conflict { field: field.into(), problem })
        }
        (Some(n), _) | (None, Some(n)) => Ok(n),
        (None, None) => {
            let expected = format!("the data does not say how many {what} there are");
            Err(Error::Missing { field: field.into(), expected })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: DataFacts = DataFacts { vocab: Some(256), image: None, classes: None };
    const IMAGES: DataFacts = DataFacts { vocab: None, image: Some((32, 32, 3)), classes: Some(10) };

    fn plan(text: &str, facts: DataFacts) -> Result<Plan, Error> {
        Plan::new(RunFile::parse(text, &[])?, facts)
    }

    fn sentence(text: &str, facts: DataFacts) -> String {
        plan(text, facts).unwrap_err().to_string()
    }

    #[test]
    fn the_data_decides_what_is_left_out() {
        assert_eq!(plan("", TEXT).unwrap().model.classes, 256);
        assert_eq!(plan("[model]\nvocab = 300", TEXT).unwrap().model.classes, 300);
        assert_eq!(plan("[model]\nname = \"gpt2-124m\"", TEXT).unwrap().parameters, 124_439_808);
        let resnet = plan("[model]\nname = \"resnet-18\"", IMAGES).unwrap();
        assert_eq!(resnet.parameters, 11_173_962); // the usual form for CIFAR-10
        let large = "[model]\nname = \"resnet-18\"\nform = \"imagenet\"\nclasses = 1000";
        assert_eq!(plan(large, IMAGES).unwrap().parameters, 11_689_512);
        let facts = DataFacts { image: Some((28, 28, 1)), ..IMAGES };
        assert_eq!(plan("[model]\nname = \"simple-cnn\"", facts).unwrap().parameters, 62_346);
    }

    #[test]
    fn every_model_can_be_planned() {
        for name in crate::config::Model::names().filter(|name| *name != "custom") {
            let text = format!("[model]\nname = \"{name}\"");
            let facts = if name.starts_with("gpt") { TEXT } else { IMAGES };
            let plan = plan(&text, facts).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(plan.step_flops > 0.0 && plan.memory.activations > 0, "{name}");
        }
    }

    #[test]
    fn what_does_not_fit_the_data() {
        insta::assert_snapshot!(sentence("[model]\nvocab = 100", TEXT), @"`model.vocab` is 100, but the data has 256 tokens");
        insta::assert_snapshot!(sentence("[model]\nname = \"resnet8\"\nclasses = 5", IMAGES), @"`model.classes` is 5, but the data has 10 classes");
        insta::assert_snapshot!(sentence("", DataFacts::default()), @"`model.vocab` is missing: the data does not say how many tokens there are");
        insta::assert_snapshot!(sentence("[model]\nname = \"resnet8\"", TEXT), @"`data.kind` gives no images, but the model resnet8 takes them");
        let tiny = DataFacts { image: Some((16, 16, 3)), ..IMAGES };
        insta::assert_snapshot!(sentence("[model]\nname = \"vgg-16\"", tiny), @"`model`: layer 30 (max_pool): a window of 2 x 2 is larger than an image of 1 x 1 x 512");
        let custom = "[model]\nname = \"custom\"\nlayers = [{type=\"flatten\"}, {type=\"linear\", output=7}]";
        insta::assert_snapshot!(sentence(custom, IMAGES), @"`model`: output: the last layer must give a vector of 10 (one logit a class), got a vector of 7");
    }

    #[test]
    fn pruning_that_does_not_fit_the_model() {
        let channels = "[prune]\nmethod = \"early-bird\"\nform = \"channels\"";
        insta::assert_snapshot!(sentence(channels, TEXT), @r#"`prune.form` is "channels", but the model gpt has no candidate convolution with a batch norm behind it: "weights" needs none"#);
        let image = |model: &str| format!("[model]\nname = \"{model}\"\n{channels}");
        assert!(sentence(&image("simple-cnn"), IMAGES).contains("`prune.form`"));
        assert!(plan(&image("resnet-18"), IMAGES).is_ok());
        let all = format!("{}\nexclude = \"conv\"", image("resnet8"));
        assert!(sentence(&all, IMAGES).contains("`prune.form`"), "excluded convolutions are no candidates");
        let nothing = "[prune]\nmethod = \"random\"\nexclude = \"h.\"";
        insta::assert_snapshot!(sentence(nothing, TEXT), @r#"`prune.method` is "random", but nothing of gpt is left to prune: see `prune.exclude`"#);
        let misspelt = "[prune]\nmethod = \"random\"\nexclude = [\"attn\", \"mpl\"]";
        insta::assert_snapshot!(sentence(misspelt, TEXT), @r#"`prune.exclude` has no effect for "mpl", which is in no name of gpt's parameters"#);
        let late = |field: &str| format!("[prune]\n{field}\n[train]\nsteps = 5");
        insta::assert_snapshot!(sentence(&late("method = \"magnitude\"\nat = 5"), TEXT), @"`prune.at` is 5, but the run has 5 steps: nothing would ever be pruned");
        assert!(plan(&late("method = \"magnitude\"\nat = 4"), TEXT).is_ok());
        insta::assert_snapshot!(sentence(&late("method = \"gradual\"\nstart = 7"), TEXT), @"`prune.start` is 7, but the run has 5 steps: nothing would ever be pruned");
        let lottery = "[prune]\nmethod = \"lottery\"\n[train]\nsteps = 5";
        insta::assert_snapshot!(sentence(lottery, TEXT), @"`train.steps` is 5, but the lottery trains 12 times (11 rounds of `prune.rate`) and `prune.rewind` is 0: at least 12 are needed");
    }

    /// Each name was looked for among all others, and each stage walked the whole model: a minute and more here.
    #[test]
    fn models_of_many_layers_and_pipelines_of_many_stages_are_planned_at_once() {
        let deep = "[model]\nlayers = 10000\nheads = 1\nwidth = 8\ncontext = 8\n";
        assert_eq!(plan(deep, TEXT).unwrap().model.blocks.len(), 10_002);
        let stages = format!("{deep}[parallel]\npipeline = 5000\n[train]\nbatch = 8\nmicro_batches = 8");
        let staged = plan(&stages, TEXT).unwrap();
        assert_eq!(staged.parts.len(), 5000);
        assert!(staged.memory.weights < plan(deep, TEXT).unwrap().memory.weights / 1000);
    }

    #[test]
    fn batches_and_rates() {
        let text = "[train]\nbatch = 512\nmicro_batches = 4\nepochs = 2\n\
                    [learning_rate]\npeak = 0.1\nschedule = \"constant\"\nscale_from_batch = 256";
        let plan = plan(text, TEXT).unwrap();
        assert_eq!(plan.micro_batch, 128);
        assert_eq!(plan.learning_rate.at(0, 10), 0.2);
        assert_eq!(plan.total_steps(5120), 20);
    }

    #[test]
    fn ranks_share_the_batch() {
        let text = "[train]\nbatch = 48\nmicro_batches = 2\n[parallel]\ndata = 4";
        assert_eq!(plan(text, TEXT).unwrap().micro_batch, 6);
        let synchronised = "[parallel]\nbatch_norm = \"synchronised\"";
        insta::assert_snapshot!(sentence(synchronised, TEXT), @r#"`parallel.batch_norm` has no effect with `model.name` = "gpt", which has no batch norm"#);
        assert!(plan(&format!("[model]\nname = \"resnet-18\"\n{synchronised}"), IMAGES).is_ok());
        let ghost = |group: usize, more: &str| {
            format!(
                "[train]\nbatch = 48\nmicro_batches = 2\nbatch_norm_group = {group}\n[model]\nname = \"resnet-18\"\n{more}"
            )
        };
        insta::assert_snapshot!(sentence(&ghost(5, ""), IMAGES), @"`train.batch_norm_group` is 5, which does not divide the 24 samples of a micro-batch (`train.batch` = 48, `parallel.data` = 1, `train.micro_batches` = 2)");
        insta::assert_snapshot!(sentence(&ghost(8, synchronised), IMAGES), @r#"`train.batch_norm_group` is 8, but `parallel.batch_norm` = "synchronised" takes all ranks' samples"#);
        insta::assert_snapshot!(sentence("[train]\nbatch_norm_group = 8", TEXT), @r#"`train.batch_norm_group` has no effect with `model.name` = "gpt", which has no batch norm"#);
        assert!(plan(&ghost(8, "[parallel]\ndata = 3"), IMAGES).is_ok());
    }

    #[test]
    fn a_plan_can_be_written_as_json() {
        let json = serde_json::to_value(plan("", TEXT).unwrap()).unwrap();
        assert_eq!(json["model"]["blocks"].as_array().unwrap().len(), 6);
        assert_eq!(json["run"]["model"]["name"], "gpt");
        assert_eq!(json["run"]["train"]["steps"], 100);
        assert_eq!(json["memory"]["workspace"], serde_json::Value::Null);
    }
}
