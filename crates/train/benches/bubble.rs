//! The bubble of every schedule, measured from the executor's own timeline beside the one that the schedule
//! has in ideal time: `cargo bench -p espalier-train --bench bubble`.
//!
//! Ranks are threads. Where there are as many cores they compute: a forward is a matrix product, a backward
//! two. At 4 and 8 stages they also sleep for as long. Schedules take turns.
//!
//! Cores that others share run at half their speed for a while and at full speed again, and a pipeline waits
//! for its slowest stage; so beside the median stands the steadiest round, the one whose passes took most
//! nearly the same time for the same work, and the spread of that time. It is chosen by the spread alone, not
//! by its bubble.

mod paced;

use std::time::{Duration, Instant};

use espalier_comm::Communicator;
use espalier_comm::threads;
use espalier_plan::schedule::{
    Pass, PassUnits, Schedule, ScheduleName, ScheduleOptions, Timeline, UnitCosts,
};
use espalier_tensor::{Category, DType, Device, Tensor};
use espalier_train::step::{Executor, Trace, TraceKind, TraceSpan};
use espalier_train::{Error, Result};

use paced::{Effort, Paced, PassStep, Passes};

const SIDE: usize = 1024;
const NAP: Duration = Duration::from_millis(6);
/// Fewest and most rounds: they go on until every schedule has had a steady one.
const ROUNDS: (usize, usize) = (5, 60);
/// The spread of a steady round.
const STEADY: f64 = 0.01;

/// A pass of a chunk takes a unit forward, and one for each half of its backward; its messages are short.
fn passes() -> Passes {
    let unit = || vec![PassStep::Take(1.0)];
    Passes {
        forward: unit(),
        backward_input: unit(),
        backward_weight: unit(),
        borders: [64; 2],
        // No all-reduces of gradients are waited for, so it does not matter which backward is the last.
        backwards: usize::MAX,
    }
}

/// What one round showed.
#[derive(Clone, Copy)]
struct Round {
    /// The fraction of all ranks' time, from the first pass to the last, in which they compute nothing.
    bubble: f64,
    /// The standard deviation of a unit's time as a fraction of its mean, over all passes.
    spread: f64,
}

impl Round {
    fn of(ranks: &[Vec<TraceSpan>]) -> Round {
        let pass = |span: &TraceSpan| match span.kind {
            TraceKind::Compute { pass, .. } => {
                Some((span.start, span.end, if pass == Pass::Backward { 2.0 } else { 1.0 }))
            }
            _ => None,
        };
        let passes: Vec<(f64, f64, f64)> = ranks.iter().flatten().filter_map(pass).collect();
        let busy: f64 = passes.iter().map(|(start, end, _)| end - start).sum();
        let first = passes.iter().map(|(start, ..)| *start).fold(f64::INFINITY, f64::min);
        let last = passes.iter().map(|(_, end, _)| *end).fold(0.0, f64::max);
        let units: Vec<f64> = passes.iter().map(|(start, end, units)| (end - start) / units).collect();
        let mean = units.iter().sum::<f64>() / units.len() as f64;
        let variance = units.iter().map(|unit| (unit - mean).powi(2)).sum::<f64>() / units.len() as f64;
        Round { bubble: 1.0 - busy / (ranks.len() as f64 * (last - first)), spread: variance.sqrt() / mean }
    }
}

fn measured(schedule: &Schedule, sleeps: bool) -> Round {
    let origin = Instant::now();
    let run = |world: Communicator| -> Result<Vec<TraceSpan>> {
        let device = Device::cpu(1)?;
        device.enter(|| {
            let mut effort = match sleeps {
                true => Effort::sleep(NAP),
                false => {
                    Effort::Product(Tensor::zeros(&device, &[SIDE, SIDE], DType::F32, Category::Workspace)?)
                }
            };
            effort.take(1.0)?;
            let chunks = schedule.placement.chunks(world.rank()).len();
            let mut worker = Paced::new(effort, device.clone(), vec![passes(); chunks]);
            world.barrier()?;
            let mut executor = Executor::new(schedule.clone(), world);
            executor.trace = Some(Trace::since(origin));
            executor.run(1, &mut worker)?;
            Ok(executor.trace.take().expect("it was set").spans)
        })
    };
    let ranks = threads::run(schedule.stages(), Duration::from_secs(60), run).map_err(Error::from);
    Round::of(&ranks.expect("all ranks end well"))
}

fn main() {
    println!(
        "{:<12} {:>6} {:>13} {:>8} {:>9} {:>9} {:>9} {:>9}",
        "schedule", "stages", "micro-batches", "work", "ideal", "median", "steadiest", "spread"
    );
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for (stages, micro_batches) in [(2, 4), (2, 8), (4, 4), (4, 8), (8, 8), (8, 16)] {
        for sleeps in [false, true] {
            let worth = if sleeps { stages > 2 } else { stages <= cores };
            if worth {
                compare(stages, micro_batches, sleeps);
            }
        }
    }
}

/// Measures every schedule of a shape, and prints a line for each.
fn compare(stages: usize, micro_batches: usize, sleeps: bool) {
    let names = [
        ScheduleName::Gpipe,
        ScheduleName::OneFOneB,
        ScheduleName::Chimera,
        ScheduleName::ChimeraDoubling,
        ScheduleName::ZbH1,
        ScheduleName::Interleaved,
        ScheduleName::Axonn,
    ];
    let schedule =
        |name: &ScheduleName| name.schedule(&ScheduleOptions::new(stages, micro_batches)).expect("it fits");
    let schedules: Vec<Schedule> = names.iter().map(schedule).collect();
    let mut rounds = vec![Vec::new(); schedules.len()];
    for round in 0..ROUNDS.1 {
        let steady = |of: &Vec<Round>| of.iter().any(|round| round.spread < STEADY);
        if round >= ROUNDS.0 && rounds.iter().all(steady) {
            break;
        }
        for (schedule, of) in schedules.iter().zip(&mut rounds) {
            of.push(measured(schedule, sleeps));
        }
    }
    for (schedule, mut of) in schedules.iter().zip(rounds) {
        let costs = UnitCosts::new(schedule, PassUnits::default());
        let timeline = Timeline::walk(schedule, &costs).expect("a schedule of ours");
        let ideal = timeline.idle.iter().sum::<f64>() / (stages as f64 * timeline.end);
        of.sort_by(|a: &Round, b: &Round| a.bubble.total_cmp(&b.bubble));
        let median = of[of.len() / 2];
        let steadiest = of.iter().min_by(|a, b| a.spread.total_cmp(&b.spread)).expect("a round");
        let work = if sleeps { "sleep" } else { "products" };
        println!(
            "{:<12} {stages:>6} {micro_batches:>13} {work:>8} {:>8.1}% {:>8.1}% {:>8.1}% {:>8.1}%",
            schedule.name,
            100.0 * ideal,
            100.0 * median.bubble,
            100.0 * steadiest.bubble,
            100.0 * steadiest.spread
        );
    }
}
