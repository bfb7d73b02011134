//! The values that weights start from: functions of the seed, the parameter's name and an element's index in
//! it alone, never of the layout.

use espalier_plan::Shard;
use espalier_plan::spec::{self, Init};
use espalier_tensor::mask::ones;
use espalier_tensor::{Category, DType, Device, Mask, Tensor, random};
use rayon::prelude::*;

/// A shard of a parameter as it starts.
pub fn fresh(
    parameter: &spec::Parameter,
    shard: &Shard,
    device: &Device,
    dtype: DType,
    seed: u64,
    category: Category,
) -> Result<Tensor, espalier_tensor::Error> {
    let (mut values, len) = reserve(parameter.elements(), device, category)?;
    match shard.is_full() {
        true => sample_initial(&mut values, &parameter.name, len, parameter.init, seed, |i| i),
        false => {
            let in_full = |i: u64| shard.in_full(i as usize) as u64;
            sample_initial(&mut values, &parameter.name, len, parameter.init, seed, in_full);
        }
    }
    Tensor::from_f32(device, &parameter.shape, dtype, &values, category)
}

/// Of the same those that a mask keeps, in order: no others are sampled.
pub fn fresh_kept(
    parameter: &spec::Parameter,
    shard: &Shard,
    mask: &Mask,
    dtype: DType,
    seed: u64,
    category: Category,
) -> Result<Tensor, espalier_tensor::Error> {
    let device = mask.device();
    let (mut values, len) = reserve(mask.kept() as u64, &device, category)?;
    let kept_indices: Vec<u32> = ones(&mask.read_words()?).map(|index| index as u32).collect();
    let index = |i: u64| kept_indices[i as usize] as usize;
    match shard.is_full() {
        true => {
            sample_initial(&mut values, &parameter.name, len, parameter.init, seed, |i| index(i) as u64);
        }
        false => {
            let in_full = |i: u64| shard.in_full(index(i)) as u64;
            sample_initial(&mut values, &parameter.name, len, parameter.init, seed, in_full);
        }
    }
    Tensor::from_f32(&device, &[len], dtype, &values, category)
}

/// A running statistic as it starts.
pub fn started(buffer: &spec::BufferSpec, device: &Device) -> Result<Tensor, espalier_tensor::Error> {
    let (mut values, len) = reserve(buffer.elements(), device, Category::Weights)?;
    values.resize(len, buffer.start);
    Tensor::from_slice(device, &buffer.shape, &values, Category::Weights)
}

/// Memory of the host for so many numbers, and their number, where it is to be had.
fn reserve(
    numbers: u64,
    device: &Device,
    category: Category,
) -> Result<(Vec<f32>, usize), espalier_tensor::Error> {
    let refused = || espalier_tensor::Error::OutOfMemory {
        asked: usize::try_from(numbers.saturating_mul(4)).unwrap_or(usize::MAX),
        category,
        used: device.ledger().usage(),
    };
    let numbers = usize::try_from(numbers).map_err(|_| refused())?;
    let mut values = Vec::new();
    values.try_reserve_exact(numbers).map_err(|_| refused())?;
    Ok((values, numbers))
}

/// What stands for a parameter's name in the keys of random numbers.
pub fn name_key(name: &str) -> u64 {
    let digest = blake3::hash(name.as_bytes());
    u64::from_le_bytes(digest.as_bytes()[..8].try_into().expect("eight bytes"))
}

