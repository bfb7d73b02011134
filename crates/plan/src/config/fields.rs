//! The names of all fields: for hints that point into another section, and for the test that none lacks a
//! description in the documentation.

/// Sections with their fields; the empty name is the top of the file.
pub(super) const ALL: &[(&str, &[&str])] = &[
    ("", &["seed"]),
    ("model", MODEL),
    ("data", DATA),
    (
        "train",
        &[
            "steps",
            "epochs",
            "batch",
            "micro_batches",
            "precision",
            "recompute",
            "clip",
            "max_bad_steps",
            "eval_every",
            "eval_samples",
            "eval_batch",
            "log_every",
            "noise_scale",
            "batch_norm_group",
            "keep_zeros",
        ],
    ),
    ("optimizer", OPTIMIZER),
    ("learning_rate", LEARNING_RATE),
    ("prune", PRUNE),
    (
        "parallel",
        &[
            "data",
            "batch_norm",
            "zero",
            "average_every",
            "sequence",
            "linear",
            "integrated",
            "spatial",
            "tensor",
            "local_after",
            "pipeline",
            "schedule",
            "schedule_file",
            "chunks",
            "pipelines",
            "cut",
            "drain",
            "timeout_s",
        ],
    ),
    ("checkpoint", &["every", "keep", "last"]),
    ("sample", &["prompt", "tokens", "temperature", "top_k", "top_p", "every"]),
    ("device", &["kind", "threads", "tf32", "check_memory"]),
];

/// Fields of any model; each family takes some of them.
pub(super) const MODEL: &[&str] = &[
    "name",
    "layers",
    "heads",
    "width",
    "context",
    "vocab",
    "dropout",
    "tied",
    "norm",
    "activation",
    "classes",
    "form",
    "batch_norm",
    "hidden",
    "init",
];

/// Fields of any data; each kind takes some of them.
pub(super) const DATA: &[&str] = &[
    "kind",
    "path",
    "validation",
    "validation_path",
    "tokenizer",
    "extensions",
    "dtype",
    "images",
    "labels",
    "count",
    "size",
    "digits",
    "mean",
    "std",
];

/// Fields of any optimizer; each takes some of them.
pub(super) const OPTIMIZER: &[&str] = &[
    "name",
    "momentum",
    "trust",
    "rate_in_velocity",
    "beta1",
    "beta2",
    "eps",
    "max_weight_norm",
    "exclude_from_trust",
    "weight_decay",
    "exclude_from_decay",
    "master",
];

/// Fields of any method; each takes some of them.
pub(super) const PRUNE: &[&str] = &[
    "method",
    "sparsity",
    "embeddings",
    "biases",
    "exclude",
    "state",
    "kernels",
    "scope",
    "at",
    "initial",
    "start",
    "end",
    "every",
    "samples",
    "score_batch",
    "temperature",
    "score",
    "form",
    "window",
    "tolerance",
    "l1",
    "latest",
    "rate",
    "rewind",
    "fraction",
    "until",
    "distribution",
    "dense_first",
];

/// Fields of any schedule of the learning rate; each takes some of them.
pub(super) const LEARNING_RATE: &[&str] = &[
    "peak",
    "schedule",
    "warmup",
    "warmup_from",
    "scale_from_batch",
    "end_factor",
    "decay_steps",
    "step_every",
    "step_factor",
];

/// The full path of a field of this name in any section, or of a section nearly of this name.
pub(super) fn elsewhere(key: &str) -> Option<String> {
    let join = |section: &str| if section.is_empty() { key.into() } else { format!("{section}.{key}") };
    let field = ALL.iter().find(|(_, fields)| fields.contains(&key)).map(|(section, _)| join(section));
    let sections = ALL.iter().map(|(section, _)| *section).filter(|section| !section.is_empty());
    field.or_else(|| super::nearest(key, sections).map(String::from))
}

/// The field of a section that who gives the section itself a value most likely means.
pub(super) fn usual_field(section: &str) -> Option<&'static str> {
    Some(match section {
        "model" => "model.name",
        "data" => "data.path",
        "train" => "train.steps",
        "optimizer" => "optimizer.name",
        "learning_rate" => "learning_rate.peak",
        "prune" => "prune.sparsity",
        "parallel" => "parallel.data",
        "checkpoint" => "checkpoint.every",
        "sample" => "sample.prompt",
        "device" => "device.kind",
        _ => return None,
    })
}
