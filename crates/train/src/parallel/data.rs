//! Data parallelism: the gradients of all ranks are added up while the backward pass goes on.
//!
//! A parameter's gradient is complete when the step's last micro-batch has made it. Which of them travel together is the
//! plan's to say ([`Buckets`]): a large one by itself, small ones packed, since a message has a cost however short it is. The
//! sum of a bucket over the ranks that share it starts when the last of its gradients is complete, so in the same order on all
//! of them. Sums are waited for at the end of the pass, before the norm. What is compressed travels compressed, and in the
//! precision of the run: a rank's sum over micro-batches is rounded once when it is sent, the ranks' sums are added in f32, and
//! their sum is rounded once.

use std::time::Instant;

use espalier_comm::{Reduce, Request};
use espalier_plan::cut::BUCKET;
use espalier_plan::traffic::Buckets;
use espalier_tensor::ops::rows;
use espalier_tensor::{Category, Tensor};

use crate::Result;
use crate::layers::{GradientSink, WeightGradients};
use crate::state::Gradients;
use crate::weights::ParameterId;

use super::groups::Groups;
use super::zero::Scattering;

/// Gradients that become those of all ranks.
pub struct Reducing<'a> {
    gradients: Gradients<'a>,
    groups: &'a Groups,
    buckets: &'a Buckets,
    complete: bool,
    /// Whether each rank needs its part of a sum alone.
    shares: bool,
    /// What has come of each bucket.
    waiting: Vec<Vec<(ParameterId, Tensor)>>,
    flying: Vec<Flying>,
}

/// The sum of a bucket that is on its way.
struct Flying {
    bucket: usize,
    start: Instant,
    sum: Sum,
}

enum Sum {
    /// Of gradients of these shapes, one after the other.
    Whole(Vec<(ParameterId, Vec<usize>)>, Request<Tensor>),
    /// Of which this rank gets its parts.
    Scattered(Scattering),
}

/// When the sum of a bucket was under way.
#[derive(Debug, Clone, Copy)]
pub struct BucketTime {
    /// Its number in [`Buckets::list`].
    pub bucket: usize,
    /// When its last gradient was there.
    pub start: Instant,
    /// When the rank had waited for it.
    pub end: Instant,
}

