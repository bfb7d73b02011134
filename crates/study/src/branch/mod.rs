//! A cheap critical batch by branching (Merrill, Arora, Groeneveld & Hajishirzi 2025): from a point of a
//! training, short branches go on at k times its batch, each over the same number of samples and with a rate
//! that grows as k's root for Adam and its kin, as k for SGD. The largest batch whose loss stays within a
//! tolerance of the base run's own is the critical batch there.
//!
//! Branches begin with the base run's weights and optimizer state. Theirs is a constant rate: the one that
//! the base run had there, scaled. They are compared by the loss on held-out samples at their end; the paper's,
//! which see no sample twice, by the smoothed training loss. Beside it stands what the gradient noise scale
//! says at the same point.

mod file;
mod page;
mod train;

pub use file::{BranchStudy, Scaling};
pub use page::{figure, page};
pub use train::{Branch, BranchOrigin, BranchPoint, critical_batch, known, run};
