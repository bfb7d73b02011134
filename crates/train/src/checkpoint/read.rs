//! Reading: the files of a checkpoint, however many wrote it, joined into tensors by name.
//!
//! Only what is asked for is read, a tensor at a time: of each shard of it that has some of what is wanted,
//! from the first number of that to the last.

use std::collections::BTreeMap;
use std::ops::Range;

use espalier_plan::filters::{index_in_pytorch, to_memory};
use espalier_plan::shard::{Shard, ShardValues};
use espalier_tensor::mask::{copy_bits, ones};
use espalier_tensor::{DType, Mask, Tensor};
use safetensors::tensor::Dtype;

use super::convert::{convert, is_float};
use super::fault::ReadFault;
use super::open::{Checkpoint, ShardFile};
use super::safetensors_file::dtype_of;
use super::sharded::{MaskIndex, Overlap, overlap};
use super::tensor_entry::{FileShard, TensorEntry, overlap_of_shards, read_at};
use super::{MASKS, MODEL, OPTIMIZER};
use crate::Result;

/// What is read from one file of a checkpoint.
#[derive(Debug)]
pub struct LoadRequest<'a> {
    /// Which: `model.safetensors`, also where several ranks wrote it.
    pub file: &'a str,
    /// What is to be filled, by name.
    pub tensors: Vec<(String, LoadTarget<'a>)>,
    /// How many more of the file's tensors the run has on other ranks: any further one is not of this run.
    pub elsewhere: usize,
    /// Whether floating-point numbers of another precision are taken: widened, or rounded to the nearest.
    pub converts: bool,
}

/// What is to be filled.
#[derive(Debug)]
pub struct LoadTarget<'a> {
    pub(super) tensor: &'a mut Tensor,
    /// What this rank holds of the tensor that is read, which may be all.
    pub(super) shard: Shard,
    /// Which numbers of that are read.
    pub(super) range: Range<usize>,
    /// Where only those of them are taken that it keeps.
    pub(super) mask: Option<&'a Mask>,
}

