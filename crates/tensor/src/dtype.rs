//! Element types. Arithmetic is always done in f32; [`Float`] is how a stored element becomes one and back.

use half::bf16;

/// The type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    F32,
    /// The upper half of an f32: the same range, 8 bits of precision.
    Bf16,
    /// The lower halves of f32 numbers whose upper halves are bf16 weights.
    U16,
    /// Token ids, labels, indices.
    U32,
    /// Pixels of images as they are stored.
    U8,
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            DType::F32 | DType::U32 => 4,
            DType::Bf16 | DType::U16 => 2,
            DType::U8 => 1,
        }
    }

    /// One of two things, by which of the floating types it is.
    #[track_caller]
    pub(crate) fn by_float<T>(self, f32: T, bf16: T) -> T {
        match self {
            DType::F32 => f32,
            DType::Bf16 => bf16,
            other => panic!("a floating-point tensor was expected, got {other:?}"),
        }
    }
}

/// A Rust type that a tensor can hold.
pub trait Element: bytemuck::Pod + Send + Sync + PartialEq + std::fmt::Debug {
    /// The type as a value.
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for bf16 {
    const DTYPE: DType = DType::Bf16;
}
impl Element for u16 {
    const DTYPE: DType = DType::U16;
}
impl Element for u32 {
    const DTYPE: DType = DType::U32;
}
impl Element for u8 {
    const DTYPE: DType = DType::U8;
}

/// An element that stands for a real number.
pub trait Float: Element {
    /// Widens to f32, exactly.
    fn to_f32(self) -> f32;
    /// Rounds to the nearest, ties to even.
    fn from_f32(x: f32) -> Self;
}

impl Float for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Float for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }
    /// Branch-free, so that loops over it vectorise; a NaN stays a NaN.
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x40;
        bf16::from_bits(if x.is_nan() { quiet } else { rounded } as u16)
    }
}

/// Runs a body with `$t` standing for the Rust type of a floating [`DType`].
///
/// The set of float types is closed, so this is a `match`, not a trait object: the body is compiled once per type.
#[macro_export]
macro_rules! with_float {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                type $t = f32;
                $body
            }
            $crate::DType::Bf16 => {
                type $t = $crate::bf16;
                $body
            }
            other => panic!("a floating-point tensor was expected, got {other:?}"),
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounding_agrees_with_the_half_crate() {
        for i in 0..2_000_000u32 {
            let x = f32::from_bits(i.wrapping_mul(2147));
            let (ours, theirs) = (<bf16 as Float>::from_f32(x), bf16::from_f32(x));
            assert!(ours == theirs || (ours.is_nan() && theirs.is_nan()), "{x}: {ours} {theirs}");
        }
    }
}
