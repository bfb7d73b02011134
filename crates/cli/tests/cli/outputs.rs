//! docs/outputs.md against what runs write: a field that it lacks, and one that nothing writes, are mistakes.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::Path;

use serde_json::Value;

use crate::{
    DIVERGING, TINY, TestDir, doctor, ended, espalier, espalier_command, json, set, succeeded, train_in,
};

const PAGE: &str = include_str!("../../../../docs/outputs.md");

/// The first column of the table under a heading.
fn table(heading: &str) -> Vec<String> {
    let section = PAGE.split("\n## ").find(|section| section.starts_with(&format!("{heading}\n")));
    let lines = section.unwrap_or_else(|| panic!("no section {heading}")).lines();
    let rows = lines.filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    rows.skip(1).map(|cell| cell.trim_matches('`').to_owned()).collect()
}

/// Paths through objects, and those in lists, to all that is neither.
fn leaves(value: &Value, path: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                leaves(value, &path, found);
            }
        }
        Value::Array(items) if items.iter().any(Value::is_object) => {
            items.iter().for_each(|item| leaves(item, path, found));
        }
        _ => {
            found.insert(path.into());
        }
    }
}

fn matches(row: &str, path: &str) -> bool {
    if let Some(above) = row.strip_suffix(".**") {
        return path == above || path.starts_with(&format!("{above}."));
    }
    let (row, path): (Vec<&str>, Vec<&str>) = (row.split('.').collect(), path.split('.').collect());
    // A list or an object that is null has no names below it.
    let null = path.len() < row.len() && row.starts_with(&path);
    null || (row.len() == path.len() && row.iter().zip(&path).all(|(row, path)| *row == "*" || row == path))
}

/// Compares the table under a heading with JSON that was written.
pub fn compare(heading: &str, written: &[Value]) {
    compare_here(heading, written, &[]);
}

/// The same where a machine has no reason to write some fields: those rows, and no others, must be idle.
fn compare_here(heading: &str, written: &[Value], absent: &[&str]) {
    let mut found = BTreeSet::new();
    written.iter().for_each(|value| leaves(value, "", &mut found));
    let rows = table(heading);
    let missing: Vec<_> = found.iter().filter(|path| !rows.iter().any(|row| matches(row, path))).collect();
    let idle: Vec<_> = rows.iter().filter(|row| !found.iter().any(|path| matches(row, path))).collect();
    assert!(missing.is_empty(), "docs/outputs.md, {heading}, lacks {missing:?}");
    assert_eq!(
        idle, absent,
        "docs/outputs.md, {heading}: rows that nothing writes, and those expected to be so"
    );
}

fn metrics(run: &Path) -> Vec<Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn the_tables_are_what_runs_write() {
    let at = &TestDir::new();
    let pruned = "prune.method=early-bird prune.every=1 prune.window=2";
    let pruned = set(&format!("{pruned} train.noise_scale=true train.micro_batches=2 train.log_every=1"));
    let files = "--json --out text --trace trace.json --ranks 2";
    let text = succeeded(train_in(at, TINY, &format!("{files} {pruned}")));
    let images =
        "[model]\nname = \"resnet8\"\n[data]\nkind = \"shapes\"\ncount = 32\n[train]\nsteps = 1\nbatch = 4\n";
    let images = succeeded(train_in(at, images, "--json --out images"));
    ended(train_in(at, TINY, &format!("--out bad {DIVERGING}")), 4, &["diverged"]);
    let state = |run: &str| {
        let listed = espalier(at, &format!("runs {run} --json"));
        json(&listed.stdout)["runs"][0]["state"].clone()
    };
    assert_eq!((state("bad"), state("text")), ("diverged".into(), "finished".into()));
    let planned = train_in(at, TINY, "--dry-run --json");
    let tiles = "[model]\nname = \"resnet8\"\n[data]\nkind = \"shapes\"\ncount = 32\n[train]\nsteps = 1\nbatch = 4\n\
                 [parallel]\nspatial = 2\n";
    let tiles = train_in(at, tiles, "--dry-run --json --out tiles");

    let lines: Vec<Value> = ["text", "images", "bad"].iter().flat_map(|run| metrics(&at.join(run))).collect();
    compare("metrics.jsonl", &lines);
    let read = |path: &str| serde_json::from_slice(&fs::read(at.join(path)).unwrap()).unwrap();
    compare("plan.json", &[read("text/plan.json"), read("images/plan.json")]);
    compare("The file of --trace", &[read("trace.json")]);
    let printed = [&text, &images, &planned, &tiles].map(|output| json(&output.stdout));
    compare("espalier train --json", &printed);
    let mut folder: Vec<String> = fs::read_dir(at.join("text"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let rows = table("The run folder");
    folder.retain(|name| !rows.contains(name));
    assert!(folder.is_empty(), "docs/outputs.md lacks {folder:?}");
}

/// What a machine lacks has a reason, and what it has none: no row is idle on both kinds.
#[test]
fn the_table_of_the_doctor_is_what_it_prints() {
    let found = doctor();
    let has = |part: &Value| part["found"] == true;
    let mut absent = Vec::new();
    match has(&found["cuda"]) {
        true => absent.push("cuda.why"),
        false => absent.extend(["cuda.name", "cuda.memory", "cuda.compute_capability"]),
    }
    absent.push(if has(&found["cuda"]["cudnn"]) { "cuda.cudnn.why" } else { "cuda.cudnn.version" });
    absent.push(if has(&found["nccl"]) { "nccl.why" } else { "nccl.version" });
    compare_here("espalier doctor --json", &[found], &absent);
}

#[test]
fn the_table_of_exit_codes_is_the_promise() {
    let codes: Vec<i32> = table("Exit codes").iter().map(|code| code.parse().unwrap()).collect();
    assert_eq!(codes, [0, 1, 2, 3, 4, 130]);
    // 0 and 4 are seen above, 130 where signals are; 1 is never meant to be.
    let code = |arguments: &str| {
        let full = File::options().write(true).open("/dev/full").unwrap();
        espalier_command(Path::new("."), arguments).stdout(full).output().unwrap().status
    };
    let schedule = "schedule 1f1b --stages 2 --micro-batches 4 --actions";
    assert_eq!(code(schedule).code(), Some(3), "a disk that is full");
    assert_eq!(code("train no-such-file.toml").code(), Some(2));
}
