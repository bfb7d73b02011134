//! Softmax and cross-entropy on a GPU, a block for each row.

use std::ops::Range;

use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::LossTotal;
use crate::cuda::{Args, Build, Cuda, KernelSource};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::lanes;
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource =
    lanes::source("cross_entropy.cu", include_str!("../cross_entropy.cu"), Build::FLOATS);

/// Threads of a row's block.
const BLOCK: u32 = 512;

/// What is known of a batch's rows.
#[derive(Debug)]
pub(super) struct RowLosses {
    /// Doubles.
    losses: Tensor,
    /// u32: 1 where the row is correct.
    correct: Tensor,
}

impl RowLosses {
    pub(super) fn new(targets: &Tensor) -> Result<RowLosses> {
        let (device, rows) = (targets.device(), targets.len());
        Ok(RowLosses {
            losses: lanes::doubles(&device, rows)?,
            correct: Tensor::empty(&device, &[rows], DType::U32, Category::Workspace)?,
        })
    }

    /// Rows from `first` on; the logits become the gradient.
    pub(super) fn differentiate(
        &mut self,
        cuda: &Cuda,
        logits: &mut Tensor,
        targets: &Tensor,
        first: usize,
        scale: f32,
    ) -> Result<()> {
        let (rows, v) = (logits.rows(), logits.width());
        let kept = kept(cuda, v, logits.dtype())?;
        let shared = (kept * logits.dtype().bytes()) as u32;
        let kernel = cuda.kernel(&SOURCE, Build::of(logits.dtype()), "cross_entropy_forward_backward")?;
        let args = self.from(Args::new().output(logits), targets, first).size(v).f32(scale).size(kept);
        // SAFETY: the logits are [rows, v], the other three have as many rows from `first` on, which the
        // caller has checked; the block has room for what it keeps.
        unsafe { kernel.launch(lanes::blocks(rows, 1), BLOCK, shared, args) }
    }

    /// Rows from `first` on.
    pub(super) fn measure(
        &mut self,
        cuda: &Cuda,
        logits: &Tensor,
        targets: &Tensor,
        first: usize,
    ) -> Result<()> {
        let (rows, v) = (logits.rows(), logits.width());
        let kernel = cuda.kernel(&SOURCE, Build::of(logits.dtype()), "cross_entropy_evaluate")?;
        let args = self.from(Args::new().input(logits), targets, first).size(v);
        // SAFETY: as above.
        unsafe { kernel.launch(lanes::blocks(rows, 1), BLOCK, 0, args) }
    }

    /// Targets, losses and correct predictions from row `first` on.
    fn from<'a>(&mut self, args: Args<'a>, targets: &Tensor, first: usize) -> Args<'a> {
        let at = |tensor: &Tensor, bytes: usize| tensor.cuda_buffer().address() + (first * bytes) as u64;
        args.pointer(at(targets, 4)).pointer(at(&self.losses, 8)).pointer(at(&self.correct, 4))
    }

    /// Adds up: two doubles on the GPU.
    pub(super) fn sum(self) -> Result<Tensor> {
        let RowLosses { losses, correct } = self;
        let (cuda, device) = (losses.cuda_buffer().cuda(), losses.device());
        let sums = lanes::doubles(&device, 2)?;
        let address = sums.cuda_buffer().address();
        let args = Args::new().input(&losses).input(&correct).size(correct.len());
        let args = args.pointer(address).pointer(address + 8);
        // SAFETY: losses and correct have as many rows; the two sums, of 8 bytes each, are room for nobody
        // else. Its code is the same in both builds.
        unsafe {
            cuda.kernel(&SOURCE, Build::of(DType::F32), "cross_entropy_total")?.launch(1, 1024, 0, args)?;
        }
        Ok(sums)
    }

    /// What all ranks have read of rows from `first` on: their losses and correct predictions.
    pub(super) fn join(&mut self, cuda: &Cuda, targets: &Tensor, first: usize, all: &Tensor) -> Result<()> {
        let (ranks, rows) = (all.shape()[0], all.shape()[1]);
        let kernel = cuda.kernel(&SOURCE, Build::of(DType::F32), "cross_entropy_join")?;
        let args = self.from(Args::new().input(all), targets, first).size(rows).size(ranks);
        // SAFETY: the numbers are [ranks, rows, 4]; targets, losses and correct predictions have as many rows
        // from `first` on, which the caller has checked.
        unsafe { kernel.launch(lanes::blocks(rows, 256), 256, 0, args) }
    }
}

fn from_row(targets: &Tensor, first: usize) -> u64 {
    targets.cuda_buffer().address() + (4 * first) as u64
}

/// What a rank reads of rows from `first` on.
pub(super) fn read_shard(
    cuda: &Cuda,
    logits: &Tensor,
    targets: &Tensor,
    first: usize,
    classes: &Range<usize>,
    numbers: &mut Tensor,
) -> Result<()> {
    let (rows, v) = (logits.rows(), logits.width());
    let kernel = cuda.kernel(&SOURCE, Build::of(logits.dtype()), "cross_entropy_read_part")?;
    let args = Args::new().input(logits).pointer(from_row(targets, first)).output(numbers);
    let args = args.size(v).u32(classes.start as u32).u32(classes.len() as u32);
    // SAFETY: the logits are [rows, v] with at least as many columns as classes, the numbers [rows, 4], and
    // there are as many targets from `first` on, which the caller has checked.
    unsafe { kernel.launch(lanes::blocks(rows, 1), BLOCK, 0, args) }
}

/// The gradient of a rank's logits, of rows from `first` on, in their place.
pub(super) fn differentiate_shard(
    cuda: &Cuda,
    logits: &mut Tensor,
    targets: &Tensor,
    first: usize,
    classes: &Range<usize>,
    all: &Tensor,
    scale: f32,
) -> Result<()> {
    let (rows, v) = (logits.rows(), logits.width());
    let kernel = cuda.kernel(&SOURCE, Build::of(logits.dtype()), "cross_entropy_differentiate_part")?;
    let args = Args::new().output(logits).pointer(from_row(targets, first)).input(all);
    let args = args.size(rows).size(all.shape()[0]).size(v);
    let args = args.u32(classes.start as u32).u32(classes.len() as u32).f32(scale);
    // SAFETY: as above, and the numbers are [ranks, rows, 4].
    unsafe { kernel.launch(lanes::blocks(rows, 1), BLOCK, 0, args) }
}

/// Reads the two sums back in one copy.
pub(super) fn read(sums: &Tensor) -> Result<LossTotal> {
    let [loss, correct] = sums.cuda_buffer().words()?;
    Ok(LossTotal { loss_sum: f64::from_bits(loss), correct: correct as usize })
}

/// Logits of a row that stay in shared memory between its two readings: so many that two blocks share a
/// multiprocessor, with 2 KiB each for what the block needs beside them.
fn kept(cuda: &Cuda, v: usize, dtype: DType) -> Result<usize> {
    let shared =
        cuda.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)? as usize;
    let keeps = (shared / 2).saturating_sub(2 << 10) / dtype.bytes();
    Ok(v.min(keeps) / 8 * 8)
}
