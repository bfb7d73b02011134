use std::collections::BTreeSet;
use std::path::Path;

use super::*;
use crate::summary::StudySummary;
use crate::synthetic::{Landscape, study};
use crate::trial::TrialStatus;
use crate::workload::TrialSettings;

/// Hears, and may ask to stop after so many records.
#[derive(Default)]
struct Listener<'a> {
    records: Vec<TrialRecord>,
    widened: Vec<String>,
    stop: Option<(usize, &'a AtomicBool)>,
    /// Trials that have ended, and those that say how fast the study is.
    ended: Vec<(usize, usize)>,
}

impl StudyObserver for Listener<'_> {
    fn trial_updated(&mut self, record: &TrialRecord, progress: SearchProgress) {
        self.records.push(record.clone());
        self.ended.push((progress.done, progress.settled));
        if let Some((after, stop)) = self.stop {
            stop.store(self.records.len() >= after, Ordering::Relaxed);
        }
    }

    fn widened(&mut self, _: Cell, field: &str, _: f64, _: f64) {
        self.widened.push(field.into());
    }
}

static NEVER: AtomicBool = AtomicBool::new(false);

/// A search that nobody stops.
fn search<'a>(study: &'a Study, runner: &'a dyn TrialRunner, workers: usize) -> TrialSearch<'a> {
    TrialSearch { study, runner, workers, stop: &NEVER }
}

/// Runs all trials of a study, in a folder of its own.
fn run_all(study: &Study, landscape: &Landscape, workers: usize) -> (tempfile::TempDir, Results) {
    let folder = tempfile::tempdir().unwrap();
    let mut results = Results::open(folder.path(), study).unwrap();
    let mut listener = Listener::default();
    let ended = search(study, landscape, workers).run_trials(&mut results, TrialShard::ALL, &mut listener);
    assert!(ended.unwrap());
    (folder, results)
}

fn run_study(study: &Study, landscape: &Landscape, workers: usize) -> StudySummary {
    summary(study, &run_all(study, landscape, workers).1)
}

fn summary(study: &Study, results: &Results) -> StudySummary {
    StudySummary::of(study, results, Vec::new())
}

/// Runs a shard in a folder until so many records were heard; what was known before, what was heard, and
/// whether it has ended.
fn run_part(
    study: &Study,
    landscape: &Landscape,
    folder: &Path,
    (workers, shard, after): (usize, TrialShard, usize),
) -> (Results, Vec<TrialRecord>, bool) {
    let mut results = Results::open(folder, study).unwrap();
    let stop = AtomicBool::new(false);
    let mut listener = Listener { stop: Some((after, &stop)), ..Listener::default() };
    let search = TrialSearch { stop: &stop, ..search(study, landscape, workers) };
    let ended = search.run_trials(&mut results, shard, &mut listener).unwrap();
    (results, listener.records, ended)
}

fn k_stars(summary: &StudySummary) -> Vec<Option<u64>> {
    summary.cells.iter().map(|cell| cell.k_star).collect()
}

/// What a table says: K* of each cell, whose it is and with what, and the curves.
fn found(summary: &StudySummary) -> impl PartialEq + std::fmt::Debug + use<> {
    let cells = summary.cells.iter().map(|cell| {
        (cell.k_star, cell.best_trial, cell.best.clone(), cell.steadiest_trial, cell.seeds.clone())
    });
    (cells.collect::<Vec<_>>(), summary.fits.clone(), summary.ratios.clone())
}

const HALVING: &str = "search.method=halving";

/// All trials of Sobol's sequence, each to its end: what the paper did, and what the others are compared with.
const UNCUT: [&str; 2] = ["search.method=sobol", "search.cut=false"];

#[test]
fn sobol_without_cuts_runs_every_trial_to_its_end() {
    let study = study(&[&UNCUT[..], &["search.trials=16"]].concat());
    let landscape = Landscape::new(0.2, 0.0);
    let summary = run_study(&study, &landscape, 3);
    for cell in &summary.cells {
        assert_eq!((cell.cut, cell.stopped, cell.running), (0, 0, 0));
        assert_eq!(cell.complete + cell.incomplete + cell.infeasible, 16);
        assert!(cell.infeasible > 0, "some diverge: {cell:?}");
        let of = Cell { batch: cell.batch, sparsity: cell.sparsity };
        let all = (1..=16)
            .filter_map(|number| landscape.steps_to_goal(&study.settings(of, number, &study.search.ranges)));
        let least = all.fold(f64::INFINITY, f64::min);
        let expected = (least / 16.0).ceil() as u64 * 16;
        assert_eq!(cell.k_star, Some(expected));
    }
    assert_eq!(summary.steps, landscape.steps_taken.into_inner());
}

