//! The weights that a rank's own model holds, block by block.

use std::ops::Range;
use std::rc::Rc;

use crate::memory::Tensors;
use crate::spec::Parameter;
use crate::stages::StageBlocks;

/// What a virtual stage has of weights.
#[derive(Debug, Clone, Copy, Default)]
pub struct WeightCounts {
    /// All of them,
    pub all: f64,
    /// and those whose gradients and state are stored.
    pub stored: f64,
}

/// What a rank's own model holds, block by block.
pub struct BlockWeights {
    tensors: Rc<Tensors>,
    elements: Vec<u64>,
    kept: Option<Vec<Option<u64>>>,
}

impl BlockWeights {
    /// Of a rank's parameters; `kept`: how many weights of each stay, where some are pruned.
    pub fn new(
        tensors: Rc<Tensors>,
        parameters: &[Parameter],
        kept: Option<Vec<Option<u64>>>,
    ) -> BlockWeights {
        BlockWeights { tensors, elements: parameters.iter().map(Parameter::elements).collect(), kept }
    }

    /// Weights of each parameter that stay, where some are pruned.
    pub fn kept(&self) -> Option<&Vec<Option<u64>>> {
        self.kept.as_ref()
    }

    /// The weights of some blocks; tied ones belong to each.
    pub fn weights(&self, blocks: Range<usize>, compressed: bool) -> WeightCounts {
        self.weights_where(blocks, compressed, |_| true)
    }

    /// Those of some blocks whose parameters are chosen by their indices.
    pub(crate) fn weights_where(
        &self,
        blocks: Range<usize>,
        compressed: bool,
        is_chosen: impl Fn(usize) -> bool,
    ) -> WeightCounts {
        let mut sum = WeightCounts::default();
        for id in self.tensors.blocks.parameters(blocks).into_iter().filter(|id| is_chosen(*id)) {
            let all = self.elements[id];
            let kept = self.kept.as_ref().filter(|_| compressed).and_then(|kept| kept[id]);
            sum.all += all as f64;
            sum.stored += kept.unwrap_or(all) as f64;
        }
        sum
    }

    /// Those of a block that are expanded when it is entered, where they rest as kept values.
    pub fn expanded(&self, block: usize) -> WeightCounts {
        let is_pruned = |id: usize| {
            let kept = self.kept.as_ref().and_then(|kept| kept[id]);
            kept.is_some_and(|kept| kept < self.elements[id])
        };
        self.weights_where(block..block + 1, true, is_pruned)
    }

    /// Those of each virtual stage; equal fractions, where an engine's authors reckon so.
    pub(crate) fn of_stages(
        &self,
        stage_blocks: &StageBlocks,
        compressed: bool,
        even: bool,
    ) -> Vec<WeightCounts> {
        let each: Vec<WeightCounts> =
            stage_blocks.iter().map(|part| self.weights(part.clone(), compressed)).collect();
        if !even {
            return each;
        }
        let (fraction, all) = (
            1.0 / stage_blocks.len() as f64,
            self.weights(0..stage_blocks[stage_blocks.len() - 1].end, compressed),
        );
        vec![WeightCounts { all: all.all * fraction, stored: all.stored * fraction }; stage_blocks.len()]
    }
}
