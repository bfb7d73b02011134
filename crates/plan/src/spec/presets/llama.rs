//! The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen 2.5 and 3, with Hugging Face's names without the
//! `model.` prefix. They are one block: RMS norm, attention with rotary positions and grouped keys, RMS norm,
//! down(silu(gate x) up x); they differ in biases of queries, keys and values, in norms of queries and keys,
//! in the size of a head, in whether the head is tied, and in how rotations are scaled.
//!
//! Queries, keys and values are three weights, gate and up two, as in the files: so names, masks and shards are
//! those of the files too, a rank's heads are a range of rows of each, and a pruning method that compares
//! within a layer compares what others compare. They run as one layer all the same
//! ([`JointProjection`](super::super::JointProjection)): their products write to one tensor, and what they read
//! is made again once.
//!
//! All weights start from a normal of 0.02; projections that end a residual branch are divided by
//! sqrt(2 layers), as in GPT-2.

use serde::Serialize;

use super::super::{
    Activation, Attention, BranchJoin, Branches, Embedding, Init, Input, LayerSpec, Linear, Llama3Scaling,
    ModelSpec, QkNorm, Residual, RmsNorm, Rotary, TiedLinear, WeightOrder,
};
use super::block;

/// The sizes and choices of a model of the family.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Llama {
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and of values; divides `heads`.
    pub kv_heads: usize,
    /// Columns of a head.
    pub head_dim: usize,
    /// Columns inside the gated perceptron.
    pub inner: usize,
    /// Tokens in a sample.
    pub context: usize,
    /// Tokens there are.
    pub vocab: usize,
    /// Whether the head uses the token embedding's weight.
    pub tied: bool,
    /// Added to mean squares in norms.
    pub eps: f64,
    /// Whether queries, keys and values have biases (Qwen 2.5).
    pub qkv_bias: bool,
    /// Whether queries and keys go through a norm (Qwen 3).
    pub qk_norm: bool,
    /// Positions that a token sees at most, where there is such a bound (Mistral's sliding window). Attention
    /// here has none, so a context is not longer.
    pub window: Option<usize>,
    /// How queries and keys are turned.
    pub rotary: Rotary,
}

/// A published size: layers, width, heads, key/value heads, columns of a head and of the perceptron, vocabulary.
type PublishedSizes = [usize; 7];

impl Llama {
    /// The published sizes by their names.
    pub(crate) const PRESETS: [(&str, PublishedSizes); 15] = [
        ("smollm2-135m", [30, 576, 9, 3, 64, 1536, 49152]),
        ("smollm2-360m", [32, 960, 15, 5, 64, 2560, 49152]),
        ("smollm2-1.7b", [24, 2048, 32, 32, 64, 8192, 49152]),
        ("llama-2-7b", [32, 4096, 32, 32, 128, 11008, 32000]),
        ("llama-3.1-8b", [32, 4096, 32, 8, 128, 14336, 128_256]),
        ("llama-3.2-1b", [16, 2048, 32, 8, 64, 8192, 128_256]),
        ("llama-3.2-3b", [28, 3072, 24, 8, 128, 8192, 128_256]),
        ("mistral-7b", [32, 4096, 32, 8, 128, 14336, 32768]),
        ("qwen2.5-0.5b", [24, 896, 14, 2, 64, 4864, 151_936]),
        ("qwen2.5-1.5b", [28, 1536, 12, 2, 128, 8960, 151_936]),
        ("qwen2.5-7b", [28, 3584, 28, 4, 128, 18944, 152_064]),
        ("qwen3-0.6b", [28, 1024, 16, 8, 128, 3072, 151_936]),
        ("qwen3-1.7b", [28, 2048, 16, 8, 128, 6144, 151_936]),
        ("qwen3-4b", [36, 2560, 32, 8, 128, 9728, 151_936]),
        ("qwen3-8b", [36, 4096, 32, 8, 128, 12288, 151_936]),
    ];

    /// The context of the published sizes unless another is asked for: most can do more, few are trained with it.
    pub(crate) const CONTEXT: usize = 8192;

