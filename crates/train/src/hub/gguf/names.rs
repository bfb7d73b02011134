//! What llama.cpp calls a family of models, its sizes and its tensors, and in which order it wants their
//! rows. What a model is, is read from the config.json that the export to a folder would write, and tensors
//! have the names that they would have there: a family that `hub` writes is an arm here.

use serde_json::Value;

use super::format::{GgufPair, GgufValue};

/// A model as llama.cpp knows it.
#[derive(Debug)]
pub(super) struct GgufModel<'a> {
    family: GgufFamily,
    config: &'a Value,
}

/// The architectures of llama.cpp that are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GgufFamily {
    Gpt2,
    /// Llama, Mistral and SmolLM: rotary positions of neighbouring pairs.
    Llama,
    Qwen2,
    Qwen3,
}

/// In which order the numbers of a tensor leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowOrder {
    /// As they are.
    Stored,
    /// Input by output becomes output by input.
    Transposed,
    /// Rows of each of so many heads: those of its first half and of its second half take turns. transformers
    /// rotates pairs that are half a head apart, llama.cpp's `llama` neighbours.
    Interleaved { heads: usize },
}

/// A tensor of a folder of Hugging Face's and what becomes of it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TensorName {
    pub(super) name: String,
    pub(super) order: RowOrder,
    /// Whether it is f32 in every file: norms, biases and positions are.
    pub(super) is_exact: bool,
}

impl<'a> GgufModel<'a> {
    /// The model of a configuration, or what of it llama.cpp lacks.
    pub(super) fn of(config: &'a Value) -> Result<GgufModel<'a>, String> {
        let family = match config["model_type"].as_str().unwrap_or_default() {
            "gpt2" => GgufFamily::Gpt2,
            "llama" | "mistral" => GgufFamily::Llama,
            "qwen2" => GgufFamily::Qwen2,
            "qwen3" => GgufFamily::Qwen3,
            other => return Err(format!("llama.cpp's names of {other:?} are not known here")),
        };
        let (field, theirs): (&str, &[&str]) = match family {
            GgufFamily::Gpt2 => ("activation_function", &["gelu_new", "gelu_pytorch_tanh", "gelu_fast"]),
            _ => ("hidden_act", &["silu", "swish"]),
        };
        let activation = config[field].as_str().unwrap_or(theirs[0]);
        if !theirs.contains(&activation) {
            let only = theirs[0];
            return Err(format!("its activation is {activation}, and llama.cpp's has {only} alone"));
        }
        let model = GgufModel { family, config };
        if family != GgufFamily::Llama && model.rotary_divisors().is_some() {
            let name = model.architecture();
            return Err(format!(
                "its rotary positions are scaled (llama3), which llama.cpp's {name} does not read"
            ));
        }
        Ok(model)
    }

    /// `general.architecture`, which is also before the keys of the model's sizes.
    pub(super) fn architecture(&self) -> &'static str {
        match self.family {
            GgufFamily::Gpt2 => "gpt2",
            GgufFamily::Llama => "llama",
            GgufFamily::Qwen2 => "qwen2",
            GgufFamily::Qwen3 => "qwen3",
        }
    }

    /// The model's sizes.
    pub(super) fn pairs(&self) -> Vec<GgufPair> {
        let (config, prefix) = (self.config, self.architecture());
        let size = |field: &str| GgufValue::U32(count(config, field) as u32);
        let real = |field: &str| GgufValue::F32(number(config, field) as f32);
        let pair = |(key, value): (&str, GgufValue)| (format!("{prefix}.{key}"), value);
        if self.family == GgufFamily::Gpt2 {
            let inner = match config["n_inner"].as_u64() {
                Some(inner) => inner as usize,
                None => 4 * count(config, "n_embd"),
            };
            return [
                ("block_count", size("n_layer")),
                ("context_length", size("n_positions")),
                ("embedding_length", size("n_embd")),
                ("feed_forward_length", GgufValue::U32(inner as u32)),
                ("attention.head_count", size("n_head")),
                ("attention.layer_norm_epsilon", real("layer_norm_epsilon")),
                ("vocab_size", size("vocab_size")),
            ]
            .map(pair)
            .into();
        }
        let head = GgufValue::U32(self.head_size() as u32);
        [
            ("block_count", size("num_hidden_layers")),
            ("context_length", size("max_position_embeddings")),
            ("embedding_length", size("hidden_size")),
            ("feed_forward_length", size("intermediate_size")),
            ("attention.head_count", size("num_attention_heads")),
            ("attention.head_count_kv", GgufValue::U32(self.key_heads() as u32)),
            ("attention.key_length", head.clone()),
            ("attention.value_length", head.clone()),
            ("attention.layer_norm_rms_epsilon", real("rms_norm_eps")),
            ("rope.dimension_count", head),
            ("rope.freq_base", real("rope_theta")),
            ("vocab_size", size("vocab_size")),
        ]
        .map(pair)
        .into()
    }

