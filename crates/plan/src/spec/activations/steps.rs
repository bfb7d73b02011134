//! A model's layers as steps: what each saves in its forward pass, and what it hands over in its backward pass.

use super::super::layer::BranchJoin;
use super::super::recompute::{AttentionSpan, attention_spans};
use super::super::shape::Shape;
use super::super::{Activation, CollectiveOp, LayerSpec, RecomputeMode};
use super::Precision;

/// A tensor that may be kept: an edge, the gradient of one, or numbers beside them.
#[derive(Debug, Clone, Copy)]
pub(super) struct SavedTensor {
    number: usize,
    bytes: u64,
}

/// A layer, or a linear layer together with the one before it that makes its input again.
#[derive(Debug)]
pub(super) struct LayerActivations {
    /// What its forward pass saves. Its backward pass lets go of that first.
    pub saves: Vec<SavedTensor>,
    /// What the gradients of its weights then read.
    pub reads: Vec<SavedTensor>,
}

/// What follows on each other in the forward pass; backwards in the reverse order.
#[derive(Debug)]
pub(super) enum ActivationStep {
    Layer(LayerActivations),
    /// Some that run again just before their backward. Until then the edge before them is all that is kept.
    Again {
        input: SavedTensor,
        steps: Vec<ActivationStep>,
    },
}

#[derive(Clone, Copy)]
struct Edge {
    at: Flow,
    saved: SavedTensor,
}

/// What a micro-batch is like at some point of a model.
#[derive(Debug, Clone, Copy)]
pub(super) struct Flow {
    /// Of a sample.
    pub shape: Shape,
    /// Samples that the rank has there,
    pub samples: u64,
    /// of so many in all.
    pub all: u64,
}

impl Flow {
    fn behind(self, layer: &LayerSpec) -> Flow {
        Flow {
            shape: output(self.shape, layer),
            samples: layer.samples_behind(self.samples, self.all),
            ..self
        }
    }

    fn through(self, layers: &[LayerSpec]) -> Flow {
        layers.iter().fold(self, Flow::behind)
    }
}

/// A walk through consecutive blocks, forwards; the shapes in them were checked.
pub(super) struct ActivationWalk {
    precision: Precision,
    recompute: RecomputeMode,
    saved_tensors: usize,
    steps: Vec<ActivationStep>,
}

impl ActivationWalk {
    pub fn new(precision: Precision, recompute: RecomputeMode) -> ActivationWalk {
        ActivationWalk { precision, recompute, saved_tensors: 0, steps: Vec::new() }
    }

    /// The steps of blocks, of which the first reads `input`, and the edge behind them; `remakes` says which of
    /// these run again.
    pub fn blocks(
        mut self,
        blocks: &[&[LayerSpec]],
        input: Flow,
        remakes: impl Fn(RecomputeMode, usize) -> bool,
    ) -> (Vec<ActivationStep>, SavedTensor) {
        let mut edge = self.edge(input);
        let flows: Vec<Flow> = blocks
            .iter()
            .scan(input, |flow, layers| {
                let before = *flow;
                *flow = before.through(layers);
                Some(before)
            })
            .collect();
        let end = blocks.last().zip(flows.last()).map_or(input, |(layers, flow)| flow.through(layers));
        let mut behind = self.tensor(end);
        let mut gradients: Vec<Vec<SavedTensor>> = Vec::new();
        for (layers, flow) in blocks.iter().zip(&flows).rev() {
            let (of_layers, before) = self.gradients(layers, *flow, behind);
            gradients.push(of_layers);
            behind = before;
        }
        for (i, (layers, gradients)) in blocks.iter().zip(gradients.iter().rev()).enumerate() {
            edge = match remakes(self.recompute, i) {
                true => self.again(layers, edge, gradients),
                false => self.row(layers, edge, gradients),
            };
        }
        (self.steps, edge.saved)
    }

    fn saved(&mut self, bytes: u64) -> SavedTensor {
        self.saved_tensors += 1;
        SavedTensor { number: self.saved_tensors, bytes }
    }

    /// A tensor of one micro-batch.
    fn tensor(&mut self, at: Flow) -> SavedTensor {
        let size = if matches!(at.shape, Shape::Tokens { .. }) { 4 } else { self.precision.size() };
        self.saved(at.shape.elements().saturating_mul(size).saturating_mul(at.samples))
    }

    fn edge(&mut self, at: Flow) -> Edge {
        Edge { at, saved: self.tensor(at) }
    }

    /// The gradients of what each of some layers gives, of which the last is `behind`, and that of what they read.
    fn gradients(
        &mut self,
        layers: &[LayerSpec],
        input: Flow,
        behind: SavedTensor,
    ) -> (Vec<SavedTensor>, SavedTensor) {
        let mut flows = vec![input];
        flows.extend(layers.iter().scan(input, |flow, layer| {
            *flow = flow.behind(layer);
            Some(*flow)
        }));
        let mut gradient = behind;
        let mut all = vec![gradient; layers.len()];
        for (i, layer) in layers.iter().enumerate().rev() {
            all[i] = gradient;
            if !layer.properties().passes_gradient {
                gradient = self.tensor(flows[i]);
            }
        }
        (all, gradient)
    }

