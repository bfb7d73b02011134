//! ZeRO (Rajbhandari et al. 2020): the ranks that share a parameter split its master weights and moments, and
//! perhaps the sum of its gradients (stage 2), and its weight (stage 3).
//!
//! Each rank has its [split] of every parameter's kept weights. A gradient is reduce-scattered, each shard to
//! the rank that steps it; the new weights, kept values in the weights' own type, come back from all. A
//! reduce-scatter and an all-gather move what one all-reduce moves, so nothing more is sent than without.
//!
//! In stage 1 gradients are summed over micro-batches and then over ranks. In stage 2 a bucket is sent by
//! every micro-batch: its sum over ranks is rounded once, and each rank adds its shard to those of the
//! micro-batches before, in f32. Few such reductions are on their way at once, so that no rank ever has the full
//! gradient of the model. That of a tied parameter is kept unsharded until the pass is over.
//!
//! In stage 3 gradients are what they are in stage 2, and a rank steps its shard of the weight where it is:
//! nothing is gathered after the step, since whoever enters a block gathers its weights (`state/expansion`).
//!
//! Messages are packed by rank (`shard_gather`): `[ranks, shard of a | shard of b | ..]`. Steps are taken
//! element by element, so the bits are those of ranks that hold everything; norms are sums over shards in f64,
//! which are rounded away in the step's own f32.

use std::collections::VecDeque;
use std::time::Instant;

use espalier_comm::{Communicator, Reduce, Request};
use espalier_nn::weights::ParameterId;
use espalier_plan::packets::SCATTERED_AT_ONCE;
use espalier_plan::split;
use espalier_plan::traffic::Buckets;
use espalier_tensor::ops::compress::compress;
use espalier_tensor::ops::flat;
use espalier_tensor::ops::update::{ParamUpdate, SquaredNorms, StepParams, TrustNorms, squared_norms, step};
use espalier_tensor::{Category, Tensor};

use super::BucketTime;
use super::bucket_filler::{BucketFiller, FullBucket};
use crate::Result;
use crate::parallel::model::ModelParallel;
use crate::parallel::reduce_groups::ReduceGroups;
use crate::shard_gather::{GatheredShards, PackedMessage, PendingAllGather, VectorShard, member_of};
use crate::state::{Accumulator, Optimizer, ParamStore, mask_for};

/// Gradients of which each rank gets its shard.
pub struct Zero<'a> {
    pub(super) accumulator: Accumulator,
    filler: BucketFiller<'a>,
    /// Whether gradients are scattered as each micro-batch makes them (stage 2).
    each_micro_batch: bool,
    pub(super) is_last: bool,
    in_flight: VecDeque<(usize, Instant, PendingReduceScatter)>,
    times: Vec<BucketTime>,
    /// This rank's shards of weights that have been stepped, until all have those of the others.
    stepped_shards: Vec<SteppedShard>,
}

/// A parameter whose shards the ranks have stepped, each its own.
struct SteppedShard {
    id: ParameterId,
    /// The number of the group that shares it.
    group: usize,
    /// Kept weights of all ranks.
    length: usize,
    /// This rank's shard of them; none where that is all that it has of the weight.
    local: Option<Tensor>,
}

impl SteppedShard {
    /// What is to be gathered of it.
    fn vector(&self) -> Option<VectorShard<'_>> {
        Some(VectorShard { id: self.id, length: self.length, local: self.local.as_ref()? })
    }
}

