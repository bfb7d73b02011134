//! A model cut into virtual stages: ranges of its blocks, of about equal cost.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use crate::error::Error;
use crate::pipeline::PipelinePlan;
use crate::spec::{ModelSpec, Shape, ShapeError};

/// The blocks of each virtual stage, in order; one virtual stage without a pipeline.
pub type StageBlocks = Vec<Range<usize>>;

/// Cuts a model for a pipeline: where it is said (the first block of every virtual stage but the first), or
/// so that the costliest virtual stage costs least. `bytes` are those of each weight with its state.
pub fn stage_blocks(
    model: &ModelSpec,
    pipeline: &PipelinePlan,
    cut: &[usize],
    bytes: u64,
) -> Result<StageBlocks, Error> {
    let (blocks, stages) = (model.blocks.len(), pipeline.stages);
    if stages == 1 {
        return Ok(std::iter::once(0..blocks).collect());
    }
    if stages > blocks {
        let problem = format!("is {stages}, but the model {} has {blocks} blocks", model.name);
        return Err(Error::conflict("parallel.pipeline", problem));
    }
    if cut.is_empty() {
        return even_stage_blocks(model, pipeline.schedule(1)?.placement.virtual_stages(), bytes);
    }
    if let Some(beyond) = cut.iter().find(|block| **block >= blocks) {
        let problem = format!("names block {beyond}, but the last of {}'s is {}", model.name, blocks - 1);
        return Err(Error::conflict("parallel.cut", problem));
    }
    let ends = cut.iter().copied().chain([blocks]);
    Ok(ends.scan(0, |start, end| Some(std::mem::replace(start, end)..end)).collect())
}

/// So many virtual stages of a model, of which the costliest costs least.
pub(crate) fn even_stage_blocks(
    model: &ModelSpec,
    virtual_stages: usize,
    bytes: u64,
) -> Result<StageBlocks, Error> {
    Ok(balanced(&costs(model, bytes)?, virtual_stages))
}

/// What a block costs in time, and then in memory.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
struct BlockCost {
    flops: f64,
    bytes: f64,
}

impl BlockCost {
    const NONE: BlockCost = BlockCost { flops: 0.0, bytes: 0.0 };

    fn plus(self, other: BlockCost) -> BlockCost {
        BlockCost { flops: self.flops + other.flops, bytes: self.bytes + other.bytes }
    }
}

/// Flops of each block for a sample, and the bytes of its parameters with their state.
fn costs(model: &ModelSpec, each: u64) -> Result<Vec<BlockCost>, Error> {
    let bytes = model.blocks.iter().map(|block| {
        let mut elements = 0;
        block.for_each(&mut |layer| {
            elements += layer.parameters().iter().map(|p| p.elements()).sum::<u64>();
        });
        each as f64 * elements as f64
    });
    Ok(model
        .block_flops(1)?
        .into_iter()
        .zip(bytes)
        .map(|(flops, bytes)| BlockCost { flops, bytes })
        .collect())
}

/// The cut into consecutive virtual stages whose largest cost is least in time, then in memory; where several
/// are, the one whose virtual stages are nearest to equal. No virtual stage is empty unless there are more
/// virtual stages than blocks, and never the first and the last, which take the samples and make the loss.
///
/// Whether a limit can be kept is found by filling one virtual stage after the other, so the least limit is
/// found by halving, and the work grows with the number of blocks alone.
fn balanced(costs: &[BlockCost], virtual_stages: usize) -> StageBlocks {
    let mut prefix_sums = vec![BlockCost::NONE];
    for cost in costs {
        let sum = prefix_sums[prefix_sums.len() - 1].plus(*cost);
        prefix_sums.push(sum);
    }
    let cutting = StagePartition { total: prefix_sums[costs.len()], prefix_sums, virtual_stages };
    let flops =
        least(cutting.total.flops, |flops| cutting.can_keep(BlockCost { flops, bytes: cutting.total.bytes }));
    let bytes = least(cutting.total.bytes, |bytes| cutting.can_keep(BlockCost { flops, bytes }));
    cutting.nearest_to_equal(BlockCost { flops, bytes })
}

