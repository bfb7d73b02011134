//! Sparse products against plain loops in f64, and against dense ones.

use proptest::prelude::*;

use super::*;
use crate::dtype::DType;
use crate::mask::Mask;
use crate::ops::compress::compress;
use crate::ops::matmul::matmul;
use crate::random;
use crate::testing::{assert_close, devices, tensor, values};

/// A matrix with about this fraction of its weights kept; every tenth row or so is empty.
fn pruned(seed: u64, rows: usize, columns: usize, fraction: f64) -> Vec<f32> {
    let key = random::key(seed, 77);
    let mut weights = values(seed, rows * columns, 1.0);
    for (i, weight) in weights.iter_mut().enumerate() {
        let row = (i / columns.max(1)) as u64;
        let empty = random::uniform(key, 1 << 40 | row) < 0.1;
        if empty || random::uniform(key, i as u64) >= fraction {
            *weight = 0.0;
        }
    }
    weights
}

fn reference(x: &[f32], w: &[f32], batch: usize, rows: usize, columns: usize) -> Vec<f64> {
    let mut y = vec![0.0; batch * rows];
    for b in 0..batch {
        for r in 0..rows {
            y[b * rows + r] =
                (0..columns).map(|c| f64::from(x[b * columns + c]) * f64::from(w[r * columns + c])).sum();
        }
    }
    y
}

/// The processor with every instruction set, with one thread, two and three.
fn processors() -> impl Iterator<Item = &'static [Device; 3]> {
    devices().iter().filter(|threads| matches!(threads[0], Device::Cpu(_)))
}

/// The bits of a mask that keeps what is not zero.
fn mask_of(device: &Device, w: &[f32]) -> Mask {
    let mut words = vec![0u32; w.len().div_ceil(32)];
    w.iter().enumerate().filter(|(_, w)| **w != 0.0).for_each(|(i, _)| words[i / 32] |= 1 << (i % 32));
    Mask::new(device, w.len(), &words).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Both products of a linear layer and the gradient of its weight, against plain loops, on one thread and
    /// on several with the same bits: every width of the last panel, rows that do not fill a block or are empty.
    #[test]
    fn a_sparse_weight_does_what_a_dense_one_does(
        batch in 1usize..230, rows in 1usize..100, columns in 1usize..90, fraction in 0.0f64..1.0, seed: u64,
    ) {
        let w = pruned(seed, rows, columns, fraction);
        let (x, dy) = (values(seed ^ 1, batch * columns, 1.0), values(seed ^ 2, batch * rows, 1.0));
        let bias = values(seed ^ 3, rows, 1.0);
        let mut expected = reference(&x, &w, batch, rows, columns);
        expected.iter_mut().enumerate().for_each(|(i, y)| *y += f64::from(bias[i % rows]));
        let turned: Vec<f32> = (0..rows * columns).map(|i| w[i % rows * columns + i / rows]).collect();
        let dx = reference(&dy, &turned, batch, columns, rows);
        let gradient = |index: usize| -> f64 {
            let (r, c) = (index / columns, index % columns);
            (0..batch).map(|b| f64::from(dy[b * rows + r]) * f64::from(x[b * columns + c])).sum()
        };
        let dw: Vec<f64> = (0..w.len()).filter(|i| w[*i] != 0.0).map(gradient).collect();
        let run = |device: &Device| {
            // A ledger that no other test writes to.
            let device = &device.another().unwrap();
            let weight = tensor(device, DType::F32, &[rows, columns], &w);
            let (x, dy) = (tensor(device, DType::F32, &[batch, columns], &x), tensor(device, DType::F32, &[batch, rows], &dy));
            let bias = tensor(device, DType::F32, &[rows], &bias);
            let mask = mask_of(device, &w);
            let mask_bytes = device.ledger().current(Category::Mask);
            let sparse = SparseWeight::new(&mask, [rows, columns]).unwrap();
            assert_eq!(device.ledger().current(Category::Mask) - mask_bytes, sparse.bytes());
            [
                sparse.product(&x, &weight, true, Some(&bias), Category::Transient).unwrap(),
                sparse.product(&dy, &weight, false, None, Category::Transient).unwrap(),
                sparse.sampled_product(&dy, &x, Category::Gradients).unwrap(),
            ].map(|tensor| tensor.to_f32())
        };
        for threads in processors() {
            let [one, _, many] = threads.each_ref().map(run);
            for (computed, expected) in one.iter().zip([&expected, &dx, &dw]) {
                assert_close(computed, expected, 1e-5);
            }
            prop_assert_eq!(one, many, "the same bits on any number of threads");
        }
    }
}

/// A layer of several tasks, from a dense weight and from its kept elements.
#[test]
fn a_large_layer_agrees_with_the_dense_product() {
    let (batch, rows, columns) = (200, 1100, 1030);
    let (x, w) = (values(1, batch * columns, 1.0), pruned(2, rows, columns, 0.1));
    for [_, device, _] in processors() {
        let x = tensor(device, DType::F32, &[batch, columns], &x);
        let dense = tensor(device, DType::F32, &[rows, columns], &w);
        let expected = matmul(&x, dense.t(), None, Category::Transient).unwrap().to_f32();
        let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
        let mask = mask_of(device, &w);
        let sparse = SparseWeight::new(&mask, [rows, columns]).unwrap();
        for weight in [&dense, &compress(&dense, &mask, Category::Weights).unwrap()] {
            let y = sparse.product(&x, weight, true, None, Category::Transient).unwrap();
            assert_close(&y.to_f32(), &expected, 5e-5);
        }
    }
}
