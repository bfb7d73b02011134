//! The transport of NCCL: the suite on as many cards as the machine has, in a process each.
//!
//! Where there is one, what one rank can do alone is tested; where there is none, or no NCCL, standard error says that
//! nothing was.

use std::process::{Command, Stdio};
use std::time::Duration;

use espalier_comm::nccl;
use espalier_comm::rendezvous::{Place, Rendezvous};
use espalier_tensor::Device;
use espalier_tensor::cuda::Cuda;
use espalier_testing::{Need, skipped};

use crate::data::use_device;
use crate::rendezvous::free_port;
use crate::suite::{CASES, TAGS};

const LONG: Duration = Duration::from_secs(60);

/// Not a test by itself: a process of the test below.
#[test]
#[ignore = "run by the test of NCCL, on a machine with cards"]
fn worker() {
    let place = Place::from_environment().unwrap();
    let cuda = Cuda::open(place.local_rank).unwrap();
    use_device(Device::Cuda(cuda.clone()));
    let mut rendezvous = Rendezvous::meet(&place, LONG).unwrap();
    let comm = nccl::connect(&cuda, &mut rendezvous, LONG).unwrap();
    for (name, case) in CASES.iter().filter(|(name, _)| *name != TAGS) {
        match case(&comm) {
            Ok(()) => eprintln!("passed: {name}"),
            // On one card alone the next rank is the rank itself.
            Err(error) if comm.size() == 1 && error.to_string().ends_with("from a rank to itself") => {
                skipped(Need::TwoCuda, format!("{name}: {error}"));
            }
            Err(error) => panic!("{name}: {error}"),
        }
    }
}

#[test]
fn the_suite() {
    let gpus = Cuda::probe().gpus.len();
    let missing = match nccl::version() {
        Ok(_) if gpus >= 1 => None,
        Ok(version) => Some(format!("NCCL {version} needs a card, and there is none")),
        Err(error) => Some(error.to_string()),
    };
    if let Some(missing) = missing {
        return skipped(Need::Nccl, missing);
    }
    let port = free_port().to_string();
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "nccl::worker", "--ignored", "--nocapture"]);
        command.env("MASTER_ADDR", "localhost").env("MASTER_PORT", &port).env("WORLD_SIZE", gpus.to_string());
        command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    for process in (0..gpus).map(start).collect::<Vec<_>>() {
        let output = process.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
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
