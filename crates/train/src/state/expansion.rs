//! Expansion: the compressed weights of a block, dense while it runs.
//!
//! A pass enters one block after the other. What is stored compressed is expanded into scratch memory when its
//! block is entered, which is given back when the block is left: of the model one block is dense at a time. A
//! GPU does better with two: while one block runs, the next is expanded beside it. At a turn (from the last
//! block's forward to the loss and to its backward) the same block is entered again, and what was expanded
//! for it serves again.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};

use espalier_nn::weights::{BufferId, ParameterId, WeightStore};
use espalier_tensor::ops::compress::{Compressed, Expanding, expand_ahead, expand_all};
use espalier_tensor::ops::sparse::SparseWeight;
use espalier_tensor::{Category, Error, Tensor};

use super::stored_weight::{StoredForm, StoredWeight};

/// Weights that passes enter block by block.
pub(super) trait StoredWeights: WeightStore {
    fn stored(&self, id: ParameterId) -> &StoredWeight;
}

/// Where the blocks of some weights are made dense. Those of a model and of older versions of it share the
/// memory.
#[derive(Debug)]
pub(super) struct ExpansionScratch {
    /// Of each block the parameters that it uses.
    blocks: Arc<Vec<Vec<ParameterId>>>,
    shared: Arc<ScratchBlocks>,
    /// Whose weights these are, among those that share the memory.
    owner: u64,
}

#[derive(Debug, Default)]
struct ScratchBlocks {
    owners: AtomicU64,
    /// A block that is dense, or becomes so, and that nobody is in.
    ready: Mutex<Option<ReadyBlock>>,
}

#[derive(Debug)]
struct ReadyBlock {
    owner: u64,
    block: usize,
    dense: Expanding,
}

impl ExpansionScratch {
    /// For parameters of which each is used by some blocks.
    pub fn new<'a>(users: impl Iterator<Item = (ParameterId, &'a [usize])>) -> ExpansionScratch {
        let mut blocks: Vec<Vec<ParameterId>> = Vec::new();
        for (id, users) in users {
            for block in users {
                blocks.resize_with(blocks.len().max(block + 1), Vec::new);
                blocks[*block].push(id);
            }
        }
        ExpansionScratch { blocks: Arc::new(blocks), shared: Arc::default(), owner: 0 }
    }

    /// The same for a copy of the weights.
    pub(crate) fn for_copy(&self) -> ExpansionScratch {
        let owner = self.shared.owners.fetch_add(1, Relaxed) + 1;
        ExpansionScratch { blocks: self.blocks.clone(), shared: self.shared.clone(), owner }
    }

    /// Lets go of what is dense of a block that nobody is in: its weights are about to change, or to go.
    pub fn clear(&self) {
        self.set_ready(None);
    }

    fn set_ready(&self, ready: Option<ReadyBlock>) {
        *self.shared.ready.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = ready;
    }

    /// The parameters of a block that are expanded when it is entered, and those that something may ask for
    /// all the same.
    fn to_expand(&self, weights: &dyn StoredWeights, block: usize) -> (Vec<ParameterId>, Vec<ParameterId>) {
        let ids = self.blocks.get(block).into_iter().flatten().copied();
        let is_stored = |id: &ParameterId| {
            matches!(weights.stored(*id).form, StoredForm::Compressed(_) | StoredForm::Initial(_))
        };
        ids.filter(is_stored).partition(|id| weights.stored(*id).sparse.is_none())
    }

    /// Makes a block's weights dense, and begins with those of the next one where that costs no time.
    pub fn enter<'a>(
        &'a self,
        weights: &'a dyn StoredWeights,
        block: usize,
        next: Option<usize>,
    ) -> espalier_nn::Result<Option<Box<dyn WeightStore + 'a>>> {
        let (ids, lazy) = self.to_expand(weights, block);
        let Some(first) = ids.first().or(lazy.first()) else { return Ok(None) };
        let (device, _) = weights.stored(*first).device_and_dtype();
        let is_captured = device.is_recording();
        let dense = match if is_captured { None } else { self.take(block) } {
            Some(ready) => ready.wait()?,
            None => expanded(weights, &ids)?,
        };
        if let Some(next) = next.filter(|_| device.works_ahead()) {
            self.prefetch(weights, next)?;
        }
        Ok(Some(Box::new(EnteredBlock {
            weights,
            // What is captured exists when the graph runs, not now.
            scratch: (!is_captured).then_some(self),
            block,
            dense: ids.into_iter().zip(dense).collect(),
            lazy: lazy.into_iter().map(|id| (id, OnceLock::new())).collect(),
        })))
    }

    /// Takes what is ready of a block; what is ready of another goes.
    fn take(&self, block: usize) -> Option<Expanding> {
        let ready = self.shared.ready.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        Some(ready.filter(|ready| (ready.owner, ready.block) == (self.owner, block))?.dense)
    }

    /// Begins to expand a block ahead of its use.
    fn prefetch(&self, weights: &dyn StoredWeights, block: usize) -> espalier_nn::Result<()> {
        let (ids, _) = self.to_expand(weights, block);
        if let Some(compressed) = all_compressed(weights, &ids).filter(|all| !all.is_empty()) {
            let dense = expand_ahead(&compressed, Category::Workspace)?;
            self.set_ready(Some(ReadyBlock { owner: self.owner, block, dense }));
        }
        Ok(())
    }

    /// Keeps what was dense of a block that is left, unless another is ready.
    fn keep(&self, block: usize, dense: Vec<(ParameterId, Tensor)>) {
        let mut ready = self.shared.ready.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if ready.is_none() && !dense.is_empty() {
            let dense = Expanding::ready(dense.into_iter().map(|(_, dense)| dense).collect());
            *ready = Some(ReadyBlock { owner: self.owner, block, dense });
        }
    }
}