/// The least number, none of them negative, for which `fits` holds; it holds for `most` and from the least one on.
fn least(most: f64, fits: impl Fn(f64) -> bool) -> f64 {
    // Numbers that are not negative are ordered as their bits are.
    let (mut low, mut high) = (0u64, most.to_bits());
    while low < high {
        let middle = low + (high - low) / 2;
        if fits(f64::from_bits(middle)) { high = middle } else { low = middle + 1 }
    }
    f64::from_bits(high)
}

/// Blocks that are to be cut into so many virtual stages.
struct StagePartition {
    /// What all blocks before each one cost, and at the end what all do.
    prefix_sums: Vec<BlockCost>,
    total: BlockCost,
    virtual_stages: usize,
}

impl StagePartition {
    fn blocks(&self) -> usize {
        self.prefix_sums.len() - 1
    }

    /// Blocks that a virtual stage must have.
    fn needs(&self, virtual_stage: usize) -> usize {
        usize::from(
            self.virtual_stages <= self.blocks()
                || virtual_stage == 0
                || virtual_stage + 1 == self.virtual_stages,
        )
    }

    /// Where the first `parts` of them end at the latest, so that the others get what they must have.
    fn latest(&self, virtual_stages: usize) -> usize {
        match self.virtual_stages.checked_sub(virtual_stages) {
            None | Some(0) => self.blocks(),
            Some(left) if self.virtual_stages <= self.blocks() => self.blocks() - left,
            Some(_) => self.blocks() - 1,
        }
    }

    fn keeps(&self, from: usize, to: usize, limit: BlockCost) -> bool {
        let (from, to) = (self.prefix_sums[from], self.prefix_sums[to]);
        to.flops - from.flops <= limit.flops && to.bytes - from.bytes <= limit.bytes
    }

    /// Where a virtual stage that begins at a block ends at the latest.
    fn reach(&self, virtual_stage: usize, from: usize, limit: BlockCost) -> usize {
        let ends = from + 1..=self.latest(virtual_stage + 1);
        ends.take_while(|&to| self.keeps(from, to, limit)).last().unwrap_or(from)
    }

    /// Whether no virtual stage need cost more than the limit.
    fn can_keep(&self, limit: BlockCost) -> bool {
        let mut from = 0;
        for virtual_stage in 0..self.virtual_stages {
            let to = self.reach(virtual_stage, from, limit);
            if to < from + self.needs(virtual_stage) {
                return false;
            }
            from = to;
        }
        from == self.blocks()
    }

    /// Where each virtual stage begins at the earliest, so that no virtual stage from it on costs more than
    /// the limit.
    fn earliest(&self, limit: BlockCost) -> Vec<usize> {
        let mut begins = vec![self.blocks(); self.virtual_stages + 1];
        for virtual_stage in (0..self.virtual_stages).rev() {
            let end = begins[virtual_stage + 1];
            let first = (0..end).rev().take_while(|&from| self.keeps(from, end, limit)).last();
            begins[virtual_stage] = first.unwrap_or(end);
        }
        begins
    }

    /// The split that keeps a limit that can be kept, with ends as near as may be to those of equal stages.
    fn nearest_to_equal(&self, limit: BlockCost) -> StageBlocks {
        let earliest = self.earliest(limit);
        let mut from = 0;
        let virtual_stage = |virtual_stage: usize| {
            let least = (from + self.needs(virtual_stage)).max(earliest[virtual_stage + 1]);
            let most = self.reach(virtual_stage, from, limit);
            let wanted = self.total.flops * (virtual_stage + 1) as f64 / self.virtual_stages as f64;
            let off = |to: usize| (self.prefix_sums[to].flops - wanted).abs();
            let mut to = least;
            while to < most && off(to + 1) < off(to) {
                to += 1;
            }
            std::mem::replace(&mut from, to)..to
        };
        (0..self.virtual_stages).map(virtual_stage).collect()
    }
}

/// Which parameters and buffers each block of a model uses, from one walk over it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockTensors {
    parameters: Vec<Vec<usize>>,
    buffers: Vec<Range<usize>>,
}

impl BlockTensors {
    /// The indices in [`ModelSpec::parameters`] of what some blocks use, tied weights included, ascending.
    pub fn parameters(&self, blocks: Range<usize>) -> Vec<usize> {
        self.held(&[blocks])
    }

