//! Ranks that find each other over the loopback: as threads, and as processes that only have their variables.

use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::Duration;

use espalier_comm::Error;
use espalier_comm::rendezvous::{Rendezvous, RendezvousConfig};

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(1500);

/// A port that nobody listens on, below those that systems give to outgoing connections; no two calls give
/// the same.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let start = 20_000 + (std::process::id() % 500) as u16 * 20;
    let ports = std::iter::repeat_with(|| start + NEXT.fetch_add(1, Ordering::Relaxed));
    ports.take(1000).find(|&port| TcpListener::bind(("0.0.0.0", port)).is_ok()).expect("a free port")
}

fn config(rank: usize, size: usize, port: u16) -> RendezvousConfig {
    RendezvousConfig { rank, size, local_rank: rank, host: "127.0.0.1".into(), ports: vec![port] }
}

/// Runs each place on a thread of its own, and returns what became of it.
fn meet<R: Send>(
    configs: &[RendezvousConfig],
    limit: Duration,
    work: impl Fn(Rendezvous) -> R + Sync,
) -> Vec<Result<R, String>> {
    let one = |config: &RendezvousConfig| {
        Rendezvous::connect(config, limit).map(&work).map_err(|e: Error| e.to_string())
    };
    thread::scope(|scope| {
        let threads: Vec<_> = configs.iter().map(|config| scope.spawn(|| one(config))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn all_get_what_all_gave() {
    for size in [1, 2, 5] {
        let port = free_port();
        let configs: Vec<RendezvousConfig> = (0..size).map(|rank| config(rank, size, port)).collect();
        let results = meet(&configs, LONG, |mut rendezvous| {
            assert_eq!(rendezvous.size(), size);
            for round in 0..3 {
                let bytes = |rank: usize| vec![rank as u8 + round; [0, 10, 300_000][round as usize] + rank];
                let all = rendezvous.gather(&bytes(rendezvous.rank()), LONG).unwrap();
                assert_eq!(all, (0..size).map(bytes).collect::<Vec<_>>());
            }
            rendezvous.rank()
        });
        assert_eq!(
            results.into_iter().map(Result::unwrap).collect::<Vec<_>>(),
            (0..size).collect::<Vec<_>>()
        );
    }
}

#[test]
fn those_who_do_not_come_are_named() {
    let port = free_port();
    let results = meet(&[config(0, 4, port), config(2, 4, port)], SHORT, drop);
    let text = results[0].as_ref().unwrap_err();
    assert!(
        text.starts_with("rank 0 waited 1.5 s for ranks 1 and 3 at the rendezvous on 127.0.0.1:"),
        "{text}"
    );
    assert!(results[1].as_ref().unwrap_err().contains("rank 2 waited for rank 0"), "{results:?}");

    let limit = Duration::from_millis(100);
    let text = meet(&[config(1, 2, free_port())], limit, drop).remove(0).unwrap_err();
    assert!(text.starts_with("rank 1 waited 100 ms for rank 0 at 127.0.0.1:"), "{text}");
}

#[test]
fn ranks_of_another_job_are_refused() {
    let port = free_port();
    let results = meet(&[config(0, 2, port), config(1, 3, port)], LONG, drop);
    for end in &results {
        assert_eq!(
            end.as_ref().unwrap_err(),
            "rank 0 was started as one of 2 ranks, rank 1 as one of 3",
            "{results:?}"
        );
    }
    let port = free_port();
    let results = meet(&[config(0, 3, port), config(1, 3, port), config(1, 3, port)], LONG, drop);
    let text = results[0].as_ref().unwrap_err();
    assert_eq!(text, "rank 1 came twice to the rendezvous: is another job using the same MASTER_PORT?");
}

#[test]
fn a_port_in_use_is_said_so() {
    let taken = TcpListener::bind("[::]:0").or_else(|_| TcpListener::bind("0.0.0.0:0")).unwrap();
    let port = taken.local_addr().unwrap().port();
    let text = meet(&[config(0, 2, port)], SHORT, drop).remove(0).unwrap_err();
    assert!(text.starts_with(&format!("rank 0 cannot listen on MASTER_PORT {port}: ")), "{text}");
}

/// As under torchrun: strangers sit on some of the ports, one silent and one talkative.
#[test]
fn strangers_on_ports_beside_are_passed_over() {
    let (silent, talkative) =
        (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
    let ports =
        vec![silent.local_addr().unwrap().port(), talkative.local_addr().unwrap().port(), free_port()];
    let talk = thread::spawn(move || {
        use std::io::Write;
        // One connection for each rank that is not 0.
        for _ in 0..2 {
            let (mut stream, _) = talkative.accept().unwrap();
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    let configs: Vec<RendezvousConfig> = (0..3)
        .map(|rank| {
            // Rank 0 would not be able to listen where they do, but would if they listened on other addresses
            // only.
            let ports = if rank == 0 { ports[2..].to_vec() } else { ports.clone() };
            RendezvousConfig { ports, ..config(rank, 3, 0) }
        })
        .collect();
    let results = meet(&configs, LONG, |mut rendezvous| rendezvous.gather(&[7], LONG).unwrap());
    assert!(results.iter().all(|all| *all == Ok(vec![vec![7]; 3])), "{results:?}");
    talk.join().unwrap();
}

/// A rank that dies between two rounds is not waited for until the end.
#[test]
fn a_rank_that_is_lost_is_named() {
    let port = free_port();
    let configs: Vec<RendezvousConfig> = (0..3).map(|rank| config(rank, 3, port)).collect();
    let results = meet(&configs, LONG, |mut rendezvous| match rendezvous.rank() {
        1 => String::new(),
        _ => rendezvous.gather(&[1], LONG).unwrap_err().to_string(),
    });
    let text = results[0].as_ref().unwrap();
    assert!(text.starts_with("rank 0 waited for rank 1 at the rendezvous, which was lost: "), "{text}");
}

/// Not a test by itself: a process of the test below.
#[test]
#[ignore = "run by the test of processes"]
fn worker() {
    let config = RendezvousConfig::from_environment().unwrap();
    let mut rendezvous = Rendezvous::connect(&config, LONG).unwrap();
    let all = rendezvous.gather(&[config.rank as u8; 3], LONG).unwrap();
    assert_eq!(all, (0..config.size).map(|rank| vec![rank as u8; 3]).collect::<Vec<_>>());
}

#[test]
fn processes_find_each_other_by_their_variables() {
    let port = free_port().to_string();
    let processes: Vec<_> = (0..3)
        .rev()
        .map(|rank: usize| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "rendezvous::worker", "--ignored"]);
            command.env("MASTER_ADDR", "localhost").env("MASTER_PORT", &port).env("WORLD_SIZE", "3");
            command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for process in processes {
        let output = process.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
    }
}
