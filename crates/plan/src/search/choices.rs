//! All the ways in which a run can be laid out on so many devices.

use super::Search;
use crate::error::Error;
use crate::schedule::Name;
use crate::simulate::Candidate;
use crate::spec::{Input, Layer, Recompute};

/// Micro-batches larger than this gain nothing.
const LARGEST_MICRO_BATCH: usize = 256;
/// Tensor ranks beyond a few nodes gain nothing.
const MOST_TENSOR_NODES: usize = 2;
/// Parts of the model on a rank.
const CHUNKS: [usize; 4] = [2, 3, 4, 6];

/// Every candidate that the run, the engine and what is fixed allow.
pub(super) fn candidates(search: &Search) -> Result<Vec<Candidate>, Error> {
    let (job, fixed) = (search.job, search.fixed);
    let (plan, engine) = (job.plan, &job.engine);
    let (devices, batch) = (search.devices, plan.batch.samples);
    let blocks = plan.model.blocks.len();
    let most_tensor = if engine.tensor { MOST_TENSOR_NODES * job.cluster.node.devices } else { 1 };
    let is_image = matches!(plan.model.input, Input::Image { .. });
    let mut all = Vec::new();
    for pipeline in divisors(devices).filter(|stages| fixed.allows(fixed.pipeline, *stages)) {
        let has_pipeline = pipeline == 1 || pipeline <= blocks && !engine.schedules.is_empty();
        if !has_pipeline && fixed.pipeline.is_none() {
            continue;
        }
        for tensor in divisors(devices / pipeline).filter(|ranks| fixed.allows(fixed.tensor, *ranks)) {
            if tensor > most_tensor && fixed.tensor.is_none() {
                continue;
            }
            for grid in grids(devices / pipeline / tensor, is_image && engine.is_ours()) {
                if !fixed.allows(fixed.grid, grid) {
                    continue;
                }
                let data = devices / (pipeline * tensor * grid[0] * grid[1]);
                if !fixed.allows(fixed.data, data) || !batch.is_multiple_of(data) {
                    continue;
                }
                let mesh = Candidate { data, pipeline, tensor, grid, ..Candidate::alone(1) };
                variants(search, mesh, batch / data, &mut all);
            }
        }
    }
    if all.is_empty() {
        return Err(none(search));
    }
    Ok(all)
}

/// All that can be chosen on a mesh.
fn variants(search: &Search, mesh: Candidate, samples: usize, all: &mut Vec<Candidate>) {
    let (fixed, engine, plan) = (search.fixed, &search.job.engine, search.job.plan);
    let compressed = match (fixed.compressed, &plan.pruning) {
        (Some(chosen), _) => chosen,
        (None, Some(_)) => plan.storage.compressed && engine.compresses(),
        (None, None) => false,
    };
    let has_attention = has_attention(search);
    let sequences: &[bool] = if mesh.tensor > 1 && has_attention { &[false, true] } else { &[false] };
    let zeros: &[u8] = match (engine.gathers_weights, mesh.data > 1 && engine.is_ours()) {
        (true, _) => &[3],
        // Gradients that are scattered with every micro-batch save little beside compressed state: only where a person asks.
        (false, true) if fixed.zero == Some(2) => &[2],
        (false, true) => &[0, 1],
        (false, false) => &[0],
    };
    let micro_batches = divisors(samples).filter(|size| match fixed.micro_batch {
        Some(chosen) => *size == chosen,
        None => *size <= LARGEST_MICRO_BATCH,
    });
    for micro_batch in micro_batches {
        for &recompute in engine.recomputes {
            let useless = recompute == Recompute::Attention && !has_attention;
            if useless || !fixed.allows(fixed.recompute, recompute) {
                continue;
            }
            for &sequence in sequences.iter().filter(|chosen| fixed.allows(fixed.sequence, **chosen)) {
                for &zero in zeros.iter().filter(|chosen| fixed.allows(fixed.zero, **chosen)) {
                    for (schedule, chunks) in orders(search, &mesh, samples / micro_batch) {
                        let base = Candidate { micro_batch, recompute, sequence, zero, compressed, ..mesh };
                        all.push(Candidate { schedule, chunks, ..base });
                    }
                }
            }
        }
    }
}

/// The orders in which the stages of a mesh can work.
fn orders(search: &Search, mesh: &Candidate, micro_batches: usize) -> Vec<(Name, Option<usize>)> {
    let fixed = search.fixed;
    if mesh.pipeline == 1 {
        return vec![(Name::OneFOneB, None)];
    }
    let blocks = search.job.plan.model.blocks.len();
    let mut all = Vec::new();
    let chosen = |name: &&Name| fixed.allows(fixed.schedule, **name);
    let offered = search.job.engine.schedules.iter();
    // What a person names may be one that is not searched.
    let named = fixed.schedule.iter().filter(|name| !search.job.engine.schedules.contains(name));
    for &name in offered.chain(named).filter(chosen) {
        match name {
            Name::Interleaved => {
                let round = micro_batches.is_multiple_of(mesh.pipeline);
                let fits = |chunks: &usize| round && mesh.pipeline * chunks <= blocks;
                let wanted = fixed.chunks.map_or(CHUNKS.to_vec(), |chunks| vec![chunks]);
                all.extend(wanted.into_iter().filter(fits).map(|chunks| (name, Some(chunks))));
            }
            _ if fixed.chunks.is_none() => all.push((name, None)),
            _ => {}
        }
    }
    all
}

fn has_attention(search: &Search) -> bool {
    let mut found = false;
    search.job.plan.model.for_each(&mut |layer| found |= matches!(layer, Layer::Attention(_)));
    found
}

/// Grids of ranks over images: by rows, and square ones.
fn grids(ranks: usize, is_image: bool) -> Vec<[usize; 2]> {
    let rows = divisors(ranks).map(|rows| [rows, 1]);
    let squares = divisors(ranks)
        .filter(|side| *side > 1 && ranks.is_multiple_of(side * side))
        .map(|side| [side, side]);
    if is_image { rows.chain(squares).collect() } else { vec![[1, 1]] }
}

fn divisors(of: usize) -> impl Iterator<Item = usize> {
    (1..=of).filter(move |part| of.is_multiple_of(*part))
}

/// One sentence that says why there is no way at all.
fn none(search: &Search) -> Error {
    let (devices, batch) = (search.devices, search.job.plan.batch.samples);
    let problem = if search.fixed.is_empty() {
        format!(
            "is {batch}, which {devices} devices cannot share out: replicas take equal parts of it, and the model {} has {} \
             blocks for stages",
            search.job.plan.model.name,
            search.job.plan.model.blocks.len()
        )
    } else {
        format!(
            "is {batch}, and no layout of {devices} devices with what `--layout` fixes shares it out evenly"
        )
    };
    Error::Conflict { field: "train.batch".into(), problem }
}
