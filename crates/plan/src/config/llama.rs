//! `[model]` of the Llama family: its fields as they are read, and as sizes and choices.

use serde::{Deserialize, Serialize};

use super::Error;
use super::reader::{FieldValues, Section};
use crate::spec::presets::Llama;
use crate::spec::{Llama3Scaling, Rotary};

/// The fields of `llama`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LlamaConfig {
    /// Transformer layers.
    pub layers: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values; they divide those of queries.
    pub kv_heads: usize,
    /// Columns of a head.
    pub head_dim: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Columns inside the gated perceptron.
    pub inner: usize,
    /// Tokens in a sample.
    pub context: usize,
    /// Tokens there are; left out: as many as the data has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocab: Option<usize>,
    /// Whether the head uses the token embedding's weight.
    pub tied: bool,
    /// Added to mean squares in norms.
    pub eps: f64,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether queries and keys go through a norm.
    pub qk_norm: bool,
    /// Positions that a token sees at most; contexts are not longer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window: Option<usize>,
    /// What rotary frequencies are powers of.
    pub rotary_base: f64,
    /// How they are scaled.
    pub rotary_scaling: ScalingKind,
    #[serde(flatten)]
    scaling: ScalingConfig,
}

/// How rotary frequencies are scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScalingKind {
    /// Not at all.
    #[default]
    None,
    /// As in Llama 3.1.
    Llama3,
}

/// What a scaling of rotary frequencies has beside its kind.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct ScalingConfig {
    #[serde(skip_serializing_if = "Option::is_none")]
    rotary_factor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rotary_low: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rotary_high: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rotary_original: Option<usize>,
}

impl ScalingConfig {
    fn of(scaling: Option<Llama3Scaling>) -> ScalingConfig {
        ScalingConfig {
            rotary_factor: scaling.map(|one| one.factor),
            rotary_low: scaling.map(|one| one.low),
            rotary_high: scaling.map(|one| one.high),
            rotary_original: scaling.map(|one| one.original),
        }
    }

    fn scaling(&self) -> Option<Llama3Scaling> {
        let &ScalingConfig { rotary_factor, rotary_low, rotary_high, rotary_original } = self;
        Some(Llama3Scaling {
            factor: rotary_factor?,
            low: rotary_low?,
            high: rotary_high?,
            original: rotary_original?,
        })
    }
}

impl LlamaConfig {
    /// As sizes and choices, of a model that knows so many tokens.
    pub(super) fn shape(&self, vocab: usize) -> Llama {
        let &LlamaConfig { layers, heads, kv_heads, head_dim, width, inner, context, tied, .. } = self;
        Llama {
            layers,
            width,
            heads,
            kv_heads,
            head_dim,
            inner,
            context,
            vocab,
            tied,
            eps: self.eps,
            qkv_bias: self.qkv_bias,
            qk_norm: self.qk_norm,
            window: self.window,
            rotary: Rotary { base: self.rotary_base, scaling: self.scaling.scaling() },
        }
    }

    /// The fields of such sizes and choices.
    pub(super) fn of(shape: &Llama) -> LlamaConfig {
        let &Llama { layers, width, heads, kv_heads, head_dim, inner, context, vocab, tied, .. } = shape;
        LlamaConfig {
            layers,
            heads,
            kv_heads,
            head_dim,
            width,
            inner,
            context,
            vocab: Some(vocab),
            tied,
            eps: shape.eps,
            qkv_bias: shape.qkv_bias,
            qk_norm: shape.qk_norm,
            window: shape.window,
            rotary_base: shape.rotary.base,
            rotary_scaling: shape.rotary.scaling.map_or(ScalingKind::None, |_| ScalingKind::Llama3),
            scaling: ScalingConfig::of(shape.rotary.scaling),
        }
    }