    /// A published size by name. Mistral is version 0.3, which has no sliding window.
    pub fn preset(name: &str) -> Option<Llama> {
        let (_, sizes) = Llama::PRESETS.into_iter().find(|(known, _)| *known == name)?;
        let [layers, width, heads, kv_heads, head_dim, inner, vocab] = sizes;
        let scaled = |factor| {
            let scaling = Llama3Scaling { factor, low: 1.0, high: 4.0, original: 8192 };
            Rotary { base: 500_000.0, scaling: Some(scaling) }
        };
        let is = |family: &str| name.starts_with(family);
        let rotary = match name {
            "llama-2-7b" => Rotary::new(10_000.0),
            "llama-3.1-8b" => scaled(8.0),
            "llama-3.2-1b" | "llama-3.2-3b" => scaled(32.0),
            "smollm2-1.7b" => Rotary::new(130_000.0),
            "smollm2-135m" | "smollm2-360m" => Rotary::new(100_000.0),
            _ => Rotary::new(1_000_000.0),
        };
        let untied = ["llama-2-7b", "llama-3.1-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b"];
        Some(Llama {
            layers,
            width,
            heads,
            kv_heads,
            head_dim,
            inner,
            context: Llama::CONTEXT,
            vocab,
            tied: !untied.contains(&name),
            eps: if is("qwen") { 1e-6 } else { 1e-5 },
            qkv_bias: is("qwen2.5"),
            qk_norm: is("qwen3"),
            window: None,
            rotary,
        })
    }
}

/// Builds one. Blocks: `embedding`, `layers.0` ..., `head` (the last norm and the logits).
pub fn llama(name: &str, shape: &Llama) -> ModelSpec {
    let &Llama { layers, width, context, vocab, .. } = shape;
    let init = Init::Normal(0.02);
    let table = Embedding { name: "embed_tokens".into(), vocab, first: 0, width, init };
    let mut blocks = vec![block("embedding", vec![LayerSpec::Embedding(table)])];
    blocks.extend((0..layers).map(|i| {
        let name = format!("layers.{i}");
        let layers = transformer_layer(&name, shape);
        block(name, layers)
    }));
    let logits = match shape.tied {
        true => LayerSpec::TiedLinear(TiedLinear {
            weight: "embed_tokens.weight".into(),
            input: width,
            output: vocab,
        }),
        false => linear("lm_head".into(), width, vocab, false, 0.02),
    };
    blocks.push(block("head", vec![norm("norm".into(), shape), logits]));
    ModelSpec { name: name.into(), input: Input::Tokens { seq: context, vocab }, blocks, classes: vocab }
}

fn transformer_layer(name: &str, shape: &Llama) -> Vec<LayerSpec> {
    let &Llama { layers, width, heads, kv_heads, head_dim, inner, qkv_bias, .. } = shape;
    let residual = 0.02 / (2.0 * layers as f32).sqrt();
    let part = |part: &str| format!("{name}.{part}");
    let (queries, keys) = (heads.saturating_mul(head_dim), kv_heads.saturating_mul(head_dim));
    let project = |which: &str, columns| {
        vec![linear(part(&format!("self_attn.{which}_proj")), width, columns, qkv_bias, 0.02)]
    };
    let qk_norm = QkNorm { name: part("self_attn"), eps: shape.eps as f32 };
    let attention = Attention {
        rotary: Some(shape.rotary),
        qk_norm: shape.qk_norm.then_some(qk_norm),
        ..Attention::new(heads, kv_heads, queries)
    };
    let attention = vec![
        norm(part("input_layernorm"), shape),
        LayerSpec::Branches(Branches {
            join: BranchJoin::Concat,
            branches: vec![project("q", queries), project("k", keys), project("v", keys)],
        }),
        LayerSpec::Attention(attention),
        linear(part("self_attn.o_proj"), queries, width, false, residual),
    ];
    let mut gate = vec![linear(part("mlp.gate_proj"), width, inner, false, 0.02)];
    gate.push(LayerSpec::Activation(Activation::Silu));
    let up = vec![linear(part("mlp.up_proj"), width, inner, false, 0.02)];
    let perceptron = vec![
        norm(part("post_attention_layernorm"), shape),
        LayerSpec::Branches(Branches { join: BranchJoin::Product, branches: vec![gate, up] }),
        linear(part("mlp.down_proj"), inner, width, false, residual),
    ];
    [attention, perceptron]
        .map(|branch| LayerSpec::Residual(Residual { branch, shortcut: Vec::new() }))
        .into()
}

