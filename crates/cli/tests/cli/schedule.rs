//! `espalier schedule`: its JSON, its picture, files of one's own, and the pictures in the documentation.

use std::fs;
use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};

use crate::outputs::compare;
use crate::pipeline::ALL;
use crate::{TestDir, espalier, json_of, refused_in_a_sentence, stderr, stdout, succeeded};

fn schedule_in(folder: &Path, arguments: &str) -> Output {
    espalier(folder, &format!("schedule {arguments}"))
}

/// Runs with words divided by spaces.
fn schedule(arguments: &str) -> Output {
    schedule_in(Path::new("."), arguments)
}

fn figures(arguments: &str) -> Value {
    json_of(schedule(&format!("{arguments} --json")))
}

#[test]
fn the_figures_of_every_schedule() {
    let expected = [
        // bubble in thousandths, in flight, weight versions
        (273, json!([8, 8, 8, 8]), json!([1, 1, 1, 1])),
        (273, json!([4, 3, 2, 1]), json!([1, 1, 1, 1])),
        (158, json!([11, 9, 7, 5]), json!([1, 1, 1, 1])),
        (0, json!([4, 3, 2, 1]), json!([4, 3, 2, 1])),
        (0, json!([4, 3, 2, 1]), json!([2, 2, 2, 2])),
        (200, json!([3, 4, 4, 3]), json!([1, 1, 1, 1])),
        (111, json!([7, 8, 8, 7]), json!([1, 1, 1, 1])),
        (111, json!([4, 3, 2, 1]), json!([1, 1, 1, 1])),
        (273, json!([4, 4, 4, 1]), json!([1, 1, 1, 1])),
    ];
    let mut all = Vec::new();
    for (name, (bubble, in_flight, versions)) in ALL.iter().zip(expected) {
        let figures = figures(&format!("{name} --stages 4 --micro-batches 8"));
        assert_eq!(figures["name"], *name);
        assert_eq!((&figures["stages"], &figures["micro_batches"]), (&json!(4), &json!(8)), "{name}");
        assert_eq!((1000.0 * figures["bubble_ratio"].as_f64().unwrap()).round(), f64::from(bubble), "{name}");
        assert_eq!(figures["in_flight"], in_flight, "{name}");
        assert_eq!(figures["weight_versions"], versions, "{name}");
        assert_eq!(figures["copies"], if name.starts_with("chimera") { 2 } else { 1 });
        assert_eq!(figures["idle"].as_array().unwrap().len(), 4, "{name}");
        assert_eq!(figures["actions"].as_array().unwrap().len(), 4, "{name}");
        all.push(figures);
    }
    compare("espalier schedule --json", &all);
}

#[test]
fn actions_are_one_line_a_rank() {
    let figures = figures("1f1b --stages 4 --micro-batches 8");
    assert_eq!(figures["actions"][0], "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7");
    assert_eq!(figures["actions"][3], "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7");
}

#[test]
fn the_picture_in_samos_paper() {
    let figures = figures("axonn --stages 3 --micro-batches 5 --forward 1 --backward 2");
    assert_eq!(figures["idle"], json!([6.0, 6.0, 6.0]));
}

#[test]
fn options_reach_the_schedule() {
    let chunks = figures("interleaved --stages 4 --micro-batches 8 --chunks 4");
    assert_eq!(chunks["idle"][0], 2.25);
    let pipelines = figures("chimera --stages 8 --micro-batches 8 --pipelines 4 --backward 1");
    assert_eq!((&pipelines["copies"], &pipelines["idle"][0]), (&json!(4), &json!(2.0)));
    let batches = figures("gpipe --stages 2 --micro-batches 3 --batches 4");
    assert_eq!(batches["idle"][0], 12.0);
}

#[test]
fn the_picture_is_what_was_asked_for() {
    let output = schedule("1f1b --stages 4 --micro-batches 8");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let text = stdout(&output);
    assert!(text.starts_with("rank 0 |0>1>2>3>............0<<<4>1<<<"), "{text}");
    assert!(text.contains("27.3 %"), "{text}");
    assert!(!text.contains('\x1b'), "no colours where nobody sees them: {text:?}");
}