impl<'a> Reducing<'a> {
    /// Sums over the ranks that share a parameter; where none do, gradients stay as they are. Where they share, each rank
    /// gets its part of every sum alone: that of kept weights, in their order.
    pub fn new(
        mut gradients: Gradients<'a>,
        groups: &'a Groups,
        buckets: &'a Buckets,
        shares: bool,
    ) -> Reducing<'a> {
        if shares {
            gradients.share_out(groups);
        }
        let waiting = buckets.list().iter().map(|_| Vec::new()).collect();
        Reducing { gradients, groups, buckets, complete: false, shares, waiting, flying: Vec::new() }
    }

    /// Says whether what comes next is the last of the step.
    pub fn last_micro_batch(&mut self, is_last: bool) {
        self.complete = is_last;
    }

    /// Says that a micro-batch has ended.
    pub fn end_micro_batch(&mut self) -> Result<()> {
        self.gradients.end_micro_batch()
    }

    /// Sends these now, and zeros for those that nothing came for. Copies of a part see other micro-batches, perhaps none, and
    /// must send alike.
    pub fn send_all(
        &mut self,
        parameters: &[ParameterId],
        zeros: impl Fn(ParameterId) -> Result<Tensor>,
    ) -> Result<()> {
        for id in parameters {
            if self.gradients.get(*id).is_none() {
                self.gradients.put(*id, zeros(*id)?);
            }
        }
        self.send_whole(parameters)
    }

    /// Waits for all sums, which it says when were under way.
    pub fn finish(mut self) -> Result<(Gradients<'a>, Vec<BucketTime>)> {
        // What is still here came more than once.
        for id in self.gradients.ids() {
            self.send(id)?;
        }
        assert!(self.waiting.iter().all(Vec::is_empty), "every parameter that a rank holds has a gradient");
        let mut times = Vec::with_capacity(self.flying.len());
        for Flying { bucket, start, sum } in std::mem::take(&mut self.flying) {
            match sum {
                Sum::Scattered(parts) => {
                    parts.wait()?.into_iter().for_each(|(id, part)| self.gradients.put(id, part));
                }
                Sum::Whole(parts, request) => self.take_apart(parts, request.wait()?)?,
            }
            times.push(BucketTime { bucket, start, end: Instant::now() });
        }
        Ok((self.gradients, times))
    }

    /// Puts the sums of a bucket where its gradients were.
    fn take_apart(&mut self, parts: Vec<(ParameterId, Vec<usize>)>, mut sum: Tensor) -> Result<()> {
        if let [(id, _)] = parts[..] {
            sum.book_as(Category::Gradients);
            self.gradients.put(id, sum);
            return Ok(());
        }
        let mut start = 0;
        for (id, shape) in parts {
            let end = start + shape.iter().product::<usize>();
            let part = rows::take(&sum, start..end, Category::Gradients)?;
            self.gradients.put(id, part.reshape(&shape));
            start = end;
        }
        Ok(())
    }

    /// Sends those of some gradients that are whole: a tied parameter's comes once per use, and is when the pass is over.
    fn send_whole(&mut self, parameters: &[ParameterId]) -> Result<()> {
        let buckets = self.buckets;
        let chunk = |id: &&ParameterId| buckets.list()[buckets.of(id.0)?].chunk;
        parameters.iter().filter(|id| chunk(id).is_some()).try_for_each(|id| self.send(*id))
    }

    /// Puts a gradient into its bucket, and starts the sum of that once it is full.
    fn send(&mut self, id: ParameterId) -> Result<()> {
        let (Some(group), Some(bucket)) = (self.groups.of(id), self.buckets.of(id.0)) else { return Ok(()) };
        let Some(gradient) = self.gradients.take_rounded(id)? else { return Ok(()) };
        self.waiting[bucket].push((id, gradient));
        if self.waiting[bucket].len() < self.buckets.list()[bucket].parameters.len() {
            return Ok(());
        }
        let gradients = std::mem::take(&mut self.waiting[bucket]);
        let sum = match self.shares {
            true => Sum::Scattered(Scattering::start(gradients, group)?),
            false => {
                let shapes = gradients.iter().map(|(id, part)| (*id, part.shape().to_vec())).collect();
                Sum::Whole(shapes, group.start_all_reduce(packed(gradients)?, Reduce::Sum)?)
            }
        };
        self.flying.push(Flying { bucket, start: Instant::now(), sum });
        Ok(())
    }
}

/// Gradients one after the other in a tensor; one alone as it is, booked as the message that it would be with others.
fn packed(mut gradients: Vec<(ParameterId, Tensor)>) -> Result<Tensor> {
    if let [(_, alone)] = &mut gradients[..] {
        if (alone.byte_len() as u64) < BUCKET {
            alone.book_as(Category::Communication);
        }
        return Ok(gradients.remove(0).1);
    }
    let elements = gradients.iter().map(|(_, part)| part.len()).sum();
    let (device, dtype) = (gradients[0].1.device(), gradients[0].1.dtype());
    let mut flat = Tensor::empty(&device, &[elements, 1], dtype, Category::Communication)?;
    let mut start = 0;
    for (_, part) in gradients {
        let len = part.len();
        rows::put(&mut flat, start, &part.reshape(&[len, 1]))?;
        start += len;
    }
    Ok(flat)
}

impl GradientSink for Reducing<'_> {
    fn accept(&mut self, parameters: &[ParameterId], gradients: WeightGradients) -> Result<()> {
        self.gradients.accept(parameters, gradients)?;
        if !self.complete {
            return Ok(());
        }
        self.send_whole(parameters)
    }
}
