//! The IDX format of MNIST and Fashion-MNIST: a magic number, whose last byte counts the sizes that follow,
//! big-endian, then bytes.
//!
//! Images: 0x00000803, count, rows, columns, pixels; in colour, of any size, 0x00000804, count, rows,
//! columns, channels, pixels with their channels together. Labels: 0x00000801, count, labels. Each may be
//! gzipped, which the file's first two bytes tell, not its name.

use crate::{
    Error,
    error::{FEWER_IMAGES, open, reading},
    raw::RawImages,
};
use espalier_tensor::machine::memory_left;
use flate2::read::MultiGzDecoder;
use std::{
    io::{self, BufRead, BufReader, Read},
    path::{Path, PathBuf},
};

const HINT: &str = "Fashion-MNIST comes with the Debian package dataset-fashion-mnist, \
    in /usr/share/datasets/fashion-mnist, and `espalier data mnist DIR` writes MNIST";

/// The magic number but for its last byte: of all kinds of numbers that IDX knows, unsigned bytes are read.
const UNSIGNED_BYTES: u32 = 0x0800;

/// The training images of a folder.
pub(crate) fn read(folder: &Path) -> Result<RawImages, Error> {
    let [images, labels] = files(folder)?;
    read_pair(&images, &labels)
}

/// The files of a folder that hold training images, and their labels.
pub(crate) fn files(folder: &Path) -> Result<[PathBuf; 2], Error> {
    Ok([
        find(folder, "train-images", &["idx3-ubyte", "idx4-ubyte"])?,
        find(folder, "train-labels", &["idx1-ubyte"])?,
    ])
}

/// A file of images and the file of their labels.
pub(crate) fn read_pair(images: &Path, labels: &Path) -> Result<RawImages, Error> {
    let (sizes, pixels) = parse(images, &[3, 4])?;
    let (count, shape) = (sizes[0], [sizes[1], sizes[2], sizes.get(3).copied().unwrap_or(1)]);
    if pixels.is_empty() {
        return Err(Error::Empty { path: images.into(), expected: "at least one image".into() });
    }
    let (sizes, marks) = parse(labels, &[1])?;
    if sizes[0] != count {
        return Err(Error::Labels { path: labels.into(), expected: count, got: sizes[0] });
    }
    let classes = marks.iter().max().map_or(0, |&l| usize::from(l) + 1);
    Ok(RawImages { path: images.into(), pixels, labels: marks, shape, classes })
}

/// The first of these kinds that is there, with a dash or a dot before it, as it is or with `.gz`.
fn find(folder: &Path, name: &str, kinds: &[&str]) -> Result<PathBuf, Error> {
    let names = kinds.iter().flat_map(|kind| ["-", "."].map(|joint| format!("{name}{joint}{kind}")));
    let mut candidates = names.flat_map(|name| [folder.join(&name), folder.join(format!("{name}.gz"))]);
    candidates.find(|path| path.is_file()).ok_or_else(|| Error::Missing {
        path: folder.join(format!("{name}-{}", kinds[0])),
        expected: "an IDX file, plain or .gz".into(),
        hint: HINT,
    })
}

