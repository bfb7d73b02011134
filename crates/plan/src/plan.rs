//! The plan: a run file and the facts of its data, resolved once into everything a run needs to know. After this,
//! nothing reads the run file for a size.

use std::ops::Range;
use std::time::Duration;

use serde::{Deserialize, Serialize, Serializer};

use crate::batch::Batch;
use crate::config::{self, Change, Family, RunFile};
use crate::data::Data;
use crate::device::Device;
use crate::error::Error;
use crate::layout::{Layout, LocalModel};
use crate::learning_rate::LearningRate;
use crate::memory::{Memory, Prediction, StateBytes};
use crate::mesh::{Mesh, PerAxis};
use crate::optimization::Optimization;
use crate::pipeline::Pipeline;
use crate::pruning::{Method, Pruning, TicketForm};
use crate::rounds::Rounds;
use crate::schedule::{Placement, Schedule};
use crate::scoring::{self, Scoring};
use crate::sharing::Sharing;
use crate::spec::custom::custom;
use crate::spec::presets::{self, Gpt, ImageSize};
use crate::spec::{Input, Layer, Model, Parameter, Precision, Recompute};
use crate::stages::{self, Parts};
use crate::storage::Storage;
use crate::tiles::Region;
use crate::timetable::{Length, Timetable};

/// What only the data knows. What does not apply is `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DataFacts {
    /// Tokens there are: every id is below this.
    pub vocab: Option<usize>,
    /// Rows, columns and colours of an image.
    pub image: Option<ImageSize>,
    /// Kinds of image: every label is below this.
    pub classes: Option<usize>,
}

/// A resolved run: what was decided, and what follows from it. The same on every rank; [`Plan::rank`] says what one of them
/// holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// What the data said.
    pub facts: DataFacts,
    /// The model, every size known, all shapes checked.
    pub model: Model,
    /// What is learnt from.
    pub data: Data,
    /// Where all randomness comes from: initial weights, order of samples, dropout.
    pub seed: u64,
    /// How the samples of a step are cut.
    pub batch: Batch,
    /// In which form a rank keeps what it trains.
    pub storage: Storage,
    /// What is done with the gradient of a step.
    pub optimization: Optimization,
    /// How replicas come to the same weights.
    pub sharing: Sharing,
    /// Which weights go, and when.
    pub pruning: Option<Pruning>,
    /// Which ranks there are.
    pub mesh: Mesh,
    /// What each of them has of the model's tensors.
    pub layout: Layout,
    /// The stages, and the order in which they work.
    pub pipeline: Pipeline,
    /// The blocks of each part of the pipeline.
    pub parts: Parts,
    /// What happens after which step.
    pub timetable: Timetable,
    /// What is to compute it.
    pub device: Device,
    /// How long a rank waits for another.
    pub timeout: Duration,
    /// What a person should know of how the run file was read.
    pub notes: Vec<String>,
    /// Numbers that are trained.
    pub parameters: u64,
    /// Flops of one step, forward and backward, recomputation included.
    pub step_flops: f64,
    /// Predicted bytes of a rank, the most that any has of each category.
    pub memory: Memory,
    /// Predicted bytes of all stages together: what one replica takes where its ranks share a machine.
    pub replica_memory: Memory,
    /// Predicted bytes of those that have parts of the same layers, stage by stage.
    rank_memory: Vec<Vec<Memory>>,
    record: Record,
}

/// The run file that a plan was made from, to be written, compared and printed: nothing else can be read of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Record(RunFile);

impl Record {
    /// The resolved file: every field, also those that were left out.
    pub fn to_toml(&self) -> Result<String, Error> {
        self.0.to_toml()
    }

    /// What differs from what the run `was`; see [`RunFile::changes`].
    pub fn changes(
        &self,
        was: &RunFile,
        same_file: impl Fn(&str, &str) -> bool,
    ) -> Result<Vec<Change>, Error> {
        self.0.changes(was, same_file)
    }

