//! All the ways in which a run can be laid out on so many devices.

use super::{LayoutSearch, SearchConstraints};
use crate::error::Error;
use crate::schedule::ScheduleName;
use crate::simulate::Candidate;
use crate::spec::{Input, RecomputeMode};

/// Micro-batches of more sequences than this gain nothing; small images may be as many as there are.
const MOST_SEQUENCES: usize = 256;
/// Tensor ranks beyond a few nodes gain nothing.
const MOST_TENSOR_NODES: usize = 2;
/// Virtual stages on a rank.
const CHUNKS: [usize; 4] = [2, 3, 4, 6];

/// Every candidate that the run, the engine and what is fixed allow; an error where there is none.
pub(super) fn candidates(search: &LayoutSearch) -> Result<Vec<Candidate>, Error> {
    let all = allowed(search)?;
    if all.is_empty() { Err(none(search)) } else { Ok(all) }
}

fn allowed(search: &LayoutSearch) -> Result<Vec<Candidate>, Error> {
    let (job, fixed) = (search.job, search.fixed);
    let (plan, engine) = (job.plan, &job.engine);
    let (devices, batch) = (search.devices, plan.batch.samples);
    let is_compressed = [("state", fixed.compressed), ("weights", fixed.compressed_weights)];
    let compressed = is_compressed.into_iter().find(|(_, chosen)| *chosen == Some(true));
    if let Some((field, _)) = compressed.filter(|_| plan.pruning.is_none()) {
        return Err(Error::no_effect(format!("--layout {field}"), "as compressed without pruning"));
    }
    if fixed.pipeline == Some(1) && (fixed.schedule.is_some() || fixed.chunks.is_some()) {
        let field = if fixed.schedule.is_some() { "schedule" } else { "chunks" };
        return Err(Error::no_effect(format!("--layout {field}"), "with pipeline=1"));
    }
    let blocks = plan.model.blocks.len();
    let node = &job.cluster.node;
    let precision = plan.storage.precision;
    if !job.cluster.device.has(precision) {
        let problem =
            format!("is {}, which {} does not compute in", precision.name(), job.cluster.device.name);
        return Err(Error::conflict("train.precision", problem));
    }
    if let Some(nodes) = job.cluster.nodes.filter(|nodes| devices > nodes.saturating_mul(node.devices)) {
        let problem = format!(
            "is {nodes}, and {devices} devices are more than the {} that these have",
            nodes * node.devices
        );
        return Err(Error::conflict("nodes", problem));
    }
    if devices > node.devices && !node.cores && job.cluster.network.is_none() {
        let problem = format!(
            "is missing, and {devices} devices are more than the {} of a node: say how nodes are connected, or plan for one",
            node.devices
        );
        return Err(Error::conflict("network", problem));
    }
    let most_tensor = if engine.tensor { MOST_TENSOR_NODES * job.cluster.node.devices } else { 1 };
    let image = match plan.model.input {
        Input::Image { height, width, .. } if engine.is_ours() => Some([height, width]),
        _ => None,
    };
    let mut all = Vec::new();
    let most_stages = if engine.schedules.is_empty() { 1 } else { blocks.max(1) };
    for pipeline in axis_sizes(devices, fixed.pipeline, most_stages).filter(|stages| *stages <= most_stages) {
        for tensor in axis_sizes(devices / pipeline, fixed.tensor, most_tensor) {
            for (data, grid) in replicas(devices / pipeline / tensor, batch, image) {
                if !fixed.allows(fixed.grid, grid) || !fixed.allows(fixed.data, data) {
                    continue;
                }
                let mesh = Candidate { data, pipeline, tensor, grid, ..Candidate::single_rank(1) };
                variants(search, mesh, batch / data, &mut all);
            }
        }
    }
    Ok(all)
}

