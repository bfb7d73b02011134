//! Activation bytes: what is kept of a micro-batch for its backward pass.
//!
//! The rule: a tensor between two layers (an *edge*) is kept if the layer after it saves its input or the
//! layer before it saves its output; each edge counts once, however many want it. What a layer saves it says
//! itself ([`SavedForBackward`](super::layer::SavedForBackward)). The input edge of branches is shared by all
//! of them, and their joined output is a new edge; where they are multiplied, what each gives is kept too,
//! unless a smooth activation made it. One kind of edge is made again instead, just before the backward pass
//! needs it: what a norm of rows or a smooth activation gives a linear layer, since that is a cheap function
//! of what the norm or the activation saves. Likewise what ReLU behind a batch norm gives a convolution.
//!
//! The model's [head](ModelSpec::head) runs together with the loss, so what it reads is kept until then,
//! whatever made it; its logits come and go in chunks, which are scratch space.
//!
//! With `recompute = "block"` every block but the model's last keeps its input edge alone, and its forward
//! runs again just before its backward: then its own edges are there, and those of the blocks behind it are
//! not any more. With `"attention"` the same holds of what stands [inside](super::recompute::AttentionSpan)
//! each attention, wherever it is.
//!
//! Where the gradients of weights are deferred (zero-bubble schedules), what they read is kept in turn
//! ([`GradientReads`](super::layer::GradientReads)): inputs of products, made again where need be, and
//! gradients of outputs. A backward pass that defers them lets go of the one while it takes in the other, so
//! its peak is found by going through it layer by layer (`steps`).

mod steps;

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{LayerSpec, ModelSpec, RecomputeMode, ShapeError};
use steps::{ActivationStep, ActivationWalk, Flow, LiveActivations, SavedTensor};

/// What weights, gradients and activations are stored in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 32 bits.
    #[default]
    F32,
    /// The upper 16 bits of an f32; the optimizer keeps a master copy in f32.
    Bf16,
}

impl Precision {
    /// As the run file writes it.
    pub fn name(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
        }
    }

    /// Bytes of one element.
    pub fn size(self) -> u64 {
        match self {
            Precision::F32 => 4,
            Precision::Bf16 => 2,
        }
    }
}

/// What a stage of a model keeps of a micro-batch, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageActivations {
    /// From its forward pass to its backward pass.
    pub kept: u64,
    /// The most in the course of the backward pass, at whose beginning it is `kept`.
    pub backward: u64,
    /// The same where the gradients of weights are deferred,
    pub backward_input: u64,
    /// and what is kept until they are made.
    pub deferred: u64,
}

impl ModelSpec {
    /// The most bytes that one micro-batch of `samples` keeps for its backward pass, or in it.
    pub(crate) fn activation_bytes(
        &self,
        samples: usize,
        precision: Precision,
        recompute: RecomputeMode,
    ) -> Result<u64, ShapeError> {
        let all_blocks = std::iter::once(0..self.blocks.len());
        let stages = self.stage_activations(all_blocks, samples, precision, recompute)?;
        Ok(stages[0].backward)
    }

    /// What each of some ranges of consecutive blocks keeps of one micro-batch of `samples`.
    pub fn stage_activations(
        &self,
        stages: impl IntoIterator<Item = Range<usize>>,
        samples: usize,
        precision: Precision,
        recompute: RecomputeMode,
    ) -> Result<Vec<StageActivations>, ShapeError> {
        let flows = self.flows(samples as u64)?;
        let of_stage = |blocks: Range<usize>| {
            let stage = StageSteps::new(self, blocks, &flows, ActivationWalk::new(precision, recompute));
            let kept = stage.forward();
            let (full, split) = (stage.backward(kept.clone(), false), stage.backward(kept.clone(), true));
            StageActivations {
                kept: kept.now,
                backward: full.most,
                backward_input: split.most,
                deferred: split.now,
            }
        };
        Ok(stages.into_iter().map(of_stage).collect())
    }

    /// What a micro-batch of so many samples is like before each block.
    fn flows(&self, samples: u64) -> Result<Vec<Flow>, ShapeError> {
        let all = samples;
        let flows = self.borders()?.into_iter().zip(self.samples_at_borders(all));
        Ok(flows.map(|(shape, samples)| Flow { shape, samples, all }).collect())
    }

    /// The layers of a block, without what ends the model.
    pub(super) fn layers_before_head(&self, block: usize) -> &[LayerSpec] {
        let layers = &self.blocks[block].layers;
        let head = block + 1 == self.blocks.len() && self.head().is_some();
        &layers[..layers.len() - usize::from(head)]
    }
}

