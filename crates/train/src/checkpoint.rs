//! Checkpoints: a folder per step, complete or not there at all.
//!
//! ```text
//! checkpoints/step-000300/manifest.json          what it is, and a hash of every other file
//!                         model.safetensors      weights and running statistics under their public names
//!                         optimizer.safetensors  master weights and moments, as master/NAME, moment0/NAME
//! ```
//!
//! A checkpoint is written under a temporary name, synced and renamed. Loading checks every hash and every
//! shape before the first weight is touched; a broken checkpoint is reported and the one before it is used.

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
    /// Steps taken by the optimizer.
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

/// Named tensors of one file of a checkpoint.
pub type Named<'a> = Vec<(String, &'a Tensor)>;

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
    pub fn save(&self, progress: &Progress, files: &[(&str, Named<'_>)]) -> Result<PathBuf> {
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
            return Err(Error::file(target, format!("the checkpoint cannot be written: {why}")));
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

    /// Fills `files` from the newest checkpoint that is whole; `report` hears of those that are not.
    ///
    /// A checkpoint of another model or precision is an error, not a broken checkpoint.
    pub fn load_latest(
        &self,
        files: &mut [(&str, NamedMut<'_>)],
        mut report: impl FnMut(&Error),
    ) -> Result<Option<(PathBuf, Progress)>> {
        for path in self.list()?.into_iter().rev() {
            match Whole::read(&path) {
                Ok(whole) => {
                    self.check(&path, &whole, files)?;
                    for (name, tensors) in files.iter_mut() {
                        whole.fill(name, tensors).map_err(|why| refuse(&path, why))?;
                    }
                    return Ok(Some((path, whole.manifest.progress)));
                }
                Err(broken) => report(&broken),
            }
        }
        Ok(None)
    }

    /// Compares what the checkpoint holds with what is to be filled, names, types and shapes, without touching anything.
    fn check(&self, path: &Path, whole: &Whole, files: &[(&str, NamedMut<'_>)]) -> Result<()> {
        for (what, theirs, ours) in [
            ("model", &whole.manifest.model, &self.model),
            ("precision", &whole.manifest.precision, &self.precision),
        ] {
            if theirs != ours {
                return Err(refuse(
                    path,
                    format!("it holds {what} {theirs}, and this run trains {what} {ours}"),
                ));
            }
        }
        for (name, tensors) in files {
            let stored = whole.tensors(name).map_err(|why| refuse(path, why))?;
            for (key, tensor) in tensors {
                let Ok(view) = stored.tensor(key) else {
                    return Err(refuse(path, format!("{name} has no tensor {key}, which this run needs")));
                };
                if view.shape() != tensor.shape() || view.dtype() != dtype_of(tensor) {
                    return Err(refuse(
                        path,
                        format!(
                            "{key} is {:?} {:?} there, and {:?} {:?} in this run",
                            view.dtype(),
                            view.shape(),
                            dtype_of(tensor),
                            tensor.shape()
                        ),
                    ));
                }
            }
            if stored.len() != tensors.len() {
                return Err(refuse(
                    path,
                    format!("{name} holds {} tensors, this run {}", stored.len(), tensors.len()),
                ));
            }
        }
        Ok(())
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

fn write_tensors(path: &Path, tensors: &Named<'_>) -> io::Result<FileRecord> {
    let bytes: Vec<_> = tensors.iter().map(|(_, tensor)| tensor.host_bytes()).collect();
    let views = tensors.iter().zip(&bytes).map(|((name, tensor), bytes)| {
        let view = TensorView::new(dtype_of(tensor), tensor.shape().to_vec(), bytes);
        (name, view.expect("a tensor's bytes fit its shape"))
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
struct Whole {
    manifest: Manifest,
    files: BTreeMap<String, Vec<u8>>,
}

impl Whole {
    fn read(path: &Path) -> Result<Whole> {
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
        Ok(Whole { manifest, files })
    }

    fn tensors(&self, file: &str) -> Result<SafeTensors<'_>, String> {
        let bytes = self.files.get(file).ok_or_else(|| format!("it has no {file}"))?;
        SafeTensors::deserialize(bytes).map_err(|why| format!("{file}: {why}"))
    }

    fn fill(&self, file: &str, tensors: &mut NamedMut<'_>) -> Result<(), String> {
        let stored = self.tensors(file)?;
        for (key, tensor) in tensors {
            let view = stored.tensor(key).map_err(|why| why.to_string())?;
            tensor.copy_from_host(view.data());
        }
        Ok(())
    }
}
