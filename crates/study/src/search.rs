//! The work of a study: workers take trials of any cell, run them to where they are compared, and write down
//! where they stand.
//!
//! Cells are taken in their order, and the next one is opened where those before have nothing to do for a
//! worker but wait. A paused trial stays in memory, so that it resumes without taking its steps again,
//! and with the worker that began it, whose device it is on, and on disk ([`PausedTrialStore`]); killed, a
//! study loses those that run, as far as they went since they were last paused. What was decided stays decided.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use espalier_train::Error;

use crate::advance;
use crate::bracket::{Bracket, TrialJob};
use crate::file::{Cell, Study};
use crate::finalists;
use crate::paused_trials::PausedTrialStore;
use crate::results::Results;
use crate::trial::{Trial, TrialRecord, TrialRunner, repeat_number};
use crate::widen;

/// How many times K* a best trial may take with another seed.
const SLOWER: u64 = 4;

/// How often the files of other processes are read.
const REFRESH: Duration = Duration::from_secs(2);

/// A shard of a study's trials: of each cell's trials every n-th.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrialShard {
    /// Which of them, from 1.
    pub index: u32,
    /// How many shards there are.
    pub of: u32,
}

impl TrialShard {
    pub const ALL: TrialShard = TrialShard { index: 1, of: 1 };

    fn has(self, trial: u32) -> bool {
        trial % self.of == self.index % self.of
    }
}

/// How far a study has come.
#[derive(Debug, Clone, Copy)]
pub struct SearchProgress {
    /// Trials that have come to their end, of this process's shard.
    pub done: usize,
    /// All trials of it.
    pub trials: usize,
    /// Those that say how fast a study is: of cells that are over, since the trials of a cell end together when
    /// its K* is known, and all that repeat best ones.
    pub settled: usize,
    /// K* of the cell that was reported last, as far as it is known.
    pub best: Option<u64>,
}

/// Is called as a study goes on.
pub trait StudyObserver: Send {
    /// A trial has come to its end, or is paused.
    fn trial_updated(&mut self, record: &TrialRecord, progress: SearchProgress);

    /// A range of a cell has grown.
    fn widened(&mut self, cell: Cell, field: &str, low: f64, high: f64);
}

/// A study's trials as they are run: by whom, on how many workers, until somebody asks to stop. Each of its
/// functions is false where it was stopped before the end.
pub struct TrialSearch<'a> {
    pub study: &'a Study,
    pub runner: &'a dyn TrialRunner,
    pub workers: usize,
    pub stop: &'a AtomicBool,
}

impl TrialSearch<'_> {
    /// Runs what is left of the study's trials, as far as they are of a shard.
    pub fn run_trials(
        &self,
        results: &mut Results,
        shard: TrialShard,
        observer: &mut dyn StudyObserver,
    ) -> Result<bool, Error> {
        let numbers = || (1..=self.study.search.trials).filter(|&trial| shard.has(trial));
        let brackets = self.study.cells.iter().map(|&cell| self.bracket(cell, numbers())).collect();
        self.run_brackets(results, brackets, observer)
    }

    /// Looks beyond the ends of ranges at which best trials lie, until none does or the run file allows no more.
    pub fn widen_ranges(
        &self,
        results: &mut Results,
        observer: &mut dyn StudyObserver,
    ) -> Result<bool, Error> {
        loop {
            let mut brackets = Vec::new();
            for &cell in &self.study.cells {
                // What was begun is ended first.
                for begun in results.widened(cell) {
                    brackets.push(self.bracket(cell, begun.numbers()));
                }
                for wider in widen::next(self.study, results, cell) {
                    brackets.push(self.bracket(cell, wider.numbers()));
                    let range = widen::range(self.study, results, &wider);
                    observer.widened(cell, &wider.field, range.low, range.high);
                    results.widen(wider)?;
                }
            }
            let before = results.finished();
            if !self.run_brackets(results, brackets, observer)? {
                return Ok(false);
            }
            if results.finished() == before {
                return Ok(true);
            }
        }
    }

    /// Runs the best trials of every cell again, with as many other seeds as the study asks for and up to four
    /// times the steps of the best one: how much K* is luck, and which of them needs the least of it.
    pub fn repeat_best(
        &self,
        results: &mut Results,
        observer: &mut dyn StudyObserver,
    ) -> Result<bool, Error> {
        let repeats = |&cell: &Cell| {
            let finalists = finalists::of_cell(self.study, results, cell);
            let most = SLOWER * finalists.first()?.steps;
            let seeds = 1..=self.study.search.seeds;
            let of_trial = |trial: u32| seeds.clone().map(move |n| repeat_number(trial, n));
            let numbers = finalists.iter().flat_map(|finalist| of_trial(finalist.trial));
            Some(Bracket::repeats(self.study, cell, numbers, most))
        };
        let brackets = self.study.cells.iter().filter_map(repeats).collect();
        self.run_brackets(results, brackets, observer)
    }

    fn bracket(&self, cell: Cell, numbers: impl Iterator<Item = u32>) -> Bracket {
        Bracket::new(self.study, cell, numbers, self.runner.chance_level(self.study.goal))
    }

    fn run_brackets(
        &self,
        results: &mut Results,
        mut brackets: Vec<Bracket>,
        observer: &mut dyn StudyObserver,
    ) -> Result<bool, Error> {
        let mut stopped = Vec::new();
        for bracket in &mut brackets {
            let cell = bracket.cell;
            results
                .records()
                .filter(|record| record.cell() == cell)
                .for_each(|record| bracket.replay(record));
            stopped.extend(bracket.compare());
        }
        results.append(&stopped)?;
        let store = PausedTrialStore::of(results.folder(), self.runner.min_unsaved_time());
        // Also what a study left that was killed between the line of a trial's end and this.
        results.records().filter(|record| record.status.is_final()).for_each(|record| store.remove(record));
        let state = SearchState {
            brackets,
            paused: HashMap::new(),
            results,
            refreshed: Instant::now(),
            observer,
            failed: None,
        };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        thread::scope(|scope| {
            for worker in 0..self.workers {
                let (state, changed, store) = (&state, &changed, &store);
                scope.spawn(move || self.work(worker, store, state, changed));
            }
        });
        let state = state.into_inner().unwrap_or_else(PoisonError::into_inner);
        match state.failed {
            Some(error) => Err(error),
            None => Ok(state.brackets.iter().all(Bracket::is_over)),
        }
    }

    /// Takes jobs until there are none.
    fn work<'s>(
        &'s self,
        worker: usize,
        store: &PausedTrialStore,
        state: &Mutex<SearchState<'s>>,
        changed: &Condvar,
    ) {
        let TrialSearch { study, runner, stop, .. } = *self;
        let mut guard = lock(state);
        while !stop.load(Ordering::Relaxed) && guard.failed.is_none() {
            let Some((index, job)) = guard.take(worker) else {
                if guard.brackets.iter().all(Bracket::is_over) {
                    break;
                }
                // Others run what this waits for; a signal to stop wakes nobody.
                guard = changed
                    .wait_timeout(guard, Duration::from_millis(200))
                    .map_or_else(|e| e.into_inner().0, |w| w.0);
                continue;
            };
            let bracket = &guard.brackets[index];
            let bound = bracket.cuts().then(|| bracket.bound.clone());
            let known = bracket.record(job.trial).cloned();
            let settings = widen::settings(study, guard.results, bracket.cell, job.trial);
            let paused = guard.paused.remove(&(index, job.trial));
            drop(guard);
            let mut unsaved = paused.as_ref().map_or(Duration::ZERO, |paused| paused.unsaved);
            let begun = match paused {
                Some(paused) => Ok((paused.trial, known)),
                None => store.begin(runner, worker, &settings),
            };
            let outcome = begun.and_then(|(mut trial, known)| {
                let began = Instant::now();
                let record = advance::advance_trial(
                    study,
                    &settings,
                    trial.as_mut(),
                    known,
                    job.until,
                    bound.as_ref(),
                    stop,
                )?;
                unsaved += began.elapsed();
                Ok(record.map(|record| {
                    let unsaved = store.save(trial.as_mut(), &record, unsaved);
                    (PausedTrial { worker, trial, unsaved }, record)
                }))
            });
            guard = lock(state);
            match outcome {
                Err(error) => guard.failed = guard.failed.take().or(Some(error)),
                Ok(None) => break,
                Ok(Some((paused, record))) => {
                    let ended = guard.settle(index, paused, record);
                    ended.iter().for_each(|record| store.remove(record));
                }
            }
            changed.notify_all();
        }
        changed.notify_all();
    }
}

