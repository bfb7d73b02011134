//! Engines: what a program that trains keeps, runs again, hides and waits for, apart from the machine it runs on.
//!
//! Ours is exact: its memory is what [`memory`](crate::memory) predicts and the ledger measures. The others
//! are what their papers say of them, so that published runs can be predicted through the engine that made
//! them.

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
    /// The fraction of a message between stages during which neither end computes.
    pub blocking: f64,
    /// What its all-reduces over replicas reach of the rate of what they travel over.
    pub all_reduce_efficiency: f64,
    /// Whether gradient all-reduces start within the last backward pass.
    pub overlaps_all_reduce: bool,
    /// Whether each stage has an equal fraction of the model's time, as its authors reckon, or whole blocks.
    pub even_stages: bool,
    /// Whether weights are sharded over replicas and gathered block by block (ZeRO-3),
    pub gathers_weights: bool,
    /// and the fraction of a block's computing that hides the gathering of the next.
    pub hides: f64,
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

/// Bytes for each weight, in mixed precision with Adam.
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
        /// of these what replicas may shard: exact weights and moments (ZeRO-1),
        shared: f64,
        /// and what of its gradient is all-reduced over replicas.
        summed: f64,
    },
}

impl EngineState {
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
    /// This program's, without ever writing the scores down: as fast as the cluster's file says.
    Ours,
    /// Without ever writing the scores down.
    Fused {
        /// The flops that it does of all positions by all positions.
        flops: f64,
        /// What it reaches of a product's rate.
        efficiency: f64,
    },
    /// Two products with the scores between them.
    Unfused {
        /// Bytes that pass through memory for each score, forward.
        bytes: f64,
    },
}

impl AttentionKernel {
    /// What ours reaches of a product's rate where nobody measured it.
    pub(crate) const OUR_EFFICIENCY: f64 = 0.5;
}

/// Those that some run may want: GPipe takes as long as 1F1B and holds more, Chimera's copies cost more than
/// they hide, and the others change what is learnt.
const SEARCHED: &[ScheduleName] = &[ScheduleName::OneFOneB, ScheduleName::Interleaved, ScheduleName::ZbH1];
const EVERY_RECOMPUTE: &[RecomputeMode] =
    &[RecomputeMode::None, RecomputeMode::Attention, RecomputeMode::Block];

impl EngineProfile {
    /// This program.
    pub const ESPALIER: EngineProfile = EngineProfile {
        name: "espalier",
        state: EngineState::Exact,
        stash: EngineStash::Exact,
        workspace: 0,
        attention: AttentionKernel::Ours,
        passes: 1.0,
        blocking: 0.0,
        all_reduce_efficiency: 1.0,
        overlaps_all_reduce: true,
        even_stages: false,
        gathers_weights: false,
        hides: 1.0,
        sink: [2.0, 8.0],
        remakes_queries: true,
        tensor: true,
        schedules: SEARCHED,
        recomputes: EVERY_RECOMPUTE,
    };

    /// AxoNN with dense state (Singh & Bhatele 2022), as SAMO's paper measures it on Summit.
    pub const AXONN: EngineProfile = EngineProfile {
        name: "axonn",
        state: EngineState::Bytes { weight: 20.0, kept: 0.0, shared: 12.0, summed: 2.0 },
        stash: EngineStash::Megatron,
        // 80.16 GB of GPT-3 2.7B on eight GPUs are 53 GB of state and a gigabyte of activations on each; the
        // rest is this.
        workspace: 2_400_000_000,
        attention: AttentionKernel::Unfused { bytes: 6.0 },
        passes: 1.3,
        blocking: 1.0,
        all_reduce_efficiency: 0.27,
        overlaps_all_reduce: false,
        even_stages: true,
        gathers_weights: false,
        hides: 1.0,
        sink: [6.0, 0.0],
        remakes_queries: false,
        tensor: false,
        schedules: &[ScheduleName::Axonn],
        recomputes: &[RecomputeMode::Block],
    };

    /// AxoNN with SAMO: 24 f + 2 bytes a weight (Singh & Bhatele 2023).
    pub const SAMO: EngineProfile = EngineProfile {
        name: "samo",
        state: EngineState::Bytes { weight: 2.0, kept: 24.0, shared: 12.0, summed: 2.0 },
        sink: [22.0, 0.0],
        ..EngineProfile::AXONN
    };

    /// Megatron-LM (Narayanan et al. 2021, Korthikanti et al. 2022).
    pub const MEGATRON: EngineProfile = EngineProfile {
        name: "megatron",
        state: EngineState::Bytes { weight: 18.0, kept: 0.0, shared: 12.0, summed: 4.0 },
        stash: EngineStash::Megatron,
        workspace: 0,
        attention: AttentionKernel::Unfused { bytes: 14.0 },
        passes: 1.0,
        blocking: 0.32,
        all_reduce_efficiency: 1.0,
        overlaps_all_reduce: false,
        even_stages: false,
        gathers_weights: false,
        hides: 1.0,
        sink: [10.0, 0.0],
        remakes_queries: false,
        tensor: true,
        schedules: &[ScheduleName::OneFOneB, ScheduleName::Interleaved],
        recomputes: EVERY_RECOMPUTE,
    };

    /// PyTorch's fully sharded data parallelism under a trainer with fused attention (MosaicML's llm-foundry).
    pub const FSDP: EngineProfile = EngineProfile {
        name: "fsdp",
        state: EngineState::Bytes { weight: 16.0, kept: 0.0, shared: 12.0, summed: 4.0 },
        stash: EngineStash::Megatron,
        workspace: 0,
        attention: AttentionKernel::Fused { flops: 0.5, efficiency: 0.25 },
        passes: 2.75,
        blocking: 0.0,
        all_reduce_efficiency: 1.0,
        overlaps_all_reduce: true,
        even_stages: false,
        gathers_weights: true,
        hides: 0.16,
        sink: [4.0, 0.0],
        remakes_queries: false,
        tensor: false,
        schedules: &[],
        recomputes: EVERY_RECOMPUTE,
    };

    pub const ALL: [EngineProfile; 5] = [
        EngineProfile::ESPALIER,
        EngineProfile::AXONN,
        EngineProfile::SAMO,
        EngineProfile::MEGATRON,
        EngineProfile::FSDP,
    ];

    /// Whether it is this program, perhaps with another form of state.
    pub fn is_ours(&self) -> bool {
        self.name == EngineProfile::ESPALIER.name
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
        assert_eq!(EngineProfile::ESPALIER.state.bytes(1.0, 0.1, 0, 1), None);
        assert!(
            EngineProfile::SAMO.compresses()
                && EngineProfile::ESPALIER.compresses()
                && !EngineProfile::AXONN.compresses()
        );
    }
}
