//! From what was seen on a machine to the few numbers of a cluster file. Only arithmetic: who measures is
//! `espalier bench`.

use super::Fabric;
use crate::cost::{AlphaBeta, Cost};

/// An operation that was timed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OpTiming {
    /// Its flops, or the bytes that it reads and writes.
    pub size: f64,
    /// How long it took.
    pub seconds: f64,
}

impl OpTiming {
    /// Flops or bytes a second.
    pub fn rate(&self) -> f64 {
        self.size / self.seconds
    }
}

/// The best rate of all samples.
pub fn best_rate(samples: &[OpTiming]) -> f64 {
    samples.iter().map(OpTiming::rate).fold(0.0, f64::max)
}

/// An efficiency as a file has it: one point for each decade of sizes, at the middle of those that were seen,
/// with the median of their fractions of `peak`. `unit` is what sizes are written in: 1e9 for Gflop.
///
/// No point takes longer than a larger one: what a machine did with more in less time it can do with less
/// too, so the smaller one was held up.
pub fn efficiency(samples: &[OpTiming], unit: f64, peak: f64) -> Vec<[f64; 2]> {
    let decade = |sample: &OpTiming| sample.size.log10().round() as i32;
    let mut decades: Vec<i32> = samples.iter().map(decade).collect();
    decades.sort_unstable();
    decades.dedup();
    let mut points: Vec<[f64; 2]> = Vec::new();
    for this in decades.into_iter().rev() {
        let all: Vec<OpTiming> = samples.iter().copied().filter(|sample| decade(sample) == this).collect();
        let middle = all.iter().map(|sample| sample.size.ln()).sum::<f64>() / all.len() as f64;
        let size = rounded(middle.exp() / unit);
        let least = points.last().map_or(0.0, |larger| larger[1] * size / larger[0]);
        points.push([size, (median(all.iter().map(OpTiming::rate)) / peak).max(least)]);
    }
    points.reverse();
    points.into_iter().map(|[size, share]| [size, rounded(share)]).collect()
}

/// What samples reach of the rate by which an operation of a size is expected to take so many seconds: their
/// median.
pub fn share_of(expected: impl Fn(f64) -> f64, seen: &[OpTiming]) -> f64 {
    rounded(median(seen.iter().map(|sample| expected(sample.size) / sample.seconds)))
}

impl Fabric {
    /// The link that comes closest to what was seen, by relative error: each pattern of messages with its
    /// words, of so many bytes. `efficiency` is what rings reach of the rate of messages between two.
    pub fn fit(point_to_point: &[(Cost, f64)], rings: &[(Cost, f64)], word_bytes: f64) -> Fabric {
        let efficiency = AlphaBeta::fit(point_to_point).beta / AlphaBeta::fit(rings).beta;
        let efficiency = if efficiency.is_finite() && efficiency > 0.0 { efficiency } else { 1.0 };
        // As many words as a message between two would have sent in that time: then one alpha and one beta
        // hold for both.
        let scaled =
            |(cost, seconds): &(Cost, f64)| (Cost { words: cost.words / efficiency, ..*cost }, *seconds);
        let all: Vec<_> = point_to_point.iter().copied().chain(rings.iter().map(scaled)).collect();
        let AlphaBeta { alpha, beta } = AlphaBeta::fit(&all);
        // Where times do not grow with the words, nothing is known of the rate but that it is at least the
        // highest seen.
        let seen = all.iter().map(|(cost, seconds)| cost.words / seconds).fold(f64::MIN_POSITIVE, f64::max);
        let beta = if beta > 0.0 { beta } else { 1.0 / seen };
        Fabric {
            alpha_us: rounded(alpha * 1e6),
            gb_per_s: rounded(word_bytes / beta * 1e-9),
            efficiency: rounded(efficiency),
            ..Fabric::NONE
        }
    }
}

/// The middle one, or the mean of the two in the middle; NaN of none.
pub fn median(numbers: impl IntoIterator<Item = f64>) -> f64 {
    let mut numbers: Vec<f64> = numbers.into_iter().collect();
    numbers.sort_by(f64::total_cmp);
    match numbers.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => numbers[n / 2],
        n => (numbers[n / 2 - 1] + numbers[n / 2]) / 2.0,
    }
}

