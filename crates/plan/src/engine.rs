//! Engines: what a program that trains keeps, runs again, hides and waits for, apart from the machine it runs on.
//!
//! Ours is exact: its memory is what [`memory`](crate::memory) predicts and the ledger measures. The others
//! are what their papers say of them, so that published runs can be predicted through the engine that made
//! them. `profiles` has the numbers of each.

mod profiles;

use crate::edit_distance::nearest;
use crate::schedule::ScheduleName;
use crate::spec::RecomputeMode;

/// What an engine is like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EngineProfile {
    /// As `--engine` takes it.
    pub name: &'static str,
    /// Bytes of what it keeps for each weight.
    pub state: EngineState,
    /// What it keeps of a forward pass.
    pub stash: EngineStash,
    /// Bytes of buffers beside: what its authors measured above state and activations.
    pub workspace: u64,
    /// How it computes attention.
    pub attention: AttentionKernel,
    /// Bytes that its norms, activations and sums move, of those that ours do.
    pub passes: f64,
    /// Whether passes that queue the same work in each step are captured as a CUDA graph.
    pub captures: bool,
    /// The fraction of a message between stages during which neither end computes.
    pub blocking: f64,
    /// Whether gradient all-reduces start within the last backward pass.
    pub overlaps_all_reduce: bool,
    /// Whether each stage has an equal fraction of the model's time, as its authors reckon, or whole blocks.
    pub even_stages: bool,
    /// Whether it takes the fewest stages that fit, as its authors do, or as many as are fastest.
    pub fewest_stages: bool,
    /// What replicas can shard (ZeRO), the least of it first.
    pub zero: &'static [u8],
    /// Where weights are sharded and gathered block by block (ZeRO-3): the fraction of a block's computing that
    /// hides the gathering of the next, within a node and between nodes.
    pub hides: [f64; 2],
    /// How many times as long as a dense product one of pruned weights takes: sparse kernels skip zeros, and
    /// are still slower.
    pub sparse_products: f64,
    /// Bytes that handling a weight's gradient moves in every micro-batch, of each weight and of each kept one.
    pub sink: [f64; 2],
    /// Whether recomputing attention begins with the linear layer that makes queries, keys and values, or
    /// with their product.
    pub remakes_queries: bool,
    /// Whether layers can be cut over ranks.
    pub tensor: bool,
    /// The orders of a pipeline that it has; none: it has no pipeline.
    pub schedules: &'static [ScheduleName],
    /// What it can compute twice.
    pub recomputes: &'static [RecomputeMode],
}

/// Bytes for each weight, in mixed precision with Adam, whose two moments are 8 of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum EngineState {
    /// As the plan predicts them, to the byte.
    Exact,
    /// By the paper.
    Bytes {
        /// Of every weight,
        weight: f64,
        /// of every kept one,
        kept: f64,
        /// of these, or of all where no kept ones are counted, what replicas may shard: exact weights and
        /// moments (ZeRO-1),
        shared: f64,
        /// and what of its gradient is all-reduced over replicas.
        summed: f64,
    },
}

impl EngineState {
    /// Of an optimizer with so many moments instead of Adam's two.
    pub fn with_moments(self, moments: u64) -> EngineState {
        let EngineState::Bytes { weight, kept, shared, summed } = self else { return self };
        let fewer = 4.0 * (2.0 - moments as f64);
        let (weight, kept) = if kept > 0.0 { (weight, kept - fewer) } else { (weight - fewer, kept) };
        EngineState::Bytes { weight, kept, shared: shared - fewer, summed }
    }

    /// Bytes of so many weights, of which so many have gradients and state, where so many replicas shard what
    /// `zero` says; none where the plan predicts them itself.
    pub fn bytes(&self, all: f64, stored: f64, zero: u8, replicas: usize) -> Option<f64> {
        let EngineState::Bytes { weight, kept, shared, .. } = *self else { return None };
        let (full, elsewhere) = (weight * all + kept * stored, 1.0 - 1.0 / replicas as f64);
        Some(match zero {
            0 => full,
            3 => full * (1.0 - elsewhere),
            _ => full - shared * stored * elsewhere,
        })
    }
}

