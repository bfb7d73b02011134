//! The weights of a rank: parameters in the precision of the kernels, and running statistics in f32.
//!
//! `initial` gives them their first values.

mod initial;

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use espalier_plan::filters::to_pytorch;
use espalier_plan::layout::LocalModel;
use espalier_plan::spec;
use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::sparse::SparseWeight;
use espalier_tensor::{Category, DType, Device, Tensor};

use crate::Result;
pub use initial::{fresh, fresh_kept, index_runs, name_key, started};

/// Which parameter: its index in [`spec::ModelSpec::parameters`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParameterId(pub usize);

/// Which running statistic: its index in [`spec::ModelSpec::buffers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BufferId(pub usize);

/// Where layers get their weights from. At rest these may be in a form that takes less memory; a block's are
/// dense while it works.
pub trait WeightStore: Sync {
    /// A parameter, dense, in the precision of the kernels: one of the block that is at work.
    fn get(&self, id: ParameterId) -> &Tensor;

    /// The same of one that products read without its zeros, for what reads all of it all the same.
    fn dense(&self, id: ParameterId) -> Result<&Tensor> {
        Ok(self.get(id))
    }

    /// A parameter in the form in which it rests, for products without zeros: dense, or its kept values.
    fn at_rest(&self, id: ParameterId) -> &Tensor {
        self.get(id)
    }

    /// Where a parameter that is multiplied without its zeros has its other elements.
    fn sparse(&self, id: ParameterId) -> Option<&SparseWeight>;

    fn buffer(&self, id: BufferId) -> &Tensor;

    /// Makes the weights of a block dense for as long as what comes back lives; nothing where they are
    /// anyway. Where it is known which block the pass enters next, its weights may be made dense meanwhile.
    fn enter(&self, _block: usize, _next: Option<usize>) -> Result<Option<EnteredWeights<'_>>> {
        Ok(None)
    }
}

/// Weights for as long as a pass is in a block.
pub type EnteredWeights<'a> = Box<dyn WeightStore + 'a>;

impl WeightStore for Weights {
    fn get(&self, id: ParameterId) -> &Tensor {
        Weights::get(self, id)
    }

    fn sparse(&self, id: ParameterId) -> Option<&SparseWeight> {
        self.sparse[id.0].as_ref()
    }

    fn buffer(&self, id: BufferId) -> &Tensor {
        Weights::buffer(self, id)
    }
}

/// Which parameters and statistics of a model a rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalTensors {
    /// Indices in [`spec::ModelSpec::parameters`], ascending.
    pub parameters: Vec<usize>,
    /// Indices in [`spec::ModelSpec::buffers`], ascending.
    pub buffers: Vec<usize>,
}

impl LocalTensors {
    /// Those of a rank that has the full model.
    pub fn all(model: &spec::ModelSpec) -> LocalTensors {
        LocalTensors::of(model, std::iter::once(0..model.blocks.len()))
    }

    /// Those that some ranges of blocks use.
    pub fn of(model: &spec::ModelSpec, block_ranges: impl IntoIterator<Item = Range<usize>>) -> LocalTensors {
        let tensors = model.block_tensors();
        let mut local_tensors = LocalTensors { parameters: Vec::new(), buffers: Vec::new() };
        for range in block_ranges {
            local_tensors.parameters.extend(tensors.parameters(range.clone()));
            local_tensors.buffers.extend(tensors.buffers(range));
        }
        for indices in [&mut local_tensors.parameters, &mut local_tensors.buffers] {
            indices.sort_unstable();
            indices.dedup();
        }
        local_tensors
    }
}

/// The names of a model's tensors, and their indices by name.
#[derive(Debug)]
pub struct TensorNames {
    parameters: Vec<String>,
    buffers: Vec<String>,
    parameter_ids: HashMap<String, usize>,
    buffer_ids: HashMap<String, usize>,
}

impl TensorNames {
    /// Those of a model's parameters and running statistics.
    pub fn of(parameters: &[spec::Parameter], buffers: &[spec::BufferSpec]) -> TensorNames {
        let names = parameters.iter().map(|parameter| parameter.name.clone()).collect();
        TensorNames::new(names, buffers.iter().map(|buffer| buffer.name.clone()).collect())
    }

    /// These, in their order.
    pub fn new(parameters: Vec<String>, buffers: Vec<String>) -> TensorNames {
        TensorNames {
            parameter_ids: ids_by_name(parameters.iter().map(String::as_str)),
            buffer_ids: ids_by_name(buffers.iter().map(String::as_str)),
            parameters,
            buffers,
        }
    }

    pub fn name(&self, id: ParameterId) -> &str {
        &self.parameters[id.0]
    }

    pub fn statistic_name(&self, id: BufferId) -> &str {
        &self.buffers[id.0]
    }

    /// The parameter of a name.
    pub fn parameter(&self, name: &str) -> Option<ParameterId> {
        self.parameter_ids.get(name).copied().map(ParameterId)
    }
}

/// The weights of a model that a rank holds: all of them, or those of its stages.
#[derive(Debug)]
pub struct Weights {
    parameters: Vec<Option<Tensor>>,
    buffers: Vec<Option<Tensor>>,
    names: Arc<TensorNames>,
    /// Of those that are multiplied without their zeros, where these are not.
    sparse: Vec<Option<SparseWeight>>,
}

