//! Writing: each rank its own files, rank 0 the manifest.
//!
//! **Who writes what.** Ranks along the data axis hold the same tensors, those along the pipeline their stages': each
//! tensor is written by one of those that hold it (a tied embedding is at both ends of a pipeline), dealt out so that all
//! write alike many bytes. A [`Stored::Piece`] is this rank's alone, so it writes it.
//!
//! **Whole or absent.** Rank 0 makes the temporary folder; all write into it and sync; all hear how it went; rank 0 writes the
//! manifest and renames. A rank that dies at any moment before leaves a temporary folder, which the next checkpoint
//! removes.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use espalier_tensor::{DType, Tensor};
use safetensors::tensor::{Dtype, View};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::shard::{Held, PIECES, Piece, Pieces, deal, file_name, part_of};
use super::{Checkpoints, FORMAT, FileRecord, MANIFEST, MODEL, Manifest, Progress};
use crate::parallel::{Ranks, exchange, together};
use crate::{Error, Result};

/// Folders that are being written start with this.
const WRITING: &str = ".writing-";
/// One that goes bears this name: whoever is killed while it goes leaves no checkpoint with holes.
const REMOVING: &str = ".removing-";

/// What several ranks need.
const SHARED: &str = "the run folder must be one that all ranks share";

/// What one file of a checkpoint holds, by name.
pub type Saved<'a> = Vec<(String, Stored<'a>)>;

/// Something that is saved.
#[derive(Debug)]
pub enum Stored<'a> {
    /// A tensor, from whichever device; every rank that holds one of this name holds the same.
    Tensor(&'a Tensor),
    /// A flat range of a tensor that no other rank holds.
    Piece(&'a Tensor, Piece),
    /// Whole numbers of the host; the same.
    Words(Vec<u32>),
}

/// What a rank says of a file that it wrote.
#[derive(Serialize, Deserialize)]
struct Written {
    file: String,
    record: FileRecord,
    /// Tensors that it holds whole, and their bytes.
    tensors: BTreeMap<String, usize>,
}

impl Checkpoints {
    /// Writes a checkpoint and removes those that are too old. All ranks must call it, each with what it holds.
    pub fn save(
        &self,
        progress: &Progress,
        files: Vec<(&str, Saved<'_>)>,
        ranks: Option<&Ranks>,
    ) -> Result<PathBuf> {
        let name = format!("step-{:06}", progress.step);
        let (target, temporary) = (self.folder.join(&name), self.folder.join(format!("{WRITING}{name}")));
        let leads = ranks.is_none_or(Ranks::leads);
        let on_first = |work: &dyn Fn() -> io::Result<()>| {
            let work = || if leads { work().map_err(|why| why.to_string()) } else { Ok(()) };
            Ok(together(ranks, work)?.map(|_| ()))
        };
        let mut device = None;
        let attempt = || -> Result<Result<(), String>> {
            if let Err(why) = on_first(&|| self.make_room(&temporary))? {
                return Ok(Err(why));
            }
            let own = own_part(files, ranks)?;
            // That a card cannot be read any more is not the disk's fault: it is told apart, to all.
            let write = || match write_own(&temporary, own, ranks) {
                Ok(written) => Ok(Ok(written)),
                Err(why) => {
                    device = Some(why.downcast::<espalier_tensor::Error>().map_err(|why| why.to_string())?);
                    Ok(Err(device.as_ref().expect("just set").to_string()))
                }
            };
            let written = match together(ranks, write)? {
                Ok(written) => all_read(written)?,
                Err(why) => return Ok(Err(why)),
            };
            on_first(&|| self.complete(progress, &written.iter().collect::<Vec<_>>(), &temporary, &target))
        };
        let outcome = attempt();
        if leads && !matches!(outcome, Ok(Ok(()))) {
            let _ = fs::remove_dir_all(&temporary);
        }
        if let Some(failed) = device {
            return Err(Error::Tensor(failed));
        }
        outcome?.map_err(|why| Error::file(&target, format!("the checkpoint cannot be written: {why}")))?;
        if leads {
            for old in self.list()?.iter().rev().skip(self.keep.max(1)) {
                remove_if_there(old).map_err(|why| Error::file(old, why))?;
            }
        }
        Ok(target)
    }

    /// An empty folder to write to; what a run left that ended while it wrote goes.
    fn make_room(&self, temporary: &Path) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().as_encoded_bytes();
            if [WRITING, REMOVING].iter().any(|prefix| name.starts_with(prefix.as_bytes())) {
                fs::remove_dir_all(path)?;
            }
        }
        fs::create_dir(temporary)
    }

    /// Writes the manifest of what all have written, and gives the folder its name.
    fn complete(
        &self,
        progress: &Progress,
        written: &[&Written],
        temporary: &Path,
        target: &Path,
    ) -> io::Result<()> {
        let mut files = BTreeMap::new();
        for Written { file, record, .. } in written {
            let seen = fs::metadata(temporary.join(file)).map(|found| found.len());
            if !seen.is_ok_and(|bytes| bytes == record.bytes) {
                return Err(io::Error::other(format!(
                    "rank 0 does not see {file}, which was written: {SHARED}"
                )));
            }
            files.insert(file.clone(), record.clone());
        }
        if let Some(index) = index(written)? {
            let name = format!("{MODEL}.index.json");
            let path = temporary.join(&name);
            write_synced(&path, &serde_json::to_vec_pretty(&index)?)?;
            files.insert(name, hash(&path)?);
        }
        let manifest = Manifest {
            format: FORMAT,
            model: self.model.clone(),
            precision: self.precision.clone(),
            progress: progress.clone(),
            files,
        };
        write_synced(&temporary.join(MANIFEST), &serde_json::to_vec_pretty(&manifest)?)?;
        File::open(temporary)?.sync_all()?;
        remove_if_there(target)?;
        fs::rename(temporary, target)?;
        File::open(&self.folder)?.sync_all()
    }
}

