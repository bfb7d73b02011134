//! Rotary positions (Su et al. 2021): pair i of a head of d columns at position p is turned by p f_i, with
//! f_i = base^(-2 i / d), and these frequencies scaled where a model was made to reach further than it was
//! trained first.

use serde::Serialize;

/// By how much queries and keys are turned.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rotary {
    /// What frequencies are powers of; `rope_theta` elsewhere.
    pub base: f64,
    /// How they are scaled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scaling: Option<Llama3Scaling>,
}

/// Llama 3.1's scaling: what turns slowly is slowed down by `factor`, what turns fast stays, and between the
/// two it is something in between.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Llama3Scaling {
    /// By how much the lowest frequencies are divided.
    pub factor: f64,
    /// A wavelength that fits into the original context at most so often is scaled by all of it;
    pub low: f64,
    /// one that fits into it at least so often is not.
    pub high: f64,
    /// The context that the model was trained with first.
    pub original: usize,
}

impl Rotary {
    /// Unscaled.
    pub fn new(base: f64) -> Rotary {
        Rotary { base, scaling: None }
    }

    /// The frequency of each pair of a head of so many columns, with transformers' roundings: f32 throughout.
    pub fn frequencies(&self, columns: usize) -> Vec<f32> {
        let one = |pair: usize| {
            let frequency = 1.0 / (self.base as f32).powf((2 * pair) as f32 / columns as f32);
            self.scaling.map_or(frequency, |scaling| scaling.apply(frequency))
        };
        (0..columns / 2).map(one).collect()
    }
}

impl Llama3Scaling {
    fn apply(&self, frequency: f32) -> f32 {
        let Llama3Scaling { factor, low, high, original } = *self;
        let (factor, low, high, original) = (factor as f32, low as f32, high as f32, original as f32);
        let wavelength = 2.0 * std::f32::consts::PI / frequency;
        if wavelength < original / high {
            return frequency;
        }
        if wavelength > original / low {
            return frequency / factor;
        }
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * frequency / factor + smooth * frequency
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_are_powers_of_the_base() {
        let all = Rotary::new(10_000.0).frequencies(8);
        let expected = [1.0, 0.1, 0.01, 0.001];
        assert!(
            all.iter().zip(expected).all(|(got, expected)| (got / expected - 1.0).abs() < 1e-6),
            "{all:?}"
        );
    }

    /// Llama 3.2's numbers. By hand: a wavelength of 8192 / 4 = 2048 is f = 0.00307, one of 8192 is 0.000767.
    #[test]
    fn fast_ones_stay_slow_ones_are_divided_and_there_is_no_step() {
        let scaling = Llama3Scaling { factor: 32.0, low: 1.0, high: 4.0, original: 8192 };
        assert_eq!(scaling.apply(0.0031), 0.0031);
        assert_eq!(scaling.apply(0.0007), 0.0007 / 32.0);
        let middle = scaling.apply(0.0015);
        let smooth = (8192.0 * 0.0015 / (2.0 * std::f32::consts::PI) - 1.0) / 3.0;
        assert!((middle - 0.0015 * ((1.0 - smooth) / 32.0 + smooth)).abs() < 1e-9, "{middle}");
        let (above, below) = (scaling.apply(0.003_068), scaling.apply(0.000_766_9));
        assert!((above / 0.003_068 - 1.0).abs() < 1e-3, "{above}");
        assert!((below * 32.0 / 0.000_766_9 - 1.0).abs() < 1e-2, "{below}");
    }
}
