//! A convolution as cuDNN sees it, and the algorithm that is picked for it.
//!
//! Images are [batch, h, w, channels] and filters [o, kernel, kernel, c] in memory; cuDNN names the dimensions of
//! both in the order (n, c, h, w) and learns the order in memory from strides.

use std::time::Instant;

use super::bindings::{
    Address, BehaviourNote, ConvolutionMode, CudnnFunctions, CudnnHandle, DescriptorKind, ElementType,
    HeuristicsMode, NumericalNote, attribute,
};
use super::descriptor::CudnnDescriptor;
use crate::dtype::DType;
use crate::error::Result;

/// The most scratch space of an algorithm: one that wants more is passed over.
const WORKSPACE: i64 = 512 << 20;
/// The most algorithms that are looked at, of each ranking.
const OFFERS: usize = 24;
/// What addresses are multiples of; blocks of a GPU's memory are of more.
const ALIGNMENT: i64 = 128;

/// Which of the three products of a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ConvPass {
    /// y from x and w.
    Forward,
    /// The gradient of x from that of y, and w.
    Input,
    /// The gradient of w from that of y, and x.
    Weight,
}

/// What tells one convolution from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConvKey {
    /// Forward, or which of the two gradients.
    pub pass: ConvPass,
    /// The type of all three tensors; sums are in f32, and operands of f32 are rounded to TF32.
    pub dtype: DType,
    /// x: [batch, h, w, c].
    pub x: [usize; 4],
    /// y: [batch, oh, ow, o].
    pub y: [usize; 4],
    /// The window's side.
    pub kernel: usize,
    /// Steps of the window.
    pub stride: usize,
    /// Zeros above and left of the image.
    pub padding_before: [usize; 2],
    /// Zeros below and right of it.
    pub padding_after: [usize; 2],
}

/// What cuDNN says of an algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AlgorithmTraits {
    /// cuDNN's number for it.
    pub engine: i64,
    /// Whether it uses the tensor cores: for f32, in TF32.
    pub tensor_cores: bool,
    /// Whether its sums come out the same every time.
    pub repeats: bool,
    /// Whether it multiplies what was given, and adds up in f32: no Winograd, no Fourier transform.
    pub plain: bool,
    /// Whether it is compiled when it is planned.
    pub compiled: bool,
}

impl AlgorithmTraits {
    /// Whether it may serve. Without the tensor cores our own kernels are as fast, and among cuDNN's that
    /// claim to be plain some err by 2e-3 in f32.
    pub(super) fn suit(&self) -> bool {
        self.repeats && self.plain && self.tensor_cores
    }
}

/// An algorithm for a convolution, ready to run.
#[derive(Debug)]
pub(super) struct ConvPlan {
    plan: CudnnDescriptor,
    pub workspace: usize,
    pub traits: AlgorithmTraits,
    // What the plan was made from.
    _config: CudnnDescriptor,
}

impl ConvPlan {
    /// The best of the library's ranking that repeats; `None` where it has none.
    pub(super) fn new(
        cudnn: &'static CudnnFunctions,
        handle: CudnnHandle,
        key: &ConvKey,
    ) -> Result<Option<ConvPlan>> {
        let graph = ConvGraph::new(cudnn, key)?.finished(cudnn, handle)?;
        for mode in [HeuristicsMode::RANKED, HeuristicsMode::FALLBACK] {
            for config in graph.offers(cudnn, mode)? {
                let traits = traits(cudnn, &config)?;
                // What is ranked may still not be possible.
                if let Some(plan) =
                    traits.suit().then(|| ConvPlan::of(cudnn, handle, config, traits)).flatten()
                {
                    return Ok(Some(plan));
                }
            }
        }
        Ok(None)
    }

    /// Every algorithm that is possible, suitable or not, best first, with the seconds that its planning took.
    pub(super) fn all(
        cudnn: &'static CudnnFunctions,
        handle: CudnnHandle,
        key: &ConvKey,
    ) -> Result<Vec<(ConvPlan, f64)>> {
        let graph = ConvGraph::new(cudnn, key)?.finished(cudnn, handle)?;
        let mut plans = Vec::new();
        for config in graph.offers(cudnn, HeuristicsMode::RANKED)? {
            let traits = traits(cudnn, &config)?;
            let start = Instant::now();
            let plan = ConvPlan::of(cudnn, handle, config, traits);
            plans.extend(plan.map(|plan| (plan, start.elapsed().as_secs_f64())));
        }
        Ok(plans)
    }

