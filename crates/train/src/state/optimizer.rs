//! Optimizers: which state each keeps for a parameter, and the step over all of them.
//!
//! In f32 the weight is its own master; in bf16 each parameter has an f32 master (or the 16 bits that the weight
//! lost), and the weight is its rounding. Under a mask that compresses, master and moments hold kept weights alone.
//! Ranks may share them out: then each has its [`GroupRank`] of these vectors.

use espalier_comm::Communicator;
use espalier_nn::weights::{ParameterId, Weights};
use espalier_plan::Shard;
use espalier_plan::optimizer;
use espalier_plan::optimizer::Master;
use espalier_plan::spec::Precision;
use espalier_plan::{GroupRank, Plan};
use espalier_tensor::mask::ones;
use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::compress::{apply, compress, expand};
use espalier_tensor::ops::flat;
use espalier_tensor::ops::update::{self, Norms, Rule, Step, Target, squared_norms};
use espalier_tensor::{Category, DType, Mask, Tensor};

use super::{Gradients, Masks};
use crate::Result;
use crate::checkpoint::{OPTIMIZER, Room, Saved, Stored, Wanted};
use crate::parallel::groups::Groups;
use crate::parallel::pieces::Pieces;
use crate::parallel::zero::{join, own_weights};

/// LARS adds this to its denominator; the method's own paper leaves it open.
const LARS_EPS: f32 = 1e-9;

/// The state of all parameters.
#[derive(Debug)]
pub struct Optimizer {
    rule: Rule,
    /// Whether weights are roundings of masters.
    has_master: bool,
    /// None where a parameter is another stage's.
    slots: Vec<Option<Slot>>,
}

/// The state of one parameter.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(super) name: String,
    /// Of the state, were all of the rank's shard here.
    shape: Vec<usize>,
    /// Whether it is of kept weights alone.
    pub(super) compressed: bool,
    /// Which part of it is.
    pub(super) member: GroupRank,
    pub(super) master: Option<Tensor>,
    moments: Vec<Tensor>,
    /// Zero for biases and norm parameters where they are left out of weight decay,
    weight_decay: f32,
    /// and these may be left out of trust ratios too.
    adapts: bool,
}

impl Optimizer {
    /// Fresh state for a model's weights. Those who share a parameter share its state out, where they are given.
    pub fn new(plan: &Plan, weights: &Weights, masks: &Masks, shared: Option<&Groups>) -> Result<Optimizer> {
        let config = &plan.optimization.optimizer;
        let (rule, decay) = (rule_of(config.rule), config.weight_decay as f32);
        let has_master = plan.storage.precision != Precision::F32;
        let parameters = plan.model.parameters().into_iter().enumerate();
        let slots = parameters
            .map(|(place, parameter)| (ParameterId(place), parameter))
            .map(|(id, parameter)| {
                if !weights.holds(id) {
                    return Ok(None);
                }
                let (weight, mask) = (weights.get(id), masks.compressing(id));
                let member = shared.map_or(GroupRank::SINGLE, |groups| groups.member(id));
                let shape = mask.map_or(weight.shape().to_vec(), |mask| vec![mask.kept()]);
                let own = match member.is_single() {
                    true => shape.clone(),
                    false => vec![member.split(shape.iter().product()).len()],
                };
                let zeros = |dtype| Tensor::zeros(&weight.device(), &own, dtype, Category::Optimizer);
                let moments = (0..rule.states()).map(|_| zeros(DType::F32)).collect::<Result<_, _>>()?;
                Ok(Some(Slot {
                    master: match (weight.dtype(), config.master, mask) {
                        (DType::F32, ..) => None,
                        // A fresh weight is a bf16 number: no bit was lost.
                        (_, Master::LowBits, _) => Some(zeros(DType::U16)?),
                        (_, Master::F32, None) if member.is_single() => {
                            Some(cast(weight, DType::F32, Category::Optimizer)?)
                        }
                        (_, Master::F32, mask) => {
                            let kept = own_weights(weight, mask, member)?;
                            Some(cast(&kept, DType::F32, Category::Optimizer)?)
                        }
                    },
                    moments,
                    weight_decay: if parameter.decays || !config.exclude_from_decay { decay } else { 0.0 },
                    adapts: parameter.decays || !config.excludes_from_trust(),
                    name: parameter.name,
                    compressed: mask.is_some(),
                    shape,
                    member,
                }))
            })
            .collect::<Result<_>>()?;
        Ok(Optimizer { rule, has_master, slots })
    }

