//! GPT: GPT-2's architecture and Hugging Face's names without the `transformer.` prefix; GPT-3's sizes.
//!
//! All weights start from a normal of 0.02; projections that end a residual branch are divided by sqrt(2 layers),
//! since the residual stream sums that many of them (Radford et al. 2019). With a dropout rate, there is a dropout
//! after the embeddings and at the end of every branch; attention weights are not dropped.

use serde::{Deserialize, Serialize};

use super::super::{
    Activation, Attention, Dropout, Embedding, Init, Input, LayerNorm, LayerSpec, Linear, ModelSpec,
    PositionEmbedding, Residual, RmsNorm, TiedLinear, WeightOrder,
};
use super::block;

/// Which norm stands before each branch and before the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NormKind {
    /// Layer norm, with scale and shift.
    #[default]
    Layer,
    /// RMS norm, with scale.
    Rms,
}

/// The sizes and choices of a GPT.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Gpt {
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Attention heads, of `width / heads` each.
    pub heads: usize,
    /// Tokens in a sample.
    pub context: usize,
    /// Tokens there are.
    pub vocab: usize,
    /// Dropout rate, 0 for none.
    pub dropout: f32,
    /// Whether the head uses the token embedding's weight.
    pub tied: bool,
    /// Layer norm with mean and shift, or RMS norm without.
    pub norm: NormKind,
    /// The non-linearity of the multi-layer perceptron.
    pub activation: Activation,
    /// Columns inside the perceptron; left out: four widths.
    pub inner: Option<usize>,
    /// Added to variances in norms.
    pub eps: f64,
}

impl Default for Gpt {
    /// Small enough for a laptop, with a vocabulary of bytes.
    fn default() -> Gpt {
        Gpt {
            layers: 4,
            width: 128,
            heads: 4,
            context: 128,
            vocab: 256,
            dropout: 0.0,
            tied: true,
            norm: NormKind::Layer,
            activation: Activation::Gelu,
            inner: None,
            eps: Gpt::EPS,
        }
    }
}

impl Gpt {
    /// The epsilon of the published sizes.
    pub(crate) const EPS: f64 = 1e-5;

    /// The published sizes by their names: layers, width, heads, context.
    pub(crate) const PRESETS: [(&str, [usize; 4]); 6] = [
        ("gpt2-124m", [12, 768, 12, 1024]),
        ("gpt2-350m", [24, 1024, 16, 1024]),
        ("gpt3-xl", [24, 2048, 16, 2048]),
        ("gpt3-2.7b", [32, 2560, 32, 2048]),
        ("gpt3-6.7b", [32, 4096, 32, 2048]),
        ("gpt3-13b", [40, 5120, 40, 2048]),
    ];

    /// A published size by name. GPT-3 XL has 16 heads here (the paper's 24 do not divide its width) and 13B a
    /// width of 5120 (the paper's 5140 is not a multiple of its 40 heads).
    pub fn preset(name: &str) -> Option<Gpt> {
        let (_, sizes) = Gpt::PRESETS.into_iter().find(|(known, _)| *known == name)?;
        let [layers, width, heads, context] = sizes;
        Some(Gpt { layers, width, heads, context, vocab: 50257, ..Gpt::default() })
    }
}

/// Builds one. Blocks: `embedding`, `h.0` ..., `head` (the last norm and the logits).
pub fn gpt(name: &str, shape: &Gpt) -> ModelSpec {
    let &Gpt { layers, width, context, vocab, .. } = shape;
    let init = Init::Normal(0.02);
    let tokens = Embedding { name: "wte".into(), vocab, first: 0, width, init };
    let positions = PositionEmbedding { name: "wpe".into(), context, first: 0, width, init };
    let mut embedding = vec![LayerSpec::Embedding(tokens), LayerSpec::PositionEmbedding(positions)];
    embedding.extend(dropout(shape));
    let mut blocks = vec![block("embedding", embedding)];
    blocks.extend((0..layers).map(|i| {
        let name = format!("h.{i}");
        let layers = transformer_layer(&name, shape);
        block(name, layers)
    }));
    let logits = if shape.tied {
        LayerSpec::TiedLinear(TiedLinear { weight: "wte.weight".into(), input: width, output: vocab })
    } else {
        let (name, order) = ("lm_head".into(), WeightOrder::OutIn);
        LayerSpec::Linear(Linear { name, input: width, output: vocab, bias: false, order, init })
    };
    blocks.push(block("head", vec![norm("ln_f".into(), shape), logits]));
    ModelSpec { name: name.into(), input: Input::Tokens { seq: context, vocab }, blocks, classes: vocab }
}

