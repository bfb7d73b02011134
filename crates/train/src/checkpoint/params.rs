//! Parameters as checkpoints hold them: weights in the shards that a rank has, running statistics, and the
//! optimizer's state as `master/NAME` and `moment0/NAME`, all of it or what this rank has of its shard. Weights
//! are dense there, whatever their form at rest: a rank that has a shard of the kept values writes the range of
//! the dense weight that they lie in.

use espalier_plan::Shard;

use super::safetensors_file::tensor_is_finite;
use super::{CheckpointTensor, LoadRequest, LoadTarget, MODEL, NamedTensors, OPTIMIZER};
use crate::Result;
use crate::state::{Param, ParamStore, ParamTargets, WeightTarget};

/// The weights and statistics that are here, to be saved.
pub(crate) fn weights_to_save(params: &ParamStore) -> Result<NamedTensors<'_>> {
    // Shards that another group has too are written by the first of them.
    let written = |(_, param): &(_, &Param)| !param.is_weight_sharded() || param.plan.is_first_copy;
    let weights = params
        .iter()
        .filter(written)
        .map(|(_, param)| Ok((param.plan.name.clone(), CheckpointTensor::weight_of(param)?)));
    let statistics = params.statistics().filter_map(|(id, tensor)| {
        Some(Ok((params.statistic_name(id).to_owned(), CheckpointTensor::Tensor(tensor?))))
    });
    weights.chain(statistics).collect()
}

/// Load targets for the same, to be filled from a checkpoint.
pub(crate) fn weights_load_request(params: &mut ParamStore) -> Result<LoadRequest<'_>> {
    let [weights, _] = load_requests(params, 0)?;
    Ok(weights)
}

/// Load targets for weights, statistics and the optimizer's state, to be filled from a checkpoint that has so
/// many tensors of state for each parameter.
pub(crate) fn load_requests(params: &mut ParamStore, state_tensors: usize) -> Result<[LoadRequest<'_>; 2]> {
    let (all, missing) = (params.len() + params.statistics().len(), params.len() - params.iter().count());
    let described: Vec<_> = params
        .iter()
        .map(|(_, param)| {
            let range = param.weight_range()?;
            Ok((param.plan.name.clone(), param.plan.shard.clone(), range, labels(param), state_shard(param)))
        })
        .collect::<Result<_>>()?;
    let here = params.statistics().filter(|(_, tensor)| tensor.is_some()).map(|(id, _)| id);
    let names: Vec<String> = here.map(|id| params.statistic_name(id).to_owned()).collect();
    let (mut weights, mut state) = (Vec::new(), Vec::new());
    let (tensors, statistics) = params.load_targets()?;
    for (targets, (name, shard, range, labels, state_shard)) in tensors.into_iter().zip(described) {
        let ParamTargets { weight, state: of_state } = targets;
        let weight = match weight {
            WeightTarget::Dense(weight) => LoadTarget::of(weight, shard),
            WeightTarget::Compressed(tensor, mask) => {
                LoadTarget { tensor, shard, range: 0..mask.len(), mask: Some(mask) }
            }
            WeightTarget::Sharded(tensor, mask) => {
                let range = range.expect("a shard of a weight has a range");
                LoadTarget { tensor, shard: shard.starting_at(range.start), range, mask }
            }
        };
        weights.push((name, weight));
        let target = |tensor| match state_shard.clone() {
            None => LoadTarget::full(tensor),
            Some(shard) => LoadTarget::of(tensor, shard),
        };
        state.extend(labels.into_iter().zip(of_state.into_iter().map(target)));
    }
    weights.extend(names.into_iter().zip(statistics.into_iter().map(LoadTarget::full)));
    let elsewhere = all - weights.len();
    Ok([
        LoadRequest { file: MODEL, tensors: weights, elsewhere, converts: false },
        // A run that may go on with moments of another type takes those that are there; masters are never of
        // two float types.
        LoadRequest { file: OPTIMIZER, tensors: state, elsewhere: missing * state_tensors, converts: true },
    ])
}

/// The optimizer's state that is here, to be saved.
pub(crate) fn state_to_save(params: &ParamStore) -> NamedTensors<'_> {
    // Ranges of the same shard that another group splits too are written by the first of them.
    let written = |param: &&Param| param.plan.zero.is_single() || param.plan.is_first_copy;
    let state = params.iter().map(|(_, param)| param).filter(written).flat_map(|param| {
        let shard = state_shard(param);
        let stored = move |(label, tensor)| match shard.clone() {
            None => (label, CheckpointTensor::Tensor(tensor)),
            Some(shard) => (label, CheckpointTensor::Shard(tensor, shard)),
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
