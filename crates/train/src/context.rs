//! A rank as one value: all that it is given when it starts, and that no step changes.

use std::sync::Arc;

use espalier_comm::Reduce;
use espalier_data::{Dataset, Feed, Order, Split};
use espalier_nn::weights::{ParameterId, Weights};
use espalier_plan::Plan;
use espalier_plan::layout::LocalModel;
use espalier_plan::spec::Precision;
use espalier_tensor::ops::reduce::{dot, squared_norm_all};
use espalier_tensor::{DType, Device, Tensor};

use crate::Result;
use crate::parallel::Ranks;
use crate::parallel::groups::Groups;
use crate::parallel::pieces::Pieces;
use crate::stage::Stage;
use crate::step::{Sweep, Totals};

/// What a rank knows. Weights, masks and state are not here: they change.
#[derive(Debug)]
pub struct Context {
    /// What is to be done.
    pub plan: Plan,
    /// Steps of the whole run.
    pub steps: u64,
    /// Its place on the mesh, and its groups along the axes.
    pub ranks: Ranks,
    /// Who shares which parameter.
    pub groups: Groups,
    /// Who holds which pieces of its layers.
    pub pieces: Pieces,
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
        let dtype = dtype(plan.storage.precision);
        let stage = Stage::new(&plan, &ranks)?;
        Ok(Context {
            steps: plan.total_steps(dataset.len(Split::Train)) as u64,
            pieces: Pieces::of(&plan.layout, &ranks),
            groups: Groups::form(&plan, stage.placement(), &ranks)?,
            order: Order::new(plan.seed, dataset.len(Split::Train)),
            feed: Feed::new(dataset.clone(), device, dtype),
            device: device.clone(),
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

    /// The squared norm of tensors that belong to some parameters, over all ranks of a replica.
    pub fn squared_norm(&self, tensors: &[(ParameterId, &Tensor)]) -> Result<f64> {
        let own = tensors.iter().filter(|(id, _)| self.groups.is_owner(*id)).map(|(_, tensor)| *tensor);
        let own = squared_norm_all(&own.collect::<Vec<_>>())?;
        self.sum_over_replica(own)
    }

    /// The product of two vectors that have a tensor for each of some parameters, likewise.
    pub fn dot(&self, ids: &[ParameterId], a: &[Tensor], b: &[Tensor]) -> Result<f64> {
        let mut own = 0.0;
        for (id, (a, b)) in ids.iter().zip(a.iter().zip(b)) {
            if self.groups.is_owner(*id) {
                own += dot(a, b)?;
            }
        }
        self.sum_over_replica(own)
    }

    /// What came of the passes of all ranks, from this one's.
    pub fn sum(&self, own: Totals) -> Result<Totals> {
        let counted = if self.ranks.counts() { own } else { Totals::default() };
        Ok(Totals::from_numbers(&self.ranks.sum(counted.to_numbers())?))
    }

    fn sum_over_replica(&self, own: f64) -> Result<f64> {
        Ok(self.ranks.replica().all_reduce(vec![own], Reduce::Sum)?[0])
    }

    /// For passes that change no weights.
    pub fn sweep<'a>(&'a self, weights: &'a Weights) -> Sweep<'a> {
        Sweep {
            stage: &self.stage,
            others: self.ranks.stages(),
            weights,
            dataset: &self.dataset,
            device: &self.device,
            dtype: self.dtype,
        }
    }
}

/// The type that kernels compute in.
pub(crate) fn dtype(precision: Precision) -> DType {
    match precision {
        Precision::F32 => DType::F32,
        Precision::Bf16 => DType::Bf16,
    }
}