    /// What becomes of a tensor under its name in a folder of Hugging Face's.
    pub(super) fn tensor(&self, theirs: &str) -> Option<TensorName> {
        let exact = |name: String| TensorName { name, order: RowOrder::Stored, is_exact: true };
        let weight = |name: &str| TensorName { name: name.into(), order: RowOrder::Stored, is_exact: false };
        if theirs == "lm_head.weight" {
            return Some(weight("output.weight"));
        }
        if self.family == GgufFamily::Gpt2 {
            let theirs = theirs.strip_prefix("transformer.")?;
            return match theirs {
                "wte.weight" => Some(weight("token_embd.weight")),
                "wpe.weight" => Some(exact("position_embd.weight".into())),
                "ln_f.weight" | "ln_f.bias" => Some(exact(theirs.replace("ln_f", "output_norm"))),
                _ => {
                    let (block, module, kind) = in_block(theirs.strip_prefix("h.")?)?;
                    let (ours, is_linear) = match module {
                        "ln_1" => ("attn_norm", false),
                        "ln_2" => ("ffn_norm", false),
                        "attn.c_attn" => ("attn_qkv", true),
                        "attn.c_proj" => ("attn_output", true),
                        "mlp.c_fc" => ("ffn_up", true),
                        "mlp.c_proj" => ("ffn_down", true),
                        _ => return None,
                    };
                    let is_matrix = is_linear && kind == "weight";
                    Some(TensorName {
                        name: format!("blk.{block}.{ours}.{kind}"),
                        order: if is_matrix { RowOrder::Transposed } else { RowOrder::Stored },
                        is_exact: !is_matrix,
                    })
                }
            };
        }
        let theirs = theirs.strip_prefix("model.")?;
        match theirs {
            "embed_tokens.weight" => Some(weight("token_embd.weight")),
            "norm.weight" => Some(exact("output_norm.weight".into())),
            _ => {
                let (block, module, kind) = in_block(theirs.strip_prefix("layers.")?)?;
                let ours = match module {
                    "input_layernorm" => "attn_norm",
                    "post_attention_layernorm" => "ffn_norm",
                    "self_attn.q_proj" => "attn_q",
                    "self_attn.k_proj" => "attn_k",
                    "self_attn.v_proj" => "attn_v",
                    "self_attn.o_proj" => "attn_output",
                    "self_attn.q_norm" => "attn_q_norm",
                    "self_attn.k_norm" => "attn_k_norm",
                    "mlp.gate_proj" => "ffn_gate",
                    "mlp.up_proj" => "ffn_up",
                    "mlp.down_proj" => "ffn_down",
                    _ => return None,
                };
                let order = match (self.family, ours) {
                    (GgufFamily::Llama, "attn_q") => {
                        RowOrder::Interleaved { heads: count(self.config, "num_attention_heads") }
                    }
                    (GgufFamily::Llama, "attn_k") => RowOrder::Interleaved { heads: self.key_heads() },
                    _ => RowOrder::Stored,
                };
                let is_exact = kind == "bias" || ours.ends_with("norm");
                Some(TensorName { name: format!("blk.{block}.{ours}.{kind}"), order, is_exact })
            }
        }
    }

    /// What each angle of llama3's scaled rotary positions is divided by, `rope_freqs.weight`; none without
    /// that scaling. Slow angles, of which the original context saw less than a turn, are divided by the
    /// factor, fast ones by 1, and between them it is interpolated.
    pub(super) fn rotary_divisors(&self) -> Option<Vec<f32>> {
        let scaling = &self.config["rope_scaling"];
        let kind = scaling.get("rope_type").or(scaling.get("type"))?;
        if kind != "llama3" {
            return None;
        }
        let context = number(scaling, "original_max_position_embeddings");
        let factor = number(scaling, "factor");
        let (low, high) = (number(scaling, "low_freq_factor"), number(scaling, "high_freq_factor"));
        let (base, size) = (number(self.config, "rope_theta"), self.head_size());
        let divisor = |i: usize| {
            let turns = context * base.powf(-2.0 * i as f64 / size as f64) / std::f64::consts::TAU;
            if turns > high {
                1.0
            } else if turns < low {
                factor
            } else {
                let smooth = (turns - low) / (high - low);
                1.0 / ((1.0 - smooth) / factor + smooth)
            }
        };
        Some((0..size / 2).map(|i| divisor(i) as f32).collect())
    }

    fn key_heads(&self) -> usize {
        let grouped = self.config["num_key_value_heads"].as_u64();
        grouped.map_or_else(|| count(self.config, "num_attention_heads"), |heads| heads as usize)
    }

    fn head_size(&self) -> usize {
        let own = self.config["head_dim"].as_u64().map(|size| size as usize);
        own.unwrap_or_else(|| count(self.config, "hidden_size") / count(self.config, "num_attention_heads"))
    }
}

impl RowOrder {
    /// The shape that it makes of one.
    pub(super) fn shape(self, shape: &[usize]) -> Vec<usize> {
        match self {
            RowOrder::Transposed => shape.iter().rev().copied().collect(),
            RowOrder::Stored | RowOrder::Interleaved { .. } => shape.to_vec(),
        }
    }

