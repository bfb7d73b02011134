//! The arithmetic of the rules on the host: plain loops over kept weights that lie side by side.

use super::{SquaredNorms, StepParams, UpdateRule};
use crate::cpu::math::power;
use crate::cpu::{Isa, lanes};
use crate::dtype::Float;
use crate::simd;

/// A rule with the numbers of a step and of a target filled in.
#[derive(Debug, Clone, Copy)]
pub(super) struct PreparedRule {
    rule: UpdateRule,
    /// The learning rate, times the trust ratio where there is one,
    rate: f32,
    /// but for this factor of it, which is applied to a velocity: 1, unless LARS keeps its rate outside.
    outer: f32,
    decay: f32,
    scale: f32,
    moments: AdamMoments,
}

impl PreparedRule {
    pub(super) fn new(
        rule: UpdateRule,
        step: StepParams,
        decay: f32,
        norms: Option<SquaredNorms>,
    ) -> PreparedRule {
        let ratio = norms.map_or(1.0, |norms| trust_ratio(rule, step, decay, norms));
        let (inner, outer) = match rule {
            UpdateRule::Lars { rate_in_velocity: false, .. } => (1.0, step.lr),
            _ => (step.lr, 1.0),
        };
        PreparedRule {
            rule,
            rate: (f64::from(inner) * ratio) as f32,
            outer,
            decay,
            scale: step.gradient_scale,
            moments: AdamMoments::new(rule, step),
        }
    }

    /// Steps weights, whose states and gradients have the same indices.
    pub(super) fn advance<G: Float>(&self, isa: Isa, w: &mut [f32], states: &mut [&mut [f32]], g: &[G]) {
        let s = *self;
        match (self.rule, states) {
            (UpdateRule::Sgd, _) => sgd(isa, w, g, s),
            (UpdateRule::Momentum { momentum, nesterov }, [v]) => {
                velocity(isa, w, v, g, momentum, nesterov, s)
            }
            (UpdateRule::Adam { decoupled, .. }, [m, v]) => adam(isa, w, m, v, g, decoupled, s),
            (UpdateRule::Lars { momentum, .. }, [v]) => lars(isa, w, v, g, momentum, s),
            (UpdateRule::Lamb { .. }, [m, v]) => lamb(isa, w, m, v, g, s),
            (rule, states) => panic!("{rule:?} with {} states", states.len()),
        }
    }

    /// The squared norms of a shard of a layer.
    pub(super) fn norms<G: Float>(&self, isa: Isa, w: &[f32], states: &[&[f32]], g: &[G]) -> SquaredNorms {
        let direction = match (self.rule, states) {
            (UpdateRule::Lamb { .. }, [m, v]) => direction_norm(isa, w, m, v, g, *self),
            _ => square(isa, g),
        };
        SquaredNorms { weight: square(isa, w), direction }
    }
}

/// r in the formulas: 1 where a norm is zero, so that a layer that is still zero moves at all.
fn trust_ratio(rule: UpdateRule, step: StepParams, decay: f32, norms: SquaredNorms) -> f64 {
    let (w, d) = (norms.weight.sqrt(), norms.direction.sqrt());
    match rule {
        _ if w == 0.0 || d == 0.0 => 1.0,
        UpdateRule::Lars { trust, eps, .. } => {
            let g = d * f64::from(step.gradient_scale).abs();
            if g > 0.0 { f64::from(trust) * w / (g + f64::from(decay) * w + f64::from(eps)) } else { 1.0 }
        }
        UpdateRule::Lamb { max_norm, .. } if w > f64::from(max_norm) => f64::from(max_norm) / d,
        UpdateRule::Lamb { .. } => (norms.weight / norms.direction).sqrt(),
        _ => 1.0,
    }
}

/// What Adam and LAMB share: the moments and the direction they give.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct AdamMoments {
    pub(super) beta1: f32,
    pub(super) beta2: f32,
    pub(super) eps: f32,
    /// 1 / (1 - b1^step).
    pub(super) unbias1: f32,
    /// 1 / sqrt(1 - b2^step).
    pub(super) unbias2: f32,
}

