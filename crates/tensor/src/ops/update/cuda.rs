//! Optimizer steps on a GPU: one launch for a whole list of tensors.
//!
//! What the kernels work on is described by arrays that go to the GPU with each step, in one upload: norms, the
//! targets, the list of blocks, and the first block of each tensor.

use std::marker::PhantomData;

use super::rule::AdamMoments;
use super::{ParamUpdate, Rounding, SquaredNorms, StepParams, TrustNorms, UpdateRule};
use crate::cuda::{Args, Build, Cuda, KernelInclude, KernelSource};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::compress;
use crate::ops::lanes::{self, THREADS, TILE};
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource = KernelSource {
    // Memory is what a step waits for: exact arithmetic costs nothing, and dense, masked and compressed state
    // step alike.
    exact: true,
    includes: &[KernelInclude::LANES, KernelInclude::KEPT, KernelInclude::RANDOM],
    ..lanes::source("update.cu", include_str!("../update.cu"), &[Build::PLAIN])
};

/// Flags of a target.
const NARROW_GRADIENT: u32 = 1;
const ADAPT: u32 = 2;
const LOW_BITS: u32 = 4;
const COMPRESSED: u32 = 8;
const COMPRESSED_WEIGHT: u32 = 16;
const NARROW_STATES: u32 = 32;
const KEPT_VALUES: u32 = 64;

fn kernel_of(rule: &UpdateRule) -> &'static str {
    match rule {
        UpdateRule::Sgd => "update_sgd",
        UpdateRule::Momentum { .. } => "update_momentum",
        UpdateRule::Adam { .. } => "update_adam",
        UpdateRule::Lars { .. } => "update_lars",
        UpdateRule::Lamb { .. } => "update_lamb",
    }
}

/// Numbers of a step, each of 4 bytes.
const FIELDS: usize = 13;

/// A step's numbers in the order of the kernels' struct; those that a rule does not name are ignored.
fn settings(rule: UpdateRule, step: StepParams) -> [u32; FIELDS] {
    let (momentum, trust) = match rule {
        UpdateRule::Momentum { momentum, .. } => (momentum, 0.0),
        UpdateRule::Lars { momentum, trust, .. } => (momentum, trust),
        UpdateRule::Sgd | UpdateRule::Adam { .. } | UpdateRule::Lamb { .. } => (0.0, 0.0),
    };
    let AdamMoments { beta1, beta2, eps, unbias1, unbias2 } = AdamMoments::new(rule, step);
    let eps = if let UpdateRule::Lars { eps, .. } = rule { eps } else { eps };
    let max_norm = if let UpdateRule::Lamb { max_norm, .. } = rule { max_norm } else { f32::INFINITY };
    let floats =
        [step.lr, step.gradient_scale, momentum, beta1, beta2, eps, unbias1, unbias2, trust, max_norm];
    let nesterov = matches!(rule, UpdateRule::Momentum { nesterov: true, .. });
    let decoupled = matches!(rule, UpdateRule::Adam { decoupled: true, .. });
    let mut fields = [0; FIELDS];
    for (field, float) in fields.iter_mut().zip(floats) {
        *field = float.to_bits();
    }
    let outside = matches!(rule, UpdateRule::Lars { rate_in_velocity: false, .. });
    fields[floats.len()..].copy_from_slice(&[nesterov.into(), decoupled.into(), outside.into()]);
    fields
}

/// 8-byte words that a target takes on the GPU.
const WORDS: usize = 22;

/// A tensor as the kernels see it: addresses on the GPU, or 0 for what is not there.
#[derive(Debug)]
struct TensorDescriptor<'a> {
    words: [u64; WORDS],
    blocks: u32,
    gpu: &'a Cuda,
    tensors: PhantomData<&'a mut Tensor>,
}

