//! What a trainer saves, and how it goes back to it: its own run's checkpoints, or the weights and masks of
//! another's.

use std::collections::BTreeMap;
use std::path::PathBuf;

use espalier_plan::pruning::PruneMethod;
use espalier_plan::spec::Precision;
use espalier_plan::{ParamPlan, Shard};
use espalier_tensor::Mask;

use super::Trainer;
use crate::checkpoint::{
    Checkpoint, CheckpointTensor, Checkpoints, MASKS, MODEL, NamedTensors, OPTIMIZER, PRUNER, load_requests,
    state_to_save, weights_load_request, weights_to_save,
};
use crate::prune::{Pruner, PrunerState};
use crate::{Error, Result};

impl Trainer {
    /// Saves everything that the next step depends on. All ranks must.
    pub fn save(&mut self, checkpoints: &Checkpoints) -> Result<PathBuf> {
        self.average()?;
        self.ready_optimizer()?;
        let mut files: Vec<(&str, NamedTensors<'_>)> =
            vec![(MODEL, weights_to_save(&self.params)?), (OPTIMIZER, state_to_save(&self.params))];
        // Also where nothing of this stage is pruned: another's may be.
        let masked = self.params.iter().filter_map(|(_, param)| Some((&param.plan, param.mask()?)));
        let mask = |(plan, mask): (&ParamPlan, &Mask)| {
            Ok((plan.name.clone(), CheckpointTensor::packed(mask.read_words()?, &plan.shard, 1)))
        };
        let masks: NamedTensors<'_> = masked.map(mask).collect::<Result<_>>()?;
        let pruner_state = match &self.pruner {
            Some(pruner) => self.pruner_tensors(&**pruner)?,
            None => NamedTensors::default(),
        };
        files.extend(
            [(MASKS, masks), (PRUNER, pruner_state)].into_iter().filter(|(_, saved)| !saved.is_empty()),
        );
        checkpoints.save(&self.progress, files, &self.context.ranks)
    }

    /// Goes back to the newest intact checkpoint, if there is one. All ranks must.
    pub fn load(&mut self, checkpoints: &Checkpoints, report: impl FnMut(&Error)) -> Result<Option<PathBuf>> {
        let Some(checkpoint) = checkpoints.latest(&self.context.ranks, report)? else { return Ok(None) };
        self.restore(&checkpoint)?;
        Ok(Some(checkpoint.path().to_owned()))
    }

    /// Goes back to a checkpoint. All ranks must.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        self.take_masks(checkpoint)?;
        self.optimizer.make_state(&mut self.params)?;
        let state_tensors = self.optimizer.tensors(self.params.dtype());
        checkpoint.fill(&mut load_requests(&mut self.params, state_tensors)?)?;
        if let Some(mut pruner) = self.pruner.take() {
            pruner.load(self.load_pruner_state(&*pruner, checkpoint)?);
            self.pruner = Some(pruner);
        }
        (self.has_state, self.origin) = (true, None);
        self.progress = checkpoint.progress().clone();
        self.last_sync = (self.progress.step, self.context.ranks.sent());
        Ok(())
    }

    /// Starts from the weights and masks of a checkpoint of another run, dense or pruned, in either
    /// precision, with fresh state: an exact master, where there is one, begins at the number that is there,
    /// before it is rounded to the weight. What is zero there stays so where the run file asks for it.
    pub fn start_from(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        self.take_masks(checkpoint)?;
        let pruning = self.context.plan.pruning.as_ref();
        let keeps = pruning.filter(|pruning| pruning.method == PruneMethod::Keep);
        let sparsity = keeps.map(|pruning| pruning.sparsity);
        if sparsity.is_some() {
            self.take_zeros(checkpoint)?;
        }
        let plan = &self.context.plan;
        checkpoint.start(weights_load_request(&mut self.params)?, &plan.model)?;
        let rounds = plan.storage.precision == Precision::Bf16 && checkpoint.is_finer_than_bf16();
        self.origin = rounds.then(|| checkpoint.clone());
        if plan.keep_zeros {
            self.keep_zeros()?;
        }
        if let Some(sparsity) = sparsity {
            self.check_zeros(sparsity)?;
        }
        self.refuse_more_pruned(checkpoint)
    }

