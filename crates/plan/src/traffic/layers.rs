//! What layers exchange within a pass: collectives of tensor ranks, halos, and what batch norms measure
//! together. All of it is in a rank's own model; the schedule says how often a chunk of it runs.

use std::ops::Range;

use serde::Serialize;

use super::all_reduce;
use crate::error::Error;
use crate::layout::LocalModel;
use crate::mesh::Axis;
use crate::plan::Plan;
use crate::schedule::{Action, Schedule};
use crate::spec::recompute::attention_spans;
use crate::spec::{
    CollectiveLayer, CollectiveOp, Halo, LayerSpec, RecomputeMode, Shape, ShardDim, SharedStatistics,
};
use crate::split::GroupRank;

/// Numbers of a row of logits that ranks with some classes each send each other: f32.
const NUMBERS_OF_A_ROW: u64 = 4;

/// Messages of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct MessageTotals {
    /// How many there are.
    pub count: u64,
    /// What the rank sends in all of them.
    pub bytes: u64,
}

impl MessageTotals {
    /// So many more of so many bytes each.
    pub(super) fn add(&mut self, count: u64, bytes: u64) {
        self.count = self.count.saturating_add(count);
        self.bytes = self.bytes.saturating_add(bytes.saturating_mul(count));
    }
}

/// What a rank's layers send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct LayerTraffic {
    /// All-reduces of activations and of their gradients: over tensor ranks, and where a split of images ends.
    #[serde(rename = "sums")]
    pub all_reduces: MessageTotals,
    /// All-gathers of activations over tensor ranks, and what these send each other of their logits.
    #[serde(rename = "gathers")]
    pub all_gathers: MessageTotals,
    /// Reduce-scatters over tensor ranks.
    #[serde(rename = "scatters")]
    pub reduce_scatters: MessageTotals,
    /// All-to-alls: activations sharded along one dimension become sharded along another.
    #[serde(rename = "dealt")]
    pub all_to_alls: MessageTotals,
    /// Pixels that windows of neighbours see, and their gradients.
    pub halos: MessageTotals,
    /// What batch norms measure together.
    pub norms: MessageTotals,
}

impl Plan {
    /// What a rank's layers send in the passes of a schedule's list.
    pub fn layer_traffic(&self, rank: usize, schedule: &Schedule) -> Result<LayerTraffic, Error> {
        let coords = self.mesh.coordinates(rank);
        let local = self.layout.of(coords);
        let borders = local.model.borders()?;
        let samples = local.model.samples_at_borders(self.batch.micro_batch as u64);
        let mut walk = TrafficWalk {
            plan: self,
            local,
            rank,
            runs: 0,
            forwards: 1,
            samples: 0,
            sent: LayerTraffic::default(),
        };
        for (number, chunk) in schedule.placement.chunks(coords.pipeline).iter().enumerate() {
            let forward = |action: &&Action| matches!(action, Action::Forward(work) if work.chunk == number);
            walk.runs = schedule.ranks[coords.pipeline].iter().filter(forward).count() as u64;
            walk.chunk(
                self.stage_blocks[chunk.virtual_stage].clone(),
                &borders,
                &samples,
                chunk.virtual_stage == 0,
            );
        }
        Ok(walk.sent)
    }
}

/// A walk through what one rank runs.
struct TrafficWalk<'a> {
    plan: &'a Plan,
    local: &'a LocalModel,
    rank: usize,
    /// Micro-batches that go through the chunk.
    runs: u64,
    /// Forward passes of each: two, where the block is run again.
    forwards: u64,
    /// Samples of each that the rank has at the point reached.
    samples: u64,
    sent: LayerTraffic,
}

