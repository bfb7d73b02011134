//! Local SGD (Stich 2019): ranks along the data axis step by themselves, and every so many steps their weights are
//! averaged. What is pruned is zero on all of them, so only kept values travel.
//!
//! Momentum and moments are averaged with the weights (Yu, Jin & Yang 2019): after it all ranks are the same
//! again, so a checkpoint is that of one of them, and averaging after every step is synchronous SGD, with
//! momentum or without.

use espalier_comm::{Communicator, Reduce};
use espalier_nn::weights::ParameterId;
use espalier_plan::packets::packets;
use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::elementwise::scale_into;
use espalier_tensor::ops::flat;
use espalier_tensor::{Category, DType, Tensor};

use crate::Result;
use crate::state::ParamStore;

/// A vector that is averaged.
#[derive(Debug, Clone, Copy)]
enum AveragedVector {
    /// A parameter's kept weights, which are exact.
    Weight(ParameterId),
    /// One of the tensors of its state.
    State(ParameterId, usize),
}

/// Makes weights and state the mean over the ranks of a group, in the same bits on all.
pub(crate) fn average(params: &mut ParamStore, group: &Communicator) -> Result<()> {
    let Some((_, first)) = params.iter().next() else { return Ok(()) };
    let (device, mut vectors) = (first.device(), Vec::new());
    for (id, param) in params.iter() {
        if param.dtype() == DType::F32 {
            vectors.push((AveragedVector::Weight(id), param.state_len()));
        }
        vectors
            .extend(param.state().enumerate().map(|(i, state)| (AveragedVector::State(id, i), state.len())));
    }
    // All of them travel as f32: where weights are bf16 the exact ones are the masters, and a mean of moments
    // in bf16 is rounded once, to the nearest, since nothing is added to it bit by bit.
    let bytes: Vec<u64> = vectors.iter().map(|(_, length)| 4 * *length as u64).collect();
    for packet in packets(&bytes) {
        let packet: Vec<(AveragedVector, usize)> = packet.into_iter().map(|i| vectors[i]).collect();
        let length = packet.iter().map(|(_, length)| length).sum();
        let mut message = Tensor::empty(&device, &[length], DType::F32, Category::Communication)?;
        let mut start = 0;
        for (vector, length) in &packet {
            match *vector {
                AveragedVector::Weight(id) => {
                    flat::put(&mut message, start, &params.param(id).values()?, 0..*length)?
                }
                AveragedVector::State(id, i) => {
                    let state = params.param(id).state().nth(i).expect("listed above");
                    match state.dtype() {
                        DType::F32 => flat::put(&mut message, start, state, 0..*length)?,
                        _ => {
                            let wide = cast(state, DType::F32, Category::Workspace)?;
                            flat::put(&mut message, start, &wide, 0..*length)?;
                        }
                    }
                }
            }
            start += length;
        }
        let mut mean = group.all_reduce(message, Reduce::Sum)?;
        scale_into(&mut mean, 1.0 / group.size() as f32)?;
        let mut start = 0;
        for (vector, length) in packet {
            let at = start..start + length;
            start = at.end;
            match vector {
                AveragedVector::Weight(id) => {
                    params.param_mut(id).set_values(&flat::take(&mean, at, Category::Workspace)?)?;
                }
                AveragedVector::State(id, i) => {
                    let state = params.param_mut(id).state_mut().nth(i).expect("listed above");
                    match state.dtype() {
                        DType::F32 => flat::put(state, 0, &mean, at)?,
                        dtype => {
                            let mean = flat::take(&mean, at, Category::Workspace)?;
                            let rounded = cast(&mean, dtype, Category::Workspace)?;
                            flat::put(state, 0, &rounded, 0..length)?;
                        }
                    }
                }
            }
        }
    }
    round_masters(params)
}

/// Where weights are the roundings of masters, makes them those of the new ones.
fn round_masters(params: &mut ParamStore) -> Result<()> {
    for (_, param) in params.iter_mut() {
        let dtype = param.dtype();
        if dtype != DType::F32 {
            let master = param.state().next().expect("a rounded weight has a master");
            let rounded = cast(master, dtype, Category::Workspace)?;
            param.set_values(&rounded)?;
        }
    }
    Ok(())
}
