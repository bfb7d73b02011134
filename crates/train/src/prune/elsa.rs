//! ELSA (Lee et al. 2026, "Pushing the Limits of LLM Sparsity with Surrogate-Free ADMM"): the loss itself is
//! minimised under `x = z`, where z is sparse.
//!
//! The x-update are steps of Adam on `f(x) + lambda/2 |x - z + u|^2`; the pull, `lambda (x - z + u)`, joins the
//! gradient after clipping, as in the authors' program. Every so many steps, with v Adam's second moment,
//!
//! - `z = ` the weights of `x + u` with the largest `v (x + u)^2` of each layer, the others 0;
//! - `u += x - z`.
//!
//! So of `w = x + u` a kept weight has `z = w` and `u = 0`, one that is not `z = 0` and `u = w`: a single tensor,
//! `u - z`, and a bit for each weight say both. It is f32 on the device; the bits are on the host. The first z
//! has the largest weights, and `u = 0`. After the last step of the span the weights with the largest `v x^2`
//! stay, and the others go.

use std::collections::BTreeMap;

use espalier_nn::weights::ParameterId;
use espalier_plan::pruning::{PruneSpan, Scope};
use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::compress::apply;
use espalier_tensor::ops::elementwise::{add_into, mul, scale_into};
use espalier_tensor::ops::select::{ScoreOrder, product_keys};
use espalier_tensor::{Category, DType, Mask, Tensor};

use super::{Decision, MaskBits, Network, NewMasks, Pruner, PrunerState, StepClock};
use crate::shard_gather::join;
use crate::state::Penalty;
use crate::{Error, Result};

/// What stands before a name in a checkpoint.
const OFFSET: &str = "elsa/offset/";
const KEPT: &str = "elsa/kept/";

/// The method in the course of a run.
#[derive(Debug)]
pub struct Elsa {
    sparsity: f64,
    span: PruneSpan,
    every: u64,
    /// Lambda.
    penalty: f32,
    /// u - z, from the first step of the span to the last.
    offsets: BTreeMap<ParameterId, Tensor>,
    /// Where z is not 0, with the parameter's name.
    kept: BTreeMap<ParameterId, (String, MaskBits)>,
    /// What a checkpoint had, until there is a device.
    saved: BTreeMap<String, Vec<u32>>,
}

impl Elsa {
    pub fn new(sparsity: f64, span: PruneSpan, every: u64, penalty: f32) -> Elsa {
        let (offsets, kept, saved) = Default::default();
        Elsa { sparsity, span, every, penalty, offsets, kept, saved }
    }

    /// Takes the first sparse network.
    fn start(&mut self, network: &Network<'_>) -> Result<()> {
        for &id in network.candidates {
            if network.params.mask(id).is_some() {
                let problem =
                    "is \"elsa\", which chooses among all weights, but the run starts from weights that are \
                               pruned already: use \"gradual\", or \"keep\""
                        .into();
                let field = "prune.method".into();
                return Err(Error::Plan(espalier_plan::Error::Conflict { field, problem }));
            }
            let kept = network.best(id, &network.magnitudes(id)?, self.kept_count(network, id))?;
            let mut sparse = network.params.param(id).widened(Category::Workspace)?;
            apply(&mut sparse, &mask(network, id, &kept)?)?;
            scale_into(&mut sparse, -1.0)?;
            self.set(network, id, sparse, kept);
        }
        Ok(())
    }

    /// Takes the next one.
    fn advance(&mut self, network: &Network<'_>) -> Result<()> {
        for &id in network.candidates {
            let (_, before) = &self.kept[&id];
            let offset = self.offsets.remove(&id).expect("every candidate has one");
            let mut shifted = dual(&offset, &mask(network, id, before)?)?;
            drop(offset);
            add_into(&mut shifted, &network.params.param(id).dense()?)?;
            let kept =
                network.best(id, &fisher_keys(network, id, &shifted)?, self.kept_count(network, id))?;
            let offset = split(&shifted, &mask(network, id, &kept)?)?;
            self.set(network, id, offset, kept);
        }
        Ok(())
    }

