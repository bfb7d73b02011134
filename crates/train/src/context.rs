//! A rank as one value: all that it is given when it starts, and that no step changes.

use std::sync::Arc;

use espalier_comm::Reduce;
use espalier_data::{Dataset, Feed, Order, Split};
use espalier_nn::weights::ParameterId;
use espalier_plan::layout::LocalModel;
use espalier_plan::{ParamPlan, Plan, RankParams};
use espalier_tensor::ops::reduce::{dot, squared_norm_all};
use espalier_tensor::{DType, Device, Tensor};

use crate::Result;
use crate::parallel::Ranks;
use crate::parallel::groups::Groups;
use crate::parallel::model::ModelParallel;
use crate::stage::Stage;

/// What a rank knows. Weights, masks and state are not here: they change.
#[derive(Debug)]
pub struct Context {
    /// What is to be done.
    pub plan: Plan,
    /// Steps of the whole run.
    pub steps: u64,
    /// Its place on the mesh, and its groups along the axes.
    pub ranks: Ranks,
    /// What it has of each parameter, and with whom.
    pub params: RankParams,
    /// The groups that share parameters.
    pub groups: Groups,
    /// The ranks that have parts of the same layers.
    pub peers: ModelParallel,
    /// The parts of the model that it holds.
    pub stage: Stage,
    /// The device that holds its tensors.
    pub device: Device,
    /// The type that its kernels compute in.
    pub dtype: DType,
    /// Where samples come from.
    pub dataset: Arc<Dataset>,
    /// The order in which training samples are met.
    pub order: Order,
    /// Training batches, the next one ahead of its time.
    pub feed: Feed,
}

impl Context {
    /// A rank of a plan; all ranks of the world must come.
    pub fn new(
        plan: Plan,
        dataset: impl Into<Arc<Dataset>>,
        device: &Device,
        ranks: Ranks,
    ) -> Result<Context> {
        let dataset = dataset.into();
        let dtype = espalier_nn::dtype(plan.storage.precision);
        let stage = Stage::new(&plan, &ranks)?;
        let params = plan.params(ranks.rank())?;
        Ok(Context {
            steps: plan.total_steps(dataset.len(Split::Train)) as u64,
            peers: ModelParallel::of(&plan.layout, &ranks),
            groups: Groups::form(&plan, &params, &ranks)?,
            order: Order::new(plan.seed, dataset.len(Split::Train)),
            feed: Feed::new(dataset.clone(), device, dtype),
            device: device.clone(),
            params,
            ranks,
            stage,
            dtype,
            dataset,
            plan,
        })
    }

    /// The rank's own model, cut along every axis that cuts tensors.
    pub fn local(&self) -> &LocalModel {
        self.plan.layout.of(self.ranks.place())
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
        let own = tensors.iter().filter(|(id, _)| self.is_owner(*id)).map(|(_, tensor)| *tensor);
        let own = squared_norm_all(&own.collect::<Vec<_>>())?;
        self.sum_over_replica(own)
    }

    /// The product of two vectors that have a tensor for each of some parameters, likewise.
    pub fn dot(&self, ids: &[ParameterId], a: &[Tensor], b: &[Tensor]) -> Result<f64> {
        let mut own = 0.0;
        for (id, (a, b)) in ids.iter().zip(a.iter().zip(b)) {
            if self.is_owner(*id) {
                own += dot(a, b)?;
            }
        }
        self.sum_over_replica(own)
    }

    fn sum_over_replica(&self, own: f64) -> Result<f64> {
        Ok(self.ranks.replica().all_reduce(vec![own], Reduce::Sum)?[0])
    }
}
