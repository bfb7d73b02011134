//! ZeRO, stages 1 and 2 (Rajbhandari et al. 2020): the ranks that share a parameter share out its master weights and moments, and
//! perhaps the sum of its gradients (`data` says when each is scattered).
//!
//! Each rank has its [`GroupRank`] of every parameter's kept weights. A gradient's sum goes in parts, each to the rank that steps
//! it; the new weights, kept values in the weights' own type, come back from all. A reduce-scatter and an all-gather move
//! what one all-reduce moves, so nothing more is sent than without.
//!
//! Messages are packed by rank: `[ranks, part of a | part of b | ..]`, parts padded with zeros to one length. Steps are
//! taken element by element, so the bits are those of ranks that hold everything; norms are sums of parts in f64, which
//! are rounded away in the step's own f32.

use espalier_comm::{Communicator, Reduce, Request};
use espalier_nn::weights::{ParameterId, Weights};
use espalier_plan::packets::packets;
use espalier_plan::{GroupRank, split};
use espalier_tensor::ops::compress::{compress, expand_into};
use espalier_tensor::ops::flat;
use espalier_tensor::ops::update::{Norms, SquaredNorms, Step, Target, squared_norms, step};
use espalier_tensor::{Category, DType, Mask, Tensor};

use super::groups::Groups;
use super::pieces::Pieces;
use crate::Result;
use crate::state::{Gradients, Masks, Optimizer};

/// Vectors that travel in one message, with their lengths, in the order of their places in it.
struct Packet {
    member: GroupRank,
    lengths: Vec<(ParameterId, usize)>,
}

impl Packet {
    /// Elements of one rank's part of the message.
    fn part(&self) -> usize {
        self.lengths.iter().map(|(_, length)| self.member.largest(*length)).sum()
    }

    /// Each vector with its length and its first element's place within a rank's part.
    fn places(&self) -> impl Iterator<Item = (ParameterId, usize, usize)> {
        self.lengths.iter().scan(0, |next, &(id, length)| {
            let place = *next;
            *next += self.member.largest(length);
            Some((id, length, place))
        })
    }
}

/// Sums of gradients that are on their way, each rank's parts to it.
pub(super) struct Scattering {
    packet: Packet,
    request: Request<Tensor>,
}

impl Scattering {
    /// Starts the sum of some gradients.
    pub(super) fn start(gradients: Vec<(ParameterId, Tensor)>, group: &Communicator) -> Result<Scattering> {
        let member = member_of(group);
        let lengths = gradients.iter().map(|(id, gradient)| (*id, gradient.len())).collect();
        let (packet, first) = (Packet { member, lengths }, &gradients[0].1);
        let (device, dtype, part) = (first.device(), first.dtype(), packet.part());
        let whole = match &*gradients {
            // Nothing is to be padded and nothing packed.
            [(_, one)] if one.len() == part * member.ranks => gradients.into_iter().next().expect("one").1,
            _ => {
                let all = [part * member.ranks];
                let mut whole = Tensor::zeros(&device, &all, dtype, Category::Communication)?;
                for ((_, gradient), (_, length, place)) in gradients.iter().zip(packet.places()) {
                    for rank in 0..member.ranks {
                        flat::put(
                            &mut whole,
                            rank * part + place,
                            gradient,
                            split(length, member.ranks, rank),
                        )?;
                    }
                }
                whole
            }
        };
        let own = Tensor::empty(&device, &[part], dtype, Category::Communication)?;
        Ok(Scattering { packet, request: group.start_reduce_scatter(whole, own, Reduce::Sum)? })
    }

    /// Waits for this rank's parts, which the caller books as what they are to be.
    pub(super) fn wait(self) -> Result<Vec<(ParameterId, Tensor)>> {
        let part = self.request.wait()?;
        if let [(id, length)] = *self.packet.lengths
            && self.packet.member.split(length).len() == part.len()
        {
            return Ok(vec![(id, part)]);
        }
        let own = |(id, length, place): (ParameterId, usize, usize)| {
            let at = place..place + self.packet.member.split(length).len();
            Ok((id, flat::take(&part, at, Category::Workspace)?))
        };
        self.packet.places().map(own).collect()
    }
}

