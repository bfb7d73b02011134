//! A rank as one value: all that it is given when it starts, and that no step changes.

use std::sync::Arc;

use espalier_comm::Reduce;
use espalier_data::{DataLoader, DataSplit, Dataset, SampleOrder};
use espalier_nn::weights::ParameterId;
use espalier_plan::layout::LocalModel;
use espalier_plan::{ParamPlan, Plan, RankParams};
use espalier_tensor::ops::reduce::{dot, squared_norm_all};
use espalier_tensor::{DType, Device, Tensor};

use crate::Result;
use crate::parallel::Ranks;
use crate::parallel::model::ModelParallel;
use crate::parallel::reduce_groups::ReduceGroups;
use crate::shared_scores::ScoresOfRun;
use crate::stage::Stage;

/// What a rank knows. Weights, masks and state are not here: they change.
#[derive(Debug)]
pub struct TrainContext {
    /// What is to be done.
    pub plan: Plan,
    /// Steps of the whole run.
    pub steps: u64,
    /// Its coordinates on the mesh, and its groups along the axes.
    pub ranks: Ranks,
    /// What it has of each parameter, and with whom.
    pub params: RankParams,
    /// The groups that share parameters.
    pub groups: ReduceGroups,
    /// The ranks that have shards of the same layers.
    pub model_parallel: ModelParallel,
    /// The chunks of the model that it holds.
    pub stage: Stage,
    /// The device that holds its tensors.
    pub device: Device,
    /// The type that its kernels compute in.
    pub dtype: DType,
    /// Where samples come from.
    pub dataset: Arc<Dataset>,
    /// The order in which training samples are met.
    pub order: SampleOrder,
    /// Training batches, the next one ahead of its time.
    pub feed: DataLoader,
    /// What weights are scored by before the first step, where other runs begin alike.
    pub scores: Option<ScoresOfRun>,
}

impl TrainContext {
    /// A rank of a plan; all ranks of the world must call it.
    pub fn new(
        plan: Plan,
        dataset: impl Into<Arc<Dataset>>,
        device: &Device,
        ranks: Ranks,
    ) -> Result<TrainContext> {
        let dataset = dataset.into();
        let dtype = espalier_nn::dtype(plan.storage.precision);
        let stage = Stage::new(&plan, &ranks)?;
        let params = plan.params(ranks.rank())?;
        Ok(TrainContext {
            steps: plan.total_steps(dataset.len(DataSplit::Train)) as u64,
            model_parallel: ModelParallel::of(&plan.layout, &ranks),
            groups: ReduceGroups::form(&plan, &params, &ranks)?,
            order: SampleOrder::new(plan.seed, dataset.len(DataSplit::Train)),
            feed: DataLoader::new(dataset.clone(), device, dtype),
            scores: None,
            device: device.clone(),
            params,
            ranks,
            stage,
            dtype,
            dataset,
            plan,
        })
    }

    /// The rank's own model, sharded along every axis that shards tensors.
    pub fn local(&self) -> &LocalModel {
        self.plan.layout.of(self.ranks.coords())
    }

    /// What this rank has of a parameter, and with whom.
    pub fn param(&self, id: ParameterId) -> &ParamPlan {
        &self.params.params[id.0]
    }

    /// Whether this rank speaks for its shard of a parameter where each element must be counted once in a replica.
    pub fn is_owner(&self, id: ParameterId) -> bool {
        self.param(id).is_owner
    }

    /// The squared norm of tensors that belong to some parameters, over all ranks of a replica.
    pub fn squared_norm(&self, tensors: &[(ParameterId, &Tensor)]) -> Result<f64> {
        let owned = tensors.iter().filter(|(id, _)| self.is_owner(*id)).map(|(_, tensor)| *tensor);
        let owned = squared_norm_all(&owned.collect::<Vec<_>>())?;
        self.all_reduce_over_replica(owned)
    }

    /// The product of two vectors that have a tensor for each of some parameters, likewise.
    pub fn dot(&self, ids: &[ParameterId], a: &[Tensor], b: &[Tensor]) -> Result<f64> {
        let mut owned = 0.0;
        for (id, (a, b)) in ids.iter().zip(a.iter().zip(b)) {
            if self.is_owner(*id) {
                owned += dot(a, b)?;
            }
        }
        self.all_reduce_over_replica(owned)
    }

    fn all_reduce_over_replica(&self, owned: f64) -> Result<f64> {
        Ok(self.ranks.replica().all_reduce(vec![owned], Reduce::Sum)?[0])
    }
}
