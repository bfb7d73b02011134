//! All schedules, over stages 1 to 8 and micro-batches 1 to 24, fewer micro-batches than stages included.

mod files;
mod formulas;
mod pictures;
mod validity;

use super::*;

/// Every stage and micro-batch count that is tried. In the short form only 16 and 24 stand for the many
/// micro-batches, which eight stages divide, and 13 for those that nothing divides.
fn grid() -> impl Iterator<Item = (usize, usize)> {
    let is_tried = |n: &usize| *n <= 13 || n.is_multiple_of(8) || espalier_testing::long();
    (1..=8)
        .flat_map(move |stages| (1..=24).filter(is_tried).map(move |micro_batches| (stages, micro_batches)))
}

/// Every choice of the options that a schedule has.
fn choices(name: ScheduleName, stages: usize, micro_batches: usize) -> Vec<ScheduleOptions> {
    let plain = ScheduleOptions::new(stages, micro_batches);
    match name {
        ScheduleName::Interleaved if !micro_batches.is_multiple_of(stages) => vec![],
        ScheduleName::Interleaved => {
            (2..=4).map(|chunks| ScheduleOptions { chunks: Some(chunks), ..plain }).collect()
        }
        ScheduleName::Chimera | ScheduleName::ChimeraDoubling => (2..=stages)
            .step_by(2)
            .filter(|pipelines| stages.is_multiple_of(2) && stages.is_multiple_of(*pipelines))
            .map(|pipelines| ScheduleOptions { pipelines: Some(pipelines), ..plain })
            .collect(),
        _ => vec![plain],
    }
}

/// All of it.
fn everything() -> impl Iterator<Item = (ScheduleName, ScheduleOptions)> {
    let all = grid().flat_map(|(p, m)| ScheduleName::ALL.map(|name| (name, p, m)));
    all.flat_map(|(name, p, m)| choices(name, p, m).into_iter().map(move |options| (name, options)))
}

fn walk(schedule: &Schedule, forward: f64, backward: f64) -> Timeline {
    Timeline::walk(schedule, &UnitCosts::new(schedule, PassUnits { forward, backward })).unwrap()
}

/// What each action of a rank takes; messages travel at once.
struct ActionCosts<F>(F);

impl<F: Fn(usize, &Action) -> f64> Costs for ActionCosts<F> {
    fn busy(&self, rank: usize, action: &Action) -> f64 {
        (self.0)(rank, action)
    }
}