    /// The numbers of a tensor of a shape, in this order.
    pub(super) fn apply(self, numbers: Vec<f32>, shape: &[usize]) -> Vec<f32> {
        match self {
            RowOrder::Stored => numbers,
            RowOrder::Transposed => {
                let (rows, columns) = (shape[0], shape[1]);
                let column = |j| numbers[j..].iter().step_by(columns).take(rows);
                (0..columns).flat_map(column).copied().collect()
            }
            RowOrder::Interleaved { heads } => {
                let row: usize = shape[1..].iter().product();
                let half = shape[0] / heads / 2;
                let rows = (0..heads).flat_map(|head| {
                    (0..half).flat_map(move |i| [2 * head * half + i, (2 * head + 1) * half + i])
                });
                rows.flat_map(|i| &numbers[i * row..(i + 1) * row]).copied().collect()
            }
        }
    }
}

/// `3.mlp.c_fc.weight` as block, module and kind.
fn in_block(name: &str) -> Option<(usize, &str, &str)> {
    let (block, name) = name.split_once('.')?;
    let (module, kind) = name.rsplit_once('.')?;
    Some((block.parse().ok()?, module, kind)).filter(|(_, _, kind)| ["weight", "bias"].contains(kind))
}

/// A size of a configuration that `hub` itself has written.
fn count(config: &Value, field: &str) -> usize {
    config[field].as_u64().unwrap_or_else(|| panic!("a configuration of ours has `{field}`")) as usize
}

fn number(config: &Value, field: &str) -> f64 {
    config[field].as_f64().unwrap_or_else(|| panic!("a configuration of ours has `{field}`"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn plain(kind: &str) -> Value {
        let mut config = llama(kind);
        config["rope_scaling"] = Value::Null;
        config
    }

    fn llama(kind: &str) -> Value {
        json!({
            "model_type": kind, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
            "rope_theta": 500_000.0, "hidden_act": "silu",
            "rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        })
    }

    #[test]
    fn rows_of_queries_and_keys_take_turns_in_llama_alone() {
        let order = |kind: &str, name: &str| {
            let config = plain(kind);
            GgufModel::of(&config).unwrap().tensor(name).unwrap().order
        };
        let (q, k) = ("model.layers.0.self_attn.q_proj.weight", "model.layers.7.self_attn.k_proj.bias");
        assert_eq!(order("llama", q), RowOrder::Interleaved { heads: 4 });
        assert_eq!(order("mistral", k), RowOrder::Interleaved { heads: 2 });
        for kind in ["qwen2", "qwen3"] {
            assert_eq!([order(kind, q), order(kind, k)], [RowOrder::Stored; 2]);
        }
        // Two heads of four rows of one number each.
        let numbers: Vec<f32> = (0..8).map(|i| i as f32).collect();
        let taken = RowOrder::Interleaved { heads: 2 }.apply(numbers.clone(), &[8]);
        assert_eq!(taken, [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
        assert_eq!(
            RowOrder::Transposed.apply(numbers[..6].to_vec(), &[2, 3]),
            [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
        );
    }

    #[test]
    fn every_name_is_found_and_no_other() {
        let config = plain("qwen3");
        let model = GgufModel::of(&config).unwrap();
        let norm = model.tensor("model.layers.11.self_attn.k_norm.weight").unwrap();
        assert!(norm.is_exact && norm.name == "blk.11.attn_k_norm.weight", "{norm:?}");
        assert!(!model.tensor("lm_head.weight").unwrap().is_exact);
        for name in ["model.layers.x.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.scale", "wte.weight"] {
            assert_eq!(model.tensor(name), None, "{name}");
        }
    }

    /// As llama.cpp's converter has them: 1 for fast angles, the factor for slow ones.
    #[test]
    fn scaled_angles_have_divisors() {
        let config = llama("llama");
        let divisors = GgufModel::of(&config).unwrap().rotary_divisors().unwrap();
        assert_eq!(divisors.len(), 8);
        assert_eq!((divisors[0], divisors[7]), (1.0, 8.0));
        // base^(-6/16) is 0.00728, or 9.51 turns of 8192; base^(-8/16) 1.84; base^(-10/16) 0.358.
        assert_eq!((divisors[3], divisors[5]), (1.0, 8.0));
        assert!((divisors[4] - 2.694_5).abs() < 1e-3, "{divisors:?}");
        assert_eq!(GgufModel::of(&plain("llama")).unwrap().rotary_divisors(), None);
    }

    #[test]
    fn what_llama_cpp_lacks_is_named() {
        let scaled = llama("qwen3");
        let error = GgufModel::of(&scaled).unwrap_err();
        assert_eq!(error, "its rotary positions are scaled (llama3), which llama.cpp's qwen3 does not read");
        let relu = json!({ "model_type": "gpt2", "activation_function": "relu" });
        let error = GgufModel::of(&relu).unwrap_err();
        assert_eq!(error, "its activation is relu, and llama.cpp's has gelu_new alone");
        let other = GgufModel::of(&json!({ "model_type": "opt" })).unwrap_err();
        assert_eq!(other, "llama.cpp's names of \"opt\" are not known here");
    }
}
