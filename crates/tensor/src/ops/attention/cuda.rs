//! Attention on a GPU.
//!
//! bf16 runs on the tensor cores (`attention.cu`) for the head sizes that these are built for. f32, and other
//! head sizes by way of f32, run on the plain cores (`attention_f32.cu`).

use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::AttentionDims;
use crate::cuda::{Args, Build, Cuda, KernelInclude, KernelSource};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Category;
use crate::ops::cast::cast;
use crate::ops::lanes;
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource = KernelSource {
    name: "attention.cu",
    includes: &[
        KernelInclude::COPIES,
        KernelInclude::TENSOR_CORES,
        KernelInclude { name: "attention/tiles.cuh", text: include_str!("tiles.cuh") },
        KernelInclude { name: "attention/products.cuh", text: include_str!("products.cuh") },
        KernelInclude { name: "attention/forward.cuh", text: include_str!("forward.cuh") },
        KernelInclude { name: "attention/backward_query.cuh", text: include_str!("backward_query.cuh") },
        KernelInclude { name: "attention/backward_key.cuh", text: include_str!("backward_key.cuh") },
        KernelInclude {
            name: "attention/backward_key_paired.cuh",
            text: include_str!("backward_key_paired.cuh"),
        },
    ],
    text: include_str!("../attention.cu"),
    exact: false,
    builds: &[head(32), head(64), head(80), head(96), head(128)],
};

pub(crate) static SOURCE_F32: KernelSource = KernelSource {
    name: "attention_f32.cu",
    includes: &[],
    text: include_str!("../attention_f32.cu"),
    exact: false,
    builds: &[head(1), head(40), head(64), head(128), head(256)],
};

/// The largest head of the plain kernels.
const MOST: usize = 256;

/// A build's macros live as long as the program: one for each head size.
static HEADS: [[(&str, i64); 1]; MOST + 1] = {
    let mut all = [[("HEAD", 0)]; MOST + 1];
    let mut d = 0;
    while d <= MOST {
        all[d][0].1 = d as i64;
        d += 1;
    }
    all
};

const fn head(d: usize) -> Build {
    Build { element: None, defines: &HEADS[d] }
}

pub(super) fn forward(
    cuda: &Cuda,
    qkv: &Tensor,
    positions: Option<&Tensor>,
    z: &AttentionDims,
) -> Result<(Tensor, Tensor)> {
    let kernels = AttentionKernels::new(cuda, qkv.dtype(), positions, z)?;
    if kernels.dtype == qkv.dtype() {
        return kernels.forward(qkv, Category::Transient);
    }
    let (y, logsumexp) = kernels.forward(&kernels.convert(qkv)?, Category::Workspace)?;
    Ok((cast(&y, qkv.dtype(), Category::Transient)?, logsumexp))
}

pub(super) fn backward(
    cuda: &Cuda,
    dy: &Tensor,
    qkv: &Tensor,
    y: &Tensor,
    logsumexp: &Tensor,
    positions: Option<&Tensor>,
    z: &AttentionDims,
) -> Result<Tensor> {
    let kernels = AttentionKernels::new(cuda, qkv.dtype(), positions, z)?;
    if kernels.dtype == qkv.dtype() {
        return kernels.backward(dy, qkv, y, logsumexp, Category::Transient);
    }
    let [dy, wide, y] = [kernels.convert(dy)?, kernels.convert(qkv)?, kernels.convert(y)?];
    let dqkv = kernels.backward(&dy, &wide, &y, logsumexp, Category::Workspace)?;
    cast(&dqkv, qkv.dtype(), Category::Transient)
}

#[derive(Debug, Clone, Copy)]
enum AttentionPass {
    Forward,
    BackwardQuery,
    BackwardKey,
}

/// One of the two files of kernels, for one call.
struct AttentionKernels<'a> {
    cuda: &'a Cuda,
    z: &'a AttentionDims,
    positions: Option<&'a Tensor>,
    dtype: DType,
    build: Build,
}

