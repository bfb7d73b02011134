//! The speed of an all-reduce among threads, beside what the memory gives in the same run.
//!
//! An all-reduce in place must read what every rank has and write it again: `2 P n` bytes. The bound is the time in which
//! all cores together do just that to the same buffers, with nothing to add up and nobody to wait for.
//!
//! `cargo bench -p espalier-comm --bench all_reduce -- [MiB]`; `gloo.py` measures the same in PyTorch.

use std::time::{Duration, Instant};

use espalier_comm::{Communicator, Error, Reduce, threads};
use espalier_tensor::{Category, DType, Device, Tensor};

const ROUNDS: usize = 15;

fn main() {
    let mib = std::env::args().filter_map(|a| a.parse().ok()).next().unwrap_or(64);
    println!("all_reduce (sum) of {mib} MiB a rank; the shortest of {ROUNDS} interleaved rounds");
    println!(
        "{:<6} {:>5} {:>9} {:>9} {:>8} {:>9} {:>12}",
        "type", "ranks", "ms", "bound ms", "of it", "GB/s moved", "start+wait ms"
    );
    for dtype in [DType::F32, DType::Bf16] {
        for ranks in [2, 4] {
            row(dtype, ranks, mib << 20);
        }
    }
}

fn row(dtype: DType, ranks: usize, bytes: usize) {
    let (mut call, mut started, mut bound) = (f64::INFINITY, f64::INFINITY, f64::INFINITY);
    let work = |comm: Communicator| -> Result<Vec<[f64; 3]>, Error> {
        let device = Device::cpu(1).expect("a thread");
        let mut data =
            Tensor::zeros(&device, &[bytes / dtype.bytes()], dtype, Category::Gradients).expect("memory");
        let mut times = Vec::new();
        for _ in 0..ROUNDS + 1 {
            let (seconds, it) = timed(&comm, || comm.all_reduce(data, Reduce::Sum))?;
            let (overlapped, it) = timed(&comm, || comm.start_all_reduce(it, Reduce::Sum)?.wait())?;
            data = it;
            let (touched, ()) = timed(&comm, || {
                touch(data.bytes_mut());
                Ok(())
            })?;
            times.push([seconds, overlapped, touched]);
        }
        // The first round faults the pages in.
        Ok(times.split_off(1))
    };
    let times = threads::run(ranks, Duration::from_secs(60), work).unwrap_or_else(|e| panic!("{e}"));
    for round in 0..ROUNDS {
        let slowest = |i: usize| times.iter().map(|rank| rank[round][i]).fold(0.0, f64::max);
        call = call.min(slowest(0));
        started = started.min(slowest(1));
        bound = bound.min(slowest(2));
    }
    let moved = (2 * ranks * bytes) as f64 / call / 1e9;
    println!(
        "{:<6} {ranks:>5} {:>9.2} {:>9.2} {:>8.2} {moved:>9.1} {:>12.2}",
        format!("{dtype:?}").to_lowercase(),
        call * 1e3,
        bound * 1e3,
        bound / call,
        started * 1e3
    );
}

/// Seconds from when all ranks are ready until this one is done.
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
