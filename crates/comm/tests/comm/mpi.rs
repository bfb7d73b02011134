//! The transport of MPI: the suite under `mpirun`, and what happens where a rank fails or is late.
//!
//! A test starts this very program under `mpirun`, to run [`worker`] with the part that an environment
//! variable names. It writes what it has to say into files: `mpirun` loses lines of a job that it ends. Where
//! there is no `mpirun`, standard error says that nothing was tested. `ESPALIER_MPIRUN` names another one.

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use espalier_comm::{Communicator, ElementType, Error, Reduce, mpi};
use espalier_testing::{Need, skipped};

use crate::data::{message, receive_buffer};
use crate::suite::CASES;

const SCENARIO: &str = "ESPALIER_MPI_PART";
const MESSAGES: &str = "ESPALIER_MPI_SAID";
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(200);

type Scenario = fn(&Communicator) -> Result<(), Error>;

/// What a worker can be told to do, and the limit of its calls.
const SCENARIOS: &[(&str, Duration, Scenario)] = &[
    ("suite", LONG, suite),
    ("late", SHORT, late),
    ("silent", SHORT, silent),
    ("panic", LONG, panic),
    ("error", LONG, error),
    ("longer", LONG, longer),
];

/// Writes a line that the test will read.
fn record(line: &(impl Display + ?Sized)) {
    let folder = PathBuf::from(std::env::var_os(MESSAGES).expect("where to say it"));
    let file = folder.join(std::process::id().to_string());
    let mut file = OpenOptions::new().create(true).append(true).open(file).unwrap();
    writeln!(file, "{line}").unwrap();
}

fn suite(comm: &Communicator) -> Result<(), Error> {
    for (name, case) in CASES {
        case(comm).inspect_err(|error| record(&format!("{name}, {} ranks: {error}", comm.size())))?;
    }
    Ok(())
}

/// The last rank comes to no all-reduce; it makes other calls meanwhile, and lets all go once all have given up.
fn late(comm: &Communicator) -> Result<(), Error> {
    let patient = comm.with_limit(LONG);
    patient.barrier()?;
    if comm.rank() == comm.size() - 1 {
        let others = 0..comm.rank();
        others.clone().try_for_each(|rank| patient.receive(vec![0u64], rank, 1).map(drop))?;
        return others.into_iter().try_for_each(|rank| patient.send(vec![0u64], rank, 2).map(drop));
    }
    let error = comm.all_reduce(message(ElementType::F32, 12, |_| 1), Reduce::Sum).unwrap_err();
    record(&error);
    patient.send(vec![0u64], comm.size() - 1, 1)?;
    patient.receive(vec![0u64], comm.size() - 1, 2)?;
    Err(error)
}

/// The last rank neither sends nor receives.
fn silent(comm: &Communicator) -> Result<(), Error> {
    let last = comm.size() - 1;
    if comm.rank() == last {
        std::thread::sleep(4 * SHORT);
        return Ok(());
    }
    // Long enough that MPI cannot store it on the way.
    let sent = comm.send(message(ElementType::F32, 1 << 20, |_| 1), last, 7).map(drop);
    let received = comm.receive(receive_buffer(ElementType::Bf16, 5), last, 8).map(drop);
    for result in [&sent, &received] {
        record(result.as_ref().unwrap_err());
    }
    sent
}

fn panic(comm: &Communicator) -> Result<(), Error> {
    comm.barrier().inspect_err(record)?;
    if comm.rank() == comm.size() - 1 {
        panic!("the disk is on fire");
    }
    let error = comm.all_reduce(message(ElementType::F32, 5, |_| 1), Reduce::Sum).unwrap_err();
    record(&error);
    Err(error)
}

fn error(comm: &Communicator) -> Result<(), Error> {
    comm.barrier().inspect_err(record)?;
    if comm.rank() == comm.size() - 1 {
        return Err(Error::Unsupported { what: "the file data.bin is missing".into() });
    }
    let error = comm.receive(vec![0u64], comm.size() - 1, 0).unwrap_err();
    record(&error);
    Err(error)
}

/// MPI's own error: a message that does not fit. It comes back as ours.
fn longer(comm: &Communicator) -> Result<(), Error> {
    match comm.rank() {
        0 => comm.send(receive_buffer(ElementType::F32, 6), 1, 0).map(drop),
        1 => comm.receive(receive_buffer(ElementType::F32, 5), 0, 0).map(drop).inspect_err(record),
        _ => Ok(()),
    }
}

/// Not a test by itself: what the tests below run under `mpirun`.
#[test]
#[ignore = "run by the tests of MPI, under mpirun"]
fn worker() {
    let scenario = std::env::var(SCENARIO).expect("the part to run");
    let (_, limit, work) = SCENARIOS.iter().find(|(name, ..)| *name == scenario).expect("a part that exists");
    // MPI's own start takes longer than the shortest limit.
    if let Err(failure) = mpi::run(LONG, |comm| work(&comm.with_limit(*limit))) {
        record(&failure);
        std::process::exit(3);
    }
    record("well");
}

