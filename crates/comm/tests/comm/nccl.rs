//! The transport of NCCL: the suite on as many ranks as the machine has GPUs, in a process each; and on two
//! and four ranks of one GPU, where NCCL can do that (`ESPALIER_NCCL` names one of 2.30 or newer,
//! `NCCL_MULTI_RANK_GPU_ENABLE` is 1). What ranks do when one of them is late, fails or is killed is tested
//! there too.
//!
//! Where there is no GPU, or no NCCL, what was skipped is said.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use espalier_comm::rendezvous::RendezvousConfig;
use espalier_comm::{Communicator, ElementType, Error, Failure, Reduce, nccl};
use espalier_tensor::Device;
use espalier_tensor::cuda::Cuda;
use espalier_testing::{Need, skipped};

use crate::data::{message, receive_buffer, use_device};
use crate::rendezvous::free_port;
use crate::suite::{CASES, TO_ITSELF};

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_secs(3);
/// What a test's processes are told to do.
const SCENARIO: &str = "ESPALIER_TEST_PART";

/// Not a test by itself: a process of the tests below.
#[test]
#[ignore = "run by the tests of NCCL, on a machine with a GPU"]
fn worker() {
    let config = RendezvousConfig::from_environment().unwrap();
    let gpus = Cuda::probe().gpus.len();
    let cuda = Cuda::open(config.local_rank % gpus).unwrap();
    use_device(Device::Cuda(cuda.clone()));
    let scenario = std::env::var(SCENARIO).unwrap();
    let outcome: Result<(), Failure<Error>> = nccl::run(&cuda, &config, LONG, |comm| match &*scenario {
        "suite" => suite(&comm),
        "crossed" => crossed(&comm),
        "late" | "silent" => late(&comm.with_limit(SHORT), &scenario),
        "killed" | "stopped" | "error" | "panic" => gone(&comm.with_limit(SHORT), &scenario),
        other => panic!("no part is called {other}"),
    });
    match outcome {
        Ok(()) => {
            eprintln!("well");
            end(0);
        }
        Err(failure) => {
            eprintln!("said: {failure}");
            end(3);
        }
    }
}

/// Ends without handlers, as a program should where a thread may sit in a call that never returns.
fn end(code: i32) -> ! {
    // SAFETY: nothing of this process is used any more.
    unsafe { libc::_exit(code) }
}

fn suite(comm: &Communicator) -> Result<(), Error> {
    for (name, case) in CASES {
        match case(comm) {
            Ok(()) => eprintln!("passed: {name}"),
            // On one rank alone the next one is the rank itself.
            Err(error) if comm.size() == 1 && error.to_string().ends_with(TO_ITSELF) => {
                skipped(Need::TwoCuda, format!("{name}: {error}"));
            }
            Err(error) => panic!("{name}: {error}"),
        }
    }
    Ok(())
}

/// Every rank posts its receives before it sends, to all others at once and in an order of its own, messages
/// too long to be stored on the way: whoever counted on the order in which ranks post, or on room between
/// them, would wait for ever.
fn crossed(comm: &Communicator) -> Result<(), Error> {
    const N: usize = 3 << 20;
    let (rank, size) = (comm.rank(), comm.size());
    let others: Vec<usize> =
        (0..size).map(|step| (rank + step) % size).filter(|&other| other != rank).collect();
    let value = |from: usize, to: usize, tag: u32| (16 * from + 4 * to) as u32 + tag;
    comm.connect(&others)?;
    for round in 0..3 {
        let order: Vec<u32> = if (rank + round) % 2 == 0 { vec![0, 1] } else { vec![1, 0] };
        let mut coming = Vec::new();
        for &from in others.iter().rev() {
            for &tag in &order {
                coming.push((
                    from,
                    tag,
                    comm.start_receive(receive_buffer(ElementType::Bf16, N), from, tag)?,
                ));
            }
        }
        let reduction = comm.start_all_reduce(message(ElementType::F32, N, |_| rank as u32), Reduce::Sum)?;
        let mut going = Vec::new();
        for &to in &others {
            for tag in [0, 1] {
                going.push(comm.start_send(
                    message(ElementType::Bf16, N, |_| value(rank, to, tag)),
                    to,
                    tag,
                )?);
            }
        }
        for (from, tag, request) in coming {
            crate::data::assert_holds("crossed", &request.wait()?, N, |_| value(from, rank, tag));
        }
        crate::data::assert_holds("sum", &reduction.wait()?, N, |_| (0..size as u32).sum());
        going.into_iter().try_for_each(|request| request.wait().map(drop))?;
    }
    Ok(())
}

/// The last rank does not come to a collective call, although it answers; or it neither sends nor receives.
fn late(comm: &Communicator, scenario: &str) -> Result<(), Error> {
    comm.barrier()?;
    if comm.rank() == comm.size() - 1 {
        std::thread::sleep(2 * SHORT);
        return Ok(());
    }
    match scenario {
        "late" => comm.all_reduce(message(ElementType::F32, 12, |_| 1), Reduce::Sum).map(drop),
        _ => comm.receive(receive_buffer(ElementType::Bf16, 5), comm.size() - 1, 8).map(drop),
    }
}

