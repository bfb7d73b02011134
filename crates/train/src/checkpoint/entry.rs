//! A tensor of a checkpoint: which files have which parts of it. All of this is known from their headers.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::iter;
use std::os::unix::fs::FileExt;

use espalier_plan::shard::{Run, Shard, Values};
use safetensors::tensor::{Dtype, Metadata};

use super::fault::{ReadFault, retry};
use super::sharded::{Common, Descriptions, Kept, PIECES, common, runs};

/// The largest header of a file that is believed, as the format has it.
const LARGEST_HEADER: u64 = 100_000_000;

/// A tensor, in one part or several.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) dtype: Dtype,
    pub(super) values: Values,
    /// Of the whole; where kept weights are stored, of all weights.
    pub(super) shape: Vec<usize>,
    pub(super) parts: Vec<FileShard>,
}

/// What a file has of a tensor, and where its bytes begin.
#[derive(Debug, Clone)]
pub(super) struct FileShard {
    pub(super) shard: Shard,
    /// Numbers in the file.
    pub(super) length: usize,
    /// Which file.
    pub(super) file: usize,
    pub(super) offset: u64,
}

impl FileShard {
    fn start(&self) -> usize {
        self.shard.start().unwrap_or(0)
    }

    /// What it has of what is wanted. Of the same shard that is a range, whatever the mask keeps of it.
    pub(super) fn common(&self, wanted: &Shard, length: usize, kept: Option<&Kept>) -> Vec<Common> {
        if self.shard.elements() == wanted.elements() && self.shard.values() == wanted.values() {
            let flat = |first: usize, length| iter::once(Run { at: 0, in_full: first, length });
            return common(flat(self.start(), self.length), flat(wanted.start().unwrap_or(0), length));
        }
        let own_runs = |shard: &Shard, length| -> Vec<Run> {
            runs(shard, length, kept.filter(|_| matches!(shard.values(), Values::KeptBy(_)))).collect()
        };
        common(own_runs(&self.shard, self.length).into_iter(), own_runs(wanted, length).into_iter())
    }
}

impl Entry {
    /// The shape of all that is stored: of kept weights, of their vector.
    pub(super) fn stored_shape(&self) -> Vec<usize> {
        match self.values {
            Values::Dense => self.shape.clone(),
            Values::KeptBy(_) | Values::Packed(_) => vec![self.parts.iter().map(|part| part.length).sum()],
        }
    }

    /// The parts must be all of it, each element once. How many a mask keeps is not known yet ([`Entry::check_kept`]).
    pub(super) fn check(&self) -> Result<(), String> {
        let all: usize = self.shape.iter().product();
        let mut held = 0;
        for (shard, parts) in self.by_elements() {
            let end = ranges_follow(&parts)?;
            held += match self.values {
                Values::Dense if end < shard.len() => end,
                Values::Dense if end > shard.len() => {
                    return Err(format!("its files hold {end} elements of {all}"));
                }
                Values::Packed(bits) if end != (bits * shard.len()).div_ceil(32) => {
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
        match held == all {
            true => Ok(()),
            false => Err(format!("its files hold {held} elements of {all}")),
        }
    }

    /// The parts of kept weights must be all that the mask keeps.
    pub(super) fn check_kept(&self, kept: &Kept) -> Result<(), String> {
        for (shard, parts) in self.by_elements() {
            let (found, expected) = (ranges_follow(&parts)?, kept.count_in(&shard));
            if found != expected {
                return Err(format!("its files hold {found} numbers where its mask keeps {expected}"));
            }
        }
        Ok(())
    }

    /// The parts that ranks have split among them, in their order, by what they are parts of.
    fn by_elements(&self) -> HashMap<Shard, Vec<&FileShard>> {
        let mut shards: HashMap<Shard, Vec<&FileShard>> = HashMap::new();
        self.parts.iter().for_each(|part| shards.entry(part.shard.elements()).or_default().push(part));
        shards.values_mut().for_each(|parts| parts.sort_by_key(|part| (part.start(), part.length)));
        shards
    }
}

/// Where the ranges of one shard end, if each begins where the one before ends.
fn ranges_follow(parts: &[&FileShard]) -> Result<usize, String> {
    let mut next = 0;
    for part in parts {
        let start = part.start();
        if start != next {
            let how = if next < start { "in no file" } else { "in two files" };
            return Err(format!("its elements {} to {} are {how}", next.min(start), next.max(start)));
        }
        next = start.checked_add(part.length).ok_or("a shard of it is missing")?;
    }
    Ok(next)
}

/// Takes in the tensors of a file, after a look at its header alone.
pub(super) fn add_tensors(
    tensors: &mut BTreeMap<String, Entry>,
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
    let described = header.metadata().as_ref().and_then(|described| described.get(PIECES));
    let mut pieces: Descriptions = match described {
        Some(text) => serde_json::from_str(text).map_err(|why| format!("its shards are damaged: {why}"))?,
        None => Descriptions::new(),
    };
    for (name, info) in header.tensors() {
        let shard = match pieces.remove(&name) {
            Some(description) => description.shard().map_err(|why| format!("{name}: {why}"))?,
            None => Shard::full(&info.shape),
        };
        let entry = tensors.entry(name.clone()).or_insert_with(|| Entry {
            dtype: info.dtype,
            values: shard.values().clone(),
            shape: shard.full_shape().to_vec(),
            parts: Vec::new(),
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
        entry.parts.push(FileShard { shard, length: info.shape.iter().product(), file: number, offset });
    }
    Ok(())
}

/// Fills bytes from a place of a file, whoever else reads it at the same time: threads of one process may share it. What fails
/// for a moment is tried again.
pub(super) fn read_at(file: &File, at: u64, into: &mut [u8]) -> io::Result<()> {
    retry(|| file.read_exact_at(into, at))
}