    /// One sentence where the run has another length than the run `was`; see [`RunFile::new_length`].
    pub fn new_length(&self, was: &RunFile, done: u64, samples: usize) -> Option<String> {
        self.0.new_length(was, done, samples)
    }
}

/// What one rank of a plan holds.
#[derive(Debug, Clone, PartialEq)]
pub struct RankPlan {
    /// Its place on each axis.
    pub coordinates: PerAxis,
    /// The blocks of its chunks of the model, in the order of its chunks.
    pub blocks: Vec<Range<usize>>,
    /// Its tile of every image, where images are cut.
    pub tile: Option<Region>,
    /// Numbers of the model that it holds, pruned ones included.
    pub parameters: u64,
    /// Predicted bytes, at the peak of each category.
    pub memory: Memory,
}

impl Plan {
    /// Resolves a run, or says what in it does not fit the data or itself.
    pub fn new(run: RunFile, facts: DataFacts) -> Result<Plan, Error> {
        let mut model = build(&run.model, facts)?;
        model.check()?;
        let (batch, storage, sharing) = (run.batch(), run.storage(), run.sharing());
        let (pruning, pipeline, timetable) = (run.pruning(), run.stages_and_order(), run.timetable());
        model.group_batch_norms(batch.norm_group.unwrap_or(0));
        let parameters = model.parameters();
        if let Some(pruning) = &pruning {
            check_pruning(pruning, &model, &parameters, timetable.length)?;
        }
        check_norms(&batch, &model)?;
        check_recompute(storage.recompute, &model)?;
        let each = 2 * storage.precision.size() + storage.optimizer_bytes;
        let parts = stages::parts(&model, &pipeline, run.cut(), each)?;
        check_ties(&pipeline, &model, &parts)?;
        let schedule = match (pipeline.stages, pipeline.is_asynchronous()) {
            // One micro-batch after the other.
            (1, _) => Pipeline { micro_batches: 1, ..pipeline.clone() }.schedule(1)?,
            (_, false) => pipeline.schedule(1)?,
            // Enough batches that one that never ends has come into its stride.
            (stages, true) => pipeline.schedule(2 + stages)?,
        };
        let mesh = run.mesh();
        let layout = Layout::new(&model, &parameters, run.cuts())?;
        check_scattering(sharing, &schedule)?;
        let stages_of = |(peer, local): (usize, &LocalModel)| {
            let kept = pruning.as_ref().map(|pruning| local.kept(pruning.kept_by_parameter(&parameters)));
            let prediction = Prediction::new(
                &local.model,
                &local.parameters,
                storage,
                sharing,
                batch,
                pruning.as_ref(),
                kept,
            );
            let summands = (0..parameters.len()).map(|id| layout.summands(id, peer) as u64).collect();
            prediction.among(summands).stages(&local.model, &parts, &schedule)
        };
        let rank_memory =
            layout.peers().iter().enumerate().map(stages_of).collect::<Result<Vec<Vec<Memory>>, _>>()?;
        let all = |both: fn(u64, u64) -> u64| {
            rank_memory.iter().flatten().fold(Memory::NONE, |sum, rank| sum.with(*rank, both))
        };
        Ok(Plan {
            parameters: parameters.iter().fold(0, |sum: u64, one| sum.saturating_add(one.elements())),
            step_flops: model.train_flops(batch.samples, storage.recompute)?,
            memory: all(u64::max),
            replica_memory: all(u64::saturating_add),
            rank_memory,
            data: run.data.clone(),
            seed: run.seed,
            batch,
            storage,
            optimization: run.optimization(),
            sharing,
            pruning,
            mesh,
            layout,
            pipeline,
            parts,
            timetable,
            device: run.device.clone(),
            timeout: run.timeout(),
            notes: run.notes.clone(),
            model,
            facts,
            record: Record(run),
        })
    }

    /// The same run on one rank, in micro-batches of the same size and with the same form of state.
    pub fn alone(&self) -> Result<Plan, Error> {
        Plan::new(self.record.0.alone(), self.facts)
    }

