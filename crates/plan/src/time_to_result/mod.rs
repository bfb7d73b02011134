//! Time to a result: how many steps it takes (a study's) times how long a step takes (the search's), for every
//! batch, sparsity and number of GPUs, and what follows: which choice is best, where more GPUs stop paying, and
//! whether pruning, whose steps are cheaper and more, is worth it.
//!
//! Hours are those of steps alone. Evaluation, checkpoints and the beginning of a run come on top.

mod curve;

pub use curve::{ConvergenceCurve, IntervalSource, RepeatCurves};

use serde::{Deserialize, Serialize};

use crate::cluster::Cluster;
use crate::simulate::{Candidate, Estimate};

/// Twice the GPUs pay as long as they shorten the time by this factor.
pub const DOUBLING_PAYS: f64 = 1.3;

/// One choice: how many GPUs, which batch, pruned how far.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ResultChoice {
    /// Devices: GPUs, or ranks where these are cores.
    pub gpus: usize,
    /// Samples in a step.
    pub batch: usize,
    /// The fraction of the prunable weights that is pruned.
    pub sparsity: f64,
    /// What a new run is to expect.
    pub steps: u64,
    /// K*: what the luckiest of the trials took.
    pub k_star: u64,
    /// The least and the most that are to be expected, where anything is known of that.
    pub steps_interval: Option<[u64; 2]>,
    /// Whether the batch lies beyond those that were studied.
    pub extrapolated: bool,
    /// Of the fastest layout that fits.
    pub step_seconds: f64,
    /// Whether steps of its kind were ever measured.
    #[serde(default)]
    pub measured: bool,
    /// All steps.
    pub hours: f64,
    /// The same for the interval of steps.
    pub hours_interval: Option<[f64; 2]>,
    /// Hours of all devices together.
    pub gpu_hours: f64,
    /// What these cost, where there is a price.
    pub cost: Option<f64>,
    /// What they draw, where that is known.
    pub kwh: Option<f64>,
    /// The layout in words.
    pub described: String,
    /// The same; none where the point was read from a file.
    #[serde(skip)]
    pub candidate: Option<Candidate>,
}

impl ResultChoice {
    /// The steps of a curve at a batch size, each of which takes what a search has found for so many devices.
    pub fn new(
        curve: &ConvergenceCurve,
        batch: usize,
        gpus: usize,
        found: &Estimate,
        cluster: &Cluster,
    ) -> ResultChoice {
        let whole = |steps: f64| steps.ceil().max(1.0) as u64;
        let steps = whole(curve.at(batch as f64));
        let steps_interval = curve.interval(batch as f64).map(|ends| ends.map(whole));
        let hours = |steps: u64| steps as f64 * found.slowest_seconds() / 3600.0;
        // Ranks of a machine's cores have all of them, however many ranks there are.
        let devices = if cluster.node.cores { cluster.node.devices } else { gpus };
        let gpu_hours = hours(steps) * devices as f64;
        ResultChoice {
            gpus,
            batch,
            sparsity: curve.sparsity,
            steps,
            k_star: whole(curve.k_star(batch as f64)),
            steps_interval,
            extrapolated: curve.is_extrapolated(batch),
            step_seconds: found.slowest_seconds(),
            measured: found.accuracy.is_some(),
            hours: hours(steps),
            hours_interval: steps_interval.map(|ends| ends.map(hours)),
            gpu_hours,
            cost: cluster.price_per_gpu_hour.map(|price| price * gpu_hours),
            kwh: cluster.watts_per_gpu.map(|watts| 1e-3 * watts * gpu_hours),
            described: found.candidate.to_string(),
            candidate: Some(found.candidate),
        }
    }
}

/// Every choice, and the curves of which they are made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ResultTimes {
    /// What is trained.
    pub model: String,
    /// Where: the cluster,
    pub cluster: String,
    /// its device,
    pub device: String,
    /// and by what.
    pub engine: String,
    /// One for each sparsity.
    pub curves: Vec<ConvergenceCurve>,
    /// The fastest first.
    #[serde(rename = "time_to_result")]
    pub points: Vec<ResultChoice>,
    /// What a reader should know of the numbers, a sentence each.
    pub notes: Vec<String>,
}

/// The fastest choice for which no doubling of GPUs was in vain.
#[derive(Debug, Clone, PartialEq)]
pub struct ScalingLimit<'a> {
    /// With the most GPUs that pay.
    pub point: &'a ResultChoice,
    /// With the next number of GPUs, where there is one.
    pub next: Option<&'a ResultChoice>,
}

