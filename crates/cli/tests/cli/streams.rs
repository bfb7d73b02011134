//! Standard output has what a command was asked for, standard error what is said beside it; with `--json`
//! standard output has one line for a program, and the answer for people joins the notes.

use std::path::Path;

use serde_json::Value;

use crate::{TINY, TestDir, espalier, espalier_command, json, stderr, stdout, succeeded, train_in};

#[test]
fn what_was_asked_for_is_on_standard_output() {
    let folder = TestDir::new();
    let trained = succeeded(train_in(&folder, TINY, "--out out/a"));
    for (answer, note) in [("perplexity ", "step      4/4 "), ("run folder out/a", "saved ")] {
        assert!(stdout(&trained).contains(answer) && !stderr(&trained).contains(answer), "{answer}");
        assert!(stderr(&trained).contains(note) && !stdout(&trained).contains(note), "{note}");
    }
    succeeded(train_in(&folder, TINY, "--out out/b --set train.batch=8"));

    let asked = [
        ("train run.toml --dry-run", "predicted        peak"),
        ("plan run.toml --gpus 2", "time breakdown"),
        ("plan run.toml --fits 80GB", "fits on one device"),
        ("runs", "finished"),
        ("compare out/a out/b", "train.batch"),
        ("explain run.toml --ranks 2", "best mixture: "),
        ("eval out/a", "perplexity"),
        ("verify out/a", "--resume would continue after step 4"),
        ("doctor", "cores"),
        ("schedule 1f1b --stages 2 --micro-batches 4", "weight versions"),
        ("report out/a", "page: "),
        ("measure out/a --eigenvalue --samples 4", "largest eigenvalue"),
        ("prune out/a --method magnitude --sparsity 0.5 -o out/c", "density per layer"),
        ("export out/a -o out/d", "tensors"),
    ];
    for (command, answer) in asked {
        let output = espalier(&folder, command);
        assert!(output.status.success(), "{command}: {}", stderr(&output));
        assert!(stdout(&output).contains(answer), "{command}: {}", stdout(&output));
        assert!(!stderr(&output).contains(answer), "{command}: {}", stderr(&output));
        // Twice would write over what was written.
        if command.contains(" -o ") {
            continue;
        }
        let output = espalier(&folder, &format!("{command} --json"));
        assert!(json(&output.stdout).is_object(), "{command}");
        assert!(stderr(&output).contains(answer), "{command}: {}", stderr(&output));
    }
}

/// Lines that `--file` reads have nothing between them.
#[test]
fn actions_have_standard_output_to_themselves() {
    let folder = TestDir::new();
    let output = espalier(&folder, "schedule 1f1b --stages 2 --micro-batches 4 --actions");
    assert!(!stdout(&output).contains("bubble") && stderr(&output).contains("bubble"), "{}", stderr(&output));
    std::fs::write(folder.join("mine.txt"), &output.stdout).unwrap();
    let again = espalier(&folder, "schedule --file mine.txt --json");
    assert_eq!(json(&again.stdout)["stages"], Value::from(2));
}

/// Every line of every help fits where it is read, and options that belong together stand together.
#[test]
fn help_is_wrapped_and_grouped() {
    let help = |command: &str, columns: &str| {
        let mut espalier = espalier_command(Path::new("."), &format!("{command} --help"));
        stdout(&succeeded(espalier.env("COLUMNS", columns).output().unwrap()))
    };
    let commands = "train,prune,study,generate,chat,eval,export,plan,explain,schedule,runs,compare,report,verify,measure,doctor,\
                    bench,bench compute,tokenize,completions";
    for command in [""].into_iter().chain(commands.split(',')) {
        for columns in [80, 60] {
            let text = help(command, &columns.to_string());
            // One line says how it is called, however long it is, and one word is not broken.
            let is_one = |line: &str| line.starts_with("Usage:") || !line.trim().contains(' ');
            let wide = text.lines().find(|line| line.chars().count() > columns && !is_one(line));
            assert_eq!(wide, None, "{command} at {columns}");
        }
    }
    for (command, heads) in [
        ("", &["Train and prune:", "Use a model:", "Inspect runs:"][..]),
        ("train", &["Resuming:", "Log:"]),
        ("generate", &["Sampling:", "Model:"]),
        ("plan", &["Search:", "Files:"]),
    ] {
        let text = help(command, "80");
        heads.iter().for_each(|head| assert!(text.lines().any(|line| line == *head), "{head} in {text}"));
    }
}

#[test]
fn tables_fit_where_they_are_read_or_are_turned() {
    let folder = TestDir::new();
    std::fs::write(folder.join("run.toml"), TINY).unwrap();
    let table = |columns: &str| {
        let mut command = espalier_command(&folder, "explain run.toml --ranks 2");
        let text = stdout(&succeeded(command.env("COLUMNS", columns).output().unwrap()));
        text.split("\n\n").nth(1).unwrap().to_owned()
    };
    let widest = |text: &str| text.lines().map(|line| line.chars().count()).max().unwrap();
    let wide = table("200");
    assert!(wide.starts_with("layer ") && widest(&wide) > 80, "{wide}");
    let turned = table("80");
    assert!(widest(&turned) <= 80, "{turned}");
    assert!(turned.contains("    weights ") && turned.contains("  cheapest "), "{turned}");
}
