//! What the passes of each block of a rank's model take: kernels, and the collectives of its layers.

use super::collective::RankGroup;
pub use super::seconds::{PassSeconds, Passes};
use crate::cluster::DeviceKernels;
use crate::engine::{AttentionKernel, EngineProfile};
use crate::mesh::Axis;
use crate::pruning::Pruning;
use crate::spec::recompute::attention_spans;
use crate::spec::{
    Activation, AttentionRole, CollectiveLayer, CollectiveOp, Halo, LayerKernel, LayerSpec, MemoryPass,
    ModelSpec, ProductSize, RecomputeMode, Shape, ShapeError, ShardDim,
};

/// What computes and who takes part.
#[derive(Debug, Clone, Copy)]
pub struct PassContext<'a> {
    pub kernels: DeviceKernels<'a>,
    pub engine: &'a EngineProfile,
    /// Whether a batch norm does what stands behind it on its way: our kernels on a GPU.
    pub fuses_norms: bool,
    /// Which weights are zeros, where some are.
    pub pruning: Option<&'a Pruning>,
    /// Ranks of one model-parallel group,
    pub tensor: RankGroup<'a>,
    /// and tiles of the same images.
    pub spatial: RankGroup<'a>,
    /// How many neighbours the tile with most of them has, for each that the first one has.
    pub neighbours: f64,
    /// What is run again.
    pub recompute: RecomputeMode,
    /// Samples of a micro-batch.
    pub samples: usize,
}

/// A layer, and what its passes take.
#[derive(Debug, Clone, Copy)]
pub struct TimedLayer<'m> {
    /// The layer; one with branches stands behind those of its branches, for what it does itself.
    pub layer: &'m LayerSpec,
    /// What it reads of a sample.
    pub input: Shape,
    /// What it makes of it.
    pub output: Shape,
    /// What that takes.
    pub passes: Passes,
}

/// The passes of each block of a rank's own model.
pub(crate) fn block_passes(model: &ModelSpec, at: &PassContext) -> Result<Vec<Passes>, ShapeError> {
    let sum = |layers: Vec<TimedLayer>| layers.into_iter().map(|timed| timed.passes).sum();
    Ok(layer_passes(model, at)?.into_iter().map(sum).collect())
}

/// The passes of each layer, block by block.
pub(crate) fn layer_passes<'m>(
    model: &'m ModelSpec,
    at: &PassContext,
) -> Result<Vec<Vec<TimedLayer<'m>>>, ShapeError> {
    let (borders, last) = (model.borders()?, model.blocks.len().saturating_sub(1));
    let of_block = |(i, shape): (usize, Shape)| {
        let layers = &model.blocks[i].layers[..];
        let head = i == last && model.head().is_some();
        let mut timed = Vec::new();
        at.layers(layers, shape, head, &mut timed);
        if let Some(first) = timed.iter_mut().find(|timed| i == 0 && is_convolution(timed.layer)) {
            let unmade = at.first_input_gradient(layers, shape);
            first.passes.backward_input = first.passes.backward_input - unmade;
        }
        if at.recompute.remakes(i, last) {
            timed.iter_mut().for_each(|timed| timed.passes.again = timed.passes.forward);
        }
        timed
    };
    Ok(borders.into_iter().take(last + 1).enumerate().map(of_block).collect())
}

