//! Numbers that are rounded and those that are not: a bf16 run keeps in its masters what it starts from in
//! f32, and `--dtype f32` writes them. And numbers that are none.

use std::collections::BTreeMap;
use std::path::Path;

use espalier_tensor::Device;
use espalier_train::Error;
use espalier_train::hub::{ExportOptions, ExportPrecision};
use espalier_train::parallel::Ranks;
use espalier_train::trained::EvalWindows;
use safetensors::Dtype;

use super::{AS_IT_IS, Numbers, floats, folder_with, gpt2, ids, open, start_from, tensors, write_ids};
use crate::support::{assert_says, scored};

fn f32s(numbers: &Numbers) -> Vec<f32> {
    assert_eq!(numbers.0, Dtype::F32);
    floats(&numbers.2)
}

/// The weights of a run as f32, by way of a folder.
fn exported(run: &Path, name: &str) -> BTreeMap<String, Numbers> {
    let folder = run.with_file_name(format!("{name}-f32"));
    open(run).export(&folder, &ExportOptions { dtype: Some(ExportPrecision::F32), ..AS_IT_IS }).unwrap();
    tensors(&folder.join("model.safetensors"))
}

/// In either form of the master, sharded or not, of all weights or of kept ones alone. Without a step
/// nothing has changed.
#[test]
fn f32_weights_stay_what_they_are_in_the_masters_of_bf16() {
    let folder = tempfile::tempdir().unwrap();
    let theirs = tensors(&gpt2().join("model.safetensors"));
    let pruned = "prune.method=magnitude prune.sparsity=0.5 prune.state=compressed train.steps=1 \
                  learning_rate.peak=1e-30 optimizer.weight_decay=0";
    for (name, more) in [
        ("whole", ""),
        ("low", "optimizer.master=low-bits"),
        ("zero", "parallel.data=2 parallel.zero=1 train.batch=2"),
        ("cut", "parallel.tensor=2"),
        ("pruned", pruned),
        ("low-pruned", &format!("{pruned} optimizer.master=low-bits")),
    ] {
        let run = folder.path().join(name);
        let settings = format!("train.precision=bf16 train.steps=0 model.context=8 {more}");
        start_from(&gpt2(), &ids().repeat(4), &run, &settings);
        let (ours, mut gone) = (exported(&run, name), 0);
        for (key, numbers) in &theirs {
            let (mut expected, got) = (f32s(numbers), f32s(&ours[key]));
            // Of the positions those that the run has.
            expected.truncate(got.len());
            for (index, (expected, got)) in expected.iter().zip(&got).enumerate() {
                if name.ends_with("pruned") && *got == 0.0 {
                    gone += 1;
                    continue;
                }
                assert_eq!(
                    expected.to_bits(),
                    got.to_bits(),
                    "{name}: {key} at {index}: {expected} and {got}"
                );
            }
        }
        assert_eq!(gone > 2_000, name.ends_with("pruned"), "{name}: {gone}");
        // The weights themselves are rounded.
        let narrow = folder.path().join(format!("{name}-narrow"));
        open(&run).export(&narrow, &AS_IT_IS).unwrap();
        let narrow = tensors(&narrow.join("model.safetensors"));
        assert!(narrow.values().all(|numbers| numbers.0 == Dtype::BF16), "{name}");
    }
}

/// No text, no score and no folder comes of them, and the exit code says why.
#[test]
fn weights_that_are_no_numbers_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let broken = folder_with(at("broken"), |all| {
        let bytes = &mut all.get_mut("transformer.h.1.mlp.c_fc.weight").unwrap().2;
        bytes[40..44].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    let trained = open(&broken);
    let (plan, device) = (trained.plan(&[]).unwrap(), Device::cpu(1).unwrap());
    let weights = trained.params(&plan, &device, &Ranks::single()).unwrap_err();
    let written = trained.export(&at("hf"), &AS_IT_IS).unwrap_err();
    write_ids(&at("ids.bin"), &ids());
    let evaluated = scored(&trained, Some(&at("ids.bin")), "", EvalWindows::default()).unwrap_err();
    for error in [weights, written, evaluated] {
        assert!(
            matches!(&error, Error::BrokenWeights { tensor, .. } if tensor == "h.1.mlp.c_fc.weight"),
            "{error}"
        );
        assert_says(&error, &["broken: h.1.mlp.c_fc.weight has a NaN or an infinity"]);
    }
    assert!(!at("hf").exists());
}
