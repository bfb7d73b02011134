//! Pruning in the course of a run: asking the method, and putting weights and state under its new masks.

use std::collections::HashSet;

use espalier_data::DataSplit;
use espalier_nn::weights::{ParameterId, WeightStore};
use espalier_plan::memory::StateBytes;
use espalier_plan::pruning::PrunedKernels;
use espalier_plan::{Plan, Scoring};
use espalier_tensor::mask::MaskStorage;
use espalier_tensor::ops::sparse::SparseWeight;
use espalier_tensor::{Category, Device, Mask};

use super::Trainer;
use super::state_mask::set_state_mask;
use crate::prune::{self, Decision, LayerDensity, Network, NewMasks, PruneReport, StepClock};
use crate::state::{Param, ParamStore};
use crate::{Error, Result};

impl Trainer {
    /// Candidates of the model that are kept, and all of them.
    pub fn kept(&self) -> (u64, u64) {
        self.kept.iter().fold((0, 0), |(kept, all), layer| (kept + layer.kept, all + layer.of))
    }

    /// What is kept of each candidate, on whatever stage.
    pub fn kept_by_layer(&self) -> Vec<LayerDensity> {
        self.kept.clone()
    }

    /// What may be pruned of what this rank holds.
    pub(super) fn candidates(&self) -> impl Iterator<Item = ParameterId> {
        self.params.iter().filter(|(_, param)| param.plan.prunable).map(|(id, _)| id)
    }

    /// Counts them, each on one stage, and what gradients of them move.
    pub(super) fn count_kept(&mut self) -> Result<()> {
        let mut counts = vec![0; 2 * self.params.len()];
        for (id, param) in self.params.iter().filter(|(_, param)| param.plan.prunable && param.plan.is_owner)
        {
            counts[2 * id.0] = param.kept() as u64;
            counts[2 * id.0 + 1] = param.len() as u64;
        }
        let counts = self.context.ranks.all_reduce_over_replica(counts)?;
        let layers = counts.chunks(2).enumerate().filter(|(_, layer)| layer[1] > 0);
        let layer = |(i, layer): (usize, &[u64])| {
            let name = self.params.name(ParameterId(i)).to_owned();
            LayerDensity { name, kept: layer[0], of: layer[1] }
        };
        self.kept = layers.map(layer).collect();
        let mut lengths = self.context.plan.gradient_lengths(self.context.ranks.rank());
        for (id, param) in self.params.iter() {
            lengths[id.0] = param.state_len() as u64;
        }
        self.traffic = self.context.plan.traffic(self.context.ranks.rank(), &lengths)?;
        Ok(())
    }

    /// The candidates of which fewer than one in a hundred is left; where no more is asked for, fewer than
    /// half of it.
    fn thin(&self) -> Vec<LayerDensity> {
        let wanted = self.context.plan.pruning.as_ref().map_or(1.0, |prune| 1.0 - prune.sparsity);
        let least = if wanted > 0.01 { 0.01 } else { wanted / 2.0 };
        self.kept.iter().filter(|layer| layer.kept > 0 && layer.density() < least).cloned().collect()
    }

    /// The fraction of candidates that is gone.
    pub fn sparsity(&self) -> f64 {
        let (kept, all) = self.kept();
        if all == 0 { 0.0 } else { 1.0 - kept as f64 / all as f64 }
    }

    /// Bytes for each candidate weight, as they are now, over all stages: one may have no candidate. All
    /// ranks must ask.
    pub fn state_bytes(&self) -> Result<StateBytes> {
        let candidates: Vec<&Param> =
            self.params.iter().map(|(_, param)| param).filter(|param| param.plan.prunable).collect();
        let total = |of: &dyn Fn(&Param) -> usize| candidates.iter().map(|param| of(param) as u64).sum();
        let totals: Vec<u64> = vec![
            total(&Param::len),
            total(&Param::weight_bytes),
            self.gradient_bytes as u64,
            total(&Param::state_bytes),
            total(&Param::mask_bytes),
        ];
        let totals = self.context.ranks.all_reduce_over_replica(totals)?;
        let each = |bytes: u64| bytes as f64 / totals[0].max(1) as f64;
        Ok(StateBytes {
            weights: each(totals[1]),
            gradients: each(totals[2]),
            optimizer: each(totals[3]),
            mask: each(totals[4]),
        })
    }

    /// Records what weights, gradients, optimizer state and masks took in a step, at the peak of each.
    pub(super) fn record_state_peak(&mut self) {
        let last = self.take_state_peak();
        self.state_peak = [self.state_peak[0].max(last), last];
    }

