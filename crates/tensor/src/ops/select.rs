//! The best of many scores, exactly: keys, their histograms, and the mask of those above a threshold. keys:
//! u32 `[len]`.
//!
//! A key is an integer of its score's order, so that a k-th largest is found digit by digit from two
//! histograms, and devices cannot disagree about it. Counting is exact in any order: a GPU adds with atomics
//! and still repeats its bits.

pub(crate) mod cuda;

use crate::cpu::Cpu;
use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::ops::chunks::CHUNK;
use crate::ops::flat;
use crate::ops::index_runs::IndexRuns;
use crate::random;
use crate::tensor::Tensor;
use crate::with_float;

/// The key of what is out of the question, below that of any score: see [`key`].
pub const EXCLUDED: u32 = 0;
/// How many values a digit has: a key has two digits.
pub const DIGITS: usize = 1 << 16;
/// Keys that are counted at once: a histogram of its own must be worth it.
const COUNTED: usize = 1 << 22;
/// Keys among which ties are counted: a multiple of a word's bits.
const TILE: usize = 1 << 16;

/// A score as an integer: larger is better, what is not a number is worst, and nothing is as low as
/// [`EXCLUDED`].
pub fn key(score: f32) -> u32 {
    if score.is_nan() {
        return EXCLUDED + 1;
    }
    // Both zeros are one score.
    let bits = (score + 0.0).to_bits();
    if bits >> 31 == 0 { bits | 1 << 31 } else { !bits }
}

/// What of a number counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScoreOrder {
    /// Itself: the largest is best.
    Signed,
    /// How far it is from zero.
    Magnitude,
}

impl ScoreOrder {
    fn of(self, x: f32) -> f32 {
        match self {
            ScoreOrder::Signed => x,
            ScoreOrder::Magnitude => x.abs(),
        }
    }
}

/// The keys of a tensor's elements.
pub fn keys(x: &Tensor, score: ScoreOrder) -> Result<Tensor> {
    make(x, None, score)
}

/// The keys of the products of two tensors' elements, the second of f32.
pub fn product_keys(x: &Tensor, y: &Tensor, score: ScoreOrder) -> Result<Tensor> {
    assert_eq!((x.len(), y.dtype()), (y.len(), DType::F32), "keys of products");
    make(x, Some(y), score)
}

fn make(x: &Tensor, y: Option<&Tensor>, score: ScoreOrder) -> Result<Tensor> {
    let mut keys = Tensor::empty(&x.device(), &[x.len()], DType::U32, Category::Workspace)?;
    match x.device() {
        Device::Cpu(cpu) => with_float!(x.dtype(), T => {
            let (x, y) = (x.slice::<T>(), y.map(Tensor::slice::<f32>));
            cpu.for_chunks(keys.slice_mut::<u32>(), CHUNK, |at, keys| {
                let x = x[at.clone()].iter().map(|x| Float::to_f32(*x));
                match y {
                    None => keys.iter_mut().zip(x).for_each(|(k, x)| *k = key(score.of(x))),
                    Some(y) => keys.iter_mut().zip(x.zip(&y[at])).for_each(|(k, (x, y))| *k = key(score.of(x * y))),
                }
            });
        }),
        Device::Cuda(cuda) => cuda::keys(&cuda, x, y, score, &mut keys)?,
    }
    Ok(keys)
}

/// Random keys: the numbers of a stream at these indices.
pub fn random_keys(device: &Device, indices: &IndexRuns, stream: u64) -> Result<Tensor> {
    let mut keys = Tensor::empty(device, &[indices.len()], DType::U32, Category::Workspace)?;
    match device {
        Device::Cpu(cpu) => cpu.for_chunks(keys.slice_mut::<u32>(), CHUNK, |at, keys| {
            let numbers = indices.indices(at).map(|index| random::bits(stream, index));
            keys.iter_mut().zip(numbers).for_each(|(key, bits)| *key = bits.max(EXCLUDED + 1));
        }),
        Device::Cuda(cuda) => cuda::random_keys(cuda, indices, stream, &mut keys)?,
    }
    Ok(keys)
}

/// Which half of a key is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Digit {
    /// The upper one, of all keys.
    High,
    /// The lower one, of the keys whose upper half is this.
    LowOf(u32),
}

impl Digit {
    fn of(self, key: u32) -> Option<usize> {
        match self {
            Digit::High => Some((key >> 16) as usize),
            Digit::LowOf(high) => (key >> 16 == high).then_some((key & 0xffff) as usize),
        }
    }
}

/// How many keys have each value of a digit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Histogram(Vec<u64>);

impl Default for Histogram {
    fn default() -> Self {
        Histogram(vec![0; DIGITS])
    }
}

