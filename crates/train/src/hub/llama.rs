//! The Llama family's config.json: Llama 2 and 3, SmolLM2, Mistral, Qwen 2.5 and 3, which are one network with
//! some switches, and one for each `llama` of ours that is one of these.
//!
//! Read in both dialects of transformers, 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5
//! (`rope_parameters`, `dtype`); written in that of 4, which both read. Whether queries, keys and values have
//! biases, and whether queries and keys have norms, no field says: the `model_type` does.

use espalier_plan::config::ModelConfig;
use espalier_plan::spec::presets::Llama;
use espalier_plan::spec::{Llama3Scaling, Rotary};
use serde_json::{Value, json};

use super::architecture::{Architecture, ForeignFiles, ForeignModel, HEAD, OurModel};
use super::config_fields::{flag, number, positive_integer, text};

/// Before all names but the head's.
const PREFIX: &str = "model.";

/// One of the family's classes in transformers.
#[derive(Debug)]
pub(super) struct LlamaClass {
    model_type: &'static str,
    class: &'static str,
    /// Whether queries, keys and values have biases,
    qkv_bias: bool,
    /// and queries and keys norms.
    qk_norm: bool,
}

pub(super) const LLAMA: LlamaClass =
    LlamaClass { model_type: "llama", class: "LlamaForCausalLM", qkv_bias: false, qk_norm: false };
pub(super) const MISTRAL: LlamaClass =
    LlamaClass { model_type: "mistral", class: "MistralForCausalLM", ..LLAMA };
pub(super) const QWEN2: LlamaClass =
    LlamaClass { model_type: "qwen2", class: "Qwen2ForCausalLM", qkv_bias: true, ..LLAMA };
pub(super) const QWEN3: LlamaClass =
    LlamaClass { model_type: "qwen3", class: "Qwen3ForCausalLM", qk_norm: true, ..LLAMA };

impl Architecture for LlamaClass {
    fn model_type(&self) -> Option<&'static str> {
        Some(self.model_type)
    }

    fn read(&self, files: &ForeignFiles<'_>) -> Result<ForeignModel, String> {
        let config = files.config;
        let integer = |field: &str| positive_integer(config, field);
        let optional = |field: &str| match config[field].is_null() {
            true => Ok(None),
            false => integer(field).map(Some),
        };
        for field in ["attention_bias", "mlp_bias"] {
            if flag(config, field)? == Some(true) {
                return Err(format!(
                    "`{field}` is true, and output projections and perceptrons here have no biases"
                ));
            }
        }
        match text(config, "hidden_act")? {
            None | Some("silu" | "swish") => {}
            Some(other) => return Err(format!("`hidden_act` is {other:?}, and gates here are \"silu\"")),
        }
        let (width, heads) = (integer("hidden_size")?, integer("num_attention_heads")?);
        let kv_heads = optional("num_key_value_heads")?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(format!(
                "`num_key_value_heads` is {kv_heads}, which does not divide `num_attention_heads` = {heads}"
            ));
        }
        let head_dim = match optional("head_dim")? {
            Some(columns) => columns,
            None if width.is_multiple_of(heads) => width / heads,
            None => {
                return Err(format!(
                    "`num_attention_heads` is {heads}, which does not divide `hidden_size` = {width}, and there is no \
                     `head_dim`"
                ));
            }
        };
        if !head_dim.is_multiple_of(2) {
            return Err(format!("heads have {head_dim} columns, and rotary positions turn pairs of them"));
        }
        let longest = integer("max_position_embeddings")?;
        let window = self.window(config)?.filter(|window| *window < longest);
        let shape = Llama {
            layers: integer("num_hidden_layers")?,
            width,
            heads,
            kv_heads,
            head_dim,
            inner: integer("intermediate_size")?,
            context: window.unwrap_or(longest),
            vocab: integer("vocab_size")?,
            tied: self.tied_to(config)?.is_some() && !files.shapes.contains_key(HEAD),
            eps: number(config, "rms_norm_eps")?.unwrap_or(1e-6),
            qkv_bias: self.qkv_bias,
            qk_norm: self.qk_norm,
            window,
            rotary: rotary(config, longest)?,
        };
        Ok(ForeignModel { model: ModelConfig::of_llama(&shape), image: None })
    }

    fn our_name(&self, theirs: &str) -> Option<String> {
        let name = theirs.strip_prefix(PREFIX).unwrap_or(theirs);
        (!name.ends_with("rotary_emb.inv_freq")).then(|| name.to_owned())
    }

    fn their_name(&self, ours: &str) -> String {
        if ours == HEAD { ours.into() } else { format!("{PREFIX}{ours}") }
    }

    fn tied_to(&self, config: &Value) -> Result<Option<&'static str>, String> {
        Ok(flag(config, "tie_word_embeddings")?.unwrap_or(false).then_some("embed_tokens.weight"))
    }

    fn config(&self, network: &OurModel<'_>) -> Option<Value> {
        let shape = network.model.llama(network.vocab)?;
        let is_mine = (shape.qkv_bias, shape.qk_norm) == (self.qkv_bias, self.qk_norm)
            && shape.window.is_some() == (self.model_type == MISTRAL.model_type);
        if !is_mine {
            return None;
        }
        let scaling = shape.rotary.scaling.map(|scaling| {
            json!({
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
                "original_max_position_embeddings": scaling.original,
            })
        });
        let mut config = json!({
            "architectures": [self.class],
            "model_type": self.model_type,
            "hidden_size": shape.width,
            "intermediate_size": shape.inner,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": shape.context,
            "vocab_size": shape.vocab,
            "hidden_act": "silu",
            "rms_norm_eps": shape.eps,
            "rope_theta": shape.rotary.base,
            "rope_scaling": scaling,
            "attention_bias": false,
            "attention_dropout": 0.0,
            "tie_word_embeddings": shape.tied,
            "initializer_range": 0.02,
            "bos_token_id": network.end,
            "eos_token_id": network.end,
            "torch_dtype": network.dtype,
            "use_cache": true,
        });
        match self.model_type {
            "llama" => config["mlp_bias"] = json!(false),
            "mistral" => config["sliding_window"] = json!(shape.window),
            _ => {
                config["use_sliding_window"] = json!(false);
                config["sliding_window"] = Value::Null;
            }
        }
        Some(config)
    }
}

