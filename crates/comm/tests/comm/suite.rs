//! The conformance suite: every case runs on all ranks of a world of any size, on whichever transport carries it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use espalier_comm::traffic::chunk;
use espalier_comm::{CommBuffer, Communicator, ElementType, Error, Reduce, TrafficKind};
use espalier_plan::{Axis, Mesh, PerAxis};

use crate::data::{ELEMENTS, assert_holds, floats, message, receive_buffer};

/// A case of the suite.
pub type Case = fn(&Communicator) -> Result<(), Error>;

/// How an error ends where a rank that is alone in its world cannot send to the next, which is itself: with NCCL.
pub const TO_ITSELF: &str = "has nobody to talk to";

/// All cases, by name.
pub const CASES: &[(&str, Case)] = &[
    ("messages go around a ring", ring),
    ("messages are told apart by their tags", tags),
    ("messages of one tag stay in order", order),
    ("a broadcast reaches all from every root", broadcast),
    ("reductions and gathers of every type and size", collectives),
    ("bf16 is summed in f32", rounding),
    ("a sum has the same bits every time, on every rank", same_bits),
    ("nobody leaves a barrier before all have come", barrier),
    ("calls overlap and are waited for in any order", overlap),
    ("groups along the axes of a mesh work at the same time", mesh_groups),
    ("a split follows colours and keys", split),
    ("bytes are counted by kind", counts),
    ("calls that cannot work are refused", refused),
];

/// Element counts: nothing, one, odd ones, one that needs several pieces of work.
const SIZES: [usize; 5] = [0, 1, 7, 1001, 70_003];

/// What rank `r` has at `i`.
fn value(r: usize, i: usize) -> u32 {
    ((7 * i + 3 * r + i / 1000) % 13) as u32
}

fn sum(ranks: &[usize], i: usize) -> u32 {
    ranks.iter().map(|&r| value(r, i)).sum()
}

fn max(ranks: &[usize], i: usize) -> u32 {
    ranks.iter().map(|&r| value(r, i)).max().unwrap()
}

fn ring(comm: &Communicator) -> Result<(), Error> {
    let (rank, size) = (comm.rank(), comm.size());
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    for element in ELEMENTS {
        for n in SIZES {
            let data = message(element, n, |i| value(rank, i));
            let sent = comm.start_send(data, next, 5)?;
            let got = comm.receive(receive_buffer(element, n), previous, 5)?;
            assert_holds("received", &got, n, |i| value(previous, i));
            assert_holds("given back", &sent.wait()?, n, |i| value(rank, i));
        }
    }
    // Blocking sends too: even ranks send first. An odd one out sits still.
    let (pairs, even) = (size / 2 * 2, rank.is_multiple_of(2));
    if rank < pairs {
        let partner = rank ^ 1;
        for n in SIZES {
            let data = message(ElementType::F32, n, |i| value(rank, i));
            let into = receive_buffer(ElementType::F32, n);
            let got = if even {
                comm.send(data, partner, 6)?;
                comm.receive(into, partner, 6)?
            } else {
                let got = comm.receive(into, partner, 6)?;
                comm.send(data, partner, 6)?;
                got
            };
            assert_holds("from the partner", &got, n, |i| value(partner, i));
        }
    }
    Ok(())
}

fn tags(comm: &Communicator) -> Result<(), Error> {
    let (rank, size) = (comm.rank(), comm.size());
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    let n = |tag: u32| 40_000 * tag as usize + 1;
    let sends: Vec<_> = (0..4)
        .map(|tag| comm.start_send(message(ElementType::F32, n(tag), |_| 10 * tag + rank as u32), next, tag))
        .collect::<Result<_, _>>()?;
    for tag in [2, 3, 0, 1] {
        let got = comm.receive(receive_buffer(ElementType::F32, n(tag)), previous, tag)?;
        assert_holds("by tag", &got, n(tag), |_| 10 * tag + previous as u32);
    }
    sends.into_iter().try_for_each(|send| send.wait().map(drop))
}

fn order(comm: &Communicator) -> Result<(), Error> {
    let (rank, size) = (comm.rank(), comm.size());
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    let receives: Vec<_> = (0..4)
        .map(|_| comm.start_receive(receive_buffer(ElementType::Bf16, 9), previous, 1))
        .collect::<Result<_, _>>()?;
    let sends: Vec<_> = (0..8)
        .map(|k| comm.start_send(message(ElementType::Bf16, 9, |_| k), next, 1))
        .collect::<Result<_, _>>()?;
    for (k, receive) in receives.into_iter().enumerate() {
        assert_holds("receive that came first", &receive.wait()?, 9, |_| k as u32);
    }
    for k in 4..8 {
        let got = comm.receive(receive_buffer(ElementType::Bf16, 9), previous, 1)?;
        assert_holds("receive that came second", &got, 9, |_| k);
    }
    sends.into_iter().try_for_each(|send| send.wait().map(drop))
}

