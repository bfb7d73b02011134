//! Decoded pictures on disk, so that each is decoded once and not in every epoch: their bytes one after another
//! in one file, and beside it which files they were.
//!
//! Pictures whose shorter side has more pixels than the cache keeps are shrunk once, antialiased. The index is
//! written last: a cache without one is not there. It is made anew where files have been added, removed or
//! changed, by size or time. Of several processes one makes it, and the others wait.

use super::decode::decode;
use super::listing::{PictureFile, PictureListing};
use super::resample::{Picture, with_shorter_side};
use crate::{Error, regular_file};
use rayon::prelude::*;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::mpsc::sync_channel,
    thread,
};

/// Changed whenever the same files would give other bytes.
const VERSION: u32 = 1;

/// Files that are decoded before any of them is written: enough for every core, few enough for memory.
const AT_ONCE: usize = 128;

/// The most bytes of a file of a picture.
const LARGEST_FILE: u64 = 1 << 30;

/// A file that is no picture, or not all of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DamagedPicture {
    pub path: PathBuf,
    /// What is wrong with it, as the end of a sentence.
    pub why: String,
}

/// Pictures in a file.
#[derive(Debug)]
pub(crate) struct CachedPictures {
    path: PathBuf,
    pixels: File,
    /// Of each file of the listing: where its picture begins, height and width; none where it is damaged.
    places: Vec<Option<(u64, usize, usize)>>,
    pub damaged: Vec<DamagedPicture>,
}

#[derive(Debug, Serialize, Deserialize, PartialEq)]
struct CacheIndex {
    version: u32,
    side: usize,
    /// Name, bytes and time of each.
    files: Vec<(PathBuf, u64, u64)>,
    pictures: Vec<CachedPicture>,
}

#[derive(Debug, Serialize, Deserialize, PartialEq)]
#[serde(untagged)]
enum CachedPicture {
    Size(usize, usize),
    Damaged(String),
}