/// A stage of a model, as its passes go through it.
struct StageSteps {
    steps: Vec<ActivationStep>,
    /// What the loss is made from, where the model ends here.
    read: Option<SavedTensor>,
    /// Whether a weight makes it, whose gradient can be deferred.
    has_head: bool,
}

impl StageSteps {
    fn new(model: &ModelSpec, blocks: Range<usize>, flows: &[Flow], walk: ActivationWalk) -> StageSteps {
        let last = model.blocks.len() - 1;
        let layers: Vec<_> = blocks.clone().map(|block| model.layers_before_head(block)).collect();
        let remakes = |recompute: RecomputeMode, i: usize| recompute.remakes(blocks.start + i, last);
        let (steps, read) = walk.blocks(&layers, flows[blocks.start], remakes);
        StageSteps {
            steps,
            read: Some(read).filter(|_| blocks.contains(&last)),
            has_head: model.head().is_some(),
        }
    }

    /// What is kept behind the forward pass.
    fn forward(&self) -> LiveActivations {
        let mut live = LiveActivations::default();
        live.forward(&self.steps);
        live.save(self.read.as_slice());
        live
    }

    /// What is left behind the backward pass, and the most in its course.
    fn backward(&self, mut live: LiveActivations, deferred: bool) -> LiveActivations {
        live.release(self.read.as_slice());
        if deferred && self.has_head {
            live.save(self.read.as_slice());
        }
        live.backward(&self.steps, deferred);
        live
    }
}

#[cfg(test)]
mod tests {
    use super::super::presets::*;
    use super::super::{Activation, BatchNorm, BlockSpec, Conv, Init, Input, NORM_EPS, Residual};
    use super::*;

    fn bytes(model: &ModelSpec, samples: usize, recompute: RecomputeMode) -> u64 {
        model.activation_bytes(samples, Precision::F32, recompute).unwrap()
    }

    fn conv(name: &str, input: usize, output: usize) -> LayerSpec {
        let (name, padding, init) = (name.into(), 0.into(), Init::Constant(1.0));
        LayerSpec::Conv(Conv { name, input, output, kernel: 1, stride: 1, padding, bias: false, init })
    }

    fn norm(channels: usize) -> LayerSpec {
        let name = format!("n{channels}");
        LayerSpec::BatchNorm(BatchNorm { name, channels, scale: 1.0, group: 0, eps: NORM_EPS })
    }

    /// A model of one block that reads an image of 2 x 2.
    fn of_block(layers: Vec<LayerSpec>, classes: usize) -> ModelSpec {
        let input = Input::Image { height: 2, width: 2, channels: 1 };
        let blocks = vec![BlockSpec { name: "only".into(), layers }];
        ModelSpec { name: "by-hand".into(), input, blocks, classes }
    }

    /// By hand: image (conv1 saves it), relu1 12x12x32 (conv2), and the vector of 1024 that a flatten makes
    /// of relu2 (head); and a byte for each output of both pools. Not kept: what the pools read, and relu2.
    #[test]
    fn simple_cnn_by_hand() {
        let (edges, places) = (28 * 28 + 12 * 12 * 32 + 1024, 12 * 12 * 32 + 4 * 4 * 64);
        assert_eq!(bytes(&simple_cnn((28, 28, 1), 10), 3, RecomputeMode::None), 3 * (4 * edges + places));
    }

