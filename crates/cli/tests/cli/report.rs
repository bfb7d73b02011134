//! `espalier report`: pages of runs that are whole, torn, running or none.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::{
    TINY, TestDir, espalier, espalier_command, json, json_of, outputs, refused, refused_each, set, stderr,
    succeeded, train_in,
};

/// The command `espalier report ARGUMENTS`, to be run in `folder`.
pub fn report(folder: &Path, arguments: &str) -> Command {
    espalier_command(folder, &format!("report {arguments}"))
}

fn reported(folder: &Path, arguments: &str) -> Output {
    report(folder, arguments).output().unwrap()
}

/// A run of a moment in `folder/NAME`, every step of which is logged.
fn run(folder: &Path, name: &str, settings: &str, arguments: &str) {
    let settings = set(&format!("train.log_every=1 {settings}"));
    succeeded(train_in(folder, TINY, &format!("--out {name} {settings} {arguments}")));
}

/// A folder as a run leaves it that was killed in its third step: hand-made, so that every number is known.
pub fn torn(folder: &Path) {
    fs::create_dir(folder).unwrap();
    fs::write(folder.join("run.toml"), "").unwrap();
    let lines = "{\"step\":1,\"loss\":2.5,\"lr\":0.1,\"grad_norm\":1.0,\"accuracy\":0.5,\"sparsity\":0.0,\"time\":0.1}\n\
                 {\"step\":2,\"loss\":null,\"lr\":0.1,\"grad_norm\":null,\"accuracy\":null,\"sparsity\":0.0,\"time\":0.2,\"skipped\":true}\n\
                 not what a run writes\n\
                 {\"step\":3,\"loss\":1.5,\"lr\":0.1,\"grad_n";
    fs::write(folder.join("metrics.jsonl"), lines).unwrap();
}

#[test]
fn a_page_shows_what_a_run_has() {
    let at = &TestDir::new();
    let settings =
        "model.layers=4 parallel.pipeline=2 train.micro_batches=2 prune.method=magnitude prune.sparsity=0.5";
    run(at, "run", settings, "--trace run/trace.json");
    let output = succeeded(reported(at, "run"));
    let page = fs::read_to_string(at.join("run/report.html")).unwrap();
    let headings = ["Loss", "Learning rate", "Gradient norm", "Throughput", "Memory", "activations"];
    let more =
        ["Density per block", "Timeline of the last steps", "idle", "All settings of run", "train.batch"];
    for text in headings.iter().chain(&more) {
        assert!(page.contains(text), "{text}");
    }
    assert!(page.contains("validation") && page.contains("; finished</p>"), "{page}");
    assert!(!page.contains("NaN") && page.len() < 150_000, "{}", page.len());
    let printed = crate::stdout(&output);
    assert!(printed.contains("run: finished, 4 steps"), "{printed}");

    let output = reported(at, "run --svg curves.svg --json");
    let found = json(&output.stdout);
    assert_eq!((&found["runs"][0]["steps"], &found["page"]), (&4.into(), &Value::Null));
    let summary: Value = serde_json::from_slice(&fs::read(at.join("run/summary.json")).unwrap()).unwrap();
    assert!(summary["tokens_per_s"].is_number());
    assert_eq!(
        found["runs"][0]["tokens_per_s"], summary["tokens_per_s"],
        "throughput is one thing everywhere"
    );
    assert!(
        page.contains("class=\"broad\"") && page.contains("class=\"slim\""),
        "the loss has the full width"
    );
    assert!(fs::read_to_string(at.join("curves.svg")).unwrap().starts_with("<svg"));
}

