//! A sum that takes no memory where it need not.

use espalier_tensor::Tensor;
use espalier_tensor::ops::elementwise::{add, add_into};

use crate::Result;

/// `long + short`, into whichever of the two nobody else holds.
pub(super) fn sum(mut long: Tensor, mut short: Tensor) -> Result<Tensor> {
    if long.is_unique() {
        add_into(&mut long, &short)?;
        Ok(long)
    } else if short.is_unique() {
        add_into(&mut short, &long)?;
        Ok(short)
    } else {
        Ok(add(&long, &short)?)
    }
}
