//! What is computed twice to save memory: nothing, attention's inside, or blocks, all or some of them.
//!
//! Korthikanti et al. 2022 make again what attention keeps alone, since that is large and cheap. Their
//! kernels kept matrices of positions by positions; ours keep none, so what is left is the path from the norm
//! to what attention gives: queries, keys, values and output, four of the ten widths that a layer of a GPT
//! keeps of each token, for the product that makes three of them and for attention itself.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{AttentionRole, Branches, LayerSpec, ModelSpec};

/// What is computed twice to save memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecomputeMode {
    /// Everything that backward needs is kept.
    #[default]
    None,
    /// Every attention, and what gives it queries, keys and values, run again just before attention's backward.
    Attention,
    /// Every block but the last runs its forward again just before its backward.
    Block,
    /// So many of these blocks.
    #[serde(untagged)]
    Blocks(usize),
}

impl RecomputeMode {
    /// Whether a block runs its forward again, in a model whose last block is number `last`. Some blocks are
    /// spread evenly, so that every stage of a pipeline has its fraction of them; they begin with the second,
    /// since the first is an embedding that there is nothing to save of.
    pub fn remakes(self, block: usize, last: usize) -> bool {
        block < last
            && match self {
                RecomputeMode::None | RecomputeMode::Attention => false,
                RecomputeMode::Block => true,
                RecomputeMode::Blocks(number) => (block + last - 1) * number % last < number,
            }
    }
}

/// As `--layout` takes it.
impl fmt::Display for RecomputeMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RecomputeMode::None => f.write_str("none"),
            RecomputeMode::Attention => f.write_str("attention"),
            RecomputeMode::Block => f.write_str("block"),
            RecomputeMode::Blocks(number) => number.fmt(f),
        }
    }
}

impl ModelSpec {
    /// Whether there is an attention whose inside can run again.
    pub fn attends(&self) -> bool {
        let mut attends = false;
        self.for_each(&mut |layer| attends |= is(AttentionRole::Core, layer));
        attends
    }
}

/// An attention in a row of layers, with what is run again for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttentionSpan {
    /// The norm, what ranks do behind it, the linear layers, and attention: of these as many as stand there.
    pub again: Range<usize>,
    /// The index behind the linear layer that reads what attention gives, and so need not keep it; where
    /// there is none, behind attention.
    pub read: usize,
}

/// The attentions of a row of layers, without those in layers of it.
pub fn attention_spans(layers: &[LayerSpec]) -> Vec<AttentionSpan> {
    let is_attention = |index: &usize| is(AttentionRole::Core, &layers[*index]);
    let again: Vec<Range<usize>> =
        (0..layers.len()).filter(is_attention).map(|index| first(layers, index)..index + 1).collect();
    let inside = |(i, span): (usize, &Range<usize>)| {
        let next = again.get(i + 1).map_or(layers.len(), |next| next.start);
        let read = span.end + reader(&layers[span.end..next]);
        AttentionSpan { again: span.clone(), read }
    };
    again.iter().enumerate().map(inside).collect()
}

/// The first layer that is run again for the attention at an index.
fn first(layers: &[LayerSpec], attention: usize) -> usize {
    let mut at = attention;
    let mut goes_back = |over: fn(&LayerSpec) -> bool| {
        let does = at > 0 && over(&layers[at - 1]);
        at -= usize::from(does);
        does
    };
    goes_back(gathers);
    if goes_back(|layer| is(AttentionRole::Projects, layer)) {
        goes_back(enters);
        goes_back(|layer| is(AttentionRole::Norms, layer));
    }
    at
}

fn is(role: AttentionRole, layer: &LayerSpec) -> bool {
    layer.properties().attention_role == role
}

/// Whether a layer brings together keys and values that one linear layer makes on several ranks.
fn gathers(layer: &LayerSpec) -> bool {
    matches!(layer, LayerSpec::Branches(Branches { branches, .. }) if matches!(branches[0][..], [LayerSpec::FeatureSlice(_)]))
}

fn enters(layer: &LayerSpec) -> bool {
    matches!(layer, LayerSpec::Collective(collective) if collective.is_entrance())
}

/// How many of the layers behind an attention end in the one that reads it: none, or a linear layer and what
/// ranks do before.
fn reader(behind: &[LayerSpec]) -> usize {
    match behind {
        [linear, ..] if linear.properties().takes_remade => 1,
        [collective, linear, ..] if enters(collective) && linear.properties().takes_remade => 2,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::super::presets::{Gpt, gpt};
    use super::super::{Activation, Attention, BranchJoin, Branches, Init, Linear, Residual, WeightOrder};
    use super::*;

    fn linear(name: &str) -> LayerSpec {
        let (name, order) = (name.to_owned(), WeightOrder::InOut);
        LayerSpec::Linear(Linear { name, input: 8, output: 8, bias: false, order, init: Init::Constant(1.0) })
    }

    /// As many as are asked for, and in every half of a model half of them, give or take one.
    #[test]
    fn some_blocks_are_spread_evenly() {
        let remade = |number: usize, blocks: Range<usize>, last: usize| {
            blocks.filter(|block| RecomputeMode::Blocks(number).remakes(*block, last)).count()
        };
        for last in 1..40 {
            for number in 1..=last {
                assert_eq!(remade(number, 0..last + 1, last), number, "{number} of {last}");
                let half = remade(number, 0..last / 2, last);
                assert!((2 * half).abs_diff(number) <= 3, "{half} of {number} in half of {last}");
            }
        }
    }

    #[test]
    fn what_runs_again_goes_from_the_norm_to_attention() {
        let shape = Gpt { layers: 1, ..Gpt::default() };
        let model = gpt("gpt", &shape);
        let LayerSpec::Residual(Residual { branch, .. }) = &model.blocks[1].layers[0] else {
            panic!("a residual")
        };
        assert_eq!(attention_spans(branch), [AttentionSpan { again: 0..3, read: 4 }]);
        assert_eq!(attention_spans(&model.blocks[1].layers), [], "those in residuals are theirs");
    }

    #[test]
    fn a_layer_between_two_attentions_belongs_to_the_second() {
        let attention = || LayerSpec::Attention(Attention::new(1, 1, 8));
        let smooth = || LayerSpec::Activation(Activation::Gelu);
        let row = [linear("a"), smooth(), linear("b"), attention(), linear("c"), attention(), smooth()];
        let insides = attention_spans(&row);
        assert_eq!(insides, [AttentionSpan { again: 2..4, read: 4 }, AttentionSpan { again: 4..6, read: 6 }]);
        // Attention alone, where something else stands before it.
        assert_eq!(attention_spans(&[smooth(), attention()]), [AttentionSpan { again: 1..2, read: 2 }]);
        let branches = vec![vec![linear("q")], vec![linear("k"), smooth()]];
        let wide = LayerSpec::Branches(Branches { join: BranchJoin::Concat, branches });
        assert_eq!(
            attention_spans(&[wide, attention(), linear("o")]),
            [AttentionSpan { again: 0..2, read: 3 }]
        );
    }
}