#[test]
fn runs_are_laid_over_each_other_and_what_differs_is_named() {
    let at = &TestDir::new();
    run(at, "small", "", "");
    run(at, "large", "train.batch=8 optimizer.name=lamb", "");
    let output = reported(at, "small large -o both.html --json");
    let found = json(&output.stdout);
    outputs::compare("espalier report --json", std::slice::from_ref(&found));
    assert_eq!(found["differ"]["train.batch"], serde_json::json!(["4", "8"]));
    let differing: Vec<&String> = found["differ"].as_object().unwrap().keys().collect();
    assert!(!differing.iter().any(|field| field.starts_with("model.")), "{differing:?}");
    let page = fs::read_to_string(at.join("both.html")).unwrap();
    assert!(page.contains("Settings that differ") && page.contains("Validation loss"), "{page}");
    let curves = page.find("aria-label=\"Loss\"").unwrap();
    assert!(curves < page.find("Settings that differ").unwrap(), "curves before settings");
    for name in ["small", "large"] {
        assert!(page.matches(&format!("data-name=\"{name}\"")).count() >= 4, "{name}: {page}");
    }
    assert!(!at.join("small/report.html").exists());
    // Of two folders of one name each has the whole of it.
    fs::create_dir(at.join("other")).unwrap();
    torn(&at.join("other/small"));
    let found = json(&reported(at, "small other/small -o both.html --json").stdout);
    assert_eq!(
        (&found["runs"][0]["name"], &found["runs"][1]["name"]),
        (&"small".into(), &"other/small".into())
    );
}

#[test]
fn a_run_that_was_torn_is_shown_as_far_as_it_goes() {
    let at = &TestDir::new();
    torn(&at.join("torn"));
    let found = json_of(reported(at, "torn --json -o torn.html"));
    let run = &found["runs"][0];
    assert_eq!((&run["steps"], &run["loss"], &run["state"]), (&2.into(), &2.5.into(), &"stopped".into()));
    let notes = run["notes"].to_string();
    for words in ["1 step was skipped", "1 line is ignored", "plan.json is missing"] {
        assert!(notes.contains(words), "{words}: {notes}");
    }
    let page = fs::read_to_string(at.join("torn.html")).unwrap();
    assert!(page.contains("1 step was skipped") && !page.contains("NaN"), "{page}");
    // Nothing of it yet.
    fs::create_dir(at.join("begun")).unwrap();
    fs::write(at.join("begun/run.toml"), "").unwrap();
    succeeded(reported(at, "begun"));
    assert!(
        fs::read_to_string(at.join("begun/report.html")).unwrap().contains("no step is in metrics.jsonl yet")
    );
}

/// One sentence, exit code 2, and nothing is written.
#[test]
fn what_is_no_run_is_refused() {
    let at = &TestDir::new();
    fs::create_dir(at.join("empty")).unwrap();
    fs::write(at.join("file"), "words").unwrap();
    torn(&at.join("run"));
    let metrics = fs::read(at.join("run/metrics.jsonl")).unwrap();
    let mistakes = r#"
        empty => empty: there is no run here (no run.toml)
        nowhere => nowhere: there is no such folder
        file => file: this is no folder
        run empty => empty: there is no run here
        run -o run/metrics.jsonl => a file is here that is no page of a report
        run --trace file => file: this is no timeline of a run
        run --serve 127.0.0.1:port => `port` is no port
    "#;
    refused_each(mistakes, |arguments| reported(at, arguments));
    assert_eq!(fs::read(at.join("run/metrics.jsonl")).unwrap(), metrics);
    assert_eq!(fs::read_dir(at.join("run")).unwrap().count(), 2, "run.toml and metrics.jsonl");
}

