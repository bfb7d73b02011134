//! Which layout is the fastest that fits: enumerates all that so many devices can be put to, bounds each from
//! below, simulates the most promising and ranks them.
//!
//! A bound is what a step takes at least: the passes of all micro-batches, split evenly, with the bubble
//! that the schedule cannot do without. Candidates are walked in the order of their bounds, until what is
//! left cannot get into the table any more.
//!
//! A candidate that does not fit is made smaller until it does: by pruned weights that rest as kept values,
//! which change no bit and on a GPU hardly any time; by gradients, then by weights that replicas shard (ZeRO-2
//! and 3), which are sent more often. None of it is ever faster, so where a candidate fits, nothing is tried.

mod apply;
mod choices;
mod explain;
mod fixed;

pub use explain::Advice;
pub use fixed::SearchConstraints;

use std::collections::HashMap;

use crate::engine::EngineState;
use crate::error::Error;
use crate::mesh::PerAxis;
use crate::schedule::ScheduleName;
use crate::simulate::{Candidate, Estimate, Simulation};

/// What a search found.
#[derive(Debug, Clone, PartialEq)]
pub struct SearchResult {
    /// The best of each mesh that fits, fastest first.
    pub ranked: Vec<Estimate>,
    /// The fastest that were simulated and do not fit, one of each mesh.
    pub too_large: Vec<Estimate>,
    /// Where none fits, the one that needs the least memory.
    pub smallest: Option<SmallestLayout>,
    /// Candidates there were,
    pub candidates: usize,
    /// and those whose lists were walked.
    pub simulated: usize,
}

/// A layout that does not fit, and what it needs on each device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SmallestLayout {
    /// How it is laid out.
    pub candidate: Candidate,
    /// Bytes.
    pub memory: u64,
}

/// So many devices, and what is already decided of their layout.
#[derive(Clone, Copy)]
pub struct LayoutSearch<'a> {
    /// What is to run.
    pub job: &'a Simulation<'a>,
    /// Devices, all of which are used.
    pub devices: usize,
    /// What a person has decided.
    pub fixed: &'a SearchConstraints,
    /// Rows of the table.
    pub rows: usize,
}

/// A candidate and the least that it can take.
struct Bounded {
    candidate: Candidate,
    seconds: f64,
}

/// What has been simulated.
#[derive(Default)]
struct FoundLayouts {
    /// The best of each mesh that fits,
    best: HashMap<PerAxis, Estimate>,
    /// and of those that do not.
    too_large: HashMap<PerAxis, Estimate>,
    smallest: Option<SmallestLayout>,
    simulated: usize,
}

