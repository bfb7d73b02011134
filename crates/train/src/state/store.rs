//! The parameters that a rank trains: of each, in one value, what the plan says of it, its mask, weight,
//! gradient and optimizer state.
//!
//! A weight may be stored in another form than kernels read. This store alone turns the one into the other:
//! layers are given a block's weights by [`WeightStore::enter`], and whoever else reads or writes a
//! weight asks [`Param`] for what it means: all of it as a dense tensor, or the values that are kept.

use std::sync::Arc;

use espalier_comm::Communicator;
use espalier_nn::weights::{
    BufferId, EnteredWeights, ParameterId, TensorNames, WeightStore, Weights, digest, fresh, hash_of, started,
};
use espalier_plan::layout::LocalModel;
use espalier_plan::{GroupRank, ParamPlan, RankParams, Shard, spec};
use espalier_tensor::ops::reduce::squared_norm_all;
use espalier_tensor::ops::sparse::SparseWeight;
use espalier_tensor::{Category, DType, Device, Mask, Tensor};

use super::expansion::{ExpansionScratch, StoredWeights, WeightVersion};
use super::param::{Param, ParamTargets};
use super::stored_weight::{InitialWeight, StoredForm, StoredWeight, WeightSharding};
use crate::Result;

/// How weights that pruning may touch are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WeightStorageMode {
    /// As kernels read them.
    Dense,
    /// As kept values from when they have masks on.
    Compressed,
    /// The same, and until then they are not initialised: their masks are found without a pass over them.
    Uninitialised,
}

/// How weights are stored, and with whom.
#[derive(Clone, Copy)]
pub(crate) struct WeightStorage<'a> {
    pub mode: WeightStorageMode,
    /// The ranks of a group, by its number in the plan, where there are others: they have the other shards of
    /// weights that the plan shards.
    pub groups: &'a dyn Fn(usize) -> Option<Communicator>,
}

impl WeightStorage<'_> {
    const DENSE: WeightStorage<'static> = WeightStorage { mode: WeightStorageMode::Dense, groups: &|_| None };
}

/// All parameters of a model, those of other stages without weights, and the running statistics of batch norms.
#[derive(Debug)]
pub struct ParamStore {
    // Before the parameters, which something may still be expanded from.
    scratch: ExpansionScratch,
    params: Vec<Param>,
    statistics: Vec<Option<Tensor>>,
    names: Arc<TensorNames>,
    /// Whether gradients and state of masked parameters hold kept weights alone.
    compresses: bool,
    dtype: DType,
}

impl ParamStore {
    /// Fresh weights of what a rank holds of a model. `compresses` says whether gradients and state will hold
    /// kept weights alone.
    pub fn new(
        params: &RankParams,
        local: &LocalModel,
        device: &Device,
        dtype: DType,
        seed: u64,
        compresses: bool,
    ) -> Result<ParamStore> {
        ParamStore::with_storage(params, local, device, dtype, seed, compresses, WeightStorage::DENSE)
    }

    /// The same with weights that are stored in another form.
    pub(crate) fn with_storage(
        params: &RankParams,
        local: &LocalModel,
        device: &Device,
        dtype: DType,
        seed: u64,
        compresses: bool,
        weights: WeightStorage<'_>,
    ) -> Result<ParamStore> {
        let buffers = local.model.buffers();
        let names = Arc::new(TensorNames::of(&local.parameters, &buffers));
        let param = |(plan, parameter): (&ParamPlan, &spec::Parameter)| {
            let (parameter, shard) = (parameter.clone(), plan.shard.clone());
            let initial = InitialWeight { parameter, shard, device: device.clone(), dtype, seed };
            let group = (weights.groups)(plan.group).filter(|_| plan.shards_weight);
            let sharding = group.map(|group| WeightSharding { group, member: plan.zero });
            let weight = match plan.is_here {
                false => StoredForm::Elsewhere,
                true if plan.prunable && weights.mode == WeightStorageMode::Uninitialised => {
                    StoredForm::Initial(Box::new(initial))
                }
                true if sharding.is_some() => StoredForm::Dense(initial.init(Category::Workspace)?),
                true => StoredForm::Dense(initial.init(Category::Weights)?),
            };
            let param = Param::new(plan.clone(), weight, compresses).sharding_weight(sharding)?;
            Ok(param.compressing_weight(weights.mode != WeightStorageMode::Dense))
        };
        let params_here = params.params.iter().zip(&local.parameters).map(param).collect::<Result<_>>()?;
        let statistic = |(group, buffer): (&usize, _)| {
            params.members[*group].map(|_| Ok(started(buffer, device)?)).transpose()
        };
        let statistics = params.statistics.iter().zip(&buffers).map(statistic).collect::<Result<_>>()?;
        Ok(ParamStore::of_params(params_here, statistics, names, compresses, dtype))
    }

