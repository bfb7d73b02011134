//! From logits to a token: the likeliest, or one that is sampled from the likely ones.
//!
//! Logits are divided by the temperature; of the tokens the `top_k` likeliest stay, and of these the fewest
//! whose probabilities add up to `top_p` (nucleus sampling, Holtzman et al. 2020), without those that are
//! less than `min_p` times as likely as the likeliest (Nguyen et al. 2024). Before that the logits of tokens
//! that the text has already are divided by the repetition penalty where they are positive, and multiplied by
//! it where they are not (Keskar et al. 2019). What is sampled depends on the seed and the number of the token
//! alone, so a text repeats on any layout of ranks that gives the same logits.

use std::collections::BTreeSet;

use espalier_tensor::ops::argmax;
use espalier_tensor::random;

/// Apart from every other use of a seed.
const PURPOSE: u64 = u64::from_be_bytes(*b"sampling");

/// How a token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// What logits are divided by; 0: the likeliest token, always.
    pub temperature: f64,
    /// How many of the likeliest tokens can be sampled; 0: all.
    pub top_k: usize,
    /// The fraction of probability that can be sampled, in (0, 1].
    pub top_p: f64,
    /// Tokens that are less than this times as likely as the likeliest cannot be sampled; 0: all can.
    pub min_p: f64,
    /// Above 1 tokens of the prompt and of the text so far are less likely; 1: as likely as ever.
    pub repetition_penalty: f64,
    pub seed: u64,
}

impl Sampling {
    /// The likeliest token, always.
    pub const GREEDY: Sampling =
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 };
}

/// Chooses the tokens of one text.
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    key: u64,
    /// Tokens chosen so far.
    chosen: u64,
    /// Those of the prompt and of the text, where they count.
    seen: BTreeSet<u32>,
}

impl Sampler {
    /// At the beginning of a text.
    pub fn new(sampling: Sampling) -> Sampler {
        Sampler { sampling, key: random::key(sampling.seed, PURPOSE), chosen: 0, seen: BTreeSet::new() }
    }

    /// Whether nothing but the logits has a part in it: it is the likeliest token, always.
    pub(crate) fn is_argmax(&self) -> bool {
        self.is_greedy() && !self.has_penalty()
    }

    fn is_greedy(&self) -> bool {
        self.sampling.temperature == 0.0 || self.sampling.top_k == 1
    }

    fn has_penalty(&self) -> bool {
        self.sampling.repetition_penalty != 1.0
    }

    /// Takes note of tokens that stand in the text without having been chosen here.
    pub fn read(&mut self, ids: &[u32]) {
        if self.has_penalty() {
            self.seen.extend(ids);
        }
    }

    /// The next token. Of equally likely ones the first comes first; a logit that is no number is never chosen.
    pub fn choose(&mut self, logits: &[f32]) -> u32 {
        if !self.has_penalty() {
            return self.sample(logits);
        }
        let (mut logits, penalty) = (logits.to_vec(), self.sampling.repetition_penalty as f32);
        for token in &self.seen {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
        }
        let token = self.sample(&logits);
        self.seen.insert(token);
        token
    }

