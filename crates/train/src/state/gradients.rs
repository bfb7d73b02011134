//! Gradients of a step while they are made: one sum per parameter over micro-batches.
//!
//! Where there is one micro-batch a gradient is kept as it comes; those of several are added up in f32,
//! whatever the precision of the run: a bf16 number has 8 bits, so that a sum in bf16 takes nothing more in
//! once it is 256 times what comes. One rank's step is taken from that f32 sum. What is reduced over ranks too
//! is rounded once before, so that messages have the bytes of the run's precision. Under a mask the kept
//! elements of a gradient are taken the moment it is made and the rest is let go: no dense gradient of the
//! model ever exists.

use espalier_nn::layers::{GradientElements, GradientSink, WeightGradients};
use espalier_nn::weights::ParameterId;
use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::compress::{compress, compress_add};
use espalier_tensor::ops::elementwise::add_into;
use espalier_tensor::{Category, DType, Mask, Tensor};

use super::{Param, ParamStore};
use crate::Result;

/// Sums of gradients over micro-batches, one per parameter.
#[derive(Debug)]
pub struct Accumulator {
    gradients: Vec<Option<Tensor>>,
    /// The type in which gradients come, where they are summed in f32.
    rounded: Option<DType>,
    /// What each took when all of it was here.
    bytes: Vec<usize>,
}

impl Accumulator {
    /// For so many parameters. Where several micro-batches come in this type, they are summed in f32.
    pub fn new(parameters: usize, several: Option<DType>) -> Accumulator {
        let rounded = several.filter(|dtype| *dtype != DType::F32);
        Accumulator { gradients: vec![None; parameters], rounded, bytes: vec![0; parameters] }
    }

    /// Adds a gradient of one micro-batch; of a masked parameter what is kept.
    pub fn add(&mut self, id: ParameterId, param: &Param, mut gradient: Tensor) -> Result<()> {
        match (&mut self.gradients[id.0], mask_for(param, &gradient)) {
            (Some(sum), Some(mask)) => compress_add(sum, &gradient, mask)?,
            (Some(sum), None) => add_into(sum, &gradient)?,
            (empty, mask) => {
                if let Some(mask) = mask {
                    gradient = compress(&gradient, mask, Category::Workspace)?;
                }
                *empty = Some(begin_sum(gradient, self.rounded)?);
            }
        }
        self.bytes[id.0] = self.gradients[id.0].as_ref().map_or(0, Tensor::byte_len);
        Ok(())
    }

    /// Adds this rank's shard of a micro-batch's gradient that was reduced over ranks.
    pub(crate) fn add_shard(&mut self, id: ParameterId, shard: Tensor) -> Result<()> {
        match &mut self.gradients[id.0] {
            Some(sum) => add_into(sum, &shard)?,
            empty => *empty = Some(begin_sum(shard, self.rounded)?),
        }
        self.bytes[id.0] = self.gradients[id.0].as_ref().map_or(0, Tensor::byte_len);
        Ok(())
    }

    /// Stores a complete gradient: one that was reduced over ranks.
    pub fn set_reduced(&mut self, id: ParameterId, mut gradient: Tensor) {
        gradient.tag_memory(Category::Gradients);
        self.gradients[id.0] = Some(gradient);
    }

    /// The same, of a gradient that was made elsewhere.
    pub(crate) fn set_local(&mut self, id: ParameterId, gradient: Tensor) {
        self.bytes[id.0] = gradient.byte_len();
        self.gradients[id.0] = Some(gradient);
    }

    /// Whether a gradient has arrived.
    pub fn has(&self, id: ParameterId) -> bool {
        self.gradients[id.0].is_some()
    }

    /// The parameters whose gradients have arrived.
    pub fn ids(&self) -> impl Iterator<Item = ParameterId> + use<> {
        let arrived = (0..self.gradients.len()).filter(|id| self.gradients[*id].is_some()).map(ParameterId);
        arrived.collect::<Vec<_>>().into_iter()
    }

    /// Takes a sum out for a message: rounded to the type in which its terms came.
    pub(crate) fn take_rounded(&mut self, id: ParameterId) -> Result<Option<Tensor>> {
        let Some(sum) = self.gradients[id.0].take() else { return Ok(None) };
        let Some(dtype) = self.rounded.filter(|dtype| *dtype != sum.dtype()) else { return Ok(Some(sum)) };
        // Scratch until the sum is gone: of a gradient there is one.
        let mut rounded = cast(&sum, dtype, Category::Workspace)?;
        drop(sum);
        rounded.tag_memory(Category::Gradients);
        Ok(Some(rounded))
    }

    /// Hands the sums over to their parameters, and begins anew. What it took of the memory of those that
    /// pruning may touch.
    pub fn finish(&mut self, params: &mut ParamStore) -> usize {
        let mut bytes = 0;
        for (id, param) in params.iter_mut() {
            param.gradient = self.gradients[id.0].take();
            bytes += if param.plan.prunable { self.bytes[id.0] } else { 0 };
        }
        self.gradients.fill(None);
        self.bytes.fill(0);
        bytes
    }
}

/// The mask by which a gradient is yet to be compressed: a layer may have made the kept elements alone.
pub(crate) fn mask_for<'a>(param: &'a Param, gradient: &Tensor) -> Option<&'a Mask> {
    param.compressing_mask().filter(|mask| gradient.len() == mask.len())
}

/// The first term of a gradient, as what the others are added to: in f32, where they come in another type.
fn begin_sum(mut first: Tensor, rounded: Option<DType>) -> Result<Tensor> {
    if rounded.is_some() {
        first = cast(&first, DType::F32, Category::Workspace)?;
    }
    first.tag_memory(Category::Gradients);
    Ok(first)
}

/// What a sink asks layers to make of gradients.
pub(crate) fn gradient_elements(params: &ParamStore) -> GradientElements {
    if params.compresses() { GradientElements::Kept } else { GradientElements::All }
}

/// The gradients of one micro-batch, as a sink that sends nothing.
#[derive(Debug)]
pub struct MicroBatchGradients<'a> {
    params: &'a ParamStore,
    gradients: Accumulator,
}

impl<'a> MicroBatchGradients<'a> {
    pub fn new(params: &'a ParamStore) -> MicroBatchGradients<'a> {
        MicroBatchGradients { params, gradients: Accumulator::new(params.len(), None) }
    }

    pub fn take(self) -> Vec<(ParameterId, Tensor)> {
        let gradients = self.gradients.gradients.into_iter().enumerate();
        gradients.filter_map(|(id, sum)| Some((ParameterId(id), sum?))).collect()
    }
}

impl GradientSink for MicroBatchGradients<'_> {
    fn accept(&mut self, parameters: &[ParameterId], gradients: WeightGradients) -> espalier_nn::Result<()> {
        for (id, gradient) in parameters.iter().zip(gradients.make(gradient_elements(self.params))?) {
            self.gradients.add(*id, self.params.param(*id), gradient)?;
        }
        Ok(())
    }
}
