//! A planned rank as lists of steps: what its layers take by the planner, and what they send by their own specs.
//!
//! Where the backward of a layer makes both gradients before anything is sent on, both are taken there: no
//! schedule that defers those of weights is run with these lists.

use std::time::{Duration, Instant};

use espalier_comm::{Communicator, threads};
use espalier_nn::weights::ParameterId;
use espalier_plan::cluster::Cluster;
use espalier_plan::engine::EngineProfile;
use espalier_plan::mesh::Axis;
use espalier_plan::simulate::{Candidate, Script, ScriptLayer, ScriptStage, Simulation};
use espalier_plan::spec::{CollectiveLayer, CollectiveOp, LayerSpec, Shape, ShardDim};
use espalier_plan::{DataFacts, Plan, RunFile};
use espalier_tensor::{DType, Device};
use espalier_train::parallel::Ranks;
use espalier_train::parallel::data::DataParallel;
use espalier_train::parallel::reduce_groups::ReduceGroups;
use espalier_train::state::ParamStore;
use espalier_train::step::Executor;
use espalier_train::{Error, Result};

use super::{Effort, Neighbour, Paced, PassStep, Passes};

/// A cluster of devices so slow that copies of messages and the waking of threads are next to nothing.
pub const SLOW: &str = "\
name = \"slow\"
[device]
name = \"one that sleeps\"
memory_gb = 1.0
launch_us = 1.0
[device.bf16]
peak_tflops = 0.002
efficiency = [[0.000001, 0.5], [0.01, 1.0]]
[device.f32]
peak_tflops = 0.002
efficiency = [[0.000001, 0.5], [0.01, 1.0]]
[device.memory]
gb_per_s = 0.5
efficiency = [[0.01, 1.0]]
[node]
devices = 16
[node.link]
alpha_us = 300.0
gb_per_s = 0.1
";

/// How long a rank waits for another.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a step was predicted to take, and took.
#[derive(Debug, Clone)]
pub struct Comparison {
    pub candidate: Candidate,
    pub predicted: f64,
    /// The shortest of the steps.
    pub measured: f64,
}

/// Compares a plan's step on a cluster with the clock, several times. The cluster's devices are GPUs: each
/// rank has one.
pub fn compare(plan: &Plan, cluster: &Cluster, steps: usize) -> Result<Comparison> {
    let candidate = Candidate::of(plan).expect("a layout that a candidate stands for");
    let job = Simulation::new(plan, cluster, EngineProfile::ESPALIER);
    let predicted = job.estimate(&candidate)?.step_seconds;
    let coords = |rank| plan.mesh.coordinates(rank);
    let scripts: Vec<Script> =
        (0..plan.mesh.size()).map(|rank| job.script(&candidate, coords(rank))).collect::<Result<_, _>>()?;
    let link = cluster.node.link();
    let (latency, rate) = (Duration::from_secs_f64(link.alpha_us * 1e-6), link.gb_per_s * 1e9);
    let run = |world: Communicator| {
        let script = &scripts[world.rank()];
        step_times(plan, script, world.over(latency, rate), steps)
    };
    let times = threads::run(plan.mesh.size(), PATIENCE, run).map_err(Error::from)?;
    let slowest = |step: usize| times.iter().map(|rank| rank[step]).fold(0.0, f64::max);
    let measured = (0..steps).map(slowest).fold(f64::INFINITY, f64::min);
    Ok(Comparison { candidate, predicted, measured })
}

/// A model on data x pipeline x tensor x spatial ranks.
pub fn plan(
    model: &str,
    [data, pipeline, tensor, spatial]: [usize; 4],
    samples: usize,
    micro_batches: usize,
) -> Result<Plan, espalier_plan::Error> {
    let text = format!(
        "{model}[train]\nsteps = 1\nbatch = {samples}\nmicro_batches = {micro_batches}\n\
         [parallel]\ndata = {data}\npipeline = {pipeline}\ntensor = {tensor}\nspatial = {spatial}\n"
    );
    let facts = DataFacts { vocab: Some(256), image: Some((32, 32, 3)), classes: Some(10) };
    Plan::new(RunFile::parse(&text, &[])?, facts)
}

