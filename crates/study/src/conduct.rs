//! The work of a study: workers take trials of any cell, run them to where they are compared, and write down where they stand.
//!
//! Cells are taken in their order, and the next one is opened where those before have nothing to do for a worker but wait. A trial that waits is kept in memory, so
//! that it goes on without taking its steps again, and with the worker that began it, whose device it is on, and on disk ([`Waiting`]); killed, a study loses those that run, as far as they went since they last waited. What
//! was decided stays decided.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use espalier_train::Error;

use crate::attempt;
use crate::file::{Cell, Study};
use crate::race::{Job, Race};
use crate::results::Results;
use crate::trial::{Record, Runner, Trial};
use crate::waiting::Waiting;
use crate::widen;

/// How often the files of others are looked at.
const REFRESH: Duration = Duration::from_secs(2);

/// A share of a study's trials: of each cell's trials every n-th.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// Which of them, from 1.
    pub index: u32,
    /// How many share the study.
    pub of: u32,
}

impl Shard {
    /// All of it.
    pub const WHOLE: Shard = Shard { index: 1, of: 1 };

    fn has(self, trial: u32) -> bool {
        trial % self.of == self.index % self.of
    }
}

/// How far a study has come.
#[derive(Debug, Clone, Copy)]
pub struct Standing {
    /// Trials that have come to their end, of this process's share.
    pub done: usize,
    /// All trials of it.
    pub trials: usize,
    /// K* of the cell that was heard of last, as far as it is known.
    pub best: Option<u64>,
}

/// Hears how a study goes.
pub trait Observer: Send {
    /// A trial has come to its end, or to a place where it waits.
    fn heard(&mut self, record: &Record, standing: Standing);

    /// A range of a cell has grown.
    fn widened(&mut self, cell: Cell, field: &str, low: f64, high: f64);
}

/// Runs what is left of a study's trials, as far as they are of a shard, on so many workers; false where it was stopped before the end.
pub fn run_trials(
    study: &Study,
    runner: &dyn Runner,
    results: &mut Results,
    workers: usize,
    shard: Shard,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<bool, Error> {
    let by_chance = runner.by_chance(study.goal);
    let numbers = || (1..=study.search.trials).filter(|&trial| shard.has(trial));
    let races = study.cells.iter().map(|&cell| Race::new(study, cell, numbers(), by_chance)).collect();
    run_races(study, runner, results, races, workers, stop, observer)
}

/// Looks beyond the ends of ranges at which best trials lie, until none does or the run file allows no more; false where it was stopped before the end.
pub fn widen_ranges(
    study: &Study,
    runner: &dyn Runner,
    results: &mut Results,
    workers: usize,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<bool, Error> {
    let by_chance = runner.by_chance(study.goal);
    loop {
        let mut races = Vec::new();
        for &cell in &study.cells {
            // What was begun is ended first.
            for begun in results.widened(cell) {
                races.push(Race::new(study, cell, begun.numbers(), by_chance));
            }
            for wider in widen::next(study, results, cell) {
                races.push(Race::new(study, cell, wider.numbers(), by_chance));
                let range = widen::range(study, results, &wider);
                observer.widened(cell, &wider.field, range.low, range.high);
                results.widen(wider)?;
            }
        }
        let before = results.finished();
        if !run_races(study, runner, results, races, workers, stop, observer)? {
            return Ok(false);
        }
        if results.finished() == before {
            return Ok(true);
        }
    }
}

/// A trial that waits.
struct Kept<'a> {
    /// Who began it.
    worker: usize,
    trial: Box<dyn Trial + Send + 'a>,
    /// What its steps took that are not on disk.
    unkept: Duration,
}

/// What workers share.
struct State<'a> {
    races: Vec<Race>,
    /// Trials that wait, by race and number.
    kept: HashMap<(usize, u32), Kept<'a>>,
    results: &'a mut Results,
    refreshed: Instant,
    observer: &'a mut dyn Observer,
    failed: Option<Error>,
}

