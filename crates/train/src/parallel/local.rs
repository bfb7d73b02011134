//! Local SGD (Stich 2019): ranks along the data axis step by themselves, and every so many steps their weights are
//! averaged. What is pruned is zero on all of them, so only kept values travel.
//!
//! Momentum and moments are averaged with the weights (Yu, Jin & Yang 2019): after it all ranks are the same again, so a
//! checkpoint is that of one of them, and averaging after every step is synchronous SGD, with momentum or without.

use espalier_comm::{Communicator, Reduce};
use espalier_nn::weights::{ParameterId, Weights};
use espalier_plan::Traffic;
use espalier_plan::packets::packets;
use espalier_plan::schedule::Action;
use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::compress::{compress, expand_into};
use espalier_tensor::ops::elementwise::scale_into;
use espalier_tensor::ops::flat;
use espalier_tensor::{Category, DType, Tensor};

use crate::Result;
use crate::checkpoint::Progress;
use crate::context::Context;
use crate::state::{Masks, Optimizer};
use crate::step::Worker;

/// Runs [`Action::Average`]: ranks that have gone apart come together.
pub(crate) struct Averaging<'a> {
    pub context: &'a Context,
    pub traffic: &'a Traffic,
    pub weights: &'a mut Weights,
    pub masks: &'a Masks,
    /// None before the first step.
    pub optimizer: Option<&'a mut Optimizer>,
    pub progress: &'a mut Progress,
    /// Whether this rank is asked to stop, and then whether any is.
    pub stop: &'a mut bool,
}

impl Worker for Averaging<'_> {
    fn bytes(&self, action: &Action) -> u64 {
        self.traffic.bytes(action)
    }

    fn act(&mut self, action: Action) -> Result<()> {
        debug_assert_eq!(action, Action::Average);
        let Context { ranks, groups, .. } = self.context;
        if let Some(optimizer) = &mut self.optimizer {
            average(self.weights, self.masks, optimizer, ranks.data())?;
        }
        groups.average_statistics(self.weights)?;
        // One that skipped a step has counted it alone.
        let Progress { updates, bad_steps, .. } = *self.progress;
        let all = ranks.largest(vec![updates, bad_steps, u64::from(*self.stop)])?;
        (self.progress.updates, self.progress.bad_steps, *self.stop) = (all[0], all[1], all[2] > 0);
        Ok(())
    }
}

/// A vector that is averaged.
#[derive(Debug, Clone, Copy)]
enum Of {
    /// A parameter's kept weights, which are exact.
    Weight(ParameterId),
    /// One of the tensors of its state.
    State(ParameterId, usize),
}

/// Makes weights and state the mean over the ranks of a group, in the same bits on all.
fn average(
    weights: &mut Weights,
    masks: &Masks,
    optimizer: &mut Optimizer,
    group: &Communicator,
) -> Result<()> {
    let Some(first) = weights.ids().next() else { return Ok(()) };
    let (device, mut vectors) = (weights.get(first).device(), Vec::new());
    for id in weights.ids() {
        let weight = weights.get(id);
        if weight.dtype() == DType::F32 {
            let length = masks.compressing(id).map_or(weight.len(), |mask| mask.kept());
            vectors.push((Of::Weight(id), length));
        }
        vectors
            .extend(optimizer.state(id).iter().enumerate().map(|(i, state)| (Of::State(id, i), state.len())));
    }
    // All of them are f32: in bf16 the exact weights are the masters.
    let bytes: Vec<u64> = vectors.iter().map(|(_, length)| 4 * *length as u64).collect();
    for packet in packets(&bytes) {
        let packet: Vec<(Of, usize)> = packet.into_iter().map(|i| vectors[i]).collect();
        let length = packet.iter().map(|(_, length)| length).sum();
        let mut message = Tensor::empty(&device, &[length], DType::F32, Category::Communication)?;
        let mut start = 0;
        for (of, length) in &packet {
            match *of {
                Of::Weight(id) => match masks.compressing(id) {
                    Some(mask) => {
                        let kept = compress(weights.get(id), mask, Category::Workspace)?;
                        flat::put(&mut message, start, &kept, 0..*length)?;
                    }
                    None => flat::put(&mut message, start, weights.get(id), 0..*length)?,
                },
                Of::State(id, i) => flat::put(&mut message, start, optimizer.state(id)[i], 0..*length)?,
            }
            start += length;
        }
        let mut mean = group.all_reduce(message, Reduce::Sum)?;
        scale_into(&mut mean, 1.0 / group.size() as f32)?;
        let mut start = 0;
        for (of, length) in packet {
            let at = start..start + length;
            start = at.end;
            match of {
                Of::Weight(id) => match masks.compressing(id) {
                    Some(mask) => {
                        let kept = flat::take(&mean, at, Category::Workspace)?;
                        expand_into(&kept, mask, weights.get_mut(id))?;
                    }
                    None => flat::put(weights.get_mut(id), 0, &mean, at)?,
                },
                Of::State(id, i) => flat::put(optimizer.state_mut(id).swap_remove(i), 0, &mean, at)?,
            }
        }
    }
    round_masters(weights, masks, optimizer)
}

/// Where weights are the roundings of masters, makes them those of the new ones.
fn round_masters(weights: &mut Weights, masks: &Masks, optimizer: &Optimizer) -> Result<()> {
    let held = weights.all_mut().filter_map(|(id, weight)| Some((id, weight?)));
    for (id, weight) in held.filter(|(_, weight)| weight.dtype() != DType::F32) {
        let master = optimizer.state(id)[0];
        let rounded = cast(master, weight.dtype(), Category::Workspace)?;
        match masks.compressing(id) {
            Some(mask) => expand_into(&rounded, mask, weight)?,
            None => flat::put(weight, 0, &rounded, 0..rounded.len())?,
        }
    }
    Ok(())
}