    fn kept_count(&self, network: &Network<'_>, id: ParameterId) -> usize {
        Network::kept_of(network.full_len(id), self.sparsity)
    }

    fn set(&mut self, network: &Network<'_>, id: ParameterId, mut offset: Tensor, kept: MaskBits) {
        offset.tag_memory(Category::Optimizer);
        self.offsets.insert(id, offset);
        self.kept.insert(id, (network.params.name(id).to_owned(), kept));
    }
}

fn mask(network: &Network<'_>, id: ParameterId, bits: &[u32]) -> Result<Mask> {
    Ok(Mask::within(&network.context.device, network.len(id), bits, Category::Workspace)?)
}

/// u, of `u - z`: where z is kept it is 0.
fn dual(offset: &Tensor, kept: &Mask) -> Result<Tensor> {
    let mut dual = offset.duplicate(Category::Workspace)?;
    apply(&mut dual, kept)?;
    scale_into(&mut dual, -1.0)?;
    add_into(&mut dual, offset)?;
    Ok(dual)
}

/// u - z, of `x + u`: where z is kept minus that.
fn split(shifted: &Tensor, kept: &Mask) -> Result<Tensor> {
    let mut offset = shifted.duplicate(Category::Workspace)?;
    apply(&mut offset, kept)?;
    scale_into(&mut offset, -2.0)?;
    add_into(&mut offset, shifted)?;
    Ok(offset)
}

/// `v w^2` of the elements of a parameter, as keys. Ranks that share its state gather v.
fn fisher_keys(network: &Network<'_>, id: ParameterId, w: &Tensor) -> Result<Tensor> {
    let param = network.params.param(id);
    let [.., moment] = &param.moments[..] else { unreachable!("the plan has an optimizer with two moments") };
    let group = network.context.groups.of(param.plan.group).filter(|_| !param.plan.zero.is_single());
    let moment = match group {
        Some(group) => join(moment, param.len(), group)?,
        None => moment.clone(),
    };
    let moment = cast(&moment, DType::F32, Category::Workspace)?;
    Ok(product_keys(&mul(w, w)?, &moment, ScoreOrder::Signed)?)
}

impl Pruner for Elsa {
    fn should_run(&self, at: StepClock) -> bool {
        let (start, end) = self.span.of_run(at.steps);
        let in_span = (start..end).contains(&at.step) && (at.step - start).is_multiple_of(self.every);
        in_span || at.step == end
    }

    /// Puts what a checkpoint had onto the device.
    fn prepare(&mut self, network: &Network<'_>) -> Result<()> {
        for (name, kept) in std::mem::take(&mut self.saved) {
            let Some(name) = name.strip_prefix(KEPT) else {
                let name = name.strip_prefix(OFFSET).expect("a name of these two kinds");
                let Some(id) = network.params.find(name) else { continue };
                let (device, shape) = (&network.context.device, network.context.param(id).shard.shape());
                let numbers: Vec<f32> = kept.into_iter().map(f32::from_bits).collect();
                let offset = Tensor::from_slice(device, &shape, &numbers, Category::Optimizer)?;
                self.offsets.insert(id, offset);
                continue;
            };
            if let Some(id) = network.params.find(name) {
                self.kept.insert(id, (name.to_owned(), kept));
            }
        }
        Ok(())
    }

    fn run(&mut self, network: &mut Network<'_>) -> Result<Decision> {
        let (start, end) = self.span.of_run(network.context.steps);
        match network.step {
            step if step == end => {
                (self.offsets, self.kept) = Default::default();
                let masks = network.keep_best(self.sparsity, Scope::Layer, |id| {
                    fisher_keys(network, id, &network.params.param(id).widened(Category::Workspace)?)
                })?;
                return Ok(NewMasks::of(masks));
            }
            step if step == start => self.start(network)?,
            _ => self.advance(network)?,
        }
        Ok(Decision::Wait)
    }