fn broadcast(comm: &Communicator) -> Result<(), Error> {
    for root in 0..comm.size() {
        for element in ELEMENTS {
            // How a type is cut into pieces does not depend on the root: two of them send large ones of every type.
            let large = root < 2 || element == ElementType::F32;
            for n in SIZES.into_iter().take(if large { SIZES.len() } else { SIZES.len() - 1 }) {
                let data = if comm.rank() == root {
                    message(element, n, |i| value(root, i))
                } else {
                    receive_buffer(element, n)
                };
                let data = comm.broadcast(data, root)?;
                assert_holds("broadcast", &data, n, |i| value(root, i));
            }
        }
    }
    Ok(())
}

fn collectives(comm: &Communicator) -> Result<(), Error> {
    let (rank, size) = (comm.rank(), comm.size());
    let ranks: Vec<usize> = (0..size).collect();
    // Where many ranks have a part each, smaller ones are several pieces of work in all.
    let most = if size > 3 { 20_011 } else { usize::MAX };
    for element in ELEMENTS {
        for n in SIZES.map(|n| n.min(most)) {
            let local = || message(element, n, |i| value(rank, i));
            let data = comm.all_reduce(local(), Reduce::Sum)?;
            assert_holds("all_reduce, sum", &data, n, |i| sum(&ranks, i));
            let data = comm.all_reduce(local(), Reduce::Max)?;
            assert_holds("all_reduce, max", &data, n, |i| max(&ranks, i));

            let full = comm.all_gather(local(), receive_buffer(element, n * size))?;
            assert_holds("all_gather", &full, n * size, |i| value(i / n, i % n));

            let full = || message(element, n * size, |i| value(rank, i));
            let shard = comm.reduce_scatter(full(), receive_buffer(element, n), Reduce::Sum)?;
            assert_holds("reduce_scatter, sum", &shard, n, |i| sum(&ranks, n * rank + i));
            let shard = comm.reduce_scatter(full(), receive_buffer(element, n), Reduce::Max)?;
            assert_holds("reduce_scatter, max", &shard, n, |i| max(&ranks, n * rank + i));
        }
    }
    Ok(())
}

/// In bf16, 256 + 1 is 256: sums that are rounded at every rank stay there.
fn rounding(comm: &Communicator) -> Result<(), Error> {
    // The nearest bf16 above 256 are two apart; ties go to the even one of them.
    let exact = 256 + comm.size() as u32 - 1;
    let nearest = match exact % 4 {
        1 => exact - 1,
        3 => exact + 1,
        _ => exact,
    };
    let local = if comm.rank() == 0 { 256 } else { 1 };
    let data = comm.all_reduce(message(ElementType::Bf16, 33, |_| local), Reduce::Sum)?;
    assert_holds("all_reduce in bf16", &data, 33, |_| nearest);
    let full = message(ElementType::Bf16, 5 * comm.size(), |_| local);
    let shard = comm.reduce_scatter(full, receive_buffer(ElementType::Bf16, 5), Reduce::Sum)?;
    assert_holds("reduce_scatter in bf16", &shard, 5, |_| nearest);
    Ok(())
}

fn same_bits(comm: &Communicator) -> Result<(), Error> {
    let n = 140_003;
    // Numbers of very different size: any other order of additions would show.
    let noise = |i: usize| {
        let hash = (i as u64 + 1)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .wrapping_mul(2 * comm.rank() as u64 + 1)
            .rotate_left(23);
        (hash as i32 as f32) * ((hash >> 40) as f32).exp2().clamp(1e-6, 1e6)
    };
    let values: Vec<f32> = (0..n).map(noise).collect();
    let mut first: Option<Vec<u8>> = None;
    for round in 0..5 {
        let reduced = if round % 2 == 0 {
            comm.all_reduce(floats(&values), Reduce::Sum)?
        } else {
            let request = comm.start_all_reduce(floats(&values), Reduce::Sum)?;
            std::thread::sleep(Duration::from_millis(comm.rank() as u64));
            request.wait()?
        };
        let bits = reduced.host_bytes().into_owned();
        assert!(*first.get_or_insert_with(|| bits.clone()) == bits, "round {round}: other bits");
    }
    let bits = first.unwrap();
    let words = bits.as_chunks::<4>().0.iter().map(|&b| u64::from(u32::from_le_bytes(b)));
    let hash = words.fold(0u64, |hash, word| (hash ^ word).wrapping_mul(0x100_0000_01b3));
    let hashes = comm.all_gather(vec![hash], vec![0; comm.size()])?;
    assert!(hashes.iter().all(|&other| other == hash), "ranks have other bits: {hashes:x?}");
    Ok(())
}

