//! What is wrong with other people's files, each in one sentence that names it.

use std::fs;

use safetensors::Dtype;
use serde_json::json;

use super::{folder_with, gpt2, open, refusal, tensors, write};
use crate::support::settings;

/// Why a run, or whoever uses it, cannot have the weights of a folder.
fn weights_refused(folder: &std::path::Path) -> String {
    let trained = open(folder);
    let device = espalier_tensor::Device::cpu(1).unwrap();
    let plan = trained.plan(&[]).unwrap();
    trained.params(&plan, &device, &espalier_train::parallel::Ranks::single()).unwrap_err().to_string()
}

#[test]
fn an_architecture_that_we_lack_is_named_with_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder_with(folder.path().to_owned(), |_| {});
    let mut config: serde_json::Value =
        serde_json::from_slice(&fs::read(at.join("config.json")).unwrap()).unwrap();
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
    let missing = weights_refused(&folder_with(at("missing"), |all| {
        all.remove("transformer.h.1.ln_2.bias");
    }));
    assert!(
        missing.ends_with("missing: model.safetensors has no tensor h.1.ln_2.bias, which this run needs"),
        "{missing}"
    );
    let shape = weights_refused(&folder_with(at("shape"), |all| {
        all.get_mut("transformer.h.0.mlp.c_fc.weight").unwrap().1 = vec![64, 16];
    }));
    assert!(
        shape.ends_with("h.0.mlp.c_fc.weight is F32 [64, 16] there, and F32 [16, 64] in this run"),
        "{shape}"
    );
    let more = weights_refused(&folder_with(at("more"), |all| {
        all.insert("score.weight".into(), (Dtype::F32, vec![1], vec![0; 4]));
    }));
    assert!(more.ends_with("holds 29 tensors, this run 28: it has no score.weight"), "{more}");
    let integers = weights_refused(&folder_with(at("whole"), |all| {
        let wte = all.get_mut("transformer.wte.weight").unwrap();
        (wte.0, wte.2) = (Dtype::I8, vec![0; 640]);
    }));
    assert!(integers.contains("wte.weight is I8 [40, 16] there"), "{integers}");
    let short = open(&gpt2()).plan(&settings("model.context=99")).unwrap();
    let device = espalier_tensor::Device::cpu(1).unwrap();
    let single = espalier_train::parallel::Ranks::single();
    let short = open(&gpt2()).params(&short, &device, &single).unwrap_err().to_string();
    assert!(short.ends_with("wpe.weight is F32 [16, 16] there, and F32 [99, 16] in this run"), "{short}");
}

#[test]
fn a_tokenizer_of_another_size_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder_with(folder.path().to_owned(), |_| {});
    let vocab: serde_json::Map<_, _> = (0..41).map(|id| (format!("t{id}"), json!(id))).collect();
    let tokenizer = json!({ "pre_tokenizer": { "type": "ByteLevel" }, "model": { "type": "BPE", "vocab": vocab, "merges": [] } });
    fs::write(at.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let message = refusal(&at);
    assert!(
        message.ends_with("its tokenizer has 41 tokens, and the model 40: it is that of another model"),
        "{message}"
    );
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
