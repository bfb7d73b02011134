//! The best of many, exactly: so many positions, ties going to the earlier one, so that every rank agrees.
//!
//! The k-th largest key is found digit by digit from two histograms, which the device makes. Keys are shown
//! three times instead of being held, as a model's may be larger than what is free.

use std::cmp::Reverse;

use espalier_plan::Shard;
use espalier_tensor::Tensor;
use espalier_tensor::ops::select::{Digit, EXCLUDED, Histogram, at_least, histogram};
use rayon::prelude::*;

use super::MaskBits;
use super::ties::{AllReduceCounts, ThresholdTies, first_to_go};

/// Tensors of which each rank has some, or shards of some: those of its stage.
pub struct DistributedTensors<'a> {
    /// The index of each tensor here among the tensors of all stages, ascending.
    pub positions: Vec<usize>,
    /// Whether what is here of it is counted here: what several ranks hold is counted on one of them.
    pub owned: Vec<bool>,
    /// Tensors of all stages.
    pub all: usize,
    /// The shard of a tensor that a rank of this kind holds, by its index among all, where the tensor is split:
    /// all ranks say of the same ones that they are.
    pub shard: &'a dyn Fn(usize) -> Option<&'a Shard>,
    /// All-reduce over all these ranks.
    pub all_reduce: &'a AllReduceCounts<'a>,
}

/// What is shown the keys of a tensor.
pub type KeyVisitor<'a> = dyn FnMut(usize, Tensor) -> crate::Result<()> + 'a;

/// Shows the keys of each tensor, which `keys` gives.
pub(crate) fn one_by_one(
    tensors: usize,
    mut keys: impl FnMut(usize) -> crate::Result<Tensor>,
) -> impl FnMut(&mut KeyVisitor<'_>) -> crate::Result<()> {
    move |visit| (0..tensors).try_for_each(|i| visit(i, keys(i)?))
}

