//! The figures of a schedule in ideal time, as a person or a program asks for them.
//!
//! A schedule with a flush is what one batch of it is. One without goes on for as long as the run does, so
//! its figures are those of a pipeline that is full: they are taken from longer lists, as what one more batch
//! adds. What it costs to fill and drain the pipeline, once in a run, stands beside them.

use serde::Serialize;

use super::{
    PassUnits, Schedule, ScheduleError, ScheduleName, ScheduleOptions, Timeline, UnitCosts, Updates,
};

/// What `espalier schedule --json` prints.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScheduleReport {
    pub name: String,
    /// Ranks of the pipeline.
    pub stages: usize,
    /// Micro-batches of a batch.
    pub micro_batches: usize,
    /// Batches in the lists.
    pub batches: usize,
    /// Idle time over all time, all ranks together.
    pub bubble_ratio: f64,
    /// Most forwards at a time whose gradient is still to come, per rank.
    pub in_flight: Vec<usize>,
    /// Most forwards at a time whose activations must be kept, per rank.
    pub held: Vec<usize>,
    /// Most versions of the weights at a time, per rank.
    pub weight_versions: Vec<usize>,
    /// Copies of the model.
    pub copies: usize,
    /// Idle units of the batches, per rank.
    pub idle: Vec<f64>,
    /// Units that the batches take.
    pub time: f64,
    /// Idle units to fill and drain a pipeline that has no flush, per rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fill_and_drain: Option<Vec<f64>>,
    /// Whether ranks may take whatever message has arrived.
    pub message_driven: bool,
    /// The order in which every rank computes.
    pub actions: Vec<String>,
}

impl ScheduleReport {
    /// The figures of a built-in schedule, with its lists and their timeline.
    pub fn of(
        name: ScheduleName,
        options: &ScheduleOptions,
    ) -> Result<(Schedule, Timeline, ScheduleReport), ScheduleError> {
        let schedule = name.schedule(options)?;
        let (timeline, mut report) = ScheduleReport::new(&schedule, options.units)?;
        if schedule.updates != Updates::Flush {
            report.make_steady(name, options)?;
        }
        Ok((schedule, timeline, report))
    }

    /// The figures of lists as they are, and their timeline.
    pub fn new(schedule: &Schedule, units: PassUnits) -> Result<(Timeline, ScheduleReport), ScheduleError> {
        units.check()?;
        let timeline = Timeline::walk(schedule, &UnitCosts::new(schedule, units))?;
        let report = ScheduleReport {
            name: schedule.name.clone(),
            stages: schedule.stages(),
            micro_batches: schedule.micro_batches,
            batches: schedule.batches,
            bubble_ratio: rounded(timeline.bubble_ratio()),
            in_flight: timeline.in_flight.clone(),
            held: timeline.held.clone(),
            weight_versions: timeline.weight_versions.clone(),
            copies: schedule.placement.copies(),
            idle: timeline.idle.iter().copied().map(rounded).collect(),
            time: rounded(timeline.end),
            fill_and_drain: None,
            message_driven: schedule.message_driven,
            actions: (0..schedule.stages()).map(|rank| schedule.order(rank)).collect(),
        };
        Ok((timeline, report))
    }

    /// Replaces the figures of a short list by those of a full pipeline.
    fn make_steady(&mut self, name: ScheduleName, options: &ScheduleOptions) -> Result<(), ScheduleError> {
        // Past p micro-batches a batch changes nothing but how rarely weights do, and shorter lists say the same.
        let micro_batches = options.micro_batches.min(options.stages);
        let enough = (4 * options.stages).div_ceil(micro_batches) + 4;
        let walk = |batches| {
            let schedule = name.schedule(&ScheduleOptions { micro_batches, batches, ..*options })?;
            Timeline::walk(&schedule, &UnitCosts::new(&schedule, options.units))
        };
        let (shorter, longer) = (walk(enough)?, walk(2 * enough)?);
        let one_batch = options.micro_batches as f64 / (enough * micro_batches) as f64;
        let batches = options.batches as f64 * one_batch;
        let added: Vec<f64> = shorter.idle.iter().zip(&longer.idle).map(|(less, more)| more - less).collect();
        let time = longer.end - shorter.end;
        self.bubble_ratio = rounded(added.iter().sum::<f64>() / (time * added.len() as f64));
        // The shorter lists fill and drain once, and are as long beside that as what was added.
        let once = shorter.idle.iter().zip(&added).map(|(all, steady)| rounded(all - steady));
        self.fill_and_drain = Some(once.collect());
        self.idle = added.iter().map(|idle| rounded(idle * batches)).collect();
        self.time = rounded(time * batches);
        self.in_flight = longer.in_flight;
        self.held = longer.held;
        self.weight_versions = longer.weight_versions;
        Ok(())
    }
}

/// Without the dust of adding thirds.
fn rounded(value: f64) -> f64 {
    (value * 1e9).round() / 1e9
}
