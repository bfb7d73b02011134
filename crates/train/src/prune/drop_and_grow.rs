//! What SET and RigL share: a sparse network that moves.
//!
//! It starts from a random mask, each layer at the sparsity, or as the Erdos-Renyi-kernel distribution has
//! it. Every so many steps, until T_end, each layer drops `alpha_t = fraction / 2 (1 + cos(pi t / T_end))` of
//! its kept weights, the smallest, and grows as many where none is kept then: what has just been dropped may
//! come back, as published, with its value and state. Other grown weights start at zero, as does their first
//! moment; their second moment starts at the mean of the layer's (see `trainer/state_mask`). A layer's count
//! never changes.

use espalier_nn::weights::ParameterId;
use espalier_plan::pruning::DynamicSparsity;
use espalier_tensor::ops::compress::apply;
use espalier_tensor::{Category, Mask, Tensor};

use super::{Decision, MaskBits, Network, NewMasks, StepClock, count, differing, random};
use crate::Result;

/// When and how much moves.
#[derive(Debug, Clone, Copy)]
pub struct DropAndGrow {
    every: u64,
    fraction: f64,
    until: f64,
}

impl DropAndGrow {
    /// As a run file has it.
    pub fn new(moving: DynamicSparsity) -> DropAndGrow {
        DropAndGrow { every: moving.every as u64, fraction: moving.fraction, until: moving.until }
    }

    /// Whether masks change before a step.
    pub(crate) fn should_run(&self, at: StepClock) -> bool {
        at.step == 0 || self.due(at.step, at.steps).is_some()
    }

    /// Random masks before the first step; later, when it is time, `update` says what moves of a fraction.
    pub(crate) fn decide(
        &self,
        network: &Network<'_>,
        update: impl FnOnce(f64) -> Result<Decision>,
    ) -> Result<Decision> {
        if network.step == 0 {
            return Ok(Decision::Prune(self.start(network)?));
        }
        self.due(network.step, network.context.steps).map_or(Ok(Decision::Wait), update)
    }

    /// The masks before the first step: random ones.
    pub fn start(&self, network: &Network<'_>) -> Result<NewMasks> {
        let prune = network.context.plan.pruning.as_ref().expect("a run that prunes");
        let kept = prune.kept_by_parameter(&network.context.plan.model.parameters());
        let mask = |id: &ParameterId| -> Result<(ParameterId, MaskBits)> {
            let keys = network.exclude_pruned(*id, random::keys(network, *id)?)?;
            let kept = kept[id.0].expect("a candidate") as usize;
            Ok((*id, network.best(*id, &keys, kept.min(network.kept_count(*id)?))?))
        };
        let masks = network.candidates.iter().map(mask).collect::<Result<_>>()?;
        Ok(NewMasks { masks, ..NewMasks::default() })
    }

    /// The fraction of kept weights that moves before step `step` of `steps`, if it is time.
    pub fn due(&self, step: u64, steps: u64) -> Option<f64> {
        let end = self.until * steps as f64;
        let now = step > 0 && step.is_multiple_of(self.every) && (step as f64) < end;
        now.then(|| self.fraction / 2.0 * (1.0 + (std::f64::consts::PI * step as f64 / end).cos()))
    }

    /// Moves a fraction of each layer: `growth` gives the positions that grow, so many of those that are free.
    pub fn update_masks(
        network: &Network<'_>,
        fraction: f64,
        mut growth: impl FnMut(ParameterId, usize) -> Result<MaskBits>,
    ) -> Result<Decision> {
        let mut moved = 0;
        let mut masks = Vec::new();
        for id in network.candidates.iter().copied() {
            let moving = moving(network, id, fraction)?;
            if moving == 0 {
                continue;
            }
            let (mut bits, grown) = (staying(network, id, moving)?, growth(id, moving)?);
            debug_assert_eq!(
                network.context.model_parallel.count(id, count(&grown))?,
                moving,
                "{}",
                network.params.name(id)
            );
            bits.iter_mut().zip(grown).for_each(|(word, grown)| *word |= grown);
            if network.is_owner(id) {
                let before = network.params.mask(id).expect("what moves has a mask").read_words()?;
                moved += differing(&before, &bits) / 2;
            }
            masks.push((id, bits));
        }
        let moved = network.all_reduce_sum(moved)?;
        match moved {
            0 => Ok(Decision::Wait),
            _ => Ok(Decision::Prune(NewMasks {
                masks,
                note: format!("{moved} weights moved"),
                ..NewMasks::default()
            })),
        }
    }
}

/// How many weights of a layer are dropped and grown; none of a layer that is dense.
pub fn moving(network: &Network<'_>, id: ParameterId, fraction: f64) -> Result<usize> {
    let kept = network.kept_count(id)?;
    Ok(if kept == network.full_len(id) { 0 } else { (fraction * kept as f64).round() as usize })
}

/// What a layer keeps when so many, the smallest, are dropped.
fn staying(network: &Network<'_>, id: ParameterId, moving: usize) -> Result<MaskBits> {
    let keys = network.exclude_pruned(id, network.magnitudes(id)?)?;
    network.best(id, &keys, network.kept_count(id)? - moving)
}

/// Of the positions that are free once `count` weights are dropped, the `count` with the largest keys.
pub fn best_free(network: &Network<'_>, id: ParameterId, mut keys: Tensor, count: usize) -> Result<MaskBits> {
    let len = network.len(id);
    let mut free: MaskBits = staying(network, id, count)?.into_iter().map(|word| !word).collect();
    if let Some(last) = free.last_mut().filter(|_| !len.is_multiple_of(32)) {
        *last &= (1 << (len % 32)) - 1;
    }
    let free = Mask::within(&network.context.device, len, &free, Category::Workspace)?;
    apply(&mut keys, &free)?;
    network.best(id, &keys, count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fraction_falls_with_a_cosine_and_ends() {
        let moves = DropAndGrow { every: 10, fraction: 0.4, until: 0.5 };
        let due: Vec<(u64, f64)> = (0..100).filter_map(|t| Some((t, moves.due(t, 100)?))).collect();
        assert_eq!(due.iter().map(|(t, _)| *t).collect::<Vec<_>>(), [10, 20, 30, 40]);
        // By hand: 0.2 (1 + cos(0.2 pi)) = 0.2 1.80901699...
        assert!((due[0].1 - 0.361803398).abs() < 1e-8 && (due[3].1 - 0.038196601).abs() < 1e-8);
    }
}
