//! Normalisation by the root mean square (Zhang & Sennrich 2019) over the last dimension.
//!
//! x, y: `[rows, c]`; scale: `[c]`; statistics: f32 `[rows]` = rstd.
//!
//! With h = x rstd and rstd = 1/sqrt(mean(x^2) + eps):
//!
//! - y = h scale
//! - dx = rstd (d - h mean(d h)), d = dy scale
//! - dscale = sum over rows of dy h
//!
//! The walk over rows is that of `norm.rs`; here is what happens to one row.

use crate::cpu::lanes;
use crate::cuda::KernelSource;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::ops::norm::{self, NormFormula, cuda::NormKernels};
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource = norm::cuda::source("rms_norm.cu", include_str!("rms_norm.cu"));

/// (y, statistics).
pub fn forward(x: &Tensor, scale: &Tensor, eps: f32) -> Result<(Tensor, Tensor)> {
    norm::forward::<RmsNormFormula, 1>(x, [scale], eps)
}

/// dx.
pub fn backward_input(dy: &Tensor, x: &Tensor, scale: &Tensor, statistics: &Tensor) -> Result<Tensor> {
    norm::backward_input::<RmsNormFormula, 1>(dy, x, scale, statistics)
}

/// (dx, y): the gradient, plus another one where it is given, and what the forward pass made of x, for a layer
/// behind that did not keep it. y has the forward pass's bits. A GPU adds `plus` before it rounds, in its place if
/// nobody else holds it; the host rounds first, as two operations would.
pub fn backward_remaking(
    dy: &Tensor,
    x: &Tensor,
    scale: &Tensor,
    statistics: &Tensor,
    plus: Option<Tensor>,
) -> Result<(Tensor, Tensor)> {
    norm::backward_remaking::<RmsNormFormula, 1>(dy, x, [scale], statistics, plus)
}

/// dscale, as `dtype`.
pub fn backward_weights(dy: &Tensor, x: &Tensor, statistics: &Tensor, dtype: DType) -> Result<Tensor> {
    let [dscale] = norm::backward_weights::<RmsNormFormula, 1>(dy, x, statistics, dtype)?;
    Ok(dscale)
}

/// The formulas above, for the loops that all norms of rows share.
struct RmsNormFormula;

impl NormFormula<1> for RmsNormFormula {
    const NAME: &'static str = "rms_norm";
    const KERNELS: NormKernels = NormKernels {
        source: &SOURCE,
        forward: "rms_norm_forward",
        backward_input: "rms_norm_backward_input",
        backward_remaking: "rms_norm_backward_remaking",
        backward_weights: "rms_norm_backward_weights",
        backward_weights_total: "rms_norm_backward_weights_total",
    };

    #[inline(always)]
    fn statistics<T: Float>(x: &[T], eps: f32) -> [f32; 1] {
        [1.0 / (lanes::sum(x, |x| x * x) / x.len() as f32 + eps).sqrt()]
    }

    #[inline(always)]
    fn normalise<T: Float>(x: &[T], [rstd]: [f32; 1], [scale]: [&[f32]; 1], y: &mut [T]) {
        for ((y, x), scale) in y.iter_mut().zip(x).zip(scale) {
            *y = T::from_f32(x.to_f32() * rstd * scale);
        }
    }

    #[inline(always)]
    fn differentiate<T: Float>(dy: &[T], x: &[T], scale: &[f32], [rstd]: [f32; 1], dx: &mut [T]) {
        let mean_dh = lanes::sum3(dy, x, scale, |dy, x, scale| dy * scale * x) * rstd / x.len() as f32;
        for (((dx, dy), x), scale) in dx.iter_mut().zip(dy).zip(x).zip(scale) {
            *dx = T::from_f32(rstd * (dy.to_f32() * scale - x.to_f32() * rstd * mean_dh));
        }
    }

    #[inline(always)]
    fn add_products<T: Float>(dy: &[T], x: &[T], [rstd]: [f32; 1], [dscale]: [&mut [f32]; 1]) {
        for ((dscale, dy), x) in dscale.iter_mut().zip(dy).zip(x) {
            *dscale += dy.to_f32() * (x.to_f32() * rstd);
        }
    }
}
