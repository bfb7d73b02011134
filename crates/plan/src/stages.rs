//! A model cut into parts: ranges of its blocks, of about equal cost.

use std::ops::Range;

use crate::config::{Error, RunFile};
use crate::spec::{Layer, Model, Shape};

/// The blocks of each part, in order; one part without a pipeline.
pub type Parts = Vec<Range<usize>>;

/// Cuts a model for the pipeline of a run file, where the file says, or so that the costliest part costs least.
pub fn parts(model: &Model, run: &RunFile) -> Result<Parts, Error> {
    let blocks = model.blocks.len();
    let Some(pipeline) = &run.parallel.pipeline else { return Ok(std::iter::once(0..blocks).collect()) };
    if pipeline.stages > blocks {
        let problem = format!("is {}, but the model {} has {blocks} blocks", pipeline.stages, model.name);
        return Err(Error::Conflict { field: "parallel.pipeline".into(), problem });
    }
    let schedule = pipeline.schedule(run.train.micro_batches, 1)?;
    if pipeline.cut.is_empty() {
        return Ok(balanced(&costs(model, run)?, schedule.placement.parts()));
    }
    if let Some(beyond) = pipeline.cut.iter().find(|block| **block >= blocks) {
        let problem = format!("names block {beyond}, but the last of {}'s is {}", model.name, blocks - 1);
        return Err(Error::Conflict { field: "parallel.cut".into(), problem });
    }
    let ends = pipeline.cut.iter().copied().chain([blocks]);
    Ok(ends.scan(0, |start, end| Some(std::mem::replace(start, end)..end)).collect())
}

/// What a block costs in time, and then in memory.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
struct Cost {
    flops: f64,
    bytes: f64,
}

impl Cost {
    const NONE: Cost = Cost { flops: 0.0, bytes: 0.0 };

    fn plus(self, other: Cost) -> Cost {
        Cost { flops: self.flops + other.flops, bytes: self.bytes + other.bytes }
    }

    fn most(self, other: Cost) -> Cost {
        Cost { flops: self.flops.max(other.flops), bytes: self.bytes.max(other.bytes) }
    }
}

/// Flops of each block for a sample, and the bytes of its parameters with their state.
fn costs(model: &Model, run: &RunFile) -> Result<Vec<Cost>, Error> {
    let each = (2 * run.train.precision.size() + run.optimizer_bytes()) as f64;
    let bytes = model.blocks.iter().map(|block| {
        let mut elements = 0;
        block.layers.iter().for_each(|layer| {
            layer.for_each(&mut |layer| {
                elements += layer.parameters().iter().map(|p| p.elements()).sum::<u64>()
            });
        });
        each * elements as f64
    });
    Ok(model.block_flops(1)?.into_iter().zip(bytes).map(|(flops, bytes)| Cost { flops, bytes }).collect())
}

/// The cut into consecutive parts whose largest cost is least. No part is empty unless there are more parts than blocks,
/// and never the first and the last, which take the samples and make the loss.
fn balanced(costs: &[Cost], parts: usize) -> Parts {
    let blocks = costs.len();
    let sums: Vec<Cost> = [Cost::NONE]
        .into_iter()
        .chain(costs.iter().scan(Cost::NONE, |sum, cost| {
            *sum = sum.plus(*cost);
            Some(*sum)
        }))
        .collect();
    let between = |from: usize, to: usize| Cost {
        flops: sums[to].flops - sums[from].flops,
        bytes: sums[to].bytes - sums[from].bytes,
    };
    // best[end]: the largest cost of the first parts when they end there, and where the last of them begins.
    let mut best: Vec<Option<Cost>> = vec![None; blocks + 1];
    best[0] = Some(Cost::NONE);
    let mut begins: Vec<Vec<usize>> = Vec::new();
    for part in 0..parts {
        let least = usize::from(parts <= blocks || part == 0 || part + 1 == parts);
        let mut next = vec![None; blocks + 1];
        let mut begin = vec![0; blocks + 1];
        for end in 0..=blocks {
            for from in 0..=end.saturating_sub(least) {
                let Some(before) = best[from].filter(|_| end - from >= least) else { continue };
                let cost = before.most(between(from, end));
                if next[end].is_none_or(|found| cost < found) {
                    (next[end], begin[end]) = (Some(cost), from);
                }
            }
        }
        best = next;
        begins.push(begin);
    }
    let mut end = blocks;
    let mut cut: Parts = begins
        .iter()
        .rev()
        .map(|begin| {
            let range = begin[end]..end;
            end = range.start;
            range
        })
        .collect();
    cut.reverse();
    cut
}

impl Model {
    /// What a sample looks like where a block begins; behind the last block, its logits.
    pub fn border(&self, block: usize) -> Shape {
        let mut shape = self.input.shape();
        self.for_each_layer(|at, _, _, output| {
            if at < block {
                shape = output;
            }
        })
        .expect("a model that was checked");
        shape
    }

    /// The places in [`Model::parameters`] of what several ranges of blocks use together, ascending.
    pub(crate) fn held(&self, parts: &[Range<usize>]) -> Vec<usize> {
        let mut places: Vec<usize> = parts.iter().flat_map(|part| self.parameters_of(part.clone())).collect();
        places.sort_unstable();
        places.dedup();
        places
    }

