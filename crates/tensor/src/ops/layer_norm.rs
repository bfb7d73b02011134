//! Layer normalisation (Ba, Kiros & Hinton 2016) over the last dimension.
//!
//! x, y: `[rows, c]`; scale, shift: `[c]`; statistics: f32 `[rows, 2]` = mean, rstd.
//!
//! With h = (x - mean) rstd and rstd = 1/sqrt(variance + eps):
//!
//! - y = h scale + shift
//! - dx = rstd (d - mean(d) - h mean(d h)), d = dy scale
//! - dscale = sum over rows of dy h, dshift = sum over rows of dy
//!
//! The walk over rows is that of `norm.rs`; here is what happens to one row.

use crate::cpu::lanes;
use crate::cuda::KernelSource;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::ops::norm::{self, NormFormula, cuda::NormKernels};
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource = norm::cuda::source("layer_norm.cu", include_str!("layer_norm.cu"));

/// (y, statistics).
pub fn forward(x: &Tensor, scale: &Tensor, shift: &Tensor, eps: f32) -> Result<(Tensor, Tensor)> {
    norm::forward::<LayerNormFormula, 2>(x, [scale, shift], eps)
}

/// dx.
pub fn backward_input(dy: &Tensor, x: &Tensor, scale: &Tensor, statistics: &Tensor) -> Result<Tensor> {
    norm::backward_input::<LayerNormFormula, 2>(dy, x, scale, statistics)
}

/// (dx, y): the gradient, plus another one where it is given, and what the forward pass made of x, for a layer
/// behind that did not keep it. y has the forward pass's bits. A GPU adds `plus` before it rounds, in its place if
/// nobody else holds it; the host rounds first, as two operations would.
pub fn backward_remaking(
    dy: &Tensor,
    x: &Tensor,
    scale: &Tensor,
    shift: &Tensor,
    statistics: &Tensor,
    plus: Option<Tensor>,
) -> Result<(Tensor, Tensor)> {
    norm::backward_remaking::<LayerNormFormula, 2>(dy, x, [scale, shift], statistics, plus)
}

/// (dscale, dshift), as `dtype`.
pub fn backward_weights(
    dy: &Tensor,
    x: &Tensor,
    statistics: &Tensor,
    dtype: DType,
) -> Result<(Tensor, Tensor)> {
    let [dscale, dshift] = norm::backward_weights::<LayerNormFormula, 2>(dy, x, statistics, dtype)?;
    Ok((dscale, dshift))
}

/// The formulas above, for the loops that all norms of rows share.
struct LayerNormFormula;

impl NormFormula<2> for LayerNormFormula {
    const NAME: &'static str = "layer_norm";
    const KERNELS: NormKernels = NormKernels {
        source: &SOURCE,
        forward: "layer_norm_forward",
        backward_input: "layer_norm_backward_input",
        backward_remaking: "layer_norm_backward_remaking",
        backward_weights: "layer_norm_backward_weights",
        backward_weights_total: "layer_norm_backward_weights_total",
    };

    #[inline(always)]
    fn statistics<T: Float>(x: &[T], eps: f32) -> [f32; 2] {
        let per_element = 1.0 / x.len() as f32;
        let mean = lanes::sum(x, |x| x) * per_element;
        // A second pass over a row in the cache; E[x^2] - mean^2 would cancel.
        let variance = lanes::sum(x, |x| (x - mean) * (x - mean)) * per_element;
        [mean, 1.0 / (variance + eps).sqrt()]
    }

    #[inline(always)]
    fn normalise<T: Float>(x: &[T], [mean, rstd]: [f32; 2], [scale, shift]: [&[f32]; 2], y: &mut [T]) {
        for (((y, x), scale), shift) in y.iter_mut().zip(x).zip(scale).zip(shift) {
            *y = T::from_f32((x.to_f32() - mean) * rstd * scale + shift);
        }
    }

    #[inline(always)]
    fn differentiate<T: Float>(dy: &[T], x: &[T], scale: &[f32], [mean, rstd]: [f32; 2], dx: &mut [T]) {
        let per_element = 1.0 / x.len() as f32;
        let mean_d = lanes::sum2(dy, scale, |dy, scale| dy * scale) * per_element;
        let mean_dh = lanes::sum3(dy, x, scale, |dy, x, scale| dy * scale * (x - mean)) * rstd * per_element;
        for (((dx, dy), x), scale) in dx.iter_mut().zip(dy).zip(x).zip(scale) {
            let h = (x.to_f32() - mean) * rstd;
            *dx = T::from_f32(rstd * (dy.to_f32() * scale - mean_d - h * mean_dh));
        }
    }

    #[inline(always)]
    fn add_products<T: Float>(dy: &[T], x: &[T], [mean, rstd]: [f32; 2], [dscale, dshift]: [&mut [f32]; 2]) {
        for (((dscale, dshift), dy), x) in dscale.iter_mut().zip(dshift.iter_mut()).zip(dy).zip(x) {
            *dscale += dy.to_f32() * ((x.to_f32() - mean) * rstd);
            *dshift += dy.to_f32();
        }
    }
}
