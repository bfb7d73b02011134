//! Every rule against its formula in f64, by hand, alone and in lists, dense and under masks.

mod rounded;

use super::host::{join, nearest, split};
use super::*;
use crate::ops::compress::{apply, compress, expand};
use crate::testing::{assert_close, devices, mask_words, tensor, values, wide};
use crate::{Category, DType, Device, bf16};
use proptest::prelude::*;

const STEPS: u64 = 8;

// Settings that f32 holds exactly, so that both sides mean the same.
const LR: f32 = 0.03125;
const DECAY: f32 = 0.125;
const CLIP: f32 = 0.5;
const BETA1: f32 = 0.875;
const BETA2: f32 = 0.96875;
const EPS: f32 = 1e-3;
const TRUST: f32 = 0.0625;

const RULES: [UpdateRule; 9] = [
    UpdateRule::Sgd,
    UpdateRule::Momentum { momentum: BETA1, nesterov: false },
    UpdateRule::Momentum { momentum: BETA1, nesterov: true },
    UpdateRule::Adam { beta1: BETA1, beta2: BETA2, eps: EPS, decoupled: false },
    UpdateRule::Adam { beta1: BETA1, beta2: BETA2, eps: EPS, decoupled: true },
    UpdateRule::Lars { momentum: BETA1, trust: TRUST, eps: EPS, rate_in_velocity: true },
    UpdateRule::Lars { momentum: BETA1, trust: TRUST, eps: EPS, rate_in_velocity: false },
    UpdateRule::Lamb { beta1: BETA1, beta2: BETA2, eps: EPS, max_norm: f32::INFINITY },
    UpdateRule::Lamb { beta1: BETA1, beta2: BETA2, eps: EPS, max_norm: 4.0 },
];

fn numbered(number: u64) -> StepParams {
    StepParams { lr: LR, gradient_scale: CLIP, number }
}

/// A parameter and its state.
struct TestParam {
    weight: Tensor,
    master: Option<Tensor>,
    states: Vec<Tensor>,
    rounded: Option<Rounded>,
    mask: Option<Mask>,
    decay: f32,
    adapt: bool,
}

/// How states in bf16 are rounded.
#[derive(Clone)]
struct Rounded {
    key: u64,
    kept_by: Option<Mask>,
    first: usize,
    positions: Positions,
}

/// How a parameter is kept exactly.
#[derive(Clone, Copy, Debug, PartialEq)]
enum TestMaster {
    Itself,
    Full,
    Low,
}

/// Every form of master, with a type of gradient.
const MASTERS: [(TestMaster, DType); 3] =
    [(TestMaster::Itself, DType::F32), (TestMaster::Full, DType::Bf16), (TestMaster::Low, DType::Bf16)];

impl TestParam {
    fn new(device: &Device, rule: &UpdateRule, start: &[f32], master: TestMaster) -> TestParam {
        let n = start.len();
        let zeros = |dtype| Tensor::zeros(device, &[n], dtype, Category::Optimizer).unwrap();
        let weight = match master {
            TestMaster::Itself => tensor(device, DType::F32, &[n], start),
            TestMaster::Full | TestMaster::Low => tensor(device, DType::Bf16, &[n], start),
        };
        let master = match master {
            TestMaster::Itself => None,
            TestMaster::Full => Some(tensor(device, DType::F32, &[n], start)),
            // The start is a bf16 number: no bit was lost.
            TestMaster::Low => Some(zeros(DType::U16)),
        };
        let states = (0..rule.states()).map(|_| zeros(DType::F32)).collect();
        TestParam { weight, master, states, rounded: None, mask: None, decay: DECAY, adapt: true }
    }

    /// Under a mask: what is not kept becomes zero, and state is dense or compressed.
    fn masked(mut self, words: &[u32], compressed: bool) -> TestParam {
        let mask = Mask::new(&self.weight.device(), self.weight.len(), words).unwrap();
        apply(&mut self.weight, &mask).unwrap();
        for state in self.states.iter_mut().chain(&mut self.master) {
            if compressed {
                *state = compress(state, &mask, Category::Optimizer).unwrap();
            } else {
                apply(state, &mask).unwrap();
            }
        }
        self.mask = Some(mask);
        self
    }

    /// The same with the weight compressed too.
    fn packed(mut self) -> TestParam {
        let mask = self.mask.as_ref().expect("it was masked before");
        self.weight = compress(&self.weight, mask, Category::Weights).unwrap();
        self
    }

