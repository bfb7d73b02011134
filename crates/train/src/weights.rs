//! The weights of a rank: parameters in the precision of the kernels, and running statistics in f32.
//!
//! Initial values depend on the seed and the parameter's name alone, never on the layout.

use std::collections::HashMap;

use espalier_plan::spec::{self, Init};
use espalier_tensor::ops::cast::cast;
use espalier_tensor::{Category, DType, Device, Tensor, random};
use rayon::prelude::*;

use crate::Result;

/// Which parameter: its place in [`spec::Model::parameters`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParameterId(pub usize);

/// Which running statistic: its place in [`spec::Model::buffers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BufferId(pub usize);

/// All weights of a model.
#[derive(Debug)]
pub struct Weights {
    parameters: Vec<Tensor>,
    buffers: Vec<Tensor>,
    names: Vec<String>,
    buffer_names: Vec<String>,
}

impl Weights {
    /// Fresh weights for a model.
    pub fn initialise(model: &spec::Model, device: &Device, dtype: DType, seed: u64) -> Result<Weights> {
        let (parameters, buffers) = (model.parameters(), model.buffers());
        Ok(Weights {
            parameters: parameters
                .iter()
                .map(|p| fresh(p, device, dtype, seed, Category::Weights))
                .collect::<Result<_>>()?,
            buffers: buffers.iter().map(|b| started(b, device)).collect::<Result<_>>()?,
            names: parameters.into_iter().map(|p| p.name).collect(),
            buffer_names: buffers.into_iter().map(|b| b.name).collect(),
        })
    }

    /// Gives all parameters and statistics the values that [`Weights::initialise`] gave them, one at a time.
    pub fn initialise_again(&mut self, model: &spec::Model, seed: u64) -> Result<()> {
        for (tensor, parameter) in self.parameters.iter_mut().zip(&model.parameters()) {
            // The new one is booked as workspace until it stands in the place of the old.
            *tensor = fresh(parameter, &tensor.device(), tensor.dtype(), seed, Category::Workspace)?;
            tensor.book_as(Category::Weights);
        }
        for (tensor, buffer) in self.buffers.iter_mut().zip(&model.buffers()) {
            *tensor = started(buffer, &tensor.device())?;
        }
        Ok(())
    }