    fn of_params(
        params: Vec<Param>,
        statistics: Vec<Option<Tensor>>,
        names: Arc<TensorNames>,
        compresses: bool,
        dtype: DType,
    ) -> ParamStore {
        let here = params.iter().filter(|param| param.is_here());
        let scratch = ExpansionScratch::new(here.map(|param| (param.id(), &param.plan.blocks[..])));
        ParamStore { scratch, params, statistics, names, compresses, dtype }
    }

    /// Parameters of a rank without weights: for whoever sends their gradients and no more.
    pub fn without_weights(params: &RankParams) -> ParamStore {
        let elsewhere = |plan: &ParamPlan| Param::new(plan.clone(), StoredForm::Elsewhere, false);
        let names =
            TensorNames::new(params.params.iter().map(|plan| plan.name.clone()).collect(), Vec::new());
        let params = params.params.iter().map(elsewhere).collect();
        ParamStore::of_params(params, Vec::new(), Arc::new(names), false, DType::F32)
    }

    /// Parameters of these names and weights, all of them here.
    pub fn of_tensors(weights: Vec<(&str, Tensor)>, compresses: bool) -> ParamStore {
        let names = weights.iter().map(|(name, _)| (*name).to_owned()).collect();
        let names = Arc::new(TensorNames::new(names, Vec::new()));
        let param = |(id, (name, weight)): (usize, (&str, Tensor))| {
            let plan = ParamPlan {
                id,
                name: name.to_owned(),
                shard: Shard::full(weight.shape()),
                is_here: true,
                is_split: false,
                group: 0,
                zero: GroupRank::SINGLE,
                shards_weight: false,
                is_owner: true,
                is_first_copy: true,
                decays: true,
                prunable: true,
                blocks: vec![id],
                is_tied: false,
            };
            Param::new(plan, StoredForm::Dense(weight), compresses)
        };
        let dtype = weights.first().map_or(DType::F32, |(_, weight)| weight.dtype());
        let params = weights.into_iter().enumerate().map(param).collect();
        ParamStore::of_params(params, Vec::new(), names, compresses, dtype)
    }

    /// Gives all weights and statistics the values that they started with, one at a time.
    pub(crate) fn initialise_again(&mut self, local: &LocalModel, seed: u64) -> Result<()> {
        self.scratch.clear();
        for (param, parameter) in self.params.iter_mut().zip(&local.parameters) {
            // What is not initialised yet has them anyway.
            let Some(weight) = param.at_rest() else { continue };
            let (device, dtype) = (weight.device(), weight.dtype());
            // The new one is counted as workspace until it replaces the old.
            let first = fresh(parameter, &param.plan.shard, &device, dtype, seed, Category::Workspace)?;
            param.stored.write(first)?;
        }
        for (tensor, buffer) in self.statistics.iter_mut().zip(&local.model.buffers()) {
            if let Some(tensor) = tensor {
                *tensor = started(buffer, &tensor.device())?;
            }
        }
        Ok(())
    }

