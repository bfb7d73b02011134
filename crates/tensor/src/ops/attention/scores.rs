//! What happens to a block of scores between two products, row by row: softmax forward, its gradient backward.

use crate::cpu::math::exp;
use crate::dtype::Float;
use crate::simd;

/// Queries in a block: many, because each product packs its keys anew.
pub(super) const QUERIES: usize = 256;
/// Keys in a block: few, because half of the block on the diagonal is not needed. Divides `QUERIES`.
pub(super) const KEYS: usize = 64;

/// Sums over this many lanes at once; the order of additions is the same for every instruction set.
const LANES: usize = 16;

#[inline(always)]
fn fold(mut lanes: [f32; LANES], join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            lanes[l] = join(lanes[l], lanes[l + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// How many keys of a block the query sees that is `r` rows below the first, which is `ahead` of the first key.
#[inline(always)]
fn visible_keys(ahead: usize, r: usize, keys: usize) -> u32 {
    (ahead + r + 1).min(keys) as u32
}

/// How many keys of a block, whose first is `first_key` of the sequence, come before the document of the query in
/// row `r`; `starts` is empty where a sequence is one document.
#[inline(always)]
fn hidden_keys(starts: &[u32], r: usize, first_key: usize) -> u32 {
    if starts.is_empty() { 0 } else { starts[r].saturating_sub(first_key as u32) }
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

simd! {
    /// y = x factor.
    pub(super) fn scaled[T: Float](x: &[f32], factor: f32, y: &mut [T]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = T::from_f32(x * factor);
        }
    }

    /// sum of a b.
    pub(super) fn dot[T: Float](a: &[T], b: &[T]) -> f32 {
        let mut lanes = [0.0f32; LANES];
        let (a16, b16) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
        let rest = a16.remainder().iter().zip(b16.remainder());
        let rest: f32 = rest.map(|(a, b)| a.to_f32() * b.to_f32()).sum();
        for (a, b) in a16.zip(b16) {
            for l in 0..LANES {
                lanes[l] += a[l].to_f32() * b[l].to_f32();
            }
        }
        fold(lanes, |a, b| a + b) + rest
    }

    /// The weights e^(s - maximum) of a block of scores, and the running sums brought to the new maxima.
    ///
    /// Rows are `KEYS` apart and always worked on whole, so that the compiler knows their length; what lies past
    /// the keys that a query sees does not count.
    pub(super) fn softmax[T: Float](
        scores: &mut [f32],
        p: &mut [T],
        ahead: usize,
        keys: usize,
        starts: &[u32],
        first_key: usize,
        scale: f32,
        running: [&mut [f32]; 2],
        out: &mut [f32],
        d: usize,
    ) {
        let [maxima, totals] = running;
        let mut shrink = [0.0f32; QUERIES];
        let shrink = &mut shrink[..maxima.len()];
        for (r, (row, maximum)) in scores.chunks_exact_mut(KEYS).zip(&mut *maxima).enumerate() {
            let (hidden, visible_keys) = (hidden_keys(starts, r, first_key), visible_keys(ahead, r, keys));
            for k in 0..KEYS {
                let visible = (k as u32) < visible_keys && (k as u32) >= hidden;
                row[k] = if visible { row[k] * scale } else { f32::NEG_INFINITY };
            }
            let mut lanes = [f32::NEG_INFINITY; LANES];
            for row in row.chunks_exact(LANES) {
                for l in 0..LANES {
                    lanes[l] = larger(lanes[l], row[l]);
                }
            }
            let old = *maximum;
            *maximum = larger(old, fold(lanes, larger));
            // A query that has seen no key yet has nothing to shrink.
            shrink[r] = if *maximum == f32::NEG_INFINITY { 0.0 } else { old - *maximum };
        }
        for (shrink, total) in shrink.iter_mut().zip(&mut *totals) {
            *shrink = exp(*shrink);
            *total *= *shrink;
        }
        let rows = scores.chunks_exact(KEYS).zip(p.chunks_exact_mut(KEYS));
        for (r, (row, p)) in rows.take(maxima.len()).enumerate() {
            let mut lanes = [0.0f32; LANES];
            let maximum = if maxima[r] == f32::NEG_INFINITY { 0.0 } else { maxima[r] };
            for (row, p) in row.chunks_exact(LANES).zip(p.chunks_exact_mut(LANES)) {
                for l in 0..LANES {
                    let e = exp(row[l] - maximum);
                    p[l] = T::from_f32(e);
                    lanes[l] += e;
                }
            }
            totals[r] += fold(lanes, |a, b| a + b);
            if shrink[r] != 1.0 {
                out[r * d..(r + 1) * d].iter_mut().for_each(|x| *x *= shrink[r]);
            }
        }
    }

    /// The probabilities of a block of scores and the gradients of these. Rows as in `softmax`.
    pub(super) fn gradients[T: Float](
        scores: &[f32],
        dp: &[f32],
        p: &mut [T],
        ds: &mut [T],
        ahead: usize,
        keys: usize,
        starts: &[u32],
        first_key: usize,
        scale: f32,
        logsumexp: &[f32],
        inner: &[f32],
    ) {
        let sources = scores.chunks_exact(KEYS).zip(dp.chunks_exact(KEYS));
        let results = p.chunks_exact_mut(KEYS).zip(ds.chunks_exact_mut(KEYS));
        for (r, ((s, dp), (p, ds))) in sources.zip(results).take(inner.len()).enumerate() {
            let (hidden, visible_keys) = (hidden_keys(starts, r, first_key), visible_keys(ahead, r, keys));
            for k in 0..KEYS {
                let e = exp(s[k] * scale - logsumexp[r]);
                let visible = (k as u32) < visible_keys && (k as u32) >= hidden;
                p[k] = T::from_f32(if visible { e } else { 0.0 });
                ds[k] = T::from_f32(if visible { e * (dp[k] - inner[r]) * scale } else { 0.0 });
            }
        }
    }
}
