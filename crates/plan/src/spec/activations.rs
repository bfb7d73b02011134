//! Activation bytes: what the forward pass keeps for the backward pass.
//!
//! The rule: a tensor between two layers (an *edge*) is kept if the layer after it saves its input or the layer
//! before it saves its output; each edge counts once, however many want it. What a layer saves it says itself
//! ([`Saves`](super::layer::Saves)). The input edge of branches is shared by all of them, and their joined output is a new edge; where
//! they are multiplied, what each gives is kept too, unless a smooth activation made it. One kind of edge is
//! made again instead, just before the backward pass needs it: what a norm of rows or a smooth activation gives a linear
//! layer, since that is a cheap function of what the norm or the activation saves.
//!
//! The model's [head](Model::head) runs together with the loss, so what it reads is kept until then, whatever made it;
//! its logits come and go in chunks, which are scratch space.
//!
//! With `recompute = "block"` only the input edge of every block stays; the backward pass runs one block's forward
//! again, so that one block's own edges (and what the head reads, in the last) exist at a time: the largest counts.

use std::ops::Range;

use serde::Serialize;

use super::shape::Shape;
use super::{Entry, Layer, Model, Move, ShapeError};

/// What weights, gradients and activations are stored in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
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

/// What is computed twice to save memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// Every block but the last runs its forward again just before its backward.
    Block,
}

/// Whether the edge between two layers is made again rather than kept.
fn remade(from: &Layer, to: &Layer) -> bool {
    from.entry().remakes_output() && to.entry().takes_remade()
}

/// Whether the edges on both sides of a layer are one: an exchange whose result is its input, or is gathered again when a linear
/// layer's gradient needs it.
fn is_entrance(layer: &Layer, next: Option<&Layer>) -> bool {
    match layer {
        Layer::Exchange(exchange) if exchange.forward == Move::Nothing => true,
        // What comes from neighbours is kept beside the tile, as what it is: a message.
        Layer::Halo(_) => matches!(next, Some(Layer::Conv(_))),
        Layer::Exchange(exchange) => {
            exchange.is_entrance() && next.is_some_and(|next| next.entry().takes_remade())
        }
        _ => false,
    }
}

/// Bytes of one micro-batch, gathered during a walk.
struct Tally {
    samples: u64,
    precision: Precision,
    bytes: u64,
}

impl Tally {
    fn edge_bytes(&self, shape: Shape) -> u64 {
        let size = if matches!(shape, Shape::Tokens { .. }) { 4 } else { self.precision.size() };
        shape.elements().saturating_mul(size).saturating_mul(self.samples)
    }

    fn add_edge(&mut self, shape: Shape, kept: bool) {
        if kept {
            self.bytes = self.bytes.saturating_add(self.edge_bytes(shape));
        }
    }

    /// Adds what stands inside a chain of layers: its inner edges and its layers' statistics, not its two ends.
    fn chain(&mut self, layers: &[Layer], input: Shape) -> Result<Ends, String> {
        let mut ends = Ends { input: false, output: false, shape: input };
        // The last layer that made something, and the shape of what it made.
        let (mut before, mut edge): (Option<&Layer>, Shape) = (None, input);
        for (i, layer) in layers.iter().enumerate() {
            if is_entrance(layer, layers.get(i + 1)) {
                ends.shape = layer.output(ends.shape)?;
                continue;
            }
            let wants = self.layer(layer, ends.shape)?;
            match before {
                None => ends.input = wants.input,
                Some(before) => {
                    self.add_edge(edge, ends.output || (wants.input && !remade(before, layer)));
                }
            }
            ends.output = wants.output;
            ends.shape = wants.shape;
            (before, edge) = (Some(layer), wants.shape);
        }
        Ok(ends)
    }