impl PassContext<'_> {
    /// A row of layers; `head`: its last one makes the logits.
    fn layers<'m>(
        &self,
        layers: &'m [LayerSpec],
        mut shape: Shape,
        head: bool,
        all: &mut Vec<TimedLayer<'m>>,
    ) {
        let insides = match self.recompute {
            RecomputeMode::Attention => attention_spans(layers),
            _ => Vec::new(),
        };
        for (i, layer) in layers.iter().enumerate() {
            let output = layer.output(shape).expect("the shapes were checked");
            let before = i.checked_sub(1).map(|before| &layers[before]);
            let branches = layer.description().branches();
            let branches = branches.iter().flat_map(|branches| &branches.all);
            branches.for_each(|branch| self.layers(branch.layers, shape, false, all));
            let own = match fused_pass(layers, i).filter(|_| self.fuses_norms) {
                Some(pass) => self.passing(pass, true, self.elements(shape), self.elements(output)),
                None => self.layer(layer, shape, output),
            };
            let own = self.without_zeros(layer, &layers[i + 1..], own);
            let mut passes = own + self.halo_passes(before, layer);
            let is_core = layer.properties().attention_role == AttentionRole::Core;
            let again = self.engine.remakes_queries || is_core;
            if again && insides.iter().any(|inside| inside.again.contains(&i)) {
                passes.again = passes.again + passes.forward;
            }
            if head && i + 1 == layers.len() {
                passes = passes + self.loss(output);
            }
            let next = layers.get(i + 1);
            if let (LayerSpec::Halo(_), Some(conv)) =
                (layer, next.filter(|next| next.properties().hides_halo))
                && self.engine.is_ours()
            {
                let made = conv.output(output).expect("the shapes were checked");
                passes = self.behind(passes, &self.layer(conv, output, made));
            }
            if let LayerSpec::Halo(halo) = layer {
                passes = passes + self.exchange(halo);
            }
            if let LayerSpec::Collective(collective) = layer
                && collective.is_entrance()
                && next.is_some_and(|next| next.properties().takes_remade)
            {
                // A linear layer keeps what stands before it, and has it gathered again for its gradient.
                passes.again = passes.again + passes.forward;
            }
            all.push(TimedLayer { layer, input: shape, output, passes });
            shape = output;
        }
    }

    pub(super) fn layer(&self, layer: &LayerSpec, input: Shape, output: Shape) -> Passes {
        let passes = match layer.properties().kernel {
            LayerKernel::Pass(pass) => {
                let in_norm = matches!(layer, LayerSpec::BatchNorm(_));
                self.passing(pass, in_norm, self.elements(input), self.elements(output))
            }
            LayerKernel::Product(size) => self.product(input, size),
            LayerKernel::Convolution { kernel, size } => self.convolution(kernel, size, [input, output]),
            LayerKernel::Attention { heads, width, turned } => {
                let passes = self.attention(heads, width, input);
                // Read and written, there and back.
                let moved = 2.0 * self.engine.passes * self.rows(input) * turned as f64;
                let once = match turned {
                    0 => PassSeconds::default(),
                    _ => PassSeconds::computing(self.kernels.pass(moved * self.kernels.element())),
                };
                Passes {
                    forward: passes.forward + once,
                    backward_input: passes.backward_input + once,
                    ..passes
                }
            }
        };
        match layer {
            // A few numbers a channel.
            LayerSpec::SharedStatistics(_) => {
                let seconds = self.spatial.all_reduce(16.0 * input.last() as f64);
                let both = PassSeconds::collective(&self.spatial, seconds);
                Passes { forward: both, backward_input: both, ..Passes::default() }
            }
            LayerSpec::Collective(collective) => self.collective(collective, input, output),
            LayerSpec::Halo(halo) => self.halo(halo, input),
            LayerSpec::TiledMean(_) => {
                let seconds = self.spatial.all_reduce(self.elements(output) * self.kernels.element());
                Passes { forward: passes.forward + PassSeconds::collective(&self.spatial, seconds), ..passes }
            }
            _ => passes,
        }
    }

    /// `[rows, input]` by `[input, output]`, and the two products of its backward.
    fn product(&self, shape: Shape, size: ProductSize) -> Passes {
        let (rows, input, output) = (self.rows(shape), size.input as f64, size.output as f64);
        let slower = if self.kernels.zeros > 0.0 { self.engine.sparse_products } else { 1.0 };
        let once = |rows, depth, columns| {
            PassSeconds::computing(slower * self.kernels.product(rows, depth, columns))
        };
        Passes {
            forward: once(rows, input, output),
            again: PassSeconds::default(),
            backward_input: once(rows, output, input),
            backward_weight: once(input, rows, output),
        }
    }

    fn attention(&self, heads: usize, width: usize, input: Shape) -> Passes {
        let (samples, seq) = (self.samples as f64, input.rows() as f64);
        let flops = 4.0 * samples * seq * seq * width as f64;
        let moved = self.kernels.element() * samples * seq * (input.last() + width) as f64;
        let (forward, backward) = match self.engine.attention {
            AttentionKernel::Fused { speed } => {
                let matrix = self.kernels.device.matrix(self.kernels.precision);
                let efficiency = speed * matrix.attention.unwrap_or(AttentionKernel::UNMEASURED);
                let done = flops / 2.0;
                (
                    self.kernels.work(done, efficiency, moved),
                    self.kernels.work(2.0 * done, efficiency, 2.0 * moved),
                )
            }
            AttentionKernel::Unfused { bytes } => {
                let scores = bytes * samples * heads as f64 * seq * seq;
                let once = self.kernels.work(flops, 1.0, 0.0) + self.kernels.pass(scores);
                (once, 2.0 * once)
            }
        };
        Passes {
            forward: PassSeconds::computing(forward),
            backward_input: PassSeconds::computing(backward),
            ..Passes::default()
        }
    }

    /// The loss of logits, whose rows are read, and written as gradients.
    fn loss(&self, logits: Shape) -> Passes {
        let bytes = self.engine.passes * 4.0 * self.elements(logits);
        Passes {
            forward: PassSeconds::computing(self.kernels.pass(2.0 * bytes)),
            backward_input: PassSeconds::computing(self.kernels.pass(bytes)),
            ..Passes::default()
        }
    }

    /// A layer that reads so many elements and makes so many, which pass through memory as it says; `in_norm`:
    /// within the kernels of a batch norm.
    fn passing(&self, pass: MemoryPass, in_norm: bool, read: f64, made: f64) -> Passes {
        let once = |[input, output]: [f64; 2]| {
            let bytes = self.engine.passes * (input * read + output * made) * self.kernels.element();
            PassSeconds::computing(match pass.is_light {
                _ if bytes == 0.0 => 0.0,
                _ if in_norm => self.kernels.batch_norm(bytes),
                true => self.kernels.light_pass(bytes),
                false => self.kernels.pass(bytes),
            })
        };
        Passes { forward: once(pass.forward), backward_input: once(pass.backward), ..Passes::default() }
    }

    fn collective(&self, collective: &CollectiveLayer, input: Shape, output: Shape) -> Passes {
        let group = match collective.axis {
            Axis::Spatial => self.spatial,
            _ => self.tensor,
        };
        let all: usize = collective.shard_sizes.iter().sum();
        let full = |shape: Shape, along| match along {
            ShardDim::Samples => self.elements(shape),
            ShardDim::Sequence => self.samples as f64 * (all * shape.last()) as f64,
            ShardDim::Last => self.rows(shape) * all as f64,
        };
        let seconds = |how, shape| {
            let bytes = |elements: f64| elements * self.kernels.element();
            // Features of several ranks lie apart in a message, and side by side in a row: taken out of it,
            // and interleaved by short runs.
            let interleaved = match how {
                CollectiveOp::AllGather(ShardDim::Last) | CollectiveOp::ReduceScatter(ShardDim::Last)
                    if self.engine.is_ours() =>
                {
                    let moved = 2.0 * bytes(full(shape, ShardDim::Last));
                    self.kernels.light_pass(moved) + self.kernels.pass(moved)
                }
                CollectiveOp::Slice(ShardDim::Last) if self.engine.is_ours() => {
                    self.kernels.pass(2.0 * bytes(full(shape, ShardDim::Last)) / collective.ranks() as f64)
                }
                _ => 0.0,
            };
            let sent = match how {
                CollectiveOp::Identity | CollectiveOp::Slice(_) => 0.0,
                CollectiveOp::AllReduce => group.all_reduce(bytes(self.elements(shape))),
                CollectiveOp::AllGather(along) | CollectiveOp::ReduceScatter(along) => {
                    group.gather(bytes(full(shape, along)))
                }
                // Each has a shard of all, and keeps as large a fraction of that.
                CollectiveOp::AllToAll { .. } => {
                    group.gather(bytes(full(shape, ShardDim::Last)) / collective.ranks() as f64)
                }
            };
            PassSeconds::computing(interleaved) + PassSeconds::collective(&group, sent)
        };
        Passes {
            forward: seconds(collective.forward, input),
            backward_input: seconds(collective.backward, output),
            ..Passes::default()
        }
    }

    fn halo(&self, halo: &Halo, input: Shape) -> Passes {
        let pixel = input.last() as f64 * self.kernels.element() * self.samples as f64;
        let given = halo.0.neighbours.iter().map(|peer| peer.gives.pixels() as f64 * pixel);
        let once = PassSeconds::communicating(self.spatial.messages(given));
        Passes { forward: once, backward_input: once, ..Passes::default() }
    }

    /// What of an exchange of borders no convolution hides.
    fn exchange(&self, halo: &Halo) -> Passes {
        let met = halo.0.neighbours.iter().filter(|peer| !peer.gives.is_empty() || !peer.takes.is_empty());
        let once = PassSeconds::communicating(self.spatial.halo(met.count() as f64 * self.neighbours));
        Passes { forward: once, backward_input: once, ..Passes::default() }
    }

    /// The messages of a halo that travel while the tile's own pixels are convolved, and backwards while the
    /// gradients of tile and weights are made.
    fn behind(&self, halo: Passes, conv: &Passes) -> Passes {
        let exposed = |message: PassSeconds, beside: f64| {
            let communication = self.spatial.exposed(message.communication, beside);
            PassSeconds { communication, ..message }
        };
        let backward = conv.backward_input.compute + conv.backward_weight.compute;
        Passes {
            forward: exposed(halo.forward, conv.forward.compute),
            backward_input: exposed(halo.backward_input, backward),
            ..halo
        }
    }

    pub(super) fn rows(&self, shape: Shape) -> f64 {
        self.samples as f64 * shape.rows() as f64
    }

    pub(super) fn elements(&self, shape: Shape) -> f64 {
        self.samples as f64 * shape.elements() as f64
    }
}

