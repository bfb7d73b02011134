//! A step in virtual time, and what it holds: the schedule's own actions, with what kernels and messages take on a cluster under an
//! engine.
//!
//! [`passes`] says what the blocks of a rank's model take, [`collective`] what ranks take to talk, [`state`] what they hold;
//! [`step`] walks the lists.

pub mod candidate;
pub mod collective;
pub mod passes;
pub mod state;
mod step;

pub use candidate::{Candidate, LayoutRecord};
pub use step::{Breakdown, Estimate};

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use crate::cluster::Cluster;
use crate::cost::Kernels;
use crate::engine::Engine;
use crate::error::Error;
use crate::layout::{Layout, LocalModel};
use crate::plan::Plan;
use crate::spec::{Parameter, Recompute};
use passes::{Passes, Place, block_passes};

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
    passes: RefCell<HashMap<(CutKey, usize, Recompute), Rc<Vec<Passes>>>>,
}

/// What tells two cuts of a model's tensors apart: tensor ranks, along the sequence or not, and the grid over images.
type CutKey = (usize, bool, [usize; 2]);

/// A rank's model, or why there is none.
type Local = Result<Rc<LocalModel>, Error>;

impl<'a> Job<'a> {
    /// A run on one rank, whose layout is to be found.
    pub fn new(plan: &'a Plan, cluster: &'a Cluster, engine: Engine) -> Job<'a> {
        let (locals, passes) = (RefCell::default(), RefCell::default());
        Job { plan, cluster, engine, parameters: plan.model.parameters(), locals, passes }
    }

    /// The model of the first of the ranks that have parts of the same layers: none has more.
    fn local(&self, candidate: &Candidate) -> Local {
        let make = || {
            let layout = Layout::new(&self.plan.model, &self.parameters, candidate.cuts())?;
            Ok(Rc::new(layout.peers()[0].clone()))
        };
        self.locals.borrow_mut().entry(candidate.cut_key()).or_insert_with(make).clone()
    }

    /// What the passes of each block take.
    fn passes(&self, candidate: &Candidate) -> Result<Rc<Vec<Passes>>, Error> {
        let key = (candidate.cut_key(), candidate.micro_batch, candidate.recompute);
        if let Some(known) = self.passes.borrow().get(&key) {
            return Ok(known.clone());
        }
        let at = Place {
            kernels: Kernels { device: &self.cluster.device, precision: self.plan.storage.precision },
            engine: &self.engine,
            tensor: collective::Group::new(self.cluster, candidate.tensor, 1),
            spatial: collective::Group::new(self.cluster, candidate.spatial(), candidate.tensor),
            recompute: candidate.recompute,
            samples: candidate.micro_batch,
        };
        let found = Rc::new(block_passes(&self.local(candidate)?.model, &at)?);
        self.passes.borrow_mut().insert(key, found.clone());
        Ok(found)
    }
}