/// All that can be chosen on a mesh.
fn variants(search: &LayoutSearch, mesh: Candidate, samples: usize, all: &mut Vec<Candidate>) {
    let (fixed, engine, plan) = (search.fixed, &search.job.engine, search.job.plan);
    let compressed = match (fixed.compressed, &plan.pruning) {
        (Some(chosen), _) => chosen,
        (None, Some(_)) => plan.storage.compressed && engine.compresses(),
        (None, None) => false,
    };
    let weights = fixed.compressed_weights.unwrap_or(plan.storage.compressed_weights);
    let compressed_weights = weights && compressed && engine.is_ours();
    let has_attention = search.job.plan.model.attends();
    let sequences: &[bool] = if mesh.tensor > 1 && has_attention { &[false, true] } else { &[false] };
    let zeros: &[u8] = match fixed.zero {
        _ if mesh.data == 1 && !engine.gathers_weights() => &[0],
        Some(2) if engine.is_ours() => &[2],
        Some(3) if engine.is_ours() => &[3],
        _ => engine.zero,
    };
    let most = match plan.model.input {
        Input::Image { .. } => samples,
        _ => MOST_SEQUENCES,
    };
    let micro_batches = divisors(samples).into_iter().filter(|size| match fixed.micro_batch {
        Some(chosen) => *size == chosen,
        None => *size <= most,
    });
    for micro_batch in micro_batches {
        // How many blocks are enough is found where none of them does not fit.
        let some = fixed.recompute.filter(|one| engine.is_ours() && matches!(one, RecomputeMode::Blocks(_)));
        for recompute in engine.recomputes.iter().copied().chain(some) {
            let useless = recompute == RecomputeMode::Attention && !has_attention
                || matches!(recompute, RecomputeMode::Blocks(number) if number >= plan.model.blocks.len());
            if useless || !fixed.allows(fixed.recompute, recompute) {
                continue;
            }
            for &sequence in sequences.iter().filter(|chosen| fixed.allows(fixed.sequence, **chosen)) {
                for &zero in zeros.iter().filter(|chosen| fixed.allows(fixed.zero, **chosen)) {
                    for (schedule, chunks) in orders(search, &mesh, samples / micro_batch) {
                        let base = Candidate { micro_batch, recompute, sequence, zero, ..mesh };
                        let base = Candidate { compressed, compressed_weights, ..base };
                        all.push(Candidate { schedule, chunks, ..base });
                    }
                }
            }
        }
    }
}

