//! The transport of threads: the suite, and what happens where a rank fails, is late or calls something else.

use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, Mutex, mpsc};
use std::time::{Duration, Instant};

use espalier_comm::{CommBuffer, Communicator, ElementType, Error, Failure, Reduce, threads};
use proptest::prelude::*;

use crate::data::{ELEMENTS, assert_holds, message, receive_buffer};
use crate::suite::CASES;

/// Longer than anything takes: what ends sooner was ended.
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(50);

fn run<R: Send>(
    ranks: usize,
    limit: Duration,
    work: impl Fn(Communicator) -> Result<R, Error> + Sync,
) -> Result<Vec<R>, Failure<Error>> {
    threads::run(ranks, limit, work)
}

/// All cases, each in a world of its own, over what `over` makes of its communicator.
fn suite(ranks: usize, over: impl Fn(Communicator) -> Communicator + Sync) {
    for (name, case) in CASES {
        if let Err(failure) = run(ranks, LONG, |comm| case(&over(comm))) {
            panic!("{name}, {ranks} ranks: {failure}");
        }
    }
}

#[test]
fn the_suite() {
    [1, 2, 3, 4, 8].into_iter().for_each(|ranks| suite(ranks, |comm| comm));
}

/// The process would be aborted while they start.
#[test]
fn more_ranks_than_a_process_can_have_threads() {
    let most = espalier_comm::threads::most_ranks();
    let failure = run(most + 1, LONG, |_| Ok::<(), Error>(())).unwrap_err();
    assert!(matches!(failure, Failure::Launch(Error::TooManyThreads { ranks, .. }) if ranks == most + 1));
}

/// Whoever is late is only late.
#[test]
fn the_suite_where_messages_come_late() {
    suite(3, |comm| comm.delayed(Duration::from_millis(1)));
}

/// The same over a link with a rate.
#[test]
fn the_suite_over_a_slow_network() {
    suite(3, |comm| comm.over(Duration::from_millis(1), 1e8));
}

/// Two messages of a rank share its link, in groups split from each other too: the second arrives when both
/// have left.
#[test]
fn messages_leave_one_after_the_other() {
    let each = Duration::from_millis(40);
    run(2, LONG, |comm| {
        let comm = comm.over(Duration::ZERO, 1e6 / each.as_secs_f64());
        let other = comm.split(Some(0), comm.rank())?.expect("a colour was given");
        let bytes = || vec![0u64; 125_000];
        // Before any of them is sent.
        let start = Instant::now();
        comm.barrier()?;
        match comm.rank() {
            0 => {
                let sent = [comm.start_send(bytes(), 1, 0)?, other.start_send(bytes(), 1, 0)?];
                sent.into_iter().try_for_each(|sent| sent.wait().map(drop))?;
            }
            _ => {
                comm.receive(bytes(), 0, 0)?;
                assert!(start.elapsed() >= each.mul_f64(0.9), "the first took {:?}", start.elapsed());
                other.receive(bytes(), 0, 0)?;
                assert!(start.elapsed() >= 2 * each.mul_f64(0.9), "both took {:?}", start.elapsed());
            }
        }
        Ok::<_, Error>(())
    })
    .unwrap();
}

/// A sum sets off when the last rank has come, and takes that long from then on, also where nobody waits for it.
#[test]
fn late_messages_take_their_time_while_ranks_compute() {
    let latency = Duration::from_millis(400);
    run(2, LONG, |comm| {
        let comm = comm.delayed(latency);
        comm.barrier()?;
        let start = Instant::now();
        let sum = comm.start_all_reduce(message(ElementType::F32, 3, |i| i as u32), Reduce::Sum)?;
        assert!(start.elapsed() < latency, "to start a sum is not to wait for it");
        std::thread::sleep(latency + latency / 2);
        let before = Instant::now();
        let mut sum = sum;
        while !sum.is_done()? {
            assert!(before.elapsed() < 4 * latency, "it has come while the rank was busy, or comes soon");
            std::thread::yield_now();
        }
        assert!(start.elapsed() >= latency);
        sum.wait().map(drop)
    })
    .unwrap();
}

/// Each rank's result is returned, in the order of ranks; what a rank returns need not be plain data.
#[test]
fn results_come_in_the_order_of_ranks() {
    let names = run(5, LONG, |comm| Ok(format!("rank {} of {}", comm.rank(), comm.size()))).unwrap();
    assert_eq!(names, (0..5).map(|r| format!("rank {r} of 5")).collect::<Vec<_>>());
}

