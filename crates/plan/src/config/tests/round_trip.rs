//! Writing and reading are inverses, and nonsense is an error and no panic.

use proptest::prelude::*;

use super::*;

/// One file for each model, data kind, optimizer and schedule.
pub(super) fn valid_files() -> Vec<String> {
    let mut files: Vec<String> = ModelConfig::names()
        .filter(|name| *name != "custom")
        .map(|name| format!("[model]\nname = \"{name}\""))
        .collect();
    files.push(custom("{type=\"flatten\"}, {type=\"linear\"}"));
    files.push("[data]\nkind = \"text\"\npath = \"a\"\ntokenizer = \"b\"".into());
    files.push("[data]\nkind = \"text\"\npath = \"a\"\nvalidation_path = [\"b\", \"c\"]".into());
    files.push(
        "[data]\nkind = \"jsonl\"\npath = \"a\"\ntokenizer = \"b\"\nloss_on = \"all\"\npack = false".into(),
    );
    files.push("[model]\nvocab = 100\n[data]\nkind = \"tokens\"\npath = \"a\"".into());
    for data in [
        "idx\"\npath = \"a",
        "idx\"\nimages = \"a\"\nlabels = \"b",
        "cifar10\"\npath = \"c\"\nvalidation_path = \"d",
        "cifar10\"\nflip = true\npadding = 4\npath = \"c",
        "images\"\npath = \"c",
        "images\"\ncrop = \"random\"\nflip = false\ncache = \"none\"\npath = \"c",
        "images\"\nsize = 64\nscale = [0.25, 1]\nstrict = true\nvalidation_path = \"d\"\ncache_path = \"e\"\npath = \"c",
        "shapes",
    ] {
        files.push(format!("[model]\nname = \"resnet8\"\nclasses = 10\n[data]\nkind = \"{data}\""));
    }
    files.push(
        "[model]\nname = \"resnet8\"\n[data]\nkind = \"shapes\"\nmean = [0, 0.5, 1]\nstd = 0.25".into(),
    );
    for name in ["sgd", "momentum", "nesterov", "adam", "adamw", "lars", "lamb"] {
        files.push(format!("[optimizer]\nname = \"{name}\""));
    }
    for name in [
        "random",
        "magnitude",
        "gradual",
        "elsa",
        "snip",
        "grasp",
        "early-bird",
        "lottery",
        "set",
        "rigl",
        "2:4",
    ] {
        files.push(format!("[prune]\nmethod = \"{name}\"\nexclude = [\"a\", \"b\"]"));
    }
    files.push("[prune]\nmethod = \"early-bird\"\nform = \"channels\"".into());
    files.push("[prune]\nmethod = \"elsa\"\nstart = 3\n[learning_rate]\nby_density = 0.3".into());
    for name in ["constant", "linear", "cosine", "step"] {
        files.push(format!("[learning_rate]\nschedule = \"{name}\"\nscale_from_batch = 256"));
    }
    files.push("[train]\nepochs = 2".into());
    files.push("[sample]\nprompt = \"1+1=\"".into());
    files.push("[parallel]\nbatch_norm = \"synchronised\"".into());
    files
}

proptest! {
    /// Whatever can be written resolves to a file that reads back as the same value.
    #[test]
    fn writing_and_reading_are_inverses(
        file in prop::sample::select(valid_files()),
        seed in 0..i64::MAX,
        micro in 1usize..100,
        batches in 1usize..100,
        clip in 0.0f64..1e9,
        decay in prop::num::f64::POSITIVE | prop::num::f64::SUBNORMAL | prop::num::f64::ZERO,
        peak in 1e-300f64..1e300,
        (bf16, noise) in any::<(bool, bool)>(),
        again in prop::sample::select(vec!["none", "attention", "block", "3"]),
        every in 1usize..1_000_000,
    ) {
        let overrides = [
            format!("seed={seed}"),
            format!("train.batch={}", micro * batches),
            format!("train.micro_batches={micro}"),
            format!("train.clip={clip:e}"),
            format!("train.precision={}", if bf16 { "bf16" } else { "f32" }),
            format!("train.recompute={again}"),
            format!("train.noise_scale={}", noise && micro > 1),
            format!("train.eval_every={every}"),
            format!("optimizer.weight_decay={:e}", decay.abs()),
            format!("learning_rate.peak={peak:e}"),
            format!("checkpoint.every={every}"),
            format!("checkpoint.keep={micro}"),
        ];
        let run = RunFile::parse(&file, &overrides.map(Override::from)).unwrap();
        let text = run.to_toml().unwrap();
        prop_assert_eq!(&RunFile::parse(&text, &[]).unwrap(), &run);
        prop_assert_eq!(run.train.clip, clip);
        prop_assert_eq!(run.learning_rate.peak, peak);
    }

    /// No text makes the reader panic.
    #[test]
    fn nonsense_is_an_error_and_no_more(text in "[a-z\\[\\]=. \"0-9\n{},-]{0,60}", set in "[a-z.=0-9\"\\[\\]]{0,20}") {
        let _ = RunFile::parse(&text, &[set.into()]);
    }
}