impl AttentionKernels<'_> {
    fn new<'a>(
        cuda: &'a Cuda,
        dtype: DType,
        positions: Option<&'a Tensor>,
        z: &'a AttentionDims,
    ) -> Result<AttentionKernels<'a>> {
        if z.d > MOST {
            let what = format!(
                "attention on a GPU takes heads of at most {MOST} columns, got {}: raise model.heads or set \
                 device.kind = \"cpu\"",
                z.d
            );
            return Err(Error::Unsupported { what });
        }
        let build = head(z.d);
        let tensor_cores = dtype == DType::Bf16 && SOURCE.builds.contains(&build) && fits(cuda, build)?;
        let dtype = if tensor_cores { DType::Bf16 } else { DType::F32 };
        Ok(AttentionKernels { cuda, z, positions, dtype, build })
    }

    /// A tensor in the kernels' type.
    fn convert(&self, x: &Tensor) -> Result<Tensor> {
        cast(x, self.dtype, Category::Workspace)
    }

    /// The output, counted under `category`, and the logsumexp.
    fn forward(&self, qkv: &Tensor, category: Category) -> Result<(Tensor, Tensor)> {
        let (z, device) = (self.z, qkv.device());
        let mut y = Tensor::empty(&device, &[z.batch, z.t, z.c], self.dtype, category)?;
        let mut logsumexp =
            Tensor::empty(&device, &[z.batch, z.heads, z.t], DType::F32, Category::Transient)?;
        let args = Args::new().input(qkv).output(&mut y).output(&mut logsumexp);
        // SAFETY: qkv is [batch, t, columns], y [batch, t, c] and the logsumexp [batch, heads, t].
        unsafe { self.launch(AttentionPass::Forward, args)? };
        Ok((y, logsumexp))
    }

    /// The gradient, counted under `category`.
    fn backward(
        &self,
        dy: &Tensor,
        qkv: &Tensor,
        y: &Tensor,
        logsumexp: &Tensor,
        category: Category,
    ) -> Result<Tensor> {
        let z = self.z;
        let mut dqkv = qkv.empty_like(category)?;
        let mut rows =
            Tensor::empty(&qkv.device(), &[z.batch, z.heads, z.t, 2], DType::F32, Category::Workspace)?;
        let args = Args::new().input(qkv).input(y).input(dy).input(logsumexp).output(&mut rows);
        let args = args.output(&mut dqkv);
        // SAFETY: qkv and dqkv are [batch, t, columns], y and dy [batch, t, c], the logsumexp
        // [batch, heads, t], and `rows` has two numbers for each of these.
        unsafe { self.launch(AttentionPass::BackwardQuery, args)? };
        let args = Args::new().input(qkv).input(dy).input(&rows);
        if z.group() == 1 {
            // SAFETY: as above; the kernel before has filled `rows`, and this one writes the other columns of
            // dqkv.
            unsafe { self.launch(AttentionPass::BackwardKey, args.output(&mut dqkv))? };
            return Ok(dqkv);
        }
        // Each head of queries leaves what it gives to the keys and values that it shares, to be added up in
        // their order.
        let mut each =
            Tensor::empty(&qkv.device(), &[z.batch, z.t, 2 * z.c], self.dtype, Category::Workspace)?;
        // SAFETY: as above, with keys' and values' gradients of every head of queries.
        unsafe { self.launch(AttentionPass::BackwardKey, args.output(&mut each))? };
        let (source, name) = match self.dtype {
            DType::Bf16 => (&SOURCE, "attention_sum_groups"),
            _ => (&SOURCE_F32, "attention_sum_groups_f32"),
        };
        let n = z.batch * z.t * 2 * z.kv_heads * z.d;
        let args = Args::new().input(&each).output(&mut dqkv).size(n);
        let args = args.i32(z.heads as i32).i32(z.kv_heads as i32);
        let kernel = self.cuda.kernel(source, self.build, name)?;
        // SAFETY: a thread for each of the n elements that it writes, and as many for every head of a group
        // in `each`.
        unsafe { kernel.launch(lanes::blocks(n, 256), 256, 0, args)? };
        Ok(dqkv)
    }

    /// # Safety
    /// The arguments are those of the pass before `positions`, of the sizes of this call.
    unsafe fn launch<'b>(&'b self, pass: AttentionPass, args: Args<'b>) -> Result<()> {
        let (source, name, rows, threads, shared) = self.geometry(pass)?;
        let args = match self.positions {
            Some(positions) => args.input(positions),
            None => args.null(),
        };
        let args = args.i32(self.z.t as i32).i32(self.z.heads as i32).i32(self.z.kv_heads as i32);
        let blocks = lanes::blocks(self.z.t, rows as usize) as usize * self.z.tasks();
        let kernel = self.cuda.kernel(source, self.build, name)?;
        // SAFETY: the caller vouches for the tensors; every block of rows of every head has a block of threads.
        unsafe { kernel.launch(lanes::blocks(blocks, 1), threads, shared, args) }
    }

    /// A pass's source, its name there, the rows of a block, its threads and its shared memory.
    fn geometry(&self, pass: AttentionPass) -> Result<(&'static KernelSource, &'static str, u32, u32, u32)> {
        if self.dtype == DType::Bf16 {
            let names = ["attention_forward", "attention_backward_query", "attention_backward_key"];
            let [rows, threads, shared] = launches(self.cuda, self.build)?[pass as usize];
            return Ok((&SOURCE, names[pass as usize], rows, threads, shared));
        }
        let names = ["attention_forward_f32", "attention_backward_query_f32", "attention_backward_key_f32"];
        let tiles = [3, 4, 4][pass as usize];
        let shared = tiles * 32 * (self.z.d as u32 + 1) * 4;
        Ok((&SOURCE_F32, names[pass as usize], 32, 256, shared))
    }
}

/// For each pass on the tensor cores the rows of a block, its threads and its shared memory.
fn launches(cuda: &Cuda, build: Build) -> Result<[[u32; 3]; 3]> {
    let all = cuda.constant::<9>(&SOURCE, build, "attention_geometry")?;
    Ok([0, 1, 2].map(|pass| [0, 1, 2].map(|i| all[pass * 3 + i] as u32)))
}

/// Whether the GPU has the shared memory that a head of this size wants: small GPUs have not for large heads.
fn fits(cuda: &Cuda, build: Build) -> Result<bool> {
    let most = cuda.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    Ok(launches(cuda, build)?.iter().all(|[_, _, shared]| *shared <= most))
}
