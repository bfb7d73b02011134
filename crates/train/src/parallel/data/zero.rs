//! ZeRO, stages 1 and 2 (Rajbhandari et al. 2020): the ranks that share a parameter split its master weights and moments, and
//! perhaps the sum of its gradients.
//!
//! Each rank has its [split] of every parameter's kept weights. A gradient's sum goes in parts, each to the rank that steps
//! it; the new weights, kept values in the weights' own type, come back from all. A reduce-scatter and an all-gather move
//! what one all-reduce moves, so nothing more is sent than without.
//!
//! In stage 1 gradients are summed over micro-batches and then over ranks. In stage 2 a bucket is sent by every micro-batch: its sum
//! over ranks is rounded once, and each rank adds its part to those of the micro-batches before, in f32. Of such sums few are on their way
//! at once, so that no rank ever has a whole gradient of the model. What several places use is kept whole until the pass is over.
//!
//! Messages are packed by rank: `[ranks, part of a | part of b | ..]`, parts padded with zeros to one length. Steps are
//! taken element by element, so the bits are those of ranks that hold everything; norms are sums of parts in f64, which
//! are rounded away in the step's own f32.

use std::collections::VecDeque;
use std::time::Instant;

use espalier_comm::{Communicator, Reduce, Request};
use espalier_nn::weights::ParameterId;
use espalier_plan::packets::{SCATTERED_AT_ONCE, packets};
use espalier_plan::traffic::Buckets;
use espalier_plan::{GroupRank, split};
use espalier_tensor::ops::compress::compress;
use espalier_tensor::ops::flat;
use espalier_tensor::ops::update::{Norms, SquaredNorms, Step, Target, squared_norms, step};
use espalier_tensor::{Category, DType, Tensor};

use super::BucketTime;
use super::filling::{Filling, Full};
use crate::Result;
use crate::parallel::groups::Groups;
use crate::parallel::model::ModelParallel;
use crate::state::{Accumulator, Optimizer, ParamStore, mask_for};

/// Gradients of which each rank gets its part.
pub struct Zero<'a> {
    pub(super) sums: Accumulator,
    filling: Filling<'a>,
    /// Whether a sum is scattered as each micro-batch makes it (stage 2).
    each_micro_batch: bool,
    pub(super) is_last: bool,
    in_flight: VecDeque<(usize, Instant, Scattering)>,
    times: Vec<BucketTime>,
    /// This rank's parts of what has been stepped, until all have those of the others.
    stepped: Vec<Stepped>,
}

/// A parameter whose parts the ranks have stepped, each its own.
struct Stepped {
    id: ParameterId,
    /// The number of the group that shares it.
    group: usize,
    /// Kept weights of all ranks.
    length: usize,
    /// This rank's part of them.
    own: Tensor,
}

