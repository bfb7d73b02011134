//! Chimera (Li & Hoefler, 2021): copies of the model in both directions, so that one pipeline's backwards
//! fill the other one's bubbles.
//!
//! With D stages and 2f pipelines, f run down and f run up: stage j of the i-th down is on worker i D/f + j,
//! and of the i-th up on worker i D/f + D - 1 - j (modulo D). A unit of D micro-batches gives every pipeline
//! D / 2f of them. In slots of one pass each, the k-th of a pipeline in unit u runs forward on stage j at 2D
//! u + j + 2k and backward at 2D u + 2D - 1 - j + 2k. No two of these meet on a worker: down and up differ in
//! parity, the pipelines of one direction are D/f slots apart, and where one unit's forwards or backwards end
//! the next run begins. So units follow each other without a gap, and a list is the passes of a worker in the
//! order of their slots.
//!
//! In slots the bubble is (D - 2f) / (2f N + D - 2f) of the time, which is what one gets where a backward
//! takes as long as a forward and D divides N. Where it takes twice as long, two pipelines wait in the middle
//! of each unit: at N = D the ratio is then (D - 2) / (3N/2 + D - 2).
//!
//! **Forward doubling** (the paper's section 3.5) takes that wait away where N > D: a unit has 2D
//! micro-batches, and a slot is a backward or the forwards of two micro-batches, which take as long. The k-th
//! pair of a pipeline runs forward at 3D u + j + 2k; its backwards, D/f of a pipeline in a unit, go in two
//! waves of the base unit, at 3D u + 2D - 1 - j + 2k and D slots later. Each wave begins where the one before
//! it ends, and so does the next unit, so that again no two meet and nothing is left between. What is left
//! over after whole units is one more, doubled if it has more than D micro-batches, and the base unit
//! otherwise. The paper runs a pair as one batch of twice the size; here its forwards are two actions in a
//! row, so that the next stage begins with the first of them while this one runs the second. The bubble is
//! then (D - 2f) / (2f N + D - 2f) where a backward takes twice as long as a forward and 2D divides N, and D
//! more micro-batches are in flight than without doubling.
//!
//! **Gradients are all-reduced eagerly** (section 3.2): both holders of a virtual stage start its all-reduce
//! as soon as the later of their copies is complete, and go on with their other stage meanwhile. Counted in
//! slots that is one moment for all of them, and every message is sent in an earlier slot than that in which
//! it is needed: so holders reach their all-reduces in one order, and nobody waits in a circle even where an
//! all-reduce blocks and whatever comes behind it waits.

use super::action::PassTask;
use super::assemble::ReducePoint;
use super::{Pass, Placement, Schedule, ScheduleError, ScheduleName, ScheduleOptions};

