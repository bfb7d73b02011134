//! The largest eigenvalue of the Hessian by power iteration.
//!
//! Products with the Hessian turn any direction towards the eigenvector whose eigenvalue is the largest in
//! magnitude; v H v of a unit vector v is then that eigenvalue. Where it is negative, as on the way out of a
//! saddle, the same is done once more with the Hessian minus that eigenvalue, of which no eigenvalue is
//! negative: what is asked for is how sharply the loss rises.

use serde::Serialize;

use super::surface::{Direction, LossSurface, add_direction, scale};
use crate::Result;

/// Change of the eigenvalue between two products, as a fraction of it, that ends the iteration.
const TOLERANCE: f64 = 1e-3;

/// Products after which it ends in any case.
const MOST: usize = 100;

/// The largest eigenvalue that was found.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Eigenvalue {
    /// Second derivative of the loss along its eigenvector.
    pub value: f64,
    /// Products with the Hessian that it took.
    pub products: usize,
    /// Whether the last two products agreed; otherwise it is a lower bound.
    pub settled: bool,
}

/// The largest eigenvalue of the Hessian at the surface's own weights.
pub fn largest_eigenvalue(surface: &LossSurface<'_>) -> Result<Eigenvalue> {
    let first = iterate(surface, 0.0, 0)?;
    if first.value >= 0.0 {
        return Ok(first);
    }
    let second = iterate(surface, first.value, 1)?;
    Ok(Eigenvalue {
        value: second.value + first.value,
        products: first.products + second.products,
        settled: first.settled && second.settled,
    })
}

/// The eigenvalue of H - `shift` that is the largest in magnitude, from a random direction.
fn iterate(surface: &LossSurface<'_>, shift: f64, start: u64) -> Result<Eigenvalue> {
    let mut v = surface.random_signs(start)?;
    let length = surface.norm(&v)?;
    if length == 0.0 {
        return Ok(Eigenvalue { value: 0.0, products: 0, settled: true });
    }
    scale(&mut v, 1.0 / length)?;
    let mut value = f64::NAN;
    for products in 1..=MOST {
        let mut turned: Direction = surface.hessian_product(&v)?;
        if shift != 0.0 {
            add_direction(&mut turned, -shift, &v)?;
        }
        let found = surface.finite("the largest eigenvalue", surface.dot(&v, &turned)?)?;
        let length = surface.norm(&turned)?;
        // A Hessian of zeros keeps no direction.
        if length == 0.0 || (found - value).abs() <= TOLERANCE * found.abs() {
            return Ok(Eigenvalue { value: found, products, settled: true });
        }
        value = found;
        scale(&mut turned, 1.0 / length)?;
        v = turned;
    }
    Ok(Eigenvalue { value, products: MOST, settled: false })
}
