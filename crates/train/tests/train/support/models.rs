//! Small models for tests to train.

use std::fmt::Display;

use super::{Base, base};

/// A model on generated text.
fn on_text(model: &str, decay_steps: usize, line: impl Display) -> Base {
    base(include_str!("text.toml"))
        .set(format!("learning_rate.decay_steps={decay_steps}"))
        .set(model)
        .set(line)
}

/// A GPT of a few thousand parameters on generated text.
pub fn tiny_gpt(line: impl Display) -> Base {
    on_text("model.name=gpt model.layers=2 model.heads=2 model.width=16 model.context=12", 8, line)
}

/// Two layers of the Llama family with all that its members have: rotary positions that are scaled, grouped
/// keys, a head size apart from the width, biases, norms of queries and keys.
pub fn rotary_llama(line: impl Display) -> Base {
    const MODEL: &str = "
        model.name=llama model.layers=2 model.width=16 model.inner=20 model.context=12 model.heads=4
        model.kv_heads=2 model.head_dim=6 model.qkv_bias=true model.qk_norm=true model.rotary_base=100.0
        model.rotary_scaling=llama3 model.rotary_original=16";
    on_text(MODEL, 40, line)
}

/// Two layers as Llama has them (RMS norm, separate queries, keys and values, grouped queries, SwiGLU, no
/// biases), written layer by layer; docs/run-file.md has the same at another width.
pub fn tiny_llama(line: impl Display) -> Base {
    base(include_str!("llama.toml")).set(line)
}

/// A convolutional network with batch norm and a residual branch on synthetic shapes.
pub fn tiny_cnn(line: impl Display) -> Base {
    base(include_str!("cnn.toml")).set(line)
}

/// A few synthetic shapes of 32 x 32, for a model to be named.
pub fn images() -> Base {
    base("[data]\nkind = \"shapes\"\ncount = 16\n[train]\nbatch = 4")
}
