//! Which layout is the fastest that fits: enumerates all that so many devices can be put to, bounds each from
//! below, simulates the most promising and ranks them.
//!
//! A bound is what a step takes at least: the passes of all micro-batches, split evenly, with the bubble
//! that the schedule cannot do without. Candidates are walked in the order of their bounds, until what is
//! left cannot get into the table any more. Of layouts that are nearly as fast as the fastest the simplest is
//! preferred: a prediction is not exact enough to tell them apart, and people have to run them.
//!
//! A candidate that does not fit is made smaller until it does: by pruned weights that rest as kept values,
//! which change no bit and on a GPU hardly any time; by gradients, then by weights that replicas shard (ZeRO-2
//! and 3), which are sent more often. None of it is ever faster, so where a candidate fits, nothing is tried. One
//! that recomputes nothing is also tried with the fewest recomputed blocks with which it fits.

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
use crate::spec::RecomputeMode;

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

/// How much slower a simpler layout may be to be preferred.
const NEARLY: f64 = 1.02;

/// What has been simulated.
#[derive(Default)]
struct FoundLayouts {
    /// Those of each mesh that fit and are nearly as fast as the fastest of them,
    best: HashMap<PerAxis, Vec<Estimate>>,
    /// and the fastest of those that do not.
    too_large: HashMap<PerAxis, Estimate>,
    smallest: Option<SmallestLayout>,
    simulated: usize,
}