    /// The run file that it was made from.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// What the ranks of a pipeline do for so many batches in a row; without one, what the only rank does.
    pub fn schedule(&self, batches: usize) -> Result<Schedule, Error> {
        let schedule = self.pipeline.schedule(batches)?;
        Ok(if self.sharing.is_sharded() { schedule.gathering() } else { schedule })
    }

    /// Steps of the whole run when there are so many training samples.
    pub fn total_steps(&self, samples: usize) -> usize {
        self.timetable.length.steps(samples, self.batch.samples)
    }

    /// What a rank of the mesh holds.
    pub fn rank(&self, rank: usize) -> Result<RankPlan, Error> {
        let coordinates = self.mesh.coordinates(rank);
        let blocks = self.blocks_of(&self.schedule(1)?.placement, coordinates.pipeline);
        let local = self.layout.of(coordinates);
        let held = self.model.block_tensors().held(&blocks);
        Ok(RankPlan {
            coordinates,
            blocks,
            tile: local.tile(),
            parameters: held.into_iter().map(|place| local.parameters[place].elements()).sum(),
            memory: self.rank_memory[self.layout.peer(coordinates)][coordinates.pipeline],
        })
    }

    /// The blocks of a stage's chunks.
    fn blocks_of(&self, placement: &Placement, stage: usize) -> Vec<Range<usize>> {
        placement.chunks(stage).iter().map(|chunk| self.parts[chunk.part].clone()).collect()
    }

    /// Bytes for each weight that pruning may touch, once it has.
    pub fn state_bytes(&self) -> StateBytes {
        StateBytes::predict(self.storage, self.sharing, self.batch.replicas, self.pruning.as_ref())
    }

    /// How candidates are scored on a device of so much memory, what the system and the kernels take included; None where
    /// the method needs no gradients. An error where it does not fit, however it is cut.
    pub fn scoring(&self, memory: Option<u64>) -> Result<Option<Scoring>, Error> {
        let Some(pruning) = &self.pruning else { return Ok(None) };
        let placement = self.schedule(1)?.placement;
        let tensors = self.model.block_tensors();
        let of_stages = |local: &LocalModel| {
            let all = &local.parameters;
            let of_stage = |stage| {
                let held = tensors.held(&self.blocks_of(&placement, stage));
                scoring::Needs::of(all, &held, Some(pruning))
            };
            (0..self.pipeline.stages).map(of_stage).collect::<Vec<_>>()
        };
        let needs = self.layout.peers().iter().flat_map(of_stages).collect::<Option<Vec<_>>>();
        let Some(needs) = needs else { return Ok(None) };
        // GraSP's passes are in f32, and what its gates chose stays beside them.
        let activations = match pruning.method {
            Method::Grasp { .. } => {
                let (samples, recompute) = (self.batch.micro_batch, self.storage.recompute);
                self.model.activation_bytes(samples, Precision::F32, recompute)?.saturating_mul(2)
            }
            _ => self.memory.activations,
        };
        scoring::fit(pruning.method.name(), &needs, memory, self.memory.weights, activations).map(Some)
    }
}

/// As `plan.json` has it.
impl Serialize for Plan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Printed<'a> {
            run: &'a Record,
            facts: &'a DataFacts,
            model: &'a Model,
            micro_batch: usize,
            learning_rate: &'a LearningRate,
            parameters: u64,
            step_flops: f64,
            memory: &'a Memory,
            replica_memory: &'a Memory,
            parts: &'a Parts,
        }
        let Plan { record: run, facts, model, parameters, step_flops, memory, replica_memory, parts, .. } =
            self;
        Printed {
            run,
            facts,
            model,
            micro_batch: self.batch.micro_batch,
            learning_rate: &self.optimization.learning_rate,
            parameters: *parameters,
            step_flops: *step_flops,
            memory,
            replica_memory,
            parts,
        }
        .serialize(serializer)
    }
}

