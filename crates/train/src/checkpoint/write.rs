//! Writing: each rank its own files, rank 0 the manifest.
//!
//! **Who writes what.** Ranks along the data axis hold the same tensors, those of one replica its stages' and
//! of these perhaps shards: each tensor, and each shard of one, is written by one of those that hold it (a
//! tied embedding is at both ends of a pipeline, a norm replicated beside shards of matrices), dealt out so
//! that all write alike many bytes. A range of shared state is this rank's alone, so it writes it.
//!
//! **Complete or absent.** Rank 0 makes the temporary folder; all write into it and sync; all learn how it went;
//! rank 0 writes the manifest and renames. A rank that dies at any moment before leaves a temporary folder,
//! which the next checkpoint removes.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::checkpoint_tensor::{CheckpointTensor, NamedTensors};
use super::fault::WriteFault;
use super::files::{Holders, WRITING, assign_writers, file_name, logical_file};
use super::manifest::{FileRecord, Manifest};
use super::retention::{remove, set_aside};
use super::safetensors_file::write_tensors;
use super::sharded::ShardDescription;
use super::{Checkpoint, Checkpoints, MANIFEST, MODEL, ReadFault, RunProgress};
use crate::parallel::{Ranks, all_gather_bytes, all_gather_results};
use crate::{Result, durable};

/// What several ranks need.
const SHARED: &str = "the run folder must be one that all ranks share";

/// A file beside the tensors, for other programs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SidecarFile {
    /// Its name in the folder.
    pub name: String,
    pub bytes: Vec<u8>,
    /// Whether it would be misleading where ranks have written shards of the weights, which other programs
    /// cannot read.
    pub needs_unsharded_weights: bool,
}

/// What a rank says of a file that it wrote.
#[derive(Serialize, Deserialize)]
struct WrittenFile {
    file: String,
    record: FileRecord,
    /// Tensors that it holds unsharded, and their bytes.
    tensors: BTreeMap<String, usize>,
    /// Whether it holds nothing but unsharded ones.
    is_unsharded: bool,
}