/// Seconds of some steps of a rank.
fn step_times(plan: &Plan, script: &Script, world: Communicator, steps: usize) -> Result<Vec<f64>> {
    let device = Device::cpu(1)?;
    device.enter(|| {
        let schedule = plan.schedule(1)?;
        let ranks = Ranks::join(world, &plan.mesh)?;
        let stage = ranks.coords().pipeline;
        let local = schedule.placement.chunks(stage).to_vec();
        let rank = PlannedRank { plan, ranks: &ranks };
        let traffic = plan.traffic(ranks.rank(), &plan.gradient_lengths(ranks.rank()))?;
        let params = plan.params(ranks.rank())?;
        let groups = ReduceGroups::form(plan, &params, &ranks)?;
        let params = ParamStore::without_weights(&params);
        let chunks =
            local.iter().map(|chunk| rank.passes(chunk.virtual_stage, &script.stages[chunk.virtual_stage]));
        let mut worker =
            Paced::new(Effort::sleep(Duration::from_secs(1)), device.clone(), chunks.collect::<Result<_>>()?);
        worker.step = local.iter().map(|chunk| script.stages[chunk.virtual_stage].step).sum();
        worker.world = Some(ranks.world().clone());
        let shared = DataParallel::new(plan.data_parallel, false, &params, None, &groups, &traffic.buckets);
        worker.shared = Some((shared, params));
        let mut executor = Executor::new(schedule, ranks.stages().clone());
        let mut times = Vec::new();
        for _ in 0..steps {
            ranks.world().barrier()?;
            let start = Instant::now();
            executor.run(1, &mut worker)?;
            times.push(start.elapsed().as_secs_f64());
            executor.rewind();
        }
        Ok(times)
    })
}

/// A rank of a plan among the others.
struct PlannedRank<'a> {
    plan: &'a Plan,
    ranks: &'a Ranks,
}

