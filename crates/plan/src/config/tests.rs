//! The run file as a whole: defaults, and what is read of sections.

mod documented;
mod ranks;
mod round_trip;
mod sentences;

use super::*;
use crate::data::PictureCrop;
use crate::field::FieldType;
use crate::intervals::RunLength;
use crate::pruning::WeightForm;

fn parse(text: &str) -> Result<RunFile, Error> {
    RunFile::parse(text, &[])
}

fn sentence(text: &str) -> String {
    parse(text).unwrap_err().to_string()
}

#[test]
fn an_empty_file_is_a_run() {
    let run = parse("").unwrap();
    insta::assert_snapshot!(run.to_toml().unwrap(), @r#"
    seed = 0

    [model]
    name = "gpt"
    layers = 4
    heads = 4
    width = 128
    context = 128
    dropout = 0.0
    tied = true
    norm = "layer"
    activation = "gelu"

    [data]
    kind = "arithmetic"
    count = 10000
    digits = 2
    validation = 0.1

    [train]
    steps = 100
    batch = 32
    micro_batches = 1
    precision = "f32"
    recompute = "none"
    clip = 0.0
    max_bad_steps = 5
    eval_every = 0
    eval_samples = 0
    eval_batch = 0
    log_every = 10
    noise_scale = false
    batch_norm_group = 0
    keep_zeros = false

    [optimizer]
    name = "adamw"
    beta1 = 0.9
    beta2 = 0.999
    eps = 0.00000001
    weight_decay = 0.01
    exclude_from_decay = true
    master = "f32"
    moments = "f32"

    [learning_rate]
    peak = 0.001
    warmup = 0
    by_density = 0.0
    schedule = "cosine"
    end_factor = 0.1
    decay_steps = 0

    [parallel]
    data = 1
    tensor = 1
    sequence = false
    linear = "paired"
    spatial = 1
    batch_norm = "local"
    zero = 0
    average_every = 1
    local_after = 0
    timeout_s = 600

    [checkpoint]
    every = 0
    keep = 3
    last = true

    [device]
    kind = "auto"
    threads = 0
    tf32 = true
    check_memory = true
    "#);
    assert_eq!(parse(&run.to_toml().unwrap()).unwrap(), run);
}

#[test]
fn every_kind_of_device_can_be_asked_for_and_tf32_forbidden() {
    for (word, kind) in [("auto", DeviceKind::Auto), ("cpu", DeviceKind::Cpu), ("cuda", DeviceKind::Cuda)] {
        let run = parse(&format!("[device]\nkind = \"{word}\"\ntf32 = false")).unwrap();
        assert_eq!((run.device.kind, run.device.tf32), (kind, false));
        assert_eq!(parse(&run.to_toml().unwrap()).unwrap(), run);
    }
    insta::assert_snapshot!(sentence("[device]\ntf32 = 1"), @"`device.tf32` must be true or false, got 1");
}

/// What follows from the size, and what contradicts it.
#[test]
fn pictures_are_cropped_as_recipes_have_it() {
    let images = |more: &str| {
        format!("[model]\nname = \"resnet-18\"\n[data]\nkind = \"images\"\npath = \"a\"\n{more}")
    };
    let run = parse(&images("")).unwrap();
    let DatasetSource::Images { folder } = &run.data.source else { panic!("not images") };
    assert_eq!((folder.size, folder.resize, folder.max_side), (224, 256, 512));
    assert_eq!(folder.crop, PictureCrop::Resized { scale: [0.08, 1.0], ratio: [0.75, 4.0 / 3.0] });
    assert_eq!((run.data.variation.flip, run.data.variation.padding), (Some(true), None));
    let shapes = parse("[model]\nname = \"resnet-18\"").unwrap();
    assert_eq!((shapes.data.variation.flip, shapes.data.variation.padding), (Some(false), Some(0)));
    insta::assert_snapshot!(sentence(&images("resize = 100")), @"`data.resize` is 100, and `data.size` 224: a crop is not larger than the picture");
    insta::assert_snapshot!(sentence(&images("max_side = 100")), @"`data.max_side` is 100, and `data.resize` 256: pictures would be shrunk, then enlarged");
    insta::assert_snapshot!(sentence(&images("crop = \"center\"\nscale = [0.1, 1]")), @r#"`data.scale` has no effect with `data.crop` = "random" or "center""#);
    insta::assert_snapshot!(sentence(&images("scale = [1, 0.1]")), @"`data.scale` takes two numbers, the least and the largest");
    insta::assert_snapshot!(sentence(&images("ratio = 0.5")), @"`data.ratio` takes two numbers, the least and the largest");
    insta::assert_snapshot!(sentence(&images("cache = \"none\"\ncache_path = \"b\"")), @r#"`data.cache_path` has no effect with `data.cache` = "none""#);
    insta::assert_snapshot!(sentence(&images("padding = 4")), @r#"`data.padding` has no effect with `data.kind` = "images", whose fields are: cache, cache_path, crop, flip, max_side, mean, path, ratio, resize, scale, size, std, strict, validation, validation_path"#);
}

/// The unit that is set takes the place of the file's, and says so; both in one place are a contradiction.
#[test]
fn a_length_is_in_steps_or_in_epochs() {
    let set = |text: &str, set: &[&str]| {
        RunFile::parse(text, &set.iter().map(|set| (*set).into()).collect::<Vec<_>>())
    };
    let run = set("[train]\nsteps = 500", &["train.epochs=2"]).unwrap();
    assert_eq!(run.train.length, crate::intervals::RunLength::Epochs(2));
    assert_eq!(run.notes, ["`train.steps` of the run file is ignored: `train.epochs` replaces it"]);
    let plain = set("[train]\nsteps = 500", &["train.steps=", "train.epochs=2"]).unwrap();
    assert_eq!((plain.train.length, plain.notes.len()), (run.train.length, 0));
    assert!(set("", &["train.epochs=2", "train.steps=3"]).is_err());
    assert!(set("", &["train.bacth="]).is_err(), "what takes nothing out is a slip");
}

#[test]
fn pruning_is_read_and_checked() {
    let prune = |rest: &str| sentence(&format!("[prune]\n{rest}"));
    insta::assert_snapshot!(prune("sparsity = 0.9"), @r#"`prune.method` is missing: "magnitude", "snip", "early-bird" or another method"#);
    insta::assert_snapshot!(prune("method = \"magnitude\"\nsparsity = 1.0"), @"`prune.sparsity` must be a number in [0, 1): the fraction of weights to prune, got 1.0");
    insta::assert_snapshot!(prune("method = \"magnitude\"\nsparsity = -0.1"), @"`prune.sparsity` must be a number in [0, 1): the fraction of weights to prune, got -0.1");
    insta::assert_snapshot!(prune("method = \"magnitud\""), @r#"`prune.method` must be one of 13 known words, got "magnitud"; did you mean `magnitude`?"#);
    insta::assert_snapshot!(prune("method = \"snip\"\nscope = \"layer\""), @r#"`prune.scope` has no effect with `prune.method` = "snip", whose fields are: biases, embeddings, exclude, kernels, samples, score_batch, sparsity, state, weights"#);
    insta::assert_snapshot!(prune("method = \"2:4\"\nsparsity = 0.9"), @r#"`prune.sparsity` has no effect with `prune.method` = "2:4", which is 0.5 by definition"#);
    insta::assert_snapshot!(prune("method = \"early-bird\"\nl1 = 0.1"), @r#"`prune.l1` has no effect with `prune.form` = "weights": it is a penalty on batch-norm scales"#);
    insta::assert_snapshot!(prune("method = \"gradual\"\ninitial = 0.95"), @"`prune.initial` is 0.95, above `prune.sparsity` = 0.9");
    insta::assert_snapshot!(prune("method = \"gradual\"\nstart = 20\nend = 10"), @"`prune.end` is 10, which is not after `prune.start` = 20");
    insta::assert_snapshot!(prune("method = \"elsa\"\nstart = 20\nend = 20"), @"`prune.end` is 20, which is not after `prune.start` = 20");
    insta::assert_snapshot!(prune("method = \"elsa\"\npenalty = 0"), @"`prune.penalty` must be a number above 0, got 0");
    insta::assert_snapshot!(prune("method = \"elsa\"\n[optimizer]\nname = \"sgd\""), @r#"`prune.method` is "elsa", which weighs weights by Adam's second moment: set `optimizer.name` to "adamw", "adam" or "lamb""#);
    insta::assert_snapshot!(sentence("[learning_rate]\nby_density = 0.3"), @"`learning_rate.by_density` has no effect without a section `[prune]`: the network stays dense");
    insta::assert_snapshot!(prune("method = \"rigl\"\nfraction = 1.5"), @"`prune.fraction` must be a number in (0, 1), got 1.5");
    insta::assert_snapshot!(sentence("[optimizer]\nmaster = \"low-bits\""), @r#"`optimizer.master` has no effect with `train.precision` = "f32": the weights are exact themselves"#);
    insta::assert_snapshot!(sentence("[optimizer]\nmoments = \"f16\""), @r#"`optimizer.moments` must be "f32" or "bf16", got "f16"; did you mean `bf16`?"#);
    insta::assert_snapshot!(sentence("[optimizer]\nname = \"sgd\"\nmoments = \"bf16\""), @r#"`optimizer.moments` has no effect with `optimizer.name` = "sgd": it has no moments"#);
    let sparse =
        |rest: &str| sentence(&format!("[prune]\nmethod = \"magnitude\"\nkernels = \"sparse\"\n{rest}"));
    insta::assert_snapshot!(sparse("[train]\nprecision = \"bf16\""), @r#"`prune.kernels` has no effect with `train.precision` = "bf16": dense kernels are faster there"#);
    insta::assert_snapshot!(sparse("[device]\nkind = \"cuda\""), @r#"`prune.kernels` has no effect with `device.kind` = "cuda": dense kernels are faster there"#);
    insta::assert_snapshot!(sparse("state = \"dense\""), @r#"`prune.kernels` is "sparse", which computes gradients of kept weights only, but `prune.state` is dense"#);
    insta::assert_snapshot!(prune("weights = \"compressed\""), @r#"`prune.method` is missing: "magnitude", "snip", "early-bird" or another method"#);
    let compressed = |rest: &str| prune(&format!("method = \"magnitude\"\nweights = \"compressed\"\n{rest}"));
    insta::assert_snapshot!(compressed("sparsity = 0"), @"`prune.weights` has no effect with `prune.sparsity` = 0: nothing is pruned");
    insta::assert_snapshot!(compressed("state = \"dense\""), @r#"`prune.weights` is "compressed", but `prune.state` = "dense" keeps gradients and state of all weights: remove it"#);
    let run = parse("[prune]\nmethod = \"random\"\nexclude = \"head\"").unwrap().prune.unwrap();
    assert_eq!((run.sparsity, run.exclude.len(), run.method.name()), (0.9, 1, "random"));
    // A mask of 0.133 bytes a weight pays from 0.95 % on where 14 bytes stand beside each weight.
    let at = |sparsity: f64| Pruning { sparsity, ..run.clone() };
    assert!(at(0.01).compresses(14) && !at(0.009).compresses(14));
    assert!(Pruning { state: StateForm::Compressed, ..at(0.0) }.compresses(14));
    assert!(Pruning { weights: WeightForm::Compressed, ..at(0.001) }.compresses(14));
}

fn custom(layers: &str) -> String {
    format!("[model]\nname = \"custom\"\nlayers = [{layers}]")
}

#[test]
fn layers_are_read_and_named() {
    let text = custom(
        "{type=\"conv\", output=32, kernel=5}, {type=\"relu\"}, {type=\"max_pool\", kernel=2},
         {type=\"residual\", branch=[{type=\"conv\", output=32, kernel=3, padding=\"same\"}]},
         {type=\"flatten\"}, {type=\"linear\", output=10}",
    );
    let run = parse(&text).unwrap();
    assert_eq!(parse(&run.to_toml().unwrap()).unwrap(), run);
    assert!(!run.model.takes_text());
    let text = custom("{type=\"embedding\", width=8}, {type=\"position\"}, {type=\"linear\", bias=false}");
    assert_eq!(parse(&text).unwrap().model.context(), Some(128));

    insta::assert_snapshot!(sentence("[model]\nname = \"custom\""), @r#"`model.layers` is missing: a list of layers, such as [{ type = "flatten" }, { type = "linear" }]"#);
    insta::assert_snapshot!(sentence(&custom("")), @r#"`model.layers` must be a list of layers, such as [{ type = "flatten" }, { type = "linear" }], got an empty list"#);
    insta::assert_snapshot!(sentence(&custom("3")), @r#"`model.layers.0` must be a layer, such as { type = "relu" }, got 3"#);
    insta::assert_snapshot!(sentence(&custom("{kernel = 3}")), @"`model.layers.0.type` is missing: one of linear, conv, max_pool, avg_pool, global_avg_pool, adaptive_avg_pool, flatten, pad_channels, batch_norm, layer_norm, rms_norm, relu, gelu, silu, gelu_erf, tanh, dropout, embedding, position, attention, residual, branches");
    insta::assert_snapshot!(sentence(&custom("{type=\"conv2d\"}")), @r#"`model.layers.0.type` must be one of 22 known words, got "conv2d"; did you mean `conv`?"#);
    insta::assert_snapshot!(sentence(&custom("{type=\"conv\", output=3}")), @"`model.layers.0.kernel` is missing: a whole number of at least 1");
    insta::assert_snapshot!(sentence(&custom("{type=\"conv\", output=3, kernel=3, padding=\"valid\"}")), @r#"`model.layers.0.padding` must be a whole number of at least 0, or "same", got "valid""#);
    insta::assert_snapshot!(sentence(&custom("{type=\"relu\", output=3}")), @r#"`model.layers.0.output` has no effect with `model.layers.0.type` = "relu", whose fields are: none"#);
    insta::assert_snapshot!(sentence(&custom("{type=\"linear\", output=3, kernel=3}")), @r#"`model.layers.0.kernel` has no effect with `model.layers.0.type` = "linear", whose fields are: bias, output"#);
    insta::assert_snapshot!(sentence(&custom("{type=\"linear\", ouput=3}")), @"`model.layers.0.ouput` is not a field; did you mean `model.layers.0.output`?");
    insta::assert_snapshot!(sentence(&custom("{type=\"residual\", branch=[{type=\"gleu\"}]}")), @r#"`model.layers.0.branch.0.type` must be one of 22 known words, got "gleu"; did you mean `gelu`?"#);
    insta::assert_snapshot!(sentence(&custom("{type=\"branches\", join=\"multiply\", branches=[[], []]}")), @r#"`model.layers.0.join` must be "sum", "product" or "concat", got "multiply""#);
    insta::assert_snapshot!(sentence(&custom("{type=\"branches\", branches=[[]]}")), @"`model.layers.0.branches` must be a list of at least 2 lists of layers, got a list of 1");
    insta::assert_snapshot!(sentence(&custom("{type=\"branches\", branches=[[], {type=\"relu\"}]}")), @"`model.layers.0.branches.1` must be a list of layers, got a table");
    insta::assert_snapshot!(sentence(&custom("{type=\"layer_norm\", eps=0}")), @"`model.layers.0.eps` must be a number above 0 and at most 1, got 0");
    insta::assert_snapshot!(sentence(&custom("{type=\"attention\", kv_head=2}")), @"`model.layers.0.kv_head` is not a field; did you mean `model.layers.0.kv_heads`?");
    let context = format!("{}\ncontext = 3", custom("{type=\"flatten\"}"));
    insta::assert_snapshot!(sentence(&context), @"`model.context` has no effect with images: only a model whose first layer is an embedding takes text");
}

#[test]
fn overrides_pass_the_same_checks() {
    let set = |all: &[&str]| {
        RunFile::parse("[train]\nbatch = 8", &all.iter().map(|set| (*set).into()).collect::<Vec<_>>())
    };
    let run = set(&["train.batch=64", "model.name=resnet8", "optimizer.name=sgd", "learning_rate.peak=1e-2"]);
    let run = run.unwrap();
    assert_eq!((run.train.batch, run.model.name.as_str()), (64, "resnet8"));
    assert_eq!(run.learning_rate.peak, 0.01);
    insta::assert_snapshot!(set(&["train.bach=3"]).unwrap_err(), @"`train.bach` is not a field; did you mean `train.batch`?");
    insta::assert_snapshot!(set(&["train.batch=many"]).unwrap_err(), @r#"`train.batch` must be a whole number of at least 1, got "many""#);
}

#[test]
fn paths_are_relative_to_the_run_file() {
    let text =
        "[data]\nkind = \"text\"\npath = [\"a.txt\", \"/b\"]\ntokenizer = \"t.json\"\nextensions = \".rs\"";
    let mut run = parse(text).unwrap();
    run.resolve_paths(Path::new("/runs"));
    let DatasetSource::Text { path, tokenizer, extensions } = &run.data.source else { panic!("not text") };
    assert_eq!(*path, [Path::new("/runs/a.txt"), Path::new("/b")]);
    assert_eq!(tokenizer.as_deref(), Some(Path::new("/runs/t.json")));
    assert_eq!(*extensions, ["rs"]);
    assert_eq!(parse(&run.to_toml().unwrap()).unwrap(), run);
}

#[test]
fn epochs_become_steps() {
    let run = parse("[train]\nepochs = 3\nbatch = 10").unwrap();
    assert_eq!(run.train.length, RunLength::Epochs(3));
    assert_eq!(run.train.length.steps(109, run.train.batch), 30);
    assert_eq!(run.train.length.steps(4, run.train.batch), 3);
    assert_eq!(RunLength::Steps(7).steps(0, 1), 7);
}

#[test]
fn a_short_trial_of_a_long_run_is_no_mistake() {
    let run =
        parse("[train]\nsteps = 5\n[learning_rate]\nschedule = \"step\"\nwarmup = 100\nstep_every = 50")
            .unwrap();
    assert!(run.learning_rate.at(4, 5) < run.learning_rate.peak);
}

#[test]
fn token_files_need_a_vocabulary() {
    insta::assert_snapshot!(sentence("[data]\nkind = \"tokens\"\npath = \"a\""), @"`model.vocab` is missing: how many tokens there are, which token files do not say");
}

/// The words of the table of fields are those of the types that they become, in whatever variant of a section.
#[test]
fn every_word_of_every_field_is_read() {
    for (section, rows) in fields::ALL {
        let variants = match rows[0].takes {
            FieldType::Word(words) => words,
            _ => &[""],
        };
        for (row, variant) in rows.iter().flat_map(|row| variants.iter().map(move |variant| (row, *variant)))
        {
            let FieldType::Word(words) = row.takes else { continue };
            for word in words.iter().filter(|_| (row.with)(variant)) {
                let mut set = vec![format!("data.path=a"), format!("{section}.{}={variant}", rows[0].name)];
                set.push(format!("{section}.{}={word}", row.name));
                let set: Vec<Override> =
                    set.into_iter().filter(|set| !set.ends_with('=')).map(Override::from).collect();
                let read = RunFile::parse("", &set[usize::from(*section != "data")..]);
                assert!(!matches!(read, Err(Error::Value { .. })), "{set:?}: {read:?}");
            }
        }
    }
}

#[test]
fn variants_of_optimizers_and_of_the_warm_up() {
    let lars = parse("[optimizer]\nname = \"lars\"\nexclude_from_trust = false").unwrap();
    assert!(!lars.optimizer.excludes_from_trust());
    insta::assert_snapshot!(sentence("[learning_rate]\nwarmup_from = 0.1"), @"`learning_rate.warmup_from` has no effect with `learning_rate.warmup` = 0");
    for (name, field, value) in [("lars", "max_weight_norm", "10"), ("adam", "exclude_from_trust", "false")] {
        let said = sentence(&format!("[optimizer]\nname = \"{name}\"\n{field} = {value}"));
        assert!(said.contains(&format!("`optimizer.{field}`")), "{said}");
    }
}
