//! Which weights of a tensor are kept: one bit a weight with a directory of ranks, or the indices of the kept
//! ones.
//!
//! Bits cost 1/8 byte a weight and a 128th for the directory, whatever is kept; indices cost 4 bytes a kept
//! weight, which is less once fewer than about 3.3 % are kept. The smaller form is chosen. *Compressed*
//! means: the kept elements alone, in the order of their indices in the flattened tensor.

use std::ops::Range;

use crate::cpu::CHUNK;
use crate::device::Device;
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;

/// Weights of one entry of the directory.
pub(crate) const BLOCK: usize = 512;
/// Weights that a thread of the host takes at once.
const SPAN: usize = 128 * BLOCK;

/// The kept elements of a tensor, on its device. Clones share the memory.
#[derive(Debug, Clone)]
pub struct Mask {
    len: usize,
    kept: usize,
    form: MaskStorage,
}

/// How a mask is stored.
#[derive(Debug, Clone)]
pub enum MaskStorage {
    /// Bit `i % 32` of word `i / 32` says whether weight `i` is kept; `ranks[b]` counts the kept ones before
    /// block `b`.
    Bits {
        /// u32 `[ceil(len / 32)]`; bits past the end are zero.
        words: Tensor,
        /// u32 `[ceil(len / BLOCK)]`.
        ranks: Tensor,
    },
    /// The kept indices, ascending: where few are kept.
    Indices(Tensor),
}

impl MaskStorage {
    /// The name printed for people.
    pub fn name(&self) -> &'static str {
        match self {
            MaskStorage::Bits { .. } => "bits",
            MaskStorage::Indices(_) => "index",
        }
    }
}

impl Mask {
    /// The mask of a tensor of `len` weights whose bits are `words`; those past the end must be zero.
    pub fn new(device: &Device, len: usize, words: &[u32]) -> Result<Mask> {
        Mask::within(device, len, words, Category::Mask)
    }

    /// The same, counted under another category: one that is dropped at once, or has yet to replace an older one.
    pub fn within(device: &Device, len: usize, words: &[u32], category: Category) -> Result<Mask> {
        let kept = words.iter().map(|word| word.count_ones() as usize).sum();
        if 4 * kept < Mask::bytes_as_bits(len) {
            let indices: Vec<u32> = ones(words).map(|index| index as u32).collect();
            let indices = Tensor::from_slice(device, &[kept], &indices, category)?;
            return Ok(Mask { len, kept, form: MaskStorage::Indices(indices) });
        }
        Mask::bits_within(device, len, words, category)
    }

    /// Counts it as a mask that stays. This must be its only owner.
    pub fn tag_memory(&mut self) {
        match &mut self.form {
            MaskStorage::Bits { words, ranks } => {
                words.tag_memory(Category::Mask);
                ranks.tag_memory(Category::Mask);
            }
            MaskStorage::Indices(indices) => indices.tag_memory(Category::Mask),
        }
    }

    /// As [`Mask::new`], always with one bit a weight.
    #[cfg(test)]
    pub(crate) fn as_bits(device: &Device, len: usize, words: &[u32]) -> Result<Mask> {
        Mask::bits_within(device, len, words, Category::Mask)
    }

    fn bits_within(device: &Device, len: usize, words: &[u32], category: Category) -> Result<Mask> {
        assert_eq!(words.len(), len.div_ceil(32), "a mask of {len} weights");
        assert!(len <= u32::MAX as usize, "a mask of more weights than 32 bits can count");
        if let Some(last) = words.last().filter(|_| !len.is_multiple_of(32)) {
            assert_eq!(last >> (len % 32), 0, "a mask with bits past its end");
        }
        let mut kept = 0;
        let rank = |block: &[u32]| {
            let before = kept;
            kept += block.iter().map(|word| word.count_ones()).sum::<u32>();
            before
        };
        let ranks: Vec<u32> = words.chunks(BLOCK / 32).map(rank).collect();
        let form = MaskStorage::Bits {
            words: Tensor::from_slice(device, &[words.len()], words, category)?,
            ranks: Tensor::from_slice(device, &[ranks.len()], &ranks, category)?,
        };
        Ok(Mask { len, kept: kept as usize, form })
    }

