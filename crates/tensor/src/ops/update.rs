//! Optimizer steps: one pass over a weight, its gradient and its state. Any shape; state is f32.
//!
//! Each reads g (times `gradient_scale`, which is how clipping arrives), updates the f32 weight w and, where w is
//! the master copy of a bf16 weight, writes the rounded weight. Formulas are those of PyTorch; LARS (You, Gitman &
//! Ginsburg 2017) and LAMB (You et al. 2020) scale a layer's step by a ratio of norms. A layer may be spread over
//! several ranks, so its squared norms are taken by functions of their own, for the caller to add up.

pub(crate) mod cuda;

use crate::cpu::{Cpu, Isa, lanes};
use crate::cuda::Cuda;
use crate::device::Device;
use crate::dtype::Float;
use crate::error::must;
use crate::ops::cast::convert;
use crate::ops::pieces::{self, PIECE};
use crate::ops::reduce::squared_norm;
use crate::tensor::Tensor;
use crate::{bf16, simd, with_float};
use cuda::{Described, Ratios, Rule, Settings};

/// What a step works on: a weight in f32, or one in bf16 with its f32 master copy.
#[derive(Debug)]
pub struct Target<'a> {
    /// The weight that the kernels read.
    pub weight: &'a mut Tensor,
    /// Its f32 copy, which the step updates; none where the weight itself is f32.
    pub master: Option<&'a mut Tensor>,
    /// The gradient, of either float type.
    pub gradient: &'a Tensor,
}

impl Target<'_> {
    /// The f32 weight.
    fn exact(&self) -> &Tensor {
        self.master.as_deref().unwrap_or(self.weight)
    }
}

/// Plain gradient descent: w -= lr (g + wd w).
#[derive(Debug, Clone, Copy)]
pub struct Sgd {
    /// The learning rate.
    pub lr: f32,
    /// wd.
    pub weight_decay: f32,
    /// A factor on the gradient.
    pub gradient_scale: f32,
}

/// d = g + wd w; v = momentum v + d; w -= lr v, or lr (d + momentum v) for Nesterov's.
#[derive(Debug, Clone, Copy)]
pub struct Momentum {
    /// The learning rate.
    pub lr: f32,
    /// How much of the velocity stays.
    pub momentum: f32,
    /// Whether to look ahead.
    pub nesterov: bool,
    /// wd.
    pub weight_decay: f32,
    /// A factor on the gradient.
    pub gradient_scale: f32,
}

/// m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w -= lr m_hat / (sqrt(v_hat) + eps),
/// where m_hat = m / (1 - b1^step) and v_hat = v / (1 - b2^step).
#[derive(Debug, Clone, Copy)]
pub struct Adam {
    /// The learning rate.
    pub lr: f32,
    /// b1.
    pub beta1: f32,
    /// b2.
    pub beta2: f32,
    /// Added to the root.
    pub eps: f32,
    /// wd.
    pub weight_decay: f32,
    /// AdamW: first w *= 1 - lr wd. Otherwise g += wd w.
    pub decoupled: bool,
    /// The number of this step; the first is 1.
    pub step: u64,
    /// A factor on the gradient.
    pub gradient_scale: f32,
}

/// v = momentum v + lr r (g + wd w); w -= v, with r = trust |w| / (|g| + wd |w| + eps).
#[derive(Debug, Clone, Copy)]
pub struct Lars {
    /// The learning rate.
    pub lr: f32,
    /// How much of the velocity stays.
    pub momentum: f32,
    /// The trust coefficient, eta in the paper.
    pub trust: f32,
    /// Added to the denominator of r.
    pub eps: f32,
    /// wd.
    pub weight_decay: f32,
    /// A factor on the gradient.
    pub gradient_scale: f32,
    /// Whether there is a trust ratio; biases and norm parameters have none (r = 1).
    pub adapt: bool,
}

/// u = m_hat / (sqrt(v_hat) + eps) + wd w, with [`Adam`]'s moments; w -= lr r u, with r = |w| / |u|.
#[derive(Debug, Clone, Copy)]
pub struct Lamb {
    /// The learning rate.
    pub lr: f32,
    /// b1.
    pub beta1: f32,
    /// b2.
    pub beta2: f32,
    /// Added to the root.
    pub eps: f32,
    /// wd.
    pub weight_decay: f32,
    /// The number of this step; the first is 1.
    pub step: u64,
    /// A factor on the gradient.
    pub gradient_scale: f32,
    /// Whether there is a trust ratio; biases and norm parameters have none (r = 1).
    pub adapt: bool,
}

/// Squared norms of a layer. A layer in shards adds up those of its shards.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SquaredNorms {
    /// |w|^2.
    pub weight: f64,
    /// For LARS |g|^2, without the gradient's scale; for LAMB |u|^2.
    pub direction: f64,
}

/// A step of plain gradient descent.
pub fn sgd(target: Target<'_>, s: Sgd) {
    let decay = s.weight_decay;
    sgd_all(vec![(target, decay)], s);
}

