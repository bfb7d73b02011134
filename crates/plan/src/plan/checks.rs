//! What in a run does not fit its model or itself, and can be known only once the model is there.

use crate::batch::BatchSizes;
use crate::data_parallel::DataParallelMode;
use crate::error::Error;
use crate::intervals::RunLength;
use crate::pipeline::PipelinePlan;
use crate::pruning::{PruneMethod, Pruning, TicketForm};
use crate::rounds::Rounds;
use crate::schedule::Schedule;
use crate::spec::{ModelSpec, Parameter, RecomputeMode};
use crate::stages::StageBlocks;

/// A weight on two stages of an asynchronous pipeline would have two values.
pub(super) fn ties(
    pipeline: &PipelinePlan,
    model: &ModelSpec,
    stage_blocks: &StageBlocks,
) -> Result<(), Error> {
    if !pipeline.is_asynchronous() {
        return Ok(());
    }
    let (mut seen, tensors) = (vec![0; model.parameters().len()], model.block_tensors());
    let used = stage_blocks.iter().flat_map(|part| tensors.parameters(part.clone()));
    used.for_each(|id| seen[id] += 1);
    let Some(twice) = seen.iter().position(|uses| *uses > 1) else { return Ok(()) };
    let problem = format!(
        "ties {} to two stages, which \"{}\" updates at different times: set `model.tied` to false",
        model.parameters()[twice].name,
        pipeline.order.name()
    );
    Err(Error::conflict("model", problem))
}

/// Copies of a stage make gradients of other micro-batches, at other times: no two of them belong together
/// before the last.
pub(super) fn scattering(data_parallel: DataParallelMode, schedule: &Schedule) -> Result<(), Error> {
    let DataParallelMode::Sharded(stage) = data_parallel else { return Ok(()) };
    if !data_parallel.scatters_gradients() || schedule.placement.copies() == 1 {
        return Ok(());
    }
    let problem = format!(
        "is {}, but with the schedule \"{}\" several ranks hold replicas of a stage, whose gradients are reduced after the last \
         micro-batch: use 1",
        stage.number(),
        schedule.name
    );
    Err(Error::conflict("parallel.zero", problem))
}

/// Settings of batch norms need batch norms.
pub(super) fn norms(batch: &BatchSizes, model: &ModelSpec) -> Result<(), Error> {
    let set = [
        ("parallel.batch_norm", batch.synchronises_norms()),
        ("train.batch_norm_group", batch.norm_group.is_some()),
    ];
    match set.into_iter().find(|(_, set)| *set) {
        Some((field, _)) if model.buffers().is_empty() => {
            let why = format!("with `model.name` = \"{}\", which has no batch norm", model.name);
            Err(Error::no_effect(field, why))
        }
        _ => Ok(()),
    }
}

/// Attention's inside is made again where there is attention, and as many blocks as there are before the last.
pub(super) fn recompute(recompute: RecomputeMode, model: &ModelSpec) -> Result<(), Error> {
    let field = || "train.recompute".to_owned();
    match (recompute, model.blocks.len().saturating_sub(1)) {
        (RecomputeMode::Attention, _) if !model.attends() => {
            let why = format!("as \"attention\" with `model.name` = \"{}\", which has none", model.name);
            Err(Error::no_effect(field(), why))
        }
        (RecomputeMode::Blocks(number), most) if number > most => {
            let problem = format!(
                "is {number}, and the model {} has {most} blocks before its last: \"block\" recomputes them all",
                model.name
            );
            Err(Error::conflict(field(), problem))
        }
        _ => Ok(()),
    }
}

/// What a pruning method needs of the model and of the length of the run.
pub(super) fn pruning(
    prune: &Pruning,
    model: &ModelSpec,
    parameters: &[Parameter],
    length: RunLength,
) -> Result<(), Error> {
    for part in &prune.exclude {
        if !parameters.iter().any(|parameter| parameter.name.contains(part.as_str())) {
            let why = format!("for \"{part}\", which is in no name of {}'s parameters", model.name);
            return Err(Error::no_effect("prune.exclude", why));
        }
    }
    if !parameters.iter().any(|parameter| prune.covers(parameter)) {
        let problem =
            format!("is \"{}\", but nothing of {} is left to prune", prune.method.name(), model.name);
        let hint = match prune.exclude.is_empty() {
            true => ": it has no weight of two dimensions but embeddings",
            false => ": see `prune.exclude`",
        };
        return Err(Error::conflict("prune.method", problem + hint));
    }
    if let PruneMethod::Wanda { .. } = prune.method {
        let read = model.observed_weights();
        if let Some(other) = parameters.iter().find(|one| prune.covers(one) && !read.contains(&one.name)) {
            let problem = format!(
                "is \"wanda\", which needs the inputs of linear layers, and {} is not the weight of one: exclude it with \
                 `prune.exclude`",
                other.name
            );
            return Err(Error::conflict("prune.method", problem));
        }
    }
    if let PruneMethod::EarlyBird { form: TicketForm::Channels, .. } = prune.method
        && !model.scaled_channels().iter().any(|channels| prune.covers_channels(channels))
    {
        let problem = format!(
            "is \"channels\", but the model {} has no prunable convolution followed by a batch norm: use \"weights\"",
            model.name
        );
        return Err(Error::conflict("prune.form", problem));
    }
    // How many steps an epoch has, only the data knows.
    let RunLength::Steps(steps) = length else { return Ok(()) };
    prune.method.check_length(steps)?;
    Rounds::of(model, prune).map_or(Ok(()), |rounds| rounds.trainings(length, steps).map(|_| ()))
}
