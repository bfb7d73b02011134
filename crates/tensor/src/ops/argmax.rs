//! Where the largest of some numbers stands: of logits, the likeliest token. On a GPU the logits need not
//! come to the host for it.

pub(crate) mod cuda;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;

/// The index of the largest element of x, a `[1]` of u32: see [`of_slice`].
pub fn argmax(x: &Tensor) -> Result<Tensor> {
    assert!(u32::try_from(x.len()).is_ok(), "{} elements have no u32 each", x.len());
    let device = x.device();
    match &device {
        Device::Cpu(_) => Tensor::from_slice(&device, &[1], &[of_slice(&x.read_f32()?)], Category::Transient),
        Device::Cuda(gpu) => {
            let mut y = Tensor::empty(&device, &[1], DType::U32, Category::Transient)?;
            cuda::argmax(gpu, x, &mut y)?;
            Ok(y)
        }
    }
}

/// The index of the largest number; of equal ones the first. What is no number is never it; where there is
/// none, it is 0.
pub fn of_slice(x: &[f32]) -> u32 {
    // In two passes, the first of which compares many at a time.
    const LANES: usize = 16;
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (packs, rest) = x.as_chunks::<LANES>();
    let mut tops = [f32::NEG_INFINITY; LANES];
    for pack in packs {
        tops.iter_mut().zip(pack).for_each(|(top, x)| *top = larger(*top, *x));
    }
    let top = tops.iter().chain(rest).fold(f32::NEG_INFINITY, |top, x| larger(top, *x));
    x.iter().position(|x| *x == top).unwrap_or(0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{devices, tensor};

    fn on_all(x: &[f32]) -> Vec<u32> {
        let found = devices().iter().flatten().flat_map(|device| {
            [DType::F32, DType::Bf16].map(|dtype| {
                let x = tensor(device, dtype, &[x.len()], x);
                argmax(&x).unwrap().read_u32().unwrap()[0]
            })
        });
        found.collect()
    }

    /// More than a block of a GPU takes at a time, the largest in any place.
    #[test]
    fn the_largest_is_found_wherever_it_is() {
        for count in [1, 15, 16, 40, 1000, 50_257] {
            for best in [0, count / 2, count - 1] {
                let mut x: Vec<f32> = (0..count).map(|i| -(i as f32) - 1.0).collect();
                x[best] = 3.0;
                assert!(on_all(&x).iter().all(|found| *found == best as u32), "{best} of {count}");
            }
        }
    }

    #[test]
    fn the_first_of_equals_wins_and_what_is_no_number_never_does() {
        let among = |x: &[f32], expected| assert!(on_all(x).iter().all(|found| *found == expected), "{x:?}");
        among(&[0.0, f32::NAN, 2.0, 1.0, 2.0], 2);
        among(&[f32::NAN; 40], 0);
        among(&[f32::NAN, f32::NEG_INFINITY, f32::NEG_INFINITY], 1);
        let mut many = vec![1.0; 20_000];
        many[..3000].fill(0.0);
        among(&many, 3000);
    }
}