impl LayoutSearch<'_> {
    /// The best layouts. An error where there is no candidate at all.
    pub fn run(&self) -> Result<SearchResult, Error> {
        let candidates = choices::candidates(self)?;
        let count = candidates.len();
        let mut bounded: Vec<Bounded> = candidates
            .into_iter()
            .filter_map(|candidate| Some(Bounded { seconds: self.bound(&candidate)?, candidate }))
            .collect();
        bounded.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let mut found = FoundLayouts::default();
        for Bounded { candidate, seconds } in bounded {
            if seconds > self.worst(&found.best) {
                break;
            }
            let mut next = Some(candidate);
            while let Some(candidate) = next.filter(|candidate| !self.try_candidate(candidate, &mut found)) {
                next = self.smaller(&candidate);
            }
        }
        let mut ranked = in_order(found.best);
        ranked.truncate(self.rows);
        let too_large = in_order(found.too_large);
        let smallest = found.smallest.filter(|_| ranked.is_empty());
        Ok(SearchResult { ranked, too_large, smallest, candidates: count, simulated: found.simulated })
    }

    /// Simulates a candidate, unless it is known to be of no use; whether it fits, or cannot be built.
    fn try_candidate(&self, candidate: &Candidate, found: &mut FoundLayouts) -> bool {
        let (mesh, most) = (candidate.axis_sizes(), self.job.cluster.memory());
        // One that does not fit is only shown where it is the first of its mesh, or where none fits and it is
        // the smallest.
        let is_shown = found.too_large.contains_key(&mesh);
        let smallest = match found.best.is_empty() {
            true => found.smallest.map_or(u64::MAX, |smallest| smallest.memory),
            false => 0,
        };
        if is_shown && self.job.least_memory(candidate).is_ok_and(|least| least > most && least >= smallest) {
            return false;
        }
        let Ok(memory) = self.job.memory(candidate) else { return true };
        let fits = memory.total() <= most;
        if !fits && memory.total() < smallest {
            found.smallest = Some(SmallestLayout { candidate: *candidate, memory: memory.total() });
        }
        if !fits && is_shown {
            return false;
        }
        found.simulated += 1;
        let Ok(estimate) = self.job.estimate(candidate) else { return true };
        let layouts = if fits { &mut found.best } else { &mut found.too_large };
        let known = layouts.get(&mesh).map_or(f64::INFINITY, |known: &Estimate| known.step_seconds);
        if estimate.step_seconds < known {
            layouts.insert(mesh, estimate);
        }
        fits
    }

    /// The same in less memory; none where that is fixed, or all is done.
    fn smaller(&self, candidate: &Candidate) -> Option<Candidate> {
        // Whose bytes the plan predicts itself: what others store is as their papers have it.
        if self.job.engine.state != EngineState::Exact {
            return None;
        }
        let compresses = candidate.compressed && !candidate.compressed_weights;
        if compresses && self.fixed.compressed_weights.is_none() {
            return Some(Candidate { compressed_weights: true, ..*candidate });
        }
        // Of copies of a stage, and of older versions of weights, none is a shard.
        let is_plain = candidate.pipeline == 1 || candidate.schedule.has_one_copy_of_weights();
        let shards = is_plain && self.fixed.zero.is_none() && (1..3).contains(&candidate.zero);
        shards.then_some(Candidate { zero: candidate.zero + 1, ..*candidate })
    }

    /// The time that a new mesh must beat to get into the table.
    fn worst(&self, best: &HashMap<PerAxis, Estimate>) -> f64 {
        let mut times: Vec<f64> = best.values().map(|estimate| estimate.step_seconds).collect();
        times.sort_by(f64::total_cmp);
        times.get(self.rows - 1).copied().unwrap_or(f64::INFINITY)
    }

    /// The least that a step of a candidate can take; none where it cannot be built.
    fn bound(&self, candidate: &Candidate) -> Option<f64> {
        let (passes, micro_batches) = self.job.micro_batch_seconds(candidate).ok()?;
        let each = passes / candidate.pipeline as f64;
        let waits = match candidate.schedule {
            // The gradients of weights fill what they can.
            ScheduleName::ZbH1 => 0.0,
            _ => (candidate.pipeline - 1) as f64 / candidate.chunks.unwrap_or(1) as f64,
        };
        Some(each * (micro_batches as f64 + waits))
    }
}