/// Cutting is exact: the same K* from far fewer steps, whatever trials overtake each other, and no trial is
/// stopped that could have lowered it.
#[test]
fn sobol_with_cuts_finds_the_same() {
    for (crossing, shift, workers) in [(0.0, 0.0, 1), (0.1, 0.5, 2), (0.2, -0.5, 5), (0.3, 0.0, 1)] {
        let all = run_study(&study(&UNCUT), &Landscape::new(crossing, shift), 1);
        let landscape = Landscape::new(crossing, shift);
        let few = run_study(&study(&["search.method=sobol"]), &landscape, workers);
        assert_eq!(k_stars(&few), k_stars(&all), "crossing {crossing}, shift {shift}");
        for (all, few) in all.cells.iter().zip(&few.cells) {
            assert_eq!((few.stopped, few.running), (0, 0), "{few:?}");
            assert!(few.cut > 0 && few.infeasible == all.infeasible, "{few:?} and {all:?}");
            assert!(few.steps < all.steps, "{few:?} of {all:?}");
        }
        assert_eq!(few.steps, landscape.steps_taken.into_inner());
        assert_eq!(found(&few), found(&all));
        // Little more than K* steps of each trial that does not diverge, where each knows those before it: of
        // several at once, one may be far ahead before another has told what it takes.
        let alone = run_study(&study(&["search.method=sobol"]), &Landscape::new(crossing, shift), 1);
        for cell in &alone.cells {
            let least = (32 - cell.infeasible) as u64 * cell.k_star.unwrap();
            assert!(10 * cell.steps <= 11 * least, "{} steps, {least} at least: {cell:?}", cell.steps);
        }
    }
}

/// The promise of halving, over landscapes whose best rate lies elsewhere each time and whose trials overtake
/// each other.
#[test]
fn halving_finds_the_same_with_a_third_of_the_steps() {
    // How much trials overtake each other, where the best rate lies, and by how much K* may be missed for that.
    let landscapes = [(0.0, 0.0, 1.0), (0.1, -1.0, 1.0), (0.1, 0.0, 1.0), (0.1, 0.5, 1.0), (0.2, -0.5, 1.2)];
    for (crossing, shift, missed) in landscapes {
        let (sobol, halving) = (study(&UNCUT), study(&[HALVING]));
        let all = run_study(&sobol, &Landscape::new(crossing, shift), 1);
        let few = run_study(&halving, &Landscape::new(crossing, shift), 2);
        for (all, few) in all.cells.iter().zip(&few.cells) {
            let (all, few) = (all.k_star.unwrap() as f64, few.k_star.unwrap() as f64);
            assert!(
                all <= few && few <= missed * all,
                "{few} steps, not {all}: crossing {crossing}, shift {shift}"
            );
        }
        assert!(
            3 * few.steps <= all.steps,
            "{} of {} steps: crossing {crossing}, shift {shift}",
            few.steps,
            all.steps
        );
        for (all, few) in all.cells.iter().zip(&few.cells) {
            assert!(2 * few.steps <= all.steps, "{few:?} of {all:?}");
        }
    }
}

/// Judged even against trials that are left when they have passed the best one, which is exact.
#[test]
fn halving_saves_more_than_leaving_those_that_have_lost() {
    let halving = study(&[HALVING]);
    let summary = run_study(&halving, &Landscape::new(0.1, 0.0), 1);
    for cell in &summary.cells {
        let k_star = cell.k_star.unwrap();
        assert!(cell.steps < 12 * k_star, "{} steps of 32 trials with K* = {k_star}", cell.steps);
    }
}

#[test]
fn workers_do_not_change_what_is_found() {
    for method in ["search.method=sobol", HALVING] {
        let study = study(&[method]);
        let [one, many] = [1, 7].map(|workers| run_study(&study, &Landscape::new(0.2, 0.0), workers));
        assert_eq!(found(&one), found(&many), "{method}");
    }
}