/// What layer `i` takes beside a batch norm or a max pool that does it on its way: ReLU, the sum of a
/// residual layer between a norm and ReLU, a norm before a pool (`nn/model/builder/cnn`). None where it runs
/// by itself.
fn fused_pass(layers: &[LayerSpec], i: usize) -> Option<MemoryPass> {
    let is_relu = |layer: &LayerSpec| matches!(layer, LayerSpec::Activation(Activation::Relu));
    let is_norm = |layer: &LayerSpec| matches!(layer, LayerSpec::BatchNorm(_));
    let ends_in_norm = |layer: &LayerSpec| match layer {
        LayerSpec::Residual(residual) => residual.branch.last().is_some_and(is_norm),
        _ => false,
    };
    let (before, next) = (i.checked_sub(1).map(|before| &layers[before]), layers.get(i + 1));
    let times = |forward: f64, backward: f64| {
        Some(MemoryPass { forward: [0.0, forward], backward: [0.0, backward], is_light: true })
    };
    match &layers[i] {
        // It is measured, forward and back; the pool's passes do the rest, and its gradient is not written
        // between.
        norm if is_norm(norm) && matches!(next, Some(LayerSpec::MaxPool(_))) => {
            Some(MemoryPass { forward: [1.0, 0.0], backward: [2.0, 1.0], is_light: false })
        }
        LayerSpec::MaxPool(_) if before.is_some_and(is_norm) => {
            times(1.0, 2.0).map(|pass| MemoryPass { forward: [1.0, 1.0], ..pass })
        }
        // A convolution's input is made again on the way back.
        relu if is_relu(relu) && before.is_some_and(is_norm) => {
            times(0.0, if matches!(next, Some(LayerSpec::Conv(_))) { 1.0 } else { 0.0 })
        }
        relu if is_relu(relu) && matches!(before, Some(LayerSpec::MaxPool(_))) => times(0.0, 0.0),
        // The output is read, and the gradient of the sum written.
        relu if is_relu(relu) && before.is_some_and(ends_in_norm) => times(0.0, 2.0),
        // The shortcut is read; on the way back the norm of the block before reads both gradients of the input.
        sum if ends_in_norm(sum) && next.is_some_and(is_relu) => {
            times(1.0, 0.0).map(|pass| MemoryPass { backward: [1.0, 0.0], ..pass })
        }
        _ => None,
    }
}

