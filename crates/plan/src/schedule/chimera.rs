//! Chimera (Li & Hoefler, 2021): copies of the model in both directions, so that one pipeline's backwards fill the other
//! one's bubbles.
//!
//! With D stages and 2f pipelines, f run down and f run up: stage j of the i-th down is on worker i D/f + j, and of the
//! i-th up on worker i D/f + D - 1 - j (modulo D). A unit of D micro-batches gives every pipeline D / 2f of them. In
//! slots of one pass each, the k-th of a pipeline in unit u runs forward on stage j at 2D u + j + 2k and backward at
//! 2D u + 2D - 1 - j + 2k. No two of these meet on a worker: down and up differ in parity, the pipelines of one
//! direction are D/f slots apart, and where one unit's forwards or backwards end the next run begins. So units follow
//! each other without a gap, and a list is the passes of a worker in the order of their slots.
//!
//! In slots the bubble is (D - 2f) / (2f N + D - 2f) of the time, which is what one gets where a backward takes as long
//! as a forward and D divides N. Where it takes twice as long, two pipelines wait in the middle of each unit: at
//! N = D the ratio is then (D - 2) / (3N/2 + D - 2).

use super::action::Task;
use super::{Error, Name, Options, Pass, Placement, Schedule};

pub(super) fn schedule(options: &Options) -> Result<Schedule, Error> {
    let &Options { stages, micro_batches, pipelines, .. } = options;
    let pipelines = pipelines.unwrap_or(2);
    let refuse = |expected: &str, got: usize| {
        let (expected, got) = (expected.into(), got.to_string());
        Err(Error::Options { name: Name::Chimera.as_str(), expected, got })
    };
    if stages % 2 == 1 {
        return refuse("an even number of stages", stages);
    }
    if pipelines == 0 || pipelines % 2 == 1 {
        return refuse("an even number of pipelines, as many down as up", pipelines);
    }
    if !stages.is_multiple_of(pipelines) {
        return refuse(&format!("a number of pipelines that divides the {stages} stages"), pipelines);
    }
    let places = places(stages, pipelines, micro_batches);
    let copies = (0..pipelines).map(|pipeline| ranks(stages, pipelines, pipeline)).collect();
    let routes = places.iter().map(|place| place.pipeline).collect();
    let placement = Placement::new(stages, copies, routes)?;

    let mut slots: Vec<Vec<(usize, Task)>> = vec![Vec::new(); stages];
    for (micro_batch, place) in places.iter().enumerate() {
        for (stage, &rank) in placement.pipeline(place.pipeline).iter().enumerate() {
            let begin = 2 * stages * place.unit + 2 * place.turn;
            let chunk = placement.chunks_for(rank, micro_batch).next().expect("every rank has a stage of it");
            slots[rank].push((begin + stage, Task::new(Pass::Forward, micro_batch, chunk)));
            slots[rank].push((begin + 2 * stages - 1 - stage, Task::new(Pass::Backward, micro_batch, chunk)));
        }
    }
    let in_order = |mut passes: Vec<(usize, Task)>| {
        passes.sort_by_key(|&(slot, _)| slot);
        debug_assert!(passes.windows(2).all(|pair| pair[0].0 < pair[1].0), "two passes in one slot");
        passes.into_iter().map(|(_, task)| task).collect()
    };
    Ok(Schedule::flushed(Name::Chimera, options, placement, slots.into_iter().map(in_order).collect()))
}

/// Where a micro-batch goes.
struct Place {
    unit: usize,
    pipeline: usize,
    /// How many of its unit go before it in its pipeline.
    turn: usize,
}

/// The places of all micro-batches. A last unit of fewer than `stages` is shared out as evenly as it can be.
fn places(stages: usize, pipelines: usize, micro_batches: usize) -> Vec<Place> {
    let mut places = Vec::with_capacity(micro_batches);
    for unit in 0..micro_batches.div_ceil(stages) {
        let count = stages.min(micro_batches - unit * stages);
        for pipeline in 0..pipelines {
            // Down and up in turn get one more, so that both directions stay even.
            let share = count / pipelines + usize::from(pipeline < count % pipelines);
            places.extend((0..share).map(|turn| Place { unit, pipeline, turn }));
        }
    }
    places
}

/// The rank of every stage of a pipeline: even ones run down, odd ones up.
fn ranks(stages: usize, pipelines: usize, pipeline: usize) -> Vec<usize> {
    let first = pipeline / 2 * (stages / (pipelines / 2));
    let rank = |stage| match pipeline % 2 {
        0 => first + stage,
        _ => first + stages - 1 - stage,
    };
    (0..stages).map(|stage| rank(stage) % stages).collect()
}