#[test]
fn a_study_that_was_stopped_goes_on_and_finds_the_same() {
    for method in ["search.method=sobol", HALVING] {
        stopped_and_resumed(&study(&[method]));
    }
}

fn stopped_and_resumed(study: &Study) {
    let undisturbed = run_study(study, &Landscape::new(0.2, 0.0), 1);
    let folder = tempfile::tempdir().unwrap();
    let landscape = Landscape::new(0.2, 0.0);
    let key = |record: &TrialRecord| (record.batch, record.sparsity.to_bits(), record.trial);
    let (mut done, mut starts, mut ended) = (BTreeSet::new(), 0, false);
    while !ended {
        starts += 1;
        let (results, heard, is_over) = run_part(study, &landscape, folder.path(), (2, TrialShard::ALL, 25));
        let again = heard.iter().find(|record| done.contains(&key(record)));
        assert_eq!(again, None, "what has ended is not begun again");
        done = results.records().filter(|record| record.status.is_final()).map(key).collect();
        ended = is_over;
    }
    assert!(starts > 3, "it was stopped {starts} times");
    let results = Results::open(folder.path(), study).unwrap();
    assert_eq!(found(&summary(study, &results)), found(&undisturbed));
}

/// Stopped again and again, with paused trials on disk: the same K*, and not one step taken twice. One
/// worker, which is stopped where a trial is paused, so that none runs then.
#[test]
fn trials_that_wait_outlive_their_study() {
    let halving = study(&[HALVING]);
    let undisturbed = Landscape::new(0.2, 0.0);
    let expected = k_stars(&run_study(&halving, &undisturbed, 1));
    let landscape = Landscape { saves: true, ..Landscape::new(0.2, 0.0) };
    let folder = tempfile::tempdir().unwrap();
    let mut ended = false;
    while !ended {
        let (results, _, is_over) = run_part(&halving, &landscape, folder.path(), (1, TrialShard::ALL, 25));
        ended = is_over;
        let paused = results.records().filter(|record| !record.status.is_final()).count();
        let saved = std::fs::read_dir(folder.path().join("waiting")).map_or(0, Iterator::count);
        assert_eq!(saved, paused, "those that wait, and no others");
    }
    assert!(landscape.resumed.into_inner() > 10);
    assert_eq!(landscape.steps_taken.into_inner(), undisturbed.steps_taken.into_inner());
    let results = Results::open(folder.path(), &halving).unwrap();
    assert_eq!(k_stars(&summary(&halving, &results)), expected);
    assert!(!folder.path().join("waiting").exists());
}

#[test]
fn shards_share_a_folder_and_bests() {
    let halving = study(&["search.trials=31", HALVING]);
    let folder = tempfile::tempdir().unwrap();
    let landscape = Landscape::new(0.1, 0.0);
    let run = |shard| run_part(&halving, &landscape, folder.path(), (2, shard, usize::MAX));
    for index in [2, 1, 3] {
        let (_, heard, ended) = run(TrialShard { index, of: 3 });
        assert!(ended && heard.iter().all(|record| record.trial % 3 == index % 3));
    }
    let sharded = summary(&halving, &Results::open(folder.path(), &halving).unwrap());
    assert_eq!((sharded.finished, sharded.trials), (4 * 31, 4 * 31));
    let single = run_study(&halving, &Landscape::new(0.1, 0.0), 1);
    assert_eq!(k_stars(&sharded), k_stars(&single));
    // All is done, whoever asks again.
    let taken = landscape.steps_taken.load(Ordering::Relaxed);
    run(TrialShard::ALL);
    assert_eq!(landscape.steps_taken.load(Ordering::Relaxed), taken);
}

