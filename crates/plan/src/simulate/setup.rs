//! What a run takes before its first step: weights are initialised and, where a method does that first, pruned.
//!
//! Both are counted as bytes through the device's memory, by what was measured on an H200 and on two cores
//! (160 million f32 weights: 2.7 s dense, 3.3 s pruned to 90 %): they are bound by random numbers, and by the
//! atomics of the histograms that find a threshold, not by these bytes.

use super::{Candidate, Simulation};

/// Until a GPU has its first kernels.
const GPU_START: f64 = 1.0;
/// To initialise a weight takes as long as so many bytes, on a GPU and on cores;
const INITIALISED: [f64; 2] = [20.0, 340.0];
/// to rank it besides, and to compress what is kept.
const PRUNED: [f64; 2] = [1060.0, 70.0];

impl Simulation<'_> {
    /// Seconds before the first step of a candidate; none where weights are scored by passes over samples first.
    pub fn setup_seconds(&self, candidate: &Candidate) -> Option<f64> {
        let cores = usize::from(self.cluster.node.cores);
        let weights = (self.plan.parameters / (candidate.pipeline * candidate.tensor) as u64) as f64;
        let bytes = match self.plan.pruning.as_ref().map(|pruning| &pruning.method) {
            Some(method) if method.needs_no_pass() => INITIALISED[cores] + PRUNED[cores],
            Some(method) if method.at_start() => return None,
            _ => INITIALISED[cores],
        };
        let start = if self.cluster.node.cores { 0.0 } else { GPU_START };
        Some(start + self.kernels(candidate).pass(bytes * weights))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::builtin;
    use crate::engine::EngineProfile;
    use crate::plan::Plan;

    /// What 13 and 80 billion weights took on an H200, pruned by magnitude and at random before the first step.
    #[test]
    fn setup_takes_what_it_took() {
        let cluster = builtin("h200-node").unwrap();
        let seconds = |layers: usize, width: usize, prune: &str| {
            let text = format!(
                "[model]\nlayers = {layers}\nwidth = {width}\nheads = 64\ncontext = 512\nvocab = 256\n\
                 [train]\nbatch = 1\nprecision = \"bf16\"\n{prune}"
            );
            let plan = Plan::of_text(&text);
            let simulation = Simulation::new(&plan, &cluster, EngineProfile::ESPALIER);
            simulation.setup_seconds(&Candidate::of(&plan).unwrap())
        };
        let pruned = |method: &str| format!("[prune]\nmethod = \"{method}\"\nsparsity = 0.9\n");
        let is_near = |found: Option<f64>, measured: f64| (found.unwrap() / measured - 1.0).abs() < 0.15;
        assert!(is_near(seconds(40, 5120, &pruned("magnitude")), 4.5));
        assert!(is_near(seconds(100, 8192, &pruned("random")), 23.3));
        assert!(seconds(40, 5120, "").unwrap() < 3.0, "nothing is ranked");
        assert_eq!(seconds(40, 5120, &pruned("snip")), None, "that depends on the passes");
    }
}