/// Parts that are on their way to all ranks.
struct Gathering {
    packet: Packet,
    request: Request<Tensor>,
}

impl Gathering {
    /// Hands this rank's parts of some vectors, of such lengths, to all.
    fn start(parts: &[(ParameterId, usize, &Tensor)], group: &Communicator) -> Result<Gathering> {
        let member = member_of(group);
        let packet = Packet { member, lengths: parts.iter().map(|(id, length, _)| (*id, *length)).collect() };
        let (device, dtype) = (parts[0].2.device(), parts[0].2.dtype());
        let mut own = Tensor::zeros(&device, &[packet.part()], dtype, Category::Communication)?;
        for ((_, _, part), (_, _, place)) in parts.iter().zip(packet.places()) {
            flat::put(&mut own, place, part, 0..part.len())?;
        }
        let all = Tensor::empty(&device, &[packet.part() * member.ranks], dtype, Category::Communication)?;
        Ok(Gathering { packet, request: group.start_all_gather(own, all)? })
    }

    fn wait(self) -> Result<Gathered> {
        Ok(Gathered { all: self.request.wait()?, packet: self.packet })
    }
}

/// A message with the parts of all ranks.
struct Gathered {
    packet: Packet,
    all: Tensor,
}

impl Gathered {
    /// Puts the parts of a vector together, in a tensor of its length.
    fn join(&self, id: ParameterId, into: &mut Tensor) -> Result<()> {
        let (member, part) = (self.packet.member, self.packet.part());
        let (_, length, place) =
            self.packet.places().find(|(of, ..)| *of == id).expect("a vector of this message");
        for rank in 0..member.ranks {
            let (of, start) = (split(length, member.ranks, rank), rank * part + place);
            flat::put(into, of.start, &self.all, start..start + of.len())?;
        }
        Ok(())
    }
}

/// A vector of which each rank holds its part, whole on all of them.
pub(crate) fn join(part: &Tensor, length: usize, group: &Communicator) -> Result<Tensor> {
    // Low bits are no numbers that a message knows; here they only move.
    let wire = if part.dtype() == DType::U16 { DType::Bf16 } else { part.dtype() };
    let (only, own) = (ParameterId(0), part.clone().reinterpret(wire));
    let mut whole = Tensor::empty(&part.device(), &[length], wire, Category::Workspace)?;
    Gathering::start(&[(only, length, &own)], group)?.wait()?.join(only, &mut whole)?;
    Ok(whole.reinterpret(part.dtype()))
}

fn member_of(group: &Communicator) -> GroupRank {
    GroupRank { ranks: group.size(), rank: group.rank() }
}

/// A parameter whose parts the ranks have stepped, each its own.
pub(crate) struct Shared {
    id: ParameterId,
    /// The number of the group that shares it.
    group: usize,
    /// Kept weights of all ranks.
    length: usize,
    /// This rank's part of them.
    own: Tensor,
}

