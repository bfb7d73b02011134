//! `espalier study` of the kinds that are no search: smoothness, generalisation gap, critical batch.

use std::fs;
use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::{TestDir, espalier, json_of, refused_at_last};

/// What all of them train.
const RUN: &str = r#"
    name = "small"
    [run.model]
    name = "mlp"
    hidden = [16]
    [run.data]
    kind = "shapes"
    count = 300
    size = 16
    [run.optimizer]
    name = "momentum"
    [run.learning_rate]
    peak = 0.01
    schedule = "constant"
    [run.device]
    kind = "cpu"
    threads = 2
"#;

fn study(folder: &Path, kind: &str, rest: &str, arguments: &str) -> Output {
    fs::write(folder.join("study.toml"), format!("kind = \"{kind}\"\n{RUN}\n{rest}")).unwrap();
    espalier(folder, &format!("study study.toml {arguments}"))
}

/// What a study prints, the first time and again: it runs nothing twice.
fn twice(kind: &str, rest: &str) -> Value {
    let folder = TestDir::new();
    let run_study = || json_of(study(&folder, kind, rest, "--json"));
    let found = run_study();
    let outcomes = fs::read_to_string(folder.join("out/small/outcomes.jsonl")).unwrap();
    assert_eq!(run_study(), found);
    assert_eq!(fs::read_to_string(folder.join("out/small/outcomes.jsonl")).unwrap(), outcomes);
    let page = fs::read_to_string(folder.join(found["report"].as_str().unwrap())).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.contains("<svg"), "{page}");
    assert_eq!((found["kind"].as_str(), found["name"].as_str()), (Some(kind), Some("small")));
    found
}

#[test]
fn smoothness_is_measured_along_one_run_at_several_sparsities() {
    let rest = "[run.train]\nsteps = 8\n[run.prune]\nmethod = \"snip\"\n\
                [smoothness]\nsparsities = [0, 0.9]\nevery = 4\nsamples = 100";
    let found = twice("smoothness", rest);
    let courses = found["smoothness"].as_array().unwrap();
    assert_eq!(courses.len(), 2);
    for course in courses {
        assert!(
            course["mean"].as_f64().unwrap() > 0.0 && course["variance"].as_f64().unwrap() > 0.0,
            "{course}"
        );
        assert_eq!(course["points"].as_array().unwrap().len(), 2, "{course}");
    }
}

#[test]
fn every_arm_of_a_gap_ends_at_every_batch() {
    let rest = "[run.train]\nepochs = 1\n[gap]\nbatches = [10, 90]\nsamples = 100\n[arms.as-it-is]\n\
                [arms.lamb]\noptimizer.name = \"lamb\"";
    let found = twice("generalisation-gap", rest);
    let runs = found["runs"].as_array().unwrap();
    let names: Vec<_> =
        runs.iter().map(|run| (run["batch"].as_u64().unwrap(), run["arm"].as_str().unwrap())).collect();
    assert_eq!(names, [(10, "as-it-is"), (10, "lamb"), (90, "as-it-is"), (90, "lamb")]);
    assert!(runs.iter().all(|run| run["ended"]["sharpness"].as_f64().unwrap() > 0.0), "{found}");
}

#[test]
fn branches_say_a_critical_batch() {
    let rest = "[run.train]\nbatch = 4\nsteps = 20\n[branch]\nat = [10]\nfactors = [1, 4]\nsamples = 64";
    let found = twice("critical-batch", rest);
    let fork = &found["forks"][0];
    assert_eq!((fork["step"].as_u64(), fork["branches"].as_array().unwrap().len()), (Some(10), 2));
    assert!([4, 16].contains(&fork["critical_batch"].as_u64().unwrap()), "{fork}");
}

/// In a study of steps-to-result, beside the cells.
#[test]
fn the_best_trials_of_a_search_are_looked_at_where_asked() {
    let folder = TestDir::new();
    let run = RUN.replace("peak = 0.01", "");
    let rest = "[run.prune]\nmethod = \"snip\"\n[cells]\nbatches = [16]\nsparsities = [0, 0.5]\n[goal]\nerror = 0.88\n\
                [search]\ntrials = 2\nsteps = 64\neval_every = 4\n[search.ranges]\n\
                learning_rate.peak = { log = [0.005, 0.02] }\n[smoothness]\nevery = 2\nsamples = 100";
    fs::write(folder.join("study.toml"), run + rest).unwrap();
    let found = json_of(espalier(&folder, "study study.toml --json"));
    let smoothness = found["smoothness"].as_array().unwrap();
    assert_eq!(smoothness.len(), 2, "{found}");
    assert!(smoothness.iter().all(|one| one["mean"].as_f64().unwrap() > 0.0), "{found}");
    assert!(
        found["ratios"][0]["predicted"].is_null() || found["ratios"][0]["predicted"].as_f64().unwrap() > 0.0
    );
}

#[test]
fn what_is_wrong_with_them_is_said_in_one_sentence() {
    let folder = TestDir::new();
    let branch = "[run.train]\nbatch = 4\nsteps = 20\n[branch]\nat = [10]\nfactors = [1, 4]\nsamples = 64";
    let cases: [(&str, &str, &str); 7] = [
        ("critical-bach", "", "did you mean `critical-batch`?"),
        ("critical-batch", "--widen", "`--widen` is for a study of kind \"steps-to-result\""),
        ("critical-batch", "--workers 2", "`--workers` is for a study of kind \"steps-to-result\""),
        (
            "critical-batch",
            "--set branch.samples=30",
            "`branch.samples` is 30, no whole number of batches of 4",
        ),
        ("critical-batch", "--set branch.at=[30]", "`branch.at` has 30, and the base run ends after"),
        ("critical-batch", "--set run.data.validation=0", "`run.data.validation` leaves no validation split"),
        ("critical-batch", "--set run.parallel.data=2", "`run.parallel` asks for 2 ranks"),
    ];
    for (kind, arguments, expected) in cases {
        refused_at_last(study(&folder, kind, branch, arguments), &[expected]);
    }
}
