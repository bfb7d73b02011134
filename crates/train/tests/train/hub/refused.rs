//! What is wrong with other people's files, each in one sentence that names it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use espalier_tensor::Device;
use espalier_train::parallel::Ranks;
use safetensors::Dtype;
use serde_json::json;

use super::{Numbers, config_of, copy, folder_with, gpt2, open, oracle, refusal, tensors, write};
use crate::support::{assert_says, settings};

/// Why a run, or whoever uses it, cannot have the weights of a folder.
fn weights_refused(folder: &Path, more: &str) -> String {
    let trained = open(folder);
    let plan = trained.plan(&settings(more)).unwrap();
    trained.params(&plan, &Device::cpu(1).unwrap(), &Ranks::single()).unwrap_err().to_string()
}

#[test]
fn an_architecture_that_we_lack_is_named_with_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder_with(folder.path().to_owned(), |_| {});
    let mut config = config_of(&at);
    config["model_type"] = json!("qwen3_moe");
    fs::write(at.join("config.json"), config.to_string()).unwrap();
    assert_eq!(
        refusal(&at).replace(&at.display().to_string(), "DIR"),
        "DIR/config.json: its `model_type` is \"qwen3_moe\", which is not supported (missing: mixture of experts); what is \
         read is \"gpt2\", \"llama\", \"mistral\", \"qwen2\" and \"qwen3\", and ResNets, VGGs and AlexNet of torchvision \
         without a config.json"
    );
    fs::write(at.join("config.json"), "{").unwrap();
    assert!(refusal(&at).contains("config.json is not JSON"));
}

#[test]
fn a_tensor_that_is_missing_too_many_or_of_another_shape_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let refused = |name: &str, change: fn(&mut BTreeMap<String, Numbers>)| {
        weights_refused(&folder_with(at(name), change), "")
    };
    let missing = refused("missing", |all| drop(all.remove("transformer.h.1.ln_2.bias")));
    let expected = "missing: model.safetensors has no tensor h.1.ln_2.bias, which this run needs";
    assert!(missing.ends_with(expected), "{missing}");
    let shape = refused("shape", |all| {
        all.get_mut("transformer.h.0.mlp.c_fc.weight").unwrap().1 = vec![64, 16];
    });
    let expected = "h.0.mlp.c_fc.weight is F32 [64, 16] there, and F32 [16, 64] in this run";
    assert!(shape.ends_with(expected), "{shape}");
    let more = refused("more", |all| {
        all.insert("score.weight".into(), (Dtype::F32, vec![1], vec![0; 4]));
    });
    assert!(more.ends_with("holds 29 tensors, this run 28: it has no score.weight"), "{more}");
    let integers = refused("whole", |all| {
        let wte = all.get_mut("transformer.wte.weight").unwrap();
        (wte.0, wte.2) = (Dtype::I8, vec![0; 640]);
    });
    assert_says(&integers, &["wte.weight is I8 [40, 16] there"]);
    let short = weights_refused(&gpt2(), "model.context=99");
    assert!(short.ends_with("wpe.weight is F32 [16, 16] there, and F32 [99, 16] in this run"), "{short}");
}

#[test]
fn a_tokenizer_of_another_size_is_refused() {
    let vocab: serde_json::Map<_, _> = (0..41).map(|id| (format!("t{id}"), json!(id))).collect();
    let model = json!({ "type": "BPE", "vocab": vocab, "merges": [] });
    let tokenizer = json!({ "pre_tokenizer": { "type": "ByteLevel" }, "model": model });
    for name in ["gpt2", "llama"] {
        let folder = tempfile::tempdir().unwrap();
        copy(&oracle().join("hub").join(name), folder.path());
        fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let message = refusal(folder.path());
        let expected = "its tokenizer has 41 tokens, and the model 40: it is that of another model";
        assert!(message.ends_with(expected), "{message}");
    }
}

/// Nothing is allocated for what a header only claims.
#[test]
fn headers_and_indices_that_lie_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder_with(folder.path().join("model"), |_| {});
    let weights = at.join("model.safetensors");
    let good = fs::read(&weights).unwrap();
    let mut bytes = good.clone();
    bytes[..8].copy_from_slice(&1_000_000_000_000_000_000_u64.to_le_bytes());
    fs::write(&weights, &bytes).unwrap();
    let message = refusal(&at);
    assert!(
        message
            .ends_with("model.safetensors: its header is damaged: it would have 1000000000000000000 bytes"),
        "{message}"
    );
    fs::write(&weights, &good[..good.len() - 1]).unwrap();
    assert!(refusal(&at).ends_with("its header is not that of a file of its size"));

    let all = tensors(&gpt2().join("model.safetensors"));
    fs::remove_file(&weights).unwrap();
    let index = at.join("model.safetensors.index.json");
    let name =
        |file: &str| all.keys().map(|name| (name.clone(), json!(file))).collect::<serde_json::Map<_, _>>();
    fs::write(&index, json!({ "weight_map": name("gone.safetensors") }).to_string()).unwrap();
    let message = refusal(&at);
    assert!(
        message.ends_with("model.safetensors.index.json names gone.safetensors, which is not there"),
        "{message}"
    );
    write(&at.join("part.safetensors"), &all);
    let mut map = name("part.safetensors");
    map.insert("nothing.weight".into(), json!("part.safetensors"));
    fs::write(&index, json!({ "weight_map": map }).to_string()).unwrap();
    assert!(refusal(&at).ends_with("says that part.safetensors holds nothing.weight, which it does not"));
    fs::write(&index, json!({ "weight_map": { "a": "../part.safetensors" } }).to_string()).unwrap();
    fs::copy(at.join("part.safetensors"), folder.path().join("part.safetensors")).unwrap();
    assert!(refusal(&at).ends_with("it names ../part.safetensors, which is not in its folder"));
    fs::write(&index, "[]").unwrap();
    assert!(refusal(&at).contains("is not an index of weights"));
    fs::remove_file(&index).unwrap();
    fs::write(at.join("pytorch_model.bin"), b"").unwrap();
    assert!(refusal(&at).contains("pytorch_model.bin is a pickle"));
    fs::remove_file(at.join("pytorch_model.bin")).unwrap();
    assert!(refusal(&at).ends_with("it has no model.safetensors and no model.safetensors.index.json"));
}