impl Weights {
    /// Fresh weights for a model.
    pub fn initialise(model: &spec::ModelSpec, device: &Device, dtype: DType, seed: u64) -> Result<Weights> {
        let (local, all) = (LocalModel::unsharded(model), LocalTensors::all(model));
        Weights::initialise_local(&local, &all, device, dtype, seed)
    }

    /// Tensors of a model, with the patterns of those that are multiplied without their zeros.
    pub fn of_tensors(
        names: Arc<TensorNames>,
        parameters: Vec<Option<Tensor>>,
        buffers: Vec<Option<Tensor>>,
        sparse: Vec<Option<SparseWeight>>,
    ) -> Weights {
        Weights { parameters, buffers, names, sparse }
    }

    /// Fresh weights for what is held of a rank's model.
    pub fn initialise_local(
        local: &LocalModel,
        local_tensors: &LocalTensors,
        device: &Device,
        dtype: DType,
        seed: u64,
    ) -> Result<Weights> {
        let (parameters, buffers) = (&local.parameters, local.model.buffers());
        let mut weights = Weights {
            parameters: vec![None; parameters.len()],
            buffers: vec![None; buffers.len()],
            names: Arc::new(TensorNames::of(parameters, &buffers)),
            sparse: vec![None; parameters.len()],
        };
        for &index in &local_tensors.parameters {
            let (parameter, shard) = (&parameters[index], &local.shards[index]);
            weights.parameters[index] =
                Some(fresh(parameter, shard, device, dtype, seed, Category::Weights)?);
        }
        for &index in &local_tensors.buffers {
            weights.buffers[index] = Some(started(&buffers[index], device)?);
        }
        Ok(weights)
    }

    /// A copy whose parameters are f32 and are multiplied with their zeros, which may be moved; statistics
    /// are shared.
    pub fn widened(&self) -> Result<Weights> {
        let copy = |held: &Option<Tensor>| {
            held.as_ref().map(|tensor| cast(tensor, DType::F32, Category::Scoring)).transpose()
        };
        Ok(Weights {
            parameters: self.parameters.iter().map(copy).collect::<Result<_, _>>()?,
            buffers: self.buffers.clone(),
            names: self.names.clone(),
            sparse: vec![None; self.parameters.len()],
        })
    }

    /// Where a parameter that is multiplied without its zeros has its other elements.
    pub fn sparse(&self, id: ParameterId) -> Option<&SparseWeight> {
        self.sparse[id.0].as_ref()
    }

    /// A copy of a parameter as f32.
    pub fn widened_one(&self, id: ParameterId, category: Category) -> Result<Tensor> {
        Ok(cast(self.get(id), DType::F32, category)?)
    }

    /// A parameter that is held.
    pub fn get(&self, id: ParameterId) -> &Tensor {
        self.parameters[id.0].as_ref().unwrap_or_else(|| panic!("{} is on another stage", self.name(id)))
    }

    /// A parameter that is held, to be changed.
    pub fn get_mut(&mut self, id: ParameterId) -> &mut Tensor {
        self.parameters[id.0].as_mut().expect("a parameter of this stage")
    }

    /// The parameter of a name, held or not.
    pub fn parameter(&self, name: &str) -> Option<ParameterId> {
        self.names.parameter_ids.get(name).copied().map(ParameterId)
    }

    /// The running statistic of a name, held or not.
    pub fn statistic(&self, name: &str) -> Option<BufferId> {
        self.names.buffer_ids.get(name).copied().map(BufferId)
    }

    pub fn buffer(&self, id: BufferId) -> &Tensor {
        self.buffers[id.0].as_ref().expect("a statistic of this stage")
    }

    /// The ids of all parameters that are held.
    pub fn ids(&self) -> impl Iterator<Item = ParameterId> + use<> {
        let held = |index: &usize| self.parameters[*index].is_some();
        let ids: Vec<_> = (0..self.parameters.len()).filter(held).map(ParameterId).collect();
        ids.into_iter()
    }

    pub fn name(&self, id: ParameterId) -> &str {
        &self.names.parameters[id.0]
    }

    /// Parameters, and behind them running statistics, with their names: what is held, in the order of the model.
    pub fn named(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        let names = self.names.parameters.iter().chain(&self.names.buffers).map(String::as_str);
        let tensors = self.parameters.iter().chain(&self.buffers);
        names.zip(tensors).filter_map(|(name, tensor)| Some((name, tensor.as_ref()?)))
    }
}

/// blake3 of a tensor's bytes, in PyTorch's order.
pub fn digest(tensor: &Tensor) -> Result<[u8; 32]> {
    Ok(digest_of(tensor.read_bytes()?, tensor.shape(), tensor.dtype()))
}

/// The same of the bytes of a tensor, as they are in memory.
pub fn digest_of(bytes: Cow<'_, [u8]>, shape: &[usize], dtype: DType) -> [u8; 32] {
    let bytes = to_pytorch(bytes, shape, dtype.bytes());
    *blake3::Hasher::new().update_rayon(&bytes).finalize().as_bytes()
}

/// blake3 of the digests of all parameters and statistics.
pub fn hash_of(digests: &[[u8; 32]]) -> String {
    blake3::hash(digests.as_flattened()).to_hex().to_string()
}

/// The indices of names in their list.
pub fn ids_by_name<'a>(names: impl IntoIterator<Item = &'a str>) -> HashMap<String, usize> {
    names.into_iter().enumerate().map(|(i, name)| (name.to_owned(), i)).collect()
}
