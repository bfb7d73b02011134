//! What flows between layers: tensors that no backward pass waits for. They come and go within a pass, so
//! what counts is the most at one time, which is in the backward of one layer: the gradients of what it gave
//! and of what it read, what it had made again for the linear layer behind it, and the gradient that waits at
//! the end of the residual around it.
//!
//! Logits come and go in chunks, which are scratch space. An estimate, held against what the ledger measures:
//! for a GPT it is the gelu's 4 + 4 + 4 + 1 widths, to the byte.

use super::shape::Shape;
use super::{LayerBranch, LayerSpec, ModelSpec, ShapeError};

impl ModelSpec {
    /// The most elements of one sample that flow between the layers of each block.
    pub(crate) fn transient_elements(&self) -> Result<Vec<u64>, ShapeError> {
        let borders = self.borders()?;
        let blocks = (0..self.blocks.len()).zip(borders);
        Ok(blocks.map(|(block, shape)| most(self.layers_before_head(block), shape, 0)).collect())
    }
}

/// Of a row of layers, beside so many elements that wait outside.
fn most(layers: &[LayerSpec], mut shape: Shape, outside: u64) -> u64 {
    let mut found = 0;
    for (i, layer) in layers.iter().enumerate() {
        let output = layer.output(shape).expect("the shapes were checked");
        let within = match layer.description().branches() {
            // A gated unit: the gradients of both halves, of what it gave, and that made again.
            Some(branches) if layer.properties().remakes_output => {
                let half = |branch: &LayerBranch<'_>| {
                    branch.layers[0].output(shape).expect("the shapes were checked").elements()
                };
                outside + branches.all.iter().map(half).sum::<u64>() + 2 * output.elements()
            }
            Some(branches) => {
                let beside = outside + output.elements();
                branches.all.iter().map(|branch| most(branch.layers, shape, beside)).max().unwrap_or(0)
            }
            None => {
                let takes_again = layers.get(i + 1).is_some_and(|next| next.properties().takes_remade);
                let again =
                    if takes_again && layer.properties().remakes_output { output.elements() } else { 0 };
                outside + shape.elements() + output.elements() + again
            }
        };
        found = found.max(within);
        shape = output;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::presets::{Gpt, gpt};

    /// As measured on a processor and on a GPU, in both precisions.
    #[test]
    fn a_gpt_has_thirteen_widths() {
        let shape = Gpt { layers: 2, width: 128, heads: 4, context: 64, vocab: 256, ..Gpt::default() };
        let blocks = gpt("gpt", &shape).transient_elements().unwrap();
        assert_eq!(blocks[1..3], [13 * 64 * 128; 2]);
        assert!(blocks[3] < 13 * 64 * 128, "logits are not among them: {blocks:?}");
    }
}
