//! Causal attention proper; the projections around it are linear layers.
//!
//! Queries, keys and values come side by side, `[heads d | kv_heads d | kv_heads d]`, from one linear layer,
//! or from several in a [`Branches`](super::Branches) that puts them side by side. With fewer heads of keys
//! and values than of queries each serves a group of neighbouring queries' heads (grouped-query attention,
//! Ainslie et al. 2023; with one, Shazeer 2019). Queries and keys may go through a norm of each head, as in
//! Qwen 3, and be turned by their positions ([`Rotary`]).

use std::ops::Range;

use serde::Serialize;

use super::super::Init;
use super::super::parameter::{Parameter, weight_and_bias};
use super::super::shape::Shape;
use super::kind::{Downstream, LayerKind};
use super::rotary::Rotary;
use super::{
    AttentionRole, HeadShard, LayerDescription, LayerKernel, LayerSpec, NORM_EPS, Properties,
    SavedForBackward, TensorRole, sequence,
};
use crate::field::{LARGEST, POSITIVE, flag, integer, optional_integer, optional_number};
use crate::split::split;

/// `[seq, width + 2 kv_heads d]` becomes `[seq, width]`, d = width / heads.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Attention {
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and of values; divides `heads`.
    pub kv_heads: usize,
    /// Columns of the result: those of all heads of queries.
    pub width: usize,
    /// How queries and keys are turned by their positions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rotary: Option<Rotary>,
    /// What queries and keys go through before they are turned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qk_norm: Option<QkNorm>,
}

/// RMS norms over the columns of each head, one scale for all heads of queries and one for all of keys.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct QkNorm {
    /// Prefix of `.q_norm.weight` and `.k_norm.weight`.
    pub name: String,
    /// Added to the mean square.
    pub eps: f32,
}

/// As a run file writes it.
pub(super) const ATTENTION: LayerKind = LayerKind {
    word: "attention",
    fields: &[
        integer("heads", 1, 1, LARGEST),
        optional_integer("kv_heads", 1, LARGEST),
        optional_number("rotary", POSITIVE),
        flag("qk_norm", false),
    ],
    opens: false,
    then: Downstream::Linear,
    complete: |written, at| {
        let heads: usize = written.values.get("heads");
        let kv_heads = written.values.find("kv_heads").unwrap_or(heads);
        let last = at.shape.last();
        let width = match kv_heads == heads {
            true => last / 3,
            false => (last / heads.saturating_add(kv_heads.saturating_mul(2))).saturating_mul(heads),
        };
        let norm = QkNorm { name: at.name.clone(), eps: NORM_EPS };
        Ok(LayerSpec::Attention(Attention {
            rotary: written.values.find("rotary").map(Rotary::new),
            qk_norm: written.values.get::<bool>("qk_norm").then_some(norm),
            ..Attention::new(heads, kv_heads, width)
        }))
    },
};

impl LayerDescription for Attention {
    fn name(&self) -> Option<&str> {
        self.qk_norm.as_ref().map(|norm| norm.name.as_str())
    }

    fn parameters(&self) -> Vec<Parameter> {
        let scale = |norm: &QkNorm, which: &str| {
            let width = self.width / self.heads.max(1);
            weight_and_bias(&format!("{}.{which}", norm.name), vec![width], Init::Constant(1.0), None)
        };
        let both =
            |norm| ["q_norm", "k_norm"].map(|which| scale(norm, which)).into_iter().flatten().collect();
        self.qk_norm.as_ref().map_or_else(Vec::new, both)
    }

