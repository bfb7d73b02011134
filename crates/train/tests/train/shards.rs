//! Checkpoints that several ranks write: any number of ranks reads them, and they are complete or absent whoever
//! fails.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use espalier_plan::Shard;
use espalier_plan::mesh::{Mesh, PerAxis};
use espalier_tensor::{Category, Device, Tensor};
use espalier_train::Error;
use espalier_train::checkpoint::{CheckpointTensor, Checkpoints, LoadRequest, LoadTarget, RunProgress};
use espalier_train::parallel::{Ranks, on_threads};

use crate::support::{
    assert_says, files, fill, flip_a_bit, names, passed_on, planned, read_step, saved, tiny_cnn, tiny_gpt,
};

fn mesh(data: usize, pipeline: usize) -> Mesh {
    Mesh::new(PerAxis { data, pipeline, ..PerAxis::ONES }).unwrap()
}

fn after(step: u64) -> RunProgress {
    RunProgress { step, updates: step, ..RunProgress::default() }
}

/// Through any chain of rank counts, what one rank wrote comes back byte for byte: weights, state, masks, the
/// pruner's memory.
#[test]
fn a_checkpoint_goes_through_any_numbers_of_ranks_unchanged() {
    let lottery = tiny_gpt("train.batch=12 train.steps=24 prune.method=lottery prune.sparsity=0.5");
    let bases = [
        lottery.set("prune.rate=0.3 prune.rewind=2 train.precision=bf16"),
        tiny_cnn("train.batch=12 train.steps=12 prune.method=magnitude prune.sparsity=0.9"),
    ];
    for (base, at_lottery) in bases.into_iter().zip([true, false]) {
        let first = saved(&base, 12);
        let by_three = passed_on(first.path(), [base.replicas(3)]);
        let last = passed_on(by_three.path(), [base.replicas(2), base.clone()]);
        let before = files(first.path());
        let more = if at_lottery { "pruner.safetensors" } else { "optimizer.safetensors" };
        assert!(before.contains_key("masks.safetensors") && before.contains_key(more), "{:?}", before.keys());
        assert!(files(last.path()) == before, "{base}");
        let step = by_three.path().join("step-000012");
        let model: Vec<String> = names(&step).into_iter().filter(|name| name.starts_with("model-")).collect();
        let expected: Vec<String> = (1..=3).map(|i| format!("model-{i:05}-of-00003.safetensors")).collect();
        assert_eq!(model, expected);
        let index: serde_json::Value =
            serde_json::from_slice(&fs::read(step.join("model.safetensors.index.json")).unwrap()).unwrap();
        let map: BTreeMap<String, String> = serde_json::from_value(index["weight_map"].clone()).unwrap();
        for (name, file) in &map {
            let bytes = fs::read(step.join(file)).unwrap();
            let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            assert!(tensors.tensor(name).is_ok(), "{name} is in {file}");
        }
        let plan = planned(&base);
        assert_eq!(map.len(), plan.model.parameters().len() + plan.model.buffers().len());
    }
}

fn numbers(device: &Device, range: std::ops::Range<usize>) -> Tensor {
    let values: Vec<f32> = range.clone().map(|i| i as f32).collect();
    Tensor::from_slice(device, &[range.len()], &values, Category::Optimizer).unwrap()
}

/// The elements of a tensor from one on.
fn range_from(shape: &[usize], start: usize) -> Shard {
    Shard::full(shape).starting_at(start)
}

/// Saves shards of a tensor of 10 x 3, one range a rank.
fn save_shards(folder: &Path, ranges: &[std::ops::Range<usize>]) {
    let device = Device::cpu(1).unwrap();
    on_threads(&mesh(ranges.len(), 1), &device, |ranks, device| {
        let range = ranges[ranks.rank()].clone();
        let (shard_values, shard) = (numbers(device, range.clone()), range_from(&[10, 3], range.start));
        let unsharded = numbers(device, 0..7);
        let tensors = vec![
            ("a".to_owned(), CheckpointTensor::Shard(&shard_values, shard)),
            ("b".to_owned(), CheckpointTensor::Tensor(&unsharded)),
        ];
        Checkpoints::new(folder, 1, "m", "f32").save(&after(1), vec![("state.safetensors", tensors)], &ranks)
    })
    .unwrap();
}