impl Checkpoints {
    /// Writes a checkpoint. All ranks must call it, each with what it holds. Where the disk fails
    /// ([`Error::Disk`](crate::Error::Disk), on every rank), those before it and nothing else are there.
    pub fn save(
        &self,
        progress: &RunProgress,
        files: Vec<(&str, NamedTensors<'_>)>,
        ranks: &Ranks,
    ) -> Result<PathBuf> {
        let name = format!("step-{:06}", progress.step);
        let target = self.folder.join(&name);
        let is_rank0 = ranks.is_rank0();
        let attempt = || -> Result<()> {
            let all = CollectiveWrite { ranks, target: &target, step: progress.step };
            let made = all.run(|| Ok(is_rank0.then(|| self.make_temporary_folder(&name)).transpose()?))?;
            let folder = made.into_iter().next().flatten().expect("rank 0 made one");
            let folder = &self.folder.join(folder);
            let local = tensors_to_write(files, ranks)?;
            let written: Vec<WrittenFile> =
                all.run(|| write_local_files(folder, local, ranks))?.into_iter().flatten().collect();
            all.run(|| if is_rank0 { self.complete(progress, &written, folder, &target) } else { Ok(()) })?;
            Ok(())
        };
        let outcome = attempt();
        if is_rank0 && outcome.is_err() {
            let _ = self.remove_leftovers();
        }
        outcome.map(|()| target)
    }

    /// Makes an empty folder to write to, and returns its name. What a run left that ended while it wrote
    /// goes, if it can.
    fn make_temporary_folder(&self, name: &str) -> io::Result<String> {
        durable::create_folder(&self.folder)?;
        self.remove_leftovers()?;
        for attempt in 1.. {
            let more = if attempt == 1 { String::new() } else { format!("-{attempt}") };
            let name = format!("{WRITING}{name}{more}");
            match fs::create_dir(self.folder.join(&name)) {
                Err(why) if why.kind() == io::ErrorKind::AlreadyExists => {}
                made => return made.map(|()| name),
            }
        }
        unreachable!("some name is free")
    }

    /// Writes the manifest of what all have written, and gives the folder its name.
    fn complete(
        &self,
        progress: &RunProgress,
        written: &[WrittenFile],
        temporary: &Path,
        target: &Path,
    ) -> Result<(), WriteFault> {
        let mut files = BTreeMap::new();
        for WrittenFile { file, record, .. } in written {
            let seen = fs::metadata(temporary.join(file)).map(|found| found.len());
            if !seen.is_ok_and(|bytes| bytes == record.bytes) {
                return Err(WriteFault::NotShared(format!(
                    "rank 0 does not see {file}, which was written: {SHARED}"
                )));
            }
            files.insert(file.clone(), record.clone());
        }
        if let Some(index) = index(written)? {
            let name = format!("{MODEL}.index.json");
            let text = serde_json::to_vec_pretty(&index).map_err(io::Error::from)?;
            durable::write_synced(&temporary.join(&name), &text)?;
            files.insert(name, FileRecord::of(&text));
        }
        let model = |written: &&WrittenFile| logical_file(&written.file).as_deref() == Some(MODEL);
        let unsharded = written.iter().filter(model).all(|written| written.is_unsharded);
        for SidecarFile { name, bytes, needs_unsharded_weights } in &self.sidecar_files {
            if unsharded || !needs_unsharded_weights {
                durable::write_synced(&temporary.join(name), bytes)?;
                files.insert(name.clone(), FileRecord::of(bytes));
            }
        }
        let manifest = Manifest::new(&self.model, &self.precision, progress, files);
        durable::write_synced(&temporary.join(MANIFEST), &manifest.encode())?;
        durable::sync_folder(temporary)?;
        if target.exists() {
            match Checkpoint::open(target) {
                Ok(_) => remove(target)?,
                // It might be rescued.
                Err(ReadFault::Damaged(_)) => drop(set_aside(target)?),
                Err(ReadFault::Unread(why)) => return Err(WriteFault::Disk(why)),
            }
        }
        Ok(durable::rename(temporary, target)?)
    }
}

/// Work on one checkpoint that all ranks do, and of which all must know how it went.
struct CollectiveWrite<'a> {
    ranks: &'a Ranks,
    target: &'a Path,
    step: u64,
}

impl CollectiveWrite<'_> {
    /// Does this rank's work; returns the results of all or, on all alike, what the first to fail came to.
    fn run<T>(&self, work: impl FnOnce() -> Result<T, WriteFault>) -> Result<Vec<T>>
    where
        T: Serialize + serde::de::DeserializeOwned,
    {
        let results = all_gather_results(self.ranks, || Ok(work()))?.expect("faults are gathered as results");
        let several = !self.ranks.is_single();
        let of = |(rank, result): (usize, Result<T, WriteFault>)| {
            result.map_err(|fault| fault.of(several.then_some(rank), self.target, self.step))
        };
        results.into_iter().enumerate().map(of).collect()
    }
}

/// A file, a name in it, and which shard of the tensor of that name, if it is not all.
type TensorId = (String, String, Option<ShardDescription>);
/// What a rank holds, and its bytes.
type LocalTensor = (TensorId, usize);

fn id(stored: &CheckpointTensor<'_>, file: &str, name: &str) -> TensorId {
    (file.to_owned(), name.to_owned(), stored.shard().map(ShardDescription::of))
}

