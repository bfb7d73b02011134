//! The f32 numbers of weights. Those of a bf16 run are roundings of masters, which its checkpoints have
//! beside them: in f32, or as the 16 bits that each weight lost; of a pruned parameter those of its kept
//! weights, where state is compressed.

use espalier_plan::shard::{Shard, ShardValues};
use espalier_plan::spec::ModelSpec;
use espalier_tensor::bf16;
use espalier_tensor::mask::ones;
use espalier_tensor::ops::update::join;
use safetensors::tensor::Dtype;

use super::convert::convert;
use super::open::Checkpoint;
use super::safetensors_file::is_finite;
use super::sharded::MaskIndex;
use super::start::positions;
use super::{MASKS, MODEL, OPTIMIZER};
use crate::Result;

impl Checkpoint {
    /// All of a weight as its optimizer has it; none where it has no master, being exact itself.
    pub(crate) fn master(&self, name: &str, shape: &[usize]) -> Result<Option<Vec<f32>>> {
        let label = format!("master/{name}");
        let Some(entry) = self.files.get(OPTIMIZER).and_then(|tensors| tensors.get(&label)) else {
            return Ok(None);
        };
        let full = Shard::full(shape);
        let is_dense = entry.values == ShardValues::Dense && entry.shape == shape;
        let kept = match is_dense {
            true => None,
            false => self.packed(MASKS, name, &full, 1)?.map(MaskIndex::new),
        };
        let (shard, stored) = match (&entry.values, &kept) {
            (ShardValues::KeptBy(mask), Some(kept)) => (full.clone().kept_by(mask), kept.count()),
            (ShardValues::Dense, _) => (Shard::full(&entry.shape), entry.shape.iter().product()),
            _ => return Err(self.refuse(format!("{label} is in an unknown form"))),
        };
        let indices: Vec<usize> = match &kept {
            None => (0..full.len()).collect(),
            Some(kept) => ones(kept.words()).collect(),
        };
        if indices.len() != stored {
            return Err(self.refuse(format!("{label} has {stored} numbers where {} are kept", indices.len())));
        }
        let order = self.older_order(&label, entry)?;
        let bytes = self.bytes(entry, &shard, stored, kept.as_ref(), order.as_deref())?;
        let mut exact = vec![0.0; full.len()];
        match entry.dtype {
            Dtype::F32 => {
                let numbers = bytes.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four));
                indices.iter().zip(numbers).for_each(|(index, number)| exact[*index] = number);
            }
            Dtype::U16 => {
                let Some((Dtype::BF16, weights)) = self.numbers(MODEL, name, shape)? else {
                    return Err(
                        self.refuse(format!("{label} are low bits, and {name} is not bf16 {shape:?}"))
                    );
                };
                let (weights, low) = (weights.as_chunks().0, bytes.as_chunks().0);
                for (index, low) in indices.iter().zip(low) {
                    exact[*index] = join(bf16::from_le_bytes(weights[*index]), u16::from_le_bytes(*low));
                }
            }
            other => return Err(self.refuse(format!("{label} is {other:?}, which no master is"))),
        }
        Ok(Some(exact))
    }

    /// The first weight of a model that has a NaN or an infinity.
    pub(crate) fn first_not_finite(&self, model: &ModelSpec) -> Result<Option<String>> {
        for parameter in model.parameters() {
            let there = self.numbers(MODEL, &parameter.name, &parameter.shape)?;
            if there.is_some_and(|(dtype, numbers)| !is_finite(&numbers, dtype)) {
                return Ok(Some(parameter.name));
            }
        }
        Ok(None)
    }

    /// Whether some of its weights have more digits than bf16.
    pub(crate) fn is_finer_than_bf16(&self) -> bool {
        let weights = self.files.get(MODEL).into_iter().flatten();
        weights.into_iter().any(|(_, entry)| matches!(entry.dtype, Dtype::F32 | Dtype::F16))
    }

    /// The numbers of shards of a model's weights, by name, one at a time: none of those that are bf16 there,
    /// which lose nothing.
    pub(crate) fn exact_shards<'a>(
        &'a self,
        model: &ModelSpec,
    ) -> impl Fn(&str, &Shard) -> Result<Option<Vec<f32>>> + 'a {
        let positions = positions(model);
        move |name, shard| {
            let entry = self.files.get(MODEL).and_then(|tensors| tensors.get(name));
            let Some(entry) = entry.filter(|entry| matches!(entry.dtype, Dtype::F32 | Dtype::F16)) else {
                return Ok(None);
            };
            let shard = match entry.shape.first() {
                Some(rows) if positions.contains(name) && *rows > shard.full_shape()[0] => {
                    shard.clone().of_longer(0, *rows)
                }
                _ => shard.clone(),
            };
            let bytes = convert(self.bytes(entry, &shard, shard.len(), None, None)?, entry.dtype, Dtype::F32);
            Ok(Some(bytes.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)).collect()))
        }
    }
}