impl<'a> TensorDescriptor<'a> {
    /// A target, whose lengths and types have been checked.
    fn target(target: &'a ParamUpdate<'_>, step: StepParams) -> TensorDescriptor<'a> {
        let ParamUpdate { weight, master, gradient, states, mask, weight_decay, adapt, .. } = target;
        let gpu = gradient.cuda_buffer().cuda();
        let address = |tensor: &Tensor| {
            assert!(tensor.cuda_buffer().cuda().is(gpu), "update: a target on two GPUs");
            tensor.cuda_buffer().address()
        };
        let low = master.as_ref().is_some_and(|master| master.dtype() == DType::U16);
        let rounding = target.placed_rounding();
        let kept_by = rounding.and_then(|rounding| rounding.kept_by);
        let flags = [
            (*adapt, ADAPT),
            (low, LOW_BITS),
            (target.is_compressed(), COMPRESSED),
            (target.weight_is_compressed() && target.is_compressed(), COMPRESSED_WEIGHT),
            (rounding.is_some(), NARROW_STATES),
            (kept_by.is_some(), KEPT_VALUES),
        ];
        let flags =
            flags.iter().filter(|(set, _)| *set).fold(width_flag(gradient), |all, (_, flag)| all | flag);
        let [m, v] = [0, 1].map(|i| states.get(i).map_or(0, |state| address(state)));
        let master = master.as_deref().map_or(0, address);
        // Kept values are met where their mask says that they stand.
        let mask = mask.or(kept_by);
        let walked = match mask {
            Some(mask) => compress::cuda::words(mask),
            None => [0, 0, 0, weight.len() as u64, weight.len() as u64],
        };
        let decay = pair(weight_decay.to_bits(), flags);
        let mut words = [0; WORDS];
        let tensors = [address(weight), master, address(gradient), m, v];
        let fields = tensors.into_iter().chain(walked).chain([decay]);
        let rounding = rounding.iter().flat_map(|one| rounding_words(one, step, weight.len()));
        words.iter_mut().zip(fields.chain(rounding)).for_each(|(word, field)| *word = field);
        TensorDescriptor {
            words,
            blocks: mask.map_or(lanes::blocks(weight.len(), TILE), compress::cuda::blocks),
            gpu,
            tensors: PhantomData,
        }
    }

    /// A gradient alone, to be measured.
    fn gradient(gradient: &'a Tensor) -> TensorDescriptor<'a> {
        let (buffer, length) = (gradient.cuda_buffer(), gradient.len() as u64);
        let flags = pair(0, width_flag(gradient));
        let mut words = [0; WORDS];
        words[..11].copy_from_slice(&[0, 0, buffer.address(), 0, 0, 0, 0, 0, length, length, flags]);
        TensorDescriptor {
            words,
            blocks: lanes::blocks(gradient.len(), TILE),
            gpu: buffer.cuda(),
            tensors: PhantomData,
        }
    }
}

/// How a target of so many elements is rounded, as the kernels' struct lies in memory.
fn rounding_words(rounding: &Rounding<'_>, step: StepParams, elements: usize) -> [u64; 11] {
    let Rounding { first, positions, .. } = *rounding;
    let [a, b, c] = positions.ranges;
    let ranges = [a.0, b.0, c.0, a.1, b.1, c.1];
    let mut words = [rounding.stream(step), first as u64, elements as u64, positions.row, positions.full_row]
        .into_iter()
        .chain(ranges);
    std::array::from_fn(|_| words.next().expect("eleven words"))
}

