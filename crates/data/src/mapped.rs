//! Token files: ids as little-endian u16 or u32, without a header, in one file or many that are read as one
//! stream.
//!
//! They are mapped into memory, so a set larger than memory costs what is read of it, and ranks of one
//! machine share the pages. An id past the vocabulary would index outside the embedding, so it is an error:
//! found at opening in files below 1 GB, and on reading in those above, where checking every id first would
//! delay the start by minutes.
//!
//! The `unsafe` here is the only block outside the tensor and comm crates: no safe function maps a file.

use crate::{Error, error::reading};
use memmap2::Mmap;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Files below this are checked at opening.
const CHECKED: u64 = 1 << 30;

/// Bytes at a file's beginning by which text and ids of another width are known, and the fewest that say
/// anything: fewer ids may spell a word by chance.
const SNIFFED_BYTES: usize = 8192;
const FEWEST: usize = 64;

/// How wide an id is in a token file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenWidth {
    /// Two bytes, little-endian.
    U16,
    /// Four bytes, little-endian.
    U32,
}

/// Token files as one stream.
#[derive(Debug)]
pub(crate) struct MappedTokens {
    width: TokenWidth,
    vocab: usize,
    files: Vec<MappedFile>,
}

#[derive(Debug)]
struct MappedFile {
    path: PathBuf,
    bytes: Mmap,
    /// The stream's position of its first id, and of the first past it.
    start: u64,
    end: u64,
}

/// The token files that are meant by files and folders, in the order in which they are read.
pub(crate) fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, Error> {
    if paths.is_empty() {
        return Err(Error::setting("paths", "at least one token file", "none"));
    }
    let mut files = Vec::new();
    for path in paths {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let entries = fs::read_dir(path).map_err(reading(path, "a folder of token files"))?;
        let mut found: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        found.retain(|path| path.extension().is_some_and(|e| e == "bin") && path.is_file());
        found.sort();
        if found.is_empty() {
            return Err(Error::Empty { path: path.clone(), expected: "at least one .bin file".into() });
        }
        files.append(&mut found);
    }
    Ok(files)
}

impl MappedTokens {
    /// Files, or folders whose `.bin` files are meant, in the order of their names.
    pub(crate) fn open(paths: &[PathBuf], width: TokenWidth, vocab: usize) -> Result<MappedTokens, Error> {
        let mut stream = MappedTokens { width, vocab, files: Vec::new() };
        files(paths)?.into_iter().try_for_each(|path| stream.push(path, CHECKED))?;
        Ok(stream)
    }

    /// The files, in the order in which they are read.
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        self.files.iter().map(|mapped_file| mapped_file.path.clone()).collect()
    }

    /// Ids in all files.
    pub(crate) fn len(&self) -> u64 {
        self.files.last().map_or(0, |mapped_file| mapped_file.end)
    }

    /// Appends the ids `start .. start + count`, which may cross from file to file.
    pub(crate) fn read(&self, start: u64, count: usize, out: &mut Vec<u32>) -> Result<(), Error> {
        let end = start + count as u64;
        debug_assert!(end <= self.len());
        let first = self.files.partition_point(|mapped_file| mapped_file.end <= start);
        for mapped_file in self.files[first..].iter().take_while(|mapped_file| mapped_file.start < end) {
            let from = start.max(mapped_file.start) - mapped_file.start;
            let bytes = &mapped_file.bytes[from as usize * self.width.bytes()
                ..(end.min(mapped_file.end) - mapped_file.start) as usize * self.width.bytes()];
            let written = out.len();
            match self.width {
                TokenWidth::U16 => {
                    out.extend(bytes.as_chunks().0.iter().map(|b| u32::from(u16::from_le_bytes(*b))))
                }
                TokenWidth::U32 => out.extend(bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b))),
            }
            self.check(&mapped_file.path, from, &out[written..])?;
        }
        Ok(())
    }

    /// Adds a file to the stream; `checked` is the size below which every id is looked at.
    fn push(&mut self, path: PathBuf, checked: u64) -> Result<(), Error> {
        let expected = "a token file of little-endian ids";
        let file = crate::error::open(&path, expected)?;
        // SAFETY: the map is read-only and lives as long as the bytes we lend. Whoever cuts the file short
        // while a run reads it ends that run with SIGBUS, and whoever overwrites it changes the ids, which
        // are checked at each read: both are the contract of every mapped file, and neither can be ruled out
        // by code here.
        let bytes = unsafe { Mmap::map(&file) }.map_err(reading(&path, expected))?;
        let (size, width) = (bytes.len() as u64, self.width.bytes() as u64);
        if size % width != 0 {
            return Err(Error::Uneven { path, unit: "ids", expected: width, got: size });
        }
        if size == 0 {
            return Err(Error::Empty { path, expected: "at least one id".into() });
        }
        let head = &bytes[..bytes.len().min(SNIFFED_BYTES)];
        if head.len() >= FEWEST && is_text(head) {
            let expected = "little-endian token ids, which `espalier tokenize` makes of text (`data.kind` = \"text\" reads text itself)";
            return Err(Error::IsText { path, expected });
        }
        if self.width == TokenWidth::U16 && head.len() >= FEWEST && is_wider(head) {
            return Err(Error::Wider { path });
        }
        let start = self.len();
        let end = start + size / width;
        self.files.push(MappedFile { path, bytes, start, end });
        if size < checked {
            let mut ids = Vec::new();
            for from in (start..end).step_by(1 << 16) {
                ids.clear();
                self.read(from, (end - from).min(1 << 16) as usize, &mut ids)?;
            }
        }
        Ok(())
    }

    /// `ids` stand in this file from position `from` on.
    fn check(&self, path: &Path, from: u64, ids: &[u32]) -> Result<(), Error> {
        // The largest first: a scan for it runs at memory speed, and almost always ends the matter.
        if ids.iter().max().is_none_or(|&id| (id as usize) < self.vocab) {
            return Ok(());
        }
        let past = ids.iter().zip(from..).find(|(id, _)| **id as usize >= self.vocab);
        let (got, position) = past.map(|(id, at)| (*id, at)).expect("the largest id is past the vocabulary");
        Err(Error::Vocabulary { path: path.into(), position, expected: self.vocab, got })
    }
}