    /// The places in [`Model::parameters`] of what some blocks use, tied weights included, ascending.
    pub fn parameters_of(&self, blocks: Range<usize>) -> Vec<usize> {
        let all = self.parameters();
        let at =
            |name: &str| all.iter().position(|parameter| parameter.name == name).expect("it has an owner");
        let mut places = Vec::new();
        self.for_each_of(blocks, &mut |layer| {
            places.extend(layer.parameters().iter().map(|parameter| at(&parameter.name)));
            if let Layer::TiedLinear { weight, .. } = layer {
                places.push(at(weight));
            }
        });
        places.sort_unstable();
        places.dedup();
        places
    }

    /// The places in [`Model::buffers`] of what some blocks use, ascending.
    pub fn buffers_of(&self, blocks: Range<usize>) -> Vec<usize> {
        let (mut before, mut own) = (0, 0);
        self.for_each_of(0..blocks.start, &mut |layer| before += layer.buffers().len());
        self.for_each_of(blocks, &mut |layer| own += layer.buffers().len());
        (before..before + own).collect()
    }

    fn for_each_of<'a>(&'a self, blocks: Range<usize>, visit: &mut dyn FnMut(&'a Layer)) {
        for layer in self.blocks[blocks].iter().flat_map(|block| &block.layers) {
            layer.for_each(visit);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::spec::presets::{Gpt, gpt, resnet8};

    fn cut(flops: &[f64], parts: usize) -> Parts {
        balanced(&flops.iter().map(|&flops| Cost { flops, bytes: 1.0 }).collect::<Vec<_>>(), parts)
    }

    #[test]
    fn the_costliest_part_costs_least() {
        assert_eq!(cut(&[1.0; 12], 4), [0..3, 3..6, 6..9, 9..12]);
        assert_eq!(cut(&[0.0, 1.0, 1.0, 1.0, 1.0, 3.0], 2), [0..4, 4..6]);
        assert_eq!(cut(&[9.0, 1.0, 1.0], 3), [0..1, 1..2, 2..3]);
        // Memory decides between cuts of equal time.
        let even = [(4.0, 1.0), (0.0, 9.0), (4.0, 1.0)].map(|(flops, bytes)| Cost { flops, bytes });
        assert_eq!(balanced(&even, 2).len(), 2);
        let heavy = [(4.0, 9.0), (0.0, 9.0), (4.0, 1.0)].map(|(flops, bytes)| Cost { flops, bytes });
        assert_eq!(balanced(&heavy, 2), [0..1, 1..3]);
        assert_eq!(cut(&[1.0, 1.0], 4), [0..1, 1..1, 1..1, 1..2]);
    }

    proptest! {
        /// Against all cuts.
        #[test]
        fn no_cut_is_better(flops in prop::collection::vec(0u8..9, 1..9), parts in 1usize..5) {
            let flops: Vec<f64> = flops.into_iter().map(f64::from).collect();
            prop_assume!(parts <= flops.len());
            let largest = |cut: &[Range<usize>]| {
                cut.iter().map(|part| flops[part.clone()].iter().sum::<f64>()).fold(0.0, f64::max)
            };
            let found = cut(&flops, parts);
            prop_assert_eq!(found.len(), parts);
            prop_assert!(found.iter().all(|part| !part.is_empty()));
            prop_assert_eq!(found.iter().map(|part| part.len()).sum::<usize>(), flops.len());
            let inner = flops.len() - 1;
            for choice in 0u32..1 << inner {
                if choice.count_ones() as usize + 1 != parts {
                    continue;
                }
                let mut ends: Vec<usize> = (0..inner).filter(|i| choice >> i & 1 == 1).map(|i| i + 1).collect();
                ends.push(flops.len());
                let all: Parts =
                    ends.iter().scan(0, |start, end| Some(std::mem::replace(start, *end)..*end)).collect();
                prop_assert!(largest(&found) <= largest(&all));
            }
        }
    }

    #[test]
    fn parts_know_their_parameters_and_borders() {
        let model =
            gpt("gpt", &Gpt { layers: 2, width: 8, heads: 2, context: 4, vocab: 16, ..Gpt::default() });
        let all = model.parameters();
        let names = |blocks| {
            model.parameters_of(blocks).into_iter().map(|i| all[i].name.as_str()).collect::<Vec<_>>()
        };
        assert!(
            names(0..1).contains(&"wte.weight") && names(3..4).contains(&"wte.weight"),
            "tied: both need it"
        );
        assert!(names(1..2).iter().all(|name| name.starts_with("h.0.")));
        assert_eq!(model.border(0), Shape::Tokens { seq: 4 });
        assert_eq!(model.border(2), Shape::Sequence { seq: 4, width: 8 });
        let images = resnet8((32, 32, 3), 10);
        assert_eq!(images.border(3), Shape::Image { height: 16, width: 16, channels: 32 });
        let together: usize = [0..2, 2..5].into_iter().map(|blocks| images.parameters_of(blocks).len()).sum();
        assert_eq!(together, images.parameters().len());
    }
}
