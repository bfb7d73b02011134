//! `espalier train` under `mpirun`: processes train as threads do, and as one rank does.
//!
//! `ESPALIER_MPIRUN` names a launcher other than the one of the MPI that the program is linked with. Where
//! there is none, standard error says that nothing was tested.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use espalier_comm::mpi;
use espalier_testing::{Need, skipped};
use serde_json::Value;

use crate::faults::{LONG, assert_complete, kill, random, reaches_step};
use crate::{
    DIVERGING, TestDir, ended, espalier, espalier_command, json, json_of, pipeline, refused, root, said, set,
    stderr, succeeded,
};

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
    [learning_rate]
    peak = 1e-3
"#;

/// Images of 16 x 16, at a rate at which an activation that rounding moves across the kink of a ReLU does not
/// show.
const RESNET8: &str = r#"
    seed = 4
    [model]
    name = "resnet8"
    [data]
    kind = "shapes"
    size = 16
    count = 100
    [learning_rate]
    peak = 1e-5
"#;

/// What both have in common.
const TRAINING: &str = r#"
    [train]
    batch = 8
    log_every = 1
    eval_samples = 4
    [optimizer]
    name = "adamw"
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
        skipped(Need::Mpi, "there is no mpirun");
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
pub fn mpi_command(ranks: usize, folder: &Path, arguments: &str) -> Option<Command> {
    let mut command = mpirun()?;
    command.current_dir(folder).args(["-n", &ranks.to_string(), env!("CARGO_BIN_EXE_espalier")]);
    command.args(["train", "run.toml"]).args(arguments.split_whitespace());
    Some(command)
}

/// The losses of all steps, and the summary.
fn trained(folder: &Path, out: &str, output: &Output) -> (Vec<f64>, Value) {
    assert!(output.status.success(), "{out}: {}", stderr(output));
    let metrics = fs::read_to_string(folder.join(out).join("metrics.jsonl")).unwrap();
    let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    (lines.filter_map(|line| line["loss"].as_f64()).collect(), json(&output.stdout))
}

/// Over 16 steps with AdamW (100 in the long form), dense and with nine weights of ten gone: losses within
/// 1e-6 of those of one rank, and weights with the very bits that threads give, since both add up in the
/// order of ranks.
fn processes_train_as_threads_and_as_one_rank(run_file: &str, learns: bool) {
    let folder = TestDir::new();
    fs::write(folder.join("run.toml"), format!("{run_file}{TRAINING}")).unwrap();
    let pruned = "--set prune.method=magnitude --set prune.sparsity=0.9";
    let steps = if espalier_testing::long() { 100 } else { 16 };
    for (how, settings) in [("dense", ""), ("pruned", pruned)] {
        let arguments = format!("train run.toml {settings} --set train.steps={steps}");
        let alone = format!("{arguments} --json --out {how}-1");
        let (one, _) = trained(&folder, &format!("{how}-1"), &espalier(&folder, &alone));
        assert_eq!(one.len(), steps);
        assert!(!learns || one[steps - 1] < one[0], "{how}: it learns");
        for ranks in [2, 4] {
            let name = format!("{how}-{ranks}");
            let threads = format!("--ranks {ranks}");
            let Some((losses, [by_mpi, _])) = same_bits(&folder, &name, ranks, &arguments, &threads) else {
                return;
            };
            let apart = espalier_testing::apart(&one, &losses);
            assert!(losses.len() == steps && apart < 1e-6, "{how} on {ranks} ranks: {apart:e} apart");
            assert_eq!(by_mpi["layout"]["data"], ranks, "left out, it is the number of processes");
        }
    }
}

