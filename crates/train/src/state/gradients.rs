//! The gradient sink: one tensor per parameter, summed over micro-batches.
//!
//! Where there is one micro-batch a gradient is kept as it comes; those of several are added up in f32, whatever the
//! precision of the run: a bf16 number has 8 bits, so that a sum in bf16 takes nothing more in once it is 256 times what
//! comes. One rank's step is taken from that f32 sum. What is summed over ranks too is rounded once before, so that messages
//! have the bytes of the run's precision. Under a mask the kept elements of a gradient are taken the moment it is made and
//! the rest is let go: no dense gradient of the model ever exists.

use std::collections::HashSet;

use espalier_nn::layers::{GradientSink, Wanted, WeightGradients};
use espalier_nn::weights::ParameterId;
use espalier_plan::GroupRank;
use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::compress::{compress, compress_add};
use espalier_tensor::ops::elementwise::add_into;
use espalier_tensor::ops::flat;
use espalier_tensor::ops::reduce::{squared_norm, squared_norm_all};
use espalier_tensor::{Category, DType, Mask, Tensor};

use super::Masks;
use crate::Result;
use crate::parallel::groups::Groups;

/// Sums of gradients, one per parameter.
#[derive(Debug)]
pub struct Gradients<'a> {
    sums: Vec<Option<Tensor>>,
    masks: &'a Masks,
    /// The type in which gradients come, where they are summed in f32.
    rounded: Option<DType>,
    /// Who has the other parts of each sum, where only parts are here.
    shared: Option<&'a Groups>,
    /// Whose gradients are not summed here but handed on as they come, and those that have come.
    passing: HashSet<ParameterId>,
    arrived: Vec<(ParameterId, Tensor)>,
    /// What each took when it was whole.
    bytes: Vec<usize>,
    measured: Option<Measured>,
}

/// Squared norms of single micro-batches, for the gradient noise scale.
#[derive(Debug)]
struct Measured {
    /// What another rank counts.
    skipped: HashSet<ParameterId>,
    /// Tied parameters come once for each use, and what counts is the norm of the sum:
    tied: HashSet<ParameterId>,
    /// so these wait until their micro-batch has ended.
    parts: Vec<(ParameterId, Tensor)>,
    squares: f64,
}

impl<'a> Gradients<'a> {
    /// Room for a model's parameters, under its masks.
    pub fn new(masks: &'a Masks) -> Gradients<'a> {
        let sums: Vec<_> = (0..masks.parameters()).map(|_| None).collect();
        Gradients {
            bytes: vec![0; sums.len()],
            sums,
            masks,
            rounded: None,
            shared: None,
            passing: HashSet::new(),
            arrived: Vec::new(),
            measured: None,
        }
    }

    /// Sums in f32 what comes in this type.
    pub fn accumulating(mut self, dtype: DType) -> Gradients<'a> {
        self.rounded = Some(dtype).filter(|dtype| *dtype != DType::F32);
        self
    }

