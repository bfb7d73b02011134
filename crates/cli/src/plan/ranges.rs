//! Sizes, fractions, amounts and ranges as arguments write them.

use std::ops::RangeInclusive;

use anyhow::Result;

use super::wrong;

/// The fraction of weights to prune.
pub fn sparsity(text: &str) -> Result<f64> {
    let fraction = text.trim().parse::<f64>().ok().filter(|fraction| (0.0..1.0).contains(fraction));
    Ok(fraction
        .ok_or_else(|| wrong("--sparsity", "a number in [0, 1), or a range as in 0..0.95", text, None))?)
}

/// One fraction, or those of `0..0.95`.
pub fn sparsities(text: &str) -> Result<RangeInclusive<f64>> {
    let Some((from, to)) = text.split_once("..") else { return sparsity(text).map(|one| one..=one) };
    let (from, to) = (sparsity(from)?, sparsity(to)?);
    if from > to {
        return Err(wrong("--sparsity", "a range that grows, as in 0..0.95", text, None).into());
    }
    Ok(from..=to)
}

/// `80GB`, `80 GB` or `80`.
pub fn gigabytes(text: &str) -> Result<f64> {
    let number = text.trim().trim_end_matches("GB").trim_end_matches("gb").trim();
    let size = number.parse::<f64>().ok().filter(|size| size.is_finite() && *size > 0.0);
    Ok(size.ok_or_else(|| wrong("--fits", "a size, as in 80GB", text, None))?)
}

/// `300B`, `1.5T`, `2e9`: so many things.
pub fn amount(option: &str, text: &str) -> Result<f64> {
    let written = text.trim();
    let unit = match written.chars().last().map(|letter| letter.to_ascii_uppercase()) {
        Some('K') => 1e3,
        Some('M') => 1e6,
        Some('B') => 1e9,
        Some('T') => 1e12,
        _ => 1.0,
    };
    let number = if unit > 1.0 { &written[..written.len() - 1] } else { written };
    let amount = number.trim().parse::<f64>().ok().map(|number| unit * number);
    let amount = amount.filter(|amount| amount.is_finite() && *amount >= 1.0);
    Ok(amount.ok_or_else(|| wrong(option, "a number, as in 300B", text, None))?)
}

/// `gpus=64..2048`: powers of two from the first to the last.
pub fn powers(range: &str) -> Result<Vec<usize>> {
    let refuse = || wrong("--sweep", "a range of devices, as in gpus=64..2048", range, None);
    let numbers = range.trim().strip_prefix("gpus=").filter(|range| range.contains(".."));
    Ok(numbers.and_then(numbers_of).ok_or_else(refuse)?)
}

/// `256,512`, or `64..2048`: from the first to the last, each twice the one before.
pub fn doublings(option: &str, text: &str) -> Result<Vec<usize>> {
    let expected = "numbers as in 256,512, or a range as in 64..4096";
    Ok(numbers_of(text).ok_or_else(|| wrong(option, expected, text, None))?)
}

fn numbers_of(text: &str) -> Option<Vec<usize>> {
    let positive = |text: &str| text.trim().parse::<usize>().ok().filter(|number| *number > 0);
    let Some((from, to)) = text.split_once("..") else { return text.split(',').map(positive).collect() };
    let (from, to) = (positive(from)?, positive(to)?);
    let doubled = std::iter::successors(Some(from), |number| number.checked_mul(2));
    (from <= to).then(|| doubled.take_while(|number| *number <= to).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_and_ranges_are_read_and_others_refused() {
        let tokens = |text| amount("--tokens", text).ok();
        assert_eq!(["300B", "1.5t", " 2e9 ", "7"].map(tokens), [3e11, 1.5e12, 2e9, 7.0].map(Some));
        assert_eq!(["", "B", "-3B", "0", "many", "nanB", "1e400"].map(tokens), [None; 7]);
        let batches = |text| doublings("--batches", text).ok();
        assert_eq!(batches("7, 12"), Some(vec![7, 12]));
        assert_eq!(batches("24..100"), Some(vec![24, 48, 96]));
        assert_eq!(["0", "8..4", "8,,9", "a", ""].map(batches), [const { None }; 5]);
        assert_eq!(powers("gpus=2..9").unwrap(), [2, 4, 8]);
        assert!(powers("gpus=2").is_err() && powers("2..8").is_err());
        assert_eq!(sparsities("0.5").unwrap(), 0.5..=0.5);
        assert!(sparsities("0..0.9").unwrap().contains(&0.9) && sparsities("0.9..0").is_err());
    }
}
