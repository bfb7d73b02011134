//! Attention of the last positions of a sequence whose earlier keys and values are kept: what was read before
//! is not read through the model again.
//!
//! ```text
//! position first + i:   s = q_i k' / sqrt(d) over keys 0 ..= first + i,   p = softmax(s),   y_i = p v
//! ```
//! qkv: [1, t, c + 2 kv_heads d] as in [`attention`](super::attention), of positions first .. first + t;
//! cache: [2, kv_heads, context, d], keys and then values, each head's one after the other; y: [1, t, c].
//!
//! With one position this reads each kept key and value once and computes next to nothing; heads of queries
//! that share keys and values read them together. Sums and probabilities are f32.

pub(crate) mod cuda;
mod host;

use super::attention::AttentionDims;
use super::position::Position;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;

/// An empty cache for one attention layer: memory for the keys and values of `context` positions.
pub fn cache(device: &Device, dtype: DType, kv_heads: usize, context: usize, d: usize) -> Result<Tensor> {
    Tensor::zeros(device, &[2, kv_heads, context, d], dtype, Category::Cache)
}

/// Puts the keys and values of new positions, from `first` on, into the cache.
pub fn append(
    qkv: &Tensor,
    cache: &mut Tensor,
    first: &Position,
    heads: usize,
    kv_heads: usize,
) -> Result<()> {
    let z = sizes(qkv, cache, first.at(), heads, kv_heads);
    match &qkv.device() {
        Device::Cpu(_) => {
            host::append(qkv, cache, first.at(), &z);
            Ok(())
        }
        Device::Cuda(gpu) => cuda::append(gpu, qkv, cache, first, &z),
    }
}

/// The same, and the attention's output at the new positions.
pub fn forward(
    qkv: &Tensor,
    cache: &mut Tensor,
    first: &Position,
    heads: usize,
    kv_heads: usize,
) -> Result<Tensor> {
    let z = sizes(qkv, cache, first.at(), heads, kv_heads);
    match &qkv.device() {
        Device::Cpu(cpu) => {
            host::append(qkv, cache, first.at(), &z);
            host::forward(cpu, qkv, cache, first.at(), &z)
        }
        Device::Cuda(gpu) => cuda::forward(gpu, qkv, cache, first, &z),
    }
}