/// How wide the ids of token files are, at a look at the first of them; `usual` where that says nothing.
pub(crate) fn width_of(path: &Path, usual: TokenWidth) -> Result<TokenWidth, Error> {
    let first = files(&[path.to_owned()])?.swap_remove(0);
    Ok(if is_wider(&head(&first)?) { TokenWidth::U32 } else { usual })
}

/// The beginning of a file.
pub(crate) fn head(path: &Path) -> Result<Vec<u8>, Error> {
    use std::io::Read;
    let (expected, mut head) = ("a token file of little-endian ids", Vec::new());
    let file = crate::error::open(path, expected)?;
    file.take(SNIFFED_BYTES as u64).read_to_end(&mut head).map_err(reading(path, expected))?;
    Ok(head)
}

/// Whether bytes are text: UTF-8, or nearly all of ASCII, and without the control characters that ids are full of.
pub(crate) fn is_text(bytes: &[u8]) -> bool {
    let is_control = |byte: &u8| *byte < b' ' && !b"\t\n\r\x0c".contains(byte);
    if bytes.is_empty() || bytes.iter().any(is_control) {
        return false;
    }
    let ascii = bytes.iter().filter(|byte| byte.is_ascii()).count();
    // The last character may be cut.
    let is_utf8 = std::str::from_utf8(bytes).map_or_else(|why| why.error_len().is_none(), |_| true);
    is_utf8 || 10 * ascii >= 9 * bytes.len()
}

/// Whether ids of two bytes would be the halves of wider ones: every second of them is 0, and not every first.
fn is_wider(bytes: &[u8]) -> bool {
    let (ids, _) = bytes.as_chunks::<4>();
    bytes.len() >= FEWEST
        && ids.iter().all(|id| id[2..] == [0, 0])
        && ids.iter().filter(|id| id[..2] != [0, 0]).count() > ids.len() / 2
}

