//! Batches of stored images on a GPU: one launch for pixels and labels.

use super::StoredImages;
use crate::cuda::{Args, Build, Cuda, KernelSource};
use crate::error::Result;
use crate::memory::Category;
use crate::ops::lanes::{self, THREADS};
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource =
    lanes::source("stored.cu", include_str!("../stored.cu"), Build::FLOATS);

/// Pixels of an image that a block takes.
const PIXELS: usize = 1024;

pub(super) fn batch(
    cuda: &Cuda,
    stored: &StoredImages,
    picks: &[u32],
    x: &mut Tensor,
    targets: &mut Tensor,
) -> Result<()> {
    let sent = Tensor::from_slice(&x.device(), &[picks.len()], picks, Category::Workspace)?;
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "stored_batch")?;
    // The images may have been copied through another handle of this GPU, which is no argument of ours.
    let args = [&stored.pixels, &stored.labels, &stored.values]
        .into_iter()
        .fold(Args::new(), |args, table| args.pointer(table.cuda_buffer().address()));
    let args = args.input(&sent).output(x).output(targets).size(stored.len).size(stored.values.rows());
    let grid = (lanes::blocks(picks.len(), 1), lanes::blocks(stored.len, PIXELS));
    // SAFETY: the tables have as many bytes, labels and values as their sizes say, and live as long as
    // `stored`; every pick is one of them; x is [picks, len], targets [picks].
    unsafe { kernel.launch(grid, THREADS, 0, args) }
}