    /// Whether they are those values. Where ranks have shards of weights all of them must ask.
    pub(crate) fn are_initial(&self, local: &LocalModel, seed: u64) -> Result<bool> {
        let mut are_initial = true;
        for (param, parameter) in self.params.iter().zip(&local.parameters) {
            let Some(weight) = param.at_rest() else { continue };
            // One that has found another value goes on where others of a group wait for its shards.
            if !are_initial && !param.is_weight_sharded() {
                continue;
            }
            let (device, dtype) = (weight.device(), weight.dtype());
            let first = fresh(parameter, &param.plan.shard, &device, dtype, seed, Category::Workspace)?;
            are_initial &= first.read_bytes()? == param.dense()?.read_bytes()?;
        }
        for (tensor, buffer) in self.statistics.iter().zip(&local.model.buffers()) {
            let Some(tensor) = tensor else { continue };
            are_initial &= started(buffer, &tensor.device())?.read_bytes()? == tensor.read_bytes()?;
        }
        Ok(are_initial)
    }

    /// Lets go of what is dense of a block that nobody is in.
    pub(crate) fn release_blocks(&self) {
        self.scratch.clear();
    }

    /// Whether gradients and state of masked parameters hold kept weights alone.
    pub fn compresses(&self) -> bool {
        self.compresses
    }

    /// The type of all weights.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Parameters of the model, here or not.
    pub fn len(&self) -> usize {
        self.params.len()
    }

    pub fn is_empty(&self) -> bool {
        self.params.is_empty()
    }

    /// Those that are here.
    pub fn iter(&self) -> impl Iterator<Item = (ParameterId, &Param)> {
        let params = self.params.iter().enumerate().map(|(id, param)| (ParameterId(id), param));
        params.filter(|(_, param)| param.is_here())
    }