impl TokenWidth {
    pub(crate) fn bytes(self) -> usize {
        match self {
            TokenWidth::U16 => 2,
            TokenWidth::U32 => 4,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DataSplit, Dataset, TokenDataset, TokenWindows};

    fn write(path: PathBuf, ids: &[u16]) -> PathBuf {
        fs::write(&path, ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>()).unwrap();
        path
    }

    /// Bytes of a text are ids of most vocabularies, and so are halves of wider ids: nobody would notice.
    #[test]
    fn text_and_wider_ids_are_no_ids_of_two_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let open =
            |path: &Path, width| MappedTokens::open(&[path.to_owned()], width, 50_257).map(|all| all.len());
        fs::write(at("book.txt"), "It was the best of times, it was the worst of times\n".repeat(4)).unwrap();
        assert!(matches!(open(&at("book.txt"), TokenWidth::U16), Err(Error::IsText { .. })));
        // Latin-1 is no UTF-8.
        fs::write(at("buch.bin"), b"Es war einmal ein M\xfcller, der hatte zwei T\xf6chter. ".repeat(4))
            .unwrap();
        assert!(matches!(open(&at("buch.bin"), TokenWidth::U16), Err(Error::IsText { .. })));
        let wide: Vec<u8> = (0..40u32).flat_map(|id| (1000 * id).to_le_bytes()).collect();
        fs::write(at("wide.bin"), wide).unwrap();
        let refused = open(&at("wide.bin"), TokenWidth::U16).unwrap_err();
        assert!(
            refused.to_string().ends_with(
                "holds ids of 4 bytes: expected ids of 2, as `data.dtype` = \"u16\" says; \"u32\" reads these"
            ),
            "{refused}"
        );
        assert_eq!(open(&at("wide.bin"), TokenWidth::U32).unwrap(), 40);
        assert_eq!(width_of(&at("wide.bin"), TokenWidth::U16).unwrap(), TokenWidth::U32);
        let narrow = write(at("narrow.bin"), &(0..400u16).map(|id| 125 * id).collect::<Vec<_>>());
        assert_eq!(
            (open(&narrow, TokenWidth::U16).unwrap(), width_of(&narrow, TokenWidth::U16).unwrap()),
            (400, TokenWidth::U16)
        );
        let zeros = write(at("zeros.bin"), &[0; 400]);
        assert_eq!(open(&zeros, TokenWidth::U16).unwrap(), 400);
    }

    /// Reads cross file borders, a folder is read in the order of its names, and other files stay out.
    #[test]
    fn a_folder_is_one_stream() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path().join("b.bin"), &[3, 4, 5, 6]);
        write(folder.path().join("a.bin"), &[0, 1, 2]);
        write(folder.path().join("c.bin"), &[7]);
        fs::write(folder.path().join("notes.txt"), "odd").unwrap();
        let stream = MappedTokens::open(&[folder.path().into()], TokenWidth::U16, 8).unwrap();
        assert_eq!(stream.len(), 8);
        for start in 0..8 {
            for end in start..=8 {
                let mut ids = Vec::new();
                stream.read(start, (end - start) as usize, &mut ids).unwrap();
                assert!(ids.into_iter().eq(start as u32..end as u32));
            }
        }
    }

    #[test]
    fn four_byte_ids_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ids.bin");
        fs::write(&path, [70_000u32, 1, 2].map(u32::to_le_bytes).concat()).unwrap();
        let windows = TokenWindows { seq: 2, validation: 0.0, seed: 0 };
        let tokens =
            TokenDataset::files(std::slice::from_ref(&path), None, TokenWidth::U32, 70_001, windows).unwrap();
        let batch = Dataset::Tokens(tokens).batch(DataSplit::Train, &[(0, 0)]).unwrap();
        assert_eq!(batch.targets, [1, 2]);
        assert!(matches!(
            TokenDataset::files(&[path], None, TokenWidth::U32, 70_000, windows),
            Err(Error::Vocabulary { .. })
        ));
    }

    /// The error names the file and the offset in it, at opening and, for a file too large for that, on reading.
    #[test]
    fn a_token_past_the_vocabulary_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let good = write(folder.path().join("good.bin"), &[1; 10]);
        let bad = write(folder.path().join("bad.bin"), &[1, 2, 50_000, 9]);
        let message =
            MappedTokens::open(&[good.clone(), bad.clone()], TokenWidth::U16, 9).unwrap_err().to_string();
        let end = "bad.bin has a token past the vocabulary at position 2: expected one below 9, got 50000";
        assert!(message.ends_with(end), "{message}");

        let mut large = MappedTokens { width: TokenWidth::U16, vocab: 9, files: Vec::new() };
        large.push(good, 0).unwrap();
        large.push(bad, 0).unwrap();
        let mut ids = Vec::new();
        large.read(0, 12, &mut ids).unwrap();
        let error = large.read(8, 5, &mut ids).unwrap_err();
        assert!(matches!(error, Error::Vocabulary { position: 2, got: 50_000, .. }), "{error}");
    }

    #[test]
    fn damage_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let open = |paths: &[PathBuf]| MappedTokens::open(paths, TokenWidth::U16, 9).unwrap_err();
        assert!(matches!(open(&[folder.path().join("none.bin")]), Error::Missing { .. }));
        assert!(matches!(open(&[folder.path().into()]), Error::Empty { .. }));
        assert!(matches!(open(&[]), Error::Setting { field: "paths", .. }));
        let path = folder.path().join("odd.bin");
        fs::write(&path, [0; 7]).unwrap();
        assert!(matches!(open(std::slice::from_ref(&path)), Error::Uneven { expected: 2, got: 7, .. }));
        fs::write(&path, []).unwrap();
        assert!(matches!(open(&[path]), Error::Empty { .. }));
    }
}
