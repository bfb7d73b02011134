//! Plans of whole run files: their numbers, and the sentences of those that cannot be.

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
    for name in crate::config::ModelConfig::names().filter(|name| *name != "custom") {
        let text = format!("[model]\nname = \"{name}\"");
        let images = ["mlp", "simple-cnn", "alexnet", "resnet", "wide-resnet", "vgg"];
        let facts = if images.iter().any(|family| name.starts_with(family)) { IMAGES } else { TEXT };
        let plan = plan(&text, facts).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(plan.step_flops > 0.0 && plan.memory.activations > 0, "{name}");
    }
}

#[test]
fn what_does_not_fit_the_data() {
    insta::assert_snapshot!(sentence("[model]\nvocab = 100", TEXT), @"`model.vocab` is 100, but the data has 256 tokens");
    insta::assert_snapshot!(sentence("[model]\nname = \"resnet8\"\nclasses = 5", IMAGES), @"`model.classes` is 5, but the data has 10 classes");
    insta::assert_snapshot!(sentence("[model]\nlayers = 2\n[train]\nrecompute = 4", TEXT), @"`train.recompute` is 4, and the model gpt has 3 blocks before its last: \"block\" recomputes them all");
    insta::assert_snapshot!(sentence("[model]\nname = \"resnet8\"\n[train]\nrecompute = \"attention\"", IMAGES), @r#"`train.recompute` has no effect as "attention" with `model.name` = "resnet8", which has none"#);
    insta::assert_snapshot!(sentence("", DataFacts::default()), @"`model.vocab` is missing: the number of tokens in the data is unknown");
    insta::assert_snapshot!(sentence("[model]\nname = \"resnet8\"", TEXT), @"`data.kind` gives no images, but the model resnet8 takes them");
    let tiny = DataFacts { image: Some((16, 16, 3)), ..IMAGES };
    insta::assert_snapshot!(sentence("[model]\nname = \"vgg-16\"", tiny), @"`model`: layer 29 (max_pool): a window of 2 x 2 is larger than an image of 1 x 1 x 512");
    let wide = "[model]\nname = \"custom\"\nlayers = [{type=\"max_pool\", kernel=16}]";
    insta::assert_snapshot!(sentence(wide, IMAGES), @"`model`: layer 0 (max_pool): a window of 16 x 16 is larger than 15 x 15, the most that a max pool takes");
    let custom = "[model]\nname = \"custom\"\nlayers = [{type=\"flatten\"}, {type=\"linear\", output=7}]";
    insta::assert_snapshot!(sentence(custom, IMAGES), @"`model`: output: the last layer must give a vector of 10 (one logit a class), got a vector of 7");
}

/// Copies of a stage have other micro-batches, at other times.
#[test]
fn shards_of_gradients_and_weights_need_one_copy_of_a_stage() {
    let text = |zero: usize| {
        format!(
            "[train]\nbatch = 8\nmicro_batches = 4\n[model]\ntied = false\n[parallel]\ndata = 2\npipeline = 2\n\
             schedule = \"chimera\"\nzero = {zero}"
        )
    };
    assert!(plan(&text(1), TEXT).is_ok());
    insta::assert_snapshot!(sentence(&text(2), TEXT), @r#"`parallel.zero` is 2, but with the schedule "chimera" several ranks hold replicas of a stage, whose gradients are reduced after the last micro-batch: use 1"#);
    insta::assert_snapshot!(sentence(&text(3), TEXT), @r#"`parallel.zero` is 3, but with the schedule "chimera" several ranks hold replicas of a stage, whose gradients are reduced after the last micro-batch: use 1"#);
}

#[test]
fn pruning_that_does_not_fit_the_model() {
    let channels = "[prune]\nmethod = \"early-bird\"\nform = \"channels\"";
    insta::assert_snapshot!(sentence(channels, TEXT), @r#"`prune.form` is "channels", but the model gpt has no prunable convolution followed by a batch norm: use "weights""#);
    let image = |model: &str| format!("[model]\nname = \"{model}\"\n{channels}");
    assert!(sentence(&image("simple-cnn"), IMAGES).contains("`prune.form`"));
    assert!(plan(&image("resnet-18"), IMAGES).is_ok());
    let all = format!("{}\nexclude = \"conv\"", image("resnet8"));
    assert!(sentence(&all, IMAGES).contains("`prune.form`"), "excluded convolutions are no candidates");
    let nothing = "[prune]\nmethod = \"random\"\nexclude = \"h.\"";
    insta::assert_snapshot!(sentence(nothing, TEXT), @r#"`prune.method` is "random", but nothing of gpt is left to prune: see `prune.exclude`"#);
    let misspelt = "[prune]\nmethod = \"random\"\nexclude = [\"attn\", \"mpl\"]";
    insta::assert_snapshot!(sentence(misspelt, TEXT), @r#"`prune.exclude` has no effect for "mpl", which is in no name of gpt's parameters"#);
    let pruned = |field: &str| format!("[prune]\n{field}\n[train]\nsteps = 5");
    insta::assert_snapshot!(sentence(&pruned("method = \"magnitude\"\nat = 5"), TEXT), @"`prune.at` is 5, but the run has 5 steps: nothing would ever be pruned");
    assert!(plan(&pruned("method = \"magnitude\"\nat = 4"), TEXT).is_ok());
    insta::assert_snapshot!(sentence(&pruned("method = \"gradual\"\nstart = 7"), TEXT), @"`prune.start` is 7, but the run has 5 steps: nothing would ever be pruned");
    let lottery = "[prune]\nmethod = \"lottery\"\n[train]\nsteps = 5";
    insta::assert_snapshot!(sentence(lottery, TEXT), @"`train.steps` is 5, but the lottery trains 12 times (11 rounds of `prune.rate`) and `prune.rewind` is 0: at least 12 are needed");
}

/// Each name was looked for among all others, and each stage walked the whole model: 10,000 layers, as the
/// long form has them, took a minute.
#[test]
fn models_of_many_layers_and_pipelines_of_many_stages_are_planned_at_once() {
    let layers = if espalier_testing::long() { 10_000 } else { 2_000 };
    let deep = format!("[model]\nlayers = {layers}\nheads = 1\nwidth = 8\ncontext = 8\n");
    let whole = plan(&deep, TEXT).unwrap();
    assert_eq!(whole.model.blocks.len(), layers + 2);
    let stages =
        format!("{deep}[parallel]\npipeline = {}\n[train]\nbatch = 8\nmicro_batches = 8", layers / 2);
    let staged = plan(&stages, TEXT).unwrap();
    assert_eq!(staged.stage_blocks.len(), layers / 2);
    assert!(staged.memory.weights < whole.memory.weights / (layers as u64 / 6));
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

/// Layers are walked a few times in all, however many there are and on however many stages: a walk for each
/// stage, or a look through all names for each, took 47 seconds for 10,000 layers.
#[test]
fn planning_walks_the_model_a_few_times() {
    use crate::spec::layer::listings::LISTINGS;
    let listings = |layers: usize, rest: &str| {
        let text = format!("[model]\nlayers = {layers}\nwidth = 8\nheads = 2\n{rest}");
        let before = LISTINGS.get();
        let plan = plan(&text, TEXT).unwrap();
        let (listings, mut all) = (LISTINGS.get() - before, 0);
        plan.model.for_each(&mut |_| all += 1);
        assert!(plan.rank(plan.mesh.size() - 1).is_ok());
        assert!(listings <= 5 * all, "{listings} listings of {all} layers: {rest}");
        listings
    };
    for rest in [
        "",
        "[parallel]\npipeline = 30\n[train]\nmicro_batches = 32",
        "tied = false\n[parallel]\npipeline = 30\nschedule = \"2bw\"\n[train]\nmicro_batches = 32",
        "[prune]\nmethod = \"rigl\"\ndistribution = \"erdos-renyi-kernel\"\n[parallel]\ndata = 4\nzero = true",
        "[prune]\nmethod = \"magnitude\"\nkernels = \"sparse\"",
    ] {
        let (few, many) = (listings(50, rest), listings(200, rest));
        assert!(many <= 4 * few, "{few} and {many}: {rest}");
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