/// The last rank comes to a bad end while the others wait for it.
fn gone(comm: &Communicator, how: &str) -> Result<(), Error> {
    comm.barrier()?;
    if comm.rank() == comm.size() - 1 {
        match how {
            "killed" => end(137),
            "error" => return Err(Error::Unsupported { what: "the file data.bin is missing".into() }),
            "panic" => panic!("the disk is on fire"),
            _ => stop_itself(),
        }
    }
    comm.all_reduce(message(ElementType::F32, 1 << 20, |_| 1), Reduce::Sum).map(drop)
}

/// As a process that a debugger, or a full machine, has stopped: its connections are there, and nobody answers.
fn stop_itself() {
    // SAFETY: a signal to this process alone.
    unsafe { libc::raise(libc::SIGSTOP) };
}

/// Why there can be no test with so many ranks.
fn missing(ranks: usize) -> Option<(Need, String)> {
    let gpus = Cuda::probe().gpus.len();
    let version = match nccl::version() {
        Ok(version) => version,
        Err(error) => return Some((Need::Nccl, error.to_string())),
    };
    if gpus == 0 {
        return Some((Need::Nccl, format!("NCCL {version} needs a GPU, and there is none")));
    }
    let shares = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1");
    (gpus < ranks && !shares).then(|| {
        let why = format!(
            "{ranks} ranks need as many GPUs, or NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1; this is NCCL {version} with {gpus}"
        );
        (Need::TwoCuda, why)
    })
}

struct Ended {
    code: Option<i32>,
    stderr: String,
}

/// Runs a part on so many ranks; nothing where the machine cannot.
fn ranks(n: usize, scenario: &str) -> Option<Vec<Ended>> {
    if let Some((need, why)) = missing(n) {
        skipped(need, why);
        return None;
    }
    let port = free_port().to_string();
    let start = |rank: usize| -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "nccl::worker", "--ignored", "--nocapture"]);
        command.env("MASTER_ADDR", "localhost").env("MASTER_PORT", &port).env("WORLD_SIZE", n.to_string());
        command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string()).env(SCENARIO, scenario);
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut children: Vec<Child> = (0..n).map(start).collect();
    // One that has stopped itself ends when all others have.
    let stays = (scenario == "stopped").then(|| children.pop().unwrap());
    let collect = |child: Child| {
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        Ended { code: output.status.code(), stderr }
    };
    let ended = children.into_iter().map(collect).collect();
    if let Some(mut stopped) = stays {
        stopped.kill().unwrap();
        stopped.wait().unwrap();
    }
    Some(ended)
}

fn all_well(n: usize, scenario: &str) {
    for (rank, end) in ranks(n, scenario).into_iter().flatten().enumerate() {
        assert_eq!(end.code, Some(0), "{scenario}, rank {rank} of {n}:\n{}", end.stderr);
        assert!(end.stderr.contains("well"), "{scenario}, rank {rank} of {n}:\n{}", end.stderr);
    }
}

#[test]
fn the_suite() {
    all_well(Cuda::probe().gpus.len().max(1), "suite");
}

#[test]
fn the_suite_on_two_and_four_ranks() {
    [2, 4].into_iter().for_each(|n| all_well(n, "suite"));
}

#[test]
fn nobody_counts_on_the_order_in_which_ranks_post() {
    [2, 4].into_iter().for_each(|n| all_well(n, "crossed"));
}

/// Who waits is told within a moment of the limit, and who is missing.
#[test]
fn limits_hold_and_name_who_is_missing() {
    for (scenario, n, call) in [
        ("late", 3, "for rank 2 in all_reduce (sum) of 12 f32 among ranks 0, 1 and 2"),
        ("silent", 2, "for rank 1 in receive (tag 8) of 5 bf16"),
        ("stopped", 3, "for rank 2 in all_reduce (sum) of 1048576 f32 among ranks 0, 1 and 2"),
    ] {
        for (rank, end) in ranks(n, scenario).into_iter().flatten().enumerate().take(n - 1) {
            assert_eq!(end.code, Some(3), "{scenario}, rank {rank}:\n{}", end.stderr);
            // The first to give up says so, the others that it did.
            assert!(end.stderr.contains(call), "{scenario}, rank {rank}:\n{}", end.stderr);
        }
    }
}

/// A rank that fails, panics or is killed ends the others at once: they name it, and not a limit.
#[test]
fn a_rank_that_is_gone_ends_the_others() {
    for (scenario, words) in [
        ("killed", "because rank 2 was lost: its connection was closed"),
        ("error", "because rank 2 failed: the file data.bin is missing"),
        ("panic", "because rank 2 panicked: the disk is on fire"),
    ] {
        let Some(ends) = ranks(3, scenario) else { return };
        for (rank, end) in ends.iter().enumerate().take(2) {
            assert_eq!(end.code, Some(3), "{scenario}, rank {rank}:\n{}", end.stderr);
            assert!(end.stderr.contains(words), "{scenario}, rank {rank}:\n{}", end.stderr);
        }
    }
}

/// Where it is not, one sentence says what to do; where it is, it is new enough to be used.
#[test]
fn nccl_is_found_or_what_to_do_is_said() {
    match nccl::version() {
        Ok(version) => assert!(version.starts_with("2."), "{version}"),
        Err(error) => {
            let text = error.to_string();
            assert!(
                text.contains("libnccl.so.2 was not found; install") || text.contains("ESPALIER_NCCL"),
                "{text}"
            );
        }
    }
}
