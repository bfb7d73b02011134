//! Data parallelism: the gradients of all ranks are added up while the backward pass goes on.
//!
//! A parameter's gradient is complete when the step's last micro-batch has made it. Which of them travel together is the
//! plan's to say ([`Buckets`]): a large one by itself, small ones packed, since a message has a cost however short it is. The
//! sum of a bucket over the ranks that share it starts when the last of its gradients is complete, so in the same order on all
//! of them. Sums are waited for at the end of the pass, before the norm. What is compressed travels compressed, and in the
//! precision of the run: a rank's sum over micro-batches is rounded once when it is sent, the ranks' sums are added in f32, and
//! their sum is rounded once.
//!
//! Where ranks share out gradients too (ZeRO-2), a bucket is sent by every micro-batch: its sum over ranks is rounded once, and
//! each rank adds its part to those of the micro-batches before, in f32. Of such sums few are on their way at once, so that no
//! rank ever has a whole gradient of the model.

use std::collections::VecDeque;
use std::time::Instant;

use espalier_comm::{Reduce, Request};
use espalier_nn::layers::{GradientSink, WeightGradients};
use espalier_nn::weights::ParameterId;
use espalier_plan::packets::{BUCKET, SCATTERED_AT_ONCE};
use espalier_plan::sharing::Sharing;
use espalier_plan::traffic::Buckets;
use espalier_tensor::ops::rows;
use espalier_tensor::{Category, Tensor};

use crate::Result;
use crate::state::Gradients;

use super::groups::Groups;
use super::zero::Scattering;

/// Gradients that become those of all ranks.
pub struct Reducing<'a> {
    gradients: Gradients<'a>,
    groups: &'a Groups,
    buckets: &'a Buckets,
    complete: bool,
    /// Which of a sum each rank needs, and when.
    sharing: Sharing,
    /// What has come of each bucket.
    waiting: Vec<Vec<(ParameterId, Tensor)>>,
    flying: VecDeque<Flying>,
    /// When those that have arrived were under way.
    times: Vec<BucketTime>,
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
    /// Sums over the ranks that share a parameter; where none do, gradients stay as they are. Where they share out state, each rank
    /// gets its part of every sum alone: that of kept weights, in their order.
    pub fn new(
        mut gradients: Gradients<'a>,
        groups: &'a Groups,
        buckets: &'a Buckets,
        sharing: Sharing,
    ) -> Reducing<'a> {
        if sharing.is_sharded() {
            gradients.share_out(groups);
        }
        if sharing.scatters_gradients() {
            // What several places use is complete when the pass is, and is kept whole until the last one.
            let at_once = buckets.list().iter().filter(|bucket| bucket.chunk.is_some());
            gradients.pass_on(
                at_once.flat_map(|bucket| bucket.parameters.iter().copied().map(ParameterId)).collect(),
            );
        }
        let waiting = buckets.list().iter().map(|_| Vec::new()).collect();
        let (flying, times) = (VecDeque::new(), Vec::new());
        Reducing { gradients, groups, buckets, complete: false, sharing, waiting, flying, times }
    }

    /// Takes a gradient that is complete, on a rank that is alone.
    pub fn put(&mut self, id: ParameterId, gradient: Tensor) {
        self.gradients.put_whole(id, gradient);
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
        for id in self.gradients.ids().filter(|id| !self.gradients.passes_on(*id)).collect::<Vec<_>>() {
            self.send(id)?;
        }
        assert!(self.waiting.iter().all(Vec::is_empty), "every parameter that a rank holds has a gradient");
        while self.arrive()? {}
        Ok((self.gradients, self.times))
    }

    /// Waits for the sum that was sent first of those on their way; whether there was any.
    fn arrive(&mut self) -> Result<bool> {
        let Some(Flying { bucket, start, sum }) = self.flying.pop_front() else { return Ok(false) };
        match sum {
            Sum::Scattered(parts) => {
                for (id, mut part) in parts.wait()? {
                    if self.gradients.passes_on(id) {
                        self.gradients.add_part(id, part)?;
                    } else {
                        part.book_as(Category::Gradients);
                        self.gradients.put(id, part);
                    }
                }
            }
            Sum::Whole(parts, request) => self.take_apart(parts, request.wait()?)?,
        }
        self.times.push(BucketTime { bucket, start, end: Instant::now() });
        Ok(true)
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

    /// Sends a gradient as far as it has been summed.
    fn send(&mut self, id: ParameterId) -> Result<()> {
        if self.groups.of(id).is_none() {
            return Ok(());
        }
        match self.gradients.take_rounded(id)? {
            None => Ok(()),
            Some(gradient) => self.fill_bucket(id, gradient),
        }
    }

    /// Sends what has come of a micro-batch and is scattered at once, when sums before it have arrived.
    fn hand_on(&mut self) -> Result<()> {
        for (id, mut gradient) in self.gradients.take_arrived() {
            gradient.book_as(Category::Communication);
            self.fill_bucket(id, gradient)?;
        }
        Ok(())
    }

    /// Puts a gradient into its bucket, and starts the sum of that once it is full.
    fn fill_bucket(&mut self, id: ParameterId, gradient: Tensor) -> Result<()> {
        let (Some(group), Some(bucket)) = (self.groups.of(id), self.buckets.of(id.0)) else { return Ok(()) };
        self.waiting[bucket].push((id, gradient));
        if self.waiting[bucket].len() < self.buckets.list()[bucket].parameters.len() {
            return Ok(());
        }
        if self.gradients.passes_on(id) {
            while self.flying.len() >= SCATTERED_AT_ONCE {
                self.arrive()?;
            }
        }
        let gradients = std::mem::take(&mut self.waiting[bucket]);
        let sum = match self.sharing.is_sharded() {
            true => Sum::Scattered(Scattering::start(gradients, group)?),
            false => {
                let shapes = gradients.iter().map(|(id, part)| (*id, part.shape().to_vec())).collect();
                Sum::Whole(shapes, group.start_all_reduce(packed(gradients)?, Reduce::Sum)?)
            }
        };
        self.flying.push_back(Flying { bucket, start: Instant::now(), sum });
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
    fn accept(&mut self, parameters: &[ParameterId], gradients: WeightGradients) -> espalier_nn::Result<()> {
        self.gradients.accept(parameters, gradients)?;
        if self.sharing.scatters_gradients() {
            self.hand_on()?;
        } else if self.complete {
            self.send_whole(parameters)?;
        }
        Ok(())
    }
}
