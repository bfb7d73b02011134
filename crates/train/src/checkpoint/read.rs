//! Reading: the files of a checkpoint, however many wrote it, joined into tensors by name.
//!
//! Hashes are compared when it is opened, each rank a part of the files. After that only what is asked for is read, a
//! tensor at a time: of each part of it that has some of what is wanted, from the first number of that to the last.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Component, Path, PathBuf};

use espalier_plan::layout::Piece;
use espalier_tensor::mask::copy_bits;
use espalier_tensor::{Tensor, bf16};
use safetensors::tensor::Dtype;

use super::entry::{Entry, Part, add_tensors, read_at};
use super::manifest::Manifest;
use super::portion::{Common, Form, Kept, Portion, common};
use super::shard::part_of;
use super::tensors::dtype_of;
use super::write::hash;
use super::{Checkpoints, MANIFEST, MASKS, OPTIMIZER, Progress, refuse};
use crate::data::irregular;
use crate::parallel::{Ranks, together};
use crate::{Error, Result};

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
    /// With a part of one.
    Portion(&'a mut Tensor, Portion),
}

impl<'a> Room<'a> {
    /// For a tensor of which this rank holds a piece, which may be all.
    pub fn piece(tensor: &'a mut Tensor, piece: &Piece) -> Room<'a> {
        match piece.is_whole() {
            true => Room::Tensor(tensor),
            false => Room::Portion(tensor, Portion::of(piece.clone())),
        }
    }

    fn tensor(&self) -> &Tensor {
        match self {
            Room::Tensor(tensor) | Room::Portion(tensor, _) => tensor,
        }
    }

    fn portion(&self) -> Cow<'_, Portion> {
        match self {
            Room::Tensor(tensor) => Cow::Owned(Portion::of(Piece::whole(tensor.shape()))),
            Room::Portion(_, portion) => Cow::Borrowed(portion),
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

    /// The names of a file's tensors; none where the checkpoint has no such file.
    pub fn names(&self, file: &str) -> impl Iterator<Item = &str> {
        self.files.get(file).into_iter().flatten().map(|(name, _)| name.as_str())
    }

    /// The whole numbers of a tensor that no rank had a piece of.
    pub fn words(&self, file: &str, name: &str) -> Result<Option<Vec<u32>>> {
        let Some(entry) = self.words_of(file, name)? else { return Ok(None) };
        if entry.form != Form::Numbers {
            return Err(self.refuse(format!("{name} in {file} is in pieces")));
        }
        let whole = Portion::of(Piece::whole(&entry.shape));
        Ok(Some(words(&self.bytes(entry, &whole, entry.shape.iter().product(), None)?)))
    }

    /// What is packed in words for each weight of a piece, so many bits, whoever wrote which pieces or all of it.
    pub fn packed(&self, file: &str, name: &str, piece: &Piece, bits: usize) -> Result<Option<Vec<u32>>> {
        let Some(entry) = self.words_of(file, name)? else { return Ok(None) };
        let whole = Piece::whole(piece.of());
        let refuse = || match (bits, whole.len()) {
            (1, len) => self.refuse(format!("the mask of {name} is not one of {len} weights")),
            (_, len) => {
                self.refuse(format!("{name} in {file} has not {bits} bits for each of {len} weights"))
            }
        };
        let mut packed = vec![0; (bits * piece.len()).div_ceil(32)];
        let mut take = |from: &Piece, stored: Vec<u32>| match are_bits(&stored, bits * from.len()) {
            false => Err(refuse()),
            true => {
                for Common { from, to, length } in common(from.runs(), piece.runs()) {
                    copy_bits(&stored, bits * from, &mut packed, bits * to, bits * length);
                }
                Ok(())
            }
        };
        match &entry.form {
            Form::Numbers => take(&whole, self.words(file, name)?.expect("it is there"))?,
            form if *form != Form::Packed(bits) || entry.shape != piece.of() => return Err(refuse()),
            _ => {
                for part in &entry.parts {
                    let mut bytes = vec![0; 4 * part.length];
                    self.read_part(entry, part, 0, &mut bytes)?;
                    take(&part.portion.piece, words(&bytes))?;
                }
            }
        }
        Ok(Some(packed))
    }

    fn words_of(&self, file: &str, name: &str) -> Result<Option<&Entry>> {
        match self.files.get(file).and_then(|tensors| tensors.get(name)) {
            Some(entry) if entry.dtype != Dtype::U32 => {
                Err(self.refuse(format!("{name} in {file} is {:?}, not U32", entry.dtype)))
            }
            found => Ok(found),
        }
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
                self.compare(file, name, entry, room, *converts)?;
            }
            let (there, here) = (stored.map_or(0, BTreeMap::len), tensors.len() + elsewhere);
            if there != here {
                return Err(self.refuse(format!("{file} holds {there} tensors, this run {here}")));
            }
        }
        for Wanted { file, tensors, .. } in wanted {
            for (name, room) in tensors {
                let entry = &self.files[*file][name];
                let portion = room.portion();
                let kept = self.kept(entry, &portion)?;
                let bytes = self.bytes(entry, &portion, room.tensor().len(), kept.as_ref())?;
                let (Room::Tensor(tensor) | Room::Portion(tensor, _)) = room;
                match (entry.dtype, dtype_of(tensor)) {
                    (Dtype::F32, Dtype::BF16) => tensor.copy_from_host(&narrowed(&bytes))?,
                    (Dtype::BF16, Dtype::F32) => tensor.copy_from_host(&widened(&bytes))?,
                    _ => tensor.copy_from_host(&bytes)?,
                }
            }
        }
        Ok(())
    }

