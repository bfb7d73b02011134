//! One function a pattern of messages: how many a rank sends one after another, and how many words.
//!
//! `ranks` is P and `words` is n, the length of what a rank ends with: the vector that is reduced, or the one
//! that is gathered. Rings send P - 1 messages of n / P words; trees and halvings go through log2 P rounds,
//! rounded up.

use serde::Serialize;

use super::Cost;

/// The algorithm of an all-reduce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AllReduce {
    #[default]
    Ring,
    Tree,
    Halving,
}

impl AllReduce {
    /// All of them, with their words.
    pub const ALL: [(&'static str, AllReduce); 3] =
        [("ring", AllReduce::Ring), ("tree", AllReduce::Tree), ("halving", AllReduce::Halving)];

    pub fn cost(self, ranks: usize, words: f64) -> Cost {
        match self {
            // A reduce-scatter and an all-gather, each once around a ring: 2 (P - 1) messages, 2 (P - 1)/P n
            // words. The words hardly depend on P, the messages do.
            AllReduce::Ring => reduce_scatter(ranks, words) + all_gather(ranks, words),
            // Up a tree and down again: 2 log2 P messages of all n words. For short vectors.
            AllReduce::Tree => pattern(2.0 * rounds(ranks), 2.0 * rounds(ranks) * words),
            // Reduce-scatter by halving the vector and all-gather by doubling it (Rabenseifner): the few messages
            // of a tree and the few words of a ring, 2 log2 P and 2 (P - 1)/P n. It wants links between all ranks.
            AllReduce::Halving => pattern(2.0 * rounds(ranks), 2.0 * others(ranks) / ranks as f64 * words),
        }
    }
}

/// A pattern of messages with its words, as a layer needs it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum CollectivePattern {
    /// Of so many words.
    AllReduce(f64),
    /// Shards of all ranks, so many words together.
    AllGather(f64),
    /// So many words to the rank before, and to the one behind: [`halo`].
    Halo(f64, f64),
}

/// Each rank gets its P-th of the sum: P - 1 messages, (P - 1)/P n words.
pub fn reduce_scatter(ranks: usize, words: f64) -> Cost {
    pattern(others(ranks), others(ranks) / ranks as f64 * words)
}

/// The shards of all ranks, for all of them: P - 1 messages, (P - 1)/P n words.
pub fn all_gather(ranks: usize, words: f64) -> Cost {
    pattern(others(ranks), others(ranks) / ranks as f64 * words)
}

/// What is sharded along one dimension becomes sharded along another: of its n/P words each rank sends a P-th
/// to every other. n is the length of all shards together.
pub fn all_to_all(ranks: usize, words: f64) -> Cost {
    let local = words / ranks as f64;
    pattern(others(ranks), others(ranks) / ranks as f64 * local)
}

/// One rank to another.
pub fn point_to_point(words: f64) -> Cost {
    pattern(1.0, words)
}

/// Edges of an image that is split into slabs, to the neighbours on both sides at once: the longer of the two
/// counts.
pub fn halo(to_before: f64, to_after: f64) -> Cost {
    point_to_point(to_before.max(to_after))
}

/// Costs nothing where there is nothing to send, or nobody to send it to.
fn pattern(messages: f64, words: f64) -> Cost {
    if words > 0.0 { Cost { messages, words } } else { Cost::FREE }
}

fn others(ranks: usize) -> f64 {
    ranks.saturating_sub(1) as f64
}

fn rounds(ranks: usize) -> f64 {
    f64::from(ranks.max(1).next_power_of_two().ilog2())
}

#[cfg(test)]
mod tests {
    use super::super::AlphaBeta;
    use super::*;

    fn cost(messages: f64, words: f64) -> Cost {
        Cost { messages, words }
    }

    /// By hand, for P = 4 and n = 1000.
    #[test]
    fn the_formulas_for_four_ranks() {
        assert_eq!(AllReduce::Ring.cost(4, 1000.0), cost(6.0, 1500.0));
        assert_eq!(AllReduce::Tree.cost(4, 1000.0), cost(4.0, 4000.0));
        assert_eq!(AllReduce::Halving.cost(4, 1000.0), cost(4.0, 1500.0));
        assert_eq!(reduce_scatter(4, 1000.0), cost(3.0, 750.0));
        assert_eq!(all_gather(4, 1000.0), cost(3.0, 750.0));
        assert_eq!(all_to_all(4, 1000.0), cost(3.0, 187.5));
        assert_eq!(point_to_point(1000.0), cost(1.0, 1000.0));
        assert_eq!(halo(300.0, 200.0), cost(1.0, 300.0));
    }

    /// AlexNet's 61 million gradients on 512 ranks at 2 microseconds and 6 GB/s: 81 ms on the wire, and 2
    /// more for a ring's messages; a tree sends the whole vector 18 times.
    #[test]
    fn seconds_of_a_published_size() {
        let link = AlphaBeta::published(4);
        let n = 61_100_840.0;
        let wire = 2.0 * 511.0 / 512.0 * n * 4.0 / 6e9;
        let close = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-12, "{a} {b}");
        close(AllReduce::Ring.cost(512, n).seconds(link), 2.0 * 511.0 * 2e-6 + wire);
        close(AllReduce::Halving.cost(512, n).seconds(link), 18.0 * 2e-6 + wire);
        close(AllReduce::Tree.cost(512, n).seconds(link), 18.0 * (2e-6 + n * 4.0 / 6e9));
        assert!((wire - 0.0813).abs() < 1e-4, "{wire}");
    }

    #[test]
    fn one_rank_and_no_words_cost_nothing() {
        for (name, how) in AllReduce::ALL {
            assert_eq!(how.cost(1, 1000.0), Cost::FREE, "{name}");
            assert_eq!(how.cost(8, 0.0), Cost::FREE, "{name}");
        }
        assert_eq!(all_gather(1, 9.0) + reduce_scatter(1, 9.0) + all_to_all(1, 9.0), Cost::FREE);
        assert_eq!(halo(0.0, 0.0), Cost::FREE);
    }

    /// Five ranks need as many rounds as eight.
    #[test]
    fn rounds_are_rounded_up() {
        assert_eq!(AllReduce::Tree.cost(5, 10.0), cost(6.0, 60.0));
        assert_eq!(AllReduce::Halving.cost(5, 10.0), cost(6.0, 16.0));
    }
}
