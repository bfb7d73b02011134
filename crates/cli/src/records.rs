//! What runs have written, read back: one run folder or several, complete or torn, ended or still going on.

pub mod facts;
mod folder;
mod settings;
mod tail;

pub use folder::{RunRecord, differing, disambiguate};