/// Processes that run at the same time, each killed once, one after the other and side by side: the table of
/// one process.
#[test]
fn shards_that_are_killed_and_resumed_give_the_table_of_one_process() {
    let study = study(&["search.trials=31", "search.seeds=2"]);
    let seeded = |results: &mut Results, landscape: &Landscape| {
        let mut listener = Listener::default();
        assert!(search(&study, landscape, 2).repeat_best(results, &mut listener).unwrap());
        found(&summary(&study, results))
    };
    let landscape = Landscape::new(0.2, 0.5);
    let (_single, mut results) = run_all(&study, &landscape, 1);
    let expected = seeded(&mut results, &landscape);

    let folder = tempfile::tempdir().unwrap();
    let landscape = Landscape { saves: true, ..Landscape::new(0.2, 0.5) };
    let one = |index: u32, after: usize| {
        run_part(&study, &landscape, folder.path(), (3, TrialShard { index, of: 2 }, after)).2
    };
    assert!(!one(1, 40), "killed before its end");
    thread::scope(|scope| {
        let other = scope.spawn(|| one(2, 70));
        assert!(one(1, usize::MAX));
        assert!(!other.join().unwrap());
    });
    assert!(one(2, usize::MAX));
    let mut results = Results::open(folder.path(), &study).unwrap();
    assert_eq!(seeded(&mut results, &landscape), expected);
}

/// The best trial of each cell again, whose luck is another each time: not a trial more for the search, which
/// finds the same K*, and an interval for the curve.
#[test]
fn best_trials_are_repeated_with_other_seeds() {
    let study = study(&["search.seeds=4"]);
    let landscape = Landscape::new(0.1, 0.0);
    let (folder, mut results) = run_all(&study, &landscape, 2);
    let before = summary(&study, &results);
    assert!(before.cells.iter().all(|cell| cell.seeds.is_empty()));
    assert_eq!(before.fits[0].fit.c1_interval, None);
    let search = search(&study, &landscape, 2);
    let mut listener = Listener::default();
    search.repeat_best(&mut results, &mut listener).unwrap();
    assert!(!listener.ended.is_empty() && listener.ended.iter().all(|(done, settled)| done == settled));
    // Read again from the disk, and nothing more to do.
    let mut results = Results::open(folder.path(), &study).unwrap();
    let taken = landscape.steps_taken.load(Ordering::Relaxed);
    search.repeat_best(&mut results, &mut Listener::default()).unwrap();
    assert_eq!(landscape.steps_taken.load(Ordering::Relaxed), taken);
    let after = summary(&study, &results);
    assert_eq!(k_stars(&after), k_stars(&before));
    assert_eq!((after.finished, after.trials, after.steps), (before.finished, before.trials, before.steps));
    for (cell, before) in after.cells.iter().zip(&before.cells) {
        let k_star = before.k_star.unwrap();
        let others: Vec<u64> = cell.seeds.iter().map(|steps| steps.expect("they reach the goal")).collect();
        assert!(others.len() == 4 && others.iter().all(|steps| *steps <= 2 * k_star), "{cell:?}");
        assert!(others.iter().any(|steps| *steps != others[0]), "{cell:?}");
        assert!(cell.seeds_in_words().contains(" to "), "{cell:?}");
    }
    let [low, high] = after.fits[0].fit.c1_interval.unwrap();
    assert!(low < high && high < 2.0 * after.fits[0].fit.curve.c1, "{:?}", after.fits[0]);
}

/// A trial of K* that another seed does not bring to the goal, and one that is a little slower with any of them.
#[test]
fn the_steadiest_of_the_best_trials_is_what_a_new_run_should_take() {
    let study =
        study(&["search.seeds=3", "search.finalists=2", "cells.batches=[64]", "cells.sparsities=[0]"]);
    let folder = tempfile::tempdir().unwrap();
    let mut results = Results::open(folder.path(), &study).unwrap();
    let record = |trial: u32, status: TrialStatus, steps: u64, best: f64| TrialRecord {
        batch: 64,
        sparsity: 0.0,
        trial,
        status,
        steps,
        best: Some(best),
        fields: vec![("learning_rate.peak".into(), f64::from(trial))],
        curve: Vec::new(),
    };
    use TrialStatus::{Complete, Cut, Incomplete, Infeasible};
    let searched =
        [(1, Cut, 320, 0.3), (2, Complete, 320, 0.1), (3, Infeasible, 16, 0.01), (4, Cut, 304, 0.2)];
    let searched = searched.map(|(trial, status, steps, best)| record(trial, status, steps, best));
    results.append(&searched).unwrap();
    let finalists = finalists::of_cell(&study, &results, study.cells[0]);
    assert_eq!(finalists.iter().map(|record| record.trial).collect::<Vec<_>>(), [2, 4]);
    let cell = |results: &Results| summary(&study, results).cells[0].clone();
    assert_eq!((cell(&results).steadiest_trial, cell(&results).seeds), (None, Vec::new()));

    let repeats = |trial: u32, steps: [Option<u64>; 3]| -> Vec<TrialRecord> {
        let numbered = (1..).zip(steps).map(|(n, steps)| match steps {
            Some(steps) => record(repeat_number(trial, n), Complete, steps, 0.1),
            None => record(repeat_number(trial, n), Incomplete, 1280, 0.2),
        });
        numbered.collect()
    };
    results.append(&repeats(2, [Some(320), None, None])).unwrap();
    // One seed of the other one is not enough to judge it by.
    let others = repeats(4, [Some(352), Some(336), Some(368)]);
    results.append(&others[..1]).unwrap();
    assert_eq!((cell(&results).steadiest_trial, cell(&results).seeds[1]), (Some(2), None));
    results.append(&others[1..]).unwrap();
    let found = cell(&results);
    assert_eq!((found.k_star, found.best_trial, found.steadiest_trial), (Some(320), Some(2), Some(4)));
    assert_eq!((found.seeds, found.steadiest["lr"]), (vec![Some(352), Some(336), Some(368)], 4.0));
    assert_eq!((found.best["lr"], found.complete), (2.0, 1));
}