/// Keeps the `keep` positions with the largest keys over the tensors of all stages. `visit_all` shows the keys
/// of each tensor of this one, in whatever order, and must show the same ones each of the three times that it
/// is called. Ties go to the earlier tensor, wherever it is, and within a tensor to the earlier position of
/// the full tensor, whoever holds it.
pub(crate) fn best_of_distributed(
    distributed: &DistributedTensors<'_>,
    keep: usize,
    mut visit_all: impl FnMut(&mut KeyVisitor<'_>) -> crate::Result<()>,
) -> crate::Result<Vec<MaskBits>> {
    let tensors = distributed.positions.len();
    let mut high = Histogram::default();
    visit_all(&mut |i, keys| {
        if distributed.owned[i] {
            high.add(&histogram(&keys, Digit::High)?);
        }
        Ok(())
    })?;
    let (digit, above) = Histogram::of((distributed.all_reduce)(high.into_counts())?).holder_of(keep);
    // By tensor, since how many of each are at the threshold must be known too: a quarter of a megabyte each.
    let mut low: Vec<Vec<u32>> = vec![Vec::new(); tensors];
    let mut sum = Histogram::default();
    visit_all(&mut |i, keys| {
        if distributed.owned[i] {
            let local = histogram(&keys, Digit::LowOf(digit))?;
            sum.add(&local);
            low[i] = local.narrow();
        }
        Ok(())
    })?;
    let (rest, above_low) =
        Histogram::of((distributed.all_reduce)(sum.into_counts())?).holder_of(keep - above);
    let threshold = digit << 16 | rest;
    // As many of those at the threshold as are still missing, the first ones.
    let missing = keep - above - above_low;
    let mut at_threshold = vec![0; distributed.all];
    for (position, counts) in distributed.positions.iter().zip(&low) {
        at_threshold[*position] = counts.get(rest as usize).map_or(0, |n| u64::from(*n));
    }
    drop(low);
    let at_threshold = (distributed.all_reduce)(at_threshold)?;
    let stay =
        |position: usize| missing.saturating_sub(at_threshold[..position].iter().sum::<u64>() as usize);
    // Of all tensors before it the ties stay, of all behind it they go.
    let divided = (0..distributed.all)
        .find(|position| (1..at_threshold[*position]).contains(&(stay(*position) as u64)));
    let divided = divided.and_then(|position| Some((position, (distributed.shard)(position)?)));
    let mut ties = None;
    let mut bits = vec![MaskBits::new(); tensors];
    visit_all(&mut |i, keys| {
        match divided {
            Some((position, _)) if position == distributed.positions[i] => {
                ties = Some((i, ThresholdTies::of(&keys, threshold)?))
            }
            _ => bits[i] = at_least(&keys, threshold, stay(distributed.positions[i]))?,
        }
        Ok(())
    })?;
    if let Some((position, shard)) = divided {
        let local = ties.as_ref().filter(|(i, _)| distributed.owned[*i]).map(|(_, ties)| ties);
        let end = first_to_go(local, shard, stay(position), distributed.all_reduce)?;
        if let Some((i, ties)) = ties {
            bits[i] = ties.keep_before(end, shard);
        }
    }
    Ok(bits)
}

/// Keeps the `keep` positions with the largest keys of one tensor, of which this rank holds a shard, and says
/// whether it speaks for it.
pub(crate) fn best_of_shards(
    keys: &Tensor,
    keep: usize,
    (shard, owned): (&Shard, bool),
    all_reduce: &AllReduceCounts<'_>,
) -> crate::Result<MaskBits> {
    let distributed = DistributedTensors {
        positions: vec![0],
        owned: vec![owned],
        all: 1,
        shard: &|_| Some(shard),
        all_reduce,
    };
    let bits = best_of_distributed(&distributed, keep, one_by_one(1, |_| Ok(keys.clone())))?;
    Ok(bits.into_iter().next().expect("one tensor"))
}

/// Keeps the `keep` positions with the largest keys of one tensor.
pub fn best(keys: &Tensor, keep: usize) -> crate::Result<MaskBits> {
    let (digit, above) = histogram(keys, Digit::High)?.holder_of(keep);
    let (rest, above_low) = histogram(keys, Digit::LowOf(digit))?.holder_of(keep - above);
    Ok(at_least(keys, digit << 16 | rest, keep - above - above_low)?)
}

/// Keeps the `keep` positions with the largest keys of each output of a tensor, which lie along a dimension;
/// what has no key stays out. Ties go to the earlier position.
pub(crate) fn best_of_rows(keys: &[u32], shape: &[usize], dim: usize, keep: usize) -> MaskBits {
    let (rows, inner) = (shape[dim], shape[dim + 1..].iter().product::<usize>());
    let outer = keys.len().checked_div(rows * inner).unwrap_or(0);
    let best = |row: usize| {
        let positions = (0..outer).flat_map(|o| (0..inner).map(move |i| (o * rows + row) * inner + i));
        let mut positions: Vec<usize> = positions.filter(|position| keys[*position] != EXCLUDED).collect();
        if keep < positions.len() {
            positions.select_nth_unstable_by_key(keep, |position| (Reverse(keys[*position]), *position));
            positions.truncate(keep);
        }
        positions
    };
    let mut bits = vec![0; keys.len().div_ceil(32)];
    let kept: Vec<Vec<usize>> = (0..rows).into_par_iter().map(best).collect();
    kept.into_iter().flatten().for_each(|position| bits[position / 32] |= 1 << (position % 32));
    bits
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parallel::on_threads;
    use espalier_plan::mesh::{Mesh, PerAxis};
    use espalier_tensor::mask::ones;
    use espalier_tensor::ops::select::key;
    use espalier_tensor::{Category, Device};
    use proptest::prelude::*;
    use std::sync::LazyLock;

    /// The best of tensors that are all on one rank.
    fn best_of_all(
        tensors: usize,
        keep: usize,
        keys: impl FnMut(usize) -> crate::Result<Tensor>,
    ) -> crate::Result<Vec<MaskBits>> {
        let distributed = DistributedTensors {
            positions: (0..tensors).collect(),
            owned: vec![true; tensors],
            all: tensors,
            shard: &|_| None,
            all_reduce: &Ok,
        };
        best_of_distributed(&distributed, keep, one_by_one(tensors, keys))
    }

    static DEVICE: LazyLock<Device> = LazyLock::new(|| Device::cpu(1).unwrap());

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        /// Against a sort, with many ties, over several tensors.
        #[test]
        fn the_best_are_those_of_a_stable_sort(
            tensors in prop::collection::vec(prop::collection::vec(-6i8..6, 0..80), 1..5),
            fraction in 0.0f64..=1.0,
        ) {
            let keys: Vec<Vec<u32>> =
                tensors.iter().map(|t| t.iter().map(|x| key(f32::from(*x) / 3.0)).collect()).collect();
            let tensor = |keys: &Vec<u32>| Tensor::from_slice(&DEVICE, &[keys.len()], keys, Category::Workspace).unwrap();
            let total: usize = keys.iter().map(Vec::len).sum();
            let keep = (fraction * total as f64) as usize;
            let mut all: Vec<(usize, usize)> =
                keys.iter().enumerate().flat_map(|(t, k)| (0..k.len()).map(move |i| (t, i))).collect();
            all.sort_by_key(|&(t, i)| std::cmp::Reverse(keys[t][i]));
            all.truncate(keep);
            all.sort();
            let chosen = best_of_all(keys.len(), keep, |i| Ok(tensor(&keys[i]))).unwrap();
            let positions: Vec<(usize, usize)> =
                chosen.iter().enumerate().flat_map(|(t, bits)| ones(bits).map(move |i| (t, i))).collect();
            prop_assert_eq!(positions, all);
            // Two stages, the first tensor on both: histograms are all-reduced over them.
            if keys.len() > 1 {
                let middle = keys.len() / 2;
                let (here, there) = (std::sync::mpsc::channel(), std::sync::mpsc::channel());
                let stage = |indices: Vec<usize>, owned: Vec<bool>, give: std::sync::mpsc::Sender<Vec<u64>>, take: std::sync::mpsc::Receiver<Vec<u64>>| {
                    let sum = move |counts: Vec<u64>| {
                        give.send(counts.clone()).unwrap();
                        Ok(take.recv().unwrap().iter().zip(counts).map(|(a, b)| a + b).collect())
                    };
                    let distributed = DistributedTensors { positions: indices.clone(), owned, all: keys.len(), shard: &|_| None, all_reduce: &sum };
                    best_of_distributed(&distributed, keep, one_by_one(indices.len(), |i| Ok(tensor(&keys[indices[i]])))).unwrap()
                };
                let second: Vec<usize> = [0].into_iter().chain(middle..keys.len()).collect();
                let first: Vec<usize> = (0..middle).collect();
                let mut owned = vec![true; second.len()];
                owned[0] = middle == 0;
                let second = if middle == 0 { second[1..].to_vec() } else { second };
                let (a, b) = std::thread::scope(|scope| {
                    let other = scope.spawn(|| stage(second.clone(), owned, there.0, here.1));
                    (stage(first.clone(), vec![true; middle], here.0, there.1), other.join().unwrap())
                });
                for (position, bits) in first.iter().zip(a).chain(second.iter().zip(b)) {
                    prop_assert_eq!(&bits, &chosen[*position]);
                }
            }
            for keys in &keys {
                let keep = (fraction * keys.len() as f64) as usize;
                prop_assert_eq!(best(&tensor(keys), keep).unwrap(), best_of_all(1, keep, |_| Ok(tensor(keys))).unwrap().remove(0));
            }
        }
    }

    proptest! {
        /// Against a stable sort of each row, along any dimension of three, with many ties and some that are out.
        #[test]
        fn the_best_of_rows_are_those_of_a_stable_sort_of_each(
            shape in prop::array::uniform3(0usize..6), dim in 0usize..3, keep in 0usize..20, seed in any::<u64>(),
        ) {
            let len: usize = shape.iter().product();
            let keys: Vec<u32> =
                (0..len).map(|i| (espalier_tensor::random::bits(seed, i as u64) % 5) as u32).collect();
            let index = |position: usize| position / shape[dim + 1..].iter().product::<usize>() % shape[dim];
            let mut expected = Vec::new();
            for row in 0..shape[dim] {
                let of_row = |position: &usize| index(*position) == row && keys[*position] != EXCLUDED;
                let mut positions: Vec<usize> = (0..len).filter(of_row).collect();
                positions.sort_by_key(|position| Reverse(keys[*position]));
                expected.extend(positions.into_iter().take(keep));
            }
            expected.sort_unstable();
            let found: Vec<usize> = ones(&best_of_rows(&keys, &shape, dim, keep)).collect();
            prop_assert_eq!(found, expected);
        }
    }

    prop_compose! {
        /// A tensor with many ties, and which of three shards each of its columns is in.
        fn split_tensors()(rows in 1usize..6, columns in 1usize..14)
            (scores in prop::collection::vec(-2i8..2, rows * columns), at in prop::collection::vec(0usize..3, columns),
             columns in Just(columns)) -> (usize, Vec<u32>, Vec<usize>) {
            (columns, scores.iter().map(|x| key(f32::from(*x))).collect(), at)
        }
    }

    /// The indices of the full tensor that masks of shards keep.
    fn in_full(bits: &MaskBits, shard: &Shard) -> Vec<usize> {
        ones(bits).map(|at| shard.in_full(at)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Against a stable sort of the full tensors: the columns of each are on three ranks, of which the
        /// third may hold what the first does. Over all tensors together, and of each by itself.
        #[test]
        fn the_best_of_shards_are_the_best_of_the_full_tensors(
            tensors in prop::collection::vec(split_tensors(), 1..4), fraction in 0.0f64..=1.0, copies in any::<bool>(),
            is_split in prop::collection::vec(any::<bool>(), 4),
        ) {
            let ranks = 3;
            // With copies there are two shards, and the first is on two ranks.
            let distinct = if copies { 2 } else { ranks };
            let shard_of = |t: usize, rank: usize| {
                let (columns, keys, at) = &tensors[t];
                let full = Shard::full(&[keys.len() / columns, *columns]);
                let local = (0..*columns).filter(|column| at[*column] % distinct == rank % distinct);
                if is_split[t] { full.narrow(1, &local.map(|column| column..column + 1).collect::<Vec<_>>()) } else { full }
            };
            let is_owner = |t: usize, rank: usize| if is_split[t] { rank < distinct } else { rank == 0 };
            let count = |keys: &[u32]| (fraction * keys.len() as f64) as usize;
            let keep: usize = tensors.iter().map(|(_, keys, _)| count(keys)).sum();
            let sorted = |some: &[usize], keep: usize| {
                let positions = |t: usize| (0..tensors[t].1.len()).map(move |i| (t, i));
                let mut all: Vec<(usize, usize)> = some.iter().flat_map(|t| positions(*t)).collect();
                all.sort_by_key(|&(t, i)| std::cmp::Reverse(tensors[t].1[i]));
                all.truncate(keep);
                all.sort();
                all
            };
            let mesh = Mesh::new(PerAxis { pipeline: ranks, ..PerAxis::ONES }).unwrap();
            let chosen = on_threads(&mesh, &DEVICE, |world, device| {
                let rank = world.rank();
                let shards: Vec<Shard> = (0..tensors.len()).map(|t| shard_of(t, rank)).collect();
                let keys = |t: usize| {
                    let at = shards[t].runs().flat_map(|run| run.in_full..run.in_full + run.length);
                    let keys: Vec<u32> = at.map(|position| tensors[t].1[position]).collect();
                    Ok(Tensor::from_slice(device, &[keys.len()], &keys, Category::Workspace)?)
                };
                let sum = |counts| world.all_reduce_over_replica(counts);
                let distributed = DistributedTensors {
                    positions: (0..tensors.len()).collect(),
                    owned: (0..tensors.len()).map(|t| is_owner(t, rank)).collect(),
                    all: tensors.len(),
                    shard: &|t| is_split[t].then(|| &shards[t]),
                    all_reduce: &sum,
                };
                let together = best_of_distributed(&distributed, keep, one_by_one(tensors.len(), keys))?;
                let single = |t: usize| {
                    let local = (&shards[t], is_owner(t, rank));
                    best_of_shards(&keys(t)?, count(&tensors[t].1), local, &sum)
                };
                let single = (0..tensors.len()).map(single).collect::<crate::Result<Vec<_>>>()?;
                let positions = |bits: &[MaskBits]| {
                    bits.iter().zip(&shards).map(|(bits, shard)| in_full(bits, shard)).collect::<Vec<_>>()
                };
                Ok((positions(&together), positions(&single)))
            }).unwrap();
            for t in 0..tensors.len() {
                let expected = |some: &[usize], keep| -> Vec<usize> {
                    sorted(some, keep).into_iter().filter(|(of, _)| *of == t).map(|(_, i)| i).collect()
                };
                let all: Vec<usize> = (0..tensors.len()).collect();
                for (rank, (together, single)) in chosen.iter().enumerate() {
                    let shard = shard_of(t, rank);
                    let here = |positions: Vec<usize>| -> Vec<usize> {
                        positions.into_iter().filter(|position| shard.runs().any(|run| (run.in_full..run.in_full + run.length).contains(position))).collect()
                    };
                    prop_assert_eq!(&together[t], &here(expected(&all, keep)), "all, rank {}", rank);
                    prop_assert_eq!(&single[t], &here(expected(&[t], count(&tensors[t].1))), "{}, rank {}", t, rank);
                }
            }
        }
    }
}
