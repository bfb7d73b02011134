//! The generalisation gap: how well a network does on held-out data when it has learnt in large batches, by
//! what was done about them, and how sharp a minimum it ended in (Keskar et al. 2017; Hoffer, Hubara & Soudry
//! 2017; Goyal et al. 2017).
//!
//! An arm is a change of run-file fields: a scaled rate, a warm-up, LARS or LAMB, ghost batch norm,
//! post-local SGD, more steps. Every arm is trained at every batch, from the same seeds, to one training loss:
//! a network that has learnt less generalises otherwise for that alone, and large batches take fewer steps in
//! as many epochs. Without such a loss each is trained to the end of its run.

mod file;
mod page;
mod train;

pub use file::{Arm, GapStudy};
pub use page::{figure, page};
pub use train::{FinalMetrics, GapOutcome, known, run};