impl LayoutSearch<'_> {
    /// The best layouts. An error where there is no candidate at all.
    pub fn run(&self) -> Result<SearchResult, Error> {
        let candidates = choices::candidates(self)?;
        let count = candidates.len();
        let mut bounded = Vec::new();
        let mut unbuilt: Option<(Candidate, Error)> = None;
        for candidate in candidates {
            match self.bound(&candidate) {
                Ok(seconds) => bounded.push(Bounded { candidate, seconds }),
                // The model's own limits are on tensor ranks.
                Err(why) if unbuilt.as_ref().is_none_or(|(other, _)| candidate.tensor < other.tensor) => {
                    unbuilt = Some((candidate, why));
                }
                Err(_) => {}
            }
        }
        if let Some((candidate, why)) = unbuilt.filter(|_| bounded.is_empty()) {
            return Err(self.none_can_be_built(&candidate, why));
        }
        bounded.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let mut found = FoundLayouts::default();
        for Bounded { candidate, seconds } in bounded {
            let best = found.best.values().map(|near| fastest(near)).fold(f64::INFINITY, f64::min);
            if seconds > self.worst(&found.best).max(NEARLY * best) {
                break;
            }
            let mut next = Some(candidate);
            while let Some(candidate) = next.filter(|candidate| !self.try_candidate(candidate, &mut found)) {
                if let Some(partly) = self.partly_recomputed(&candidate) {
                    self.try_candidate(&partly, &mut found);
                }
                next = self.smaller(&candidate);
            }
        }
        let batch = self.job.plan.batch.samples;
        let simplest = found.best.into_values().filter_map(|near| in_order(near, batch).into_iter().next());
        let mut ranked = in_order(simplest.collect(), batch);
        if self.job.engine.fewest_stages {
            ranked.sort_by_key(|estimate| estimate.candidate.pipeline);
        }
        ranked.truncate(self.rows);
        let mut too_large: Vec<Estimate> = found.too_large.into_values().collect();
        too_large.sort_by(|a, b| a.step_seconds.total_cmp(&b.step_seconds));
        let smallest = found.smallest.filter(|_| ranked.is_empty());
        Ok(SearchResult { ranked, too_large, smallest, candidates: count, simulated: found.simulated })
    }

    /// Why not even the candidate with the fewest tensor ranks; in the error's own words where these are a
    /// person's choice, or not to blame.
    fn none_can_be_built(&self, candidate: &Candidate, why: Error) -> Error {
        if self.fixed.tensor.is_some() || candidate.tensor == 1 {
            return why;
        }
        let (devices, batch) = (self.devices, self.job.plan.batch.samples);
        Error::Ranks(format!(
            "no layout of {devices} devices for a batch of {batch} can be built, not even the one with the \
             fewest tensor-parallel ranks ({candidate}): {why}"
        ))
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
        let Ok(estimate) = self.job.estimate_of(candidate, memory) else { return true };
        match fits {
            true => {
                let near = found.best.entry(mesh).or_default();
                near.push(estimate);
                let fastest = fastest(near);
                near.retain(|one| one.step_seconds <= NEARLY * fastest);
            }
            // The first, since its mesh has none yet.
            false => drop(found.too_large.insert(mesh, estimate)),
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

    /// The same with the fewest recomputed blocks with which it fits; none where those are all that there
    /// are, which is a candidate by itself.
    fn partly_recomputed(&self, candidate: &Candidate) -> Option<Candidate> {
        let is_free = self.job.engine.is_ours() && self.fixed.recompute.is_none();
        if !is_free || candidate.recompute != RecomputeMode::None {
            return None;
        }
        let most = self.job.cluster.memory();
        if self.job.least_memory(candidate).is_ok_and(|least| least > most) {
            return None;
        }
        let with = |number| Candidate { recompute: RecomputeMode::Blocks(number), ..*candidate };
        let fits = |number| self.job.memory(&with(number)).is_ok_and(|memory| memory.total() <= most);
        let (mut too_few, mut enough) = (0, self.job.plan.model.blocks.len().saturating_sub(2));
        if enough == 0 || !fits(enough) {
            return None;
        }
        while enough - too_few > 1 {
            let middle = too_few.midpoint(enough);
            *(if fits(middle) { &mut enough } else { &mut too_few }) = middle;
        }
        Some(with(enough))
    }

    /// The time that a new mesh must beat to get into the table.
    fn worst(&self, best: &HashMap<PerAxis, Vec<Estimate>>) -> f64 {
        // Stages count before time: all are looked at.
        if self.job.engine.fewest_stages {
            return f64::INFINITY;
        }
        let mut times: Vec<f64> = best.values().map(|near| fastest(near)).collect();
        times.sort_by(f64::total_cmp);
        times.get(self.rows - 1).copied().unwrap_or(f64::INFINITY)
    }

    /// The least that a step of a candidate can take, or why it cannot be built.
    fn bound(&self, candidate: &Candidate) -> Result<f64, Error> {
        let (passes, micro_batches) = self.job.micro_batch_seconds(candidate)?;
        let each = passes / candidate.pipeline as f64;
        let waits = match candidate.schedule {
            // The gradients of weights fill what they can.
            ScheduleName::ZbH1 => 0.0,
            _ => (candidate.pipeline - 1) as f64 / candidate.chunks.unwrap_or(1) as f64,
        };
        Ok(each * (micro_batches as f64 + waits))
    }
}

fn fastest(of: &[Estimate]) -> f64 {
    of.iter().map(|estimate| estimate.step_seconds).fold(f64::INFINITY, f64::min)
}

/// By time, but that the simplest of those that are nearly as fast as the fastest comes first.
fn in_order(mut all: Vec<Estimate>, batch: usize) -> Vec<Estimate> {
    // Of equal ones the simplest, so that every rank of a launcher that searches by itself finds the same.
    let order = |a: &Estimate, b: &Estimate| {
        a.step_seconds
            .total_cmp(&b.step_seconds)
            .then_with(|| complexity(a, batch).cmp(&complexity(b, batch)))
    };
    all.sort_by(order);
    let most = NEARLY * fastest(&all);
    let near = all.iter().take_while(|one| one.step_seconds <= most).enumerate();
    if let Some((simplest, _)) = near.min_by_key(|(_, one)| complexity(one, batch)[0]) {
        all[..=simplest].rotate_right(1);
    }
    all
}

/// How much there is to a layout, first of all by what a person has to understand of it: each axis beside data
/// and each option counts twice, ZeRO by its stage. Gradient accumulation counts once, but not in a pipeline,
/// which needs several micro-batches.
fn complexity(one: &Estimate, batch: usize) -> [usize; 6] {
    let Candidate { data, pipeline, tensor, grid, .. } = one.candidate;
    let Candidate { sequence, schedule, recompute, zero, compressed_weights, .. } = one.candidate;
    let options = [
        pipeline > 1,
        tensor > 1,
        grid != [1, 1],
        sequence,
        pipeline > 1 && schedule != ScheduleName::OneFOneB,
        recompute != RecomputeMode::None,
        compressed_weights,
    ];
    let simple = options.into_iter().map(usize::from).sum::<usize>() + usize::from(zero);
    let accumulates = pipeline == 1 && one.candidate.micro_batches(batch) != Some(1);
    [
        2 * simple + usize::from(accumulates),
        pipeline * tensor * grid[0] * grid[1],
        tensor,
        pipeline,
        grid[0],
        data,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Cluster, builtin};
    use crate::config::RunFile;
    use crate::engine::EngineProfile;
    use crate::plan::{DataFacts, Plan};

    /// The best layout of so many devices, some of it fixed.
    fn searched(plan: &Plan, cluster: &Cluster, devices: usize, fixed: &str) -> Result<SearchResult, Error> {
        let job = Simulation::new(plan, cluster, EngineProfile::ESPALIER);
        let fixed = SearchConstraints::parse(fixed).unwrap();
        LayoutSearch { job: &job, devices, fixed: &fixed, rows: 1 }.run()
    }

    /// 4.8 billion weights at 90 %: 17 GB where they rest dense, 8 where they rest compressed, and a V100 has 16.
    #[test]
    fn compressed_weights_are_tried_where_nothing_else_fits() {
        let text = "[model]\nlayers = 24\nwidth = 4096\nheads = 32\ncontext = 512\nvocab = 256\n\
            [train]\nbatch = 1\nprecision = \"bf16\"\n[prune]\nmethod = \"random\"\nsparsity = 0.9\n";
        let found = |devices: usize, more: &str, fixed: &str| {
            let plan = Plan::of_text(&format!("{text}{more}"));
            let found = searched(&plan, &builtin("summit").unwrap(), devices, fixed).unwrap();
            found.ranked.first().map(|best| best.candidate.weights())
        };
        assert_eq!(found(1, "", ""), Some("compressed"));
        assert_eq!(found(1, "", "weights=dense"), None, "a person has decided");
        assert_eq!(found(2, "", ""), Some("dense"), "two have room");
        assert_eq!(found(2, "weights = \"compressed\"", ""), Some("compressed"), "as the run file says");
        assert_eq!(found(1, "", "state=dense"), None);
    }

    /// A network so small that a GPU is full only with thousands of images takes them all at once.
    #[test]
    fn small_images_are_one_micro_batch() {
        let text = "[model]\nname = \"simple-cnn\"\n[train]\nbatch = 4096\n";
        let facts = DataFacts { image: Some((28, 28, 1)), classes: Some(10), ..DataFacts::default() };
        let plan = Plan::new(RunFile::parse(text, &[]).unwrap(), facts).unwrap();
        let found = searched(&plan, &builtin("h200-node").unwrap(), 1, "").unwrap();
        assert_eq!(found.ranked[0].candidate.micro_batch, 4096);
    }

    /// Of two layouts that take about as long, the one without gradient accumulation.
    #[test]
    fn one_micro_batch_is_simpler_than_several() {
        let text =
            "[model]\nlayers = 2\nheads = 2\nwidth = 64\ncontext = 64\nvocab = 256\n[train]\nbatch = 8\n";
        let plan = Plan::of_text(text);
        let cluster = builtin("this-machine").unwrap();
        let of = |fixed: &str, step_seconds: f64| {
            let found = searched(&plan, &cluster, 1, fixed).unwrap();
            Estimate { step_seconds, ..found.ranked.into_iter().next().unwrap() }
        };
        let first = |slower: f64| {
            in_order(vec![of("micro_batch=4", 1.0), of("micro_batch=8", slower)], 8)[0].candidate.micro_batch
        };
        assert_eq!([first(1.01), first(1.03)], [8, 4]);
    }

    /// What the smallest layout needs is said where none fits, and not what the fastest does. Nodes need a
    /// network.
    #[test]
    fn where_none_fits_the_smallest_is_named() {
        let text = "[model]\nlayers = 24\nwidth = 4096\nheads = 32\ncontext = 512\nvocab = 256\n\
            [train]\nbatch = 8\nprecision = \"bf16\"\n";
        let plan = Plan::of_text(text);
        let mut cluster = builtin("summit").unwrap();
        cluster.network = None;
        let job = Simulation::new(&plan, &cluster, EngineProfile::ESPALIER);
        let fixed = SearchConstraints::default();
        let search = LayoutSearch { job: &job, devices: 2, fixed: &fixed, rows: 1 };
        let found = search.run().unwrap();
        let smallest = found.smallest.unwrap();
        assert_eq!(smallest.candidate.recompute, RecomputeMode::Block);
        let all = choices::candidates(&search).unwrap();
        let least =
            all.iter().filter_map(|candidate| Some(job.memory(candidate).ok()?.total())).min().unwrap();
        assert!(found.ranked.is_empty() && smallest.memory > cluster.memory() && smallest.memory <= least);
        let error = LayoutSearch { devices: 12, ..search }.run().unwrap_err();
        assert!(error.to_string().starts_with("`network` is missing, and 12 devices"), "{error}");
    }

    /// 4.8 billion weights on GPUs of 16 GB: dense state of 16 bytes a weight has room on eight of them where all
    /// of it is sharded, and on two nodes where gradients are.
    #[test]
    fn replicas_shard_gradients_and_weights_where_they_must() {
        let text = "[model]\nlayers = 24\nwidth = 4096\nheads = 32\ncontext = 512\nvocab = 256\n\
            [train]\nbatch = 48\nprecision = \"bf16\"\n";
        let plan = Plan::of_text(text);
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