    fn target<'a>(&'a mut self, gradient: &'a Tensor) -> ParamUpdate<'a> {
        ParamUpdate {
            weight: &mut self.weight,
            master: self.master.as_mut(),
            gradient,
            states: self.states.iter_mut().collect(),
            rounding: self.rounded.as_ref().map(|one| Rounding {
                key: one.key,
                kept_by: one.kept_by.as_ref(),
                first: one.first,
                positions: one.positions,
            }),
            mask: self.mask.as_ref(),
            weight_decay: self.decay,
            adapt: self.adapt,
        }
    }

    fn step(&mut self, rule: UpdateRule, number: u64, gradient: &Tensor) {
        step(rule, numbered(number), vec![self.target(gradient)], TrustNorms::Measured).unwrap();
    }

    /// The exact weights, dense.
    fn exact(&self) -> Vec<f32> {
        match &self.master {
            Some(master) if master.dtype() == DType::F32 => master.to_f32(),
            Some(low) => {
                let bytes = low.host_bytes();
                let low = bytes.as_chunks().0.iter().map(|pair| u16::from_le_bytes(*pair));
                self.weight.to_f32().iter().zip(low).map(|(&w, low)| join(bf16::from_f32(w), low)).collect()
            }
            None => self.weight.to_f32(),
        }
    }