    fn sample(&mut self, logits: &[f32]) -> u32 {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        self.chosen += 1;
        if self.is_greedy() {
            return argmax::of_slice(logits);
        }
        let mut tokens: Vec<u32> =
            (0..logits.len() as u32).filter(|token| !logits[*token as usize].is_nan()).collect();
        let order =
            |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then_with(|| a.cmp(b));
        if (1..tokens.len()).contains(&top_k) {
            tokens.select_nth_unstable_by(top_k - 1, order);
            tokens.truncate(top_k);
        }
        tokens.sort_unstable_by(order);
        let Some(first) = tokens.first() else { return 0 };
        let top = f64::from(logits[*first as usize]);
        let weight = |token: &u32| ((f64::from(logits[*token as usize]) - top) / temperature).exp();
        let weights: Vec<f64> = tokens.iter().map(weight).collect();
        let mut total: f64 = weights.iter().sum();
        if top_p < 1.0 {
            let (mass, mut sum) = (top_p * total, 0.0);
            let enough = weights.iter().position(|weight| {
                sum += weight;
                sum >= mass
            });
            tokens.truncate(enough.map_or(tokens.len(), |last| last + 1));
        }
        // The likeliest weighs 1, and weights fall.
        tokens.truncate(weights[..tokens.len()].partition_point(|weight| *weight >= min_p).max(1));
        if tokens.len() < weights.len() {
            total = weights[..tokens.len()].iter().sum();
        }
        let mut left = random::uniform(self.key, self.chosen - 1) * total;
        let sampled = weights[..tokens.len()].iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        tokens[sampled.unwrap_or(tokens.len() - 1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 6] = [0.0, 2.0, f32::NAN, 1.0, 2.0, -1.0];

    fn sampled(sampling: Sampling, count: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(sampling);
        (0..count).map(|_| sampler.choose(&LOGITS)).collect()
    }

    #[test]
    fn without_temperature_the_first_of_the_likeliest_is_chosen() {
        assert_eq!(sampled(Sampling::GREEDY, 3), [1, 1, 1]);
        assert_eq!(sampled(Sampling { temperature: 5.0, top_k: 1, ..Sampling::GREEDY }, 3), [1, 1, 1]);
    }

    /// Frequencies over many samples against the softmax, at two temperatures.
    #[test]
    fn tokens_are_sampled_as_often_as_they_are_likely() {
        for temperature in [0.7, 1.5] {
            let sampling = Sampling { temperature, seed: 3, ..Sampling::GREEDY };
            let (count, all) = (40_000, sampled(sampling, 40_000));
            let weight = |token: usize| (f64::from(LOGITS[token]) / temperature).exp();
            let tokens = [0, 1, 3, 4, 5];
            let total: f64 = tokens.iter().map(|token| weight(*token)).sum();
            for token in tokens {
                let seen = all.iter().filter(|sampled| **sampled as usize == token).count() as f64;
                let frequency = seen / f64::from(count);
                assert!((frequency - weight(token) / total).abs() < 0.01, "{token}: {frequency}");
            }
            assert!(!all.contains(&2), "a logit that is no number");
        }
    }

    #[test]
    fn the_unlikely_are_left_out() {
        let seen = |sampling| {
            let mut seen = sampled(sampling, 4000);
            seen.sort_unstable();
            seen.dedup();
            seen
        };
        let hot = Sampling { temperature: 3.0, seed: 1, ..Sampling::GREEDY };
        assert_eq!(seen(hot), [0, 1, 3, 4, 5]);
        assert_eq!(seen(Sampling { top_k: 3, ..hot }), [1, 3, 4]);
        assert_eq!(seen(Sampling { top_k: 99, ..hot }), [0, 1, 3, 4, 5]);
        // At temperature 3 the two likeliest have a probability of 0.54, the three likeliest of 0.73.
        assert_eq!(seen(Sampling { top_p: 0.6, ..hot }), [1, 3, 4]);
        assert_eq!(seen(Sampling { top_p: 0.5, ..hot }), [1, 4]);
        assert_eq!(seen(Sampling { top_p: 0.01, ..hot }), [1]);
        // exp(-1/3) = 0.72 and exp(-2/3) = 0.51 of the likeliest.
        assert_eq!(seen(Sampling { min_p: 0.5, ..hot }), [0, 1, 3, 4]);
        assert_eq!(seen(Sampling { min_p: 0.6, ..hot }), [1, 3, 4]);
        assert_eq!(seen(Sampling { min_p: 1.0, ..hot }), [1, 4]);
        assert_eq!(seen(Sampling { min_p: 0.6, top_k: 1, ..hot }), [1]);
    }

    #[test]
    fn what_stands_in_the_text_is_less_likely_again() {
        let mut sampler = Sampler::new(Sampling { repetition_penalty: 3.0, ..Sampling::GREEDY });
        assert!(!sampler.is_argmax(), "a GPU must show its logits");
        sampler.read(&[4, 99]);
        // 4 falls from 2 to 0.67, then 1 does, then 3 from 1 to 0.33; -1 would become -3.
        assert_eq!([0; 5].map(|_| sampler.choose(&LOGITS)), [1, 3, 1, 1, 1]);
        let mut below = Sampler::new(Sampling { repetition_penalty: 3.0, ..Sampling::GREEDY });
        below.read(&[1]);
        assert_eq!(below.choose(&[-2.0, -1.0]), 0, "-1 counts as -3");
    }

    #[test]
    fn a_seed_gives_its_tokens_again_and_another_gives_others() {
        let hot = |seed| sampled(Sampling { temperature: 2.0, seed, ..Sampling::GREEDY }, 50);
        assert_eq!(hot(7), hot(7));
        assert_ne!(hot(7), hot(8));
    }
}
