//! GPT-2's config.json: what of it our `gpt` can be, and one for each `gpt` that is a GPT-2.
//!
//! Read in both dialects of transformers, 4 (`torch_dtype`) and 5 (`dtype`); written in that of 4, which both read. Dropout is a
//! matter of how a model is trained: the run file's counts, not the file's.

use espalier_plan::spec::presets::{Gpt, Norm, gpt};
use espalier_plan::spec::{Activation, Input, Layer, Model, NORM_EPS};
use serde_json::{Value, json};

/// What other architectures have that no layer here has.
const MISSING: &[(&[&str], &str)] = &[
    (
        &["llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "gemma", "gemma2", "gemma3", "olmo2"],
        "rotary positions",
    ),
    (&["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss"], "rotary positions and routed experts"),
    (&["gpt_neox", "gptj", "phi", "falcon"], "rotary positions and branches that run side by side"),
    (&["bloom", "mpt"], "positions by a bias on attention"),
    (&["opt", "gpt_neo"], "its order of norms and its names"),
    (
        &["bert", "roberta", "distilbert", "electra", "deberta-v2", "modernbert"],
        "attention that sees both ways",
    ),
    (&["t5", "mt5", "bart", "whisper", "marian"], "a decoder that attends to an encoder"),
    (&["mamba", "mamba2", "rwkv", "falcon_mamba"], "recurrent layers"),
    (&["vit", "clip", "siglip", "dinov2"], "patches of images as tokens"),
    (&["resnet"], "the names of transformers' ResNet: torchvision's and timm's are read"),
];

/// The activations of GPT-2's configuration that are ours. `gelu` is by the error function, and is not.
const ACTIVATIONS: [(&str, Activation); 6] = [
    ("gelu_new", Activation::Gelu),
    ("gelu_pytorch_tanh", Activation::Gelu),
    ("gelu_fast", Activation::Gelu),
    ("relu", Activation::Relu),
    ("silu", Activation::Silu),
    ("swish", Activation::Silu),
];

/// Whether the head uses the token embedding's weight, which it does unless the file says otherwise.
pub(super) fn is_tied(config: &Value) -> Result<bool, String> {
    Ok(config["model_type"] == "gpt2" && flag(config, "tie_word_embeddings")?.unwrap_or(true))
}

/// A field that is true or false, where it is there. Of another type it is no default: nobody knows what was meant.
fn flag(config: &Value, field: &str) -> Result<Option<bool>, String> {
    match &config[field] {
        Value::Null => Ok(None),
        Value::Bool(value) => Ok(Some(*value)),
        other => Err(format!("`{field}` must be true or false, got {other}")),
    }
}

/// The `[model]` of a run file that is what a configuration describes, or what of it is missing here. Where there `is_head`, a weight of
/// the head that is not the token embedding's, it is used, whether or not the file says that they are one.
pub(super) fn read(config: &Value, is_head: bool) -> Result<String, String> {
    let kind = &config["model_type"];
    let kind = kind.as_str().ok_or_else(|| format!("`model_type` must be a text, got {kind}"))?;
    if kind != "gpt2" {
        let missing = MISSING.iter().find(|(kinds, _)| kinds.contains(&kind)).map(|(_, missing)| *missing);
        let missing = missing.unwrap_or("its layers");
        return Err(format!(
            "its `model_type` is {kind:?}, which is not built here (missing: {missing}); what is read is \"gpt2\", and ResNets, VGGs \
             and AlexNet of torchvision without a config.json"
        ));
    }
    let whole = |field: &str| {
        let value = config[field].as_u64().filter(|number| *number > 0);
        value.ok_or_else(|| format!("`{field}` must be a whole number above 0, got {}", config[field]))
    };
    let (width, heads) = (whole("n_embd")?, whole("n_head")?);
    let inner = &config["n_inner"];
    let refused = |field: &str, ours: String| Err(format!("`{field}` is {}, and {ours}", config[field]));
    if !inner.is_null() && inner.as_u64() != Some(4 * width) {
        return refused("n_inner", format!("a layer here has 4 widths inside, {}", 4 * width));
    }
    let eps = &config["layer_norm_epsilon"];
    if !eps.is_null() && !eps.is_number() {
        return Err(format!("`layer_norm_epsilon` must be a number, got {eps}"));
    }
    if eps.as_f64().is_some_and(|eps| eps as f32 != NORM_EPS) {
        return refused("layer_norm_epsilon", format!("norms here have {NORM_EPS}"));
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
    let written = match &config["activation_function"] {
        Value::Null => "gelu_new",
        Value::String(name) => name,
        other => return Err(format!("`activation_function` must be a text, got {other}")),
    };
    let Some((_, activation)) = ACTIVATIONS.iter().find(|(name, _)| *name == written) else {
        let names = ACTIVATIONS.map(|(name, _)| name).join(", ");
        return refused("activation_function", format!("those read are {names}"));
    };
    Ok(format!(
        "[model]\nname = \"gpt\"\nlayers = {}\nheads = {heads}\nwidth = {width}\ncontext = {}\nvocab = {}\ntied = {}\n\
         activation = \"{}\"\n",
        whole("n_layer")?,
        whole(if config["n_positions"].is_null() { "n_ctx" } else { "n_positions" })?,
        whole("vocab_size")?,
        is_tied(config)? && !is_head,
        our_word(*activation),
    ))
}

/// The word of a run file.
fn our_word(activation: Activation) -> &'static str {
    match activation {
        Activation::Gelu => "gelu",
        Activation::Relu => "relu",
        Activation::Silu => "silu",
    }
}

/// The shape of a model that is a GPT-2 as transformers has it; none of any other.
pub(super) fn shape_of(model: &Model) -> Option<Gpt> {
    let Input::Tokens { seq: context, vocab } = model.input else { return None };
    let mut shape = Gpt { layers: model.blocks.len().checked_sub(2)?, context, vocab, ..Gpt::default() };
    (shape.tied, shape.norm) = (false, Norm::Layer);
    model.for_each(&mut |layer| match layer {
        Layer::Embedding(embedding) => shape.width = embedding.width,
        Layer::Attention(attention) => shape.heads = attention.heads,
        Layer::Activation(activation) => shape.activation = *activation,
        Layer::Dropout(dropout) => shape.dropout = dropout.rate,
        Layer::TiedLinear(_) => shape.tied = true,
        _ => {}
    });
    // Whatever it is, it must be what such a shape builds.
    (gpt(&model.name, &shape) == *model).then_some(shape)
}

/// The configuration of a GPT-2 whose weights are of a type that PyTorch calls `dtype`; `end` is the token that ends a document.
pub(super) fn config(shape: &Gpt, dtype: &str, end: Option<u32>) -> Value {
    let named = ACTIVATIONS.iter().find(|(_, activation)| *activation == shape.activation);
    json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_embd": shape.width,
        "n_inner": null,
        "n_positions": shape.context,
        "n_ctx": shape.context,
        "vocab_size": shape.vocab,
        "activation_function": named.map(|(name, _)| name),
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": shape.tied,
        "initializer_range": 0.02,
        "embd_pdrop": shape.dropout,
        "resid_pdrop": shape.dropout,
        // Attention weights are never dropped here.
        "attn_pdrop": 0.0,
        "scale_attn_weights": true,
        "scale_attn_by_inverse_layer_idx": false,
        "reorder_and_upcast_attn": false,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": dtype,
        "use_cache": true,
    })
}

