//! A trained model on several ranks, to generate text.

use std::time::Duration;

use espalier_plan::Plan;
use espalier_tensor::Device;

use super::TrainedModel;
use crate::Result;
use crate::infer::Generator;
use crate::parallel::{AbortFn, Ranks, on_threads_with_timeout};
use crate::stage::Stage;

/// Opens a trained model on the ranks of a plan, and does some work on each of them; what rank 0 returns is
/// returned. A rank waits at most `limit` for another; one that hangs is the end where there is somebody to
/// `abort`.
pub fn on_ranks<R: Send>(
    trained: &TrainedModel,
    plan: &Plan,
    device: &Device,
    limit: Duration,
    abort: Option<AbortFn>,
    work: impl Fn(&mut Generator<'_>) -> Result<R> + Sync,
) -> Result<R> {
    let rank = |ranks: Ranks, device: &Device| {
        let params = trained.params(plan, device, &ranks)?;
        let stage = Stage::new(plan, &ranks)?;
        work(&mut Generator::new(plan, &stage, &params, &ranks, device)?)
    };
    if plan.mesh.size() == 1 {
        return device.enter(|| rank(Ranks::single(), device));
    }
    let all = on_threads_with_timeout(limit, abort, &plan.mesh, device, rank)?;
    Ok(all.into_iter().next().expect("there is a rank 0"))
}
