//! Checkpoints of ranks that hold shards of tensors: whatever the layout under which they were written, any
//! other reads the same bits.

use std::ops::Range;
use std::path::Path;

use espalier_plan::mesh::{Mesh, PerAxis};
use espalier_plan::{GroupRank, Shard};
use espalier_tensor::mask::ones;
use espalier_tensor::{Category, Device, Tensor};
use espalier_train::Result;
use espalier_train::checkpoint::{
    Checkpoint, CheckpointTensor, Checkpoints, LoadTarget, MASKS, MODEL, OPTIMIZER, PRUNER, RunProgress,
};
use espalier_train::parallel::{Ranks, on_threads};
use proptest::prelude::*;

use crate::support::{assert_says, fill, read_step};

/// A weight, its mask, and what is kept of its state, before anyone has split them.
#[derive(Debug, Clone)]
struct FullState {
    shape: Vec<usize>,
    kept: Vec<bool>,
}

/// The weight at an index of the full tensor: no two are the same.
fn weight_at(index: usize) -> f32 {
    index as f32 - 7.0
}

/// Its state.
fn moment_at(index: usize) -> f32 {
    1.0 / (1.0 + index as f32)
}

/// Who holds what: the dimension that is split, whose each index is one of the shards', and the shard of each
/// rank of a replica.
#[derive(Debug, Clone)]
struct Layout {
    dim: usize,
    shard_of_index: Vec<usize>,
    shard_of_rank: Vec<usize>,
    replicas: usize,
    /// Whether those that hold a shard split its state.
    shared: bool,
}

/// What one rank holds.
struct LocalState {
    shard: Shard,
    member: GroupRank,
    weight: Vec<f32>,
    dense_state: Vec<f32>,
    kept_state: Vec<f32>,
    mask: Vec<u32>,
    /// 16 bits for each weight.
    halves: Vec<u32>,
}

impl Layout {
    fn members(&self) -> usize {
        self.shard_of_rank.len()
    }

    /// What a rank of a replica holds of a tensor.
    fn local(&self, full: &FullState, member: usize, replica: usize) -> LocalState {
        let number = self.shard_of_rank[member];
        let local_indices = (0..full.shape[self.dim]).filter(|index| self.shard_of_index[*index] == number);
        let ranges: Vec<Range<usize>> = local_indices.map(|index| index..index + 1).collect();
        let shard = Shard::full(&full.shape).narrow(self.dim, &ranges);
        let holders: Vec<(usize, usize)> = (0..self.members())
            .filter(|other| self.shard_of_rank[*other] == number)
            .flat_map(|other| (0..self.replicas).map(move |replica| (other, replica)))
            .collect();
        let rank = holders.iter().position(|holder| *holder == (member, replica)).unwrap();
        let group_rank =
            if self.shared { GroupRank { ranks: holders.len(), rank } } else { GroupRank::SINGLE };
        let indices: Vec<usize> =
            shard.runs().flat_map(|run| run.in_full..run.in_full + run.length).collect();
        let of = |numbers: Vec<f32>| numbers[group_rank.split(numbers.len())].to_vec();
        let mut mask = vec![0; indices.len().div_ceil(32)];
        let mut halves = vec![0; indices.len().div_ceil(2)];
        for (at, index) in indices.iter().enumerate() {
            mask[at / 32] |= u32::from(full.kept[*index]) << (at % 32);
            halves[at / 2] |= ((40_503 * (*index as u32 + 1)) & 0xffff) << (16 * (at % 2));
        }
        LocalState {
            weight: indices.iter().map(|index| weight_at(*index)).collect(),
            dense_state: of(indices.iter().map(|index| moment_at(*index)).collect()),
            kept_state: of(indices
                .iter()
                .filter(|index| full.kept[**index])
                .map(|index| moment_at(*index))
                .collect()),
            shard,
            member: group_rank,
            mask,
            halves,
        }
    }

    fn on_ranks(&self, work: impl Fn(Ranks, &Device, (usize, usize)) -> Result<()> + Sync) {
        let mesh =
            Mesh::new(PerAxis { pipeline: self.members(), data: self.replicas, ..PerAxis::ONES }).unwrap();
        let device = Device::cpu(1).unwrap();
        let run = |ranks: Ranks, device: &Device| {
            let coords = (ranks.stages().rank(), ranks.data().rank());
            work(ranks, device, coords)
        };
        on_threads(&mesh, &device, run).unwrap();
    }
}

impl LocalState {
    /// Which shard of the state this rank has, of all weights or of the kept ones.
    fn shard(&self, kept: Option<&str>) -> Option<Shard> {
        let (local, all) = match kept {
            Some(_) => (self.kept_state.len(), ones(&self.mask).count()),
            None => (self.dense_state.len(), self.shard.len()),
        };
        assert_eq!(self.member.split(all).len(), local);
        let is_full = self.shard.is_full();
        let shard = match kept {
            Some(_) if is_full => Shard::full(&[all]),
            Some(mask) => self.shard.clone().kept_by(mask),
            None => self.shard.clone(),
        };
        match self.member.is_single() {
            true => (!is_full).then_some(shard),
            false => Some(shard.starting_at(self.member.split(all).start)),
        }
    }
}

