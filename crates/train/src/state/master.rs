//! Masters that begin at other numbers than the weights: those of which the weights were rounded, where a bf16 run starts from more
//! digits than it has itself.

use espalier_nn::weights::Weights;
use espalier_plan::Shard;
use espalier_tensor::mask::ones;
use espalier_tensor::ops::update::split;
use espalier_tensor::{DType, Mask, Tensor};

use super::optimizer::Slot;
use super::{Masks, Optimizer};
use crate::Result;
use crate::parallel::pieces::Pieces;

impl Optimizer {
    /// Has fresh masters begin at what `exact` says of a parameter's name and of the shard of it that is here; where that is nothing, they
    /// stay at the weight.
    pub(crate) fn start_masters(
        &mut self,
        weights: &mut Weights,
        masks: &Masks,
        pieces: &Pieces,
        exact: impl Fn(&str, &Shard) -> Result<Option<Vec<f32>>>,
    ) -> Result<()> {
        for (id, slot) in self.slots_mut() {
            if slot.master.is_some()
                && let Some(exact) = exact(&slot.name, pieces.own(id))?
            {
                slot.start_master(weights.get_mut(id), masks.get(id), exact)?;
            }
        }
        Ok(())
    }
}

impl Slot {
    fn start_master(&mut self, weight: &mut Tensor, mask: Option<&Mask>, mut exact: Vec<f32>) -> Result<()> {
        let words = mask.map(Mask::read_words).transpose()?;
        if let Some(words) = &words {
            let pruned = |place: &usize| words[place / 32] >> (place % 32) & 1 == 0;
            (0..exact.len()).filter(pruned).for_each(|place| exact[place] = 0.0);
        }
        let Some(master) = &mut self.master else { return Ok(()) };
        if master.dtype() == DType::U16 {
            // Low bits say how a number was rounded, and ties are rounded another way than where weights are read.
            let rounded: Vec<u8> = exact.iter().flat_map(|number| split(*number).0.to_le_bytes()).collect();
            weight.copy_from_host(&rounded)?;
        }
        let stored: Vec<f32> = match words.filter(|_| self.compressed) {
            Some(words) => ones(&words).map(|place| exact[place]).collect(),
            None => exact,
        };
        let own = &stored[self.member.split(stored.len())];
        let bytes: Vec<u8> = match master.dtype() {
            DType::U16 => own.iter().flat_map(|number| split(*number).1.to_le_bytes()).collect(),
            _ => own.iter().flat_map(|number| number.to_le_bytes()).collect(),
        };
        Ok(master.copy_from_host(&bytes)?)
    }
}
