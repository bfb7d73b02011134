//! Synthetic arithmetic, "17+25=42\n" and "17-25=-8\n", one line after the other: text whose answers can be
//! learnt, with a vocabulary so small that a tiny model shows it within minutes.
//!
//! The lines are a pure function of the seed. Their operands cannot be foreseen, so the loss does not fall to
//! zero: with two digits a line carries ln(100 * 100 * 2) = 9.9 nats in 9.2 characters on average, and 1.08
//! nats a character is the best any model can do. What follows "=" can be learnt wholly.

use crate::{Error, error::FEWER};
use espalier_tensor::random;

/// The characters, in the order of their ids.
pub(crate) const ALPHABET: &[u8; 14] = b"0123456789+-=\n";

/// Ids are below this: two more than there are characters, so that a vocabulary split over ranks splits evenly.
pub(crate) const VOCAB: usize = 16;

/// Lines of arithmetic to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arithmetic {
    /// Lines in all splits together.
    pub count: usize,
    /// Operands have at most this many digits: 1 to 9.
    pub digits: u32,
    /// Another seed, other operands.
    pub seed: u64,
}

impl Arithmetic {
    /// The ids of all lines, one after the other.
    pub(crate) fn write(&self) -> Result<Vec<u8>, Error> {
        if !(1..=9).contains(&self.digits) {
            return Err(Error::setting("digits", "1 to 9", self.digits));
        }
        if self.count == 0 {
            return Err(Error::setting("count", "at least one sample", self.count));
        }
        let mut ids = Vec::new();
        let refused = |_| Error::too_large("data.arithmetic", self.least_bytes(), FEWER);
        ids.try_reserve(usize::try_from(self.least_bytes()).unwrap_or(usize::MAX)).map_err(refused)?;
        let text = (0..self.count as u64).flat_map(|i| self.line(i).into_bytes());
        ids.extend(text.map(|c| id(c).expect("sums are made of the alphabet")));
        Ok(ids)
    }

    /// Bytes that all lines take at least: the shortest one is "0+0=0" and a line break.
    pub(crate) fn least_bytes(&self) -> u64 {
        (self.count as u64).saturating_mul(6)
    }

    fn line(&self, i: u64) -> String {
        let key = random::key(self.seed, i);
        let bound = 10i64.pow(self.digits);
        let [a, b] = [0, 1].map(|n| i64::from(random::bits(key, n)) % bound);
        if random::bits(key, 2) & 1 == 0 {
            format!("{a}+{b}={}\n", a + b)
        } else {
            format!("{a}-{b}={}\n", a - b)
        }
    }
}

/// The id of a character, if it has one.
pub(crate) fn id(character: u8) -> Option<u8> {
    ALPHABET.iter().position(|&c| c == character).map(|i| i as u8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tokenizer;

    fn text(sums: Arithmetic) -> String {
        let ids: Vec<u32> = sums.write().unwrap().into_iter().map(u32::from).collect();
        String::from_utf8(Tokenizer::Arithmetic.decode(&ids)).unwrap()
    }

    /// Every line is true, both signs occur, and operands fill their range.
    #[test]
    fn sums_are_true() {
        let text = text(Arithmetic { count: 2000, digits: 2, seed: 4 });
        let (mut pluses, mut largest) = (0, 0);
        for line in text.lines() {
            let (problem, answer) = line.split_once('=').unwrap();
            let plus = problem.contains('+');
            let (a, b) = problem.split_once(if plus { '+' } else { '-' }).unwrap();
            let (a, b): (i64, i64) = (a.parse().unwrap(), b.parse().unwrap());
            assert_eq!(answer.parse::<i64>().unwrap(), if plus { a + b } else { a - b }, "{line}");
            pluses += usize::from(plus);
            largest = largest.max(a).max(b);
        }
        assert_eq!(text.lines().count(), 2000);
        assert!((900..1100).contains(&pluses) && largest == 99);
    }

    /// The same seed gives the same lines, fewer are the beginning of more, and another seed gives others.
    #[test]
    fn the_seed_decides() {
        let sums = Arithmetic { count: 50, digits: 3, seed: 1 };
        assert_eq!(text(sums), text(sums));
        assert!(text(sums).starts_with(&text(Arithmetic { count: 20, ..sums })));
        assert_ne!(text(sums), text(Arithmetic { seed: 2, ..sums }));
    }

    #[test]
    fn what_makes_no_sums_is_refused() {
        let error = |count, digits| Arithmetic { count, digits, seed: 0 }.write().unwrap_err();
        assert!(matches!(error(9, 0), Error::Setting { field: "digits", .. }));
        assert!(matches!(error(9, 10), Error::Setting { field: "digits", .. }));
        assert!(matches!(error(0, 2), Error::Setting { field: "count", .. }));
    }
}
