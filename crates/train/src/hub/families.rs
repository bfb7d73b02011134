//! The families of models that are read and written, and what is missing for others.

use serde_json::Value;

use super::architecture::{Architecture, OurModel};
use super::gpt2::Gpt2;
use super::llama;
use super::torchvision::Torchvision;

const ALL: [&dyn Architecture; 6] =
    [&Gpt2, &llama::LLAMA, &llama::MISTRAL, &llama::QWEN2, &llama::QWEN3, &Torchvision];

/// What other families have that no layer here has.
const MISSING: &[(&[&str], &str)] = &[
    (&["smollm3"], "layers without rotary positions"),
    (&["phi3"], "its names: queries, keys and values in one weight"),
    (&["gemma", "gemma2", "gemma3"], "its norms and the scale of its embedding"),
    (&["olmo2"], "its order of norms"),
    (&["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss"], "mixture of experts"),
    (&["gpt_neox", "gptj", "phi", "falcon"], "parallel branches and rotations of parts of a head"),
    (&["bloom", "mpt"], "position biases in attention (ALiBi)"),
    (&["opt", "gpt_neo"], "its order of norms and its names"),
    (&["bert", "roberta", "distilbert", "electra", "deberta-v2", "modernbert"], "bidirectional attention"),
    (&["t5", "mt5", "bart", "whisper", "marian"], "cross-attention (encoder-decoder)"),
    (&["mamba", "mamba2", "rwkv", "falcon_mamba"], "recurrent layers"),
    (&["vit", "clip", "siglip", "dinov2"], "image patches as tokens"),
    (&["resnet"], "the names of transformers' ResNet: torchvision's and timm's are read"),
];

/// The family that a configuration names, or else that without one.
pub(super) fn find(config: &Value) -> Result<&'static dyn Architecture, String> {
    let kind = match &config["model_type"] {
        Value::Null => None,
        Value::String(kind) => Some(kind.as_str()),
        other => return Err(format!("`model_type` must be a text, got {other}")),
    };
    let known = ALL.into_iter().find(|family| family.model_type() == kind);
    known.ok_or_else(|| {
        let kind = kind.unwrap_or_default();
        let missing = MISSING.iter().find(|(kinds, _)| kinds.contains(&kind)).map(|(_, missing)| *missing);
        let missing = missing.unwrap_or("its layers");
        format!(
            "its `model_type` is {kind:?}, which is not supported (missing: {missing}); what is read is \"gpt2\", \"llama\", \
             \"mistral\", \"qwen2\" and \"qwen3\", and ResNets, VGGs and AlexNet of torchvision without a config.json"
        )
    })
}

/// Our name of a tensor of files whose configuration names their family; where it names none that is known,
/// by the rules of all, which do not contradict each other.
pub(super) fn our_name(config: &Value, theirs: &str) -> Option<String> {
    let named = find(config).ok().filter(|family| family.model_type().is_some());
    let families = named.map_or(ALL.to_vec(), |family| vec![family]);
    families.into_iter().try_fold(theirs.to_owned(), |name, family| family.our_name(&name))
}

/// The family that a network of ours is of, and its configuration.
pub(super) fn describe(network: &OurModel<'_>) -> Option<(&'static dyn Architecture, Value)> {
    ALL.into_iter().find_map(|family| Some((family, family.config(network)?)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::architecture::HEAD;
    use super::*;

    #[test]
    fn names_are_ours_and_what_is_made_anew_has_none() {
        for config in [Value::Null, json!({ "model_type": "gpt2" }), json!({ "model_type": "opt" })] {
            for name in ["transformer.h.0.attn.c_attn.bias", "h.0.attn.c_attn.bias"] {
                assert_eq!(our_name(&config, name).unwrap(), "h.0.attn.c_attn.bias");
            }
            for name in ["h.11.attn.bias", "transformer.h.0.attn.masked_bias"] {
                assert_eq!(our_name(&config, name), None, "{name}");
            }
            assert_eq!(our_name(&config, HEAD).unwrap(), HEAD);
        }
        assert_eq!(our_name(&Value::Null, "bn1.num_batches_tracked"), None);
    }

    #[test]
    fn what_is_missing_is_named() {
        let message = |kind: Value| find(&json!({ "model_type": kind })).err().unwrap();
        let olmo = message(json!("olmo2"));
        assert!(olmo.starts_with(
            "its `model_type` is \"olmo2\", which is not supported (missing: its order of norms);"
        ));
        assert!(message(json!("qwen3_moe")).contains("(missing: mixture of experts)"));
        assert!(message(json!("new")).contains("(missing: its layers)"));
        assert_eq!(message(json!(2)), "`model_type` must be a text, got 2");
    }
}
