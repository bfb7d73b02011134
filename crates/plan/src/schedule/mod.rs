//! Pipeline schedules as data: a schedule is a function from stages, micro-batches and options to the list of
//! actions of every rank. One executor runs the lists; [`Timeline`] walks the very same ones in virtual time.
//!
//! A schedule's own file says in which order each rank computes. What follows from that order is added here, once
//! for all: the messages (`messages`), the all-reduces, steps and kept versions (`updates`), and what ranks tell each other
//! about a step (`agreement`).
//!
//! ```
//! use espalier_plan::schedule::{Name, Options, Timeline, UnitCosts, Units};
//!
//! let schedule = Name::OneFOneB.schedule(&Options::new(3, 5))?;
//! assert_eq!(schedule.order(2), "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4");
//! schedule.validate()?;
//! let timeline = Timeline::walk(&schedule, &UnitCosts::new(&schedule, Units::default()))?;
//! assert_eq!(timeline.idle, [6.0, 6.0, 6.0]);
//! # Ok::<(), espalier_plan::schedule::Error>(())
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

pub use action::{Action, Message, Notice, Pass, Payload, Topic, Work};
pub use axonn::message_driven;
pub use error::Error;
pub use picture::Ink;
pub use placement::{Chunk, Placement};
pub use report::Report;
pub(crate) use timeline::last_passes;
pub use timeline::{Costs, Span, Timeline, UnitCosts};
pub use updates::Updates;

use crate::near::nearest;

/// More forwards, over all ranks, than a list needs; a slip of the finger should not fill the memory.
const FORWARDS_MOST: u128 = 1 << 20;

/// The schedules there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Name {
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
pub struct Options {
    /// Ranks of the pipeline.
    pub stages: usize,
    /// Micro-batches of a batch.
    pub micro_batches: usize,
    /// Batches in the lists. A flush ends each, or they run into one another, as the schedule has it.
    pub batches: usize,
    /// Parts of the model on a rank, for interleaving; 2 unless said.
    pub chunks: Option<usize>,
    /// Copies of the model, for Chimera; 2 unless said.
    pub pipelines: Option<usize>,
    /// Times by which a message-driven order is found; no other order depends on them.
    pub units: Units,
}

/// Times of one micro-batch on one stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Units {
    /// What a forward takes, in the unit of the others.
    pub forward: f64,
    /// A whole backward; its halves take half of it each.
    pub backward: f64,
}

/// The lists of all ranks, and what one must know to run them.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    /// One of [`Name`], or what a file calls itself.
    pub name: String,
    /// Micro-batches of a batch.
    pub micro_batches: usize,
    /// Batches in the lists.
    pub batches: usize,
    /// Which rank holds which parts.
    pub placement: Placement,
    /// When weights change, and which version a micro-batch uses.
    pub updates: Updates,
    /// Whether a rank may also take whatever message has arrived; the lists are then the order of ideal time.
    pub message_driven: bool,
    /// What every rank does.
    pub ranks: Vec<Vec<Action>>,
}

impl Name {
    /// All of them.
    pub const ALL: [Name; 9] = [
        Name::Gpipe,
        Name::OneFOneB,
        Name::Interleaved,
        Name::PipeDream,
        Name::TwoBw,
        Name::Chimera,
        Name::ChimeraDoubling,
        Name::ZbH1,
        Name::Axonn,
    ];