fn tensor(device: &Device, shape: &[usize], values: &[f32]) -> Tensor {
    Tensor::from_slice(device, shape, values, Category::Optimizer).unwrap()
}

/// The shape of what a rank has of dense state.
fn dense_shape(local: &LocalState) -> Vec<usize> {
    if local.member.is_single() { local.shard.shape() } else { vec![local.dense_state.len()] }
}

const DENSE: &str = "moment0/w";
const KEPT: &str = "moment1/w";

fn save(folder: &Path, full: &FullState, layout: &Layout) {
    layout.on_ranks(|ranks, device, (member, replica)| {
        let local = layout.local(full, member, replica);
        let weight = tensor(device, &local.shard.shape(), &local.weight);
        let dense = tensor(device, &dense_shape(&local), &local.dense_state);
        let kept = tensor(device, &[local.kept_state.len()], &local.kept_state);
        let state = |tensor, shard: Option<Shard>| match shard {
            None => CheckpointTensor::Tensor(tensor),
            Some(shard) => CheckpointTensor::Shard(tensor, shard),
        };
        let files = vec![
            (MODEL, vec![("w".to_owned(), CheckpointTensor::of(&weight, &local.shard))]),
            (
                OPTIMIZER,
                vec![
                    (DENSE.to_owned(), state(&dense, local.shard(None))),
                    (KEPT.to_owned(), state(&kept, local.shard(Some("w")))),
                ],
            ),
            (MASKS, vec![("w".to_owned(), CheckpointTensor::packed(local.mask.clone(), &local.shard, 1))]),
            (
                PRUNER,
                vec![(
                    "early/w".to_owned(),
                    CheckpointTensor::packed(local.halves.clone(), &local.shard, 16),
                )],
            ),
        ];
        Checkpoints::new(folder, 1, "m", "f32").save(&RunProgress::default(), files, &ranks).map(drop)
    });
}

fn read(folder: &Path, full: &FullState, layout: &Layout) {
    layout.on_ranks(|ranks, device, (member, replica)| {
        let local = layout.local(full, member, replica);
        let checkpoint = Checkpoint::read(&folder.join("step-000000"), &ranks)?;
        assert_eq!(checkpoint.packed(MASKS, "w", &local.shard, 1)?.unwrap(), local.mask);
        assert_eq!(checkpoint.packed(PRUNER, "early/w", &local.shard, 16)?.unwrap(), local.halves);
        let empty = |shape: &[usize]| tensor(device, shape, &vec![f32::MAX; shape.iter().product()]);
        let mut weight = empty(&local.shard.shape());
        let (mut dense, mut kept) = (empty(&dense_shape(&local)), empty(&[local.kept_state.len()]));
        let dense_target = match local.shard(None) {
            None => LoadTarget::full(&mut dense),
            Some(shard) => LoadTarget::of(&mut dense, shard),
        };
        let kept_target = match local.shard(Some("w")) {
            None => LoadTarget::full(&mut kept),
            Some(shard) => LoadTarget::of(&mut kept, shard),
        };
        let weight_target = LoadTarget::of(&mut weight, local.shard.clone());
        fill(&checkpoint, MODEL, vec![("w".to_owned(), weight_target)])?;
        fill(&checkpoint, OPTIMIZER, vec![(DENSE.to_owned(), dense_target), (KEPT.to_owned(), kept_target)])?;
        assert_eq!(weight.to_f32(), local.weight);
        assert_eq!(dense.to_f32(), local.dense_state);
        assert_eq!(kept.to_f32(), local.kept_state);
        Ok(())
    });
}

prop_compose! {
    fn tensors()(shape in prop::collection::vec(1usize..9, 2..4))
        (kept in prop::collection::vec(any::<bool>(), shape.iter().product::<usize>()), shape in Just(shape)) -> FullState {
        FullState { shape, kept }
    }
}

prop_compose! {
    /// Up to three shards on up to four ranks: runs of indices go to them in turn, so that a shard may be
    /// three ranges.
    fn layouts()(
        shards in 1usize..4, more in 0usize..2, runs in prop::collection::vec(1usize..4, 9), turn in 0usize..3,
        dim in 0usize..3, replicas in 1usize..3, shared in any::<bool>(),
    ) -> Layout {
        let shard_of_index =
            runs.iter().enumerate().flat_map(|(i, run)| vec![(i + turn) % shards; *run]).collect();
        let shard_of_rank = (0..shards + more).map(|rank| rank % shards).collect();
        Layout { dim, shard_of_index, shard_of_rank, replicas, shared }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn what_one_layout_writes_any_other_reads(full in tensors(), mut from in layouts(), mut to in layouts()) {
        for layout in [&mut from, &mut to] {
            layout.dim %= full.shape.len();
        }
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), &full, &from);
        read(folder.path(), &full, &to);
    }
}

