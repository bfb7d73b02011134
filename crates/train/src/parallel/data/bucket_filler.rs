//! Buckets as they fill: gradients wait until all of their bucket are there, and then travel as one message.

use espalier_comm::Communicator;
use espalier_nn::weights::ParameterId;
use espalier_plan::traffic::Buckets;
use espalier_tensor::Tensor;

use crate::parallel::reduce_groups::ReduceGroups;
use crate::state::ParamStore;

/// The gradients that have arrived for each bucket.
pub(super) struct BucketFiller<'a> {
    pub groups: &'a ReduceGroups,
    buckets: &'a Buckets,
    waiting: Vec<Vec<(ParameterId, Tensor)>>,
}

/// A bucket all of whose gradients are there, and who shares them.
pub(super) struct FullBucket<'a> {
    pub bucket: usize,
    pub gradients: Vec<(ParameterId, Tensor)>,
    pub group: &'a Communicator,
}

impl<'a> BucketFiller<'a> {
    pub fn new(groups: &'a ReduceGroups, buckets: &'a Buckets) -> BucketFiller<'a> {
        let waiting = buckets.list().iter().map(|_| Vec::new()).collect();
        BucketFiller { groups, buckets, waiting }
    }

    /// Whether a parameter's gradient is reduced over ranks.
    pub fn is_shared(&self, params: &ParamStore, id: ParameterId) -> bool {
        self.groups.of(params.param(id).plan.group).is_some()
    }

    /// Whether a parameter's gradient is complete as soon as its layer's backward is: that of
    /// a tied one is when the pass is over.
    pub(crate) fn is_complete_early(&self, id: ParameterId) -> bool {
        self.buckets.of(id.0).is_some_and(|bucket| self.buckets.list()[bucket].chunk.is_some())
    }

    /// Adds a gradient to its bucket, which it may fill.
    pub fn add(&mut self, params: &ParamStore, id: ParameterId, gradient: Tensor) -> Option<FullBucket<'a>> {
        let groups: &'a ReduceGroups = self.groups;
        let (group, bucket) = (groups.of(params.param(id).plan.group)?, self.buckets.of(id.0)?);
        self.waiting[bucket].push((id, gradient));
        let is_full = self.waiting[bucket].len() == self.buckets.list()[bucket].parameters.len();
        is_full.then(|| FullBucket { bucket, gradients: std::mem::take(&mut self.waiting[bucket]), group })
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.iter().all(Vec::is_empty)
    }
}
