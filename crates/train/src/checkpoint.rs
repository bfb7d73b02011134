//! Checkpoints: a folder per step, complete or not there at all.
//!
//! ```text
//! checkpoints/step-000300/manifest.json          what it is, and a hash of every other file
//!                         model.safetensors      weights and running statistics under their public names
//!                         optimizer.safetensors  master weights and moments, as master/NAME, moment0/NAME; of a pruned
//!                                                parameter those of its kept weights
//!                         masks.safetensors      where something is pruned: bit i % 32 of word i / 32 of NAME says
//!                                                whether its weight i is kept
//!                         pruner.safetensors     what the pruning method remembers
//! ```
//!
//! A checkpoint is written under a temporary name, synced and renamed. Loading checks every hash and every
//! shape before the first weight is touched; a broken checkpoint is reported and the one before it is used.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use espalier_tensor::{DType, Tensor};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

const MANIFEST: &str = "manifest.json";
const FORMAT: u32 = 1;

/// Where a run stands, apart from its tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps tried, also those skipped for a bad gradient: fixes the position in the data.
    pub step: u64,
    /// Steps taken by the optimizer since its state was fresh.
    pub updates: u64,
    /// Bad steps in a row up to now.
    pub bad_steps: u64,
    /// The best validation loss so far.
    pub best_validation: Option<f64>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    format: u32,
    model: String,
    precision: String,
    progress: Progress,
    files: BTreeMap<String, FileRecord>,
}

#[derive(Debug, Serialize, Deserialize)]
struct FileRecord {
    bytes: u64,
    blake3: String,
}

/// What one file of a checkpoint holds, by name.
pub type Saved<'a> = Vec<(String, Stored<'a>)>;

/// Something that is saved.
#[derive(Debug)]
pub enum Stored<'a> {
    /// A tensor, from whichever device.
    Tensor(&'a Tensor),
    /// Whole numbers of the host.
    Words(Vec<u32>),
}

/// Named tensors to be filled from one file of a checkpoint.
pub type NamedMut<'a> = Vec<(String, &'a mut Tensor)>;

/// The checkpoints of a run.
#[derive(Debug, Clone)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
    model: String,
    precision: String,
}

impl Checkpoints {
    /// Those in `folder`, of which the last `keep` stay. Model and precision are written down and compared.
    pub fn new(folder: impl Into<PathBuf>, keep: usize, model: &str, precision: &str) -> Checkpoints {
        Checkpoints { folder: folder.into(), keep, model: model.into(), precision: precision.into() }
    }