    /// The bytes of weight, master and states, the last two dense.
    fn bytes(&self) -> Vec<Vec<u8>> {
        let dense = |x: &Tensor| match &self.mask {
            Some(mask) if x.len() < mask.len() => {
                expand(x, mask, &[mask.len()], Category::Optimizer).unwrap().host_bytes().into_owned()
            }
            _ => x.host_bytes().into_owned(),
        };
        [&self.weight].into_iter().chain(&self.master).chain(&self.states).map(dense).collect()
    }
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// A step in f64, as the rules' documentation has it.
fn plain(rule: UpdateRule, t: u64, w: &mut [f64], states: &mut [Vec<f64>; 2], g: &[f64], adapt: bool) {
    let (lr, wd, clip) = (f64::from(LR), f64::from(DECAY), f64::from(CLIP));
    let [m, v] = states;
    let g: Vec<f64> = g.iter().map(|g| clip * g).collect();
    let n = w.len();
    let mut direction = |g: &[f64], b1: f32, b2: f32, eps: f32| -> Vec<f64> {
        let (b1, b2) = (f64::from(b1), f64::from(b2));
        let (c1, c2) = (1.0 - b1.powf(t as f64), 1.0 - b2.powf(t as f64));
        let one = |i: usize| {
            m[i] = b1 * m[i] + (1.0 - b1) * g[i];
            v[i] = b2 * v[i] + (1.0 - b2) * g[i] * g[i];
            (m[i] / c1) / ((v[i] / c2).sqrt() + f64::from(eps))
        };
        (0..n).map(one).collect()
    };
    match rule {
        UpdateRule::Sgd => (0..n).for_each(|i| w[i] -= lr * (g[i] + wd * w[i])),
        UpdateRule::Momentum { momentum, nesterov } => {
            for i in 0..n {
                let (d, momentum) = (g[i] + wd * w[i], f64::from(momentum));
                m[i] = momentum * m[i] + d;
                w[i] -= lr * if nesterov { d + momentum * m[i] } else { m[i] };
            }
        }
        UpdateRule::Adam { beta1, beta2, eps, decoupled } => {
            let l2 = if decoupled { 0.0 } else { wd };
            let g: Vec<f64> = (0..n).map(|i| g[i] + l2 * w[i]).collect();
            let u = direction(&g, beta1, beta2, eps);
            let keep = if decoupled { 1.0 - lr * wd } else { 1.0 };
            (0..n).for_each(|i| w[i] = keep * w[i] - lr * u[i]);
        }
        UpdateRule::Lars { momentum, trust, eps, rate_in_velocity } => {
            let (wn, gn) = (norm(w), norm(&g));
            let r = f64::from(trust) * wn / (gn + wd * wn + f64::from(eps));
            let r = if adapt && wn > 0.0 && gn > 0.0 { r } else { 1.0 };
            for i in 0..n {
                let (inner, outer) = if rate_in_velocity { (lr, 1.0) } else { (1.0, lr) };
                m[i] = f64::from(momentum) * m[i] + inner * r * (g[i] + wd * w[i]);
                w[i] -= outer * m[i];
            }
        }
        UpdateRule::Lamb { beta1, beta2, eps, max_norm } => {
            let mut u = direction(&g, beta1, beta2, eps);
            (0..n).for_each(|i| u[i] += wd * w[i]);
            let (wn, un) = (norm(w), norm(&u));
            let r = if adapt && wn > 0.0 && un > 0.0 { wn.min(f64::from(max_norm)) / un } else { 1.0 };
            (0..n).for_each(|i| w[i] -= lr * r * u[i]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3))]

    /// On every device, with every form of master, for both types of gradient.
    #[test]
    fn every_rule_follows_its_formula(n in 1usize..40_000, seed: u64, adapt: bool) {
        let start = values(seed, n, 0.5);
        let gradients: Vec<Vec<f32>> = (0..STEPS).map(|i| values(seed ^ (i + 1), n, 0.1)).collect();
        for rule in RULES {
            let (mut expected, mut states) = (wide(&start), [vec![0.0; n], vec![0.0; n]]);
            for (i, g) in gradients.iter().enumerate() {
                plain(rule, i as u64 + 1, &mut expected, &mut states, &wide(g), adapt);
            }
            for threads in devices() {
                let run = |device: &Device, dtype: DType, master: TestMaster| {
                    let mut layer = TestParam { adapt, ..TestParam::new(device, &rule, &start, master) };
                    for (i, g) in gradients.iter().enumerate() {
                        layer.step(rule, i as u64 + 1, &tensor(device, dtype, &[n], g));
                    }
                    if master != TestMaster::Itself {
                        let rounded: Vec<f32> = layer.exact().iter().map(|&w| nearest(w).to_f32()).collect();
                        assert_eq!(layer.weight.to_f32(), rounded);
                    }
                    layer.exact()
                };
                for dtype in [DType::F32, DType::Bf16] {
                    let [one, two, three] = threads.each_ref().map(|device| run(device, dtype, TestMaster::Itself));
                    prop_assert!(one == two && one == three);
                    assert_close(&one, &expected, 2e-5);
                }
                let full = run(&threads[0], DType::Bf16, TestMaster::Full);
                assert_close(&full, &expected, 2e-5);
                prop_assert!(full == run(&threads[1], DType::Bf16, TestMaster::Low), "low bits, {:?}", rule);
            }
        }
    }

    /// Bit for bit, norms included; and what is not kept stays zero. The third witness is a dense step under
    /// no mask whose gradient is zero where nothing is kept: equal bits where no norm is taken.
    #[test]
    fn compressed_state_steps_as_dense_state_under_the_same_mask(
        n in 1usize..150_000, seed: u64, fraction in 0.0f64..1.0,
    ) {
        let fraction = if seed.is_multiple_of(3) { fraction / 40.0 } else { fraction };
        let (start, words) = (values(seed, n, 0.5), mask_words(seed, n, fraction));
        let gradients = [1, 2].map(|number| (number, values(seed ^ number, n, 0.1)));
        for rule in RULES {
            for [device, other, _] in devices() {
                for (master, dtype) in MASTERS {
                    let fresh = |on: &Device, compressed| TestParam::new(on, &rule, &start, master).masked(&words, compressed);
                    let (mut small, mut large) = (fresh(device, true), fresh(other, false));
                    let mut packed = fresh(device, true).packed();
                    let mut plain = TestParam { mask: None, ..fresh(device, false) };
                    for &(number, ref g) in &gradients {
                        let mask = small.mask.clone().unwrap();
                        let dense = tensor(device, dtype, &[n], g);
                        let kept = compress(&dense, &mask, Category::Gradients).unwrap();
                        small.step(rule, number, &kept);
                        packed.step(rule, number, &kept);
                        large.step(rule, number, &tensor(other, dtype, &[n], g));
                        let mut zeroed = dense;
                        apply(&mut zeroed, &mask).unwrap();
                        plain.step(rule, number, &zeroed);
                    }
                    prop_assert!(small.bytes() == large.bytes(), "{:?} {:?}", rule, master);
                    prop_assert!(small.bytes() == packed.bytes(), "{:?} {:?}, weights compressed", rule, master);
                    if matches!(device, Device::Cpu(_)) && !rule.adapts() {
                        prop_assert!(small.bytes() == plain.bytes(), "{:?} {:?}", rule, master);
                    }
                    assert_close(&small.weight.to_f32(), &wide(&plain.weight.to_f32()), 1.0 / 128.0);
                    let weight = small.weight.to_f32();
                    prop_assert!((0..n).all(|i| words[i / 32] >> (i % 32) & 1 == 1 || weight[i] == 0.0));
                }
            }
        }
    }

    #[test]
    fn a_number_comes_back_from_its_rounding_and_its_low_half(bits: u32) {
        let x = f32::from_bits(bits);
        prop_assume!(x.is_finite() && nearest(x).is_finite());
        let (weight, low) = split(x);
        prop_assert_eq!(join(weight, low).to_bits(), bits);
        prop_assert!((weight.to_f32() - x).abs() <= (bf16::from_f32(x).to_f32() - x).abs());
        // Ties, which rounding to even would make ambiguous.
        let tie = f32::from_bits(bits & 0xffff_0000 | 0x8000);
        let (weight, low) = split(tie);
        prop_assert_eq!(join(weight, low).to_bits(), tie.to_bits());
    }
}

/// A tensor of each kind in one list: odd lengths, an empty one, masks, master copies, both types of gradient.
#[test]
fn a_list_of_targets_steps_as_each_of_them_alone() {
    let kinds = [
        (70_001, TestMaster::Itself, DType::F32, None),
        (3, TestMaster::Full, DType::Bf16, None),
        (0, TestMaster::Itself, DType::F32, None),
        (4096, TestMaster::Low, DType::F32, None),
        (9000, TestMaster::Full, DType::Bf16, Some(0.3)),
        (9000, TestMaster::Full, DType::Bf16, Some(0.01)),
    ];
    const DECAYS: [f32; 6] = [0.0, 0.125, 0.25, 0.5, 0.25, 0.0];
    // Drawn once for all rules.
    let (starts, gradients) = (values(1, 70_001, 0.5), values(2, 70_001, 0.1));
    let fresh = |device: &Device, rule: &UpdateRule| -> Vec<(TestParam, Tensor)> {
        let layer = |(i, &(n, master, dtype, fraction)): (usize, &(_, _, _, Option<f64>))| {
            let mut layer = TestParam::new(device, rule, &starts[i..][..n], master);
            let mut gradient = tensor(device, dtype, &[n], &gradients[i..][..n]);
            if let Some(fraction) = fraction {
                layer = layer.masked(&mask_words(i as u64, n, fraction), true);
                gradient = compress(&gradient, layer.mask.as_ref().unwrap(), Category::Gradients).unwrap();
            }
            (TestParam { decay: DECAYS[i], adapt: i % 2 == 0, ..layer }, gradient)
        };
        kinds.iter().enumerate().map(layer).collect()
    };
    let bytes =
        |layers: &[(TestParam, Tensor)]| -> Vec<_> { layers.iter().flat_map(|(l, _)| l.bytes()).collect() };
    for [device, ..] in devices() {
        for rule in RULES {
            let (mut one_by_one, mut together, mut given) =
                (fresh(device, &rule), fresh(device, &rule), fresh(device, &rule));
            for (layer, gradient) in &mut one_by_one {
                layer.step(rule, 3, gradient);
            }
            step(
                rule,
                numbered(3),
                together.iter_mut().map(|(l, g)| l.target(g)).collect(),
                TrustNorms::Measured,
            )
            .unwrap();
            let stepped = bytes(&one_by_one);
            assert_ne!(stepped, bytes(&given));
            assert_eq!(stepped, bytes(&together));
            let targets: Vec<ParamUpdate<'_>> = given.iter_mut().map(|(l, g)| l.target(g)).collect();
            let norms = squared_norms(rule, numbered(3), &targets).unwrap();
            step(rule, numbered(3), targets, TrustNorms::Given(&norms)).unwrap();
            assert_eq!(stepped, bytes(&given), "norms taken apart");
        }
    }
    step(UpdateRule::Sgd, numbered(1), vec![], TrustNorms::Measured).unwrap();
}

/// One weight stepped through `(rate, gradient, expected weight)` at decay 0.1.
fn by_hand(device: &Device, rule: UpdateRule, start: f32, steps: &[(f32, f32, f64)]) {
    let mut layer = TestParam { decay: 0.1, ..TestParam::new(device, &rule, &[start], TestMaster::Itself) };
    for (i, &(lr, g, expected)) in steps.iter().enumerate() {
        let now = StepParams { lr, gradient_scale: 1.0, number: i as u64 + 1 };
        let gradient = tensor(device, DType::F32, &[1], &[g]);
        step(rule, now, vec![layer.target(&gradient)], TrustNorms::Measured).unwrap();
        assert_close(&layer.weight.to_f32(), &[expected], 1e-5);
    }
}

/// w = 1, g = 0.5, then 0.25: momentum 0.9, lr 0.1, wd 0.1. By hand:
/// d = 0.6, v = 0.6, w = 0.94; then d = 0.344, v = 0.884, w = 0.8516.
/// Nesterov's first step: d + m v = 0.6 + 0.54, w = 1 - 0.114.
#[test]
fn momentum_by_hand() {
    for [device, ..] in devices() {
        let rule = |nesterov| UpdateRule::Momentum { momentum: 0.9, nesterov };
        by_hand(device, rule(false), 1.0, &[(0.1, 0.5, 0.94), (0.1, 0.25, 0.8516)]);
        by_hand(device, rule(true), 1.0, &[(0.1, 0.5, 0.886)]);
    }
}

/// AdamW, w = 1, g = 0.5 then -0.25, lr 0.1, wd 0.1, eps 0. The first direction is g/|g| = 1:
/// w = 0.99 - 0.1 = 0.89. Then m = 0.9 0.05 - 0.1 0.25 = 0.02, m_hat = 0.02/0.19;
/// v = 0.999 0.00025 + 0.001 0.0625 = 0.00031225, v_hat = v/0.001999;
/// w = 0.99 0.89 - 0.1 (0.10526316/0.39522387) = 0.8811 - 0.02663381.
#[test]
fn adamw_by_hand() {
    for [device, ..] in devices() {
        let rule = UpdateRule::Adam { beta1: 0.9, beta2: 0.999, eps: 0.0, decoupled: true };
        by_hand(device, rule, 1.0, &[(0.1, 0.5, 0.89), (0.1, -0.25, 0.854_466_19)]);
    }
}

/// A layer that is still zero, or has no gradient, moves as without a ratio instead of not at all.
#[test]
fn the_ratio_is_one_where_a_norm_is_zero() {
    for [device, ..] in devices() {
        for rate_in_velocity in [true, false] {
            let lars = UpdateRule::Lars { momentum: 0.0, trust: 0.001, eps: 0.0, rate_in_velocity };
            by_hand(device, lars, 0.0, &[(0.5, 1.0, -0.5)]);
        }
        let lamb = UpdateRule::Lamb { beta1: 0.5, beta2: 0.5, eps: 0.0, max_norm: f32::INFINITY };
        by_hand(device, lamb, 0.0, &[(0.5, 1.0, -0.5)]);
    }
}

/// LARS with its rate inside and outside, trust 0.1, momentum 0.9, wd 0.1, w = 2, g = 0.3, then 0.3 at a
/// tenth of the rate. r = 0.1 2 / (0.3 + 0.1 2) = 0.4, d = 0.5; at a rate of 1 both step by 0.2 to 1.8. Then
/// r = 0.18 / 0.48 = 0.375, d = 0.48, r d = 0.18. Inside: v = 0.9 0.2 + 0.1 0.18 = 0.198, w = 1.602. Outside:
/// v = 0.18 + 0.18, w = 1.8 - 0.036.
#[test]
fn lars_by_hand_when_the_rate_falls() {
    for [device, ..] in devices() {
        for (rate_in_velocity, expected) in [(true, 1.602), (false, 1.764)] {
            let rule = UpdateRule::Lars { momentum: 0.9, trust: 0.1, eps: 0.0, rate_in_velocity };
            by_hand(device, rule, 2.0, &[(1.0, 0.3, 1.8), (0.1, 0.3, expected)]);
        }
    }
}

/// LAMB's phi: w = 20, u = 1 + 0.1 20 = 3, lr 0.1. Without a limit r = 20/3 and w = 18; with 10 as in the authors'
/// experiments r = 10/3 and w = 19.
#[test]
fn lamb_by_hand_with_a_limited_norm() {
    for [device, ..] in devices() {
        for (max_norm, expected) in [(f32::INFINITY, 18.0), (10.0, 19.0), (30.0, 18.0)] {
            let rule = UpdateRule::Lamb { beta1: 0.9, beta2: 0.999, eps: 0.0, max_norm };
            by_hand(device, rule, 20.0, &[(0.1, 0.5, expected)]);
        }
    }
}

/// A mask that keeps nothing leaves nothing to step.
#[test]
fn nothing_kept_is_a_step_of_nothing() {
    for [device, ..] in devices() {
        let mut layer =
            TestParam::new(device, &RULES[4], &[1.0; 100], TestMaster::Full).masked(&[0; 4], true);
        layer.step(RULES[4], 1, &Tensor::empty(device, &[0], DType::Bf16, Category::Gradients).unwrap());
        assert_eq!(layer.weight.to_f32(), [0.0; 100]);
    }
}
