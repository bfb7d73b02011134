//! How the eigenvalues of the Hessian are distributed, by stochastic Lanczos quadrature (Golub & Meurant
//! 1994; for networks Ghorbani, Krishnan & Xiao 2019).
//!
//! For a random direction v of signs, v f(H) v / n has the mean of f over all eigenvalues as its expectation,
//! whatever f; some steps of Lanczos from v turn it into a sum over a few nodes. Nodes of several directions
//! together stand for the whole distribution: the largest and smallest of them are eigenvalues as good as
//! exact, those between say how many lie thereabouts.

use serde::Serialize;

use super::lanczos::tridiagonal;
use super::surface::LossSurface;
use crate::Result;

/// How much is spent on it.
#[derive(Debug, Clone, Copy)]
pub struct Probes {
    /// Random directions.
    pub directions: usize,
    /// Products with the Hessian for each.
    pub steps: usize,
}

impl Default for Probes {
    fn default() -> Probes {
        Probes { directions: 2, steps: 30 }
    }
}

/// A distribution of eigenvalues.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Spectrum {
    /// Nodes, ascending, and the fraction of all eigenvalues that each stands for; the fractions add up to 1.
    pub nodes: Vec<(f64, f64)>,
    /// How many eigenvalues there are.
    pub dimension: u64,
}

/// The spectrum of the Hessian at the surface's own weights.
pub fn spectrum(surface: &LossSurface<'_>, probes: Probes) -> Result<Spectrum> {
    let mut nodes = Vec::new();
    for number in 0..probes.directions {
        let start = surface.random_signs(number as u64)?;
        let found = tridiagonal(surface, start, probes.steps)?.quadrature();
        nodes.extend(found.into_iter().map(|(value, fraction)| (value, fraction / probes.directions as f64)));
    }
    nodes.sort_by(|a, b| a.0.total_cmp(&b.0));
    Ok(Spectrum { nodes, dimension: surface.dimension()? })
}

impl Spectrum {
    /// The smallest eigenvalue and the largest; nothing where there are no weights.
    pub fn ends(&self) -> Option<(f64, f64)> {
        Some((self.nodes.first()?.0, self.nodes.last()?.0))
    }

    /// The sum of all eigenvalues.
    pub fn trace(&self) -> f64 {
        self.dimension as f64 * self.nodes.iter().map(|(value, fraction)| value * fraction).sum::<f64>()
    }

    /// The fraction of eigenvalues below a number.
    pub fn below(&self, limit: f64) -> f64 {
        self.nodes.iter().filter(|(value, _)| *value < limit).map(|(_, fraction)| fraction).sum()
    }

    /// The density at so many points from end to end, each node a bell of a hundredth of the width: what a
    /// picture shows.
    pub fn density(&self, points: usize) -> Vec<(f64, f64)> {
        let Some((low, high)) = self.ends() else { return Vec::new() };
        let width = ((high - low) / 100.0).max(f64::MIN_POSITIVE);
        let (from, step) = (low - 3.0 * width, (high - low + 6.0 * width) / (points.max(2) - 1) as f64);
        let bell = |x: f64| (-0.5 * x * x).exp() / (width * (2.0 * std::f64::consts::PI).sqrt());
        let at = |x: f64| self.nodes.iter().map(|(node, fraction)| fraction * bell((x - node) / width)).sum();
        (0..points).map(|i| from + i as f64 * step).map(|x| (x, at(x))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_distribution_knows_its_ends_its_trace_and_its_density() {
        let spectrum = Spectrum { nodes: vec![(-1.0, 0.25), (0.0, 0.5), (3.0, 0.25)], dimension: 8 };
        assert_eq!(spectrum.ends(), Some((-1.0, 3.0)));
        assert_eq!(spectrum.trace(), 4.0);
        assert_eq!((spectrum.below(0.0), spectrum.below(0.5)), (0.25, 0.75));
        let density = spectrum.density(4001);
        let step = density[1].0 - density[0].0;
        let area: f64 = density.iter().map(|(_, height)| height * step).sum();
        // Beyond three widths of the outer bells lies a thousandth of each.
        assert!((area - 1.0).abs() < 2e-3, "{area}");
        let around_zero = density.iter().filter(|(x, _)| x.abs() < 0.5).map(|(_, height)| height * step);
        assert!((around_zero.sum::<f64>() - 0.5).abs() < 1e-3);
    }
}
