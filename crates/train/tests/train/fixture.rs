//! Numbers that PyTorch made, as `../oracle/make.py` stores them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::{Dtype, SafeTensors};

/// What a file holds, by the type of its tensors.
pub struct Fixture {
    pub f32: BTreeMap<String, Vec<f32>>,
    /// Bits, the first in the lowest bit of the first word.
    pub words: BTreeMap<String, Vec<u32>>,
    /// Bytes with their shape.
    pub bytes: BTreeMap<String, (Vec<usize>, Vec<u8>)>,
    pub metadata: BTreeMap<String, String>,
}

impl Fixture {
    pub fn read(file: &[u8]) -> Fixture {
        let (_, header) = SafeTensors::read_metadata(file).unwrap();
        let metadata = header.metadata().clone().unwrap().into_iter().collect();
        let mut fixture =
            Fixture { f32: BTreeMap::new(), words: BTreeMap::new(), bytes: BTreeMap::new(), metadata };
        for (name, view) in SafeTensors::deserialize(file).unwrap().tensors() {
            let fours = || view.data().chunks_exact(4).map(|four| <[u8; 4]>::try_from(four).unwrap());
            match view.dtype() {
                Dtype::F32 => drop(fixture.f32.insert(name, fours().map(f32::from_le_bytes).collect())),
                Dtype::U32 => drop(fixture.words.insert(name, fours().map(u32::from_le_bytes).collect())),
                Dtype::U8 => drop(fixture.bytes.insert(name, (view.shape().to_vec(), view.data().to_vec()))),
                other => panic!("{name} is of {other:?}"),
            }
        }
        fixture
    }

    /// Writes pixels and labels into a folder as MNIST has them.
    pub fn write_images(&self, pixels: &str, labels: &str, folder: &Path) {
        let write = |name: &str, kind: u32, (sizes, bytes): &(Vec<usize>, Vec<u8>)| {
            let words = [kind].into_iter().chain(sizes.iter().map(|size| *size as u32));
            let header: Vec<u8> = words.flat_map(u32::to_be_bytes).collect();
            fs::write(folder.join(name), [&header, &bytes[..]].concat()).unwrap();
        };
        write("train-images-idx3-ubyte", 0x0803, &self.bytes[pixels]);
        write("train-labels-idx1-ubyte", 0x0801, &self.bytes[labels]);
    }
}
