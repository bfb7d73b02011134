//! A trained model opened to be used: the weights that its run ended with, on any layout of ranks, without
//! its data.

use std::path::Path;

use espalier_data::Tokenizer;
use espalier_tensor::DType;
use espalier_train::parallel::{Ranks, on_threads};
use espalier_train::run::RunDir;
use espalier_train::trained::EvalWindows;

use crate::support::{hash, open, prepare, scored, settings, tiny_cnn, tiny_gpt};

#[test]
fn a_trained_model_has_the_weights_of_its_run_and_no_state() {
    let folder = tempfile::tempdir().unwrap();
    let pruned = "train.steps=2 prune.method=magnitude prune.sparsity=0.8 prune.at=1";
    for (name, base) in [("gpt", tiny_gpt(pruned)), ("cut", tiny_gpt("train.steps=2 parallel.tensor=2"))] {
        let folder = folder.path().join(name);
        let hash = hash(base.run_in(&folder));
        let trained = open(&folder);
        assert!(matches!(trained.tokenizer(), Some(Tokenizer::Arithmetic)));
        let plan = trained.plan(&[]).unwrap();
        let (_, _, device) = prepare(&base, 1);
        let weights = trained.params(&plan, &device, &Ranks::single()).unwrap();
        assert_eq!(weights.hash().unwrap(), hash);
        assert_eq!(device.ledger().total_peak(), 4 * plan.parameters as usize);

        let two = trained.plan(&settings("parallel.tensor=2 train.precision=bf16")).unwrap();
        on_threads(&two.mesh, &device, |ranks, device| {
            let weights = trained.params(&two, device, &ranks)?;
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
    let hash = hash(tiny_cnn("train.steps=1").run_in(folder.path()));
    let trained = open(folder.path());
    assert_eq!(trained.facts().image, Some((16, 16, 3)));
    assert!(trained.tokenizer().is_none());
    let (_, _, device) = prepare(&tiny_cnn(""), 1);
    let weights = trained.params(&trained.plan(&[]).unwrap(), &device, &Ranks::single()).unwrap();
    assert_eq!(weights.hash().unwrap(), hash);
}

/// On one rank, on ranks that share layers, stages or samples, in the form of a checkpoint or of ranks'
/// shards: the same numbers.
#[test]
fn a_score_is_the_same_on_every_layout() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    hash(tiny_gpt("train.steps=2 model.context=24 parallel.tensor=2").run_in(&at("run")));
    std::fs::write(at("sums.txt"), "12+30=42\n7-9=-2\n".repeat(40)).unwrap();
    let trained = open(&at("run"));
    let score = |layout: &str, path: Option<&Path>, samples| {
        scored(&trained, path, layout, EvalWindows { samples, stride: None }).unwrap()
    };
    let text = at("sums.txt");
    let one = score("", Some(&text), None);
    // The last window is not filled by the text: its 640 tokens are all predicted but the first.
    assert_eq!((one.samples, one.tokens, one.accuracy), (27, Some(639), None));
    // Every token is a byte.
    assert!((one.bits_per_byte.unwrap() - one.loss / std::f64::consts::LN_2).abs() < 1e-12);
    assert!((one.perplexity.unwrap() - one.loss.exp()).abs() < 1e-12);
    for layout in
        ["parallel.tensor=2", "parallel.data=2", "parallel.pipeline=2", "parallel.data=2 parallel.pipeline=2"]
    {
        let other = score(layout, Some(&text), None);
        assert!((other.loss - one.loss).abs() < 1e-5, "{layout}: {} and {}", other.loss, one.loss);
        assert_eq!(other.tokens, one.tokens);
    }
    assert_eq!(score("", Some(&text), Some(5)).samples, 5);
    assert_eq!(score("model.context=12", Some(&text), None).tokens, Some(639));
    // A text that is shorter than a window is one, and worth what it is in a window of its own length.
    std::fs::write(at("short.txt"), "12+30=42\n7-9=").unwrap();
    let (short, exact) =
        (score("", Some(&at("short.txt")), None), score("model.context=12", Some(&at("short.txt")), None));
    assert_eq!((short.samples, short.tokens, exact.tokens), (1, Some(12), Some(12)));
    assert!((short.loss - exact.loss).abs() < 1e-6, "{} and {}", short.loss, exact.loss);
    // Without a path: what the run held out, and what it said of that at its end.
    let held_out = score("", None, Some(4)).loss;
    let validation = last_validation(&at("run"));
    assert!((held_out - validation).abs() < 1e-5, "{held_out} and {validation}");
}

/// The last validation loss that a run wrote down.
fn last_validation(run: &Path) -> f64 {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.filter_map(|line| line["validation"]["loss"].as_f64()).next_back().unwrap()
}

/// It measures what it starts from, and leaves a checkpoint of just that.
#[test]
fn a_run_of_no_steps_evaluates_and_saves() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let trained = hash(tiny_gpt("train.steps=3").run_in(&at("trained")));
    let none = tiny_gpt("train.steps=0");
    let run_dir = RunDir { from: Some(at("trained")), ..RunDir::at(at("none")) };
    let summary = none.run_at(&run_dir, &mut ()).unwrap().summary;
    let loss = summary.validation.loss.unwrap();
    assert_eq!((summary.steps, summary.loss), (0, None));
    assert_eq!(hash(summary), trained);
    assert!((loss - last_validation(&at("trained"))).abs() < 1e-6);
    assert!(at("none/checkpoints/step-000000/model.safetensors").is_file());
    // Going on, there is nothing to do.
    assert_eq!(none.run_in(&at("none")).validation.loss, None);
    let unheld = tiny_gpt("train.steps=0 data.validation=0 train.eval_samples=0");
    unheld.run_in(&at("unheld"));
}