    /// What a step does.
    pub(crate) fn rule(&self) -> Rule {
        self.rule
    }

    /// The state of what is held.
    pub(crate) fn slots_mut(&mut self) -> impl Iterator<Item = (ParameterId, &mut Slot)> {
        let slots = self.slots.iter_mut().enumerate();
        slots.filter_map(|(i, slot)| Some((ParameterId(i), slot.as_mut()?)))
    }

    /// Takes a step: one pass over all parameters, which on a card is one launch.
    pub fn step(
        &mut self,
        weights: &mut Weights,
        masks: &Masks,
        gradients: &Gradients<'_>,
        step: Step,
    ) -> Result<()> {
        self.step_pieces(weights, masks, gradients, step, None)
    }

    /// The same where weights may be pieces: norms that count are those of the whole ones.
    pub(crate) fn step_pieces(
        &mut self,
        weights: &mut Weights,
        masks: &Masks,
        gradients: &Gradients<'_>,
        step: Step,
        pieces: Option<&Pieces>,
    ) -> Result<()> {
        let targets = weights.all_mut().zip(&mut self.slots).filter_map(|((id, weight), slot)| {
            let (weight, slot) = weight.zip(slot.as_mut())?;
            Some((id, slot.target(weight, gradients.get(id)?, masks.get(id))))
        });
        let (ids, targets): (Vec<ParameterId>, Vec<Target<'_>>) = targets.unzip();
        let Some(pieces) = pieces.filter(|pieces| self.rule.adapts() && !pieces.are_whole()) else {
            return Ok(update::step(self.rule, step, targets, Norms::Measured)?);
        };
        let mut norms = squared_norms(self.rule, step, &targets)?;
        pieces.whole_norms(&ids, &mut norms)?;
        Ok(update::step(self.rule, step, targets, Norms::Given(&norms))?)
    }

    /// Puts a parameter's state under a mask in the place of an older one: what is no longer kept is let go, and what
    /// comes back starts at zero. One tensor at a time, so that there is never a second copy of the state. Those that
    /// share what is here of the parameter are the `group`; all that hold pieces of it must call.
    ///
    /// But for the mean square that Adam divides by. Late in a run nothing corrects its start any more: from zero it would be
    /// `(1 - beta2) g^2` after the first step and the weight would move by `(1 - beta1) / sqrt(1 - beta2)`, three times the
    /// rate, and up to seven times in the steps after it, all grown weights at once. It starts at the mean over the
    /// parameter's weights that stay, so that a grown weight moves as they do while its mean gradient builds up.
    pub fn remask(
        &mut self,
        id: ParameterId,
        old: Option<&Mask>,
        new: &Mask,
        compressed: bool,
        group: Option<&Communicator>,
        pieces: &Pieces,
    ) -> Result<()> {
        let slot = self.slots[id.0].as_mut().expect("a parameter of this stage");
        let (member, before) = (slot.member, slot.shape.iter().product());
        if compressed {
            (slot.shape, slot.compressed) = (vec![new.kept()], true);
        }
        let mean_square = (self.rule.states() == 2).then(|| slot.master.iter().len() + 1);
        for (i, state) in slot.master.iter_mut().chain(&mut slot.moments).enumerate() {
            let warm = old.filter(|_| mean_square == Some(i));
            if !compressed {
                apply(state, new)?;
                if let Some(old) = warm {
                    warm_up(state, old, new, |place, _| place, (id, pieces))?;
                }
                continue;
            }
            let whole = match group.filter(|_| !member.is_single()) {
                Some(group) => join(state, before, group)?,
                None => state.clone(),
            };
            let dense = match old {
                Some(old) => expand(&whole, old, &[old.len()], Category::Workspace)?,
                None => whole.clone(),
            };
            let mut kept = compress(&dense, new, Category::Workspace)?;
            drop((whole, dense));
            if let Some(old) = warm {
                warm_up(&mut kept, old, new, |_, nth| nth, (id, pieces))?;
            }
            if !member.is_single() {
                kept = flat::take(&kept, member.split(kept.len()), Category::Workspace)?;
            }
            // Workspace until it stands in the place of the old one.
            *state = kept;
            state.book_as(Category::Optimizer);
        }
        Ok(())
    }

    /// The tensors of a parameter's state: the master, where there is one, and the moments.
    pub(crate) fn state(&self, id: ParameterId) -> Vec<&Tensor> {
        let slot = self.slots[id.0].iter();
        slot.flat_map(|slot| slot.master.iter().chain(&slot.moments)).collect()
    }

    /// The same, to be changed.
    pub(crate) fn state_mut(&mut self, id: ParameterId) -> Vec<&mut Tensor> {
        let slot = self.slots[id.0].iter_mut();
        slot.flat_map(|slot| slot.master.iter_mut().chain(&mut slot.moments)).collect()
    }

    /// Bytes held for a parameter.
    pub fn bytes(&self, id: ParameterId) -> usize {
        self.state(id).into_iter().map(Tensor::byte_len).sum()
    }

    /// The state as a checkpoint holds it: `master/NAME`, `moment0/NAME`, whole or what this rank has of its shard.
    pub fn saved(&self, pieces: &Pieces, groups: &Groups) -> Saved<'_> {
        let slots =
            self.slots.iter().enumerate().filter_map(|(i, slot)| Some((ParameterId(i), slot.as_ref()?)));
        // Parts of the same shard that another group shares out too are written by the first of them.
        let slots = slots.filter(|(id, slot)| slot.member.is_single() || groups.is_first_copy(*id));
        slots.flat_map(|(id, slot)| slot.saved(pieces.own(id))).collect()
    }