impl AdamMoments {
    /// Those of a rule at a step; zeros for a rule that has none.
    pub(super) fn new(rule: UpdateRule, step: StepParams) -> AdamMoments {
        let (UpdateRule::Adam { beta1, beta2, eps, .. } | UpdateRule::Lamb { beta1, beta2, eps, .. }) = rule
        else {
            return AdamMoments::default();
        };
        assert!(step.number > 0, "update: steps are counted from 1");
        let rest = |beta: f32| 1.0 - power(f64::from(beta), step.number);
        let (unbias1, unbias2) = ((1.0 / rest(beta1)) as f32, (1.0 / rest(beta2).sqrt()) as f32);
        AdamMoments { beta1, beta2, eps, unbias1, unbias2 }
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
    fn sgd[G: Float](w: &mut [f32], g: &[G], s: PreparedRule) {
        for (w, g) in w.iter_mut().zip(g) {
            *w -= s.rate * (g.to_f32() * s.scale + s.decay * *w);
        }
    }

    fn velocity[G: Float](w: &mut [f32], v: &mut [f32], g: &[G], momentum: f32, nesterov: bool, s: PreparedRule) {
        // Nesterov's step is lr (d + momentum v), the plain one lr (0 d + 1 v).
        let (now, ahead) = if nesterov { (1.0, momentum) } else { (0.0, 1.0) };
        for ((w, v), g) in w.iter_mut().zip(v).zip(g) {
            let d = g.to_f32() * s.scale + s.decay * *w;
            *v = momentum * *v + d;
            *w -= s.rate * (now * d + ahead * *v);
        }
    }

    fn adam[G: Float](w: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[G], decoupled: bool, s: PreparedRule) {
        let (coupled, keep) = if decoupled { (0.0, 1.0 - s.rate * s.decay) } else { (s.decay, 1.0) };
        for (((w, m), v), g) in w.iter_mut().zip(m).zip(v).zip(g) {
            let g = g.to_f32() * s.scale + coupled * *w;
            (*m, *v) = s.moments.next(*m, *v, g);
            *w = *w * keep - s.rate * s.moments.direction(*m, *v);
        }
    }

    fn lars[G: Float](w: &mut [f32], v: &mut [f32], g: &[G], momentum: f32, s: PreparedRule) {
        for ((w, v), g) in w.iter_mut().zip(v).zip(g) {
            let d = g.to_f32() * s.scale + s.decay * *w;
            *v = momentum * *v + s.rate * d;
            *w -= s.outer * *v;
        }
    }

    fn lamb[G: Float](w: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[G], s: PreparedRule) {
        for (((w, m), v), g) in w.iter_mut().zip(m).zip(v).zip(g) {
            (*m, *v) = s.moments.next(*m, *v, g.to_f32() * s.scale);
            *w -= s.rate * (s.moments.direction(*m, *v) + s.decay * *w);
        }
    }

    fn direction_norm[G: Float](w: &[f32], m: &[f32], v: &[f32], g: &[G], s: PreparedRule) -> f64 {
        // Through a short array, so that the sum has its lanes and its order.
        const SHORT: usize = 512;
        let mut u = [0f32; SHORT];
        let mut sum = 0.0;
        let slices = w.chunks(SHORT).zip(m.chunks(SHORT)).zip(v.chunks(SHORT)).zip(g.chunks(SHORT));
        for (((w, m), v), g) in slices {
            for ((((u, w), m), v), g) in u.iter_mut().zip(w).zip(m).zip(v).zip(g) {
                let (m, v) = s.moments.next(*m, *v, g.to_f32() * s.scale);
                *u = s.moments.direction(m, v) + s.decay * w;
            }
            sum += lanes::sum(&u[..w.len()], |u| f64::from(u) * f64::from(u));
        }
        sum
    }

    fn square[T: Float](x: &[T]) -> f64 {
        lanes::sum(x, |x| f64::from(x) * f64::from(x))
    }
}