    /// Layers one after the other, with the gradients of what each gives; gives the edge behind the last.
    fn row(&mut self, layers: &[LayerSpec], input: Edge, gradients: &[SavedTensor]) -> Edge {
        let (mut edge, mut done) = (input, 0);
        if self.recompute == RecomputeMode::Attention {
            for AttentionSpan { again, read } in attention_spans(layers) {
                let before = done..again.start;
                edge = self.plain_row(&layers[before.clone()], edge, &gradients[before]);
                // The linear layer behind reads what is made again before its own gradient.
                let again = again.start..read;
                edge = self.again(&layers[again.clone()], edge, &gradients[again]);
                done = read;
            }
        }
        self.plain_row(&layers[done..], edge, &gradients[done..])
    }

    /// Layers that run again.
    fn again(&mut self, layers: &[LayerSpec], input: Edge, gradients: &[SavedTensor]) -> Edge {
        let before = std::mem::take(&mut self.steps);
        let behind = self.plain_row(layers, input, gradients);
        let steps = std::mem::replace(&mut self.steps, before);
        self.steps.push(ActivationStep::Again { input: input.saved, steps });
        behind
    }

    fn plain_row(&mut self, layers: &[LayerSpec], input: Edge, gradients: &[SavedTensor]) -> Edge {
        let mut edge = input;
        // The last layer that made something.
        let mut before: Option<&LayerSpec> = None;
        for (i, (layer, gradient)) in layers.iter().zip(gradients).enumerate() {
            if i > 0 && remakes_image(&layers[i - 1..]) {
                // ReLU belongs to the norm before it, and what it gives is nobody's to keep.
                edge = self.edge(edge.at.behind(layer));
                continue;
            }
            if i > 1 && remakes_image(&layers[i - 2..]) {
                edge = self.layer(layer, edge, *gradient, true);
                before = Some(layer);
                continue;
            }
            if i > 0 && is_part_of_pool(&layers[i - 1], layer) {
                edge = self.edge(edge.at);
                continue;
            }
            if is_entrance(layer, layers.get(i + 1)) {
                edge.at = edge.at.behind(layer);
                continue;
            }
            let remade = before.is_some_and(|before| remakes(before, layer));
            edge = match layer.description().branches() {
                Some(_) if remade => self.remade_branches(layer, edge),
                Some(_) => self.branches(layer, edge, *gradient),
                None => self.layer(layer, edge, *gradient, remade),
            };
            before = Some(layer);
        }
        edge
    }

    fn layer(&mut self, layer: &LayerSpec, input: Edge, gradient: SavedTensor, remade: bool) -> Edge {
        let made = self.edge(input.at.behind(layer));
        let saves = layer.description().saves(input.at.shape, input.at.samples);
        let reads = layer.properties().weight_reads;
        let numbers = self.saved(saves.bytes);
        let saves =
            [(saves.input && !remade, input.saved), (saves.output, made.saved), (saves.bytes > 0, numbers)];
        let read = if remade { self.tensor(input.at) } else { input.saved };
        let reads = [(reads.input, read), (reads.gradient, gradient), (reads.numbers, numbers)];
        let chosen = |saved_tensors: [(bool, SavedTensor); 3]| {
            saved_tensors.into_iter().filter(|(is, _)| *is).map(|(_, saved)| saved)
        };
        match self.steps.last_mut().filter(|_| remade) {
            // Both go backwards at once, the linear layer's gradients first.
            Some(ActivationStep::Layer(before)) => {
                before.saves.extend(chosen(saves));
                before.reads.splice(0..0, chosen(reads));
            }
            _ => self.layer_step(chosen(saves).collect(), chosen(reads).collect()),
        }
        made
    }

    fn layer_step(&mut self, saves: Vec<SavedTensor>, reads: Vec<SavedTensor>) {
        self.steps.push(ActivationStep::Layer(LayerActivations { saves, reads }));
    }

    /// Linear layers side by side whose input is made again: they go backwards together with what makes it.
    fn remade_branches(&mut self, layer: &LayerSpec, input: Edge) -> Edge {
        let branches = layer.description().branches().expect("a layer with branches");
        let outputs: Vec<SavedTensor> =
            branches.all.iter().map(|branch| self.tensor(input.at.through(&branch.layers[..1]))).collect();
        let read = self.tensor(input.at);
        let gradients: Vec<SavedTensor> =
            branches.all.iter().map(|branch| self.tensor(input.at.through(&branch.layers[..1]))).collect();
        match self.steps.last_mut() {
            Some(ActivationStep::Layer(before)) => {
                before.reads.splice(0..0, std::iter::once(read).chain(gradients));
            }
            _ => unreachable!("what is made again is made by a layer"),
        }
        if branches.join.reads_outputs() {
            self.layer_step(outputs, Vec::new());
        }
        self.edge(input.at.behind(layer))
    }