/// Runs `espalier ARGUMENTS` as so many processes, and as one with threads of which `threads` says the same:
/// the same bits, of which the losses and both summaries are returned.
fn same_bits(
    folder: &Path,
    name: &str,
    ranks: usize,
    arguments: &str,
    threads: &str,
) -> Option<(Vec<f64>, [Value; 2])> {
    let mut launched = mpirun()?;
    launched.args(["-n", &ranks.to_string(), env!("CARGO_BIN_EXE_espalier")]);
    let run = |mut command: Command, how: &str, more: &str| {
        let out = format!("{name}-{how}");
        let words = format!("{arguments} {more} --json --out {out}");
        trained(folder, &out, &command.current_dir(folder).args(words.split_whitespace()).output().unwrap())
    };
    let (losses, by_mpi) = run(launched, "mpi", "");
    let (losses_of_threads, by_threads) = run(espalier_command(folder, ""), "threads", threads);
    assert_eq!(losses, losses_of_threads, "{name}");
    for field in ["weights_hash", "bytes_sent"] {
        assert_eq!(by_mpi[field], by_threads[field], "{name}: {field}");
    }
    Some((losses, [by_mpi, by_threads]))
}

/// Weights in shards (ZeRO-3), dense and pruned: the bits of threads, and what these send.
#[test]
fn sharded_weights_are_gathered_in_processes() {
    let folder = TestDir::new();
    fs::write(folder.join("run.toml"), format!("{GPT}{TRAINING}")).unwrap();
    for (how, ranks, settings) in [
        ("dense", 2, ""),
        ("pruned", 4, "--set prune.method=snip --set prune.sparsity=0.9"),
        ("stages", 4, STAGES),
    ] {
        let arguments = format!("train run.toml {settings} --set parallel.zero=3 --set train.steps=8");
        let threads = format!("--ranks {ranks}");
        let Some((_, [by_mpi, by_threads])) = same_bits(&folder, how, ranks, &arguments, &threads) else {
            return;
        };
        assert_eq!(by_mpi["validation"], by_threads["validation"], "{how}");
        let all = by_mpi["memory"]["weights"]["measured"].as_u64().unwrap();
        assert_eq!(Some(all), by_mpi["memory"]["weights"]["predicted"].as_u64(), "{how}");
    }
}

/// Each process has a log of its own, and is named in all of it.
#[test]
fn each_process_logs_under_its_rank() {
    let folder = TestDir::with_run_file();
    let arguments = "--out a --log debug --log-file a.log";
    let Some(mut launched) = mpi_command(2, &folder, arguments) else { return };
    succeeded(launched.output().unwrap());
    for rank in 0..2 {
        let text = fs::read_to_string(folder.join(format!("a.log.{rank}"))).unwrap();
        let name = format!("rank {rank}: ");
        assert!(text.lines().all(|line| line.contains(&name)), "{text}");
        for landmark in [
            "connects to the others by MPI",
            "step 4: F0",
            "step 4: waits for all_reduce",
            "the run has ended",
        ] {
            assert!(text.contains(&format!("{name}{landmark}")), "{landmark}: {text}");
        }
    }
}

#[test]
fn a_gpt_learns_the_same_in_processes() {
    processes_train_as_threads_and_as_one_rank(GPT, true);
}

#[test]
fn a_resnet_learns_the_same_in_processes() {
    // At its rate, one batch's loss says more of the batch than of the step.
    processes_train_as_threads_and_as_one_rank(RESNET8, false);
}

/// Every schedule of `runs/pipeline.toml`, two stages as two processes: the bits of two threads.
#[test]
fn every_schedule_runs_in_processes() {
    let folder = TestDir::new();
    for schedule in pipeline::ALL {
        let Some((_, [by_mpi, _])) = same_bits(&folder, schedule, 2, &pipeline::small(schedule), "") else {
            return;
        };
        assert_eq!(by_mpi["layout"]["schedule"], schedule);
    }
}

