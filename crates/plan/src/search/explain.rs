//! Why the first is the first, what stops the others, and what more memory or more pruning would buy:
//! sentences about what a search found.

use super::{LayoutSearch, SearchResult};
use crate::cluster::Cluster;
use crate::error::Error;
use crate::plan::Plan;
use crate::simulate::{Breakdown, Estimate};
use crate::spec::{Input, RecomputeMode};

/// What one could change.
#[derive(Debug, Clone, PartialEq)]
pub struct Advice {
    /// In words: `1 GB more on each device`.
    pub change: String,
    /// The best with it.
    pub best: Estimate,
    /// Its time, of the best without.
    pub times_faster: f64,
}

impl SearchResult {
    /// One paragraph.
    pub fn why(&self, cluster: &Cluster) -> String {
        let mut text = match &self.ranked[..] {
            [] => String::new(),
            [only] => format!("No other mesh fits than that of {}.", only.candidate),
            [first, second, ..] => {
                let gap = 100.0 * (second.step_seconds / first.step_seconds - 1.0);
                let how = match gap {
                    ..0.0 if first.candidate.pipeline < second.candidate.pipeline && gap < -2.0 => {
                        format!("has the fewest stages that fit, and is {:.1} % slower", -gap)
                    }
                    ..0.0 => format!("is simpler, and no more than {:.1} % slower", -gap),
                    _ => format!("is {gap:.1} % faster"),
                };
                let mut text = format!("The first {how} than the second ({})", second.candidate);
                let (gains, costs) = differences(&first.breakdown, &second.breakdown, first.step_seconds);
                if !gains.is_empty() {
                    text += &format!(": it spends less on {}", gains.join(", "));
                    if !costs.is_empty() {
                        text += &format!(", and more on {}", costs.join(", "));
                    }
                }
                text + "."
            }
        };
        let faster = self.ranked.first().map_or(f64::INFINITY, |best| best.step_seconds);
        let stopped = self.too_large.iter().find(|large| large.step_seconds < faster);
        if let Some(large) = stopped {
            let gb = |bytes: u64| bytes as f64 / 1e9;
            text += &format!(
                " The fastest layout that does not fit, {}, would take at least {:.3} s and needs {:.1} GB per device, which has {:.1}.",
                large.candidate,
                large.step_seconds,
                gb(large.memory.total()),
                gb(cluster.memory())
            );
        }
        text.trim_start().to_owned()
    }
}

/// What one breakdown has less of than another, and more of, in per cent of a time; dust is left out.
fn differences(first: &Breakdown, second: &Breakdown, of: f64) -> (Vec<String>, Vec<String>) {
    let mut kinds: Vec<(&str, f64)> = first
        .kinds()
        .iter()
        .zip(second.kinds())
        .map(|((name, mine), (_, other))| (*name, 100.0 * (other - mine) / of))
        .filter(|(_, fraction)| fraction.abs() >= 0.5)
        .collect();
    kinds.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()));
    let named = |kinds: Vec<&(&str, f64)>| {
        kinds.into_iter().map(|(name, fraction)| format!("{name} ({:.1} %)", fraction.abs())).collect()
    };
    let (less, more) = kinds.iter().partition(|(_, fraction)| *fraction > 0.0);
    (named(less), named(more))
}

/// What of a device's memory, or of its computing, is much,
const MUCH: f64 = 0.5;
/// and what of the computing attention has where sequences are long.
const LONG: f64 = 0.2;

impl LayoutSearch<'_> {
    /// That ranks which split a sequence would win, where one sample is too much for a rank: its activations fill
    /// devices, or attention is most of the computing, and it takes recomputation or tensor parallelism to get by.
    pub fn context_parallelism(&self, found: &SearchResult) -> Option<String> {
        let job = self.job;
        let smallest = found.smallest.map(|smallest| smallest.candidate);
        let candidate = found.ranked.first().map(|best| best.candidate).or(smallest)?;
        let is_pressed =
            found.ranked.is_empty() || candidate.tensor > 1 || candidate.recompute != RecomputeMode::None;
        if !job.engine.is_ours() || self.devices == 1 || candidate.micro_batch > 1 || !is_pressed {
            return None;
        }
        let Input::Tokens { seq: context, .. } = job.plan.model.input else { return None };
        let activations = job.memory(&candidate).ok()?.activations as f64 / job.cluster.memory() as f64;
        let attention = job.attention_fraction(&candidate).ok()?;
        (attention >= MUCH || attention >= LONG && activations >= MUCH).then(|| {
            format!(
                "Context parallelism (ranks that split a sequence) is not built, and would help here: of one sample of \
                 {context} tokens, activations take {:.0} % of a device's memory and attention {:.0} % of the \
                 computing.",
                100.0 * activations,
                100.0 * attention
            )
        })
    }

    /// What one more GB on each device, and ten more points of sparsity, would buy.
    pub fn advice(&self, best: &Estimate, sparser: Option<&Plan>) -> Result<Vec<Advice>, Error> {
        let mut all = Vec::new();
        let mut larger = self.job.cluster.clone();
        larger.device.memory_gb += 1.0;
        let tries = [
            ("1 GB more memory per device".to_owned(), Some(self.job.plan), &larger),
            ("10 points more sparsity".to_owned(), sparser, self.job.cluster),
        ];
        for (change, plan, cluster) in tries {
            let Some(plan) = plan else { continue };
            let job = self.job.with(plan, cluster);
            let found = LayoutSearch { job: &job, rows: 1, ..*self }.run()?;
            if let Some(new) = found.ranked.into_iter().next() {
                let times_faster = best.step_seconds / new.step_seconds;
                all.push(Advice { change, best: new, times_faster });
            }
        }
        Ok(all)
    }
}