impl PlannedRank<'_> {
    fn passes(&self, number: usize, stage: &ScriptStage) -> Result<Passes> {
        let local = self.plan.layout.of(self.ranks.coords());
        let (blocks, borders) = (
            self.plan.stage_blocks[number].clone(),
            local.model.borders().map_err(espalier_plan::Error::from)?,
        );
        let tensors = self.plan.model.block_tensors();
        let elements = |index: usize| local.parameters[index].elements() as usize;
        let [mut forward, mut backward] = [Vec::new(), Vec::new()];
        for layers in &stage.blocks {
            self.forward(layers, &mut forward);
        }
        for (layers, block) in stage.blocks.iter().zip(blocks.clone()).rev() {
            self.backward(layers, &mut backward);
            let made = tensors.parameters(block..block + 1).into_iter().rev();
            backward
                .push(PassStep::Gradients(made.map(|index| (ParameterId(index), elements(index))).collect()));
        }
        backward.push(PassStep::Take(stage.sink));
        let samples = self.plan.batch.micro_batch;
        let entering = |border: usize| samples * borders[border].elements() as usize;
        Ok(Passes {
            forward,
            backward_input: Vec::new(),
            backward_weight: backward,
            borders: [entering(blocks.start), entering(blocks.end)],
            backwards: self.plan.batch.micro_batches,
        })
    }

    fn forward(&self, layers: &[ScriptLayer], steps: &mut Vec<PassStep>) {
        let mut hidden = false;
        for (i, ScriptLayer { layer, input, output, passes }) in layers.iter().enumerate() {
            match layer {
                LayerSpec::Collective(collective) => {
                    steps.push(PassStep::Take(passes.forward.compute));
                    steps.extend(self.collective(collective, collective.forward, *input));
                }
                LayerSpec::Halo(_) => {
                    let conv = layers.get(i + 1).filter(|next| matches!(next.layer, LayerSpec::Conv(_)));
                    let beside = conv.map_or(0.0, |conv| conv.passes.forward.compute);
                    steps.push(self.halo(layer, *input, beside, true));
                    hidden = conv.is_some();
                    continue;
                }
                LayerSpec::TiledMean(_) => {
                    steps.push(PassStep::Take(passes.forward.compute));
                    steps.push(
                        self.all_reduce(Axis::Spatial, self.micro_batch() * output.elements() as usize),
                    );
                }
                LayerSpec::SharedStatistics(statistics) => {
                    let group = self.ranks.axes().over(&statistics.over).clone();
                    steps.push(PassStep::AllReduce(group, 2 * statistics.numbers() as usize, DType::F32));
                }
                _ if hidden => {}
                _ => steps.push(PassStep::Take(passes.forward.compute)),
            }
            hidden = false;
        }
    }

    fn backward(&self, layers: &[ScriptLayer], steps: &mut Vec<PassStep>) {
        for (i, ScriptLayer { layer, input, output, passes }) in layers.iter().enumerate().rev() {
            let compute = passes.backward().compute;
            match layer {
                LayerSpec::Collective(collective) => {
                    steps.extend(self.collective(collective, collective.backward, *output));
                    steps.push(PassStep::Take(compute));
                }
                LayerSpec::Halo(_) => {
                    let conv = layers.get(i + 1).filter(|next| matches!(next.layer, LayerSpec::Conv(_)));
                    let beside = conv.map_or(0.0, |conv| conv.passes.backward().compute);
                    steps.push(self.halo(layer, *input, beside, false));
                }
                LayerSpec::Conv(_) if i > 0 && matches!(layers[i - 1].layer, LayerSpec::Halo(_)) => {}
                LayerSpec::SharedStatistics(statistics) => {
                    let group = self.ranks.axes().over(&statistics.over).clone();
                    steps.push(PassStep::AllReduce(group, 2 * statistics.numbers() as usize, DType::F32));
                }
                _ => steps.push(PassStep::Take(compute)),
            }
        }
    }

    fn micro_batch(&self) -> usize {
        self.plan.batch.micro_batch
    }

    fn all_reduce(&self, axis: Axis, numbers: usize) -> PassStep {
        PassStep::AllReduce(self.ranks.along(axis).clone(), numbers, DType::F32)
    }

    /// What a collective does to a tensor of some shape.
    fn collective(&self, layer: &CollectiveLayer, op: CollectiveOp, shape: Shape) -> Option<PassStep> {
        let widest = layer.shard_sizes.iter().copied().max().unwrap_or(0);
        let shard = |along| match along {
            ShardDim::Samples => self.micro_batch().div_ceil(layer.ranks()) * shape.elements() as usize,
            ShardDim::Sequence => self.micro_batch() * widest * shape.last(),
            ShardDim::Last => self.micro_batch() * widest * shape.rows() as usize,
        };
        let group = || self.ranks.along(layer.axis).clone();
        match op {
            CollectiveOp::Identity | CollectiveOp::Slice(_) => None,
            CollectiveOp::AllReduce => {
                Some(self.all_reduce(layer.axis, self.micro_batch() * shape.elements() as usize))
            }
            CollectiveOp::AllGather(along) => Some(PassStep::AllGather(group(), shard(along))),
            CollectiveOp::ReduceScatter(along) => Some(PassStep::ReduceScatter(group(), shard(along))),
            CollectiveOp::AllToAll { .. } => unreachable!("no candidate has one"),
        }
    }

    fn halo(&self, layer: &LayerSpec, input: Shape, beside: f64, forward: bool) -> PassStep {
        let LayerSpec::Halo(halo) = layer else { unreachable!("a halo") };
        let pixel = self.micro_batch() * input.last();
        let neighbours = halo.0.neighbours.iter().map(|peer| {
            let [gives, takes] = [&peer.gives, &peer.takes].map(|of| pixel * of.pixels() as usize);
            let (gives, takes) = if forward { (gives, takes) } else { (takes, gives) };
            Neighbour { rank: peer.rank, gives, takes }
        });
        PassStep::Halo(self.ranks.along(Axis::Spatial).for_halos(), neighbours.collect(), beside)
    }
}
