//! Every field of a run file, section by section: what it takes and what it is for. Hints that point into
//! another section, overrides, what makes another run, and what of a run a trained model still reads all come
//! from this table; a test compares it with the documentation.

use super::LAYERS_MOST;
use crate::field::{
    BELOW_ONE, Field, FieldDefault, INSIDE, LARGEST, MOST, NOT_NEGATIVE, NumberRule, POSITIVE, any, flag,
    integer, integer_or, number, numbers, optional_integer, optional_number, text, texts, word,
};
use crate::schedule::ScheduleName;
use crate::spec::presets::{Gpt, Llama};

/// Sections with their fields; the empty name is the top of the file.
pub(super) const ALL: &[(&str, &[Field])] = &[
    ("", TOP),
    ("model", MODEL),
    ("data", DATA),
    ("train", TRAIN),
    ("optimizer", OPTIMIZER),
    ("learning_rate", LEARNING_RATE),
    ("prune", PRUNE),
    ("parallel", PARALLEL),
    ("checkpoint", CHECKPOINT),
    ("sample", SAMPLE),
    ("device", DEVICE),
];

pub(super) const TOP: &[Field] = &[integer("seed", 0, 0, i64::MAX as usize).held_out()];

pub(super) const MODEL: &[Field] = &[
    any("name").always().usual(),
    integer("heads", 4, 1, LARGEST).with(sized).always(),
    optional_integer("kv_heads", 1, LARGEST).with(llama).always(),
    optional_integer("head_dim", 1, LARGEST).with(llama).always(),
    integer("width", 128, 1, LARGEST).with(sized).always(),
    optional_integer("inner", 1, LARGEST).with(sized).always(),
    integer("layers", 4, 1, LAYERS_MOST).with(sized).always(),
    any("layers").with(custom).always(),
    integer("context", 128, 1, LARGEST).with(sized).always(),
    optional_integer("context", 1, LARGEST).with(|name| published_text(name) || custom(name)).always(),
    optional_integer("vocab", 1, LARGEST).with(|name| sized(name) || published_text(name)).always(),
    number("dropout", 0.0, BELOW_ONE).with(|name| gpt(name) || sized_gpt(name)),
    flag("tied", true).with(sized).always(),
    number("eps", 1e-5, ("a number above 0 and at most 1", |x| x > 0.0 && x <= 1.0)).with(sized).always(),
    flag("qkv_bias", false).with(llama).always(),
    flag("qk_norm", false).with(llama).always(),
    optional_integer("window", 1, LARGEST).with(llama).always(),
    number("rotary_base", 10_000.0, POSITIVE).with(llama).always(),
    word("rotary_scaling", "none", &["none", "llama3"]).with(llama).always(),
    optional_number("rotary_factor", POSITIVE).with(llama).always(),
    optional_number("rotary_low", POSITIVE).with(llama).always(),
    optional_number("rotary_high", POSITIVE).with(llama).always(),
    optional_integer("rotary_original", 1, MOST).with(llama).always(),
    word("norm", "layer", &["layer", "rms"]).with(gpt).always(),
    word("activation", "gelu", &["gelu", "relu", "silu", "gelu_erf", "tanh"]).with(gpt).always(),
    any("hidden").with(|name| name == "mlp").always(),
    word("init", "he", &["he", "fan-in"]).with(small_images),
    optional_integer("classes", 2, LARGEST).with(|name| !sized(name) && !published_text(name)).always(),
    word("form", "auto", &["auto", "imagenet", "32x32"]).with(published_images).always(),
    flag("batch_norm", false).with(|name| name.starts_with("vgg-")).always(),
];

fn gpt(name: &str) -> bool {
    name == "gpt"
}

fn llama(name: &str) -> bool {
    name == "llama"
}

/// The families of text models whose sizes are fields.
fn sized(name: &str) -> bool {
    gpt(name) || llama(name)
}

/// The published sizes of these.
fn published_text(name: &str) -> bool {
    sized_gpt(name) || Llama::preset(name).is_some()
}

fn sized_gpt(name: &str) -> bool {
    Gpt::preset(name).is_some()
}

fn custom(name: &str) -> bool {
    name == "custom"
}

fn small_images(name: &str) -> bool {
    matches!(name, "mlp" | "simple-cnn" | "resnet8")
}

