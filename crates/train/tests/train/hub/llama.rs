//! What a configuration of the Llama family says that is not in its weights: a window, a scaling of positions,
//! heads that do not divide.

use std::fs;
use std::path::PathBuf;

use serde_json::json;

use super::{AS_IT_IS, config_of, logits, open, oracle, refusal};
use crate::support::settings;

/// The folder of a family with another configuration.
fn with_config(name: &str, at: PathBuf, change: impl FnOnce(&mut serde_json::Value)) -> PathBuf {
    let from = oracle().join("hub").join(name);
    fs::create_dir_all(&at).unwrap();
    fs::copy(from.join("model.safetensors"), at.join("model.safetensors")).unwrap();
    let mut config = config_of(&from);
    change(&mut config);
    fs::write(at.join("config.json"), config.to_string()).unwrap();
    at
}

/// Up to its window a model sees what it saw in training; beyond it, it does not.
#[test]
fn a_sliding_window_is_refused_where_it_matters() {
    let out = tempfile::tempdir().unwrap();
    let at = with_config("mistral", out.path().join("window"), |config| config["sliding_window"] = json!(64));
    let ours = open(&at);
    assert_eq!(ours.plan(&[]).unwrap().network.context(), Some(64));
    let whole = open(&oracle().join("hub/mistral"));
    let ids = [1, 7, 30, 2];
    assert_eq!(logits(&ours, "", &ids), logits(&whole, "", &ids));
    let error = ours.plan(&settings("model.context=65")).unwrap_err().to_string();
    assert_eq!(
        error,
        "`model.context` is 65, and the model sees 64 positions at most (`model.window`, a sliding window, which attention \
         here lacks): set it to 64 or less"
    );
    ours.export(&out.path().join("again"), &AS_IT_IS).unwrap();
    let config = config_of(&out.path().join("again"));
    assert_eq!((&config["model_type"], &config["sliding_window"]), (&json!("mistral"), &json!(64)));
}

#[test]
fn what_we_lack_is_one_sentence() {
    let out = tempfile::tempdir().unwrap();
    let message = |name: &str, change: &dyn Fn(&mut serde_json::Value)| {
        let at = with_config("llama", out.path().join(name), change);
        refusal(&at).replace(&at.display().to_string(), "DIR")
    };
    assert_eq!(
        message("yarn", &|config| config["rope_parameters"]["rope_type"] = json!("yarn")),
        "DIR/config.json: `rope_parameters` is of type \"yarn\", a scaling of rotary positions that is missing here: \
         \"llama3\" and \"default\" are read"
    );
    assert_eq!(
        message("heads", &|config| config["num_key_value_heads"] = json!(3)),
        "DIR/config.json: `num_key_value_heads` is 3, which does not divide `num_attention_heads` = 4"
    );
}