fn barrier(comm: &Communicator) -> Result<(), Error> {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as u64;
    for late in 0..comm.size() {
        if comm.rank() == late {
            std::thread::sleep(Duration::from_millis(5));
        }
        let came = now();
        comm.barrier()?;
        let left = now();
        let last_to_come = comm.all_reduce(vec![came], Reduce::Max)?[0];
        assert!(left >= last_to_come, "left {left}, while the last came {last_to_come}");
    }
    Ok(())
}

fn overlap(comm: &Communicator) -> Result<(), Error> {
    let (rank, size) = (comm.rank(), comm.size());
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    let ranks: Vec<usize> = (0..size).collect();
    let n = |k: usize| 70_000 * (k % 3) + k;
    let reductions: Vec<_> = (0..5)
        .map(|k| comm.start_all_reduce(message(ElementType::F32, n(k), |i| value(rank, i + k)), Reduce::Sum))
        .collect::<Result<_, _>>()?;
    let got = comm.start_receive(receive_buffer(ElementType::Bf16, 70_000), previous, 0)?;
    let gather = comm.start_all_gather(vec![rank as u64], vec![0; size])?;
    let shard = comm.start_reduce_scatter(
        message(ElementType::Bf16, 11 * size, |i| value(rank, i)),
        receive_buffer(ElementType::Bf16, 11),
        Reduce::Max,
    )?;
    let data = if rank == size - 1 { vec![4.5; 3] } else { vec![0.0; 3] };
    let broadcast = comm.start_broadcast(data, size - 1)?;
    let sent = comm.start_send(message(ElementType::Bf16, 70_000, |i| value(rank, i)), next, 0)?;

    let mut broadcast = broadcast;
    while !broadcast.is_done()? {
        std::thread::yield_now();
    }
    assert_eq!(broadcast.wait()?, [4.5; 3]);
    assert_holds("reduce_scatter", &shard.wait()?, 11, |i| max(&ranks, 11 * rank + i));
    assert_eq!(gather.wait()?, (0..size as u64).collect::<Vec<_>>());
    for (k, reduction) in reductions.into_iter().enumerate().rev() {
        assert_holds("all_reduce", &reduction.wait()?, n(k), |i| sum(&ranks, i + k));
    }
    sent.wait()?;
    assert_holds("received", &got.wait()?, 70_000, |i| value(previous, i));
    Ok(())
}

/// All meshes of the world's size: groups along each axis reduce at the same time, each as often as it likes.
fn mesh_groups(comm: &Communicator) -> Result<(), Error> {
    let size = comm.size();
    for data in (1..=size).filter(|n| size.is_multiple_of(*n)) {
        for tensor in (1..=size / data).filter(|n| (size / data).is_multiple_of(*n)) {
            let extents = PerAxis { data, tensor, pipeline: size / data / tensor, spatial: 1 };
            let mesh = Mesh::for_ranks(extents, size).unwrap();
            for axes in [&[Axis::Data][..], &[Axis::Tensor], &[Axis::Pipeline], &[Axis::Data, Axis::Tensor]] {
                let slice = mesh.slice(comm.rank(), axes);
                let group = comm.split(Some(slice.number), slice.index)?.expect("a colour was given");
                assert_eq!(group.members(), slice.ranks);
                assert_eq!((group.rank(), group.world_rank()), (slice.index, comm.rank()));
                for round in 0..3 + slice.number {
                    let n = 10_000 + round;
                    let local = message(ElementType::F32, n, |i| value(comm.rank(), i));
                    let reduced = group.all_reduce(local, Reduce::Sum)?;
                    assert_holds("in a slice", &reduced, n, |i| sum(&slice.ranks, i));
                }
                if group.size() > 1 {
                    let next = (group.rank() + 1) % group.size();
                    let previous = (group.rank() + group.size() - 1) % group.size();
                    let sent = group.start_send(vec![comm.rank() as u64], next, 3)?;
                    let got = group.receive(vec![0u64], previous, 3)?;
                    assert_eq!(got, [slice.ranks[previous] as u64]);
                    sent.wait()?;
                }
            }
        }
    }
    Ok(())
}

