use super::*;

const TEXT: &str = r#"
    name = "small"
    [run.model]
    name = "simple-cnn"
    [run.data]
    kind = "shapes"
    [run.optimizer]
    name = "momentum"
    [run.prune]
    method = "snip"
    [cells]
    batches = [16, 64]
    sparsities = [0, 0.9]
    [goal]
    error = 0.12
    [search]
    trials = 8
    steps = 1000
    [search.ranges]
    "learning_rate.peak" = { log = [1e-4, 1.0] }
    optimizer.momentum = { one_minus_log = [1e-4, 0.1] }
"#;

fn with(overrides: &[&str]) -> Result<Study, Error> {
    Study::parse(TEXT, &overrides.iter().map(|&text| text.into()).collect::<Vec<_>>())
}

#[test]
fn a_study_is_cells_a_goal_and_ranges() {
    let study = with(&[]).unwrap();
    assert_eq!(study.cells.len(), 4);
    assert_eq!(study.cells[1], Cell { batch: 64, sparsity: 0.0 });
    assert_eq!(study.sparsities(), [0.0, 0.9]);
    assert_eq!(study.goal, Goal::Error(0.12));
    assert_eq!((study.search.method, study.search.eval_every), (SearchMethod::Sobol, 16));
    let settings = study.settings(study.cells[2], 1, &study.search.ranges);
    assert_eq!((settings.batch, settings.sparsity, settings.seed), (16, 0.9, 1));
    let run = study.run_file(&settings).unwrap();
    assert!((run.learning_rate.peak - 1e-2).abs() < 1e-12, "the middle of its range");
    assert_eq!((run.train.batch, run.seed, run.prune.unwrap().sparsity), (16, 1, 0.9));
    let dense = study.run_file(&study.settings(study.cells[0], 2, &study.search.ranges)).unwrap();
    assert!(dense.prune.is_none(), "what is whole is not pruned");
}

/// Another method in SNIP's place, with how long it takes to prune among what is searched: the dense network
/// has no such field.
#[test]
fn a_field_of_pruning_is_searched_where_there_is_pruning() {
    let study =
        with(&["run.prune={method=\"gradual\"}", "search.ranges.prune.end.whole_log=[16, 512]"]).unwrap();
    let settings = |cell: usize| study.settings(study.cells[cell], 1, &study.search.ranges);
    let names = |cell| settings(cell).fields.into_iter().map(|(field, _)| field).collect::<Vec<_>>();
    assert_eq!(names(0), ["learning_rate.peak", "optimizer.momentum"]);
    assert_eq!(names(2), ["learning_rate.peak", "optimizer.momentum", "prune.end"]);
    assert!(study.run_file(&settings(0)).unwrap().prune.is_none());
    let sparse = study.run_file(&settings(2)).unwrap().prune.unwrap();
    assert_eq!(sparse.method.pruned_after(study.search.steps), 91);
}

#[test]
fn an_override_reaches_every_field() {
    let study = with(&[
        "search.trials=3",
        "cells.batches=[8]",
        "search.ranges.optimizer.momentum.one_minus_log=[0.01, 1]",
    ])
    .unwrap();
    assert_eq!((study.search.trials, study.cells.len()), (3, 2));
    assert_eq!(study.search.ranges[1].high, 1.0);
}

#[test]
fn results_are_comparable_while_the_fingerprint_stays() {
    let same =
        |overrides: &[&str]| with(overrides).unwrap().fingerprint() == with(&[]).unwrap().fingerprint();
    assert!(same(&["search.trials=200", "cells.batches=[8]", "name=other", "run.device.kind=cpu"]));
    for other in [
        "goal.error=0.11",
        "search.steps=2000",
        "search.eval_every=8",
        "run.data.size=24",
        "search.method=halving",
    ] {
        assert!(!same(&[other]), "{other}");
    }
}

#[test]
fn mistakes_get_a_sentence_that_names_the_field() {
    let message = |change: &str| with(&[change]).unwrap_err().to_string();
    let refused = r#"
        nmae=x => `nmae` is not a field; did you mean `name`?
        name=a/b => `name` must be letters, digits, `-`, `_` and `.`: it names a folder, got "a/b"
        cells.batchs=[1] => `cells.batchs` is not a field; did you mean `cells.batches`?
        cells.batches=[] => `cells.batches` must be a list of batch sizes, such as [16, 64], got an empty list
        cells.batches=[0] => `cells.batches` must be a list of batch sizes, such as [16, 64], got 0
        cells.batches=[4, 4] => `cells.batches` has 4 twice
        cells.sparsities=[1] => `cells.sparsities` must be a list of numbers in [0, 1), such as [0, 0.9], got 1
        goal.loss=2 => `goal.loss` and `goal.error` exclude each other: a study has one goal
        goal.error=12 => `goal.error` must be an error rate, in (0, 1), got 12
        search.method=sobel => `search.method` must be "sobol" or "halving", got "sobel"; did you mean `sobol`?
        search.eval_every=5000 => `search.eval_every` is 5000, above `search.steps` = 1000: no trial would be measured
        search.sparsity=1 => `search.sparsity` is not a field
        search.finalists=2 => `search.finalists` is how many trials are run again with other seeds, and `search.seeds` is 0
        search.ranges.learning_rate.peak.log=[0.1, 1] => `search.ranges` has `learning_rate.peak` twice, in quotes and as a section
        run.seed=3 => `run.seed` has no effect in a study: the trial's number decides it
        run.train.batch=3 => `run.train.batch` has no effect in a study: `cells.batches` decides it
        run.learning_rate.peak=0.1 => `run.learning_rate.peak` has no effect in a study that searches it: `search.ranges.learning_rate.peak` decides it
        run.model.nmae=x => `run.model.nmae` is not a field; did you mean `run.model.name`?
        run.optimizer.name=sgd => `run.optimizer.momentum` has no effect with `optimizer.name` = "sgd", whose fields are: exclude_from_decay, master, moments, weight_decay
        search.ranges.learning_rate.peek.log=[1, 2] => `run.learning_rate.peek` is not a field; did you mean `run.learning_rate.peak`?
    "#;
    for line in refused.trim().lines() {
        let (change, expected) = line.trim().split_once(" => ").expect("a change, and a sentence");
        assert_eq!(message(change), expected, "{change}");
    }
    let without = |line: &str| Study::parse(&TEXT.replace(line, ""), &[]).unwrap_err().to_string();
    assert_eq!(without("name = \"small\""), "`name` is missing: a name for folders and pages");
    assert_eq!(
        without("error = 0.12"),
        "`goal.error` is missing: the validation error to reach (or `goal.loss`)"
    );
    assert_eq!(without("steps = 1000"), "`search.steps` is missing: the most steps of a trial");
    assert_eq!(
        without("[run.prune]\n    method = \"snip\""),
        "`run.prune` is missing: a method for the sparsity of 0.9 in `cells.sparsities`"
    );
}