    /// Room for the same, to be filled from a checkpoint.
    pub fn wanted(&mut self, pieces: &Pieces) -> Wanted<'_> {
        let missing = self.slots.iter().filter(|slot| slot.is_none()).count();
        let elsewhere = missing * (self.rule.states() + usize::from(self.has_master));
        let tensors = self.slots_mut().flat_map(|(id, slot)| slot.rooms(pieces.own(id))).collect();
        Wanted { file: OPTIMIZER, tensors, elsewhere, converts: false }
    }
}

/// Gives the weights that a new mask has grown the mean of those that stay. `at` says where a weight's number is, from its
/// place in the parameter and its number among the kept ones. On the host, where masks are chosen: sums are in the order of
/// places, so that dense and compressed state agree in every bit; the mean is over all of a parameter that is in pieces.
fn warm_up(
    state: &mut Tensor,
    old: &Mask,
    new: &Mask,
    at: impl Fn(usize, usize) -> usize,
    (id, pieces): (ParameterId, &Pieces),
) -> Result<()> {
    let (old, new) = (old.read_words()?, new.read_words()?);
    let stays = |place: usize| old[place / 32] >> (place % 32) & 1 == 1;
    let kept: Vec<(usize, bool)> =
        ones(&new).enumerate().map(|(nth, place)| (at(place, nth), stays(place))).collect();
    let staying = kept.iter().filter(|(_, stays)| *stays).count();
    if !pieces.is_cut(id) && (staying == kept.len() || staying == 0) {
        return Ok(());
    }
    let mut values = state.copy_to_host()?;
    let sum: f64 = kept.iter().filter(|(_, stays)| *stays).map(|(at, _)| f64::from(values[*at])).sum();
    let totals = pieces.total(id, vec![sum, staying as f64])?;
    if totals[1] == 0.0 {
        return Ok(());
    }
    let mean = (totals[0] / totals[1]) as f32;
    kept.iter().filter(|(_, stays)| !stays).for_each(|(at, _)| values[*at] = mean);
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Ok(state.copy_from_host(&bytes)?)
}

