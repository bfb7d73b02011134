//! Many runs as one measurement: how many steps a result takes over batch sizes and sparsities, what curve that follows, and why.
//!
//! After Lee, Ajanthan, Torr & Jaggi (ICLR 2021), whose method is that of Shallue et al. (2019): for every batch size B and every sparsity the metaparameters are searched,
//! and K*, the fewest steps to a goal of validation, is recorded; K* = c1/B + c2 is fitted to that.
//!
//! ```text
//! study file --> cells x points --> trials --> results --> summary, page
//! (file, range)  (sobol, widen)    (race, attempt, conduct)  (results, fit, theory)
//! ```

#![forbid(unsafe_code)]

pub mod attempt;
pub mod branch;
pub mod claim;
pub mod conduct;
pub mod file;
pub mod fit;
pub mod folder;
pub mod gap;
pub mod kind;
pub mod look;
pub mod outcomes;
pub mod page;
pub mod race;
pub mod range;
mod reading;
pub mod results;
pub mod running;
pub mod smoothness;
pub mod sobol;
pub mod summary;
#[cfg(test)]
mod synthetic;
pub mod theory;
pub mod trial;
pub mod waiting;
pub mod widen;
pub mod workers;
pub mod workload;

pub use claim::StudyClaim;
pub use conduct::{Observer, Shard, Standing, run_trials, widen_ranges};
pub use file::{Cell, Goal, Method, Study};
pub use folder::StudyFolder;
pub use kind::Kind;
pub use look::Look;
pub use results::Results;
pub use running::Running;
pub use summary::Summary;
pub use trial::{Check, Record, Runner, Status, Trial};
pub use workers::Workers;
pub use workload::{Settings, Workload};
