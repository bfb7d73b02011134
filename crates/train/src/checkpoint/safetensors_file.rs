//! One file of tensors, in the format safetensors: a header that says where each lies, and their bytes.
//!
//! The hash is taken of what is meant to be on the disk, while it is written, not of what the disk gives
//! back. A number that is not finite ends it: weights that cannot go on are no checkpoint. A file of full
//! tensors says that they lie as PyTorch has them (`{"format": "pt"}`), without which some tools do not read
//! it.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::Path;

use espalier_plan::filters::{shape_in_pytorch, to_pytorch};
use espalier_tensor::mask::ones;
use espalier_tensor::{DType, Tensor};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use super::checkpoint_tensor::{CheckpointTensor, NamedTensors};
use super::fault::WriteFault;
use super::manifest::FileRecord;
use super::sharded::{SHARDS_KEY, ShardDescription, ShardDescriptions};
use crate::durable;
use crate::state::Param;

/// Writes a file and waits until it is on the disk.
pub(crate) fn write_tensors(path: &Path, saved: &NamedTensors<'_>) -> Result<FileRecord, WriteFault> {
    // The format wants the types with the widest elements first.
    let mut order: Vec<&(String, CheckpointTensor<'_>)> = saved.iter().collect();
    order.sort_by(|(a, left), (b, right)| right.dtype().cmp(&left.dtype()).then(a.cmp(b)));
    let mut file = HashingWriter { file: BufWriter::new(File::create(path)?), hasher: blake3::Hasher::new() };
    file.write(&header(&order)?)?;
    for (name, stored) in order {
        let bytes = stored.bytes()?;
        if !is_finite(&bytes, stored.dtype()) {
            return Err(WriteFault::NotFinite(name.clone()));
        }
        file.write(&bytes)?;
    }
    let HashingWriter { file, hasher } = file;
    durable::sync(&file.into_inner().map_err(io::Error::from)?, path)?;
    Ok(FileRecord { bytes: hasher.count(), blake3: hasher.finalize().to_hex().to_string() })
}

/// The length of the header and the header, a multiple of eight bytes.
fn header(order: &[&(String, CheckpointTensor<'_>)]) -> io::Result<Vec<u8>> {
    let (mut shard_descriptions, mut infos, mut end) = (ShardDescriptions::new(), Vec::new(), 0);
    for (name, stored) in order {
        if let Some(shard) = stored.shard() {
            shard_descriptions.insert(name.clone(), ShardDescription::of(shard));
        }
        let start = end;
        end += stored.byte_len();
        let (dtype, shape) = (stored.dtype(), stored.shape());
        let shape = if stored.shard().is_none() { shape_in_pytorch(&shape) } else { shape };
        infos.push((name.clone(), TensorInfo { dtype, shape, data_offsets: (start, end) }));
    }
    // One entry, so that the bytes are the same every time: nobody but us reads shards.
    let described = match shard_descriptions.is_empty() {
        true => ("format", "pt".to_owned()),
        false => (SHARDS_KEY, serde_json::to_string(&shard_descriptions)?),
    };
    let described = HashMap::from([(described.0.to_owned(), described.1)]);
    let mut text = serde_json::to_vec(&Metadata::new(Some(described), infos).map_err(io::Error::other)?)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    Ok([&(text.len() as u64).to_le_bytes()[..], &text].concat())
}

struct HashingWriter {
    file: BufWriter<File>,
    hasher: blake3::Hasher,
}

impl HashingWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hasher.update_rayon(bytes);
        self.file.write_all(bytes)
    }
}

impl CheckpointTensor<'_> {
    fn shape(&self) -> Vec<usize> {
        match self {
            CheckpointTensor::Tensor(tensor) | CheckpointTensor::Shard(tensor, _) => tensor.shape().to_vec(),
            CheckpointTensor::Weight(param) => param.plan.shard.shape(),
            CheckpointTensor::WeightRange(.., range) => vec![range.len()],
            CheckpointTensor::U32(words) | CheckpointTensor::Packed(words, _) => vec![words.len()],
            CheckpointTensor::Bytes(_, shape, _) => shape.clone(),
        }
    }

    fn dtype(&self) -> Dtype {
        match self {
            CheckpointTensor::Tensor(tensor) | CheckpointTensor::Shard(tensor, _) => of_dtype(tensor.dtype()),
            CheckpointTensor::Weight(param) | CheckpointTensor::WeightRange(param, ..) => {
                of_dtype(param.dtype())
            }
            CheckpointTensor::U32(_) | CheckpointTensor::Packed(..) => Dtype::U32,
            CheckpointTensor::Bytes(dtype, ..) => *dtype,
        }
    }

    pub(super) fn byte_len(&self) -> usize {
        self.shape().iter().product::<usize>() * self.dtype().bitsize() / 8
    }

    /// What the file has. From whichever device: one tensor at a time is on the host.
    fn bytes(&self) -> Result<Cow<'_, [u8]>, espalier_tensor::Error> {
        let bytes = self.bytes_in_memory()?;
        let is_full = self.shard().is_none();
        Ok(if is_full { to_pytorch(bytes, &self.shape(), self.dtype().bitsize() / 8) } else { bytes })
    }

    fn bytes_in_memory(&self) -> Result<Cow<'_, [u8]>, espalier_tensor::Error> {
        match self {
            CheckpointTensor::Tensor(tensor) | CheckpointTensor::Shard(tensor, _) => tensor.read_bytes(),
            CheckpointTensor::Weight(param) => Ok(param.expanded()?.read_bytes()?.into_owned().into()),
            CheckpointTensor::WeightRange(param, _, range) => bytes_of_range(param, range),
            CheckpointTensor::U32(words) | CheckpointTensor::Packed(words, _) => {
                Ok(words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>().into())
            }
            CheckpointTensor::Bytes(.., bytes) => Ok(bytes.into()),
        }
    }
}