#[test]
fn what_actions_prints_can_be_read_back() {
    let folder = TestDir::new();
    for name in ALL {
        let arguments = format!("{name} --stages 4 --micro-batches 8 --batches 2 --actions");
        let written = succeeded(schedule(&arguments));
        fs::write(folder.join("mine.txt"), &written.stdout).unwrap();
        let read = succeeded(schedule_in(&folder, "--file mine.txt --actions"));
        assert_eq!(written.stdout, read.stdout, "{name}");
        let picture = |output| stderr(output).lines().take(4).map(String::from).collect::<Vec<_>>();
        assert_eq!(picture(&written), picture(&read), "{name}");
    }
}

/// Where batches wait for one another, the first two of 2bw wait less than the later ones.
#[test]
fn no_time_is_negative() {
    let text = stdout(&schedule("2bw --stages 8 --micro-batches 1"));
    assert!(text.contains("fill and drain   idle 15 units less, once per run"), "{text}");
}

#[test]
fn json_is_the_last_line() {
    let output = schedule("gpipe --stages 2 --micro-batches 2 --actions --json");
    let text = String::from_utf8(output.stdout).unwrap();
    let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!(last["actions"][1], "F0 F1 B0 B1");
}

#[test]
fn what_cannot_be_asked_for() {
    let cases: [(&str, &[&str]); 10] = [
        ("1fb1 --stages 4 --micro-batches 8", &["`1fb1`", "did you mean `1f1b`?", "axonn"]),
        ("zbh1 --stages 4 --micro-batches 8", &["did you mean `zb-h1`?"]),
        ("gpipe --stages 0 --micro-batches 8", &["gpipe", "1 stage"]),
        ("gpipe --stages 4 --micro-batches 0", &["gpipe", "1 micro-batch"]),
        ("chimera --stages 3 --micro-batches 8", &["chimera", "even", "3"]),
        ("interleaved --stages 4 --micro-batches 6", &["interleaved", "multiple", "6"]),
        ("1f1b --stages 4 --micro-batches 8 --chunks 2", &["chunks", "no effect"]),
        ("gpipe --stages 4 --micro-batches 8 --forward 0", &["forward", "0.001"]),
        ("gpipe --stages 4 --micro-batches 8 --backward nan", &["backward", "NaN"]),
        ("gpipe --stages 999999 --micro-batches 999999", &["too long"]),
    ];
    for (arguments, words) in cases {
        refused_in_a_sentence(schedule(arguments), words);
    }
}

#[test]
fn files_that_cannot_be_run() {
    let folder = TestDir::new();
    let cases: [(&str, &[&str]); 4] = [
        ("F0 F1 B0 B1\nF0 F1 B0 C1", &["mine.txt", "line 2", "`C1`"]),
        ("F0 B0 F1 B1\nF0 F1 B0 B1", &["mine.txt", "deadlock", "rank 0", "rank 1"]),
        ("F0 B0 B1 F1", &["mine.txt", "rank 0, action 3", "its forward has not run"]),
        ("pipeline 0 5\nF0 B0\nF0 B0", &["mine.txt", "rank 5"]),
    ];
    for (text, words) in cases {
        fs::write(folder.join("mine.txt"), text).unwrap();
        refused_in_a_sentence(schedule_in(&folder, "--file mine.txt"), words);
    }
    refused_in_a_sentence(schedule_in(&folder, "--file none.txt"), &["none.txt"]);
    fs::write(folder.join("mine.txt"), "F0 B0").unwrap();
    refused_in_a_sentence(schedule_in(&folder, "--file mine.txt --forward -1"), &["forward", "-1"]);
}

/// Every command in the documentation prints what the page says.
#[test]
fn the_documentation_shows_true_output() {
    let folder = TestDir::new();
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/schedules.md");
    let page = fs::read_to_string(page).unwrap();
    let mut compared = 0;
    for block in page.split("```").skip(1).step_by(2) {
        let (first, rest) = block.split_once('\n').unwrap();
        match first.split_once(' ') {
            Some(("text", file)) => fs::write(folder.join(file), rest).unwrap(),
            _ => {
                let (command, expected) = rest.split_once('\n').unwrap();
                let arguments = command.strip_prefix("$ espalier schedule ").expect("a command");
                let arguments = arguments.strip_suffix(" 2> /dev/null").unwrap_or(arguments);
                let output = schedule_in(&folder, arguments);
                assert_eq!(stdout(&output), expected, "{command}");
                compared += 1;
            }
        }
    }
    assert!(compared >= 10, "{compared} commands");
}
