//! What can be wrong with a run, each in one sentence that names the field.

use crate::edit_distance::did_you_mean;
use crate::spec::ShapeError;

/// A mistake in a run file, an override, or between them and the data.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// The text is not TOML.
    #[error("line {line}: not TOML: {message}")]
    Syntax {
        /// Counted from 1.
        line: usize,
        /// What the TOML reader says.
        message: String,
    },
    /// An override that is not `a.b=c`, or whose path leads nowhere.
    #[error("override `{text}` must be {expected}")]
    Override {
        /// The override as it was given.
        text: String,
        /// What it should look like.
        expected: String,
    },
    /// A field that does not exist.
    #[error("`{field}` is not a field{}", did_you_mean(.hint))]
    UnknownField {
        /// Its full path.
        field: String,
        /// The field that was probably meant.
        hint: Option<String>,
    },
    /// A value of the wrong type, or an impossible one.
    #[error("`{field}` must be {expected}, got {got}{}", did_you_mean(.hint))]
    Value {
        /// Full path of the field.
        field: String,
        /// What it takes.
        expected: String,
        /// What was written.
        got: String,
        /// The value that was probably meant.
        hint: Option<String>,
    },
    /// A field that must be written.
    #[error("`{field}` is missing: {expected}")]
    Missing {
        /// Full path of the field.
        field: String,
        /// What it takes.
        expected: String,
    },
    /// A setting that would change nothing.
    #[error("`{field}` has no effect {why}")]
    NoEffect {
        /// Full path of the field.
        field: String,
        /// `with optimizer.name = "adam"`
        why: String,
    },
    /// A pipeline that no schedule fits, more ranks than a network can be split over, or others than were started.
    #[error("`parallel`: {0}")]
    Ranks(String),
    /// Two settings, or a setting and the data, that contradict each other.
    #[error("`{field}` {problem}")]
    Conflict {
        /// Full path of the field that should change.
        field: String,
        /// `is 100, but the data has 256 tokens`
        problem: String,
    },
    /// A model whose layers do not fit together.
    #[error("`model`: {0}")]
    Shape(#[from] ShapeError),
}

impl Error {
    /// Two settings, or a setting and the data, that contradict each other.
    pub fn conflict(field: impl Into<String>, problem: impl Into<String>) -> Error {
        Error::Conflict { field: field.into(), problem: problem.into() }
    }

    /// A setting that would change nothing.
    pub fn no_effect(field: impl Into<String>, why: impl Into<String>) -> Error {
        Error::NoEffect { field: field.into(), why: why.into() }
    }

    /// A value of the wrong type, or an impossible one.
    pub fn value(field: impl Into<String>, expected: impl Into<String>, got: impl Into<String>) -> Error {
        Error::Value { field: field.into(), expected: expected.into(), got: got.into(), hint: None }
    }
}
