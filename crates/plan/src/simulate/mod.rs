//! A step in virtual time, and what it holds: the schedule's own actions, with what kernels and messages take on a cluster under an
//! engine.
//!
//! [`passes`] says what the blocks of a rank's model take (`convolution` its convolutions), [`collective`] what ranks take to talk, `sums` what they sum of gradients, [`state`] what they hold;
//! `rank_model` keeps what candidates have in common; `step` walks the lists; `script` is a rank's part for a worker that takes the planned time; `calibrate` refits a cluster's rates to what runs took.

mod breakdown;
mod calibrate;
pub mod candidate;
pub mod collective;
mod convolution;
mod holdings;
pub mod passes;
mod rank_model;
mod schedules;
mod script;
pub mod seconds;
pub mod state;
mod step;
mod sums;
mod times;

pub use breakdown::Breakdown;
pub use calibrate::{Calibrated, Measured};
pub use candidate::{Candidate, LayoutRecord};
pub use script::{Script, ScriptLayer, ScriptPart};
pub use step::Estimate;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use crate::cluster::Cluster;
use crate::cluster::Kernels;
use crate::engine::Engine;
use crate::error::Error;
use crate::layout::Layout;
use crate::plan::Plan;
use crate::spec::{Parameter, Recompute};
use crate::stages::{Parts, even_parts};
use passes::{Passes, block_passes};
use rank_model::RankModel;
use schedules::Schedules;

/// What is to run, on what and by what. Candidates for it share what they have in common: ranks' models and what their passes take.
pub struct Job<'a> {
    /// The run, on one rank.
    pub plan: &'a Plan,
    /// Where it is to run.
    pub cluster: &'a Cluster,
    /// What runs it.
    pub engine: Engine,
    parameters: Vec<Parameter>,
    locals: RefCell<HashMap<CutKey, Local>>,
    passes: RefCell<HashMap<PassKey, Rc<Vec<Passes>>>>,
    parts: RefCell<HashMap<usize, Rc<Parts>>>,
    schedules: Rc<Schedules>,
}

/// What tells two cuts of a model's tensors apart: tensor ranks, along the sequence or not, and the grid over images.
type CutKey = (usize, bool, [usize; 2]);

/// What tells the passes of two candidates apart: the cut, samples of a micro-batch, what is run again, and how many ranks share
/// the cores.
type PassKey = (CutKey, usize, Recompute, usize);

/// A rank's model, or why there is none.
type Local = Result<Rc<RankModel>, Error>;

impl<'a> Job<'a> {
    /// A run on one rank, whose layout is to be found.
    pub fn new(plan: &'a Plan, cluster: &'a Cluster, engine: Engine) -> Job<'a> {
        Job {
            plan,
            cluster,
            engine,
            parameters: plan.model.parameters(),
            locals: RefCell::default(),
            passes: RefCell::default(),
            parts: RefCell::default(),
            schedules: Rc::default(),
        }
    }

    /// Another run or another cluster, by the same engine: schedules are the same.
    pub fn with<'b>(&self, plan: &'b Plan, cluster: &'b Cluster) -> Job<'b> {
        Job { schedules: self.schedules.clone(), ..Job::new(plan, cluster, self.engine) }
    }

    /// So many parts of the model.
    fn parts(&self, number: usize) -> Result<Rc<Parts>, Error> {
        if let Some(known) = self.parts.borrow().get(&number) {
            return Ok(known.clone());
        }
        let storage = &self.plan.storage;
        let each = 2 * storage.precision.size() + storage.optimizer_bytes;
        let parts = match number {
            1 => std::iter::once(0..self.plan.model.blocks.len()).collect(),
            _ => even_parts(&self.plan.model, number, each)?,
        };
        let parts = Rc::new(parts);
        self.parts.borrow_mut().insert(number, parts.clone());
        Ok(parts)
    }

    /// The model of a candidate's ranks.
    fn local(&self, candidate: &Candidate) -> Local {
        let make = || {
            let layout = Layout::new(&self.plan.model, &self.parameters, candidate.cuts())?;
            let on_gpu = !self.cluster.node.cores;
            Ok(Rc::new(RankModel::new(self.plan, &self.parameters, &layout, on_gpu)?))
        };
        self.locals.borrow_mut().entry(candidate.cut_key()).or_insert_with(make).clone()
    }

    /// What computes for a rank.
    fn kernels(&self, candidate: &Candidate) -> Kernels<'_> {
        Kernels {
            device: &self.cluster.device,
            precision: self.plan.storage.precision,
            zeros: self.plan.pruning.as_ref().map_or(0.0, |pruning| pruning.sparsity),
            devices: self.cluster.node.devices_each(candidate.ranks()),
        }
    }

    /// What the passes of each block take.
    fn passes(&self, candidate: &Candidate) -> Result<Rc<Vec<Passes>>, Error> {
        let sharers = if self.cluster.node.cores { candidate.ranks() } else { 1 };
        let key = (candidate.cut_key(), candidate.micro_batch, candidate.recompute, sharers);
        if let Some(known) = self.passes.borrow().get(&key) {
            return Ok(known.clone());
        }
        let at = self.place(candidate);
        let found = Rc::new(block_passes(&self.local(candidate)?.local.model, &at)?);
        self.passes.borrow_mut().insert(key, found.clone());
        Ok(found)
    }
}
