//! The bubble of every schedule, measured from the executor's own timeline beside the one that the schedule has in ideal
//! time: `cargo bench -p espalier-train --bench bubble`.
//!
//! Ranks are threads. At 2 stages they compute: a forward is a matrix product, a backward two. At 4 and 8 stages, more than
//! this machine may have cores, they sleep for as long. Medians over rounds, in which the schedules take turns, and the
//! least disturbed round.

use std::time::{Duration, Instant};

use espalier_comm::Communicator;
use espalier_comm::threads;
use espalier_plan::schedule::{Message, Name, Options, Schedule, Timeline, UnitCosts, Units, Work};
use espalier_tensor::ops::matmul::matmul;
use espalier_tensor::{Category, DType, Device, Tensor};
use espalier_train::step::{Executor, Kind, Span, Trace, Worker};
use espalier_train::{Error, Result};

const SIDE: usize = 768;
const NAP: Duration = Duration::from_millis(6);
const ROUNDS: usize = 7;

/// What a pass is made of.
enum Effort {
    /// Products of this square.
    Product(Tensor),
    Sleep,
}

struct Paced {
    effort: Effort,
    device: Device,
}

impl Paced {
    /// So many units of work.
    fn work(&self, units: usize) -> Result<()> {
        match &self.effort {
            Effort::Product(square) => {
                for _ in 0..units {
                    matmul(square, false, square, false, None, Category::Workspace)?;
                }
            }
            Effort::Sleep => std::thread::sleep(NAP * units as u32),
        }
        Ok(())
    }

    fn message(&self) -> Result<Tensor> {
        Ok(Tensor::zeros(&self.device, &[64], DType::F32, Category::Activations)?)
    }
}

impl Worker for Paced {
    fn forward(&mut self, _: Work, _: Option<Tensor>) -> Result<Option<Tensor>> {
        self.work(1)?;
        self.message().map(Some)
    }

    fn backward(&mut self, _: Work, _: Option<Tensor>, whole: bool) -> Result<Option<Tensor>> {
        self.work(if whole { 2 } else { 1 })?;
        self.message().map(Some)
    }

    fn backward_weight(&mut self, _: Work) -> Result<()> {
        self.work(1)
    }

    fn room(&mut self, _: &Message) -> Result<Tensor> {
        self.message()
    }

    fn all_reduce(&mut self, _: usize) -> Result<()> {
        Ok(())
    }

    fn step(&mut self) -> Result<()> {
        Ok(())
    }

    fn stash(&mut self, _: usize) -> Result<()> {
        Ok(())
    }

    fn forget(&mut self, _: usize) {}
}

/// The share of all ranks' time, from the first pass to the last, in which they compute nothing.
fn bubble(ranks: &[Vec<Span>]) -> f64 {
    let passes = || ranks.iter().flatten().filter(|span| matches!(span.kind, Kind::Compute { .. }));
    let busy: f64 = passes().map(|span| span.end - span.start).sum();
    let first = passes().map(|span| span.start).fold(f64::INFINITY, f64::min);
    let last = passes().map(|span| span.end).fold(0.0, f64::max);
    1.0 - busy / (ranks.len() as f64 * (last - first))
}

fn measured(schedule: &Schedule, sleeps: bool) -> f64 {
    let origin = Instant::now();
    let run = |world: Communicator| -> Result<Vec<Span>> {
        let device = Device::cpu(1)?;
        device.enter(|| {
            let effort = match sleeps {
                true => Effort::Sleep,
                false => {
                    Effort::Product(Tensor::zeros(&device, &[SIDE, SIDE], DType::F32, Category::Workspace)?)
                }
            };
            let mut worker = Paced { effort, device: device.clone() };
            worker.work(1)?;
            world.barrier()?;
            let mut executor = Executor::new(schedule.clone(), Some(world));
            executor.trace = Some(Trace::since(origin));
            executor.run(1, &mut worker)?;
            Ok(executor.trace.take().expect("it was set").spans)
        })
    };
    let ranks = threads::run(schedule.stages(), Duration::from_secs(60), run).map_err(Error::from);
    bubble(&ranks.expect("all ranks end well"))
}

fn main() {
    println!(
        "{:<12} {:>6} {:>13} {:>8} {:>9} {:>9} {:>9}",
        "schedule", "stages", "micro-batches", "work", "ideal", "median", "least"
    );
    for (stages, micro_batches) in [(2, 4), (2, 8), (4, 4), (4, 8), (8, 8), (8, 16)] {
        let names = [Name::Gpipe, Name::OneFOneB, Name::Chimera, Name::ZbH1, Name::Interleaved, Name::Axonn];
        let schedules: Vec<Schedule> = names
            .iter()
            .map(|name| name.schedule(&Options::new(stages, micro_batches)).expect("it fits"))
            .collect();
        let sleeps = stages > 2;
        let mut rounds = vec![Vec::new(); schedules.len()];
        for _ in 0..ROUNDS {
            for (schedule, of) in schedules.iter().zip(&mut rounds) {
                of.push(measured(schedule, sleeps));
            }
        }
        for (schedule, of) in schedules.iter().zip(&mut rounds) {
            let costs = UnitCosts::new(schedule, Units::default());
            let timeline = Timeline::walk(schedule, &costs).expect("a schedule of ours");
            let ideal = timeline.idle.iter().sum::<f64>() / (stages as f64 * timeline.end);
            of.sort_by(f64::total_cmp);
            let work = if sleeps { "sleep" } else { "products" };
            println!(
                "{:<12} {stages:>6} {micro_batches:>13} {work:>8} {:>8.1}% {:>8.1}% {:>8.1}%",
                schedule.name,
                100.0 * ideal,
                100.0 * of[of.len() / 2],
                100.0 * of[0]
            );
        }
    }
}
