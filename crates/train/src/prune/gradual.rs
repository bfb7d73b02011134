//! The smallest weights go, a few at a time (Zhu & Gupta 2017): after t steps the sparsity is
//! `s_t = s_f + (s_i - s_f) (1 - (t - start) / (end - start))^3`.

use espalier_plan::pruning::{PruneSpan, Scope, cubic};

use super::{Decision, Network, NewMasks, Pruner, StepClock};
use crate::Result;

/// Magnitude pruning on a cubic schedule.
#[derive(Debug)]
pub struct Gradual {
    /// s_i: the sparsity at the first pruning.
    pub initial: f64,
    /// s_f: the sparsity at the last.
    pub sparsity: f64,
    /// Over what the threshold is.
    pub scope: Scope,
    /// When it prunes.
    pub span: PruneSpan,
    /// Steps from one pruning to the next.
    pub every: u64,
}

impl Gradual {
    /// The sparsity to reach before step `step`, if it is time.
    pub fn due(&self, step: u64, steps: u64) -> Option<f64> {
        let (start, end) = self.span.of_run(steps);
        let now = step >= start && step <= end;
        if !now || !((step - start).is_multiple_of(self.every) || step == end) {
            return None;
        }
        Some(cubic(self.initial, self.sparsity, step, start, end))
    }
}

impl Pruner for Gradual {
    fn should_run(&self, at: StepClock) -> bool {
        self.due(at.step, at.steps).is_some_and(|sparsity| sparsity > 0.0)
    }

    fn run(&mut self, network: &mut Network<'_>) -> Result<Decision> {
        let sparsity = self.due(network.step, network.context.steps).expect("it runs where it is due");
        let masks = network.keep_best(sparsity, self.scope, |id| network.magnitudes(id))?;
        Ok(NewMasks::of(masks))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schedule_is_cubic_and_ends_where_it_should() {
        let span = PruneSpan { start: Some(10), end: 50 };
        let gradual = Gradual { initial: 0.5, sparsity: 0.9, scope: Scope::Global, span, every: 15 };
        let due: Vec<(u64, f64)> = (0..60).filter_map(|t| Some((t, gradual.due(t, 100)?))).collect();
        let steps: Vec<u64> = due.iter().map(|(step, _)| *step).collect();
        assert_eq!(steps, [10, 25, 40, 50]);
        // By hand: 0.9 - 0.4 (1 - 15/40)^3 = 0.9 - 0.4 0.244140625.
        assert!((due[1].1 - 0.80234375).abs() < 1e-12 && due[0].1 == 0.5 && due[3].1 == 0.9);
        let open_ended = Gradual { span: PruneSpan { end: 0, ..span }, ..gradual };
        assert_eq!((0..=100).rev().find_map(|t| open_ended.due(t, 100)), Some(0.9));
    }
}
