//! Opening a checkpoint: its manifest, the headers of its files, and all their hashes, of which each rank
//! compares some.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use safetensors::tensor::Dtype;

use espalier_data::regular_file::{self, RECORDS, irregular};
use espalier_plan::filters::are_permuted;

use super::fault::{ReadFault, retry};
use super::files::logical_file;
use super::manifest::{Manifest, OLDER_FORMAT, hash};
use super::tensor_entry::{TensorEntry, add_tensors};
use super::{Checkpoints, MANIFEST, MODEL, RunProgress, refuse};
use crate::parallel::{Ranks, all_gather_results};
use crate::{Error, Result};

/// A checkpoint whose hashes are right. Its copies read the same files, which stay open.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    pub(super) shards: Vec<ShardFile>,
    /// The tensors of each file, by name.
    pub(super) files: BTreeMap<String, BTreeMap<String, TensorEntry>>,
}

/// A file on the disk.
#[derive(Debug, Clone)]
pub(super) struct ShardFile {
    pub(super) name: String,
    pub(super) file: Arc<File>,
}

impl Checkpoint {
    /// Opens the checkpoint at `path`, or the newest intact one of the run folder there; `report` hears of
    /// newer ones that are damaged.
    pub fn find(path: &Path, ranks: &Ranks, report: impl FnMut(&Error)) -> Result<Checkpoint> {
        let manifest = path.join(MANIFEST);
        let is_one = retry(|| manifest.try_exists());
        if is_one.or_else(not_below_a_file).map_err(|why| ReadFault::of(MANIFEST, &why).at(path))? {
            return Checkpoint::read(path, ranks);
        }
        let none =
            || refuse(path, format!("it is neither a checkpoint (no {MANIFEST}) nor a run folder with one"));
        if path.is_file() {
            return Err(none());
        }
        if !path.exists() {
            let why = "there is no such folder (nothing is downloaded: a model is a folder or file of this machine)";
            return Err(Error::file(path, why));
        }
        let mut damaged = Vec::new();
        let Some(newest) = Checkpoints::of_run(path).newest(ranks, |broken| damaged.push(broken))? else {
            return Err(damaged.into_iter().next().unwrap_or_else(none));
        };
        damaged.iter().for_each(report);
        Ok(newest)
    }

    /// The run file of its run, where it stands in a run folder.
    pub fn run_file(&self) -> PathBuf {
        self.path.join("../../run.toml")
    }