fn sizes(qkv: &Tensor, cache: &Tensor, first: usize, heads: usize, kv_heads: usize) -> AttentionDims {
    let z = AttentionDims::new(qkv, heads, kv_heads);
    assert_eq!(z.batch, 1, "a cache is of one sequence");
    assert_eq!(cache.dtype(), qkv.dtype(), "a cache of another type");
    let &[2, kept, context, d] = cache.shape() else { panic!("a cache of {:?}", cache.shape()) };
    assert_eq!((kept, d), (kv_heads, z.d), "a cache of {:?}", cache.shape());
    assert!(first + z.t <= context, "positions up to {} in a cache of {context}", first + z.t);
    z
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::attention;
    use crate::ops::attention::tests::{grouped, plain_forward};
    use crate::testing::{check, tensor, values, wide};
    use proptest::prelude::*;

    /// All positions of one sequence, by plain loops with the whole row of scores.
    fn plain(qkv: &[f64], t: usize, heads: usize, kv_heads: usize, d: usize) -> Vec<f64> {
        plain_forward(qkv, &[], &grouped(1, t, heads, kv_heads, d)).0
    }

    /// The sequence in pieces of these lengths, each with what those before have left in the cache: on
    /// every device what the whole sequence gives at once.
    fn compare(lengths: &[usize], heads: usize, kv_heads: usize, d: usize, seed: u64) {
        let (t, width) = (lengths.iter().sum::<usize>(), (heads + 2 * kv_heads) * d);
        let qkv = values(seed, t * width, 1.5);
        let expected = plain(&wide(&qkv), t, heads, kv_heads, d);
        let c = heads * d;
        let mut first = 0;
        let bounds = lengths.iter().map(|len| {
            first += len;
            (first - len, *len)
        });
        let bounds: Vec<(usize, usize)> = bounds.collect();
        let each: Vec<Vec<f64>> =
            bounds.iter().map(|(first, len)| expected[first * c..(first + len) * c].to_vec()).collect();
        check(&each, |device, dtype| {
            let mut kept = cache(device, dtype, kv_heads, t + 3, d).unwrap();
            let mut position = Position::new(device).unwrap();
            let mut outputs = Vec::new();
            for &(first, len) in &bounds {
                let rows = &qkv[first * width..(first + len) * width];
                let rows = tensor(device, dtype, &[1, len, width], rows);
                position.set(first);
                position.send().unwrap();
                outputs.push(forward(&rows, &mut kept, &position, heads, kv_heads).unwrap());
            }
            outputs
        });
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(10))]
        #[test]
        fn pieces_of_a_sequence_agree_with_plain_loops(
            (start, more, heads, d) in (1usize..60, 1usize..5, 1usize..4, 1usize..40),
            seed in 0u64..1000,
        ) {
            compare(&[start, 1, more, 1, 1], heads, heads, d, seed);
        }
    }

    /// Heads of keys and values that serve several heads of queries, one of them all, and the largest head of
    /// a GPU.
    #[test]
    fn grouped_queries_agree_with_plain_loops() {
        for (heads, kv_heads, d) in [(4, 2, 32), (6, 2, 64), (4, 1, 128), (6, 3, 24), (2, 1, 256)] {
            compare(&[40, 1, 1, 7, 1], heads, kv_heads, d, 7);
        }
    }

    /// What is only put in is found by what comes behind it.
    #[test]
    fn keys_that_were_put_in_without_an_output_are_attended_to() {
        let (rows, d) = (values(5, 12 * 24, 1.0), 8);
        let expected = plain(&wide(&rows), 12, 1, 1, d);
        check(&[expected[11 * d..].to_vec()], |device, dtype| {
            let mut kept = cache(device, dtype, 1, 12, d).unwrap();
            let mut position = Position::new(device).unwrap();
            append(&tensor(device, dtype, &[1, 11, 24], &rows[..11 * 24]), &mut kept, &position, 1, 1)
                .unwrap();
            position.set(11);
            position.send().unwrap();
            let last = tensor(device, dtype, &[1, 1, 24], &rows[11 * 24..]);
            vec![forward(&last, &mut kept, &position, 1, 1).unwrap()]
        });
    }

    /// Scores that would overflow in an exponential.
    #[test]
    fn large_scores_are_no_trouble() {
        check(&[vec![0.0]], |device, dtype| {
            let qkv = tensor(device, dtype, &[1, 70, 24], &values(1, 70 * 24, 60.0));
            let mut kept = cache(device, dtype, 2, 70, 4).unwrap();
            let y = forward(&qkv, &mut kept, &Position::new(device).unwrap(), 2, 2).unwrap().to_f32();
            vec![tensor(device, dtype, &[1], &[if y.iter().all(|y| y.is_finite()) { 0.0 } else { 1.0 }])]
        });
    }

    /// In f32 it is what the attention of training gives, to rounding.
    #[test]
    fn a_cache_gives_what_attention_without_one_gives() {
        let qkv = values(3, 90 * 48, 1.5);
        let device = Device::cpu(1).unwrap();
        let qkv = tensor(&device, DType::F32, &[1, 90, 48], &qkv);
        let (y, _) = attention::forward(&qkv, 4, 1).unwrap();
        let mut kept = cache(&device, DType::F32, 1, 90, 8).unwrap();
        let cached = forward(&qkv, &mut kept, &Position::new(&device).unwrap(), 4, 1).unwrap();
        crate::testing::assert_close(&cached.to_f32(), &wide(&y.to_f32()), 2e-6);
        assert_eq!(device.ledger().current(Category::Cache), 2 * 90 * 8 * 4);
    }
}