/// What of all that a rank holds it writes: the rule is at the top of this file.
fn tensors_to_write<'a>(
    files: Vec<(&'a str, NamedTensors<'a>)>,
    ranks: &Ranks,
) -> Result<Vec<(&'a str, NamedTensors<'a>)>> {
    if ranks.is_single() {
        return Ok(files);
    }
    let mut files = files;
    files.iter_mut().for_each(|(_, saved)| saved.retain(|(_, stored)| !stored.is_nothing()));
    let mut local_tensors: Vec<LocalTensor> = Vec::new();
    for (file, saved) in &files {
        let shared = saved.iter().filter(|(_, stored)| stored.is_shared());
        local_tensors.extend(shared.map(|(name, stored)| (id(stored, file, name), stored.byte_len())));
    }
    let local_tensors = serde_json::to_vec(&local_tensors).expect("names are plain data");
    // Those that hold the model together: each replica has the same.
    let replica = ranks.replica();
    let mut tensors: BTreeMap<TensorId, Holders> = BTreeMap::new();
    for (member, local_tensors) in all_gather_bytes(replica, &local_tensors)?.iter().enumerate() {
        let local_tensors: Vec<LocalTensor> =
            serde_json::from_slice(local_tensors).expect("what a rank of the same program wrote");
        for (id, bytes) in local_tensors {
            tensors.entry(id).or_insert(Holders { bytes, members: Vec::new() }).members.push(member);
        }
    }
    let writers = assign_writers(&tensors.values().collect::<Vec<_>>(), replica.size(), ranks.data().size());
    let local = (replica.rank(), ranks.data().rank());
    let local: HashSet<&TensorId> =
        tensors.keys().zip(writers).filter(|(_, owner)| *owner == local).map(|(id, _)| id).collect();
    let is_local = |file: &str, (name, stored): &(String, CheckpointTensor<'_>)| {
        !stored.is_shared() || local.contains(&id(stored, file, name))
    };
    let written_here = |(file, saved): (&'a str, NamedTensors<'a>)| {
        (file, saved.into_iter().filter(|one| is_local(file, one)).collect())
    };
    Ok(files.into_iter().map(written_here).collect())
}

/// Writes a rank's files. A single rank writes all of them; of several, one that has nothing for a file
/// writes none.
fn write_local_files(
    folder: &Path,
    files: Vec<(&str, NamedTensors<'_>)>,
    ranks: &Ranks,
) -> Result<Vec<WrittenFile>, WriteFault> {
    let (rank, size) = (ranks.rank(), ranks.size());
    if !folder.exists() {
        return Err(WriteFault::NotShared(format!("it does not see the folder that rank 0 made: {SHARED}")));
    }
    let some = files.into_iter().filter(|(_, saved)| size == 1 || !saved.is_empty());
    some.map(|(file, saved)| {
        let name = file_name(file, rank, size);
        let record = write_tensors(&folder.join(&name), &saved)?;
        let all = saved.len();
        let unsharded = saved.into_iter().filter(|(_, stored)| stored.shard().is_none());
        let tensors: BTreeMap<_, _> = unsharded.map(|(name, stored)| (name, stored.byte_len())).collect();
        Ok(WrittenFile { file: name, record, is_unsharded: tensors.len() == all, tensors })
    })
    .collect()
}

/// Which file has which tensor of the model, as Hugging Face's tools read it, where there are several. Also
/// checks that no two ranks wrote the same tensor.
fn index(written: &[WrittenFile]) -> io::Result<Option<serde_json::Value>> {
    let mut seen = HashSet::new();
    for WrittenFile { file, tensors, .. } in written {
        if let Some(name) = tensors.keys().find(|name| !seen.insert((logical_file(file), *name))) {
            return Err(io::Error::other(format!("two ranks wrote {name} to {:?}", logical_file(file))));
        }
    }
    let model: Vec<_> =
        written.iter().filter(|written| logical_file(&written.file).as_deref() == Some(MODEL)).collect();
    if model.iter().all(|written| written.file == MODEL) {
        return Ok(None);
    }
    let entry = |written: &&WrittenFile| {
        let file = written.file.clone();
        written.tensors.keys().map(move |name| (name.clone(), file.clone())).collect::<Vec<_>>()
    };
    let map: BTreeMap<String, String> = model.iter().flat_map(entry).collect();
    let bytes: usize = model.iter().flat_map(|written| written.tensors.values()).sum();
    Ok(Some(json!({ "metadata": { "total_size": bytes }, "weight_map": map })))
}