    /// Opens a checkpoint's folder and compares every hash. All ranks must, and all get the same answer.
    pub fn read(path: &Path, ranks: &Ranks) -> Result<Checkpoint> {
        let mut opened = None;
        let mut read = || -> Result<(), ReadFault> {
            let checkpoint = Checkpoint::open(path)?;
            checkpoint.verify(ranks)?;
            opened = Some(checkpoint);
            Ok(())
        };
        let outcomes = all_gather_results(ranks, || Ok(read()))?.expect("faults are gathered as results");
        let several = !ranks.is_single();
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            let of_rank = |fault: ReadFault| match several {
                true => fault.in_file(&format!("rank {rank}")),
                false => fault,
            };
            outcome.map_err(|fault| of_rank(fault).at(path))?;
        }
        Ok(opened.expect("nothing was wrong"))
    }

    /// Files of weights in a folder that another program wrote: no hashes, no masks, nothing beside. `path`
    /// is what a person calls it.
    pub(crate) fn of_files(path: &Path, folder: &Path, names: &[String]) -> Result<Checkpoint, ReadFault> {
        let (mut shards, mut tensors) = (Vec::new(), BTreeMap::new());
        for name in names {
            add_file(folder, name, None, &mut shards, &mut tensors)?;
        }
        let files = BTreeMap::from([(MODEL.to_owned(), tensors)]);
        check_entries(&files)?;
        let manifest = Manifest::new("", "", &RunProgress::default(), BTreeMap::new());
        Ok(Checkpoint { path: path.into(), manifest, shards, files })
    }

    /// The files that tell it from any other: the manifest, which has the hashes of the others, or all that
    /// another program wrote.
    pub(crate) fn identifying_files(&self) -> Vec<PathBuf> {
        if !self.manifest.files.is_empty() {
            return vec![self.path.join(MANIFEST)];
        }
        let file = |shard: &ShardFile| match self.path.is_file() {
            true => self.path.clone(),
            false => self.path.join(&shard.name),
        };
        self.shards.iter().map(file).collect()
    }

    /// Gives the weights other names, and forgets those that have none.
    pub(crate) fn rename(&mut self, new: impl Fn(&str) -> Option<String>) -> Result<(), String> {
        let mut renamed = BTreeMap::new();
        for (name, entry) in self.files.remove(MODEL).unwrap_or_default() {
            let Some(new) = new(&name) else { continue };
            if renamed.insert(new.clone(), entry).is_some() {
                return Err(format!("{name} and another of its tensors are both {new}"));
            }
        }
        self.files.insert(MODEL.into(), renamed);
        Ok(())
    }

    /// The file that holds a tensor of the weights, or a shard of it.
    pub(crate) fn file_of(&self, tensor: &str) -> Option<&str> {
        let entry = self.files.get(MODEL)?.get(tensor)?;
        Some(&self.shards[entry.file_shards.first()?.file].name)
    }

    /// All but the hashes of its files.
    pub(super) fn open(path: &Path) -> Result<Checkpoint, ReadFault> {
        regular(path, MANIFEST)?;
        let text = retry(|| regular_file::read(&path.join(MANIFEST), RECORDS))
            .map_err(|why| ReadFault::of(MANIFEST, &why))?;
        let manifest = Manifest::decode(&text)?;
        let (mut shards, mut files) = (Vec::new(), BTreeMap::<_, BTreeMap<_, _>>::new());
        for (name, record) in &manifest.files {
            match logical_file(name) {
                Some(logical) => {
                    let tensors = files.entry(logical).or_default();
                    add_file(path, name, Some(record.bytes), &mut shards, tensors)?;
                }
                None => drop(open_file(path, name, Some(record.bytes))?),
            }
        }
        check_entries(&files)?;
        let checkpoint = Checkpoint { path: path.into(), manifest, shards, files };
        let mut entries = checkpoint.files.values().flatten();
        match entries.find(|(_, entry)| !entry.is_full() && checkpoint.has_older_order(&entry.shape)) {
            Some((name, _)) => Err(format!(
                "{name} is in shards of an earlier version of this program, in which filters of convolutions lay in \
                 another order: export it with that version, and start from the export with --from"
            )
            .into()),
            None => Ok(checkpoint),
        }
    }

    /// Whether what is in a file as in memory, of filters of this shape, is in the order of an earlier version.
    pub(super) fn has_older_order(&self, shape: &[usize]) -> bool {
        self.manifest.format == OLDER_FORMAT && are_permuted(shape)
    }

    /// Compares the hashes of the files that fall to this rank.
    fn verify(&self, ranks: &Ranks) -> Result<(), ReadFault> {
        let (rank, size) = (ranks.rank(), ranks.size());
        for (name, expected) in self.manifest.files.iter().skip(rank).step_by(size) {
            let found = retry(|| hash(&self.path.join(name))).map_err(|why| ReadFault::of(name, &why))?;
            if found != *expected {
                return Err(format!("{name} is damaged: its hash is not the one in {MANIFEST}").into());
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

    /// The type of a tensor's numbers, where the file has it.
    pub(crate) fn dtype(&self, file: &str, name: &str) -> Option<Dtype> {
        Some(self.files.get(file)?.get(name)?.dtype)
    }

    /// Where its run stood.
    pub fn progress(&self) -> &RunProgress {
        &self.manifest.progress
    }

    /// The error of a weight that has a NaN or an infinity.
    pub(crate) fn not_finite(&self, tensor: &str) -> Error {
        Error::BrokenWeights { path: self.path.clone(), tensor: tensor.to_owned() }
    }

    /// An error about it.
    pub fn refuse(&self, why: impl ToString) -> Error {
        refuse(&self.path, why)
    }
}

/// Opens a file of a folder, and says how long it is: as long as it should be, where that is known.
fn open_file(folder: &Path, name: &str, expected: Option<u64>) -> Result<(File, u64), ReadFault> {
    regular(folder, name)?;
    let open = || {
        let file = regular_file::open(&folder.join(name))?;
        let bytes = file.metadata()?.len();
        Ok((file, bytes))
    };
    let (file, bytes) = retry(open).map_err(|why| ReadFault::of(name, &why))?;
    match expected.filter(|expected| bytes != *expected) {
        Some(expected) => Err(format!("{name} has {bytes} bytes instead of {expected}").into()),
        None => Ok((file, bytes)),
    }
}

/// Opens a file of tensors and takes in what its header says.
fn add_file(
    folder: &Path,
    name: &str,
    expected: Option<u64>,
    shards: &mut Vec<ShardFile>,
    tensors: &mut BTreeMap<String, TensorEntry>,
) -> Result<(), ReadFault> {
    let (file, bytes) = open_file(folder, name, expected)?;
    add_tensors(tensors, &file, bytes, shards.len()).map_err(|fault| fault.in_file(name))?;
    shards.push(ShardFile { name: name.to_owned(), file: Arc::new(file) });
    Ok(())
}

/// An error where the shards of a tensor are not all of it.
fn check_entries(files: &BTreeMap<String, BTreeMap<String, TensorEntry>>) -> Result<(), String> {
    for (file, tensors) in files {
        for (name, entry) in tensors {
            entry.check().map_err(|why| format!("{name} in {file}: {why}"))?;
        }
    }
    Ok(())
}

/// Refuses what no checkpoint of ours has in its list: a file outside its folder, and what is no file, of
/// which a FIFO would be waited for and a device read without end.
fn regular(folder: &Path, name: &str) -> Result<(), ReadFault> {
    let mut components = Path::new(name).components();
    if !matches!((components.next(), components.next()), (Some(Component::Normal(_)), None)) {
        return Err(format!("it names {name}, which is not in its folder").into());
    }
    let found = retry(|| fs::metadata(folder.join(name))).map_err(|why| ReadFault::of(name, &why))?;
    match irregular(found.file_type()) {
        Some(got) => Err(format!("{name} is {got}, not a regular file").into()),
        None => Ok(()),
    }
}

/// Below what is no folder there is nothing.
fn not_below_a_file(error: io::Error) -> io::Result<bool> {
    if error.kind() == io::ErrorKind::NotADirectory { Ok(false) } else { Err(error) }
}
