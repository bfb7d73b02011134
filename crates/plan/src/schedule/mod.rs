//! Pipeline schedules as data: a schedule is a function from stages, micro-batches and options to the list of
//! actions of every rank. One executor runs the lists; [`Timeline`] walks the very same ones in virtual time.
//!
//! A schedule's own file says in which order each rank computes. What follows from that order is added here,
//! once for all: the messages (`messages`), the all-reduces, steps and kept versions (`updates`), and what
//! ranks send each other about a step (`agreement`).
//!
//! ```
//! use espalier_plan::schedule::{ScheduleName, ScheduleOptions, Timeline, UnitCosts, PassUnits};
//!
//! let schedule = ScheduleName::OneFOneB.schedule(&ScheduleOptions::new(3, 5))?;
//! assert_eq!(schedule.order(2), "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4");
//! schedule.validate()?;
//! let timeline = Timeline::walk(&schedule, &UnitCosts::new(&schedule, PassUnits::default()))?;
//! assert_eq!(timeline.idle, [6.0, 6.0, 6.0]);
//! # Ok::<(), espalier_plan::schedule::ScheduleError>(())
//! ```

mod action;
mod agreement;
mod assemble;
mod axonn;
mod chimera;
mod error;
mod gpipe;
mod interleaved;
mod messages;
mod one_f_one_b;
mod parse;
mod picture;
mod pipedream;
mod placement;
mod report;
mod sweep;
#[cfg(test)]
mod tests;
mod text;
mod timeline;
mod two_bw;
mod updates;
mod validate;
mod walk;
mod zb_h1;

use std::fmt;
use std::str::FromStr;

pub use action::{Action, ChunkWork, ControlKind, ControlMessage, Pass, Payload, StageMessage};
pub use axonn::message_driven;
pub use error::ScheduleError;
pub use picture::Ink;
pub use placement::{Chunk, Placement};
pub use report::ScheduleReport;
pub(crate) use timeline::last_passes;
pub use timeline::{ActionSpan, Costs, Timeline, UnitCosts};
pub use updates::Updates;

use crate::edit_distance::nearest;

/// More forwards, over all ranks, than a list needs; a slip of the finger should not fill the memory.
const FORWARDS_MOST: u128 = 1 << 20;

/// The schedules there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScheduleName {
    /// All forwards, then all backwards.
    Gpipe,
    /// One forward, one backward, with a flush.
    OneFOneB,
    /// The same with several chunks a rank.
    Interleaved,
    /// Without a flush, with a step after every micro-batch.
    PipeDream,
    /// Without a flush, with two versions of the weights.
    TwoBw,
    /// Pipelines in both directions.
    Chimera,
    /// The same where forwards run in pairs, for more micro-batches than stages.
    ChimeraDoubling,
    /// Weight gradients apart, to fill the drain.
    ZbH1,
    /// Whatever message has arrived.
    Axonn,
}

/// What a schedule is made from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScheduleOptions {
    /// Ranks of the pipeline.
    pub stages: usize,
    /// Micro-batches of a batch.
    pub micro_batches: usize,
    /// Batches in the lists. A flush ends each, or they run into one another, as the schedule has it.
    pub batches: usize,
    /// Virtual stages on a rank, for interleaving; 2 unless said.
    pub chunks: Option<usize>,
    /// Copies of the model, for Chimera; 2 unless said.
    pub pipelines: Option<usize>,
    /// Times by which a message-driven order is found; no other order depends on them.
    pub units: PassUnits,
}

/// Times of one micro-batch on one stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PassUnits {
    /// What a forward takes, in the unit of the others.
    pub forward: f64,
    /// A whole backward; its halves take half of it each.
    pub backward: f64,
}

/// The lists of all ranks, and what one must know to run them.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    /// One of [`ScheduleName`], or what a file calls itself.
    pub name: String,
    /// Micro-batches of a batch.
    pub micro_batches: usize,
    /// Batches in the lists.
    pub batches: usize,
    /// Which rank holds which virtual stages.
    pub placement: Placement,
    /// When weights change, and which version a micro-batch uses.
    pub updates: Updates,
    /// Whether a rank may also take whatever message has arrived; the lists are then the order of ideal time.
    pub message_driven: bool,
    /// What every rank does.
    pub ranks: Vec<Vec<Action>>,
}

impl ScheduleName {
    /// Whether each weight is on one stage of a replica, in one version.
    pub(crate) fn has_one_copy_of_weights(self) -> bool {
        use ScheduleName::*;
        !matches!(self, PipeDream | TwoBw | Chimera | ChimeraDoubling)
    }

    pub const ALL: [ScheduleName; 9] = [
        ScheduleName::Gpipe,
        ScheduleName::OneFOneB,
        ScheduleName::Interleaved,
        ScheduleName::PipeDream,
        ScheduleName::TwoBw,
        ScheduleName::Chimera,
        ScheduleName::ChimeraDoubling,
        ScheduleName::ZbH1,
        ScheduleName::Axonn,
    ];

    /// As a person writes them, in the same order.
    pub const NAMES: [&str; 9] =
        ["gpipe", "1f1b", "interleaved", "pipedream", "2bw", "chimera", "chimera-doubling", "zb-h1", "axonn"];

