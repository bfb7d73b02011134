//! New masks for parameters that have optimizer state.

use espalier_comm::Communicator;
use espalier_nn::weights::ParameterId;
use espalier_tensor::mask::ones;
use espalier_tensor::ops::compress::{apply, compress, expand};
use espalier_tensor::ops::flat;
use espalier_tensor::{Category, DType, Mask, Tensor, bf16};

use crate::Result;
use crate::parallel::model::ModelParallel;
use crate::shard_gather::join;
use crate::state::Param;

/// Puts a parameter's state under a mask that replaces an older one: what is no longer kept is let go, and what
/// comes back starts at zero. One tensor at a time, so that there is never a second copy of the state. Those that
/// share what is here of the parameter are the `group`; all that hold shards of it must call.
///
/// But for the mean square that Adam divides by. Late in a run nothing corrects its start any more: from zero
/// it would be `(1 - beta2) g^2` after the first step and the weight would move by
/// `(1 - beta1) / sqrt(1 - beta2)`, three times the rate, and up to seven times in the steps after it, all
/// grown weights at once. It starts at the mean over the parameter's weights that stay, so that a grown
/// weight moves as they do while its mean gradient builds up.
pub(super) fn set_state_mask(
    param: &mut Param,
    new: &Mask,
    compresses: bool,
    group: Option<&Communicator>,
    model_parallel: &ModelParallel,
) -> Result<()> {
    let (id, zero, before) = (param.id(), param.plan.zero, param.state_len());
    let old = param.mask().cloned();
    let mean_square = (param.moments.len() == 2).then(|| param.master.iter().len() + 1);
    for (i, state) in param.state_mut().enumerate() {
        let warm = old.as_ref().filter(|_| mean_square == Some(i));
        if !compresses {
            apply(state, new)?;
            if let Some(old) = warm {
                warm_up(state, old, new, |index, _| index, (id, model_parallel))?;
            }
            continue;
        }
        let full = match group.filter(|_| !zero.is_single()) {
            Some(group) => join(state, before, group)?,
            None => state.clone(),
        };
        let dense = match &old {
            Some(old) => expand(&full, old, &[old.len()], Category::Workspace)?,
            None => full.clone(),
        };
        let mut kept = compress(&dense, new, Category::Workspace)?;
        drop((full, dense));
        if let Some(old) = warm {
            warm_up(&mut kept, old, new, |_, nth| nth, (id, model_parallel))?;
        }
        if !zero.is_single() {
            kept = flat::take(&kept, zero.split(kept.len()), Category::Workspace)?;
        }
        // Workspace until it replaces the old one.
        *state = kept;
        state.tag_memory(Category::Optimizer);
    }
    Ok(())
}

/// Gives the weights that a new mask has grown the mean of those that stay. `at` says where a weight's number
/// is, from its index in the parameter and its number among the kept ones. On the host, where masks are
/// chosen: sums are in the order of indices, so that dense and compressed state agree in every bit; the mean
/// is over all of a parameter that is split.
fn warm_up(
    state: &mut Tensor,
    old: &Mask,
    new: &Mask,
    at: impl Fn(usize, usize) -> usize,
    (id, model_parallel): (ParameterId, &ModelParallel),
) -> Result<()> {
    let (old, new) = (old.read_words()?, new.read_words()?);
    let stays = |index: usize| old[index / 32] >> (index % 32) & 1 == 1;
    let kept: Vec<(usize, bool)> =
        ones(&new).enumerate().map(|(nth, index)| (at(index, nth), stays(index))).collect();
    let staying = kept.iter().filter(|(_, stays)| *stays).count();
    if !model_parallel.is_split(id) && (staying == kept.len() || staying == 0) {
        return Ok(());
    }
    let mut values = state.copy_to_host()?;
    let sum: f64 = kept.iter().filter(|(_, stays)| *stays).map(|(at, _)| f64::from(values[*at])).sum();
    let totals = model_parallel.total(id, vec![sum, staying as f64])?;
    if totals[1] == 0.0 {
        return Ok(());
    }
    let mean = (totals[0] / totals[1]) as f32;
    kept.iter().filter(|(_, stays)| !stays).for_each(|(at, _)| values[*at] = mean);
    let bytes: Vec<u8> = match state.dtype() {
        DType::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        _ => values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
    };
    Ok(state.copy_from_host(&bytes)?)
}
