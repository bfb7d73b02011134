//! A tensor of a checkpoint: which files have which shards of it. All of this is known from their headers.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::iter;
use std::os::unix::fs::FileExt;

use espalier_plan::filters::{are_permuted, shape_in_memory};
use espalier_plan::shard::{ElementRun, Shard, ShardValues};
use safetensors::tensor::{Dtype, Metadata};

use super::fault::{ReadFault, retry};
use super::sharded::{MaskIndex, Overlap, SHARDS_KEY, ShardDescriptions, overlap, runs};

/// The largest header of a file that is believed, as the format has it.
const LARGEST_HEADER: u64 = 100_000_000;

/// A tensor, in one shard or several.
#[derive(Debug, Clone)]
pub(super) struct TensorEntry {
    pub(super) dtype: Dtype,
    pub(super) values: ShardValues,
    /// Of the full tensor, in memory; where kept weights are stored, of all weights.
    pub(super) shape: Vec<usize>,
    pub(super) file_shards: Vec<FileShard>,
}

/// What a file has of a tensor, and where its bytes begin.
#[derive(Debug, Clone)]
pub(super) struct FileShard {
    pub(super) shard: Shard,
    /// Numbers in the file.
    pub(super) length: usize,
    pub(super) file: usize,
    pub(super) offset: u64,
}

impl FileShard {
    pub(super) fn start(&self) -> usize {
        self.shard.start().unwrap_or(0)
    }

    /// What it has of what is wanted.
    pub(super) fn overlap(&self, wanted: &Shard, length: usize, kept: Option<&MaskIndex>) -> Vec<Overlap> {
        overlap_of_shards((&self.shard, self.length), (wanted, length), kept)
    }
}

/// What one shard, of so many numbers, has of another. Of the same shard that is a range, whatever the mask keeps of it.
pub(super) fn overlap_of_shards(
    (there, stored): (&Shard, usize),
    (wanted, length): (&Shard, usize),
    kept: Option<&MaskIndex>,
) -> Vec<Overlap> {
    if there.elements() == wanted.elements() && there.values() == wanted.values() {
        let flat = |first: Option<usize>, length| {
            iter::once(ElementRun { at: 0, in_full: first.unwrap_or(0), length })
        };
        return overlap(flat(there.start(), stored), flat(wanted.start(), length));
    }
    let runs_of = |shard: &Shard, length| -> Vec<ElementRun> {
        runs(shard, length, kept.filter(|_| matches!(shard.values(), ShardValues::KeptBy(_)))).collect()
    };
    overlap(runs_of(there, stored).into_iter(), runs_of(wanted, length).into_iter())
}

impl TensorEntry {
    /// Whether one file has all of it, and it is no shard.
    pub(super) fn is_full(&self) -> bool {
        let full = |one: &FileShard| one.shard.is_full() && one.shard.start().is_none();
        self.values == ShardValues::Dense && self.file_shards.iter().all(full)
    }

    /// Whether its numbers are in another order than in memory.
    pub(super) fn is_permuted(&self) -> bool {
        are_permuted(&self.shape) && self.is_full()
    }

    /// The shape of all that is stored: of kept weights, of their vector.
    pub(super) fn stored_shape(&self) -> Vec<usize> {
        match self.values {
            ShardValues::Dense => self.shape.clone(),
            ShardValues::KeptBy(_) | ShardValues::Packed(_) => {
                vec![self.file_shards.iter().map(|file_shard| file_shard.length).sum()]
            }
        }
    }

    /// The shards must be all of it, each element once. How many a mask keeps is not known yet
    /// ([`TensorEntry::check_kept`]).
    pub(super) fn check(&self) -> Result<(), String> {
        let all: usize = self.shape.iter().product();
        let mut covered = 0;
        for (shard, file_shards) in self.by_elements() {
            let end = ranges_follow(&file_shards)?;
            covered += match self.values {
                ShardValues::Dense if end < shard.len() => end,
                ShardValues::Dense if end > shard.len() => {
                    return Err(format!("its files hold {end} elements of {all}"));
                }
                ShardValues::Packed(bits) if end != (bits * shard.len()).div_ceil(32) => {
                    return Err(format!(
                        "{end} words are not {bits} bits for each of {} elements",
                        shard.len()
                    ));
                }
                _ => shard.len(),
            };
        }
        let shards: Vec<Shard> = self.by_elements().into_keys().collect();
        let overlap = |i: usize| shards[..i].iter().any(|other| !shards[i].intersect(other).is_empty());
        if (0..shards.len()).any(overlap) {
            return Err("some of its elements are in two files".into());
        }
        match covered == all {
            true => Ok(()),
            false => Err(format!("its files hold {covered} elements of {all}")),
        }
    }

