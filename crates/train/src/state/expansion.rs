//! Expansion: the weights of a block, dense while it runs, where they rest compressed or in shards.
//!
//! A pass enters one block after the other. What is stored compressed is expanded into scratch memory when its
//! block is entered, which is given back when the block is left: of the model one block is dense at a time. A
//! GPU does better with two: while one block runs, the next is expanded beside it. At a turn (from the last
//! block's forward to the loss and to its backward) the same block is entered again, and what was expanded
//! for it serves again.
//!
//! What ranks have shards of (ZeRO-3) is gathered first: its kept values, or all where there is no mask. While
//! a block runs, those of the next are on their way on any device. All ranks of a group enter the same blocks in
//! the same order, so that they call the same gathers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};

use espalier_comm::Communicator;
use espalier_nn::weights::{BufferId, EnteredWeights, ParameterId, WeightStore};
use espalier_tensor::ops::compress::{Compressed, Expanding, expand_ahead, expand_all};
use espalier_tensor::ops::sparse::SparseWeight;
use espalier_tensor::{Category, Error, Tensor};

use super::stored_weight::{StoredForm, StoredWeight};
use crate::shard_gather::{GatheredShards, PendingAllGather, VectorShard};

/// Weights that passes enter block by block.
pub(super) trait StoredWeights: WeightStore {
    fn stored(&self, id: ParameterId) -> &StoredWeight;

    /// The number of the group that has shards of a parameter.
    fn group(&self, id: ParameterId) -> usize;
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
    weights: ReadyWeights,
}

#[derive(Debug)]
enum ReadyWeights {
    /// The block was left, and may be entered again.
    Made(MadeWeights),
    /// It is the next: what is expanded ahead, and what is gathered.
    Begun { expanding: Option<Expanding>, gathering: Vec<PendingAllGather> },
}

/// What was made of the weights of a block.
#[derive(Debug, Default)]
struct MadeWeights {
    dense: Vec<(ParameterId, Tensor)>,
    /// Kept values, gathered, of those that products read without their zeros.
    kept: Vec<(ParameterId, Tensor)>,
}

/// The parameters of a block of which something is made when it is entered.
struct BlockParams {
    /// Those that are here in full, and are expanded.
    expanded: Vec<ParameterId>,
    /// Those of them that products read as they are, and that something may ask for all the same.
    lazy: Vec<ParameterId>,
    /// Those of which ranks have shards.
    gathered: Vec<ParameterId>,
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

    /// The parameters of a block of which something is made.
    fn params_of(&self, weights: &dyn StoredWeights, block: usize) -> BlockParams {
        let ids = self.blocks.get(block).into_iter().flatten().copied();
        let (gathered, here): (Vec<_>, Vec<_>) =
            ids.partition(|id| matches!(weights.stored(*id).form, StoredForm::Sharded(_)));
        let is_stored = |id: &ParameterId| {
            matches!(weights.stored(*id).form, StoredForm::Compressed(_) | StoredForm::Initial(_))
        };
        let (expanded, lazy) =
            here.into_iter().filter(is_stored).partition(|id| weights.stored(*id).sparse.is_none());
        BlockParams { expanded, lazy, gathered }
    }