fn linear(name: String, input: usize, output: usize, bias: bool, deviation: f32) -> LayerSpec {
    let (order, init) = (WeightOrder::OutIn, Init::Normal(deviation));
    LayerSpec::Linear(Linear { name, input, output, bias, order, init })
}

fn norm(name: String, shape: &Llama) -> LayerSpec {
    LayerSpec::RmsNorm(RmsNorm { name, width: shape.width, eps: shape.eps as f32 })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As published.
    #[test]
    fn parameters_are_counted_as_published() {
        let counts = [
            ("smollm2-135m", 134_515_008),
            ("smollm2-360m", 361_821_120),
            ("smollm2-1.7b", 1_711_376_384),
            ("llama-2-7b", 6_738_415_616),
            ("llama-3.1-8b", 8_030_261_248),
            ("llama-3.2-1b", 1_235_814_400),
            ("llama-3.2-3b", 3_212_749_824),
            ("mistral-7b", 7_248_023_552),
            ("qwen2.5-0.5b", 494_032_768),
            ("qwen2.5-1.5b", 1_543_714_304),
            ("qwen2.5-7b", 7_615_616_512),
            ("qwen3-0.6b", 596_049_920),
            ("qwen3-1.7b", 1_720_574_976),
            ("qwen3-4b", 4_022_468_096),
            ("qwen3-8b", 8_190_735_360),
        ];
        assert_eq!(counts.map(|(name, _)| name), Llama::PRESETS.map(|(name, _)| name));
        for (name, count) in counts {
            let model = llama(name, &Llama::preset(name).unwrap());
            model.check().unwrap();
            assert_eq!(model.parameter_count(), count, "{name}");
        }
    }

    #[test]
    fn names_are_hugging_faces() {
        let shape = Llama {
            layers: 1,
            qkv_bias: true,
            qk_norm: true,
            tied: false,
            ..Llama::preset("qwen3-0.6b").unwrap()
        };
        let names: Vec<_> = llama("llama", &shape).parameters().into_iter().map(|p| p.name).collect();
        let expected = "embed_tokens.weight layers.0.input_layernorm.weight layers.0.self_attn.q_proj.weight \
            layers.0.self_attn.q_proj.bias layers.0.self_attn.k_proj.weight \
            layers.0.self_attn.k_proj.bias layers.0.self_attn.v_proj.weight \
            layers.0.self_attn.v_proj.bias layers.0.self_attn.q_norm.weight \
            layers.0.self_attn.k_norm.weight layers.0.self_attn.o_proj.weight \
            layers.0.post_attention_layernorm.weight layers.0.mlp.gate_proj.weight \
            layers.0.mlp.up_proj.weight layers.0.mlp.down_proj.weight norm.weight lm_head.weight";
        assert_eq!(names, expected.split_whitespace().collect::<Vec<_>>());
    }

    #[test]
    fn heads_that_do_not_divide_are_named() {
        let shape = Llama { kv_heads: 2, ..Llama::preset("smollm2-135m").unwrap() };
        let error = llama("llama", &shape).check().unwrap_err().to_string();
        assert!(error.ends_with("2 key/value heads do not divide the 9 query heads"), "{error}");
        let shape = Llama { head_dim: 7, ..Llama::preset("smollm2-135m").unwrap() };
        let error = llama("llama", &shape).check().unwrap_err().to_string();
        assert!(error.ends_with("heads of 7 columns have no pairs that could be turned"), "{error}");
    }
}
