//! An all-reduce through MPI beside a bare call of `MPI_Allreduce` on the same data.
//!
//! The program starts itself under `mpirun`, in turn as a rank of ours and as one that only calls MPI. A
//! launch gives the median of its rounds; the ratio is the median over pairs of launches. Ours reduces by
//! itself, in the order of ranks, from another thread, with a limit to every wait. Where others use the
//! machine too, the least disturbed round of all says more: those are the last columns.
//!
//! `cargo bench -p espalier-comm --features mpi --bench mpi -- [MiB]`; `ESPALIER_MPIRUN` names the launcher.

use std::process::Command;
use std::time::{Duration, Instant};

use espalier_comm::{Communicator, Error, Reduce, mpi};
use espalier_tensor::{Category, Device, Tensor};

const ROUNDS: usize = 8;
const LAUNCHES: usize = 5;
/// Says which kind of rank to be, in the processes that `mpirun` starts.
const RANK: &str = "ESPALIER_BENCH_RANK";

fn main() {
    let sizes: Vec<usize> = {
        let mib = std::env::args().filter_map(|a| a.parse().ok()).next().unwrap_or(64);
        vec![1 << 10, 1 << 20, mib << 20]
    };
    match std::env::var(RANK).as_deref() {
        Ok("ours") => return ours(&sizes),
        Ok(_) => return bare(&sizes),
        Err(_) => {}
    }
    println!("{}", mpi::library().lines().next().unwrap_or_default());
    println!("all_reduce (sum) of f32, medians of {LAUNCHES} x {ROUNDS} rounds");
    println!(
        "{:>5} {:>12} {:>10} {:>10} {:>10} {:>14} {:>10} {:>10}",
        "ranks", "bytes", "bare ms", "ours ms", "of bare", "least: bare ms", "ours ms", "of bare"
    );
    for ranks in [2, 4] {
        let pairs: Vec<_> = (0..LAUNCHES).map(|_| (launch(ranks, "bare"), launch(ranks, "ours"))).collect();
        for (i, bytes) in sizes.iter().enumerate() {
            let least = |times: &mut dyn Iterator<Item = Times>| {
                times.map(|times| times.least).fold(f64::INFINITY, f64::min)
            };
            let (bare, ours) =
                (|| pairs.iter().map(|(bare, _)| bare[i]), || pairs.iter().map(|(_, ours)| ours[i]));
            let (least_bare, least_ours) = (least(&mut bare()), least(&mut ours()));
            println!(
                "{ranks:>5} {bytes:>12} {:>10.4} {:>10.4} {:>10.2} {:>14.4} {:>10.4} {:>10.2}",
                median(bare().map(|bare| bare.usual * 1e3).collect()),
                median(ours().map(|ours| ours.usual * 1e3).collect()),
                median(bare().zip(ours()).map(|(bare, ours)| ours.usual / bare.usual).collect()),
                least_bare * 1e3,
                least_ours * 1e3,
                least_ours / least_bare,
            );
        }
    }
}

/// What a call takes, in seconds: in the median round, and in the least disturbed.
#[derive(Debug, Clone, Copy)]
struct Times {
    usual: f64,
    least: f64,
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Runs ranks of one kind; returns the times that rank 0 printed.
fn launch(ranks: usize, kind: &str) -> Vec<Times> {
    let own = if mpi::library().contains("Open MPI") { "mpirun.openmpi" } else { "mpirun.mpich" };
    let named = std::env::var("ESPALIER_MPIRUN").unwrap_or_else(|_| own.to_owned());
    let start = |mpirun: &str| {
        let mut command = Command::new(mpirun);
        command.args(["-n", &ranks.to_string()]).arg(std::env::current_exe().expect("this program"));
        command.args(std::env::args().skip(1)).env(RANK, kind);
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        command.env("OMPI_MCA_rmaps_base_oversubscribe", "1").output()
    };
    let output = start(&named).or_else(|_| start("mpirun")).expect("a launcher of MPI");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let times: Vec<f64> = text.split_whitespace().map(|time| time.parse().expect("a time")).collect();
    times.as_chunks().0.iter().map(|&[usual, least]| Times { usual, least }).collect()
}

/// What `call` takes all ranks.
fn measure(bytes: usize, barrier: impl Fn(), mut call: impl FnMut()) -> Times {
    let repeat = if bytes <= 1 << 20 { 50 } else { 1 };
    let round = || {
        barrier();
        let start = Instant::now();
        (0..repeat).for_each(|_| call());
        barrier();
        start.elapsed().as_secs_f64() / f64::from(repeat)
    };
    // The first round faults the pages in.
    let rounds: Vec<f64> = std::iter::repeat_with(round).take(ROUNDS + 1).skip(1).collect();
    Times { least: rounds.iter().copied().fold(f64::INFINITY, f64::min), usual: median(rounds) }
}

fn ours(sizes: &[usize]) {
    let work = |comm: Communicator| -> Result<(), Error> {
        let device = Device::cpu(1).expect("a thread");
        for &bytes in sizes {
            let zeros = vec![0f32; bytes / 4];
            let data =
                Tensor::from_slice(&device, &[zeros.len()], &zeros, Category::Gradients).expect("memory");
            let mut data = Some(data);
            let barrier = || comm.barrier().expect("all are here");
            let times = measure(bytes, barrier, || {
                data = Some(
                    comm.all_reduce(data.take().expect("given back"), Reduce::Sum).expect("all are here"),
                );
            });
            if comm.rank() == 0 {
                println!("{} {}", times.usual, times.least);
            }
        }
        Ok(())
    };
    mpi::run(Duration::from_secs(120), work).unwrap_or_else(|e| panic!("{e}"));
}

fn bare(sizes: &[usize]) {
    let mpi = ferrompi::Mpi::init().expect("MPI");
    let world = mpi.world();
    for &bytes in sizes {
        let mut data = vec![0f32; bytes / 4];
        let barrier = || world.barrier().expect("all are here");
        let times = measure(bytes, barrier, || {
            world.allreduce_inplace(&mut data, ferrompi::ReduceOp::Sum).expect("all are here");
        });
        if world.rank() == 0 {
            println!("{} {}", times.usual, times.least);
        }
    }
}
