//! Scores of all candidates, some of them at a time where the sums of all would not fit: see
//! [`espalier_plan::scoring`].
//!
//! A sum does not depend on which others are made beside it, so the masks are the same bit for bit. Every
//! rank makes as many passes as the one that needs most: a stage with nothing to score in a pass still sends
//! its samples on.

use std::ops::Range;

use espalier_nn::weights::ParameterId;
use espalier_plan::scoring::partition;
use espalier_tensor::Tensor;
use espalier_tensor::ops::select::{ScoreOrder, product_keys};

use super::{MaskBits, Network, select};
use crate::Result;

impl Network<'_> {
    /// The masks that keep the candidates with the largest scores at a sparsity, over all of the model.
    /// `make` gives a tensor for each of some candidates, in their order, and the score of a weight follows
    /// from its product with the tensor's element.
    pub(super) fn keep_scored(
        &self,
        sparsity: f64,
        mut make: impl FnMut(&[ParameterId]) -> Result<Vec<Tensor>>,
        score: ScoreOrder,
    ) -> Result<Vec<(ParameterId, MaskBits)>> {
        let passes = self.passes()?;
        // One pass is made once and kept, as there is memory for it.
        let known = self.context.scores.as_ref().filter(|_| self.step == 0);
        let once = match (passes.len(), known) {
            (1, Some(known)) => Some(known.get_or_make(&self.context.device, || make(self.candidates))?),
            (1, None) => Some(make(self.candidates)?),
            _ => None,
        };
        let show =
            |visit: &mut select::KeyVisitor<'_>, range: Range<usize>, tensors: &[Tensor]| -> Result<()> {
                for (i, tensor) in range.zip(tensors) {
                    let weight = self.params.param(self.candidates[i]).dense()?;
                    visit(i, product_keys(&weight, tensor, score)?)?;
                }
                Ok(())
            };
        let count = Self::kept_of(self.total()?, sparsity);
        self.keep_visited(self.candidates, count, |visit| {
            for range in &passes {
                match &once {
                    Some(tensors) => show(visit, range.clone(), tensors)?,
                    None => show(visit, range.clone(), &make(&self.candidates[range.clone()])?)?,
                }
            }
            Ok(())
        })
    }

    /// Which candidates of this rank are scored in each pass.
    fn passes(&self) -> Result<Vec<Range<usize>>> {
        let passes = self.context.ranks.all_reduce_max(vec![self.passes as u64])?[0];
        let sizes: Vec<u64> = self.candidates.iter().map(|id| 4 * self.len(*id) as u64).collect();
        Ok(partition(&sizes, passes as usize))
    }
}
