//! One way to lay a run out on so many devices.

use std::fmt;

use serde::Serialize;

use crate::config::SpatialGrid;
use crate::layout::Partition;
use crate::mesh::PerAxis;
use crate::pipeline::ScheduleSource;
use crate::plan::Plan;
use crate::schedule::ScheduleName;
use crate::spec::RecomputeMode;

/// Ranks along each axis, and what goes with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Candidate {
    /// Replicas.
    pub data: usize,
    /// Stages.
    pub pipeline: usize,
    /// Ranks that have a shard of every large layer,
    pub tensor: usize,
    /// and whether these cut what lies between along the sequence.
    pub sequence: bool,
    /// Rows and columns of the grid over which images are split.
    pub grid: [usize; 2],
    /// Samples that a rank runs at a time.
    pub micro_batch: usize,
    /// The order of a pipeline; of no meaning with one stage.
    pub schedule: ScheduleName,
    /// Virtual stages on a rank, for interleaving.
    pub chunks: Option<usize>,
    /// What is computed twice.
    pub recompute: RecomputeMode,
    /// What replicas shard: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too (other
    /// engines').
    pub zero: u8,
    /// Whether gradients and optimizer state are those of kept weights alone.
    pub compressed: bool,
    /// Whether pruned weights rest as kept values too.
    pub compressed_weights: bool,
}

impl Candidate {
    /// One rank that runs so many samples at a time.
    pub const fn single_rank(micro_batch: usize) -> Candidate {
        Candidate {
            data: 1,
            pipeline: 1,
            tensor: 1,
            sequence: false,
            grid: [1, 1],
            micro_batch,
            schedule: ScheduleName::OneFOneB,
            chunks: None,
            recompute: RecomputeMode::None,
            zero: 0,
            compressed: false,
            compressed_weights: false,
        }
    }

    /// The layout of a run; none where it is one that no step stands for: a schedule of the user's own, one
    /// that never flushes, replicas that step by themselves, or layers that are each split in another way.
    pub fn of(plan: &Plan) -> Option<Candidate> {
        let ScheduleSource::Named { name: schedule, chunks, pipelines: None } = plan.pipeline.order else {
            return None;
        };
        if plan.pipeline.is_asynchronous() || plan.data_parallel.is_local() || plan.layout.mixture().is_some()
        {
            return None;
        }
        let PerAxis { data, pipeline, tensor, .. } = plan.mesh.axis_sizes();
        Some(Candidate {
            data,
            pipeline,
            tensor,
            sequence: plan.layout.has_sequence(),
            grid: plan.layout.grid(),
            micro_batch: plan.batch.micro_batch,
            schedule,
            chunks,
            recompute: plan.storage.recompute,
            zero: plan.data_parallel.zero_stage(),
            compressed: plan.storage.compressed,
            compressed_weights: plan.storage.compressed_weights,
        })
    }

    /// Devices that it takes.
    pub fn ranks(&self) -> usize {
        self.data * self.pipeline * self.tensor * self.spatial()
    }

    /// Ranks that have tiles of the same images.
    pub fn spatial(&self) -> usize {
        self.grid[0] * self.grid[1]
    }

    /// How many neighbours a tile has in the middle of the grid, for each that the first one has, in its corner.
    pub(super) fn most_neighbours(&self) -> f64 {
        let around = |reach: usize| self.grid.iter().map(|tiles| reach.min(*tiles)).product::<usize>() - 1;
        if self.spatial() == 1 { 1.0 } else { around(3) as f64 / around(2) as f64 }
    }

    /// Ranks along each axis.
    pub fn axis_sizes(&self) -> PerAxis {
        PerAxis { data: self.data, pipeline: self.pipeline, tensor: self.tensor, spatial: self.spatial() }
    }

    /// How it cuts tensors.
    pub fn cuts(&self) -> Partition {
        Partition { tensor: self.tensor, sequence: self.sequence, grid: self.grid, ..Partition::NONE }
    }

    /// What tells its partition of tensors apart from others.
    pub(super) fn partition_key(&self) -> (usize, bool, [usize; 2]) {
        (self.tensor, self.sequence, self.grid)
    }

