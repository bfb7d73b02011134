//! Builds layers one after the other from the spec of a rank's model. Linear layers take what stands before
//! them into a chain; what convolutions and batch norms take is decided in `cnn`.

mod cnn;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use espalier_plan::layout::LocalModel;
use espalier_plan::mesh::Axis;
use espalier_plan::spec::recompute::{AttentionSpan, attention_spans};
use espalier_plan::spec::shape::Shape;
use espalier_plan::spec::{self, CollectiveOp, LayerDescription, ShardDim, WeightOrder};
use espalier_tensor::ops::activation::ActivationFn;
use espalier_tensor::ops::embedding::TableRows;
use espalier_tensor::ops::padding::Padding;
use espalier_tensor::ops::pool::PoolParams;

use crate::AxisGroups;
use crate::layers::spatial::{HaloComm, HaloExchange, TiledMean};
use crate::layers::*;
use crate::weights::{ParameterId, ids_by_name};

/// What is known at the layer reached.
pub(super) struct Builder<'a> {
    parameters: HashMap<String, usize>,
    buffers: HashMap<String, usize>,
    /// The shape of one sample at the layer reached.
    shape: Shape,
    dropouts: u64,
    attentions: usize,
    /// With what they turn, and how many columns a head has.
    rotary_tables: Vec<(spec::Rotary, usize, Arc<RotaryTable>)>,
    tied: HashSet<ParameterId>,
    /// Of a convolution, for the batch norm behind it.
    bias_before: Option<ParameterId>,
    /// Where they are to be frozen, no activation with a gate is fused.
    frozen_gates: Option<FrozenGates>,
    /// The vocabulary of the full model, of which an embedding may have a shard; 0 for images.
    vocab: usize,
    /// The groups of its collectives.
    groups: &'a AxisGroups,
    recompute: spec::RecomputeMode,
}

