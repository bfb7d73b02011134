//! The gradient sink of dense training: one tensor per parameter, summed over micro-batches.
//!
//! The first gradient of a parameter is kept as it comes, without a copy; later ones are added to it.

use std::collections::HashSet;

use espalier_tensor::Tensor;
use espalier_tensor::ops::elementwise::add_into;
use espalier_tensor::ops::reduce::{squared_norm, squared_norm_all};

use crate::Result;
use crate::layers::{GradientSink, WeightGradients};
use crate::weights::ParameterId;

/// Sums of gradients, one per parameter.
#[derive(Debug)]
pub struct Gradients {
    sums: Vec<Option<Tensor>>,
    measured: Option<Measured>,
}

/// Squared norms of single micro-batches, for the gradient noise scale.
#[derive(Debug)]
struct Measured {
    /// Tied parameters come in parts, whose norms say nothing of their sum's: they are left out.
    without: HashSet<ParameterId>,
    squares: f64,
}

impl Gradients {
    /// Room for this many parameters.
    pub fn new(parameters: usize) -> Gradients {
        Gradients { sums: (0..parameters).map(|_| None).collect(), measured: None }
    }

    /// Also sums the squared norms of the gradients as they come, except those of tied parameters.
    pub fn measuring(mut self, tied: HashSet<ParameterId>) -> Gradients {
        self.measured = Some(Measured { without: tied, squares: 0.0 });
        self
    }

    /// The gradient of a parameter, if any has come.
    pub fn get(&self, id: ParameterId) -> Option<&Tensor> {
        self.sums[id.0].as_ref()
    }

    /// The squared norm over all parameters; NaN or infinite if any element is.
    pub fn squared_norm(&self) -> f64 {
        squared_norm_all(&self.sums.iter().flatten().collect::<Vec<_>>())
    }

    /// The sum over micro-batches of squared norms, and the squared norm of the sum, over the same parameters.
    pub fn noise_norms(&self) -> Option<(f64, f64)> {
        let measured = self.measured.as_ref()?;
        let sums = self.sums.iter().enumerate().filter(|(i, _)| !measured.without.contains(&ParameterId(*i)));
        Some((
            measured.squares,
            squared_norm_all(&sums.filter_map(|(_, sum)| sum.as_ref()).collect::<Vec<_>>()),
        ))
    }
}

impl GradientSink for Gradients {
    fn accept(&mut self, parameters: &[ParameterId], gradients: WeightGradients) -> Result<()> {
        for (&id, gradient) in parameters.iter().zip(gradients()?) {
            if let Some(measured) = self.measured.as_mut().filter(|m| !m.without.contains(&id)) {
                measured.squares += squared_norm(&gradient);
            }
            match &mut self.sums[id.0] {
                Some(sum) => add_into(sum, &gradient),
                empty => *empty = Some(gradient),
            }
        }
        Ok(())
    }
}