/// Three digits: more is noise, and nobody reads it.
pub fn rounded(number: f64) -> f64 {
    format!("{number:.2e}").parse().expect("a number that was just written")
}

#[cfg(test)]
mod tests {
    use super::super::MatmulRates;
    use super::*;

    fn took(size: f64, seconds: f64) -> OpTiming {
        OpTiming { size, seconds }
    }

    /// A noisy machine may take no longer for more words: the rate is then the highest seen, and no infinity.
    #[test]
    fn a_link_has_a_rate_whatever_was_seen() {
        let seen = [(1.0, 1e3, 2e-6), (1.0, 1e4, 2e-6), (1.0, 1e3, 3e-6)];
        let seen = seen.map(|(messages, words, seconds)| (Cost { messages, words }, seconds));
        let link = Fabric::fit(&seen, &seen, 4.0);
        assert!(link.gb_per_s.is_finite() && link.gb_per_s > 0.0 && link.efficiency > 0.0, "{link:?}");
        let shrinking = [(1.0, 1e3, 9e-6), (1.0, 1e4, 1e-6)];
        let shrinking = shrinking.map(|(messages, words, seconds)| (Cost { messages, words }, seconds));
        assert_eq!(Fabric::fit(&shrinking, &shrinking, 4.0).gb_per_s, 40.0);
    }

    #[test]
    fn a_decade_is_one_point_with_the_median_of_its_shares() {
        // Around 1e9: rates of 1e12, 2e12 and 6e12; around 1e10: 8e12.
        let samples = [took(8e8, 8e-4), took(1e9, 5e-4), took(1.25e9, 1.25e9 / 6e12), took(1e10, 1.25e-3)];
        assert_eq!(efficiency(&samples, 1e9, 1e13), [[1.0, 0.2], [10.0, 0.8]]);
        assert_eq!(best_rate(&samples), 8e12);
        assert!(efficiency(&[], 1e9, 1e13).is_empty());
    }

    #[test]
    fn a_small_one_that_was_held_up_takes_as_long_as_a_large_one() {
        let samples = [took(1e6, 1e-3), took(1e7, 1e-5), took(1e8, 2e-5)];
        let points = efficiency(&samples, 1e9, 1e13);
        assert_eq!(points, [[0.001, 0.01], [0.01, 0.1], [0.1, 0.5]]);
        let matrix = MatmulRates::plain(10.0, points);
        assert!((matrix.seconds(1e6) / 1e-5 - 1.0).abs() < 1e-9);
    }

    #[test]
    fn convolutions_are_held_against_products() {
        let matrix = MatmulRates::plain(1.0, vec![[1.0, 0.5], [10.0, 0.5]]);
        let seen = [took(1e9, 4e-3), took(2e9, 8e-3), took(4e9, 8e-3)];
        assert_eq!(share_of(|flops| matrix.seconds(flops), &seen), 0.5);
    }

    /// 5 microseconds, 20 GB/s between two, and half of that in rings.
    #[test]
    fn a_link_is_found_again() {
        let seen = |messages: f64, words: f64, bytes_a_second: f64| {
            (Cost { messages, words }, 5e-6 * messages + 4.0 * words / bytes_a_second)
        };
        let two = [seen(1.0, 256.0, 20e9), seen(1.0, 1e6, 20e9)];
        let rings = [seen(6.0, 256.0, 10e9), seen(6.0, 1e6, 10e9), seen(3.0, 1e6, 10e9)];
        let found = Fabric::fit(&two, &rings, 4.0);
        assert_eq!((found.alpha_us, found.gb_per_s, found.efficiency), (5.0, 20.0, 0.5), "{found:?}");
        assert_eq!((found.shared_by, found.occupies), (1, 0.0));
    }

    #[test]
    fn three_digits_are_left() {
        assert_eq!([0.123_456, 98_765.0, 1.0, 3e-9].map(rounded), [0.123, 98_800.0, 1.0, 3e-9]);
        assert!(median([]).is_nan());
        assert_eq!((median([3.0, 1.0, 2.0]), median([4.0, 1.0, 2.0, 3.0])), (2.0, 2.5));
    }
}
