//! What messages cost, by the alpha-beta model: a message takes `alpha` seconds to start and `beta` seconds
//! for each word.
//!
//! [`collective`] has one function for each pattern of messages. [`layer`] puts them together into what a
//! layer costs under data, model and domain parallelism (Gholami et al. 2018), [`crossing`] says where one
//! overtakes another, [`integrated`] which mixture of them is the cheapest for a model, moves between layers
//! included, and [`explanation`] gathers what `espalier explain` prints.
//!
//! Only messages are counted. Computing is split evenly by all three, but for what is not worth it
//! (norms, activations), and nothing is assumed to overlap.

pub mod collective;
pub mod crossing;
pub mod explanation;
pub mod integrated;
pub mod layer;

pub use collective::{AllReduce, CollectivePattern};
pub use explanation::Explanation;
pub use integrated::Integrated;
pub use layer::{LayerSizes, Parallelism};

use std::iter::Sum;
use std::ops::Add;

use serde::Serialize;

/// How fast messages are.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct AlphaBeta {
    /// Seconds to start a message.
    pub alpha: f64,
    /// Seconds for each word.
    pub beta: f64,
}

impl AlphaBeta {
    /// What Gholami et al. 2018 reckon with: 2 microseconds, and 6 GB/s for words of so many bytes.
    pub fn published(word_bytes: u64) -> AlphaBeta {
        AlphaBeta { alpha: 2e-6, beta: word_bytes as f64 / 6e9 }
    }

    /// The alpha and beta that come closest to what patterns of messages were measured to take, by relative
    /// error; neither is below 0.
    pub fn fit(measured: &[(Cost, f64)]) -> AlphaBeta {
        // Normal equations of sum ((alpha messages + beta words) / seconds - 1)^2.
        let scaled = measured.iter().map(|(cost, seconds)| (cost.messages / seconds, cost.words / seconds));
        let sums = scaled.fold([0.0; 5], |[mm, mw, ww, m1, w1], (m, w)| {
            [mm + m * m, mw + m * w, ww + w * w, m1 + m, w1 + w]
        });
        let [mm, mw, ww, m1, w1] = sums;
        let determinant = mm * ww - mw * mw;
        let both =
            AlphaBeta { alpha: (m1 * ww - w1 * mw) / determinant, beta: (w1 * mm - m1 * mw) / determinant };
        match both {
            AlphaBeta { alpha, beta } if alpha >= 0.0 && beta >= 0.0 => both,
            AlphaBeta { alpha, .. } if alpha < 0.0 => AlphaBeta { alpha: 0.0, beta: w1 / ww },
            _ => AlphaBeta { alpha: m1 / mm, beta: 0.0 },
        }
    }
}

/// What a pattern of messages costs each of the ranks that take part, all of them at once.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Cost {
    /// Messages that a rank sends one after another.
    pub messages: f64,
    /// Words that a rank sends.
    pub words: f64,
}

impl Cost {
    pub const FREE: Cost = Cost { messages: 0.0, words: 0.0 };

    /// `alpha` for each message and `beta` for each word.
    pub fn seconds(self, link: AlphaBeta) -> f64 {
        link.alpha * self.messages + link.beta * self.words
    }
}

impl Add for Cost {
    type Output = Cost;

    fn add(self, other: Cost) -> Cost {
        Cost { messages: self.messages + other.messages, words: self.words + other.words }
    }
}

impl Sum for Cost {
    fn sum<I: Iterator<Item = Cost>>(costs: I) -> Cost {
        costs.fold(Cost::FREE, Add::add)
    }
}

/// Where a cost is asked for: what is the same for all layers of a model.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Setting {
    /// Ranks that share the work.
    pub ranks: usize,
    /// Samples of a step, of all ranks together.
    pub batch: usize,
    /// How fast messages are.
    #[serde(flatten)]
    pub link: AlphaBeta,
    /// The algorithm of an all-reduce.
    pub all_reduce: AllReduce,
}

impl Setting {
    /// Seconds of a cost here.
    pub fn seconds(&self, cost: Cost) -> f64 {
        cost.seconds(self.link)
    }

    /// The words of a batch, where a sample has so many.
    fn of_batch(&self, words: f64) -> f64 {
        self.batch as f64 * words
    }

    /// What a pattern of messages costs here.
    pub fn cost(&self, pattern: CollectivePattern) -> Cost {
        match pattern {
            CollectivePattern::AllReduce(words) => self.all_reduced(words),
            CollectivePattern::AllGather(words) => collective::all_gather(self.ranks, words),
            CollectivePattern::Halo(to_before, to_behind) => collective::halo(to_before, to_behind),
        }
    }

    /// An all-reduce of so many words.
    fn all_reduced(&self, words: f64) -> Cost {
        self.all_reduce.cost(self.ranks, words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fit_finds_what_made_the_times() {
        let link = AlphaBeta { alpha: 3e-6, beta: 2e-9 };
        let costs = [(1.0, 1e3), (1.0, 1e6), (6.0, 1e3), (6.0, 1e6)]
            .map(|(messages, words)| Cost { messages, words });
        let found = AlphaBeta::fit(&costs.map(|cost| (cost, cost.seconds(link))));
        assert!(
            (found.alpha / link.alpha - 1.0).abs() < 1e-9 && (found.beta / link.beta - 1.0).abs() < 1e-9,
            "{found:?}"
        );
        // Messages that are faster the more there are of them: no time to start is below 0.
        let found =
            AlphaBeta::fit(&[(costs[0], 1e-6), (costs[1], 2e-3), (costs[2], 0.5e-6), (costs[3], 2e-3)]);
        assert!(found.alpha == 0.0 && found.beta > 0.0, "{found:?}");
    }
}
