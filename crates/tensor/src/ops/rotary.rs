//! Rotary positions (Su et al. 2021): queries and keys are turned by angles that grow with the position, so
//! that their products depend on the distance between positions alone.
//!
//! ```text
//! pair i of a head at position p: (x_i, x_{i + d/2}) turned by p f_i
//! y_i = x_i cos - x_{i + d/2} sin,   y_{i + d/2} = x_{i + d/2} cos + x_i sin
//! ```
//! qkv: [batch, seq, (heads + 2 kv_heads) d] as [`attention`](super::attention) has it; values stay as they
//! are. A rotation's gradient is the rotation back.
//!
//! Angles, sines and cosines are made once, on the host, in a table f32 [context, d]: the cosines of a
//! position's d/2 angles, then their sines. A position times a frequency is rounded to f32, as transformers
//! rounds it.

pub(crate) mod cuda;

use crate::device::Device;
use crate::dtype::Float;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::attention::AttentionDims;
use crate::ops::chunks::{self, writable};
use crate::ops::position::Position;
use crate::tensor::Tensor;
use crate::{simd, with_float};

/// Cosines and sines of `context` positions, at one frequency for each pair of a head's elements.
pub fn table(device: &Device, frequencies: &[f32], context: usize) -> Result<Tensor> {
    let pairs = frequencies.len();
    let mut numbers = vec![0.0f32; context * 2 * pairs];
    for (position, row) in numbers.chunks_exact_mut((2 * pairs).max(1)).enumerate() {
        let (cosines, sines) = row.split_at_mut(pairs);
        for ((cosine, sine), frequency) in cosines.iter_mut().zip(sines).zip(frequencies) {
            let angle = f64::from(position as f32 * frequency);
            (*cosine, *sine) = (angle.cos() as f32, angle.sin() as f32);
        }
    }
    Tensor::from_slice(device, &[context, 2 * pairs], &numbers, Category::Workspace)
}

/// Queries and keys turned, in place where nobody else holds them. The first of them stands at `first`, or at
/// the beginning.
pub fn forward(
    qkv: Tensor,
    table: &Tensor,
    first: Option<&Position>,
    heads: usize,
    kv_heads: usize,
) -> Result<Tensor> {
    turn(qkv, table, first, heads, kv_heads, 1.0)
}

/// Their gradients, from those of what [`forward`] gave for sequences from the beginning.
pub fn backward(dqkv: Tensor, table: &Tensor, heads: usize, kv_heads: usize) -> Result<Tensor> {
    turn(dqkv, table, None, heads, kv_heads, -1.0)
}

/// `sense`: 1 forwards, -1 backwards.
fn turn(
    qkv: Tensor,
    table: &Tensor,
    first: Option<&Position>,
    heads: usize,
    kv_heads: usize,
    sense: f32,
) -> Result<Tensor> {
    let z = AttentionDims::new(&qkv, heads, kv_heads);
    check_table(table, &z, first);
    let mut turned = writable(qkv)?;
    match turned.device() {
        Device::Cpu(cpu) => {
            let (width, start) = (z.width(), first.map_or(0, Position::at));
            let (table, columns) = (table.slice::<f32>(), (heads + kv_heads) * z.d);
            with_float!(turned.dtype(), T => {
                cpu.for_chunks(turned.slice_mut::<T>(), chunks::rows(width) * width, |at, rows| {
                    for (row, x) in (at.start / width..).zip(rows.chunks_exact_mut(width)) {
                        let angles = &table[(start + row % z.t) * z.d..][..z.d];
                        turn_row(cpu.isa(), &mut x[..columns], angles, sense);
                    }
                });
            });
        }
        Device::Cuda(cuda) => cuda::turn(&cuda, &mut turned, table, first, &z, sense)?,
    }
    Ok(turned)
}

/// Asserts that a table fits heads and positions.
pub(super) fn check_table(table: &Tensor, z: &AttentionDims, first: Option<&Position>) {
    assert_eq!(table.width(), z.d, "a table of rotations for heads of {}", z.d);
    assert!(z.d.is_multiple_of(2), "heads of {} columns have no pairs", z.d);
    let end = first.map_or(0, Position::at) + z.t;
    assert!(end <= table.rows(), "positions up to {end} with rotations for {}", table.rows());
}

