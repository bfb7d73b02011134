//! `espalier train` under `mpirun`: processes train as threads do, and as one rank does.
//!
//! `ESPALIER_MPIRUN` names a launcher other than the one of the MPI that the program is linked with. Where there is none,
//! standard error says that nothing was tested.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use espalier_comm::mpi;
use serde_json::Value;

use crate::{TINY, command, json, said};

/// A hundred steps of a small GPT.
const GPT: &str = r#"
    seed = 4
    [model]
    name = "gpt"
    layers = 2
    heads = 2
    width = 32
    context = 16
    [data]
    kind = "arithmetic"
    count = 400
    [train]
    steps = 100
    batch = 8
    log_every = 1
    eval_samples = 4
    [optimizer]
    name = "adamw"
    [learning_rate]
    peak = 1e-3
    [checkpoint]
    last = false
    [device]
    kind = "cpu"
"#;

/// The same of a resnet8, on images of 16 x 16.
const RESNET8: &str = r#"
    seed = 4
    [model]
    name = "resnet8"
    [data]
    kind = "shapes"
    size = 16
    count = 100
    [train]
    steps = 100
    batch = 8
    log_every = 1
    eval_samples = 4
    [optimizer]
    name = "adamw"
    [learning_rate]
    peak = 1e-3
    [checkpoint]
    last = false
    [device]
    kind = "cpu"
"#;

/// The launcher that belongs to the MPI that the program is linked with.
pub fn mpirun() -> Option<Command> {
    let kind = if mpi::library().contains("Open MPI") { "openmpi" } else { "mpich" };
    let named = std::env::var("ESPALIER_MPIRUN").ok();
    let names = named.map_or(vec![format!("mpirun.{kind}"), "mpirun".to_owned()], |name| vec![name]);
    let runs = |name: &String| {
        let version =
            Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        version.is_ok_and(|status| status.success())
    };
    let Some(name) = names.into_iter().find(runs) else {
        eprintln!("SKIPPED, nothing was tested with MPI: there is no mpirun");
        return None;
    };
    let mut command = Command::new(name);
    // More ranks than cores, and as root in a container: both on purpose.
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
        .env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe");
    Some(command)
}

/// The command `mpirun -n RANKS espalier train run.toml ARGUMENTS`, to be run in `folder`.
pub fn mpi_command(ranks: usize, folder: &Path, arguments: &[&str]) -> Option<Command> {
    let mut command = mpirun()?;
    command.current_dir(folder).args(["-n", &ranks.to_string(), env!("CARGO_BIN_EXE_espalier")]);
    command.args(["train", "run.toml"]).args(arguments);
    Some(command)
}

/// The losses of all steps, and the summary.
fn trained(folder: &Path, out: &str, output: &Output) -> (Vec<f64>, Value) {
    assert!(output.status.success(), "{out}: {}", said(output));
    let metrics = fs::read_to_string(folder.join(out).join("metrics.jsonl")).unwrap();
    let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    (lines.filter_map(|line| line["loss"].as_f64()).collect(), json(&output.stdout))
}

/// Over 100 steps with AdamW, dense and with nine weights of ten gone: losses within 1e-6 of those of one rank, and weights
/// with the very bits that threads give, since both add up in the order of ranks.
fn processes_train_as_threads_and_as_one_rank(run_file: &str) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("run.toml"), run_file).unwrap();
    let pruned = ["--set", "prune.method=magnitude", "--set", "prune.sparsity=0.9"];
    for (how, settings) in [("dense", &[][..]), ("pruned", &pruned)] {
        let run = |out: &str, command: &mut Command| {
            command.args(settings).args(["--json", "--out", out]);
            trained(folder.path(), out, &command.output().unwrap())
        };
        let (one, _) = run(&format!("{how}-1"), &mut command(folder.path(), &[]));
        assert_eq!(one.len(), 100);
        assert!(one[99] < one[0], "{how}: it learns");
        for ranks in [2, 4] {
            let Some(mut launched) = mpi_command(ranks, folder.path(), &[]) else { return };
            let (losses, by_mpi) = run(&format!("{how}-mpi-{ranks}"), &mut launched);
            let apart = one.iter().zip(&losses).map(|(a, b)| (a - b).abs() / a).fold(0.0, f64::max);
            assert!(losses.len() == 100 && apart < 1e-6, "{how} on {ranks} ranks: {apart:e} apart");
            let number = ranks.to_string();
            let mut threads = command(folder.path(), &["--ranks", &number]);
            let (losses_of_threads, by_threads) = run(&format!("{how}-threads-{ranks}"), &mut threads);
            assert_eq!(by_mpi["weights_hash"], by_threads["weights_hash"], "{how} on {ranks} ranks");
            assert_eq!(losses, losses_of_threads, "{how} on {ranks} ranks");
            assert_eq!(by_mpi["bytes_sent"], by_threads["bytes_sent"], "{how} on {ranks} ranks");
            assert_eq!(by_mpi["layout"]["data"], ranks, "left out, it is the number of processes");
        }
    }
}

#[test]
fn a_gpt_learns_the_same_in_processes() {
    processes_train_as_threads_and_as_one_rank(GPT);
}

#[test]
fn a_resnet_learns_the_same_in_processes() {
    processes_train_as_threads_and_as_one_rank(RESNET8);
}

#[test]
fn rank_0_speaks_and_writes() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("run.toml"), TINY).unwrap();
    let Some(mut command) = mpi_command(4, folder.path(), &["--json"]) else { return };
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(json(&output.stdout)["run"], "out/run");
    let text = said(&output);
    assert!(text.contains("batch 4 over 4 ranks, joined by MPI"), "{text}");
    for once in ["joined by MPI", "saved out/run/checkpoints/step-000004", "run folder out/run"] {
        assert_eq!(text.matches(once).count(), 1, "`{once}`: {text}");
    }
    let metrics = fs::read_to_string(folder.path().join("out/run/metrics.jsonl")).unwrap();
    assert_eq!(metrics.lines().filter(|line| line.contains("\"lr\"")).count(), 1, "{metrics}");

    // A stop and a resume by another number of processes.
    let more = ["--out", "out/run", "--resume", "--json", "--set", "train.steps=8"];
    let output = mpi_command(2, folder.path(), &more).unwrap().output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("resumed after step 4"), "{}", said(&output));
    assert_eq!(json(&output.stdout)["steps"], 8);
}

/// The user's mistakes keep their sentence and their code: what all ranks see, and what rank 0 alone sees.
#[test]
fn mistakes_and_divergence_read_as_on_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("run.toml"), TINY).unwrap();
    let Some(mut wrong) = mpi_command(2, folder.path(), &["--ranks", "4"]) else { return };
    let output = wrong.output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    let sentence =
        "error: `parallel.data` is 4, but the launcher started 2 ranks: start 4 of them, or leave it out";
    assert!(said(&output).contains(sentence), "{}", said(&output));
    assert!(!folder.path().join("out").exists(), "nothing is left behind");

    let resume = ["--resume", "--out", "nowhere"];
    let output = mpi_command(2, folder.path(), &resume).unwrap().output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert_eq!(said(&output).matches("no run here to resume").count(), 1, "{}", said(&output));

    let diverging =
        ["--set", "learning_rate.peak=1e38", "--set", "optimizer.name=sgd", "--set", "train.steps=30"];
    let output = mpi_command(2, folder.path(), &diverging).unwrap().output().unwrap();
    assert_eq!(output.status.code(), Some(4), "{}", said(&output));
    assert_eq!(said(&output).matches("error: the run diverged").count(), 1, "{}", said(&output));
}