    /// Also sums the squared norms of every micro-batch's gradients, those of `skipped` parameters left out: another rank counts them.
    pub fn measuring(mut self, tied: HashSet<ParameterId>, skipped: HashSet<ParameterId>) -> Gradients<'a> {
        self.measured = Some(Measured { tied, skipped, parts: Vec::new(), squares: 0.0 });
        self
    }

    /// Says that what comes next is another micro-batch's.
    pub fn end_micro_batch(&mut self) -> Result<()> {
        let Some(measured) = &mut self.measured else { return Ok(()) };
        for (_, sum) in measured.parts.drain(..) {
            measured.squares += squared_norm(&sum)?;
        }
        Ok(())
    }

    /// Says that in the end each rank will have its part of every sum.
    pub fn share_out(&mut self, groups: &'a Groups) {
        self.shared = Some(groups);
    }

    /// Says that gradients of these are [taken](Gradients::take_arrived) as they come, and come back as [parts](Gradients::add_part).
    pub fn pass_on(&mut self, parameters: HashSet<ParameterId>) {
        self.passing = parameters;
    }

    /// Whether a parameter's gradients are handed on as they come.
    pub fn passes_on(&self, id: ParameterId) -> bool {
        self.passing.contains(&id)
    }

    /// Takes what has come and is to be handed on, in the precision in which it was made.
    pub fn take_arrived(&mut self) -> Vec<(ParameterId, Tensor)> {
        std::mem::take(&mut self.arrived)
    }

    /// Adds this rank's part of a gradient that was handed on to those of the micro-batches before.
    pub fn add_part(&mut self, id: ParameterId, part: Tensor) -> Result<()> {
        match &mut self.sums[id.0] {
            Some(sum) => add_into(sum, &part)?,
            empty => *empty = Some(begin_sum(part, self.rounded)?),
        }
        self.bytes[id.0] = self.sums[id.0].as_ref().map_or(0, Tensor::byte_len);
        Ok(())
    }

    /// The gradient of a parameter, if any has come: compressed where the masks say so.
    pub fn get(&self, id: ParameterId) -> Option<&Tensor> {
        self.sums[id.0].as_ref()
    }

    /// Takes the gradient of a parameter out.
    pub fn take(&mut self, id: ParameterId) -> Option<Tensor> {
        self.sums[id.0].take()
    }

    /// Takes the gradient of a parameter out for a message: a sum in f32 is rounded to the type in which its summands came.
    pub fn take_rounded(&mut self, id: ParameterId) -> Result<Option<Tensor>> {
        let Some(sum) = self.take(id) else { return Ok(None) };
        let Some(dtype) = self.rounded.filter(|dtype| *dtype != sum.dtype()) else { return Ok(Some(sum)) };
        // Scratch until the sum is gone: of a gradient there is one.
        let mut rounded = cast(&sum, dtype, Category::Workspace)?;
        drop(sum);
        rounded.book_as(Category::Gradients);
        Ok(Some(rounded))
    }

    /// Puts the gradient of a parameter back in.
    pub fn put(&mut self, id: ParameterId, gradient: Tensor) {
        self.sums[id.0] = Some(gradient);
    }

    /// The same, of a gradient that was made elsewhere.
    pub fn put_whole(&mut self, id: ParameterId, gradient: Tensor) {
        self.bytes[id.0] = gradient.byte_len();
        self.put(id, gradient);
    }

    /// The parameters of the model, whether or not a gradient of theirs has come.
    pub fn ids(&self) -> impl Iterator<Item = ParameterId> + use<> {
        (0..self.sums.len()).map(ParameterId)
    }

    /// Adds `strength * sign(w)` to the gradient of a parameter: an L1 penalty pulls its weights towards zero.
    pub fn add_l1(&mut self, id: ParameterId, weight: &Tensor, strength: f32) -> Result<()> {
        let Some(sum) = &mut self.sums[id.0] else { return Ok(()) };
        let sign = |w: f32| if w == 0.0 { 0.0 } else { w.signum() };
        let mut pulls = weight.copy_to_host()?;
        pulls.iter_mut().for_each(|w| *w = strength * sign(*w));
        let pull = Tensor::from_slice(&weight.device(), weight.shape(), &pulls, Category::Workspace)?;
        let pull = match self.masks.compressing(id) {
            Some(mask) => compress(&pull, mask, Category::Workspace)?,
            None => pull,
        };
        let member = self.shared.map_or(GroupRank::SINGLE, |groups| groups.member(id));
        match member.is_single() {
            true => add_into(sum, &pull)?,
            false => add_into(sum, &flat::take(&pull, member.split(pull.len()), Category::Workspace)?)?,
        }
        Ok(())
    }

    /// Bytes held for a parameter while its gradient was summed.
    pub fn bytes(&self, id: ParameterId) -> usize {
        self.bytes[id.0]
    }

    /// The squared norm over all kept parameters, or this rank's parts of them; NaN or infinite if any element is.
    pub fn squared_norm(&self) -> Result<f64> {
        self.squared_norm_of(|_| true)
    }

    /// The sum over micro-batches of squared norms, and the squared norm of the sum, over the same parameters.
    pub fn noise_norms(&self) -> Result<Option<(f64, f64)>> {
        let Some(measured) = &self.measured else { return Ok(None) };
        Ok(Some((measured.squares, self.squared_norm_of(|id| !measured.skipped.contains(&id))?)))
    }

    /// The same over some parameters.
    pub fn squared_norm_of(&self, counts: impl Fn(ParameterId) -> bool) -> Result<f64> {
        let sums = self.sums.iter().enumerate().filter_map(|(i, sum)| Some((ParameterId(i), sum.as_ref()?)));
        let kept = sums
            .filter(|(id, _)| counts(*id))
            .map(|(id, sum)| self.kept(id, sum))
            .collect::<Result<Vec<_>>>()?;
        Ok(squared_norm_all(&kept.iter().collect::<Vec<_>>())?)
    }

    /// What counts of a gradient: its kept elements, in the order in which compressed state has them.
    fn kept(&self, id: ParameterId, gradient: &Tensor) -> Result<Tensor> {
        match self.masks.get(id) {
            Some(mask) if gradient.len() == mask.len() && !self.masks.compress() => {
                Ok(compress(gradient, mask, Category::Workspace)?)
            }
            _ => Ok(gradient.clone()),
        }
    }
}