#[test]
fn a_goal_out_of_reach_ends_when_the_steps_are_spent() {
    let halving = study(&["search.steps=640", "search.trials=8", HALVING]);
    let summary = run_study(&halving, &Landscape { scale: 0.0, ..Landscape::new(0.0, 0.0) }, 2);
    for cell in &summary.cells {
        assert_eq!((cell.k_star, cell.complete, cell.running), (None, 0, 0));
        assert!(cell.incomplete > 0 && cell.incomplete + cell.infeasible + cell.stopped == 8, "{cell:?}");
    }
    assert!(summary.fits.is_empty() && summary.ratios.is_empty());
}

#[test]
fn a_best_trial_at_the_edge_is_flagged_and_widening_finds_a_better_one() {
    // The best effective rate is above what the range allows with the momentum left at its smallest.
    let narrow = [
        "search.ranges.learning_rate.peak.log=[1e-4, 2e-3]",
        "search.trials=16",
        "cells.batches=[256]",
        "cells.sparsities=[0]",
    ];
    let (study, landscape) = (study(&narrow), Landscape::new(0.0, 1.0));
    let (folder, mut results) = run_all(&study, &landscape, 2);
    let before = summary(&study, &results);
    assert!(!before.cells[0].at_edge.is_empty(), "{:?}", before.cells[0]);
    let mut listener = Listener::default();
    assert!(search(&study, &landscape, 2).widen_ranges(&mut results, &mut listener).unwrap());
    assert!(!listener.widened.is_empty());
    // Read again from the disk.
    let results = Results::open(folder.path(), &study).unwrap();
    let after = summary(&study, &results);
    assert!(after.cells[0].k_star < before.cells[0].k_star, "{:?} {:?}", before.cells[0], after.cells[0]);
    assert_eq!(after.cells[0].running, 0);
    // The values of a trial beyond the range follow from its number again.
    let beyond = results.of_cell(study.cells[0]).into_iter().find(|record| record.trial > 1000).unwrap();
    let settings = widen::settings(&study, &results, study.cells[0], beyond.trial);
    assert_eq!(settings.fields, beyond.fields);
}

/// A trial that fails otherwise than by diverging ends the study with its sentence.
#[test]
fn an_error_of_a_trial_is_the_studys() {
    struct Broken;
    impl TrialRunner for Broken {
        fn begin<'a>(&'a self, _: usize, _: &TrialSettings) -> Result<Box<dyn Trial + Send + 'a>, Error> {
            Err(Error::File { path: "weights".into(), why: "torn".into() })
        }
        fn chance_level(&self, _: crate::file::Goal) -> f64 {
            0.9
        }
        fn training_samples(&self) -> usize {
            1
        }
    }
    let study = study(&[]);
    let folder = tempfile::tempdir().unwrap();
    let mut results = Results::open(folder.path(), &study).unwrap();
    let ended =
        search(&study, &Broken, 2).run_trials(&mut results, TrialShard::ALL, &mut Listener::default());
    assert_eq!(ended.unwrap_err().to_string(), "weights: torn");
}
