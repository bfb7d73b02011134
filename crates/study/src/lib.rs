//! Many runs as one measurement: how many steps a result takes over batch sizes and sparsities, what curve
//! that follows, and why.
//!
//! After Lee, Ajanthan, Torr & Jaggi (ICLR 2021), whose method is that of Shallue et al. (2019): for every
//! batch size B and every sparsity the hyperparameters are searched, and K*, the fewest steps to a goal of
//! validation, is recorded; K* = c1/B + c2 is fitted to that.
//!
//! ```text
//! study file --> cells x points --> trials --> results --> summary, page
//! (file, range)  (sobol, widen)    (bracket, advance, search)  (results, fit, theory)
//! ```

#![forbid(unsafe_code)]

pub mod advance;
pub mod bracket;
pub mod branch;
pub mod file;
mod finalists;
pub mod fit;
pub mod folder;
pub mod gap;
pub mod kind;
pub mod lock;
pub mod measure_schedule;
pub mod outcomes;
pub mod page;
pub mod paused_trials;
pub mod range;
pub mod results;
pub mod running_trial;
pub mod search;
pub mod smoothness;
pub mod sobol;
mod study_table;
pub mod summary;
#[cfg(test)]
mod synthetic;
pub mod theory;
pub mod trial;
pub mod widen;
pub mod workers;
pub mod workload;

pub use file::{Cell, Goal, SearchMethod, Study};
pub use folder::StudyFolder;
pub use kind::StudyKind;
pub use lock::StudyLock;
pub use measure_schedule::MeasureSchedule;
pub use results::Results;
pub use running_trial::RunningTrial;
pub use search::{SearchProgress, StudyObserver, TrialSearch, TrialShard};
pub use summary::StudySummary;
pub use trial::{Trial, TrialCheck, TrialRecord, TrialRunner, TrialStatus};
pub use workers::WorkerPool;
pub use workload::{TrialSettings, Workload};
