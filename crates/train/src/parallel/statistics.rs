//! Running statistics of batch norms whose batches several ranks have measured, as one rank would fold them.
//!
//! Folding is linear. With momentum a and k = 1 - a, the statistics s(0) .. s(n - 1) of a step, folded one
//! after the other, make of a running value r
//!
//! ```text
//! k^n r + a sum over i of k^(n - 1 - i) s(i)
//! ```
//!
//! So each rank weighs its own by their positions in that order, the results are all-reduced, and the message
//! is no longer than the statistics themselves.

use std::collections::HashMap;

use espalier_nn::layers::BatchStatistics;
use espalier_nn::weights::{BufferId, WeightStore};
use espalier_tensor::ops::batch_norm::MOMENTUM;
use espalier_tensor::ops::elementwise::{add_into, scale_into};
use espalier_tensor::ops::flat;
use espalier_tensor::{Category, Tensor};

use super::reduce_groups::ReduceGroups;
use crate::Result;
use crate::state::ParamStore;

/// Folds what all ranks have measured, `count` batches of each norm: this rank's own, with their positions
/// in the order of all. `factor` is one over how many ranks measure each position. All ranks of the groups must.
pub(crate) fn fold_together(
    local: &[(usize, BatchStatistics)],
    count: usize,
    factor: f32,
    groups: &ReduceGroups,
    params: &mut ParamStore,
) -> Result<()> {
    let decay = |times: usize| (1.0 - f64::from(MOMENTUM)).powi(times as i32) as f32;
    let shared: Vec<BufferId> = groups.shared_statistics().collect();
    let mut before: Vec<Tensor> = Vec::new();
    for id in &shared {
        let buffer = params.buffer(*id);
        before.push(flat::take(buffer, 0..buffer.len(), Category::Workspace)?);
        scale_into(params.buffer_mut(*id), 0.0)?;
    }
    // The position after the last that each norm has folded.
    let mut next: HashMap<BufferId, usize> = HashMap::new();
    for (position, measured) in local {
        let at = next.entry(measured.mean_id).or_insert(*position);
        for id in [measured.mean_id, measured.variance_id] {
            scale_into(params.buffer_mut(id), decay(position - *at))?;
        }
        measured.fold_into(params.buffers_mut([measured.mean_id, measured.variance_id]))?;
        *at = position + 1;
    }
    let ends = local.iter().flat_map(|(_, one)| [(one.mean_id, one.mean_id), (one.variance_id, one.mean_id)]);
    let ends: HashMap<BufferId, usize> = ends.map(|(id, norm)| (id, next[&norm])).collect();
    for (id, end) in ends {
        scale_into(params.buffer_mut(id), decay(count - end))?;
    }
    groups.all_reduce_statistics(params, |_| factor)?;
    for (id, mut old) in shared.into_iter().zip(before) {
        scale_into(&mut old, decay(count))?;
        add_into(params.buffer_mut(id), &old)?;
    }
    Ok(())
}
