//! Writing: each rank its own files, rank 0 the manifest.
//!
//! **Who writes what.** Ranks along the data axis hold the same tensors, those of one replica its stages' and of these perhaps
//! pieces: each tensor, and each shard of one, is written by one of those that hold it (a tied embedding is at both ends of a
//! pipeline, a norm whole beside pieces of matrices), dealt out so that all write alike many bytes. A range of shared state is
//! this rank's alone, so it writes it.
//!
//! **Whole or absent.** Rank 0 makes the temporary folder; all write into it and sync; all hear how it went; rank 0 writes the
//! manifest and renames. A rank that dies at any moment before leaves a temporary folder, which the next checkpoint
//! removes.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::fault::WriteFault;
use super::files::{Holders, WRITING, deal, file_name, part_of};
use super::manifest::{FileRecord, Manifest};
use super::old::{remove, set_aside};
use super::sharded::Description;
use super::stored::{Saved, Stored};
use super::tensors::write_tensors;
use super::{Checkpoint, Checkpoints, MANIFEST, MODEL, Progress, ReadFault};
use crate::parallel::{Ranks, exchange, together};
use crate::{Result, durable};

/// What several ranks need.
const SHARED: &str = "the run folder must be one that all ranks share";

/// A file beside the tensors, for other programs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Companion {
    /// Its name in the folder.
    pub name: String,
    /// All of it.
    pub bytes: Vec<u8>,
    /// Whether it would be misleading where ranks have written pieces of the weights, which other programs cannot read.
    pub needs_whole_weights: bool,
}

/// What a rank says of a file that it wrote.
#[derive(Serialize, Deserialize)]
struct Written {
    file: String,
    record: FileRecord,
    /// Tensors that it holds whole, and their bytes.
    tensors: BTreeMap<String, usize>,
    /// Whether it holds nothing but whole ones.
    is_whole: bool,
}

