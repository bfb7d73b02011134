//! Values to start from on a GPU.

use super::{InitialDistribution, SampleForm};
use crate::cuda::{Args, Build, Cuda, KernelInclude, KernelSource};
use crate::error::Result;
use crate::ops::index_runs::IndexRuns;
use crate::ops::lanes::{self, THREADS};
use crate::tensor::Tensor;

/// Exact: a product and a sum that are rounded once would give other bits than the CPU's.
pub(crate) static SOURCE: KernelSource = KernelSource {
    includes: &[KernelInclude::LANES, KernelInclude::RANDOM],
    exact: true,
    ..lanes::source("sample.cu", include_str!("../sample.cu"), Build::FLOATS)
};

pub(super) fn sample(
    cuda: &Cuda,
    distribution: InitialDistribution,
    key: u64,
    indices: &IndexRuns,
    values: &mut Tensor,
) -> Result<()> {
    let n = values.len();
    if n == 0 {
        return Ok(());
    }
    let build = Build::of(values.dtype());
    match distribution.form() {
        SampleForm::Constant(value) => {
            let kernel = cuda.kernel(&SOURCE, build, "sample_constant")?;
            let args = Args::new().output(values).size(n).f32(value);
            // SAFETY: values has n elements.
            unsafe { kernel.launch(lanes::elements(n), THREADS, 0, args) }
        }
        SampleForm::Normal { scale, from, width } => {
            let table = indices.table(cuda)?;
            let kernel = cuda.kernel(&SOURCE, build, "sample_normal")?;
            let args = Args::new().output(values).size(n).u64(key).input(&table).size(indices.rows());
            let args = args.f64(scale).f64(from).f64(width);
            // SAFETY: values has n elements, the table a row for each run, and the first run begins at 0.
            unsafe { kernel.launch(lanes::elements(n), THREADS, 0, args) }
        }
    }
}
