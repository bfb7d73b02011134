//! The gradient noise scale (McCandlish et al. 2018): the batch size at which noise and signal are equal.
//!
//! From the mean squared norm of micro-batch gradients (batch b) and that of their mean (batch B):
//! `|G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)`, `tr S = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)`,
//! `B_simple = tr S / |G|^2`. Both are noisy and unbiased, their ratio is not: so each is smoothed before
//! dividing.

use serde::{Deserialize, Serialize};

/// Running estimates of both. A checkpoint has them, so that a run that goes on need not begin to measure anew.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
pub struct NoiseScale {
    #[serde(with = "exact")]
    signal: f64,
    #[serde(with = "exact")]
    noise: f64,
    steps: u32,
}

/// Numbers as text, which comes back to the bit; the reader of JSON numbers rounds some of them the other way.
mod exact {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(x: &f64, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&x.to_string())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

impl NoiseScale {
    /// `|G|^2` and `tr S` of squared gradient norms at the small and the large batch size, unbiased both.
    pub fn split(small_batch: f64, small: f64, large_batch: f64, large: f64) -> (f64, f64) {
        let signal = (large_batch * large - small_batch * small) / (large_batch - small_batch);
        let noise = (small - large) / (1.0 / small_batch - 1.0 / large_batch);
        (signal, noise)
    }

    /// Folds in one step: squared gradient norms at the small and the large batch size.
    pub fn observe(&mut self, small_batch: f64, small: f64, large_batch: f64, large: f64) {
        let (signal, noise) = NoiseScale::split(small_batch, small, large_batch, large);
        self.steps += 1;
        // A plain mean at first, then a moving one over about twenty steps.
        let weight = (1.0 / f64::from(self.steps)).max(0.05);
        self.signal += weight * (signal - self.signal);
        self.noise += weight * (noise - self.noise);
    }

    /// The noise scale in samples, once it is defined.
    pub fn value(&self) -> Option<f64> {
        (self.steps > 0 && self.signal > 0.0 && self.noise > 0.0).then(|| self.noise / self.signal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use espalier_tensor::random::{key, normal};

    #[test]
    fn a_known_noise_scale_is_found() {
        // Per-sample gradients are `mean + deviation * normal` in 50 dimensions: tr S = 50 d^2, |G|^2 = 50 m^2.
        let (mean, deviation, dims, batch, micro) = (0.5, 4.0, 50, 64, 4);
        let mut scale = NoiseScale::default();
        for step in 0..200u64 {
            let k = key(1, step);
            let samples: Vec<Vec<f64>> = (0..batch as u64)
                .map(|s| (0..dims).map(|d| mean + deviation * normal(k, s * dims + d)).collect())
                .collect();
            let norm = |group: &[Vec<f64>]| -> f64 {
                (0..dims as usize)
                    .map(|d| (group.iter().map(|g| g[d]).sum::<f64>() / group.len() as f64).powi(2))
                    .sum()
            };
            let small = samples.chunks(batch / micro).map(norm).sum::<f64>() / micro as f64;
            scale.observe((batch / micro) as f64, small, batch as f64, norm(&samples));
        }
        let expected = (deviation / mean).powi(2);
        let got = scale.value().unwrap();
        assert!((got / expected - 1.0).abs() < 0.25, "{got} against {expected}");
    }
}