fn published_images(name: &str) -> bool {
    !sized(name) && !published_text(name) && !small_images(name) && !custom(name)
}

const TEXT_FILES: &str = "a text file or folder, or a list of them";
const ROW_FILES: &str = "a .jsonl file, a name with * for several, or a list of them";
const TOKEN_FILES: &str = "a file of token ids, or a list of them";
const IMAGE_FILES: &str = "a file or folder of images, or a list of them";
const PICTURE_FOLDER: &str = "a folder with a folder of pictures for each class";
const PICTURE_FOLDERS: &str = "a folder with a folder of pictures for each class, or a list of them";
const CIFAR_FILES: &str = "the folder of CIFAR-10's .bin files, or one of them";

pub(super) const DATA: &[Field] = &[
    word("kind", "", &["text", "jsonl", "tokens", "idx", "cifar10", "images", "shapes", "arithmetic"])
        .held_out(),
    texts("path", TEXT_FILES).required().with(|kind| kind == "text").held_out().path().usual(),
    texts("path", ROW_FILES).required().with(|kind| kind == "jsonl").held_out().path(),
    texts("path", TOKEN_FILES).required().with(|kind| kind == "tokens").held_out().path(),
    text("path", "the folder of MNIST's files").with(|kind| kind == "idx").held_out().path(),
    text("path", CIFAR_FILES).required().with(|kind| kind == "cifar10").held_out().path(),
    text("path", PICTURE_FOLDER).required().with(pictures).held_out().path(),
    text("tokenizer", "the path of a tokenizer.json")
        .with(|kind| matches!(kind, "text" | "jsonl"))
        .held_out()
        .path(),
    word("loss_on", "answers", &["answers", "all"]).with(|kind| kind == "jsonl").held_out(),
    flag("pack", true).with(|kind| kind == "jsonl").held_out(),
    texts("extensions", "a list of extensions, such as [\"txt\"]").with(|kind| kind == "text").held_out(),
    word("dtype", "u16", &["u16", "u32"]).with(|kind| kind == "tokens").held_out(),
    text("images", "the file of images").with(|kind| kind == "idx").held_out().path(),
    text("labels", "the file of labels").with(|kind| kind == "idx").held_out().path(),
    integer("count", 10_000, 1, MOST).with(drawn).held_out(),
    integer("size", 32, 16, 4096).with(|kind| kind == "shapes").held_out(),
    integer("size", 224, 8, 4096).with(pictures).for_evaluation(),
    optional_integer("resize", 8, 8192).with(pictures).for_evaluation(),
    word("crop", "resized", &["resized", "random", "center"]).with(pictures),
    numbers("scale", ("two numbers above 0 and at most 1", |x| x > 0.0 && x <= 1.0)).with(pictures),
    numbers("ratio", ("two numbers above 0", |x| x > 0.0)).with(pictures),
    flag("flip", true).with(pictures),
    flag("flip", false).with(|kind| images(kind) && !pictures(kind)),
    integer("padding", 0, 0, 4096).with(|kind| images(kind) && !pictures(kind)),
    optional_integer("max_side", 8, 65_536).with(pictures).held_out(),
    flag("strict", false).with(pictures).for_evaluation(),
    word("cache", "disk", &["disk", "none"]).with(pictures).free().held_out(),
    text("cache_path", "a folder for decoded pictures").with(pictures).free().held_out().path(),
    integer("digits", 2, 1, 9).with(|kind| kind == "arithmetic").held_out(),
    texts("validation_path", TEXT_FILES).with(|kind| kind == "text").held_out().path(),
    texts("validation_path", ROW_FILES).with(|kind| kind == "jsonl").held_out().path(),
    texts("validation_path", TOKEN_FILES).with(|kind| kind == "tokens").held_out().path(),
    texts("validation_path", PICTURE_FOLDERS).with(pictures).held_out().path(),
    texts("validation_path", IMAGE_FILES).with(|kind| matches!(kind, "idx" | "cifar10")).held_out().path(),
    optional_number("validation", BELOW_ONE).held_out(),
    numbers("mean", ("a number, or one for each channel", |_| true)).with(images).for_evaluation(),
    numbers("std", ("a number above 0, or one for each channel", |std| std > 0.0))
        .with(images)
        .for_evaluation(),
];

fn drawn(kind: &str) -> bool {
    matches!(kind, "shapes" | "arithmetic")
}