/// Whether its passes are those of a convolution.
pub(super) fn is_convolution(layer: &LayerSpec) -> bool {
    matches!(layer.properties().kernel, LayerKernel::Convolution { .. })
}

#[cfg(test)]
mod tests {
    use super::super::{Candidate, Simulation};
    use super::*;
    use crate::cluster::builtin;
    use crate::config::RunFile;
    use crate::plan::{DataFacts, Plan};

    /// The ReLUs and sums of a residual network: on a GPU a pass over what is added each way, elsewhere three. The
    /// norm of its stem is a part of the pool behind it, but for being measured.
    #[test]
    fn a_norm_does_the_relu_behind_it_on_its_way() {
        let text = "[model]\nname = \"resnet-18\"\n[train]\nsteps = 1\nbatch = 64\n";
        let facts = DataFacts { image: Some((224, 224, 3)), classes: Some(1000), ..DataFacts::default() };
        let plan = Plan::new(RunFile::parse(text, &[]).unwrap(), facts).unwrap();
        let cluster = builtin("h200-node").unwrap();
        let seconds = |fuses_norms: bool, word: &str| -> [f64; 2] {
            let job = Simulation::new(&plan, &cluster, EngineProfile::ESPALIER);
            let at = job.pass_context(&Candidate::of(&plan).unwrap());
            assert!(at.fuses_norms, "a GPU, and our kernels");
            let layers = layer_passes(&plan.model, &PassContext { fuses_norms, ..at }).unwrap();
            let of_word = layers.into_iter().flatten().filter(|timed| timed.layer.kind() == word);
            of_word.fold([0.0; 2], |[forward, backward], timed| {
                let Passes { forward: there, backward_input: back, .. } = timed.passes;
                [forward + there.compute, backward + back.compute]
            })
        };
        assert_eq!(seconds(true, "relu")[0], 0.0);
        assert!(seconds(true, "relu")[1] < 0.7 * seconds(false, "relu")[1]);
        let [fused, alone] = [true, false].map(|fuses| seconds(fuses, "residual"));
        assert!((0..2).all(|way| fused[way] < 0.6 * alone[way]), "{fused:?}, {alone:?}");
        let [fused, alone] = [true, false].map(|fuses| seconds(fuses, "batch_norm"));
        assert!((0..2).all(|way| fused[way] < 0.95 * alone[way]), "{fused:?}, {alone:?}");
    }
}
