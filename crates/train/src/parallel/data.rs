//! Data parallelism: the gradients of all ranks are added up while the backward pass goes on.
//!
//! A parameter's gradient is complete when the step's last micro-batch has made it. From then on its sum over ranks is on
//! its way, in the order in which the backward pass makes them, which is the same on every rank: a large one by itself,
//! small ones packed together, since a message has a cost however short it is. They are waited for at the end of the pass,
//! before the norm. What is compressed travels compressed.

use std::collections::HashSet;

use espalier_comm::{Communicator, Reduce, Request};
use espalier_plan::memory::BUCKET;
use espalier_tensor::ops::rows;
use espalier_tensor::{Category, Tensor};

use crate::Result;
use crate::layers::{GradientSink, WeightGradients};
use crate::state::Gradients;
use crate::weights::{ParameterId, Weights};

use super::Ranks;

/// Gradients that become those of all ranks.
pub struct Reducing<'a> {
    gradients: Gradients<'a>,
    group: Option<&'a Communicator>,
    /// A tied parameter comes once per use: it is complete when the whole pass is.
    tied: &'a HashSet<ParameterId>,
    complete: bool,
    bucket_bytes: usize,
    bucket: Vec<(ParameterId, Tensor)>,
    flying: Vec<Flying>,
}

/// A sum that is on its way.
enum Flying {
    One(ParameterId, Request<Tensor>),
    /// The parts of a flat tensor, with their shapes.
    Packed(Vec<(ParameterId, Vec<usize>)>, Request<Tensor>),
}

impl<'a> Reducing<'a> {
    /// Sums over the ranks that have other samples; with none, gradients stay as they are.
    pub fn new(
        gradients: Gradients<'a>,
        ranks: Option<&'a Ranks>,
        tied: &'a HashSet<ParameterId>,
    ) -> Reducing<'a> {
        Reducing {
            gradients,
            group: ranks.map(Ranks::data),
            tied,
            complete: false,
            bucket_bytes: BUCKET as usize,
            bucket: Vec::new(),
            flying: Vec::new(),
        }
    }

    /// Packs gradients of fewer bytes than this, up to this many.
    pub fn with_buckets_of(mut self, bytes: usize) -> Reducing<'a> {
        self.bucket_bytes = bytes;
        self
    }

    /// Says that the next micro-batch is the last of the step.
    pub fn last_micro_batch(&mut self) {
        self.complete = true;
    }

    /// Waits for all sums.
    pub fn finish(mut self) -> Result<Gradients<'a>> {
        let Some(group) = self.group else { return Ok(self.gradients) };
        // What is still here came more than once, or waits for its bucket to fill.
        for id in self.gradients.ids() {
            self.send(id, group)?;
        }
        self.send_bucket(group)?;
        for flying in std::mem::take(&mut self.flying) {
            match flying {
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
    fn send(&mut self, id: ParameterId, group: &Communicator) -> Result<()> {
        let Some(gradient) = self.gradients.take(id) else { return Ok(()) };
        if gradient.byte_len() >= self.bucket_bytes {
            self.flying.push(Flying::One(id, group.start_all_reduce(gradient, Reduce::Sum)?));
            return Ok(());
        }
        let waiting: usize = self.bucket.iter().map(|(_, gradient)| gradient.byte_len()).sum();
        if waiting + gradient.byte_len() > self.bucket_bytes {
            self.send_bucket(group)?;
        }
        self.bucket.push((id, gradient));
        Ok(())
    }

    fn send_bucket(&mut self, group: &Communicator) -> Result<()> {
        let parts = std::mem::take(&mut self.bucket);
        let Some((_, first)) = parts.first() else { return Ok(()) };
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
        self.flying.push(Flying::Packed(shapes, group.start_all_reduce(flat, Reduce::Sum)?));
        Ok(())
    }
}

impl GradientSink for Reducing<'_> {
    fn accept(&mut self, parameters: &[ParameterId], gradients: WeightGradients) -> Result<()> {
        self.gradients.accept(parameters, gradients)?;
        let Some(group) = self.group.filter(|_| self.complete) else { return Ok(()) };
        for id in parameters.iter().filter(|id| !self.tied.contains(id)) {
            self.send(*id, group)?;
        }
        Ok(())
    }
}

/// Makes the running statistics of batch norms those of all ranks: their mean, in the same bits everywhere.
pub fn average_statistics(weights: &mut Weights, ranks: &Ranks) -> Result<()> {
    let own: Vec<f64> =
        weights.statistics_mut().flat_map(|statistic| statistic.to_f32()).map(f64::from).collect();
    // A message has a cost even with nothing in it.
    if own.is_empty() {
        return Ok(());
    }
    let sums = ranks.sum(own)?;
    let mut sums = sums.iter().map(|sum| (sum / ranks.data().size() as f64) as f32);
    for statistic in weights.statistics_mut() {
        let mean: Vec<u8> = sums.by_ref().take(statistic.len()).flat_map(f32::to_le_bytes).collect();
        statistic.copy_from_host(&mean);
    }
    Ok(())
}
