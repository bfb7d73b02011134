//! How a step walks over a parameter on the host: in spans, each of which is brought side by side, stepped
//! while it is in the cache, and put back.

use std::borrow::Cow;
use std::ops::Range;

use super::rounding::{of_state, round_run, stochastic, widen};
use super::rule::PreparedRule;
use super::{ParamUpdate, Rounding, SquaredNorms, StepParams, TrustNorms, UpdateRule};
use crate::cpu::scratch::ScratchPool;
use crate::cpu::{Cpu, Isa};
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::mask::{KeptSpan, Mask, split_at_ranges};
use crate::memory::Category;
use crate::ops::chunks::{self, CHUNK};
use crate::tensor::Tensor;
use crate::{bf16, random, simd, with_float};

pub(super) fn step(
    cpu: &Cpu,
    rule: UpdateRule,
    step: StepParams,
    targets: Vec<ParamUpdate<'_>>,
    norms: TrustNorms<'_>,
) -> Result<()> {
    for (i, target) in targets.into_iter().enumerate() {
        let norms = match norms {
            _ if !(rule.adapts() && target.adapt) => None,
            TrustNorms::Given(given) => Some(given[i]),
            TrustNorms::Measured => Some(self::norms(cpu, rule, step, &target)?),
        };
        let prepared = PreparedRule::new(rule, step, target.weight_decay, norms);
        with_float!(target.gradient.dtype(), G => advance::<G>(cpu, target, &prepared, step)?);
    }
    Ok(())
}

pub(super) fn norms(
    cpu: &Cpu,
    rule: UpdateRule,
    step: StepParams,
    target: &ParamUpdate<'_>,
) -> Result<SquaredNorms> {
    let prepared = PreparedRule::new(rule, step, target.weight_decay, None);
    let walk = UpdateSpans::new(target);
    let per_span = with_float!(target.gradient.dtype(), G => {
        let gradient = target.gradient.slice::<G>();
        cpu.map_chunks(walk.spans.len(), 1, |i| {
            let span = &walk.spans[i.start];
            let states: Vec<Cow<'_, [f32]>> =
                target.states.iter().map(|state| walk.read_widened(span, state)).collect();
            let states: Vec<&[f32]> = states.iter().map(|state| &**state).collect();
            let w = walk.exact(span, target.weight, target.master.as_deref());
            prepared.norms(cpu.isa(), &w, &states, &walk.read(span, gradient))
        })
    });
    let join = |a: SquaredNorms, b: SquaredNorms| SquaredNorms {
        weight: a.weight + b.weight,
        direction: a.direction + b.direction,
    };
    Ok(per_span.into_iter().fold(SquaredNorms::default(), join))
}

fn advance<G: Float>(
    cpu: &Cpu,
    target: ParamUpdate<'_>,
    rule: &PreparedRule,
    step: StepParams,
) -> Result<()> {
    let walk = UpdateSpans::new(&target);
    let rounding = target.placed_rounding().map(|rounding| (rounding, rounding.stream(step)));
    let ParamUpdate { weight, master, gradient, states, .. } = target;
    // Room for w, two states and g.
    let longest = walk.spans.iter().map(|span| span.kept.len()).max().unwrap_or(0);
    let scratch = ScratchPool::new(cpu, walk.spans.len(), || {
        Tensor::empty(&weight.device(), &[4, longest], DType::F32, Category::Workspace)
    })?;
    let dense = || walk.spans.iter().map(|span| span.dense.clone());
    let stored = || walk.spans.iter().map(|span| walk.stored(span));
    let mut exact: Vec<ExactWeights<'_>> = match master {
        None => split_at_ranges(weight.slice_mut::<f32>(), dense())
            .into_iter()
            .map(ExactWeights::Weight)
            .collect(),
        Some(master) => {
            let weights = split_at_ranges(weight.slice_mut::<bf16>(), dense()).into_iter();
            match master.dtype() {
                DType::U16 => {
                    let low = split_at_ranges(master.slice_mut::<u16>(), stored());
                    weights.zip(low).map(|(weight, low)| ExactWeights::Low { weight, low }).collect()
                }
                _ => {
                    let master = split_at_ranges(master.slice_mut::<f32>(), stored());
                    weights
                        .zip(master)
                        .map(|(weight, master)| ExactWeights::Master { weight, master })
                        .collect()
                }
            }
        }
    };
    let mut states: Vec<States<'_>> = match rounding {
        None => of_spans(states, stored).map(States::F32).collect(),
        Some(_) => of_spans(states, stored).map(States::Bf16).collect(),
    };
    let gradient = gradient.slice::<G>();
    let per_span = walk.spans.iter().zip(exact.drain(..)).zip(states.drain(..));
    let per_span =
        per_span.map(|((span, exact), states)| (span, exact, states, &gradient[walk.stored(span)]));
    chunks::each(cpu, per_span, |(span, exact, states, g)| {
        scratch.lend(|buffers| {
            let update = SpanUpdate { walk: &walk, span, exact, states, rounding };
            update.advance(cpu.isa(), g, rule, buffers.slice_mut::<f32>());
        });
    });
    Ok(())
}