impl<'a> Zero<'a> {
    pub(super) fn new(
        accumulator: Accumulator,
        groups: &'a ReduceGroups,
        buckets: &'a Buckets,
        each_micro_batch: bool,
    ) -> Zero<'a> {
        Zero {
            accumulator,
            filler: BucketFiller::new(groups, buckets),
            each_micro_batch,
            is_last: false,
            in_flight: VecDeque::new(),
            times: Vec::new(),
            stepped_shards: Vec::new(),
        }
    }

    /// Whether a parameter's gradient is scattered as each micro-batch makes it.
    fn is_scattered_at_once(&self, id: ParameterId) -> bool {
        self.each_micro_batch && self.filler.is_complete_early(id)
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
                self.accumulator.add(id, param, gradient)?;
                continue;
            }
            if let Some(mask) = mask_for(param, &gradient) {
                gradient = compress(&gradient, mask, Category::Workspace)?;
            }
            at_once.push((id, gradient));
        }
        for (id, mut gradient) in at_once {
            gradient.tag_memory(Category::Communication);
            self.fill(params, id, gradient)?;
        }
        if self.is_last && !self.each_micro_batch { self.send_complete(params, &ids) } else { Ok(()) }
    }

    /// Sends those of some gradients that are complete.
    pub(super) fn send_complete(&mut self, params: &ParamStore, ids: &[ParameterId]) -> Result<()> {
        for id in ids {
            if self.filler.is_complete_early(*id) {
                self.send(params, *id)?;
            }
        }
        Ok(())
    }

    /// Sends a gradient as far as it has been summed.
    fn send(&mut self, params: &ParamStore, id: ParameterId) -> Result<()> {
        if !self.filler.is_shared(params, id) {
            return Ok(());
        }
        match self.accumulator.take_rounded(id)? {
            None => Ok(()),
            Some(gradient) => self.fill(params, id, gradient),
        }
    }

    /// Puts a gradient into its bucket, and starts its reduction once it is full: of those that go at once, when
    /// earlier ones have arrived.
    fn fill(&mut self, params: &ParamStore, id: ParameterId, gradient: Tensor) -> Result<()> {
        let Some(FullBucket { bucket, gradients, group }) = self.filler.add(params, id, gradient) else {
            return Ok(());
        };
        while self.is_scattered_at_once(id) && self.in_flight.len() >= SCATTERED_AT_ONCE {
            self.wait_first()?;
        }
        self.in_flight.push_back((bucket, Instant::now(), PendingReduceScatter::start(gradients, group)?));
        Ok(())
    }

    /// Waits for the reduction that was started first of those on their way; whether there was any.
    fn wait_first(&mut self) -> Result<bool> {
        let Some((bucket, start, pending)) = self.in_flight.pop_front() else { return Ok(false) };
        for (id, shard) in pending.wait()? {
            match self.is_scattered_at_once(id) {
                true => self.accumulator.add_shard(id, shard)?,
                false => self.accumulator.set_reduced(id, shard),
            }
        }
        self.times.push(BucketTime { bucket, start, end: Instant::now() });
        Ok(true)
    }

    pub(super) fn finish(&mut self, params: &ParamStore) -> Result<Vec<BucketTime>> {
        // What is still here came more than once.
        for id in self.accumulator.ids().filter(|id| !self.is_scattered_at_once(*id)).collect::<Vec<_>>() {
            self.send(params, id)?;
        }
        assert!(self.filler.is_empty(), "every parameter that a rank holds has a gradient");
        while self.wait_first()? {}
        Ok(std::mem::take(&mut self.times))
    }

    /// Steps this rank's shard of every parameter.
    pub(super) fn step(
        &mut self,
        params: &mut ParamStore,
        optimizer: &Optimizer,
        step_params: StepParams,
        model_parallel: &ModelParallel,
    ) -> Result<()> {
        let with_gradient = params.iter().filter(|(_, param)| param.gradient.is_some());
        let local = with_gradient.map(|(id, param)| {
            let (group, length) = (param.plan.group, param.state_len());
            let local = (!param.is_weight_sharded()).then(|| param.local_values()).transpose()?;
            Ok(SteppedShard { id, group, length, local })
        });
        self.stepped_shards = local.collect::<Result<_>>()?;
        let (ids, group_of): (Vec<ParameterId>, Vec<usize>) =
            self.stepped_shards.iter().map(|one| (one.id, one.group)).unzip();
        let mut local = self.stepped_shards.iter_mut();
        let targets =
            params.iter_mut().filter(|(_, param)| param.gradient.is_some()).filter_map(|(_, param)| {
                optimizer.target(param, local.next().expect("one for each gradient").local.as_mut())
            });
        // One that has nothing of a parameter steps nothing; its index among the norms stays.
        let (indices, targets): (Vec<usize>, Vec<ParamUpdate<'_>>) =
            targets.enumerate().filter(|(_, target)| !target.weight.is_empty()).unzip();
        let given = match optimizer.rule.adapts() {
            true => {
                let local = squared_norms(optimizer.rule, step_params, &targets)?;
                let mut all = joined_norms(&group_of, &indices, &local, self.filler.groups)?;
                model_parallel.full_norms(&ids, &mut all)?;
                indices.iter().map(|index| all[*index]).collect()
            }
            false => vec![SquaredNorms::default(); targets.len()],
        };
        Ok(step(optimizer.rule, step_params, targets, TrustNorms::Given(&given))?)
    }

    /// Gives every weight of which ranks have all the values that they have stepped: while one message is on its
    /// way, the one before is unpacked.
    pub(super) fn gather(&mut self, params: &mut ParamStore) -> Result<()> {
        let stepped_shards = std::mem::take(&mut self.stepped_shards);
        let mut before: Option<PendingAllGather> = None;
        for (number, group) in self.filler.groups.iter() {
            let shared: Vec<VectorShard<'_>> = stepped_shards
                .iter()
                .filter(|one| one.group == number)
                .filter_map(SteppedShard::vector)
                .collect();
            for packet in PendingAllGather::packets(&shared) {
                let packet: Vec<&VectorShard<'_>> = packet.iter().map(|i| &shared[*i]).collect();
                let now = PendingAllGather::start(&packet, group)?;
                if let Some(arrived) = before.replace(now) {
                    write_gathered(&arrived.wait()?, params)?;
                }
            }
        }
        before.map_or(Ok(()), |arrived| write_gathered(&arrived.wait()?, params))
    }
}