    /// By hand, per token in f32: ids 1; layer: ln_1 input w + 2, qkv 3w, attention output w and a number a
    /// head, ln_2 input w + 2, gelu input 4w; ln_f input w + 2, head input w. What the token embedding gives
    /// the position embedding is not kept, and what the norms and gelu give the linear layers in a block is
    /// made again.
    #[test]
    fn gpt_by_hand() {
        let (w, h, s, v) = (8, 2, 4, 16);
        let shape = Gpt { layers: 2, width: w, heads: h, context: s, vocab: v, ..Gpt::default() };
        let model = gpt("gpt", &shape);
        let layer = w + 2 + 3 * w + w + h + w + 2 + 4 * w;
        let head = w + 2 + w;
        assert_eq!(bytes(&model, 5, RecomputeMode::None), (5 * 4 * s * (1 + 2 * layer + head)) as u64);
        // Recomputing: the inputs of embedding and two layers, and all of the head's; then, as the second
        // layer runs again, its own edges behind the inputs of the embedding and of both layers.
        let bytes_of = |recompute| {
            let all_blocks = std::iter::once(0..model.blocks.len());
            model.stage_activations(all_blocks, 5, Precision::F32, recompute).unwrap()[0]
        };
        let again = bytes_of(RecomputeMode::Block);
        assert_eq!(again.kept, (5 * 4 * s * (1 + 2 * w + head)) as u64);
        assert_eq!(again.backward, (5 * 4 * s * (1 + w + layer)) as u64);
        // Deferred, of a layer: both norms' inputs, statistics, outputs made again and their gradients; the
        // gradients of queries, keys and values; attention's output; the gradients of both sums; gelu's
        // output and the gradient of its input. Of the embeddings: ids and one gradient. Of the head: what it
        // reads, and ln_f's input, statistics and gradient.
        let deferred =
            2 * (2 * (w + 2 + w + w) + 3 * w + w + 2 * w + 4 * w + 4 * w) + 1 + w + (w + w + 2 + w);
        // The gradient of the last layer's output, and of the first's input, are counted once.
        assert_eq!(bytes_of(RecomputeMode::None).deferred, (5 * 4 * s * deferred) as u64);
        assert_eq!(again.deferred, bytes_of(RecomputeMode::None).deferred, "whatever was made twice");
        // Attention's inside again: a layer keeps the inputs of both norms, the second's statistics, and
        // gelu's input; the last one runs again behind all the others' and its own.
        let attention = bytes_of(RecomputeMode::Attention);
        let outside = w + w + 2 + 4 * w;
        assert_eq!(attention.kept, (5 * 4 * s * (1 + 2 * outside + head)) as u64);
        // What the second half of that layer kept, and the head, is gone by then: the beginning of the
        // backward pass is the peak, until the widths of attention are more than those of the perceptron.
        let inside = (2 + 3 * w + w + h) as i64 - (2 * w + 2 + 4 * w + 2 + w) as i64;
        assert_eq!(attention.backward as i64, attention.kept as i64 + (5 * 4 * s) as i64 * inside.max(0));
        assert_eq!(attention.deferred, again.deferred, "whatever was made twice");
        // In bf16 the ids and the statistics keep four bytes.
        let four = 1 + 2 * (4 + h) + 2;
        let two = 2 * (layer - 4 - h) + head - 2;
        let half = model.activation_bytes(5, Precision::Bf16, RecomputeMode::None).unwrap();
        assert_eq!(half, (5 * s * (4 * four + 2 * two)) as u64);
    }

    /// The input of a projecting residual is shared: counted once although two convolutions save it.
    #[test]
    fn a_shared_edge_counts_once_and_channel_statistics_do_not_grow_with_the_batch() {
        let shortcut = vec![conv("b", 1, 1), norm(1)];
        let both = LayerSpec::Residual(Residual { branch: vec![conv("a", 1, 1)], shortcut });
        let model = of_block(vec![both, LayerSpec::GlobalAvgPool], 1);
        // The input (4), the norm's input (4), the logits (1); and two statistics for the batch.
        assert_eq!(bytes(&model, 1, RecomputeMode::None), 4 * (4 + 4 + 1 + 2));
        assert_eq!(bytes(&model, 7, RecomputeMode::None), 4 * (7 * (4 + 4 + 1) + 2));
    }

    /// By hand: the image (conv a), a's 2 x 2 x 3 (norm), the norm's six statistics, b's 2 x 2 x 5 (second
    /// norm) and its ten, ReLU's 2 x 2 x 5 behind that (no convolution follows), the logits' input. Not kept:
    /// what the first ReLU gives b.
    #[test]
    fn what_relu_behind_a_batch_norm_gives_a_convolution_is_made_again() {
        let relu = LayerSpec::Activation(Activation::Relu);
        let first = [conv("a", 1, 3), norm(3), relu.clone()];
        let second = [conv("b", 3, 5), norm(5), relu, LayerSpec::GlobalAvgPool];
        let model = of_block(first.into_iter().chain(second).collect(), 5);
        let edges = 4 + 4 * 3 + 4 * 5 + 4 * 5 + 5;
        assert_eq!(bytes(&model, 7, RecomputeMode::None), 4 * (7 * edges + 6 + 10));
        // Deferred: the image and a's gradient; b's input made again, and its gradient.
        let all_blocks = std::iter::once(0..1);
        let stages = model.stage_activations(all_blocks, 7, Precision::F32, RecomputeMode::None).unwrap();
        assert_eq!(stages[0].deferred, 4 * 7 * (4 + 4 * 3 + 4 * 3 + 4 * 5));
    }

    #[test]
    fn recomputing_never_keeps_more_than_all_edges_and_helps_deep_models() {
        let model = gpt("gpt2-124m", &Gpt::preset("gpt2-124m").unwrap());
        assert!(bytes(&model, 1, RecomputeMode::Block) * 3 < bytes(&model, 1, RecomputeMode::None));
    }
}
