//! Which files a run reads, and what they held: so that a resumed run can tell whether they are still
//! the same.
//!
//! A file's fingerprint is its size and a blake3 of its bytes. Up to 1 GiB of data every byte is hashed. Of
//! larger sets 64 blocks of each file are, spread evenly from its first byte to its last and together about 1
//! GiB over all files: a run must not wait minutes for a hash of hundreds of gigabytes. Of a folder of pictures
//! all names and sizes are, and every so manieth file. A file that was
//! rewritten, truncated or extended is noticed by that; a few bytes that changed between two blocks are not.

use crate::image_folder::listing::{FolderListings, PictureListing};
use crate::{
    Dataset, Error, TextFiles, Tokenizer, TokenizerConfig, cifar, error, idx, image_formats, jsonl, mapped,
    regular_file,
};
use espalier_plan::data::{DatasetSource, DatasetSpec, HeldOut, IdxFiles};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    io::{Cursor, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

/// Bytes that are hashed of all files together, about.
const HASHED: u64 = 1 << 30;
/// Blocks of a file that is not hashed in full.
const BLOCKS: u64 = 64;

/// What the data files of a run held. Names are for people: files that were moved are the same.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Fingerprint {
    files: Vec<DataFile>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct DataFile {
    path: PathBuf,
    bytes: u64,
    /// Of all bytes, or of blocks.
    blake3: String,
}

impl Dataset {
    /// All files that a run's data come from, in the order in which they are read; none where they are made up.
    pub fn files(data: &DatasetSpec) -> Result<Vec<PathBuf>, Error> {
        let held_out: &[PathBuf] = match &data.held_out {
            HeldOut::Fraction { .. } => &[],
            HeldOut::Files { validation_path } => validation_path,
        };
        Ok(match &data.source {
            DatasetSource::Text { path, tokenizer, extensions } => {
                let (paths, extensions) = (path.clone(), extensions.clone());
                let text = TextFiles { paths, extensions, tokenizer: tokenizer.clone() };
                let mut files = text.files()?.wanted;
                if !held_out.is_empty() {
                    files.append(&mut text.held_out(held_out).files()?.wanted);
                }
                files.extend(tokenizer.as_deref().map(Tokenizer::file_at));
                files
            }
            DatasetSource::Jsonl { path, tokenizer, .. } => {
                let mut files = jsonl::files(path)?;
                if !held_out.is_empty() {
                    files.append(&mut jsonl::files(held_out)?);
                }
                if let Some(tokenizer) = tokenizer.as_deref().map(Tokenizer::file_at) {
                    files.extend(TokenizerConfig::template_file(tokenizer.parent().unwrap_or(Path::new(""))));
                    files.push(tokenizer);
                }
                files
            }
            DatasetSource::Tokens { path, .. } => {
                let mut files = mapped::files(path)?;
                if !held_out.is_empty() {
                    files.append(&mut mapped::files(held_out)?);
                }
                files
            }
            DatasetSource::Idx { .. } | DatasetSource::Cifar10 { .. } => {
                let mut files = learnt_images(&data.source)?;
                for path in held_out {
                    files.append(&mut image_formats::image_files(path)?);
                }
                files
            }
            DatasetSource::Images { folder } => {
                let FolderListings { learnt, held_out: others } = FolderListings::of(folder, &data.held_out)?;
                let files = [learnt].into_iter().chain(others).flat_map(|listing| listing.files);
                files.map(|file| file.path).collect()
            }
            DatasetSource::Shapes { .. } | DatasetSource::Arithmetic { .. } => Vec::new(),
        })
    }
}

/// The files of images and labels that are learnt from.
pub(crate) fn learnt_images(source: &DatasetSource) -> Result<Vec<PathBuf>, Error> {
    Ok(match source {
        DatasetSource::Idx { files: IdxFiles::Folder { path } } => idx::files(path)?.into(),
        DatasetSource::Idx { files: IdxFiles::Pair { images, labels } } => {
            vec![images.clone(), labels.clone()]
        }
        DatasetSource::Cifar10 { path } => cifar::files(path)?,
        _ => Vec::new(),
    })
}

impl DataFile {
    /// A folder of pictures as if it were one file: the names and sizes of all, and all bytes of as many as
    /// there are in so many bytes, spread evenly.
    fn of_pictures(listing: &PictureListing, hashed: u64) -> Result<DataFile, Error> {
        let (bytes, mut hasher) = (listing.bytes(), blake3::Hasher::new());
        let every = bytes.div_ceil(hashed).max(1) as usize;
        for (i, file) in listing.files.iter().enumerate() {
            let name = file.path.strip_prefix(&listing.folder).unwrap_or(&file.path);
            hasher.update(name.as_os_str().as_encoded_bytes()).update(&file.bytes.to_le_bytes());
            if i % every == 0 {
                let mut hash = |path: &Path| hasher.update_reader(regular_file::open(path)?).map(drop);
                hash(&file.path).map_err(error::reading(&file.path, "a picture"))?;
            }
        }
        let blake3 = hasher.finalize().to_hex().to_string();
        Ok(DataFile { path: listing.folder.clone(), bytes, blake3 })
    }
}

/// Bytes of all these files.
pub(crate) fn total(files: &[PathBuf]) -> Result<u64, Error> {
    let size = |path: &PathBuf| Ok(fs::metadata(path).map_err(error::reading(path, "a data file"))?.len());
    files.iter().map(size).sum()
}

impl Fingerprint {
    /// Of the files that a run reads; none where it reads none.
    pub fn of(data: &DatasetSpec) -> Result<Option<Fingerprint>, Error> {
        if let DatasetSource::Images { folder } = &data.source {
            let FolderListings { learnt, held_out } = FolderListings::of(folder, &data.held_out)?;
            let listings = [learnt].into_iter().chain(held_out);
            let files = listings.map(|listing| DataFile::of_pictures(&listing, HASHED));
            return Ok(Some(Fingerprint { files: files.collect::<Result<_, Error>>()? }));
        }
        let paths = Dataset::files(data)?;
        let tokenizer = match &data.source {
            DatasetSource::Text { tokenizer: Some(path), .. }
            | DatasetSource::Jsonl { tokenizer: Some(path), .. } => Some(Tokenizer::file_at(path)),
            _ => None,
        };
        let found = Fingerprint::of_files(&paths, tokenizer.as_deref(), HASHED)?;
        Ok(Some(found).filter(|found| !found.files.is_empty()))
    }

    /// Of these files, whatever they hold.
    pub fn of_paths(paths: &[PathBuf]) -> Result<Fingerprint, Error> {
        Fingerprint::of_files(paths, None, HASHED)
    }

    /// As it is written to a run folder.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("paths and numbers are plain data")
    }

    /// One of them may be the `tokenizer`'s.
    fn of_files(paths: &[PathBuf], tokenizer: Option<&Path>, hashed: u64) -> Result<Fingerprint, Error> {
        // None: every byte.
        let block_bytes = (total(paths)? > hashed).then(|| (hashed / BLOCKS / paths.len() as u64).max(4096));
        let file = |path: &PathBuf| {
            // A tokenizer in two files is what the one file is that checkpoints have in their place.
            let joined = (tokenizer == Some(path)).then(|| Tokenizer::joined(path)).transpose()?.flatten();
            let (bytes, blake3) = match joined {
                Some(text) => hash(Cursor::new(&text), text.len() as u64, block_bytes),
                None => regular_file::open(path).and_then(|file| {
                    let bytes = file.metadata()?.len();
                    hash(file, bytes, block_bytes)
                }),
            }
            .map_err(error::reading(path, "a data file"))?;
            Ok(DataFile { path: path.clone(), bytes, blake3 })
        };
        Ok(Fingerprint { files: paths.iter().map(file).collect::<Result<_, Error>>()? })
    }

    /// What is no longer as it `was`, as the end of a sentence; none where nothing differs.
    pub fn change_since(&self, was: &Fingerprint) -> Option<String> {
        let same = |(a, b): &(&DataFile, &DataFile)| (a.bytes, &a.blake3) == (b.bytes, &b.blake3);
        let (now, before) = (self.files.len(), was.files.len());
        let differs = self.files.iter().zip(&was.files).find(|pair| !same(pair));
        let (is, was) = match differs {
            // Where there are fewer or more, all that follow may only have moved up or down.
            _ if now != before => return Some(format!("were {before} files and are {now}")),
            None => return None,
            Some(pair) => pair,
        };
        let name = is.path.display();
        Some(match is.bytes == was.bytes {
            false => format!("have changed: {name} has {} bytes and had {}", is.bytes, was.bytes),
            true => format!("have changed: {name} holds something else than it did"),
        })
    }
}