/// Units of as many micro-batches as there are stages; doubling, of twice as many, their forwards in pairs.
pub(super) fn schedule(name: ScheduleName, options: &ScheduleOptions) -> Result<Schedule, ScheduleError> {
    let &ScheduleOptions { stages, micro_batches, pipelines, .. } = options;
    let pipelines = pipelines.unwrap_or(2);
    let refuse = |expected: &str, got: usize| {
        let (expected, got) = (expected.into(), got.to_string());
        Err(ScheduleError::Options { name: name.as_str(), expected, got })
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
    let form = UnitShape { stages, pipelines, doubles: name == ScheduleName::ChimeraDoubling };
    let unit_slots = form.unit_slots(micro_batches);
    let copies = (0..pipelines).map(|pipeline| ranks(stages, pipelines, pipeline)).collect();
    let routes = unit_slots.iter().map(|unit_slot| unit_slot.pipeline).collect();
    let placement = Placement::new(stages, copies, routes)?;

    let mut slots: Vec<Vec<(ChimeraSlot, PassTask)>> = vec![Vec::new(); stages];
    // Of each virtual stage, when its gradients are complete wherever it is held.
    let mut complete: Vec<ChimeraSlot> = vec![(0, false); stages];
    for (micro_batch, unit_slot) in unit_slots.iter().enumerate() {
        for (stage, &rank) in placement.pipeline(unit_slot.pipeline).iter().enumerate() {
            let chunk = placement.chunks_for(rank, micro_batch).next().expect("every rank has a stage of it");
            let task = |pass| PassTask::new(pass, micro_batch, chunk);
            slots[rank].push((form.forward(unit_slot, stage), task(Pass::Forward)));
            let backward = form.backward(unit_slot, stage);
            slots[rank].push((backward, task(Pass::Backward)));
            complete[stage] = complete[stage].max(backward);
        }
    }
    let in_order = |(rank, mut passes): (usize, Vec<(ChimeraSlot, PassTask)>)| {
        passes.sort_by_key(|&(slot, _)| slot);
        debug_assert!(passes.windows(2).all(|pair| pair[0].0 < pair[1].0), "two passes in one slot");
        let chunks = placement.chunks(rank).iter().enumerate();
        let mut all_reduces: Vec<(ChimeraSlot, usize, usize)> =
            chunks.map(|(chunk, at)| (complete[at.virtual_stage], at.virtual_stage, chunk)).collect();
        all_reduces.sort_unstable();
        let reduced = |(slot, _, chunk): (ChimeraSlot, usize, usize)| ReducePoint {
            behind: passes.partition_point(|pass| pass.0 <= slot),
            chunk,
        };
        let reduced = all_reduces.into_iter().map(reduced).collect();
        (passes.into_iter().map(|(_, task)| task).collect(), reduced)
    };
    let (order, reduced) = slots.into_iter().enumerate().map(in_order).unzip();
    Ok(Schedule::flushed_eagerly(name, options, placement, order, reduced))
}

/// When a pass runs: its slot, and whether it is the second forward of a pair there.
type ChimeraSlot = (usize, bool);

/// Where a micro-batch goes.
struct MicroBatchSlot {
    unit: usize,
    pipeline: usize,
    /// How many of its unit go before it in its pipeline.
    index: usize,
    /// Whether forwards of its unit run in pairs.
    paired: bool,
}

/// What units look like.
#[derive(Clone, Copy)]
struct UnitShape {
    stages: usize,
    pipelines: usize,
    doubles: bool,
}

impl UnitShape {
    /// The slots of all micro-batches. A last unit that is not full is split as evenly as it can be.
    fn unit_slots(self, micro_batches: usize) -> Vec<MicroBatchSlot> {
        let UnitShape { stages, pipelines, doubles } = self;
        let full = if doubles { 2 * stages } else { stages };
        let mut unit_slots = Vec::with_capacity(micro_batches);
        for unit in 0..micro_batches.div_ceil(full) {
            let count = full.min(micro_batches - unit * full);
            for pipeline in 0..pipelines {
                // Down and up in turn get one more, so that both directions stay even.
                let of_pipeline = count / pipelines + usize::from(pipeline < count % pipelines);
                let unit_slot = |index| MicroBatchSlot { unit, pipeline, index, paired: count > stages };
                unit_slots.extend((0..of_pipeline).map(unit_slot));
            }
        }
        unit_slots
    }

    /// The first slot of a unit: its forwards and its one or two waves of backwards take as many slots as
    /// there are stages, each.
    fn begin(self, unit: usize) -> usize {
        (if self.doubles { 3 } else { 2 }) * self.stages * unit
    }

    fn forward(self, unit_slot: &MicroBatchSlot, stage: usize) -> ChimeraSlot {
        let begin = self.begin(unit_slot.unit) + stage;
        match unit_slot.paired {
            true => (begin + 2 * (unit_slot.index / 2), unit_slot.index % 2 == 1),
            false => (begin + 2 * unit_slot.index, false),
        }
    }

    fn backward(self, unit_slot: &MicroBatchSlot, stage: usize) -> ChimeraSlot {
        let each = self.stages / self.pipelines;
        let (wave, index) = (unit_slot.index / each, unit_slot.index % each);
        (self.begin(unit_slot.unit) + (2 + wave) * self.stages - 1 - stage + 2 * index, false)
    }
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