/// Layers that are cut, each way that has a run file of its own, and mixtures on samples and on tiles: the
/// bits of threads.
#[test]
fn cut_layers_run_in_processes() {
    const TEXT: &str = "train.steps=4 train.eval_samples=8 model.width=16 model.context=16";
    const IMAGES: &str = "train.epochs=1 data.count=160 train.batch=32 train.eval_every=2";
    let tiles = format!("{IMAGES} parallel.tensor=1 parallel.spatial=2");
    let folder = TestDir::new();
    for (name, file, settings) in [
        ("tensor", "tensor", TEXT),
        ("spatial", "spatial", IMAGES),
        ("integrated", "integrated", IMAGES),
        ("tiles", "integrated", &tiles),
    ] {
        let settings = set(&format!("{settings} train.log_every=1 learning_rate.warmup=1"));
        let arguments = format!("train {}/runs/{file}.toml {settings}", root().display());
        let Some((losses, _)) = same_bits(&folder, name, 2, &arguments, "") else { return };
        assert!(losses.len() >= 4, "{name}: {losses:?}");
    }
}

#[test]
fn rank_0_speaks_and_writes() {
    let folder = TestDir::with_run_file();
    let Some(mut command) = mpi_command(4, &folder, "--json") else { return };
    let output = succeeded(command.output().unwrap());
    assert_eq!(json(&output.stdout)["run"], "out/run");
    let text = stderr(&output);
    assert!(text.contains("batch 4 over 4 data-parallel ranks (MPI)"), "{text}");
    for once in ["ranks (MPI)", "saved out/run/checkpoints/step-000004", "run folder out/run"] {
        assert_eq!(text.matches(once).count(), 1, "`{once}`: {text}");
    }
    let metrics = fs::read_to_string(folder.join("out/run/metrics.jsonl")).unwrap();
    assert_eq!(metrics.lines().filter(|line| line.contains("\"lr\"")).count(), 1, "{metrics}");

    // A stop and a resume by another number of processes.
    let more = "--out out/run --resume --json --set train.steps=8";
    let output = said(mpi_command(2, &folder, more).unwrap().output().unwrap(), &["resumed after step 4"]);
    assert_eq!(json(&output.stdout)["steps"], 8);
}

/// The user's mistakes keep their sentence and their code: what all ranks see, and what rank 0 alone sees.
#[test]
fn mistakes_and_divergence_read_as_on_one_rank() {
    let folder = TestDir::with_run_file();
    let Some(mut wrong) = mpi_command(2, &folder, "--ranks 4") else { return };
    let sentence = "error: `parallel`: the mesh of data 4 takes 4 ranks, but 2 were started; start 4, or set `data` to 2";
    refused(wrong.output().unwrap(), &[sentence]);
    assert!(!folder.join("out").exists(), "nothing is left behind");

    let resume = "--resume --out nowhere";
    let text = refused(mpi_command(2, &folder, resume).unwrap().output().unwrap(), &[]);
    assert_eq!(text.matches("no run here to resume").count(), 1, "{text}");

    let text = ended(mpi_command(2, &folder, DIVERGING).unwrap().output().unwrap(), 4, &[]);
    assert_eq!(text.matches("error: the run diverged").count(), 1, "{text}");
}

/// Marks the processes of one test.
const MARK: &str = "ESPALIER_TEST_MARK";

/// The processes with a mark, each with the number of its rank where it is one.
fn marked(mark: &str) -> Vec<(u32, Option<usize>)> {
    let of = |entry: fs::DirEntry| {
        let process: u32 = entry.file_name().to_str()?.parse().ok()?;
        let environment = fs::read(entry.path().join("environ")).ok()?;
        let variables: Vec<&str> =
            environment.split(|byte| *byte == 0).filter_map(|it| std::str::from_utf8(it).ok()).collect();
        let value = |name: &str| variables.iter().find_map(|it| it.strip_prefix(name)?.strip_prefix('='));
        let rank = value("OMPI_COMM_WORLD_RANK").or(value("PMI_RANK")).and_then(|rank| rank.parse().ok());
        (value(MARK) == Some(mark)).then_some((process, rank))
    };
    fs::read_dir("/proc").unwrap().filter_map(|entry| of(entry.ok()?)).collect()
}

