//! `espalier measure`: numbers of a checkpoint, and what cannot be measured.

use std::path::Path;
use std::process::Output;

use crate::{TINY, TestDir, espalier, json, refused_at_last, stderr, succeeded, train_in};

fn measure(folder: &Path, arguments: &str) -> Output {
    espalier(folder, &format!("measure {arguments}"))
}

#[test]
fn a_checkpoint_has_a_sharpness_an_eigenvalue_a_spectrum_and_a_critical_batch() {
    let at = &TestDir::new();
    let pruned = "--set prune.method=magnitude --set prune.sparsity=0.5 --set train.steps=20";
    succeeded(train_in(at, TINY, &format!("--out thin {pruned}")));

    let output = succeeded(measure(at, "thin --samples 16 --json"));
    let usual = json(&output.stdout);
    assert_eq!((usual["step"].as_u64(), usual["samples"].as_u64()), (Some(20), Some(16)));
    let number = |path: &str| {
        usual.pointer(path).and_then(|x| x.as_f64()).unwrap_or_else(|| panic!("{path}: {usual}"))
    };
    assert!(number("/loss") > 0.0 && number("/gradient_norm") > 0.0 && number("/noise/variance") > 0.0);
    assert!(number("/sharpness/value") > 0.0 && number("/sharpness/highest") > number("/loss"));
    assert!(number("/eigenvalue/value") > 0.0);
    // Weights that are gone are no dimensions of the space: half of the layer's 3072, and of the head's
    // nothing, which is tied.
    let all = json(&train_in(at, TINY, "--dry-run --json").stdout)["parameters"].as_u64().unwrap();
    assert_eq!(number("/dimension") as u64, all - 1536);
    assert!(usual["spectrum"].is_null());
    assert_eq!(
        stderr(&output).lines().filter(|line| line.starts_with("sharpness")).count(),
        1,
        "{}",
        stderr(&output)
    );

    let output = measure(at, "thin --samples 16 --spectrum --json");
    let found = json(&output.stdout);
    assert!(found["sharpness"].is_null() && found["noise"].is_null(), "only what was asked for: {found}");
    let largest = found["spectrum"]["largest"].as_f64().unwrap();
    assert!((largest / number("/eigenvalue/value") - 1.0).abs() < 0.05, "{largest}, and {usual}");
}

#[test]
fn what_cannot_be_measured_is_said_in_one_sentence() {
    let at = &TestDir::new();
    succeeded(train_in(at, TINY, "--out dense"));
    let cases: [(&str, &str); 7] = [
        ("nowhere", "nowhere: there is no such folder"),
        ("dense --samples 100000", "`samples` is 100000, and there are"),
        ("dense --samples 6 --noise", "noise is measured between micro-batches of 4: it must be 8 or more"),
        ("dense --epsilon 0", "`--epsilon` is 0, and must be in (0, 1]"),
        ("dense --epsilon -1", "`--epsilon` is -1, and must be in (0, 1]"),
        ("dense --eigenvalue --epsilon 0.1", "`--epsilon` belongs to --sharpness"),
        ("dense --data nowhere.bin", "`data.path`"),
    ];
    for (arguments, expected) in cases {
        let output = measure(at, arguments);
        // What it has said by then is where it is and how high the loss is there.
        assert!(stderr(&output).lines().count() <= 3, "{arguments:?}: {}", stderr(&output));
        refused_at_last(output, &[expected]);
    }
}
