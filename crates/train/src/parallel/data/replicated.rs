//! Replicas that have everything: the gradients of all ranks are added up while the backward pass goes on.
//!
//! A parameter's gradient is complete when the step's last micro-batch has made it. Which of them travel
//! together is the plan's to say ([`Buckets`]): a large one by itself, small ones packed, since a message has
//! a cost however short it is. The all-reduce of a bucket over the ranks that share it starts when the last of its
//! gradients is complete, so in the same order on all of them. They are waited for at the end of the pass,
//! before the norm. What is compressed travels compressed, and in the precision of the run: a rank's sum over
//! micro-batches is rounded once when it is sent, the ranks' sums are added in f32, and their sum is rounded
//! once.

use std::time::Instant;

use espalier_comm::{Reduce, Request};
use espalier_nn::weights::ParameterId;
use espalier_plan::packets::BUCKET;
use espalier_plan::traffic::Buckets;
use espalier_tensor::ops::rows;
use espalier_tensor::{Category, Tensor};

use super::BucketTime;
use super::bucket_filler::{BucketFiller, FullBucket};
use crate::Result;
use crate::parallel::reduce_groups::ReduceGroups;
use crate::state::{Accumulator, ParamStore};

/// Gradients that become those of all ranks.
pub struct Replicated<'a> {
    pub(super) accumulator: Accumulator,
    filler: BucketFiller<'a>,
    pub(super) is_last: bool,
    in_flight: Vec<InFlightBucket>,
}

/// The all-reduce of a bucket that is on its way: of gradients of these shapes, one after the other.
struct InFlightBucket {
    bucket: usize,
    start: Instant,
    shapes: Vec<(ParameterId, Vec<usize>)>,
    request: Request<Tensor>,
}

impl<'a> Replicated<'a> {
    pub(super) fn new(
        accumulator: Accumulator,
        groups: &'a ReduceGroups,
        buckets: &'a Buckets,
    ) -> Replicated<'a> {
        Replicated {
            accumulator,
            filler: BucketFiller::new(groups, buckets),
            is_last: false,
            in_flight: Vec::new(),
        }
    }

    pub(super) fn accept(
        &mut self,
        params: &ParamStore,
        gradients: Vec<(ParameterId, Tensor)>,
    ) -> Result<()> {
        let ids: Vec<ParameterId> = gradients.iter().map(|(id, _)| *id).collect();
        for (id, gradient) in gradients {
            self.accumulator.add(id, params.param(id), gradient)?;
        }
        if self.is_last { self.send_complete(params, &ids) } else { Ok(()) }
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
        let Some(gradient) = self.accumulator.take_rounded(id)? else { return Ok(()) };
        let Some(FullBucket { bucket, gradients, group }) = self.filler.add(params, id, gradient) else {
            return Ok(());
        };
        let shapes = gradients.iter().map(|(id, gradient)| (*id, gradient.shape().to_vec())).collect();
        let request = group.start_all_reduce(packed(gradients)?, Reduce::Sum)?;
        self.in_flight.push(InFlightBucket { bucket, start: Instant::now(), shapes, request });
        Ok(())
    }

    pub(super) fn finish(&mut self, params: &ParamStore) -> Result<Vec<BucketTime>> {
        // What is still here came more than once.
        self.accumulator.ids().try_for_each(|id| self.send(params, id))?;
        assert!(self.filler.is_empty(), "every parameter that a rank holds has a gradient");
        let mut times = Vec::new();
        for InFlightBucket { bucket, start, shapes, request } in std::mem::take(&mut self.in_flight) {
            self.unpack(shapes, request.wait()?)?;
            times.push(BucketTime { bucket, start, end: Instant::now() });
        }
        Ok(times)
    }

    /// Puts the all-reduce of a bucket where its gradients were.
    fn unpack(&mut self, shapes: Vec<(ParameterId, Vec<usize>)>, reduced: Tensor) -> Result<()> {
        if let [(id, _)] = shapes[..] {
            self.accumulator.set_reduced(id, reduced);
            return Ok(());
        }
        let mut start = 0;
        for (id, shape) in shapes {
            let end = start + shape.iter().product::<usize>();
            let gradient = rows::take(&reduced, start..end, Category::Gradients)?;
            self.accumulator.set_reduced(id, gradient.reshape(&shape));
            start = end;
        }
        Ok(())
    }
}

/// Gradients one after the other in a tensor; a single one as it is, counted as the message that it would be
/// with others.
fn packed(mut gradients: Vec<(ParameterId, Tensor)>) -> Result<Tensor> {
    if let [(_, single)] = &mut gradients[..] {
        if (single.byte_len() as u64) < BUCKET {
            single.tag_memory(Category::Communication);
        }
        return Ok(gradients.remove(0).1);
    }
    let elements = gradients.iter().map(|(_, gradient)| gradient.len()).sum();
    let (device, dtype) = (gradients[0].1.device(), gradients[0].1.dtype());
    let mut flat = Tensor::empty(&device, &[elements, 1], dtype, Category::Communication)?;
    let mut start = 0;
    for (_, gradient) in gradients {
        let len = gradient.len();
        rows::put(&mut flat, start, &gradient.reshape(&[len, 1]))?;
        start += len;
    }
    Ok(flat)
}
