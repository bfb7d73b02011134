//! Lanczos: an orthogonal basis in which a symmetric matrix, known by its products alone, is tridiagonal; and what
//! eigenvalues that has.
//!
//! Each new vector is made orthogonal to all before it, twice: in f32 the three-term recurrence alone loses
//! that after a few steps and finds large eigenvalues several times. All vectors are held, 4 bytes a weight
//! each.

use super::surface::{Direction, LossSurface, add_direction, scale};
use crate::Result;

/// A symmetric tridiagonal matrix.
#[derive(Debug, Clone, Default)]
pub struct Tridiagonal {
    pub diagonal: Vec<f64>,
    /// Beside it: one fewer.
    pub off_diagonal: Vec<f64>,
}

/// The Hessian of a surface in the basis that grows from a direction, after at most so many products; fewer
/// where what the direction reaches has no more dimensions.
pub(crate) fn tridiagonal(surface: &LossSurface<'_>, start: Direction, steps: usize) -> Result<Tridiagonal> {
    let mut matrix = Tridiagonal::default();
    let mut basis: Vec<Direction> = Vec::new();
    let (mut next, mut largest) = (start, 0.0f64);
    let length = surface.norm(&next)?;
    if length == 0.0 {
        return Ok(matrix);
    }
    scale(&mut next, 1.0 / length)?;
    for step in 0..steps {
        let mut rest = surface.hessian_product(&next)?;
        let along = surface.finite("the spectrum", surface.dot(&next, &rest)?)?;
        matrix.diagonal.push(along);
        largest = largest.max(along.abs());
        basis.push(next);
        if step + 1 == steps {
            break;
        }
        for _ in 0..2 {
            for vector in &basis {
                let along = surface.dot(vector, &rest)?;
                add_direction(&mut rest, -along, vector)?;
            }
        }
        let length = surface.norm(&rest)?;
        largest = largest.max(length);
        // What is left is the rounding of products and not a direction of its own.
        if length <= ROUNDING * largest {
            break;
        }
        matrix.off_diagonal.push(length);
        scale(&mut rest, 1.0 / length)?;
        next = rest;
    }
    Ok(matrix)
}

/// What of a product with the Hessian by differences of gradients in f32 is rounding.
const ROUNDING: f64 = 1e-4;

impl Tridiagonal {
    /// Its eigenvalues, ascending, each with the squared first component of its eigenvector: nodes and
    /// weights of the quadrature that Golub & Welsch (1969) found in it. By Jacobi's rotations, which are
    /// slow and exact; there are a few dozen rows.
    pub(crate) fn quadrature(&self) -> Vec<(f64, f64)> {
        let n = self.diagonal.len();
        let mut a = vec![vec![0.0; n]; n];
        for (i, x) in self.diagonal.iter().enumerate() {
            a[i][i] = *x;
        }
        for (i, x) in self.off_diagonal.iter().enumerate() {
            a[i][i + 1] = *x;
            a[i + 1][i] = *x;
        }
        // The first row of the matrix of eigenvectors.
        let mut first = vec![0.0; n];
        first.iter_mut().take(1).for_each(|x| *x = 1.0);
        let size: f64 = a.iter().flatten().map(|x| x * x).sum();
        loop {
            let off: f64 =
                (0..n).flat_map(|i| (0..i).map(move |j| (i, j))).map(|(i, j)| a[i][j] * a[i][j]).sum();
            if off <= 1e-28 * size {
                break;
            }
            for p in 0..n {
                for q in p + 1..n {
                    rotate(&mut a, &mut first, p, q);
                }
            }
        }
        let mut nodes: Vec<(f64, f64)> = (0..n).map(|i| (a[i][i], first[i] * first[i])).collect();
        nodes.sort_by(|a, b| a.0.total_cmp(&b.0));
        nodes
    }
}

/// Turns rows and columns p and q of a symmetric matrix so that the element between them is 0.
fn rotate(a: &mut [Vec<f64>], first: &mut [f64], p: usize, q: usize) {
    if a[p][q] == 0.0 {
        return;
    }
    let half = (a[q][q] - a[p][p]) / (2.0 * a[p][q]);
    let tangent = half.signum() / (half.abs() + (half * half + 1.0).sqrt());
    let cosine = 1.0 / (tangent * tangent + 1.0).sqrt();
    let sine = tangent * cosine;
    let turn = |x: f64, y: f64| (cosine * x - sine * y, sine * x + cosine * y);
    for row in a.iter_mut() {
        (row[p], row[q]) = turn(row[p], row[q]);
    }
    for i in 0..a.len() {
        let (x, y) = turn(a[p][i], a[q][i]);
        (a[p][i], a[q][i]) = (x, y);
    }
    (first[p], first[q]) = turn(first[p], first[q]);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The matrix with 2 on the diagonal and -1 beside it has eigenvalues 2 - 2 cos(k pi / (n + 1)), and
    /// eigenvectors of sines.
    #[test]
    fn a_matrix_of_known_eigenvalues_has_them() {
        let n = 30;
        let matrix = Tridiagonal { diagonal: vec![2.0; n], off_diagonal: vec![-1.0; n - 1] };
        let angle = std::f64::consts::PI / (n + 1) as f64;
        for (k, (value, weight)) in matrix.quadrature().into_iter().enumerate() {
            let k = (k + 1) as f64;
            assert!((value - (2.0 - 2.0 * (k * angle).cos())).abs() < 1e-12, "{k}: {value}");
            let expected = 2.0 / (n + 1) as f64 * (k * angle).sin().powi(2);
            assert!((weight - expected).abs() < 1e-12, "{k}: {weight}, not {expected}");
        }
    }

    #[test]
    fn nothing_and_a_number_are_matrices_too() {
        assert_eq!(Tridiagonal::default().quadrature(), []);
        assert_eq!(Tridiagonal { diagonal: vec![-3.0], off_diagonal: vec![] }.quadrature(), [(-3.0, 1.0)]);
    }
}
