//! Causal multi-head attention that never holds a sequence x sequence matrix (Dao et al. 2022).
//!
//! ```text
//! s = q k' / sqrt(d) where key <= query,   p = softmax(s),   y = p v
//! dv = p' dy,   dp = dy v',   ds = p (dp - rowsum(dy y)) / sqrt(d),   dq = ds k,   dk = ds' q
//! ```
//! qkv: [batch, seq, c + 2 kv_heads d], queries, keys and values side by side: [heads, d], c = heads d, then
//! [kv_heads, d] twice; y: [batch, seq, c]; logsumexp of the scores of each query: f32 [batch, heads, seq].
//! Where there are fewer heads of keys and values, each serves heads / kv_heads neighbouring heads of
//! queries, and its gradient is the sum over them.
//!
//! Where several documents lie in a sequence, `positions` (u32 [batch, seq]) has the index of each token in its
//! own: a query then sees the keys from its document's beginning on, `query - position`, and tiles that no
//! query of a block sees are left out.
//!
//! Probabilities enter products in the tensor's own type, sums are f32.

pub(crate) mod cuda;
mod host;
mod scores;
#[cfg(test)]
pub(super) mod tests;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;

/// The attention's output and the logsumexp that [`backward`] needs, of sequences that are one document each.
pub fn forward(qkv: &Tensor, heads: usize, kv_heads: usize) -> Result<(Tensor, Tensor)> {
    forward_within(qkv, None, heads, kv_heads)
}

/// The same within documents, whose tokens have these `positions`.
pub fn forward_within(
    qkv: &Tensor,
    positions: Option<&Tensor>,
    heads: usize,
    kv_heads: usize,
) -> Result<(Tensor, Tensor)> {
    let z = AttentionDims::new(qkv, heads, kv_heads);
    z.check_positions(positions);
    match &qkv.device() {
        Device::Cpu(cpu) => host::forward(cpu, qkv, positions, &z),
        Device::Cuda(gpu) => cuda::forward(gpu, qkv, positions, &z),
    }
}

/// The gradient of `qkv`, from what [`forward`] took and gave.
pub fn backward(
    dy: &Tensor,
    qkv: &Tensor,
    y: &Tensor,
    logsumexp: &Tensor,
    heads: usize,
    kv_heads: usize,
) -> Result<Tensor> {
    backward_within(dy, qkv, y, logsumexp, None, heads, kv_heads)
}

/// The same from what [`forward_within`] took and gave.
pub fn backward_within(
    dy: &Tensor,
    qkv: &Tensor,
    y: &Tensor,
    logsumexp: &Tensor,
    positions: Option<&Tensor>,
    heads: usize,
    kv_heads: usize,
) -> Result<Tensor> {
    let z = AttentionDims::new(qkv, heads, kv_heads);
    z.check_positions(positions);
    assert_eq!(dy.shape(), [z.batch, z.t, z.c], "the gradient of attention's output");
    assert_eq!(y.shape(), dy.shape(), "attention's output");
    assert_eq!(logsumexp.shape(), [z.batch, heads, z.t], "attention's logsumexp");
    assert!(dy.dtype() == qkv.dtype() && y.dtype() == qkv.dtype(), "attention's tensors have one type");
    match &qkv.device() {
        Device::Cpu(cpu) => host::backward(cpu, dy, qkv, y, logsumexp, positions, &z),
        Device::Cuda(gpu) => cuda::backward(gpu, dy, qkv, y, logsumexp, positions, &z),
    }
}

/// The sizes of one call.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttentionDims {
    pub(super) batch: usize,
    pub(super) t: usize,
    pub(super) c: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) d: usize,
    pub(super) scale: f32,
}

impl AttentionDims {
    pub(super) fn new(qkv: &Tensor, heads: usize, kv_heads: usize) -> AttentionDims {
        let &[batch, t, width] = qkv.shape() else {
            panic!("qkv is [batch, seq, columns], got {:?}", qkv.shape())
        };
        let shared_out = kv_heads > 0 && heads.is_multiple_of(kv_heads);
        assert!(shared_out, "{kv_heads} heads of keys and values for {heads} heads of queries");
        let all = heads + 2 * kv_heads;
        assert!(width.is_multiple_of(all), "{width} columns are not {heads} + 2 x {kv_heads} heads");
        let d = width / all;
        AttentionDims { batch, t, c: heads * d, heads, kv_heads, d, scale: 1.0 / (d as f32).sqrt() }
    }

    fn check_positions(&self, positions: Option<&Tensor>) {
        if let Some(positions) = positions {
            assert_eq!(positions.shape(), [self.batch, self.t], "the positions of attention's tokens");
            assert_eq!(positions.dtype(), DType::U32, "the positions of attention's tokens");
        }
    }

    /// Heads of all sequences.
    fn tasks(&self) -> usize {
        self.batch * self.heads
    }

    /// Heads of queries that share one of keys and values.
    pub(super) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Columns of queries, keys and values side by side.
    pub(super) fn width(&self) -> usize {
        self.c + 2 * self.kv_heads * self.d
    }

    /// Where a task's columns begin in row `row` of its sequence, in a tensor [batch, seq, c].
    fn row(&self, task: usize, row: usize) -> usize {
        ((task / self.heads) * self.t + row) * self.c + task % self.heads * self.d
    }

    /// The same of its queries, keys and values in qkv.
    #[inline]
    fn qkv_rows(&self, task: usize, row: usize) -> [usize; 3] {
        let (sequence, head) = (task / self.heads, task % self.heads);
        let start = (sequence * self.t + row) * self.width();
        let shared = start + self.c + head / self.group() * self.d;
        [start + head * self.d, shared, shared + self.kv_heads * self.d]
    }

    /// The queries, keys and values of a task, rows [`AttentionDims::width`] apart.
    fn head<'a, T>(&self, qkv: &'a [T], task: usize) -> [&'a [T]; 3] {
        self.qkv_rows(task, 0).map(|at| &qkv[at..])
    }
}