/// The launcher that belongs to the MPI we are linked with.
fn mpirun() -> Option<String> {
    if let Ok(named) = std::env::var("ESPALIER_MPIRUN") {
        return Some(named);
    }
    let kind = if mpi::library().contains("Open MPI") { "openmpi" } else { "mpich" };
    let runs = |name: &String| {
        let version =
            Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        version.is_ok_and(|status| status.success())
    };
    let found = [format!("mpirun.{kind}"), "mpirun".to_owned()].into_iter().find(runs);
    if found.is_none() {
        skipped(Need::Mpi, "there is no mpirun");
    }
    found
}

fn command(program: &str, scenario: &str) -> Command {
    let mut command = Command::new(program);
    command.env(SCENARIO, scenario).env("RUST_BACKTRACE", "0");
    // More ranks than cores, and as root in a container: both on purpose.
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
        .env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe");
    command
}

const WORKER: [&str; 4] = ["--exact", "mpi::worker", "--ignored", "--nocapture"];

/// Runs a command of workers; returns whether it went well, and what they said.
fn run(mut command: Command) -> (bool, String) {
    let folder = tempfile::tempdir().unwrap();
    let output = command.env(MESSAGES, folder.path()).output().unwrap();
    let files = folder.path().read_dir().unwrap();
    let messages: String = files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap()).collect();
    if messages.is_empty() {
        panic!("nothing was said: {output:?}");
    }
    (output.status.success(), messages)
}

/// A part on so many ranks, each of them this program.
fn ranks(ranks: usize, scenario: &str) -> Option<Command> {
    let mut command = command(&mpirun()?, scenario);
    command.args(["-n", &ranks.to_string()]).arg(std::env::current_exe().unwrap()).args(WORKER);
    Some(command)
}

/// What all ranks said, in a run that failed.
fn failed(n: usize, scenario: &str) -> Option<String> {
    let (well, messages) = run(ranks(n, scenario)?);
    assert!(!well, "{scenario} went well:\n{messages}");
    Some(messages)
}

#[test]
fn the_suite() {
    for n in [1, 2, 3, 4] {
        let Some(command) = ranks(n, "suite") else { return };
        let (well, messages) = run(command);
        assert!(well && messages == "well\n".repeat(n), "{n} ranks:\n{messages}");
    }
}

/// Three wait, and all name the fourth, although it answers other calls.
#[test]
fn a_late_rank_is_named_by_those_who_wait() {
    let Some(messages) = failed(4, "late") else { return };
    for rank in 0..3 {
        let begin = format!("rank {rank} waited ");
        let sentence =
            messages.lines().find(|line| line.starts_with(&begin)).unwrap_or_else(|| panic!("{messages}"));
        let end =
            "ms for rank 3 in all_reduce (sum) of 12 f32 among ranks 0, 1, 2 and 3; a rank that is missing";
        assert!(sentence.contains(end), "{sentence}");
    }
}

#[test]
fn a_message_that_does_not_come_names_both_ranks() {
    let Some(messages) = failed(2, "silent") else { return };
    for call in ["send (tag 7) of 1048576 f32", "receive (tag 8) of 5 bf16"] {
        let named = |line: &str| {
            line.starts_with("rank 0 waited ") && line.contains(&format!("ms for rank 1 in {call};"))
        };
        assert!(messages.lines().any(named), "{call}\n{messages}");
    }
}

#[test]
fn a_failing_rank_frees_the_others_at_once() {
    for (scenario, why) in [
        ("panic", "because rank 3 panicked: the disk is on fire"),
        ("error", "because rank 3 failed: the file data.bin is missing"),
    ] {
        let Some(messages) = failed(4, scenario) else { return };
        for rank in 0..3 {
            // In the call that never will be done, or still in the barrier before it.
            let stopped = format!("rank {rank} stopped in ");
            let names_it = |line: &str| line.contains(&stopped) && line.ends_with(why);
            assert!(messages.lines().any(names_it), "rank {rank}\n{messages}");
        }
    }
}

#[test]
fn an_error_of_mpi_is_ours() {
    let Some(messages) = failed(2, "longer") else { return };
    assert!(messages.contains("rank 1 called receive (tag 0) of 5 f32, which failed: "), "{messages}");
    assert!(messages.to_lowercase().contains("truncate"), "{messages}");
}

/// Started without a launcher that connects it, while the variables say that there is one.
#[test]
fn copies_of_rank_0_are_noticed() {
    let mut command = command(std::env::current_exe().unwrap().to_str().unwrap(), "suite");
    command.args(WORKER).env("SLURM_NTASKS", "4");
    let (well, messages) = run(command);
    assert!(
        !well && messages.contains("started 4 ranks (SLURM_NTASKS=4), but this one sees only itself"),
        "{messages}"
    );
}