    /// The indices in [`ModelSpec::parameters`] of what several ranges of blocks use together, ascending.
    pub(crate) fn held(&self, virtual_stages: &[Range<usize>]) -> Vec<usize> {
        let blocks = virtual_stages.iter().flat_map(|virtual_stage| &self.parameters[virtual_stage.clone()]);
        let mut ids: Vec<usize> = blocks.flatten().copied().collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// The indices in [`ModelSpec::parameters`] of what is used more than once.
    pub(crate) fn tied(&self) -> HashSet<usize> {
        let mut seen = HashSet::new();
        self.parameters.iter().flatten().copied().filter(|id| !seen.insert(*id)).collect()
    }

    /// The indices in [`ModelSpec::buffers`] of what some blocks use, ascending.
    pub fn buffers(&self, blocks: Range<usize>) -> Range<usize> {
        match &self.buffers[blocks] {
            [] => 0..0,
            [first, .., last] => first.start..last.end,
            [only] => only.clone(),
        }
    }
}

impl ModelSpec {
    /// What a sample looks like where each block begins, and behind the last block: its logits.
    pub fn borders(&self) -> Result<Vec<Shape>, ShapeError> {
        let mut borders = vec![self.input.shape(); self.blocks.len() + 1];
        let mut known = 0;
        self.for_each_layer(|block, _, _, output| {
            // A block without layers passes on what it gets.
            let before = borders[known];
            borders[known..=block].fill(before);
            known = block + 1;
            borders[known] = output;
        })?;
        let last = borders[known];
        borders[known..].fill(last);
        Ok(borders)
    }

    /// How many samples of a micro-batch of `all` a rank has where each block begins, and behind the last: a
    /// rank's own model may split them.
    pub(crate) fn samples_at_borders(&self, all: u64) -> Vec<u64> {
        let mut samples = vec![all];
        samples.extend(self.blocks.iter().scan(all, |now, block| {
            *now = block.layers.iter().fold(*now, |now, layer| layer.samples_behind(now, all));
            Some(*now)
        }));
        samples
    }