/// The model that the run file names, with the sizes that the data decides.
fn build(written: &config::Model, facts: DataFacts) -> Result<Model, Error> {
    let image = || {
        facts.image.ok_or_else(|| Error::Conflict {
            field: "data.kind".into(),
            problem: format!("gives no images, but the model {} takes them", written.name),
        })
    };
    let classes = |number| at_least("model.classes", number, facts.classes, "classes");
    let vocab = |field, number| at_least(field, number, facts.vocab, "tokens");
    Ok(match written.family {
        Family::Gpt { layers, heads, width, context, vocab: number, dropout, tied, norm, activation } => {
            let vocab = vocab("model.vocab", number)?;
            let dropout = dropout as f32;
            let shape = Gpt { layers, width, heads, context, vocab, dropout, tied, norm, activation };
            presets::gpt(&written.name, &shape)
        }
        Family::GptPreset { context, vocab: number, dropout } => {
            let vocab = vocab("model.vocab", Some(number))?;
            let size = Gpt::preset(&written.name).expect("the name was checked when it was read");
            presets::gpt(&written.name, &Gpt { context, vocab, dropout: dropout as f32, ..size })
        }
        Family::Mlp { ref hidden, classes: number } => presets::mlp(image()?, hidden, classes(number)?),
        Family::SimpleCnn { classes: number } => presets::simple_cnn(image()?, classes(number)?),
        Family::Resnet8 { classes: number } => presets::resnet8(image()?, classes(number)?),
        Family::ResNet { net, classes: number, form } => {
            let image = image()?;
            presets::resnet(net, image, classes(number)?, form.form(image))
        }
        Family::Vgg { net, classes: number, form, batch_norm } => {
            let image = image()?;
            presets::vgg(net, image, classes(number)?, form.form(image), batch_norm)
        }
        Family::AlexNet { classes: number, form } => {
            let image = image()?;
            presets::alexnet(image, classes(number)?, form.form(image))
        }
        Family::Custom { classes: number, context: Some(seq), ref layers } => {
            let vocab = vocab("model.classes", number)?;
            custom(Input::Tokens { seq, vocab }, vocab, layers)?
        }
        Family::Custom { classes: number, context: None, ref layers } => {
            let (height, width, channels) = image()?;
            custom(Input::Image { height, width, channels }, classes(number)?, layers)?
        }
    })
}

/// A weight on two stages of an asynchronous pipeline would have two values.
fn check_ties(pipeline: &Pipeline, model: &Model, parts: &Parts) -> Result<(), Error> {
    if !pipeline.is_asynchronous() {
        return Ok(());
    }
    let (mut seen, tensors) = (vec![0; model.parameters().len()], model.block_tensors());
    let used = parts.iter().flat_map(|part| tensors.parameters(part.clone()));
    used.for_each(|place| seen[place] += 1);
    let Some(twice) = seen.iter().position(|parts| *parts > 1) else { return Ok(()) };
    let problem = format!(
        "ties {} to two stages, which \"{}\" updates at different times: set `model.tied` to false",
        model.parameters()[twice].name,
        pipeline.order.name()
    );
    Err(Error::Conflict { field: "model".into(), problem })
}

/// Copies of a part make gradients of other micro-batches, at other times: no two of them belong together before the last.
fn check_scattering(sharing: Sharing, schedule: &Schedule) -> Result<(), Error> {
    if !sharing.scatters_gradients() || schedule.placement.copies() == 1 {
        return Ok(());
    }
    let problem = format!(
        "is 2, but with the schedule \"{}\" several ranks have copies of a stage, whose gradients are summed when the last \
         micro-batch has made them: use 1",
        schedule.name
    );
    Err(Error::Conflict { field: "parallel.zero".into(), problem })
}

