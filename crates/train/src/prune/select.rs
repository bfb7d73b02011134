//! The best of many, exactly: so many places, ties going to the earlier one, so that every rank agrees.
//!
//! The k-th largest key is found digit by digit from two histograms, which the device makes. Keys are shown three times instead
//! of being held, as a model's may be larger than what is free.

use std::cmp::Reverse;

use espalier_plan::Shard;
use espalier_tensor::Tensor;
use espalier_tensor::ops::select::{Digit, EXCLUDED, Histogram, at_least, histogram};
use rayon::prelude::*;

use super::Words;
use super::ties::{Sum, Ties, first_to_go};

/// Tensors of which each rank has some, or pieces of some: those of its stage.
pub struct Stages<'a> {
    /// The place of each tensor here among the tensors of all stages, ascending.
    pub places: Vec<usize>,
    /// Whether what is here of it is counted here: what several ranks hold is counted on one of them.
    pub owned: Vec<bool>,
    /// Tensors of all stages.
    pub all: usize,
    /// The shard of a tensor that a rank of this kind holds, by its place among all, where the tensor is cut: all ranks say of
    /// the same ones that they are.
    pub shard: &'a dyn Fn(usize) -> Option<&'a Shard>,
    /// Sums over all these ranks.
    pub sum: &'a Sum<'a>,
}

/// What is shown the keys of a tensor.
pub type See<'a> = dyn FnMut(usize, Tensor) -> crate::Result<()> + 'a;

/// Shows the keys of each tensor, which `keys` gives.
pub fn one_by_one(
    tensors: usize,
    mut keys: impl FnMut(usize) -> crate::Result<Tensor>,
) -> impl FnMut(&mut See<'_>) -> crate::Result<()> {
    move |see| (0..tensors).try_for_each(|i| see(i, keys(i)?))
}