fn images(kind: &str) -> bool {
    matches!(kind, "idx" | "cifar10" | "images" | "shapes")
}

fn pictures(kind: &str) -> bool {
    kind == "images"
}

pub(super) const TRAIN: &[Field] = &[
    optional_integer("steps", 0, MOST).free().usual(),
    optional_integer("epochs", 1, MOST).free(),
    integer("batch", 32, 1, LARGEST).for_evaluation(),
    integer("micro_batches", 1, 1, LARGEST).free().for_evaluation(),
    word("precision", "f32", &["f32", "bf16"]).always(),
    integer_or("recompute", FieldDefault::Word("none"), [1, LAYERS_MOST], &["none", "attention", "block"])
        .free(),
    number("clip", 0.0, ("a number of at least 0 (0: off)", |x| x >= 0.0)),
    integer("max_bad_steps", 5, 1, MOST).free(),
    integer("eval_every", 0, 0, MOST).free(),
    integer("eval_samples", 0, 0, MOST).free(),
    integer("eval_batch", 0, 0, LARGEST).free().for_evaluation(),
    integer("log_every", 10, 1, MOST).free(),
    flag("noise_scale", false).free(),
    integer("batch_norm_group", 0, 0, LARGEST),
    flag("keep_zeros", false),
];

/// Defaults are those published with each method: beta2 = 0.999 for all of the Adam family (Kingma & Ba; language
/// models often use 0.95, which forgets a bad batch sooner), eps = 1e-8, or 1e-6 for LAMB; trust = 0.001 for LARS.
pub(super) const OPTIMIZER: &[Field] = &[
    word("name", "adamw", &["sgd", "momentum", "nesterov", "adam", "adamw", "lars", "lamb"]).usual(),
    number("momentum", 0.9, BELOW_ONE).with(|name| matches!(name, "momentum" | "nesterov" | "lars")),
    number("trust", 0.001, POSITIVE).with(|name| name == "lars"),
    flag("rate_in_velocity", true).with(|name| name == "lars"),
    number("beta1", 0.9, BELOW_ONE).with(adam),
    number("beta2", 0.999, BELOW_ONE).with(adam),
    number("eps", 1e-8, POSITIVE).with(|name| matches!(name, "adam" | "adamw")),
    number("eps", 1e-6, POSITIVE).with(|name| name == "lamb"),
    number("max_weight_norm", 0.0, ("a number of at least 0 (0: no limit)", |x| x >= 0.0))
        .with(|name| name == "lamb"),
    flag("exclude_from_trust", true).with(|name| matches!(name, "lars" | "lamb")),
    number("weight_decay", 0.01, NOT_NEGATIVE).with(|name| name == "adamw"),
    number("weight_decay", 0.0, NOT_NEGATIVE).with(|name| name != "adamw"),
    flag("exclude_from_decay", true),
    word("master", "f32", &["f32", "low-bits"]).free(),
    word("moments", "f32", &["f32", "bf16"]),
];

fn adam(name: &str) -> bool {
    matches!(name, "adam" | "adamw" | "lamb")
}

pub(super) const LEARNING_RATE: &[Field] = &[
    word("schedule", "cosine", &["constant", "linear", "cosine", "step"]),
    optional_number("peak", POSITIVE).usual(),
    integer("warmup", 0, 0, MOST),
    optional_number("warmup_from", NOT_NEGATIVE),
    optional_integer("scale_from_batch", 1, LARGEST),
    number("by_density", 0.0, NOT_NEGATIVE),
    number("end_factor", 0.1, ("a number from 0 to 1", |x| (0.0..=1.0).contains(&x))).with(falling),
    integer("decay_steps", 0, 0, MOST).with(falling),
    integer("step_every", 0, 0, MOST).with(|name| name == "step"),
    number("step_factor", 0.1, ("a number above 0 and below 1", |x| x > 0.0 && x < 1.0))
        .with(|name| name == "step"),
];

fn falling(name: &str) -> bool {
    matches!(name, "linear" | "cosine")
}

const GOING: NumberRule =
    ("a number in [0, 1): the fraction of weights to prune", |x| (0.0..1.0).contains(&x));
