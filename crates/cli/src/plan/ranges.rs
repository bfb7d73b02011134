//! Sizes, fractions and ranges as arguments write them.

use anyhow::Result;

use super::wrong;

/// The fraction of weights to prune.
pub fn sparsity(text: &str) -> Result<f64> {
    let fraction = text.trim().parse::<f64>().ok().filter(|fraction| (0.0..1.0).contains(fraction));
    Ok(fraction
        .ok_or_else(|| wrong("--sparsity", "a number in [0, 1), or a range as in 0..0.95", text, None))?)
}

/// `80GB`, `80 GB` or `80`.
pub fn gigabytes(text: &str) -> Result<f64> {
    let number = text.trim().trim_end_matches("GB").trim_end_matches("gb").trim();
    let size = number.parse::<f64>().ok().filter(|size| size.is_finite() && *size > 0.0);
    Ok(size.ok_or_else(|| wrong("--fits", "a size, as in 80GB", text, None))?)
}

/// `gpus=64..2048`: powers of two from the first to the last.
pub fn powers(range: &str) -> Result<Vec<usize>> {
    let refuse = || wrong("--sweep", "a range of devices, as in gpus=64..2048", range, None);
    let (from, to) =
        range.trim().strip_prefix("gpus=").and_then(|range| range.split_once("..")).ok_or_else(refuse)?;
    let positive = |text: &str| text.trim().parse::<usize>().ok().filter(|number| *number > 0);
    let (Some(from), Some(to)) = (positive(from), positive(to)) else { return Err(refuse().into()) };
    if from > to {
        return Err(refuse().into());
    }
    let doubled = std::iter::successors(Some(from), |number| number.checked_mul(2));
    Ok(doubled.take_while(|number| *number <= to).collect())
}