/// Starts four ranks, sends one of them a signal at a step, and returns what came of it and what was said.
/// All ranks are connected by then, and the launcher has to end the job by itself.
fn struck(signal: &str, rank: usize, step: u64, folder: &Path, settings: &str) -> Option<Struck> {
    let moment = |job: &mut Child| reaches_step(job, &folder.join("broken"), step);
    let struck = struck_after(moment, signal, rank, folder, settings)?;
    let said = stderr(&struck.output);
    assert!(!struck.launcher_hung, "the launcher did not end the job within {LAUNCHER:?}: {said}");
    Some(struck)
}

/// How long a launcher may take to end a job in which a rank was struck.
const LAUNCHER: Duration = Duration::from_secs(30);

/// What came of a job in which a rank was struck.
struct Struck {
    output: Output,
    /// The job had ended by itself before the rank was to be struck.
    ended_before: bool,
    /// The launcher had not ended after [`LAUNCHER`], and the test killed it: then it has no exit code of its
    /// own.
    launcher_hung: bool,
}

/// The same at any moment for which `moment` waits (false: the job ended before), as soon as there is that
/// rank.
fn struck_after(
    moment: impl FnOnce(&mut Child) -> bool,
    signal: &str,
    rank: usize,
    folder: &Path,
    settings: &str,
) -> Option<Struck> {
    let mark = format!("{}-{signal}-{}", std::process::id(), random(1_000_000));
    let mut command = mpi_command(4, folder, &format!("{LONG} {settings}"))?;
    command.env(MARK, &mark).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut job = command.spawn().unwrap();
    let begin = Instant::now();
    let process = loop {
        if let Some((process, _)) = marked(&mark).iter().find(|(_, of)| *of == Some(rank)) {
            break *process;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "no process is rank {rank}");
        std::thread::sleep(Duration::from_millis(1));
    };
    let ended_before = !moment(&mut job);
    if !ended_before {
        kill(signal, process);
    }
    let launcher = job.id();
    let job = std::thread::spawn(move || job.wait_with_output().unwrap());
    let struck = Instant::now();
    while !job.is_finished() && struck.elapsed() < LAUNCHER {
        std::thread::sleep(Duration::from_millis(20));
    }
    let launcher_hung = !job.is_finished();
    if launcher_hung {
        [process, launcher].into_iter().for_each(|process| kill("-KILL", process));
    }
    let output = job.join().unwrap();
    // Whoever was ended by the launcher may need a moment to be gone.
    for _ in 0..200 {
        if marked(&mark).is_empty() {
            return Some(Struck { output, ended_before, launcher_hung });
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("still there: {:?}\n{}", marked(&mark), stderr(&output));
}

/// A rank that is killed ends the run, which goes on from its last checkpoint with the bits of never having
/// been killed.
fn goes_on_after_a_kill(layout: &str) {
    let folder = TestDir::with_run_file();
    // Four processes on few cores take long for a step.
    let settings = format!("--set train.steps=24 {layout}");
    let (rank, step) = (random(4) as usize, 1 + random(10));
    let broken = format!("{settings} --out broken");
    let Some(Struck { output, ended_before, .. }) = struck("-KILL", rank, step, &folder, &broken) else {
        return;
    };
    assert!(!ended_before, "step {step} is never reached: {}", stderr(&output));
    assert!(!output.status.success(), "rank {rank} was killed at step {step}: {}", stderr(&output));
    assert!(stderr(&output).to_lowercase().contains("killed"), "the launcher says so: {}", stderr(&output));
    assert_complete(&folder.join("broken"));
    let resume = format!("{LONG} {broken} --json --resume");
    let resumed = json_of(mpi_command(4, &folder, &resume).unwrap().output().unwrap());
    // Threads take the same steps, and little time for them.
    let whole = format!("train run.toml {LONG} {settings} --json --out whole --ranks 4");
    assert_eq!(
        resumed["weights_hash"],
        json_of(espalier(&folder, &whole))["weights_hash"],
        "rank {rank} was killed at step {step}"
    );
}

#[test]
fn a_run_goes_on_after_a_replica_was_killed() {
    goes_on_after_a_kill("");
}

#[test]
fn a_run_goes_on_after_a_stage_was_killed() {
    goes_on_after_a_kill(STAGES);
}

/// Two stages of two replicas.
const STAGES: &str = "--set parallel.pipeline=2 --set train.micro_batches=2";

/// A rank that no longer answers, as one whose machine is gone: the launcher notices nothing, the time limit
/// does. On busy cores a rank that is well may itself be waited for longer than a short limit: then a longer
/// one is tried.
fn is_named_when_the_time_limit_is_over(layout: &str) {
    let strike = |limit: u32| {
        let folder = TestDir::with_run_file();
        let settings =
            format!("{layout} --out broken --set parallel.timeout_s={limit} --set train.steps=100000");
        let struck = struck("-STOP", 2, 5, &folder, &settings)?;
        Some((folder, struck))
    };
    let Some((mut folder, mut struck)) = strike(2) else { return };
    for limit in [6, 18] {
        if struck.ended_before {
            (folder, struck) = strike(limit).unwrap();
        }
    }
    let output = struck.output;
    assert!(!struck.ended_before, "step 5 is never reached: {}", stderr(&output));
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    let text = stderr(&output);
    // `error: rank 1 waited 2.1 s for ranks 0 and 2 in ...`: who waits for the one that hangs may be missing
    // too, to a third. How long it took to notice is the machine's affair.
    let names_it = |line: &str| {
        let missing = line.split_once(" waited ").and_then(|(_, rest)| rest.split_once(" s for rank"));
        let missing = missing.and_then(|(_, rest)| rest.split_once(" in ")).map_or("", |(ranks, _)| ranks);
        missing.split([' ', ',', 's']).any(|rank| rank == "2")
    };
    assert!(text.lines().any(|line| line.starts_with("error: rank ") && names_it(line)), "{text}");
    assert_complete(&folder.join("broken"));
}

#[test]
fn a_replica_that_hangs_is_named() {
    is_named_when_the_time_limit_is_over("");
}

#[test]
fn a_stage_that_hangs_is_named() {
    is_named_when_the_time_limit_is_over(STAGES);
}

/// Before its first step a rank is waited for by MPI itself, which has no limit: in its start, and where
/// groups are made.
#[test]
fn a_rank_that_stops_before_its_first_step_is_given_up() {
    let folder = TestDir::with_run_file();
    for (run, wait) in [0, 30, 100].into_iter().enumerate() {
        let out = format!("stopped-{run}");
        let settings = format!("--out {out} --set parallel.timeout_s=1 --set train.steps=100000");
        let moment = |_: &mut Child| {
            std::thread::sleep(Duration::from_millis(wait));
            true
        };
        let Some(Struck { output, launcher_hung, .. }) = struck_after(moment, "-STOP", 2, &folder, &settings)
        else {
            return;
        };
        let text = stderr(&output);
        // Open MPI's launcher waits without limit for a rank that is stopped while the two are being
        // connected, also when another rank has aborted the job. Then it is killed and has no exit code; what
        // the ranks have said counts. No other launcher is known to, and one that ends by itself must pass on
        // the code of the rank that gave up. It has also been seen to crash on its way out, once every rank
        // had ended.
        let crashed = output.status.code().is_none() && text.contains("PMIx_server_finalize");
        let lost = (launcher_hung || crashed) && mpi::library().contains("Open MPI");
        let expected = if lost { None } else { Some(3) };
        assert_eq!(output.status.code(), expected, "stopped after {wait} ms: {text}");
        assert!(text.lines().any(|line| line.starts_with("error: ")), "stopped after {wait} ms: {text}");
    }
}
