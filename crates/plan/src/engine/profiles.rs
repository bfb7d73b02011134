//! The numbers of each engine, and where they come from: `cargo bench -p espalier-plan --bench published` holds
//! them against what was published.

use super::{AttentionKernel, EngineProfile, EngineStash, EngineState};
use crate::schedule::ScheduleName;
use crate::spec::RecomputeMode;

/// Those that some run may want: GPipe takes as long as 1F1B and holds more, Chimera's copies cost more than
/// they hide, and the others change what is learnt.
const SEARCHED: &[ScheduleName] = &[ScheduleName::OneFOneB, ScheduleName::Interleaved, ScheduleName::ZbH1];
const EVERY_RECOMPUTE: &[RecomputeMode] =
    &[RecomputeMode::None, RecomputeMode::Attention, RecomputeMode::Block];
/// How far FSDP hides its gathers within a node and between nodes: by MosaicML's runs.
const FSDP_HIDES: [f64; 2] = [0.11, 0.21];

impl EngineProfile {
    /// This program. Gathers of ZeRO-3 were seen to hide within a node alone; between nodes they are taken to hide
    /// as far as FSDP's.
    pub const ESPALIER: EngineProfile = EngineProfile {
        name: "espalier",
        state: EngineState::Exact,
        stash: EngineStash::Exact,
        workspace: 0,
        attention: AttentionKernel::Fused { speed: 1.0 },
        passes: 1.0,
        captures: true,
        blocking: 0.0,
        overlaps_all_reduce: true,
        even_stages: false,
        fewest_stages: false,
        // More is sharded of those that do not fit.
        zero: &[0, 1],
        hides: [1.0, FSDP_HIDES[1]],
        sparse_products: 1.0,
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
        // 80.16 GB of GPT-3 2.7B on eight GPUs are 53 GB of state and a gigabyte of activations on each; the
        // rest is this.
        workspace: 2_400_000_000,
        attention: AttentionKernel::Unfused { bytes: 2.3 },
        blocking: 1.0,
        even_stages: true,
        fewest_stages: true,
        sink: [6.0, 0.0],
        tensor: false,
        schedules: &[ScheduleName::Axonn],
        recomputes: &[RecomputeMode::Block],
        ..EngineProfile::MEGATRON
    };

    /// AxoNN with SAMO: 24 f + 2 bytes a weight (Singh & Bhatele 2023).
    pub const SAMO: EngineProfile = EngineProfile {
        name: "samo",
        state: EngineState::Bytes { weight: 2.0, kept: 24.0, shared: 12.0, summed: 2.0 },
        sink: [22.0, 0.0],
        ..EngineProfile::AXONN
    };

    /// AxoNN with Sputnik's sparse kernels, as SAMO's paper measures it: weights are kept ones alone, and their
    /// products take longer than dense ones.
    pub const SPUTNIK: EngineProfile = EngineProfile {
        name: "sputnik",
        state: EngineState::Bytes { weight: 0.0, kept: 26.0, shared: 12.0, summed: 2.0 },
        sink: [0.0, 22.0],
        sparse_products: 3.8,
        ..EngineProfile::AXONN
    };

    /// DeepSpeed's pipeline over Megatron's tensor parallelism with ZeRO-1, as SAMO's paper measures it on Summit.
    pub const DEEPSPEED_3D: EngineProfile = EngineProfile {
        name: "deepspeed-3d",
        even_stages: false,
        fewest_stages: false,
        zero: &[1],
        tensor: true,
        schedules: &[ScheduleName::OneFOneB],
        ..EngineProfile::AXONN
    };

    /// Megatron-LM (Narayanan et al. 2021, Korthikanti et al. 2022).
    pub const MEGATRON: EngineProfile = EngineProfile {
        name: "megatron",
        state: EngineState::Bytes { weight: 18.0, kept: 0.0, shared: 12.0, summed: 4.0 },
        stash: EngineStash::Megatron,
        workspace: 0,
        attention: AttentionKernel::Unfused { bytes: 14.0 },
        passes: 0.8,
        captures: false,
        blocking: 0.0,
        overlaps_all_reduce: false,
        even_stages: false,
        fewest_stages: false,
        zero: &[0],
        hides: [1.0; 2],
        sparse_products: 1.0,
        sink: [10.0, 0.0],
        remakes_queries: false,
        tensor: true,
        schedules: &[ScheduleName::OneFOneB, ScheduleName::Interleaved],
        recomputes: EVERY_RECOMPUTE,
    };

    /// Megatron-Core, as it is run today: fused attention, a sharded optimizer, gradient all-reduces within the
    /// backward pass, messages that hold nobody up.
    pub const MEGATRON_CORE: EngineProfile = EngineProfile {
        name: "megatron-core",
        attention: AttentionKernel::Fused { speed: 1.0 },
        overlaps_all_reduce: true,
        zero: &[0, 1],
        ..EngineProfile::MEGATRON
    };

    /// PyTorch's fully sharded data parallelism under a trainer with fused attention (MosaicML's llm-foundry).
    pub const FSDP: EngineProfile = EngineProfile {
        name: "fsdp",
        state: EngineState::Bytes { weight: 16.0, kept: 0.0, shared: 12.0, summed: 4.0 },
        attention: AttentionKernel::Fused { speed: 0.68 },
        passes: 3.5,
        overlaps_all_reduce: true,
        zero: &[3],
        hides: FSDP_HIDES,
        sink: [4.0, 0.0],
        tensor: false,
        schedules: &[],
        ..EngineProfile::MEGATRON
    };
}
