//! Values to start from, most of them random: element i is a function of a key and of its index in a longer
//! vector, the same on every device to the bit. So a GPU makes its own weights, and a rank those of its
//! shard.

pub(crate) mod cuda;

use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::ops::chunks::CHUNK;
use crate::ops::index_runs::IndexRuns;
use crate::random;
use crate::tensor::Tensor;
use crate::with_float;

/// How values are distributed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum InitialDistribution {
    /// All are this one.
    Constant(f32),
    /// Normally around zero, with this deviation.
    Normal(f32),
    /// Normally around zero, cut off at two deviations; what is left has this one.
    TruncatedNormal(f32),
}

/// Between -2 and 2 deviations lies this much of the normal distribution, above this much of it.
const BELOW: f64 = 0.022_750_131_948;
const WITHIN: f64 = 0.954_499_736_104;
/// The deviation of what lies between.
const TRUNCATED_DEVIATION: f64 = 0.879_625_661_034;

/// How a value is made.
enum SampleForm {
    Constant(f32),
    /// A normal number times a factor, of those that a part of the uniform numbers gives: where that begins, and
    /// how much it is.
    Normal {
        scale: f64,
        from: f64,
        width: f64,
    },
}

impl InitialDistribution {
    fn form(self) -> SampleForm {
        match self {
            InitialDistribution::Constant(value) => SampleForm::Constant(value),
            InitialDistribution::Normal(deviation) => {
                SampleForm::Normal { scale: f64::from(deviation), from: 0.0, width: 1.0 }
            }
            InitialDistribution::TruncatedNormal(deviation) => {
                let scale = f64::from(deviation) / TRUNCATED_DEVIATION;
                SampleForm::Normal { scale, from: BELOW, width: WITHIN }
            }
        }
    }

    /// The value of an index.
    pub fn at(self, key: u64, index: u64) -> f32 {
        match self.form() {
            SampleForm::Constant(value) => value,
            SampleForm::Normal { scale, from, width } => {
                (scale * random::normal_quantile(from + width * random::uniform(key, index))) as f32
            }
        }
    }
}

/// A tensor of such values, those of the indices.
pub fn sample(
    device: &Device,
    shape: &[usize],
    dtype: DType,
    distribution: InitialDistribution,
    key: u64,
    indices: &IndexRuns,
    category: Category,
) -> Result<Tensor> {
    assert_eq!(shape.iter().product::<usize>(), indices.len(), "an index for each element");
    let mut values = Tensor::empty(device, shape, dtype, category)?;
    match device {
        Device::Cpu(cpu) => with_float!(dtype, T => {
            cpu.for_chunks(values.slice_mut::<T>(), CHUNK, |at, values| {
                let numbers = indices.indices(at).map(|index| distribution.at(key, index));
                values.iter_mut().zip(numbers).for_each(|(value, number)| *value = Float::from_f32(number));
            });
        }),
        Device::Cuda(cuda) => cuda::sample(cuda, distribution, key, indices, &mut values)?,
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::devices;

    /// Against one index after the other, in both types, with runs of no length among them.
    #[test]
    fn every_device_makes_the_same_values() {
        let runs: Vec<(usize, usize)> = (0..300)
            .flat_map(|row| [(row * 70, 20), (row * 70 + 20, 0), (row * 70 + 40, row % 30)])
            .chain([(1 << 33, 50_000)])
            .collect();
        let indices: Vec<usize> = runs.iter().flat_map(|(first, n)| *first..first + n).collect();
        let (key, runs) = (random::key(3, 4), IndexRuns::new(runs));
        for distribution in [
            InitialDistribution::Constant(0.5),
            InitialDistribution::Normal(0.7),
            InitialDistribution::TruncatedNormal(0.02),
        ] {
            let expected: Vec<f32> = indices.iter().map(|i| distribution.at(key, *i as u64)).collect();
            for device in devices().iter().flatten() {
                for dtype in [DType::F32, DType::Bf16] {
                    let expected =
                        Tensor::from_f32(device, &[indices.len()], dtype, &expected, Category::Weights);
                    let made =
                        sample(device, &[indices.len()], dtype, distribution, key, &runs, Category::Weights);
                    assert_eq!(
                        made.unwrap().to_f32(),
                        expected.unwrap().to_f32(),
                        "{distribution:?} {dtype:?}"
                    );
                }
                let none = IndexRuns::new([]);
                let none = sample(device, &[0], DType::F32, distribution, key, &none, Category::Weights);
                assert!(none.unwrap().is_empty());
            }
        }
    }

    #[test]
    fn values_have_the_deviation_asked_for() {
        for distribution in [InitialDistribution::Normal(0.3), InitialDistribution::TruncatedNormal(0.3)] {
            let values: Vec<f64> =
                (0..200_000).map(|i| f64::from(distribution.at(random::key(1, 2), i))).collect();
            let n = values.len() as f64;
            let mean = values.iter().sum::<f64>() / n;
            let deviation = (values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n).sqrt();
            assert!(
                mean.abs() < 3e-3 && (deviation - 0.3).abs() < 3e-3,
                "{distribution:?}: {mean} {deviation}"
            );
        }
        let cut = (0..200_000)
            .map(|i| InitialDistribution::TruncatedNormal(1.0).at(random::key(1, 2), i).abs())
            .fold(0.0, f32::max);
        assert!(cut < 2.0 / 0.8796 && cut > 2.2, "cut at two deviations of the uncut distribution: {cut}");
    }
}