impl Checkpoints {
    /// Writes a checkpoint. All ranks must call it, each with what it holds. Where the disk fails ([`Error::Disk`](crate::Error::Disk), on every
    /// rank), those before it and nothing else are there.
    pub fn save(&self, progress: &Progress, files: Vec<(&str, Saved<'_>)>, ranks: &Ranks) -> Result<PathBuf> {
        let name = format!("step-{:06}", progress.step);
        let target = self.folder.join(&name);
        let leads = ranks.leads();
        let attempt = || -> Result<()> {
            let all = Together { ranks, target: &target, step: progress.step };
            let made = all.do_part(|| Ok(leads.then(|| self.make_room(&name)).transpose()?))?;
            let folder = made.into_iter().next().flatten().expect("rank 0 made one");
            let folder = &self.folder.join(folder);
            let own = own_part(files, ranks)?;
            let written: Vec<Written> =
                all.do_part(|| write_own(folder, own, ranks))?.into_iter().flatten().collect();
            all.do_part(|| if leads { self.complete(progress, &written, folder, &target) } else { Ok(()) })?;
            Ok(())
        };
        let outcome = attempt();
        if leads && outcome.is_err() {
            let _ = self.remove_leftovers();
        }
        outcome.map(|()| target)
    }

    /// Makes an empty folder to write to, and returns its name. What a run left that ended while it wrote goes, if it can.
    fn make_room(&self, name: &str) -> io::Result<String> {
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
        progress: &Progress,
        written: &[Written],
        temporary: &Path,
        target: &Path,
    ) -> Result<(), WriteFault> {
        let mut files = BTreeMap::new();
        for Written { file, record, .. } in written {
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
        let model = |written: &&Written| part_of(&written.file).as_deref() == Some(MODEL);
        let whole = written.iter().filter(model).all(|written| written.is_whole);
        for Companion { name, bytes, needs_whole_weights } in &self.companions {
            if whole || !needs_whole_weights {
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
struct Together<'a> {
    ranks: &'a Ranks,
    target: &'a Path,
    step: u64,
}

impl Together<'_> {
    /// Does this rank's part; returns that of all or, on all alike, what the first to fail came to.
    fn do_part<T>(&self, part: impl FnOnce() -> Result<T, WriteFault>) -> Result<Vec<T>>
    where
        T: Serialize + serde::de::DeserializeOwned,
    {
        let parts = together(self.ranks, || Ok(part()))?.expect("faults are told as results");
        let several = !self.ranks.is_alone();
        let of = |(rank, part): (usize, Result<T, WriteFault>)| {
            part.map_err(|fault| fault.of(several.then_some(rank), self.target, self.step))
        };
        parts.into_iter().enumerate().map(of).collect()
    }
}

/// A file, a name in it, and which shard of the tensor of that name, if it is not all.
type StoredId = (String, String, Option<Description>);
/// What a rank holds, and its bytes.
type Holding = (StoredId, usize);

fn id(stored: &Stored<'_>, file: &str, name: &str) -> StoredId {
    (file.to_owned(), name.to_owned(), stored.shard().map(Description::of))
}

/// What of all that a rank holds it writes: the rule is at the top of this file.
fn own_part<'a>(files: Vec<(&'a str, Saved<'a>)>, ranks: &Ranks) -> Result<Vec<(&'a str, Saved<'a>)>> {
    if ranks.is_alone() {
        return Ok(files);
    }
    let mut files = files;
    files.iter_mut().for_each(|(_, saved)| saved.retain(|(_, stored)| !stored.is_nothing()));
    let mut held: Vec<Holding> = Vec::new();
    for (file, saved) in &files {
        let shared = saved.iter().filter(|(_, stored)| stored.is_shared());
        held.extend(shared.map(|(name, stored)| (id(stored, file, name), stored.byte_len())));
    }
    let held = serde_json::to_vec(&held).expect("names are plain data");
    // Those that hold the model together: each replica has the same.
    let replica = ranks.replica();
    let mut tensors: BTreeMap<StoredId, Holders> = BTreeMap::new();
    for (member, held) in exchange(replica, &held)?.iter().enumerate() {
        let held: Vec<Holding> = serde_json::from_slice(held).expect("what a rank of the same program wrote");
        for (id, bytes) in held {
            tensors.entry(id).or_insert(Holders { bytes, members: Vec::new() }).members.push(member);
        }
    }
    let dealt = deal(&tensors.values().collect::<Vec<_>>(), replica.size(), ranks.data().size());
    let own = (replica.rank(), ranks.data().rank());
    let own: HashSet<&StoredId> =
        tensors.keys().zip(dealt).filter(|(_, owner)| *owner == own).map(|(id, _)| id).collect();
    let is_own = |file: &str, (name, stored): &(String, Stored<'_>)| {
        !stored.is_shared() || own.contains(&id(stored, file, name))
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
    ranks: &Ranks,
) -> Result<Vec<Written>, WriteFault> {
    let (rank, size) = (ranks.rank(), ranks.size());
    if !folder.exists() {
        return Err(WriteFault::NotShared(format!("it does not see the folder that rank 0 made: {SHARED}")));
    }
    let some = files.into_iter().filter(|(_, saved)| size == 1 || !saved.is_empty());
    some.map(|(file, saved)| {
        let name = file_name(file, rank, size);
        let record = write_tensors(&folder.join(&name), &saved)?;
        let all = saved.len();
        let whole = saved.into_iter().filter(|(_, stored)| stored.shard().is_none());
        let tensors: BTreeMap<_, _> = whole.map(|(name, stored)| (name, stored.byte_len())).collect();
        Ok(Written { file: name, record, is_whole: tensors.len() == all, tensors })
    })
    .collect()
}

/// Which file has which tensor of the model, as Hugging Face's tools read it, where there are several. Also checks that
/// no two ranks wrote the same tensor.
fn index(written: &[Written]) -> io::Result<Option<serde_json::Value>> {
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
    let entry = |written: &&Written| {
        let file = written.file.clone();
        written.tensors.keys().map(move |name| (name.clone(), file.clone())).collect::<Vec<_>>()
    };
    let map: BTreeMap<String, String> = model.iter().flat_map(entry).collect();
    let bytes: usize = model.iter().flat_map(|written| written.tensors.values()).sum();
    Ok(Some(json!({ "metadata": { "total_size": bytes }, "weight_map": map })))
}