    /// As a person writes it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Name::Gpipe => "gpipe",
            Name::OneFOneB => "1f1b",
            Name::Interleaved => "interleaved",
            Name::PipeDream => "pipedream",
            Name::TwoBw => "2bw",
            Name::Chimera => "chimera",
            Name::ChimeraDoubling => "chimera-doubling",
            Name::ZbH1 => "zb-h1",
            Name::Axonn => "axonn",
        }
    }

    /// When its weights change.
    pub fn updates(self) -> Updates {
        match self {
            Name::PipeDream => Updates::EveryMicroBatch,
            Name::TwoBw => Updates::DoubleBuffered,
            _ => Updates::Flush,
        }
    }

    /// All names in a row.
    pub fn list() -> String {
        Name::ALL.map(Name::as_str).join(", ")
    }

    /// The lists of this schedule, or what it cannot work with.
    pub fn schedule(self, options: &Options) -> Result<Schedule, Error> {
        options.check(self)?;
        match self {
            Name::Gpipe => Ok(gpipe::schedule(options)),
            Name::OneFOneB => Ok(one_f_one_b::schedule(options)),
            Name::Interleaved => interleaved::schedule(options),
            Name::PipeDream => Ok(pipedream::schedule(options)),
            Name::TwoBw => Ok(two_bw::schedule(options)),
            Name::Chimera => chimera::schedule(options),
            Name::ChimeraDoubling => chimera::doubling(options),
            Name::ZbH1 => Ok(zb_h1::schedule(options)),
            Name::Axonn => axonn::schedule(options),
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Name {
    type Err = Error;

    fn from_str(name: &str) -> Result<Name, Error> {
        Name::ALL.into_iter().find(|known| known.as_str() == name).ok_or_else(|| Error::UnknownName {
            name: name.into(),
            hint: nearest(name, Name::ALL.map(Name::as_str)).map(String::from),
        })
    }
}

impl Options {
    /// One batch, with the defaults of everything else.
    pub fn new(stages: usize, micro_batches: usize) -> Options {
        let units = Units::default();
        Options { stages, micro_batches, batches: 1, chunks: None, pipelines: None, units }
    }

    /// What holds for every schedule.
    fn check(&self, name: Name) -> Result<(), Error> {
        let refuse = |expected: &str, got: String| {
            Err(Error::Options { name: name.as_str(), expected: expected.into(), got })
        };
        let no_effect =
            |option, only: Name| Err(Error::NoEffect { option, name: name.as_str(), only: only.as_str() });
        match *self {
            Options { stages: 0, .. } => return refuse("at least 1 stage", "0".into()),
            Options { micro_batches: 0, .. } => return refuse("at least 1 micro-batch", "0".into()),
            Options { batches: 0, .. } => return refuse("at least 1 batch", "0".into()),
            Options { chunks: Some(_), .. } if name != Name::Interleaved => {
                return no_effect("chunks", Name::Interleaved);
            }
            Options { pipelines: Some(_), .. } if !matches!(name, Name::Chimera | Name::ChimeraDoubling) => {
                return no_effect("pipelines", Name::Chimera);
            }
            _ => {}
        }
        self.units.check()?;
        let factors = [self.stages, self.micro_batches, self.batches, self.chunks.unwrap_or(1)];
        let forwards = factors.iter().fold(1u128, |product, &factor| product.saturating_mul(factor as u128));
        match forwards > FORWARDS_MOST {
            true => Err(Error::TooLong { forwards }),
            false => Ok(()),
        }
    }
}

impl Units {
    /// A range in which sums stay exact enough for a picture.
    fn check(self) -> Result<(), Error> {
        let refuse = |pass, got| Err(Error::Units { pass, got });
        let possible = 0.001..=1e6;
        match self {
            Units { forward, .. } if !possible.contains(&forward) => refuse("forward", forward),
            Units { backward, .. } if !possible.contains(&backward) => refuse("backward", backward),
            _ => Ok(()),
        }
    }
}

impl Default for Units {
    /// A backward is two products for each one of the forward.
    fn default() -> Units {
        Units { forward: 1.0, backward: 2.0 }
    }
}

impl Schedule {
    /// How many ranks there are.
    pub fn stages(&self) -> usize {
        self.ranks.len()
    }

    /// Micro-batches of all batches.
    pub fn all_micro_batches(&self) -> usize {
        self.micro_batches * self.batches
    }

    /// A number that the sender and the receiver of a message agree on, and that no other message between them bears: for each
    /// crossing of a border between two parts, one for the activation and one for the gradient; above those, one for each
    /// notice of an update.
    pub fn tag(&self, rank: usize, action: &Action) -> Option<u64> {
        let (message, out) = match action {
            Action::Send(message) => (message, true),
            Action::Receive(message) => (message, false),
            Action::Tell(notice) | Action::Hear(notice) => {
                let crossings = 2 * self.all_micro_batches() * self.placement.parts();
                return Some((crossings + notice.update * Topic::ALL.len() + notice.topic as usize) as u64);
            }
            _ => return None,
        };
        let part = self.placement.chunks(rank)[message.chunk].part;
        let is_gradient = message.payload == Payload::Gradient;
        // A border is named by the part before it, which activations leave and gradients reach.
        let border = if out != is_gradient { part } else { part - 1 };
        let crossing = (message.micro_batch * self.placement.parts() + border) as u64;
        Some(2 * crossing + u64::from(is_gradient))
    }
}