fn in_order(found: HashMap<PerAxis, Estimate>) -> Vec<Estimate> {
    let mut all: Vec<Estimate> = found.into_values().collect();
    // Of equal ones the plainest, so that every rank of a launcher that searches by itself finds the same.
    let plainness = |one: &Estimate| {
        let Candidate { data, pipeline, tensor, grid, .. } = one.candidate;
        (pipeline * tensor * grid[0] * grid[1], tensor, pipeline, grid, data)
    };
    let order = |a: &Estimate, b: &Estimate| {
        a.step_seconds.total_cmp(&b.step_seconds).then_with(|| plainness(a).cmp(&plainness(b)))
    };
    all.sort_by(order);
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::builtin;
    use crate::config::RunFile;
    use crate::engine::EngineProfile;
    use crate::plan::{DataFacts, Plan};
    use crate::spec::RecomputeMode;

    /// 4.8 billion weights at 90 %: 17 GB where they rest dense, 8 where they rest compressed, and a V100 has 16.
    #[test]
    fn compressed_weights_are_tried_where_nothing_else_fits() {
        let text = "[model]\nlayers = 24\nwidth = 4096\nheads = 32\ncontext = 512\nvocab = 256\n\
            [train]\nbatch = 1\nprecision = \"bf16\"\n[prune]\nmethod = \"random\"\nsparsity = 0.9\n";
        let facts = DataFacts { vocab: Some(256), ..DataFacts::default() };
        let found = |devices: usize, more: &str, fixed: &str| {
            let plan = Plan::new(RunFile::parse(&format!("{text}{more}"), &[]).unwrap(), facts).unwrap();
            let cluster = builtin("summit").unwrap();
            let job = Simulation::new(&plan, &cluster, EngineProfile::ESPALIER);
            let fixed = SearchConstraints::parse(fixed).unwrap();
            let found = LayoutSearch { job: &job, devices, fixed: &fixed, rows: 1 }.run().unwrap();
            found.ranked.first().map(|best| best.candidate.weights())
        };
        assert_eq!(found(1, "", ""), Some("compressed"));
        assert_eq!(found(1, "", "weights=dense"), None, "a person has decided");
        assert_eq!(found(2, "", ""), Some("dense"), "two have room");
        assert_eq!(found(2, "weights = \"compressed\"", ""), Some("compressed"), "as the run file says");
        assert_eq!(found(1, "", "state=dense"), None);
    }

    /// What the smallest layout needs is said where none fits, and not what the fastest does. Nodes need a
    /// network.
    #[test]
    fn where_none_fits_the_smallest_is_named() {
        let text = "[model]\nlayers = 24\nwidth = 4096\nheads = 32\ncontext = 512\nvocab = 256\n\
            [train]\nbatch = 8\nprecision = \"bf16\"\n";
        let facts = DataFacts { vocab: Some(256), ..DataFacts::default() };
        let plan = Plan::new(RunFile::parse(text, &[]).unwrap(), facts).unwrap();
        let mut cluster = builtin("summit").unwrap();
        cluster.network = None;
        let job = Simulation::new(&plan, &cluster, EngineProfile::ESPALIER);
        let fixed = SearchConstraints::default();
        let found = LayoutSearch { job: &job, devices: 2, fixed: &fixed, rows: 1 }.run().unwrap();
        let smallest = found.smallest.unwrap();
        assert_eq!(smallest.candidate.recompute, RecomputeMode::Block);
        let all =
            choices::candidates(&LayoutSearch { job: &job, devices: 2, fixed: &fixed, rows: 1 }).unwrap();
        let least =
            all.iter().filter_map(|candidate| Some(job.memory(candidate).ok()?.total())).min().unwrap();
        assert!(found.ranked.is_empty() && smallest.memory > cluster.memory() && smallest.memory <= least);
        let error = LayoutSearch { job: &job, devices: 12, fixed: &fixed, rows: 1 }.run().unwrap_err();
        assert!(error.to_string().starts_with("`network` is missing, and 12 devices"), "{error}");
    }

    /// 4.8 billion weights on GPUs of 16 GB: dense state of 16 bytes a weight has room on eight of them where all
    /// of it is sharded, and on two nodes where gradients are.
    #[test]
    fn replicas_shard_gradients_and_weights_where_they_must() {
        let text = "[model]\nlayers = 24\nwidth = 4096\nheads = 32\ncontext = 512\nvocab = 256\n\
            [train]\nbatch = 48\nprecision = \"bf16\"\n";
        let facts = DataFacts { vocab: Some(256), ..DataFacts::default() };
        let plan = Plan::new(RunFile::parse(text, &[]).unwrap(), facts).unwrap();
        let cluster = builtin("summit").unwrap();
        let job = Simulation::new(&plan, &cluster, EngineProfile::ESPALIER);
        let found = |devices: usize, fixed: &str| {
            let fixed = SearchConstraints::parse(fixed).unwrap();
            let found = LayoutSearch { job: &job, devices, fixed: &fixed, rows: 1 }.run().unwrap();
            found.ranked.first().map(|best| best.candidate.zero)
        };
        assert_eq!(found(8, "pipeline=1,tensor=1"), Some(3));
        assert_eq!(found(8, "pipeline=1,tensor=1,zero=1"), None, "a person has decided");
        assert_eq!(found(16, "pipeline=1,tensor=1"), Some(2));
        assert_eq!(found(16, "pipeline=1,tensor=1,zero=3"), Some(3));
        assert_eq!(found(8, "pipeline=2,schedule=chimera"), None, "copies of a stage are not shards");
    }
}
