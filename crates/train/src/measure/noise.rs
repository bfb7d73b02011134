//! How much the gradients of single samples disagree: their variance, and the noise scale that follows from
//! it (McCandlish et al. 2018), at weights that stand still. [`NoiseScale`] smooths the same two numbers in
//! the course of a run.
//!
//! Both come from the squared norms of gradients of micro-batches and of their mean. Over kept weights alone.

use espalier_comm::Reduce;
use espalier_data::DataSplit;
use espalier_nn::weights::Weights;
use serde::Serialize;

use super::surface::{LossSurface, add_direction, scale};
use crate::Result;
use crate::prune::gradient::{GradientSums, all_reduce_gradient};
use crate::state::NoiseScale;
use crate::step::LossConfig;

/// Signal and noise of the gradient.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct GradientNoise {
    /// The squared length of the gradient over all samples; can be below 0 where noise hides it.
    pub signal: f64,
    /// The variance of one sample's gradient, added up over all weights.
    pub variance: f64,
}

impl GradientNoise {
    /// The batch at which noise and signal are equal: an estimate of the critical batch. None where noise
    /// hides the signal.
    pub fn critical_batch(&self) -> Option<f64> {
        (self.signal > 0.0 && self.variance > 0.0).then(|| self.variance / self.signal)
    }
}

/// Signal and noise at the surface's own weights, from its micro-batches; an error where there are fewer than
/// two full ones.
pub fn gradient_noise(surface: &LossSurface<'_>) -> Result<GradientNoise> {
    gradient_noise_at(surface, &surface.center()?)
}

/// The same at any point of it. Ranks may be replicas of the full model or hold shards of one, not both.
pub fn gradient_noise_at(surface: &LossSurface<'_>, at: &Weights) -> Result<GradientNoise> {
    let (context, size, ids) = (surface.context, surface.micro_batch, surface.ids());
    let (replicas, shards) = (context.ranks.data().size(), context.ranks.replica().size());
    if replicas > 1 && shards > 1 {
        let problem =
            format!("has {replicas} replicas of {shards} ranks: gradient noise is measured on one rank");
        return Err(espalier_plan::Error::Conflict { field: "parallel".into(), problem }.into());
    }
    let (mut squares, mut count, mut total) = (0.0, 0usize, None);
    for micro_batch in
        surface.scored().micro_batches().iter().filter(|micro_batch| micro_batch.samples.len() == size)
    {
        let ignored = context.dataset.ignored(DataSplit::Train, micro_batch.samples);
        let loss = LossConfig { samples: size, ignored, ..surface.scored().loss() };
        let mut sums = GradientSums::of(ids);
        surface.no_update_pass(at).train(
            micro_batch.samples,
            loss,
            &micro_batch.batch_slice,
            &mut Vec::new(),
            &mut sums,
        )?;
        // Replicas have micro-batches of their own; shards of a model see the same ones, and a parameter that
        // two of them share has a gradient on both.
        let gradient = if replicas > 1 { sums.take_local(ids, context)? } else { sums.take(ids, context)? };
        let gradient = surface.kept(gradient)?;
        squares += surface.norm(&gradient)?.powi(2);
        count += 1;
        match &mut total {
            None => total = Some(gradient),
            Some(total) => add_direction(total, 1.0, &gradient)?,
        }
    }
    let all = context.ranks.data().all_reduce(vec![squares, count as f64], Reduce::Sum)?;
    let (squares, count) = (all[0], all[1] as usize);
    if count < 2 {
        let problem = format!(
            "is {}, and noise is measured between micro-batches of {size}: it must be {} or more",
            surface.samples(),
            2 * size
        );
        return Err(espalier_plan::Error::Conflict { field: "samples".into(), problem }.into());
    }
    let mut mean = match total {
        Some(total) => total,
        None => GradientSums::of(ids).take_local(ids, context)?,
    };
    if replicas > 1 {
        let reduced = ids.iter().zip(mean).map(|(id, local)| all_reduce_gradient(context, *id, local));
        mean = reduced.collect::<Result<Vec<_>>>()?;
    }
    scale(&mut mean, 1.0 / count as f64)?;
    let (small, large) = (size as f64, (size * count) as f64);
    let (signal, variance) =
        NoiseScale::split(small, squares / count as f64, large, surface.norm(&mean)?.powi(2));
    Ok(GradientNoise { signal, variance: surface.finite("the variance of gradients", variance)? })
}
