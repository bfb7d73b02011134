//! Opening a checkpoint: its manifest, the headers of its files, and all their hashes, of which each rank compares a part.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Component, Path, PathBuf};

use super::entry::{Entry, add_tensors};
use super::manifest::Manifest;
use super::shard::part_of;
use super::write::hash;
use super::{Checkpoints, MANIFEST, Progress, refuse};
use crate::data::irregular;
use crate::parallel::{Ranks, together};
use crate::{Error, Result};

/// A checkpoint whose hashes are right.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    pub(super) shards: Vec<Shard>,
    /// The tensors of each file, by name.
    pub(super) files: BTreeMap<String, BTreeMap<String, Entry>>,
}

/// A file on the disk.
#[derive(Debug)]
pub(super) struct Shard {
    pub(super) name: String,
    pub(super) file: File,
}

impl Checkpoint {
    /// Opens the checkpoint at `path`, or the newest whole one of the run folder there; `report` hears of newer ones that are
    /// damaged.
    pub fn find(path: &Path, ranks: &Ranks, mut report: impl FnMut(&Error)) -> Result<Checkpoint> {
        if path.join(MANIFEST).exists() {
            return Checkpoint::read(path, ranks);
        }
        let none =
            || refuse(path, format!("it is neither a checkpoint (no {MANIFEST}) nor a run folder with one"));
        if path.is_file() {
            return Err(none());
        }
        let mut damaged = Vec::new();
        for path in Checkpoints::of_run(path).list_of_first(ranks)?.into_iter().rev() {
            match Checkpoint::read(&path, ranks) {
                Ok(whole) => {
                    damaged.iter().for_each(&mut report);
                    return Ok(whole);
                }
                Err(error @ Error::Checkpoint { .. }) => damaged.push(error),
                Err(other) => return Err(other),
            }
        }
        Err(damaged.into_iter().next().unwrap_or_else(none))
    }

    /// The run file of its run, where it stands in a run folder.
    pub fn run_file(&self) -> PathBuf {
        self.path.join("../../run.toml")
    }

    /// Opens a checkpoint's folder and compares every hash. All ranks must, and all get the same answer.
    pub fn read(path: &Path, ranks: &Ranks) -> Result<Checkpoint> {
        let mut opened = None;
        let outcome = together(ranks, || {
            let whole = Checkpoint::open(path)?;
            whole.verify(ranks)?;
            opened = Some(whole);
            Ok(())
        })?;
        outcome.map_err(|why| refuse(path, why))?;
        Ok(opened.expect("nothing was wrong"))
    }

    /// All but the hashes of its files.
    pub(super) fn open(path: &Path) -> Result<Checkpoint, String> {
        regular(path, MANIFEST)?;
        let text = fs::read(path.join(MANIFEST)).map_err(|why| format!("{MANIFEST}: {why}"))?;
        let manifest = Manifest::decode(&text)?;
        let (mut shards, mut files) = (Vec::new(), BTreeMap::<_, BTreeMap<_, _>>::new());
        for (name, record) in &manifest.files {
            regular(path, name)?;
            let file = File::open(path.join(name)).map_err(|why| format!("{name}: {why}"))?;
            let bytes = file.metadata().map_err(|why| format!("{name}: {why}"))?.len();
            if bytes != record.bytes {
                return Err(format!("{name} has {bytes} bytes instead of {}", record.bytes));
            }
            let Some(logical) = part_of(name) else { continue };
            let tensors = files.entry(logical).or_default();
            add_tensors(tensors, &file, bytes, shards.len()).map_err(|why| format!("{name}: {why}"))?;
            shards.push(Shard { name: name.clone(), file });
        }
        for (file, tensors) in &files {
            for (name, entry) in tensors {
                entry.check().map_err(|why| format!("{name} in {file}: {why}"))?;
            }
        }
        Ok(Checkpoint { path: path.into(), manifest, shards, files })
    }

    /// Compares the hashes of this rank's part of the files.
    fn verify(&self, ranks: &Ranks) -> Result<(), String> {
        let (rank, size) = (ranks.rank(), ranks.size());
        for (name, expected) in self.manifest.files.iter().skip(rank).step_by(size) {
            let found = hash(&self.path.join(name)).map_err(|why| format!("{name}: {why}"))?;
            if found != *expected {
                return Err(format!("{name} is damaged: its hash is not the one in {MANIFEST}"));
            }
        }
        Ok(())
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The shape of a tensor, where the file has it.
    pub fn shape(&self, file: &str, name: &str) -> Option<&[usize]> {
        Some(&self.files.get(file)?.get(name)?.shape)
    }

    /// Where its run stood.
    pub fn progress(&self) -> &Progress {
        &self.manifest.progress
    }

    /// An error about it.
    pub fn refuse(&self, why: impl ToString) -> Error {
        refuse(&self.path, why)
    }
}

/// Refuses what no checkpoint of ours has in its list: a file outside its folder, and what is no file, of which a FIFO
/// would be waited for and a device read without end.
fn regular(folder: &Path, name: &str) -> Result<(), String> {
    let mut parts = Path::new(name).components();
    if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
        return Err(format!("{MANIFEST} names {name}, which is not in the checkpoint's folder"));
    }
    let kind = fs::metadata(folder.join(name)).map_err(|why| format!("{name}: {why}"))?.file_type();
    match irregular(kind) {
        Some(got) => Err(format!("{name} is {got}, not a regular file")),
        None => Ok(()),
    }
}
