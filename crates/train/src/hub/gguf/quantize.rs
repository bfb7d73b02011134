//! The types that numbers of a GGUF file have, and how weights become them.
//!
//! Q8_0 and Q4_0 take 32 weights of a row at a time: one scale `d` in f16, and a small whole number for each
//! weight. They follow the reference of ggml (`quantize_row_q8_0_ref`, `quantize_row_q4_0_ref`), operation by
//! operation in f32, so that a file is the same to the bit as one that llama.cpp's own tools would write:
//! the scale that divides is not yet rounded to f16, and the division is a product with its reciprocal.

use espalier_tensor::{bf16, f16};
use rayon::prelude::*;

/// Weights that share a scale.
pub(super) const BLOCK: usize = 32;
/// Blocks that a thread takes at a time.
const BLOCKS_AT_ONCE: usize = 2048;

/// What the weights of a GGUF file are stored in. Vectors, norms and positions are f32 in all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgufType {
    /// Four bytes.
    F32,
    /// Two bytes, more exact than bf16, up to 65504.
    F16,
    /// Two bytes, with the range of f32.
    Bf16,
    /// 32 weights in 34 bytes: a scale, and whole numbers of 8 bits.
    Q8_0,
    /// 32 weights in 18 bytes: a scale, and whole numbers of 4 bits.
    Q4_0,
}

impl GgufType {
    /// Its name, its number in the table of tensors, `general.file_type` of a file most of whose weights are of
    /// this type, and the bytes of [`BLOCK`] weights.
    fn row(self) -> (&'static str, u32, u32, usize) {
        match self {
            GgufType::F32 => ("f32", 0, 0, 4 * BLOCK),
            GgufType::F16 => ("f16", 1, 1, 2 * BLOCK),
            GgufType::Bf16 => ("bf16", 30, 32, 2 * BLOCK),
            GgufType::Q8_0 => ("q8_0", 8, 7, 34),
            GgufType::Q4_0 => ("q4_0", 2, 2, 18),
        }
    }

    /// As `--type` has it.
    pub fn name(self) -> &'static str {
        self.row().0
    }

    pub(super) fn code(self) -> u32 {
        self.row().1
    }

    pub(super) fn file_type(self) -> u32 {
        self.row().2
    }

    /// Whether weights share a scale, so that a row must be a multiple of [`BLOCK`].
    pub(super) fn is_quantized(self) -> bool {
        matches!(self, GgufType::Q8_0 | GgufType::Q4_0)
    }

    /// Bytes of so many weights.
    pub(super) fn bytes(self, elements: usize) -> usize {
        elements * self.row().3 / BLOCK
    }
}

/// Finite weights in a type, whole rows of them; none where one is beyond what f16 holds.
pub(super) fn quantize(weights: &[f32], dtype: GgufType) -> Option<Vec<u8>> {
    let half = |weight: f32| Some(f16::from_f32(weight)).filter(|half| half.is_finite());
    match dtype {
        GgufType::F32 => Some(weights.iter().flat_map(|weight| weight.to_le_bytes()).collect()),
        GgufType::Bf16 => {
            Some(weights.iter().flat_map(|weight| bf16::from_f32(*weight).to_le_bytes()).collect())
        }
        GgufType::F16 => {
            let mut bytes = Vec::with_capacity(2 * weights.len());
            for weight in weights {
                bytes.extend(half(*weight)?.to_le_bytes());
            }
            Some(bytes)
        }
        GgufType::Q8_0 => blocks(weights, |block, out| {
            let largest = block.iter().fold(0.0, |most: f32, weight| most.max(weight.abs()));
            let scale = largest / 127.0;
            out.extend(half(scale)?.to_le_bytes());
            let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
            // `round` is half away from zero, as C's `roundf`.
            out.extend(block.iter().map(|weight| (weight * inverse).round() as i8 as u8));
            Some(())
        }),
        GgufType::Q4_0 => {
            blocks(weights, |block, out| {
                // The first of those that are furthest from zero, with its sign: it becomes -8.
                let largest = block
                    .iter()
                    .fold(0.0_f32, |most, weight| if weight.abs() > most.abs() { *weight } else { most });
                let scale = largest / -8.0;
                out.extend(half(scale)?.to_le_bytes());
                let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
                let four_bits = |weight: f32| ((weight * inverse + 8.5) as u8).min(15);
                let (low, high) = block.split_at(BLOCK / 2);
                out.extend(low.iter().zip(high).map(|(low, high)| four_bits(*low) | (four_bits(*high) << 4)));
                Some(())
            })
        }
    }
}

/// Every block of 32 in order, by all threads.
fn blocks(
    weights: &[f32],
    write: impl Fn(&[f32; BLOCK], &mut Vec<u8>) -> Option<()> + Sync,
) -> Option<Vec<u8>> {
    let (blocks, rest) = weights.as_chunks::<BLOCK>();
    assert!(rest.is_empty(), "rows are whole blocks");
    let written: Option<Vec<Vec<u8>>> = blocks
        .par_chunks(BLOCKS_AT_ONCE)
        .map(|some| {
            let mut out = Vec::new();
            some.iter().try_for_each(|block| write(block, &mut out))?;
            Some(out)
        })
        .collect();
    written.map(|parts| parts.concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: blocks of which every number can be checked.
    #[test]
    fn a_block_has_a_scale_and_whole_numbers() {
        let mut block = [0.0_f32; BLOCK];
        assert_eq!(quantize(&block, GgufType::Q8_0).unwrap(), [0; 34]);
        // A scale of zero divides nothing: all are at 8.5, the middle.
        let zeros = quantize(&block, GgufType::Q4_0).unwrap();
        assert_eq!(&zeros[2..], [0x88; 16]);
        (block[0], block[1], block[31]) = (127.0, -1.5, 2.4);
        let eight = quantize(&block, GgufType::Q8_0).unwrap();
        assert_eq!(eight[..4], [0x00, 0x3c, 127, (-2_i8) as u8]);
        assert_eq!(eight[33], 2);
        (block[0], block[1], block[31]) = (-8.0, 7.0, 3.0);
        let four = quantize(&block, GgufType::Q4_0).unwrap();
        // The scale is 1: -8 is 0, 7 is 15, 3 is 11 in the upper half, and 0 is 8.
        assert_eq!(four[..4], [0x00, 0x3c, 0x80, 0x8f]);
        assert_eq!(four[17], 0xb8);
    }

    #[test]
    fn what_f16_cannot_hold_is_none() {
        let mut block = [0.0_f32; BLOCK];
        block[3] = 70_000.0;
        assert_eq!(quantize(&block, GgufType::F16), None);
        for dtype in [GgufType::F32, GgufType::Bf16, GgufType::Q8_0, GgufType::Q4_0] {
            let bytes = quantize(&block, dtype).unwrap();
            assert_eq!(bytes.len(), dtype.bytes(BLOCK), "{}", dtype.name());
        }
        block[3] = 1e9;
        assert_eq!(quantize(&block, GgufType::Q8_0), None);
        assert_eq!(quantize(&block, GgufType::Q4_0), None);
    }
}
