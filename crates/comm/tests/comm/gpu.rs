//! The transport of threads where the ranks share one GPU: the suite again, and what is only so there.
//!
//! Where there is no GPU, standard error says that nothing was tested.

use std::time::Duration;

use espalier_comm::{CommBuffer, Communicator, ElementType, Error, Failure, Reduce, threads};
use espalier_tensor::cuda::Cuda;
use espalier_tensor::{Category, DType, Device, Tensor};
use espalier_testing::{Need, skipped};

use crate::data::{assert_holds, floats, message, receive_buffer, use_device};
use crate::suite::CASES;

const LONG: Duration = Duration::from_secs(60);
const ON_GPU: [ElementType; 3] = [ElementType::F32, ElementType::Bf16, ElementType::U32];

/// Ranks on one GPU, each with streams and memory of its own; `None` where there is no GPU.
fn outcome(
    ranks: usize,
    work: impl Fn(Communicator) -> Result<(), Error> + Sync,
) -> Option<Result<Vec<()>, Failure<Error>>> {
    let probe = Cuda::probe();
    if !probe.usable() {
        skipped(Need::Cuda, probe.missing.join("; "));
        return None;
    }
    let gpu = Cuda::open(0).unwrap();
    Some(threads::run(ranks, LONG, |comm| {
        use_device(Device::Cuda(gpu.another().unwrap()));
        work(comm)
    }))
}

/// The same, none of which fails.
fn run(ranks: usize, work: impl Fn(Communicator) -> Result<(), Error> + Sync) {
    if let Some(Err(failure)) = outcome(ranks, work) {
        panic!("{ranks} ranks: {failure}");
    }
}

#[test]
fn the_suite() {
    for ranks in [1, 2, 3, 4, 8] {
        for (name, case) in CASES {
            run(ranks, |comm| case(&comm).inspect_err(|error| eprintln!("{name}: {error}")));
        }
    }
}

/// Lengths whose parts begin at any address: packs of 16 bytes, and what is left.
#[test]
fn parts_of_any_length() {
    for n in [1, 3, 4, 8, 33, 1000, 4099, 100_001] {
        for element in ON_GPU {
            let value = |r: usize, i: usize| ((5 * i + r + i / 997) % 11) as u32;
            run(3, |comm| {
                let full = message(element, 3 * n, |i| value(comm.rank(), i));
                let shard = comm.reduce_scatter(full, receive_buffer(element, n), Reduce::Sum)?;
                let at = n * comm.rank();
                assert_holds("part", &shard, n, |i| (0..3).map(|r| value(r, at + i)).sum());
                let full = comm.all_gather(shard, receive_buffer(element, 3 * n))?;
                assert_holds("whole", &full, 3 * n, |i| (0..3).map(|r| value(r, i)).sum());
                let most = comm.all_reduce(message(element, n, |i| value(comm.rank(), i)), Reduce::Max)?;
                assert_holds("most", &most, n, |i| (0..3).map(|r| value(r, i)).max().unwrap());
                Ok(())
            });
        }
    }
}

/// Many calls in flight, waited for late, while the ranks' own streams write to what they get back: nothing
/// may overtake.
#[test]
fn streams_keep_their_order() {
    let n = 300_000;
    run(4, |comm| {
        let mut flying = Vec::new();
        for round in 0..20u32 {
            let data = message(ElementType::F32, n, |i| i as u32 % 7 + round);
            flying.push(comm.start_all_reduce(data, Reduce::Sum)?);
            // Memory that is freed and taken again while calls are on their way.
            drop(message(ElementType::F32, n, |_| 1000 + round));
        }
        for (round, request) in flying.into_iter().enumerate() {
            let CommBuffer::Tensor(mut reduced) = request.wait()? else { unreachable!("a tensor went in") };
            espalier_tensor::ops::elementwise::scale_into(&mut reduced, 0.25).unwrap();
            assert_holds("sum", &CommBuffer::Tensor(reduced), n, |i| i as u32 % 7 + round as u32);
        }
        Ok(())
    });
}

/// A request that is dropped leaves its buffer to the call: whoever gets the memory next comes after it.
#[test]
fn what_nobody_waits_for_harms_nobody() {
    let n = 500_000;
    run(2, |comm| {
        for _ in 0..10 {
            drop(comm.start_all_reduce(message(ElementType::F32, n, |_| 3), Reduce::Sum)?);
            let fresh = message(ElementType::F32, n, |i| i as u32 % 9);
            let reduced = comm.all_reduce(message(ElementType::F32, n, |i| i as u32 % 5), Reduce::Sum)?;
            assert_holds("sum", &reduced, n, |i| 2 * (i as u32 % 5));
            assert_holds("fresh", &fresh, n, |i| i as u32 % 9);
        }
        Ok(())
    });
}

/// As on the host: the order of ranks shows in the bits, and NaN shows.
#[test]
fn sums_are_taken_in_the_order_of_ranks() {
    let x: [[f32; 4]; 3] = [[1e8, 1.0, -1e8, f32::NAN], [-1e8, 1e8, 1.0, 1.0], [1.0, -1e8, 1e8, 2.0]];
    run(3, |comm| {
        let local = &x[comm.rank()];
        let reduced = comm.all_reduce(floats(local), Reduce::Sum)?.to_f32();
        let max = comm.all_reduce(floats(local), Reduce::Max)?.to_f32();
        assert_eq!((&reduced[..3], &max[..3]), (&[1.0, 0.0, 0.0][..], &[1e8, 1e8, 1e8][..]));
        assert!(reduced[3].is_nan() && max[3].is_nan());
        Ok(())
    });
}

#[test]
fn data_on_two_devices_is_refused() {
    let Some(failure) = outcome(2, |comm| {
        let host = Device::cpu(1).unwrap();
        let tensor = match comm.rank() {
            0 => floats(&[1.0]),
            _ => Tensor::zeros(&host, &[1], DType::F32, Category::Communication).unwrap(),
        };
        comm.all_reduce(tensor, Reduce::Sum).map(drop)
    }) else {
        return;
    };
    let text = failure.unwrap_err().to_string();
    assert!(text.contains("the data of rank 1 is on the host, that of others on a GPU"), "{text}");
}