impl ScalingLimit<'_> {
    /// How many times as fast the next number of GPUs is.
    pub fn next_speedup(&self) -> Option<f64> {
        self.next.map(|next| self.point.hours / next.hours)
    }
}

/// A sparsity against no pruning, each with its best batch and layout.
#[derive(Debug, Clone, PartialEq)]
pub struct PruningGain {
    pub sparsity: f64,
    /// GPUs, and how many times as fast the pruned network is there.
    pub speedups: Vec<(usize, f64)>,
    /// Numbers of GPUs on which it fits and the dense network does not.
    pub only_pruned: Vec<usize>,
}

impl PruningGain {
    /// Numbers of GPUs on which pruning saves time, or makes a run possible at all.
    pub fn pays_on(&self) -> Vec<usize> {
        let faster = self.speedups.iter().filter(|(_, speedup)| *speedup > 1.0).map(|(gpus, _)| *gpus);
        let mut all: Vec<usize> = self.only_pruned.iter().copied().chain(faster).collect();
        all.sort_unstable();
        all
    }
}

impl ResultTimes {
    /// Puts the fastest choices first, and of equally fast ones those that take fewer GPU-hours.
    pub fn sort(&mut self) {
        self.points
            .sort_by(|a, b| a.hours.total_cmp(&b.hours).then_with(|| a.gpu_hours.total_cmp(&b.gpu_hours)));
    }

    /// Choices of one sparsity, or of all; the fastest first.
    fn of(&self, sparsity: Option<f64>) -> impl Iterator<Item = &ResultChoice> {
        self.points.iter().filter(move |point| sparsity.is_none_or(|wanted| wanted == point.sparsity))
    }

    /// The fastest choice for each number of GPUs, by ascending number.
    pub fn by_gpus(&self, sparsity: Option<f64>) -> Vec<&ResultChoice> {
        let mut fastest: Vec<&ResultChoice> = Vec::new();
        for point in self.of(sparsity) {
            if fastest.iter().all(|known| known.gpus != point.gpus) {
                fastest.push(point);
            }
        }
        fastest.sort_by_key(|point| point.gpus);
        fastest
    }

    /// Choices of which none is both faster and takes fewer GPU-hours; the fastest first.
    pub fn pareto(&self, sparsity: Option<f64>) -> Vec<&ResultChoice> {
        let mut least = f64::INFINITY;
        let mut is_less = |point: &&ResultChoice| {
            let less = point.gpu_hours < least;
            least = least.min(point.gpu_hours);
            less
        };
        self.of(sparsity).filter(|point| is_less(point)).collect()
    }

    /// Where more GPUs stop paying, at one sparsity or at the best of each; none without any choice.
    pub fn scaling_limit(&self, sparsity: Option<f64>) -> Option<ScalingLimit<'_>> {
        let fastest = self.by_gpus(sparsity);
        let pays = |pair: &&[&ResultChoice]| {
            let doublings = (pair[1].gpus as f64 / pair[0].gpus as f64).log2();
            pair[0].hours / pair[1].hours >= DOUBLING_PAYS.powf(doublings)
        };
        let last = fastest.windows(2).take_while(pays).count();
        Some(ScalingLimit { point: fastest.get(last)?, next: fastest.get(last + 1).copied() })
    }

    /// What pruning buys, where there is a dense network to compare with.
    pub fn pruning_gains(&self) -> Vec<PruningGain> {
        let dense = self.by_gpus(Some(0.0));
        let gain = |curve: &ConvergenceCurve| {
            let mut gain =
                PruningGain { sparsity: curve.sparsity, speedups: Vec::new(), only_pruned: Vec::new() };
            for pruned in self.by_gpus(Some(curve.sparsity)) {
                match dense.iter().find(|dense| dense.gpus == pruned.gpus) {
                    Some(dense) => gain.speedups.push((pruned.gpus, dense.hours / pruned.hours)),
                    None => gain.only_pruned.push(pruned.gpus),
                }
            }
            gain
        };
        let has_dense = self.curves.iter().any(|curve| curve.sparsity == 0.0);
        self.curves.iter().filter(|curve| has_dense && curve.sparsity > 0.0).map(gain).collect()
    }
}

#[cfg(test)]
mod tests;
