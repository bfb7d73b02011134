//! Small models for tests to train.

use std::fmt::Display;

use super::{Base, base};

/// A model on generated text.
fn on_text(model: &str, decay_steps: usize, line: impl Display) -> Base {
    const TASK: &str = r#"
        [data]
        kind = "arithmetic"
        count = 400
        [train]
        batch = 4
        eval_samples = 4
        [learning_rate]
        peak = 1e-2
        schedule = "cosine"
        warmup = 1
    "#;
    base(&format!("seed = 4\n[model]{model}{TASK}decay_steps = {decay_steps}")).set(line)
}

/// A GPT of a few thousand parameters on generated text.
pub fn tiny_gpt(line: impl Display) -> Base {
    const MODEL: &str = r#"
        name = "gpt"
        layers = 2
        heads = 2
        width = 16
        context = 12
    "#;
    on_text(MODEL, 8, line)
}

/// Two layers of the Llama family with all that its members have: rotary positions that are scaled, grouped
/// keys, a head size apart from the width, biases, norms of queries and keys.
pub fn rotary_llama(line: impl Display) -> Base {
    const MODEL: &str = r#"
        name = "llama"
        layers = 2
        heads = 4
        kv_heads = 2
        head_dim = 6
        width = 16
        inner = 20
        context = 12
        qkv_bias = true
        qk_norm = true
        rotary_base = 100.0
        rotary_scaling = "llama3"
        rotary_original = 16
    "#;
    on_text(MODEL, 40, line)
}

/// Two layers as Llama has them (RMS norm, separate queries, keys and values, grouped queries, SwiGLU, no
/// biases), written layer by layer; docs/run-file.md has the same at another width.
pub fn tiny_llama(line: impl Display) -> Base {
    const MODEL: &str = r#"
        name = "custom"
        context = 12
        layers = [
            { type = "embedding", width = 16 },
            { type = "position" },
            { type = "residual", branch = [
                { type = "rms_norm", eps = 1e-6 },
                { type = "branches", join = "concat", branches = [
                    [{ type = "linear", output = 16, bias = false }],
                    [{ type = "linear", output = 8, bias = false }],
                    [{ type = "linear", output = 8, bias = false }],
                ] },
                { type = "attention", heads = 4, kv_heads = 2 },
                { type = "linear", output = 16, bias = false },
            ] },
            { type = "residual", branch = [
                { type = "rms_norm", eps = 1e-6 },
                { type = "branches", join = "product", branches = [
                    [{ type = "linear", output = 44, bias = false }, { type = "silu" }],
                    [{ type = "linear", output = 44, bias = false }],
                ] },
                { type = "linear", output = 16, bias = false },
            ] },
            { type = "residual", branch = [
                { type = "layer_norm", bias = false },
                { type = "linear", output = 24, bias = false },
                { type = "attention", heads = 4, kv_heads = 1 },
                { type = "linear", output = 16, bias = false },
            ] },
            { type = "residual", branch = [
                { type = "rms_norm" },
                { type = "branches", join = "product", branches = [
                    [{ type = "linear", output = 44 }, { type = "gelu" }],
                    [{ type = "linear", output = 44 }],
                ] },
                { type = "linear", output = 16 },
            ] },
            { type = "rms_norm" },
            { type = "linear", bias = false },
        ]
    "#;
    on_text(MODEL, 40, line)
}

/// A convolutional network with batch norm and a residual branch on synthetic shapes.
pub fn tiny_cnn(line: impl Display) -> Base {
    const TEXT: &str = r#"
        seed = 4
        [model]
        name = "custom"
        layers = [
            { type = "conv", output = 8, kernel = 3, padding = 1, bias = false },
            { type = "batch_norm" },
            { type = "relu" },
            { type = "max_pool", kernel = 2 },
            { type = "residual", branch = [{ type = "conv", output = 8, kernel = 3, padding = 1 }, { type = "relu" }] },
            { type = "global_avg_pool" },
            { type = "linear", output = 10 },
        ]
        [data]
        kind = "shapes"
        count = 200
        size = 16
        [train]
        batch = 8
        eval_samples = 8
        [optimizer]
        name = "momentum"
        [learning_rate]
        peak = 0.02
        schedule = "constant"
    "#;
    base(TEXT).set(line)
}

/// A few synthetic shapes of 32 x 32, for a model to be named.
pub fn images() -> Base {
    base("[data]\nkind = \"shapes\"\ncount = 16\n[train]\nbatch = 4")
}