fn transformer_layer(name: &str, shape: &Gpt) -> Vec<LayerSpec> {
    let &Gpt { layers, width, heads, activation, .. } = shape;
    let residual = 0.02 / (2.0 * layers as f32).sqrt();
    let linear = |part: &str, input: usize, output: usize, deviation| {
        let (name, order, init) = (format!("{name}.{part}"), WeightOrder::InOut, Init::Normal(deviation));
        LayerSpec::Linear(Linear { name, input, output, bias: true, order, init })
    };
    let mut attention = vec![
        norm(format!("{name}.ln_1"), shape),
        linear("attn.c_attn", width, width.saturating_mul(3), 0.02),
        LayerSpec::Attention(Attention::new(heads, heads, width)),
        linear("attn.c_proj", width, width, residual),
    ];
    let hidden = shape.inner.unwrap_or(width.saturating_mul(4));
    let mut perceptron = vec![
        norm(format!("{name}.ln_2"), shape),
        linear("mlp.c_fc", width, hidden, 0.02),
        LayerSpec::Activation(activation),
        linear("mlp.c_proj", hidden, width, residual),
    ];
    attention.extend(dropout(shape));
    perceptron.extend(dropout(shape));
    [attention, perceptron]
        .map(|branch| LayerSpec::Residual(Residual { branch, shortcut: Vec::new() }))
        .into()
}

fn norm(name: String, shape: &Gpt) -> LayerSpec {
    let (width, eps) = (shape.width, shape.eps as f32);
    match shape.norm {
        NormKind::Layer => LayerSpec::LayerNorm(LayerNorm { name, width, eps, bias: true }),
        NormKind::Rms => LayerSpec::RmsNorm(RmsNorm { name, width, eps }),
    }
}

fn dropout(shape: &Gpt) -> Option<LayerSpec> {
    (shape.dropout > 0.0).then_some(LayerSpec::Dropout(Dropout { rate: shape.dropout, counted: None }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_hugging_faces() {
        let shape = Gpt { layers: 1, ..Gpt::default() };
        let names: Vec<_> = gpt("gpt", &shape).parameters().into_iter().map(|p| p.name).collect();
        let expected = "wte.weight wpe.weight h.0.ln_1.weight h.0.ln_1.bias h.0.attn.c_attn.weight \
            h.0.attn.c_attn.bias h.0.attn.c_proj.weight h.0.attn.c_proj.bias h.0.ln_2.weight h.0.ln_2.bias \
            h.0.mlp.c_fc.weight h.0.mlp.c_fc.bias h.0.mlp.c_proj.weight h.0.mlp.c_proj.bias ln_f.weight ln_f.bias";
        assert_eq!(names, expected.split_whitespace().collect::<Vec<_>>());
        let c_attn = &gpt("gpt", &shape).parameters()[4];
        assert_eq!(c_attn.shape, [128, 384]);
    }

    #[test]
    fn dropout_is_a_layer_only_where_it_drops() {
        let count = |rate| {
            let mut n = 0;
            gpt("gpt", &Gpt { layers: 2, dropout: rate, ..Gpt::default() })
                .for_each(&mut |layer| n += usize::from(matches!(layer, LayerSpec::Dropout(_))));
            n
        };
        assert_eq!(count(0.0), 0);
        assert_eq!(count(0.1), 5);
    }

    #[test]
    fn variants_fit_and_wrong_heads_are_named() {
        let other = Gpt { norm: NormKind::Rms, activation: Activation::Silu, tied: false, ..Gpt::default() };
        gpt("gpt", &other).check().unwrap();
        let error = gpt("gpt", &Gpt { heads: 3, ..Gpt::default() }).check().unwrap_err();
        insta::assert_snapshot!(error, @"layer 2 (residual), branch 2 (attention): 3 heads do not divide the width 128");
    }
}
