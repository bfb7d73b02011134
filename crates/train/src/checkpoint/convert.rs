//! Numbers of one precision as those of another: widened exactly, or rounded to the nearest.

use espalier_tensor::{bf16, f16};
use safetensors::tensor::Dtype;

/// Whether numbers of a type can be had in another one.
pub(super) fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16)
}

/// Numbers of one type in another, little-endian both. Those that are of the type already stay as they are.
pub(crate) fn convert(bytes: Vec<u8>, from: Dtype, to: Dtype) -> Vec<u8> {
    if from == to {
        return bytes;
    }
    let two = || bytes.as_chunks::<2>().0.iter();
    match from {
        Dtype::F32 => rounded(bytes.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)), to),
        Dtype::BF16 => rounded(two().map(|two| bf16::from_le_bytes(*two).to_f32()), to),
        Dtype::F16 => rounded(two().map(|two| f16::from_le_bytes(*two).to_f32()), to),
        other => unreachable!("{other:?} is not converted"),
    }
}

fn rounded(numbers: impl Iterator<Item = f32>, to: Dtype) -> Vec<u8> {
    match to {
        Dtype::F32 => numbers.flat_map(f32::to_le_bytes).collect(),
        Dtype::BF16 => numbers.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
        Dtype::F16 => numbers.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
        other => unreachable!("nothing is converted to {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_widened_exactly_and_rounded_to_the_nearest() {
        let f32s = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let values = f32s(&[1.0, -0.5, 65504.0, 1.0 + 1.0 / 1024.0]);
        for half in [Dtype::F16, Dtype::BF16] {
            let narrow = convert(values.clone(), Dtype::F32, half);
            assert_eq!(narrow.len(), 8);
            assert_eq!(convert(convert(narrow.clone(), half, Dtype::F32), Dtype::F32, half), narrow);
        }
        assert_eq!(
            convert(convert(values.clone(), Dtype::F32, Dtype::F16), Dtype::F16, Dtype::F32),
            values,
            "all of them are numbers of f16"
        );
        let between = convert(f32s(&[1.0 + 3.0 / 256.0]), Dtype::F32, Dtype::BF16);
        assert_eq!(between, bf16::from_f32(1.015_625).to_le_bytes(), "ties go to the even one");
    }
}
