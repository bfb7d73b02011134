//! Causal multi-head attention that never holds a sequence x sequence matrix (Dao et al. 2022).
//!
//! ```text
//! s = q k' / sqrt(d) where key <= query,   p = softmax(s),   y = p v
//! dv = p' dy,   dp = dy v',   ds = p (dp - rowsum(dy y)) / sqrt(d),   dq = ds k,   dk = ds' q
//! ```
//! qkv: [batch, seq, 3 c], queries, keys and values side by side, each [heads, d] within c = heads d;
//! y: [batch, seq, c]; logsumexp of the scores of each query: f32 [batch, heads, seq].
//!
//! Probabilities enter products in the tensor's own type, sums are f32.

pub(crate) mod cuda;
mod host;
mod scores;
#[cfg(test)]
mod tests;

use crate::device::Device;
use crate::error::Result;
use crate::tensor::Tensor;

/// The attention's output and the logsumexp that [`backward`] needs.
pub fn forward(qkv: &Tensor, heads: usize) -> Result<(Tensor, Tensor)> {
    let z = Sizes::new(qkv, heads);
    match &qkv.device() {
        Device::Cpu(cpu) => host::forward(cpu, qkv, &z),
        Device::Cuda(card) => cuda::forward(card, qkv, &z),
    }
}

/// The gradient of `qkv`, from what [`forward`] took and gave.
pub fn backward(dy: &Tensor, qkv: &Tensor, y: &Tensor, logsumexp: &Tensor, heads: usize) -> Result<Tensor> {
    let z = Sizes::new(qkv, heads);
    assert_eq!(dy.shape(), [z.batch, z.t, z.c], "the gradient of attention's output");
    assert_eq!(y.shape(), dy.shape(), "attention's output");
    assert_eq!(logsumexp.shape(), [z.batch, heads, z.t], "attention's logsumexp");
    assert!(dy.dtype() == qkv.dtype() && y.dtype() == qkv.dtype(), "attention's tensors have one type");
    match &qkv.device() {
        Device::Cpu(cpu) => host::backward(cpu, dy, qkv, y, logsumexp, &z),
        Device::Cuda(card) => cuda::backward(card, dy, qkv, y, logsumexp, &z),
    }
}

/// The sizes of one call.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batch: usize,
    t: usize,
    c: usize,
    heads: usize,
    d: usize,
    scale: f32,
}

impl Sizes {
    fn new(qkv: &Tensor, heads: usize) -> Sizes {
        let &[batch, t, width] = qkv.shape() else {
            panic!("qkv is [batch, seq, 3 c], got {:?}", qkv.shape())
        };
        assert!(heads > 0 && width % (3 * heads) == 0, "{width} columns are not 3 x {heads} heads");
        let d = width / 3 / heads;
        Sizes { batch, t, c: width / 3, heads, d, scale: 1.0 / (d as f32).sqrt() }
    }

    fn tasks(&self) -> usize {
        self.batch * self.heads
    }

    /// Where a task's columns begin in row `row` of its sequence, in a tensor [batch, seq, c].
    fn row(&self, task: usize, row: usize) -> usize {
        ((task / self.heads) * self.t + row) * self.c + task % self.heads * self.d
    }

    /// The same for the queries in [batch, seq, 3 c]; keys are c further on, values 2 c.
    fn qkv_row(&self, task: usize, row: usize) -> usize {
        ((task / self.heads) * self.t + row) * 3 * self.c + task % self.heads * self.d
    }

    /// The queries, keys and values of a task, rows 3 c apart.
    fn head<'a, T>(&self, qkv: &'a [T], task: usize) -> [&'a [T]; 3] {
        let at = self.qkv_row(task, 0);
        [&qkv[at..], &qkv[at + self.c..], &qkv[at + 2 * self.c..]]
    }
}
