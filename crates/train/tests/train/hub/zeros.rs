//! Zeros of a folder that was pruned and exported: trained on, they are kept where the run file says so, and
//! reported where it does not.

use std::path::{Path, PathBuf};

use espalier_train::hub::{ExportOptions, ExportPrecision};

use super::{AS_IT_IS, folder_with, gpt2, ids, open, started, tensors};
use crate::support::{RecordingObserver, assert_predicted, assert_says, tiny_gpt};

/// The fixture without three of four weights of its layers: 4,608, of 7,040 with the tables of tokens and
/// positions, which can be pruned too.
fn pruned(at: PathBuf) -> PathBuf {
    folder_with(at, |all| {
        for (name, (_, shape, bytes)) in all {
            if name.contains(".h.") && shape.len() == 2 {
                bytes
                    .chunks_exact_mut(4)
                    .enumerate()
                    .filter(|(i, _)| i % 4 > 0)
                    .for_each(|(_, four)| four.fill(0));
            }
        }
    })
}

/// Prunable weights of a folder that are zero.
fn zeros(folder: &Path) -> usize {
    let all = tensors(&folder.join("model.safetensors"));
    let prunable = all.iter().filter(|(name, (_, shape, _))| name.contains(".h.") && shape.len() == 2);
    prunable.map(|(_, (_, _, bytes))| bytes.chunks_exact(4).filter(|four| **four == [0; 4]).count()).sum()
}

#[test]
fn zeros_of_a_pruned_folder_can_be_kept() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let from = pruned(at("from"));
    let all = zeros(&from);
    let train = |name: &str, settings: &str| {
        let mut observer = RecordingObserver::default();
        let summary = started(&from, &ids(), &at(name), settings, &mut observer).unwrap();
        let back = at(&format!("{name}-hf"));
        open(&at(name)).export(&back, &AS_IT_IS).unwrap();
        (
            summary,
            zeros(&back),
            observer.notes.into_iter().filter(|note| note.contains("are zero")).collect::<Vec<_>>(),
        )
    };
    let (_, left, notes) = train("lost", "");
    assert!(left < all / 10, "{left} of {all}");
    assert_eq!(
        notes,
        [
            "65 % of the prunable weights that it starts from are zero, and training changes them: `prune.method` = \"keep\" keeps these zeros"
        ]
    );
    for (name, layout) in [
        ("kept", ""),
        ("cut", "parallel.tensor=2"),
        ("staged", "parallel.pipeline=2"),
        ("shared", "parallel.data=2 parallel.zero=1 train.batch=2"),
    ] {
        let (summary, left, notes) = train(name, &format!("train.keep_zeros=true {layout}"));
        assert_eq!((left, notes.len()), (all, 0), "{name}");
        assert!((summary.sparsity - 4608.0 / 7040.0).abs() < 1e-9, "{name}: {}", summary.sparsity);
    }
    // With nothing to start from there are none.
    let run = tiny_gpt("train.keep_zeros=true");
    let error = run.run_observed().0.unwrap_err().to_string();
    assert!(error.starts_with("`train.keep_zeros` has no effect without --from"), "{error}");
}

/// Whatever form of state and weights, on every layout: zeros stay, no other weight goes, and the bits are
/// those of training all weights under the mask.
#[test]
fn what_was_pruned_is_kept_and_has_no_state() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let from = pruned(at("from"));
    let train = |name: &str, settings: &str| {
        let mut observer = RecordingObserver::default();
        let settings = format!("train.steps=3 optimizer.name=adamw {settings}");
        let summary = started(&from, &ids().repeat(8), &at(name), &settings, &mut observer).unwrap();
        let back = at(&format!("{name}-hf"));
        let wide = ExportOptions { dtype: Some(ExportPrecision::F32), ..AS_IT_IS };
        open(&at(name)).export(&back, &wide).unwrap();
        assert_eq!(zeros(&back), zeros(&from), "{name}");
        (summary, observer.prunings)
    };
    // Candidates are the weights of layers: 6,144, of which 1,536 are left.
    let (masked, _) = train("masked", "train.keep_zeros=true");
    let keep = "prune.method=keep";
    let forms = [
        ("dense", "prune.state=dense"),
        ("compressed", "prune.state=compressed"),
        ("weights", "prune.weights=compressed"),
    ];
    for (name, form) in forms {
        let (summary, reports) = train(name, &format!("{keep} {form}"));
        assert_eq!(summary.weights_hash, masked.weights_hash, "{name}");
        assert_eq!(reports, [(1, 1536, 6144)], "{name}: once, before the first step");
        assert_eq!((summary.kept, summary.sparsity), (1536, 0.75), "{name}");
        let state = summary.state_bytes_per_parameter;
        assert!(if name == "dense" { state > 16.0 } else { state < 9.0 }, "{name}: {state}");
        // Weights that rest compressed are read under their masks: never all of them dense.
        assert_predicted(&summary, &["weights"], name);
    }
    for (name, layout) in [
        ("replicas", "parallel.data=2 train.batch=2"),
        ("zero", "parallel.data=2 parallel.zero=1 train.batch=2"),
        ("zero2", "parallel.data=2 parallel.zero=2 train.batch=2 prune.weights=compressed"),
        ("zero3", "parallel.data=2 parallel.zero=3 train.batch=2"),
        ("cut", "parallel.tensor=2 prune.weights=compressed"),
        ("staged", "parallel.pipeline=2 train.batch=2 train.micro_batches=2"),
        ("narrow", "train.precision=bf16"),
    ] {
        let (summary, reports) = train(name, &format!("{keep} {layout}"));
        assert_eq!((summary.kept, reports), (1536, vec![(1, 1536, 6144)]), "{name}");
    }
    // A run that is resumed has its masks in the checkpoint, and its sparsity in run.toml.
    let text = std::fs::read_to_string(at("compressed").join("run.toml")).unwrap();
    assert_says(&text, &["method = \"keep\"", "sparsity = 0.75"]);
}

/// Each in one sentence.
#[test]
fn zeros_that_are_not_there_cannot_be_kept() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let refused = |from: &Path, settings: &str| {
        started(from, &ids(), &at("run"), settings, &mut ()).unwrap_err().to_string()
    };
    let none = "`prune.method` is \"keep\", and none of the prunable weights that the run starts from is zero: it is not pruned";
    assert_eq!(refused(&gpt2(), "prune.method=keep"), none);
    assert_eq!(refused(&gpt2(), "prune.method=keep prune.sparsity=0.5"), none);
    let from = pruned(at("from"));
    // All that may be pruned is dense.
    assert_eq!(refused(&from, "prune.method=keep prune.embeddings=true prune.exclude=h."), none);
    let other = refused(&from, "prune.method=keep prune.sparsity=0.5");
    assert_eq!(
        other,
        "`prune.sparsity` is 0.5, and 0.7500 of the prunable weights that the run starts from are zero: leave it out"
    );
    assert!(!at("run").exists(), "nothing is left of a run that cannot start");
    let run = tiny_gpt("prune.method=keep prune.sparsity=0.5");
    let error = run.run_observed().0.unwrap_err().to_string();
    assert!(error.starts_with("`prune.method` has no effect without --from"), "{error}");
}