    /// The most that each of these took since it was last asked, together.
    pub(super) fn take_state_peak(&self) -> u64 {
        const STATE: [Category; 4] =
            [Category::Weights, Category::Gradients, Category::Optimizer, Category::Mask];
        let ledger = self.context.device.ledger();
        STATE.map(|category| ledger.take_recent_peak(category) as u64).iter().sum()
    }

    /// The most that these took in any step of this process, and in the last one.
    pub fn state_peak(&self) -> [u64; 2] {
        self.state_peak
    }

    /// What the pruning method does after so many steps.
    pub(super) fn ask_pruner(&mut self, step: u64) -> Result<Decision> {
        let StepClock { epoch, .. } = self.step_clock(step);
        if self.should_run(step) {
            tracing::info!("asks the pruning method after {step} steps");
            self.average()?;
            self.scoring = self.scoring_in_memory()?.or(self.scoring);
        }
        let Some(mut pruner) = self.pruner.take() else { return Ok(Decision::Wait) };
        let candidates: Vec<ParameterId> = self.candidates().collect();
        let mut network = Network {
            context: &self.context,
            step,
            epoch,
            candidates: &candidates,
            params: &mut self.params,
            passes: self.scoring.map_or(1, |scoring| scoring.passes),
        };
        let decision = pruner.before_step(&mut network);
        self.pruner = Some(pruner);
        decision
    }

    fn step_clock(&self, step: u64) -> StepClock {
        let epoch =
            (self.context.dataset.len(DataSplit::Train) / self.context.plan.batch.samples).max(1) as u64;
        StepClock { step, steps: self.context.steps, epoch }
    }

    fn should_run(&self, step: u64) -> bool {
        self.pruner.as_ref().is_some_and(|pruner| pruner.should_run(self.step_clock(step)))
    }

    /// How candidates are scored by gradients in what memory there is, where the method does so.
    fn scoring_in_memory(&self) -> Result<Option<Scoring>> {
        let memory = self
            .memory
            .or_else(|| prune::memory_per_rank(&self.context.device, self.context.ranks.ranks_per_device()));
        self.context.plan.scoring(memory).map_err(Error::Plan)
    }

    /// How all candidates are scored by gradients before the next step, where they are: it may take as long
    /// as many steps.
    pub(crate) fn scores_next(&self) -> Result<Option<Scoring>> {
        if self.should_run(self.progress.step) { self.scoring_in_memory() } else { Ok(None) }
    }

    /// Puts weights and state under new masks, one parameter at a time.
    pub(super) fn apply(&mut self, new_masks: NewMasks) -> Result<PruneReport> {
        let before = self.context.device.ledger().total();
        let mut mask_stats = MaskStats::of(self.params.len());
        let weights =
            |params: &ParamStore| params.iter().map(|(_, param)| param.weight_bytes()).sum::<usize>();
        let weights_before = weights(&self.params);
        if new_masks.reset_state {
            self.params.drop_state();
            self.has_state = false;
            // Adam's correction of young moments counts from here.
            self.progress.updates = 0;
        }
        for (id, bits) in new_masks.masks {
            let compresses = self.params.compresses();
            let param = self.params.param_mut(id);
            // Workspace until it replaces the old one.
            let mask = Mask::within(&self.context.device, param.len(), &bits, Category::Workspace)?;
            param.zero_pruned(&mask)?;
            if self.has_state {
                let group = self.context.groups.of(param.plan.group);
                set_state_mask(param, &mask, compresses, group, &self.context.model_parallel)?;
            }
            let is_index = matches!(mask.form(), MaskStorage::Indices(_));
            mask_stats.add(id, if is_index { MaskOutcome::Indices } else { MaskOutcome::Bits });
            if mask.kept() > 0 {
                mask_stats.add(id, MaskOutcome::Left);
            }
            self.set_mask(id, mask)?;
            if self.params.sparse(id).is_some() {
                mask_stats.add(id, MaskOutcome::Sparse);
            }
        }
        if weights(&self.params) < weights_before {
            // Dense weights that are compressed now leave blocks of sizes that nobody asks for again.
            self.context.device.release_unused()?;
        }
        if !self.context.ranks.is_single() {
            self.context.ranks.check_replicas_agree("pruning masks", &self.params.mask_hash()?)?;
        }
        mask_stats.counts = self.context.ranks.all_reduce_over_replica(mask_stats.counts)?;
        self.count_kept()?;
        let (kept, of) = self.kept();
        Ok(PruneReport {
            kept,
            of,
            emptied: mask_stats.emptied().map(|id| self.params.name(id).to_owned()).collect(),
            thin: self.thin(),
            note: new_masks.note,
            distances: new_masks.distances,
            form: mask_stats.forms(),
            sparse: mask_stats.with_outcome(MaskOutcome::Sparse).count(),
            bytes: [before, self.context.device.ledger().total()],
        })
    }