/// Runs are found below a folder, not within each other, and compared in words.
#[test]
fn runs_are_listed_and_compared_in_words() {
    let at = &TestDir::new();
    run(at, "out/small", "", "");
    run(at, "out/deep/large", "train.batch=8", "");
    torn(&at.join("out/small/set-aside-1"));
    let espalier = |arguments: &str| espalier(at, arguments);
    let output = espalier("runs --json");
    let found = json(&output.stdout);
    outputs::compare("espalier runs --json", std::slice::from_ref(&found));
    let names: Vec<&str> =
        found["runs"].as_array().unwrap().iter().map(|run| run["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["small", "deep/large"], "the newest last");
    assert!(
        stderr(&output).lines().count() == 3 && stderr(&output).contains("deep/large"),
        "{}",
        stderr(&output)
    );

    let output = espalier("compare out/small out/deep/large --json");
    let found = json(&output.stdout);
    outputs::compare("espalier compare --json", std::slice::from_ref(&found));
    let line = stderr(&output).lines().find(|line| line.starts_with("train.batch ")).unwrap().to_owned();
    assert_eq!(line.split_whitespace().collect::<Vec<_>>(), ["train.batch", "4", "8"]);
    assert!(stderr(&output).lines().any(|line| line.starts_with("validation loss ")), "{}", stderr(&output));
    for (arguments, words) in [("runs nowhere", "nowhere"), ("compare out/small", "2 values required")] {
        refused(espalier(arguments), &[words]);
    }
}

#[test]
fn numbers_are_handed_to_other_programs() {
    let at = &TestDir::new();
    torn(&at.join("run"));
    succeeded(reported(at, "run --csv run.csv --tensorboard events"));
    let table = fs::read_to_string(at.join("run.csv")).unwrap();
    assert_eq!(
        table,
        "run,step,accuracy,grad_norm,loss,lr,sparsity\nrun,1,0.5,1,2.5,0.1,0\nrun,2,,,,0.1,0\n"
    );
    let events = fs::read(at.join("events/run/events.out.tfevents.0.espalier")).unwrap();
    let tags = ["loss", "lr", "grad_norm"]
        .map(|tag| events.windows(tag.len()).filter(|bytes| *bytes == tag.as_bytes()).count());
    assert_eq!(tags, [1, 2, 1], "what is no number is not there");
    assert!(!at.join("run/report.html").exists(), "no page was asked for");
}

/// A process that serves, until it is dropped.
pub struct Served {
    process: Child,
    pub address: String,
}

impl Served {
    pub fn start(folder: &Path, runs: &str) -> Served {
        Served::by(report(folder, runs))
    }

    /// What a command serves; the first thing that it says is where.
    pub fn by(mut command: Command) -> Served {
        let mut process = command.args(["--serve", "127.0.0.1:0"]).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address =
            line.split("http://").nth(1).unwrap_or_else(|| panic!("{line}")).split('/').next().unwrap();
        Served { address: address.to_owned(), process }
    }

    pub fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream
            .write_all(format!("GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n", self.address).as_bytes())
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Asks until it is there: a page is a second old.
    fn wait_for(&self, words: &str) -> String {
        self.wait_until(|content| content.contains(words))
    }

    /// Asks until it is so, or for as long as anybody would.
    pub fn wait_until(&self, is_so: impl Fn(&str) -> bool) -> String {
        let begin = Instant::now();
        loop {
            let content = self.get("/live");
            if is_so(&content) || begin.elapsed() > Duration::from_secs(20) {
                return content;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn runs_are_served_as_they_go_on_and_nothing_else_is() {
    let at = &TestDir::new();
    torn(&at.join("one"));
    torn(&at.join("two"));
    let served = Served::start(at, "one two");
    let page = served.get("/");
    assert!(page.contains("<!doctype html>") && page.contains("<h1>one, two</h1>"), "{page}");
    // The torn line is whole now, and the run has come to its end.
    let mut metrics = fs::OpenOptions::new().append(true).open(at.join("two/metrics.jsonl")).unwrap();
    metrics.write_all(b"orm\":1.0,\"accuracy\":0.5,\"sparsity\":0.0,\"time\":0.3}\n").unwrap();
    let content = served.wait_for("<td class=\"number\">3</td>");
    assert!(content.contains("<td class=\"number\">3</td><td class=\"number\">1.5</td>"), "{content}");
    for path in ["/run.toml", "/one/metrics.jsonl", "/../one/run.toml", "/%2e%2e/one/run.toml", "/one"] {
        let answer = served.get(path);
        assert!(
            answer.starts_with("HTTP/1.1 404 ") && answer.ends_with("\r\n\r\nthere is only /\n"),
            "{path}: {answer}"
        );
    }
    // A run that starts over is shown from its beginning.
    fs::write(at.join("two/metrics.jsonl"), "").unwrap();
    assert!(served.wait_for("two: no step is in metrics.jsonl yet").contains("two: no step is in"));
}