    /// Micro-batches of a step of so many samples; none where these cannot be split evenly.
    pub fn micro_batches(&self, batch: usize) -> Option<usize> {
        let each = self.data.checked_mul(self.micro_batch)?;
        batch.is_multiple_of(each).then_some(batch / each).filter(|number| *number > 0)
    }

    /// What a person calls the form of its state.
    pub fn state(&self) -> &'static str {
        if self.compressed { "compressed" } else { "dense" }
    }

    /// Whether a block's pruned weights are made dense when it runs: shards are of kept values too.
    pub(super) fn expands_weights(&self) -> bool {
        self.compressed_weights || self.compressed && self.zero == 3
    }

    /// What a person calls the form of its weights at rest.
    pub fn weights(&self) -> &'static str {
        if self.compressed_weights { "compressed" } else { "dense" }
    }
}

/// `data 32 x pipeline 8, micro-batch 1, 1f1b, recompute block`: what is not the default.
impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes = [("data", self.data), ("pipeline", self.pipeline), ("tensor", self.tensor)];
        let mut axes: Vec<String> = axes
            .iter()
            .filter(|(_, ranks)| *ranks > 1)
            .map(|(axis, ranks)| format!("{axis} {ranks}"))
            .collect();
        match self.grid {
            [1, 1] => {}
            [rows, 1] => axes.push(format!("spatial {rows}")),
            [rows, columns] => axes.push(format!("spatial {rows} x {columns}")),
        }
        f.write_str(&if axes.is_empty() { "one rank".to_owned() } else { axes.join(" x ") })?;
        if self.sequence {
            f.write_str(", sequence")?;
        }
        write!(f, ", micro-batch {}", self.micro_batch)?;
        if self.pipeline > 1 {
            write!(f, ", {}", self.schedule)?;
        }
        if let Some(chunks) = self.chunks {
            write!(f, " ({chunks} chunks)")?;
        }
        match self.recompute {
            RecomputeMode::None => {}
            RecomputeMode::Blocks(1) => f.write_str(", recompute 1 block")?,
            RecomputeMode::Blocks(number) => write!(f, ", recompute {number} blocks")?,
            other => write!(f, ", recompute {other}")?,
        }
        if self.zero > 0 {
            write!(f, ", ZeRO-{}", self.zero)?;
        }
        if self.compressed_weights {
            f.write_str(", compressed weights")?;
        }
        Ok(())
    }
}

/// As `espalier train --json` writes a layout, with what a plan decides beside it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayoutRecord {
    /// Replicas.
    pub data: usize,
    /// Stages.
    pub pipeline: usize,
    /// Ranks of a tensor-parallel group.
    pub tensor: usize,
    /// Ranks with tiles of the same images: one number, or rows and columns.
    pub spatial: SpatialGrid,
    /// Whether activations are cut along the sequence.
    pub sequence: bool,
    /// What replicas shard.
    pub zero: u8,
    /// The order of the pipeline, where there is one.
    pub schedule: Option<&'static str>,
    /// Virtual stages on a rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunks: Option<usize>,
    /// Micro-batches of a step, of each replica.
    pub micro_batches: usize,
    /// Samples of each.
    pub micro_batch: usize,
    /// What is computed twice.
    pub recompute: RecomputeMode,
    /// The form of gradients and optimizer state.
    pub state: &'static str,
    /// The form in which pruned weights rest.
    pub weights: &'static str,
}

impl LayoutRecord {
    /// Of a candidate, for steps of so many samples.
    pub fn new(candidate: &Candidate, batch: usize) -> LayoutRecord {
        LayoutRecord {
            data: candidate.data,
            pipeline: candidate.pipeline,
            tensor: candidate.tensor,
            spatial: SpatialGrid(candidate.grid),
            sequence: candidate.sequence,
            zero: candidate.zero,
            schedule: (candidate.pipeline > 1).then(|| candidate.schedule.as_str()),
            chunks: candidate.chunks,
            micro_batches: candidate.micro_batches(batch).unwrap_or(0),
            micro_batch: candidate.micro_batch,
            recompute: candidate.recompute,
            state: candidate.state(),
            weights: candidate.weights(),
        }
    }
}