#[test]
fn shards_are_joined_and_split_anew() {
    let folder = tempfile::tempdir().unwrap();
    save_shards(folder.path(), &[0..4, 4..4, 4..29, 29..30]);
    let checkpoint = read_step(folder.path(), 1).unwrap();
    let device = Device::cpu(1).unwrap();
    for range in [0..30, 0..1, 3..5, 10..20, 28..30, 30..30] {
        let (mut shard_values, mut other) = (numbers(&device, 0..range.len()), numbers(&device, 1..8));
        let shard = range_from(&[10, 3], range.start);
        let tensors = vec![
            ("a".to_owned(), LoadTarget::of(&mut shard_values, shard)),
            ("b".to_owned(), LoadTarget::full(&mut other)),
        ];
        fill(&checkpoint, "state.safetensors", tensors).unwrap();
        assert_eq!(shard_values.to_f32(), numbers(&device, range).to_f32());
        assert_eq!(other.to_f32(), numbers(&device, 0..7).to_f32());
    }
    let mut dense = numbers(&device, 0..30).reshape(&[10, 3]);
    dense.fill_zero().unwrap();
    let mut wanted = |elsewhere| {
        let tensors = vec![("a".to_owned(), LoadTarget::full(&mut dense))];
        checkpoint.fill(&mut [LoadRequest { file: "state.safetensors", tensors, elsewhere, converts: false }])
    };
    assert_says(wanted(0).unwrap_err(), &["holds 2 tensors, this run 1"]);
    wanted(1).unwrap();
    assert_eq!(dense.to_f32(), numbers(&device, 0..30).to_f32());
}