/// Some weights as kept values, where all of them are stored so.
fn all_compressed<'a>(weights: &'a dyn StoredWeights, ids: &[ParameterId]) -> Option<Vec<Compressed<'a>>> {
    ids.iter().map(|id| weights.stored(*id).compressed()).collect()
}

/// Some weights dense, now.
fn expanded(weights: &dyn StoredWeights, ids: &[ParameterId]) -> Result<Vec<Tensor>, Error> {
    match all_compressed(weights, ids) {
        Some(compressed) => expand_all(&compressed, Category::Workspace),
        None => ids.iter().map(|id| weights.stored(*id).dense(Category::Workspace)).collect(),
    }
}

/// A block that a pass is in.
struct EnteredBlock<'a> {
    weights: &'a dyn StoredWeights,
    /// Where its dense weights go when it is left.
    scratch: Option<&'a ExpansionScratch>,
    block: usize,
    dense: Vec<(ParameterId, Tensor)>,
    /// Those that products read without their zeros: dense when something else has asked for it.
    lazy: Vec<(ParameterId, OnceLock<Tensor>)>,
}

impl EnteredBlock<'_> {
    fn lazy(&self, id: ParameterId) -> Option<&OnceLock<Tensor>> {
        self.lazy.iter().find(|(lazy, _)| *lazy == id).map(|(_, dense)| dense)
    }
}

impl WeightStore for EnteredBlock<'_> {
    fn get(&self, id: ParameterId) -> &Tensor {
        let dense = self.dense.iter().find(|(dense, _)| *dense == id).map(|(_, dense)| dense);
        dense.or_else(|| self.lazy(id)?.get()).unwrap_or_else(|| self.weights.get(id))
    }

    fn dense(&self, id: ParameterId) -> espalier_nn::Result<&Tensor> {
        if let Some(lazy) = self.lazy(id).filter(|lazy| lazy.get().is_none()) {
            let dense = self.weights.stored(id).dense(Category::Workspace)?;
            return Ok(lazy.get_or_init(|| dense));
        }
        Ok(self.get(id))
    }

    fn at_rest(&self, id: ParameterId) -> &Tensor {
        self.weights.at_rest(id)
    }

    fn sparse(&self, id: ParameterId) -> Option<&SparseWeight> {
        self.weights.sparse(id)
    }

    fn buffer(&self, id: BufferId) -> &Tensor {
        self.weights.buffer(id)
    }
}

impl Drop for EnteredBlock<'_> {
    fn drop(&mut self) {
        if let Some(scratch) = self.scratch {
            scratch.keep(self.block, std::mem::take(&mut self.dense));
        }
    }
}

/// The weights of a rank as they were at some update, for passes that began with them: running statistics are
/// no part of them.
#[derive(Debug)]
pub struct WeightVersion {
    // Before the weights, which something may still be expanded from.
    scratch: ExpansionScratch,
    weights: Vec<StoredWeight>,
}

impl WeightVersion {
    pub(super) fn new(scratch: &ExpansionScratch, weights: Vec<StoredWeight>) -> WeightVersion {
        WeightVersion { scratch: scratch.for_copy(), weights }
    }
}

impl Drop for WeightVersion {
    fn drop(&mut self) {
        self.scratch.clear();
    }
}

impl StoredWeights for WeightVersion {
    fn stored(&self, id: ParameterId) -> &StoredWeight {
        &self.weights[id.0]
    }
}

impl WeightStore for WeightVersion {
    fn get(&self, id: ParameterId) -> &Tensor {
        match &self.weights[id.0].form {
            StoredForm::Dense(weight) => weight,
            _ => panic!("a weight of a block that was not entered"),
        }
    }

    fn at_rest(&self, id: ParameterId) -> &Tensor {
        self.weights[id.0].tensor().expect("a weight of this stage")
    }

    fn sparse(&self, id: ParameterId) -> Option<&SparseWeight> {
        self.weights[id.0].sparse.as_ref()
    }

    fn buffer(&self, _: BufferId) -> &Tensor {
        panic!("a version of weights has no statistics")
    }

    fn enter(
        &self,
        block: usize,
        next: Option<usize>,
    ) -> espalier_nn::Result<Option<Box<dyn WeightStore + '_>>> {
        self.scratch.enter(self, block, next)
    }
}