/// Sizes and bytes of a file whose header says one of these numbers of sizes.
fn parse(path: &Path, dimensions: &[usize]) -> Result<(Vec<usize>, Vec<u8>), Error> {
    let failed = || reading(path, "an IDX file");
    let file = BufReader::new(open(path, "an IDX file")?);
    let (mut zipped, mut plain);
    let mut from = file;
    let is_zipped = from.fill_buf().map_err(failed())?.starts_with(&[0x1f, 0x8b]);
    let source: &mut dyn Read = if is_zipped {
        zipped = MultiGzDecoder::new(from);
        &mut zipped
    } else {
        plain = from;
        &mut plain
    };
    let size = |expected, got: u64| Error::Size { path: path.into(), expected, got };
    let mut head = Vec::new();
    source.take(4).read_to_end(&mut head).map_err(failed())?;
    let (magic, mut header) = (|sizes: usize| UNSIGNED_BYTES | sizes as u32, 4 * (dimensions[0] + 1));
    if let Some(got) = head.first_chunk().map(|field| u32::from_be_bytes(*field)) {
        let Some(&known) = dimensions.iter().find(|&&sizes| magic(sizes) == got) else {
            return Err(Error::Magic { path: path.into(), expected: magic(dimensions[0]), got });
        };
        header = 4 * (known + 1);
        source.take(header as u64 - 4).read_to_end(&mut head).map_err(failed())?;
    }
    if head.len() < header {
        return Err(size(header as u64, head.len() as u64));
    }
    let fields = head.chunks_exact(4).skip(1);
    let sizes: Vec<usize> =
        fields.map(|field| field.iter().fold(0, |size, byte| size << 8 | usize::from(*byte))).collect();
    let data = sizes.iter().try_fold(1u64, |product, &n| product.checked_mul(n as u64)).unwrap_or(u64::MAX);
    let fits = memory_left().is_none_or(|left| data <= left);
    if is_zipped && !fits {
        return Err(Error::too_large(path, data, FEWER_IMAGES));
    }
    let mut bytes = Vec::new();
    // No more than the header says, and one to see that there is more: what is zipped may unfold without end.
    source.take(data.saturating_add(1)).read_to_end(&mut bytes).map_err(failed())?;
    if bytes.len() as u64 != data {
        let rest = io::copy(&mut source.take(1 << 30), &mut io::sink()).map_err(failed())?;
        let got = header as u64 + bytes.len() as u64 + rest;
        return Err(size(data.saturating_add(header as u64), got));
    }
    Ok((sizes, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DataFacts, DataSplit, Dataset, HostBatch, ImageDataset, Inputs};
    use flate2::{Compression, write::GzEncoder};
    use std::{fs, io::Write};

    fn file(magic: u32, sizes: &[u32], data: &[u8]) -> Vec<u8> {
        let fields = std::iter::once(&magic).chain(sizes).flat_map(|w| w.to_be_bytes());
        fields.chain(data.iter().copied()).collect()
    }

    fn folder(images: &[u8], labels: &[u8]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("train-images-idx3-ubyte"), images).unwrap();
        let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
        gz.write_all(labels).unwrap();
        fs::write(folder.path().join("train-labels.idx1-ubyte.gz"), gz.finish().unwrap()).unwrap();
        folder
    }

    fn images() -> Vec<u8> {
        file(0x0803, &[2, 2, 3], &(0..12).collect::<Vec<_>>())
    }

    /// Both spellings of the names, one file plain and one gzipped.
    #[test]
    fn a_folder_is_read() {
        let raw = read(folder(&images(), &file(0x0801, &[2], &[4, 1])).path()).unwrap();
        assert_eq!((raw.shape, raw.classes, &raw.labels[..]), ([2, 3, 1], 5, &[4, 1][..]));
        assert!(raw.pixels.into_iter().eq(0..12));
    }

    /// Four sizes are images in colour, under a name that says so.
    #[test]
    fn images_in_colour_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let images = file(0x0804, &[2, 2, 3, 3], &(0..36).collect::<Vec<_>>());
        fs::write(at("train-images-idx4-ubyte"), &images).unwrap();
        fs::write(at("train-labels-idx1-ubyte"), file(0x0801, &[2], &[1, 0])).unwrap();
        let raw = read(folder.path()).unwrap();
        assert_eq!((raw.shape, raw.classes), ([2, 3, 3], 2));
        assert!(raw.pixels.into_iter().eq(0..36));
        fs::write(at("train-images-idx4-ubyte"), &images[..18]).unwrap();
        let cut = read(folder.path()).unwrap_err();
        assert!(matches!(cut, Error::Size { expected: 20, got: 18, .. }), "{cut}");
        fs::write(at("train-images-idx4-ubyte"), file(0x0805, &[1, 1, 1, 1, 1], &[0])).unwrap();
        assert!(matches!(read(folder.path()).unwrap_err(), Error::Magic { got: 0x0805, .. }));
    }

    #[test]
    fn a_missing_set_says_how_to_get_it() {
        let message = read(Path::new("/no/such/folder")).unwrap_err().to_string();
        assert!(message.starts_with("/no/such/folder/train-images-idx3-ubyte is not there"), "{message}");
        assert!(message.contains("Debian package dataset-fashion-mnist"), "{message}");
    }

    #[test]
    fn damage_is_named() {
        let labels = file(0x0801, &[2], &[4, 1]);
        let error = |images: &[u8], labels: &[u8]| read(folder(images, labels).path()).unwrap_err();

        let swapped = error(&labels, &images());
        assert!(matches!(swapped, Error::Magic { expected: 0x0803, got: 0x0801, .. }));
        assert!(
            swapped.to_string().contains("expected the magic number 0x00000803, got 0x00000801"),
            "{swapped}"
        );

        assert!(matches!(error(&images()[..27], &labels), Error::Size { expected: 28, got: 27, .. }));
        assert!(matches!(error(&images()[..9], &labels), Error::Size { expected: 16, got: 9, .. }));
        assert!(matches!(error(&[], &labels), Error::Size { expected: 16, got: 0, .. }));
        let boast = file(0x0803, &[u32::MAX; 3], &[]);
        assert!(matches!(error(&boast, &labels), Error::Size { .. }));
        let few = error(&images(), &file(0x0801, &[1], &[4]));
        assert!(matches!(few, Error::Labels { expected: 2, got: 1, .. }));
        assert!(matches!(error(&file(0x0803, &[0, 2, 3], &[]), &labels), Error::Empty { .. }));
    }

    #[test]
    fn a_cut_gzip_names_its_file() {
        let folder = folder(&images(), &file(0x0801, &[2], &[4, 1]));
        let path = folder.path().join("train-labels.idx1-ubyte.gz");
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 9]).unwrap();
        let error = read(folder.path()).unwrap_err();
        assert!(matches!(error, Error::Read { .. }), "{error}");
    }

    #[test]
    fn fashion_mnist_is_read_where_it_is_installed() {
        let folder = Path::new("/usr/share/datasets/fashion-mnist");
        if !folder.exists() {
            return espalier_testing::skipped(espalier_testing::Need::FashionMnist, HINT);
        }
        let images = ImageDataset::new(read(folder).unwrap(), 0.1).unwrap();
        // The published figures of the whole training set are 72.94 and 90.02.
        assert!((images.standard().mean[0] - 72.94).abs() < 0.2, "{:?}", images.standard());
        assert!((images.standard().std[0] - 90.02).abs() < 0.2, "{:?}", images.standard());
        let data = Dataset::Images(images);
        assert_eq!(data.facts(), DataFacts { vocab: None, image: Some((28, 28, 1)), classes: Some(10) });
        assert_eq!((data.len(DataSplit::Train), data.len(DataSplit::Validation)), (54_000, 6_000));
        let batch = data.batch(DataSplit::Train, &[(0, 0), (0, 53_999)]).unwrap();
        let HostBatch { inputs: Inputs::Images(images), .. } = batch else { panic!() };
        assert_eq!(images.shape, [2, 28, 28, 1]);
    }
}
