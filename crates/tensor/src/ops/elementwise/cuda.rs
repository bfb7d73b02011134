//! Sums, products and multiples on a GPU.

use crate::cuda::{Args, Build, Cuda, Kernel, KernelSource};
use crate::error::Result;
use crate::ops::lanes::{self, THREADS};
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource =
    lanes::source("elementwise.cu", include_str!("../elementwise.cu"), Build::FLOATS);

pub(super) fn add(cuda: &Cuda, a: &Tensor, b: &Tensor, y: &mut Tensor) -> Result<()> {
    let n = a.len();
    let args = Args::new().input(a).input(b).output(y).size(n);
    // SAFETY: the three are of n elements, a and y of one type, b of the type that the kernel is for.
    unsafe { adder(cuda, a, b)?.launch(lanes::elements(n), THREADS, 0, args) }
}

pub(super) fn add_into(cuda: &Cuda, a: &mut Tensor, b: &Tensor) -> Result<()> {
    let n = a.len();
    let kernel = adder(cuda, a, b)?;
    let address = a.cuda_buffer().address();
    let args = Args::new().pointer(address).input(b).output(a).size(n);
    // SAFETY: both are of n elements, b of the type that the kernel is for, which lets its sum be a.
    unsafe { kernel.launch(lanes::elements(n), THREADS, 0, args) }
}

fn adder(cuda: &Cuda, a: &Tensor, b: &Tensor) -> Result<Kernel> {
    let name = b.dtype().by_float("elementwise_add_f32", "elementwise_add_bf16");
    cuda.kernel(&SOURCE, Build::of(a.dtype()), name)
}

pub(super) fn mul(cuda: &Cuda, a: &Tensor, b: &Tensor, y: &mut Tensor) -> Result<()> {
    let n = a.len();
    let kernel = cuda.kernel(&SOURCE, Build::of(a.dtype()), "elementwise_mul")?;
    let args = Args::new().input(a).input(b).output(y).size(n);
    // SAFETY: the three are of n elements and of the type that the kernel is built for.
    unsafe { kernel.launch(lanes::elements(n), THREADS, 0, args) }
}

pub(super) fn scale_into(cuda: &Cuda, a: &mut Tensor, s: f32) -> Result<()> {
    let n = a.len();
    let kernel = cuda.kernel(&SOURCE, Build::of(a.dtype()), "elementwise_scale")?;
    let address = a.cuda_buffer().address();
    let args = Args::new().pointer(address).output(a).size(n).f32(s);
    // SAFETY: a has n elements; the kernel lets its result be a.
    unsafe { kernel.launch(lanes::elements(n), THREADS, 0, args) }
}
