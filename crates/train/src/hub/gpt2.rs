//! GPT-2's config.json: what of it our `gpt` can be, and one for each `gpt` that is a GPT-2.
//!
//! Read in both dialects of transformers, 4 (`torch_dtype`) and 5 (`dtype`); written in that of 4, which both
//! read. Dropout is a matter of how a model is trained: the run file's counts, not the file's.

use espalier_plan::config::ModelConfig;
use espalier_plan::spec::Activation;
use espalier_plan::spec::presets::{Gpt, NormKind};
use serde_json::{Value, json};

use super::architecture::{Architecture, ForeignFiles, ForeignModel, HEAD, OurModel};
use super::config_fields::{flag, number, positive_integer, text};

/// Before all names but the head's, where transformers' class with a head wrote them.
const PREFIX: &str = "transformer.";

/// What GPT-2's configuration calls activations, the name that is written first.
const ACTIVATIONS: [(&str, Activation); 9] = [
    ("gelu_new", Activation::Gelu),
    ("gelu_pytorch_tanh", Activation::Gelu),
    ("gelu_fast", Activation::Gelu),
    ("relu", Activation::Relu),
    ("silu", Activation::Silu),
    ("swish", Activation::Silu),
    ("gelu", Activation::GeluErf),
    ("gelu_python", Activation::GeluErf),
    ("tanh", Activation::Tanh),
];

/// GPT-2, whose names are ours but for the prefix of transformers' class. Its Conv1D weights lie input by
/// output, as ours do.
pub(super) struct Gpt2;