    /// The same, to be changed.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (ParameterId, &mut Param)> {
        self.scratch.clear();
        let params = self.params.iter_mut().enumerate().map(|(id, param)| (ParameterId(id), param));
        params.filter(|(_, param)| param.is_here())
    }

    /// The ids of those that are here.
    pub fn ids(&self) -> impl Iterator<Item = ParameterId> + use<> {
        self.iter().map(|(id, _)| id).collect::<Vec<_>>().into_iter()
    }

    /// A parameter, here or not.
    pub fn param(&self, id: ParameterId) -> &Param {
        &self.params[id.0]
    }

    /// The same, to be changed.
    pub fn param_mut(&mut self, id: ParameterId) -> &mut Param {
        self.scratch.clear();
        &mut self.params[id.0]
    }

    /// Whether a parameter is here.
    pub fn holds(&self, id: ParameterId) -> bool {
        self.params[id.0].is_here()
    }

    pub fn name(&self, id: ParameterId) -> &str {
        self.names.name(id)
    }

    /// The parameter of a name, here or not.
    pub fn find(&self, name: &str) -> Option<ParameterId> {
        self.names.parameter(name)
    }

    /// A parameter's mask; none while all of it is kept.
    pub fn mask(&self, id: ParameterId) -> Option<&Mask> {
        self.params[id.0].mask()
    }

    pub fn masks(&self) -> impl Iterator<Item = (ParameterId, &Mask)> {
        self.iter().filter_map(|(id, param)| Some((id, param.mask()?)))
    }

    /// Running statistics of the model, here or not.
    pub fn statistics(&self) -> impl ExactSizeIterator<Item = (BufferId, Option<&Tensor>)> {
        self.statistics.iter().enumerate().map(|(i, tensor)| (BufferId(i), tensor.as_ref()))
    }

    /// A running statistic's name.
    pub fn statistic_name(&self, id: BufferId) -> &str {
        self.names.statistic_name(id)
    }

    /// A running statistic, to be changed.
    pub(crate) fn buffer_mut(&mut self, id: BufferId) -> &mut Tensor {
        self.statistics[id.0].as_mut().expect("a statistic of this stage")
    }

    /// Two running statistics, to be changed.
    pub fn buffers_mut(&mut self, ids: [BufferId; 2]) -> [&mut Tensor; 2] {
        let two = self.statistics.get_disjoint_mut(ids.map(|id| id.0)).expect("two of this model");
        two.map(|statistic| statistic.as_mut().expect("a statistic of this stage"))
    }

    /// Weights as they are stored, and behind them running statistics, with their names: what is here, in the
    /// order of the model.
    pub fn named(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        let weights = self.iter().filter_map(|(id, param)| Some((self.names.name(id), param.at_rest()?)));
        let statistics =
            self.statistics().filter_map(|(id, tensor)| Some((self.statistic_name(id), tensor?)));
        weights.chain(statistics)
    }

    /// The same, to be changed.
    pub fn named_mut(&mut self) -> impl Iterator<Item = (&str, &mut Tensor)> {
        self.scratch.clear();
        let names = &self.names;
        let params = self.params.iter_mut().enumerate();
        let weights = params
            .filter_map(|(id, param)| Some((names.name(ParameterId(id)), param.stored.form.tensor_mut()?)));
        let statistics = self.statistics.iter_mut().enumerate();
        let statistics = statistics
            .filter_map(|(id, tensor)| Some((names.statistic_name(BufferId(id)), tensor.as_mut()?)));
        weights.chain(statistics)
    }

    /// Gives all weights and statistics here the values that `of` has for their names, as bytes of dense
    /// tensors; those of an odd number of bf16 may be followed by two more.
    pub(crate) fn write_all(&mut self, of: impl Fn(&str) -> Vec<u8>) -> Result<()> {
        for (_, param) in self.iter_mut() {
            let bytes = of(&param.plan.name);
            param.write(&bytes[..param.len() * param.dtype().bytes()])?;
        }
        for (id, statistic) in self.statistics.iter_mut().enumerate() {
            if let Some(statistic) = statistic {
                let bytes = of(self.names.statistic_name(BufferId(id)));
                statistic.copy_from_host(&bytes[..statistic.byte_len()])?;
            }
        }
        Ok(())
    }

    /// Of each parameter here the weight and the tensors of its state, and the statistics here, to be filled.
    pub(crate) fn load_targets(&mut self) -> Result<(Vec<ParamTargets<'_>>, Vec<&mut Tensor>)> {
        self.scratch.clear();
        let here = self.params.iter_mut().filter(|param| param.is_here());
        let targets = here.map(Param::load_targets).collect::<Result<_>>()?;
        Ok((targets, self.statistics.iter_mut().flatten().collect()))
    }

    /// A digest of each weight, made by `of`, and of each statistic, in the order of the model's, with zeros
    /// for what is not here.
    pub fn digests(&self, of: impl Fn(&Param) -> Result<[u8; 32]>) -> Result<Vec<[u8; 32]>> {
        let weights = self.params.iter().map(|param| if param.is_here() { of(param) } else { Ok([0; 32]) });
        let statistics = self.statistics.iter().map(|tensor| match tensor {
            Some(tensor) => Ok(digest(tensor)?),
            None => Ok([0; 32]),
        });
        weights.chain(statistics).collect()
    }

    /// What stands for all weights and statistics here, be they shards: blake3 of the digests.
    pub fn hash(&self) -> Result<String> {
        Ok(hash_of(&self.digests(|param| Ok(digest(&param.dense()?)?))?))
    }

    /// blake3 of the bits of all masks in the order of the parameters: ranks compare it to know that they
    /// prune alike.
    pub fn mask_hash(&self) -> Result<String> {
        let mut hasher = blake3::Hasher::new();
        for (id, mask) in self.masks() {
            hasher.update(&(id.0 as u64).to_le_bytes());
            for word in mask.read_words()? {
                hasher.update(&word.to_le_bytes());
            }
        }
        Ok(hasher.finalize().to_hex().to_string())
    }

    /// A copy whose weights are f32 and are multiplied with their zeros, which may be moved; statistics are
    /// shared.
    pub fn widened(&self) -> Result<Weights> {
        let copy = |param: &Param| param.widened(Category::Scoring);
        self.copied(self.statistics.clone(), vec![None; self.len()], copy)
    }

    /// A copy of the weights as they are now, for passes that train, in the form in which they are stored: running
    /// statistics are no part of them.
    pub fn version(&self) -> Result<WeightVersion> {
        let copy = |param: &Param| param.stored.duplicate(Category::Weights);
        let weights = self.params.iter().map(copy).collect::<std::result::Result<_, _>>()?;
        let groups = self.params.iter().map(|param| param.plan.group).collect();
        Ok(WeightVersion { scratch: self.scratch.for_copy(), weights, groups })
    }

    /// A copy of the weights as they are now, dense, to measure from: running statistics are no part of them.
    pub fn dense_copy(&self) -> Result<Weights> {
        let sparse = self.params.iter().map(|param| param.stored.sparse.clone()).collect();
        let copy = |param: &Param| match param.stored.form {
            StoredForm::Dense(ref weight) => Ok(weight.duplicate(Category::Weights)?),
            _ => Ok(param.stored.dense(Category::Weights)?),
        };
        self.copied(vec![None; self.statistics.len()], sparse, copy)
    }

    fn copied(
        &self,
        statistics: Vec<Option<Tensor>>,
        sparse: Vec<Option<SparseWeight>>,
        copy: impl Fn(&Param) -> Result<Tensor>,
    ) -> Result<Weights> {
        let one = |param: &Param| param.is_here().then(|| copy(param)).transpose();
        let parameters = self.params.iter().map(one).collect::<Result<_>>()?;
        Ok(Weights::of_tensors(self.names.clone(), parameters, statistics, sparse))
    }

    /// The squared norm of the gradients of some parameters, of those that are pruned over what is kept; NaN
    /// or infinite if any element is.
    pub(crate) fn squared_gradient_norm(&self, counts: impl Fn(&ParamPlan) -> bool) -> Result<f64> {
        let counted = self.params.iter().filter(|param| counts(&param.plan));
        let kept =
            counted.filter_map(|param| param.kept_gradient().transpose()).collect::<Result<Vec<_>>>()?;
        Ok(squared_norm_all(&kept.iter().collect::<Vec<_>>())?)
    }

    /// Takes all gradients out.
    pub(crate) fn take_gradients(&mut self) -> Vec<(ParameterId, Tensor)> {
        self.iter_mut().filter_map(|(id, param)| Some((id, param.gradient.take()?))).collect()
    }

    /// Lets go of the optimizer's state.
    pub(crate) fn drop_state(&mut self) {
        for param in &mut self.params {
            (param.master, param.moments) = (None, Vec::new());
        }
    }
}

impl WeightStore for ParamStore {
    fn get(&self, id: ParameterId) -> &Tensor {
        self.params[id.0].weight()
    }

    fn at_rest(&self, id: ParameterId) -> &Tensor {
        self.params[id.0].at_rest().expect("a weight of this stage")
    }

    fn sparse(&self, id: ParameterId) -> Option<&SparseWeight> {
        self.params[id.0].stored.sparse.as_ref()
    }

    fn buffer(&self, id: BufferId) -> &Tensor {
        self.statistics[id.0].as_ref().expect("a statistic of this stage")
    }

    fn enter(&self, block: usize, next: Option<usize>) -> espalier_nn::Result<Option<EnteredWeights<'_>>> {
        self.scratch.enter(self, block, next)
    }
}

impl StoredWeights for ParamStore {
    fn stored(&self, id: ParameterId) -> &StoredWeight {
        &self.params[id.0].stored
    }

    fn group(&self, id: ParameterId) -> usize {
        self.params[id.0].plan.group
    }
}
