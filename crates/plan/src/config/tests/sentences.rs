//! What is said of a run file that cannot be: the field, the near miss, the setting without effect.

use super::*;

#[test]
fn misspelt_fields_and_words() {
    insta::assert_snapshot!(sentence("[train]\nbacth = 8"), @"`train.bacth` is not a field; did you mean `train.batch`?");
    insta::assert_snapshot!(sentence("batch = 8"), @"`batch` is not a field; did you mean `train.batch`?");
    insta::assert_snapshot!(sentence("[train]\nlr = 0.1"), @"`train.lr` is not a field; did you mean `learning_rate.peak`?");
    insta::assert_snapshot!(sentence("[optimiser]\nname = \"adam\""), @"`optimiser` is not a field; did you mean `optimizer`?");
    insta::assert_snapshot!(sentence("[train]\nfrobnicate = 1"), @"`train.frobnicate` is not a field");
    insta::assert_snapshot!(sentence("[optimizer]\nname = \"adma\""), @r#"`optimizer.name` must be "sgd", "momentum", "nesterov", "adam", "adamw", "lars" or "lamb", got "adma"; did you mean `adam`?"#);
    insta::assert_snapshot!(sentence("[model]\nname = \"resnet50\""), @r#"`model.name` must be one of 39 known words, got "resnet50"; did you mean `resnet-50`?"#);
    insta::assert_snapshot!(sentence("[train]\nprecision = \"fp16\""), @r#"`train.precision` must be "f32" or "bf16", got "fp16"; did you mean `bf16`?"#);
    insta::assert_snapshot!(sentence("[model]\nname = \"mlp\"\n[data]\nkind = \"shape\""), @r#"`data.kind` must be "text", "jsonl", "tokens", "idx", "cifar10", "images", "shapes" or "arithmetic", got "shape"; did you mean `shapes`?"#);
}

/// What people type who come from other tools, wherever they write it.
#[test]
fn names_of_other_tools_get_ours() {
    let names = [
        ("batch_size", "train.batch"),
        ("lr", "learning_rate.peak"),
        ("hidden_size", "model.width"),
        ("n_layer", "model.layers"),
        ("n_head", "model.heads"),
        ("block_size", "model.context"),
        ("max_steps", "train.steps"),
        ("num_epochs", "train.epochs"),
        ("dtype", "train.precision"),
        ("gradient_accumulation_steps", "train.micro_batches"),
        ("max_grad_norm", "train.clip"),
        ("warmup_steps", "learning_rate.warmup"),
        ("tensor_parallel_size", "parallel.tensor"),
        ("save_steps", "checkpoint.every"),
        ("max-new-tokens", "sample.tokens"),
    ];
    for (theirs, ours) in names {
        for section in ["", "[train]\n", "[model]\n"] {
            let text = sentence(&format!("{section}{theirs} = 1"));
            assert!(text.ends_with(&format!("is not a field; did you mean `{ours}`?")), "{section}: {text}");
        }
        let set = RunFile::parse("", &[format!("{theirs}=1").into()]).unwrap_err().to_string();
        assert!(set.contains(&format!("`{ours}`")), "{set}");
    }
    insta::assert_snapshot!(sentence("[model]\nname = \"mlp\"\nhidden_size = 3"), @"`model.hidden_size` is not a field; did you mean `model.hidden`?");
    insta::assert_snapshot!(sentence("learning_rate = 0.1"), @"`learning_rate` must be a section, `[learning_rate]`, got 0.1; did you mean `learning_rate.peak`?");
    insta::assert_snapshot!(sentence("[train]\nprecision = \"bfloat16\""), @r#"`train.precision` must be "f32" or "bf16", got "bfloat16"; did you mean `bf16`?"#);
}

#[test]
fn wrong_types_and_impossible_values() {
    insta::assert_snapshot!(sentence("[train]\nbatch = \"eight\""), @r#"`train.batch` must be a whole number of at least 1, got "eight""#);
    insta::assert_snapshot!(sentence("[train]\nbatch = 8.5"), @"`train.batch` must be a whole number of at least 1, got 8.5");
    insta::assert_snapshot!(sentence("[train]\nbatch = -8"), @"`train.batch` must be a whole number of at least 1, got -8");
    insta::assert_snapshot!(sentence("[train]\nbatch = 99999999999"), @"`train.batch` must be a whole number of at most 16777216, got 99999999999");
    insta::assert_snapshot!(sentence("[model]\nwidth = 0"), @"`model.width` must be a whole number of at least 1, got 0");
    insta::assert_snapshot!(sentence("[model]\nheads = 3"), @"`model.heads` is 3, which does not divide `model.width` = 128");
    insta::assert_snapshot!(sentence("[model]\ndropout = 1.0"), @"`model.dropout` must be a number in [0, 1), got 1.0");
    insta::assert_snapshot!(sentence("[model]\nname = \"mlp\"\nhidden = [10, 0]"), @"`model.hidden.1` must be a whole number of at least 1, got 0");
    insta::assert_snapshot!(sentence("[learning_rate]\npeak = -0.1"), @"`learning_rate.peak` must be a number above 0, got -0.1");
    insta::assert_snapshot!(sentence("[learning_rate]\npeak = nan"), @"`learning_rate.peak` must be a number above 0, got nan");
    insta::assert_snapshot!(sentence("[optimizer]\nbeta1 = 1"), @"`optimizer.beta1` must be a number in [0, 1), got 1");
    insta::assert_snapshot!(sentence("[data]\nvalidation = 1"), @"`data.validation` must be a number in [0, 1), got 1");
    let pixels = |field: &str| sentence(&format!("[data]\nkind = \"shapes\"\n{field}"));
    insta::assert_snapshot!(pixels("std = [0.5, 0]"), @"`data.std` must be a number above 0, or one for each channel, got a list of 2");
    insta::assert_snapshot!(pixels("mean = []"), @"`data.mean` must be a number, or one for each channel, got an empty list");
    insta::assert_snapshot!(sentence("[data]\nmean = 0.5"), @r#"`data.mean` has no effect with `data.kind` = "arithmetic", whose fields are: count, digits, validation"#);
    insta::assert_snapshot!(sentence("seed = -1"), @"`seed` must be a whole number of at least 0, got -1");
    insta::assert_snapshot!(sentence("train = 3"), @"`train` must be a section, `[train]`, got 3; did you mean `train.steps`?");
    insta::assert_snapshot!(sentence("[device]\nthreads = 5000"), @"`device.threads` must be a whole number of at most 4096, got 5000");
    insta::assert_snapshot!(sentence("[device]\nkind = \"gpu\""), @r#"`device.kind` must be "auto", "cpu" or "cuda", got "gpu"; did you mean `cuda`?"#);
    insta::assert_snapshot!(sentence("[train]\nsteps = = 3"), @"line 2: not TOML: extra `=`, expected nothing");
    insta::assert_snapshot!(sentence("[train]\nsteps = 3\nsteps = 4"), @"line 3: not TOML: duplicate key");
}

#[test]
fn settings_that_contradict_each_other() {
    insta::assert_snapshot!(sentence("[train]\nsteps = 3\nepochs = 4"), @"`train.epochs` and `train.steps` exclude each other: write one of them (`--set train.steps=` leaves the other out)");
    insta::assert_snapshot!(sentence("[train]\nbatch = 8\nmicro_batches = 3"), @"`train.micro_batches` is 3, which does not divide `train.batch` = 8");
    insta::assert_snapshot!(sentence("[model]\nname = \"resnet-50\"\n[data]\nkind = \"arithmetic\""), @r#"`data.kind` is "arithmetic", which gives text, but the model resnet-50 takes images"#);
    insta::assert_snapshot!(sentence("[data]\nkind = \"shapes\""), @r#"`data.kind` is "shapes", which gives images, but the model gpt takes text"#);
    insta::assert_snapshot!(sentence("[data]\nkind = \"text\""), @"`data.path` is missing: a text file or folder, or a list of them");
    let idx = "[model]\nname = \"mlp\"\n[data]\nkind = \"idx\"\n";
    insta::assert_snapshot!(sentence(idx), @"`data.path` is missing: the folder of MNIST's files (or `data.images` and `data.labels`)");
    insta::assert_snapshot!(sentence(&format!("{idx}path = \"a\"\nimages = \"b\"")), @"`data.images` and `data.path` exclude each other: name the folder or the two files");
    insta::assert_snapshot!(sentence(&format!("{idx}images = \"b\"")), @"`data.labels` is missing: the file of labels");
}

#[test]
fn settings_without_effect() {
    insta::assert_snapshot!(sentence("[optimizer]\nname = \"adam\"\nmomentum = 0.9"), @r#"`optimizer.momentum` has no effect with `optimizer.name` = "adam", whose fields are: beta1, beta2, eps, exclude_from_decay, master, moments, weight_decay"#);
    insta::assert_snapshot!(sentence("[optimizer]\nname = \"sgd\"\nexclude_from_decay = false"), @"`optimizer.exclude_from_decay` has no effect with `optimizer.weight_decay` = 0");
    insta::assert_snapshot!(sentence("[learning_rate]\nschedule = \"constant\"\nend_factor = 0.1"), @r#"`learning_rate.end_factor` has no effect with `learning_rate.schedule` = "constant", whose fields are: by_density, peak, scale_from_batch, warmup, warmup_from"#);
    insta::assert_snapshot!(sentence("[model]\nname = \"gpt2-124m\"\nlayers = 3"), @r#"`model.layers` has no effect with `model.name` = "gpt2-124m", whose fields are: context, dropout, vocab"#);
    insta::assert_snapshot!(sentence("[model]\nname = \"resnet-50\"\nbatch_norm = true"), @r#"`model.batch_norm` has no effect with `model.name` = "resnet-50", whose fields are: classes, form"#);
    insta::assert_snapshot!(sentence("[train]\nnoise_scale = true"), @"`train.noise_scale` has no effect with `train.micro_batches` = 1 on one rank: it compares gradients of at least 2");
    let apart = "[data]\nkind = \"text\"\npath = \"a\"\nvalidation_path = \"b\"\n";
    insta::assert_snapshot!(sentence(&format!("{apart}validation = 0")), @"`data.validation` and `data.validation_path` exclude each other: hold out a fraction, or use other files");
    assert!(parse(&format!("{apart}[train]\neval_every = 5")).is_ok());
    insta::assert_snapshot!(sentence("[data]\nvalidation_path = \"b\""), @r#"`data.validation_path` has no effect with `data.kind` = "arithmetic", whose fields are: count, digits, validation"#);
    insta::assert_snapshot!(sentence("[train]\neval_every = 5\n[data]\nvalidation = 0"), @"`train.eval_every` has no effect with `data.validation` = 0");
    insta::assert_snapshot!(sentence("[checkpoint]\nkeep = 5"), @"`checkpoint.keep` has no effect with `checkpoint.every` = 0: there is one, at the end");
    insta::assert_snapshot!(sentence("[data]\nkind = \"arithmetic\"\nsize = 5"), @r#"`data.size` has no effect with `data.kind` = "arithmetic", whose fields are: count, digits, validation"#);
}
