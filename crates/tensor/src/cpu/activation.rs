//! Activation functions of one number.
//!
//! - ReLU: y = max(x, 0)
//! - GELU, the tanh form of GPT-2: y = x/2 (1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3). Since
//!   (1 + tanh u)/2 = sigmoid(2u), it is computed as x sigmoid(2u): one exponential, no cancellation.
//! - SiLU: y = x sigmoid(x)
//! - GELU by the error function: y = x Phi(x), Phi(x) = (1 + erf(x / sqrt 2)) / 2
//! - tanh

use super::math;
use crate::dtype::Float;
use crate::simd;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ActivationFn {
    /// max(x, 0).
    Relu,
    /// x Phi(x), in its tanh form.
    Gelu,
    /// x sigmoid(x), also called swish.
    Silu,
    /// x Phi(x), by the error function.
    GeluErf,
    /// tanh x.
    Tanh,
}

/// sqrt(2/pi).
const GELU_SCALE: f32 = 0.797_884_6;
const GELU_CUBE: f32 = 0.044_715;

impl ActivationFn {
    /// f(x).
    #[inline(always)]
    pub fn apply(self, x: f32) -> f32 {
        match self {
            // This way round, a NaN passes.
            ActivationFn::Relu => {
                if x < 0.0 {
                    0.0
                } else {
                    x
                }
            }
            ActivationFn::Gelu => x * gelu_gate(x),
            ActivationFn::Silu => x * math::sigmoid(x),
            ActivationFn::GeluErf => x * normal_below(x),
            ActivationFn::Tanh => math::tanh(x),
        }
    }

    /// Its derivative, from what the forward pass saves: the output for ReLU, the input for the others.
    #[inline(always)]
    pub fn slope(self, saved: f32) -> f32 {
        let x = saved;
        match self {
            ActivationFn::Relu => {
                if x > 0.0 {
                    1.0
                } else {
                    0.0
                }
            }
            ActivationFn::Gelu => {
                let gate = gelu_gate(x);
                let inner = 2.0 * GELU_SCALE * (1.0 + 3.0 * GELU_CUBE * x * x);
                gate + x * gate * (1.0 - gate) * inner
            }
            ActivationFn::Silu => {
                let gate = math::sigmoid(x);
                gate + x * gate * (1.0 - gate)
            }
            ActivationFn::GeluErf => {
                let density = math::exp(-0.5 * x * x) * 0.398_942_3;
                // Far out the density is 0 and x may be anything.
                normal_below(x) + if x.abs() > 20.0 { 0.0 } else { x * density }
            }
            ActivationFn::Tanh => {
                let y = math::tanh(x);
                1.0 - y * y
            }
        }
    }
}

/// Runs a body with a function as the constant `$kind`: a choice within a loop would keep it from vectorising.
macro_rules! with_activation {
    ($of:expr, $kind:ident => $body:expr) => {
        with_activation!($of, $kind => $body; Relu Gelu Silu GeluErf Tanh)
    };
    ($of:expr, $kind:ident => $body:expr; $($one:ident)*) => {
        match $of {
            $(ActivationFn::$one => {
                const $kind: ActivationFn = ActivationFn::$one;
                $body
            })*
        }
    };
}
pub(crate) use with_activation;

simd! {
    /// x = f(x).
    pub(crate) fn apply_in_place[T: Float](kind: ActivationFn, x: &mut [T]) {
        with_activation!(kind, KIND => x.iter_mut().for_each(|x| *x = T::from_f32(KIND.apply(x.to_f32()))));
    }
}

#[inline(always)]
fn gelu_gate(x: f32) -> f32 {
    math::sigmoid(2.0 * GELU_SCALE * x * (1.0 + GELU_CUBE * x * x))
}

/// The share of a standard normal below x.
#[inline(always)]
fn normal_below(x: f32) -> f32 {
    0.5 * (1.0 + math::erf(x * std::f32::consts::FRAC_1_SQRT_2))
}
