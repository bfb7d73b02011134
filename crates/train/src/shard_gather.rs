//! Vectors of which each rank of a group has a shard, and the messages that gather them.
//!
//! Messages are packed by rank: `[ranks, shard of a | shard of b | ..]`, shards padded with zeros to one length.
//! Large vectors travel alone, small ones together ([`packets`]).

use espalier_comm::{Communicator, Request};
use espalier_nn::Result;
use espalier_nn::weights::ParameterId;
use espalier_plan::packets::packets;
use espalier_plan::{GroupRank, split};
use espalier_tensor::ops::flat;
use espalier_tensor::{Category, DType, Tensor};

/// Vectors that travel in one message, with their lengths, in their order in it.
pub(crate) struct PackedMessage {
    pub member: GroupRank,
    pub lengths: Vec<(ParameterId, usize)>,
}

impl PackedMessage {
    /// Elements of one rank's shard of the message.
    pub fn shard_len(&self) -> usize {
        self.lengths.iter().map(|(_, length)| self.member.largest(*length)).sum()
    }

    /// Each vector with its length and its offset within a rank's shard.
    pub fn offsets(&self) -> impl Iterator<Item = (ParameterId, usize, usize)> {
        self.lengths.iter().scan(0, |next, &(id, length)| {
            let offset = *next;
            *next += self.member.largest(length);
            Some((id, length, offset))
        })
    }
}

/// This rank's shard of a vector.
pub(crate) struct VectorShard<'a> {
    pub id: ParameterId,
    /// Elements of the vector.
    pub length: usize,
    pub local: &'a Tensor,
}

/// An all-gather that is on its way.
pub(crate) struct PendingAllGather {
    packet: PackedMessage,
    request: Request<Tensor>,
}

impl std::fmt::Debug for PendingAllGather {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PendingAllGather").field("vectors", &self.packet.lengths).finish_non_exhaustive()
    }
}

impl PendingAllGather {
    /// Which of some vectors travel in one message.
    pub fn packets(shards: &[VectorShard<'_>]) -> Vec<Vec<usize>> {
        let bytes = |shard: &VectorShard<'_>| (shard.length * shard.local.dtype().bytes()) as u64;
        packets(&shards.iter().map(bytes).collect::<Vec<_>>())
    }

    /// Hands this rank's shards of some vectors to all, in one message.
    pub fn start(shards: &[&VectorShard<'_>], group: &Communicator) -> Result<PendingAllGather> {
        let member = member_of(group);
        let lengths = shards.iter().map(|shard| (shard.id, shard.length)).collect();
        let packet = PackedMessage { member, lengths };
        let (device, dtype) = (shards[0].local.device(), shards[0].local.dtype());
        let mut local = Tensor::zeros(&device, &[packet.shard_len()], dtype, Category::Communication)?;
        for (shard, (_, _, offset)) in shards.iter().zip(packet.offsets()) {
            flat::put(&mut local, offset, shard.local, 0..shard.local.len())?;
        }
        let all =
            Tensor::empty(&device, &[packet.shard_len() * member.ranks], dtype, Category::Communication)?;
        Ok(PendingAllGather { packet, request: group.start_all_gather(local, all)? })
    }

    pub fn wait(self) -> Result<GatheredShards> {
        Ok(GatheredShards { all: self.request.wait()?, packet: self.packet })
    }
}

/// A message with the shards of all ranks.
pub(crate) struct GatheredShards {
    packet: PackedMessage,
    all: Tensor,
}

impl GatheredShards {
    /// The vectors that are in it, with their lengths.
    pub fn lengths(&self) -> &[(ParameterId, usize)] {
        &self.packet.lengths
    }

    /// Joins the shards of a vector, in a tensor of its length.
    pub fn join(&self, id: ParameterId, into: &mut Tensor) -> Result<()> {
        let (member, shard_len) = (self.packet.member, self.packet.shard_len());
        let (_, length, offset) =
            self.packet.offsets().find(|(of, ..)| *of == id).expect("a vector of this message");
        for rank in 0..member.ranks {
            let (of, start) = (split(length, member.ranks, rank), rank * shard_len + offset);
            flat::put(into, of.start, &self.all, start..start + of.len())?;
        }
        Ok(())
    }

    /// All its vectors, joined; a single one that was not padded is the message itself.
    pub fn into_vectors(mut self) -> Result<Vec<(ParameterId, Tensor)>> {
        if let [(id, length)] = *self.lengths()
            && length == self.all.len()
        {
            self.all.tag_memory(Category::Workspace);
            return Ok(vec![(id, self.all)]);
        }
        let (device, dtype) = (self.all.device(), self.all.dtype());
        let vector = |&(id, length): &(ParameterId, usize)| {
            let mut full = Tensor::empty(&device, &[length], dtype, Category::Workspace)?;
            self.join(id, &mut full)?;
            Ok((id, full))
        };
        self.lengths().iter().map(vector).collect()
    }
}

/// A vector of which each rank holds a shard, gathered on all of them.
pub(crate) fn join(shard: &Tensor, length: usize, group: &Communicator) -> Result<Tensor> {
    // Low bits are no numbers that a message knows; here they only move.
    let wire = if shard.dtype() == DType::U16 { DType::Bf16 } else { shard.dtype() };
    let local = shard.clone().reinterpret(wire);
    let only = VectorShard { id: ParameterId(0), length, local: &local };
    let mut vectors = PendingAllGather::start(&[&only], group)?.wait()?.into_vectors()?;
    let (_, full) = vectors.pop().expect("one vector");
    Ok(full.reinterpret(shard.dtype()))
}

pub(crate) fn member_of(group: &Communicator) -> GroupRank {
    GroupRank { ranks: group.size(), rank: group.rank() }
}
