//! The pictures of a folder that has a folder for each class, as ImageNet is laid out: which classes there are,
//! in the order of their names, and which files, in the order of theirs. No file is opened.

use crate::{Error, error::reading};
use espalier_plan::data::{FolderSource, HeldOut};
use std::{
    fs,
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

/// Folders within a class; more is a circle of links.
const DEEPEST: usize = 16;

/// The folders that may be held out, where `train` is learnt from.
const HELD_OUT_FOLDERS: [&str; 4] = ["val", "validation", "valid", "test"];

/// `data.validation` where it is left out.
const HELD_OUT_USUALLY: f64 = 0.1;

/// A file in the folder of a class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PictureFile {
    pub path: PathBuf,
    pub label: u32,
    pub bytes: u64,
    /// Nanoseconds since 1970, so that a cache knows whether it is still the one that was decoded.
    pub modified: u64,
}

/// The files of a folder of classes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PictureListing {
    pub folder: PathBuf,
    /// In the order of their labels.
    pub classes: Vec<String>,
    /// Class by class.
    pub files: Vec<PictureFile>,
}

impl PictureListing {
    /// The classes of a folder are its folders, or some of those that are `known`, from which they then have
    /// their labels. What begins with a point is nobody's picture.
    pub(crate) fn read(folder: &Path, known: Option<&[String]>) -> Result<PictureListing, Error> {
        let found = PictureListing::classes(folder)?;
        let classes = known.map_or_else(|| found.clone(), <[String]>::to_vec);
        let mut files = Vec::new();
        for class in &found {
            let path = folder.join(class);
            let label = classes.iter().position(|known| known == class);
            let label =
                label.ok_or_else(|| Error::UnknownClass { path: path.clone(), expected: classes.len() })?;
            let before = files.len();
            append(&path, label as u32, DEEPEST, &mut files)?;
            if files.len() == before {
                return Err(Error::EmptyClass { path });
            }
        }
        Ok(PictureListing { folder: folder.into(), classes, files })
    }

    /// The names of a folder's folders, sorted.
    pub(crate) fn classes(folder: &Path) -> Result<Vec<String>, Error> {
        let expected = "a folder with a folder of pictures for each class";
        let mut found = Vec::new();
        for entry in fs::read_dir(folder).map_err(reading(folder, expected))? {
            let path = entry.map_err(reading(folder, expected))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if !name.starts_with('.') && path.is_dir() {
                found.push(name);
            }
        }
        found.sort();
        match found.is_empty() {
            true => Err(Error::NoClasses { path: folder.into() }),
            false => Ok(found),
        }
    }

    /// Bytes of all files.
    pub(crate) fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

/// All files of a folder and of those within it, in the order of their names.
fn append(folder: &Path, label: u32, deepest: usize, files: &mut Vec<PictureFile>) -> Result<(), Error> {
    let expected = "a folder of pictures";
    let entries = fs::read_dir(folder).map_err(reading(folder, expected))?;
    let mut paths = entries
        .map(|entry| Ok(entry.map_err(reading(folder, expected))?.path()))
        .collect::<Result<Vec<PathBuf>, Error>>()?;
    paths.retain(|path| !path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b".")));
    paths.sort();
    for path in paths {
        let metadata = fs::metadata(&path).map_err(reading(&path, "a picture"))?;
        if metadata.is_file() {
            let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            let modified = modified.map_or(0, |since| since.as_nanos() as u64);
            files.push(PictureFile { path, label, bytes: metadata.len(), modified });
        } else if metadata.is_dir() && deepest > 0 {
            append(&path, label, deepest - 1, files)?;
        }
    }
    Ok(())
}

/// The files of a run.
pub(crate) struct FolderListings {
    pub learnt: PictureListing,
    /// None where a fraction of the others is held out.
    pub held_out: Vec<PictureListing>,
}

impl FolderListings {
    pub(crate) fn of(source: &FolderSource, held_out: &HeldOut) -> Result<FolderListings, Error> {
        match held_out {
            HeldOut::Fraction { validation } => FolderListings::read(source, None, *validation),
            HeldOut::Files { validation_path } => FolderListings::read(source, Some(validation_path), 0.0),
        }
    }

    fn read(
        source: &FolderSource,
        held_out: Option<&[PathBuf]>,
        validation: f64,
    ) -> Result<FolderListings, Error> {
        let folder = learnt_folder(source);
        let held_out = match (held_out, held_out_folder(&source.path)) {
            (Some(paths), _) => paths.to_vec(),
            (None, Some(path)) if validation == HELD_OUT_USUALLY => vec![path],
            (None, Some(path)) => {
                let got = format!("{validation}, although {} is there", path.display());
                return Err(Error::setting("validation", "nothing where a folder is held out", got));
            }
            (None, None) => Vec::new(),
        };
        let learnt = PictureListing::read(&folder, None)?;
        if let [class] = &learnt.classes[..] {
            return Err(Error::OneClass { path: folder, class: class.clone() });
        }
        let read = |path: &PathBuf| PictureListing::read(path, Some(&learnt.classes));
        let held_out = held_out.iter().map(read).collect::<Result<_, _>>()?;
        Ok(FolderListings { learnt, held_out })
    }
}

/// The folder beside `train` that is held out.
pub(crate) fn held_out_folder(path: &Path) -> Option<PathBuf> {
    let mut found = HELD_OUT_FOLDERS.iter().map(|name| path.join(name)).filter(|path| path.is_dir());
    path.join("train").is_dir().then(|| found.next()).flatten()
}

/// The folder of classes that are learnt.
pub(crate) fn learnt_folder(source: &FolderSource) -> PathBuf {
    Some(source.path.join("train")).filter(|path| path.is_dir()).unwrap_or_else(|| source.path.clone())
}
