//! What a rank hands over to be saved.

use std::ops::Range;

use espalier_plan::Shard;
use espalier_tensor::Tensor;
use safetensors::tensor::Dtype;

use crate::Result;
use crate::state::Param;

/// What one file of a checkpoint holds, by name.
pub type NamedTensors<'a> = Vec<(String, CheckpointTensor<'a>)>;

/// Something that is saved.
#[derive(Debug)]
pub enum CheckpointTensor<'a> {
    /// A tensor, from whichever device; every rank that holds one of this name holds the same.
    Tensor(&'a Tensor),
    /// A shard of a tensor; every rank that holds this one holds the same, and a range of it no other.
    Shard(&'a Tensor, Shard),
    /// A weight that is not stored dense, or the shard of it that is here: made dense when it is written. As
    /// a tensor.
    Weight(&'a Param),
    /// A range of a weight of which this rank has a shard, which no other has: made dense when it is written.
    WeightRange(&'a Param, Shard, Range<usize>),
    /// u32 values of the host; as a tensor.
    U32(Vec<u32>),
    /// Those that pack a shard of a tensor; as a shard.
    Packed(Vec<u32>, Shard),
    /// Numbers of the host, of a type and shape, little-endian; as a tensor.
    Bytes(Dtype, Vec<usize>, Vec<u8>),
}

impl<'a> CheckpointTensor<'a> {
    /// A tensor of which this rank holds a shard, which may be all.
    pub fn of(tensor: &'a Tensor, shard: &Shard) -> CheckpointTensor<'a> {
        match shard.is_full() {
            true => CheckpointTensor::Tensor(tensor),
            false => CheckpointTensor::Shard(tensor, shard.clone()),
        }
    }

    /// A parameter's weight, which must be here.
    pub(crate) fn weight_of(param: &'a Param) -> Result<CheckpointTensor<'a>> {
        if let Some(range) = param.weight_range()?.filter(|_| param.is_weight_sharded()) {
            let shard = param.plan.shard.clone().starting_at(range.start);
            return Ok(CheckpointTensor::WeightRange(param, shard, range));
        }
        Ok(match param.at_rest().filter(|weight| weight.len() == param.len()) {
            Some(weight) => CheckpointTensor::of(weight, &param.plan.shard),
            None => CheckpointTensor::Weight(param),
        })
    }

    /// So many bits for each weight of a shard, which may be all.
    pub fn packed(words: Vec<u32>, shard: &Shard, bits: usize) -> CheckpointTensor<'a> {
        match shard.is_full() {
            true => CheckpointTensor::U32(words),
            false => CheckpointTensor::Packed(words, shard.clone().packed(bits)),
        }
    }

    /// Which shard of a tensor it is, if it is not all.
    pub(super) fn shard(&self) -> Option<&Shard> {
        match self {
            CheckpointTensor::Tensor(_) | CheckpointTensor::U32(_) | CheckpointTensor::Bytes(..) => None,
            CheckpointTensor::Shard(_, shard)
            | CheckpointTensor::Packed(_, shard)
            | CheckpointTensor::WeightRange(_, shard, _) => Some(shard),
            CheckpointTensor::Weight(param) => Some(&param.plan.shard).filter(|shard| !shard.is_full()),
        }
    }

    /// Whether it is nothing of something: another rank may hold all of it, and write it as what was never split.
    pub(super) fn is_nothing(&self) -> bool {
        let nothing = |shard: &Shard| shard.is_empty() && shard.full_shape().iter().all(|size| *size > 0);
        self.shard().is_some_and(nothing)
    }

    /// Whether other ranks may hold it too.
    pub(super) fn is_shared(&self) -> bool {
        self.shard().is_none_or(|shard| shard.start().is_none())
    }
}