impl Slot {
    /// What a step of this parameter reads and writes.
    pub(crate) fn target<'a>(
        &'a mut self,
        weight: &'a mut Tensor,
        gradient: &'a Tensor,
        mask: Option<&'a Mask>,
    ) -> Target<'a> {
        Target {
            weight,
            master: self.master.as_mut(),
            gradient,
            states: self.moments.iter_mut().collect(),
            mask,
            weight_decay: self.weight_decay,
            adapt: self.adapts,
        }
    }

    fn saved(&self, shard: &Shard) -> Saved<'_> {
        let stored = |(i, tensor)| match self.shard(shard) {
            None => (self.label(i), Stored::Tensor(tensor)),
            Some(shard) => (self.label(i), Stored::Shard(tensor, shard)),
        };
        self.master.iter().chain(&self.moments).enumerate().map(stored).collect()
    }

    fn rooms(&mut self, shard: &Shard) -> Vec<(String, Room<'_>)> {
        let count = self.master.iter().len() + self.moments.len();
        let (labels, shard): (Vec<_>, _) = ((0..count).map(|i| self.label(i)).collect(), self.shard(shard));
        let room = |tensor| match shard.clone() {
            None => Room::Tensor(tensor),
            Some(shard) => Room::Shard(tensor, shard),
        };
        labels.into_iter().zip(self.master.iter_mut().chain(&mut self.moments).map(room)).collect()
    }

    /// The name of the i-th tensor of its state, the master first.
    fn label(&self, i: usize) -> String {
        match (i, &self.master) {
            (0, Some(_)) => format!("master/{}", self.name),
            (i, master) => format!("moment{}/{}", i - master.iter().len(), self.name),
        }
    }

    /// Where what is here of a rank's shard of the parameter belongs, if that is not all of its state.
    fn shard(&self, shard: &Shard) -> Option<Shard> {
        let shard = match (shard.is_full(), self.compressed) {
            (true, _) => Shard::full(&self.shape),
            (false, false) => shard.clone(),
            (false, true) => shard.clone().kept_by(&self.name),
        };
        match self.member.is_single() {
            true => (!shard.is_full()).then_some(shard),
            false => Some(shard.starting_at(self.member.split(self.shape.iter().product()).start)),
        }
    }
}

/// The rule of a run file, in the precision of the kernels.
fn rule_of(rule: optimizer::Rule) -> Rule {
    let (f, nesterov) = (|x: f64| x as f32, matches!(rule, optimizer::Rule::Nesterov { .. }));
    match rule {
        optimizer::Rule::Sgd => Rule::Sgd,
        optimizer::Rule::Momentum { momentum } | optimizer::Rule::Nesterov { momentum } => {
            Rule::Momentum { momentum: f(momentum), nesterov }
        }
        optimizer::Rule::Adam { beta1, beta2, eps } => {
            Rule::Adam { beta1: f(beta1), beta2: f(beta2), eps: f(eps), decoupled: false }
        }
        optimizer::Rule::AdamW { beta1, beta2, eps } => {
            Rule::Adam { beta1: f(beta1), beta2: f(beta2), eps: f(eps), decoupled: true }
        }
        optimizer::Rule::Lars { momentum, trust, rate_in_velocity, .. } => {
            Rule::Lars { momentum: f(momentum), trust: f(trust), eps: LARS_EPS, rate_in_velocity }
        }
        optimizer::Rule::Lamb { beta1, beta2, eps, max_weight_norm, .. } => {
            let max_norm = if max_weight_norm > 0.0 { f(max_weight_norm) } else { f32::INFINITY };
            Rule::Lamb { beta1: f(beta1), beta2: f(beta2), eps: f(eps), max_norm }
        }
    }
}