    fn layer(&mut self, layer: &Layer, input: Shape) -> Result<Ends, String> {
        if let Some(sides) = layer.entry().sides() {
            let reads = sides.join.reads_outputs();
            let (mut wanted, mut shapes) = (false, Vec::with_capacity(sides.all.len()));
            for side in &sides.all {
                let ends = self.chain(side.layers, input)?;
                // What a way gives is an edge too, which ends inside the layer. An empty way is the input edge itself, and what a
                // smooth activation gives a product is made again.
                match side.layers.last() {
                    None => wanted |= reads,
                    Some(Layer::Activation(last)) if last.remakes_output() => {}
                    Some(_) => self.add_edge(ends.shape, ends.output || reads),
                }
                wanted |= ends.input;
                shapes.push(ends.shape);
            }
            return Ok(Ends { input: wanted, output: false, shape: sides.meet(&shapes)? });
        }
        let wants = layer.entry().saves(input, self.samples);
        self.bytes = self.bytes.saturating_add(wants.numbers.saturating_mul(4));
        Ok(Ends { input: wants.input, output: wants.output, shape: layer.output(input)? })
    }
}

/// What a layer or a chain wants of the edges at its two ends, and the shape of the second.
#[derive(Clone, Copy)]
struct Ends {
    input: bool,
    output: bool,
    shape: Shape,
}

/// What a part of a model keeps of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartActivations {
    /// From its forward pass to its backward pass.
    pub kept: u64,
    /// In the backward pass alone, where blocks are recomputed.
    pub again: u64,
}

impl Model {
    /// Bytes that the forward pass of one micro-batch of `samples` keeps for the backward pass.
    pub fn activation_bytes(
        &self,
        samples: usize,
        precision: Precision,
        recompute: Recompute,
    ) -> Result<u64, ShapeError> {
        let whole = std::iter::once(0..self.blocks.len());
        let parts = self.part_activations(whole, samples, precision, recompute)?;
        Ok(parts.iter().fold(0, |n: u64, part| n.saturating_add(part.kept).saturating_add(part.again)))
    }

    /// What each of some ranges of consecutive blocks keeps of one micro-batch of `samples`.
    pub fn part_activations(
        &self,
        parts: impl IntoIterator<Item = Range<usize>>,
        samples: usize,
        precision: Precision,
        recompute: Recompute,
    ) -> Result<Vec<PartActivations>, ShapeError> {
        let borders = self.borders()?;
        let tally = || Tally { samples: samples as u64, precision, bytes: 0 };
        Ok(parts.into_iter().map(|part| self.kept_by(part, &borders, tally(), recompute)).collect())
    }

