//! How replicas come to the same weights: which of the gradient, the state and the weights they communicate,
//! and when.

/// What replicas do with each other's updates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataParallelMode {
    /// Gradients are all-reduced in every step, and each replica has all of the optimizer's state and takes the
    /// same step.
    Replicated,
    /// Gradients are reduce-scattered in every step to where the state is: each replica has a shard of it,
    /// and steps with that (ZeRO).
    Sharded(ZeroStage),
    /// Each replica takes steps by itself, and weights and state are averaged now and then (local SGD).
    Local {
        /// Steps between averages.
        every: u64,
        /// Steps that are taken together before (post-local SGD, Lin et al. 2020).
        after: u64,
    },
}

/// What replicas shard (Rajbhandari et al. 2020): each stage what the one before does, and more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ZeroStage {
    /// The optimizer's state: after a step the new weights are all-gathered.
    State = 1,
    /// Gradients too: each micro-batch's are reduce-scattered as they are made.
    Gradients,
    /// Weights too: a block's are all-gathered when it runs, and nothing is after a step. Those of parameters
    /// that several pipeline stages use are on each of them, as in the stage before.
    Weights,
}

impl ZeroStage {
    pub fn number(self) -> usize {
        self as usize
    }
}

impl DataParallelMode {
    /// ZeRO's stage of a number; replicas for another.
    pub(crate) fn of_stage(number: usize) -> DataParallelMode {
        let stages = [ZeroStage::State, ZeroStage::Gradients, ZeroStage::Weights];
        let stage = stages.into_iter().find(|stage| stage.number() == number);
        stage.map_or(DataParallelMode::Replicated, DataParallelMode::Sharded)
    }

    /// Whether each replica has a shard of the optimizer's state.
    pub fn is_sharded(&self) -> bool {
        matches!(self, DataParallelMode::Sharded(_))
    }

    /// The number of ZeRO's stage; 0 where nothing is sharded.
    pub(crate) fn zero_stage(&self) -> u8 {
        match self {
            DataParallelMode::Sharded(stage) => *stage as u8,
            _ => 0,
        }
    }

    /// Whether it has only a shard of the gradients too.
    pub(crate) fn scatters_gradients(&self) -> bool {
        matches!(self, DataParallelMode::Sharded(stage) if *stage >= ZeroStage::Gradients)
    }

    /// Whether it has only a shard of the weights too.
    pub fn shards_weights(&self) -> bool {
        matches!(self, DataParallelMode::Sharded(ZeroStage::Weights))
    }

    /// Whether replicas take steps by themselves at some time.
    pub fn is_local(&self) -> bool {
        matches!(self, DataParallelMode::Local { .. })
    }

    /// Whether the step after so many is one that each replica takes by itself.
    pub fn is_local_at(&self, step: u64) -> bool {
        matches!(*self, DataParallelMode::Local { after, .. } if step >= after)
    }

    /// Whether replicas that step by themselves are averaged after so many steps.
    pub fn averages_after(&self, step: u64) -> bool {
        matches!(*self, DataParallelMode::Local { every, .. } if step.is_multiple_of(every))
    }
}
