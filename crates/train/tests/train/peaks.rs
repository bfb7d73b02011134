//! The peak of a model's own bytes before and after pruning: those of dense training where pruning comes later.

use crate::support::{Base, tiny_gpt};

fn peaks(base: &Base) -> (espalier_train::StatePeak, espalier_train::RunSummary) {
    let summary = base.run();
    (summary.state_peak, summary)
}

/// Of methods that prune before the first step, dense state never exists; of the others it does until they prune.
#[test]
fn peaks_before_and_after_pruning_are_those_predicted() {
    let base = tiny_gpt("prune.sparsity=0.75 model.tied=false train.micro_batches=2 train.steps=12");
    for precision in ["f32", "bf16"] {
        let base = base.set(format!("train.precision={precision}"));
        let dense = tiny_gpt("model.tied=false train.micro_batches=2 train.steps=12");
        let dense = peaks(&dense.set(format!("train.precision={precision}"))).0;
        assert_eq!((dense.before, dense.pruned_after), (dense.after, None));
        for (method, set, pruned_after) in [
            ("snip", "prune.samples=8", 0),
            ("grasp", "prune.samples=8", 0),
            ("rigl", "prune.every=3", 0),
            ("magnitude", "prune.at=5 prune.scope=layer", 5),
            ("gradual", "prune.every=2 prune.end=8 prune.scope=layer", 8),
            ("elsa", "prune.every=2 prune.end=8", 8),
            ("early-bird", "prune.every=2 prune.latest=6 prune.scope=layer", 6),
        ] {
            let base = base.set(format!("prune.method={method}")).set(set);
            let (peak, summary) = peaks(&base);
            let what = format!("{method} {precision}");
            assert_eq!(peak.pruned_after, Some(pruned_after), "{what}");
            for bytes in [peak.before, peak.after] {
                assert_eq!(bytes.predicted, bytes.measured.map(|bytes| bytes as u64), "{what}: {peak:?}");
            }
            assert!(peak.after.measured < dense.after.measured, "{what}: {peak:?}");
            match pruned_after {
                0 => assert_eq!(peak.before, peak.after, "{what}"),
                _ => assert!(peak.before.measured >= dense.before.measured, "{what}: {peak:?}"),
            }
            let scoring = summary.memory["scoring"];
            assert_eq!(scoring.predicted.unwrap(), scoring.measured.unwrap() as u64, "{what}");
            assert_eq!(peak.scoring.is_some(), ["snip", "grasp", "rigl"].contains(&method), "{what}");
        }
    }
}