#[test]
fn shards_that_leave_a_gap_or_overlap_are_refused() {
    for (ranges, message) in [
        ([0..4, 5..30], "elements 4 to 5 are in no file"),
        ([0..6, 5..30], "elements 5 to 6 are in two files"),
        ([0..6, 6..29], "29 elements of 30"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        save_shards(folder.path(), &ranges);
        let error = read_step(folder.path(), 1).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}

/// Ranks with other stages of the model: what they hold is joined, and what two of them hold is written once.
#[test]
fn stages_write_what_they_hold() {
    let device = Device::cpu(1).unwrap();
    let folder = tempfile::tempdir().unwrap();
    on_threads(&mesh(2, 2), &device, |ranks, device| {
        let stage = ranks.stages().rank();
        let (shard, tied) = (numbers(device, 0..3 + stage), numbers(device, 7..9));
        let name = ["a", "b"][stage].to_owned();
        let saved = vec![
            (name, CheckpointTensor::Tensor(&shard)),
            ("tied".to_owned(), CheckpointTensor::Tensor(&tied)),
        ];
        let files = vec![("model.safetensors", saved)];
        Checkpoints::new(folder.path(), 1, "m", "f32").save(&after(1), files, &ranks)
    })
    .unwrap();
    let path = folder.path().join("step-000001");
    let tensors_in = |name: &String| {
        let bytes = fs::read(path.join(name)).unwrap();
        safetensors::SafeTensors::deserialize(&bytes).unwrap().len()
    };
    let files_of_model: Vec<String> =
        names(&path).into_iter().filter(|name| name.starts_with("model-")).collect();
    assert_eq!(files_of_model.iter().map(tensors_in).sum::<usize>(), 3, "{files_of_model:?}");
    let checkpoint = read_step(folder.path(), 1).unwrap();
    let (mut a, mut b, mut tied) = (numbers(&device, 5..8), numbers(&device, 5..9), numbers(&device, 0..2));
    let tensors = vec![
        ("b".to_owned(), LoadTarget::full(&mut b)),
        ("tied".to_owned(), LoadTarget::full(&mut tied)),
        ("a".to_owned(), LoadTarget::full(&mut a)),
    ];
    fill(&checkpoint, "model.safetensors", tensors).unwrap();
    assert_eq!((a.to_f32().len(), b.to_f32()), (3, vec![0.0, 1.0, 2.0, 3.0]));
    assert_eq!(tied.to_f32(), [7.0, 8.0]);
}

/// A rank that cannot write, one that has gone, and one that ends while it writes: the last checkpoint stays, and
/// every rank gets the error.
#[test]
fn whoever_fails_the_checkpoint_is_absent_and_the_one_before_stays() {
    let device = Device::cpu(1).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path(), 1, "m", "f32");
    let save = |step: u64, failing: &'static str| {
        on_threads(&mesh(3, 1), &device, |ranks, device| {
            let last = ranks.rank() == 2;
            if last && failing == "gone" {
                return Err(Error::File { path: "x".into(), why: "gone".into() });
            }
            let (values, shard) = (numbers(device, 0..1), range_from(&[3], ranks.rank()));
            // No such folder can be written to.
            let file = if last && failing == "cannot" { "no/state.safetensors" } else { "state.safetensors" };
            let tensors = vec![("a".to_owned(), CheckpointTensor::Shard(&values, shard))];
            let saved = checkpoints.save(&after(step), vec![(file, tensors)], &ranks);
            if failing == "cannot" {
                let error = saved.as_ref().unwrap_err();
                assert!(matches!(error, Error::Disk { .. }), "{error:?}");
                assert_says(error, &["step-000002: the checkpoint cannot be written: rank 2:"]);
            }
            saved
        })
    };
    save(1, "nobody").unwrap();
    for failing in ["cannot", "gone"] {
        save(2, failing).unwrap_err();
        assert_eq!(names(folder.path()), ["step-000001"], "{failing}");
    }
    // What a killed process leaves.
    fs::create_dir(folder.path().join(".writing-step-000007")).unwrap();
    fs::write(folder.path().join(".writing-step-000007/state-00001-of-00003.safetensors"), "half").unwrap();
    assert_eq!(checkpoints.list().unwrap().len(), 1);
    assert_eq!(checkpoints.latest(&Ranks::single(), |_| ()).unwrap().unwrap().progress().step, 1);
    save(2, "nobody").unwrap();
    checkpoints.remove_old(2, |problem| panic!("{problem}"));
    assert_eq!(names(folder.path()), ["step-000002"], "the old one and what was left are gone");
}

/// One damaged file of one rank is found by all ranks, which then go on from the checkpoint before.
#[test]
fn a_damaged_file_is_reported_to_all() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path(), 2, "m", "f32");
    let device = Device::cpu(1).unwrap();
    on_threads(&mesh(2, 1), &device, |ranks, device| {
        for step in [1, 2] {
            let shard_values = numbers(device, 0..5);
            let shard = range_from(&[10], 5 * ranks.rank());
            let tensors = vec![("a".to_owned(), CheckpointTensor::Shard(&shard_values, shard))];
            checkpoints.save(&after(step), vec![("state.safetensors", tensors)], &ranks)?;
        }
        Ok(())
    })
    .unwrap();
    flip_a_bit(&folder.path().join("step-000002/state-00002-of-00002.safetensors"));
    let steps = on_threads(&mesh(3, 1), &device, |ranks, _| {
        let mut reported = Vec::new();
        let checkpoint = checkpoints.latest(&ranks, |broken| reported.push(broken.to_string()))?;
        assert!(
            reported.len() == 1 && reported[0].contains("state-00002-of-00002.safetensors is damaged"),
            "{reported:?}"
        );
        Ok(checkpoint.expect("the one before").progress().step)
    });
    assert_eq!(steps.unwrap(), [1, 1, 1]);
}
