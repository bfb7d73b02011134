//! What can be wrong with a schedule: what was asked for, what a file says, or what the lists would do.

use crate::edit_distance::did_you_mean;

/// A mistake in one sentence.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ScheduleError {
    /// A name that no schedule has.
    #[error("`{name}` is not a schedule: there are {}{}", super::ScheduleName::list(), did_you_mean(.hint))]
    UnknownName {
        /// As a person wrote it.
        name: String,
        /// The one that was probably meant.
        hint: Option<String>,
    },
    /// A number that the schedule cannot work with.
    #[error("{name} needs {expected}, got {got}")]
    Options {
        name: &'static str,
        /// `an even number of stages`
        expected: String,
        /// `3`
        got: String,
    },
    /// A time that is none, or none that can be drawn.
    #[error("a {pass} takes between 0.001 and 1000000 units, got {got}")]
    Units {
        /// `forward`
        pass: &'static str,
        /// In units, as a person wrote it.
        got: f64,
    },
    /// An option that the schedule does not have.
    #[error("{option} have no effect on {name}: only {only} has them")]
    NoEffect {
        /// `chunks`
        option: &'static str,
        name: &'static str,
        /// The schedule that has it.
        only: &'static str,
    },
    /// A list too long to hold.
    #[error("a schedule of {forwards} forwards is too long: the most is {}", super::FORWARDS_MOST)]
    TooLong {
        /// Forward passes of all ranks together.
        forwards: u128,
    },
    /// Virtual stages where they cannot be.
    #[error("{problem}")]
    Placement {
        /// What is wrong, as a clause that the message ends with.
        problem: String,
    },
    /// Lists that cannot be run in the order in which messages arrive.
    #[error("message-driven ranks need {expected}, but {got}")]
    MessageDriven {
        /// `whole backwards`
        expected: &'static str,
        /// `rank 0 has W0`
        got: String,
    },
    /// A file that cannot be read as a schedule.
    #[error("line {line}: {problem}")]
    Syntax {
        /// Counted from 1.
        line: usize,
        /// What is wrong, as a clause that the message ends with.
        problem: String,
    },
    /// An action that cannot be done where it stands.
    #[error("rank {rank}, action {} (`{action}`): {problem}", position + 1)]
    Invalid {
        /// The rank whose list it is in.
        rank: usize,
        /// Where in the list, from 0.
        position: usize,
        /// As it is written in a file.
        action: String,
        /// What is wrong, as a clause that the message ends with.
        problem: String,
    },
    /// Something that should have happened by the end of the lists.
    #[error("rank {rank} at its end: {problem}")]
    Unfinished {
        /// The rank whose list it is in.
        rank: usize,
        /// What is wrong, as a clause that the message ends with.
        problem: String,
    },
    /// Every rank waits or has finished, and some wait.
    #[error("deadlock: {waiting}")]
    Deadlock {
        /// Who waits, and at what.
        waiting: String,
    },
}
