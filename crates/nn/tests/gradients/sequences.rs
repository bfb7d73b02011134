//! Layers of sequences, and branches of both kinds.

use espalier_plan::spec::{
    Activation, Attention, BranchJoin, Branches, Dropout, Embedding, Init, Input, LayerNorm, LayerSpec,
    Linear, Llama3Scaling, PositionEmbedding, QkNorm, Residual, RmsNorm, Rotary, TiedLinear, WeightOrder,
};

use crate::differences::*;
use crate::images::{batch_norm, check_image};

const TEXT: Input = Input::Tokens { seq: 6, vocab: 11 };

/// An embedding of width 8, the layers, and a head of 11 logits.
fn text(layers: Vec<LayerSpec>, width: usize) -> Vec<LayerSpec> {
    let embedding = embedding("embedding", 1.0);
    [embedding].into_iter().chain(layers).chain([linear("head", width, 11)]).collect()
}

fn check_text(layers: Vec<LayerSpec>, width: usize) {
    check(TEXT, text(layers, width), 11);
}

fn embedding(name: &str, deviation: f32) -> LayerSpec {
    let (name, init) = (name.to_owned(), Init::Normal(deviation));
    LayerSpec::Embedding(Embedding { name, vocab: 11, first: 0, width: 8, init })
}

fn positions(context: usize) -> LayerSpec {
    let (name, init) = ("position".to_owned(), Init::Normal(1.0));
    LayerSpec::PositionEmbedding(PositionEmbedding { name, context, first: 0, width: 8, init })
}

fn layer_norm(width: usize) -> LayerSpec {
    LayerSpec::LayerNorm(LayerNorm { name: "norm".into(), width, eps: 1e-5, bias: true })
}

fn rms_norm() -> LayerSpec {
    LayerSpec::RmsNorm(RmsNorm { name: "norm".into(), width: 8, eps: 1e-5 })
}

#[test]
fn embedding_and_positions() {
    check_text(vec![positions(9)], 8);
}

#[test]
fn linear_in_both_orders_and_every_activation() {
    for kind in [Activation::Relu, Activation::Gelu, Activation::Silu, Activation::GeluErf, Activation::Tanh]
    {
        let (name, order, init) = ("conv1d".to_owned(), WeightOrder::InOut, Init::Normal(0.4));
        let other = LayerSpec::Linear(Linear { name, input: 8, output: 10, bias: true, order, init });
        // The first activation is fused into its linear layer, the second stands alone behind a norm.
        let layers = vec![other, LayerSpec::Activation(kind), layer_norm(10), LayerSpec::Activation(kind)];
        check_text(layers, 10);
    }
}

/// Linear layers behind a norm or an activation, whose inputs are made again: after a norm, between two
/// linear layers, behind an activation that stands alone, and several in a row.
#[test]
fn chains_of_linear_layers() {
    for norm in [layer_norm(8), rms_norm()] {
        for kind in [Activation::Relu, Activation::Gelu, Activation::Silu] {
            let middle = |i: usize| [LayerSpec::Activation(kind), linear(&format!("middle{i}"), 8, 8)];
            let branch = [norm.clone(), linear("first", 8, 8)].into_iter().chain(middle(0)).chain(middle(1));
            let branch: Vec<LayerSpec> = branch
                .chain([LayerSpec::Dropout(Dropout { rate: 0.2, counted: None })])
                .chain(middle(2))
                .collect();
            check_text(branch.clone(), 8);
            check_text(vec![LayerSpec::Residual(Residual { branch, shortcut: vec![] })], 8);
        }
    }
}

/// A model that ends in no linear layer: its last layer's output are the logits, even where that layer keeps them.
#[test]
fn no_head() {
    for last in [
        LayerSpec::Activation(Activation::Relu),
        LayerSpec::RmsNorm(RmsNorm { name: "last".into(), width: 11, eps: 1e-5 }),
    ] {
        check(TEXT, vec![embedding("embedding", 1.0), linear("middle", 8, 11), last], 11);
    }
}

