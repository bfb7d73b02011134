//! Keys, their histograms and masks on a GPU.

use super::{DIGITS, Digit, ScoreOrder, TILE};
use crate::cuda::{Args, Build, Cuda, KernelInclude, KernelSource};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::index_runs::IndexRuns;
use crate::ops::lanes::{self, THREADS};
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource = KernelSource {
    includes: &[KernelInclude::LANES, KernelInclude::RANDOM],
    ..lanes::source("select.cu", include_str!("../select.cu"), Build::FLOATS)
};

/// What is asked of keys alone is in every build.
const OF_KEYS: Build = Build::F32;

pub(super) fn keys(
    cuda: &Cuda,
    x: &Tensor,
    y: Option<&Tensor>,
    score: ScoreOrder,
    keys: &mut Tensor,
) -> Result<()> {
    let n = x.len();
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "select_keys")?;
    let by = y.map_or(0, |y| y.cuda_buffer().address());
    let args =
        Args::new().input(x).u64(by).output(keys).size(n).u32(u32::from(score == ScoreOrder::Magnitude));
    // SAFETY: keys has n elements, and so has y, of f32; a missing one is a null pointer.
    unsafe { kernel.launch(lanes::elements(n), THREADS, 0, args) }
}

pub(super) fn random_keys(cuda: &Cuda, indices: &IndexRuns, stream: u64, keys: &mut Tensor) -> Result<()> {
    let n = keys.len();
    if n == 0 {
        return Ok(());
    }
    let table = indices.table(cuda)?;
    let kernel = cuda.kernel(&SOURCE, OF_KEYS, "select_random")?;
    let args = Args::new().output(keys).size(n).u64(stream).input(&table).size(indices.rows());
    // SAFETY: keys has n elements, the table a row for each run, and the first run begins at 0.
    unsafe { kernel.launch(lanes::elements(n), THREADS, 0, args) }
}

pub(super) fn histogram(cuda: &Cuda, keys: &Tensor, digit: Digit) -> Result<Vec<u64>> {
    let n = keys.len();
    // Pairs of words, each pair a count.
    let mut counts = zeros(cuda, 2 * DIGITS)?;
    let (low, high) = match digit {
        Digit::High => (0, 0),
        Digit::LowOf(high) => (1, high),
    };
    let kernel = cuda.kernel(&SOURCE, OF_KEYS, "select_histogram")?;
    let args = Args::new().input(keys).output(&mut counts).size(n).u32(low).u32(high);
    // SAFETY: counts has a pair of words for every value of a digit, and a digit has 16 bits.
    unsafe { kernel.launch(lanes::elements(n), THREADS, 0, args) }?;
    let words = counts.read_u32()?;
    Ok(words.as_chunks().0.iter().map(|[low, high]| u64::from(*high) << 32 | u64::from(*low)).collect())
}

pub(super) fn equal_by_tile(cuda: &Cuda, keys: &Tensor, threshold: u32) -> Result<Vec<u32>> {
    let n = keys.len();
    let tiles = n.div_ceil(TILE);
    let mut counts = zeros(cuda, tiles)?;
    let kernel = cuda.kernel(&SOURCE, OF_KEYS, "select_equal")?;
    let args = Args::new().input(keys).output(&mut counts).size(n).u32(threshold).u32(TILE as u32);
    // SAFETY: a block reads its own tile and writes its own count.
    unsafe { kernel.launch(tiles as u32, THREADS, 0, args) }?;
    counts.read_u32()
}

pub(super) fn at_least(cuda: &Cuda, keys: &Tensor, threshold: u32, end: usize) -> Result<Vec<u32>> {
    let n = keys.len();
    let mut words = zeros(cuda, n.div_ceil(32))?;
    let kernel = cuda.kernel(&SOURCE, OF_KEYS, "select_at_least")?;
    let args = Args::new().input(keys).output(&mut words).size(n).u32(threshold).size(end);
    // SAFETY: a warp writes the word of the 32 keys that it reads.
    unsafe { kernel.launch(lanes::blocks(n, THREADS as usize), THREADS, 0, args) }?;
    words.read_u32()
}

fn zeros(cuda: &Cuda, len: usize) -> Result<Tensor> {
    Tensor::zeros(&Device::Cuda(cuda.clone()), &[len], DType::U32, Category::Workspace)
}