    /// As a person writes it.
    pub fn as_str(self) -> &'static str {
        ScheduleName::NAMES[self as usize]
    }

    /// When its weights change.
    pub fn updates(self) -> Updates {
        match self {
            ScheduleName::PipeDream => Updates::EveryMicroBatch,
            ScheduleName::TwoBw => Updates::DoubleBuffered,
            _ => Updates::Flush,
        }
    }

    /// All names in a row.
    pub fn list() -> String {
        ScheduleName::NAMES.join(", ")
    }

    /// The lists of this schedule, or what it cannot work with.
    pub fn schedule(self, options: &ScheduleOptions) -> Result<Schedule, ScheduleError> {
        options.check(self)?;
        match self {
            ScheduleName::Gpipe => Ok(gpipe::schedule(options)),
            ScheduleName::OneFOneB => Ok(one_f_one_b::schedule(options)),
            ScheduleName::Interleaved => interleaved::schedule(options),
            ScheduleName::PipeDream => Ok(pipedream::schedule(options)),
            ScheduleName::TwoBw => Ok(two_bw::schedule(options)),
            ScheduleName::Chimera | ScheduleName::ChimeraDoubling => chimera::schedule(self, options),
            ScheduleName::ZbH1 => Ok(zb_h1::schedule(options)),
            ScheduleName::Axonn => axonn::schedule(options),
        }
    }
}

impl fmt::Display for ScheduleName {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for ScheduleName {
    type Err = ScheduleError;

    fn from_str(name: &str) -> Result<ScheduleName, ScheduleError> {
        ScheduleName::ALL.into_iter().find(|known| known.as_str() == name).ok_or_else(|| {
            ScheduleError::UnknownName {
                name: name.into(),
                hint: nearest(name, ScheduleName::NAMES).map(String::from),
            }
        })
    }
}

impl ScheduleOptions {
    /// One batch, with the defaults of everything else.
    pub fn new(stages: usize, micro_batches: usize) -> ScheduleOptions {
        let units = PassUnits::default();
        ScheduleOptions { stages, micro_batches, batches: 1, chunks: None, pipelines: None, units }
    }

    /// What holds for every schedule.
    fn check(&self, name: ScheduleName) -> Result<(), ScheduleError> {
        let refuse = |expected: &str, got: String| {
            Err(ScheduleError::Options { name: name.as_str(), expected: expected.into(), got })
        };
        let no_effect = |option, only: ScheduleName| {
            Err(ScheduleError::NoEffect { option, name: name.as_str(), only: only.as_str() })
        };
        match *self {
            ScheduleOptions { stages: 0, .. } => return refuse("at least 1 stage", "0".into()),
            ScheduleOptions { micro_batches: 0, .. } => return refuse("at least 1 micro-batch", "0".into()),
            ScheduleOptions { batches: 0, .. } => return refuse("at least 1 batch", "0".into()),
            ScheduleOptions { chunks: Some(_), .. } if name != ScheduleName::Interleaved => {
                return no_effect("chunks", ScheduleName::Interleaved);
            }
            ScheduleOptions { pipelines: Some(_), .. }
                if !matches!(name, ScheduleName::Chimera | ScheduleName::ChimeraDoubling) =>
            {
                return no_effect("pipelines", ScheduleName::Chimera);
            }
            _ => {}
        }
        self.units.check()?;
        let factors = [self.stages, self.micro_batches, self.batches, self.chunks.unwrap_or(1)];
        let forwards = factors.iter().fold(1u128, |product, &factor| product.saturating_mul(factor as u128));
        match forwards > FORWARDS_MOST {
            true => Err(ScheduleError::TooLong { forwards }),
            false => Ok(()),
        }
    }
}

impl PassUnits {
    /// A range in which sums stay exact enough for a picture.
    fn check(self) -> Result<(), ScheduleError> {
        let refuse = |pass, got| Err(ScheduleError::Units { pass, got });
        let possible = 0.001..=1e6;
        match self {
            PassUnits { forward, .. } if !possible.contains(&forward) => refuse("forward", forward),
            PassUnits { backward, .. } if !possible.contains(&backward) => refuse("backward", backward),
            _ => Ok(()),
        }
    }
}

impl Default for PassUnits {
    /// A backward is two products for each one of the forward.
    fn default() -> PassUnits {
        PassUnits { forward: 1.0, backward: 2.0 }
    }
}

impl Schedule {
    /// How many ranks there are.
    pub fn stages(&self) -> usize {
        self.ranks.len()
    }

    /// Micro-batches of all batches.
    pub(crate) fn all_micro_batches(&self) -> usize {
        self.micro_batches * self.batches
    }

    /// Tags of messages between stages are below this, those of control messages are not.
    fn crossings(&self) -> usize {
        2 * self.all_micro_batches() * self.placement.virtual_stages()
    }

    /// A number that the sender and the receiver of a message agree on, and that no other message between
    /// them bears: for each crossing of a border between two virtual stages, one for the activation and one
    /// for the gradient; above those, one for each control message of an update.
    pub fn tag(&self, rank: usize, action: &Action) -> Option<u64> {
        let (message, out) = match action {
            Action::Send(message) => (message, true),
            Action::Receive(message) => (message, false),
            Action::SendControl(notice) | Action::RecvControl(notice) => {
                let control = notice.update * ControlKind::ALL.len() + notice.topic as usize;
                return Some((self.crossings() + control) as u64);
            }
            _ => return None,
        };
        let virtual_stage = self.placement.chunks(rank)[message.chunk].virtual_stage;
        let is_gradient = message.payload == Payload::Gradient;
        // A border is named by the virtual stage before it, which activations leave and gradients reach.
        let border = if out != is_gradient { virtual_stage } else { virtual_stage - 1 };
        let crossing = (message.micro_batch * self.placement.virtual_stages() + border) as u64;
        Some(2 * crossing + u64::from(is_gradient))
    }
}