    /// Whether they are what [`Weights::initialise`] gives.
    pub fn are_initial(&self, model: &spec::Model, seed: u64) -> Result<bool> {
        for (tensor, parameter) in self.parameters.iter().zip(&model.parameters()) {
            let first = fresh(parameter, &tensor.device(), tensor.dtype(), seed, Category::Workspace)?;
            if first.read_bytes()? != tensor.read_bytes()? {
                return Ok(false);
            }
        }
        for (tensor, buffer) in self.buffers.iter().zip(&model.buffers()) {
            if started(buffer, &tensor.device())?.read_bytes()? != tensor.read_bytes()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A copy whose parameters are f32; statistics are shared.
    pub fn widened(&self) -> Result<Weights> {
        Ok(Weights {
            parameters: self.ids().map(|id| self.widened_one(id)).collect::<Result<_>>()?,
            buffers: self.buffers.clone(),
            names: self.names.clone(),
            buffer_names: self.buffer_names.clone(),
        })
    }

    /// A copy of a parameter as f32.
    pub fn widened_one(&self, id: ParameterId) -> Result<Tensor> {
        Ok(cast(self.get(id), DType::F32, Category::Workspace)?)
    }

    /// A parameter.
    pub fn get(&self, id: ParameterId) -> &Tensor {
        &self.parameters[id.0]
    }

    /// All parameters, to be changed.
    pub fn all_mut(&mut self) -> impl Iterator<Item = (ParameterId, &mut Tensor)> {
        self.parameters.iter_mut().enumerate().map(|(i, tensor)| (ParameterId(i), tensor))
    }

    /// A parameter, to be changed.
    pub fn get_mut(&mut self, id: ParameterId) -> &mut Tensor {
        &mut self.parameters[id.0]
    }

    /// A running statistic.
    pub fn buffer(&self, id: BufferId) -> &Tensor {
        &self.buffers[id.0]
    }

    /// Two running statistics, to be changed.
    pub fn buffers_mut(&mut self, a: BufferId, b: BufferId) -> [&mut Tensor; 2] {
        self.buffers.get_disjoint_mut([a.0, b.0]).expect("two different statistics of this model")
    }

    /// All running statistics, to be changed.
    pub fn statistics_mut(&mut self) -> impl Iterator<Item = &mut Tensor> {
        self.buffers.iter_mut()
    }

    /// The ids of all parameters.
    pub fn ids(&self) -> impl Iterator<Item = ParameterId> + use<> {
        (0..self.parameters.len()).map(ParameterId)
    }

    /// A parameter's name.
    pub fn name(&self, id: ParameterId) -> &str {
        &self.names[id.0]
    }

    /// Parameters and running statistics with their names, as a checkpoint holds them.
    pub fn named(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        let names = self.names.iter().chain(&self.buffer_names).map(String::as_str);
        names.zip(self.parameters.iter().chain(&self.buffers))
    }

    /// The same, to be changed.
    pub fn named_mut(&mut self) -> impl Iterator<Item = (&str, &mut Tensor)> {
        let names = self.names.iter().chain(&self.buffer_names).map(String::as_str);
        names.zip(self.parameters.iter_mut().chain(&mut self.buffers))
    }

    /// blake3 of the bytes of all parameters and statistics in the order of their names.
    pub fn hash(&self) -> String {
        let mut all: Vec<_> = self.named().collect();
        all.sort_unstable_by_key(|(name, _)| *name);
        let mut hasher = blake3::Hasher::new();
        for (_, tensor) in all {
            hasher.update_rayon(&tensor.host_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }
}

/// A parameter as it starts.
fn fresh(
    parameter: &spec::Parameter,
    device: &Device,
    dtype: DType,
    seed: u64,
    category: Category,
) -> Result<Tensor> {
    let values = initial_values(&parameter.name, parameter.elements() as usize, parameter.init, seed);
    Ok(Tensor::from_f32(device, &parameter.shape, dtype, &values, category)?)
}

/// A running statistic as it starts.
fn started(buffer: &spec::Buffer, device: &Device) -> Result<Tensor> {
    let values = vec![buffer.start; buffer.elements() as usize];
    Ok(Tensor::from_slice(device, &buffer.shape, &values, Category::Weights)?)
}

/// Names to ids.
pub(crate) fn ids_by_name<'a>(names: impl IntoIterator<Item = &'a str>) -> HashMap<String, usize> {
    names.into_iter().enumerate().map(|(i, name)| (name.to_owned(), i)).collect()
}

/// What stands for a parameter's name in the keys of random numbers.
pub(crate) fn name_key(name: &str) -> u64 {
    let digest = blake3::hash(name.as_bytes());
    u64::from_le_bytes(digest.as_bytes()[..8].try_into().expect("eight bytes"))
}

/// Element `i` is a function of the seed, the name and `i`.
fn initial_values(name: &str, len: usize, init: Init, seed: u64) -> Vec<f32> {
    let key = random::key(seed, name_key(name));
    match init {
        Init::Constant(value) => vec![value; len],
        Init::Normal(std) => draw(len, |i| std as f64 * random::normal(key, i)),
        Init::TruncatedNormal(std) => {
            // Between -2 and 2 deviations lies this much of the distribution; what is left has this deviation.
            const LOW: f64 = 0.022_750_131_948;
            const WIDTH: f64 = 0.954_499_736_104;
            const DEVIATION: f64 = 0.879_625_661_034;
            let truncated = |i| random::normal_quantile(LOW + WIDTH * random::uniform(key, i));
            draw(len, |i| std as f64 / DEVIATION * truncated(i))
        }
    }
}

/// `[f(0), f(1), ...]`, on all cores: each number is a function of its place, so it does not matter who computes it.
fn draw(len: usize, f: impl Fn(u64) -> f64 + Sync + Send) -> Vec<f32> {
    (0..len as u64).into_par_iter().map(|i| f(i) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
