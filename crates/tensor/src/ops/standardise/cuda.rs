//! Batches of images on a GPU: one launch for pixels and labels.

use crate::cuda::{Args, Build, Cuda, KernelSource};
use crate::error::Result;
use crate::ops::lanes::{self, THREADS};
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource =
    lanes::source("standardise.cu", include_str!("../standardise.cu"), Build::FLOATS);

/// Numbers of a sample that a block takes.
const NUMBERS: usize = 4096;

pub(super) fn standardise(
    cuda: &Cuda,
    pixels: &Tensor,
    values: &Tensor,
    crops: &Tensor,
    x: &mut Tensor,
    targets: &mut Tensor,
) -> Result<()> {
    let &[n, height, width, channels] = x.shape() else { unreachable!("made by the caller") };
    let sizes = [pixels.shape()[1], pixels.shape()[2], height, width, channels];
    let sizes = sizes.map(|size| i32::try_from(size).expect("an image's extents have 31 bits") as u32);
    let len = height * width * channels;
    assert!(len < 1 << 31, "a crop of {len} numbers: they have 31 bits");
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "standardise")?;
    // The images may have been copied through another handle of this GPU, which is no argument of ours.
    let args = [pixels, values]
        .into_iter()
        .fold(Args::new(), |args, table| args.pointer(table.cuda_buffer().address()));
    let args = args.input(crops).output(x).output(targets).fields(&sizes);
    let grid = (lanes::blocks(n, 1), lanes::blocks(len, NUMBERS));
    // SAFETY: the tables have as many bytes and values as their sizes say, and outlive the launch in the order of
    // the stream; every crop is of one of the images, x is [n, height, width, channels], targets [n].
    unsafe { kernel.launch(grid, THREADS, 0, args) }
}
