//! Early-Bird tickets (You et al. 2020): train densely until it is settled which weights are small, then
//! prune them.
//!
//! Every so many steps the mask that pruning now would give is computed. When the newest is nearer than a
//! tolerance to each of the others in a window of the last few, it is the ticket.
//!
//! The paper's masks are of channels: those with the smallest `|gamma|` of their batch norm, over all layers
//! together, while `l1 sign(gamma)` is added to the gradients of these scales until the ticket is drawn.
//! Pruning a channel removes the convolution's weights and bias that make it, its scale and shift, and the
//! weights of the layers behind that read it: where residual branches are summed, if the channels of all of
//! them are pruned. Networks without batch norm have masks of weights by their magnitude, with the same
//! window.
//!
//! The distance of two masks of channels is the paper's: differing positions over all positions. Of weights, of
//! which few are kept, that could not fail: two masks that have nothing in common differ in `2 (1 - s)` of
//! all positions, 0.1 at 95 %. There it is differing positions over twice the kept ones: 0 for equal masks, 1 for
//! disjoint ones, at any sparsity.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use espalier_nn::weights::{ParameterId, ids_by_name};
use espalier_plan::Plan;
use espalier_plan::pruning::{PruneMethod, Pruning, Scope, TicketForm};
use espalier_plan::spec::{ChannelReader, ChannelSource};

use super::{
    Decision, MaskBits, Network, NewMasks, Observation, Pruner, PrunerState, StepClock, count, differing,
    is_kept,
};
use crate::Result;
use crate::state::Penalty;

/// Names in a checkpoint.
const MASK: &str = "mask/";
const TICKET: &str = "ticket";

/// The search for an Early-Bird ticket.
#[derive(Debug)]
pub struct EarlyBird {
    sparsity: f64,
    /// Whether weights of all layers compete, or those of each layer.
    scope: Scope,
    every: u64,
    window: usize,
    tolerance: f64,
    l1: f32,
    latest: u64,
    /// None: masks are of weights.
    channels: Option<Vec<ChannelParams>>,
    /// What reads the channels.
    readers: Vec<(ParameterId, ChannelReader)>,
    /// The last masks, oldest first, by the names of their parameters.
    recent_masks: VecDeque<BTreeMap<String, MaskBits>>,
    /// The steps taken before the ticket was drawn.
    ticket: Option<u64>,
}

/// The parameters of one layer's channels.
#[derive(Debug)]
struct ChannelParams {
    /// Among those of the model, as readers count them.
    index: usize,
    channels: usize,
    conv: ParameterId,
    bias: Option<ParameterId>,
    scale: ParameterId,
    shift: ParameterId,
}

impl EarlyBird {
    /// The search that a run file asks for.
    pub fn new(plan: &Plan, prune: &Pruning) -> EarlyBird {
        let PruneMethod::EarlyBird { form, scope, every, window, tolerance, l1, latest } = prune.method
        else {
            panic!("the fields of early-bird, not of {}", prune.method.name());
        };
        let parameters = plan.model.parameters();
        let ids = ids_by_name(parameters.iter().map(|parameter| parameter.name.as_str()));
        let id = |layer: &str, suffix: &str| ParameterId(ids[&format!("{layer}.{suffix}")]);
        let layers = plan.model.scaled_channels();
        let layers = layers.iter().enumerate().filter(|(_, layer)| prune.covers_channels(layer));
        let layers = layers.map(|(index, layer)| ChannelParams {
            index,
            channels: layer.channels,
            conv: id(&layer.conv, "weight"),
            bias: layer.bias.then(|| id(&layer.conv, "bias")),
            scale: id(&layer.norm, "weight"),
            shift: id(&layer.norm, "bias"),
        });
        let reads = |reader: ChannelReader| Some((ParameterId(*ids.get(&reader.weight)?), reader));
        let readers = plan.model.channel_readers().into_iter().filter_map(reads);
        let readers = readers.filter(|(id, _)| prune.covers(&parameters[id.0])).collect();
        EarlyBird {
            readers,
            sparsity: prune.sparsity,
            scope,
            every: every as u64,
            window,
            tolerance,
            l1: l1 as f32,
            latest: latest as u64,
            channels: (form == TicketForm::Channels).then(|| layers.collect()),
            recent_masks: VecDeque::new(),
            ticket: None,
        }
    }

    /// Whether a ticket is drawn now, settled or not.
    fn is_last(&self, at: StepClock) -> bool {
        let latest = if self.latest == 0 { (at.steps / 2).max(1) } else { self.latest };
        at.step >= latest
    }

