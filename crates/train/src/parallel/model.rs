//! Tensor and spatial parallelism: the ranks that have shards of the same layers, and which of each
//! parameter each of them has.
//!
//! A parameter that is split has another shard on each of them, or the same on some; one that is not is
//! replicated on all. What is found in shards and must be that of the full tensor, a count, a digest, is put
//! together here. Shards are in the order of the full tensor, so that masks, ties and compressed state of a
//! shard are those of the full tensor where they lie.

use espalier_comm::{Communicator, IntoCommBuffer, Reduce};
use espalier_nn::weights::{ParameterId, digest, digest_of};
use espalier_plan::Shard;
use espalier_plan::layout::Layout;
use espalier_plan::spec::{ModelSpec, Parameter};
use espalier_tensor::Tensor;
use espalier_tensor::ops::update::SquaredNorms;

use super::{Ranks, all_gather_bytes};
use crate::Result;

/// What the ranks of a stage hold of each parameter of the model, also of those of other stages: which are
/// split is the same everywhere.
#[derive(Debug, Clone)]
pub struct ModelParallel {
    group: Communicator,
    /// By peer, and of each by parameter.
    shards: Vec<Vec<Shard>>,
}

impl ModelParallel {
    /// Those of a layout.
    pub fn of(layout: &Layout, ranks: &Ranks) -> ModelParallel {
        let shards = layout.local_models().iter().map(|local| local.shards.clone()).collect();
        ModelParallel::new(ranks.model_parallel().clone(), shards)
    }

    /// Those of one rank that holds all of every tensor.
    pub fn unsharded(model: &ModelSpec) -> ModelParallel {
        let full = |parameter: &Parameter| Shard::full(&parameter.shape);
        ModelParallel {
            group: Communicator::single_rank(),
            shards: vec![model.parameters().iter().map(full).collect()],
        }
    }

    /// Whether this rank has all of every layer.
    pub fn is_single(&self) -> bool {
        self.group.size() == 1
    }

    /// Those of the model-parallel ranks, in their order, each a shard of every parameter.
    pub fn new(group: Communicator, shards: Vec<Vec<Shard>>) -> ModelParallel {
        assert_eq!(group.size(), shards.len(), "shards of all of them");
        ModelParallel { group, shards }
    }

    /// What this rank holds of a parameter, if its stage has it.
    pub fn local_shard(&self, id: ParameterId) -> &Shard {
        &self.shards[self.group.rank()][id.0]
    }

    /// Whether some peer has less than all of a parameter.
    pub fn is_split(&self, id: ParameterId) -> bool {
        self.shards.iter().any(|peer_shards| !peer_shards[id.0].is_full())
    }

    /// Whether this rank speaks for its shard: the first of the model-parallel ranks that hold it.
    pub fn is_owner(&self, id: ParameterId) -> bool {
        self.shards.iter().position(|peer_shards| peer_shards[id.0] == *self.local_shard(id))
            == Some(self.group.rank())
    }

    /// All-reduce (sum) over the model-parallel ranks, all of which must ask.
    pub fn all_reduce_sum(&self, numbers: Vec<u64>) -> Result<Vec<u64>> {
        Ok(self.group.all_reduce(numbers, Reduce::Sum)?)
    }

    /// What all model-parallel ranks together count of a parameter, from what each counts of its shard. Where
    /// it is split all must ask.
    pub fn count(&self, id: ParameterId, local: usize) -> Result<usize> {
        Ok(self.total(id, vec![local as u64])?[0] as usize)
    }

    /// Sums over all of a parameter, from those over this rank's shard. Where it is split all model-parallel
    /// ranks must ask.
    pub fn total<T: Copy + Default>(&self, id: ParameterId, local: Vec<T>) -> Result<Vec<T>>
    where
        Vec<T>: IntoCommBuffer,
    {
        match (self.is_split(id), self.is_owner(id)) {
            (false, _) => Ok(local),
            (true, true) => Ok(self.group.all_reduce(local, Reduce::Sum)?),
            (true, false) => Ok(self.group.all_reduce(vec![T::default(); local.len()], Reduce::Sum)?),
        }
    }

