//! How replicas come to the same weights: which of the gradient, the state and the weights they communicate,
//! and when.

/// What replicas do with each other's updates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataParallelMode {
    /// Gradients are all-reduced in every step, and each replica has all of the optimizer's state and takes the
    /// same step.
    Replicated,
    /// Gradients are reduce-scattered in every step to where the state is: each replica has a shard of it,
    /// steps with that, and all-gathers the new weights (ZeRO-1).
    Sharded {
        /// Whether it also keeps only its shard of the gradients: each micro-batch's are reduce-scattered as
        /// they are made (ZeRO-2).
        gradients: bool,
    },
    /// Each replica takes steps by itself, and weights and state are averaged now and then (local SGD).
    Local {
        /// Steps between averages.
        every: u64,
        /// Steps that are taken together before (post-local SGD, Lin et al. 2020).
        after: u64,
    },
}

impl DataParallelMode {
    /// Whether each replica has a shard of the optimizer's state.
    pub fn is_sharded(&self) -> bool {
        matches!(self, DataParallelMode::Sharded { .. })
    }

    /// Whether it has only a shard of the gradients too.
    pub(crate) fn scatters_gradients(&self) -> bool {
        matches!(self, DataParallelMode::Sharded { gradients: true })
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
