//! Filters of convolutions in checkpoints: PyTorch's order in files, ours in memory, and what versions wrote that
//! had PyTorch's order in memory, too.

use std::fs;

use espalier_plan::mesh::{Mesh, PerAxis};
use espalier_plan::{Shard, split};
use espalier_tensor::{Category, DType, Device, Tensor};
use espalier_train::Result;
use espalier_train::checkpoint::{
    Checkpoint, CheckpointTensor, Checkpoints, LoadTarget, MASKS, MODEL, OPTIMIZER, RunProgress,
};
use espalier_train::parallel::{Ranks, on_threads};
use safetensors::SafeTensors;

use crate::support::{fill, read_step};

/// One filter, 1 x 2 positions, three inputs: tens are inputs, ones positions.
const SHAPE: [usize; 4] = [1, 1, 2, 3];
const IN_MEMORY: [f32; 6] = [0.0, 10.0, 20.0, 1.0, 11.0, 21.0];
const IN_FILES: [f32; 6] = [0.0, 1.0, 10.0, 11.0, 20.0, 21.0];
/// Of weights 1, 2, 3 and 5 is state kept.
const MASK: u32 = 0b101110;
const MOMENTS: [f32; 4] = [0.1, 0.2, 0.3, 0.4];

/// A checkpoint of one filter, a mask of it and the state of what is kept, of which each rank has a share.
fn saved(ranks: usize) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mesh = Mesh::new(PerAxis { data: ranks, ..PerAxis::ONES }).unwrap();
    let write = |ranks: Ranks, device: &Device| -> Result<()> {
        let tensor =
            |shape: &[usize], values: &[f32]| Tensor::from_slice(device, shape, values, Category::Weights);
        let own = split(MOMENTS.len(), mesh.size(), ranks.data().rank());
        let (weight, moment) = (tensor(&SHAPE, &IN_MEMORY)?, tensor(&[own.len()], &MOMENTS[own.clone()])?);
        let moment = match own.len() < MOMENTS.len() {
            true => CheckpointTensor::Shard(&moment, Shard::full(&[MOMENTS.len()]).starting_at(own.start)),
            false => CheckpointTensor::Tensor(&moment),
        };
        let files = vec![
            (MODEL, vec![("w".to_owned(), CheckpointTensor::Tensor(&weight))]),
            (MASKS, vec![("w".to_owned(), CheckpointTensor::U32(vec![MASK]))]),
            (OPTIMIZER, vec![("moment0/w".to_owned(), moment)]),
        ];
        Checkpoints::new(folder.path(), 1, "m", "f32").save(&RunProgress::default(), files, &ranks)?;
        Ok(())
    };
    on_threads(&mesh, &Device::cpu(ranks).unwrap(), write).unwrap();
    folder
}

/// Fills a tensor of zeros.
fn loaded(checkpoint: &Checkpoint, file: &str, name: &str, shape: &[usize]) -> Vec<f32> {
    let mut tensor = Tensor::zeros(&Device::cpu(1).unwrap(), shape, DType::F32, Category::Weights).unwrap();
    let tensors = vec![(name.to_owned(), LoadTarget::full(&mut tensor))];
    fill(checkpoint, file, tensors).unwrap();
    tensor.to_f32()
}

#[test]
fn full_filters_are_in_files_as_pytorch_has_them() {
    let folder = saved(1);
    let checkpoint = read_step(folder.path(), 0).unwrap();
    let bytes = fs::read(folder.path().join("step-000000").join(MODEL)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let weight = file.tensor("w").unwrap();
    let numbers: Vec<f32> =
        weight.data().as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)).collect();
    assert_eq!((weight.shape(), &numbers[..]), (&[1, 3, 1, 2][..], &IN_FILES[..]));
    assert_eq!(loaded(&checkpoint, MODEL, "w", &SHAPE), IN_MEMORY);
    assert_eq!(loaded(&checkpoint, OPTIMIZER, "moment0/w", &[4]), MOMENTS);
    let full = Shard::full(&SHAPE);
    assert_eq!(checkpoint.packed(MASKS, "w", &full, 1).unwrap().unwrap(), [MASK]);
    // Half of the inputs, read by a rank that has no more.
    let (second, device) = (full.narrow(3, &[1..2]), Device::cpu(1).unwrap());
    let mut some = Tensor::zeros(&device, &[1, 1, 2, 1], DType::F32, Category::Weights).unwrap();
    let tensors = vec![("w".to_owned(), LoadTarget::of(&mut some, second))];
    fill(&checkpoint, MODEL, tensors).unwrap();
    assert_eq!(some.to_f32(), [10.0, 11.0]);
}

/// Masks and the state of what they keep change their order when they are read, whoever had which share.
#[test]
fn what_an_earlier_version_wrote_is_read() {
    for ranks in [1, 2, 3] {
        let folder = saved(ranks);
        let path = folder.path().join("step-000000/manifest.json");
        let mut manifest: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        manifest["format"] = 1.into();
        manifest.as_object_mut().unwrap().remove("blake3");
        fs::write(&path, manifest.to_string()).unwrap();
        let older = read_step(folder.path(), 0).unwrap();
        assert_eq!(loaded(&older, MODEL, "w", &SHAPE), IN_MEMORY);
        // In the file kept are position 1 of input 0, both of input 1 and position 1 of input 2: in memory input 1 of
        // position 0, then all of position 1.
        let full = Shard::full(&SHAPE);
        assert_eq!(older.packed(MASKS, "w", &full, 1).unwrap().unwrap(), [0b111010]);
        assert_eq!(loaded(&older, OPTIMIZER, "moment0/w", &[4]), [0.2, 0.1, 0.3, 0.4]);
        // The share of the second of two ranks.
        let mut half = Tensor::zeros(&Device::cpu(1).unwrap(), &[2], DType::F32, Category::Weights).unwrap();
        let share = LoadTarget::of(&mut half, Shard::full(&[4]).starting_at(2));
        let tensors = vec![("moment0/w".to_owned(), share)];
        fill(&older, OPTIMIZER, tensors).unwrap();
        assert_eq!(half.to_f32(), [0.3, 0.4]);
    }
}