    /// The mask that pruning now would give: of weights, or of one scale for each channel.
    fn new_bits(&self, network: &Network<'_>) -> Result<Vec<(ParameterId, MaskBits)>> {
        let magnitudes = |id| network.magnitudes(id);
        match &self.channels {
            None => network.keep_best(self.sparsity, self.scope, magnitudes),
            Some(layers) => {
                let scales: Vec<ParameterId> =
                    local_layers(layers, network).map(|layer| layer.scale).collect();
                let all = network.count_over(&scales, |id| network.len(id))?;
                network.keep(&scales, Network::kept_of(all, self.sparsity), magnitudes)
            }
        }
    }

    /// The masks of all that new bits remove. Norms are replicated on every rank; what makes and reads their
    /// channels may be split.
    fn masks(
        &self,
        network: &Network<'_>,
        new_bits: Vec<(ParameterId, MaskBits)>,
    ) -> Result<Vec<(ParameterId, MaskBits)>> {
        let Some(layers) = &self.channels else { return Ok(new_bits) };
        let pruned = pruned_channels(layers, network, &new_bits)?;
        let of_layer = |(layer, (scale, bits)): (&ChannelParams, (ParameterId, MaskBits))| {
            let len = network.full_len(layer.conv);
            let conv = rows(&bits, len, len / network.full_len(scale));
            let alike = [Some(layer.scale), Some(layer.shift), layer.bias].into_iter().flatten();
            let mut masks: Vec<(ParameterId, MaskBits)> = alike.map(|id| (id, bits.clone())).collect();
            masks.push((layer.conv, conv));
            masks
        };
        let mut masks: BTreeMap<ParameterId, MaskBits> =
            local_layers(layers, network).zip(new_bits).flat_map(of_layer).collect();
        for (id, reader) in self.readers.iter().filter(|(id, _)| network.params.holds(*id)) {
            let zero = |source: &ChannelSource| {
                !source.is_empty() && source.iter().all(|channel| pruned.contains(channel))
            };
            let zeros: Vec<usize> =
                (0..reader.inputs.len()).filter(|input| zero(&reader.inputs[*input])).collect();
            if !zeros.is_empty() {
                let len = network.full_len(*id);
                let bits = masks.entry(*id).or_insert_with(|| rows(&[1], len, len));
                clear_inputs(bits, reader, &zeros);
            }
        }
        Ok(masks.into_iter().map(|(id, bits)| (id, network.local_bits(id, bits))).collect())
    }
}

/// The channels that new bits prune, of all stages: one reads what another makes.
fn pruned_channels(
    layers: &[ChannelParams],
    network: &Network<'_>,
    new_bits: &[(ParameterId, MaskBits)],
) -> Result<HashSet<(usize, usize)>> {
    let before = |index: usize| -> usize {
        layers.iter().filter(|layer| layer.index < index).map(|layer| layer.channels).sum()
    };
    let mut counts = vec![0u64; before(usize::MAX)];
    for (layer, (scale, bits)) in local_layers(layers, network).zip(new_bits) {
        if network.is_owner(*scale) {
            let start = before(layer.index);
            let gone = (0..layer.channels).filter(|channel| !is_kept(bits, *channel));
            gone.for_each(|channel| counts[start + channel] = 1);
        }
    }
    let counts = network.context.ranks.all_reduce_over_replica(counts)?;
    let all = layers.iter().flat_map(|layer| (0..layer.channels).map(move |channel| (layer.index, channel)));
    Ok(all.zip(counts).filter(|(_, gone)| *gone > 0).map(|(channel, _)| channel).collect())
}

/// Lets go of what multiplies some inputs.
fn clear_inputs(bits: &mut MaskBits, reader: &ChannelReader, inputs: &[usize]) {
    for outer in 0..reader.outer {
        for input in inputs {
            let start = (outer * reader.inputs.len() + input) * reader.inner;
            for index in start..start + reader.inner {
                bits[index / 32] &= !(1 << (index % 32));
            }
        }
    }
}

/// The layers of this stage.
fn local_layers<'a>(
    layers: &'a [ChannelParams],
    network: &'a Network<'_>,
) -> impl Iterator<Item = &'a ChannelParams> {
    layers.iter().filter(|layer| network.params.holds(layer.scale))
}

/// The mask of `len` weights in rows of `each` that keeps the rows which `kept` keeps.
fn rows(kept: &[u32], len: usize, each: usize) -> MaskBits {
    let mut bits = vec![0; len.div_ceil(32)];
    for index in (0..len).filter(|index| is_kept(kept, index / each)) {
        bits[index / 32] |= 1 << (index % 32);
    }
    bits
}