/// The first summand of a gradient, as what the others are added to: in f32, where they come in another type.
fn begin_sum(mut first: Tensor, rounded: Option<DType>) -> Result<Tensor> {
    if rounded.is_some() {
        first = cast(&first, DType::F32, Category::Workspace)?;
    }
    first.book_as(Category::Gradients);
    Ok(first)
}

impl Measured {
    /// Takes in a gradient, or what one use of a tied parameter adds to it; of a masked one what is kept.
    fn add(&mut self, id: ParameterId, gradient: &Tensor, mask: Option<&Mask>) -> Result<()> {
        if self.skipped.contains(&id) {
            return Ok(());
        }
        let kept = match mask {
            Some(mask) => compress(gradient, mask, Category::Workspace)?,
            None if self.tied.contains(&id) => flat::take(gradient, 0..gradient.len(), Category::Workspace)?,
            None => gradient.clone(),
        };
        if !self.tied.contains(&id) {
            self.squares += squared_norm(&kept)?;
            return Ok(());
        }
        match self.parts.iter_mut().find(|(of, _)| *of == id) {
            Some((_, sum)) => add_into(sum, &kept)?,
            None => self.parts.push((id, kept)),
        }
        Ok(())
    }
}

impl GradientSink for Gradients<'_> {
    fn accept(&mut self, parameters: &[ParameterId], gradients: WeightGradients) -> espalier_nn::Result<()> {
        let wanted = if self.masks.compress() { Wanted::Kept } else { Wanted::All };
        for (&id, mut gradient) in parameters.iter().zip(gradients.make(wanted)?) {
            // A layer may have made the kept elements alone.
            let whole = |mask: &&Mask| gradient.len() == mask.len();
            let mask = self.masks.compressing(id).filter(whole);
            if let Some(measured) = &mut self.measured {
                measured.add(id, &gradient, self.masks.get(id).filter(whole))?;
            }
            if self.passing.contains(&id) {
                if let Some(mask) = mask {
                    gradient = compress(&gradient, mask, Category::Workspace)?;
                }
                self.arrived.push((id, gradient));
                continue;
            }
            match (&mut self.sums[id.0], mask) {
                (Some(sum), Some(mask)) => compress_add(sum, &gradient, mask)?,
                (Some(sum), None) => add_into(sum, &gradient)?,
                (empty, mask) => {
                    if let Some(mask) = mask {
                        gradient = compress(&gradient, mask, Category::Workspace)?;
                    }
                    *empty = Some(begin_sum(gradient, self.rounded)?);
                }
            }
            self.bytes[id.0] = self.sums[id.0].as_ref().map_or(0, Tensor::byte_len);
        }
        Ok(())
    }
}