    fn output(&self, input: Shape) -> Result<Shape, String> {
        let Attention { heads, kv_heads, width, .. } = *self;
        sequence(input)?;
        if heads == 0 || !width.is_multiple_of(heads) {
            return Err(format!("{heads} heads do not divide the width {width}"));
        }
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(format!("{kv_heads} key/value heads do not divide the {heads} query heads"));
        }
        if (self.rotary.is_some() || self.qk_norm.is_some()) && !(width / heads).is_multiple_of(2) {
            return Err(format!("heads of {} columns have no pairs that could be turned", width / heads));
        }
        let all = width.saturating_add((width / heads).saturating_mul(kv_heads).saturating_mul(2));
        if input.last() != all {
            let problem = "takes queries, keys and values side by side";
            return Err(match kv_heads == heads {
                true => format!("{problem}, three times its width {width}, got {input}"),
                false => format!("{problem}, {heads} + 2 x {kv_heads} heads of one size, got {input}"),
            });
        }
        Ok(input.with_last(width))
    }

    /// Scores, then the weighted sum of values: seq x seq x width multiply-adds each.
    fn flops(&self, input: Shape, _: Shape) -> f64 {
        2.0 * 2.0 * (input.rows() as f64).powi(2) * self.width as f64
    }

    /// One logsumexp for each head and position.
    fn saves(&self, input: Shape, samples: u64) -> SavedForBackward {
        let bytes = (4 * self.heads as u64).saturating_mul(input.rows()).saturating_mul(samples);
        SavedForBackward { input: true, output: true, bytes }
    }

    /// By whole heads of keys and values, with the queries that read them; where ranks are more than these,
    /// by heads of queries, and each reads one head of keys and values that others read too.
    fn split_heads(&self, ranks: usize, rank: usize) -> Option<Result<HeadShard, String>> {
        Some(self.heads_of(ranks, rank))
    }

    fn properties(&self) -> Properties {
        let kv_width = self.kv_heads * (self.width / self.heads.max(1));
        let turned = if self.rotary.is_some() || self.qk_norm.is_some() { self.width + kv_width } else { 0 };
        Properties {
            kernel: LayerKernel::Attention { heads: self.heads, width: self.width, turned },
            attention_role: AttentionRole::Core,
            // Keys and values.
            cached: 2 * kv_width,
            tensor_role: TensorRole::Between,
            channel_groups: self.kv_heads,
            mixes_positions: true,
            ..Properties::PLAIN
        }
    }
}

impl Attention {
    /// Of so many heads of queries, and of keys and values, with so many channels of queries.
    pub fn new(heads: usize, kv_heads: usize, width: usize) -> Attention {
        Attention { heads, kv_heads, width, rotary: None, qk_norm: None }
    }

    fn heads_of(&self, ranks: usize, rank: usize) -> Result<HeadShard, String> {
        let Attention { heads, kv_heads, width, .. } = *self;
        let (each, group) = (width / heads, heads / kv_heads);
        let (kv, queries) = if heads < ranks {
            return Err(format!("but an attention has {heads} heads"));
        } else if kv_heads >= ranks {
            let kv = split(kv_heads, ranks, rank);
            (kv.clone(), kv.start * group..kv.end * group)
        } else if !ranks.is_multiple_of(kv_heads) {
            return Err(format!(
                "but the {kv_heads} key/value heads of an attention cannot be replicated evenly over them"
            ));
        } else {
            let sharers = ranks / kv_heads;
            if group < sharers {
                return Err(format!("but an attention has {heads} heads"));
            }
            let kv = rank / sharers;
            let queries = split(group, sharers, rank % sharers);
            (kv..kv + 1, kv * group + queries.start..kv * group + queries.end)
        };
        let scaled =
            |range: &Range<usize>, first: usize| first + range.start * each..first + range.end * each;
        let gives = scaled(&queries, 0);
        let mut local = self.clone();
        (local.heads, local.kv_heads, local.width) = (queries.len(), kv.len(), gives.len());
        Ok(HeadShard {
            layer: LayerSpec::Attention(local),
            reads: [gives.clone(), scaled(&kv, width), scaled(&kv, width + kv_heads * each)],
            gives,
            of: [width, kv_heads * each],
            repeated: kv_heads < ranks,
        })
    }
}