    fn of(
        cudnn: &'static CudnnFunctions,
        handle: CudnnHandle,
        config: CudnnDescriptor,
        traits: AlgorithmTraits,
    ) -> Option<ConvPlan> {
        let made = || -> Result<(CudnnDescriptor, i64)> {
            let plan = CudnnDescriptor::new(cudnn, DescriptorKind::ConvPlan)?
                .with(attribute::PLAN_HANDLE, handle)?
                .with(attribute::PLAN_CONFIG, config.raw())?
                .finished()?;
            let workspace = plan.value(attribute::PLAN_WORKSPACE, 0i64)?;
            Ok((plan, workspace))
        };
        let (plan, workspace) = made().ok()?;
        let workspace = usize::try_from(workspace).ok().filter(|_| workspace <= WORKSPACE)?;
        Some(ConvPlan { plan, workspace, traits, _config: config })
    }

    /// Queues it on the handle's stream.
    ///
    /// # Safety
    /// The addresses are those of x, w and y of the plan's key, and of as many bytes as it wants as workspace; all
    /// stay alive in the stream's order, and the handle is the one it was made with.
    pub(super) unsafe fn run(
        &self,
        cudnn: &'static CudnnFunctions,
        handle: CudnnHandle,
        tensors: [u64; 3],
        workspace: u64,
    ) -> Result<()> {
        let operands = CudnnDescriptor::new(cudnn, DescriptorKind::Operands)?
            .with_all(attribute::OPERANDS_IDS, &IDS)?
            .with_all(attribute::OPERANDS_POINTERS, &tensors.map(Address))?
            .with(attribute::OPERANDS_WORKSPACE, Address(workspace))?
            .finished()?;
        // SAFETY: the caller vouches for the addresses; plan and operands live, and the library copies the latter.
        let code = unsafe { (cudnn.execute)(handle, self.plan.raw(), operands.raw()) };
        cudnn.check(code, "a convolution")
    }
}

/// The numbers by which x, w and y are told apart.
const IDS: [i64; 3] = [1, 2, 3];

/// A convolution as a graph of one operation, with what it is made of.
pub(super) struct ConvGraph {
    operation: CudnnDescriptor,
    graph: Option<CudnnDescriptor>,
    _parts: [CudnnDescriptor; 4],
}

impl ConvGraph {
    /// The operation, described. Needs the library and no GPU.
    pub(super) fn new(cudnn: &'static CudnnFunctions, key: &ConvKey) -> Result<ConvGraph> {
        let element = key.dtype.by_float(ElementType::F32, ElementType::BF16);
        let tensor = |id, [n, h, w, c]: [usize; 4]| {
            let sizes = [n, c, h, w].map(|n| n as i64);
            let strides = [h * w * c, 1, w * c, c].map(|n| n as i64);
            CudnnDescriptor::new(cudnn, DescriptorKind::Tensor)?
                .with(attribute::TENSOR_TYPE, element)?
                .with_all(attribute::TENSOR_DIMENSIONS, &sizes)?
                .with_all(attribute::TENSOR_STRIDES, &strides)?
                .with(attribute::TENSOR_ID, id)?
                .with(attribute::TENSOR_ALIGNMENT, ALIGNMENT)?
                .finished()
        };
        let both = |n: usize| [n as i64; 2];
        let each = |padding: [usize; 2]| padding.map(|n| n as i64);
        let convolution = CudnnDescriptor::new(cudnn, DescriptorKind::Convolution)?
            .with(attribute::CONVOLUTION_DIMENSIONS, 2i64)?
            .with(attribute::CONVOLUTION_COMPUTE, ElementType::F32)?
            .with(attribute::CONVOLUTION_MODE, ConvolutionMode::CORRELATION)?
            .with_all(attribute::CONVOLUTION_DILATIONS, &both(1))?
            .with_all(attribute::CONVOLUTION_STRIDES, &both(key.stride))?
            .with_all(attribute::CONVOLUTION_PADDING_BEFORE, &each(key.padding_before))?
            .with_all(attribute::CONVOLUTION_PADDING_AFTER, &each(key.padding_after))?
            .finished()?;
        let x = tensor(IDS[0], key.x)?;
        let w = tensor(IDS[1], [key.y[3], key.kernel, key.kernel, key.x[3]])?;
        let y = tensor(IDS[2], key.y)?;
        let (kind, names) = match key.pass {
            ConvPass::Forward => (DescriptorKind::Forward, attribute::FORWARD),
            ConvPass::Input => (DescriptorKind::BackwardData, attribute::BACKWARD_DATA),
            ConvPass::Weight => (DescriptorKind::BackwardFilter, attribute::BACKWARD_FILTER),
        };
        let operation = CudnnDescriptor::new(cudnn, kind)?
            .with(names.convolution, convolution.raw())?
            .with(names.x, x.raw())?
            .with(names.w, w.raw())?
            .with(names.y, y.raw())?
            .with(names.alpha, 1.0f32)?
            .with(names.beta, 0.0f32)?
            .finished()?;
        Ok(ConvGraph { operation, graph: None, _parts: [convolution, x, w, y] })
    }

