//! The trials of one cell, and who of them runs on.
//!
//! Whatever the method, a trial that cannot be the best one any more is *cut*: the next validation that it
//! could reach the goal at is behind that of the best one, or is the same and the best one has the smaller
//! number. K* is a minimum, and stays the same whatever the trial would have come to; so does whose it is.
//! With `sobol` that is all that saves steps. So that one that reaches the goal is soon known, all trials go
//! on together, to a number of steps that doubles, and those first that have come furthest: one after the
//! other, those that were begun before the first that reaches the goal would spend all the steps there are.
//! The least that an exact search can take is K* steps of each trial, and little is taken above that. A study
//! that wants the K of every trial sets `search.cut = false`; each then runs to its end.
//!
//! With `halving` they race. All of them are compared after a few steps, and again whenever the steps have
//! doubled. How many then go on depends on how far the first of them has come: with p the fraction of the
//! way from chance to the goal that it has behind it, in logarithms of the measure, n^(1-p) + 1 of n trials do.
//! So no trial is stopped while there is nothing to see, and few are left when the end is near, whether that is
//! after 100 steps or 20,000: no number of steps has to be guessed. (Successive halving, Jamieson & Talwalkar
//! 2016, halves at fixed steps.)
//!
//! And a trial that is behind where the first one was after a quarter of the steps is *stopped*, whatever its
//! rank among them.
//!
//! A bracket is a function of its records: given those of an earlier process ([`Bracket::replay`]), it resumes
//! from there. Whoever runs the trials asks [`Bracket::next`] and calls [`Bracket::report`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::file::{Cell, Goal, SearchMethod, Study};
use crate::trial::{TrialRecord, TrialStatus};

/// A trial that is to run until it has taken so many steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrialJob {
    /// Its number in the cell.
    pub trial: u32,
    /// Steps in all.
    pub until: u64,
}

/// The fewest steps to the goal that any trial of a cell has needed, and the least number of such a trial; all
/// that run see it.
#[derive(Debug, Clone, Default)]
pub struct StepsBound(Arc<Mutex<Option<(u64, u32)>>>);

impl StepsBound {
    /// Steps, where some trial has reached the goal.
    pub fn get(&self) -> Option<u64> {
        self.best().map(|(steps, _)| steps)
    }

    /// Whether a trial would be the best one if it reached the goal after so many steps.
    pub fn allows(&self, steps: u64, trial: u32) -> bool {
        self.best().is_none_or(|best| (steps, trial) < best)
    }

    /// Lowers it to the steps of a trial that reached the goal.
    pub fn lower(&self, steps: u64, trial: u32) {
        let mut best = self.best();
        if best.is_none_or(|best| (steps, trial) < best) {
            *best = Some((steps, trial));
        }
    }

    fn best(&self) -> MutexGuard<'_, Option<(u64, u32)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The trials of one cell on their way.
#[derive(Debug)]
pub struct Bracket {
    /// Whose K* it is about.
    pub cell: Cell,
    /// What the best trial needed, of all that are known.
    pub bound: StepsBound,
    goal: Goal,
    method: SearchMethod,
    cut: bool,
    /// Whether trials that reach the goal bound the others.
    pub is_search: bool,
    budget: u64,
    eval_every: u64,
    chance_level: f64,
    /// Steps after which all that run are compared next.
    rung: u64,
    entries: BTreeMap<u32, BracketEntry>,
}

#[derive(Debug, Default)]
struct BracketEntry {
    running: bool,
    record: Option<TrialRecord>,
}

impl BracketEntry {
    fn is_final(&self) -> bool {
        self.record.as_ref().is_some_and(|record| record.status.is_final())
    }

    fn steps(&self) -> u64 {
        self.record.as_ref().map_or(0, |record| record.steps)
    }

    /// Ends a paused trial; its last record.
    fn end(&mut self, status: TrialStatus) -> Option<TrialRecord> {
        let record = self.record.as_mut()?;
        record.status = status;
        Some(record.clone())
    }

    /// The least measure so far; what was never measured is behind all others.
    fn best(&self) -> f64 {
        self.record.as_ref().and_then(|record| record.best).unwrap_or(f64::INFINITY)
    }
}

impl Bracket {
    /// A bracket of the trials with these numbers. `chance_level` is the goal's measure of somebody who guesses.
    pub fn new(
        study: &Study,
        cell: Cell,
        numbers: impl IntoIterator<Item = u32>,
        chance_level: f64,
    ) -> Bracket {
        let search = &study.search;
        let rung = match (search.method, search.cut) {
            (SearchMethod::Sobol, false) => search.steps,
            (SearchMethod::Sobol, true) | (SearchMethod::Halving, _) => {
                (2 * search.eval_every).min(search.steps)
            }
        };
        let entries = numbers.into_iter().map(|number| (number, BracketEntry::default())).collect();
        Bracket {
            cell,
            bound: StepsBound::default(),
            goal: study.goal,
            method: search.method,
            cut: search.cut,
            is_search: true,
            budget: search.steps,
            eval_every: search.eval_every,
            chance_level,
            rung,
            entries,
        }
    }

    /// The same trial with other seeds, by their numbers, each to the goal or to so many steps.
    pub fn repeats(study: &Study, cell: Cell, numbers: impl IntoIterator<Item = u32>, steps: u64) -> Bracket {
        let search = Bracket::new(study, cell, numbers, 1.0);
        search.bound.lower(steps + 1, 0);
        let rung = study.search.steps;
        Bracket { method: SearchMethod::Sobol, cut: true, is_search: false, rung, ..search }
    }