pub(super) const METHODS: &[&str] = &[
    "random",
    "magnitude",
    "gradual",
    "elsa",
    "wanda",
    "snip",
    "grasp",
    "early-bird",
    "lottery",
    "set",
    "rigl",
    "2:4",
    "keep",
];
const SCOPES: &[&str] = &["global", "layer", "row"];

/// Defaults that were published: GraSP scores at a temperature of 200; Early-Bird compares the last five
/// masks; a lottery round removes a fifth; SET and RigL move 0.3 of the kept weights at first, every 100
/// steps, until three quarters of the run, in layers of which small ones keep more; ELSA takes a new sparse
/// network every 32 steps and pulls with 0.01.
///
/// Magnitudes are compared within a layer, as Zhu & Gupta do: layers differ in the scale that they are
/// initialised with (a GPT's output projections are smaller by the root of twice its depth), which says
/// nothing of what they are worth, and one threshold for all would empty the smaller ones. A lottery, which
/// has trained the weights to the end, has one for all, as published for deep networks.
pub(super) const PRUNE: &[Field] = &[
    word("method", "", METHODS).or_missing("\"magnitude\", \"snip\", \"early-bird\" or another method"),
    number("sparsity", 0.9, GOING).with(|method| !matches!(method, "2:4" | "keep")).usual(),
    number("sparsity", 0.5, GOING).with(|method| method == "2:4"),
    optional_number("sparsity", GOING).with(|method| method == "keep"),
    flag("embeddings", false),
    flag("biases", false),
    texts("exclude", "a part of a parameter's name, or a list of them"),
    word("state", "auto", &["auto", "compressed", "dense"]).free(),
    word("weights", "dense", &["dense", "compressed"]).free(),
    word("kernels", "dense", &["dense", "sparse"]).free(),
    word("scope", "layer", SCOPES).with(|method| matches!(method, "random" | "magnitude" | "gradual")),
    word("scope", "row", SCOPES).with(|method| method == "wanda"),
    word("scope", "", SCOPES).with(early_bird),
    integer("at", 0, 0, MOST).with(|method| matches!(method, "random" | "magnitude" | "wanda" | "2:4")),
    number("initial", 0.0, GOING).with(|method| method == "gradual"),
    optional_integer("start", 0, MOST).with(in_a_span),
    integer("end", 0, 0, MOST).with(in_a_span),
    integer("every", 10, 1, MOST).with(|method| method == "gradual"),
    integer("every", 32, 1, MOST).with(|method| method == "elsa"),
    number("penalty", 0.01, POSITIVE).with(|method| method == "elsa"),
    integer("every", 0, 0, MOST).with(early_bird),
    integer("every", 100, 1, MOST).with(moving),
    integer("samples", 128, 0, MOST).with(|method| matches!(method, "wanda" | "snip")),
    integer("samples", 0, 0, MOST).with(|method| method == "grasp"),
    integer("score_batch", 0, 0, LARGEST).with(|method| matches!(method, "snip" | "grasp")),
    number("temperature", 200.0, POSITIVE).with(|method| method == "grasp"),
    word("score", "signed", &["signed", "magnitude"]).with(|method| method == "grasp"),
    word("form", "weights", &["weights", "channels"]).with(early_bird),
    integer("window", 5, 2, 100).with(early_bird),
    optional_number("tolerance", INSIDE).with(early_bird),
    optional_number("l1", NOT_NEGATIVE).with(early_bird),
    integer("latest", 0, 0, MOST).with(early_bird),
    number("rate", 0.2, INSIDE).with(|method| method == "lottery"),
    integer("rewind", 0, 0, MOST).with(|method| method == "lottery"),
    number("fraction", 0.3, INSIDE).with(moving),
    number("until", 0.75, ("a fraction of the run, in (0, 1]", |x| x > 0.0 && x <= 1.0)).with(moving),
    word("distribution", "erdos-renyi-kernel", &["uniform", "erdos-renyi-kernel"]).with(moving),
    flag("dense_first", false).with(moving),
];

fn early_bird(method: &str) -> bool {
    method == "early-bird"
}

fn in_a_span(method: &str) -> bool {
    matches!(method, "gradual" | "elsa")
}

fn moving(method: &str) -> bool {
    matches!(method, "set" | "rigl")
}

/// The seconds of a week: whoever waits longer waits for nobody.
const WEEK: usize = 7 * 24 * 3600;