struct PausedTrial<'a> {
    /// Who began it.
    worker: usize,
    trial: Box<dyn Trial + Send + 'a>,
    /// What its steps took that are not on disk.
    unsaved: Duration,
}

/// What workers share.
struct SearchState<'a> {
    brackets: Vec<Bracket>,
    /// By bracket and number.
    paused: HashMap<(usize, u32), PausedTrial<'a>>,
    results: &'a mut Results,
    refreshed: Instant,
    observer: &'a mut dyn StudyObserver,
    failed: Option<Error>,
}

impl<'a> SearchState<'a> {
    /// The next job of the first bracket that has one for this worker.
    fn take(&mut self, worker: usize) -> Option<(usize, TrialJob)> {
        let paused = &self.paused;
        let job = |(index, bracket): (usize, &mut Bracket)| {
            let may_run = |trial| paused.get(&(index, trial)).is_none_or(|paused| paused.worker == worker);
            bracket.next(may_run).map(|job| (index, job))
        };
        self.brackets.iter_mut().enumerate().find_map(job)
    }

    /// Writes down what a job has come to, and what follows from it; returns the trials that have ended.
    fn settle(&mut self, index: usize, paused: PausedTrial<'a>, record: TrialRecord) -> Vec<TrialRecord> {
        let mut records = vec![record.clone()];
        if !record.status.is_final() {
            self.paused.insert((index, record.trial), paused);
        }
        records.extend(self.brackets[index].report(record));
        for record in records.iter().filter(|record| record.status.is_final()) {
            self.paused.remove(&(index, record.trial));
        }
        if let Err(error) = self.results.append(&records).and_then(|()| self.read_others()) {
            self.failed = Some(error);
        }
        let best = self.brackets[index].k_star();
        let (mut done, mut trials, mut settled) = (0, 0, 0);
        for bracket in &self.brackets {
            let (ended, all) = bracket.progress();
            (done, trials) = (done + ended, trials + all);
            settled += if bracket.is_search && ended < all { 0 } else { ended };
        }
        for record in &records {
            self.observer.trial_updated(record, SearchProgress { done, trials, settled, best });
        }
        records.retain(|record| record.status.is_final());
        records
    }

    /// Reads what other processes have found: their best trials bound those here.
    fn read_others(&mut self) -> Result<(), Error> {
        if self.refreshed.elapsed() < REFRESH {
            return Ok(());
        }
        self.refreshed = Instant::now();
        for record in self.results.refresh()? {
            for bracket in self.brackets.iter_mut().filter(|bracket| bracket.cell == record.cell()) {
                bracket.replay(&record);
            }
        }
        Ok(())
    }
}

/// A worker that panicked has said so, and ends the study when it is waited for.
fn lock<'m, 'a>(state: &'m Mutex<SearchState<'a>>) -> MutexGuard<'m, SearchState<'a>> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
