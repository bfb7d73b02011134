//! The non-linear functions between layers.

use crate::cpu::math;

/// Which function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// max(x, 0).
    Relu,
    /// GPT-2's form: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
    Gelu,
    /// x / (1 + e^-x).
    Silu,
}

impl Activation {
    /// Its value at `x`.
    #[inline(always)]
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Activation::Relu => {
                if x < 0.0 {
                    0.0
                } else {
                    x
                }
            }
            Activation::Gelu => {
                const ROOT: f32 = 0.797_884_6;
                let inner = ROOT * (0.044715 * x * x).mul_add(x, x);
                0.5 * x * (1.0 + math::tanh(inner))
            }
            Activation::Silu => x * math::sigmoid(x),
        }
    }
}