    pub(super) fn read(section: &Section, mut values: FieldValues) -> Result<LlamaConfig, Error> {
        let (heads, width): (usize, usize) = (values.get("heads"), values.get("width"));
        let head_dim: usize = match values.find("head_dim") {
            Some(columns) => columns,
            None if width.is_multiple_of(heads) => width / heads,
            None => {
                let problem = format!(
                    "is {heads}, which does not divide `model.width` = {width}: set `model.head_dim`"
                );
                return Err(section.conflict("heads", problem));
            }
        };
        if !head_dim.is_multiple_of(2) {
            let problem =
                format!("is {head_dim}, and rotary positions turn pairs of columns: an even number");
            return Err(section.conflict("head_dim", problem));
        }
        let kv_heads: usize = values.find("kv_heads").unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            let problem = format!("is {kv_heads}, which does not divide `model.heads` = {heads}");
            return Err(section.conflict("kv_heads", problem));
        }
        let (context, window): (usize, Option<usize>) = (values.get("context"), values.find("window"));
        if let Some(window) = window.filter(|window| *window < context) {
            let problem = format!(
                "is {context}, and the model sees {window} positions at most (`model.window`, a sliding window, which \
                 attention here lacks): set it to {window} or less"
            );
            return Err(section.conflict("context", problem));
        }
        values.set_left_out("head_dim", head_dim);
        values.set_left_out("kv_heads", kv_heads);
        // Two thirds of four widths, so that three matrices have the weights of two; whole tiles of products.
        values.set_left_out("inner", (width * 8).div_ceil(3).next_multiple_of(64));
        complete_scaling(section, &mut values)?;
        Ok(values.all())
    }
}

/// What a scaling of rotary frequencies has beside its kind, as Llama 3.1 has it.
fn complete_scaling(section: &Section, values: &mut FieldValues) -> Result<(), Error> {
    const FIELDS: [&str; 4] = ["rotary_factor", "rotary_low", "rotary_high", "rotary_original"];
    if values.get::<ScalingKind>("rotary_scaling") == ScalingKind::None {
        return match FIELDS.into_iter().find(|field| section.has(field)) {
            Some(field) => Err(section.no_effect(field, "without `model.rotary_scaling = \"llama3\"`")),
            None => Ok(()),
        };
    }
    for (field, usual) in FIELDS.into_iter().zip([8.0, 1.0, 4.0]) {
        values.set_left_out(field, usual);
    }
    values.set_left_out("rotary_original", 8192);
    let (low, high): (f64, f64) = (values.get("rotary_low"), values.get("rotary_high"));
    if high <= low {
        let problem = format!("is {high}, not above `model.rotary_low` = {low}");
        return Err(section.conflict("rotary_high", problem));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::RunFile;

    fn sentence(fields: &str) -> String {
        RunFile::parse(&format!("[model]\nname = \"llama\"\n{fields}"), &[]).unwrap_err().to_string()
    }

    #[test]
    fn what_does_not_fit_is_named() {
        insta::assert_snapshot!(sentence("heads = 3"), @"`model.heads` is 3, which does not divide `model.width` = 128: set `model.head_dim`");
        insta::assert_snapshot!(sentence("head_dim = 9"), @"`model.head_dim` is 9, and rotary positions turn pairs of columns: an even number");
        insta::assert_snapshot!(sentence("kv_heads = 3"), @"`model.kv_heads` is 3, which does not divide `model.heads` = 4");
        insta::assert_snapshot!(sentence("window = 64"), @"`model.context` is 128, and the model sees 64 positions at most (`model.window`, a sliding window, which attention here lacks): set it to 64 or less");
        insta::assert_snapshot!(sentence("rotary_factor = 8"), @r#"`model.rotary_factor` has no effect without `model.rotary_scaling = "llama3"`"#);
        insta::assert_snapshot!(sentence("rotary_scaling = \"llama3\"\nrotary_low = 4.0"), @"`model.rotary_high` is 4, not above `model.rotary_low` = 4");
        insta::assert_snapshot!(sentence("rotary_scaling = \"yarn\""), @r#"`model.rotary_scaling` must be "none" or "llama3", got "yarn""#);
        insta::assert_snapshot!(sentence("num_key_value_heads = 2"), @"`model.num_key_value_heads` is not a field; did you mean `model.kv_heads`?");
    }
}
