//! The sparse product against plain loops in f64, and against the dense product.

use proptest::prelude::*;

use super::*;
use crate::mask::Mask;
use crate::ops::matmul::matmul as dense_matmul;
use crate::random;
use crate::testing::{assert_close, check, devices, tensor, values};

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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Every width of the last panel, rows that do not fill a block, rows that are empty, and sizes of zero.
    #[test]
    fn the_product_is_that_of_plain_loops(
        batch in 0usize..230, rows in 0usize..100, columns in 0usize..90, fraction in 0.0f64..1.0, seed: u64,
    ) {
        let (x, w) = (values(seed, batch * columns, 1.0), pruned(seed, rows, columns, fraction));
        let expected = reference(&x, &w, batch, rows, columns);
        check(&[expected], |device, dtype| {
            let sparse = Csr::from_dense(&tensor(device, dtype, &[rows, columns], &w)).unwrap();
            let y = matmul(&tensor(device, dtype, &[batch, columns], &x), &sparse, Category::Transient).unwrap();
            assert_eq!((y.shape(), y.dtype()), (&[batch, rows][..], dtype));
            vec![y]
        });
    }
}

#[test]
fn a_layer_of_several_tasks_agrees_with_the_dense_product() {
    let (batch, rows, columns) = (200, 1100, 1030);
    let (x, w) = (values(1, batch * columns, 1.0), pruned(2, rows, columns, 0.1));
    for device in devices().iter().map(|threads| &threads[1]) {
        for (dtype, tolerance) in [(DType::F32, 5e-5), (DType::Bf16, 1.0 / 128.0)] {
            let (x, w) =
                (tensor(device, dtype, &[batch, columns], &x), tensor(device, dtype, &[rows, columns], &w));
            let dense = dense_matmul(&x, w.t(), None, Category::Transient).unwrap();
            let sparse = matmul(&x, &Csr::from_dense(&w).unwrap(), Category::Transient).unwrap();
            let expected: Vec<f64> = dense.to_f32().into_iter().map(f64::from).collect();
            assert_close(&sparse.to_f32(), &expected, tolerance);
        }
    }
}

#[test]
fn what_is_kept_is_counted() {
    let weights = [0.0, 2.0, 0.0, -0.0, 0.0, 0.0, f32::NAN, 1.0, -1.0f32];
    for device in devices().iter().map(|threads| &threads[0]) {
        let sparse = Csr::from_dense(&tensor(device, DType::F32, &[3, 3], &weights)).unwrap();
        assert_eq!(
            (sparse.rows(), sparse.columns(), sparse.kept()),
            (3, 3, 4),
            "a NaN is no zero, -0 is one"
        );
    }
    // A device of its own: others run on the shared ones.
    let device = Device::cpu(1).unwrap();
    let sparse = Csr::from_dense(&tensor(&device, DType::Bf16, &[3, 3], &weights)).unwrap();
    assert_eq!(device.ledger().current(Category::Weights), sparse.kept() * 2);
    assert_eq!(device.ledger().current(Category::Mask), 4 * 4 + 4 * 4, "columns, and four offsets");
}

/// The GPUs among the devices.
fn gpus() -> impl Iterator<Item = &'static Device> {
    devices().iter().map(|threads| &threads[0]).filter(|device| matches!(device, Device::Cuda(_)))
}

/// cuSPARSE may refuse some options, with a reason; what it accepts must be right, and the repeatable ones must be
/// accepted.
#[test]
fn what_a_gpu_accepts_is_right() {
    let (batch, rows, columns) = (96, 130, 250);
    let (x, w) = (values(1, batch * columns, 1.0), pruned(2, rows, columns, 0.2));
    let expected = reference(&x, &w, batch, rows, columns);
    for device in gpus() {
        for (dtype, tolerance) in [(DType::F32, 5e-5), (DType::Bf16, 1.0 / 128.0)] {
            let x = tensor(device, dtype, &[batch, columns], &x);
            let w = Csr::from_dense(&tensor(device, dtype, &[rows, columns], &w)).unwrap();
            for options in cuda::SpmmOptions::all() {
                let ran = cuda::SpmmPlan::new(&w, batch, options).and_then(|mut plan| {
                    let first = plan.run(&x, Category::Transient)?;
                    let second = plan.run(&x, Category::Transient)?;
                    device.synchronize()?;
                    Ok([first, second])
                });
                match ran {
                    Ok(both) => both.iter().for_each(|y| assert_close(&y.to_f32(), &expected, tolerance)),
                    Err(why) => {
                        assert_ne!(options, cuda::SpmmOptions::REPEATABLE, "{why}");
                        eprintln!("{options} in {dtype:?}: {why}");
                    }
                }
            }
        }
    }
}

#[test]
fn two_in_four_agree_with_the_dense_product() {
    let (batch, rows, columns) = (64, 128, 256);
    let (x, mut w) = (values(1, batch * columns, 1.0), values(2, rows * columns, 1.0));
    for (i, four) in w.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        (four[i % 4], four[(i % 4 + 1 + i / 4 % 3) % 4]) = (0.0, 0.0);
    }
    let expected = reference(&x, &w, batch, rows, columns);
    for device in gpus() {
        let (x, w) = (
            tensor(device, DType::Bf16, &[batch, columns], &x),
            tensor(device, DType::Bf16, &[rows, columns], &w),
        );
        match cuda::TwoFour::new(&w, batch) {
            Ok(mut product) => {
                let y = product.run(&x, Category::Transient).unwrap();
                assert_close(&y.to_f32(), &expected, 1.0 / 128.0);
            }
            Err(Error::Unsupported { what }) => {
                espalier_testing::skipped(espalier_testing::Need::TwoFour, what)
            }
            Err(other) => panic!("{other}"),
        }
    }
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
    /// on several with the same bits.
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
        let [one, many] = [1, 3].map(|threads| run(&Device::cpu(threads).unwrap()));
        for (computed, expected) in one.iter().zip([&expected, &dx, &dw]) {
            assert_close(computed, expected, 1e-5);
        }
        prop_assert_eq!(one, many, "the same bits on any number of threads");
    }
}
