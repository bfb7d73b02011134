//! How many weights each layer of a sparse network that moves keeps, and how it moves.

use serde::{Deserialize, Serialize};

/// How a sparse network moves.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DynamicSparsity {
    /// Steps from one move of weights to the next.
    pub every: usize,
    /// The fraction of kept weights that moves at first.
    pub fraction: f64,
    /// The last move is before this fraction of the run.
    pub until: f64,
    /// How many weights each layer keeps.
    pub distribution: Distribution,
    /// Whether the first candidate keeps all of them.
    pub dense_first: bool,
}

/// How kept weights are distributed over layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Distribution {
    /// The same fraction of each.
    Uniform,
    /// Of a weight of dimensions n_i a fraction in proportion to `sum n_i / product n_i`, at most all of it: small
    /// layers keep more (Mocanu et al. 2018; with the dimensions of kernels, Evci et al. 2020).
    ErdosRenyiKernel,
}

impl DynamicSparsity {
    /// The fraction that each candidate keeps, where together they keep so much of all; a first layer that is
    /// dense comes on top.
    pub(super) fn fractions(&self, shapes: &[&[usize]], kept: f64) -> Vec<f64> {
        let first = usize::from(self.dense_first).min(shapes.len());
        let mut fractions = vec![1.0; shapes.len()];
        fractions[first..].copy_from_slice(&match self.distribution {
            Distribution::Uniform => vec![kept; shapes.len() - first],
            Distribution::ErdosRenyiKernel => erdos_renyi_kernel(&shapes[first..], kept),
        });
        fractions
    }
}

/// Fractions in proportion to `sum n_i / product n_i`. Layers that would keep more than there is keep all,
/// and the others divide what is left, until none is above 1.
pub(super) fn erdos_renyi_kernel(shapes: &[&[usize]], kept: f64) -> Vec<f64> {
    let elements = |shape: &[usize]| shape.iter().product::<usize>() as f64;
    let raw = |shape: &[usize]| shape.iter().sum::<usize>() as f64 / elements(shape);
    let mut dense = vec![false; shapes.len()];
    loop {
        let of = |wanted: bool| (0..shapes.len()).filter(|i| dense[*i] == wanted).collect::<Vec<usize>>();
        let all: f64 = shapes.iter().map(|shape| elements(shape)).sum();
        let left = kept * all - of(true).iter().map(|i| elements(shapes[*i])).sum::<f64>();
        let weight: f64 = of(false).iter().map(|i| raw(shapes[*i]) * elements(shapes[*i])).sum();
        let factor = if weight > 0.0 { left / weight } else { 0.0 };
        let above: Vec<usize> = of(false).into_iter().filter(|i| factor * raw(shapes[*i]) > 1.0).collect();
        if above.is_empty() {
            let fraction = |i: usize| if dense[i] { 1.0 } else { factor * raw(shapes[i]) };
            return (0..shapes.len()).map(fraction).collect();
        }
        above.into_iter().for_each(|i| dense[i] = true);
    }
}