impl LlamaClass {
    /// Positions that a token sees, where that is not all of them.
    fn window(&self, config: &Value) -> Result<Option<usize>, String> {
        let is_used = match self.model_type {
            "mistral" => true,
            _ => flag(config, "use_sliding_window")?.unwrap_or(false),
        };
        match is_used && !config["sliding_window"].is_null() {
            true => positive_integer(config, "sliding_window").map(Some),
            false => Ok(None),
        }
    }
}

/// What queries and keys are turned by, in either dialect.
fn rotary(config: &Value, longest: usize) -> Result<Rotary, String> {
    let new = &config["rope_parameters"];
    let (base, scaling, named) = match new.is_null() {
        false => (new, new, "rope_parameters"),
        true => (config, &config["rope_scaling"], "rope_scaling"),
    };
    let base = number(base, "rope_theta")?.unwrap_or(10_000.0);
    for place in [config, new] {
        let turned = number(place, "partial_rotary_factor")?.unwrap_or(1.0);
        if turned != 1.0 {
            return Err(format!("`partial_rotary_factor` is {turned}, and heads here are turned in full"));
        }
    }
    let kind = match text(scaling, "rope_type")? {
        Some(kind) => Some(kind),
        None => text(scaling, "type")?,
    };
    let scaling = match kind {
        None | Some("default") => None,
        Some("llama3") => {
            let field = |name: &str| {
                let value = number(scaling, name)?.filter(|number| *number > 0.0);
                value.ok_or_else(|| format!("`{named}` has no `{name}` above 0"))
            };
            let original = match scaling["original_max_position_embeddings"].is_null() {
                true => longest,
                false => positive_integer(scaling, "original_max_position_embeddings")?,
            };
            let (low, high) = (field("low_freq_factor")?, field("high_freq_factor")?);
            if high <= low {
                return Err(format!(
                    "`high_freq_factor` of `{named}` is {high}, not above `low_freq_factor` = {low}"
                ));
            }
            Some(Llama3Scaling { factor: field("factor")?, low, high, original })
        }
        Some(other) => {
            return Err(format!(
                "`{named}` is of type {other:?}, a scaling of rotary positions that is missing here: \"llama3\" and \
                 \"default\" are read"
            ));
        }
    };
    Ok(Rotary { base, scaling })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use espalier_plan::RunFile;

    use super::*;

    const ALL: [&LlamaClass; 4] = [&LLAMA, &MISTRAL, &QWEN2, &QWEN3];

    fn written(name: &str, fields: &str) -> ModelConfig {
        let text = format!("[model]\nname = \"{name}\"\nvocab = 200\n{fields}");
        RunFile::parse(&text, &[]).unwrap_or_else(|error| panic!("{error}")).model
    }

    fn configs(model: &ModelConfig) -> Vec<(&'static LlamaClass, Value)> {
        let network = OurModel { model, vocab: 200, dtype: "float32", end: None };
        ALL.into_iter().filter_map(|class| Some((class, class.config(&network)?))).collect()
    }

    fn read(class: &LlamaClass, config: &Value) -> Result<ModelConfig, String> {
        Ok(class.read(&ForeignFiles { config, shapes: BTreeMap::new() })?.model)
    }

    /// Through config.json and back it is the same model, and one class of transformers has it.
    #[test]
    fn every_llama_has_a_configuration_that_describes_it() {
        for (fields, class) in [
            ("", "llama"),
            ("tied = false\nkv_heads = 2\nhead_dim = 48\ninner = 100\neps = 1e-6", "llama"),
            ("rotary_base = 5e5\nrotary_scaling = \"llama3\"\nrotary_factor = 32.0", "llama"),
            ("qkv_bias = true", "qwen2"),
            ("qk_norm = true", "qwen3"),
            ("window = 64\ncontext = 64", "mistral"),
        ] {
            let model = written("llama", fields);
            let all = configs(&model);
            let [(found, config)] = &all[..] else { panic!("{} classes for {fields}", all.len()) };
            assert_eq!(config["model_type"], class);
            if fields.contains("window") {
                // What it could see without a window is longer.
                let mut config = config.clone();
                config["max_position_embeddings"] = json!(128);
                assert_eq!(read(found, &config), Ok(model.clone()));
            } else {
                assert_eq!(read(found, config), Ok(model));
            }
        }
        assert!(configs(&written("llama", "qkv_bias = true\nqk_norm = true")).is_empty());
        let (_, preset) = configs(&written("llama-3.2-1b", "")).remove(0);
        assert_eq!((&preset["head_dim"], &preset["rope_scaling"]["factor"]), (&json!(64), &json!(32.0)));
    }

    /// As transformers 5 writes it.
    #[test]
    fn both_dialects_are_read() {
        let model = written("llama", "rotary_base = 5e5\nrotary_scaling = \"llama3\"\nrotary_factor = 32.0");
        let (class, mut config) = configs(&model).remove(0);
        let mut parameters = config["rope_scaling"].take();
        parameters["rope_theta"] = config["rope_theta"].take();
        config["rope_parameters"] = parameters;
        config["dtype"] = config["torch_dtype"].take();
        assert_eq!(read(class, &config), Ok(model));
        // And an older name of the kind.
        let mut old = configs(&written("llama", "")).remove(0).1;
        old["rope_scaling"] = json!({ "type": "default" });
        assert!(read(&LLAMA, &old).is_ok());
    }

    #[test]
    fn what_is_missing_is_named() {
        let message = |field: &str, value: Value| {
            let mut config = configs(&written("llama", "")).remove(0).1;
            config[field] = value;
            read(&LLAMA, &config).unwrap_err()
        };
        assert_eq!(
            message("head_dim", json!(7)),
            "heads have 7 columns, and rotary positions turn pairs of them"
        );
        let yarn = json!({ "rope_type": "yarn", "factor": 4.0 });
        let no_factor = json!({ "rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4 });
        let missing = "is of type \"yarn\", a scaling of rotary positions that is missing here: \"llama3\" and \
                       \"default\" are read";
        for (field, value, expected) in [
            ("rope_scaling", yarn, missing),
            ("rope_scaling", no_factor, "has no `factor` above 0"),
            ("num_key_value_heads", json!(3), "is 3, which does not divide `num_attention_heads` = 4"),
            ("hidden_act", json!("gelu"), "is \"gelu\", and gates here are \"silu\""),
            (
                "attention_bias",
                json!(true),
                "is true, and output projections and perceptrons here have no biases",
            ),
            ("vocab_size", Value::Null, "must be a whole number above 0, got null"),
            ("rms_norm_eps", json!("1"), "must be a number, got \"1\""),
            ("partial_rotary_factor", json!(0.5), "is 0.5, and heads here are turned in full"),
        ] {
            assert_eq!(message(field, value), format!("`{field}` {expected}"));
        }
    }
}
