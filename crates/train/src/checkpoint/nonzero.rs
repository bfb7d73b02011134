//! Which weights of a checkpoint are not zero, whatever type they are stored in: the mask of a model that was
//! pruned and has none.

use super::MODEL;
use super::open::Checkpoint;
use crate::Result;

impl Checkpoint {
    /// A bit for each of the first `elements` weights of a tensor, set where it is not zero. Of a longer
    /// context there are more positions than a run may have.
    pub(crate) fn nonzero_bits(&self, name: &str, elements: usize) -> Result<Vec<u32>> {
        let missing = || self.refuse(format!("{MODEL} has no tensor {name}, which this run needs"));
        let shape = self.shape(MODEL, name).ok_or_else(missing)?.to_vec();
        let (dtype, bytes) = self.numbers(MODEL, name, &shape)?.ok_or_else(missing)?;
        let mut bits = vec![0; elements.div_ceil(32)];
        for (i, number) in bytes.chunks_exact(dtype.bitsize() / 8).take(elements).enumerate() {
            // All but the sign, which is the first bit of the last byte.
            let is_zero = number
                .split_last()
                .is_some_and(|(sign, rest)| sign & 0x7f == 0 && rest.iter().all(|byte| *byte == 0));
            bits[i / 32] |= u32::from(!is_zero) << (i % 32);
        }
        Ok(bits)
    }
}