    /// The shards of kept weights must be all that the mask keeps.
    pub(super) fn check_kept(&self, kept: &MaskIndex) -> Result<(), String> {
        for (shard, file_shards) in self.by_elements() {
            let (found, expected) = (ranges_follow(&file_shards)?, kept.count_in(&shard));
            if found != expected {
                return Err(format!("its files hold {found} numbers where its mask keeps {expected}"));
            }
        }
        Ok(())
    }

    /// The ranges that ranks have split a shard into, in their order, by that shard.
    fn by_elements(&self) -> HashMap<Shard, Vec<&FileShard>> {
        let mut shards: HashMap<Shard, Vec<&FileShard>> = HashMap::new();
        self.file_shards
            .iter()
            .for_each(|file_shard| shards.entry(file_shard.shard.elements()).or_default().push(file_shard));
        shards.values_mut().for_each(|file_shards| {
            file_shards.sort_by_key(|file_shard| (file_shard.start(), file_shard.length))
        });
        shards
    }
}

/// Where the ranges of one shard end, if each begins where the one before ends.
fn ranges_follow(file_shards: &[&FileShard]) -> Result<usize, String> {
    let mut next = 0;
    for file_shard in file_shards {
        let start = file_shard.start();
        if start != next {
            let how = if next < start { "in no file" } else { "in two files" };
            return Err(format!("its elements {} to {} are {how}", next.min(start), next.max(start)));
        }
        next = start.checked_add(file_shard.length).ok_or("a shard of it is missing")?;
    }
    Ok(next)
}

/// Takes in the tensors of a file, from its header alone.
pub(super) fn add_tensors(
    tensors: &mut BTreeMap<String, TensorEntry>,
    file: &File,
    bytes: u64,
    number: usize,
) -> Result<(), ReadFault> {
    let io = |why: io::Error| ReadFault::of("its header", &why);
    let mut length = [0; 8];
    read_at(file, 0, &mut length).map_err(io)?;
    let length = u64::from_le_bytes(length);
    if length > LARGEST_HEADER {
        return Err(format!("its header is damaged: it would have {length} bytes").into());
    }
    let mut header = vec![0; length as usize];
    read_at(file, 8, &mut header).map_err(io)?;
    let header: Metadata =
        serde_json::from_slice(&header).map_err(|why| format!("its header is damaged: {why}"))?;
    if 8 + length + header.data_len() as u64 != bytes {
        return Err("its header is not that of a file of its size".to_owned().into());
    }
    let described = header.metadata().as_ref().and_then(|described| described.get(SHARDS_KEY));
    let mut shard_descriptions: ShardDescriptions = match described {
        Some(text) => serde_json::from_str(text).map_err(|why| format!("its shards are damaged: {why}"))?,
        None => ShardDescriptions::new(),
    };
    for (name, info) in header.tensors() {
        let shard = match shard_descriptions.remove(&name) {
            Some(description) => description.shard().map_err(|why| format!("{name}: {why}"))?,
            None => Shard::full(&shape_in_memory(&info.shape)),
        };
        let entry = tensors.entry(name.clone()).or_insert_with(|| TensorEntry {
            dtype: info.dtype,
            values: shard.values().clone(),
            shape: shard.full_shape().to_vec(),
            file_shards: Vec::new(),
        });
        let shape = shard.full_shape();
        if entry.dtype != info.dtype || entry.shape != shape || entry.values != *shard.values() {
            return Err(format!(
                "{name} is a shard of {:?} {shape:?}, and in another file one of {:?} {:?}",
                info.dtype, entry.dtype, entry.shape
            )
            .into());
        }
        let offset = 8 + length + info.data_offsets.0 as u64;
        entry.file_shards.push(FileShard {
            shard,
            length: info.shape.iter().product(),
            file: number,
            offset,
        });
    }
    Ok(())
}

/// Fills bytes from an offset of a file, whoever else reads it at the same time: threads of one process may
/// share it. What fails for a moment is tried again.
pub(super) fn read_at(file: &File, at: u64, into: &mut [u8]) -> io::Result<()> {
    retry(|| file.read_exact_at(into, at))
}
