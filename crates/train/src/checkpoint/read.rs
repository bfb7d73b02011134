//! Reading: the files of a checkpoint, however many wrote it, joined into tensors by name.
//!
//! Hashes are compared when it is opened, each rank a part of the files. After that only what is asked for is read, a
//! tensor at a time.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use espalier_tensor::{Tensor, bf16};
use safetensors::tensor::{Dtype, Metadata};

use super::manifest::Manifest;
use super::shard::{PIECES, Piece, Pieces, part_of};
use super::tensors::dtype_of;
use super::write::hash;
use super::{Checkpoints, MANIFEST, OPTIMIZER, Progress, refuse};
use crate::data::irregular;
use crate::parallel::{Ranks, together};
use crate::{Error, Result};

/// The largest header of a file that is believed, as the format has it.
const LARGEST_HEADER: u64 = 100_000_000;

/// What is read from one file of a checkpoint.
#[derive(Debug)]
pub struct Wanted<'a> {
    /// Which: `model.safetensors`, also where several ranks wrote it.
    pub file: &'a str,
    /// What is to be filled, by name.
    pub tensors: Vec<(String, Room<'a>)>,
    /// How many more of the file's tensors the run has on other ranks: any further one is not of this run.
    pub elsewhere: usize,
    /// Whether floating-point numbers of another precision are taken: widened, or rounded to the nearest.
    pub converts: bool,
}

/// What is to be filled.
#[derive(Debug)]
pub enum Room<'a> {
    /// With a whole tensor.
    Tensor(&'a mut Tensor),
    /// With a flat range of one.
    Piece(&'a mut Tensor, Piece),
}

impl Room<'_> {
    fn tensor(&self) -> &Tensor {
        match self {
            Room::Tensor(tensor) | Room::Piece(tensor, _) => tensor,
        }
    }

    /// The shape of the whole, and the elements of it that it holds.
    fn place(&self) -> (&[usize], Range<usize>) {
        match self {
            Room::Tensor(tensor) => (tensor.shape(), 0..tensor.len()),
            Room::Piece(tensor, piece) => (&piece.shape, piece.start..piece.start + tensor.len()),
        }
    }
}

/// A checkpoint whose hashes are right.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    shards: Vec<Shard>,
    /// The tensors of each file, by name.
    files: BTreeMap<String, BTreeMap<String, Entry>>,
}

/// A file on the disk.
#[derive(Debug)]
struct Shard {
    name: String,
    file: File,
}

/// A tensor, in one part or several.
#[derive(Debug)]
struct Entry {
    dtype: Dtype,
    shape: Vec<usize>,
    /// In the order of their elements.
    parts: Vec<Part>,
}