/// Column `i` of a row of 32 on rank `i % 2` of two.
fn alternating() -> (FullState, Layout) {
    let full = FullState { shape: vec![2, 32], kept: (0..64).map(|i| i % 3 == 0).collect() };
    let shard_of_index = (0..32).map(|index| index % 2).collect();
    (full, Layout { dim: 1, shard_of_index, shard_of_rank: vec![0, 1], replicas: 1, shared: false })
}

/// Where two ranks say that they hold the same column, or none says that it holds one, the checkpoint is not one.
#[test]
fn shards_that_overlap_or_leave_something_out_are_refused() {
    for (moved, message) in [(vec![], "hold 62 elements of 64"), (vec![0, 1], "in two files")] {
        let (full, layout) = alternating();
        let folder = tempfile::tempdir().unwrap();
        layout.on_ranks(|ranks, device, (member, _)| {
            let columns = (0..32).filter(|index| match index {
                5 => moved.contains(&member),
                index => index % 2 == member,
            });
            let ranges: Vec<Range<usize>> = columns.map(|index| index..index + 1).collect();
            let shard = Shard::full(&full.shape).narrow(1, &ranges);
            let weight = tensor(device, &shard.shape(), &vec![1.0; shard.len()]);
            let files = vec![(MODEL, vec![("w".to_owned(), CheckpointTensor::of(&weight, &shard))])];
            Checkpoints::new(folder.path(), 1, "m", "f32")
                .save(&RunProgress::default(), files, &ranks)
                .map(drop)
        });
        assert_says(read_step(folder.path(), 0).unwrap_err(), &[message]);
    }
}

/// State of other kept weights than the mask's is found before anything is touched.
#[test]
fn state_that_is_not_of_the_mask_is_refused() {
    let (full, layout) = alternating();
    let folder = tempfile::tempdir().unwrap();
    layout.on_ranks(|ranks, device, (member, replica)| {
        let local = layout.local(&full, member, replica);
        // One weight more than there is state for.
        let mut mask = local.mask.clone();
        mask[0] |= if member == 0 { 0b10 } else { 0 };
        assert_eq!(
            ones(&mask).count(),
            ones(&local.mask).count() + usize::from(member == 0),
            "the test's own mask"
        );
        let kept = tensor(device, &[local.kept_state.len()], &local.kept_state);
        let shard = local.shard(Some("w")).unwrap();
        let files = vec![
            (OPTIMIZER, vec![(KEPT.to_owned(), CheckpointTensor::Shard(&kept, shard))]),
            (MASKS, vec![("w".to_owned(), CheckpointTensor::packed(mask, &local.shard, 1))]),
        ];
        Checkpoints::new(folder.path(), 1, "m", "f32").save(&RunProgress::default(), files, &ranks).map(drop)
    });
    let checkpoint = read_step(folder.path(), 0).unwrap();
    let device = Device::cpu(1).unwrap();
    let kept = full.kept.iter().filter(|kept| **kept).count();
    let mut state = tensor(&device, &[kept], &vec![5.0; kept]);
    let tensors = vec![(KEPT.to_owned(), LoadTarget::full(&mut state))];
    assert_says(fill(&checkpoint, OPTIMIZER, tensors).unwrap_err(), &["where its mask keeps"]);
    assert!(state.to_f32().iter().all(|x| *x == 5.0), "nothing was touched");
}

/// Each shard is in one file, whoever else holds it.
#[test]
fn a_shard_on_several_ranks_is_written_by_one() {
    let (full, layout) = alternating();
    let layout = Layout { shard_of_rank: vec![0, 1, 0, 1], replicas: 2, ..layout };
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), &full, &layout);
    let path = folder.path().join("step-000000");
    let of = |file: &str| {
        let stem = file.strip_suffix(".safetensors").unwrap().to_owned() + "-";
        let names = std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().starts_with(&stem)).count()
    };
    assert_eq!((of(MODEL), of(MASKS)), (2, 2));
    read(folder.path(), &full, &layout);
}

/// A bit that flips where a file says which shards it has makes it damaged, not another shard, and nothing
/// panics over it.
#[test]
fn a_description_with_a_flipped_bit_is_noticed() {
    let (full, layout) = alternating();
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), &full, &Layout { shared: true, replicas: 2, ..layout });
    let path = folder.path().join("step-000000");
    let file = path.join("optimizer-00001-of-00004.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let text = String::from_utf8_lossy(&bytes[8..header]);
    assert_says(&text, &["held", "kept_by", "start"]);
    // In the short form a bit of every byte, another one from byte to byte.
    for bit in (0..8 * header).step_by(if espalier_testing::long() { 1 } else { 7 }) {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        std::fs::write(&file, flipped).unwrap();
        assert!(Checkpoint::read(&path, &Ranks::single()).is_err(), "bit {bit} of {text}");
    }
    std::fs::write(&file, bytes).unwrap();
    Checkpoint::read(&path, &Ranks::single()).unwrap();
}
