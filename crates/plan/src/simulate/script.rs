//! What a rank does in a step as a script: what each of its layers takes, for a worker that takes that time and
//! sends the messages that a run would. So a planned step can be held against the clock without the machine
//! that it was planned for.

use super::collective::RankGroup;
use super::passes::{PassContext, Passes, TimedLayer, layer_passes};
use super::times::StageTimes;
use super::{Candidate, Simulation};
use crate::error::Error;
use crate::mesh::PerAxis;
use crate::spec::{LayerSpec, Shape};

/// What a rank does.
#[derive(Debug, Clone, PartialEq)]
pub struct Script {
    /// Of each virtual stage.
    pub stages: Vec<ScriptStage>,
}

/// What a rank does with a virtual stage.
#[derive(Debug, Clone, PartialEq)]
pub struct ScriptStage {
    /// Its layers, block by block, and what they take.
    pub blocks: Vec<Vec<ScriptLayer>>,
    /// Seconds to store the gradients of a micro-batch,
    pub sink: f64,
    /// and of the step itself.
    pub step: f64,
}

/// A layer of a rank's own model.
#[derive(Debug, Clone, PartialEq)]
pub struct ScriptLayer {
    /// The layer; one with sides stands behind those of its sides.
    pub layer: LayerSpec,
    /// What it reads of a sample.
    pub input: Shape,
    /// What it makes of it.
    pub output: Shape,
    /// What that takes.
    pub passes: Passes,
}

impl Simulation<'_> {
    /// What the rank at some mesh coordinates does in a step of the plan's own layout, which must be one that
    /// a candidate stands for.
    pub fn script(&self, candidate: &Candidate, coords: PerAxis) -> Result<Script, Error> {
        let micro_batches = self.plan.batch.micro_batches;
        let times = StageTimes::new(self, candidate, &self.plan.stage_blocks, micro_batches)?;
        let model = &self.plan.layout.of(coords).model;
        let at = self.pass_context(candidate);
        // Each rank has the neighbours that its own model names.
        let at = PassContext { neighbours: 1.0, ..at };
        let own = |TimedLayer { layer, input, output, passes }: TimedLayer| {
            let layer = layer.clone();
            ScriptLayer { layer, input, output, passes }
        };
        let timed = layer_passes(model, &at)?.into_iter();
        let blocks: Vec<Vec<ScriptLayer>> =
            timed.map(|layers| layers.into_iter().map(own).collect()).collect();
        let part = |(i, part): (usize, &std::ops::Range<usize>)| {
            let [sink, step] = times.of_stage(i);
            ScriptStage { blocks: blocks[part.clone()].to_vec(), sink, step }
        };
        Ok(Script { stages: self.plan.stage_blocks.iter().enumerate().map(part).collect() })
    }

    /// What computes for a candidate's ranks, and whom they talk to.
    pub(super) fn pass_context(&self, candidate: &Candidate) -> PassContext<'_> {
        let group = |ranks, stride| RankGroup::new(self.cluster, ranks, stride).among(candidate.ranks());
        PassContext {
            kernels: self.kernels(candidate),
            engine: &self.engine,
            fuses_norms: self.engine.is_ours() && !self.cluster.node.cores,
            pruning: self.plan.pruning.as_ref(),
            tensor: group(candidate.tensor, 1),
            spatial: group(candidate.spatial(), candidate.tensor),
            neighbours: candidate.most_neighbours(),
            recompute: candidate.recompute,
            samples: candidate.micro_batch,
        }
    }
}
