//! What a run writes for programs is read back into the types it was written from, with nothing lost and
//! nothing more in it.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::fs;

use espalier_train::RunSummary;
use espalier_train::run::RunDir;
use espalier_train::run::metric_record::MetricRecord;
use espalier_train::run::trace::{TraceEvent, TraceFile};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::support::{tiny_cnn, tiny_gpt};

/// Reads a record, and fails where the text has a field that the type lacks, or the other way round.
fn read<T: Serialize + DeserializeOwned + Debug>(text: &str) -> T {
    let record: T = serde_json::from_str(text).unwrap_or_else(|why| panic!("{text}: {why}"));
    let value: serde_json::Value = serde_json::from_str(text).unwrap();
    assert_eq!(serde_json::to_value(&record).unwrap(), value, "{record:?}");
    record
}

#[test]
fn lines_of_metrics() {
    let early = tiny_gpt("prune.method=early-bird prune.every=2 prune.latest=5");
    let diverging = tiny_gpt("learning_rate.peak=1e38 learning_rate.warmup=0 train.max_bad_steps=99");
    let mut kinds = BTreeSet::new();
    for base in [early, diverging, tiny_cnn("")] {
        let base = base.set("train.steps=6 train.log_every=1 train.eval_every=3 checkpoint.last=false");
        let folder = tempfile::tempdir().unwrap();
        // One that diverges has no finite evaluation, and its lines are there all the same.
        let _ = base.run_at(&RunDir::at(folder.path()), &mut ());
        for text in fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap().lines() {
            kinds.insert(match read::<MetricRecord>(text) {
                MetricRecord::Step(line) => ["step", "skipped"][usize::from(line.skipped)],
                MetricRecord::Evaluation(_) => "evaluation",
                MetricRecord::Pruned(line) => {
                    assert!(line.pruned.kept < line.pruned.of && line.pruned.form == "bits", "{line:?}");
                    assert!(line.pruned.bytes[0] > 0 && !line.pruned.distances.is_empty(), "{line:?}");
                    "pruned"
                }
                MetricRecord::Observed(_) => "looked",
                MetricRecord::Diverged(line) => {
                    assert!(line.diverged.starts_with("the run diverged: the validation loss"), "{line:?}");
                    "diverged"
                }
            });
        }
    }
    assert_eq!(kinds.len(), 6, "{kinds:?}");
}

#[test]
fn the_summary_and_the_timeline() {
    let pruned = "prune.method=magnitude prune.sparsity=0.5 parallel.pipeline=2 train.micro_batches=2";
    let text = tiny_gpt("train.steps=2").set(pruned);
    for (base, ranks) in [(text, 2), (tiny_cnn("train.steps=2"), 1)] {
        let folder = tempfile::tempdir().unwrap();
        let trace = folder.path().join("trace.json");
        let run_dir = RunDir { trace: Some(trace.clone()), ..RunDir::at(folder.path().join("run")) };
        let summary = base.run_at(&run_dir, &mut ()).unwrap().summary;
        let again: RunSummary = read(&serde_json::to_string(&summary).unwrap());
        assert_eq!(again, summary);
        assert_eq!((again.steps, again.layout.pipeline), (2, ranks));

        let trace: TraceFile = read(&fs::read_to_string(trace).unwrap());
        let rows = trace.events.iter().filter(|event| matches!(event, TraceEvent::ThreadName(_))).count();
        assert_eq!(rows, ranks);
        for rank in 0..ranks {
            let passes: Vec<_> = trace.of_rank(rank).filter_map(|spent| spent.args.micro_batch).collect();
            let expected = 2 * 2 * summary.layout.micro_batches;
            assert_eq!(passes.len(), expected, "a forward and a backward each, in two steps: {passes:?}");
            assert!(trace.of_rank(rank).all(|spent| spent.ts >= 0.0 && spent.dur >= 0.0));
        }
    }
}