/// A range of a tensor's elements, and where its bytes begin.
#[derive(Debug)]
struct Part {
    elements: Range<usize>,
    shard: usize,
    offset: u64,
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
        for (file, tensors) in &mut files {
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

    /// The whole numbers of a file, by name; none where the checkpoint has no such file.
    pub fn words(&self, file: &str) -> Result<BTreeMap<String, Vec<u32>>> {
        let Some(tensors) = self.files.get(file) else { return Ok(BTreeMap::new()) };
        let words = |(name, entry): (&String, &Entry)| {
            if entry.dtype != Dtype::U32 {
                return Err(self.refuse(format!("{name} in {file} is {:?}, not U32", entry.dtype)));
            }
            let bytes = self.bytes(entry, 0..entry.elements())?;
            let words = bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
            Ok((name.clone(), words.collect()))
        };
        tensors.iter().map(words).collect()
    }

    /// Fills tensors from its files. Names, types and shapes are compared before the first one is touched; types may differ
    /// only where [`Wanted::converts`] says so.
    pub fn fill(&self, wanted: &mut [Wanted<'_>]) -> Result<()> {
        for Wanted { file, tensors, elsewhere, converts } in &*wanted {
            let stored = self.files.get(*file);
            if stored.is_none() && !tensors.is_empty() {
                return Err(self.refuse(format!("it has no {file}")));
            }
            for (name, room) in tensors {
                let Some(entry) = stored.and_then(|stored| stored.get(name)) else {
                    return Err(self.refuse(format!("{file} has no tensor {name}, which this run needs")));
                };
                let ((shape, _), dtype) = (room.place(), dtype_of(room.tensor()));
                if *file == OPTIMIZER && (entry.shape.len() == 1) != (shape.len() == 1) {
                    let form =
                        |compressed| if compressed { "of kept weights alone" } else { "of all weights" };
                    return Err(self.refuse(format!(
                        "{name} is state {} there, and {} in this run: take `[prune]` from the run file of the checkpoint, \
                         or begin with its weights by --from",
                        form(entry.shape.len() == 1),
                        form(shape.len() == 1),
                    )));
                }
                let floats = [entry.dtype, dtype].iter().all(|of| matches!(of, Dtype::F32 | Dtype::BF16));
                if entry.shape != shape || (entry.dtype != dtype && !(*converts && floats)) {
                    return Err(self.refuse(format!(
                        "{name} is {:?} {:?} there, and {dtype:?} {shape:?} in this run",
                        entry.dtype, entry.shape,
                    )));
                }
            }
            let (there, here) = (stored.map_or(0, BTreeMap::len), tensors.len() + elsewhere);
            if there != here {
                return Err(self.refuse(format!("{file} holds {there} tensors, this run {here}")));
            }
        }
        for Wanted { file, tensors, .. } in wanted {
            for (name, room) in tensors {
                let entry = &self.files[*file][name];
                let bytes = self.bytes(entry, room.place().1)?;
                let (Room::Tensor(tensor) | Room::Piece(tensor, _)) = room;
                match (entry.dtype, dtype_of(tensor)) {
                    (Dtype::F32, Dtype::BF16) => tensor.copy_from_host(&narrowed(&bytes))?,
                    (Dtype::BF16, Dtype::F32) => tensor.copy_from_host(&widened(&bytes))?,
                    _ => tensor.copy_from_host(&bytes)?,
                }
            }
        }
        Ok(())
    }

    /// The bytes of some elements of a tensor.
    fn bytes(&self, entry: &Entry, elements: Range<usize>) -> Result<Vec<u8>> {
        let each = entry.dtype.bitsize() / 8;
        let mut bytes = vec![0; elements.len() * each];
        for part in &entry.parts {
            let start = part.elements.start.max(elements.start);
            let end = part.elements.end.min(elements.end);
            if start >= end {
                continue;
            }
            let into = &mut bytes[(start - elements.start) * each..(end - elements.start) * each];
            let Shard { name, file } = &self.shards[part.shard];
            let at = part.offset + ((start - part.elements.start) * each) as u64;
            read_at(file, at, into).map_err(|why| self.refuse(format!("{name}: {why}")))?;
        }
        Ok(bytes)
    }
}

impl Entry {
    fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Puts the parts in order; they must be all of it, each element once.
    fn check(&mut self) -> Result<(), String> {
        self.parts.sort_by_key(|part| (part.elements.start, part.elements.end));
        let mut next = 0;
        for part in &self.parts {
            if part.elements.start != next {
                let (low, high) = (next.min(part.elements.start), next.max(part.elements.start));
                let how = if next < part.elements.start { "in no file" } else { "in two files" };
                return Err(format!("its elements {low} to {high} are {how}"));
            }
            next = part.elements.end;
        }
        match next == self.elements() {
            true => Ok(()),
            false => Err(format!("its files hold {next} elements of {}", self.elements())),
        }
    }
}

/// f32 as bf16, each to the nearest.
fn narrowed(bytes: &[u8]) -> Vec<u8> {
    let narrow = |four: &[u8; 4]| bf16::from_f32(f32::from_le_bytes(*four)).to_le_bytes();
    bytes.as_chunks().0.iter().flat_map(narrow).collect()
}

/// bf16 as f32.
fn widened(bytes: &[u8]) -> Vec<u8> {
    let widen = |two: &[u8; 2]| bf16::from_le_bytes(*two).to_f32().to_le_bytes();
    bytes.as_chunks().0.iter().flat_map(widen).collect()
}

/// Takes in the tensors of a file, after a look at its header alone.
fn add_tensors(
    tensors: &mut BTreeMap<String, Entry>,
    file: &File,
    bytes: u64,
    shard: usize,
) -> Result<(), String> {
    let io = |why: std::io::Error| why.to_string();
    let mut length = [0; 8];
    read_at(file, 0, &mut length).map_err(io)?;
    let length = u64::from_le_bytes(length);
    if length > LARGEST_HEADER {
        return Err("its header is damaged".into());
    }
    let mut header = vec![0; length as usize];
    read_at(file, 8, &mut header).map_err(io)?;
    let header: Metadata =
        serde_json::from_slice(&header).map_err(|why| format!("its header is damaged: {why}"))?;
    if 8 + length + header.data_len() as u64 != bytes {
        return Err("its header is not that of a file of its size".into());
    }
    let described = header.metadata().as_ref().and_then(|described| described.get(PIECES));
    let mut pieces: Pieces = match described {
        Some(text) => serde_json::from_str(text).map_err(|why| format!("its pieces are damaged: {why}"))?,
        None => Pieces::new(),
    };
    for (name, info) in header.tensors() {
        let elements: usize = info.shape.iter().product();
        let Piece { start, shape } =
            pieces.remove(&name).unwrap_or_else(|| Piece { start: 0, shape: info.shape.clone() });
        let part = Part {
            elements: start..start + elements,
            shard,
            offset: 8 + length + info.data_offsets.0 as u64,
        };
        let entry = tensors.entry(name.clone()).or_insert_with(|| Entry {
            dtype: info.dtype,
            shape: shape.clone(),
            parts: Vec::new(),
        });
        if entry.dtype != info.dtype || entry.shape != shape {
            return Err(format!(
                "{name} is a part of {:?} {shape:?}, and in another file one of {:?} {:?}",
                info.dtype, entry.dtype, entry.shape
            ));
        }
        entry.parts.push(part);
    }
    Ok(())
}

fn read_at(mut file: &File, at: u64, into: &mut [u8]) -> std::io::Result<()> {
    file.seek(SeekFrom::Start(at))?;
    file.read_exact(into)
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
