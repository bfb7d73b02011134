//! What a product takes beside its operands, in bytes, and its counting.
//!
//! Three things: the packed columns of `b`, at most 16 MiB or 512 columns, once for all threads; for each
//! thread at work a packed block of rows of `a` and the sums of its tiles. All of it is a function of the
//! sizes, the kernel and the number of threads, so the ledger's workspace is the same in every run. Rows of
//! `a` that turn out to be readable where they lie are counted too.

use super::drive;
use crate::cpu::{Cpu, Isa};
use crate::dtype::{DType, Float};
use crate::memory::{Category, TrackedBytes};

/// Leave to run products on the calling threads, with their scratch space counted for as long as this lives.
/// One is made before an operation goes to the threads: counting each product by itself would have them all
/// write to one counter.
#[derive(Debug)]
pub struct GemmWorkspace {
    isa: Isa,
    /// What one thread may take.
    each: usize,
    _counted: TrackedBytes,
}

impl GemmWorkspace {
    /// For `tasks` of an operation on operands of type `T`, in each of which products `(m, n, k)` of these
    /// sizes or smaller run one at a time.
    pub fn new<T: Float>(cpu: &Cpu, tasks: usize, products: &[(usize, usize, usize)]) -> GemmWorkspace {
        let sizes = products.iter().map(|&(m, n, k)| serial_bytes(cpu.isa(), T::DTYPE, m, n, k));
        let each = sizes.max().unwrap_or(0);
        let _counted = cpu.ledger().track(Category::Workspace, each * tasks.min(cpu.threads()));
        GemmWorkspace { isa: cpu.isa(), each, _counted }
    }

    /// The instruction set of its device, where a product of these sizes was foreseen.
    pub(super) fn allows(&self, dtype: DType, m: usize, n: usize, k: usize) -> Isa {
        debug_assert!(
            serial_bytes(self.isa, dtype, m, n, k) <= self.each,
            "a product of {m} x {k} and {k} x {n} takes more scratch space than was booked"
        );
        self.isa
    }
}

/// Bytes that a product on one thread takes.
fn serial_bytes(isa: Isa, dtype: DType, m: usize, n: usize, k: usize) -> usize {
    with_engine!(isa, dtype, engine => drive::serial_bytes(engine, m, n, k))
}