    /// Which parameters and buffers each block uses.
    pub fn block_tensors(&self) -> BlockTensors {
        let mut tensors = BlockTensors { parameters: Vec::new(), buffers: Vec::new() };
        let (mut owned, mut owners, mut buffers) = (0, HashMap::new(), 0);
        let mut tied: Vec<(usize, &str)> = Vec::new();
        for (at, block) in self.blocks.iter().enumerate() {
            let (first, first_buffer) = (owned, buffers);
            block.for_each(&mut |layer| {
                for parameter in layer.parameters() {
                    owners.insert(parameter.name, owned);
                    owned += 1;
                }
                buffers += layer.buffers().len();
                tied.extend(layer.description().tied_weight().map(|weight| (at, weight)));
            });
            tensors.parameters.push((first..owned).collect());
            tensors.buffers.push(first_buffer..buffers);
        }
        for (block, weight) in tied {
            tensors.parameters[block].push(owners[weight]);
        }
        tensors
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::spec::presets::{Gpt, gpt, resnet8};

    fn cut(flops: &[f64], virtual_stages: usize) -> StageBlocks {
        balanced(
            &flops.iter().map(|&flops| BlockCost { flops, bytes: 1.0 }).collect::<Vec<_>>(),
            virtual_stages,
        )
    }

    #[test]
    fn the_costliest_stage_costs_least() {
        assert_eq!(cut(&[1.0; 12], 4), [0..3, 3..6, 6..9, 9..12]);
        assert_eq!(cut(&[0.0, 1.0, 1.0, 1.0, 1.0, 3.0], 2), [0..4, 4..6]);
        assert_eq!(cut(&[9.0, 1.0, 1.0], 3), [0..1, 1..2, 2..3]);
        // Memory decides between cuts of equal time.
        let even = [(4.0, 1.0), (0.0, 9.0), (4.0, 1.0)].map(|(flops, bytes)| BlockCost { flops, bytes });
        assert_eq!(balanced(&even, 2).len(), 2);
        let heavy = [(4.0, 9.0), (0.0, 9.0), (4.0, 1.0)].map(|(flops, bytes)| BlockCost { flops, bytes });
        assert_eq!(balanced(&heavy, 2), [0..1, 1..3]);
        assert_eq!(cut(&[1.0, 1.0], 4), [0..1, 1..1, 1..1, 1..2]);
    }

    proptest! {
        /// Time first, then memory, against all cuts; where flops are few, many of them are equal in time.
        #[test]
        fn no_cut_is_better(
            costs in prop::collection::vec((0u8..9, 0u8..9), 1..9),
            kinds in prop::sample::select(vec![3u8, 9]),
            virtual_stages in 1usize..5,
        ) {
            prop_assume!(virtual_stages <= costs.len());
            let cost = |(flops, bytes): (u8, u8)| BlockCost { flops: (flops % kinds).into(), bytes: bytes.into() };
            let costs: Vec<BlockCost> = costs.into_iter().map(cost).collect();
            let largest = |cut: &[Range<usize>]| {
                let prefix_sums = cut.iter().map(|virtual_stage| costs[virtual_stage.clone()].iter().fold(BlockCost::NONE, |sum, cost| sum.plus(*cost)));
                prefix_sums.fold((0.0f64, 0.0f64), |most, sum| (most.0.max(sum.flops), most.1.max(sum.bytes)))
            };
            let found = balanced(&costs, virtual_stages);
            prop_assert_eq!(found.len(), virtual_stages);
            prop_assert!(found.iter().all(|virtual_stage| !virtual_stage.is_empty()));
            prop_assert_eq!(found.iter().map(|virtual_stage| virtual_stage.len()).sum::<usize>(), costs.len());
            for choice in 0u32..1 << (costs.len() - 1) {
                if choice.count_ones() as usize + 1 != virtual_stages {
                    continue;
                }
                let mut ends: Vec<usize> = (1..costs.len()).filter(|i| choice >> (i - 1) & 1 == 1).collect();
                ends.push(costs.len());
                let other: StageBlocks = ends.iter().scan(0, |start, end| Some(std::mem::replace(start, *end)..*end)).collect();
                prop_assert!(largest(&found) <= largest(&other), "{found:?} {other:?}");
            }
        }
    }

    /// Work that grew with virtual stages x blocks x blocks took a quarter of an hour here.
    #[test]
    fn many_stages_of_many_blocks() {
        let costs: Vec<f64> = (0..40_000).map(|block| f64::from(block % 7)).collect();
        let virtual_stages = cut(&costs, 15_000);
        assert_eq!((virtual_stages.len(), virtual_stages[14_999].end), (15_000, 40_000));
        let most = virtual_stages
            .iter()
            .map(|virtual_stage| costs[virtual_stage.clone()].iter().sum::<f64>())
            .fold(0.0, f64::max);
        assert!(most <= 11.0, "a fair share is 8 and a block costs up to 6: {most}");
    }

    #[test]
    fn stages_know_their_parameters_and_borders() {
        let model =
            gpt("gpt", &Gpt { layers: 2, width: 8, heads: 2, context: 4, vocab: 16, ..Gpt::default() });
        let all = model.parameters();
        let tensors = model.block_tensors();
        let names =
            |blocks| tensors.parameters(blocks).into_iter().map(|i| all[i].name.as_str()).collect::<Vec<_>>();
        assert!(
            names(0..1).contains(&"wte.weight") && names(3..4).contains(&"wte.weight"),
            "tied: both need it"
        );
        assert!(names(1..2).iter().all(|name| name.starts_with("h.0.")));
        let borders = model.borders().unwrap();
        assert_eq!(borders[0], Shape::Tokens { seq: 4 });
        assert_eq!(borders[2], Shape::Sequence { seq: 4, width: 8 });
        assert_eq!(borders[4..], [Shape::Sequence { seq: 4, width: 16 }]);
        let images = resnet8((32, 32, 3), 10);
        assert_eq!(images.borders().unwrap()[3], Shape::Image { height: 16, width: 16, channels: 32 });
        let tensors = images.block_tensors();
        let together: usize = [0..2, 2..5].into_iter().map(|blocks| tensors.parameters(blocks).len()).sum();
        assert_eq!(together, images.parameters().len());
        assert_eq!(tensors.buffers(0..2).end, tensors.buffers(2..5).start);
        assert_eq!(tensors.buffers(0..5), 0..images.buffers().len());
    }
}
