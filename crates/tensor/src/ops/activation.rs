//! Activation functions over tensors; what they are of one number is [`crate::cpu::activation`]'s to say.

pub(crate) mod cuda;

pub use crate::cpu::activation::ActivationFn;
use crate::cpu::activation::{apply_in_place, with_activation};
use crate::device::Device;
use crate::dtype::Float;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::chunks::{CHUNK, each, writable};
use crate::tensor::Tensor;
use crate::{simd, with_float};

/// y = f(x).
pub fn forward(kind: ActivationFn, x: &Tensor) -> Result<Tensor> {
    let mut y = x.empty_like(Category::Transient)?;
    match x.device() {
        Device::Cpu(cpu) => with_float!(x.dtype(), T => {
            let x = x.slice::<T>();
            cpu.for_chunks(y.slice_mut::<T>(), CHUNK, |at, y| apply_all(cpu.isa(), kind, &x[at], y));
        }),
        Device::Cuda(cuda) => cuda::forward(&cuda, kind, x, &mut y)?,
    }
    Ok(y)
}

/// The same, in the place of x on the host if nobody else holds it.
pub fn forward_owned(kind: ActivationFn, mut x: Tensor) -> Result<Tensor> {
    match x.device() {
        Device::Cpu(cpu) if x.is_unique() => {
            with_float!(x.dtype(), T => {
                cpu.for_chunks(x.slice_mut::<T>(), CHUNK, |_, x| apply_in_place(cpu.isa(), kind, x));
            });
            Ok(x)
        }
        _ => forward(kind, &x),
    }
}

/// dx = dy f'(x); `saved` is the output for ReLU, the input for the others. Overwrites dy if nobody else
/// holds it.
pub fn backward(kind: ActivationFn, saved: &Tensor, dy: Tensor) -> Result<Tensor> {
    assert_eq!(saved.shape(), dy.shape(), "activation: what was saved and dy");
    match saved.device() {
        Device::Cpu(cpu) => {
            let mut dx = writable(dy)?;
            with_float!(saved.dtype(), T => {
                let saved = saved.slice::<T>();
                let dx = dx.slice_mut::<T>();
                cpu.for_chunks(dx, CHUNK, |at, dx| slope_all(cpu.isa(), kind, &saved[at], dx));
            });
            Ok(dx)
        }
        Device::Cuda(cuda) => cuda::backward(&cuda, kind, saved, dy, None),
    }
}

/// As [`backward`], and y = f(x) made again in the same pass, for a layer behind that did not keep it. On the host
/// y has the bits of [`forward`]; where a GPU's product applied the function on its way out, to sums it had not
/// rounded yet, the two may differ in the last bit.
pub fn backward_remaking(kind: ActivationFn, saved: &Tensor, dy: Tensor) -> Result<(Tensor, Tensor)> {
    assert_eq!(saved.shape(), dy.shape(), "activation: what was saved and dy");
    if kind == ActivationFn::Relu {
        return Ok((backward(kind, saved, dy)?, saved.clone()));
    }
    let mut y = saved.empty_like(Category::Transient)?;
    match saved.device() {
        Device::Cpu(cpu) => {
            let mut dx = writable(dy)?;
            with_float!(saved.dtype(), T => {
                let slices = saved.slice::<T>().chunks(CHUNK).zip(y.slice_mut::<T>().chunks_mut(CHUNK));
                let slices = slices.zip(dx.slice_mut::<T>().chunks_mut(CHUNK));
                each(&cpu, slices, |((saved, y), dx)| {
                    apply_all(cpu.isa(), kind, saved, y);
                    slope_all(cpu.isa(), kind, saved, dx);
                });
            });
            Ok((dx, y))
        }
        Device::Cuda(cuda) => Ok((cuda::backward(&cuda, kind, saved, dy, Some(&mut y))?, y)),
    }
}

simd! {
    fn apply_all[T: Float](kind: ActivationFn, x: &[T], y: &mut [T]) {
        with_activation!(kind, KIND => map(x, y, |_, x| KIND.apply(x)))
    }

    fn slope_all[T: Float](kind: ActivationFn, saved: &[T], dx: &mut [T]) {
        with_activation!(kind, KIND => map(saved, dx, |dy, x| dy * KIND.slope(x)))
    }
}

