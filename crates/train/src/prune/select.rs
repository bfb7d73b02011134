//! The best of many, exactly: so many places, ties going to the earlier one, so that every rank agrees.
//!
//! Scores become whole numbers of the same order, whose k-th largest is found digit by digit from two histograms. Scores are
//! shown three times instead of being held, as a model's scores may be larger than what is free.

use rayon::prelude::*;

/// The bits of a mask, one a weight.
pub type Words = Vec<u32>;

/// A score as a whole number: larger is better, and what is not a number is worst.
pub fn key(score: f32) -> u32 {
    if score.is_nan() {
        return 0;
    }
    // Both zeros are one score.
    let bits = (score + 0.0).to_bits();
    if bits >> 31 == 0 { bits | 1 << 31 } else { !bits }
}

/// Tensors of which each stage of a pipeline has some.
pub struct Stages<'a> {
    /// The place of each tensor here among the tensors of all stages, ascending.
    pub places: Vec<usize>,
    /// Whether it is counted here: one that several stages hold is counted on one of them.
    pub speaks: Vec<bool>,
    /// Tensors of all stages.
    pub all: usize,
    /// Sums over the stages, each of which must ask for the same ones in the same order.
    pub sum: &'a dyn Fn(Vec<u64>) -> crate::Result<Vec<u64>>,
}

impl Stages<'_> {
    /// All tensors on one rank.
    pub fn alone(tensors: usize) -> Stages<'static> {
        Stages { places: (0..tensors).collect(), speaks: vec![true; tensors], all: tensors, sum: &Ok }
    }
}

/// What is shown the keys of a tensor.
pub type See<'a> = dyn FnMut(usize, Vec<u32>) -> crate::Result<()> + 'a;

/// Keeps the `keep` places with the largest keys over all tensors; `keys(i)` gives those of tensor `i`.
pub fn best_of_all(
    tensors: usize,
    keep: usize,
    keys: impl FnMut(usize) -> crate::Result<Vec<u32>>,
) -> crate::Result<Vec<Words>> {
    best_of_stages(&Stages::alone(tensors), keep, one_by_one(tensors, keys))
}

/// Shows the keys of each tensor, which `keys` gives.
pub fn one_by_one(
    tensors: usize,
    mut keys: impl FnMut(usize) -> crate::Result<Vec<u32>>,
) -> impl FnMut(&mut See<'_>) -> crate::Result<()> {
    move |see| (0..tensors).try_for_each(|i| see(i, keys(i)?))
}