#[cfg(test)]
mod tests {
    use espalier_plan::{DataFacts, Plan, RunFile};

    use super::*;

    fn built(text: &str) -> Model {
        let facts = DataFacts { vocab: Some(20), ..DataFacts::default() };
        Plan::new(RunFile::parse(text, &[]).unwrap(), facts).unwrap().model
    }

    /// Through config.json and back it is the same model.
    #[test]
    fn every_gpt2_has_a_configuration_that_describes_it() {
        for fields in
            ["", "tied = false", "activation = \"silu\"", "layers = 1\nwidth = 8\nheads = 2\ncontext = 5"]
        {
            let model = built(&format!("[model]\nname = \"gpt\"\nvocab = 24\n{fields}"));
            let shape = shape_of(&model).unwrap();
            let text = read(&config(&shape, "float32", None), false).unwrap();
            assert_eq!(built(&text), model, "{text}");
        }
        assert_eq!(shape_of(&built("[model]\nname = \"gpt\"\nnorm = \"rms\"")), None);
        let dropped = shape_of(&built("[model]\nname = \"gpt\"\ndropout = 0.1")).unwrap();
        assert_eq!(dropped.dropout, 0.1);
    }

    #[test]
    fn what_is_missing_is_named() {
        let shape = Gpt::default();
        let said = |field: &str, value: Value| {
            let mut config = config(&shape, "float32", None);
            config[field] = value;
            read(&config, false).unwrap_err()
        };
        let llama = said("model_type", json!("llama"));
        assert!(llama.starts_with(
            "its `model_type` is \"llama\", which is not built here (missing: rotary positions);"
        ));
        assert!(said("model_type", json!("qwen3_moe")).contains("rotary positions and routed experts"));
        assert!(said("model_type", json!("new")).contains("(missing: its layers)"));
        assert_eq!(
            said("n_inner", json!(100)),
            "`n_inner` is 100, and a layer here has 4 widths inside, 512"
        );
        assert_eq!(
            said("layer_norm_epsilon", json!(1e-6)),
            "`layer_norm_epsilon` is 1e-6, and norms here have 0.00001"
        );
        assert!(said("activation_function", json!("gelu")).contains("those read are gelu_new"));
        assert_eq!(
            said("scale_attn_by_inverse_layer_idx", json!(true)),
            "`scale_attn_by_inverse_layer_idx` is true, and it is false here"
        );
        assert_eq!(said("n_embd", json!(-3)), "`n_embd` must be a whole number above 0, got -3");
        // Of another type than it should be, a field is none that was left out.
        for (field, value, expected) in [
            ("tie_word_embeddings", json!("false"), "must be true or false, got \"false\""),
            ("scale_attn_weights", json!(0), "must be true or false, got 0"),
            ("layer_norm_epsilon", json!("1e-6"), "must be a number, got \"1e-6\""),
            ("activation_function", json!(["relu"]), "must be a text, got [\"relu\"]"),
            ("n_positions", json!("1024"), "must be a whole number above 0, got \"1024\""),
            ("model_type", json!(2), "must be a text, got 2"),
        ] {
            assert_eq!(said(field, value), format!("`{field}` {expected}"));
        }
    }
}
