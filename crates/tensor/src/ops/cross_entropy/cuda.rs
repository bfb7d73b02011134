//! Softmax and cross-entropy on a card, a block for each row.

use cudarc::driver::sys::CUdevice_attribute as Attribute;

use crate::cuda::lanes;
use crate::cuda::{Args, Build, Cuda, Source};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;

pub(crate) static SOURCE: Source =
    lanes::source("cross_entropy.cu", include_str!("../cross_entropy.cu"), Build::FLOATS);

/// Threads of a row's block.
const BLOCK: u32 = 512;

/// The loss and the number of correct rows; the logits become the gradient.
pub(super) fn forward_backward(
    cuda: &Cuda,
    logits: &mut Tensor,
    targets: &Tensor,
    scale: f32,
) -> Result<(f64, usize)> {
    let (rows, v) = (logits.rows(), logits.width());
    let kept = kept(cuda, v, logits.dtype())?;
    let shared = (kept * logits.dtype().bytes()) as u32;
    let kernel = cuda.kernel(&SOURCE, Build::of(logits.dtype()), "cross_entropy_forward_backward")?;
    let dtype = logits.dtype();
    judged(cuda, dtype, targets, rows, |losses, correct| {
        let args = Args::new().output(logits).input(targets).output(losses).output(correct);
        let args = args.size(v).f32(scale).size(kept);
        // SAFETY: the logits are [rows, v], the other three [rows]; the block has room for what it keeps.
        unsafe { kernel.launch(lanes::blocks(rows, 1), BLOCK, shared, args) }
    })
}

/// The loss and the number of correct rows.
pub(super) fn evaluate(cuda: &Cuda, logits: &Tensor, targets: &Tensor) -> Result<(f64, usize)> {
    let (rows, v) = (logits.rows(), logits.width());
    let kernel = cuda.kernel(&SOURCE, Build::of(logits.dtype()), "cross_entropy_evaluate")?;
    judged(cuda, logits.dtype(), targets, rows, |losses, correct| {
        let args = Args::new().input(logits).input(targets).output(losses).output(correct).size(v);
        // SAFETY: the logits are [rows, v], the other three [rows].
        unsafe { kernel.launch(lanes::blocks(rows, 1), BLOCK, 0, args) }
    })
}

/// Logits of a row that stay in shared memory between its two readings: so many that two blocks share a
/// multiprocessor, with 2 KiB each for what the block needs beside them.
fn kept(cuda: &Cuda, v: usize, dtype: DType) -> Result<usize> {
    let shared =
        cuda.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)? as usize;
    let room = (shared / 2).saturating_sub(2 << 10) / dtype.bytes();
    Ok(v.min(room) / 8 * 8)
}

/// Adds up what `work` leaves for each row, a loss (double) and whether it is correct (u32), and reads the two
/// sums back in one copy.
fn judged(
    cuda: &Cuda,
    dtype: DType,
    targets: &Tensor,
    rows: usize,
    work: impl FnOnce(&mut Tensor, &mut Tensor) -> Result<()>,
) -> Result<(f64, usize)> {
    assert_eq!(targets.dtype(), DType::U32, "cross_entropy: targets");
    let device = targets.device();
    let mut losses = lanes::doubles(&device, rows)?;
    let mut correct = Tensor::empty(&device, &[rows], DType::U32, Category::Workspace)?;
    work(&mut losses, &mut correct)?;
    let sums = lanes::doubles(&device, 2)?;
    let address = sums.cuda_buffer().address();
    let args = Args::new().input(&losses).input(&correct).size(rows).pointer(address).pointer(address + 8);
    // SAFETY: losses and correct are [rows]; the two sums, of 8 bytes each, are room for nobody else.
    unsafe {
        cuda.kernel(&SOURCE, Build::of(dtype), "cross_entropy_total")?.launch(1, 1024, 0, args)?;
    }
    let [loss, correct] = sums.cuda_buffer().words()?;
    Ok((f64::from_bits(loss), correct as usize))
}