    /// An error if a checkpoint, whose masks were taken, is pruned further than this run will prune.
    pub(crate) fn refuse_more_pruned(&self, checkpoint: &Checkpoint) -> Result<()> {
        let (kept, all) = self.kept();
        let wanted = self.context.plan.pruning.as_ref().map(|prune| prune.sparsity);
        if let Some(sparsity) = wanted.filter(|sparsity| self.is_pruned_beyond(*sparsity)) {
            return Err(checkpoint.refuse(format!(
                "it is pruned already to {:.4} ({kept} of {all} weights are left), and this run prunes to {sparsity}",
                self.sparsity()
            )));
        }
        Ok(())
    }

    /// Whether more is gone than so large a fraction of the candidates.
    pub(crate) fn is_pruned_beyond(&self, sparsity: f64) -> bool {
        self.sparsity() > sparsity + 0.5 / self.kept().1.max(1) as f64
    }

    /// What the pruning method remembers, as a checkpoint holds it.
    fn pruner_tensors(&self, pruner: &dyn Pruner) -> Result<NamedTensors<'_>> {
        let stored = |(name, values): (String, Vec<u32>)| {
            let kind = pruner.state_kind(&name).expect("a name that the method has given");
            let stored = match self.packing(kind).flatten() {
                Some((shard, bits)) => CheckpointTensor::packed(values, &shard, bits),
                None => CheckpointTensor::U32(values),
            };
            (name, stored)
        };
        Ok(pruner.save()?.into_iter().map(stored).collect())
    }

    /// What of a checkpoint the pruning method remembers on this rank.
    fn load_pruner_state(
        &self,
        pruner: &dyn Pruner,
        checkpoint: &Checkpoint,
    ) -> Result<BTreeMap<String, Vec<u32>>> {
        let mut recalled = BTreeMap::new();
        for name in checkpoint.names(PRUNER) {
            let Some(packing) = pruner.state_kind(name).and_then(|kind| self.packing(kind)) else {
                continue;
            };
            let values = match packing {
                Some((shard, bits)) => checkpoint.packed(PRUNER, name, &shard, bits)?,
                None => checkpoint.u32_values(PRUNER, name)?,
            };
            recalled.extend(values.map(|values| (name.to_owned(), values)));
        }
        Ok(recalled)
    }

    /// Of which shard, and in how many bits a weight, a method saves something, if not the same on every rank;
    /// nothing where it is of a tensor that this rank does not hold.
    fn packing(&self, kind: PrunerState<'_>) -> Option<Option<(Shard, usize)>> {
        let (name, bits) = match kind {
            PrunerState::Replicated => return Some(None),
            PrunerState::MaskOf(name) => (name, Some(1)),
            PrunerState::ValuesOf(name) => (name, None),
            PrunerState::NumbersOf(name) => (name, Some(32)),
        };
        let (shard, dtype) = match self.params.find(name).map(|id| self.params.param(id)) {
            Some(param) if param.is_here() => (param.plan.shard.clone(), param.dtype()),
            Some(_) => return None,
            None => {
                let (_, statistic) = self.params.named().find(|(named, _)| *named == name)?;
                (Shard::full(statistic.shape()), statistic.dtype())
            }
        };
        Some(Some((shard, bits.unwrap_or(8 * dtype.bytes()))))
    }

    fn take_masks(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        for name in checkpoint.names(MASKS) {
            let Some(id) = self.params.find(name) else {
                return Err(checkpoint.refuse(format!("it has a mask for {name}, which this model has not")));
            };
            let ParamPlan { shard, is_here: true, .. } = self.context.param(id) else { continue };
            let bits = checkpoint.packed(MASKS, name, shard, 1)?.expect("a name of this file");
            self.set_mask(id, Mask::new(&self.context.device, shard.len(), &bits)?)?;
        }
        self.count_kept()
    }
}
