//! A trained model opened to be used: the weights that its run ended with, on any layout of ranks, without its data.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use espalier_tensor::DType;
use espalier_train::data::Tokenizer;
use espalier_train::parallel::{Ranks, on_threads};
use espalier_train::run::{RunDir, run};
use espalier_train::trained::Trained;

use crate::support::{Base, prepare, tiny_cnn, tiny_gpt};

/// Trains in a folder; returns the hash of its weights.
fn train(base: &Base, folder: &Path) -> String {
    let (plan, dataset, device) = prepare(base, 2);
    let outcome = run(plan, dataset, &device, &RunDir::at(folder), &AtomicBool::new(false), &mut ());
    outcome.unwrap().summary.weights_hash.unwrap()
}

#[test]
fn a_trained_model_has_the_weights_of_its_run_and_no_state() {
    let folder = tempfile::tempdir().unwrap();
    let pruned = ["train.steps=2", "prune.method=magnitude", "prune.sparsity=0.8", "prune.at=1"];
    for (name, base) in
        [("gpt", tiny_gpt(&pruned)), ("cut", tiny_gpt(&["train.steps=2", "parallel.tensor=2"]))]
    {
        let folder = folder.path().join(name);
        let hash = train(&base, &folder);
        let trained = Trained::open(&folder, |broken| panic!("{broken}")).unwrap();
        assert!(matches!(trained.tokenizer(), Some(Tokenizer::Arithmetic)));
        let plan = trained.plan(&[]).unwrap();
        let (_, _, device) = prepare(&base, 1);
        let weights = trained.weights(&plan, &device, &Ranks::alone()).unwrap();
        assert_eq!(weights.hash().unwrap(), hash);
        assert_eq!(device.ledger().total_peak(), 4 * plan.parameters as usize);

        let two = trained.plan(&["parallel.tensor=2".into(), "train.precision=bf16".into()]).unwrap();
        on_threads(&two.mesh, &device, |ranks, device| {
            let weights = trained.weights(&two, device, &ranks)?;
            assert!(weights.named().all(|(_, tensor)| tensor.dtype() == DType::Bf16));
            assert!(
                weights
                    .named()
                    .any(|(name, part)| { name.ends_with("c_attn.weight") && part.len() == 16 * 48 / 2 })
            );
            Ok(())
        })
        .unwrap();
    }
}

/// Where the data has gone, plan.json says what it was.
#[test]
fn images_are_known_without_their_files() {
    let folder = tempfile::tempdir().unwrap();
    let hash = train(&tiny_cnn(&["train.steps=1"]), folder.path());
    let trained = Trained::open(folder.path(), |broken| panic!("{broken}")).unwrap();
    assert_eq!(trained.facts().image, Some((16, 16, 3)));
    assert!(trained.tokenizer().is_none());
    let (_, _, device) = prepare(&tiny_cnn(&[]), 1);
    let weights = trained.weights(&trained.plan(&[]).unwrap(), &device, &Ranks::alone()).unwrap();
    assert_eq!(weights.hash().unwrap(), hash);
}