impl<'a> LoadTarget<'a> {
    /// With a full tensor.
    pub fn full(tensor: &'a mut Tensor) -> LoadTarget<'a> {
        let shard = Shard::full(tensor.shape());
        LoadTarget::of(tensor, shard)
    }

    /// With a shard of one, which may be all.
    pub fn of(tensor: &'a mut Tensor, shard: Shard) -> LoadTarget<'a> {
        let range = 0..tensor.len();
        LoadTarget { tensor, shard, range, mask: None }
    }

    /// Takes the bytes of all numbers that were read.
    fn take(&mut self, bytes: &[u8]) -> Result<()> {
        let Some(mask) = self.mask else { return Ok(self.tensor.copy_from_host(bytes)?) };
        let kept = kept_bytes(bytes, self.tensor.dtype(), mask, &self.range)?;
        Ok(self.tensor.copy_from_host(&kept)?)
    }
}

impl Checkpoint {
    /// The names of a file's tensors; none where the checkpoint has no such file.
    pub fn names(&self, file: &str) -> impl Iterator<Item = &str> {
        self.files.get(file).into_iter().flatten().map(|(name, _)| name.as_str())
    }

    /// The u32 values of a tensor that no rank had a shard of.
    pub fn u32_values(&self, file: &str, name: &str) -> Result<Option<Vec<u32>>> {
        let Some(entry) = self.u32_entry(file, name)? else { return Ok(None) };
        if entry.values != ShardValues::Dense {
            return Err(self.refuse(format!("{name} in {file} is sharded")));
        }
        let full = Shard::full(&entry.shape);
        Ok(Some(words(&self.bytes(entry, &full, entry.shape.iter().product(), None, None)?)))
    }

    /// What is packed in words for each weight of a shard, so many bits, whoever wrote which shards or all of it.
    pub fn packed(&self, file: &str, name: &str, shard: &Shard, bits: usize) -> Result<Option<Vec<u32>>> {
        let Some(entry) = self.u32_entry(file, name)? else { return Ok(None) };
        let full = Shard::full(shard.full_shape());
        let refuse = || match (bits, full.len()) {
            (1, len) => self.refuse(format!("the mask of {name} is not one of {len} weights")),
            (_, len) => {
                self.refuse(format!("{name} in {file} has not {bits} bits for each of {len} weights"))
            }
        };
        let mut packed = vec![0; (bits * shard.len()).div_ceil(32)];
        let mut take = |from: &Shard, stored: Vec<u32>| match are_bits(&stored, bits * from.len()) {
            false => Err(refuse()),
            true => {
                for Overlap { from, to, length } in overlap(from.runs(), shard.runs()) {
                    copy_bits(&stored, bits * from, &mut packed, bits * to, bits * length);
                }
                Ok(())
            }
        };
        match &entry.values {
            ShardValues::Dense => {
                let stored = self.u32_values(file, name)?.expect("it is there");
                let is_older =
                    self.has_older_order(full.full_shape()) && are_bits(&stored, bits * full.len());
                take(
                    &full,
                    if is_older { packed_to_memory(&stored, full.full_shape(), bits) } else { stored },
                )?
            }
            form if *form != ShardValues::Packed(bits) || entry.shape != shard.full_shape() => {
                return Err(refuse());
            }
            _ => {
                for file_shard in &entry.file_shards {
                    let mut bytes = vec![0; 4 * file_shard.length];
                    self.read_file_shard(entry, file_shard, 0, &mut bytes)?;
                    take(&file_shard.shard, words(&bytes))?;
                }
            }
        }
        Ok(Some(packed))
    }

    fn u32_entry(&self, file: &str, name: &str) -> Result<Option<&TensorEntry>> {
        match self.files.get(file).and_then(|tensors| tensors.get(name)) {
            Some(entry) if entry.dtype != Dtype::U32 => {
                Err(self.refuse(format!("{name} in {file} is {:?}, not U32", entry.dtype)))
            }
            found => Ok(found),
        }
    }

    /// Fills tensors from its files. Names, types and shapes are compared before the first one is touched;
    /// types may differ only where [`LoadRequest::converts`] says so.
    pub fn fill(&self, requests: &mut [LoadRequest<'_>]) -> Result<()> {
        for LoadRequest { file, tensors, elsewhere, converts } in &*requests {
            let stored = self.files.get(*file);
            if stored.is_none() && !tensors.is_empty() {
                return Err(self.refuse(format!("it has no {file}")));
            }
            for (name, target) in tensors {
                let Some(entry) = stored.and_then(|stored| stored.get(name)) else {
                    return Err(self.refuse(format!("{file} has no tensor {name}, which this run needs")));
                };
                self.compare(file, name, entry, target, *converts)?;
            }
            let (there, here) = (stored.map_or(0, BTreeMap::len), tensors.len() + elsewhere);
            let is_wanted = |name: &&String| tensors.iter().any(|(wanted, _)| wanted == *name);
            let unknown = stored.filter(|_| *elsewhere == 0 && there > here);
            if let Some(name) = unknown.and_then(|stored| stored.keys().find(|name| !is_wanted(name))) {
                return Err(
                    self.refuse(format!("{file} holds {there} tensors, this run {here}: it has no {name}"))
                );
            }
            if there != here {
                return Err(self.refuse(format!("{file} holds {there} tensors, this run {here}")));
            }
        }
        for LoadRequest { file, tensors, .. } in requests {
            for (name, target) in tensors {
                let entry = &self.files[*file][name];
                let (kept, order) = (self.kept(entry, &target.shard)?, self.older_order(name, entry)?);
                let bytes =
                    self.bytes(entry, &target.shard, target.range.len(), kept.as_ref(), order.as_deref())?;
                let bytes = convert(bytes, entry.dtype, dtype_of(target.tensor));
                target.take(&bytes)?;
            }
        }
        Ok(())
    }

    /// All of a tensor of numbers, whoever wrote which shards of it: its type and bytes; none where the file
    /// has no such tensor, or one of another shape.
    pub fn numbers(&self, file: &str, name: &str, shape: &[usize]) -> Result<Option<(Dtype, Vec<u8>)>> {
        let entry = self.files.get(file).and_then(|tensors| tensors.get(name));
        let Some(entry) = entry.filter(|entry| entry.shape == shape && entry.values == ShardValues::Dense)
        else {
            return Ok(None);
        };
        let full = Shard::full(shape);
        Ok(Some((entry.dtype, self.bytes(entry, &full, shape.iter().product(), None, None)?)))
    }

    /// An error where a tensor is not what a target is for.
    fn compare(
        &self,
        file: &str,
        name: &str,
        entry: &TensorEntry,
        target: &LoadTarget<'_>,
        converts: bool,
    ) -> Result<()> {
        let LoadTarget { tensor, shard, range, .. } = target;
        let dtype = dtype_of(tensor);
        // A mask that does not fit is refused before anything is filled.
        self.older_order(name, entry)?;
        let kept = self.kept(entry, shard)?;
        if let (ShardValues::KeptBy(_), Some(kept)) = (&entry.values, &kept) {
            entry.check_kept(kept).map_err(|why| self.refuse(format!("{name} in {file}: {why}")))?;
        }
        let there = entry.stored_shape();
        let shape = match (&shard.values(), &kept) {
            (ShardValues::KeptBy(_), Some(kept)) => vec![kept.count()],
            _ => shard.full_shape().to_vec(),
        };
        if file == OPTIMIZER && (there.len() == 1) != (shape.len() == 1) {
            let form = |compressed| if compressed { "of kept weights only" } else { "of all weights" };
            return Err(self.refuse(format!(
                "{name} is state {} there, and {} in this run: take `[prune]` from the run file of the checkpoint, \
                 or start from its weights with --from",
                form(there.len() == 1),
                form(shape.len() == 1),
            )));
        }
        let floats = [entry.dtype, dtype].into_iter().all(is_float);
        if there != shape || (entry.dtype != dtype && !(converts && floats)) {
            return Err(self.refuse(format!(
                "{name} is {:?} {there:?} there, and {dtype:?} {shape:?} in this run",
                entry.dtype,
            )));
        }
        let all = kept.filter(|_| *shard.values() != ShardValues::Dense);
        let all = all.map_or(shard.len(), |kept| kept.count_in(shard));
        let here = range.len();
        let end = shard.start().map(|start| start + here);
        if end.map_or(here != all, |end| end > all) {
            return Err(self.refuse(format!("{name} has {all} numbers there where this run has {here}")));
        }
        Ok(())
    }

    /// Of state of kept weights in PyTorch's order, as an earlier version has that of filters: which position each
    /// number has in memory.
    pub(super) fn older_order(&self, name: &str, entry: &TensorEntry) -> Result<Option<Vec<usize>>> {
        let weight = name.split_once('/').and_then(|(_, weight)| Some((weight, self.shape(MODEL, weight)?)));
        let Some((weight, shape)) = weight.filter(|(_, shape)| entry.shape != *shape) else {
            return Ok(None);
        };
        if !self.has_older_order(shape) {
            return Ok(None);
        }
        let Some(words) = self.packed(MASKS, weight, &Shard::full(shape), 1)? else { return Ok(None) };
        let mut kept: Vec<_> = ones(&words).map(|i| index_in_pytorch(shape, i)).enumerate().collect();
        let stored: usize = entry.shape.iter().product();
        if kept.len() != stored {
            return Err(self.refuse(format!("{name} has {stored} numbers where {} are kept", kept.len())));
        }
        kept.sort_unstable_by_key(|(_, in_pytorch)| *in_pytorch);
        Ok(Some(kept.into_iter().map(|(in_memory, _)| in_memory).collect()))
    }

    /// The mask that says which weights are stored, or wanted, of a tensor of which that is not all.
    fn kept(&self, entry: &TensorEntry, shard: &Shard) -> Result<Option<MaskIndex>> {
        let (mask, shape) = match (&entry.values, &shard.values()) {
            (ShardValues::KeptBy(mask), ShardValues::KeptBy(wanted))
                if mask != wanted || entry.shape != shard.full_shape() =>
            {
                return Err(
                    self.refuse(format!("what {mask} keeps there is what {wanted} keeps in this run"))
                );
            }
            (ShardValues::KeptBy(mask), _) => (mask, &entry.shape[..]),
            (_, ShardValues::KeptBy(mask)) => (mask, shard.full_shape()),
            _ => return Ok(None),
        };
        match self.packed(MASKS, mask, &Shard::full(shape), 1)? {
            Some(words) => Ok(Some(MaskIndex::new(words))),
            None => Err(self.refuse(format!("it has no mask for {mask}, of which it holds kept weights"))),
        }
    }

    /// The bytes of a shard of a tensor, which has so many numbers; `order` is [`Checkpoint::older_order`].
    pub(super) fn bytes(
        &self,
        entry: &TensorEntry,
        shard: &Shard,
        length: usize,
        kept: Option<&MaskIndex>,
        order: Option<&[usize]>,
    ) -> Result<Vec<u8>> {
        let each = entry.dtype.bitsize() / 8;
        let mut bytes = vec![0; length * each];
        let in_memory = match order {
            Some(order) => Some(scatter(&self.in_files(entry)?, order, each)),
            None if entry.is_permuted() => Some(to_memory(self.in_files(entry)?, &entry.shape, each)),
            None => None,
        };
        if let Some(all) = in_memory {
            let full = Shard::full(&entry.shape);
            for Overlap { from, to, length } in overlap_of_shards((&full, full.len()), (shard, length), kept)
            {
                bytes[to * each..(to + length) * each]
                    .copy_from_slice(&all[from * each..(from + length) * each]);
            }
            return Ok(bytes);
        }
        for file_shard in &entry.file_shards {
            let common = file_shard.overlap(shard, length, kept);
            let (Some(first), Some(last)) = (common.first(), common.last()) else { continue };
            if let [Overlap { from, to, length }] = common[..] {
                self.read_file_shard(entry, file_shard, from, &mut bytes[to * each..(to + length) * each])?;
                continue;
            }
            let mut read = vec![0; (last.from + last.length - first.from) * each];
            self.read_file_shard(entry, file_shard, first.from, &mut read)?;
            for Overlap { from, to, length } in &common {
                let from = (from - first.from) * each..(from - first.from + length) * each;
                bytes[to * each..(to + length) * each].copy_from_slice(&read[from]);
            }
        }
        Ok(bytes)
    }

    /// The bytes of all numbers of a tensor, in the order in which they are in files.
    fn in_files(&self, entry: &TensorEntry) -> Result<Vec<u8>> {
        let each = entry.dtype.bitsize() / 8;
        let mut bytes = vec![0; entry.shape.iter().product::<usize>() * each];
        for file_shard in &entry.file_shards {
            let numbers = file_shard.start() * each..(file_shard.start() + file_shard.length) * each;
            self.read_file_shard(entry, file_shard, 0, &mut bytes[numbers])?;
        }
        Ok(bytes)
    }

    /// The bytes of a file's shard from one of its numbers on.
    fn read_file_shard(
        &self,
        entry: &TensorEntry,
        file_shard: &FileShard,
        first: usize,
        into: &mut [u8],
    ) -> Result<()> {
        let ShardFile { name, file } = &self.shards[file_shard.file];
        let at = file_shard.offset + (first * entry.dtype.bitsize() / 8) as u64;
        read_at(file, at, into).map_err(|why| ReadFault::of(name, &why).at(self.path()))
    }
}

/// What a mask keeps of the bytes of a range.
fn kept_bytes(bytes: &[u8], dtype: DType, mask: &Mask, range: &Range<usize>) -> Result<Vec<u8>> {
    let each = dtype.bytes();
    let words = mask.read_words()?;
    let kept = ones(&words).skip_while(|index| *index < range.start).take_while(|index| *index < range.end);
    let number = |index: usize| &bytes[(index - range.start) * each..(index - range.start + 1) * each];
    Ok(kept.flat_map(number).copied().collect())
}

/// Numbers of so many bytes, each where the order says.
fn scatter(bytes: &[u8], order: &[usize], each: usize) -> Vec<u8> {
    let mut scattered = vec![0; bytes.len()];
    for (number, to) in bytes.chunks_exact(each).zip(order) {
        scattered[to * each..][..each].copy_from_slice(number);
    }
    scattered
}

/// So many bits for each weight of filters, in PyTorch's order, as they are in memory.
fn packed_to_memory(words: &[u32], shape: &[usize], bits: usize) -> Vec<u32> {
    let mut moved = vec![0; words.len()];
    for i in 0..shape.iter().product() {
        copy_bits(words, bits * index_in_pytorch(shape, i), &mut moved, bits * i, bits);
    }
    moved
}

/// Whether words are so many bits, those past their end zero.
fn are_bits(words: &[u32], bits: usize) -> bool {
    let past_end = |last: &u32| !bits.is_multiple_of(32) && last >> (bits % 32) != 0;
    words.len() == bits.div_ceil(32) && !words.last().is_some_and(past_end)
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
}
