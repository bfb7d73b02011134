//! What SET and RigL share: a sparse network that moves.
//!
//! It starts from a random mask, each layer at the sparsity. Every so many steps, until T_end, each layer drops
//! `alpha_t = fraction / 2 (1 + cos(pi t / T_end))` of its kept weights, the smallest, and grows as many where none
//! was kept. What has just been dropped does not grow back: where fewer places are free than would move, only so many
//! move. Grown weights start at zero with fresh state. A layer's count never changes.

use espalier_plan::config::{self, Scope};
use rayon::prelude::*;

use super::{Decision, Draw, Moment, Network, Words, count, random, select};
use crate::Result;
use crate::weights::ParameterId;

/// When and how much moves.
#[derive(Debug, Clone, Copy)]
pub struct Moves {
    sparsity: f64,
    every: u64,
    fraction: f64,
    until: f64,
}

impl Moves {
    /// As a run file has it.
    pub fn new(sparsity: f64, moving: config::Moving) -> Moves {
        Moves { sparsity, every: moving.every as u64, fraction: moving.fraction, until: moving.until }
    }

    /// Whether masks are drawn before a step.
    pub fn looks(&self, at: Moment) -> bool {
        at.step == 0 || self.due(at.step, at.steps).is_some()
    }

    /// The first masks.
    pub fn start(&self, network: &Network<'_>) -> Result<Draw> {
        let masks = network.keep_best(self.sparsity, Scope::Layer, |id| Ok(random::keys(network, id)))?;
        Ok(Draw { masks, ..Draw::default() })
    }

    /// The share of kept weights that moves before step `step` of `steps`, if it is time.
    pub fn due(&self, step: u64, steps: u64) -> Option<f64> {
        let end = self.until * steps as f64;
        let now = step > 0 && step.is_multiple_of(self.every) && (step as f64) < end;
        now.then(|| self.fraction / 2.0 * (1.0 + (std::f64::consts::PI * step as f64 / end).cos()))
    }

    /// Moves a share of each layer: `growth` gives the places that grow, so many of those a layer does not keep.
    pub fn draw(
        network: &Network<'_>,
        share: f64,
        mut growth: impl FnMut(ParameterId, usize) -> Result<Words>,
    ) -> Result<Decision> {
        let mut moved = 0;
        let mut masks = Vec::new();
        for id in network.candidates.iter().copied() {
            let moving = moving(network, id, share);
            if moving == 0 {
                continue;
            }
            let grown = growth(id, moving)?;
            debug_assert_eq!(count(&grown), moving, "{}", network.weights.name(id));
            let mut words =
                select::best(&network.bury(id, network.magnitudes(id)?)?, kept(network, id) - moving);
            words.iter_mut().zip(grown).for_each(|(word, grown)| *word |= grown);
            masks.push((id, words));
            moved += if network.groups.speaks_for(id) { moving } else { 0 };
        }
        let moved = network.sum(moved)?;
        match moved {
            0 => Ok(Decision::Wait),
            _ => {
                Ok(Decision::Prune(Draw { masks, note: format!("{moved} weights moved"), ..Draw::default() }))
            }
        }
    }
}

/// How many weights of a layer move.
pub fn moving(network: &Network<'_>, id: ParameterId, share: f64) -> usize {
    let kept = kept(network, id);
    ((share * kept as f64).round() as usize).min(network.len(id) - kept)
}

/// Of the places that a layer does not keep, the `count` with the largest keys.
pub fn best_free(
    network: &Network<'_>,
    id: ParameterId,
    keys: impl Fn(usize) -> u32 + Sync,
    count: usize,
) -> Result<Words> {
    let kept = network.masks.get(id).map(|mask| mask.read_words()).transpose()?;
    let free = |i: usize| kept.as_ref().is_some_and(|kept| !super::is_kept(kept, i));
    // A free place is above every other, whatever its key.
    let key = |i: usize| if free(i) { keys(i).max(1) } else { 0 };
    let keys: Vec<u32> = (0..network.len(id)).into_par_iter().map(key).collect();
    Ok(select::best(&keys, count))
}

fn kept(network: &Network<'_>, id: ParameterId) -> usize {
    network.masks.get(id).map_or(network.len(id), |mask| mask.kept())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_falls_with_a_cosine_and_ends() {
        let moves = Moves { sparsity: 0.9, every: 10, fraction: 0.4, until: 0.5 };
        let due: Vec<(u64, f64)> = (0..100).filter_map(|t| Some((t, moves.due(t, 100)?))).collect();
        assert_eq!(due.iter().map(|(t, _)| *t).collect::<Vec<_>>(), [10, 20, 30, 40]);
        // By hand: 0.2 (1 + cos(0.2 pi)) = 0.2 1.80901699...
        assert!((due[0].1 - 0.361803398).abs() < 1e-8 && (due[3].1 - 0.038196601).abs() < 1e-8);
    }
}
