//! What can be wrong with data. Each error is one sentence that names the file, what was expected there and
//! what was found instead; a well-known set that is missing comes with the way to get it.

use std::{fs, io, path::PathBuf};

use crate::regular_file::{self, irregular};
use espalier_tensor::{machine::memory_left, memory::ByteSize};

/// The crate's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Something about the data a person asked for is wrong.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's sentence says what its fields are")]
pub enum Error {
    /// A file or set is not there.
    #[error("{} is not there: expected {expected}{}{hint}", .path.display(), if .hint.is_empty() { "" } else { "; " })]
    Missing { path: PathBuf, expected: String, hint: &'static str },

    /// The system refused to read it, or a gzip is broken.
    #[error("{} cannot be read: {source}", .path.display())]
    Read { path: PathBuf, source: io::Error },

    /// A device, a FIFO, a socket: it may have no end, or never begin.
    #[error("{} is {got}: expected {expected}, a regular file", .path.display())]
    NotRegular { path: PathBuf, expected: String, got: &'static str },

    /// More than the machine has left.
    #[error("{} needs {} of memory, and {} are left: {advice}", .path.display(), ByteSize(*.needed as usize), ByteSize(*.left as usize))]
    TooLarge { path: PathBuf, needed: u64, left: u64, advice: &'static str },

    /// Not the file it should be.
    #[error("{} is not an IDX file of this kind: expected the magic number {expected:#010x}, got {got:#010x}", .path.display())]
    Magic { path: PathBuf, expected: u32, got: u32 },

    /// Longer or shorter than its header says.
    #[error("{} has the wrong size: expected {expected} bytes, got {got}", .path.display())]
    Size { path: PathBuf, expected: u64, got: u64 },

    /// Not the file that everybody has under this name.
    #[error("{} is not the published file: expected the checksum {expected} (BLAKE3), got {got}", .path.display())]
    Checksum { path: PathBuf, expected: &'static str, got: String },

    /// A file of equal records ends within one.
    #[error("{} is cut off: expected a whole number of {expected}-byte {unit}, got {got} bytes", .path.display())]
    Uneven { path: PathBuf, unit: &'static str, expected: u64, got: u64 },

    /// Not as many labels as images.
    #[error("{} does not fit its images: expected {expected} labels, got {got}", .path.display())]
    Labels { path: PathBuf, expected: usize, got: usize },

    /// Images of two sizes in one set.
    #[error("{} has images of {} x {} pixels and {} channels: expected {} x {} and {}, as the training images", .path.display(), .got[0], .got[1], .got[2], .expected[0], .expected[1], .expected[2])]
    Shape { path: PathBuf, expected: [usize; 3], got: [usize; 3] },

    /// A label past the last class.
    #[error("{} has a wrong label at sample {position}: expected one below {expected}, got {got}", .path.display())]
    Label { path: PathBuf, position: usize, expected: usize, got: usize },

    /// A token past the vocabulary.
    #[error("{} has a token past the vocabulary at position {position}: expected one below {expected}, got {got}", .path.display())]
    Vocabulary { path: PathBuf, position: u64, expected: usize, got: u32 },

    /// Text where token ids were meant.
    #[error("{} is text: expected {expected}", .path.display())]
    IsText { path: PathBuf, expected: &'static str },

    /// Ids of four bytes where those of two were meant.
    #[error("{} holds ids of 4 bytes: expected ids of 2, as `data.dtype` = \"u16\" says; \"u32\" reads these", .path.display())]
    Wider { path: PathBuf },

    /// Nothing in it.
    #[error("{} holds nothing to train on: expected {expected}", .path.display())]
    Empty { path: PathBuf, expected: String },

    /// Fewer tokens than a split needs for one window.
    #[error("{} is too short for the {split} windows: expected at least {expected} tokens, got {got}", .path.display())]
    TooShort { path: PathBuf, split: &'static str, expected: u64, got: u64 },

    /// Fewer images than a split needs.
    #[error("{} is too small for the {split} split: expected at least {expected} image, got {got}", .path.display())]
    TooFew { path: PathBuf, split: &'static str, expected: usize, got: usize },

    /// A folder of pictures without folders in it.
    #[error("{} holds no classes: expected a folder of pictures for each class", .path.display())]
    NoClasses { path: PathBuf },

    /// Nothing to be told apart.
    #[error("{} holds one class, {class:?}: expected at least two folders of pictures", .path.display())]
    OneClass { path: PathBuf, class: String },

    /// The folder of a class without a file.
    #[error("{} holds no pictures: expected at least one in the folder of each class", .path.display())]
    EmptyClass { path: PathBuf },

    /// A folder to be evaluated on that no folder of the training set is named like.
    #[error("{} is a class that the model does not learn: expected one of the {expected} classes of the training set", .path.display())]
    UnknownClass { path: PathBuf, expected: usize },

    /// A file that no decoder reads.
    #[error("{} is no intact picture: {why}{}", .path.display(), and_more(*.more))]
    Damaged { path: PathBuf, why: String, more: usize },

    /// Decoded pictures have no place.
    #[error("{} cannot be written: {source}; `data.cache_path` names another folder for decoded pictures, and `data.cache` = \"none\" does without", .path.display())]
    Cache { path: PathBuf, source: io::Error },

    /// A tokenizer reads characters, and these are none.
    #[error("{} is not UTF-8 at byte {position}, which a tokenizer needs: expected text, or train on bytes", .path.display())]
    NotText { path: PathBuf, position: usize },

    /// A tokenizer file that is broken, or asks for something we do not do.
    #[error("{} is not a tokenizer we can read: expected {expected}, got {got}", .path.display())]
    Tokenizer { path: PathBuf, expected: String, got: String },

    /// A tokenizer of another kind than we read by ourselves.
    #[error("{} is not a tokenizer that this build reads: expected {expected}, got {got}; a program built with `--features tokenizers` reads all kinds", .path.display())]
    OtherTokenizer { path: PathBuf, expected: String, got: String },

    /// A tokenizer that cannot make ids of this text.
    #[error("{} cannot make tokens of the text: {why}", .path.display())]
    Untokenized { path: PathBuf, why: String },

    /// Text that the vocabulary cannot spell.
    #[error("{} has no token for {got:?}", .path.display())]
    NoToken { path: PathBuf, got: String },

    /// A row of a file that cannot be learnt from.
    #[error("line {line} of {} {why}", .path.display())]
    Row { path: PathBuf, line: u64, why: String },

    /// Fewer rows than there must be.
    #[error("{} is too small for a training and a validation split: expected at least {expected} rows, got {got}", .path.display())]
    TooFewRows { path: PathBuf, expected: usize, got: usize },

    /// A chat template that is broken, or that raised an exception.
    #[error("the chat template of {} cannot render a conversation: {why}", .path.display())]
    ChatTemplate { path: PathBuf, why: String },

    /// Two tokens that nobody could tell apart.
    #[error("{} is not a tokenizer we can read: {first:?} and {second:?} have the same id, {id}", .path.display())]
    SameId { path: PathBuf, first: String, second: String, id: u32 },

    /// What is to be written is there.
    #[error("{} is there already: choose another name", .path.display())]
    Exists { path: PathBuf },

    /// The system refused to write it.
    #[error("{} cannot be written: {source}", .path.display())]
    Write { path: PathBuf, source: io::Error },

    /// A field of the run file.
    #[error("data.{field} is wrong: expected {expected}, got {got}")]
    Setting { field: &'static str, expected: &'static str, got: String },

    /// The device that a batch was made for failed.
    #[error(transparent)]
    Tensor(#[from] espalier_tensor::Error),
}

/// How many others there are, as the end of a sentence.
fn and_more(more: usize) -> String {
    match more {
        0 => String::new(),
        1 => " (and one more file is damaged)".into(),
        more => format!(" (and {more} more files are damaged)"),
    }
}

/// What helps where made-up data do not fit.
pub(crate) const FEWER: &str = "a smaller `data.count` needs less";

/// What helps where images of a file do not.
pub(crate) const FEWER_IMAGES: &str = "fewer images in the file need less";

impl Error {
    /// The error for a field of the run file.
    pub(crate) fn setting(field: &'static str, expected: &'static str, got: impl ToString) -> Error {
        Error::Setting { field, expected, got: got.to_string() }
    }

    /// The error for a file of a tokenizer that is not what it should be.
    pub(crate) fn tokenizer(
        path: &std::path::Path,
        expected: impl Into<String>,
        got: impl ToString,
    ) -> Error {
        Error::Tokenizer { path: path.into(), expected: expected.into(), got: got.to_string() }
    }

    /// The error for so many bytes that are not to be had.
    pub(crate) fn too_large(path: impl Into<PathBuf>, needed: u64, advice: &'static str) -> Error {
        Error::TooLarge { path: path.into(), needed, left: memory_left().unwrap_or(0), advice }
    }
}

/// A `map_err` that adds the path to an input error; a file that is not there says what was expected of it.
pub(crate) fn reading(path: &std::path::Path, expected: &str) -> impl FnOnce(io::Error) -> Error {
    move |source| match source.kind() {
        io::ErrorKind::NotFound => Error::Missing { path: path.into(), expected: expected.into(), hint: "" },
        _ => Error::Read { path: path.into(), source },
    }
}

/// Opens a regular file; anything else that has this name says what was expected of it.
pub(crate) fn open(path: &std::path::Path, expected: &str) -> Result<fs::File, Error> {
    let kind = fs::metadata(path).map_err(reading(path, expected))?.file_type();
    if let Some(got) = irregular(kind) {
        return Err(Error::NotRegular { path: path.into(), expected: expected.into(), got });
    }
    regular_file::open(path).map_err(reading(path, expected))
}

/// All bytes of a regular file, which are at most so many.
pub(crate) fn read(path: &std::path::Path, expected: &str, limit: u64) -> Result<Vec<u8>, Error> {
    open(path, expected)?;
    // Memory that is not to be had is an error of it.
    regular_file::read(path, limit).map_err(reading(path, expected))
}

/// A fraction to hold out: at least 0 and below 1.
pub(crate) fn check_validation(fraction: f64) -> Result<(), Error> {
    if (0.0..1.0).contains(&fraction) {
        return Ok(());
    }
    Err(Error::setting("validation", "a fraction of at least 0 and below 1", fraction))
}

/// How many of so many samples are held out: whoever asks for any gets at least one.
pub(crate) fn held_out(count: usize, fraction: f64) -> usize {
    if fraction > 0.0 { ((count as f64 * fraction).round() as usize).max(1) } else { 0 }
}