    /// Gives a parameter a mask, and chooses how it is multiplied.
    pub(super) fn set_mask(&mut self, id: ParameterId, mask: Mask) -> Result<()> {
        let few = mask.kept() as f64 <= PrunedKernels::MOST_KEPT * mask.len() as f64;
        let sparse = few && self.sparse.contains(&id);
        let param = self.params.param_mut(id);
        let shape = param.plan.shard.shape();
        param.set_mask(mask, |mask| match shape[..] {
            [rows, columns] if sparse => Ok(Some(SparseWeight::new(mask, [rows, columns])?)),
            _ => Ok(None),
        })
    }

    /// Prunes now, whatever the run's own time for it.
    pub fn prune(&mut self) -> Result<Option<PruneReport>> {
        let at = self.context.plan.pruning.as_ref().map_or(0, |prune| prune.method.at());
        match self.ask_pruner(at)? {
            Decision::Prune(new_masks) => self.apply(new_masks).map(Some),
            Decision::Wait | Decision::Observe(_) => Ok(None),
        }
    }
}

/// The parameters that a plan wants multiplied without their zeros; an error on a GPU.
pub(super) fn sparse_products(
    plan: &Plan,
    params: &ParamStore,
    device: &Device,
) -> Result<HashSet<ParameterId>> {
    if plan.pruning.as_ref().is_none_or(|prune| prune.kernels == PrunedKernels::Dense) {
        return Ok(HashSet::new());
    }
    if let Device::Cuda(_) = device {
        let why =
            "on a GPU, where dense kernels are faster: set `device.kind` = \"cpu\", or leave it out".into();
        return Err(espalier_plan::Error::NoEffect { field: "prune.kernels".into(), why }.into());
    }
    let names = plan.model.linear_weights();
    Ok(names.iter().filter_map(|name| params.find(name)).filter(|id| params.holds(*id)).collect())
}

/// What became of the parameters that got masks, counted by parameter: stages add it up, since rank 0
/// does not hold them all.
struct MaskStats {
    parameters: usize,
    counts: Vec<u64>,
}

/// What may become of one.
#[derive(Clone, Copy)]
enum MaskOutcome {
    /// Its mask is stored as bits.
    Bits,
    /// Its mask is stored as a list of kept indices, which is smaller where few are kept.
    Indices,
    /// Something is left of it, here or in another rank's shard.
    Left,
    /// It is multiplied without its zeros.
    Sparse,
}

impl MaskStats {
    fn of(parameters: usize) -> MaskStats {
        MaskStats { parameters, counts: vec![0; (MaskOutcome::Sparse as usize + 1) * parameters] }
    }

    fn add(&mut self, id: ParameterId, outcome: MaskOutcome) {
        self.counts[outcome as usize * self.parameters + id.0] += 1;
    }

    /// The parameters with an outcome, on whatever stage.
    fn with_outcome(&self, outcome: MaskOutcome) -> impl Iterator<Item = ParameterId> {
        let counts = self.counts[outcome as usize * self.parameters..][..self.parameters].iter().enumerate();
        counts.filter(|(_, count)| **count > 0).map(|(i, _)| ParameterId(i))
    }

    /// The parameters that got masks which leave nothing, on whatever rank.
    fn emptied(&self) -> impl Iterator<Item = ParameterId> {
        let count = |outcome: MaskOutcome, id: usize| self.counts[outcome as usize * self.parameters + id];
        let masked = move |id: &usize| count(MaskOutcome::Bits, *id) + count(MaskOutcome::Indices, *id) > 0;
        (0..self.parameters)
            .filter(masked)
            .filter(move |id| count(MaskOutcome::Left, *id) == 0)
            .map(ParameterId)
    }

    fn forms(&self) -> String {
        let forms = [(MaskOutcome::Bits, "bits"), (MaskOutcome::Indices, "index")];
        let used = forms.into_iter().filter(|(outcome, _)| self.with_outcome(*outcome).next().is_some());
        used.map(|(_, form)| form).collect::<Vec<_>>().join(" and ")
    }
}
