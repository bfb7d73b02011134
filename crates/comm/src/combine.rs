//! Reductions over ranks on a GPU: in the order of ranks, bf16 in f32 and rounded once, as
//! [`crate::reduce`] does on the host.

use cudarc::driver::sys::CUdeviceptr;
use espalier_tensor::DType;
use espalier_tensor::cuda::{Args, Build, Cuda, KernelSource};

use crate::call::Reduce;
use crate::data::ElementType;

/// Ranks whose elements may lie anywhere, at most: as in combine.cu.
const MOST: usize = 12;

static SOURCE: KernelSource = KernelSource {
    name: "combine.cu",
    includes: &[],
    text: include_str!("combine.cu"),
    exact: true,
    builds: &[Build::F32, Build::BF16, Build::of(DType::U32)],
};

/// Queues the reduction of `x`, element by element, to all of `y`.
///
/// # Safety
/// Every address is of at least `elements` on this GPU, which nothing that is queued elsewhere touches
/// meanwhile. A `y` may be one of the `x`: an element is written by the thread that has read it; otherwise
/// they do not overlap.
pub(crate) unsafe fn combine(
    cuda: &Cuda,
    how: Reduce,
    element: ElementType,
    x: &[CUdeviceptr],
    y: &[CUdeviceptr],
    elements: usize,
) -> Result<(), String> {
    if x.len() > MOST {
        return Err(format!("at most {MOST} ranks of one GPU reduce together, and these are {}", x.len()));
    }
    let dtype = dtype(element);
    let name = match how {
        Reduce::Sum => "combine_sum",
        Reduce::Max => "combine_max",
    };
    let halves = |addresses: &[CUdeviceptr]| {
        let mut words = [0u32; 2 * MOST];
        for (words, address) in words.chunks_mut(2).zip(addresses) {
            words.copy_from_slice(&[*address as u32, (*address >> 32) as u32]);
        }
        words
    };
    let args = Args::new().fields(&halves(x)).fields(&halves(y));
    let args = args.u32(x.len() as u32).u32(y.len() as u32).size(elements);
    // SAFETY: what the caller promises.
    unsafe { launch(cuda, dtype, name, elements, args) }
}

fn dtype(element: ElementType) -> DType {
    match element {
        ElementType::F32 => DType::F32,
        ElementType::Bf16 => DType::Bf16,
        ElementType::U32 => DType::U32,
        ElementType::U64 | ElementType::F64 => unreachable!("no tensor has elements of eight bytes"),
    }
}

/// Queues the sum of `runs` ranges that follow each other from `x` on, each of so many elements, to `y`.
///
/// # Safety
/// The addresses are of so many elements on this GPU, which nothing that is queued elsewhere touches
/// meanwhile; the two do not overlap.
pub(crate) unsafe fn sum_runs(
    cuda: &Cuda,
    element: ElementType,
    x: CUdeviceptr,
    runs: usize,
    y: CUdeviceptr,
    elements: usize,
) -> Result<(), String> {
    let args = Args::new().pointer(x).u32(runs as u32).pointer(y).size(elements);
    // SAFETY: what the caller promises.
    unsafe { launch(cuda, dtype(element), "combine_parts", elements, args) }
}

/// # Safety
/// As for the kernel's arguments.
unsafe fn launch(
    cuda: &Cuda,
    dtype: DType,
    name: &'static str,
    elements: usize,
    args: Args<'_>,
) -> Result<(), String> {
    // Enough blocks to fill a GPU; each walks over the rest.
    let blocks = elements.div_ceil(256 * 8).min(8 * cuda.gpu().multiprocessors as usize) as u32;
    let kernel = cuda.kernel(&SOURCE, Build::of(dtype), name).map_err(|e| e.to_string())?;
    // SAFETY: what the caller promises.
    unsafe { kernel.launch(blocks, 256, 0, args) }.map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use espalier_tensor::cuda::compile::{CompileTarget, compile, version};

    use super::*;

    #[test]
    fn the_kernels_compile_for_ampere_and_hopper() {
        if let Err(e) = version() {
            return espalier_testing::skipped(espalier_testing::Need::Nvrtc, e);
        }
        for build in SOURCE.builds {
            for target in [CompileTarget::Machine(80), CompileTarget::Machine(90)] {
                let image = compile(&SOURCE, build, target).unwrap_or_else(|e| panic!("{e}"));
                assert!(image.starts_with(b"\x7fELF"), "{target}: not machine code");
            }
        }
        assert!(SOURCE.text.contains(&format!("#define PLACES {MOST}\n")), "as many ranks on both sides");
    }
}