/// The weights that a step goes over, and where things stand for each of them.
struct UpdateSpans<'a> {
    mask: Option<&'a Mask>,
    /// Whether gradient and state hold kept elements alone.
    compressed: bool,
    spans: Vec<KeptSpan>,
}

impl<'a> UpdateSpans<'a> {
    fn new(target: &ParamUpdate<'a>) -> UpdateSpans<'a> {
        let chunk = |i: usize, len: usize| i * CHUNK..((i + 1) * CHUNK).min(len);
        let spans = match target.mask {
            Some(mask) if target.weight_is_compressed() && target.is_compressed() => {
                // All that there is stands side by side; cut as under the mask, so that norms have the same bits.
                let spans = mask.spans().into_iter();
                let spans =
                    spans.map(|KeptSpan { kept, .. }| KeptSpan { dense: kept.clone(), kept }).collect();
                return UpdateSpans { mask: None, compressed: false, spans };
            }
            Some(mask) => mask.spans(),
            None => {
                let len = target.weight.len();
                let span = |i| KeptSpan { dense: chunk(i, len), kept: chunk(i, len) };
                (0..len.div_ceil(CHUNK)).map(span).collect()
            }
        };
        UpdateSpans { mask: target.mask, compressed: target.is_compressed(), spans }
    }

    /// The range of a span in gradient and state.
    fn stored(&self, span: &KeptSpan) -> Range<usize> {
        if self.compressed { span.kept.clone() } else { span.dense.clone() }
    }

    /// Whether gradient and state have the span's weights side by side.
    fn side_by_side(&self) -> bool {
        self.mask.is_none() || self.compressed
    }

    /// Calls `visit(k, p)` for each weight of a span: its number among those stepped, and among the span's.
    #[inline(always)]
    fn each(&self, span: &KeptSpan, mut visit: impl FnMut(usize, usize)) {
        match self.mask {
            Some(mask) => mask.each(span, visit),
            None => (0..span.dense.len()).for_each(|i| visit(i, i)),
        }
    }

    /// The numbers of gradient or state that a span steps, side by side.
    fn read<'t, T: Float>(&self, span: &KeptSpan, all: &'t [T]) -> Cow<'t, [T]> {
        let stored = &all[self.stored(span)];
        if self.side_by_side() {
            return Cow::Borrowed(stored);
        }
        let mut found = Vec::with_capacity(span.kept.len());
        self.each(span, |_, p| found.push(stored[p]));
        Cow::Owned(found)
    }

    /// The same of a state of either type, as f32.
    fn read_widened<'t>(&self, span: &KeptSpan, state: &'t Tensor) -> Cow<'t, [f32]> {
        match state.dtype() {
            DType::F32 => self.read(span, state.slice::<f32>()),
            _ => self.read(span, state.slice::<bf16>()).iter().map(|x| x.to_f32()).collect(),
        }
    }

    /// Rounds what a span has stepped, and puts it where the states have it.
    fn put_rounded(
        &self,
        isa: Isa,
        span: &KeptSpan,
        (rounding, key): (Rounding<'_>, u64),
        from: &[&mut [f32]],
        states: &mut [&mut [bf16]],
    ) {
        let start = rounding.first + span.dense.start;
        let is_run = self.mask.is_none() && rounding.kept_by.is_none() && rounding.positions.row == 0;
        if is_run {
            return round_run(isa, key, start as u64, from, states);
        }
        let mut put = |k: usize, at: usize, position: usize| {
            let bits = random::bits(key, rounding.positions.in_full(position as u64));
            for (i, (from, state)) in from.iter().zip(states.iter_mut()).enumerate() {
                state[at] = stochastic(from[k], of_state(bits, i));
            }
        };
        match (self.mask, rounding.kept_by) {
            (Some(_), _) => {
                self.each(span, |k, p| put(k, if self.compressed { k } else { p }, span.dense.start + p));
            }
            (None, Some(mask)) => {
                mask.each_number(start..start + span.dense.len(), |k, position| put(k, k, position));
            }
            (None, None) => (0..span.dense.len()).for_each(|k| put(k, k, start + k)),
        }
    }

    /// The exact weights that a span steps, side by side.
    fn exact<'t>(&self, span: &KeptSpan, weight: &'t Tensor, master: Option<&'t Tensor>) -> Cow<'t, [f32]> {
        match master {
            Some(master) if master.dtype() == DType::F32 => self.read(span, master.slice::<f32>()),
            Some(low) => {
                let (high, low) = (&weight.slice::<bf16>()[span.dense.clone()], low.slice::<u16>());
                let low = &low[self.stored(span)];
                let mut found = Vec::with_capacity(span.kept.len());
                self.each(span, |k, p| found.push(join(high[p], low[if self.compressed { k } else { p }])));
                Cow::Owned(found)
            }
            None if self.mask.is_none() => Cow::Borrowed(&weight.slice::<f32>()[span.dense.clone()]),
            None => {
                let weight = &weight.slice::<f32>()[span.dense.clone()];
                let mut found = Vec::with_capacity(span.kept.len());
                self.each(span, |_, p| found.push(weight[p]));
                Cow::Owned(found)
            }
        }
    }
}