/// Keeps the `keep` places with the largest keys over the tensors of all stages. `walk` shows the keys of each tensor of this one, in whatever order, and must show
/// the same ones each of the three times that it is called. Ties go to the earlier tensor, wherever it is, and within a tensor to the
/// earlier place of the whole, whoever holds it.
pub fn best_of_stages(
    stages: &Stages<'_>,
    keep: usize,
    mut walk: impl FnMut(&mut See<'_>) -> crate::Result<()>,
) -> crate::Result<Vec<Words>> {
    let tensors = stages.places.len();
    let mut high = Histogram::default();
    walk(&mut |i, keys| {
        if stages.owned[i] {
            high.add(&histogram(&keys, Digit::High)?);
        }
        Ok(())
    })?;
    let (digit, above) = Histogram::of((stages.sum)(high.into_counts())?).holder_of(keep);
    // By tensor, since how many of each are at the threshold must be known too: a quarter of a megabyte each.
    let mut low: Vec<Vec<u32>> = vec![Vec::new(); tensors];
    let mut sum = Histogram::default();
    walk(&mut |i, keys| {
        if stages.owned[i] {
            let own = histogram(&keys, Digit::LowOf(digit))?;
            sum.add(&own);
            low[i] = own.narrow();
        }
        Ok(())
    })?;
    let (rest, above_low) = Histogram::of((stages.sum)(sum.into_counts())?).holder_of(keep - above);
    let threshold = digit << 16 | rest;
    // As many of those at the threshold as are still missing, the first ones.
    let missing = keep - above - above_low;
    let mut at_threshold = vec![0; stages.all];
    for (place, counts) in stages.places.iter().zip(&low) {
        at_threshold[*place] = counts.get(rest as usize).map_or(0, |n| u64::from(*n));
    }
    drop(low);
    let at_threshold = (stages.sum)(at_threshold)?;
    let stay = |place: usize| missing.saturating_sub(at_threshold[..place].iter().sum::<u64>() as usize);
    // Of all tensors before it the ties stay, of all behind it they go.
    let divided = (0..stages.all).find(|place| (1..at_threshold[*place]).contains(&(stay(*place) as u64)));
    let divided = divided.and_then(|place| Some((place, (stages.shard)(place)?)));
    let mut ties = None;
    let mut words = vec![Words::new(); tensors];
    walk(&mut |i, keys| {
        match divided {
            Some((place, _)) if place == stages.places[i] => ties = Some((i, Ties::of(&keys, threshold)?)),
            _ => words[i] = at_least(&keys, threshold, stay(stages.places[i]))?,
        }
        Ok(())
    })?;
    if let Some((place, shard)) = divided {
        let own = ties.as_ref().filter(|(i, _)| stages.owned[*i]).map(|(_, ties)| ties);
        let end = first_to_go(own, shard, stay(place), stages.sum)?;
        if let Some((i, ties)) = ties {
            words[i] = ties.keep_before(end, shard);
        }
    }
    Ok(words)
}

/// Keeps the `keep` places with the largest keys of one tensor, of which this rank holds a shard, and says whether it speaks for it.
pub fn best_of_pieces(
    keys: &Tensor,
    keep: usize,
    (shard, owned): (&Shard, bool),
    sum: &Sum<'_>,
) -> crate::Result<Words> {
    let stages = Stages { places: vec![0], owned: vec![owned], all: 1, shard: &|_| Some(shard), sum };
    let words = best_of_stages(&stages, keep, one_by_one(1, |_| Ok(keys.clone())))?;
    Ok(words.into_iter().next().expect("one tensor"))
}

/// Keeps the `keep` places with the largest keys of one tensor.
pub fn best(keys: &Tensor, keep: usize) -> crate::Result<Words> {
    let (digit, above) = histogram(keys, Digit::High)?.holder_of(keep);
    let (rest, above_low) = histogram(keys, Digit::LowOf(digit))?.holder_of(keep - above);
    Ok(at_least(keys, digit << 16 | rest, keep - above - above_low)?)
}

/// Keeps the `keep` places with the largest keys of each output of a tensor, which lie along a dimension; what has no key stays out. Ties
/// go to the earlier place.
pub fn best_of_rows(keys: &[u32], shape: &[usize], dim: usize, keep: usize) -> Words {
    let (rows, inner) = (shape[dim], shape[dim + 1..].iter().product::<usize>());
    let outer = keys.len().checked_div(rows * inner).unwrap_or(0);
    let best = |row: usize| {
        let places = (0..outer).flat_map(|o| (0..inner).map(move |i| (o * rows + row) * inner + i));
        let mut places: Vec<usize> = places.filter(|place| keys[*place] != EXCLUDED).collect();
        if keep < places.len() {
            places.select_nth_unstable_by_key(keep, |place| (Reverse(keys[*place]), *place));
            places.truncate(keep);
        }
        places
    };
    let mut words = vec![0; keys.len().div_ceil(32)];
    let kept: Vec<Vec<usize>> = (0..rows).into_par_iter().map(best).collect();
    kept.into_iter().flatten().for_each(|place| words[place / 32] |= 1 << (place % 32));
    words
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
    ) -> crate::Result<Vec<Words>> {
        let stages = Stages {
            places: (0..tensors).collect(),
            owned: vec![true; tensors],
            all: tensors,
            shard: &|_| None,
            sum: &Ok,
        };
        best_of_stages(&stages, keep, one_by_one(tensors, keys))
    }

    static DEVICE: LazyLock<Device> = LazyLock::new(|| Device::cpu(1).unwrap());

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        /// Against a sort, with many ties, over several tensors.
        #[test]
        fn the_best_are_those_of_a_stable_sort(
            tensors in prop::collection::vec(prop::collection::vec(-6i8..6, 0..80), 1..5),
            share in 0.0f64..=1.0,
        ) {
            let keys: Vec<Vec<u32>> =
                tensors.iter().map(|t| t.iter().map(|x| key(f32::from(*x) / 3.0)).collect()).collect();
            let tensor = |keys: &Vec<u32>| Tensor::from_slice(&DEVICE, &[keys.len()], keys, Category::Workspace).unwrap();
            let total: usize = keys.iter().map(Vec::len).sum();
            let keep = (share * total as f64) as usize;
            let mut all: Vec<(usize, usize)> =
                keys.iter().enumerate().flat_map(|(t, k)| (0..k.len()).map(move |i| (t, i))).collect();
            all.sort_by_key(|&(t, i)| std::cmp::Reverse(keys[t][i]));
            all.truncate(keep);
            all.sort();
            let chosen = best_of_all(keys.len(), keep, |i| Ok(tensor(&keys[i]))).unwrap();
            let places: Vec<(usize, usize)> =
                chosen.iter().enumerate().flat_map(|(t, words)| ones(words).map(move |i| (t, i))).collect();
            prop_assert_eq!(places, all);
            // Two stages, the first tensor on both: each asks for the sums of its own histograms and the other's.
            if keys.len() > 1 {
                let cut = keys.len() / 2;
                let (here, there) = (std::sync::mpsc::channel(), std::sync::mpsc::channel());
                let stage = |own: Vec<usize>, owned: Vec<bool>, give: std::sync::mpsc::Sender<Vec<u64>>, take: std::sync::mpsc::Receiver<Vec<u64>>| {
                    let sum = move |counts: Vec<u64>| {
                        give.send(counts.clone()).unwrap();
                        Ok(take.recv().unwrap().iter().zip(counts).map(|(a, b)| a + b).collect())
                    };
                    let stages = Stages { places: own.clone(), owned, all: keys.len(), shard: &|_| None, sum: &sum };
                    best_of_stages(&stages, keep, one_by_one(own.len(), |i| Ok(tensor(&keys[own[i]])))).unwrap()
                };
                let second: Vec<usize> = [0].into_iter().chain(cut..keys.len()).collect();
                let first: Vec<usize> = (0..cut).collect();
                let mut owned = vec![true; second.len()];
                owned[0] = cut == 0;
                let second = if cut == 0 { second[1..].to_vec() } else { second };
                let (a, b) = std::thread::scope(|scope| {
                    let other = scope.spawn(|| stage(second.clone(), owned, there.0, here.1));
                    (stage(first.clone(), vec![true; cut], here.0, there.1), other.join().unwrap())
                });
                for (place, words) in first.iter().zip(a).chain(second.iter().zip(b)) {
                    prop_assert_eq!(&words, &chosen[*place]);
                }
            }
            for keys in &keys {
                let keep = (share * keys.len() as f64) as usize;
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
            let index = |place: usize| place / shape[dim + 1..].iter().product::<usize>() % shape[dim];
            let mut expected = Vec::new();
            for row in 0..shape[dim] {
                let of_row = |place: &usize| index(*place) == row && keys[*place] != EXCLUDED;
                let mut places: Vec<usize> = (0..len).filter(of_row).collect();
                places.sort_by_key(|place| Reverse(keys[*place]));
                expected.extend(places.into_iter().take(keep));
            }
            expected.sort_unstable();
            let found: Vec<usize> = ones(&best_of_rows(&keys, &shape, dim, keep)).collect();
            prop_assert_eq!(found, expected);
        }
    }

    prop_compose! {
        /// A tensor with many ties, and which of three pieces each of its columns is in.
        fn cut_tensors()(rows in 1usize..6, columns in 1usize..14)
            (scores in prop::collection::vec(-2i8..2, rows * columns), at in prop::collection::vec(0usize..3, columns),
             columns in Just(columns)) -> (usize, Vec<u32>, Vec<usize>) {
            (columns, scores.iter().map(|x| key(f32::from(*x))).collect(), at)
        }
    }

    /// The places of the whole that masks of pieces keep.
    fn in_full(words: &Words, shard: &Shard) -> Vec<usize> {
        ones(words).map(|at| shard.in_full(at)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Against a stable sort of the whole tensors: the columns of each are on three ranks, of which the third may hold what
        /// the first does. Over all tensors together, and of each by itself.
        #[test]
        fn the_best_of_pieces_are_the_best_of_the_whole(
            tensors in prop::collection::vec(cut_tensors(), 1..4), share in 0.0f64..=1.0, copies in any::<bool>(),
            cut in prop::collection::vec(any::<bool>(), 4),
        ) {
            let ranks = 3;
            // With copies there are two pieces, and the first is on two ranks.
            let distinct = if copies { 2 } else { ranks };
            let piece_of = |t: usize, rank: usize| {
                let (columns, keys, at) = &tensors[t];
                let whole = Shard::full(&[keys.len() / columns, *columns]);
                let held = (0..*columns).filter(|column| at[*column] % distinct == rank % distinct);
                if cut[t] { whole.narrow(1, &held.map(|column| column..column + 1).collect::<Vec<_>>()) } else { whole }
            };
            let is_owner = |t: usize, rank: usize| if cut[t] { rank < distinct } else { rank == 0 };
            let count = |keys: &[u32]| (share * keys.len() as f64) as usize;
            let keep: usize = tensors.iter().map(|(_, keys, _)| count(keys)).sum();
            let sorted = |some: &[usize], keep: usize| {
                let places = |t: usize| (0..tensors[t].1.len()).map(move |i| (t, i));
                let mut all: Vec<(usize, usize)> = some.iter().flat_map(|t| places(*t)).collect();
                all.sort_by_key(|&(t, i)| std::cmp::Reverse(tensors[t].1[i]));
                all.truncate(keep);
                all.sort();
                all
            };
            let mesh = Mesh::new(PerAxis { pipeline: ranks, ..PerAxis::ONES }).unwrap();
            let chosen = on_threads(&mesh, &DEVICE, |world, device| {
                let rank = world.rank();
                let pieces: Vec<Shard> = (0..tensors.len()).map(|t| piece_of(t, rank)).collect();
                let keys = |t: usize| {
                    let at = pieces[t].runs().flat_map(|run| run.in_full..run.in_full + run.length);
                    let keys: Vec<u32> = at.map(|place| tensors[t].1[place]).collect();
                    Ok(Tensor::from_slice(device, &[keys.len()], &keys, Category::Workspace)?)
                };
                let sum = |counts| world.sum_over_replica(counts);
                let stages = Stages {
                    places: (0..tensors.len()).collect(),
                    owned: (0..tensors.len()).map(|t| is_owner(t, rank)).collect(),
                    all: tensors.len(),
                    shard: &|t| cut[t].then(|| &pieces[t]),
                    sum: &sum,
                };
                let together = best_of_stages(&stages, keep, one_by_one(tensors.len(), keys))?;
                let alone = |t: usize| {
                    let held = (&pieces[t], is_owner(t, rank));
                    best_of_pieces(&keys(t)?, count(&tensors[t].1), held, &sum)
                };
                let alone = (0..tensors.len()).map(alone).collect::<crate::Result<Vec<_>>>()?;
                let places = |words: &[Words]| {
                    words.iter().zip(&pieces).map(|(words, shard)| in_full(words, shard)).collect::<Vec<_>>()
                };
                Ok((places(&together), places(&alone)))
            }).unwrap();
            for t in 0..tensors.len() {
                let expected = |some: &[usize], keep| -> Vec<usize> {
                    sorted(some, keep).into_iter().filter(|(of, _)| *of == t).map(|(_, i)| i).collect()
                };
                let all: Vec<usize> = (0..tensors.len()).collect();
                for (rank, (together, alone)) in chosen.iter().enumerate() {
                    let shard = piece_of(t, rank);
                    let here = |places: Vec<usize>| -> Vec<usize> {
                        places.into_iter().filter(|place| shard.runs().any(|run| (run.in_full..run.in_full + run.length).contains(place))).collect()
                    };
                    prop_assert_eq!(&together[t], &here(expected(&all, keep)), "all, rank {}", rank);
                    prop_assert_eq!(&alone[t], &here(expected(&[t], count(&tensors[t].1))), "{}, rank {}", t, rank);
                }
            }
        }
    }
}