    /// The branches of a layer, and their join.
    fn branches(&mut self, layer: &LayerSpec, input: Edge, gradient: SavedTensor) -> Edge {
        let branches = layer.description().branches().expect("a layer with branches");
        let mut given = Vec::with_capacity(branches.all.len());
        for branch in &branches.all {
            // A smooth activation before a product belongs to it.
            let layers = match (branches.join, branch.layers) {
                (BranchJoin::Product, [before @ .., last]) if last.properties().is_gate => before,
                (_, all) => all,
            };
            let behind = match branches.join {
                BranchJoin::Sum => gradient,
                BranchJoin::Product | BranchJoin::Concat => self.tensor(input.at.through(layers)),
            };
            let (gradients, _) = self.gradients(layers, input.at, behind);
            given.push(self.row(layers, input, &gradients).saved);
        }
        if branches.join.reads_outputs() {
            self.layer_step(given, Vec::new());
        }
        self.edge(input.at.behind(layer))
    }
}

fn output(input: Shape, layer: &LayerSpec) -> Shape {
    layer.output(input).expect("the shapes were checked")
}

/// Whether the edge between two layers is made again rather than kept.
fn remakes(from: &LayerSpec, to: &LayerSpec) -> bool {
    from.properties().remakes_output && to.properties().takes_remade
}

/// Whether layers begin with a batch norm, ReLU and a convolution, whose input is made again of what the norm
/// saves.
fn remakes_image(layers: &[LayerSpec]) -> bool {
    let relu = Activation::Relu;
    matches!(layers, [LayerSpec::BatchNorm(_), LayerSpec::Activation(kind), LayerSpec::Conv(_), ..] if *kind == relu)
}

/// Whether a layer is the ReLU behind a max pool, whose places say what it lets through: it saves nothing.
fn is_part_of_pool(before: &LayerSpec, layer: &LayerSpec) -> bool {
    matches!((before, layer), (LayerSpec::MaxPool(_), LayerSpec::Activation(Activation::Relu)))
}

/// Whether the edges on both sides of a layer are one: a collective whose result is its input, or is gathered
/// again when a linear layer's gradient needs it.
fn is_entrance(layer: &LayerSpec, next: Option<&LayerSpec>) -> bool {
    match layer {
        LayerSpec::SharedStatistics(_) => true,
        LayerSpec::Collective(collective) if collective.forward == CollectiveOp::Identity => true,
        // What comes from neighbours is kept beside the tile, as what it is: a message.
        LayerSpec::Halo(_) => next.is_some_and(|next| next.properties().hides_halo),
        LayerSpec::Collective(collective) => {
            collective.is_entrance() && next.is_some_and(|next| next.properties().takes_remade)
        }
        _ => false,
    }
}

/// What is kept at a moment, and the most that ever was.
#[derive(Debug, Clone, Default)]
pub(super) struct LiveActivations {
    /// How often each tensor is.
    counts: Vec<u32>,
    pub now: u64,
    pub most: u64,
}

impl LiveActivations {
    pub fn save(&mut self, saved_tensors: &[SavedTensor]) {
        for saved in saved_tensors {
            self.counts.resize(self.counts.len().max(saved.number + 1), 0);
            self.counts[saved.number] += 1;
            if self.counts[saved.number] == 1 {
                self.now = self.now.saturating_add(saved.bytes);
            }
        }
        self.most = self.most.max(self.now);
    }

    /// All that a forward pass saves.
    pub fn forward(&mut self, steps: &[ActivationStep]) {
        for step in steps {
            match step {
                ActivationStep::Layer(layer_step) => self.save(&layer_step.saves),
                ActivationStep::Again { input, .. } => self.save(&[*input]),
            }
        }
    }

    /// What a backward pass lets go of and, where the gradients of weights are deferred, takes in.
    pub fn backward(&mut self, steps: &[ActivationStep], deferred: bool) {
        for step in steps.iter().rev() {
            match step {
                ActivationStep::Layer(layer_step) => {
                    self.release(&layer_step.saves);
                    if deferred {
                        self.save(&layer_step.reads);
                    }
                }
                ActivationStep::Again { input, steps } => {
                    self.release(&[*input]);
                    self.forward(steps);
                    self.backward(steps, deferred);
                }
            }
        }
    }

    pub fn release(&mut self, saved_tensors: &[SavedTensor]) {
        for saved in saved_tensors {
            self.counts[saved.number] -= 1;
            if self.counts[saved.number] == 0 {
                self.now = self.now.saturating_sub(saved.bytes);
            }
        }
    }
}
