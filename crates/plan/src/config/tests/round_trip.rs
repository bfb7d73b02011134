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
    // Without a checkpoint there is nothing to keep.
    for name in fields::METHODS.iter().filter(|name| **name != "keep") {
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

#[test]
fn what_is_written_is_read() {
    let llamas = [
        "heads = 6\nkv_heads = 2\nhead_dim = 20\ninner = 100\ntied = false\neps = 1e-6",
        "qkv_bias = true\nqk_norm = true\nwindow = 128\nvocab = 300",
        "rotary_base = 5e5\nrotary_scaling = \"llama3\"\nrotary_factor = 32.0\nrotary_original = 64",
    ];
    let llamas = llamas.map(|fields| format!("[model]\nname = \"llama\"\n{fields}"));
    let shared =
        ["zero = true", "zero = 2", "zero = 3", "average_every = 5", "average_every = 5\nlocal_after = 20"];
    let shared = shared.map(|fields| format!("[train]\nbatch = 8\n[parallel]\ndata = 2\n{fields}"));
    let others = [
        "[optimizer]\nname = \"lars\"\nrate_in_velocity = false\nexclude_from_trust = false",
        "[optimizer]\nname = \"lamb\"\nmax_weight_norm = 10\nexclude_from_trust = false",
        "[learning_rate]\npeak = 0.1\nwarmup = 5\nwarmup_from = 0.1\nscale_from_batch = 8",
        "[train]\nbatch = 8\nmicro_batches = 4\n[parallel]\npipeline = 2\nschedule = \"interleaved\"\nchunks = 2\ncut = [1, 2, 3]",
    ];
    for text in valid_files().into_iter().chain(llamas).chain(shared).chain(others.map(String::from)) {
        let run = parse(&text).unwrap();
        assert_eq!(parse(&run.to_toml().unwrap()).unwrap(), run, "{text}");
    }
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