/// What all ranks wrote, if the cards of all could be read.
fn all_read(written: Vec<Result<Vec<Written>, String>>) -> Result<Vec<Written>> {
    let of = |(rank, written): (usize, Result<Vec<Written>, String>)| {
        written.map_err(|why| Error::RankEnded { rank, how: "failed", why })
    };
    Ok(written.into_iter().enumerate().map(of).collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
}

/// What of all that a rank holds it writes: the rule is at the top of this file.
fn own_part<'a>(
    files: Vec<(&'a str, Saved<'a>)>,
    ranks: Option<&Ranks>,
) -> Result<Vec<(&'a str, Saved<'a>)>> {
    let Some(ranks) = ranks else { return Ok(files) };
    let mut held: Vec<(&str, &str, usize)> = Vec::new();
    for (file, saved) in &files {
        let shared = saved.iter().filter(|(_, stored)| stored.is_shared());
        held.extend(shared.map(|(name, stored)| (*file, name.as_str(), stored.bytes())));
    }
    let held = serde_json::to_vec(&held).expect("names are plain data");
    let mut tensors: BTreeMap<(String, String), Held> = BTreeMap::new();
    for (stage, held) in exchange(ranks.stages(), &held)?.iter().enumerate() {
        let held: Vec<(String, String, usize)> =
            serde_json::from_slice(held).expect("what a rank of the same program wrote");
        for (file, name, bytes) in held {
            let tensor = tensors.entry((file, name)).or_insert(Held { bytes, stages: Vec::new() });
            tensor.stages.push(stage);
        }
    }
    let dealt = deal(&tensors.values().collect::<Vec<_>>(), ranks.stages().size(), ranks.data().size());
    let own = (ranks.stages().rank(), ranks.data().rank());
    let own: HashSet<&(String, String)> =
        tensors.keys().zip(dealt).filter(|(_, owner)| *owner == own).map(|(name, _)| name).collect();
    let is_own = |file: &str, (name, stored): &(String, Stored<'_>)| {
        !stored.is_shared() || own.contains(&(file.to_owned(), name.clone()))
    };
    let part = |(file, saved): (&'a str, Saved<'a>)| {
        (file, saved.into_iter().filter(|one| is_own(file, one)).collect())
    };
    Ok(files.into_iter().map(part).collect())
}