/// y = f(y, x).
#[inline(always)]
fn map<T: Float>(x: &[T], y: &mut [T], f: impl Fn(f32, f32) -> f32) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = T::from_f32(f(y.to_f32(), x.to_f32()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{address, assert_close, check, devices, gradient, tensor, values, wide};
    use crate::{DType, Tensor};
    use proptest::prelude::*;

    const ALL: [ActivationFn; 5] = [
        ActivationFn::Relu,
        ActivationFn::Gelu,
        ActivationFn::Silu,
        ActivationFn::GeluErf,
        ActivationFn::Tanh,
    ];

    /// The share of a standard normal below x, by the midpoints of its density from 0 on.
    fn normal_below(x: f64) -> f64 {
        let (steps, end) = (400, x.clamp(-9.0, 9.0));
        let width = end / f64::from(steps);
        let density = |t: f64| (-t * t / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
        0.5 + (0..steps).map(|i| density((f64::from(i) + 0.5) * width) * width).sum::<f64>()
    }

    fn reference(kind: ActivationFn, x: f64) -> f64 {
        match kind {
            ActivationFn::Relu => x.max(0.0),
            ActivationFn::Gelu => {
                0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
            }
            ActivationFn::Silu => x / (1.0 + (-x).exp()),
            ActivationFn::GeluErf => x * normal_below(x),
            ActivationFn::Tanh => x.tanh(),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(5))]
        #[test]
        fn both_passes_agree_with_the_formula(n in 1usize..20_000, seed: u64, spread in 0.1f64..8.0) {
            // No input at the kink of ReLU, where there is no derivative. As the formula takes its time, a few
            // hundred of them come again and again.
            let few: Vec<f32> =
                values(seed, 499, spread).iter().map(|&x| if x.abs() < 1e-3 { 1.0 } else { x }).collect();
            let x: Vec<f32> = few.iter().copied().cycle().take(n).collect();
            let dy = values(seed ^ 1, n, 1.0);
            for kind in ALL {
                let y: Vec<f64> = few.iter().map(|&x| reference(kind, x.into())).collect();
                let y = y.into_iter().cycle().take(n).collect();
                let slopes = few.iter().map(|&x| gradient(&[x.into()], |x| reference(kind, x[0]))[0]);
                let slopes = slopes.collect::<Vec<_>>().into_iter().cycle();
                let dx = slopes.zip(&dy).map(|(slope, &dy)| slope * f64::from(dy)).collect();
                check(&[y, dx], |device, dtype| {
                    let input = tensor(device, dtype, &[n], &x);
                    let y = forward(kind, &input).unwrap();
                    let in_place = forward_owned(kind, tensor(device, dtype, &[n], &x)).unwrap();
                    assert_eq!(in_place.host_bytes(), y.host_bytes());
                    assert_eq!(forward_owned(kind, input.clone()).unwrap().host_bytes(), y.host_bytes());
                    let saved = if kind == ActivationFn::Relu { &y } else { &input };
                    let dx = backward(kind, saved, tensor(device, dtype, &[n], &dy)).unwrap();
                    let (again, remade) =
                        backward_remaking(kind, saved, tensor(device, dtype, &[n], &dy)).unwrap();
                    assert_eq!(remade.host_bytes(), y.host_bytes());
                    assert_eq!(again.host_bytes(), dx.host_bytes());
                    vec![y, dx]
                });
            }
        }
    }

    #[test]
    fn backward_writes_in_place_only_when_nobody_else_looks() {
        for [device, ..] in devices() {
            let x = tensor(device, DType::F32, &[3], &[-1.0, 0.0, 2.0]);
            let dy = tensor(device, DType::F32, &[3], &[5.0; 3]);
            let kept_alive: Tensor = dy.clone();
            let dx = backward(ActivationFn::Relu, &x, dy).unwrap();
            assert_eq!((dx.to_f32(), kept_alive.to_f32()), (vec![0.0, 0.0, 5.0], vec![5.0; 3]));
            let old_address = address(&kept_alive);
            let dx = backward(ActivationFn::Relu, &x, kept_alive).unwrap();
            assert_eq!(address(&dx), old_address);
            assert_eq!(address(&backward_remaking(ActivationFn::Gelu, &x, dx).unwrap().0), old_address);
        }
    }

    /// The host's functions by themselves; what a GPU makes of such inputs is tested below.
    #[test]
    fn the_ends_of_the_line_saturate_and_nan_passes() {
        for kind in [ActivationFn::Relu, ActivationFn::Gelu, ActivationFn::Silu, ActivationFn::GeluErf] {
            assert_close(&[kind.apply(-1e4), kind.apply(1e4)], &wide(&[0.0, 1e4]), 1e-6);
            assert_eq!((kind.slope(-1e4), kind.slope(1e4)), (0.0, 1.0));
            assert!(kind.apply(f32::NAN).is_nan());
        }
    }

    #[test]
    fn tensors_saturate_and_pass_nan_too() {
        let ends = [-1e4, 1e4, f32::NAN];
        for [device, ..] in devices() {
            for kind in [ActivationFn::Relu, ActivationFn::Gelu, ActivationFn::Silu, ActivationFn::GeluErf] {
                let x = tensor(device, DType::F32, &[3], &ends);
                let y = forward(kind, &x).unwrap().to_f32();
                assert_close(&y[..2], &[0.0, 1e4], 1e-6);
                assert!(y[2].is_nan());
                let dx = backward(kind, &x, tensor(device, DType::F32, &[3], &[1.0; 3])).unwrap().to_f32();
                assert_eq!(dx[..2], [0.0, 1.0]);
            }
        }
    }
}
