//! Data parallelism: the gradients of all ranks are added up while the backward pass goes on.
//!
//! A parameter's gradient is complete when the step's last micro-batch has made it. From then on its sum over the ranks
//! that share it is on its way, in the order in which the backward pass makes them, which is the same on all of them: a
//! large one by itself, small ones packed together, since a message has a cost however short it is. They are waited for at
//! the end of the pass, before the norm. What is compressed travels compressed, and in the precision of the run: a rank's
//! sum over micro-batches is rounded once when it is sent, the ranks' sums are added in f32, and their sum is rounded once.

use std::collections::HashSet;

use espalier_comm::{Reduce, Request};
use espalier_plan::cut::BUCKET;
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
    /// A tied parameter comes once per use: it is complete when the whole pass is.
    tied: &'a HashSet<ParameterId>,
    complete: bool,
    /// Whether each rank needs its part of a sum alone.
    shares: bool,
    bucket_bytes: usize,
    /// One for each group.
    buckets: Vec<Vec<(ParameterId, Tensor)>>,
    flying: Vec<Flying>,
}

/// A sum that is on its way.
enum Flying {
    One(ParameterId, Request<Tensor>),
    /// The parts of a flat tensor, with their shapes.
    Packed(Vec<(ParameterId, Vec<usize>)>, Request<Tensor>),
    /// Of which this rank gets its parts.
    Scattered(Scattering),
}

impl<'a> Reducing<'a> {
    /// Sums over the ranks that share a parameter; where none do, gradients stay as they are.
    pub fn new(gradients: Gradients<'a>, groups: &'a Groups, tied: &'a HashSet<ParameterId>) -> Reducing<'a> {
        Reducing {
            gradients,
            groups,
            tied,
            complete: false,
            shares: false,
            bucket_bytes: BUCKET as usize,
            buckets: (0..groups.len()).map(|_| Vec::new()).collect(),
            flying: Vec::new(),
        }
    }

    /// Says whether each rank gets its part of every sum alone: that of kept weights, in their order.
    pub fn sharing(mut self, shares: bool) -> Reducing<'a> {
        self.shares = shares;
        if shares {
            self.gradients.share_out(self.groups);
        }
        self
    }

    /// Packs gradients of fewer bytes than this, up to this many.
    pub fn with_buckets_of(mut self, bytes: usize) -> Reducing<'a> {
        self.bucket_bytes = bytes;
        self
    }

    /// Says whether what comes next is the last of the step.
    pub fn last_micro_batch(&mut self, is_last: bool) {
        self.complete = is_last;
    }

    /// Says that a micro-batch has ended.
    pub fn end_micro_batch(&mut self) -> Result<()> {
        self.gradients.end_micro_batch()
    }

    /// Sends these now, in their order, and zeros for those that nothing came for. Copies of a part see other micro-batches,
    /// perhaps none, and must send alike.
    pub fn send_all(
        &mut self,
        parameters: &[ParameterId],
        zeros: impl Fn(ParameterId) -> Result<Tensor>,
    ) -> Result<()> {
        for id in parameters {
            if self.gradients.get(*id).is_none() {
                self.gradients.put(*id, zeros(*id)?);
            }
            if !self.tied.contains(id) {
                self.send(*id)?;
            }
        }
        self.send_buckets()
    }

    /// Sends what waits for its bucket to fill.
    pub fn send_buckets(&mut self) -> Result<()> {
        (0..self.buckets.len()).try_for_each(|number| self.send_bucket(number))
    }

    /// Waits for all sums.
    pub fn finish(mut self) -> Result<Gradients<'a>> {
        if self.groups.is_empty() {
            return Ok(self.gradients);
        }
        // What is still here came more than once.
        for id in self.gradients.ids() {
            self.send(id)?;
        }
        self.send_buckets()?;
        for flying in std::mem::take(&mut self.flying) {
            match flying {
                Flying::Scattered(parts) => {
                    for (id, part) in parts.wait()? {
                        self.gradients.put(id, part);
                    }
                }
                Flying::One(id, request) => self.gradients.put(id, request.wait()?),
                Flying::Packed(parts, request) => {
                    let (flat, mut start) = (request.wait()?, 0);
                    for (id, shape) in parts {
                        let end = start + shape.iter().product::<usize>();
                        let part = rows::take(&flat, start..end, Category::Gradients)?;
                        self.gradients.put(id, part.reshape(&shape));
                        start = end;
                    }
                }
            }
        }
        Ok(self.gradients)
    }

    /// Starts the sum of a gradient, or puts it into the bucket.
    fn send(&mut self, id: ParameterId) -> Result<()> {
        let Some(number) = self.groups.number(id) else { return Ok(()) };
        let Some(gradient) = self.gradients.take_rounded(id)? else { return Ok(()) };
        if gradient.byte_len() >= self.bucket_bytes {
            if self.shares {
                let alone = Scattering::start(vec![(id, gradient)], self.groups.group(number))?;
                self.flying.push(Flying::Scattered(alone));
                return Ok(());
            }
            let sum = self.groups.group(number).start_all_reduce(gradient, Reduce::Sum)?;
            self.flying.push(Flying::One(id, sum));
            return Ok(());
        }
        let waiting: usize = self.buckets[number].iter().map(|(_, gradient)| gradient.byte_len()).sum();
        if waiting + gradient.byte_len() > self.bucket_bytes {
            self.send_bucket(number)?;
        }
        self.buckets[number].push((id, gradient));
        Ok(())
    }

    fn send_bucket(&mut self, number: usize) -> Result<()> {
        let parts = std::mem::take(&mut self.buckets[number]);
        let Some((_, first)) = parts.first() else { return Ok(()) };
        if self.shares {
            self.flying.push(Flying::Scattered(Scattering::start(parts, self.groups.group(number))?));
            return Ok(());
        }
        let elements = parts.iter().map(|(_, part)| part.len()).sum();
        let mut flat =
            Tensor::empty(&first.device(), &[elements, 1], first.dtype(), Category::Communication)?;
        let (mut shapes, mut start) = (Vec::new(), 0);
        for (id, part) in parts {
            let (len, shape) = (part.len(), part.shape().to_vec());
            rows::put(&mut flat, start, &part.reshape(&[len, 1]))?;
            shapes.push((id, shape));
            start += len;
        }
        let sum = self.groups.group(number).start_all_reduce(flat, Reduce::Sum)?;
        self.flying.push(Flying::Packed(shapes, sum));
        Ok(())
    }
}

impl GradientSink for Reducing<'_> {
    fn accept(&mut self, parameters: &[ParameterId], gradients: WeightGradients) -> Result<()> {
        self.gradients.accept(parameters, gradients)?;
        if !self.complete {
            return Ok(());
        }
        parameters.iter().filter(|id| !self.tied.contains(id)).try_for_each(|id| self.send(*id))
    }
}
