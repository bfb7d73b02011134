//! The lists in virtual time: when each action starts and ends, and what follows from it.
//!
//! A rank does its actions one after another. A send ends at once for the sender unless [`Costs`] says
//! otherwise, and its message arrives after its journey; a receive ends when the message is there; an
//! all-reduce begins when all holders of the virtual stage have arrived. One that passes follow is left to
//! itself, but for the fraction of it that keeps its rank from computing: only the step waits for it, and one
//! rank's go on one after the other. Waiting is idle time, whatever an action takes is not.

use super::walk::{AllReduceRound, AllReduces, walk};
use super::{Action, ControlMessage, Pass, PassUnits, Schedule, ScheduleError, StageMessage};

/// What actions cost, in any unit of time.
pub trait Costs {
    /// How long an action keeps its rank busy, waiting excluded.
    fn busy(&self, rank: usize, action: &Action) -> f64;

    /// The fraction of an all-reduce in flight that keeps its rank from computing.
    fn occupies(&self) -> f64 {
        0.0
    }

    /// How long a message travels after its send has ended.
    fn journey(&self, _from: usize, _send: &Action) -> f64 {
        0.0
    }
}

/// The ideal: computing takes the given units, everything else takes no time.
#[derive(Debug, Clone, Copy)]
pub struct UnitCosts {
    forward: f64,
    backward: f64,
}

/// An action in time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ActionSpan {
    /// The action that took the time.
    pub action: Action,
    /// When its rank came to it.
    pub start: f64,
    /// When its rank went on.
    pub end: f64,
    /// How long it kept its rank busy, up to the end.
    pub busy: f64,
}

/// All lists in time.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    /// `[rank][action]`
    pub spans: Vec<Vec<ActionSpan>>,
    /// When the last rank has finished.
    pub end: f64,
    /// Of each rank, until the end.
    pub idle: Vec<f64>,
    /// Of each rank, the most forwards of a micro-batch through a chunk at a time whose gradient was still to
    /// come.
    pub in_flight: Vec<usize>,
    /// The same, counted until the gradients of the weights are made: what has to be kept in memory. It
    /// differs where backwards are split in two.
    pub held: Vec<usize>,
    /// Of each rank, the most versions of its weights at a time.
    pub weight_versions: Vec<usize>,
}

impl UnitCosts {
    /// The units are those of all that a rank has of one copy of the model; where that is several chunks,
    /// each takes its fraction.
    pub fn new(schedule: &Schedule, units: PassUnits) -> UnitCosts {
        let fraction = schedule.stages() as f64 / schedule.placement.virtual_stages() as f64;
        UnitCosts { forward: units.forward * fraction, backward: units.backward * fraction }
    }
}

impl Costs for UnitCosts {
    fn busy(&self, _rank: usize, action: &Action) -> f64 {
        match action.compute() {
            Some((Pass::Forward, _)) => self.forward,
            Some((Pass::Backward, _)) => self.backward,
            Some((Pass::BackwardInput | Pass::BackwardWeight, _)) => self.backward / 2.0,
            None => 0.0,
        }
    }
}