impl Histogram {
    /// From a count for each value.
    pub fn of(counts: Vec<u64>) -> Histogram {
        assert_eq!(counts.len(), DIGITS);
        Histogram(counts)
    }

    /// The count of each value.
    pub fn into_counts(self) -> Vec<u64> {
        self.0
    }

    /// The same in half the memory; a count that is too large for it is the largest.
    pub fn narrow(&self) -> Vec<u32> {
        self.0.iter().map(|count| u32::try_from(*count).unwrap_or(u32::MAX)).collect()
    }

    /// Counts other keys too.
    pub fn add(&mut self, other: &Histogram) {
        self.0.iter_mut().zip(&other.0).for_each(|(sum, count)| *sum += count);
    }

    /// The digit of the `keep`-th largest key, and how many keys have a larger one. Above every digit where
    /// none is kept, so that nothing reaches the threshold.
    pub fn holder_of(&self, keep: usize) -> (u32, usize) {
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

/// The histogram of a digit of some keys.
pub fn histogram(keys: &Tensor, digit: Digit) -> Result<Histogram> {
    match keys.device() {
        Device::Cpu(cpu) => {
            let keys = keys.slice::<u32>();
            let histograms = cpu.map_chunks(keys.len(), COUNTED, |at| {
                let mut counts = vec![0u64; DIGITS];
                keys[at].iter().filter_map(|key| digit.of(*key)).for_each(|value| counts[value] += 1);
                counts
            });
            let mut sums = Histogram::default();
            histograms.into_iter().for_each(|counted| sums.add(&Histogram(counted)));
            Ok(sums)
        }
        Device::Cuda(cuda) => cuda::histogram(&cuda, keys, digit).map(Histogram::of),
    }
}

/// The bits of a mask of all keys above a threshold and of the first `ties` at it.
pub fn at_least(keys: &Tensor, threshold: u32, ties: usize) -> Result<Vec<u32>> {
    at_least_before(keys, threshold, end_of_ties(keys, threshold, ties)?)
}

/// The bits of a mask of all keys above a threshold and of those at it before index `end`.
pub fn at_least_before(keys: &Tensor, threshold: u32, end: usize) -> Result<Vec<u32>> {
    match keys.device() {
        Device::Cpu(cpu) => {
            let keys = keys.slice::<u32>();
            let mut words = vec![0u32; keys.len().div_ceil(32)];
            cpu.for_chunks(&mut words, TILE / 32, |at, words| {
                for (word, first) in words.iter_mut().zip(at.map(|word| 32 * word)) {
                    for (bit, key) in keys[first..].iter().take(32).enumerate() {
                        let kept = *key > threshold || (*key == threshold && first + bit < end);
                        *word |= u32::from(kept) << bit;
                    }
                }
            });
            Ok(words)
        }
        Device::Cuda(cuda) => cuda::at_least(&cuda, keys, threshold, end),
    }
}

/// The index before which exactly `ties` keys equal the threshold, or all of them.
fn end_of_ties(keys: &Tensor, threshold: u32, ties: usize) -> Result<usize> {
    let counts = match keys.device() {
        Device::Cpu(cpu) => equal_by_tile(&cpu, keys.slice::<u32>(), threshold),
        Device::Cuda(cuda) => cuda::equal_by_tile(&cuda, keys, threshold)?,
    };
    let mut missing = ties;
    for (tile, count) in counts.into_iter().enumerate() {
        if count as usize <= missing {
            missing -= count as usize;
            continue;
        }
        let at = tile * TILE..((tile + 1) * TILE).min(keys.len());
        let tile = flat::take(keys, at.clone(), Category::Workspace)?.read_u32()?;
        let equal = tile.iter().enumerate().filter(|(_, key)| **key == threshold);
        let first_left_out = equal.map(|(index, _)| index).nth(missing).expect("more than are missing");
        return Ok(at.start + first_left_out);
    }
    Ok(keys.len())
}

fn equal_by_tile(cpu: &Cpu, keys: &[u32], threshold: u32) -> Vec<u32> {
    cpu.map_chunks(keys.len(), TILE, |at| keys[at].iter().filter(|key| **key == threshold).count() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{devices, indices, tensor, values};
    use proptest::prelude::*;

    #[test]
    fn keys_have_the_order_of_scores() {
        let scores = [f32::NAN, f32::NEG_INFINITY, -2.0, -1e-40, 0.0, 1e-40, 0.5, 3.0, f32::INFINITY];
        assert!(scores.windows(2).all(|pair| key(pair[0]) < key(pair[1])));
        assert_eq!(key(-0.0), key(0.0));
        assert!(key(f32::NAN) > EXCLUDED && key(-f32::NAN) > EXCLUDED);
        for device in devices().iter().flatten() {
            let made = keys(&tensor(device, DType::F32, &[3, 3], &scores), ScoreOrder::Signed).unwrap();
            assert_eq!(made.read_u32().unwrap(), scores.map(key));
            let ones = tensor(device, DType::F32, &[9], &[1.0; 9]);
            let made = product_keys(&tensor(device, DType::F32, &[9], &scores), &ones, ScoreOrder::Magnitude);
            assert_eq!(made.unwrap().read_u32().unwrap(), scores.map(|score| key(score.abs())));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        /// Against plain loops, with more keys than a tile has and with few different ones.
        #[test]
        fn counts_and_masks_are_those_of_plain_loops(
            len in 0usize..200_000, few in any::<bool>(), share in 0.0f64..1.2, seed: u64,
        ) {
            let x = values(seed, len, 1.0);
            let x: Vec<f32> = if few { x.iter().map(|x| (3.0 * x).round()).collect() } else { x };
            let y = values(seed ^ 1, len, 2.0);
            let expected: Vec<u32> = x.iter().map(|x| key(x.abs())).collect();
            let products: Vec<u32> = x.iter().zip(&y).map(|(x, y)| key(x * y)).collect();
            let threshold = expected.get(len / 2).copied().unwrap_or(7);
            let equal: Vec<usize> = (0..len).filter(|i| expected[*i] == threshold).collect();
            let ties = (share * equal.len() as f64) as usize;
            let mut bits = vec![0u32; len.div_ceil(32)];
            let above = (0..len).filter(|i| expected[*i] > threshold);
            above.chain(equal.into_iter().take(ties)).for_each(|i| bits[i / 32] |= 1 << (i % 32));
            for device in devices().iter().flatten() {
                let x = tensor(device, DType::F32, &[len], &x);
                let made = keys(&x, ScoreOrder::Magnitude).unwrap();
                prop_assert_eq!(&made.read_u32().unwrap(), &expected);
                let product = product_keys(&x, &tensor(device, DType::F32, &[len], &y), ScoreOrder::Signed).unwrap();
                prop_assert_eq!(&product.read_u32().unwrap(), &products);
                for digit in [Digit::High, Digit::LowOf(threshold >> 16)] {
                    let mut counts = vec![0u64; DIGITS];
                    expected.iter().filter_map(|key| digit.of(*key)).for_each(|value| counts[value] += 1);
                    prop_assert_eq!(histogram(&made, digit).unwrap().into_counts(), counts);
                }
                prop_assert_eq!(&at_least(&made, threshold, ties).unwrap(), &bits);
                let random = random_keys(device, &IndexRuns::full(len), seed | 1).unwrap().read_u32().unwrap();
                let stream = (0..len).map(|i| random::bits(seed | 1, i as u64).max(1));
                prop_assert_eq!(random, stream.collect::<Vec<_>>());
            }
        }
    }

    /// Rows of a matrix of which every other column is left out, among them ones of no length.
    #[test]
    fn random_keys_of_some_elements_are_those_of_the_full_vector() {
        let (rows, columns) = (300, 70);
        let runs: Vec<(usize, usize)> = (0..rows)
            .flat_map(|row| [(row * columns, 20), (row * columns + 20, 0), (row * columns + 40, row % 30)])
            .collect();
        for device in devices().iter().flatten() {
            let full = random_keys(device, &IndexRuns::full(rows * columns), 9).unwrap().read_u32().unwrap();
            let expected: Vec<u32> =
                runs.iter().flat_map(|(first, n)| full[*first..first + n].to_vec()).collect();
            let runs = IndexRuns::new(runs.iter().copied());
            assert_eq!(random_keys(device, &runs, 9).unwrap().read_u32().unwrap(), expected);
            assert!(random_keys(device, &IndexRuns::new([]), 9).unwrap().is_empty());
        }
    }

    #[test]
    fn bf16_weights_are_widened_before_they_are_scored() {
        for device in devices().iter().flatten() {
            let x = tensor(device, DType::Bf16, &[5], &[0.5, -0.25, 0.0, 1.0, -3.0]);
            let y = tensor(device, DType::F32, &[5], &[1.1, 1.1, 1.1, 1.1, 1.1]);
            let expected = [0.5f32, 0.25, 0.0, 1.0, 3.0].map(|x| key(x * 1.1));
            assert_eq!(product_keys(&x, &y, ScoreOrder::Magnitude).unwrap().read_u32().unwrap(), expected);
        }
    }

    #[test]
    fn the_first_of_those_at_the_threshold_are_taken() {
        for device in devices().iter().flatten() {
            let keys = indices(device, &[6], &[5, 9, 5, 2, 5, 5]);
            for (ties, expected) in [(0, 0b10), (1, 0b11), (3, 0b10111), (9, 0b11_0111)] {
                assert_eq!(at_least(&keys, 5, ties).unwrap(), [expected], "{ties} ties");
            }
        }
    }
}