/// Steps this rank's part of every parameter. The weights are those of before until [`gather_weights`].
pub(crate) fn step_shared(
    optimizer: &mut Optimizer,
    weights: &Weights,
    masks: &Masks,
    gradients: &Gradients<'_>,
    number: Step,
    groups: &Groups,
    pieces: &Pieces,
) -> Result<Vec<Shared>> {
    let rule = optimizer.rule();
    let ids = weights.ids().filter(|id| gradients.get(*id).is_some());
    let shared = ids.map(|id| {
        let (weight, mask) = (weights.get(id), masks.get(id));
        let group = groups.number(id).expect("with several replicas every parameter is shared");
        let length = mask.map_or(weight.len(), Mask::kept);
        Ok(Shared { id, group, length, own: own_weights(weight, mask, groups.member(id))? })
    });
    let mut shared: Vec<Shared> = shared.collect::<Result<_>>()?;
    let (ids, group_of): (Vec<ParameterId>, Vec<usize>) =
        shared.iter().map(|one| (one.id, one.group)).unzip();
    {
        let mut own = shared.iter_mut();
        let targets = optimizer.slots_mut().filter_map(|(id, slot)| {
            let gradient = gradients.get(id)?;
            Some(slot.target(&mut own.next().expect("one for each gradient").own, gradient, None))
        });
        // One that has nothing of a parameter steps nothing; its place among the norms stays.
        let (places, targets): (Vec<usize>, Vec<Target<'_>>) =
            targets.enumerate().filter(|(_, target)| !target.weight.is_empty()).unzip();
        let given = match rule.adapts() {
            true => {
                let own = squared_norms(rule, number, &targets)?;
                let mut all = joined_norms(&group_of, &places, &own, groups)?;
                pieces.whole_norms(&ids, &mut all)?;
                places.iter().map(|place| all[*place]).collect()
            }
            false => vec![SquaredNorms::default(); targets.len()],
        };
        step(rule, number, targets, Norms::Given(&given))?;
    }
    Ok(shared)
}

/// A rank's part of a parameter's kept weights.
pub(crate) fn own_weights(weight: &Tensor, mask: Option<&Mask>, member: GroupRank) -> Result<Tensor> {
    let take = |kept: &Tensor| flat::take(kept, member.split(kept.len()), Category::Workspace);
    Ok(match mask {
        Some(mask) => take(&compress(weight, mask, Category::Workspace)?)?,
        None => take(weight)?,
    })
}

/// The norms of all that a rank holds of parameters, from those of every rank's parts: each parameter has a group, and this
/// rank steps those at `places`.
fn joined_norms(
    group_of: &[usize],
    places: &[usize],
    own: &[SquaredNorms],
    groups: &Groups,
) -> Result<Vec<SquaredNorms>> {
    let mut all = vec![[0.0; 2]; group_of.len()];
    for (place, norms) in places.iter().zip(own) {
        all[*place] = [norms.weight, norms.direction];
    }
    for number in 0..groups.len() {
        let members: Vec<usize> = (0..all.len()).filter(|i| group_of[*i] == number).collect();
        let numbers: Vec<f64> = members.iter().flat_map(|i| all[*i]).collect();
        let sums: Vec<f64> = groups.group(number).all_reduce(numbers, Reduce::Sum)?;
        for (i, sums) in members.iter().zip(sums.as_chunks::<2>().0) {
            all[*i] = *sums;
        }
    }
    Ok(all.into_iter().map(|[weight, direction]| SquaredNorms { weight, direction }).collect())
}

/// Gives every weight the values that ranks have stepped: while one message is on its way, the one before is put in place.
pub(crate) fn gather_weights(
    weights: &mut Weights,
    masks: &Masks,
    shared: &[Shared],
    groups: &Groups,
) -> Result<()> {
    let mut before: Option<Gathering> = None;
    for number in 0..groups.len() {
        let shared: Vec<&Shared> = shared.iter().filter(|one| one.group == number).collect();
        let bytes: Vec<u64> =
            shared.iter().map(|one| (one.length * one.own.dtype().bytes()) as u64).collect();
        for packet in packets(&bytes) {
            let part = |i: &usize| (shared[*i].id, shared[*i].length, &shared[*i].own);
            let now = Gathering::start(&packet.iter().map(part).collect::<Vec<_>>(), groups.group(number))?;
            if let Some(arrived) = before.replace(now) {
                put_in_place(arrived, weights, masks)?;
            }
        }
    }
    before.map_or(Ok(()), |arrived| put_in_place(arrived, weights, masks))
}

fn put_in_place(arrived: Gathering, weights: &mut Weights, masks: &Masks) -> Result<()> {
    let arrived = arrived.wait()?;
    for &(id, length) in &arrived.packet.lengths {
        let weight = weights.get_mut(id);
        match masks.get(id) {
            None => arrived.join(id, weight)?,
            Some(mask) => {
                let mut kept =
                    Tensor::empty(&weight.device(), &[length], weight.dtype(), Category::Workspace)?;
                arrived.join(id, &mut kept)?;
                expand_into(&kept, mask, weight)?;
            }
        }
    }
    Ok(())
}