    /// Takes over what is known of a trial, of this bracket or another of the same cell, from an earlier
    /// process or another machine.
    pub fn replay(&mut self, record: &TrialRecord) {
        self.lower_bound(record);
        let Some(entry) = self.entries.get_mut(&record.trial) else { return };
        if entry.running || entry.is_final() {
            return;
        }
        // Comparisons before this one were decided when it was let on.
        if record.status == TrialStatus::Paused {
            self.rung = self.rung.max(record.steps);
        }
        entry.record = Some(record.clone());
    }

    /// What a trial of the search has come to bounds the others; repeated ones may need fewer steps.
    fn lower_bound(&self, record: &TrialRecord) {
        if let Some(steps) = record.result().filter(|_| self.is_search && !record.is_repeat()) {
            self.bound.lower(steps, record.trial);
        }
    }

    /// A trial that can run now, of those that `may_run`, and of these the one that is nearest to the goal;
    /// from here on it does. None where all wait for those that run, or the bracket is over.
    pub fn next(&mut self, may_run: impl Fn(u32) -> bool) -> Option<TrialJob> {
        let rung = self.rung;
        let ready = |entry: &BracketEntry| !entry.running && !entry.is_final() && entry.steps() < rung;
        let ready = self.entries.iter_mut().filter(|(trial, entry)| ready(entry) && may_run(**trial));
        let (&trial, entry) = ready.min_by(|(_, a), (_, b)| a.best().total_cmp(&b.best()))?;
        entry.running = true;
        Some(TrialJob { trial, until: rung })
    }

    /// The record that a trial resumes from.
    pub fn record(&self, trial: u32) -> Option<&TrialRecord> {
        self.entries.get(&trial)?.record.as_ref()
    }

    /// The fewest steps to the goal by now; none where trials are repeated.
    pub fn k_star(&self) -> Option<u64> {
        self.bound.get().filter(|_| self.is_search)
    }

    /// Whether a trial runs no further than the best one needed.
    pub fn cuts(&self) -> bool {
        self.cut
    }

    /// Takes the record of a job. Where that was the last of a comparison, those that end by it are returned.
    pub fn report(&mut self, record: TrialRecord) -> Vec<TrialRecord> {
        self.lower_bound(&record);
        let entry = self.entries.get_mut(&record.trial).expect("a trial of this bracket");
        entry.running = false;
        entry.record = Some(record);
        self.compare()
    }

    /// Whether every trial has come to its end.
    pub fn is_over(&self) -> bool {
        self.entries.values().all(BracketEntry::is_final)
    }

    /// Trials that have come to their end, and all of them.
    pub fn progress(&self) -> (usize, usize) {
        (self.entries.values().filter(|entry| entry.is_final()).count(), self.entries.len())
    }

    /// Cuts those that wait and cannot be the best any more. Once all others have come to the rung where they
    /// are compared, stops those that are too far behind, and moves on to the next rung.
    pub fn compare(&mut self) -> Vec<TrialRecord> {
        let mut ended = Vec::new();
        if self.cut {
            let (bound, interval) = (&self.bound, self.eval_every);
            let waiting = self.entries.iter_mut().filter(|(_, entry)| !entry.running && !entry.is_final());
            let beaten = waiting.filter(|(trial, entry)| !bound.allows(entry.steps() + interval, **trial));
            ended.extend(beaten.filter_map(|(_, entry)| entry.end(TrialStatus::Cut)));
        }
        loop {
            let mut active: Vec<&BracketEntry> =
                self.entries.values().filter(|entry| !entry.is_final()).collect();
            if active.is_empty() || active.iter().any(|entry| entry.running || entry.steps() < self.rung) {
                return ended;
            }
            if self.method == SearchMethod::Sobol {
                self.rung = (2 * self.rung).min(self.budget);
                continue;
            }
            active.sort_by(|a, b| a.best().total_cmp(&b.best()));
            let first = active[0].record.as_ref();
            let survivors = self.survivors(active[0].best()).min(active.len());
            let reference = first.map_or(f64::INFINITY, |first| self.measure_by(first, self.rung / 4));
            let behind = |(index, entry): (usize, &&BracketEntry)| {
                let hopeless = index > 0 && entry.best() > reference;
                let trial = entry.record.as_ref().map(|record| record.trial);
                trial.filter(|_| index >= survivors || hopeless)
            };
            let behind: Vec<u32> = active.iter().enumerate().filter_map(behind).collect();
            for trial in behind {
                let entry = self.entries.get_mut(&trial).expect("one of them");
                ended.extend(entry.end(TrialStatus::Stopped));
            }
            self.rung = (2 * self.rung).min(self.budget);
        }
    }

    /// How many trials go on when the first of them is at `measure`.
    fn survivors(&self, measure: f64) -> usize {
        let trials = self.entries.len();
        (trials as f64).powf(1.0 - self.log_progress(measure)).ceil() as usize + 1
    }

    /// The fraction of the way from chance to the goal, in logarithms.
    fn log_progress(&self, measure: f64) -> f64 {
        let distance = (self.chance_level / self.goal.value()).ln();
        if distance <= 0.0 || !measure.is_finite() {
            return 0.0;
        }
        ((self.chance_level / measure.max(f64::MIN_POSITIVE)).ln() / distance).clamp(0.0, 1.0)
    }

    /// The least measure of a trial within its first steps; infinite where there is none.
    fn measure_by(&self, record: &TrialRecord, steps: u64) -> f64 {
        let early = record.curve.iter().filter(|point| point.step <= steps);
        early.map(|point| point.measure(self.goal)).fold(f64::INFINITY, f64::min)
    }
}
