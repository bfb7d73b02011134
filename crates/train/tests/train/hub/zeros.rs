//! Zeros of a folder that was pruned and exported: trained on, they are kept where the run file says so, and
//! reported where it does not.

use std::path::{Path, PathBuf};

use espalier_train::run::Observer;

use super::{AS_IT_IS, folder_with, ids, open, started, tensors};

/// What is reported on the way.
#[derive(Default)]
struct Notes(Vec<String>);

impl Observer for Notes {
    fn note(&mut self, text: &str) {
        self.0.push(text.to_owned());
    }
}

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
    let train = |name: &str, settings: &[&str]| {
        let mut notes = Notes::default();
        let settings: Vec<_> = settings.iter().map(|&text| text.into()).collect();
        let summary = started(&from, &ids(), &at(name), &settings, &mut notes).unwrap();
        let back = at(&format!("{name}-hf"));
        open(&at(name)).export(&back, &AS_IT_IS).unwrap();
        (
            summary,
            zeros(&back),
            notes.0.into_iter().filter(|note| note.contains("are zero")).collect::<Vec<_>>(),
        )
    };
    let (_, left, notes) = train("lost", &[]);
    assert!(left < all / 10, "{left} of {all}");
    assert_eq!(
        notes,
        [
            "65 % of the prunable weights that it starts from are zero, and training changes them: `train.keep_zeros` = true keeps these zeros"
        ]
    );
    for (name, layout) in [
        ("kept", &[][..]),
        ("cut", &["parallel.tensor=2"]),
        ("staged", &["parallel.pipeline=2"]),
        ("shared", &["parallel.data=2", "parallel.zero=1", "train.batch=2"]),
    ] {
        let (summary, left, notes) = train(name, &[&["train.keep_zeros=true"], layout].concat());
        assert_eq!((left, notes.len()), (all, 0), "{name}");
        assert!((summary.sparsity - 4608.0 / 7040.0).abs() < 1e-9, "{name}: {}", summary.sparsity);
    }
    // With nothing to start from there are none.
    let run = crate::support::tiny_gpt(&["train.keep_zeros=true"]);
    let error = run.run_observed().0.unwrap_err().to_string();
    assert!(error.starts_with("`train.keep_zeros` has no effect without --from"), "{error}");
}