impl<'a> Zero<'a> {
    pub(super) fn new(
        sums: Accumulator,
        groups: &'a Groups,
        buckets: &'a Buckets,
        each_micro_batch: bool,
    ) -> Zero<'a> {
        Zero {
            sums,
            filling: Filling::new(groups, buckets),
            each_micro_batch,
            is_last: false,
            in_flight: VecDeque::new(),
            times: Vec::new(),
            stepped: Vec::new(),
        }
    }

    /// Whether a parameter's gradient is scattered as each micro-batch makes it.
    fn is_scattered_at_once(&self, id: ParameterId) -> bool {
        self.each_micro_batch && self.filling.is_complete_early(id)
    }

    pub(super) fn accept(
        &mut self,
        params: &ParamStore,
        gradients: Vec<(ParameterId, Tensor)>,
    ) -> Result<()> {
        let ids: Vec<ParameterId> = gradients.iter().map(|(id, _)| *id).collect();
        let mut at_once = Vec::new();
        for (id, mut gradient) in gradients {
            let param = params.param(id);
            if !self.is_scattered_at_once(id) {
                self.sums.add(id, param, gradient)?;
                continue;
            }
            if let Some(mask) = mask_for(param, &gradient) {
                gradient = compress(&gradient, mask, Category::Workspace)?;
            }
            at_once.push((id, gradient));
        }
        for (id, mut gradient) in at_once {
            gradient.book_as(Category::Communication);
            self.fill(params, id, gradient)?;
        }
        if self.is_last && !self.each_micro_batch { self.send_complete(params, &ids) } else { Ok(()) }
    }

    /// Sends those of some gradients that are complete.
    pub(super) fn send_complete(&mut self, params: &ParamStore, ids: &[ParameterId]) -> Result<()> {
        for id in ids {
            if self.filling.is_complete_early(*id) {
                self.send(params, *id)?;
            }
        }
        Ok(())
    }

    /// Sends a gradient as far as it has been summed.
    fn send(&mut self, params: &ParamStore, id: ParameterId) -> Result<()> {
        if !self.filling.is_shared(params, id) {
            return Ok(());
        }
        match self.sums.take_rounded(id)? {
            None => Ok(()),
            Some(gradient) => self.fill(params, id, gradient),
        }
    }

    /// Puts a gradient into its bucket, and starts the sum of that once it is full: of those that go at once, when sums before it have
    /// arrived.
    fn fill(&mut self, params: &ParamStore, id: ParameterId, gradient: Tensor) -> Result<()> {
        let Some(Full { bucket, gradients, group }) = self.filling.put(params, id, gradient) else {
            return Ok(());
        };
        while self.is_scattered_at_once(id) && self.in_flight.len() >= SCATTERED_AT_ONCE {
            self.arrive()?;
        }
        self.in_flight.push_back((bucket, Instant::now(), Scattering::start(gradients, group)?));
        Ok(())
    }

    /// Waits for the sum that was sent first of those on their way; whether there was any.
    fn arrive(&mut self) -> Result<bool> {
        let Some((bucket, start, sum)) = self.in_flight.pop_front() else { return Ok(false) };
        for (id, part) in sum.wait()? {
            match self.is_scattered_at_once(id) {
                true => self.sums.add_part(id, part)?,
                false => self.sums.put(id, part),
            }
        }
        self.times.push(BucketTime { bucket, start, end: Instant::now() });
        Ok(true)
    }

    pub(super) fn finish(&mut self, params: &ParamStore) -> Result<Vec<BucketTime>> {
        // What is still here came more than once.
        for id in self.sums.ids().filter(|id| !self.is_scattered_at_once(*id)).collect::<Vec<_>>() {
            self.send(params, id)?;
        }
        assert!(self.filling.is_empty(), "every parameter that a rank holds has a gradient");
        while self.arrive()? {}
        Ok(std::mem::take(&mut self.times))
    }

    /// Steps this rank's part of every parameter.
    pub(super) fn step(
        &mut self,
        params: &mut ParamStore,
        optimizer: &Optimizer,
        number: Step,
        peers: &ModelParallel,
    ) -> Result<()> {
        let with_gradient = params.iter().filter(|(_, param)| param.gradient.is_some());
        let own = with_gradient.map(|(id, param)| {
            let (group, length) = (param.plan.group, param.state_len());
            Ok(Stepped { id, group, length, own: param.own_values()? })
        });
        self.stepped = own.collect::<Result<_>>()?;
        let (ids, group_of): (Vec<ParameterId>, Vec<usize>) =
            self.stepped.iter().map(|one| (one.id, one.group)).unzip();
        let mut own = self.stepped.iter_mut();
        let targets =
            params.iter_mut().filter(|(_, param)| param.gradient.is_some()).filter_map(|(_, param)| {
                optimizer.target(param, Some(&mut own.next().expect("one for each gradient").own))
            });
        // One that has nothing of a parameter steps nothing; its place among the norms stays.
        let (places, targets): (Vec<usize>, Vec<Target<'_>>) =
            targets.enumerate().filter(|(_, target)| !target.weight.is_empty()).unzip();
        let given = match optimizer.rule.adapts() {
            true => {
                let own = squared_norms(optimizer.rule, number, &targets)?;
                let mut all = joined_norms(&group_of, &places, &own, self.filling.groups)?;
                peers.full_norms(&ids, &mut all)?;
                places.iter().map(|place| all[*place]).collect()
            }
            false => vec![SquaredNorms::default(); targets.len()],
        };
        Ok(step(optimizer.rule, number, targets, Norms::Given(&given))?)
    }

    /// Gives every weight the values that ranks have stepped: while one message is on its way, the one before is put in place.
    pub(super) fn gather(&mut self, params: &mut ParamStore) -> Result<()> {
        let stepped = std::mem::take(&mut self.stepped);
        let mut before: Option<Gathering> = None;
        for (number, group) in self.filling.groups.iter() {
            let shared: Vec<&Stepped> = stepped.iter().filter(|one| one.group == number).collect();
            let bytes: Vec<u64> =
                shared.iter().map(|one| (one.length * one.own.dtype().bytes()) as u64).collect();
            for packet in packets(&bytes) {
                let part = |i: &usize| (shared[*i].id, shared[*i].length, &shared[*i].own);
                let now = Gathering::start(&packet.iter().map(part).collect::<Vec<_>>(), group)?;
                if let Some(arrived) = before.replace(now) {
                    put_in_place(arrived, params)?;
                }
            }
        }
        before.map_or(Ok(()), |arrived| put_in_place(arrived, params))
    }
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
    for (number, group) in groups.iter() {
        let members: Vec<usize> = (0..all.len()).filter(|i| group_of[*i] == number).collect();
        let numbers: Vec<f64> = members.iter().flat_map(|i| all[*i]).collect();
        let sums: Vec<f64> = group.all_reduce(numbers, Reduce::Sum)?;
        for (i, sums) in members.iter().zip(sums.as_chunks::<2>().0) {
            all[*i] = *sums;
        }
    }
    Ok(all.into_iter().map(|[weight, direction]| SquaredNorms { weight, direction }).collect())
}

fn put_in_place(arrived: Gathering, params: &mut ParamStore) -> Result<()> {
    let arrived = arrived.wait()?;
    for &(id, length) in &arrived.packet.lengths {
        let param = params.param_mut(id);
        let (device, dtype) = (param.device(), param.dtype());
        match param.values_mut() {
            Some(at_rest) => arrived.join(id, at_rest)?,
            None => {
                let mut kept = Tensor::empty(&device, &[length], dtype, Category::Workspace)?;
                arrived.join(id, &mut kept)?;
                param.set_values(&kept)?;
            }
        }
    }
    Ok(())
}

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
struct Scattering {
    packet: Packet,
    request: Request<Tensor>,
}

impl Scattering {
    /// Starts the sum of some gradients.
    fn start(gradients: Vec<(ParameterId, Tensor)>, group: &Communicator) -> Result<Scattering> {
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
    fn wait(self) -> Result<Vec<(ParameterId, Tensor)>> {
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
