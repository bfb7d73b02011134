//! `espalier study`: small studies from end to end.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::report::{Served, report};
use crate::{
    TestDir, assert_contains, espalier_command, json, json_of, refused, refused_each, said, stderr, succeeded,
};

/// A study that finishes in a moment.
const TINY: &str = r#"
    name = "tiny"
    [run.model]
    name = "mlp"
    hidden = [16]
    [run.data]
    kind = "shapes"
    count = 400
    size = 16
    [run.optimizer]
    name = "momentum"
    [run.learning_rate]
    schedule = "constant"
    [run.prune]
    method = "magnitude"
    [run.device]
    kind = "cpu"
    [cells]
    batches = [8, 32]
    sparsities = [0, 0.5]
    [goal]
    error = 0.86
    [search]
    trials = 4
    steps = 256
    eval_every = 8
    [search.ranges]
    learning_rate.peak = { log = [1e-3, 0.1] }
    optimizer.momentum = { one_minus_log = [0.05, 0.5] }
"#;

/// Trials that end one after the other, and go on to do so for as long as anybody looks.
const ENDLESS: &str = "--set goal.error=0.0001 --set search.steps=64 --set search.trials=20000 --set search.method=sobol \
                       --set search.cut=false";

/// A study that runs until it is dropped, and serves its page.
pub fn served(folder: &Path) -> Served {
    fs::write(folder.join("study.toml"), TINY).unwrap();
    Served::by(command(folder, ENDLESS))
}

/// A study that has ended, in `out/tiny`.
pub fn ended_study(folder: &Path) {
    done(folder, "--json");
}

/// The same, its best trials run again with three other seeds.
pub fn repeated_study(folder: &Path) {
    done(folder, "--set search.seeds=3 --json");
}

fn command(folder: &Path, arguments: &str) -> Command {
    espalier_command(folder, &format!("study study.toml {arguments}"))
}

fn study(folder: &Path, arguments: &str) -> Output {
    fs::write(folder.join("study.toml"), TINY).unwrap();
    command(folder, arguments).output().unwrap()
}

fn done(folder: &Path, arguments: &str) -> Value {
    json_of(study(folder, arguments))
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).map(|entries| entries.map(|entry| entry.unwrap().path()).collect());
    let mut files: Vec<PathBuf> = entries.unwrap_or_default();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    files.sort();
    files
}

fn finished(summary: &Value) -> (u64, u64) {
    (summary["finished"].as_u64().unwrap(), summary["trials"].as_u64().unwrap())
}