/// What is kept of a forward pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum EngineStash {
    /// What the layers of the spec save, to the byte.
    Exact,
    /// Of a transformer block of width h over s positions with a heads, s h (34 + 5 a s/h) bytes a sample
    /// (Korthikanti et al. 2022); without the second term where scores are not kept. Other blocks: twice what
    /// ours keep.
    Megatron,
}

/// How attention is computed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum AttentionKernel {
    /// Without ever writing the scores down: as fast as the cluster's file says of its devices, times this.
    Fused {
        /// How fast it is beside the one that the cluster's file is of.
        speed: f64,
    },
    /// Two products with the scores between them.
    Unfused {
        /// Bytes that pass through memory for each score, forward.
        bytes: f64,
    },
}

impl AttentionKernel {
    /// What a fused one reaches of a product's rate on devices of which nobody measured it.
    pub(crate) const UNMEASURED: f64 = 0.5;
}

impl EngineProfile {
    pub const ALL: [EngineProfile; 8] = [
        EngineProfile::ESPALIER,
        EngineProfile::AXONN,
        EngineProfile::SAMO,
        EngineProfile::SPUTNIK,
        EngineProfile::DEEPSPEED_3D,
        EngineProfile::MEGATRON,
        EngineProfile::MEGATRON_CORE,
        EngineProfile::FSDP,
    ];

    /// Whether it is this program, perhaps with another form of state.
    pub fn is_ours(&self) -> bool {
        self.name == EngineProfile::ESPALIER.name
    }

    /// Whether all that replicas have is sharded, and gathered block by block.
    pub fn gathers_weights(&self) -> bool {
        self.zero == [3]
    }

    /// Whether it can keep gradients and state of kept weights alone.
    pub fn compresses(&self) -> bool {
        match self.state {
            EngineState::Exact => true,
            EngineState::Bytes { kept, .. } => kept > 0.0,
        }
    }

    /// The engine of a name, or the nearest name.
    pub fn named(name: &str) -> Result<EngineProfile, Option<&'static str>> {
        let names = EngineProfile::ALL.map(|engine| engine.name);
        EngineProfile::ALL.into_iter().find(|engine| engine.name == name).ok_or_else(|| nearest(name, names))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The totals of SAMO's paper at nine tenths, and what sixteen replicas leave of them where they shard 12
    /// bytes.
    #[test]
    fn bytes_of_a_weight_are_those_of_the_paper() {
        let bytes = |engine: EngineProfile, stored, zero| engine.state.bytes(1.0, stored, zero, 16).unwrap();
        assert!((bytes(EngineProfile::SAMO, 0.1, 0) - 4.4).abs() < 1e-12);
        assert!((bytes(EngineProfile::AXONN, 1.0, 0) - 20.0).abs() < 1e-12);
        assert!((bytes(EngineProfile::SAMO, 0.1, 1) - (4.4 - 1.2 * 15.0 / 16.0)).abs() < 1e-12);
        assert!((bytes(EngineProfile::FSDP, 1.0, 3) - 1.0).abs() < 1e-12);
        // A velocity instead of two moments: four bytes less of what has state.
        let momentum =
            |engine: EngineProfile, stored| engine.state.with_moments(1).bytes(1.0, stored, 0, 1).unwrap();
        assert!((momentum(EngineProfile::AXONN, 1.0) - 16.0).abs() < 1e-12);
        assert!((momentum(EngineProfile::SAMO, 0.1) - 4.0).abs() < 1e-12);
        assert_eq!(EngineProfile::ESPALIER.state.bytes(1.0, 0.1, 0, 1), None);
        let engines = [EngineProfile::SAMO, EngineProfile::ESPALIER, EngineProfile::AXONN];
        assert_eq!(engines.map(|engine| engine.compresses()), [true, true, false]);
    }
}
