//! What a rank knows of the others, and what it does with them. One rank alone knows of none and pays nothing.
//!
//! | axis | file |
//! |---|---|
//! | data: each rank has the whole model and a part of every batch | `data` |
//! | data, with the optimizer's state shared out | `zero` |
//! | data, with ranks that go apart and are averaged | `local` |
//!
//! Ranks start from the same bits and take the same steps, so that weights need not be sent; only those that share
//! out their state, or go apart, do. That they do is checked where it
//! could go wrong ([`Ranks::agree`]), and an error names who differs.

pub mod data;
pub mod local;
mod threads;
mod together;
pub mod zero;

use std::ops::Range;

use espalier_comm::traffic::share;
use espalier_comm::{Communicator, Reduce, Sent};
use espalier_plan::Cut;
use espalier_plan::mesh::{Axis, Mesh};

pub use threads::on_threads;
pub use together::together;

use crate::{Error, Result};

/// A rank's place among the others.
#[derive(Debug, Clone)]
pub struct Ranks {
    world: Communicator,
    data: Communicator,
}

impl Ranks {
    /// Takes its place in a mesh; all ranks of the world must.
    pub fn join(world: Communicator, mesh: &Mesh) -> Result<Ranks> {
        let slice = mesh.slice(world.rank(), &[Axis::Data]);
        let data = world.split(Some(slice.number), slice.place)?.expect("a colour was given");
        Ok(Ranks { world, data })
    }

    /// Its number in the world.
    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    /// How many there are in the world.
    pub fn size(&self) -> usize {
        self.world.size()
    }

    /// Whether it is the one that writes files and talks.
    pub fn leads(&self) -> bool {
        self.rank() == 0
    }

    /// Those that hold the same weights and other samples.
    pub fn data(&self) -> &Communicator {
        &self.data
    }

    /// Its place among those that could share state with it.
    pub fn cut(&self) -> Cut {
        Cut { ranks: self.data.size(), rank: self.data.rank() }
    }

    /// Bytes that it has sent so far.
    pub fn sent(&self) -> Sent {
        self.world.sent()
    }

    /// Which of so many samples fall to it.
    pub fn part(&self, samples: usize) -> Range<usize> {
        share(samples, self.data.size(), self.data.rank())
    }

    /// Sums over all that have a part of the samples.
    pub fn sum(&self, numbers: Vec<f64>) -> Result<Vec<f64>> {
        Ok(self.data.all_reduce(numbers, Reduce::Sum)?)
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
        let all = self.data.all_gather(own.clone(), vec![0; own.len() * self.data.size()])?;
        let (first, members) = (&all[..own.len()], self.data.members());
        let others = members.iter().zip(all.chunks(own.len())).filter(|(_, theirs)| *theirs != first);
        let others: Vec<usize> = others.map(|(rank, _)| *rank).collect();
        if others.is_empty() {
            return Ok(());
        }
        Err(Error::Disagree { what, first: members[0], others })
    }
}