    fn penalty(&self) -> Option<Penalty<'_>> {
        let pulls = !self.offsets.is_empty();
        pulls.then_some(Penalty::Proximal { offsets: &self.offsets, strength: self.penalty })
    }

    fn save(&self) -> Result<BTreeMap<String, Vec<u32>>> {
        let mut saved = self.saved.clone();
        for (id, (name, kept)) in &self.kept {
            let offset = self.offsets[id].copy_to_host()?.iter().map(|number| number.to_bits()).collect();
            saved.extend([(format!("{OFFSET}{name}"), offset), (format!("{KEPT}{name}"), kept.clone())]);
        }
        Ok(saved)
    }

    fn state_kind<'a>(&self, name: &'a str) -> Option<PrunerState<'a>> {
        let offset = name.strip_prefix(OFFSET).map(PrunerState::NumbersOf);
        offset.or_else(|| name.strip_prefix(KEPT).map(PrunerState::MaskOf))
    }

    fn load(&mut self, saved: BTreeMap<String, Vec<u32>>) {
        self.saved = saved;
    }
}

#[cfg(test)]
mod tests {
    use std::array::from_fn;

    use espalier_tensor::Device;

    use super::*;
    use crate::prune::select;

    /// `f(x) = sum h (x - a)^2 / 2` with two of six weights: the best are those with the largest `h a^2`,
    /// which are not those with the largest a, and `x = a` there. The x-update is exact, z and u are kept as
    /// textbooks have them, and every iterate of ours is theirs.
    #[test]
    fn a_quadratic_is_solved_as_by_hand() {
        const A: [f64; 6] = [3.0, 2.5, 0.5, -2.0, 0.5, -1.5];
        const H: [f64; 6] = [0.1, 1.5, 2.0, 1.0, 1.0, 0.2];
        const LAMBDA: f64 = 1.5;
        let top = |scores: [f64; 6]| {
            let mut order: [usize; 6] = from_fn(|i| i);
            order.sort_by(|i, j| scores[*j].total_cmp(&scores[*i]));
            1u32 << order[0] | 1 << order[1]
        };
        let keep =
            |bits: u32, w: [f64; 6]| -> [f64; 6] { from_fn(|i| if bits >> i & 1 == 1 { w[i] } else { 0.0 }) };
        let device = Device::cpu(1).unwrap();
        let tensor = |values: [f64; 6]| {
            Tensor::from_slice(&device, &[6], &values.map(|x| x as f32), Category::Workspace).unwrap()
        };
        let mask = |bits: u32| Mask::within(&device, 6, &[bits], Category::Workspace).unwrap();
        let mut bits = top(A.map(f64::abs));
        assert_eq!(bits, 0b11, "it starts from the largest");
        let (mut z, mut u) = (keep(bits, A), [0.0; 6]);
        let mut offset = tensor(z.map(|z| -z));
        let mut x = [0.0; 6];
        for iteration in 0..100 {
            x = from_fn(|i| (H[i] * A[i] + LAMBDA * (z[i] - u[i])) / (H[i] + LAMBDA));
            let ours = offset.to_f32();
            for i in 0..6 {
                let (ours, theirs) = (f64::from(ours[i]), u[i] - z[i]);
                assert!((ours - theirs).abs() < 1e-5, "iteration {iteration}, {i}: {ours}, not {theirs}");
            }
            let mut shifted = dual(&offset, &mask(bits)).unwrap();
            add_into(&mut shifted, &tensor(x)).unwrap();
            let keys =
                product_keys(&mul(&shifted, &shifted).unwrap(), &tensor(H), ScoreOrder::Signed).unwrap();
            let w: [f64; 6] = from_fn(|i| x[i] + u[i]);
            bits = top(from_fn(|i| H[i] * w[i] * w[i]));
            assert_eq!(select::best(&keys, 2).unwrap(), [bits], "iteration {iteration}");
            offset = split(&shifted, &mask(bits)).unwrap();
            z = keep(bits, w);
            u = from_fn(|i| w[i] - z[i]);
        }
        assert_eq!(bits, 0b1010);
        for (x, expected) in x.into_iter().zip([0.0, 2.5, 0.0, -2.0, 0.0, 0.0]) {
            assert!((x - expected).abs() < 1e-6, "{x} is not {expected}");
        }
    }
}