impl TrafficWalk<'_> {
    fn chunk(&mut self, blocks: Range<usize>, borders: &[Shape], samples: &[u64], is_first: bool) {
        let model = &self.local.model;
        let last = model.blocks.len() - 1;
        for i in blocks.clone() {
            let mut layers = &model.blocks[i].layers[..];
            if i == last && model.head().is_some() {
                layers = &layers[..layers.len() - 1];
            }
            let again = self.plan.storage.recompute.remakes(i, last);
            self.forwards = 1 + u64::from(again);
            self.samples = samples[i];
            self.layers(layers, borders[i], i > blocks.start || !is_first);
        }
        if let Some(classes) = self.local.classes.as_ref().filter(|_| blocks.end == last + 1) {
            let rows = samples[last + 1] * borders[last + 1].rows();
            let others = self.along(&[classes.axis]).ranks as u64 - 1;
            let bytes = rows * NUMBERS_OF_A_ROW * 4 * others;
            self.sent.all_gathers.add(self.runs, bytes);
        }
    }

    /// `wanted`: whether somebody wants the gradient of what enters. Nobody does of images, full or split.
    fn layers(&mut self, layers: &[LayerSpec], mut shape: Shape, mut wanted: bool) {
        let insides = match self.plan.storage.recompute {
            RecomputeMode::Attention => attention_spans(layers),
            _ => Vec::new(),
        };
        for (i, layer) in layers.iter().enumerate() {
            let output = layer.output(shape).expect("the shapes were checked");
            let is_inside = insides.iter().any(|inside| inside.again.contains(&i));
            let forwards = self.forwards + u64::from(is_inside);
            match layer {
                LayerSpec::Collective(collective) => {
                    // A linear layer keeps what stands before it, and has it gathered again for its gradient.
                    let again = collective.is_entrance()
                        && layers.get(i + 1).is_some_and(|next| next.properties().takes_remade);
                    self.count(collective, collective.forward, shape, forwards + u64::from(again));
                    self.samples =
                        collective.samples_behind(self.samples, self.plan.batch.micro_batch as u64);
                    self.count(collective, collective.backward, output, u64::from(wanted));
                }
                LayerSpec::Halo(halo) => self.halo(halo, shape, wanted),
                LayerSpec::TiledMean(_) => {
                    let elements = self.samples * output.elements();
                    let bytes = all_reduce(self.along(&[Axis::Spatial]), elements, self.element());
                    self.sent.all_reduces.add(self.runs * self.forwards, bytes);
                }
                LayerSpec::SharedStatistics(statistics) => self.statistics(statistics),
                other => {
                    let once = std::mem::replace(&mut self.forwards, forwards);
                    let branches = other.description().branches();
                    let branches = branches.iter().flat_map(|branches| &branches.all);
                    branches.for_each(|branch| self.layers(branch.layers, shape, wanted));
                    self.forwards = once;
                }
            }
            wanted = !matches!(layer, LayerSpec::Crop(_));
            shape = output;
        }
    }

    /// A collective on a tensor of some shape, so many times a micro-batch.
    fn count(&mut self, collective: &CollectiveLayer, how: CollectiveOp, shape: Shape, times: u64) {
        let group = self.along(&[collective.axis]);
        let all = self.plan.batch.micro_batch;
        let widest = |sizes: &mut dyn Iterator<Item = usize>| sizes.max().unwrap_or(0) as u64;
        let shard = |along| {
            let elements = match along {
                ShardDim::Samples => {
                    let samples = |rank| collective.samples_of(rank, all).len();
                    widest(&mut (0..group.ranks).map(samples)) * shape.elements()
                }
                ShardDim::Sequence => {
                    self.samples * widest(&mut collective.shard_sizes.iter().copied()) * shape.last() as u64
                }
                ShardDim::Last => {
                    self.samples * widest(&mut collective.shard_sizes.iter().copied()) * shape.rows()
                }
            };
            elements * self.element() * (group.ranks as u64 - 1)
        };
        let bytes = match how {
            CollectiveOp::Identity | CollectiveOp::Slice(_) => return,
            CollectiveOp::AllGather(along) | CollectiveOp::ReduceScatter(along) => shard(along),
            CollectiveOp::AllReduce => all_reduce(group, self.samples * shape.elements(), self.element()),
            CollectiveOp::AllToAll { .. } => {
                // What it has, but for what it keeps: its own samples of its own features.
                let local = collective.samples_of(collective.rank, all).len() as u64;
                let kept = local * shape.rows() * collective.shard_sizes[collective.rank] as u64;
                (self.samples_before(collective, how) * shape.elements() - kept) * self.element()
            }
        };
        let kind = match how {
            CollectiveOp::AllGather(_) => &mut self.sent.all_gathers,
            CollectiveOp::ReduceScatter(_) => &mut self.sent.reduce_scatters,
            CollectiveOp::AllToAll { .. } => &mut self.sent.all_to_alls,
            _ => &mut self.sent.all_reduces,
        };
        kind.add(self.runs * times, bytes);
    }

    fn halo(&mut self, Halo(halo): &Halo, shape: Shape, wanted: bool) {
        let pixel = shape.last() as u64 * self.element();
        let (samples, backwards) = (self.samples, u64::from(wanted));
        for peer in &halo.neighbours {
            let passes = [(&peer.gives, self.forwards), (&peer.takes, backwards)];
            for (region, times) in passes.into_iter().filter(|(region, _)| !region.is_empty()) {
                self.sent.halos.add(self.runs * times, samples * pixel * region.pixels());
            }
        }
    }

    /// Once forward and once backward.
    fn statistics(&mut self, statistics: &SharedStatistics) {
        let bytes = all_reduce(self.along(&statistics.over), statistics.numbers(), 8);
        self.sent.norms.add(self.runs * (self.forwards + 1), bytes);
    }

    /// Samples that the rank has before an all-to-all.
    fn samples_before(&self, collective: &CollectiveLayer, how: CollectiveOp) -> u64 {
        let all = self.plan.batch.micro_batch;
        match how {
            CollectiveOp::AllToAll { from: ShardDim::Samples, .. } => {
                collective.samples_of(collective.rank, all).len() as u64
            }
            _ => all as u64,
        }
    }

    /// Bytes of an element.
    fn element(&self) -> u64 {
        self.plan.storage.precision.size()
    }

    /// Its rank among those along some axes.
    fn along(&self, axes: &[Axis]) -> GroupRank {
        self.plan.mesh.rank_along(self.rank, axes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer_traffic(text: &str) -> Vec<LayerTraffic> {
        let plan = Plan::of_text(text);
        let schedule = plan.schedule(1).unwrap();
        (0..plan.mesh.size()).map(|rank| plan.layer_traffic(rank, &schedule).unwrap()).collect()
    }

    #[test]
    fn one_rank_sends_nothing() {
        assert_eq!(layer_traffic(""), [LayerTraffic::default()]);
    }

    /// Two all-reduces forward and two backward in each of four blocks, one of the embedding and one before
    /// the head; each of 32 x 64 x 128 f32, of which a rank of two sends as much as there is.
    #[test]
    fn a_transformer_block_all_reduces_twice_forward_and_twice_backward() {
        let text =
            "[model]\nlayers = 4\nwidth = 128\ncontext = 64\n[train]\nbatch = 32\n[parallel]\ntensor = 2";
        for rank in layer_traffic(text) {
            assert_eq!(rank.all_reduces, MessageTotals { count: 18, bytes: 18 * 32 * 64 * 128 * 4 });
            assert_eq!(rank.all_gathers, MessageTotals { count: 1, bytes: 32 * 64 * 4 * 4 });
            assert_eq!([rank.reduce_scatters, rank.halos], [MessageTotals::default(); 2]);
        }
        // Split along the sequence each all-reduce is a reduce-scatter and an all-gather, and a linear
        // layer's input is gathered once more.
        for rank in layer_traffic(&format!("{text}\nsequence = true")) {
            let half = 32 * 32 * 128 * 4;
            assert_eq!(rank.reduce_scatters, MessageTotals { count: 18, bytes: 18 * half });
            assert_eq!(rank.all_gathers, MessageTotals { count: 27, bytes: 26 * half + 32 * 64 * 4 * 4 });
            assert_eq!(rank.all_reduces, MessageTotals::default());
        }
        // Attention's inside begins with one of the gathers.
        let again = text.replace("[train]", "[train]\nrecompute = \"attention\"");
        for rank in layer_traffic(&format!("{again}\nsequence = true")) {
            assert_eq!(rank.all_gathers.count, 27 + 4);
            assert_eq!(rank.reduce_scatters.count, 18);
        }
    }
}