fn split(comm: &Communicator) -> Result<(), Error> {
    let (rank, size) = (comm.rank(), comm.size());
    // Backwards, without rank 0, and then that group in halves of odd and even.
    let rest = comm.split((rank > 0).then_some(7), size - rank)?;
    assert_eq!(rest.is_some(), rank > 0);
    if let Some(rest) = rest {
        assert_eq!(rest.members(), (1..size).rev().collect::<Vec<_>>());
        assert_eq!(rest.rank(), size - 1 - rank);
        let half = rest.split(Some(rank % 2), 0)?.expect("a colour was given");
        let expected: Vec<usize> = (1..size).rev().filter(|r| r % 2 == rank % 2).collect();
        assert_eq!(half.members(), expected);
        let total = half.all_reduce(vec![rank as u64], Reduce::Sum)?;
        assert_eq!(total, [expected.iter().sum::<usize>() as u64]);
        // The groups above still work, and are not mixed up with those below.
        assert_eq!(rest.all_reduce(vec![1u64], Reduce::Sum)?, [size as u64 - 1]);
    }
    assert_eq!(comm.all_reduce(vec![1u64], Reduce::Sum)?, [size as u64]);
    Ok(())
}

fn counts(comm: &Communicator) -> Result<(), Error> {
    let (rank, size) = (comm.rank(), comm.size());
    let group = comm.split(Some(0), rank)?.expect("a colour was given");
    let before = comm.sent();
    let n = 101;
    comm.all_reduce(message(ElementType::Bf16, n, |_| 1), Reduce::Sum)?;
    group.all_gather(message(ElementType::F32, n, |_| 1), receive_buffer(ElementType::F32, n * size))?;
    comm.reduce_scatter(
        message(ElementType::F32, n * size, |_| 1),
        receive_buffer(ElementType::F32, n),
        Reduce::Sum,
    )?;
    comm.broadcast(vec![1.0f64; 3], 0)?;
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    for (comm, n) in [(comm, 5), (&group.for_halos(), 6)] {
        let sent = comm.start_send(vec![1u64; n], next, 0)?;
        comm.receive(vec![0u64; n], previous, 0)?;
        sent.wait()?;
    }
    comm.barrier()?;
    let sent = comm.sent() - before;
    let local = chunk(n, size, rank).len();
    let expected = [
        (TrafficKind::AllReduce, 2 * (n - local + local * (size - 1))),
        (TrafficKind::AllGather, 4 * n * (size - 1)),
        (TrafficKind::ReduceScatter, 4 * n * (size - 1)),
        (TrafficKind::Broadcast, if rank == 0 { 24 * (size - 1) } else { 0 }),
        (TrafficKind::PointToPoint, 40),
        (TrafficKind::Halo, 48),
    ];
    for (kind, bytes) in expected {
        assert_eq!(sent.of(kind), bytes as u64, "{kind}");
    }
    assert_eq!(sent.total(), expected.iter().map(|(_, bytes)| *bytes as u64).sum::<u64>());
    assert_eq!(group.sent(), comm.sent());
    Ok(())
}

/// Refused before anything is sent, so that the world still works afterwards.
fn refused(comm: &Communicator) -> Result<(), Error> {
    let (rank, size) = (comm.rank(), comm.size());
    let message_of = |refused: Result<CommBuffer, Error>| match refused {
        Err(error @ Error::Argument { .. }) => error.to_string(),
        other => panic!("not refused: {other:?}"),
    };
    assert_eq!(
        message_of(comm.send(message(ElementType::F32, 4, |_| 1), size, 2)),
        format!("rank {rank} called send (tag 2) of 4 f32: there is no rank {size} in a group of {size}")
    );
    assert_eq!(
        message_of(
            comm.all_gather(
                receive_buffer(ElementType::U32, 3),
                receive_buffer(ElementType::U32, 3 * size + 1)
            )
        ),
        format!(
            "rank {rank} called all_gather of {} u32: {size} ranks with parts of 3 do not make a whole of {}",
            3 * size + 1,
            3 * size + 1
        )
    );
    assert_eq!(
        message_of(comm.reduce_scatter(
            receive_buffer(ElementType::F32, size),
            receive_buffer(ElementType::Bf16, 1),
            Reduce::Sum
        )),
        format!("rank {rank} called reduce_scatter (sum) of {size} f32: the part of a rank is of bf16")
    );
    comm.barrier()
}
