//! Which format a file or folder of images has, MNIST's, CIFAR-10's or folders of pictures, by what is in it.

use crate::image_folder::listing::{PictureListing, held_out_folder};
use crate::{Error, cifar, idx, raw::RawImages};
use std::{
    io::Read,
    path::{Path, PathBuf},
};

/// All images of a folder or a file, in whichever format that is.
pub(crate) fn images(path: &Path) -> Result<RawImages, Error> {
    match (path.is_dir(), is_cifar(path)) {
        (true, true) => cifar::read(path),
        (true, false) => idx::read(path),
        (false, _) if is_idx(path)? => idx::read_pair(path, &labels_beside(path)),
        (false, _) => cifar::read(path),
    }
}

/// The files that [`images`] reads.
pub(crate) fn image_files(path: &Path) -> Result<Vec<PathBuf>, Error> {
    match (path.is_dir(), is_cifar(path)) {
        (true, true) => cifar::files(path),
        (true, false) => Ok(idx::files(path)?.into()),
        (false, _) if is_idx(path)? => Ok(vec![path.to_owned(), labels_beside(path)]),
        (false, _) => Ok(vec![path.to_owned()]),
    }
}

/// The folder of classes that a path means, if it means one: what is held out of ImageNet's layout.
pub(crate) fn picture_folder(path: &Path) -> Option<PathBuf> {
    let is_other = !path.is_dir() || is_cifar(path) || idx::files(path).is_ok();
    if is_other || PictureListing::classes(path).is_err() {
        return None;
    }
    Some(held_out_folder(path).unwrap_or_else(|| path.to_owned()))
}

/// Whether a folder is one of CIFAR-10's, of which some may be missing.
fn is_cifar(folder: &Path) -> bool {
    (1..=5).any(|i| folder.join(format!("data_batch_{i}.bin")).is_file())
}

/// Whether a file of images is one of MNIST's format: its magic number begins with two zeros, unless it is
/// zipped. CIFAR's begin with a label and the first pixels, and bear another name.
fn is_idx(path: &Path) -> Result<bool, Error> {
    let expected = "images in MNIST's or CIFAR-10's format";
    let mut head = [0; 4];
    let read = crate::error::open(path, expected)?.read(&mut head);
    read.map_err(crate::error::reading(path, expected))?;
    Ok(matches!(head, [0, 0, 8, 3 | 4]) || head.starts_with(&[0x1f, 0x8b]))
}

/// The file of labels that belongs to a file of images, by MNIST's names.
fn labels_beside(images: &Path) -> PathBuf {
    let name = images.file_name().unwrap_or_default().to_string_lossy();
    images.with_file_name(name.replace("images", "labels").replace("idx3", "idx1").replace("idx4", "idx1"))
}