#[test]
fn a_tied_head() {
    let layers = vec![
        embedding("wte", 0.5),
        linear("middle", 8, 8),
        LayerSpec::TiedLinear(TiedLinear { weight: "wte.weight".into(), input: 8, output: 11 }),
    ];
    check(TEXT, layers, 11);
}

/// With an epsilon that counts, and without a shift, alone and before a linear layer that has its input made
/// again.
#[test]
fn norms_with_an_epsilon_and_without_a_shift() {
    let layer = |bias| LayerSpec::LayerNorm(LayerNorm { name: "norm".into(), width: 8, eps: 0.5, bias });
    let rms = LayerSpec::RmsNorm(RmsNorm { name: "norm".into(), width: 8, eps: 0.5 });
    for norm in [layer(true), layer(false), rms] {
        check_text(vec![norm.clone(), LayerSpec::Activation(Activation::Gelu)], 8);
        check_text(vec![norm, linear("behind", 8, 8)], 8);
    }
    check_image(vec![batch_norm("bn", 0, 0.5), LayerSpec::Activation(Activation::Gelu)], 4);
}

#[test]
fn norms_of_rows() {
    check_text(vec![layer_norm(8)], 8);
    check_text(vec![rms_norm()], 8);
}

#[test]
fn attention() {
    let layers = vec![linear("qkv", 8, 24), LayerSpec::Attention(Attention::new(2, 2, 8))];
    check_text(layers, 8);
}

/// Heads of keys and values that two heads of queries share, and one that all share.
#[test]
fn attention_with_grouped_queries() {
    for (kv_heads, columns) in [(2, 8 + 2 * 4), (1, 8 + 2 * 2)] {
        let attention = LayerSpec::Attention(Attention::new(4, kv_heads, 8));
        check_text(vec![linear("qkv", 8, columns), attention], 8);
    }
}

/// Heads that are turned by their positions, behind norms and without; of keys and values that several share too.
#[test]
fn attention_with_rotary_positions() {
    let scaling = Llama3Scaling { factor: 8.0, low: 1.0, high: 4.0, original: 16 };
    for (scaling, normed) in [(None, false), (Some(scaling), false), (None, true), (Some(scaling), true)] {
        for (kv_heads, columns) in [(2, 24), (1, 16)] {
            let attention = Attention {
                rotary: Some(Rotary { base: 10.0, scaling }),
                qk_norm: normed.then(|| QkNorm { name: "heads".into(), eps: 1e-2 }),
                ..Attention::new(2, kv_heads, 8)
            };
            check_text(vec![linear("qkv", 8, columns), LayerSpec::Attention(attention)], 8);
        }
    }
    let attention =
        Attention { qk_norm: Some(QkNorm { name: "heads".into(), eps: 1e-2 }), ..Attention::new(4, 2, 8) };
    check_text(vec![linear("qkv", 8, 16), LayerSpec::Attention(attention)], 8);
}

/// Positions that begin anew, as learnt vectors and as what attention sees; rotated, and behind norms.
#[test]
fn documents_in_a_sequence() {
    let within = Some(&[0, 1, 0, 0, 1, 2][..]);
    let plain = LayerSpec::Attention(Attention::new(4, 2, 8));
    let layers = vec![positions(6), linear("qkv", 8, 16), plain];
    check_within(TEXT, text(layers, 8), 11, within);
    let turned = Attention {
        rotary: Some(Rotary { base: 10.0, scaling: None }),
        qk_norm: Some(QkNorm { name: "heads".into(), eps: 1e-2 }),
        ..Attention::new(4, 2, 8)
    };
    check_within(TEXT, text(vec![linear("qkv", 8, 16), LayerSpec::Attention(turned)], 8), 11, within);
}

