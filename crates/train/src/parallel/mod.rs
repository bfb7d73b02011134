//! What a rank knows of the others, and what it does with them. One rank alone knows of none and pays nothing.
//!
//! | axis | file |
//! |---|---|
//! | data: each rank has the full model, or stage, and a slice of every batch | `data`: replicated, ZeRO, local |
//! | pipeline: each rank has a stage; `crate::step` runs them | `groups`: who shares what |
//! | tensor: each rank has a shard of every large layer; collectives are layers of its model | `model`; `espalier_nn::layers`, `exchange` |
//! | spatial: each rank has a tile of every image; halos are layers too | `model`; `espalier_nn::layers::spatial` |
//! | any: batches of batch norms that several ranks measure | `statistics` |
//!
//! Where ranks come from: `threads` of this process, or processes that a launcher has started (`launched`).
//!
//! Ranks start from the same bits and take the same steps, so that weights need not be sent; only those that share
//! out their state, or go apart, do. That they are the same is checked where it could go wrong ([`Ranks::agree`]), and an error names who differs.

pub mod data;
pub mod groups;
pub mod launched;
pub mod model;
pub mod statistics;
pub(crate) mod tags;
mod threads;
mod together;

use std::ops::Range;

use espalier_comm::{Communicator, Reduce, Sent};
use espalier_nn::AxisGroups;
use espalier_plan::mesh::{Axis, Mesh, PerAxis};
use espalier_plan::{Plan, split};
use tracing::span::EnteredSpan;

pub use threads::{GiveUp, on_threads, on_threads_within};
pub use together::together;
pub(crate) use together::{exchange, of_first};

use crate::{Error, Result};

/// A rank's place among the others.
#[derive(Debug, Clone)]
pub struct Ranks {
    world: Communicator,
    axes: AxisGroups,
    peers: Communicator,
    replica: Communicator,
    place: PerAxis,
    /// How many ranks compute in the same memory.
    sharing: usize,
}

impl Ranks {
    /// Takes its place in a mesh; all ranks of the world must.
    pub fn join(world: Communicator, mesh: &Mesh) -> Result<Ranks> {
        let along = |axes: &[Axis]| AxisGroups::slice(&world, mesh, axes);
        let axes = AxisGroups::form(&world, mesh)?;
        let peers = along(&[Axis::Spatial, Axis::Tensor])?;
        let replica = along(&[Axis::Pipeline, Axis::Spatial, Axis::Tensor])?;
        tracing::info!("connected to the others: rank {} of {}", world.rank(), world.size());
        let place = mesh.coordinates(world.rank());
        let sharing = world.size();
        Ok(Ranks { world, axes, peers, replica, place, sharing })
    }

    /// Names a rank of several in all that it logs, for as long as the value lives, on this thread.
    pub(crate) fn name(world: &Communicator) -> EnteredSpan {
        // Of the highest level: whatever is logged has its rank.
        tracing::error_span!("rank", number = world.rank()).entered()
    }

    /// The only rank of its world.
    pub fn alone() -> Ranks {
        let world = Communicator::alone();
        Ranks {
            axes: AxisGroups::alone(),
            peers: world.clone(),
            replica: world.clone(),
            place: PerAxis::ZEROS,
            sharing: 1,
            world,
        }
    }

    /// Whether there are no others.
    pub fn is_alone(&self) -> bool {
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

    /// Whether it is the one that talks.
    pub fn leads(&self) -> bool {
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

    /// The groups that layers exchange with.
    pub fn axes(&self) -> &AxisGroups {
        &self.axes
    }

    /// Those that have parts of the same layers: of their tensors, or of the images that they see.
    pub fn peers(&self) -> &Communicator {
        &self.peers
    }

    /// All that hold something of the same replica of the model.
    pub fn replica(&self) -> &Communicator {
        &self.replica
    }

    /// Connects this rank with those that its layers will send to: neighbours of its tile, and those that it deals out columns
    /// or samples to. A transport that has to connect ranks does so now, and not while the first step computes.
    pub fn connect(&self, plan: &Plan) -> Result<()> {
        let tiles = self.along(Axis::Spatial);
        let [_, columns] = plan.layout.grid();
        let own = tiles.rank();
        let near = |a: usize, b: usize| a.abs_diff(b) <= 1;
        let is_neighbour =
            |tile: &usize| near(tile / columns, own / columns) && near(tile % columns, own % columns);
        tiles.connect(&(0..tiles.size()).filter(is_neighbour).collect::<Vec<_>>())?;
        if plan.layout.mixture().is_some() {
            let tensor = self.along(Axis::Tensor);
            tensor.connect(&(0..tensor.size()).collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// The same where so many ranks compute in the memory of one device, and not all of the world.
    pub fn sharing(self, ranks: usize) -> Ranks {
        Ranks { sharing: ranks, ..self }
    }

    /// How many ranks share the memory of its device.
    pub fn ranks_of_device(&self) -> usize {
        self.sharing
    }

    /// Its place on the mesh.
    pub fn place(&self) -> PerAxis {
        self.place
    }

    /// Whether it counts what all ranks with parts of the same layers see alike: losses, and samples.
    pub fn counts(&self) -> bool {
        self.peers.rank() == 0
    }

    /// Bytes that it has sent so far.
    pub fn sent(&self) -> Sent {
        self.world.sent()
    }

    /// Which of so many samples fall to it.
    pub fn part(&self, samples: usize) -> Range<usize> {
        split(samples, self.data().size(), self.data().rank())
    }

    /// Sums over all ranks.
    pub fn sum(&self, numbers: Vec<f64>) -> Result<Vec<f64>> {
        Ok(self.world.all_reduce(numbers, Reduce::Sum)?)
    }

    /// Sums over the ranks of a replica.
    pub fn sum_over_replica(&self, numbers: Vec<u64>) -> Result<Vec<u64>> {
        Ok(self.replica.all_reduce(numbers, Reduce::Sum)?)
    }

    /// What the ranks of a replica hold together, where each has zeros for what it does not hold.
    pub fn of_replica(&self, own: Vec<[u8; 32]>) -> Result<Vec<[u8; 32]>> {
        let words = own.as_flattened().as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
        // Two that hold the same thing say the same.
        let all = self.replica.all_reduce::<Vec<u64>>(words, Reduce::Max)?;
        let bytes: Vec<u8> = all.into_iter().flat_map(u64::to_le_bytes).collect();
        Ok(bytes.as_chunks::<32>().0.to_vec())
    }

    /// The largest over all ranks.
    pub fn largest(&self, numbers: Vec<u64>) -> Result<Vec<u64>> {
        Ok(self.world.all_reduce(numbers, Reduce::Max)?)
    }

    /// Whether any rank says so.
    pub fn any(&self, flag: bool) -> Result<bool> {
        Ok(self.largest(vec![u64::from(flag)])?[0] > 0)
    }

    /// An error on every rank unless all with the same weights hold the same of what was hashed.
    pub fn agree(&self, what: &'static str, hash: &str) -> Result<()> {
        let digest = blake3::hash(hash.as_bytes());
        let own: Vec<u64> =
            digest.as_bytes().as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
        let all = self.data().all_gather(own.clone(), vec![0; own.len() * self.data().size()])?;
        let (first, members) = (&all[..own.len()], self.data().members());
        let others = members.iter().zip(all.chunks(own.len())).filter(|(_, theirs)| *theirs != first);
        let others: Vec<usize> = others.map(|(rank, _)| *rank).collect();
        if others.is_empty() {
            return Ok(());
        }
        Err(Error::Disagree { what, first: members[0], others })
    }
}
