//! `espalier prune`, and training from a checkpoint.

use std::path::Path;
use std::process::Output;

use crate::{
    TINY, TestDir, espalier, json, json_of, refused, refused_each, said, set, stderr, succeeded, train_in,
};

fn prune(folder: &Path, arguments: &str) -> Output {
    espalier(folder, &format!("prune {arguments}"))
}

#[test]
fn weights_of_another_precision_are_taken() {
    let at = &TestDir::new();
    let run = |out: &str, more: &str| json_of(train_in(at, TINY, &format!("--out {out} --json {more}")));
    // A rate of zero leaves the weights as they were taken.
    let still = "--set optimizer.weight_decay=0 --set learning_rate.peak=1e-30";
    let bf16 = format!("--set train.precision=bf16 {still}");
    run("exact", "");
    let rounded = run("rounded", &format!("--from exact {bf16}"));
    let widened = run("widened", &format!("--from rounded {still}"));
    let again = run("again", &format!("--from widened {bf16}"));
    // Rounding what was widened changes nothing, on one rank or several.
    assert_eq!(rounded["weights_hash"], again["weights_hash"]);
    let ranks = run("ranks", &format!("--from exact --ranks 2 {bf16}"));
    assert_eq!(rounded["weights_hash"], ranks["weights_hash"]);
    assert_ne!(rounded["weights_hash"], widened["weights_hash"]);
    let loss = |of: &serde_json::Value| of["validation"]["loss"].as_f64().unwrap();
    assert!((loss(&rounded) - loss(&widened)).abs() < 0.02 * loss(&widened));
    // A run goes on in its own precision.
    refused(train_in(at, TINY, "--out exact --resume --set train.precision=bf16"), &[]);
}

#[test]
fn a_checkpoint_is_pruned_and_trains_on() {
    let at = &TestDir::new();
    succeeded(train_in(at, TINY, "--out dense --set train.log_every=1"));
    let summary = json_of(prune(at, "dense --method magnitude --sparsity 0.75 -o thin --json"));
    assert_eq!((summary["sparsity"].as_f64(), summary["steps"].as_u64()), (Some(0.75), Some(4)));
    assert!(summary["state_bytes"]["mask"].as_f64().unwrap() > 0.1);
    // What the whole model reached is not its own.
    let best = |run: &str| {
        let manifest = at.join(run).join("checkpoints/step-000004/manifest.json");
        let manifest: serde_json::Value = serde_json::from_slice(&std::fs::read(manifest).unwrap()).unwrap();
        manifest["progress"]["best_validation"].clone()
    };
    assert!(best("dense").is_f64() && best("thin").is_null(), "{} {}", best("dense"), best("thin"));

    // Whenever the run file would have pruned, a checkpoint is pruned now.
    let late = "dense --method magnitude --set prune.at=3 -o late-thin --json";
    assert_eq!(json(&prune(at, late).stdout)["steps"], 4);

    // Its state went with it: the run can be resumed, and stays pruned.
    let resumed = succeeded(train_in(
        at,
        &std::fs::read_to_string(at.join("thin/run.toml")).unwrap(),
        "--out thin --resume --json --set train.steps=8",
    ));
    assert_eq!(json(&resumed.stdout)["sparsity"], 0.75);
    assert!(
        !stderr(&resumed).contains("there is no line"),
        "its metrics begin behind step 4: {}",
        stderr(&resumed)
    );

    // Weights and masks alone can start another run, whatever its optimizer.
    let fresh = "--out other --from thin --json --set optimizer.name=sgd";
    // Without [prune], what counts as prunable are the embeddings too.
    assert!(json_of(train_in(at, TINY, fresh))["sparsity"].as_f64().unwrap() > 0.3);
    let from_dense = "--out late --from dense --json --set prune.method=random";
    let sparsity = json(&train_in(at, TINY, from_dense).stdout)["sparsity"].as_f64().unwrap();
    assert!((sparsity - 0.9).abs() < 1e-3, "{sparsity}");
}

#[test]
fn what_cannot_be_pruned_is_said_in_one_sentence() {
    let at = &TestDir::new();
    succeeded(train_in(at, TINY, "--out dense"));
    succeeded(prune(at, "dense --method magnitude --sparsity 0.9 -o thin"));
    let mistakes = r#"
        dense --method magnitude --sparsity 0.5 --set prune.sparsity=0.9 -o x => `--sparsity` sets `prune.sparsity` to 0.5, but --set sets it to 0.9
        dense --method magnitude --set prune.method=random -o x => `--method` sets `prune.method` to "magnitude", but --set sets it to "random"
        nowhere --method magnitude -o x => nowhere: there is no such folder
        dense --method magnitud -o x => did you mean `magnitude`?
        dense --method magnitude --sparsity 1.0 -o x => a number in [0, 1)
        dense --method magnitude --sparsity=-0.5 -o x => a number in [0, 1)
        dense --method magnitude --sparsity -0.5 -o x => a number in [0, 1)
        run.toml --method magnitude -o x => neither a checkpoint
        dense --method gradual -o x => which prunes during training
        dense --method lottery -o x => which prunes during training
        thin --method magnitude --sparsity 0.5 -o x => pruned already to 0.9
        dense --method magnitude -o thin => there is a run here already
    "#;
    refused_each(mistakes, |arguments| prune(at, arguments));
    assert!(!at.join("x").exists(), "nothing is left behind");
    // A mask of another shape.
    let wider = "--out y --from thin --set model.width=32";
    refused(train_in(at, TINY, wider), &["the mask of h.0.attn.c_attn.weight is not one of 3072 weights"]);
    let output = train_in(at, TINY, "--out z --from thin --set prune.method=random --set prune.sparsity=0.5");
    assert!(stderr(&output).contains("pruned already to 0.9"), "{}", stderr(&output));
}