#[test]
fn a_late_rank_is_named_by_those_who_wait() {
    // Apart from what is tested, so that the late rank stays until all others have given up.
    let given_up = Barrier::new(3);
    let failure = run(3, SHORT, |comm| {
        if comm.rank() == 1 {
            given_up.wait();
            return Ok(());
        }
        let error = comm.all_reduce(message(ElementType::F32, 12, |_| 1), Reduce::Sum).unwrap_err();
        given_up.wait();
        let Error::TimedOut { rank, missing, waited, .. } = &error else { panic!("{error}") };
        assert_eq!((*rank, &missing[..]), (comm.rank(), &[1][..]));
        assert!(*waited >= SHORT);
        let text = error.to_string();
        assert!(text.starts_with(&format!("rank {rank} waited ")), "{text}");
        assert!(
            text.contains(" for rank 1 in all_reduce (sum) of 12 f32 among ranks 0, 1 and 2; a rank"),
            "{text}"
        );
        Err::<(), _>(error)
    });
    assert!(matches!(failure, Err(Failure::Failed { error: Error::TimedOut { .. }, .. })), "{failure:?}");
}

/// A rank hangs for ever, as far as the others can tell, and two wait for each other's sake: whatever the
/// first to give up says, the one that hangs is named.
#[test]
fn a_rank_that_hangs_is_given_up() {
    let (wake, asleep) = mpsc::channel::<()>();
    let asleep = Mutex::new(asleep);
    let ended = AtomicU64::new(0);
    let abort = |failure: Failure<Error>| -> Infallible {
        assert_eq!(ended.load(Ordering::Relaxed), 2, "the others have ended: {failure}");
        wake.send(()).unwrap();
        panic!("{failure}")
    };
    let work = |comm: Communicator| -> Result<(), Error> {
        let outcome = match comm.rank() {
            0 => comm.receive(vec![0u64], 1, 0).map(drop),
            1 => comm.receive(vec![0u64], 2, 0).map(drop),
            _ => {
                asleep.lock().unwrap().recv_timeout(LONG).expect("it is given up long before");
                return Ok(());
            }
        };
        ended.fetch_add(1, Ordering::Relaxed);
        outcome
    };
    let run = AssertUnwindSafe(|| threads::run_or_abort(3, Duration::from_secs(1), abort, work));
    let panic = catch_unwind(run).expect_err("it does not return");
    let panic = panic.downcast_ref::<String>().unwrap();
    // At least as long as the limit; longer where the machine is busy.
    let waited = panic.split_once(" waited ").and_then(|(_, rest)| rest.split_once(" s for rank "));
    assert!(waited.is_some_and(|(seconds, _)| seconds.parse::<f64>().unwrap() >= 1.0), "{panic}");
    assert!(panic.ends_with("; the run ends without rank 2, not heard of for another 1.0 s"), "{panic}");
}

/// Whoever is only late comes to its end, and nothing is given up.
#[test]
fn a_rank_that_ends_after_another_failed_is_waited_for() {
    let limit = Duration::from_secs(30);
    let abort = |failure| -> Infallible { panic!("{failure}") };
    let failure = threads::run_or_abort(2, limit, abort, |comm| match comm.rank() {
        0 => Err("no luck".to_owned()),
        _ => {
            std::thread::sleep(4 * SHORT);
            comm.barrier().map_err(|e| e.to_string())
        }
    });
    assert_eq!(failure.unwrap_err().to_string(), "rank 0 failed: no luck");
    let ranks = threads::run_or_abort(2, limit, abort, |comm| Ok(comm.rank()));
    assert_eq!(ranks.unwrap(), [0, 1]);
}

#[test]
fn a_message_that_does_not_come_names_both_ranks() {
    for send in [false, true] {
        let given_up = Barrier::new(2);
        let failure = run(2, SHORT, |comm| {
            if comm.rank() == 0 {
                given_up.wait();
                return Ok(());
            }
            let data = message(ElementType::Bf16, 7, |_| 1);
            let result = if send { comm.send(data, 0, 9) } else { comm.receive(data, 0, 9) };
            given_up.wait();
            result.map(drop)
        });
        let text = failure.unwrap_err().to_string();
        let call = if send { "send" } else { "receive" };
        assert!(text.starts_with("rank 1 failed: rank 1 waited "), "{text}");
        assert!(text.contains(&format!(" for rank 0 in {call} (tag 9) of 7 bf16; a rank")), "{text}");
    }
}