/// The orders in which the stages of a mesh can work.
fn orders(
    search: &LayoutSearch,
    mesh: &Candidate,
    micro_batches: usize,
) -> Vec<(ScheduleName, Option<usize>)> {
    let fixed = search.fixed;
    if mesh.pipeline == 1 {
        return vec![(ScheduleName::OneFOneB, None)];
    }
    let blocks = search.job.plan.model.blocks.len();
    let mut all = Vec::new();
    let chosen = |name: &&ScheduleName| fixed.allows(fixed.schedule, **name);
    let offered = search.job.engine.schedules.iter();
    // What a person names may be one that is not searched.
    let named = fixed.schedule.iter().filter(|name| !search.job.engine.schedules.contains(name));
    for &name in offered.chain(named).filter(chosen) {
        match name {
            ScheduleName::Interleaved => {
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

/// Ranks along an axis of so many: what was fixed, or up to the most that gain something. Devices may be many
/// more than can be counted through, what they are put to is not.
fn axis_sizes(devices: usize, fixed: Option<usize>, most: usize) -> impl Iterator<Item = usize> {
    let range = fixed.map_or(1..=most.min(devices), |extent| extent..=extent);
    range.filter(move |extent| *extent > 0 && devices.is_multiple_of(*extent))
}

/// Replicas that split a batch evenly, and the grid of ranks over the images of each, if they are split: by
/// rows, and square ones, of no more ranks than an image of `image` rows and columns has of these.
fn replicas(ranks: usize, batch: usize, image: Option<[usize; 2]>) -> Vec<(usize, [usize; 2])> {
    let Some([height, width]) = image else {
        return if batch.is_multiple_of(ranks) { vec![(ranks, [1, 1])] } else { Vec::new() };
    };
    let each: Vec<usize> =
        divisors(batch).into_iter().rev().filter(|data| ranks.is_multiple_of(*data)).collect();
    let rows = each.iter().map(|&data| (data, [ranks / data, 1]));
    let square = |&data: &usize| {
        let side = (ranks / data).isqrt();
        (side > 1 && side * side == ranks / data).then_some((data, [side, side]))
    };
    let all = rows.chain(each.iter().filter_map(square));
    all.filter(|(_, [rows, columns])| *rows <= height && *columns <= width).collect()
}

/// Ascending.
fn divisors(of: usize) -> Vec<usize> {
    let small: Vec<usize> = (1..=of.isqrt()).filter(|part| of.is_multiple_of(*part)).collect();
    let large = small.iter().rev().map(|part| of / part).filter(|part| *part > of.isqrt());
    small.iter().copied().chain(large).collect()
}

/// One sentence that says why there is no layout at all: of what is fixed, the field without which there would be
/// one is to blame.
fn none(search: &LayoutSearch) -> Error {
    let (job, devices) = (search.job, search.devices);
    let (batch, engine, blocks) = (job.plan.batch.samples, job.engine.name, job.plan.model.blocks.len());
    let is_possible = |fixed: &SearchConstraints| {
        allowed(&LayoutSearch { fixed, ..*search }).is_ok_and(|all| !all.is_empty())
    };
    let blamed = search.fixed.without_each().into_iter().find(|(_, fixed)| is_possible(fixed));
    if let Some((field, _)) = blamed {
        let must = match field {
            "data" => format!("replicas must divide both {devices} devices and the batch of {batch}"),
            "pipeline" if job.engine.schedules.is_empty() => format!("engine {engine} has no pipeline"),
            "pipeline" => format!(
                "stages must divide {devices} devices, and the model {} has {blocks} blocks for them",
                job.plan.model.name
            ),
            "tensor" if !job.engine.tensor => format!("engine {engine} has no tensor parallelism"),
            "tensor" => format!(
                "tensor-parallel ranks must divide {devices} devices, and are searched on up to \
                 {MOST_TENSOR_NODES} nodes"
            ),
            "sequence" => "tensor-parallel ranks of a model with attention split sequences".into(),
            "zero" => format!("engine {engine} shards so over several replicas alone"),
            "recompute" => format!(
                "engine {engine} recomputes none, attention where there is any, or up to {} blocks of the model {}",
                blocks - 1,
                job.plan.model.name
            ),
            "spatial" => format!("tiles must divide {devices} devices, and only images have any"),
            "micro_batch" => {
                format!("a micro-batch must divide the samples of a replica, of a batch of {batch}")
            }
            "chunks" => {
                "chunks belong to the schedule interleaved, with micro-batches that its stages divide".into()
            }
            _ => format!("engine {engine} has no such layout of {devices} devices"),
        };
        return Error::conflict(format!("--layout {field}"), format!("leaves no layout: {must}"));
    }
    if is_possible(&SearchConstraints::default()) {
        let problem = format!(
            "leaves no layout of {devices} devices for a batch of {batch}: its fields contradict each other"
        );
        return Error::conflict("--layout", problem);
    }
    let problem = format!(
        "is {batch}, which {devices} devices cannot split evenly: each replica takes an equal part, and the model {} \
         has {blocks} blocks for pipeline stages",
        job.plan.model.name
    );
    Error::conflict("train.batch", problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By their definition: every way to write a number of ranks as replicas times a grid.
    #[test]
    fn replicas_and_grids_are_all_that_there_are() {
        for (ranks, batch) in [(1, 1), (12, 8), (16, 24), (36, 36), (48, 2)] {
            let found = replicas(ranks, batch, Some([1000, 1000]));
            let all = (1..=ranks).flat_map(|rows| (1..=ranks).map(move |columns| [rows, columns]));
            let expected: Vec<_> = all
                .filter(|[rows, columns]| *columns == 1 || rows == columns)
                .filter(|[rows, columns]| ranks.is_multiple_of(rows * columns))
                .map(|grid| (ranks / (grid[0] * grid[1]), grid))
                .filter(|(data, _)| batch.is_multiple_of(*data))
                .collect();
            assert_eq!(found.len(), expected.len(), "{ranks} {batch}: {found:?} {expected:?}");
            assert!(expected.iter().all(|one| found.contains(one)), "{ranks} {batch}");
        }
        assert_eq!(replicas(6, 12, None), [(6, [1, 1])]);
        assert_eq!(replicas(6, 8, None), []);
    }

    /// Without counting up to them.
    #[test]
    fn devices_may_be_more_than_can_be_counted() {
        assert_eq!(axis_sizes(usize::MAX, None, 6).collect::<Vec<_>>(), [1, 3, 5]);
        assert_eq!(axis_sizes(1 << 60, Some(1 << 40), 8).collect::<Vec<_>>(), [1 << 40]);
        assert_eq!(axis_sizes(10, Some(0), 8).count() + axis_sizes(10, Some(3), 8).count(), 0);
        assert_eq!(replicas(1 << 60, 16, Some([224, 224])), []);
        assert_eq!(replicas(64, 16, Some([5, 5])), [(16, [4, 1]), (16, [2, 2]), (4, [4, 4])]);
        assert_eq!(divisors(36), [1, 2, 3, 4, 6, 9, 12, 18, 36]);
        assert_eq!((divisors(1), divisors(2), divisors(15)), (vec![1], vec![1, 2], vec![1, 3, 5, 15]));
    }
}
