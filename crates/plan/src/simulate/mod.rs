//! A step in virtual time, and what it holds: the schedule's own actions, with what kernels and messages take
//! on a cluster under an engine.
//!
//! [`passes`] says what the blocks of a rank's model take (`convolution` its convolutions), [`collective`]
//! what collectives take, `reductions` which gradients are all-reduced, [`state`] what ranks hold;
//! `rank_model` keeps what candidates have in common; `step` walks the lists; `script` is what a rank does,
//! for a worker that takes the planned time; `calibrate` refits a cluster's rates to what runs took.

mod accuracy;
mod block_weights;
mod breakdown;
mod calibrate;
pub mod candidate;
pub mod collective;
mod convolution;
pub mod passes;
mod rank_model;
mod reductions;
mod schedules;
mod script;
pub mod seconds;
mod setup;
mod skipped;
pub mod state;
mod step;
mod times;

pub use accuracy::{Accuracy, BestRun};
pub use breakdown::Breakdown;
pub use calibrate::{Calibrated, MeasuredRun};
pub use candidate::{Candidate, LayoutRecord};
pub use script::{Script, ScriptLayer, ScriptStage};
pub use step::Estimate;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use crate::cluster::Cluster;
use crate::cluster::DeviceKernels;
use crate::engine::EngineProfile;
use crate::error::Error;
use crate::layout::Layout;
use crate::plan::Plan;
use crate::spec::{Parameter, RecomputeMode};
use crate::stages::{StageBlocks, even_stage_blocks};
use passes::{Passes, block_passes};
use rank_model::RankModel;
use schedules::ScheduleCache;

/// What is to run, on what and by what. Candidates for it share what they have in common: ranks' models and
/// what their passes take.
pub struct Simulation<'a> {
    /// The run, on one rank.
    pub plan: &'a Plan,
    /// Where it is to run.
    pub cluster: &'a Cluster,
    /// What runs it.
    pub engine: EngineProfile,
    parameters: Vec<Parameter>,
    locals: RefCell<HashMap<PartitionKey, RankModelResult>>,
    passes: RefCell<HashMap<PassKey, Rc<Vec<Passes>>>>,
    stage_blocks: RefCell<HashMap<usize, Rc<StageBlocks>>>,
    schedules: Rc<ScheduleCache>,
}

/// What tells two partitions of a model's tensors apart: tensor ranks, along the sequence or not, and the
/// grid over images.
type PartitionKey = (usize, bool, [usize; 2]);

/// What tells the passes of two candidates apart: the partition, samples of a micro-batch, what is run again, and
/// how many ranks share the cores, and whether they are captured.
type PassKey = (PartitionKey, usize, RecomputeMode, usize, bool);

/// A rank's model, or why there is none.
type RankModelResult = Result<Rc<RankModel>, Error>;

impl<'a> Simulation<'a> {
    /// A run on one rank, whose layout is to be found.
    pub fn new(plan: &'a Plan, cluster: &'a Cluster, engine: EngineProfile) -> Simulation<'a> {
        Simulation {
            plan,
            cluster,
            engine,
            parameters: plan.model.parameters(),
            locals: RefCell::default(),
            passes: RefCell::default(),
            stage_blocks: RefCell::default(),
            schedules: Rc::default(),
        }
    }

    /// Another run or another cluster, by the same engine: schedules are the same.
    pub fn with<'b>(&self, plan: &'b Plan, cluster: &'b Cluster) -> Simulation<'b> {
        Simulation { schedules: self.schedules.clone(), ..Simulation::new(plan, cluster, self.engine) }
    }

    /// So many virtual stages of the model.
    fn stage_blocks(&self, number: usize) -> Result<Rc<StageBlocks>, Error> {
        if let Some(known) = self.stage_blocks.borrow().get(&number) {
            return Ok(known.clone());
        }
        let storage = &self.plan.storage;
        let each = 2 * storage.precision.size() + storage.optimizer_bytes;
        let stage_blocks = match number {
            1 => std::iter::once(0..self.plan.model.blocks.len()).collect(),
            _ => even_stage_blocks(&self.plan.model, number, each)?,
        };
        let stage_blocks = Rc::new(stage_blocks);
        self.stage_blocks.borrow_mut().insert(number, stage_blocks.clone());
        Ok(stage_blocks)
    }

    /// The model of a candidate's ranks.
    fn local(&self, candidate: &Candidate) -> RankModelResult {
        let make = || {
            let layout = Layout::new(&self.plan.model, &self.parameters, candidate.cuts())?;
            let on_gpu = !self.cluster.node.cores;
            Ok(Rc::new(RankModel::new(self.plan, &self.parameters, &layout, on_gpu)?))
        };
        self.locals.borrow_mut().entry(candidate.partition_key()).or_insert_with(make).clone()
    }

    /// What computes for a rank.
    fn kernels(&self, candidate: &Candidate) -> DeviceKernels<'_> {
        DeviceKernels {
            device: &self.cluster.device,
            precision: self.plan.storage.precision,
            zeros: self.plan.pruning.as_ref().map_or(0.0, |pruning| pruning.sparsity),
            devices: self.cluster.node.devices_each(candidate.ranks()),
            captured: self.captures(candidate),
        }
    }

    /// Whether a candidate's passes are captured as a CUDA graph.
    fn captures(&self, candidate: &Candidate) -> bool {
        let micro_batches = candidate.micro_batches(self.plan.batch.samples).unwrap_or(0);
        self.engine.captures
            && !self.cluster.node.cores
            && self.plan.model.can_capture(candidate.ranks(), micro_batches)
    }

    /// What the passes of each block take.
    fn passes(&self, candidate: &Candidate) -> Result<Rc<Vec<Passes>>, Error> {
        let sharers = if self.cluster.node.cores { candidate.ranks() } else { 1 };
        let captured = self.captures(candidate);
        let key = (candidate.partition_key(), candidate.micro_batch, candidate.recompute, sharers, captured);
        if let Some(known) = self.passes.borrow().get(&key) {
            return Ok(known.clone());
        }
        let at = self.pass_context(candidate);
        let found = Rc::new(block_passes(&self.local(candidate)?.local.model, &at)?);
        self.passes.borrow_mut().insert(key, found.clone());
        Ok(found)
    }
}