impl Timeline {
    /// Walks through the lists of a schedule that is valid; one that is not may end in a deadlock.
    pub fn walk(schedule: &Schedule, costs: &impl Costs) -> Result<Timeline, ScheduleError> {
        let stages = schedule.stages();
        let mut now = vec![0.0; stages];
        let mut busy = vec![0.0; stages];
        let mut spans: Vec<Vec<ActionSpan>> =
            schedule.ranks.iter().map(|list| Vec::with_capacity(list.len())).collect();
        // Each tag is of one message between stages, but of control messages to several ranks.
        let mut arrivals: Vec<Option<f64>> = vec![None; schedule.crossings()];
        let slot = |rank: usize, action: &Action, receiver: usize| {
            let tag = schedule.tag(rank, action).expect("a message has a tag") as usize;
            tag.checked_sub(schedule.crossings())
                .map_or(tag, |control| schedule.crossings() + control * stages + receiver)
        };
        let mut all_reduces = AllReduces::default();
        // Of each rank, all-reduces that passes follow: which, and what each takes.
        let mut in_flight_rounds: Vec<Vec<(AllReduceRound, f64)>> = vec![Vec::new(); stages];
        let last_passes = last_passes(schedule);
        walk(schedule, |rank, position, action| {
            let start = now[rank];
            let mut cost = costs.busy(rank, action);
            let begin = match action {
                Action::Receive(_) | Action::RecvControl(_) => {
                    let Some(&Some(arrival)) = arrivals.get(slot(rank, action, rank)) else {
                        return Ok(false);
                    };
                    f64::max(start, arrival)
                }
                &Action::AllReduce { chunk } if last_passes[rank].is_before(position) => {
                    in_flight_rounds[rank].push((all_reduces.arrive(schedule, rank, chunk, start), cost));
                    cost *= costs.occupies();
                    start
                }
                &Action::AllReduce { chunk } => {
                    let Some(ended) = all_reduces.ended(schedule, &in_flight_rounds[rank]) else {
                        return Ok(false);
                    };
                    let Some(begin) = all_reduces.rendezvous(schedule, rank, chunk, start) else {
                        return Ok(false);
                    };
                    f64::max(begin, ended)
                }
                Action::WaitReduce => {
                    let Some(ended) = all_reduces.ended(schedule, &in_flight_rounds[rank]) else {
                        return Ok(false);
                    };
                    in_flight_rounds[rank].clear();
                    f64::max(start, ended)
                }
                _ => start,
            };
            let end = begin + cost;
            if let Action::Send(StageMessage { peer, .. })
            | Action::SendControl(ControlMessage { peer, .. }) = *action
            {
                let slot = slot(rank, action, peer);
                arrivals.resize(arrivals.len().max(slot + 1), None);
                arrivals[slot] = Some(end + costs.journey(rank, action));
            }
            now[rank] = end;
            busy[rank] += cost;
            spans[rank].push(ActionSpan { action: *action, start, end, busy: cost });
            Ok(true)
        })?;
        let end = now.iter().copied().fold(0.0, f64::max);
        let peaks = |rise: fn(&Action) -> i64, from: i64| {
            schedule.ranks.iter().map(|list| peak(list.iter().map(rise), from)).collect()
        };
        Ok(Timeline {
            spans,
            end,
            idle: busy.iter().map(|busy| end - busy).collect(),
            in_flight: peaks(in_flight, 0),
            held: peaks(held, 0),
            weight_versions: peaks(versions, 1),
        })
    }

    /// Idle time over all time, of all ranks together.
    pub fn bubble_ratio(&self) -> f64 {
        self.idle.iter().sum::<f64>() / (self.end * self.idle.len() as f64)
    }
}

/// The positions of the last pass before each step of a rank's list.
pub(crate) struct LastPasses(Vec<(usize, usize)>);

impl LastPasses {
    /// Whether a pass follows behind a position before the next step.
    pub(crate) fn is_before(&self, position: usize) -> bool {
        let next = self.0.partition_point(|(_, step)| *step < position);
        self.0.get(next).is_some_and(|(pass, _)| *pass > position)
    }
}

pub(crate) fn last_passes(schedule: &Schedule) -> Vec<LastPasses> {
    let of_list = |list: &Vec<Action>| {
        let (mut found, mut pass) = (Vec::new(), 0);
        for (position, action) in list.iter().enumerate() {
            match action {
                Action::Step => found.push((pass, position)),
                action if action.compute().is_some() => pass = position,
                _ => {}
            }
        }
        LastPasses(found)
    };
    schedule.ranks.iter().map(of_list).collect()
}

/// The highest partial sum.
fn peak(rises: impl Iterator<Item = i64>, from: i64) -> usize {
    let mut now = from;
    rises.fold(from, |most, rise| {
        now += rise;
        most.max(now)
    }) as usize
}

fn in_flight(action: &Action) -> i64 {
    match action {
        Action::Forward(_) => 1,
        Action::Backward(_) | Action::BackwardInput(_) => -1,
        _ => 0,
    }
}

fn held(action: &Action) -> i64 {
    match action {
        Action::Forward(_) => 1,
        Action::Backward(_) | Action::BackwardWeight(_) => -1,
        _ => 0,
    }
}

/// The newest version is there before the first action. A stash keeps it beside the one that the next step makes.
fn versions(action: &Action) -> i64 {
    match action {
        Action::Stash { .. } => 1,
        Action::Drop { .. } => -1,
        _ => 0,
    }
}