/// Writes a rank's files. One rank alone writes all of them; of several, one that has nothing for a file writes none.
fn write_own(
    folder: &Path,
    files: Vec<(&str, Saved<'_>)>,
    ranks: Option<&Ranks>,
) -> io::Result<Vec<Written>> {
    let (rank, size) = ranks.map_or((0, 1), |ranks| (ranks.rank(), ranks.size()));
    if !folder.exists() {
        return Err(io::Error::other(format!("it does not see the folder that rank 0 made: {SHARED}")));
    }
    let some = files.into_iter().filter(|(_, saved)| size == 1 || !saved.is_empty());
    some.map(|(file, saved)| {
        let name = file_name(file, rank, size);
        let record = write_tensors(&folder.join(&name), &saved)?;
        let whole = saved.into_iter().filter(|(_, stored)| stored.is_shared());
        let tensors = whole.map(|(name, stored)| (name, stored.bytes())).collect();
        Ok(Written { file: name, record, tensors })
    })
    .collect()
}

/// Which file has which tensor of the model, as Hugging Face's tools read it, where there are several. Also checks that
/// no two ranks wrote the same tensor.
fn index(written: &[&Written]) -> io::Result<Option<serde_json::Value>> {
    let mut seen = HashSet::new();
    for Written { file, tensors, .. } in written {
        if let Some(name) = tensors.keys().find(|name| !seen.insert((part_of(file), *name))) {
            return Err(io::Error::other(format!("two ranks wrote {name} to {:?}", part_of(file))));
        }
    }
    let model: Vec<_> =
        written.iter().filter(|written| part_of(&written.file).as_deref() == Some(MODEL)).collect();
    if model.iter().all(|written| written.file == MODEL) {
        return Ok(None);
    }
    let entry = |written: &&&Written| {
        let file = written.file.clone();
        written.tensors.keys().map(move |name| (name.clone(), file.clone())).collect::<Vec<_>>()
    };
    let map: BTreeMap<String, String> = model.iter().flat_map(entry).collect();
    let bytes: usize = model.iter().flat_map(|written| written.tensors.values()).sum();
    Ok(Some(json!({ "metadata": { "total_size": bytes }, "weight_map": map })))
}

fn write_tensors(path: &Path, saved: &Saved<'_>) -> io::Result<FileRecord> {
    let piece = |(name, stored): &(String, Stored<'_>)| match stored {
        Stored::Piece(_, piece) => Some((name.clone(), piece.clone())),
        Stored::Tensor(_) | Stored::Words(_) => None,
    };
    let pieces: Pieces = saved.iter().filter_map(piece).collect();
    let described = (!pieces.is_empty())
        .then(|| Ok::<_, io::Error>(HashMap::from([(PIECES.into(), serde_json::to_string(&pieces)?)])))
        .transpose()?;
    let failed = RefCell::new(None);
    let views = saved.iter().map(|(name, stored)| (name, Viewed::new(stored, &failed)));
    safetensors::serialize_to_file(views, described, path).map_err(io::Error::other)?;
    if let Some(failed) = failed.take() {
        return Err(io::Error::other(failed));
    }
    File::open(path)?.sync_all()?;
    hash(path)
}

impl Stored<'_> {
    /// Whether the other ranks along the data axis hold it too.
    fn is_shared(&self) -> bool {
        !matches!(self, Stored::Piece(..))
    }

    fn bytes(&self) -> usize {
        match self {
            Stored::Tensor(tensor) | Stored::Piece(tensor, _) => tensor.byte_len(),
            Stored::Words(words) => size_of_val(words.as_slice()),
        }
    }
}

/// How the file format sees it: bytes come from a card one tensor at a time.
struct Viewed<'a> {
    stored: &'a Stored<'a>,
    shape: Vec<usize>,
    /// The format has no way to say that a card failed: zeros are written then, and this is looked at afterwards.
    failed: &'a RefCell<Option<espalier_tensor::Error>>,
}

impl<'a> Viewed<'a> {
    fn new(stored: &'a Stored<'a>, failed: &'a RefCell<Option<espalier_tensor::Error>>) -> Viewed<'a> {
        let shape = match stored {
            Stored::Tensor(tensor) | Stored::Piece(tensor, _) => tensor.shape().to_vec(),
            Stored::Words(words) => vec![words.len()],
        };
        Viewed { stored, shape, failed }
    }
}

impl View for Viewed<'_> {
    fn dtype(&self) -> Dtype {
        match self.stored {
            Stored::Tensor(tensor) | Stored::Piece(tensor, _) => dtype_of(tensor),
            Stored::Words(_) => Dtype::U32,
        }
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        match self.stored {
            Stored::Tensor(tensor) | Stored::Piece(tensor, _) => tensor.read_bytes().unwrap_or_else(|why| {
                self.failed.replace(Some(why));
                vec![0; tensor.byte_len()].into()
            }),
            Stored::Words(words) => {
                words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>().into()
            }
        }
    }

    fn data_len(&self) -> usize {
        self.stored.bytes()
    }
}

pub(super) fn dtype_of(tensor: &Tensor) -> Dtype {
    match tensor.dtype() {
        DType::F32 => Dtype::F32,
        DType::Bf16 => Dtype::BF16,
        DType::U16 => Dtype::U16,
        DType::U32 => Dtype::U32,
    }
}

pub(super) fn hash(path: &Path) -> io::Result<FileRecord> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(path)?)?;
    Ok(FileRecord { bytes: hasher.count(), blake3: hasher.finalize().to_hex().to_string() })
}

fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    fs::write(path, bytes)?;
    File::open(path)?.sync_all()
}

/// Takes a checkpoint's name away at once, and then its files.
fn remove_if_there(path: &Path) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let going = path.with_file_name(format!("{REMOVING}{name}"));
    match fs::rename(path, &going) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(why) => Err(why),
        Ok(()) => fs::remove_dir_all(going),
    }
}

#[cfg(test)]
mod tests {
    use espalier_comm::Failure;

    use super::*;

    /// Every rank calls it what it is, and by the number of the rank: no file is at fault.
    #[test]
    fn a_card_that_cannot_be_read_is_no_fault_of_the_disk() {
        let broken = "CUDA: copying to the host failed: out of luck".to_owned();
        let heard = all_read(vec![Ok(Vec::new()), Err(broken), Ok(Vec::new())]).err().expect("rank 1 failed");
        let ended = Error::from(Failure::Failed { rank: 0, error: heard });
        assert!(matches!(ended, Error::RankEnded { rank: 1, .. }), "{ended}");
        assert_eq!(ended.to_string(), "rank 1 failed: CUDA: copying to the host failed: out of luck");
    }
}