    /// What one part keeps, given the shapes at the borders of all blocks.
    fn kept_by(
        &self,
        part: Range<usize>,
        borders: &[Shape],
        mut tally: Tally,
        recompute: Recompute,
    ) -> PartActivations {
        // What the part before keeps of its output is on another rank.
        let mut edge = Ends { input: false, output: false, shape: borders[part.start] };
        // Edges between blocks; each block's own. Both end in what the head reads.
        let (mut between, mut own) = (0u64, Vec::new());
        for i in part.clone() {
            let block = &self.blocks[i];
            let is_last = i + 1 == self.blocks.len();
            let head = usize::from(is_last && self.head().is_some());
            let layers = &block.layers[..block.layers.len() - head];
            if block.layers.is_empty() {
                continue;
            }
            tally.bytes = 0;
            let ends = tally.chain(layers, edge.shape).expect("the shapes were checked");
            own.push(tally.bytes);
            // A block of the head alone has one edge: what the head reads.
            let kept = !layers.is_empty() && (recompute == Recompute::Block || edge.output || ends.input);
            between = between.saturating_add(if kept { tally.edge_bytes(edge.shape) } else { 0 });
            edge = ends;
        }
        if part.end == self.blocks.len() {
            if let Some(last) = own.last_mut() {
                *last = last.saturating_add(tally.edge_bytes(edge.shape));
            }
        } else if edge.output && !part.is_empty() {
            between = between.saturating_add(tally.edge_bytes(edge.shape));
        }
        let sum = own.iter().fold(0, |n: u64, &b| n.saturating_add(b));
        match recompute {
            Recompute::None => PartActivations { kept: between.saturating_add(sum), again: 0 },
            Recompute::Block => PartActivations { kept: between, again: own.into_iter().max().unwrap_or(0) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::presets::*;
    use super::super::{BatchNorm, Conv, NORM_EPS, Residual};
    use super::*;

    fn bytes(model: &Model, samples: usize, recompute: Recompute) -> u64 {
        model.activation_bytes(samples, Precision::F32, recompute).unwrap()
    }

    /// By hand: image (conv1 saves it), relu1 24x24x32, pool1 12x12x32 (conv2), relu2 8x8x64, the vector of 1024
    /// (head). Not kept: what a conv gives its relu, and pool2, which a flatten takes.
    #[test]
    fn simple_cnn_by_hand() {
        let edges = 28 * 28 + 24 * 24 * 32 + 12 * 12 * 32 + 8 * 8 * 64 + 1024;
        assert_eq!(bytes(&simple_cnn((28, 28, 1), 10), 3, Recompute::None), 3 * 4 * edges);
    }

    /// By hand, per token in f32: ids 1; layer: ln_1 input w + 2, qkv 3w, attention output w and a number a head, ln_2
    /// input w + 2, gelu input 4w; ln_f input w + 2, head input w. What the token embedding gives the position embedding is
    /// not kept, and what the norms and gelu give the linear layers in a block is made again.
    #[test]
    fn gpt_by_hand() {
        let (w, h, s, v) = (8, 2, 4, 16);
        let shape = Gpt { layers: 2, width: w, heads: h, context: s, vocab: v, ..Gpt::default() };
        let model = gpt("gpt", &shape);
        let layer = w + 2 + 3 * w + w + h + w + 2 + 4 * w;
        let head = w + 2 + w;
        assert_eq!(bytes(&model, 5, Recompute::None), (5 * 4 * s * (1 + 2 * layer + head)) as u64);
        // Recomputing: the inputs of embedding, two layers and head; then the larger of a layer's own and the head's.
        let largest = (layer - w).max(head - w);
        assert_eq!(bytes(&model, 5, Recompute::Block), (5 * 4 * s * (1 + 3 * w + largest)) as u64);
        // In bf16 the ids and the statistics keep four bytes.
        let four = 1 + 2 * (4 + h) + 2;
        let two = 2 * (layer - 4 - h) + head - 2;
        let half = model.activation_bytes(5, Precision::Bf16, Recompute::None).unwrap();
        assert_eq!(half, (5 * s * (4 * four + 2 * two)) as u64);
    }

    /// The input of a projecting residual is shared: counted once although two convolutions save it.
    #[test]
    fn a_shared_edge_counts_once_and_channel_statistics_do_not_grow_with_the_batch() {
        let conv = |name: &str| {
            Layer::Conv(Conv {
                name: name.into(),
                input: 1,
                output: 1,
                kernel: 1,
                stride: 1,
                padding: 0.into(),
                bias: false,
                init: super::super::Init::Constant(1.0),
            })
        };
        let norm = Layer::BatchNorm(BatchNorm {
            name: "n".into(),
            channels: 1,
            scale: 1.0,
            group: 0,
            eps: NORM_EPS,
        });
        let both = Layer::Residual(Residual { branch: vec![conv("a")], shortcut: vec![conv("b"), norm] });
        let model = Model {
            name: "shared".into(),
            input: super::super::Input::Image { height: 2, width: 2, channels: 1 },
            blocks: vec![super::super::Block {
                name: "only".into(),
                layers: vec![both, Layer::GlobalAvgPool],
            }],
            classes: 1,
        };
        // The input (4), the norm's input (4), the logits (1); and two statistics for the batch.
        assert_eq!(bytes(&model, 1, Recompute::None), 4 * (4 + 4 + 1 + 2));
        assert_eq!(bytes(&model, 7, Recompute::None), 4 * (7 * (4 + 4 + 1) + 2));
    }

    #[test]
    fn recomputing_never_keeps_more_than_all_edges_and_helps_deep_models() {
        let model = gpt("gpt2-124m", &Gpt::preset("gpt2-124m").unwrap());
        assert!(bytes(&model, 1, Recompute::Block) * 3 < bytes(&model, 1, Recompute::None));
    }
}