/// Fills an empty list with `len` numbers: element `i` is a function of the seed, the name and its index in
/// the full parameter.
fn sample_initial(
    values: &mut Vec<f32>,
    name: &str,
    len: usize,
    init: Init,
    seed: u64,
    in_full: impl Fn(u64) -> u64 + Sync + Send,
) {
    let key = random::key(seed, name_key(name));
    match init {
        Init::Constant(value) => values.resize(len, value),
        Init::Normal(std) => sample(values, len, |i| std as f64 * random::normal(key, in_full(i))),
        Init::TruncatedNormal(std) => {
            // Between -2 and 2 deviations lies this much of the distribution; what is left has this deviation.
            const LOW: f64 = 0.022_750_131_948;
            const WIDTH: f64 = 0.954_499_736_104;
            const DEVIATION: f64 = 0.879_625_661_034;
            let truncated = |i| random::normal_quantile(LOW + WIDTH * random::uniform(key, in_full(i)));
            sample(values, len, |i| std as f64 / DEVIATION * truncated(i))
        }
    }
}

/// `[f(0), f(1), ...]`, on all cores: each number is a function of its index, so it does not matter who
/// computes it.
fn sample(values: &mut Vec<f32>, len: usize, f: impl Fn(u64) -> f64 + Sync + Send) {
    (0..len).into_par_iter().map(|i| f(i as u64) as f32).collect_into_vec(values);
}

#[cfg(test)]
mod tests {
    use espalier_tensor::ops::compress::compress;

    use super::*;

    fn initial_values(name: &str, len: usize, init: Init, seed: u64) -> Vec<f32> {
        let mut values = Vec::new();
        sample_initial(&mut values, name, len, init, seed, |i| i);
        values
    }

    #[test]
    fn kept_values_are_those_of_the_dense_parameter() {
        let device = Device::cpu(2).unwrap();
        let unsharded = Shard::full(&[40, 50]);
        let parameter = |shape: Vec<usize>| spec::Parameter {
            name: "w".into(),
            init: Init::TruncatedNormal(0.02),
            shape,
            prunable: true,
            decays: true,
            embedding: false,
            output_dim: 0,
        };
        for shard in [unsharded.clone(), unsharded.narrow(1, &[3..9, 20..37])] {
            let mut mask_words: Vec<u32> =
                (0..shard.len().div_ceil(32) as u64).map(|word| random::bits(7, word)).collect();
            *mask_words.last_mut().unwrap() &= u32::MAX >> (31 - (shard.len() - 1) % 32);
            let (mask, parameter) =
                (Mask::new(&device, shard.len(), &mask_words).unwrap(), parameter(shard.shape()));
            for dtype in [DType::F32, DType::Bf16] {
                let all = fresh(&parameter, &shard, &device, dtype, 5, Category::Weights).unwrap();
                let kept = fresh_kept(&parameter, &shard, &mask, dtype, 5, Category::Weights).unwrap();
                assert_eq!(kept.to_f32(), compress(&all, &mask, Category::Weights).unwrap().to_f32());
            }
        }
    }

    #[test]
    fn initial_values_have_the_moments_asked_for_and_depend_on_seed_and_name() {
        let moments = |values: &[f32]| {
            let n = values.len() as f64;
            let mean = values.iter().map(|&x| x as f64).sum::<f64>() / n;
            (mean, (values.iter().map(|&x| (x as f64 - mean).powi(2)).sum::<f64>() / n).sqrt())
        };
        for init in [Init::Normal(0.3), Init::TruncatedNormal(0.3)] {
            let values = initial_values("w", 200_000, init, 1);
            let (mean, std) = moments(&values);
            assert!(mean.abs() < 3e-3 && (std - 0.3).abs() < 3e-3, "{init:?}: {mean} {std}");
            assert_ne!(values, initial_values("v", 200_000, init, 1));
            assert_ne!(values, initial_values("w", 200_000, init, 2));
            assert_eq!(values[..100], initial_values("w", 100, init, 1), "whatever the size");
        }
        let cut = initial_values("w", 200_000, Init::TruncatedNormal(1.0), 1);
        assert!(
            cut.iter().all(|x| x.abs() < 2.0 / 0.8796),
            "cut at two deviations of the uncut distribution"
        );
        assert_eq!(initial_values("b", 3, Init::Constant(1.0), 1), [1.0; 3]);
    }
}