impl Architecture for Gpt2 {
    fn model_type(&self) -> Option<&'static str> {
        Some("gpt2")
    }

    /// Where there is a weight of the head that is not the token embedding's, it is used, whether or not the
    /// file says that they are one.
    fn read(&self, files: &ForeignFiles<'_>) -> Result<ForeignModel, String> {
        let config = files.config;
        let positive_integer = |field: &str| positive_integer(config, field);
        let (width, heads) = (positive_integer("n_embd")?, positive_integer("n_head")?);
        let refused = |field: &str, ours: String| Err(format!("`{field}` is {}, and {ours}", config[field]));
        let inner = match config["n_inner"].is_null() {
            true => None,
            false => Some(positive_integer("n_inner")?).filter(|inner| *inner != 4 * width),
        };
        let eps = number(config, "layer_norm_epsilon")?.unwrap_or(1e-5);
        if !(eps > 0.0 && eps <= 1.0) {
            return refused("layer_norm_epsilon", "it is above 0 and at most 1 here".into());
        }
        for (field, ours) in [
            ("scale_attn_weights", true),
            ("scale_attn_by_inverse_layer_idx", false),
            ("add_cross_attention", false),
        ] {
            if flag(config, field)?.is_some_and(|value| value != ours) {
                return refused(field, format!("it is {ours} here"));
            }
        }
        let written = text(config, "activation_function")?.unwrap_or("gelu_new");
        let Some((_, activation)) = ACTIVATIONS.iter().find(|(name, _)| *name == written) else {
            let names = ACTIVATIONS.map(|(name, _)| name).join(", ");
            return refused("activation_function", format!("those read are {names}"));
        };
        let shape = Gpt {
            layers: positive_integer("n_layer")?,
            heads,
            width,
            context: positive_integer(if config["n_positions"].is_null() { "n_ctx" } else { "n_positions" })?,
            vocab: positive_integer("vocab_size")?,
            tied: self.tied_to(config)?.is_some() && !files.shapes.contains_key(HEAD),
            activation: *activation,
            inner,
            eps,
            ..Gpt::default()
        };
        Ok(ForeignModel { model: ModelConfig::of_gpt(&shape), image: None })
    }

    fn our_name(&self, theirs: &str) -> Option<String> {
        let name = theirs.strip_prefix(PREFIX).unwrap_or(theirs);
        let is_causal_mask = name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
        (!is_causal_mask).then(|| name.to_owned())
    }

    /// The head stands beside the transformer.
    fn their_name(&self, ours: &str) -> String {
        if ours == HEAD { ours.into() } else { format!("{PREFIX}{ours}") }
    }

    fn tied_to(&self, config: &Value) -> Result<Option<&'static str>, String> {
        Ok(flag(config, "tie_word_embeddings")?.unwrap_or(true).then_some("wte.weight"))
    }

    fn config(&self, network: &OurModel<'_>) -> Option<Value> {
        let shape = network.model.gpt(network.vocab).filter(|shape| shape.norm == NormKind::Layer)?;
        let named = ACTIVATIONS.iter().find(|(_, activation)| *activation == shape.activation);
        Some(json!({
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_layer": shape.layers,
            "n_head": shape.heads,
            "n_embd": shape.width,
            "n_inner": shape.inner,
            "n_positions": shape.context,
            "n_ctx": shape.context,
            "vocab_size": shape.vocab,
            "activation_function": named.map(|(name, _)| name),
            "layer_norm_epsilon": shape.eps,
            "tie_word_embeddings": shape.tied,
            "initializer_range": 0.02,
            "embd_pdrop": shape.dropout,
            "resid_pdrop": shape.dropout,
            // Attention weights are never dropped here.
            "attn_pdrop": 0.0,
            "scale_attn_weights": true,
            "scale_attn_by_inverse_layer_idx": false,
            "reorder_and_upcast_attn": false,
            "bos_token_id": network.end,
            "eos_token_id": network.end,
            "torch_dtype": network.dtype,
            "use_cache": true,
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use espalier_plan::RunFile;

    use super::*;

    fn written(fields: &str) -> ModelConfig {
        RunFile::parse(&format!("[model]\nname = \"gpt\"\nvocab = 24\n{fields}"), &[]).unwrap().model
    }

    fn config(model: &ModelConfig) -> Option<Value> {
        Gpt2.config(&OurModel { model, vocab: 24, dtype: "float32", end: None })
    }

    fn read(config: &Value) -> Result<ModelConfig, String> {
        Ok(Gpt2.read(&ForeignFiles { config, shapes: BTreeMap::new() })?.model)
    }

    /// Through config.json and back it is the same model.
    #[test]
    fn every_gpt2_has_a_configuration_that_describes_it() {
        for fields in [
            "",
            "tied = false",
            "activation = \"silu\"",
            "activation = \"gelu_erf\"",
            "activation = \"tanh\"",
            "inner = 100\neps = 1e-6",
            "layers = 1\nwidth = 8\nheads = 2\ncontext = 5",
        ] {
            let model = written(fields);
            assert_eq!(read(&config(&model).unwrap()), Ok(model));
        }
        assert_eq!(config(&written("norm = \"rms\"")), None);
        let dropped = config(&written("dropout = 0.5")).unwrap();
        assert_eq!(dropped["resid_pdrop"], 0.5);
        let preset = RunFile::parse("[model]\nname = \"gpt2-124m\"", &[]).unwrap().model;
        assert_eq!(config(&preset).unwrap()["n_embd"], 768);
    }

    #[test]
    fn what_is_missing_is_named() {
        let message = |field: &str, value: Value| {
            let mut config = config(&written("")).unwrap();
            config[field] = value;
            read(&config).unwrap_err()
        };
        assert!(message("activation_function", json!("mish")).contains("those read are gelu_new"));
        // Of another type than it should be, too, a field is none that was left out.
        for (field, value, expected) in [
            ("n_inner", json!(0), "must be a whole number above 0, got 0"),
            ("n_embd", json!(-3), "must be a whole number above 0, got -3"),
            ("layer_norm_epsilon", json!(0), "is 0, and it is above 0 and at most 1 here"),
            ("scale_attn_by_inverse_layer_idx", json!(true), "is true, and it is false here"),
            ("tie_word_embeddings", json!("false"), "must be true or false, got \"false\""),
            ("scale_attn_weights", json!(0), "must be true or false, got 0"),
            ("layer_norm_epsilon", json!("1e-6"), "must be a number, got \"1e-6\""),
            ("activation_function", json!(["relu"]), "must be a text, got [\"relu\"]"),
            ("n_positions", json!("1024"), "must be a whole number above 0, got \"1024\""),
        ] {
            assert_eq!(message(field, value), format!("`{field}` {expected}"));
        }
    }
}