/// A step of [`sgd`] for each target with its weight decay, which stands in for `s.weight_decay`. A card steps
/// them all in one launch, which is why there are such functions beside those for one target.
pub fn sgd_all(targets: Vec<(Target<'_>, f32)>, s: Sgd) {
    match shared_device(targets.iter().map(|(target, _)| target)) {
        None => {}
        Some(Device::Cpu(cpu)) => {
            for (target, weight_decay) in targets {
                let s = Sgd { weight_decay, ..s };
                with_float!(target.gradient.dtype(), G => {
                    step::<G, 0>(&cpu, target, [], |isa, w, [], g| sgd_piece(isa, w, g, s))
                });
            }
        }
        Some(Device::Cuda(cuda)) => {
            let all =
                targets.into_iter().map(|(target, decay)| Described::to_write(target, [], decay, false));
            step_all(&cuda, Rule::Sgd, all, s.settings(), Ratios::Given(&[]));
        }
    }
}

/// A step with momentum.
pub fn momentum(target: Target<'_>, velocity: &mut Tensor, s: Momentum) {
    let decay = s.weight_decay;
    momentum_all(vec![(target, velocity, decay)], s);
}

/// A step of [`momentum`] for each target with its velocity and its weight decay; as [`sgd_all`].
pub fn momentum_all(targets: Vec<(Target<'_>, &mut Tensor, f32)>, s: Momentum) {
    match shared_device(targets.iter().map(|(target, ..)| target)) {
        None => {}
        Some(Device::Cpu(cpu)) => {
            for (target, velocity, weight_decay) in targets {
                let s = Momentum { weight_decay, ..s };
                with_float!(target.gradient.dtype(), G => {
                    step::<G, 1>(&cpu, target, [velocity], |isa, w, [v], g| momentum_piece(isa, w, v, g, s))
                });
            }
        }
        Some(Device::Cuda(cuda)) => {
            let all =
                targets.into_iter().map(|(target, v, decay)| Described::to_write(target, [v], decay, false));
            step_all(&cuda, Rule::Momentum, all, s.settings(), Ratios::Given(&[]));
        }
    }
}

/// A step of Adam or AdamW.
pub fn adam(target: Target<'_>, m: &mut Tensor, v: &mut Tensor, s: Adam) {
    let decay = s.weight_decay;
    adam_all(vec![(target, m, v, decay)], s);
}

/// A step of [`adam`] for each target with its m, its v and its weight decay; as [`sgd_all`].
pub fn adam_all(targets: Vec<(Target<'_>, &mut Tensor, &mut Tensor, f32)>, s: Adam) {
    match shared_device(targets.iter().map(|(target, ..)| target)) {
        None => {}
        Some(Device::Cpu(cpu)) => {
            let moments = s.moments();
            for (target, m, v, weight_decay) in targets {
                let s = Adam { weight_decay, ..s };
                with_float!(target.gradient.dtype(), G => {
                    step::<G, 2>(&cpu, target, [m, v], |isa, w, [m, v], g| {
                        adam_piece(isa, w, m, v, g, moments, s)
                    })
                });
            }
        }
        Some(Device::Cuda(cuda)) => {
            let described = |(target, m, v, decay)| Described::to_write(target, [m, v], decay, false);
            step_all(&cuda, Rule::Adam, targets.into_iter().map(described), s.settings(), Ratios::Given(&[]));
        }
    }
}

/// The norms that [`lars`] takes.
pub fn lars_norms(target: &Target<'_>) -> SquaredNorms {
    match target.weight.device() {
        Device::Cpu(_) => {
            SquaredNorms { weight: squared_norm(target.exact()), direction: squared_norm(target.gradient) }
        }
        Device::Cuda(cuda) => {
            let all = [Described::to_read(target, &[], 0.0)];
            must(cuda::norms(&cuda, Rule::Lars, &all, Settings::default()))[0]
        }
    }
}

/// A step of LARS.
pub fn lars(target: Target<'_>, velocity: &mut Tensor, s: Lars, norms: SquaredNorms) {
    match target.weight.device() {
        Device::Cpu(cpu) => lars_on_host(&cpu, target, velocity, s, norms),
        Device::Cuda(cuda) => {
            let all = [Described::to_write(target, [velocity], s.weight_decay, s.adapt)];
            step_all(&cuda, Rule::Lars, all, s.settings(), Ratios::Given(&[norms]));
        }
    }
}

/// A step of [`lars`] for each target with its velocity, its weight decay and whether its ratio applies, which
/// stand in for those of `s`. Each target is a whole layer: its norms are taken here and, on a card, stay there.
pub fn lars_all(targets: Vec<(Target<'_>, &mut Tensor, f32, bool)>, s: Lars) {
    match shared_device(targets.iter().map(|(target, ..)| target)) {
        None => {}
        Some(Device::Cpu(cpu)) => {
            for (target, velocity, weight_decay, adapt) in targets {
                let norms = if adapt { lars_norms(&target) } else { SquaredNorms::default() };
                lars_on_host(&cpu, target, velocity, Lars { weight_decay, adapt, ..s }, norms);
            }
        }
        Some(Device::Cuda(cuda)) => {
            let described = |(target, v, decay, adapt)| Described::to_write(target, [v], decay, adapt);
            step_all(&cuda, Rule::Lars, targets.into_iter().map(described), s.settings(), Ratios::Measured);
        }
    }
}

fn lars_on_host(cpu: &Cpu, target: Target<'_>, velocity: &mut Tensor, s: Lars, norms: SquaredNorms) {
    let (w, g) = (norms.weight.sqrt(), norms.direction.sqrt() * f64::from(s.gradient_scale).abs());
    let ratio = if s.adapt && w > 0.0 && g > 0.0 {
        f64::from(s.trust) * w / (g + f64::from(s.weight_decay) * w + f64::from(s.eps))
    } else {
        1.0
    };
    let rate = (f64::from(s.lr) * ratio) as f32;
    with_float!(target.gradient.dtype(), G => {
        step::<G, 1>(cpu, target, [velocity], |isa, w, [v], g| lars_piece(isa, w, v, g, rate, s))
    });
}

/// The norms that [`lamb`] takes; m and v as they are before the step. It writes nothing.
pub fn lamb_direction_norms(target: &Target<'_>, m: &Tensor, v: &Tensor, s: Lamb) -> SquaredNorms {
    let cpu = match target.weight.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => {
            let all = [Described::to_read(target, &[m, v], s.weight_decay)];
            return must(cuda::norms(&cuda, Rule::Lamb, &all, s.settings()))[0];
        }
    };
    let moments = s.moments();
    let (weight, gradient) = (target.exact(), target.gradient);
    assert!([m.len(), v.len(), gradient.len()].iter().all(|&n| n == weight.len()), "lamb: lengths differ");
    let (w, m, v) = (weight.slice::<f32>(), m.slice::<f32>(), v.slice::<f32>());
    let direction = with_float!(gradient.dtype(), G => {
        let g = gradient.slice::<G>();
        let pieces = cpu.map_pieces(w.len(), PIECE, |at| {
            lamb_norm(cpu.isa(), &w[at.clone()], &m[at.clone()], &v[at.clone()], &g[at], moments, s)
        });
        pieces.iter().sum()
    });
    SquaredNorms { weight: squared_norm(weight), direction }
}

/// A step of LAMB.
pub fn lamb(target: Target<'_>, m: &mut Tensor, v: &mut Tensor, s: Lamb, norms: SquaredNorms) {
    match target.weight.device() {
        Device::Cpu(cpu) => lamb_on_host(&cpu, target, m, v, s, norms),
        Device::Cuda(cuda) => {
            let all = [Described::to_write(target, [m, v], s.weight_decay, s.adapt)];
            step_all(&cuda, Rule::Lamb, all, s.settings(), Ratios::Given(&[norms]));
        }
    }
}

/// A step of [`lamb`] for each target with its m, its v, its weight decay and whether its ratio applies; as
/// [`lars_all`].
pub fn lamb_all(targets: Vec<(Target<'_>, &mut Tensor, &mut Tensor, f32, bool)>, s: Lamb) {
    match shared_device(targets.iter().map(|(target, ..)| target)) {
        None => {}
        Some(Device::Cpu(cpu)) => {
            for (target, m, v, weight_decay, adapt) in targets {
                let s = Lamb { weight_decay, adapt, ..s };
                let norms =
                    if adapt { lamb_direction_norms(&target, m, v, s) } else { SquaredNorms::default() };
                lamb_on_host(&cpu, target, m, v, s, norms);
            }
        }
        Some(Device::Cuda(cuda)) => {
            let described = |(target, m, v, decay, adapt)| Described::to_write(target, [m, v], decay, adapt);
            step_all(&cuda, Rule::Lamb, targets.into_iter().map(described), s.settings(), Ratios::Measured);
        }
    }
}

fn lamb_on_host(cpu: &Cpu, target: Target<'_>, m: &mut Tensor, v: &mut Tensor, s: Lamb, norms: SquaredNorms) {
    let ratio = if s.adapt && norms.weight > 0.0 && norms.direction > 0.0 {
        (norms.weight / norms.direction).sqrt()
    } else {
        1.0
    };
    let rate = (f64::from(s.lr) * ratio) as f32;
    let moments = s.moments();
    with_float!(target.gradient.dtype(), G => {
        step::<G, 2>(cpu, target, [m, v], |isa, w, [m, v], g| lamb_piece(isa, w, m, v, g, moments, rate, s))
    });
}

/// The device of all targets; none where there is none.
fn shared_device<'a, 't: 'a>(mut targets: impl Iterator<Item = &'a Target<'t>>) -> Option<Device> {
    targets.next().map(|target| target.weight.device())
}

/// A step on a card.
fn step_all<'a>(
    cuda: &Cuda,
    rule: Rule,
    all: impl IntoIterator<Item = Described<'a>>,
    settings: Settings,
    ratios: Ratios<'_>,
) {
    let all: Vec<Described<'a>> = all.into_iter().collect();
    must(cuda::step(cuda, rule, &all, settings, ratios));
}

/// Runs `kernel(isa, w, states, g)` over the pieces of a target, and rounds w while it is in the cache.
fn step<G: Float, const S: usize>(
    cpu: &Cpu,
    target: Target<'_>,
    states: [&mut Tensor; S],
    kernel: impl Fn(Isa, &mut [f32], [&mut [f32]; S], &[G]) + Sync + Send,
) {
    let Target { weight, master, gradient } = target;
    let len = weight.len();
    let others = states.iter().map(|state| state.len()).chain(master.iter().map(|master| master.len()));
    assert!(
        others.chain([gradient.len()]).all(|n| n == len),
        "update: lengths differ from the weight's {len}"
    );
    let (w, mut rounded) = match master {
        Some(master) => (master.slice_mut::<f32>(), Some(weight.slice_mut::<bf16>().chunks_mut(PIECE))),
        None => (weight.slice_mut::<f32>(), None),
    };
    let mut states = states.map(|state| state.slice_mut::<f32>().chunks_mut(PIECE));
    let parts = w.chunks_mut(PIECE).zip(gradient.slice::<G>().chunks(PIECE)).map(|(w, g)| {
        let states = states.each_mut().map(|state| state.next().expect("a state as long as its weight"));
        (w, rounded.as_mut().and_then(|rounded| rounded.next()), states, g)
    });
    pieces::each(cpu, parts, |(w, rounded, states, g)| {
        kernel(cpu.isa(), w, states, g);
        if let Some(rounded) = rounded {
            convert(cpu.isa(), w, rounded);
        }
    });
}

impl Sgd {
    fn settings(&self) -> Settings {
        Settings { lr: self.lr, gradient_scale: self.gradient_scale, ..Settings::default() }
    }
}

impl Momentum {
    fn settings(&self) -> Settings {
        let Momentum { lr, momentum, nesterov, gradient_scale, .. } = *self;
        Settings { lr, gradient_scale, momentum, nesterov, ..Settings::default() }
    }
}

impl Adam {
    fn moments(&self) -> Moments {
        Moments::new(self.beta1, self.beta2, self.eps, self.step, self.gradient_scale)
    }

    fn settings(&self) -> Settings {
        let Adam { lr, eps, decoupled, gradient_scale, .. } = *self;
        Settings { lr, gradient_scale, eps, decoupled, moments: Some(self.moments()), ..Settings::default() }
    }
}

impl Lars {
    fn settings(&self) -> Settings {
        let Lars { lr, momentum, trust, eps, gradient_scale, .. } = *self;
        Settings { lr, gradient_scale, momentum, eps, trust, ..Settings::default() }
    }
}

impl Lamb {
    fn moments(&self) -> Moments {
        Moments::new(self.beta1, self.beta2, self.eps, self.step, self.gradient_scale)
    }

    fn settings(&self) -> Settings {
        let Lamb { lr, eps, gradient_scale, .. } = *self;
        Settings { lr, gradient_scale, eps, moments: Some(self.moments()), ..Settings::default() }
    }
}

/// What Adam and LAMB share: the moments and the direction they give.
#[derive(Debug, Clone, Copy)]
struct Moments {
    beta1: f32,
    beta2: f32,
    eps: f32,
    gradient_scale: f32,
    /// 1 / (1 - b1^step).
    unbias1: f32,
    /// 1 / sqrt(1 - b2^step).
    unbias2: f32,
}

impl Moments {
    fn new(beta1: f32, beta2: f32, eps: f32, step: u64, gradient_scale: f32) -> Moments {
        assert!(step > 0, "update: steps are counted from 1");
        let rest = |beta: f32| 1.0 - f64::from(beta).powf(step as f64);
        let (unbias1, unbias2) = ((1.0 / rest(beta1)) as f32, (1.0 / rest(beta2).sqrt()) as f32);
        Moments { beta1, beta2, eps, gradient_scale, unbias1, unbias2 }
    }

    /// The new moments.
    #[inline(always)]
    fn next(&self, m: f32, v: f32, g: f32) -> (f32, f32) {
        (self.beta1 * m + (1.0 - self.beta1) * g, self.beta2 * v + (1.0 - self.beta2) * g * g)
    }

    /// m_hat / (sqrt(v_hat) + eps).
    #[inline(always)]
    fn direction(&self, m: f32, v: f32) -> f32 {
        m * self.unbias1 / (v.sqrt() * self.unbias2 + self.eps)
    }
}

simd! {
    fn sgd_piece[G: Float](w: &mut [f32], g: &[G], s: Sgd) {
        for (w, g) in w.iter_mut().zip(g) {
            *w -= s.lr * (g.to_f32() * s.gradient_scale + s.weight_decay * *w);
        }
    }

    fn momentum_piece[G: Float](w: &mut [f32], v: &mut [f32], g: &[G], s: Momentum) {
        // Nesterov's step is lr (d + momentum v), the plain one lr (0 d + 1 v).
        let (now, ahead) = if s.nesterov { (1.0, s.momentum) } else { (0.0, 1.0) };
        for ((w, v), g) in w.iter_mut().zip(v).zip(g) {
            let d = g.to_f32() * s.gradient_scale + s.weight_decay * *w;
            *v = s.momentum * *v + d;
            *w -= s.lr * (now * d + ahead * *v);
        }
    }

    fn adam_piece[G: Float](w: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[G], moments: Moments, s: Adam) {
        let (coupled, decay) =
            if s.decoupled { (0.0, 1.0 - s.lr * s.weight_decay) } else { (s.weight_decay, 1.0) };
        for (((w, m), v), g) in w.iter_mut().zip(m).zip(v).zip(g) {
            let g = g.to_f32() * moments.gradient_scale + coupled * *w;
            (*m, *v) = moments.next(*m, *v, g);
            *w = *w * decay - s.lr * moments.direction(*m, *v);
        }
    }

    fn lars_piece[G: Float](w: &mut [f32], v: &mut [f32], g: &[G], rate: f32, s: Lars) {
        for ((w, v), g) in w.iter_mut().zip(v).zip(g) {
            let d = g.to_f32() * s.gradient_scale + s.weight_decay * *w;
            *v = s.momentum * *v + rate * d;
            *w -= *v;
        }
    }

    fn lamb_norm[G: Float](w: &[f32], m: &[f32], v: &[f32], g: &[G], moments: Moments, s: Lamb) -> f64 {
        // Through a short array, so that the sum has its lanes and its order.
        const SHORT: usize = 512;
        let mut u = [0f32; SHORT];
        let mut sum = 0.0;
        let parts = w.chunks(SHORT).zip(m.chunks(SHORT)).zip(v.chunks(SHORT)).zip(g.chunks(SHORT));
        for (((w, m), v), g) in parts {
            for ((((u, w), m), v), g) in u.iter_mut().zip(w).zip(m).zip(v).zip(g) {
                let (m, v) = moments.next(*m, *v, g.to_f32() * moments.gradient_scale);
                *u = moments.direction(m, v) + s.weight_decay * w;
            }
            sum += lanes::sum(&u[..w.len()], |u| f64::from(u) * f64::from(u));
        }
        sum
    }

    fn lamb_piece[G: Float](
        w: &mut [f32],
        m: &mut [f32],
        v: &mut [f32],
        g: &[G],
        moments: Moments,
        rate: f32,
        s: Lamb,
    ) {
        for (((w, m), v), g) in w.iter_mut().zip(m).zip(v).zip(g) {
            (*m, *v) = moments.next(*m, *v, g.to_f32() * moments.gradient_scale);
            *w -= rate * (moments.direction(*m, *v) + s.weight_decay * *w);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, devices, tensor, values, wide};
    use crate::{Category, DType, Device};
    use proptest::prelude::*;

    const STEPS: u64 = 20;

    /// A plain optimizer: `step(number, w, state, g)` in f64, on the whole weight at once.
    type Plain<'a> = &'a dyn Fn(u64, &mut [f64], &mut [Vec<f64>; 2], &[f64]);
    /// The same through this file.
    type Ours<'a> = &'a dyn Fn(u64, Target<'_>, &mut [Tensor; 2]);

    /// Takes both through the same gradients, with and without a master copy, for both types of gradient.
    fn compare(n: usize, seed: u64, plain: Plain<'_>, ours: Ours<'_>) {
        let start = values(seed, n, 0.5);
        let gradients: Vec<Vec<f32>> = (0..STEPS).map(|i| values(seed ^ (i + 1), n, 0.1)).collect();
        let (mut expected, mut state) = (wide(&start), [vec![0.0; n], vec![0.0; n]]);
        for (i, g) in gradients.iter().enumerate() {
            plain(i as u64 + 1, &mut expected, &mut state, &wide(g));
        }
        let run = |device: &Device, dtype: DType, mixed: bool| {
            let zeros = || Tensor::zeros(device, &[n], DType::F32, Category::Optimizer).unwrap();
            let mut states = [zeros(), zeros()];
            let mut exact = tensor(device, DType::F32, &[n], &start);
            let mut rounded = tensor(device, DType::Bf16, &[n], &start);
            for (i, g) in gradients.iter().enumerate() {
                let gradient = &tensor(device, dtype, &[n], g);
                let target = if mixed {
                    Target { weight: &mut rounded, master: Some(&mut exact), gradient }
                } else {
                    Target { weight: &mut exact, master: None, gradient }
                };
                ours(i as u64 + 1, target, &mut states);
            }
            if mixed {
                let nearest: Vec<f32> =
                    exact.to_f32().iter().map(|&w| half::bf16::from_f32(w).to_f32()).collect();
                assert_eq!(rounded.to_f32(), nearest);
            }
            exact.to_f32()
        };
        for threads in devices() {
            for (dtype, mixed) in [(DType::F32, false), (DType::Bf16, true), (DType::Bf16, false)] {
                let [one, two, three] = threads.each_ref().map(|device| run(device, dtype, mixed));
                assert!(one == two && one == three);
                assert_close(&one, &expected, 2e-5);
            }
        }
    }

    /// Adam's direction in f64, moments updated.
    fn adam_direction(b1: f64, b2: f64, eps: f64, t: u64, state: &mut [Vec<f64>; 2], g: &[f64]) -> Vec<f64> {
        let [m, v] = state;
        (0..g.len())
            .map(|i| {
                m[i] = b1 * m[i] + (1.0 - b1) * g[i];
                v[i] = b2 * v[i] + (1.0 - b2) * g[i] * g[i];
                let (b1, b2) = (1.0 - b1.powf(t as f64), 1.0 - b2.powf(t as f64));
                (m[i] / b1) / ((v[i] / b2).sqrt() + eps)
            })
            .collect()
    }

    fn norm(x: &[f64]) -> f64 {
        x.iter().map(|x| x * x).sum::<f64>().sqrt()
    }

    // Settings that f32 holds exactly, so that both sides mean the same.
    const LR: f32 = 0.03125;
    const DECAY: f32 = 0.125;
    const CLIP: f32 = 0.5;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4))]

        #[test]
        fn sgd_and_momentum_follow_the_formula(n in 1usize..40_000, seed: u64, nesterov: bool) {
            let (lr, wd, clip) = (f64::from(LR), f64::from(DECAY), f64::from(CLIP));
            compare(
                n,
                seed,
                &|_, w, _, g| (0..n).for_each(|i| w[i] -= lr * (clip * g[i] + wd * w[i])),
                &|_, target, _| sgd(target, Sgd { lr: LR, weight_decay: DECAY, gradient_scale: CLIP }),
            );
            compare(
                n,
                seed,
                &|_, w, [v, _], g| {
                    for i in 0..n {
                        let d = clip * g[i] + wd * w[i];
                        v[i] = 0.875 * v[i] + d;
                        w[i] -= lr * if nesterov { d + 0.875 * v[i] } else { v[i] };
                    }
                },
                &|_, target, [v, _]| {
                    let rest = Momentum { lr: LR, momentum: 0.875, nesterov, weight_decay: DECAY, gradient_scale: CLIP };
                    momentum(target, v, rest)
                },
            );
        }

        #[test]
        fn adam_and_adamw_follow_the_formula(n in 1usize..40_000, seed: u64, decoupled: bool) {
            let (lr, wd, clip) = (f64::from(LR), f64::from(DECAY), f64::from(CLIP));
            let (beta1, beta2, eps) = (0.875f32, 0.96875f32, 1e-3f32);
            compare(
                n,
                seed,
                &|t, w, state, g| {
                    let l2 = if decoupled { 0.0 } else { wd };
                    let g: Vec<f64> = (0..n).map(|i| clip * g[i] + l2 * w[i]).collect();
                    let u = adam_direction(beta1.into(), beta2.into(), eps.into(), t, state, &g);
                    let decay = if decoupled { 1.0 - lr * wd } else { 1.0 };
                    (0..n).for_each(|i| w[i] = decay * w[i] - lr * u[i]);
                },
                &|step, target, [m, v]| {
                    let weight_decay = DECAY;
                    adam(target, m, v, Adam {
                        lr: LR, beta1, beta2, eps, weight_decay, decoupled, step, gradient_scale: CLIP,
                    })
                },
            );
        }

        #[test]
        fn lars_and_lamb_follow_the_formula(n in 1usize..40_000, seed: u64, adapt: bool) {
            let (lr, wd, clip) = (f64::from(LR), f64::from(DECAY), f64::from(CLIP));
            let (beta1, beta2, eps, trust) = (0.875f32, 0.96875f32, 1e-3f32, 0.0625f32);
            compare(
                n,
                seed,
                &|_, w, [v, _], g| {
                    let g: Vec<f64> = g.iter().map(|g| clip * g).collect();
                    let (wn, gn) = (norm(w), norm(&g));
                    let r = f64::from(trust) * wn / (gn + wd * wn + f64::from(eps));
                    let r = if adapt && wn > 0.0 && gn > 0.0 { r } else { 1.0 };
                    for i in 0..n {
                        v[i] = 0.875 * v[i] + lr * r * (g[i] + wd * w[i]);
                        w[i] -= v[i];
                    }
                },
                &|_, target, [v, _]| {
                    let norms = lars_norms(&target);
                    let (lr, weight_decay, gradient_scale) = (LR, DECAY, CLIP);
                    lars(target, v, Lars {
                        lr, momentum: 0.875, trust, eps, weight_decay, gradient_scale, adapt,
                    }, norms)
                },
            );
            compare(
                n,
                seed,
                &|t, w, state, g| {
                    let g: Vec<f64> = g.iter().map(|g| clip * g).collect();
                    let mut u = adam_direction(beta1.into(), beta2.into(), eps.into(), t, state, &g);
                    (0..n).for_each(|i| u[i] += wd * w[i]);
                    let (wn, un) = (norm(w), norm(&u));
                    let r = if adapt && wn > 0.0 && un > 0.0 { wn / un } else { 1.0 };
                    (0..n).for_each(|i| w[i] -= lr * r * u[i]);
                },
                &|step, target, [m, v]| {
                    let (lr, weight_decay, gradient_scale) = (LR, DECAY, CLIP);
                    let s = Lamb { lr, beta1, beta2, eps, weight_decay, step, gradient_scale, adapt };
                    let norms = lamb_direction_norms(&target, m, v, s);
                    lamb(target, m, v, s, norms)
                },
            );
        }
    }

    fn number(device: &Device, x: f32) -> Tensor {
        tensor(device, DType::F32, &[1], &[x])
    }

    /// A tensor of each kind in one list: odd lengths, an empty one, master copies, both types of gradient.
    #[test]
    fn a_list_of_targets_steps_as_each_of_them_alone() {
        struct Layer {
            weight: Tensor,
            master: Option<Tensor>,
            gradient: Tensor,
            states: [Tensor; 2],
        }
        fn target(layer: &mut Layer) -> (Target<'_>, &mut Tensor, &mut Tensor) {
            let Layer { weight, master, gradient, states: [m, v] } = layer;
            (Target { weight, master: master.as_mut(), gradient }, m, v)
        }
        const DECAYS: [f32; 4] = [0.0, 0.125, 0.25, 0.5];
        const ADAPT: [bool; 4] = [true, false, true, true];
        let fresh = |device: &Device| -> Vec<Layer> {
            let kinds = [
                (70_001, false, DType::F32),
                (3, true, DType::Bf16),
                (0, false, DType::F32),
                (4096, true, DType::F32),
            ];
            let layer = |(i, &(n, mixed, dtype)): (usize, &(usize, bool, DType))| {
                let seed = i as u64;
                let make = |dtype, seed, spread| tensor(device, dtype, &[n], &values(seed, n, spread));
                let squares: Vec<f32> = values(seed + 30, n, 0.1).iter().map(|x| x * x).collect();
                Layer {
                    weight: make(if mixed { DType::Bf16 } else { DType::F32 }, seed, 0.5),
                    master: mixed.then(|| make(DType::F32, seed, 0.5)),
                    gradient: make(dtype, seed + 10, 0.1),
                    states: [make(DType::F32, seed + 20, 0.1), tensor(device, DType::F32, &[n], &squares)],
                }
            };
            kinds.iter().enumerate().map(layer).collect()
        };
        let (lr, gradient_scale, weight_decay) = (LR, CLIP, 9.0);
        let (beta1, beta2, eps, step, adapt) = (0.875, 0.96875, 1e-3, 3, false);
        let sgd_rule = Sgd { lr, weight_decay, gradient_scale };
        let momentum_rule = Momentum { lr, momentum: 0.875, nesterov: true, weight_decay, gradient_scale };
        let adam_rule = Adam { lr, beta1, beta2, eps, weight_decay, decoupled: true, step, gradient_scale };
        let lars_rule = Lars { lr, momentum: 0.875, trust: 0.0625, eps, weight_decay, gradient_scale, adapt };
        let lamb_rule = Lamb { lr, beta1, beta2, eps, weight_decay, step, gradient_scale, adapt };
        type One<'a> = &'a dyn Fn(Target<'_>, &mut Tensor, &mut Tensor, f32, bool);
        type All<'a> = &'a dyn Fn(Vec<(Target<'_>, &mut Tensor, &mut Tensor, f32, bool)>);
        let rules: [(One<'_>, All<'_>); 5] = [
            (&|t, _, _, weight_decay, _| sgd(t, Sgd { weight_decay, ..sgd_rule }), &|all| {
                sgd_all(all.into_iter().map(|(t, _, _, wd, _)| (t, wd)).collect(), sgd_rule)
            }),
            (
                &|t, m, _, weight_decay, _| momentum(t, m, Momentum { weight_decay, ..momentum_rule }),
                &|all| {
                    momentum_all(all.into_iter().map(|(t, m, _, wd, _)| (t, m, wd)).collect(), momentum_rule)
                },
            ),
            (&|t, m, v, weight_decay, _| adam(t, m, v, Adam { weight_decay, ..adam_rule }), &|all| {
                adam_all(all.into_iter().map(|(t, m, v, wd, _)| (t, m, v, wd)).collect(), adam_rule)
            }),
            (
                &|t, m, _, weight_decay, adapt| {
                    let norms = lars_norms(&t);
                    lars(t, m, Lars { weight_decay, adapt, ..lars_rule }, norms)
                },
                &|all| {
                    lars_all(
                        all.into_iter().map(|(t, m, _, wd, adapt)| (t, m, wd, adapt)).collect(),
                        lars_rule,
                    )
                },
            ),
            (
                &|t, m, v, weight_decay, adapt| {
                    let s = Lamb { weight_decay, adapt, ..lamb_rule };
                    let norms = lamb_direction_norms(&t, m, v, s);
                    lamb(t, m, v, s, norms)
                },
                &|all| lamb_all(all, lamb_rule),
            ),
        ];
        for [device, ..] in devices() {
            for (one, all) in rules {
                let (mut alone, mut together) = (fresh(device), fresh(device));
                for (i, layer) in alone.iter_mut().enumerate() {
                    let (target, m, v) = target(layer);
                    one(target, m, v, DECAYS[i], ADAPT[i]);
                }
                let list = together.iter_mut().enumerate().map(|(i, layer)| {
                    let (target, m, v) = target(layer);
                    (target, m, v, DECAYS[i], ADAPT[i])
                });
                all(list.collect());
                let bytes = |layers: &[Layer]| -> Vec<Vec<u8>> {
                    let tensors = layers.iter().flat_map(|layer| {
                        [
                            Some(&layer.weight),
                            layer.master.as_ref(),
                            Some(&layer.states[0]),
                            Some(&layer.states[1]),
                        ]
                    });
                    tensors.flatten().map(|tensor| tensor.host_bytes().into_owned()).collect()
                };
                let stepped = bytes(&alone);
                assert_ne!(stepped, bytes(&fresh(device)));
                assert_eq!(stepped, bytes(&together));
            }
        }
        sgd_all(vec![], sgd_rule);
    }

    /// w = 1, g = 0.5, then 0.25: momentum 0.9, lr 0.1, wd 0.1. By hand:
    /// d = 0.6, v = 0.6, w = 0.94; then d = 0.344, v = 0.884, w = 0.8516.
    #[test]
    fn momentum_by_hand() {
        for [device, ..] in devices() {
            momentum_by_hand_on(|x| number(device, x));
        }
    }

    fn momentum_by_hand_on(one: impl Fn(f32) -> Tensor) {
        let (mut w, mut v) = (one(1.0), one(0.0));
        let s = Momentum { lr: 0.1, momentum: 0.9, nesterov: false, weight_decay: 0.1, gradient_scale: 1.0 };
        for (g, expected) in [(0.5, 0.94), (0.25, 0.8516)] {
            momentum(Target { weight: &mut w, master: None, gradient: &one(g) }, &mut v, s);
            assert_close(&w.to_f32(), &[expected], 1e-6);
        }
        // Nesterov's first step: d + m v = 0.6 + 0.54, w = 1 - 0.114.
        let (mut w, mut v) = (one(1.0), one(0.0));
        let ahead = Momentum { nesterov: true, ..s };
        momentum(Target { weight: &mut w, master: None, gradient: &one(0.5) }, &mut v, ahead);
        assert_close(&w.to_f32(), &[0.886], 1e-6);
    }

    /// AdamW, w = 1, g = 0.5 then -0.25, lr 0.1, wd 0.1, eps 0. The first direction is g/|g| = 1:
    /// w = 0.99 - 0.1 = 0.89. Then m = 0.9 0.05 - 0.1 0.25 = 0.02, m_hat = 0.02/0.19;
    /// v = 0.999 0.00025 + 0.001 0.0625 = 0.00031225, v_hat = v/0.001999;
    /// w = 0.99 0.89 - 0.1 (0.10526316/0.39522387) = 0.8811 - 0.02663381.
    #[test]
    fn adamw_by_hand() {
        for [device, ..] in devices() {
            adamw_by_hand_on(|x| number(device, x));
        }
    }

    fn adamw_by_hand_on(one: impl Fn(f32) -> Tensor) {
        let (mut w, mut m, mut v) = (one(1.0), one(0.0), one(0.0));
        for (step, g, expected) in [(1, 0.5, 0.89), (2, -0.25, 0.854_466_19)] {
            let s = Adam {
                lr: 0.1,
                beta1: 0.9,
                beta2: 0.999,
                eps: 0.0,
                weight_decay: 0.1,
                decoupled: true,
                step,
                gradient_scale: 1.0,
            };
            adam(Target { weight: &mut w, master: None, gradient: &one(g) }, &mut m, &mut v, s);
            assert_close(&w.to_f32(), &[expected], 1e-5);
        }
    }

    /// A layer that is still zero, or has no gradient, moves as without a ratio instead of not at all.
    #[test]
    fn the_ratio_is_one_where_a_norm_is_zero() {
        for [device, ..] in devices() {
            the_ratio_is_one_on(|x| number(device, x));
        }
    }

    fn the_ratio_is_one_on(one: impl Fn(f32) -> Tensor) {
        let s = Lars {
            lr: 0.5,
            momentum: 0.0,
            trust: 0.001,
            eps: 0.0,
            weight_decay: 0.0,
            gradient_scale: 1.0,
            adapt: true,
        };
        let (mut w, mut v, g) = (one(0.0), one(0.0), one(1.0));
        let target = Target { weight: &mut w, master: None, gradient: &g };
        let norms = lars_norms(&target);
        assert_eq!(norms, SquaredNorms { weight: 0.0, direction: 1.0 });
        lars(target, &mut v, s, norms);
        assert_eq!(w.to_f32(), [-0.5]);
        let s = Lamb {
            lr: 0.5,
            beta1: 0.5,
            beta2: 0.5,
            eps: 0.0,
            weight_decay: 0.0,
            step: 1,
            gradient_scale: 1.0,
            adapt: true,
        };
        let (mut w, mut m, mut v) = (one(0.0), one(0.0), one(0.0));
        let target = Target { weight: &mut w, master: None, gradient: &g };
        let norms = lamb_direction_norms(&target, &m, &v, s);
        lamb(target, &mut m, &mut v, s, norms);
        assert_close(&w.to_f32(), &[-0.5], 1e-6);
    }
}
