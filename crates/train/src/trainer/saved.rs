//! What a trainer saves, and how it goes back to it: its own run's checkpoints, or the weights and masks of another's.

use std::path::PathBuf;

use espalier_tensor::Mask;

use super::Trainer;
use crate::checkpoint::{Checkpoint, Checkpoints, MASKS, MODEL, OPTIMIZER, PRUNER, Saved, Stored, Wanted};
use crate::state::Optimizer;
use crate::weights::ParameterId;
use crate::{Error, Result};

impl Trainer {
    /// Saves everything that the next step depends on. All ranks must.
    pub fn save(&mut self, checkpoints: &Checkpoints) -> Result<PathBuf> {
        self.average()?;
        self.ready_optimizer()?;
        let optimizer = self.optimizer.as_ref().expect("just made");
        let tensors = |(name, tensor): (&str, _)| (name.to_owned(), Stored::Tensor(tensor));
        let mut files: Vec<(&str, Saved<'_>)> =
            vec![(MODEL, self.weights.named().map(tensors).collect()), (OPTIMIZER, optimizer.saved())];
        // Also where nothing of this stage is pruned: another's may be.
        let mask = |(id, mask): (ParameterId, &Mask)| {
            Ok((self.weights.name(id).to_owned(), Stored::Words(mask.read_words()?)))
        };
        let masks: Saved<'_> = self.masks.iter().map(mask).collect::<Result<_>>()?;
        let remembered = self.pruner.iter().flat_map(|pruner| pruner.save());
        let remembered: Saved<'_> = remembered.map(|(name, words)| (name, Stored::Words(words))).collect();
        files.extend(
            [(MASKS, masks), (PRUNER, remembered)].into_iter().filter(|(_, saved)| !saved.is_empty()),
        );
        checkpoints.save(&self.progress, files, &self.context.ranks)
    }

    /// Goes back to the newest whole checkpoint, if there is one. All ranks must.
    pub fn load(&mut self, checkpoints: &Checkpoints, report: impl FnMut(&Error)) -> Result<Option<PathBuf>> {
        let Some(whole) = checkpoints.latest(&self.context.ranks, report)? else { return Ok(None) };
        self.restore(&whole)?;
        Ok(Some(whole.path().to_owned()))
    }

    /// Goes back to a checkpoint. All ranks must.
    pub fn restore(&mut self, whole: &Checkpoint) -> Result<()> {
        self.take_masks(whole)?;
        let mut optimizer = Optimizer::new(&self.context.plan, &self.weights, &self.masks, self.sharing())?;
        whole.fill(&mut [self.weights.wanted(), optimizer.wanted()])?;
        if let Some(pruner) = &mut self.pruner {
            pruner.load(whole.words(PRUNER)?);
        }
        self.optimizer = Some(optimizer);
        self.progress = whole.progress().clone();
        self.together = (self.progress.step, self.context.ranks.sent());
        Ok(())
    }

    /// Starts from the weights and masks of a checkpoint of another run, dense or pruned, in either precision, with fresh
    /// state: an exact master, where there is one, begins at the weight as this run holds it.
    pub fn start_from(&mut self, whole: &Checkpoint) -> Result<()> {
        self.take_masks(whole)?;
        self.refuse_more_pruned(whole)?;
        whole.fill(&mut [Wanted { converts: true, ..self.weights.wanted() }])
    }

    /// An error if a checkpoint, whose masks were taken, is pruned further than this run will prune.
    pub fn refuse_more_pruned(&self, whole: &Checkpoint) -> Result<()> {
        let (kept, all) = self.kept();
        let wanted = self.context.plan.pruning.as_ref().map(|prune| prune.sparsity);
        if let Some(sparsity) = wanted.filter(|sparsity| self.is_pruned_beyond(*sparsity)) {
            return Err(whole.refuse(format!(
                "it is pruned already to {:.4} ({kept} of {all} weights are left), and this run prunes to {sparsity}",
                self.sparsity()
            )));
        }
        Ok(())
    }

    /// Whether more is gone than so large a share of the candidates.
    pub fn is_pruned_beyond(&self, sparsity: f64) -> bool {
        self.sparsity() > sparsity + 0.5 / self.kept().1.max(1) as f64
    }

    fn take_masks(&mut self, whole: &Checkpoint) -> Result<()> {
        let mut stored = whole.words(MASKS)?;
        for id in (0..self.weights.parameters()).map(ParameterId) {
            let name = self.weights.name(id).to_owned();
            let Some(words) = stored.remove(&name).filter(|_| self.weights.holds(id)) else { continue };
            let len = self.weights.get(id).len();
            let ragged = !len.is_multiple_of(32) && words.last().is_some_and(|last| last >> (len % 32) != 0);
            if words.len() != len.div_ceil(32) || ragged {
                return Err(whole.refuse(format!("the mask of {name} is not one of {len} weights")));
            }
            self.set_mask(id, Mask::new(&self.context.device, len, &words)?)?;
        }
        if let Some(name) = stored.into_keys().next() {
            return Err(whole.refuse(format!("it has a mask for {name}, which this model has not")));
        }
        self.count_kept()
    }
}