impl<'a> Builder<'a> {
    /// At the input of a rank's model.
    pub fn new(
        local: &LocalModel,
        groups: &'a AxisGroups,
        recompute: spec::RecomputeMode,
        frozen_gates: Option<&FrozenGates>,
    ) -> Builder<'a> {
        let spec = &local.model;
        Builder {
            parameters: ids_by_name(local.parameters.iter().map(|p| p.name.as_str())),
            buffers: ids_by_name(spec.buffers().iter().map(|b| b.name.as_str())),
            shape: spec.input.shape(),
            dropouts: 0,
            attentions: 0,
            rotary_tables: Vec::new(),
            tied: HashSet::new(),
            bias_before: None,
            frozen_gates: frozen_gates.cloned(),
            vocab: match spec.input {
                spec::Input::Tokens { vocab, .. } => vocab,
                spec::Input::Image { .. } => 0,
            },
            groups,
            recompute,
        }
    }

    /// The parameters that more than one layer was found to use.
    pub(crate) fn into_tied(self) -> HashSet<ParameterId> {
        self.tied
    }

    /// The rank's shard of what enters the model, where the first layer says so.
    fn input_shard(&self, first: &spec::LayerSpec) -> Option<InputShard> {
        match first {
            spec::LayerSpec::Crop(spec::Crop { region, .. }) => Some(InputShard::Tile(region.clone())),
            spec::LayerSpec::Collective(collective)
                if collective.forward == CollectiveOp::Slice(ShardDim::Samples)
                    && collective.backward == CollectiveOp::Identity =>
            {
                Some(InputShard::Samples(self.collective(collective)))
            }
            _ => None,
        }
    }

    /// Layers one after the other; what is inside an attention is recomputed where that is asked for.
    pub fn sequence(&mut self, layers: &[spec::LayerSpec]) -> Sequence {
        if let [first, behind @ ..] = layers
            && let Some(input_shard) = self.input_shard(first)
        {
            self.advance(&layers[..1]);
            return Sequence(vec![Box::new(InputSharding {
                shard: input_shard,
                behind: self.sequence(behind),
            })]);
        }
        let insides = match self.recompute {
            spec::RecomputeMode::Attention => attention_spans(layers),
            _ => Vec::new(),
        };
        let (mut built, mut done) = (Vec::new(), 0);
        for (i, AttentionSpan { again, read }) in insides.iter().enumerate() {
            built.extend(self.row(&layers[done..again.start]));
            let inside = RecomputeLayer(Sequence(self.row(&layers[again.clone()])));
            let next = insides.get(i + 1).map_or(layers.len(), |next| next.again.start);
            let behind = &layers[again.end..next];
            let (layer, count): (Box<dyn Layer>, usize) = match *read > again.end {
                true => {
                    let chain = self.chain_behind(ChainPrologue::Again(inside), behind);
                    let (chain, count) = chain.expect("a linear layer reads it");
                    (Box::new(chain), count)
                }
                false => (Box::new(inside), 0),
            };
            built.push(layer);
            self.advance(&behind[..count]);
            done = again.end + count;
        }
        built.extend(self.row(&layers[done..]));
        Sequence(built)
    }

    /// Layers one after the other, none of them recomputed.
    fn row(&mut self, layers: &[spec::LayerSpec]) -> Vec<Box<dyn Layer>> {
        let mut built: Vec<Box<dyn Layer>> = Vec::new();
        let mut rest = layers;
        while let Some(layer) = rest.first() {
            let (next, count): (Box<dyn Layer>, usize) = match self.chain(rest) {
                Some((chain, count)) => (Box::new(chain), count),
                None => self.cnn(rest).unwrap_or_else(|| (self.layer(layer), 1)),
            };
            built.push(next);
            self.advance(&rest[..count]);
            rest = &rest[count..];
        }
        built
    }

    /// Goes on behind some layers.
    fn advance(&mut self, layers: &[spec::LayerSpec]) {
        let output = |shape: Shape, layer: &spec::LayerSpec| layer.output(shape);
        self.shape = layers.iter().try_fold(self.shape, output).expect("a spec whose shapes were checked");
    }

    /// The chain that `layers` begin with, and how many of them it takes; none where they begin with
    /// something else.
    fn chain(&mut self, layers: &[spec::LayerSpec]) -> Option<(Chain, usize)> {
        let (before, at) = match (&layers[0], layers.get(1)) {
            (spec::LayerSpec::Activation(kind), Some(_)) if !self.is_frozen(*kind) => {
                (ChainPrologue::Activation(activation(*kind)), 1)
            }
            (norm, Some(_)) => {
                self.norm(norm).map_or((ChainPrologue::Nothing, 0), |norm| (ChainPrologue::Norm(norm), 1))
            }
            _ => (ChainPrologue::Nothing, 0),
        };
        let (chain, count) = self.chain_behind(before, &layers[at..])?;
        Some((chain, at + count))
    }

    /// The chain of what stands `before` layers and the first of them; how many of these it takes.
    fn chain_behind(&mut self, before: ChainPrologue, layers: &[spec::LayerSpec]) -> Option<(Chain, usize)> {
        let mut at = 0;
        let enter = match (&before, layers) {
            (
                ChainPrologue::Nothing | ChainPrologue::Norm(_) | ChainPrologue::Again(_),
                [spec::LayerSpec::Collective(collective), _, ..],
            ) if collective.is_entrance() => {
                at += 1;
                Some(self.collective(collective))
            }
            _ => None,
        };
        let (first, mut gate) = self.projection(layers.get(at)?)?;
        at += 1;
        let mut rest = Vec::new();
        loop {
            let (link, next) = match (gate, &layers[at..]) {
                (Some(kind), [next, ..]) => (ChainLink::Gate(kind), next),
                (None, [spec::LayerSpec::Activation(kind), next, ..]) if !self.is_frozen(*kind) => {
                    (ChainLink::Activation(activation(*kind)), next)
                }
                _ => break,
            };
            let Some((linear, behind)) = self.projection(next) else { break };
            at += if gate.is_some() { 1 } else { 2 };
            rest.push((link, linear));
            gate = behind;
        }
        Some((Chain { before, enter, first, rest, gate }, at))
    }

    /// A linear layer, or several side by side, where a layer is that; and the function of a gated unit that
    /// joins two of them.
    fn projection(&mut self, layer: &spec::LayerSpec) -> Option<(Projection, Option<ActivationFn>)> {
        let (specs, gate) = match layer {
            spec::LayerSpec::Branches(branches) => {
                let joint = branches.projection()?;
                (joint.linears, joint.gate.map(activation))
            }
            one => (vec![one], None),
        };
        let widths = specs.iter().map(|one| one.properties().product_size.map_or(0, |size| size.output));
        let widths = widths.collect();
        let linears = specs.into_iter().map(|one| self.linear(one)).collect::<Option<Vec<_>>>()?;
        Some((Projection { linears, widths }, gate))
    }

    /// A linear layer, where a layer is one.
    pub fn linear(&mut self, layer: &spec::LayerSpec) -> Option<Linear> {
        match layer {
            spec::LayerSpec::Linear(spec::Linear { name, bias, order, .. }) => {
                Some(Linear { weight: self.weight(name), bias: bias.then(|| self.bias(name)), order: *order })
            }
            spec::LayerSpec::TiedLinear(spec::TiedLinear { weight, .. }) => {
                let weight = self.parameter(weight);
                self.tied.insert(weight);
                Some(Linear { weight, bias: None, order: WeightOrder::OutIn })
            }
            _ => None,
        }
    }

    fn norm(&self, layer: &spec::LayerSpec) -> Option<NormLayer> {
        match layer {
            spec::LayerSpec::LayerNorm(spec::LayerNorm { name, eps, bias, .. }) => {
                let shift = bias.then(|| self.bias(name));
                Some(NormLayer::Layer { scale: self.weight(name), shift, eps: *eps })
            }
            spec::LayerSpec::RmsNorm(spec::RmsNorm { name, eps, .. }) => {
                Some(NormLayer::Rms { scale: self.weight(name), eps: *eps })
            }
            _ => None,
        }
    }

    fn layer(&mut self, layer: &spec::LayerSpec) -> Box<dyn Layer> {
        match layer {
            spec::LayerSpec::Linear(_) | spec::LayerSpec::TiedLinear(_) | spec::LayerSpec::Conv(_) => {
                unreachable!("each is built with what stands beside it")
            }
            spec::LayerSpec::MaxPool(pool) => {
                let pool = self.max_pool(pool, false);
                match &self.frozen_gates {
                    Some(frozen_gates) => Box::new(FrozenMaxPool { gate: frozen_gates.add(), pool }),
                    None => Box::new(pool),
                }
            }
            &spec::LayerSpec::AvgPool(spec::AvgPool { kernel, stride }) => Box::new(AvgPool {
                input: self.image(),
                pool: PoolParams { kernel, stride, padding: Padding::NONE },
            }),
            spec::LayerSpec::GlobalAvgPool => Box::new(GlobalAvgPool { input: self.image() }),
            &spec::LayerSpec::AdaptiveAvgPool(spec::AdaptiveAvgPool { size }) => {
                Box::new(AdaptiveAvgPool { input: self.image(), size })
            }
            spec::LayerSpec::Flatten => Box::new(Flatten { input: self.image() }),
            &spec::LayerSpec::PadChannels(spec::PadChannels { output, .. }) => {
                Box::new(PadChannels { input: self.image(), channels: output })
            }
            spec::LayerSpec::BatchNorm(_) | spec::LayerSpec::SharedStatistics(_) => {
                unreachable!("a norm is built with what shares its statistics")
            }
            spec::LayerSpec::LayerNorm(_) | spec::LayerSpec::RmsNorm(_) => {
                Box::new(self.norm(layer).expect("it is one"))
            }
            spec::LayerSpec::Activation(kind) => match &self.frozen_gates {
                Some(frozen_gates) if self.is_frozen(*kind) => Box::new(FrozenRelu(frozen_gates.add())),
                _ => Box::new(ActivationLayer(activation(*kind))),
            },
            &spec::LayerSpec::Dropout(spec::Dropout { rate, counted }) => {
                self.dropouts += 1;
                Box::new(Dropout { rate, index: self.dropouts, counted })
            }
            &spec::LayerSpec::Embedding(spec::Embedding { ref name, vocab, first, .. }) => {
                let rows = if vocab == self.vocab { TableRows::All } else { TableRows::From(first as u32) };
                Box::new(Embedding { table: self.weight(name), vocab, rows })
            }
            &spec::LayerSpec::PositionEmbedding(spec::PositionEmbedding {
                ref name, context, first, ..
            }) => Box::new(PositionEmbedding { table: self.weight(name), context, first }),
            spec::LayerSpec::Collective(collective) => Box::new(self.collective(collective)),
            spec::LayerSpec::Crop(_) => unreachable!("it takes the layers behind it"),
            spec::LayerSpec::Halo(halo) => Box::new(HaloExchange(self.halo(halo))),
            spec::LayerSpec::TiledMean(spec::TiledMean { tiles, size, .. }) => {
                let (channels, group) = (self.image()[2], self.groups.along(Axis::Spatial));
                Box::new(TiledMean::new(tiles, channels, *size, group))
            }
            spec::LayerSpec::FeatureSlice(spec::FeatureSlice { at, of }) => {
                Box::new(Columns { at: at.clone(), of: *of })
            }
            spec::LayerSpec::Bias(spec::Bias { name, .. }) => Box::new(Bias(self.bias(name))),
            spec::LayerSpec::Attention(attention) => Box::new(self.attention(attention)),
            spec::LayerSpec::Residual(spec::Residual { branch, shortcut }) => {
                Box::new(Residual { branch: self.branch(branch).0, shortcut: self.branch(shortcut).0 })
            }
            spec::LayerSpec::Branches(spec::Branches { join, branches }) => {
                let mut gates = vec![None; branches.len()];
                let mut build = |(i, branch): (usize, &Vec<spec::LayerSpec>)| {
                    let mut layers = &branch[..];
                    if let (spec::BranchJoin::Product, [before @ .., spec::LayerSpec::Activation(last)]) =
                        (join, layers)
                        && last.properties().is_gate
                    {
                        gates[i] = Some(activation(*last));
                        layers = before;
                    }
                    self.branch(layers)
                };
                let (all, widths) = branches.iter().enumerate().map(&mut build).unzip();
                Box::new(Branches { join: *join, all, widths, gates })
            }
        }
    }

    fn attention(&mut self, attention: &spec::Attention) -> Attention {
        let &spec::Attention { heads, kv_heads, width, rotary, ref qk_norm } = attention;
        self.attentions += 1;
        let scales = |norm: &spec::QkNorm| QkScales {
            ids: ["q_norm", "k_norm"].map(|which| self.weight(&format!("{}.{which}", norm.name))),
            eps: norm.eps,
        };
        let norm = qk_norm.as_ref().map(scales);
        let rotary = rotary.map(|rotary| self.rotary_table(&rotary, width / heads));
        Attention { heads, kv_heads, number: self.attentions - 1, rotary, norm }
    }

    /// The rotations of heads of so many columns: one table for all layers that turn alike.
    fn rotary_table(&mut self, rotary: &spec::Rotary, columns: usize) -> Arc<RotaryTable> {
        let known = self.rotary_tables.iter().find(|(known, of, _)| known == rotary && *of == columns);
        if let Some((_, _, table)) = known {
            return table.clone();
        }
        let context = self.shape.rows() as usize;
        let table = Arc::new(RotaryTable::new(rotary.frequencies(columns), context));
        self.rotary_tables.push((*rotary, columns, table.clone()));
        table
    }

    fn collective(&self, spec: &spec::CollectiveLayer) -> CollectiveLayer {
        CollectiveLayer { group: self.groups.along(spec.axis).clone(), spec: spec.clone() }
    }

    fn halo(&self, spec::Halo(plan): &spec::Halo) -> HaloComm {
        HaloComm::new(plan.clone(), self.groups.along(Axis::Spatial))
    }

    /// A branch that begins here, and the last dimension of its output; the layer reached stays.
    fn branch(&mut self, layers: &[spec::LayerSpec]) -> (Sequence, usize) {
        let input = self.shape;
        let built = self.sequence(layers);
        let width = self.shape.last();
        self.shape = input;
        (built, width)
    }

    /// Whether an activation has a gate that is to be frozen.
    fn is_frozen(&self, kind: spec::Activation) -> bool {
        self.frozen_gates.is_some() && kind == spec::Activation::Relu
    }

    fn image(&self) -> [usize; 3] {
        match self.shape {
            Shape::Image { height, width, channels } => [height, width, channels],
            other => panic!("a checked spec has an image here, not {other}"),
        }
    }

    fn parameter(&self, name: &str) -> ParameterId {
        ParameterId(self.parameters[name])
    }

    fn weight(&self, name: &str) -> ParameterId {
        self.parameter(&format!("{name}.weight"))
    }

    fn bias(&self, name: &str) -> ParameterId {
        self.parameter(&format!("{name}.bias"))
    }
}

fn activation(kind: spec::Activation) -> ActivationFn {
    match kind {
        spec::Activation::Relu => ActivationFn::Relu,
        spec::Activation::Gelu => ActivationFn::Gelu,
        spec::Activation::Silu => ActivationFn::Silu,
        spec::Activation::GeluErf => ActivationFn::GeluErf,
        spec::Activation::Tanh => ActivationFn::Tanh,
    }
}