    /// Makes the norms of this rank's shards those of full parameters, by which LARS and LAMB measure a step.
    /// All model-parallel ranks must ask.
    pub(crate) fn full_norms(&self, ids: &[ParameterId], norms: &mut [SquaredNorms]) -> Result<()> {
        let split: Vec<usize> = (0..ids.len()).filter(|i| self.is_split(ids[*i])).collect();
        let local = split.iter().flat_map(|&i| match self.is_owner(ids[i]) {
            true => [norms[i].weight, norms[i].direction],
            false => [0.0; 2],
        });
        let reduced: Vec<f64> = self.group.all_reduce(local.collect(), Reduce::Sum)?;
        for (i, &[weight, direction]) in split.into_iter().zip(reduced.as_chunks::<2>().0) {
            norms[i] = SquaredNorms { weight, direction };
        }
        Ok(())
    }

    /// blake3 of the bytes of a full parameter. Where it is split, its shards come together on the host of
    /// every model-parallel rank; all must ask.
    pub fn digest(&self, id: ParameterId, local: &Tensor) -> Result<[u8; 32]> {
        match self.is_split(id) {
            false => Ok(digest(local)?),
            true => {
                let full = self.local_shard(id).full_shape();
                Ok(digest_of(self.join(id, local)?.into(), full, local.dtype()))
            }
        }
    }

    /// The bytes of a full parameter, or of what has a number for each of its weights. All model-parallel
    /// ranks must ask.
    pub(crate) fn join(&self, id: ParameterId, local: &Tensor) -> Result<Vec<u8>> {
        let each = local.dtype().bytes();
        let mut full = vec![0; self.local_shard(id).full_shape().iter().product::<usize>() * each];
        // A second holder of a shard has the same bytes.
        let local_bytes = if self.is_owner(id) { local.read_bytes()? } else { [][..].into() };
        for (peer, bytes) in all_gather_bytes(&self.group, &local_bytes)?.into_iter().enumerate() {
            if bytes.is_empty() {
                continue;
            }
            for run in self.shards[peer][id.0].runs() {
                let from = &bytes[run.at * each..(run.at + run.length) * each];
                full[run.in_full * each..(run.in_full + run.length) * each].copy_from_slice(from);
            }
        }
        Ok(full)
    }
}

#[cfg(test)]
mod tests {
    use espalier_plan::mesh::{Mesh, PerAxis};
    use espalier_tensor::{Category, DType, Device};

    use super::*;
    use crate::parallel::on_threads;

    /// Rows, columns, three ranges as of heads, and one that is on two ranks: each time the digest of the
    /// full tensor.
    #[test]
    fn a_digest_of_shards_is_that_of_the_full_tensor() {
        let (shape, device) = ([5, 12], Device::cpu(1).unwrap());
        let full = Shard::full(&shape);
        let heads = |at: usize| full.clone().narrow(1, &[at..at + 1, 4 + at..5 + at, 8 + at..9 + at]);
        let splits: [[Shard; 4]; 4] = [
            [0..2, 2..3, 3..3, 3..5].map(|rows| full.clone().narrow(0, &[rows])),
            [0..1, 1..6, 6..11, 11..12].map(|columns| full.clone().narrow(1, &[columns])),
            [0, 1, 2, 3].map(heads),
            [0..6, 6..12, 0..6, 6..12].map(|columns| full.clone().narrow(1, &[columns])),
        ];
        for dtype in [DType::F32, DType::Bf16] {
            let values: Vec<f32> = (0..60).map(|i| (i as f32 - 30.0) / 8.0).collect();
            let all = Tensor::from_f32(&device, &shape, dtype, &values, Category::Weights).unwrap();
            let expected = *blake3::hash(&all.read_bytes().unwrap()).as_bytes();
            let mesh = Mesh::new(PerAxis { pipeline: 4, ..PerAxis::ONES }).unwrap();
            let digests = on_threads(&mesh, &device, |ranks, device| {
                let id = |split: usize| ParameterId(split);
                let shards_of = |rank: usize| {
                    let mut shards: Vec<Shard> = splits.iter().map(|split| split[rank].clone()).collect();
                    shards.push(full.clone());
                    shards
                };
                let model_parallel =
                    ModelParallel::new(ranks.stages().clone(), (0..4).map(shards_of).collect());
                let digest = |split: usize| {
                    let shard = model_parallel.local_shard(id(split));
                    let at = shard.runs().flat_map(|run| run.in_full..run.in_full + run.length);
                    let local: Vec<f32> = at.map(|index| values[index]).collect();
                    let local = Tensor::from_f32(device, &shard.shape(), dtype, &local, Category::Weights)?;
                    assert_eq!(model_parallel.count(id(split), local.len())?, 60);
                    model_parallel.digest(id(split), &local)
                };
                (0..5).map(digest).collect::<Result<Vec<_>>>()
            });
            for digests in digests.unwrap() {
                assert_eq!(digests, [expected; 5]);
            }
        }
    }
}