impl Pruner for EarlyBird {
    fn should_run(&self, at: StepClock) -> bool {
        let every = if self.every == 0 { at.epoch } else { self.every };
        let due = at.step > 0 && (at.step.is_multiple_of(every) || self.is_last(at));
        self.ticket.is_none() && due
    }

    fn run(&mut self, network: &mut Network<'_>) -> Result<Decision> {
        let last = self.is_last(network.step_clock());
        let new_bits = self.new_bits(network)?;
        let ids: Vec<ParameterId> = new_bits.iter().map(|(id, _)| *id).collect();
        let total = network.count_over(&ids, |id| network.len(id))?;
        let name = |id: ParameterId| network.params.name(id).to_owned();
        let newest: BTreeMap<String, MaskBits> =
            new_bits.iter().map(|(id, bits)| (name(*id), bits.clone())).collect();
        let kept: HashMap<ParameterId, usize> =
            new_bits.iter().map(|(id, bits)| (*id, count(bits))).collect();
        let kept = network.count_over(&ids, |id| kept[&id])?;
        let most = if self.channels.is_some() { total } else { 2 * kept.max(1) };
        let distance = |older: &BTreeMap<String, MaskBits>| -> Result<f64> {
            let differs = |id| differing(&older[&name(id)], &newest[&name(id)]);
            Ok(network.count_over(&ids, differs)? as f64 / most as f64)
        };
        let distances: Vec<f64> = self.recent_masks.iter().map(distance).collect::<Result<_>>()?;
        let settled =
            distances.len() + 1 >= self.window && distances.iter().all(|distance| *distance < self.tolerance);
        let what = if self.channels.is_some() { "channels" } else { "weights" };
        let mut note = format!("keeps {kept} of {total} {what}");
        if !distances.is_empty() {
            let list: Vec<String> = distances.iter().map(|distance| format!("{distance:.4}")).collect();
            note += &format!("; mask distance to earlier masks {}", list.join(" "));
        }
        if !settled && !last {
            self.recent_masks.push_back(newest);
            if self.recent_masks.len() >= self.window {
                self.recent_masks.pop_front();
            }
            return Ok(Decision::Observe(Observation { note, distances }));
        }
        self.recent_masks.clear();
        self.ticket = Some(network.step);
        let why = if settled { "converged" } else { "not converged by `prune.latest`" };
        let note = format!("mask drawn after step {}, {why}: {note}", network.step);
        Ok(Decision::Prune(NewMasks {
            masks: self.masks(network, new_bits)?,
            reset_state: false,
            note,
            distances,
        }))
    }

    fn penalty(&self) -> Option<Penalty<'_>> {
        let layers = self.channels.as_ref().filter(|_| self.ticket.is_none() && self.l1 > 0.0)?;
        Some(Penalty::L1 { ids: layers.iter().map(|layer| layer.scale).collect(), strength: self.l1 })
    }

    fn save(&self) -> Result<BTreeMap<String, Vec<u32>>> {
        let masks = self.recent_masks.iter().enumerate().flat_map(|(i, masks)| {
            masks.iter().map(move |(name, mask)| (format!("{MASK}{i:03}/{name}"), mask.clone()))
        });
        let ticket = self.ticket.map(|step| (TICKET.to_owned(), vec![step as u32, (step >> 32) as u32]));
        Ok(masks.chain(ticket).collect())
    }

    fn state_kind<'a>(&self, name: &'a str) -> Option<PrunerState<'a>> {
        let parameter = |rest: &'a str| Some(PrunerState::MaskOf(rest.split_once('/')?.1));
        if name == TICKET {
            Some(PrunerState::Replicated)
        } else {
            name.strip_prefix(MASK).and_then(parameter)
        }
    }

    fn load(&mut self, mut saved: BTreeMap<String, Vec<u32>>) {
        self.ticket = saved.remove(TICKET).map(|step| u64::from(step[1]) << 32 | u64::from(step[0]));
        // The names sort by age.
        let mut by_age: BTreeMap<String, BTreeMap<String, MaskBits>> = BTreeMap::new();
        for (name, mask) in saved {
            if let Some((age, name)) = name.strip_prefix(MASK).and_then(|rest| rest.split_once('/')) {
                by_age.entry(age.into()).or_default().insert(name.into(), mask);
            }
        }
        self.recent_masks = by_age.into_values().collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_is_a_row_of_its_convolution() {
        assert_eq!(rows(&[0b101], 3 * 14, 14), [0xf000_3fff, 0x3ff]);
    }
}
