//! The best of many, exactly: so many places, ties going to the earlier one, so that every rank agrees.
//!
//! The k-th largest key is found digit by digit from two histograms, which the device makes. Keys are shown three times instead
//! of being held, as a model's may be larger than what is free.

use espalier_tensor::Tensor;
use espalier_tensor::ops::select::{DIGITS, Digit, at_least, histogram};

/// The bits of a mask, one a weight.
pub type Words = Vec<u32>;

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
            high.add(&histogram(&keys, Digit::High)?);
        }
        Ok(())
    })?;
    let (digit, above) = high.over(stages)?.holder_of(keep);
    // By tensor, since how many of each are at the threshold must be known too: a quarter of a megabyte each.
    let mut low: Vec<Vec<u32>> = vec![Vec::new(); tensors];
    let mut sum = Histogram::default();
    walk(&mut |i, keys| {
        if stages.speaks[i] {
            let own = histogram(&keys, Digit::LowOf(digit))?;
            sum.add(&own);
            low[i] = own.into_iter().map(|n| u32::try_from(n).unwrap_or(u32::MAX)).collect();
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
        words[i] = at_least(&keys, threshold, missing.saturating_sub(before as usize))?;
        Ok(())
    })?;
    Ok(words)
}

/// Keeps the `keep` places with the largest keys of one tensor.
pub fn best(keys: &Tensor, keep: usize) -> crate::Result<Words> {
    let (digit, above) = Histogram(histogram(keys, Digit::High)?).holder_of(keep);
    let (rest, above_low) = Histogram(histogram(keys, Digit::LowOf(digit))?).holder_of(keep - above);
    Ok(at_least(keys, digit << 16 | rest, keep - above - above_low)?)
}

/// How many keys have each value of a digit.
struct Histogram(Vec<u64>);

impl Default for Histogram {
    fn default() -> Self {
        Histogram(vec![0; DIGITS])
    }
}

impl Histogram {
    fn add(&mut self, counts: &[u64]) {
        self.0.iter_mut().zip(counts).for_each(|(sum, n)| *sum += n);
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

#[cfg(test)]
mod tests {
    use super::*;
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
        let stages =
            Stages { places: (0..tensors).collect(), speaks: vec![true; tensors], all: tensors, sum: &Ok };
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
                let stage = |own: Vec<usize>, speaks: Vec<bool>, give: std::sync::mpsc::Sender<Vec<u64>>, take: std::sync::mpsc::Receiver<Vec<u64>>| {
                    let sum = move |counts: Vec<u64>| {
                        give.send(counts.clone()).unwrap();
                        Ok(take.recv().unwrap().iter().zip(counts).map(|(a, b)| a + b).collect())
                    };
                    let stages = Stages { places: own.clone(), speaks, all: keys.len(), sum: &sum };
                    best_of_stages(&stages, keep, one_by_one(own.len(), |i| Ok(tensor(&keys[own[i]])))).unwrap()
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
                prop_assert_eq!(best(&tensor(keys), keep).unwrap(), best_of_all(1, keep, |_| Ok(tensor(keys))).unwrap().remove(0));
            }
        }
    }
}
