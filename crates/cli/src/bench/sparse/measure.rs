//! One layer, multiplied densely and sparsely in turns.

use std::time::Duration;

use espalier_tensor::ops::matmul::matmul;
use espalier_tensor::ops::sparse::cuda::{SpmmOptions, SpmmPlan, TwoFour};
use espalier_tensor::ops::sparse::{self, Csr};
use espalier_tensor::{Category, DType, Device, Error, Result, Tensor, random};

use crate::bench::timing::{TimedWork, round_robin};

/// About how long each way of cuSPARSE's is tried before the fastest competes.
const TRIAL: Duration = Duration::from_millis(30);

/// What all measurements have in common.
pub struct SparseBench {
    pub device: Device,
    /// What weights and activations are stored in.
    pub dtype: DType,
    /// Rows of the layer's input.
    pub batch: usize,
}

/// What was measured of one layer.
pub struct SparseRow {
    /// Inputs and outputs of the layer.
    pub size: usize,
    /// Weights that are not zero.
    pub kept: usize,
    /// Milliseconds of the dense product.
    pub dense: f64,
    /// Milliseconds of the sparse product, or why there are none.
    pub sparse: Result<f64, String>,
    /// How cuSPARSE was asked for it.
    pub algorithm: Option<SpmmOptions>,
    /// Milliseconds of the product with two zeros in every four weights, or why there are none; none on a
    /// processor.
    pub two_four: Option<Result<f64, String>>,
}

impl SparseRow {
    /// How many times as long as the dense product the sparse one takes.
    pub fn ratio(&self) -> Option<f64> {
        self.sparse.as_ref().ok().map(|ms| ms / self.dense)
    }
}

impl SparseBench {
    /// Measures a layer with this fraction of zeros, for about as long as `budget`.
    pub fn measure(&self, size: usize, sparsity: f64, two_four: bool, budget: Duration) -> Result<SparseRow> {
        let x = self.tensor(self.batch, size, inputs(self.batch * size))?;
        let w = self.tensor(size, size, pruned(size, sparsity))?;
        let expected = dense(&x, &w)?.to_f32();
        let sparse_w = Csr::from_dense(&w)?;

        let mut cases: Vec<TimedWork<'_>> = vec![Box::new(|| dense(&x, &w).map(drop))];
        let mut positions = [None, None];
        let mut row = SparseRow {
            size,
            kept: sparse_w.kept(),
            dense: 0.0,
            sparse: Ok(0.0),
            algorithm: None,
            two_four: None,
        };
        match &self.device {
            Device::Cpu(_) => {
                let product = || sparse::matmul(&x, &sparse_w, Category::Activations);
                self.verify(&product()?, &expected)?;
                positions[0] = Some(cases.len());
                cases.push(Box::new(move || product().map(drop)));
            }
            Device::Cuda(_) => {
                match self.fastest(&x, &sparse_w, &expected) {
                    Ok((algorithm, mut plan)) => {
                        row.algorithm = Some(algorithm);
                        positions[0] = Some(cases.len());
                        let x = &x;
                        cases.push(Box::new(move || plan.run(x, Category::Activations).map(drop)));
                    }
                    Err(why) => row.sparse = Err(why.to_string()),
                }
                if two_four {
                    match self.two_four(&x, size) {
                        Ok(mut product) => {
                            positions[1] = Some(cases.len());
                            let x = &x;
                            cases.push(Box::new(move || product.run(x, Category::Activations).map(drop)));
                        }
                        Err(why) => row.two_four = Some(Err(why.to_string())),
                    }
                }
            }
        }
        let times = round_robin(&self.device, budget, &mut cases)?;
        row.dense = times[0];
        if let Some(position) = positions[0] {
            row.sparse = Ok(times[position]);
        }
        if let Some(position) = positions[1] {
            row.two_four = Some(Ok(times[position]));
        }
        Ok(row)
    }

    fn tensor(&self, rows: usize, columns: usize, values: Vec<f32>) -> Result<Tensor> {
        Tensor::from_f32(&self.device, &[rows, columns], self.dtype, &values, Category::Weights)
    }

    /// The fastest algorithm of cuSPARSE that gives the right result; else why the last one did not.
    fn fastest(&self, x: &Tensor, w: &Csr, expected: &[f32]) -> Result<(SpmmOptions, SpmmPlan)> {
        let mut best: Result<(f64, SpmmOptions, SpmmPlan)> =
            Err(Error::Unsupported { what: "cuSPARSE cannot be queried".into() });
        for algorithm in SpmmOptions::all() {
            let tried = SpmmPlan::new(w, self.batch, algorithm).and_then(|mut plan| {
                self.verify(&plan.run(x, Category::Activations)?, expected)?;
                let mut run: [TimedWork<'_>; 1] = [Box::new(|| plan.run(x, Category::Activations).map(drop))];
                let ms = round_robin(&self.device, TRIAL, &mut run)?[0];
                drop(run);
                Ok((ms, algorithm, plan))
            });
            let better = match (&tried, &best) {
                (Ok(tried), Ok(best)) => tried.0 < best.0,
                (Ok(_) | Err(_), Err(_)) => true,
                (Err(_), Ok(_)) => false,
            };
            if better {
                best = tried;
            }
        }
        best.map(|(_, algorithm, plan)| (algorithm, plan))
    }

    /// The product with two zeros in every four weights, once its result is right.
    fn two_four(&self, x: &Tensor, size: usize) -> Result<TwoFour> {
        let mut weights = pruned(size, 0.0);
        for four in weights.chunks_mut(4) {
            // The two smallest of the four go.
            let mut order: Vec<usize> = (0..four.len()).collect();
            order.sort_by(|&a, &b| four[a].abs().total_cmp(&four[b].abs()));
            order.iter().take(2).for_each(|&i| four[i] = 0.0);
        }
        let w = self.tensor(size, size, weights)?;
        let mut product = TwoFour::new(&w, self.batch)?;
        self.verify(&product.run(x, Category::Activations)?, &dense(x, &w)?.to_f32())?;
        Ok(product)
    }

    /// A fast product that is wrong must not win.
    fn verify(&self, y: &Tensor, expected: &[f32]) -> Result<()> {
        self.device.synchronize()?;
        let largest = expected.iter().fold(0f32, |most, y| most.max(y.abs()));
        let tolerance = largest * if self.dtype == DType::F32 { 1e-3 } else { 2e-2 };
        // Written so that a NaN is wrong too.
        let right = |(y, expected): (f32, &f32)| (y - expected).abs() <= tolerance;
        match y.to_f32().into_iter().zip(expected).all(right) {
            true => Ok(()),
            false => Err(Error::Unsupported { what: "its result differs from dense matmul".into() }),
        }
    }
}

fn dense(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    matmul(x, w.t(), None, Category::Activations)
}

/// Numbers around zero.
fn inputs(len: usize) -> Vec<f32> {
    let key = random::key(1, len as u64);
    (0..len as u64).map(|i| random::uniform(key, i) as f32 - 0.5).collect()
}

/// A square of weights, of which this fraction is zero, at random positions.
fn pruned(size: usize, sparsity: f64) -> Vec<f32> {
    let (which, values) = (random::key(2, size as u64), random::key(3, size as u64));
    let weight = |i| match random::uniform(which, i) < sparsity {
        true => 0.0,
        false => random::uniform(values, i) as f32 - 0.5,
    };
    (0..(size * size) as u64).map(weight).collect()
}