/// Settings of batch norms need batch norms.
fn check_norms(batch: &Batch, model: &Model) -> Result<(), Error> {
    let set = [
        ("parallel.batch_norm", batch.synchronises_norms()),
        ("train.batch_norm_group", batch.norm_group.is_some()),
    ];
    match set.into_iter().find(|(_, set)| *set) {
        Some((field, _)) if model.buffers().is_empty() => {
            let why = format!("with `model.name` = \"{}\", which has no batch norm", model.name);
            Err(Error::NoEffect { field: field.into(), why })
        }
        _ => Ok(()),
    }
}

/// Attention's inside is made again where there is attention.
fn check_recompute(recompute: Recompute, model: &Model) -> Result<(), Error> {
    let mut attends = false;
    model.for_each(&mut |layer| attends |= matches!(layer, Layer::Attention(_)));
    if recompute == Recompute::Attention && !attends {
        let why = format!("as \"attention\" with `model.name` = \"{}\", which has none", model.name);
        return Err(Error::NoEffect { field: "train.recompute".into(), why });
    }
    Ok(())
}

/// What a pruning method needs of the model and of the length of the run.
fn check_pruning(
    prune: &Pruning,
    model: &Model,
    parameters: &[Parameter],
    length: Length,
) -> Result<(), Error> {
    for part in &prune.exclude {
        if !parameters.iter().any(|parameter| parameter.name.contains(part.as_str())) {
            let why = format!("for \"{part}\", which is in no name of {}'s parameters", model.name);
            return Err(Error::NoEffect { field: "prune.exclude".into(), why });
        }
    }
    if !parameters.iter().any(|parameter| prune.covers(parameter)) {
        let problem =
            format!("is \"{}\", but nothing of {} is left to prune", prune.method.name(), model.name);
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
    let Length::Steps(steps) = length else { return Ok(()) };
    prune.method.check_length(steps)?;
    Rounds::of(model, prune).map_or(Ok(()), |rounds| rounds.trainings(length, steps).map(|_| ()))
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
        insta::assert_snapshot!(sentence("[model]\nname = \"resnet8\"\n[train]\nrecompute = \"attention\"", IMAGES), @r#"`train.recompute` has no effect as "attention" with `model.name` = "resnet8", which has none"#);
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
        assert_eq!(plan.batch.micro_batch, 128);
        assert_eq!(plan.optimization.learning_rate.at(0, 10), 0.2);
        assert_eq!(plan.total_steps(5120), 20);
    }

    #[test]
    fn ranks_share_the_batch() {
        let text = "[train]\nbatch = 48\nmicro_batches = 2\n[parallel]\ndata = 4";
        assert_eq!(plan(text, TEXT).unwrap().batch.micro_batch, 6);
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

    /// Layers are walked a few times in all, however many there are and on however many stages: a walk for each stage, or a look
    /// through all names for each, took 47 seconds for 10,000 layers.
    #[test]
    fn planning_walks_the_model_a_few_times() {
        use crate::spec::layer::looks::LOOKS;
        let looks = |layers: usize, rest: &str| {
            let text = format!("[model]\nlayers = {layers}\nwidth = 8\nheads = 2\n{rest}");
            let before = LOOKS.get();
            let plan = plan(&text, TEXT).unwrap();
            let (looks, mut all) = (LOOKS.get() - before, 0);
            plan.model.for_each(&mut |_| all += 1);
            assert!(plan.rank(plan.mesh.size() - 1).is_ok());
            assert!(looks <= 5 * all, "{looks} looks at {all} layers: {rest}");
            looks
        };
        for rest in [
            "",
            "[parallel]\npipeline = 30\n[train]\nmicro_batches = 32",
            "tied = false\n[parallel]\npipeline = 30\nschedule = \"2bw\"\n[train]\nmicro_batches = 32",
            "[prune]\nmethod = \"rigl\"\ndistribution = \"erdos-renyi-kernel\"\n[parallel]\ndata = 4\nzero = true",
            "[prune]\nmethod = \"magnitude\"\nkernels = \"sparse\"",
        ] {
            let (few, many) = (looks(50, rest), looks(500, rest));
            assert!(many <= 10 * few, "{few} and {many}: {rest}");
        }
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
