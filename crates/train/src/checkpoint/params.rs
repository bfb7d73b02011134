//! Parameters as checkpoints hold them: weights in the shards that a rank has, running statistics, and the optimizer's state as
//! `master/NAME` and `moment0/NAME`, all of it or what this rank has of its shard.

use espalier_plan::Shard;

use super::tensors::tensor_is_finite;
use super::{MODEL, OPTIMIZER, Room, Saved, Stored, Wanted};
use crate::Result;
use crate::state::{Param, ParamRooms, ParamStore, WeightRoom};

/// The weights and statistics that are here, to be saved.
pub(crate) fn saved_weights(params: &ParamStore) -> Saved<'_> {
    let weights = params.iter().map(|(_, param)| (param.plan.name.clone(), Stored::weight_of(param)));
    let statistics = params
        .statistics()
        .filter_map(|(id, tensor)| Some((params.statistic_name(id).to_owned(), Stored::Tensor(tensor?))));
    weights.chain(statistics).collect()
}

/// Room for the same, to be filled from a checkpoint.
pub(crate) fn wanted_weights(params: &mut ParamStore) -> Result<Wanted<'_>> {
    let [weights, _] = wanted(params, 0)?;
    Ok(weights)
}

/// Room for weights, statistics and the optimizer's state, to be filled from a checkpoint that has so many tensors of state for each
/// parameter.
pub(crate) fn wanted(params: &mut ParamStore, state_tensors: usize) -> Result<[Wanted<'_>; 2]> {
    let (all, missing) = (params.len() + params.statistics().len(), params.len() - params.iter().count());
    let described: Vec<_> = params
        .iter()
        .map(|(_, param)| {
            (param.plan.name.clone(), param.plan.shard.clone(), labels(param), state_shard(param))
        })
        .collect();
    let here = params.statistics().filter(|(_, tensor)| tensor.is_some()).map(|(id, _)| id);
    let names: Vec<String> = here.map(|id| params.statistic_name(id).to_owned()).collect();
    let (mut weights, mut state) = (Vec::new(), Vec::new());
    let (tensors, statistics) = params.rooms()?;
    for (rooms, (name, shard, labels, state_shard)) in tensors.into_iter().zip(described) {
        let ParamRooms { weight, state: of_state } = rooms;
        let weight = match weight {
            WeightRoom::Dense(weight) => Room::of(weight, &shard),
            WeightRoom::Compressed(kept, mask) => Room::Compressed(kept, mask, shard),
        };
        weights.push((name, weight));
        let room = |tensor| match state_shard.clone() {
            None => Room::Tensor(tensor),
            Some(shard) => Room::Shard(tensor, shard),
        };
        state.extend(labels.into_iter().zip(of_state.into_iter().map(room)));
    }
    weights.extend(names.into_iter().zip(statistics.into_iter().map(Room::Tensor)));
    let elsewhere = all - weights.len();
    Ok([
        Wanted { file: MODEL, tensors: weights, elsewhere, converts: false },
        // A run that may go on with moments of another type takes those that are there; masters are never of two float types.
        Wanted { file: OPTIMIZER, tensors: state, elsewhere: missing * state_tensors, converts: true },
    ])
}

/// The optimizer's state that is here, to be saved.
pub(crate) fn saved_state(params: &ParamStore) -> Saved<'_> {
    // Parts of the same shard that another group splits too are written by the first of them.
    let written = |param: &&Param| param.plan.zero.is_single() || param.plan.is_first_copy;
    let state = params.iter().map(|(_, param)| param).filter(written).flat_map(|param| {
        let shard = state_shard(param);
        let stored = move |(label, tensor)| match shard.clone() {
            None => (label, Stored::Tensor(tensor)),
            Some(shard) => (label, Stored::Shard(tensor, shard)),
        };
        labels(param).into_iter().zip(param.state()).map(stored)
    });
    state.collect()
}

/// The names of the tensors of a parameter's state, the master first.
fn labels(param: &Param) -> Vec<String> {
    let name = &param.plan.name;
    let moments = (0..param.moments.len()).map(|i| format!("moment{i}/{name}"));
    param.master.iter().map(|_| format!("master/{name}")).chain(moments).collect()
}

/// Where what is here of a parameter's state belongs, if that is not all of it.
fn state_shard(param: &Param) -> Option<Shard> {
    let (shard, zero) = (&param.plan.shard, param.plan.zero);
    let shard = match (shard.is_full(), param.compressing_mask().is_some()) {
        (true, _) => Shard::full(&param.state_shape()),
        (false, false) => shard.clone(),
        (false, true) => shard.clone().kept_by(&param.plan.name),
    };
    match zero.is_single() {
        true => (!shard.is_full()).then_some(shard),
        false => Some(shard.starting_at(zero.split(param.state_len()).start)),
    }
}

/// The first weight or statistic here that has a NaN or an infinity.
pub(crate) fn first_not_finite(params: &ParamStore) -> Result<Option<String>> {
    for (name, tensor) in params.named() {
        if !tensor_is_finite(tensor)? {
            return Ok(Some(name.to_owned()));
        }
    }
    Ok(None)
}