    /// Weights, kept or not.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no weights.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn kept(&self) -> usize {
        self.kept
    }

    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let (first, second) = match &self.form {
            MaskStorage::Bits { words, ranks } => (words, Some(ranks)),
            MaskStorage::Indices(indices) => (indices, None),
        };
        [first].into_iter().chain(second)
    }

    pub fn form(&self) -> &MaskStorage {
        &self.form
    }

    pub fn bytes(&self) -> usize {
        match &self.form {
            MaskStorage::Bits { words, ranks } => words.byte_len() + ranks.byte_len(),
            MaskStorage::Indices(indices) => indices.byte_len(),
        }
    }

    /// Bytes of a mask of `len` weights, `kept` of them, in the smaller form.
    #[cfg(test)]
    pub(crate) fn bytes_for(len: usize, kept: usize) -> usize {
        Mask::bytes_as_bits(len).min(4 * kept)
    }

    fn bytes_as_bits(len: usize) -> usize {
        4 * (len.div_ceil(32) + len.div_ceil(BLOCK))
    }

    /// Its bits, on the host. What a GPU failed at before shows here.
    pub fn read_words(&self) -> Result<Vec<u32>> {
        Ok(match &self.form {
            MaskStorage::Bits { words, .. } => words.read_u32()?,
            MaskStorage::Indices(indices) => {
                let mut words = vec![0u32; self.len.div_ceil(32)];
                for index in indices.read_u32()? {
                    words[index as usize / 32] |= 1 << (index % 32);
                }
                words
            }
        })
    }

    /// As [`Mask::read_words`], for tests and tools to which a broken GPU is the end.
    ///
    /// # Panics
    /// Where the GPU failed in work queued before.
    pub fn words(&self) -> Vec<u32> {
        self.read_words().unwrap_or_else(|e| panic!("{e}"))
    }

    /// The device it is on.
    pub fn device(&self) -> Device {
        match &self.form {
            MaskStorage::Bits { words, .. } => words.device(),
            MaskStorage::Indices(indices) => indices.device(),
        }
    }

    /// Splits the weights into spans for the threads of the host: by sizes alone, so that sums over them repeat.
    pub(crate) fn spans(&self) -> Vec<KeptSpan> {
        match &self.form {
            MaskStorage::Bits { ranks, .. } => {
                let ranks = ranks.slice::<u32>();
                let rank = |index: usize| ranks.get(index / BLOCK).map_or(self.kept, |rank| *rank as usize);
                let span = |i: usize| {
                    let (start, end) = (i * SPAN, ((i + 1) * SPAN).min(self.len));
                    let last = if end == self.len { self.kept } else { rank(end) };
                    KeptSpan { dense: start..end, kept: rank(start)..last }
                };
                (0..self.len.div_ceil(SPAN)).map(span).collect()
            }
            MaskStorage::Indices(indices) => {
                let indices = indices.slice::<u32>();
                let begin =
                    |k: usize| if k == 0 { 0 } else { indices.get(k).map_or(self.len, |p| *p as usize) };
                let span = |i: usize| {
                    let kept = i * CHUNK..((i + 1) * CHUNK).min(self.kept);
                    let end = if kept.end == self.kept { self.len } else { begin(kept.end) };
                    KeptSpan { dense: begin(kept.start)..end, kept }
                };
                (0..self.kept.div_ceil(CHUNK).max(1)).map(span).collect()
            }
        }
    }

    /// Calls `visit(k, p)` for each kept weight of a span, in order: its index among the span's kept ones,
    /// and among all of the span's weights.
    #[inline(always)]
    pub(crate) fn each(&self, span: &KeptSpan, mut visit: impl FnMut(usize, usize)) {
        match &self.form {
            MaskStorage::Bits { words, .. } => {
                let words = &words.slice::<u32>()[span.dense.start / 32..span.dense.end.div_ceil(32)];
                for (k, index) in ones(words).enumerate() {
                    visit(k, index);
                }
            }
            MaskStorage::Indices(indices) => {
                for (k, index) in indices.slice::<u32>()[span.kept.clone()].iter().enumerate() {
                    visit(k, *index as usize - span.dense.start);
                }
            }
        }
    }

    /// Calls `visit(k, p)` for the kept weights of these numbers, in order: its number counted from the first
    /// of them, and its index among all weights.
    #[inline(always)]
    pub(crate) fn each_number(&self, numbers: Range<usize>, mut visit: impl FnMut(usize, usize)) {
        match &self.form {
            _ if numbers.is_empty() => {}
            MaskStorage::Bits { words, ranks } => {
                // The last block before which there are not more.
                let ranks = ranks.slice::<u32>();
                let block = ranks.partition_point(|rank| *rank as usize <= numbers.start) - 1;
                let (skipped, first) = (numbers.start - ranks[block] as usize, block * BLOCK);
                let kept = ones(&words.slice::<u32>()[first / 32..]).skip(skipped).take(numbers.len());
                kept.enumerate().for_each(|(k, index)| visit(k, first + index));
            }
            MaskStorage::Indices(indices) => {
                let kept = indices.slice::<u32>()[numbers].iter().enumerate();
                kept.for_each(|(k, index)| visit(k, *index as usize));
            }
        }
    }
}

/// A range of weights, and the range that its kept ones take in a compressed tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KeptSpan {
    pub(crate) dense: Range<usize>,
    pub(crate) kept: Range<usize>,
}