/// The dense bytes of a range that this rank's shard of a weight lies in.
fn bytes_of_range<'a>(
    param: &'a Param,
    range: &Range<usize>,
) -> Result<Cow<'a, [u8]>, espalier_tensor::Error> {
    let values = param.weight_shard().expect("a shard of a weight").read_bytes()?;
    let Some(mask) = param.mask() else { return Ok(values) };
    let each = param.dtype().bytes();
    let mut dense = vec![0; range.len() * each];
    let kept = ones(&mask.read_words()?).skip_while(|index| *index < range.start).collect::<Vec<_>>();
    for (index, value) in kept.into_iter().zip(values.chunks(each)) {
        let at = (index - range.start) * each;
        dense[at..at + each].copy_from_slice(value);
    }
    Ok(dense.into())
}

pub(super) fn dtype_of(tensor: &Tensor) -> Dtype {
    of_dtype(tensor.dtype())
}

fn of_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::Bf16 => Dtype::BF16,
        DType::U16 => Dtype::U16,
        DType::U32 => Dtype::U32,
        DType::U8 => Dtype::U8,
    }
}

/// Whether a tensor holds no NaN and no infinity: numbers whose exponent is all ones.
pub(super) fn tensor_is_finite(tensor: &Tensor) -> Result<bool, espalier_tensor::Error> {
    Ok(is_finite(&tensor.read_bytes()?, dtype_of(tensor)))
}

/// Whether numbers have no NaN and no infinity among them.
pub(crate) fn is_finite(bytes: &[u8], dtype: Dtype) -> bool {
    match dtype {
        Dtype::F32 => {
            bytes.as_chunks().0.iter().all(|number| u32::from_le_bytes(*number) & 0x7f80_0000 != 0x7f80_0000)
        }
        Dtype::BF16 => {
            bytes.as_chunks().0.iter().all(|number| u16::from_le_bytes(*number) & 0x7f80 != 0x7f80)
        }
        Dtype::F16 => bytes.as_chunks().0.iter().all(|number| u16::from_le_bytes(*number) & 0x7c00 != 0x7c00),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use espalier_tensor::{Category, Device};

    use super::*;

    #[test]
    fn numbers_that_are_not_finite_are_found_in_both_precisions() {
        let device = Device::cpu(1).unwrap();
        for dtype in [DType::F32, DType::Bf16] {
            for (value, finite) in
                [(3e38, true), (-1e-30, true), (f32::NAN, false), (f32::INFINITY, false), (-f32::NAN, false)]
            {
                let values = [0.0, 1.0, value];
                let tensor = Tensor::from_f32(&device, &[3], dtype, &values, Category::Weights).unwrap();
                assert_eq!(tensor_is_finite(&tensor).unwrap(), finite, "{value} in {dtype:?}");
            }
        }
    }

    /// What the format's own library makes of the same tensors, byte for byte.
    #[test]
    fn a_file_is_what_the_library_of_the_format_writes() {
        let device = Device::cpu(1).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file.safetensors");
        let tensor = |dtype, n: usize| {
            let values: Vec<f32> = (0..n).map(|i| i as f32 - 1.5).collect();
            Tensor::from_f32(&device, &[n], dtype, &values, Category::Weights).unwrap()
        };
        let tensors =
            [("b", tensor(DType::Bf16, 3)), ("z", tensor(DType::F32, 2)), ("a", tensor(DType::F32, 5))];
        let saved: NamedTensors<'_> = tensors
            .iter()
            .map(|(name, tensor)| (name.to_string(), CheckpointTensor::Tensor(tensor)))
            .collect();
        let record = write_tensors(&path, &saved).unwrap();
        let bytes: Vec<_> = tensors.iter().map(|(_, tensor)| tensor.read_bytes().unwrap()).collect();
        let views = tensors.iter().zip(&bytes).map(|((name, tensor), bytes)| {
            (
                *name,
                safetensors::tensor::TensorView::new(dtype_of(tensor), tensor.shape().to_vec(), bytes)
                    .unwrap(),
            )
        });
        let described = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let expected = safetensors::serialize(views, Some(described)).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), expected);
        assert_eq!(record.blake3, blake3::hash(&expected).to_hex().to_string());
    }
}