/// The norms of all that a rank holds of parameters, from those of every rank's shards: each parameter has a
/// group, and this rank steps those at `indices`.
fn joined_norms(
    group_of: &[usize],
    indices: &[usize],
    local: &[SquaredNorms],
    groups: &ReduceGroups,
) -> Result<Vec<SquaredNorms>> {
    let mut all = vec![[0.0; 2]; group_of.len()];
    for (index, norms) in indices.iter().zip(local) {
        all[*index] = [norms.weight, norms.direction];
    }
    for (number, group) in groups.iter() {
        let members: Vec<usize> = (0..all.len()).filter(|i| group_of[*i] == number).collect();
        let numbers: Vec<f64> = members.iter().flat_map(|i| all[*i]).collect();
        let reduced: Vec<f64> = group.all_reduce(numbers, Reduce::Sum)?;
        for (i, norms) in members.iter().zip(reduced.as_chunks::<2>().0) {
            all[*i] = *norms;
        }
    }
    Ok(all.into_iter().map(|[weight, direction]| SquaredNorms { weight, direction }).collect())
}

fn write_gathered(arrived: &GatheredShards, params: &mut ParamStore) -> Result<()> {
    for &(id, length) in arrived.lengths() {
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

/// A reduce-scatter of gradients that is on its way, to each rank its shard.
struct PendingReduceScatter {
    packet: PackedMessage,
    request: Request<Tensor>,
}

impl PendingReduceScatter {
    /// Starts the reduce-scatter of some gradients.
    fn start(gradients: Vec<(ParameterId, Tensor)>, group: &Communicator) -> Result<PendingReduceScatter> {
        let member = member_of(group);
        let lengths = gradients.iter().map(|(id, gradient)| (*id, gradient.len())).collect();
        let (packet, first) = (PackedMessage { member, lengths }, &gradients[0].1);
        let (device, dtype, shard_len) = (first.device(), first.dtype(), packet.shard_len());
        let full = match &*gradients {
            // Nothing is to be padded and nothing packed.
            [(_, one)] if one.len() == shard_len * member.ranks => {
                gradients.into_iter().next().expect("one").1
            }
            _ => {
                let all = [shard_len * member.ranks];
                let mut full = Tensor::zeros(&device, &all, dtype, Category::Communication)?;
                for ((_, gradient), (_, length, offset)) in gradients.iter().zip(packet.offsets()) {
                    for rank in 0..member.ranks {
                        flat::put(
                            &mut full,
                            rank * shard_len + offset,
                            gradient,
                            split(length, member.ranks, rank),
                        )?;
                    }
                }
                full
            }
        };
        let local = Tensor::empty(&device, &[shard_len], dtype, Category::Communication)?;
        Ok(PendingReduceScatter { packet, request: group.start_reduce_scatter(full, local, Reduce::Sum)? })
    }

    /// Waits for this rank's shards, whose memory category the caller sets.
    fn wait(self) -> Result<Vec<(ParameterId, Tensor)>> {
        let shard = self.request.wait()?;
        if let [(id, length)] = *self.packet.lengths
            && self.packet.member.split(length).len() == shard.len()
        {
            return Ok(vec![(id, shard)]);
        }
        let local = |(id, length, offset): (ParameterId, usize, usize)| {
            let at = offset..offset + self.packet.member.split(length).len();
            Ok((id, flat::take(&shard, at, Category::Workspace)?))
        };
        self.packet.offsets().map(local).collect()
    }
}
