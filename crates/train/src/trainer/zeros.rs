//! Zeros of what a run starts from. Checkpoints of ours say by masks which weights were pruned; a folder that
//! another program wrote, or that was exported, has zeros in their place, and training would bring them back.

use espalier_nn::weights::ParameterId;
use espalier_plan::ParamPlan;
use espalier_tensor::Mask;

use super::Trainer;
use crate::Result;
use crate::checkpoint::Checkpoint;
use crate::prune::bits_of_shard;
use crate::prune::keep::{check_zeros, nonzero_bits};

impl Trainer {
    /// Puts every candidate that has zeros, and no mask, under one that keeps the others. All ranks must.
    pub(super) fn keep_zeros(&mut self) -> Result<()> {
        let mut zeros = vec![0; self.params.len()];
        let mut bits_by_id = Vec::new();
        for id in self.unmasked() {
            let bits = nonzero_bits(&self.params.param(id).dense()?.read_f32()?);
            let kept: usize = bits.iter().map(|word| word.count_ones() as usize).sum();
            zeros[id.0] = (self.params.param(id).len() - kept) as u64;
            bits_by_id.push((id, bits));
        }
        // Those that hold shards of a parameter have masks of it together, or none.
        let zeros = self.context.ranks.all_reduce_over_replica(zeros)?;
        for (id, bits) in bits_by_id.into_iter().filter(|(id, _)| zeros[id.0] > 0) {
            let len = self.params.param(id).len();
            self.set_mask(id, Mask::new(&self.context.device, len, &bits)?)?;
        }
        self.count_kept()
    }

    /// Puts every candidate under a mask of what is not zero in a checkpoint, before its weights are read, so
    /// that those that rest compressed never are dense together.
    pub(super) fn take_zeros(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        for id in self.candidates().collect::<Vec<_>>() {
            let ParamPlan { shard, .. } = self.context.param(id);
            let elements = shard.full_shape().iter().product();
            let bits = checkpoint.nonzero_bits(self.params.name(id), elements)?;
            let mask = Mask::new(&self.context.device, shard.len(), &bits_of_shard(&bits, shard))?;
            self.set_mask(id, mask)?;
        }
        self.count_kept()
    }

    /// An error where the candidates have no zeros that a run could keep, or not so many. All ranks must ask.
    pub(super) fn check_zeros(&self, sparsity: f64) -> Result<()> {
        let (mut zeros, mut all) = (0, 0);
        for id in self.candidates().filter(|id| self.context.is_owner(*id)) {
            let weights = self.params.param(id).dense()?.read_f32()?;
            zeros += weights.iter().filter(|weight| **weight == 0.0).count() as u64;
            all += weights.len() as u64;
        }
        let counts = self.context.ranks.all_reduce_over_replica(vec![zeros, all])?;
        Ok(check_zeros(counts[0], counts[1], sparsity)?)
    }

    /// The fraction of the candidates that is zero and under no mask. All ranks must ask.
    pub fn zeros(&self) -> Result<f64> {
        let mut zeros = 0;
        for id in self.unmasked() {
            // Also where it counts elsewhere: ranks may have shards of it.
            let weights = self.params.param(id).dense()?.read_f32()?;
            if self.context.is_owner(id) {
                zeros += weights.iter().filter(|weight| **weight == 0.0).count() as u64;
            }
        }
        let zeros = self.context.ranks.all_reduce_over_replica(vec![zeros])?[0];
        Ok(zeros as f64 / self.kept().1.max(1) as f64)
    }

    fn unmasked(&self) -> Vec<ParameterId> {
        self.candidates().filter(|id| self.params.mask(*id).is_none()).collect()
    }
}
