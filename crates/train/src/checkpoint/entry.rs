//! A tensor of a checkpoint: which files have which parts of it. All of this is known from their headers.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::iter;
use std::os::unix::fs::FileExt;

use espalier_plan::layout::{Piece, Run};
use safetensors::tensor::{Dtype, Metadata};

use super::fault::{ReadFault, retry};
use super::portion::{Common, Descriptions, Form, Kept, PIECES, Portion, common};

/// The largest header of a file that is believed, as the format has it.
const LARGEST_HEADER: u64 = 100_000_000;

/// A tensor, in one part or several.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) dtype: Dtype,
    pub(super) form: Form,
    /// Of the whole; where kept weights are stored, of all weights.
    pub(super) shape: Vec<usize>,
    pub(super) parts: Vec<Part>,
}

/// What a file has of a tensor, and where its bytes begin.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub(super) portion: Portion,
    /// Numbers in the file.
    pub(super) length: usize,
    pub(super) shard: usize,
    pub(super) offset: u64,
}

impl Part {
    fn start(&self) -> usize {
        self.portion.start.unwrap_or(0)
    }

    /// What it has of what is wanted. Of the same piece that is a range, whatever the mask keeps of it.
    pub(super) fn common(&self, wanted: &Portion, length: usize, kept: Option<&Kept>) -> Vec<Common> {
        if self.portion.piece == wanted.piece && self.portion.form == wanted.form {
            let flat = |first: usize, length| iter::once(Run { at: 0, in_whole: first, length });
            return common(flat(self.start(), self.length), flat(wanted.start.unwrap_or(0), length));
        }
        let runs = |portion: &Portion, length| -> Vec<Run> {
            portion.runs(length, kept.filter(|_| matches!(portion.form, Form::KeptBy(_)))).collect()
        };
        common(runs(&self.portion, self.length).into_iter(), runs(wanted, length).into_iter())
    }
}

impl Entry {
    /// The shape of all that is stored: of kept weights, of their vector.
    pub(super) fn stored_shape(&self) -> Vec<usize> {
        match self.form {
            Form::Numbers => self.shape.clone(),
            Form::KeptBy(_) | Form::Packed(_) => vec![self.parts.iter().map(|part| part.length).sum()],
        }
    }

    /// The parts must be all of it, each element once. How many a mask keeps is not known yet ([`Entry::check_kept`]).
    pub(super) fn check(&self) -> Result<(), String> {
        let all: usize = self.shape.iter().product();
        let mut held = 0;
        for (piece, parts) in self.pieces() {
            let end = ranges_follow(&parts)?;
            held += match self.form {
                Form::Numbers if end < piece.len() => end,
                Form::Numbers if end > piece.len() => {
                    return Err(format!("its files hold {end} elements of {all}"));
                }
                Form::Packed(bits) if end != (bits * piece.len()).div_ceil(32) => {
                    return Err(format!(
                        "{end} words are not {bits} bits for each of {} elements",
                        piece.len()
                    ));
                }
                _ => piece.len(),
            };
        }
        let pieces: Vec<&Piece> = self.pieces().into_keys().collect();
        let overlap = |i: usize| pieces[..i].iter().any(|other| !pieces[i].intersect(other).is_empty());
        if (0..pieces.len()).any(overlap) {
            return Err("some of its elements are in two files".into());
        }
        match held == all {
            true => Ok(()),
            false => Err(format!("its files hold {held} elements of {all}")),
        }
    }

    /// The parts of kept weights must be all that the mask keeps.
    pub(super) fn check_kept(&self, kept: &Kept) -> Result<(), String> {
        for (piece, parts) in self.pieces() {
            let (found, expected) = (ranges_follow(&parts)?, kept.count_in(piece));
            if found != expected {
                return Err(format!("its files hold {found} numbers where its mask keeps {expected}"));
            }
        }
        Ok(())
    }

    /// The parts of each piece, in the order of their elements.
    fn pieces(&self) -> HashMap<&Piece, Vec<&Part>> {
        let mut pieces: HashMap<&Piece, Vec<&Part>> = HashMap::new();
        self.parts.iter().for_each(|part| pieces.entry(&part.portion.piece).or_default().push(part));
        pieces.values_mut().for_each(|parts| parts.sort_by_key(|part| (part.start(), part.length)));
        pieces
    }
}

/// Where the ranges of one piece end, if each begins where the one before ends.
fn ranges_follow(parts: &[&Part]) -> Result<usize, String> {
    let mut next = 0;
    for part in parts {
        let start = part.start();
        if start != next {
            let how = if next < start { "in no file" } else { "in two files" };
            return Err(format!("its elements {} to {} are {how}", next.min(start), next.max(start)));
        }
        next = start.checked_add(part.length).ok_or("a part of it is out of reach")?;
    }
    Ok(next)
}

/// Takes in the tensors of a file, after a look at its header alone.
pub(super) fn add_tensors(
    tensors: &mut BTreeMap<String, Entry>,
    file: &File,
    bytes: u64,
    shard: usize,
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
        Some(text) => serde_json::from_str(text).map_err(|why| format!("its pieces are damaged: {why}"))?,
        None => Descriptions::new(),
    };
    for (name, info) in header.tensors() {
        let portion = match pieces.remove(&name) {
            Some(description) => description.portion().map_err(|why| format!("{name}: {why}"))?,
            None => Portion::of(Piece::whole(&info.shape)),
        };
        let entry = tensors.entry(name.clone()).or_insert_with(|| Entry {
            dtype: info.dtype,
            form: portion.form.clone(),
            shape: portion.piece.of().to_vec(),
            parts: Vec::new(),
        });
        let shape = portion.piece.of();
        if entry.dtype != info.dtype || entry.shape != shape || entry.form != portion.form {
            return Err(format!(
                "{name} is a part of {:?} {shape:?}, and in another file one of {:?} {:?}",
                info.dtype, entry.dtype, entry.shape
            )
            .into());
        }
        let offset = 8 + length + info.data_offsets.0 as u64;
        entry.parts.push(Part { portion, length: info.shape.iter().product(), shard, offset });
    }
    Ok(())
}

/// Fills bytes from a place of a file, whoever else reads it at the same time: threads of one process may share it. What fails
/// for a moment is tried again.
pub(super) fn read_at(file: &File, at: u64, into: &mut [u8]) -> io::Result<()> {
    retry(|| file.read_exact_at(into, at))
}