    /// Makes a block's weights dense, and begins with those of the next one: what costs no time.
    pub fn enter<'a>(
        &'a self,
        weights: &'a dyn StoredWeights,
        block: usize,
        next: Option<usize>,
    ) -> espalier_nn::Result<Option<EnteredWeights<'a>>> {
        let params = self.params_of(weights, block);
        let mut all = params.expanded.iter().chain(&params.lazy).chain(&params.gathered);
        let Some(first) = all.next() else { return Ok(None) };
        let (device, _) = weights.stored(*first).device_and_dtype();
        let is_captured = device.is_recording();
        let made = match if is_captured { None } else { self.take(block) } {
            Some(ReadyWeights::Made(made)) => made,
            Some(ReadyWeights::Begun { expanding, gathering }) => {
                params.make(weights, expanding, gathering)?
            }
            None => params.make(weights, None, gathers(weights, &params.gathered)?)?,
        };
        if let Some(next) = next {
            self.prefetch(weights, next, device.works_ahead())?;
        }
        let sparse = made.kept.iter().map(|(id, _)| *id);
        Ok(Some(Box::new(EnteredBlock {
            weights,
            // What is captured exists when the graph runs, not now.
            scratch: (!is_captured).then_some(self),
            block,
            lazy: params.lazy.into_iter().chain(sparse).map(|id| (id, OnceLock::new())).collect(),
            made,
        })))
    }

    /// Takes what is ready of a block; what is ready of another goes.
    fn take(&self, block: usize) -> Option<ReadyWeights> {
        let ready = self.shared.ready.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        Some(ready.filter(|ready| (ready.owner, ready.block) == (self.owner, block))?.weights)
    }

    /// Begins with a block ahead of its use: gathers, and expands where that is done beside the other work.
    fn prefetch(
        &self,
        weights: &dyn StoredWeights,
        block: usize,
        expands_ahead: bool,
    ) -> espalier_nn::Result<()> {
        let params = self.params_of(weights, block);
        let compressed =
            all_compressed(weights, &params.expanded).filter(|all| expands_ahead && !all.is_empty());
        let expanding = compressed.map(|all| expand_ahead(&all, Category::Workspace)).transpose()?;
        let gathering = gathers(weights, &params.gathered)?;
        if expanding.is_some() || !gathering.is_empty() {
            let weights = ReadyWeights::Begun { expanding, gathering };
            self.set_ready(Some(ReadyBlock { owner: self.owner, block, weights }));
        }
        Ok(())
    }

    /// Keeps what was made of a block that is left, unless another is ready.
    fn keep(&self, block: usize, made: MadeWeights) {
        let mut ready = self.shared.ready.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if ready.is_none() && !(made.dense.is_empty() && made.kept.is_empty()) {
            *ready = Some(ReadyBlock { owner: self.owner, block, weights: ReadyWeights::Made(made) });
        }
    }
}

impl BlockParams {
    /// Makes all of it, from what was begun.
    fn make(
        &self,
        weights: &dyn StoredWeights,
        expanding: Option<Expanding>,
        gathering: Vec<PendingAllGather>,
    ) -> espalier_nn::Result<MadeWeights> {
        let dense = match expanding {
            Some(expanding) => expanding.wait()?,
            None => expanded(weights, &self.expanded)?,
        };
        let mut made =
            MadeWeights { dense: self.expanded.iter().copied().zip(dense).collect(), kept: Vec::new() };
        for message in gathering {
            made.take(weights, message.wait()?)?;
        }
        Ok(made)
    }
}

impl MadeWeights {
    /// Takes weights whose shards have arrived.
    fn take(&mut self, weights: &dyn StoredWeights, arrived: GatheredShards) -> espalier_nn::Result<()> {
        let mut masked = Vec::new();
        for (id, values) in arrived.into_vectors()? {
            let stored = weights.stored(id);
            match (&stored.mask, &stored.sparse) {
                (None, _) => self.dense.push((id, values.reshape(&stored.shape))),
                (Some(_), Some(_)) => self.kept.push((id, values)),
                (Some(mask), None) => masked.push((id, values, mask, &stored.shape)),
            }
        }
        let compressed: Vec<Compressed<'_>> =
            masked.iter().map(|(_, kept, mask, shape)| Compressed { kept, mask, shape }).collect();
        let dense = expand_all(&compressed, Category::Workspace)?;
        self.dense.extend(masked.iter().map(|(id, ..)| *id).zip(dense));
        Ok(())
    }
}

