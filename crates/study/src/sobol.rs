//! Sobol's points: evenly spread in the unit cube however many are taken, so that a search can stop or go on
//! anywhere.
//!
//! Point n is the exclusive or of the direction numbers v_i of the bits i of n's Gray code (Antonov & Saleev
//! 1979). Directions come from a primitive polynomial and some odd numbers for each dimension, those of Joe &
//! Kuo (2008), `new-joe-kuo-6`.

/// Bits of a coordinate, and so of a point's number.
const BITS: usize = 32;

/// Of each dimension but the first: coefficients of the primitive polynomial between its first and its last
/// one, and the first odd numbers, as many as the polynomial's degree.
const JOE_KUO: [(u32, &[u32]); 9] = [
    (0, &[1]),
    (1, &[1, 3]),
    (1, &[1, 3, 1]),
    (2, &[1, 1, 1]),
    (1, &[1, 1, 3, 3]),
    (4, &[1, 3, 5, 13]),
    (2, &[1, 1, 5, 5, 17]),
    (4, &[1, 1, 5, 5, 5]),
    (7, &[1, 1, 7, 11, 19]),
];

/// The most dimensions that there are directions for.
pub(crate) const DIMENSIONS: usize = JOE_KUO.len() + 1;

/// Point `number` of the sequence in so many dimensions, each coordinate in [0, 1). Number 0 is the origin, a
/// corner of the search, so whoever searches begins at 1.
///
/// # Panics
/// Panics with more than `DIMENSIONS` dimensions.
pub fn point(number: u32, dimensions: usize) -> Vec<f64> {
    assert!(
        dimensions <= DIMENSIONS,
        "directions are known for {DIMENSIONS} dimensions, not for {dimensions}"
    );
    let gray = number ^ (number >> 1);
    let coordinate = |dimension| {
        let directions = directions(dimension);
        let bits = (0..BITS).filter(|bit| gray >> bit & 1 == 1);
        let sum = bits.fold(0, |sum, bit| sum ^ directions[bit]);
        f64::from(sum) / (1u64 << BITS) as f64
    };
    (0..dimensions).map(coordinate).collect()
}

/// The direction numbers of a dimension, as fractions of 2^32.
fn directions(dimension: usize) -> [u32; BITS] {
    let mut v = [0; BITS];
    let Some(&(coefficients, odd)) = dimension.checked_sub(1).map(|later| &JOE_KUO[later]) else {
        return std::array::from_fn(|i| 1 << (BITS - 1 - i));
    };
    let degree = odd.len();
    for i in 0..BITS {
        if i < degree {
            v[i] = odd[i] << (BITS - 1 - i);
            continue;
        }
        v[i] = v[i - degree] ^ (v[i - degree] >> degree);
        for k in 1..degree {
            if coefficients >> (degree - 1 - k) & 1 == 1 {
                v[i] ^= v[i - k];
            }
        }
    }
    v
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first points as Joe & Kuo's own program prints them, and `scipy.stats.qmc.Sobol(3, scramble=False)`.
    #[test]
    fn the_first_points_are_the_published_ones() {
        let published = [
            [0.0, 0.0, 0.0],
            [0.5, 0.5, 0.5],
            [0.75, 0.25, 0.25],
            [0.25, 0.75, 0.75],
            [0.375, 0.375, 0.625],
            [0.875, 0.875, 0.125],
            [0.625, 0.125, 0.875],
            [0.125, 0.625, 0.375],
            [0.1875, 0.3125, 0.9375],
            [0.6875, 0.8125, 0.4375],
        ];
        for (number, expected) in published.into_iter().enumerate() {
            assert_eq!(point(number as u32, 3), expected, "point {number}");
        }
    }

    /// The property that makes them worth their trouble, in every dimension: of the first 2^k points one lies
    /// in each 2^k-th of the line.
    #[test]
    fn every_interval_has_its_share() {
        for dimension in 0..DIMENSIONS {
            for k in 0..10 {
                let count = 1u32 << k;
                let mut cells: Vec<usize> = (0..count)
                    .map(|number| (point(number, DIMENSIONS)[dimension] * f64::from(count)) as usize)
                    .collect();
                cells.sort_unstable();
                assert!(cells.iter().copied().eq(0..count as usize), "dimension {dimension}, 2^{k} points");
            }
        }
    }

    /// In pairs of the first dimensions: of 2^10 points one in each of 32 x 32 squares.
    #[test]
    fn every_square_has_its_share() {
        let mut squares = vec![0; 32 * 32];
        for number in 0..1024 {
            let at = point(number, 2);
            squares[(at[0] * 32.0) as usize * 32 + (at[1] * 32.0) as usize] += 1;
        }
        assert!(squares.iter().all(|&count| count == 1));
    }
}
