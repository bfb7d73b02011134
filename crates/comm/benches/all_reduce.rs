//! The speed of an all-reduce among threads, beside what the memory gives in the same run.
//!
//! An all-reduce in place must read what every rank has and write it again: `2 P n` bytes. The bound is the
//! time in which the ranks do just that, each to its own buffer, with nothing to add up and nobody to wait
//! for. Small calls are all waiting: their time is that of waking threads.
//!
//! `cargo bench -p espalier-comm --bench all_reduce -- [MiB]`; `gloo.py` measures the same in PyTorch.

use std::time::{Duration, Instant};

use espalier_comm::{Communicator, Error, Reduce, threads};
use espalier_tensor::{Category, DType, Device, Tensor};

const ROUNDS: usize = 15;
const SMALL: usize = 256;
const REPEAT: usize = 100;

fn main() {
    let mib = std::env::args().filter_map(|a| a.parse().ok()).next().unwrap_or(64);
    println!("threads: all_reduce (sum) of {mib} MiB and of {SMALL} elements a rank");
    println!(
        "medians of {ROUNDS} interleaved rounds, each of which takes as long as its slowest rank; in brackets the shortest"
    );
    println!(
        "{:<6} {:>5} {:>18} {:>18} {:>9} {:>11} {:>18} {:>11}",
        "type", "ranks", "ms", "bound ms", "of bound", "GB/s moved", "start+wait ms", "us for 256"
    );
    for dtype in [DType::F32, DType::Bf16] {
        for ranks in [2, 4] {
            row(dtype, ranks, mib << 20);
        }
    }
}

fn row(dtype: DType, ranks: usize, bytes: usize) {
    let work = |comm: Communicator| -> Result<Vec<[f64; 4]>, Error> {
        let device = Device::cpu(1).expect("a thread");
        let zeros = |n: usize| Tensor::zeros(&device, &[n], dtype, Category::Gradients).expect("memory");
        let (mut data, mut few) = (zeros(bytes / dtype.bytes()), zeros(SMALL));
        let mut times = Vec::new();
        for _ in 0..ROUNDS + 1 {
            let (call, it) = timed(&comm, || comm.all_reduce(data, Reduce::Sum))?;
            let (started, mut it) = timed(&comm, || comm.start_all_reduce(it, Reduce::Sum)?.wait())?;
            let (touched, ()) = timed(&comm, || {
                touch(it.bytes_mut());
                Ok(())
            })?;
            data = it;
            let (small, it) =
                timed(&comm, || (0..REPEAT).try_fold(few, |few, _| comm.all_reduce(few, Reduce::Sum)))?;
            few = it;
            times.push([call, started, touched, small / REPEAT as f64]);
        }
        // The first round faults the pages in.
        Ok(times.split_off(1))
    };
    let times = threads::run(ranks, Duration::from_secs(60), work).unwrap_or_else(|e| panic!("{e}"));
    let slowest = |round: usize, i: usize| times.iter().map(|rank| rank[round][i]).fold(0.0, f64::max);
    let of = |i: usize| (0..ROUNDS).map(|round| slowest(round, i)).collect::<Vec<_>>();
    let [call, started, bound, small] = std::array::from_fn(of);
    // Of the same round: what else the machine did then was done to both.
    let ratio = median(&call.iter().zip(&bound).map(|(call, bound)| bound / call).collect::<Vec<_>>());
    let both = |times: &[f64]| {
        let shortest = times.iter().copied().fold(f64::INFINITY, f64::min);
        format!("{:.2} ({:.2})", median(times) * 1e3, shortest * 1e3)
    };
    println!(
        "{:<6} {ranks:>5} {:>18} {:>18} {ratio:>9.2} {:>11.1} {:>18} {:>11.1}",
        format!("{dtype:?}").to_lowercase(),
        both(&call),
        both(&bound),
        (2 * ranks * bytes) as f64 / median(&call) / 1e9,
        both(&started),
        median(&small) * 1e6,
    );
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Seconds from when all ranks are ready until all are done.
fn timed<R>(comm: &Communicator, work: impl FnOnce() -> Result<R, Error>) -> Result<(f64, R), Error> {
    comm.barrier()?;
    let start = Instant::now();
    let result = work()?;
    comm.barrier()?;
    Ok((start.elapsed().as_secs_f64(), result))
}

/// Reads all bytes and writes them again, changed.
fn touch(bytes: &mut [u8]) {
    espalier_tensor::simd! {
        fn invert(words: &mut [u64]) {
            for word in words {
                *word = !*word;
            }
        }
    }
    invert(espalier_tensor::cpu::Isa::best(), bytemuck::cast_slice_mut(bytes));
}