    /// Writes a checkpoint and removes those that are too old.
    pub fn save(&self, progress: &Progress, files: &[(&str, Saved<'_>)]) -> Result<PathBuf> {
        let target = self.folder.join(format!("step-{:06}", progress.step));
        let temporary = self.folder.join(format!(".writing-step-{:06}", progress.step));
        let write = || -> io::Result<()> {
            fs::create_dir_all(&self.folder)?;
            remove_if_there(&temporary)?;
            fs::create_dir(&temporary)?;
            let mut records = BTreeMap::new();
            for (name, tensors) in files {
                records.insert((*name).to_owned(), write_tensors(&temporary.join(name), tensors)?);
            }
            let manifest = Manifest {
                format: FORMAT,
                model: self.model.clone(),
                precision: self.precision.clone(),
                progress: progress.clone(),
                files: records,
            };
            let path = temporary.join(MANIFEST);
            fs::write(&path, serde_json::to_vec_pretty(&manifest)?)?;
            File::open(&path)?.sync_all()?;
            File::open(&temporary)?.sync_all()?;
            remove_if_there(&target)?;
            fs::rename(&temporary, &target)?;
            File::open(&self.folder)?.sync_all()
        };
        if let Err(why) = write() {
            let _ = fs::remove_dir_all(&temporary);
            // That a card cannot be read any more is not the disk's fault.
            return Err(match why.downcast::<espalier_tensor::Error>() {
                Ok(device) => Error::Tensor(device),
                Err(why) => Error::file(target, format!("the checkpoint cannot be written: {why}")),
            });
        }
        let all = self.list()?;
        for old in all.iter().rev().skip(self.keep.max(1)) {
            fs::remove_dir_all(old).map_err(|why| Error::file(old, why))?;
        }
        Ok(target)
    }

    /// Complete checkpoints, oldest first.
    pub fn list(&self) -> Result<Vec<PathBuf>> {
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(why) => return Err(Error::file(&self.folder, why)),
        };
        let number =
            |path: &Path| -> Option<u64> { path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok() };
        let mut found: Vec<(u64, PathBuf)> = entries
            .filter_map(|entry| entry.ok().map(|e| e.path()))
            .filter_map(|path| Some((number(&path)?, path)))
            .collect();
        found.sort();
        Ok(found.into_iter().map(|(_, path)| path).collect())
    }

    /// The newest checkpoint that is whole; `report` hears of those that are not.
    ///
    /// A checkpoint of another model or precision is an error, not a broken checkpoint.
    pub fn latest(&self, mut report: impl FnMut(&Error)) -> Result<Option<Whole>> {
        for path in self.list()?.into_iter().rev() {
            match Whole::read(&path) {
                Ok(whole) => {
                    for (what, theirs, ours) in [
                        ("model", &whole.manifest.model, &self.model),
                        ("precision", &whole.manifest.precision, &self.precision),
                    ] {
                        if theirs != ours {
                            return Err(whole.refuse(format!(
                                "it holds {what} {theirs}, and this run trains {what} {ours}"
                            )));
                        }
                    }
                    return Ok(Some(whole));
                }
                Err(broken) => report(&broken),
            }
        }
        Ok(None)
    }
}

fn refuse(path: &Path, why: impl ToString) -> Error {
    Error::Checkpoint { path: path.into(), why: why.to_string() }
}

fn dtype_of(tensor: &Tensor) -> Dtype {
    match tensor.dtype() {
        DType::F32 => Dtype::F32,
        DType::Bf16 => Dtype::BF16,
        DType::U16 => Dtype::U16,
        DType::U32 => Dtype::U32,
    }
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(why) if why.kind() != io::ErrorKind::NotFound => Err(why),
        _ => Ok(()),
    }
}

fn write_tensors(path: &Path, saved: &Saved<'_>) -> io::Result<FileRecord> {
    // Views borrow their bytes, so these come first.
    let bytes: Vec<Cow<'_, [u8]>> = saved
        .iter()
        .map(|(_, stored)| match stored {
            Stored::Tensor(tensor) => tensor.read_bytes().map_err(io::Error::other),
            Stored::Words(words) => {
                Ok(words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>().into())
            }
        })
        .collect::<io::Result<_>>()?;
    let views = saved.iter().zip(&bytes).map(|((name, stored), bytes)| {
        let (dtype, shape) = match stored {
            Stored::Tensor(tensor) => (dtype_of(tensor), tensor.shape().to_vec()),
            Stored::Words(words) => (Dtype::U32, vec![words.len()]),
        };
        (name, TensorView::new(dtype, shape, bytes).expect("a tensor's bytes fit its shape"))
    });
    safetensors::serialize_to_file(views, None, path).map_err(io::Error::other)?;
    File::open(path)?.sync_all()?;
    hash(path)
}

fn hash(path: &Path) -> io::Result<FileRecord> {
    let mut hasher = blake3::Hasher::new();
    io::copy(&mut File::open(path)?, &mut hasher)?;
    Ok(FileRecord { bytes: hasher.count(), blake3: hasher.finalize().to_hex().to_string() })
}

/// A checkpoint in memory whose hashes are right.
#[derive(Debug)]
pub struct Whole {
    path: PathBuf,
    manifest: Manifest,
    files: BTreeMap<String, Vec<u8>>,
}

impl Whole {
    /// Reads the checkpoint at `path`, or the newest whole one of the run folder there.
    pub fn find(path: &Path) -> Result<Whole> {
        if path.join(MANIFEST).exists() {
            return Whole::read(path);
        }
        let inside = Checkpoints::new(path.join("checkpoints"), 1, "", "").list()?;
        let mut broken =
            refuse(path, format!("it is neither a checkpoint (no {MANIFEST}) nor a run folder with one"));
        for path in inside.into_iter().rev() {
            match Whole::read(&path) {
                Ok(whole) => return Ok(whole),
                Err(error) => broken = error,
            }
        }
        Err(broken)
    }

