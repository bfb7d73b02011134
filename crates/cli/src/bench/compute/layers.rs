//! Layers with random numbers in them, which are timed.

use std::fmt;

use espalier_tensor::ops::flat;
use espalier_tensor::{Category, DType, Device, Result, Tensor, random};

use crate::bench::timing::TimedWork;

/// Numbers that are made on the host; larger tensors repeat them.
const RANDOM_NUMBERS: usize = 1 << 20;
/// Bytes of weights, or of activations, that a step goes through before it is at the same ones again, and in
/// how many layers at most.
const OTHER_LAYERS: usize = 16 << 20;
const MOST_LAYERS: usize = 64;

/// A convolution with as many windows as pixels over strides.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ConvolutionSize {
    pub batch: usize,
    pub side: usize,
    pub input: usize,
    pub output: usize,
    pub kernel: usize,
    pub stride: usize,
}

impl ConvolutionSize {
    /// Of a pass.
    pub fn flops(&self) -> f64 {
        let ConvolutionSize { batch, side, input, output, kernel, stride } = *self;
        let windows = side.div_ceil(stride);
        let sizes = [batch, windows, windows, input, output, kernel, kernel];
        2.0 * sizes.iter().map(|&n| n as f64).product::<f64>()
    }
}

impl fmt::Display for ConvolutionSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ConvolutionSize { batch, side, input, output, kernel, stride } = *self;
        write!(f, "{batch} of {side} x {side}, {input} to {output}, {kernel} x {kernel}")?;
        if stride > 1 { write!(f, " / {stride}") } else { Ok(()) }
    }
}

/// Layers of one kind, one after the other, as a step goes through them: when it is back at a layer's weights
/// or activations it has been at all others, so they are in no near cache, nor is room for what becomes of
/// them.
pub struct RepeatedLayers(Vec<[Tensor; 3]>);

impl RepeatedLayers {
    /// With what each reads, of these shapes: input, weight, gradient of the output.
    pub fn with_shapes(device: &Device, dtype: DType, shapes: [Vec<usize>; 3]) -> Result<RepeatedLayers> {
        let bytes = |shape: &Vec<usize>| shape.iter().product::<usize>() * dtype.bytes();
        let largest = shapes.iter().map(bytes).max().unwrap_or(1).max(1);
        let number = (OTHER_LAYERS / largest).clamp(1, MOST_LAYERS);
        let layer = |_| layer_tensors(device, dtype, &shapes);
        Ok(RepeatedLayers((0..number).map(layer).collect::<Result<_>>()?))
    }

    /// A layer again and again.
    pub fn single(tensors: [Tensor; 3]) -> RepeatedLayers {
        RepeatedLayers(vec![tensors])
    }

    /// The next of them at every turn; what it makes is kept until its next.
    pub fn each(self, pass: impl Fn(&[Tensor; 3]) -> Result<Vec<Tensor>> + Send + 'static) -> TimedWork {
        let mut outputs: Vec<Vec<Tensor>> = self.0.iter().map(|_| Vec::new()).collect();
        let mut at = 0;
        Box::new(move || {
            at = (at + 1) % outputs.len();
            outputs[at].clear();
            outputs[at] = pass(&self.0[at])?;
            Ok(())
        })
    }
}

/// Random numbers for a layer's input, weight and gradient of its output.
pub fn layer_tensors(device: &Device, dtype: DType, shapes: &[Vec<usize>; 3]) -> Result<[Tensor; 3]> {
    let tensor = |shape: &Vec<usize>| random_tensor(device, shape, dtype);
    Ok([tensor(&shapes[0])?, tensor(&shapes[1])?, tensor(&shapes[2])?])
}

/// Numbers around zero: a GPU that multiplies zeros is cooler, and faster than it would be.
pub fn random_tensor(device: &Device, shape: &[usize], dtype: DType) -> Result<Tensor> {
    let len: usize = shape.iter().product();
    let key = random::key(4, len as u64);
    let some: Vec<f32> =
        (0..len.min(RANDOM_NUMBERS) as u64).map(|i| random::uniform(key, i) as f32 - 0.5).collect();
    let some = Tensor::from_f32(device, &[some.len()], dtype, &some, Category::Activations)?;
    if some.len() == len {
        return Ok(some.reshape(shape));
    }
    let mut full = Tensor::empty(device, &[len], dtype, Category::Activations)?;
    for first in (0..len).step_by(RANDOM_NUMBERS) {
        flat::put(&mut full, first, &some, 0..RANDOM_NUMBERS.min(len - first))?;
    }
    Ok(full.reshape(shape))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Larger than what is drawn, and by no multiple of it.
    #[test]
    fn numbers_repeat_to_the_end() {
        let device = Device::cpu(1).unwrap();
        let x = random_tensor(&device, &[RANDOM_NUMBERS + 5], DType::F32).unwrap().to_f32();
        assert_eq!(x[..5], x[RANDOM_NUMBERS..]);
        assert!(x[0] != x[1] && x.iter().all(|x| x.abs() <= 0.5));
    }
}