pub(super) const PARALLEL: &[Field] = &[
    optional_integer("data", 1, LARGEST).free().always().usual(),
    integer("pipeline", 1, 1, LARGEST).free().always(),
    word("schedule", "1f1b", &ScheduleName::NAMES).free().always(),
    text("schedule_file", "the path of a schedule").free().always().path(),
    optional_integer("chunks", 1, LARGEST).free().always(),
    optional_integer("pipelines", 1, LARGEST).free().always(),
    any("cut").free().always(),
    optional_integer("drain", 1, LARGEST),
    integer("tensor", 1, 1, LARGEST).free().always(),
    flag("sequence", false).free().always(),
    any("linear").free().always(),
    any("spatial").free().always(),
    any("integrated").free().always(),
    word("batch_norm", "local", &["local", "synchronised"]),
    any("zero").free(),
    integer("average_every", 1, 1, LARGEST),
    integer("local_after", 0, 0, MOST),
    integer("timeout_s", 600, 1, WEEK).free().always(),
];

pub(super) const CHECKPOINT: &[Field] = &[
    integer("every", 0, 0, MOST).free().usual(),
    integer("keep", 3, 1, MOST).free(),
    flag("last", true).free(),
];

pub(super) const SAMPLE: &[Field] = &[
    text("prompt", "the prompt").required().free().usual(),
    integer("tokens", 100, 1, MOST).free(),
    number("temperature", 0.8, NOT_NEGATIVE).free(),
    integer("top_k", 0, 0, MOST).free(),
    number("top_p", 1.0, ("a number above 0, up to 1", |x| x > 0.0 && x <= 1.0)).free(),
    integer("every", 0, 0, MOST).free(),
];

pub(super) const DEVICE: &[Field] = &[
    word("kind", "auto", &["auto", "cpu", "cuda"]).free().always().usual(),
    integer("threads", 0, 0, 4096).free().always(),
    flag("tf32", true).free().always(),
    flag("check_memory", true).free().always(),
    text("cluster", "the name of a cluster, or the path of a cluster file").free().path(),
];

/// The full path of a field.
fn join(section: &str, key: &str) -> String {
    if section.is_empty() { key.into() } else { format!("{section}.{key}") }
}

/// The rows of a field by its full path, several where its section has it in several forms; of a section all
/// of them.
pub(super) fn named(name: &str) -> impl Iterator<Item = &'static Field> {
    let mut keys = name.split('.');
    let first = keys.next().unwrap_or_default();
    let is_section = ALL.iter().any(|(section, _)| *section == first);
    // Behind a second point is an item of a list.
    let (section, key) = if is_section { (first, keys.next()) } else { ("", Some(first)) };
    let key = key.map(String::from);
    let own = ALL.iter().find(|(name, _)| *name == section).map_or(&[][..], |(_, fields)| *fields);
    own.iter().filter(move |row| key.as_deref().is_none_or(|key| row.name == key))
}

/// Whether something holds for a field in all its forms, or for all fields of a section.
pub(super) fn hold(name: &str, property: impl Fn(&Field) -> bool) -> bool {
    let mut rows = named(name).peekable();
    rows.peek().is_some() && rows.all(property)
}

/// Every name of a field or a section.
pub(super) fn names() -> Vec<String> {
    let of = |(section, fields): &(&str, &[Field])| {
        let fields = fields.iter().map(|field| join(section, field.name)).collect::<Vec<_>>();
        fields.into_iter().chain([section.to_string()]).filter(|name| !name.is_empty()).collect::<Vec<_>>()
    };
    ALL.iter().flat_map(of).collect()
}

/// The full path of a field of this name in any section, or of a section nearly of this name.
pub(super) fn elsewhere(key: &str) -> Option<String> {
    let has = |fields: &[Field]| fields.iter().any(|field| field.name == key);
    let field = ALL.iter().find(|(_, fields)| has(fields)).map(|(section, _)| join(section, key));
    let sections = ALL.iter().map(|(section, _)| *section).filter(|section| !section.is_empty());
    field.or_else(|| super::nearest(key, sections).map(String::from))
}

/// The field of a section that who gives the section itself a value most likely means.
pub(super) fn usual_field(section: &str) -> Option<String> {
    let (_, fields) = ALL.iter().find(|(name, _)| *name == section)?;
    fields.iter().find(|field| field.is_usual).map(|field| join(section, field.name))
}
