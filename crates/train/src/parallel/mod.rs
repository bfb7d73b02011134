//! What a rank knows of the others, and what it does with them. A single rank knows of none and pays nothing.
//!
//! | axis | file |
//! |---|---|
//! | data: each rank has the full model, or stage, and a slice of every batch | `data`: replicated, ZeRO, local |
//! | pipeline: each rank has a stage; `crate::step` runs them | `reduce_groups`: who shares what |
//! | tensor: each rank has a shard of every large layer; collectives are layers of its model | `model`; `espalier_nn::layers::collective` |
//! | spatial: each rank has a tile of every image; halos are layers too | `model`; `espalier_nn::layers::spatial` |
//! | any: batches of batch norms that several ranks measure | `statistics` |
//!
//! Where ranks come from: `threads` of this process, or processes that a launcher has started (`launched`).
//!
//! Ranks start from the same bits and take the same steps, so that weights need not be sent; only those that
//! shard their state, or go apart, do. That they are the same is checked where it could go wrong
//! ([`Ranks::check_replicas_agree`]), and an error names who differs.

pub mod data;
mod gather;
pub mod launched;
pub mod model;
pub mod reduce_groups;
pub mod statistics;
mod threads;

use std::ops::Range;

use espalier_comm::{Communicator, Reduce, SentBytes};
use espalier_nn::AxisGroups;
use espalier_plan::mesh::{Axis, Mesh, PerAxis};
use espalier_plan::{Plan, split};
use tracing::span::EnteredSpan;

pub use gather::all_gather_results;
pub(crate) use gather::{all_gather_bytes, from_rank0};
pub use threads::{AbortFn, on_threads, on_threads_with_timeout};

use crate::{Error, Result};

/// A rank among the others: its coordinates and its groups.
#[derive(Debug, Clone)]
pub struct Ranks {
    world: Communicator,
    axes: AxisGroups,
    model_parallel: Communicator,
    replica: Communicator,
    coords: PerAxis,
    /// How many ranks compute in the same memory.
    ranks_per_device: usize,
}

impl Ranks {
    /// Takes its place in a mesh; all ranks of the world must.
    pub fn join(world: Communicator, mesh: &Mesh) -> Result<Ranks> {
        let along = |axes: &[Axis]| AxisGroups::slice(&world, mesh, axes);
        let axes = AxisGroups::form(&world, mesh)?;
        let model_parallel = along(&[Axis::Spatial, Axis::Tensor])?;
        let replica = along(&[Axis::Pipeline, Axis::Spatial, Axis::Tensor])?;
        tracing::info!("connected to the others: rank {} of {}", world.rank(), world.size());
        let coords = mesh.coordinates(world.rank());
        let ranks_per_device = world.size();
        Ok(Ranks { world, axes, model_parallel, replica, coords, ranks_per_device })
    }

    /// Names a rank of several in all that it logs, for as long as the value lives, on this thread.
    pub(crate) fn name(world: &Communicator) -> EnteredSpan {
        // Of the highest level: whatever is logged has its rank.
        tracing::error_span!("rank", number = world.rank()).entered()
    }

    /// The only rank of its world.
    pub fn single() -> Ranks {
        let world = Communicator::single_rank();
        Ranks {
            axes: AxisGroups::single_rank(),
            model_parallel: world.clone(),
            replica: world.clone(),
            coords: PerAxis::ZEROS,
            ranks_per_device: 1,
            world,
        }
    }

    /// Whether there are no others.
    pub fn is_single(&self) -> bool {
        self.size() == 1
    }

    /// Its number in the world.
    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    /// How many there are in the world.
    pub fn size(&self) -> usize {
        self.world.size()
    }

    /// Whether it is the one that prints and writes what is written once.
    pub fn is_rank0(&self) -> bool {
        self.rank() == 0
    }

    /// Those that hold the same weights and other samples.
    pub fn data(&self) -> &Communicator {
        self.along(Axis::Data)
    }

    /// All ranks of the run.
    pub fn world(&self) -> &Communicator {
        &self.world
    }

    /// Those that hold the other stages of the same replica, in the order of the stages.
    pub fn stages(&self) -> &Communicator {
        self.along(Axis::Pipeline)
    }

    /// Those along an axis, in their order on it.
    pub fn along(&self, axis: Axis) -> &Communicator {
        self.axes.along(axis)
    }

    /// The groups that the collectives of layers run over.
    pub fn axes(&self) -> &AxisGroups {
        &self.axes
    }