/// Starts to gather some weights of which ranks have shards.
fn gathers(weights: &dyn StoredWeights, ids: &[ParameterId]) -> espalier_nn::Result<Vec<PendingAllGather>> {
    let mut groups: BTreeMap<usize, (&Communicator, Vec<VectorShard<'_>>)> = BTreeMap::new();
    for id in ids {
        if let Some((shard, sharding)) = weights.stored(*id).to_gather(*id) {
            groups.entry(weights.group(*id)).or_insert((&sharding.group, Vec::new())).1.push(shard);
        }
    }
    let mut gathering = Vec::new();
    for (group, shards) in groups.into_values() {
        for packet in PendingAllGather::packets(&shards) {
            let packet: Vec<&VectorShard<'_>> = packet.iter().map(|i| &shards[*i]).collect();
            gathering.push(PendingAllGather::start(&packet, group)?);
        }
    }
    Ok(gathering)
}

/// Some weights as kept values, where all of them are stored so.
fn all_compressed<'a>(weights: &'a dyn StoredWeights, ids: &[ParameterId]) -> Option<Vec<Compressed<'a>>> {
    ids.iter().map(|id| weights.stored(*id).compressed()).collect()
}

/// Some weights dense, now.
fn expanded(weights: &dyn StoredWeights, ids: &[ParameterId]) -> Result<Vec<Tensor>, Error> {
    match all_compressed(weights, ids) {
        Some(compressed) => expand_all(&compressed, Category::Workspace),
        None => ids.iter().map(|id| weights.stored(*id).expanded(Category::Workspace)).collect(),
    }
}

/// A block that a pass is in.
struct EnteredBlock<'a> {
    weights: &'a dyn StoredWeights,
    /// Where its dense weights go when it is left.
    scratch: Option<&'a ExpansionScratch>,
    block: usize,
    made: MadeWeights,
    /// Those that products read without their zeros: dense when something else has asked for it.
    lazy: Vec<(ParameterId, OnceLock<Tensor>)>,
}

impl EnteredBlock<'_> {
    fn lazy(&self, id: ParameterId) -> Option<&OnceLock<Tensor>> {
        self.lazy.iter().find(|(lazy, _)| *lazy == id).map(|(_, dense)| dense)
    }

    fn gathered(&self, id: ParameterId) -> Option<&Tensor> {
        self.made.kept.iter().find(|(kept, _)| *kept == id).map(|(_, kept)| kept)
    }
}

impl WeightStore for EnteredBlock<'_> {
    fn get(&self, id: ParameterId) -> &Tensor {
        let dense = self.made.dense.iter().find(|(dense, _)| *dense == id).map(|(_, dense)| dense);
        dense.or_else(|| self.lazy(id)?.get()).unwrap_or_else(|| self.weights.get(id))
    }

    fn dense(&self, id: ParameterId) -> espalier_nn::Result<&Tensor> {
        if let Some(lazy) = self.lazy(id).filter(|lazy| lazy.get().is_none()) {
            let stored = self.weights.stored(id);
            let dense = match self.gathered(id) {
                Some(kept) => stored.dense_of(kept.clone(), Category::Workspace)?,
                None => stored.expanded(Category::Workspace)?,
            };
            return Ok(lazy.get_or_init(|| dense));
        }
        Ok(self.get(id))
    }

    fn at_rest(&self, id: ParameterId) -> &Tensor {
        self.gathered(id).unwrap_or_else(|| self.weights.at_rest(id))
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
            scratch.keep(self.block, std::mem::take(&mut self.made));
        }
    }
}

/// The weights of a rank as they were at some update, for passes that began with them: running statistics are
/// no part of them.
#[derive(Debug)]
pub struct WeightVersion {
    // Before the weights, which something may still be expanded from.
    pub(super) scratch: ExpansionScratch,
    pub(super) weights: Vec<StoredWeight>,
    /// The number of each parameter's group.
    pub(super) groups: Vec<usize>,
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

    fn group(&self, id: ParameterId) -> usize {
        self.groups[id.0]
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

    fn enter(&self, block: usize, next: Option<usize>) -> espalier_nn::Result<Option<EnteredWeights<'_>>> {
        self.scratch.enter(self, block, next)
    }
}