/// The same over the tensors of all stages. `walk` shows the keys of each tensor of this one, in whatever order, and must show
/// the same ones each of the three times that it is called. Ties go to the earlier tensor, wherever it is.
pub fn best_of_stages(
    stages: &Stages<'_>,
    keep: usize,
    mut walk: impl FnMut(&mut See<'_>) -> crate::Result<()>,
) -> crate::Result<Vec<Words>> {
    let tensors = stages.places.len();
    let mut high = Histogram::default();
    walk(&mut |i, keys| {
        if stages.speaks[i] {
            high.add(&keys, |key| Some((key >> 16) as usize));
        }
        Ok(())
    })?;
    let (digit, above) = high.over(stages)?.holder_of(keep);
    // By tensor, since how many of each are at the threshold must be known too: a quarter of a megabyte each.
    let mut low: Vec<Vec<u32>> = vec![Vec::new(); tensors];
    let mut sum = Histogram::default();
    walk(&mut |i, keys| {
        if stages.speaks[i] {
            let mut own = Histogram::default();
            own.add(&keys, |key| (key >> 16 == digit).then_some((key & 0xffff) as usize));
            sum.0.iter_mut().zip(&own.0).for_each(|(sum, n)| *sum += n);
            low[i] = own.0.into_iter().map(|n| u32::try_from(n).unwrap_or(u32::MAX)).collect();
        }
        Ok(())
    })?;
    let (rest, above_low) = sum.over(stages)?.holder_of(keep - above);
    let threshold = digit << 16 | rest;
    // As many of those at the threshold as are still missing, the first ones.
    let missing = keep - above - above_low;
    let mut at_threshold = vec![0; stages.all];
    for (place, counts) in stages.places.iter().zip(&low) {
        at_threshold[*place] = counts.get(rest as usize).map_or(0, |n| u64::from(*n));
    }
    drop(low);
    let at_threshold = (stages.sum)(at_threshold)?;
    let mut words = vec![Words::new(); tensors];
    walk(&mut |i, keys| {
        let before: u64 = at_threshold[..stages.places[i]].iter().sum();
        words[i] = at_least(&keys, threshold, &mut missing.saturating_sub(before as usize));
        Ok(())
    })?;
    Ok(words)
}

/// Keeps the `keep` places with the largest keys of one tensor.
pub fn best(keys: &[u32], keep: usize) -> Words {
    let mut high = Histogram::default();
    high.add(keys, |key| Some((key >> 16) as usize));
    let (digit, above) = high.holder_of(keep);
    let mut low = Histogram::default();
    low.add(keys, |key| (key >> 16 == digit).then_some((key & 0xffff) as usize));
    let (rest, above_low) = low.holder_of(keep - above);
    at_least(keys, digit << 16 | rest, &mut (keep - above - above_low))
}

/// How many keys have each value of a digit.
struct Histogram(Vec<u64>);

impl Default for Histogram {
    fn default() -> Self {
        Histogram(vec![0; 1 << 16])
    }
}

impl Histogram {
    fn add(&mut self, keys: &[u32], digit: impl Fn(u32) -> Option<usize> + Sync) {
        let count = |part: &[u32]| {
            let mut counts = vec![0u64; 1 << 16];
            for digit in part.iter().filter_map(|key| digit(*key)) {
                counts[digit] += 1;
            }
            counts
        };
        let parts: Vec<Vec<u64>> = keys.par_chunks(1 << 22).map(count).collect();
        for part in parts {
            self.0.iter_mut().zip(part).for_each(|(sum, n)| *sum += n);
        }
    }

    /// Of the keys of all stages.
    fn over(self, stages: &Stages<'_>) -> crate::Result<Histogram> {
        Ok(Histogram((stages.sum)(self.0)?))
    }

    /// The digit of the `keep`-th largest key, and how many keys have a larger one. Above every digit where none is
    /// kept, so that nothing reaches the threshold.
    fn holder_of(&self, keep: usize) -> (u32, usize) {
        let mut above = 0;
        for (digit, count) in self.0.iter().enumerate().rev() {
            if above + *count as usize >= keep {
                return (digit as u32, above);
            }
            above += *count as usize;
        }
        panic!("{keep} were to be kept of {above}");
    }
}

/// The places of all keys above the threshold, and of the first `ties` at it.
fn at_least(keys: &[u32], threshold: u32, ties: &mut usize) -> Words {
    const PART: usize = 1 << 20;
    let equal: Vec<usize> =
        keys.par_chunks(PART).map(|part| part.iter().filter(|key| **key == threshold).count()).collect();
    let allowed: Vec<usize> = equal
        .iter()
        .map(|count| {
            let now = (*ties).min(*count);
            *ties -= now;
            now
        })
        .collect();
    let mut words = vec![0u32; keys.len().div_ceil(32)];
    words.par_chunks_mut(PART / 32).zip(keys.par_chunks(PART)).zip(allowed).for_each(
        |((words, keys), mut ties)| {
            for (i, key) in keys.iter().enumerate() {
                let tie = *key == threshold && ties > 0;
                if tie {
                    ties -= 1;
                }
                if tie || *key > threshold {
                    words[i / 32] |= 1 << (i % 32);
                }
            }
        },
    );
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use espalier_tensor::mask::ones;
    use proptest::prelude::*;

    #[test]
    fn keys_have_the_order_of_scores() {
        let scores = [f32::NAN, f32::NEG_INFINITY, -2.0, -1e-40, 0.0, 1e-40, 0.5, 3.0, f32::INFINITY];
        assert!(scores.windows(2).all(|pair| key(pair[0]) < key(pair[1])));
        assert_eq!(key(-0.0), key(0.0));
    }

    proptest! {
        /// Against a sort, with many ties, over several tensors.
        #[test]
        fn the_best_are_those_of_a_stable_sort(
            tensors in prop::collection::vec(prop::collection::vec(-6i8..6, 0..80), 1..5),
            share in 0.0f64..=1.0,
        ) {
            let keys: Vec<Vec<u32>> =
                tensors.iter().map(|t| t.iter().map(|x| key(f32::from(*x) / 3.0)).collect()).collect();
            let total: usize = keys.iter().map(Vec::len).sum();
            let keep = (share * total as f64) as usize;
            let mut all: Vec<(usize, usize)> =
                keys.iter().enumerate().flat_map(|(t, k)| (0..k.len()).map(move |i| (t, i))).collect();
            all.sort_by_key(|&(t, i)| std::cmp::Reverse(keys[t][i]));
            all.truncate(keep);
            all.sort();
            let chosen = best_of_all(keys.len(), keep, |i| Ok(keys[i].clone())).unwrap();
            let places: Vec<(usize, usize)> =
                chosen.iter().enumerate().flat_map(|(t, words)| ones(words).map(move |i| (t, i))).collect();
            prop_assert_eq!(places, all);
            // Two stages, the first tensor on both: each asks for the sums of its own histograms and the other's.
            if keys.len() > 1 {
                let cut = keys.len() / 2;
                let (here, there) = (std::sync::mpsc::channel(), std::sync::mpsc::channel());
                let stage = |own: Vec<usize>, speaks: Vec<bool>, give: std::sync::mpsc::Sender<Vec<u64>>, take: std::sync::mpsc::Receiver<Vec<u64>>| {
                    let sum = move |counts: Vec<u64>| {
                        give.send(counts.clone()).unwrap();
                        Ok(take.recv().unwrap().iter().zip(counts).map(|(a, b)| a + b).collect())
                    };
                    let stages = Stages { places: own.clone(), speaks, all: keys.len(), sum: &sum };
                    best_of_stages(&stages, keep, one_by_one(own.len(), |i| Ok(keys[own[i]].clone()))).unwrap()
                };
                let second: Vec<usize> = [0].into_iter().chain(cut..keys.len()).collect();
                let first: Vec<usize> = (0..cut).collect();
                let mut speaks = vec![true; second.len()];
                speaks[0] = cut == 0;
                let second = if cut == 0 { second[1..].to_vec() } else { second };
                let (a, b) = std::thread::scope(|scope| {
                    let other = scope.spawn(|| stage(second.clone(), speaks, there.0, here.1));
                    (stage(first.clone(), vec![true; cut], here.0, there.1), other.join().unwrap())
                });
                for (place, words) in first.iter().zip(a).chain(second.iter().zip(b)) {
                    prop_assert_eq!(&words, &chosen[*place]);
                }
            }
            for keys in &keys {
                let keep = (share * keys.len() as f64) as usize;
                prop_assert_eq!(best(keys, keep), best_of_all(1, keep, |_| Ok(keys.clone())).unwrap().remove(0));
            }
        }
    }
}