    /// An error where a tensor is not what a room is for.
    fn compare(&self, file: &str, name: &str, entry: &Entry, room: &Room<'_>, converts: bool) -> Result<()> {
        let (portion, dtype) = (room.portion(), dtype_of(room.tensor()));
        let kept = self.kept(entry, &portion)?;
        if let (Form::KeptBy(_), Some(kept)) = (&entry.form, &kept) {
            entry.check_kept(kept).map_err(|why| self.refuse(format!("{name} in {file}: {why}")))?;
        }
        let there = entry.stored_shape();
        let shape = match (&portion.form, &kept) {
            (Form::KeptBy(_), Some(kept)) => vec![kept.count()],
            _ => portion.piece.of().to_vec(),
        };
        if file == OPTIMIZER && (there.len() == 1) != (shape.len() == 1) {
            let form = |compressed| if compressed { "of kept weights alone" } else { "of all weights" };
            return Err(self.refuse(format!(
                "{name} is state {} there, and {} in this run: take `[prune]` from the run file of the checkpoint, \
                 or begin with its weights by --from",
                form(there.len() == 1),
                form(shape.len() == 1),
            )));
        }
        let floats = [entry.dtype, dtype].iter().all(|of| matches!(of, Dtype::F32 | Dtype::BF16));
        if there != shape || (entry.dtype != dtype && !(converts && floats)) {
            return Err(self.refuse(format!(
                "{name} is {:?} {there:?} there, and {dtype:?} {shape:?} in this run",
                entry.dtype,
            )));
        }
        let all = kept.filter(|_| portion.form != Form::Numbers);
        let all = all.map_or(portion.piece.len(), |kept| kept.count_in(&portion.piece));
        let end = portion.start.map(|start| start + room.tensor().len());
        if end.map_or(room.tensor().len() != all, |end| end > all) {
            let here = room.tensor().len();
            return Err(self.refuse(format!("{name} has {all} numbers there where this run has {here}")));
        }
        Ok(())
    }

    /// The mask that says which weights are stored, or wanted, of a tensor of which that is not all.
    fn kept(&self, entry: &Entry, portion: &Portion) -> Result<Option<Kept>> {
        let (mask, shape) = match (&entry.form, &portion.form) {
            (Form::KeptBy(mask), Form::KeptBy(wanted))
                if mask != wanted || entry.shape != portion.piece.of() =>
            {
                return Err(
                    self.refuse(format!("what {mask} keeps there is what {wanted} keeps in this run"))
                );
            }
            (Form::KeptBy(mask), _) => (mask, &entry.shape[..]),
            (_, Form::KeptBy(mask)) => (mask, portion.piece.of()),
            _ => return Ok(None),
        };
        match self.packed(MASKS, mask, &Piece::whole(shape), 1)? {
            Some(words) => Ok(Some(Kept::new(words))),
            None => Err(self.refuse(format!("it has no mask for {mask}, of which it holds kept weights"))),
        }
    }

    /// The bytes of a portion of a tensor, which has so many numbers.
    fn bytes(&self, entry: &Entry, portion: &Portion, length: usize, kept: Option<&Kept>) -> Result<Vec<u8>> {
        let each = entry.dtype.bitsize() / 8;
        let mut bytes = vec![0; length * each];
        for part in &entry.parts {
            let common = part.common(portion, length, kept);
            let (Some(first), Some(last)) = (common.first(), common.last()) else { continue };
            if let [Common { from, to, length }] = common[..] {
                self.read_part(entry, part, from, &mut bytes[to * each..(to + length) * each])?;
                continue;
            }
            let mut read = vec![0; (last.from + last.length - first.from) * each];
            self.read_part(entry, part, first.from, &mut read)?;
            for Common { from, to, length } in &common {
                let from = (from - first.from) * each..(from - first.from + length) * each;
                bytes[to * each..(to + length) * each].copy_from_slice(&read[from]);
            }
        }
        Ok(bytes)
    }

    /// The bytes of a part from one of its numbers on.
    fn read_part(&self, entry: &Entry, part: &Part, first: usize, into: &mut [u8]) -> Result<()> {
        let Shard { name, file } = &self.shards[part.shard];
        let at = part.offset + (first * entry.dtype.bitsize() / 8) as u64;
        read_at(file, at, into).map_err(|why| self.refuse(format!("{name}: {why}")))
    }
}

/// Whether words are so many bits, those past their end zero.
fn are_bits(words: &[u32], bits: usize) -> bool {
    let past_end = |last: &u32| !bits.is_multiple_of(32) && last >> (bits % 32) != 0;
    words.len() == bits.div_ceil(32) && !words.last().is_some_and(past_end)
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
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
