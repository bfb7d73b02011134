//! The values that weights start from: functions of the seed, the parameter's name and an element's index in
//! it alone, as PyTorch counts, never of the layout.

use espalier_plan::Shard;
use espalier_plan::filters::{PYTORCH_DIMS, are_permuted, index_in_pytorch};
use espalier_plan::spec::{self, Init};
use espalier_tensor::mask::ones;
use espalier_tensor::ops::compress::compress;
use espalier_tensor::ops::index_runs::IndexRuns;
use espalier_tensor::ops::layout::unflatten;
use espalier_tensor::ops::sample::{InitialDistribution, sample};
use espalier_tensor::{Category, DType, Device, Error, Mask, Tensor, random};

/// A shard of a parameter as it starts.
pub fn fresh(
    parameter: &spec::Parameter,
    shard: &Shard,
    device: &Device,
    dtype: DType,
    seed: u64,
    category: Category,
) -> Result<Tensor, Error> {
    let key = random::key(seed, name_key(&parameter.name));
    let distribution = distribution(parameter.init);
    let draw = |shape: &[usize], shard: &Shard, category| {
        sample(device, shape, dtype, distribution, key, &index_runs(shard), category)
    };
    if shard.is_empty() || !are_permuted(shard.full_shape()) {
        return draw(&parameter.shape, shard, category);
    }
    let in_pytorch = shard.permuted(PYTORCH_DIMS);
    let rows = [parameter.shape[0], shard.len() / parameter.shape[0]];
    // Alone behind this line, so that its memory may be counted as something else.
    let mut values = unflatten(&draw(&rows, &in_pytorch, Category::Workspace)?, &parameter.shape)?;
    values.tag_memory(category);
    Ok(values)
}

/// Of the same those that a mask keeps, in order. A GPU makes all of them: that takes it less than to find out
/// where they are.
pub fn fresh_kept(
    parameter: &spec::Parameter,
    shard: &Shard,
    mask: &Mask,
    dtype: DType,
    seed: u64,
    category: Category,
) -> Result<Tensor, Error> {
    let device = mask.device();
    if matches!(device, Device::Cuda(_)) {
        return compress(
            &fresh(parameter, shard, &device, dtype, seed, Category::Workspace)?,
            mask,
            category,
        );
    }
    let key = random::key(seed, name_key(&parameter.name));
    let kept = mask.read_words()?;
    let full = shard.full_shape();
    let indices = IndexRuns::new(ones(&kept).map(|index| (index_in_pytorch(full, shard.in_full(index)), 1)));
    let distribution = distribution(parameter.init);
    sample(&device, &[mask.kept()], dtype, distribution, key, &indices, category)
}

/// A running statistic as it starts.
pub fn started(buffer: &spec::BufferSpec, device: &Device) -> Result<Tensor, Error> {
    let indices = IndexRuns::full(buffer.shape.iter().product());
    let value = InitialDistribution::Constant(buffer.start);
    sample(device, &buffer.shape, DType::F32, value, 0, &indices, Category::Weights)
}

/// Where the elements of a shard are in the full tensor.
pub fn index_runs(shard: &Shard) -> IndexRuns {
    IndexRuns::new(shard.runs().map(|run| (run.in_full, run.length)))
}

fn distribution(init: Init) -> InitialDistribution {
    match init {
        Init::Constant(value) => InitialDistribution::Constant(value),
        Init::Normal(deviation) => InitialDistribution::Normal(deviation),
        Init::TruncatedNormal(deviation) => InitialDistribution::TruncatedNormal(deviation),
    }
}

/// What stands for a parameter's name in the keys of random numbers.
pub fn name_key(name: &str) -> u64 {
    let digest = blake3::hash(name.as_bytes());
    u64::from_le_bytes(digest.as_bytes()[..8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameter(name: &str, init: Init, shape: Vec<usize>) -> spec::Parameter {
        let (prunable, decays, embedding, output_dim) = (true, true, false, 0);
        spec::Parameter { name: name.into(), init, shape, prunable, decays, embedding, output_dim }
    }

    #[test]
    fn kept_values_are_those_of_the_dense_parameter() {
        let device = Device::cpu(2).unwrap();
        let (matrix, filters) = (Shard::full(&[40, 50]), Shard::full(&[12, 3, 3, 5]));
        let shards =
            [matrix.clone(), matrix.narrow(1, &[3..9, 20..37]), filters.clone().narrow(0, &[2..5]), filters];
        for shard in shards {
            let mut mask_words: Vec<u32> =
                (0..shard.len().div_ceil(32) as u64).map(|word| random::bits(7, word)).collect();
            *mask_words.last_mut().unwrap() &= u32::MAX >> (31 - (shard.len() - 1) % 32);
            let (mask, parameter) = (
                Mask::new(&device, shard.len(), &mask_words).unwrap(),
                parameter("w", Init::TruncatedNormal(0.02), shard.shape()),
            );
            for dtype in [DType::F32, DType::Bf16] {
                let all = fresh(&parameter, &shard, &device, dtype, 5, Category::Weights).unwrap();
                let kept = fresh_kept(&parameter, &shard, &mask, dtype, 5, Category::Weights).unwrap();
                assert_eq!(kept.to_f32(), compress(&all, &mask, Category::Weights).unwrap().to_f32());
            }
        }
    }

    #[test]
    fn initial_values_depend_on_seed_name_and_index_alone() {
        let device = Device::cpu(2).unwrap();
        let values = |name: &str, len: usize, seed: u64| {
            let parameter = parameter(name, Init::Normal(0.3), vec![len]);
            let shard = Shard::full(&[len]);
            fresh(&parameter, &shard, &device, DType::F32, seed, Category::Weights).unwrap().to_f32()
        };
        assert_ne!(values("w", 100, 1), values("v", 100, 1));
        assert_ne!(values("w", 100, 1), values("w", 100, 2));
        assert_eq!(values("w", 1000, 1)[..100], values("w", 100, 1), "whatever the size");
    }
}