fn width_flag(gradient: &Tensor) -> u32 {
    gradient.dtype().by_float(0, NARROW_GRADIENT)
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// A step over all targets, which are on this GPU.
pub(super) fn step(
    cuda: &Cuda,
    rule: UpdateRule,
    step: StepParams,
    mut targets: Vec<ParamUpdate<'_>>,
    norms: TrustNorms<'_>,
) -> Result<()> {
    for target in &mut targets {
        let beside = target.states.iter_mut().map(|state| &mut **state).chain(target.master.as_deref_mut());
        for written in beside.chain([&mut *target.weight]) {
            // Panics where someone else holds it.
            written.cuda_buffer_mut();
        }
    }
    let all: Vec<TensorDescriptor<'_>> =
        targets.iter().map(|target| TensorDescriptor::target(target, step)).collect();
    let settings = settings(rule, step);
    let given = match norms {
        TrustNorms::Given(norms) => norms,
        TrustNorms::Measured => &[],
    };
    let table = UpdateTable::new(cuda, &all, given)?;
    let mut args = table.args(&settings);
    if rule.adapts() {
        if let TrustNorms::Measured = norms {
            table.measure(cuda, norms_of(rule), &settings, table.norms())?;
        }
        args = args.pointer(table.norms());
    }
    let kernel = cuda.kernel(&SOURCE, Build::PLAIN, kernel_of(&rule))?;
    // SAFETY: the table describes tensors borrowed for this call, with the states that the rule names; the list
    // has an entry for each block, and there are norms for each tensor.
    unsafe { kernel.launch(lanes::blocks(table.blocks, 1), THREADS, 0, args) }
}

/// The squared norms that a rule takes, of each target; the host waits for them, once.
pub(super) fn norms(
    cuda: &Cuda,
    rule: UpdateRule,
    step: StepParams,
    targets: &[ParamUpdate<'_>],
) -> Result<Vec<SquaredNorms>> {
    let all: Vec<TensorDescriptor<'_>> =
        targets.iter().map(|target| TensorDescriptor::target(target, step)).collect();
    read_norms(cuda, norms_of(rule), &all, &settings(rule, step))
}

/// The squared norm of each tensor; the host waits for them, once.
pub(crate) fn squared_norms(cuda: &Cuda, tensors: &[&Tensor]) -> Result<Vec<f64>> {
    let all: Vec<TensorDescriptor<'_>> =
        tensors.iter().map(|tensor| TensorDescriptor::gradient(tensor)).collect();
    let norms = read_norms(cuda, MeasuredNorm::Gradient, &all, &[0; FIELDS])?;
    Ok(norms.iter().map(|norms| norms.direction).collect())
}

fn read_norms(
    cuda: &Cuda,
    kind: MeasuredNorm,
    all: &[TensorDescriptor<'_>],
    settings: &[u32; FIELDS],
) -> Result<Vec<SquaredNorms>> {
    let table = UpdateTable::new(cuda, all, &[])?;
    let norms = lanes::doubles(&table.words.device(), 2 * all.len())?;
    table.measure(cuda, kind, settings, norms.cuda_buffer().address())?;
    let mut numbers = vec![0.0f64; 2 * all.len()];
    norms.cuda_buffer().download(bytemuck::cast_slice_mut(&mut numbers))?;
    let both = |pair: &[f64; 2]| SquaredNorms { weight: pair[0], direction: pair[1] };
    Ok(numbers.as_chunks::<2>().0.iter().map(both).collect())
}

/// What is measured; the kernel's numbers.
#[derive(Debug, Clone, Copy)]
enum MeasuredNorm {
    Gradient = 0,
    Lars = 1,
    Lamb = 2,
}

fn norms_of(rule: UpdateRule) -> MeasuredNorm {
    match rule {
        UpdateRule::Lars { .. } => MeasuredNorm::Lars,
        UpdateRule::Lamb { .. } => MeasuredNorm::Lamb,
        UpdateRule::Sgd | UpdateRule::Momentum { .. } | UpdateRule::Adam { .. } => MeasuredNorm::Gradient,
    }
}

/// The arrays that describe a list of tensors, on the GPU: norms (double2), targets, blocks, first blocks.
#[derive(Debug)]
struct UpdateTable {
    words: Tensor,
    tensors: usize,
    blocks: usize,
}

impl UpdateTable {
    fn new(cuda: &Cuda, all: &[TensorDescriptor<'_>], norms: &[SquaredNorms]) -> Result<UpdateTable> {
        assert!(all.iter().all(|one| one.gpu.is(cuda)), "update: targets on two GPUs");
        let tensors = all.len();
        let blocks: usize = all.iter().map(|one| one.blocks as usize).sum();
        let mut words = Vec::with_capacity((2 + WORDS + 1) * tensors + blocks + 1);
        for i in 0..tensors {
            let SquaredNorms { weight, direction } = norms.get(i).copied().unwrap_or_default();
            words.extend([weight.to_bits(), direction.to_bits()]);
        }
        words.extend(all.iter().flat_map(|one| one.words));
        let mut firsts = vec![0];
        for (i, one) in all.iter().enumerate() {
            words.extend((0..one.blocks).map(|chunk| pair(i as u32, chunk)));
            firsts.push(firsts[i] + one.blocks);
        }
        words.extend(firsts.chunks(2).map(|two| pair(two[0], two.get(1).copied().unwrap_or_default())));
        let (device, shape) = (Device::Cuda(cuda.clone()), [words.len(), 2]);
        let halves: &[u32] = bytemuck::cast_slice(&words);
        Ok(UpdateTable {
            words: Tensor::from_slice(&device, &shape, halves, Category::Workspace)?,
            tensors,
            blocks,
        })
    }

    fn norms(&self) -> u64 {
        self.words.cuda_buffer().address()
    }

    fn targets(&self) -> u64 {
        self.norms() + 16 * self.tensors as u64
    }

    fn list(&self) -> u64 {
        self.targets() + (8 * WORDS * self.tensors) as u64
    }

    fn firsts(&self) -> u64 {
        self.list() + 8 * self.blocks as u64
    }

    /// What all kernels take first.
    fn args(&self, settings: &[u32; FIELDS]) -> Args<'_> {
        Args::new().pointer(self.targets()).pointer(self.list()).fields(settings)
    }

    /// Leaves two doubles for each tensor at `to`, which has room for them.
    fn measure(&self, cuda: &Cuda, kind: MeasuredNorm, settings: &[u32; FIELDS], to: u64) -> Result<()> {
        let kernel = |name| cuda.kernel(&SOURCE, Build::PLAIN, name);
        let mut partial = lanes::doubles(&self.words.device(), 2 * self.blocks)?;
        let args = self.args(settings).i32(kind as i32).output(&mut partial);
        // SAFETY: the table's maker borrows the tensors and has checked for the states that `kind` needs; each
        // block has room for its two doubles.
        unsafe { kernel("update_norms")?.launch(lanes::blocks(self.blocks, 1), THREADS, 0, args)? };
        let args = Args::new().input(&partial).pointer(self.firsts()).pointer(to);
        // SAFETY: the first blocks are within `partial`, and `to` has room for two doubles a tensor.
        unsafe { kernel("update_norms_total")?.launch(lanes::blocks(self.tensors, 1), 1024, 0, args) }
    }
}