    /// Those that have shards of the same layers: of their tensors, or of the images that they see.
    pub fn model_parallel(&self) -> &Communicator {
        &self.model_parallel
    }

    /// All that hold something of the same replica of the model.
    pub fn replica(&self) -> &Communicator {
        &self.replica
    }

    /// Connects this rank with those that its layers will send to: neighbours of its tile, and those that
    /// all-to-alls of features or samples reach. A transport that has to connect ranks does so now, and not
    /// while the first step computes.
    pub fn connect(&self, plan: &Plan) -> Result<()> {
        let tiles = self.along(Axis::Spatial);
        let [_, columns] = plan.layout.grid();
        let local = tiles.rank();
        let near = |a: usize, b: usize| a.abs_diff(b) <= 1;
        let is_neighbour =
            |tile: &usize| near(tile / columns, local / columns) && near(tile % columns, local % columns);
        tiles.connect(&(0..tiles.size()).filter(is_neighbour).collect::<Vec<_>>())?;
        if plan.layout.mixture().is_some() {
            let tensor = self.along(Axis::Tensor);
            tensor.connect(&(0..tensor.size()).collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// The same where so many ranks compute in the memory of one device, and not all of the world.
    pub(crate) fn with_ranks_per_device(self, ranks: usize) -> Ranks {
        Ranks { ranks_per_device: ranks, ..self }
    }

    /// How many ranks share the memory of its device.
    pub fn ranks_per_device(&self) -> usize {
        self.ranks_per_device
    }

    /// Its coordinates on the mesh.
    pub fn coords(&self) -> PerAxis {
        self.coords
    }

    /// Whether it counts what all ranks with shards of the same layers see alike: losses, and samples.
    pub(crate) fn counts_losses(&self) -> bool {
        self.model_parallel.rank() == 0
    }

    /// Bytes that it has sent so far.
    pub fn sent(&self) -> SentBytes {
        self.world.sent()
    }

    /// Which of so many samples fall to it.
    pub(crate) fn batch_range(&self, samples: usize) -> Range<usize> {
        split(samples, self.data().size(), self.data().rank())
    }

    /// The most that any replica has of so many samples.
    pub(crate) fn largest_range(&self, samples: usize) -> usize {
        samples.div_ceil(self.data().size())
    }

    /// All-reduce (sum) over all ranks.
    pub(crate) fn all_reduce_sum(&self, numbers: Vec<f64>) -> Result<Vec<f64>> {
        Ok(self.world.all_reduce(numbers, Reduce::Sum)?)
    }

    /// All-reduce (sum) over the ranks of a replica.
    pub(crate) fn all_reduce_over_replica(&self, numbers: Vec<u64>) -> Result<Vec<u64>> {
        Ok(self.replica.all_reduce(numbers, Reduce::Sum)?)
    }

    /// What the ranks of a replica hold together, where each has zeros for what it does not hold.
    pub(crate) fn gather_over_replica(&self, local: Vec<[u8; 32]>) -> Result<Vec<[u8; 32]>> {
        let words = local.as_flattened().as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
        // Two that hold the same thing say the same.
        let all = self.replica.all_reduce::<Vec<u64>>(words, Reduce::Max)?;
        let bytes: Vec<u8> = all.into_iter().flat_map(u64::to_le_bytes).collect();
        Ok(bytes.as_chunks::<32>().0.to_vec())
    }

    /// The largest over all ranks.
    pub(crate) fn all_reduce_max(&self, numbers: Vec<u64>) -> Result<Vec<u64>> {
        Ok(self.world.all_reduce(numbers, Reduce::Max)?)
    }

    /// Whether any rank says so.
    pub fn any_rank(&self, flag: bool) -> Result<bool> {
        Ok(self.all_reduce_max(vec![u64::from(flag)])?[0] > 0)
    }

    /// An error on every rank unless all with the same weights hold the same of what was hashed.
    pub fn check_replicas_agree(&self, what: &'static str, hash: &str) -> Result<()> {
        let digest = blake3::hash(hash.as_bytes());
        let local: Vec<u64> =
            digest.as_bytes().as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
        let all = self.data().all_gather(local.clone(), vec![0; local.len() * self.data().size()])?;
        let (first, members) = (&all[..local.len()], self.data().members());
        let others = members.iter().zip(all.chunks(local.len())).filter(|(_, theirs)| *theirs != first);
        let others: Vec<usize> = others.map(|(rank, _)| *rank).collect();
        if others.is_empty() {
            return Ok(());
        }
        Err(Error::Disagree { what, first: members[0], others })
    }
}
