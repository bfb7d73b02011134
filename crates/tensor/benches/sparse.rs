//! A pruned linear layer on a processor, in f32: dense products against those that skip the zeros
//! (`prune.kernels = "sparse"`), in milliseconds, the best of several rounds in turns.
//!
//! `cargo bench -p espalier-tensor --bench sparse [-- BATCH]`

use std::time::Instant;

use espalier_tensor::ops::matmul::matmul;
use espalier_tensor::ops::sparse::SparseWeight;
use espalier_tensor::{Category, DType, Device, Mask, Tensor, random};

const SIZES: [usize; 4] = [256, 512, 1024, 2048];
const SPARSITIES: [f64; 6] = [0.5, 0.6, 0.7, 0.8, 0.9, 0.98];
const ROUNDS: usize = 7;

fn main() {
    let batch = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(576);
    let device = Device::cpu(std::thread::available_parallelism().map_or(1, usize::from)).expect("threads");
    println!("y = x W^T and both gradients, batch {batch}");
    println!("{:>12} {:>9} {:>9} {:>9} {:>6}", "W", "sparsity", "dense", "sparse", "ratio");
    for size in SIZES {
        for sparsity in SPARSITIES {
            let kept = |i: u64| random::uniform(random::key(2, size as u64), i) >= sparsity;
            let words = (0..size * size / 32)
                .map(|word| (0..32).fold(0, |bits, i| bits | u32::from(kept((word * 32 + i) as u64)) << i));
            let mask = Mask::new(&device, size * size, &words.collect::<Vec<u32>>()).expect("memory");
            let matrix = |rows: usize, seed: u64, kept: &dyn Fn(u64) -> bool| -> Tensor {
                let number =
                    |i| if kept(i) { random::uniform(random::key(seed, 0), i) as f32 - 0.5 } else { 0.0 };
                let values: Vec<f32> = (0..(rows * size) as u64).map(number).collect();
                Tensor::from_f32(&device, &[rows, size], DType::F32, &values, Category::Weights)
                    .expect("memory")
            };
            let (x, dy, w) =
                (matrix(batch, 3, &|_| true), matrix(batch, 4, &|_| true), matrix(size, 5, &kept));
            let sparse = SparseWeight::new(&mask, [size, size]).expect("a mask of the matrix");
            let layer = |is_sparse: bool| -> [Tensor; 3] {
                let category = Category::Activations;
                match is_sparse {
                    true => [
                        sparse.product(&x, &w, true, None, category),
                        sparse.product(&dy, &w, false, None, category),
                        sparse.sampled_product(&dy, &x, category),
                    ],
                    false => [
                        matmul(&x, w.t(), None, category),
                        matmul(&dy, &w, None, category),
                        matmul(dy.t(), &x, None, category),
                    ],
                }
                .map(|result| result.expect("a product"))
            };
            let mut best = [f64::INFINITY; 2];
            for _ in 0..ROUNDS {
                for (best, is_sparse) in best.iter_mut().zip([false, true]) {
                    let start = Instant::now();
                    std::hint::black_box(layer(is_sparse));
                    *best = best.min(1e3 * start.elapsed().as_secs_f64());
                }
            }
            let [dense, sparse] = best;
            println!(
                "{size:>5} x {size:>4} {sparsity:>9.2} {dense:>9.3} {sparse:>9.3} {:>6.2}",
                sparse / dense
            );
        }
    }
}