/// Where a span's exact weights are. Weights are dense; what stands beside them is as [`UpdateSpans::stored`].
enum ExactWeights<'a> {
    Weight(&'a mut [f32]),
    Master { weight: &'a mut [bf16], master: &'a mut [f32] },
    Low { weight: &'a mut [bf16], low: &'a mut [u16] },
}

/// A span with its slices of all that is written.
struct SpanUpdate<'a> {
    walk: &'a UpdateSpans<'a>,
    span: &'a KeptSpan,
    exact: ExactWeights<'a>,
    states: States<'a>,
    /// With the step's stream of random bits.
    rounding: Option<(Rounding<'a>, u64)>,
}

/// A span's numbers of each state.
enum States<'a> {
    F32(Vec<&'a mut [f32]>),
    Bf16(Vec<&'a mut [bf16]>),
}

/// All states, span by span.
fn of_spans<T: Float, R: Iterator<Item = Range<usize>>>(
    states: Vec<&mut Tensor>,
    spans: impl Fn() -> R,
) -> impl Iterator<Item = Vec<&mut [T]>> {
    let count = spans().count();
    let mut states: Vec<_> = states
        .into_iter()
        .map(|state| split_at_ranges(state.slice_mut::<T>(), spans()).into_iter())
        .collect();
    let next = move |_| {
        states.iter_mut().map(|state| state.next().expect("a slice of each state for each span")).collect()
    };
    (0..count).map(next)
}

impl SpanUpdate<'_> {
    fn advance<G: Float>(self, isa: Isa, g: &[G], rule: &PreparedRule, buffers: &mut [f32]) {
        let SpanUpdate { walk, span, exact, states, rounding } = self;
        let n = span.kept.len();
        let (w_scratch, rest) = buffers.split_at_mut(n);
        let (first, rest) = rest.split_at_mut(n);
        let (second, g_scratch) = rest.split_at_mut(n);
        let (mut state_scratch, g_scratch) = ([first, second], &mut g_scratch[..n]);
        match states {
            States::F32(mut states) if walk.side_by_side() => {
                step_exact(isa, walk, span, exact, w_scratch, &mut |w| rule.advance(isa, w, &mut states, g));
            }
            States::F32(mut states) => {
                bring(walk, span, g, &states, g_scratch, &mut state_scratch);
                let gathered = &mut state_scratch[..states.len()];
                step_exact(isa, walk, span, exact, w_scratch, &mut |w| {
                    rule.advance(isa, w, gathered, g_scratch)
                });
                walk.each(span, |k, p| {
                    for (slot, state) in state_scratch.iter().zip(&mut states) {
                        state[p] = slot[k];
                    }
                });
            }
            States::Bf16(mut states) => {
                let count = states.len();
                let side_by_side = walk.side_by_side();
                match side_by_side {
                    true => state_scratch
                        .iter_mut()
                        .zip(&states)
                        .for_each(|(slot, state)| widen(isa, state, slot)),
                    false => bring(walk, span, g, &states, g_scratch, &mut state_scratch),
                }
                let gathered = &mut state_scratch[..count];
                step_exact(isa, walk, span, exact, w_scratch, &mut |w| match side_by_side {
                    true => rule.advance(isa, w, gathered, g),
                    false => rule.advance(isa, w, gathered, g_scratch),
                });
                let rounding = rounding.expect("states in bf16 are rounded");
                walk.put_rounded(isa, span, rounding, &state_scratch[..count], &mut states);
            }
        }

        /// A mask with dense state: brings states and gradient side by side too.
        fn bring<G: Float, S: Float>(
            walk: &UpdateSpans<'_>,
            span: &KeptSpan,
            g: &[G],
            states: &[&mut [S]],
            g_scratch: &mut [f32],
            state_scratch: &mut [&mut [f32]],
        ) {
            walk.each(span, |k, p| {
                g_scratch[k] = g[p].to_f32();
                for (slot, state) in state_scratch.iter_mut().zip(states) {
                    slot[k] = state[p].to_f32();
                }
            });
        }

        /// `step` behind a pointer: all of this is compiled once, not for each of its callers.
        fn step_exact(
            isa: Isa,
            walk: &UpdateSpans<'_>,
            span: &KeptSpan,
            exact: ExactWeights<'_>,
            buffers: &mut [f32],
            step: &mut dyn FnMut(&mut [f32]),
        ) {
            let index = |k: usize, p: usize| if walk.compressed { k } else { p };
            match exact {
                ExactWeights::Weight(weight) if walk.mask.is_none() => step(weight),
                ExactWeights::Weight(weight) => {
                    walk.each(span, |k, p| buffers[k] = weight[p]);
                    step(buffers);
                    walk.each(span, |k, p| weight[p] = buffers[k]);
                }
                ExactWeights::Master { weight, master } if walk.mask.is_none() => {
                    step(master);
                    narrow(isa, master, weight);
                }
                ExactWeights::Master { weight, master } if walk.compressed => {
                    step(master);
                    walk.each(span, |k, p| weight[p] = nearest(master[k]));
                }
                ExactWeights::Master { weight, master } => {
                    walk.each(span, |k, p| buffers[k] = master[p]);
                    step(buffers);
                    walk.each(span, |k, p| (master[p], weight[p]) = (buffers[k], nearest(buffers[k])));
                }
                ExactWeights::Low { weight, low } => {
                    walk.each(span, |k, p| buffers[k] = join(weight[p], low[index(k, p)]));
                    step(buffers);
                    walk.each(span, |k, p| (weight[p], low[index(k, p)]) = split(buffers[k]));
                }
            }
        }
    }
}

/// The nearest bf16, ties away from zero; a number that is not finite never gets here.
#[inline(always)]
pub(super) fn nearest(x: f32) -> bf16 {
    bf16::from_bits((x.to_bits().wrapping_add(0x8000) >> 16) as u16)
}

/// The nearest bf16, and the low bits with which [`join`] restores the number.
#[inline(always)]
pub fn split(x: f32) -> (bf16, u16) {
    (nearest(x), x.to_bits() as u16)
}

/// The f32 number of which `weight` is the nearest bf16 and `low` the lower half: where that half rounds up,
/// the upper half is one below the weight's.
#[inline(always)]
pub fn join(weight: bf16, low: u16) -> f32 {
    let upper = weight.to_bits().wrapping_sub(low >> 15);
    f32::from_bits(u32::from(upper) << 16 | u32::from(low))
}

simd! {
    fn narrow(x: &[f32], y: &mut [bf16]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = nearest(*x);
        }
    }
}