impl CachedPictures {
    /// The pictures of a listing, decoded now unless `folder` has them; `progress` hears of bytes of files.
    pub(crate) fn open(
        listing: &PictureListing,
        folder: &Path,
        side: usize,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<CachedPictures, Error> {
        fs::create_dir_all(folder).map_err(writing(folder))?;
        let root = fs::canonicalize(&listing.folder).unwrap_or_else(|_| listing.folder.clone());
        let name = blake3::hash(format!("{side} {}", root.display()).as_bytes()).to_hex();
        let [index, pixels, lock] =
            ["json", "pixels", "lock"].map(|ending| folder.join(format!("{}.{ending}", &name[..16])));
        let lock_file = File::create(&lock).map_err(writing(&lock))?;
        flock(&lock_file, FlockOperation::LockExclusive).map_err(|why| writing(&lock)(why.into()))?;
        let described = |file: &PictureFile| {
            let path = file.path.strip_prefix(&listing.folder).unwrap_or(&file.path).to_owned();
            (path, file.bytes, file.modified)
        };
        let files: Vec<_> = listing.files.iter().map(described).collect();
        if let Some(cached) = read(&index, &pixels, side, &files, listing)? {
            return Ok(cached);
        }
        let _ = fs::remove_file(&index);
        let pictures = write(&pixels, listing, side, progress)?;
        let made = CacheIndex { version: VERSION, side, files, pictures };
        let text = serde_json::to_vec(&made).expect("names and numbers are plain data");
        let new = index.with_extension("new");
        fs::write(&new, text).and_then(|()| fs::rename(&new, &index)).map_err(writing(&index))?;
        of_index(&made, &pixels, listing)
    }

    /// Height and width of a picture; none where its file is damaged.
    pub(crate) fn size(&self, picture: usize) -> Option<(usize, usize)> {
        self.places[picture].map(|(_, height, width)| (height, width))
    }

    /// Some rows of a picture.
    pub(crate) fn rows(
        &self,
        picture: usize,
        rows: std::ops::Range<usize>,
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let (start, _, width) = self.places[picture].expect("a damaged picture is no sample");
        let line = 3 * width;
        out.resize(rows.len() * line, 0);
        let read = self.pixels.read_exact_at(out, start + (rows.start * line) as u64);
        read.map_err(|source| Error::Read { path: self.path.clone(), source })
    }
}

/// Where caches are where nobody says it: the user's folder for what can be made again.
pub(crate) fn usual_folder() -> Result<PathBuf, Error> {
    let named = |name: &str| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let folder = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")));
    let expected = "a folder for decoded pictures, since there is no home folder";
    Ok(folder.ok_or_else(|| Error::setting("cache_path", expected, "none"))?.join("espalier"))
}

/// The picture in a file, no larger than a cache keeps it.
pub(crate) fn decoded(path: &Path, side: usize) -> Result<Picture, String> {
    let bytes = regular_file::read(path, LARGEST_FILE).map_err(|why| why.to_string())?;
    let picture = decode(&bytes)?;
    Ok(match picture.height.min(picture.width) > side {
        true => picture.view().resized(with_shorter_side(picture.height, picture.width, side)),
        false => picture,
    })
}

/// Those of these files that are pictures: each is decoded once, by all cores, and forgotten. The others are added
/// to `damaged`.
pub(crate) fn intact(
    files: Vec<PictureFile>,
    damaged: &mut Vec<DamagedPicture>,
    progress: &mut dyn FnMut(u64, u64),
) -> Vec<PictureFile> {
    let bytes = |files: &[PictureFile]| files.iter().map(|file| file.bytes).sum::<u64>();
    let (all, mut done, mut faults) = (bytes(&files), 0, Vec::with_capacity(files.len()));
    for some in files.chunks(AT_ONCE) {
        faults.par_extend(some.par_iter().map(|file| decoded(&file.path, usize::MAX).err()));
        done += bytes(some);
        progress(done, all);
    }
    let mut sort = |(file, why): (PictureFile, Option<String>)| match why {
        None => Some(file),
        Some(why) => {
            damaged.push(DamagedPicture { path: file.path, why });
            None
        }
    };
    files.into_iter().zip(faults).filter_map(&mut sort).collect()
}

/// The cache, where it is that of these files.
fn read(
    index: &Path,
    pixels: &Path,
    side: usize,
    files: &[(PathBuf, u64, u64)],
    listing: &PictureListing,
) -> Result<Option<CachedPictures>, Error> {
    let Ok(text) = regular_file::read(index, regular_file::RECORDS) else { return Ok(None) };
    // One that was cut off, or is of another version, is made anew.
    let Ok(found) = serde_json::from_slice::<CacheIndex>(&text) else { return Ok(None) };
    let is_same = (found.version, found.side) == (VERSION, side)
        && found.files == files
        && found.pictures.len() == files.len()
        && fs::metadata(pixels).is_ok_and(|file| file.len() == found.bytes());
    is_same.then(|| of_index(&found, pixels, listing)).transpose()
}

impl CacheIndex {
    fn bytes(&self) -> u64 {
        self.pictures.iter().map(CachedPicture::bytes).sum()
    }
}

impl CachedPicture {
    fn bytes(&self) -> u64 {
        match self {
            CachedPicture::Size(height, width) => 3 * (height * width) as u64,
            CachedPicture::Damaged(_) => 0,
        }
    }
}

fn of_index(index: &CacheIndex, pixels: &Path, listing: &PictureListing) -> Result<CachedPictures, Error> {
    let (mut start, mut places, mut damaged) = (0, Vec::with_capacity(index.pictures.len()), Vec::new());
    for (picture, file) in index.pictures.iter().zip(&listing.files) {
        match picture {
            CachedPicture::Size(height, width) => places.push(Some((start, *height, *width))),
            CachedPicture::Damaged(why) => {
                damaged.push(DamagedPicture { path: file.path.clone(), why: why.clone() });
                places.push(None);
            }
        }
        start += picture.bytes();
    }
    let file = regular_file::open(pixels).map_err(|source| Error::Read { path: pixels.into(), source })?;
    Ok(CachedPictures { path: pixels.into(), pixels: file, places, damaged })
}

/// Decodes all files by all cores while those before are written; says what has become of each.
fn write(
    path: &Path,
    listing: &PictureListing,
    side: usize,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<CachedPicture>, Error> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path).map_err(writing(path))?);
    let (all, mut done) = (listing.bytes(), 0);
    let mut pictures = Vec::with_capacity(listing.files.len());
    let (send, recv) = sync_channel::<Vec<Picture>>(1);
    let written = thread::scope(|scope| {
        let writer = scope.spawn(move || {
            recv.into_iter().flatten().try_for_each(|picture| file.write_all(&picture.pixels))?;
            file.flush()
        });
        for files in listing.files.chunks(AT_ONCE) {
            let made: Vec<_> = files.par_iter().map(|file| decoded(&file.path, side)).collect();
            let mut whole = Vec::with_capacity(made.len());
            for picture in made {
                match picture {
                    Ok(picture) => {
                        pictures.push(CachedPicture::Size(picture.height, picture.width));
                        whole.push(picture);
                    }
                    Err(why) => pictures.push(CachedPicture::Damaged(why)),
                }
            }
            if send.send(whole).is_err() {
                break;
            }
            done += files.iter().map(|file| file.bytes).sum::<u64>();
            progress(done, all);
        }
        drop(send);
        writer.join().expect("writing does not panic")
    });
    match written {
        Ok(()) => Ok(pictures),
        Err(source) => {
            let _ = fs::remove_file(path);
            Err(Error::Cache { path: path.into(), source })
        }
    }
}

fn writing(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    move |source| Error::Cache { path: path.into(), source }
}