/// The indices of the bits that are set.
pub fn ones(words: &[u32]) -> impl Iterator<Item = usize> {
    words.iter().enumerate().flat_map(|(i, &word)| {
        let mut rest = word;
        std::iter::from_fn(move || {
            let index = (rest != 0).then(|| 32 * i + rest.trailing_zeros() as usize);
            rest &= rest.wrapping_sub(1);
            index
        })
    })
}

/// Copies `bits` bits of 32-bit words, counted from the lowest of the first one, to where there are zeros.
pub fn copy_bits(from: &[u32], mut first: usize, into: &mut [u32], mut to: usize, mut bits: usize) {
    while bits > 0 {
        // As many as there are left in both words.
        let some = bits.min(32 - first % 32).min(32 - to % 32);
        let low = u32::MAX >> (32 - some);
        into[to / 32] |= (from[first / 32] >> (first % 32) & low) << (to % 32);
        (first, to, bits) = (first + some, to + some, bits - some);
    }
}

/// Splits a slice at ranges that follow each other from its beginning to its end.
pub(crate) fn split_at_ranges<T>(
    mut slice: &mut [T],
    ranges: impl IntoIterator<Item = Range<usize>>,
) -> Vec<&mut [T]> {
    let mut slices = Vec::new();
    for range in ranges {
        slices.push(slice.split_off_mut(..range.len()).expect("ranges within the slice"));
    }
    assert!(slice.is_empty(), "ranges that cover the slice");
    slices
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{devices, mask_words};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn both_forms_name_the_same_indices(len in 0usize..200_000, fraction in 0.0f64..1.0, seed: u64) {
            let words = mask_words(seed, len, fraction);
            let expected: Vec<usize> = (0..len).filter(|i| words[i / 32] >> (i % 32) & 1 == 1).collect();
            for [device, ..] in devices() {
                for mask in [Mask::new(device, len, &words).unwrap(), Mask::as_bits(device, len, &words).unwrap()] {
                    prop_assert_eq!(mask.kept(), expected.len());
                    prop_assert_eq!(mask.words(), words.clone());
                    if matches!(device, Device::Cuda(_)) {
                        continue;
                    }
                    let mut indices = Vec::new();
                    let (mut dense, mut kept) = (0, 0);
                    for span in mask.spans() {
                        prop_assert_eq!((span.dense.start, span.kept.start), (dense, kept));
                        (dense, kept) = (span.dense.end, span.kept.end);
                        mask.each(&span, |k, p| {
                            assert_eq!(indices.len(), span.kept.start + k);
                            indices.push(span.dense.start + p);
                        });
                    }
                    for numbers in [0..kept, kept / 3..kept / 2, kept / 2..kept, kept..kept] {
                        let mut some = Vec::new();
                        mask.each_number(numbers.clone(), |k, p| {
                            assert_eq!(k, some.len());
                            some.push(p);
                        });
                        prop_assert_eq!(&some[..], &expected[numbers]);
                    }
                    prop_assert_eq!(kept, expected.len());
                    prop_assert!(dense == len || len == 0);
                    prop_assert_eq!(&indices, &expected);
                }
            }
        }
    }

    #[test]
    fn the_smaller_form_is_chosen_and_counted() {
        // Its own, whose ledger no other test writes to.
        let device = &Device::cpu(1).unwrap();
        let len = 512 * 100;
        for fraction in [0.0, 0.01, 0.03, 0.04, 0.1, 1.0] {
            let mask = Mask::new(device, len, &mask_words(1, len, fraction)).unwrap();
            assert_eq!(mask.bytes(), Mask::bytes_for(len, mask.kept()));
            assert_eq!(mask.form().name(), if fraction < 0.0332 { "index" } else { "bits" }, "{fraction}");
        }
        // 1/8 byte a weight and 1/128 for the directory.
        assert_eq!(Mask::bytes_for(len, len), len / 8 + len / 128);
        let mask = Mask::new(device, len, &mask_words(1, len, 0.1)).unwrap();
        assert_eq!(device.ledger().current(Category::Mask), mask.bytes());
    }

    #[test]
    fn bits_are_copied_one_by_one() {
        let from = [0x9e37_79b9u32, 0x7f4a_7c15, 0xf39c_c060];
        let bit = |words: &[u32], i: usize| words[i / 32] >> (i % 32) & 1;
        let cases = [(0, 0, 96), (3, 0, 64), (0, 5, 64), (31, 33, 40), (7, 7, 1), (64, 0, 32), (9, 9, 0)];
        for (first, to, bits) in cases {
            let mut into = [0; 4];
            copy_bits(&from, first, &mut into, to, bits);
            for i in 0..128 {
                let expected = if (to..to + bits).contains(&i) { bit(&from, i - to + first) } else { 0 };
                assert_eq!(bit(&into, i), expected, "bit {i} of {bits} from {first} to {to}");
            }
        }
    }
}
