//! Room for what ranks exchange between two layers: a message of several ranks' parts lies beside the tensor that it is made of, or
//! becomes, while it travels.

use super::shape::Shape;
use super::{Along, Exchange, Layer, Model, Move, ShapeError};

impl Model {
    /// The most elements of a message within each block, forward or backward, in a pass of so many samples.
    pub fn message_elements(&self, samples: usize) -> Result<Vec<u64>, ShapeError> {
        let borders = self.borders()?;
        let blocks = self.blocks.iter().zip(borders);
        Ok(blocks.map(|(block, shape)| most(&block.layers, shape, samples as u64)).collect())
    }
}

/// Of a row of layers.
fn most(layers: &[Layer], mut shape: Shape, samples: u64) -> u64 {
    let mut found = 0;
    for layer in layers {
        let output = layer.output(shape).expect("the shapes were checked");
        let own = match (layer, layer.entry().sides()) {
            (_, Some(sides)) => {
                sides.all.iter().map(|side| most(side.layers, shape, samples)).max().unwrap_or(0)
            }
            (Layer::Exchange(exchange), None) => {
                let room = |how, shape| elements(exchange, how, shape, samples);
                room(exchange.forward, shape).max(room(exchange.backward, output))
            }
            _ => 0,
        };
        found = found.max(own);
        shape = output;
    }
    found
}

/// Of one move of a tensor of that shape: parts of all ranks, each as large as the largest.
fn elements(exchange: &Exchange, how: Move, shape: Shape, samples: u64) -> u64 {
    let (Move::Gather(along) | Move::ReduceScatter(along)) = how else { return 0 };
    let ranks = exchange.ranks() as u64;
    let parts = ranks * exchange.parts.iter().copied().max().unwrap_or(0) as u64;
    let width = shape.last() as u64;
    match along {
        Along::Samples => samples.next_multiple_of(ranks) * shape.elements(),
        Along::Sequence => samples * parts * width,
        Along::Last => samples * shape.rows() * parts,
    }
}
