//! CIFAR-10's binary version: records of a label byte and three planes (red, green, blue) of 32 x 32 bytes.
//! The planes are woven into channels-last pixels, as the kernels want them.

use crate::{Error, raw::RawImages};
use std::path::{Path, PathBuf};

const SIDE: usize = 32;
const PLANE: usize = SIDE * SIDE;
const RECORD: usize = 1 + 3 * PLANE;

/// The classes, in the order of their labels.
pub const CLASS_NAMES: [&str; 10] =
    ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];
const CLASSES: usize = CLASS_NAMES.len();

/// The training images of a folder, or the images of one file.
pub(crate) fn read(path: &Path) -> Result<RawImages, Error> {
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    for path in &files(path)? {
        append(path, &mut pixels, &mut labels)?;
    }
    Ok(RawImages { path: path.into(), pixels, labels, shape: [SIDE, SIDE, 3], classes: CLASSES })
}

/// The files of a folder that hold training images; one file alone is what is meant. A set of which one is
/// missing is not the one that results are known for, and nobody would notice: whoever wants fewer images
/// names a file.
pub(crate) fn files(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let missing = |path: PathBuf| Error::Missing {
        path,
        expected: "data_batch_1.bin to data_batch_5.bin".into(),
        hint: "`espalier data cifar10 DIR` writes them, and https://www.cs.toronto.edu/~kriz/cifar.html has them (cifar-10-binary.tar.gz)",
    };
    if folder.is_file() {
        return Ok(vec![folder.to_owned()]);
    }
    let paths: Vec<PathBuf> = (1..=5).map(|i| folder.join(format!("data_batch_{i}.bin"))).collect();
    match paths.iter().find(|path| !path.is_file()) {
        Some(path) => Err(missing(path.clone())),
        None => Ok(paths),
    }
}

fn append(path: &Path, pixels: &mut Vec<u8>, labels: &mut Vec<u8>) -> Result<(), Error> {
    let bytes = crate::error::read(path, "a CIFAR-10 file", u64::MAX)?;
    let (records, rest) = bytes.as_chunks::<RECORD>();
    if records.is_empty() || !rest.is_empty() {
        let (expected, got) = (RECORD as u64, bytes.len() as u64);
        return Err(Error::Uneven { path: path.into(), unit: "records", expected, got });
    }
    pixels.reserve(records.len() * 3 * PLANE);
    for (position, record) in records.iter().enumerate() {
        let got = usize::from(record[0]);
        if got >= CLASSES {
            return Err(Error::Label { path: path.into(), position, expected: CLASSES, got });
        }
        labels.push(record[0]);
        let planes = &record[1..];
        pixels.extend((0..PLANE).flat_map(|i| [planes[i], planes[PLANE + i], planes[2 * PLANE + i]]));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A record whose pixel i is (i, i + 1, i + 2), modulo 256.
    fn record(label: u8) -> Vec<u8> {
        let planes = (0..3usize).flat_map(|c| (0..PLANE).map(move |i| (i + c) as u8));
        std::iter::once(label).chain(planes).collect()
    }

    /// A set of which each file that is not given has one image.
    fn folder(files: &[(&str, Vec<u8>)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        (1..=5)
            .for_each(|i| fs::write(folder.path().join(format!("data_batch_{i}.bin")), record(5)).unwrap());
        files.iter().for_each(|(name, bytes)| fs::write(folder.path().join(name), bytes).unwrap());
        folder
    }

    /// Planes become channels, files come in order, the test file stays out.
    #[test]
    fn a_folder_is_read() {
        let files = [
            ("data_batch_2.bin", record(7)),
            ("data_batch_1.bin", [record(3), record(9)].concat()),
            ("test_batch.bin", record(0)),
            ("batches.meta.txt", b"airplane\n".to_vec()),
        ];
        let folder = folder(&files);
        let raw = read(folder.path()).unwrap();
        assert_eq!(raw.labels, [3, 9, 7, 5, 5, 5]);
        assert_eq!((raw.pixels.len(), raw.shape), (6 * 3 * PLANE, [32, 32, 3]));
        assert_eq!(raw.pixels[..6], [0, 1, 2, 1, 2, 3]);
        // A set with a file missing is not a smaller one; a file by itself is.
        fs::remove_file(folder.path().join("data_batch_4.bin")).unwrap();
        let error = read(folder.path()).unwrap_err().to_string();
        assert!(
            error.contains("data_batch_4.bin is not there: expected data_batch_1.bin to data_batch_5.bin"),
            "{error}"
        );
        assert_eq!(read(&folder.path().join("data_batch_1.bin")).unwrap().labels, [3, 9]);
    }

    #[test]
    fn damage_is_named() {
        let error = |bytes: Vec<u8>| read(folder(&[("data_batch_1.bin", bytes)]).path()).unwrap_err();
        let cut = error(record(1)[..3000].to_vec());
        assert!(matches!(cut, Error::Uneven { expected: 3073, got: 3000, .. }));
        assert!(
            cut.to_string().ends_with("expected a whole number of 3073-byte records, got 3000 bytes"),
            "{cut}"
        );
        assert!(matches!(error(vec![]), Error::Uneven { got: 0, .. }));
        let label = error([record(1), record(10)].concat());
        assert!(matches!(label, Error::Label { position: 1, expected: 10, got: 10, .. }));
    }

    #[test]
    fn a_missing_set_says_how_to_get_it() {
        for path in [Path::new("/no/such/folder"), tempfile::tempdir().unwrap().path()] {
            let message = read(path).unwrap_err().to_string();
            assert!(message.contains("data_batch_1.bin") && message.contains("toronto.edu"), "{message}");
        }
    }
}