fn run_races(
    study: &Study,
    runner: &dyn Runner,
    results: &mut Results,
    mut races: Vec<Race>,
    workers: usize,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<bool, Error> {
    let mut stopped = Vec::new();
    for race in &mut races {
        for record in results.of(race.cell) {
            race.replay(record);
        }
        stopped.extend(race.compare());
    }
    results.append(&stopped)?;
    let waiting = Waiting::of(results.folder(), runner.worth_keeping());
    // Also what a study left that was killed between the line of a trial's end and this.
    results.records().filter(|record| record.status.is_final()).for_each(|record| waiting.forget(record));
    let state =
        State { races, kept: HashMap::new(), results, refreshed: Instant::now(), observer, failed: None };
    let (state, changed) = (Mutex::new(state), Condvar::new());
    thread::scope(|scope| {
        for worker in 0..workers {
            let (state, changed, waiting) = (&state, &changed, &waiting);
            scope.spawn(move || work(worker, study, runner, waiting, state, changed, stop));
        }
    });
    let state = state.into_inner().unwrap_or_else(PoisonError::into_inner);
    match state.failed {
        Some(error) => Err(error),
        None => Ok(state.races.iter().all(Race::is_over)),
    }
}

/// Takes jobs until there are none.
fn work<'a>(
    worker: usize,
    study: &Study,
    runner: &'a dyn Runner,
    waiting: &Waiting,
    state: &Mutex<State<'a>>,
    changed: &Condvar,
    stop: &AtomicBool,
) {
    let mut held = lock(state);
    while !stop.load(Ordering::Relaxed) && held.failed.is_none() {
        let Some((index, job)) = held.take(worker) else {
            if held.races.iter().all(Race::is_over) {
                break;
            }
            // Others run what this waits for; a signal to stop wakes nobody.
            held = changed
                .wait_timeout(held, Duration::from_millis(200))
                .map_or_else(|e| e.into_inner().0, |w| w.0);
            continue;
        };
        let race = &held.races[index];
        let bound = race.cuts().then(|| race.bound.clone());
        let known = race.record(job.trial).cloned();
        let settings = widen::settings(study, held.results, race.cell, job.trial);
        let kept = held.kept.remove(&(index, job.trial));
        drop(held);
        let mut unkept = kept.as_ref().map_or(Duration::ZERO, |kept| kept.unkept);
        let begun = match kept {
            Some(kept) => Ok((kept.trial, known)),
            None => waiting.begin(runner, worker, &settings),
        };
        let outcome = begun.and_then(|(mut trial, known)| {
            let began = Instant::now();
            let record =
                attempt::advance(study, &settings, trial.as_mut(), known, job.until, bound.as_ref(), stop)?;
            unkept += began.elapsed();
            Ok(record.map(|record| {
                let unkept = waiting.keep(trial.as_mut(), &record, unkept);
                (Kept { worker, trial, unkept }, record)
            }))
        });
        held = lock(state);
        match outcome {
            Err(error) => held.failed = held.failed.take().or(Some(error)),
            Ok(None) => break,
            Ok(Some((kept, record))) => {
                let ended = held.settle(index, kept, record);
                ended.iter().for_each(|record| waiting.forget(record));
            }
        }
        changed.notify_all();
    }
    changed.notify_all();
}

impl<'a> State<'a> {
    /// The next job of the first race that has one for this worker.
    fn take(&mut self, worker: usize) -> Option<(usize, Job)> {
        let kept = &self.kept;
        let job = |(index, race): (usize, &mut Race)| {
            let may = |trial| kept.get(&(index, trial)).is_none_or(|kept| kept.worker == worker);
            race.next(may).map(|job| (index, job))
        };
        self.races.iter_mut().enumerate().find_map(job)
    }

    /// Writes down what a job has come to, and what follows from it; returns the trials that have ended.
    fn settle(&mut self, index: usize, kept: Kept<'a>, record: Record) -> Vec<Record> {
        let mut records = vec![record.clone()];
        if !record.status.is_final() {
            self.kept.insert((index, record.trial), kept);
        }
        records.extend(self.races[index].report(record));
        for record in records.iter().filter(|record| record.status.is_final()) {
            self.kept.remove(&(index, record.trial));
        }
        if let Err(error) = self.results.append(&records).and_then(|()| self.hear_others()) {
            self.failed = Some(error);
        }
        let best = self.races[index].bound.get();
        let counts = self.races.iter().map(Race::progress);
        let (done, trials) = counts.fold((0, 0), |sum, race| (sum.0 + race.0, sum.1 + race.1));
        for record in &records {
            self.observer.heard(record, Standing { done, trials, best });
        }
        records.retain(|record| record.status.is_final());
        records
    }

    /// Reads what other processes have found: their best trials bound those here.
    fn hear_others(&mut self) -> Result<(), Error> {
        if self.refreshed.elapsed() < REFRESH {
            return Ok(());
        }
        self.refreshed = Instant::now();
        for record in self.results.refresh()? {
            for race in self.races.iter_mut().filter(|race| race.cell == record.cell()) {
                race.replay(&record);
            }
        }
        Ok(())
    }
}

/// A worker that panicked has said so, and ends the study when it is waited for.
fn lock<'m, 'a>(state: &'m Mutex<State<'a>>) -> MutexGuard<'m, State<'a>> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