/// Linear layers that run as one, side by side and as gated units: behind a norm, which makes their input again,
/// and behind a layer that does not; before an attention, a linear layer, an activation, and others like
/// themselves; with biases and without.
#[test]
fn joint_projections() {
    let plain = |name: &str, input, output| {
        let (name, order, init) = (name.to_owned(), WeightOrder::InOut, Init::Normal(0.5));
        LayerSpec::Linear(Linear { name, input, output, bias: false, order, init })
    };
    let concat = |widths: [usize; 3]| {
        let [q, k, v] = widths;
        let branches = vec![vec![linear("q", 8, q)], vec![plain("k", 8, k)], vec![linear("v", 8, v)]];
        LayerSpec::Branches(Branches { join: BranchJoin::Concat, branches })
    };
    let gated = |input, kind| {
        let gate = vec![plain("gate", input, 6), LayerSpec::Activation(kind)];
        let branches = vec![gate, vec![linear("up", input, 6)]];
        LayerSpec::Branches(Branches { join: BranchJoin::Product, branches })
    };
    let (gelu, silu) = (LayerSpec::Activation(Activation::Gelu), Activation::Silu);
    let attention =
        LayerSpec::Attention(Attention { rotary: Some(Rotary::new(10.0)), ..Attention::new(2, 1, 8) });
    for before in [rms_norm(), linear("before", 8, 8), gelu.clone()] {
        let behind = |layers: Vec<LayerSpec>| [before.clone()].into_iter().chain(layers).collect::<Vec<_>>();
        check_text(behind(vec![concat([8, 4, 4]), attention.clone(), plain("o", 8, 8)]), 8);
        check_text(behind(vec![concat([3, 5, 2]), gelu.clone(), linear("down", 10, 8)]), 8);
        check_text(behind(vec![gated(8, silu), linear("down", 6, 8)]), 8);
        check_text(behind(vec![gated(8, Activation::Gelu)]), 6);
    }
    let branch = vec![rms_norm(), gated(8, silu), linear("down", 6, 8)];
    check_text(vec![LayerSpec::Residual(Residual { branch, shortcut: vec![] })], 8);
    check_text(vec![rms_norm(), concat([2, 3, 4]), gated(9, silu), plain("down", 6, 8)], 8);
}

/// Two and three ways, empty ones among them, that are added, multiplied and put side by side; of sequences
/// and of images.
#[test]
fn branches_of_every_join() {
    for join in [BranchJoin::Sum, BranchJoin::Product, BranchJoin::Concat] {
        let ways = |count: usize| match count {
            2 => vec![
                vec![linear("gate", 8, 8), LayerSpec::Activation(Activation::Silu)],
                vec![linear("up", 8, 8)],
            ],
            _ => vec![
                vec![linear("a", 8, 8)],
                vec![],
                vec![LayerSpec::Dropout(Dropout { rate: 0.2, counted: None }), linear("b", 8, 8)],
            ],
        };
        for count in [2, 3] {
            let width = if join == BranchJoin::Concat { 8 * count } else { 8 };
            let branches = LayerSpec::Branches(Branches { join, branches: ways(count) });
            check_text(vec![rms_norm(), branches], width);
        }
        let ways = vec![
            vec![conv("a", 4, 4, 3, 1, 1), LayerSpec::Activation(Activation::Relu)],
            vec![conv("b", 4, 4, 1, 1, 0)],
        ];
        let width = if join == BranchJoin::Concat { 8 } else { 4 };
        check_image(vec![LayerSpec::Branches(Branches { join, branches: ways })], width);
    }
}

#[test]
fn dropout() {
    check_text(vec![LayerSpec::Dropout(Dropout { rate: 0.4, counted: None }), linear("middle", 8, 8)], 8);
}

#[test]
fn residual_with_and_without_a_shortcut() {
    let branch = || vec![LayerSpec::Activation(Activation::Silu), linear("branch", 8, 8)];
    check_text(vec![LayerSpec::Residual(Residual { branch: branch(), shortcut: vec![] })], 8);
    let shortcut = vec![linear("shortcut", 8, 8)];
    check_text(vec![LayerSpec::Residual(Residual { branch: branch(), shortcut })], 8);
}