/// The folder holds the fields of the method before, which are not those of the next.
#[test]
fn a_pruned_checkpoint_is_pruned_further_by_any_method() {
    let at = &TestDir::new();
    succeeded(train_in(at, TINY, "--out dense"));
    let first = "dense --method magnitude --sparsity 0.4 --set prune.exclude=mlp -o 0";
    succeeded(prune(at, first));
    let rounds = [("2:4", None), ("snip", Some("0.75")), ("grasp", Some("0.8")), ("random", Some("0.85"))];
    for (round, (method, sparsity)) in rounds.into_iter().enumerate() {
        let (from, to) = (round.to_string(), (round + 1).to_string());
        let sparsity_asked = sparsity.map_or(String::new(), |sparsity| format!("--sparsity {sparsity}"));
        let pruned = json_of(prune(at, &format!("{from} --method {method} -o {to} --json {sparsity_asked}")));
        let found = pruned["sparsity"].as_f64().unwrap();
        match sparsity {
            Some(asked) => assert!((found - asked.parse::<f64>().unwrap()).abs() < 1e-3, "{method}: {found}"),
            // Two of four, less those of them that were gone.
            None => assert!((0.5..0.75).contains(&found), "{method}: {found}"),
        }
        let text = std::fs::read_to_string(at.join(&to).join("run.toml")).unwrap();
        assert!(text.contains("exclude = [\"mlp\"]"), "the candidates are the same: {text}");
    }
}

/// One rank prunes what many have trained, and many train on.
#[test]
fn the_checkpoint_of_a_pipeline_is_pruned_too() {
    let at = &TestDir::new();
    let ranks = "train.micro_batches=2 parallel.pipeline=2 parallel.data=2 parallel.zero=true";
    succeeded(train_in(at, TINY, &format!("--out dense {}", set(ranks))));
    for method in ["magnitude", "snip", "grasp"] {
        let found = json_of(prune(at, &format!("dense --method {method} --sparsity 0.8 -o {method} --json")));
        assert!((found["sparsity"].as_f64().unwrap() - 0.8).abs() < 1e-3, "{method}");
        let run_file = std::fs::read_to_string(at.join(method).join("run.toml")).unwrap();
        let resume = format!("--out {method} --resume --json --set train.steps=6");
        let resumed = json_of(train_in(at, &run_file, &resume));
        assert_eq!(resumed["layout"]["pipeline"], 2, "{method}: it is still the same run");
    }
}

#[test]
fn what_pruning_did_is_said() {
    let at = &TestDir::new();
    succeeded(train_in(at, TINY, "--out dense"));
    said(
        prune(at, "dense --method magnitude --sparsity 0.9999 -o none"),
        &["mask stored as index", "warning: nothing is left of h.0.attn.c_attn.weight"],
    );

    // What is gone stays gone, and whoever asks for less hears of it.
    succeeded(prune(at, "dense --method magnitude -o thin"));
    let run_file = std::fs::read_to_string(at.join("thin/run.toml")).unwrap();
    let less = "--out thin --resume --set train.steps=5 --set prune.sparsity=0.5 --allow prune";
    said(train_in(at, &run_file, less), &["warning: the checkpoint is pruned to 0.9"]);

    // State of kept weights is no state of all.
    let dense = "--out thin --resume --set train.steps=6 --allow prune";
    let words = "is state of kept weights only there, and of all weights in this run";
    refused(train_in(at, TINY, dense), &[words]);
}

/// On one rank, and on two stages of which rank 0 does not hold them all; resumed too.
#[test]
fn layers_that_skip_zeros_are_counted() {
    let at = &TestDir::new();
    let sparse = "--set prune.method=magnitude --set prune.kernels=sparse --set model.layers=2";
    for (out, layout) in [("one", ""), ("two", "--set parallel.pipeline=2")] {
        said(
            train_in(at, TINY, &format!("{sparse} {layout} --out {out}")),
            &[", 8 linear layers with sparse kernels; "],
        );
        let more = format!("{sparse} {layout} --out {out} --resume --set train.steps=6");
        succeeded(train_in(at, TINY, &more));
    }
}