simd! {
    /// All heads of one position.
    fn turn_row[T: Float](x: &mut [T], angles: &[f32], sense: f32) {
        let (cosines, sines) = angles.split_at(angles.len() / 2);
        for head in x.chunks_exact_mut(angles.len()) {
            let (a, b) = head.split_at_mut(cosines.len());
            for (((a, b), cosine), sine) in a.iter_mut().zip(b).zip(cosines).zip(sines) {
                let (x, y, sine) = (a.to_f32(), b.to_f32(), sense * sine);
                *a = T::from_f32(x * cosine - y * sine);
                *b = T::from_f32(y * cosine + x * sine);
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::testing::{address, check, devices, tensor, values, wide};
    use crate::{DType, Device};
    use proptest::prelude::*;

    pub(crate) fn frequencies(d: usize) -> Vec<f32> {
        (0..d / 2).map(|i| 100f32.powf(-2.0 * i as f32 / d as f32)).collect()
    }

    /// By plain loops: every head of every position.
    pub(crate) fn plain(
        x: &[f64],
        [t, heads, kv_heads, d]: [usize; 4],
        first: usize,
        sense: f64,
    ) -> Vec<f64> {
        let width = (heads + 2 * kv_heads) * d;
        let mut y = x.to_vec();
        for (row, y) in y.chunks_mut(width).enumerate() {
            for head in y.chunks_mut(d).take(heads + kv_heads) {
                for (i, frequency) in frequencies(d).into_iter().enumerate() {
                    let angle = sense * f64::from((first + row % t) as f32 * frequency);
                    let (a, b) = (head[i], head[i + d / 2]);
                    head[i] = a * angle.cos() - b * angle.sin();
                    head[i + d / 2] = b * angle.cos() + a * angle.sin();
                }
            }
        }
        y
    }

    fn agrees(batch: usize, [t, heads, kv_heads, d]: [usize; 4], seed: u64) {
        let width = (heads + 2 * kv_heads) * d;
        let x = values(seed, batch * t * width, 1.0);
        let there = plain(&wide(&x), [t, heads, kv_heads, d], 0, 1.0);
        let back = plain(&wide(&x), [t, heads, kv_heads, d], 0, -1.0);
        let later = plain(&wide(&x[..t * width]), [t, heads, kv_heads, d], 3, 1.0);
        check(&[there, back, later], |device, dtype| {
            let table = table(device, &frequencies(d), t + 3).unwrap();
            let qkv = || tensor(device, dtype, &[batch, t, width], &x);
            let mut position = Position::new(device).unwrap();
            position.set(3);
            position.send().unwrap();
            let one = tensor(device, dtype, &[1, t, width], &x[..t * width]);
            vec![
                forward(qkv(), &table, None, heads, kv_heads).unwrap(),
                backward(qkv(), &table, heads, kv_heads).unwrap(),
                forward(one, &table, Some(&position), heads, kv_heads).unwrap(),
            ]
        });
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(8))]
        #[test]
        fn rotations_agree_with_plain_loops(
            (batch, t, kv_heads, group, pairs) in (1usize..4, 1usize..60, 1usize..4, 1usize..4, 1usize..20),
            seed: u64,
        ) {
            agrees(batch, [t, kv_heads * group, kv_heads, 2 * pairs], seed);
        }
    }

    /// Whole packs of a GPU.
    #[test]
    fn usual_heads_agree_with_plain_loops() {
        for (heads, kv_heads, d) in [(9, 3, 64), (2, 1, 128), (3, 3, 16)] {
            agrees(2, [33, heads, kv_heads, d], 7);
        }
    }

    /// What a gradient is of: a rotation there and back is nothing, and values stay.
    #[test]
    fn a_rotation_back_undoes_it() {
        for device in devices().iter().flatten() {
            let table = table(device, &frequencies(8), 20).unwrap();
            let x = values(3, 20 * 40, 1.0);
            let qkv = tensor(device, DType::F32, &[1, 20, 40], &x);
            let held = qkv.clone();
            let there = forward(qkv, &table, None, 3, 1).unwrap();
            assert_eq!(held.to_f32(), x, "what somebody else holds stays as it is");
            let place = address(&there);
            let back = backward(there, &table, 3, 1).unwrap();
            assert_eq!(address(&back), place, "and what nobody holds is turned in place");
            crate::testing::assert_close(&back.to_f32(), &wide(&x), 1e-6);
        }
    }

    #[test]
    #[should_panic(expected = "positions up to 5 with rotations for 4")]
    fn positions_beyond_the_table_are_refused() {
        let device = Device::cpu(1).unwrap();
        let table = table(&device, &frequencies(4), 4).unwrap();
        let _ = forward(tensor(&device, DType::F32, &[1, 5, 12], &[0.0; 60]), &table, None, 1, 1);
    }
}