/// The size of a file and the hash of all of it, or of blocks of so many bytes.
fn hash(mut file: impl Read + Seek, bytes: u64, block_bytes: Option<u64>) -> std::io::Result<(u64, String)> {
    let mut hasher = blake3::Hasher::new();
    match block_bytes.filter(|block_bytes| BLOCKS * block_bytes < bytes) {
        None => drop(hasher.update_reader(file)?),
        Some(block_bytes) => {
            for i in 0..BLOCKS {
                let start = (u128::from(bytes - block_bytes) * u128::from(i) / u128::from(BLOCKS - 1)) as u64;
                file.seek(SeekFrom::Start(start))?;
                hasher.update_reader((&mut file).take(block_bytes))?;
            }
        }
    }
    Ok((bytes, hasher.finalize().to_hex().to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, bytes: &[u8]) {
        fs::write(path, bytes).unwrap();
    }

    /// Small sets to the byte; of large ones the ends, the size and most of what is written anew.
    #[test]
    fn what_changed_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| folder.path().join(name));
        let text: Vec<u8> = (0..1u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        write(&a, &text);
        write(&b, b"short");
        let of_all = |paths: &[&PathBuf], tokenizer, hashed| {
            let paths: Vec<PathBuf> = paths.iter().map(|path| path.to_path_buf()).collect();
            Fingerprint::of_files(&paths, tokenizer, hashed).unwrap()
        };
        let of = |paths: &[&PathBuf], hashed| of_all(paths, None, hashed);
        // All of it; and, at 1 KiB, 64 blocks of 4 KiB of `a`.
        for hashed in [HASHED, 1 << 10] {
            write(&a, &text);
            let was = of(&[&a, &b], hashed);
            assert_eq!(of(&[&a, &b], hashed).change_since(&was), None);
            for place in [0, text.len() - 1] {
                let mut other = text.clone();
                other[place] ^= 1;
                write(&a, &other);
                let change = of(&[&a, &b], hashed).change_since(&was).unwrap();
                assert_eq!(change, format!("have changed: {} holds something else than it did", a.display()));
            }
            write(&a, &text[1..]);
            let change = of(&[&a, &b], hashed).change_since(&was).unwrap();
            assert_eq!(change, format!("have changed: {} has 1048575 bytes and had 1048576", a.display()));
            write(&a, &text);
            assert_eq!(of(&[&b], hashed).change_since(&was).unwrap(), "were 2 files and are 1");
        }
        let moved = folder.path().join("c");
        let was = of(&[&a], HASHED);
        fs::rename(&a, &moved).unwrap();
        assert_eq!(of(&[&moved], HASHED).change_since(&was), None, "a file that was moved is the same");
        let [vocab, merges, joined] =
            ["vocab.json", "merges.txt", "tokenizer.json"].map(|name| folder.path().join(name));
        write(&vocab, br#"{"a": 0, "b": 1, "ab": 2}"#);
        write(&merges, b"#version: 0.2\na b\n");
        let two = || of_all(&[&vocab], Some(&vocab), HASHED);
        let was = two();
        write(&joined, Tokenizer::open(&vocab).unwrap().to_json().unwrap().as_bytes());
        assert_eq!(of(&[&joined], HASHED).change_since(&was), None, "two files of a tokenizer are one");
        write(&merges, b"#version: 0.2\n");
        assert!(two().change_since(&was).is_some());
        // One of this name among the texts is a text.
        write(&vocab, b"words that somebody has written down");
        assert_eq!(of(&[&vocab], HASHED).files[0].bytes, 36);
    }
}