/// The limit of a request starts when it is waited for, not while its rank computes.
#[test]
fn computing_does_not_count_as_waiting() {
    let limit = Duration::from_secs(1);
    let about_to_wait = Barrier::new(2);
    run(2, limit, |comm| {
        if comm.rank() == 1 {
            about_to_wait.wait();
            return comm.all_reduce(vec![1u64], Reduce::Sum).map(drop);
        }
        let request = comm.start_all_reduce(vec![1u64], Reduce::Sum)?;
        std::thread::sleep(limit + SHORT);
        about_to_wait.wait();
        assert_eq!(request.wait()?, [2]);
        Ok(())
    })
    .unwrap();
}

/// Nobody waits, and nobody helps: all ranks only look.
#[test]
fn what_was_started_goes_on_while_ranks_compute() {
    run(3, LONG, |comm| {
        let n = 500_000;
        let mut reduction =
            comm.start_all_reduce(message(ElementType::F32, n, |i| i as u32 % 50), Reduce::Sum)?;
        let (next, previous) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
        let mut sent = comm.start_send(message(ElementType::F32, n, |i| i as u32 % 60), next, 0)?;
        let mut got = comm.start_receive(receive_buffer(ElementType::F32, n), previous, 0)?;
        let start = Instant::now();
        while !(reduction.is_done()? && sent.is_done()? && got.is_done()?) {
            assert!(start.elapsed() < LONG, "no progress");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_holds("reduced", &reduction.wait()?, n, |i| 3 * (i as u32 % 50));
        assert_holds("received", &got.wait()?, n, |i| i as u32 % 60);
        sent.wait().map(drop)
    })
    .unwrap();
}

/// Both in a collective and in a message; before and after the others came to wait.
#[test]
fn a_panicking_rank_frees_the_others_at_once() {
    for early in [false, true] {
        let failure = run(4, LONG, |comm| {
            if comm.rank() == 2 {
                if !early {
                    std::thread::sleep(SHORT);
                }
                panic!("the disk is on fire");
            }
            if early {
                std::thread::sleep(SHORT);
            }
            let error = match comm.rank() {
                0 => comm.all_reduce(vec![0u64], Reduce::Sum).unwrap_err(),
                1 => comm.receive(vec![0u64], 3, 0).unwrap_err(),
                _ => comm.start_all_reduce(vec![0u64], Reduce::Sum).and_then(|r| r.wait()).unwrap_err(),
            };
            let text = error.to_string();
            assert!(text.contains("because rank 2 panicked: the disk is on fire"), "{text}");
            assert!(text.starts_with(&format!("rank {} stopped in ", comm.rank())), "{text}");
            Err::<(), _>(error)
        });
        assert_eq!(failure.unwrap_err().to_string(), "rank 2 panicked: the disk is on fire");
    }
}

/// A panic unwinds past requests that are on their way: nobody may be left with a dangling address.
#[test]
fn a_rank_may_panic_with_calls_in_flight() {
    for _ in 0..20 {
        let failure = run(3, LONG, |comm| {
            let n = 200_000;
            let data = message(ElementType::F32, n, |_| comm.rank() as u32);
            let reduction = comm.start_all_reduce(data, Reduce::Sum)?;
            let _unsent = comm.start_send(receive_buffer(ElementType::F32, n), (comm.rank() + 1) % 3, 0)?;
            if comm.rank() == 0 {
                panic!("gone");
            }
            // The reduction had all its ranks: it may be done, or be ended by the panic.
            if let Ok(reduced) = reduction.wait() {
                assert_holds("reduced", &reduced, n, |_| 3);
            }
            comm.barrier()
        });
        assert_eq!(failure.unwrap_err().to_string(), "rank 0 panicked: gone");
    }
}

#[test]
fn the_first_error_is_the_one_returned() {
    let failure = threads::run(3, LONG, |comm| match comm.rank() {
        1 => Err("the file data.bin is missing".to_owned()),
        _ => comm.barrier().map_err(|e| format!("second hand: {e}")),
    });
    assert_eq!(failure.unwrap_err().to_string(), "rank 1 failed: the file data.bin is missing");
}

#[test]
fn a_rank_that_ended_is_not_waited_for() {
    let failure = run(3, LONG, |comm| if comm.rank() == 0 { Ok(()) } else { comm.barrier() });
    let text = failure.unwrap_err().to_string();
    assert!(text.ends_with("waits in barrier for rank 0, which ended without it"), "{text}");
}

/// What was started before a rank ended still arrives.
#[test]
fn a_rank_may_end_before_its_message_is_received() {
    run(2, LONG, |comm| {
        if comm.rank() == 0 {
            drop(comm.start_send(message(ElementType::U32, 100_000, |i| i as u32), 1, 0)?);
            return Ok(());
        }
        std::thread::sleep(SHORT);
        let got = comm.receive(receive_buffer(ElementType::U32, 100_000), 0, 0)?;
        assert_holds("received", &got, 100_000, |i| i as u32);
        Ok(())
    })
    .unwrap();
}

#[test]
fn different_calls_are_told_apart() {
    let failure = run(2, LONG, |comm| match comm.rank() {
        0 => comm.barrier(),
        _ => comm.all_reduce(vec![1u64; 3], Reduce::Sum).map(drop),
    });
    let text = failure.unwrap_err().to_string();
    assert!(
        text.contains("called barrier where rank 1 called all_reduce (sum) of 3 u64")
            && text.contains("rank 0")
            || text.contains("called all_reduce (sum) of 3 u64 where rank 0 called barrier")
                && text.contains("rank 1"),
        "{text}"
    );

    let failure = run(2, LONG, |comm| match comm.rank() {
        0 => comm.send(message(ElementType::F32, 5, |_| 0), 1, 0).map(drop),
        _ => comm.receive(receive_buffer(ElementType::F32, 6), 0, 0).map(drop),
    });
    let text = failure.unwrap_err().to_string();
    assert!(text.contains("send (tag 0) of 5 f32") && text.contains("receive (tag 0) of 6 f32"), "{text}");
}

/// A tensor that somebody else holds is a mistake of the caller's: it panics, and does not take the world's
/// lock along.
#[test]
fn a_shared_tensor_is_not_written_to() {
    let failure = run(2, LONG, |comm| {
        let CommBuffer::Tensor(tensor) = receive_buffer(ElementType::F32, 4) else { unreachable!() };
        let held = (comm.rank() == 1).then(|| tensor.clone());
        comm.all_reduce(tensor, Reduce::Sum)?;
        drop(held);
        Ok(())
    });
    assert_eq!(
        failure.unwrap_err().to_string(),
        "rank 1 panicked: a tensor that is written to has one owner"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Lengths whose parts and pieces of work meet anywhere.
    #[test]
    fn parts_and_pieces_of_any_length(
        ranks in 1..6usize,
        n in prop_oneof![0..40usize, 20_000..70_000usize],
        element in proptest::sample::select(ELEMENTS.to_vec()),
        background in any::<bool>(),
    ) {
        let value = |r: usize, i: usize| ((5 * i + r + i / 997) % 11) as u32;
        run(ranks, LONG, |comm| {
            let full = message(element, n * ranks, |i| value(comm.rank(), i));
            let request = comm.start_reduce_scatter(full, receive_buffer(element, n), Reduce::Sum)?;
            if background {
                std::thread::yield_now();
            }
            let shard = request.wait()?;
            let at = n * comm.rank();
            assert_holds("part", &shard, n, |i| (0..ranks).map(|r| value(r, at + i)).sum());
            let full = comm.all_gather(shard, receive_buffer(element, n * ranks))?;
            assert_holds("whole", &full, n * ranks, |i| (0..ranks).map(|r| value(r, i)).sum());
            Ok(())
        }).unwrap();
    }
}

/// A rank that begins to wait at the very moment at which the last one comes may take the only piece; the
/// last one does not go on before that is done.
#[test]
fn nobody_goes_on_before_the_last_piece_is_done() {
    const LEN: usize = 1_000;
    let come = AtomicU64::new(0);
    let rounds = |comm: Communicator| -> Result<(), Error> {
        for round in 0..20_000u64 {
            let local: Vec<u64> = vec![round + comm.rank() as u64; LEN];
            // Both come at once, as far as a thread can see to that; but none waits for one that has failed.
            come.fetch_add(1, Ordering::Relaxed);
            let together = || come.load(Ordering::Relaxed) >= 2 * (round + 1);
            (0..1_000).take_while(|_| !together()).for_each(|_| std::hint::spin_loop());
            let sum = comm.all_reduce(local, Reduce::Sum)?;
            let wrong = sum.iter().position(|&it| it != 2 * round + 1);
            assert_eq!(wrong, None, "rank {} in round {round}", comm.rank());
        }
        Ok(())
    };
    threads::run(2, LONG, rounds).unwrap();
}