    /// The graph, made for a GPU.
    fn finished(mut self, cudnn: &'static CudnnFunctions, handle: CudnnHandle) -> Result<ConvGraph> {
        let graph = CudnnDescriptor::new(cudnn, DescriptorKind::ConvGraph)?
            .with(attribute::GRAPH_HANDLE, handle)?
            .with(attribute::GRAPH_OPERATIONS, self.operation.raw())?
            .finished()?;
        self.graph = Some(graph);
        Ok(self)
    }

    /// What the library offers, best first; nothing where it has no idea.
    fn offers(&self, cudnn: &'static CudnnFunctions, mode: HeuristicsMode) -> Result<Vec<CudnnDescriptor>> {
        let graph = self.graph.as_ref().expect("a finished graph");
        let heuristics = CudnnDescriptor::new(cudnn, DescriptorKind::Heuristics)?
            .with(attribute::HEURISTICS_GRAPH, graph.raw())?
            .with(attribute::HEURISTICS_MODE, mode)?
            .finished();
        let Ok(heuristics) = heuristics else { return Ok(Vec::new()) };
        let mut none: [super::bindings::RawDescriptor; 0] = [];
        let count = heuristics.read(attribute::HEURISTICS_RESULTS, &mut none)?.min(OFFERS);
        let mut configs = Vec::new();
        for _ in 0..count {
            configs.push(CudnnDescriptor::new(cudnn, DescriptorKind::EngineConfig)?);
        }
        let mut raw: Vec<_> = configs.iter().map(CudnnDescriptor::raw).collect();
        let written = heuristics.read(attribute::HEURISTICS_RESULTS, &mut raw)?;
        configs.truncate(written);
        Ok(configs)
    }
}

fn traits(cudnn: &'static CudnnFunctions, config: &CudnnDescriptor) -> Result<AlgorithmTraits> {
    let engine = CudnnDescriptor::new(cudnn, DescriptorKind::Engine)?;
    let mut raw = [engine.raw()];
    config.read(attribute::CONFIG_ENGINE, &mut raw)?;
    let mut notes = [NumericalNote(-1); NumericalNote::COUNT];
    engine.read(attribute::ENGINE_NUMERICAL_NOTE, &mut notes)?;
    let mut behaviour = [BehaviourNote(-1); BehaviourNote::COUNT];
    engine.read(attribute::ENGINE_BEHAVIOUR_NOTE, &mut behaviour)?;
    let altered = [
        NumericalNote::DOWN_CONVERTED_INPUTS,
        NumericalNote::REDUCED_PRECISION_SUMS,
        NumericalNote::FOURIER,
        NumericalNote::WINOGRAD,
        NumericalNote::WINOGRAD_4X4,
        NumericalNote::WINOGRAD_6X6,
        NumericalNote::WINOGRAD_13X13,
    ];
    Ok(AlgorithmTraits {
        engine: engine.value(attribute::ENGINE_INDEX, -1i64)?,
        tensor_cores: notes.contains(&NumericalNote::TENSOR_CORE),
        repeats: !notes.contains(&NumericalNote::NOT_REPEATABLE),
        plain: !altered.iter().any(|note| notes.contains(note)),
        compiled: behaviour.contains(&BehaviourNote::RUNTIME_COMPILATION),
    })
}