    /// The run file of its run, where it stands in a run folder.
    pub fn run_file(&self) -> PathBuf {
        self.path.join("../../run.toml")
    }

    /// Reads a checkpoint's folder and compares every hash.
    pub fn read(path: &Path) -> Result<Whole> {
        let broken = |why: String| refuse(path, why);
        let text = fs::read(path.join(MANIFEST)).map_err(|why| broken(format!("{MANIFEST}: {why}")))?;
        let manifest: Manifest =
            serde_json::from_slice(&text).map_err(|why| broken(format!("{MANIFEST} is damaged: {why}")))?;
        if manifest.format != FORMAT {
            return Err(broken(format!("its format is {}, this program reads {FORMAT}", manifest.format)));
        }
        let mut files = BTreeMap::new();
        for (name, expected) in &manifest.files {
            let bytes = fs::read(path.join(name)).map_err(|why| broken(format!("{name}: {why}")))?;
            if bytes.len() as u64 != expected.bytes {
                return Err(broken(format!(
                    "{name} has {} bytes instead of {}",
                    bytes.len(),
                    expected.bytes
                )));
            }
            if blake3::hash(&bytes).to_hex().as_str() != expected.blake3 {
                return Err(broken(format!("{name} is damaged: its hash is not the one in {MANIFEST}")));
            }
            files.insert(name.clone(), bytes);
        }
        Ok(Whole { path: path.into(), manifest, files })
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where its run stood.
    pub fn progress(&self) -> &Progress {
        &self.manifest.progress
    }

    /// An error about it.
    pub fn refuse(&self, why: impl ToString) -> Error {
        refuse(&self.path, why)
    }

    /// The whole numbers of a file, by name; none where the checkpoint has no such file.
    pub fn words(&self, file: &str) -> Result<BTreeMap<String, Vec<u32>>> {
        if !self.files.contains_key(file) {
            return Ok(BTreeMap::new());
        }
        let words = |(name, view): (String, TensorView<'_>)| {
            if view.dtype() != Dtype::U32 {
                return Err(self.refuse(format!("{name} in {file} is {:?}, not U32", view.dtype())));
            }
            let words = view.data().as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
            Ok((name, words.collect()))
        };
        self.tensors(file)?.tensors().into_iter().map(words).collect()
    }

    /// Fills tensors from its files. Names, types and shapes are compared before the first one is touched.
    pub fn fill(&self, files: &mut [(&str, NamedMut<'_>)]) -> Result<()> {
        for (file, tensors) in &*files {
            let stored = self.tensors(file)?;
            for (name, tensor) in tensors {
                let Ok(view) = stored.tensor(name) else {
                    return Err(self.refuse(format!("{file} has no tensor {name}, which this run needs")));
                };
                if view.shape() != tensor.shape() || view.dtype() != dtype_of(tensor) {
                    return Err(self.refuse(format!(
                        "{name} is {:?} {:?} there, and {:?} {:?} in this run",
                        view.dtype(),
                        view.shape(),
                        dtype_of(tensor),
                        tensor.shape()
                    )));
                }
            }
            if stored.len() != tensors.len() {
                let problem = format!("{file} holds {} tensors, this run {}", stored.len(), tensors.len());
                return Err(self.refuse(problem));
            }
        }
        for (file, tensors) in files {
            let stored = self.tensors(file)?;
            for (name, tensor) in tensors {
                tensor.copy_from_host(stored.tensor(name).expect("looked for above").data())?;
            }
        }
        Ok(())
    }

    fn tensors(&self, file: &str) -> Result<SafeTensors<'_>> {
        let bytes = self.files.get(file).ok_or_else(|| self.refuse(format!("it has no {file}")))?;
        SafeTensors::deserialize(bytes).map_err(|why| self.refuse(format!("{file}: {why}")))
    }
}