#[test]
fn a_study_finds_steps_for_every_cell_and_says_so() {
    let folder = TestDir::new();
    let output = study(&folder, "--json");
    let text = stderr(&output);
    assert!(output.status.success(), "{text}");
    let summary = json(&output.stdout);
    let cells = summary["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 4);
    for cell in cells {
        let k_star = cell["k_star"].as_u64().unwrap_or_else(|| panic!("no trial reached the goal: {cell}"));
        assert!(k_star > 0 && k_star.is_multiple_of(8), "{cell}");
        let count = |key: &str| cell[key].as_u64().unwrap();
        assert_eq!(
            ["complete", "incomplete", "infeasible", "cut", "stopped"].map(count).iter().sum::<u64>(),
            4,
            "{cell}"
        );
        assert!(
            cell["best"]["lr"].as_f64().unwrap() >= 1e-3 && cell["best"]["optimizer.momentum"].is_f64(),
            "{cell}"
        );
        assert!(cell["at_edge"].is_array());
    }
    let fits = summary["fits"].as_array().unwrap();
    assert_eq!(fits.len(), 2);
    assert!(
        fits.iter().all(|fit| ["sparsity", "c1", "c2"].iter().all(|key| fit[key].is_number())),
        "{fits:?}"
    );
    assert!(fits.iter().all(|fit| fit["r2"].is_null()), "any curve goes through two points: {fits:?}");
    assert!(summary["smoothness"].is_array() && summary["ratios"].as_array().unwrap().len() == 2);
    let page = fs::read_to_string(folder.join(summary["report"].as_str().unwrap())).unwrap();
    assert!(page.contains("Study tiny") && page.contains("<svg"), "{page}");
    assert!(text.contains("sparsity 0: K* = ") && text.contains("16 of 16 trials"), "{text}");

    // Asked again, it has nothing to do and says the same.
    let files_before = files(&folder.join("out/tiny"));
    let again = done(&folder, "--json");
    assert_eq!(again["cells"], summary["cells"]);
    assert_eq!(files(&folder.join("out/tiny")), files_before);
    // More trials are added to those that there are.
    let more = done(&folder, "--json --set search.trials=5");
    assert_eq!(finished(&more), (20, 20));
}

#[test]
fn shards_add_up_to_the_study() {
    let folder = TestDir::new();
    let first = done(&folder, "--json --out shared --shard 1/2 --workers 1");
    assert_eq!(finished(&first), (8, 16));
    let both = done(&folder, "--json --out shared --shard 2/2");
    assert_eq!(finished(&both), (16, 16));
    assert_eq!(files(&folder.join("shared")).len(), 2);
    let unsharded = done(&folder, "--json --out alone");
    let k_stars = |summary: &Value| -> Vec<Value> {
        summary["cells"].as_array().unwrap().iter().map(|cell| cell["k_star"].clone()).collect()
    };
    assert!(k_stars(&both).iter().all(Value::is_u64) && k_stars(&unsharded).iter().all(Value::is_u64));
}

#[test]
fn a_study_that_was_killed_goes_on() {
    let at = &TestDir::new();
    fs::write(at.join("study.toml"), TINY).unwrap();
    let hard = "--json --set goal.error=0.01 --set search.steps=64";
    // It has more cells than it can come to the end of, and those of the study first.
    let batches: Vec<String> = [8, 32].into_iter().chain(40..60).map(|batch| batch.to_string()).collect();
    let endless = format!("{hard} --set cells.batches=[{}]", batches.join(","));
    let mut child = command(at, &endless).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let began = Instant::now();
    while ended(at).len() < 2 {
        assert!(began.elapsed() < Duration::from_secs(120), "no trial has ended");
        std::thread::sleep(Duration::from_millis(5));
    }
    // Two that run all trials would run each twice.
    refused(command(at, hard).output().unwrap(), &["out/tiny: another process is at work on this study"]);
    child.kill().unwrap();
    child.wait().unwrap();
    let ended_before = ended(at);
    // A line that was torn, as by a full disk, is skipped aloud.
    let torn = &files(&at.join("out/tiny"))[0];
    let intact = fs::read(torn).unwrap();
    fs::write(torn, [&intact[..], b"{\"kind\":\"tri"].concat()).unwrap();
    let output =
        said(command(at, hard).output().unwrap(), &["warning: ", "the last line is torn, and is skipped"]);
    assert_eq!(finished(&json(&output.stdout)), (16, 16));
    let second = fs::read_to_string(&files(&at.join("out/tiny"))[1]).unwrap();
    for trial in ended_before {
        assert!(!second.contains(&trial), "what had ended was run again: {trial}");
    }
}

/// The beginnings of lines of trials that have come to their end.
fn ended(at: &Path) -> Vec<String> {
    let text: String =
        files(&at.join("out/tiny")).iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    let ended = text.lines().filter(|line| line.contains("\"status\"") && !line.contains("\"paused\""));
    ended.map(|line| line.split("\"status\"").next().unwrap().to_string()).collect()
}

#[test]
fn a_goal_out_of_reach_is_said_for_each_cell() {
    let folder = TestDir::new();
    let output = succeeded(study(&folder, "--json --set goal.error=0.0001 --set search.steps=32"));
    let summary = json(&output.stdout);
    assert!(summary["cells"].as_array().unwrap().iter().all(|cell| cell["k_star"].is_null()));
    assert_contains(&stderr(&output), &["note: batch 32, sparsity 0.5: none of 4 trials reached the goal"]);
}

#[test]
fn a_dry_run_leaves_nothing_behind() {
    let folder = TestDir::new();
    let output = succeeded(study(&folder, "--dry-run --json"));
    assert_contains(&stderr(&output), &["4 cells (2 batch sizes, 2 sparsities), 4 trials each"]);
    assert_eq!(finished(&json(&output.stdout)), (0, 16));
    assert!(!folder.join("out").exists());
}

#[test]
fn wrong_input_gets_one_sentence() {
    let at = &TestDir::new();
    done(at, "--json --out other --set search.steps=16");
    let mistakes = r#"
        --set serach.trials=2 => `serach` is not a field; did you mean `search`?
        --set search.ranges.learning_rate.peak.log=[0.1,0.01] => must be a range that is not empty: the smaller number first, got [0.1, 0.01]
        --set cells.batches=[8,1000] => `cells.batches` has 1000, and there are 360 training samples
        --set run.data.kind=idx --set run.data.path=nowhere => has no effect with `data.kind`
        --out other => results of another study (tiny
        --shard 3/2 => expected I/N with I from 1 to N, as in 2/8
        --shard 1/2 --widen => cannot be used with
        --set run.model.name=mpl => did you mean `mlp`?
        --set run.train.batch=8 => `run.train.batch` has no effect in a study: `cells.batches` decides it
        --set run.parallel.data=2 => `run.parallel` is not allowed in a study: a trial runs on one rank
    "#;
    refused_each(mistakes, |arguments| study(at, arguments));
    assert!(!at.join("out").exists(), "nothing is left behind");
    let missing = TINY.replace(
        "kind = \"shapes\"\n    count = 400\n    size = 16",
        "kind = \"idx\"\n    path = \"nowhere\"",
    );
    fs::write(at.join("study.toml"), missing).unwrap();
    refused(
        command(at, "").output().unwrap(),
        &["is not there: expected an IDX file", "`espalier data mnist DIR`"],
    );
}

/// While it runs, from within and from beside; and when it was killed.
#[test]
fn a_study_is_shown_as_it_goes_on_and_nothing_else_is() {
    let at = &TestDir::new();
    let served = served(at);
    let page = served.get("/");
    assert!(page.contains("<!doctype html>") && page.contains("<h1>Study tiny</h1>"), "{page}");
    let content = served.wait_until(|content| !content.contains(">0 of 80000 trials"));
    assert!(content.contains("of 80000 trials are finished"), "{content}");
    for path in ["/study.json", "/trials-0001.jsonl", "/../study.toml", "/%2e%2e/study.toml", "/out"] {
        assert!(served.get(path).starts_with("HTTP/1.1 404"), "{path}");
    }
    let beside = Served::start(at, "out/tiny");
    assert!(beside.get("/").contains("<h1>Study tiny</h1>"));
    drop((beside, served));
    let output = succeeded(report(at, "out/tiny --svg first.svg --json").output().unwrap());
    let found = json(&output.stdout);
    assert_eq!((&found["study"], &found["of"]), (&"tiny".into(), &80_000.into()));
    assert!(found["finished"].as_u64().unwrap() > 0 && found["page"].is_null(), "{found}");
    assert!(fs::read_to_string(at.join("first.svg")).unwrap().starts_with("<svg"));
    assert!(!at.join("out/tiny/study.html").exists());
    succeeded(report(at, "out/tiny").output().unwrap());
    assert!(fs::read_to_string(at.join("out/tiny/study.html")).unwrap().contains("Study tiny"));
}

#[test]
fn studies_are_shown_alone_or_beside_studies() {
    let at = &TestDir::new();
    ended_study(at);
    let beside = "out/tiny out/tiny -o both.html --svg both.svg --json";
    let output = succeeded(report(at, beside).output().unwrap());
    let found = json(&output.stdout);
    let alone = json(&succeeded(report(at, "out/tiny --json").output().unwrap()).stdout);
    for one in found["studies"].as_array().unwrap() {
        assert_eq!((&one["study"], &one["cells"]), (&"tiny".into(), &alone["cells"]));
    }
    assert_eq!(found["svg"], "both.svg");
    let page = fs::read_to_string(at.join("both.html")).unwrap();
    assert!(page.contains("<h1>Studies tiny, tiny</h1>") && page.matches("<table").count() >= 2, "{page}");
    let picture = fs::read_to_string(at.join("both.svg")).unwrap();
    assert_eq!(picture.matches("tiny: steps to a validation").count(), 2, "{picture}");
    let cases: [(&str, &str); 6] = [
        ("out/tiny out/tiny --serve", "`--serve` is for one study"),
        ("out/tiny out/tiny --csv numbers.csv", "`--csv` is for runs, not for several studies"),
        ("out/tiny elsewhere", "give a study by itself"),
        ("out/tiny --csv numbers.csv", "`--csv` is for runs, not for a study"),
        ("out/tiny --tensorboard events", "`--tensorboard` is for runs"),
        ("out/tiny -o study.toml", "a file is here that is no page of a report"),
    ];
    for (arguments, words) in cases {
        refused(report(at, arguments).output().unwrap(), &[words]);
    }
    refused(study(at, "--serve 127.0.0.1:port"), &["`port` is no port"]);
}
