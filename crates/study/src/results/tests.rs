use super::*;
use crate::synthetic::{self, study};
use crate::trial::{TrialStatus, ValidationPoint};

fn record(trial: u32, status: TrialStatus, steps: u64) -> TrialRecord {
    let fields = vec![("learning_rate.peak".into(), 0.1 + 0.2)];
    let curve = vec![ValidationPoint { step: 16, loss: 1.0 / 3.0, error: 0.5 }];
    TrialRecord { best: Some(0.1), fields, curve, ..synthetic::record(16, 0.9, trial, status, steps) }
}

#[test]
fn lines_are_read_as_they_were_written_and_the_furthest_counts() {
    let (folder, study) = (tempfile::tempdir().unwrap(), study(&[]));
    let mut results = Results::open(folder.path(), &study).unwrap();
    assert!(fs::read_dir(folder.path()).unwrap().next().is_none(), "who has nothing to write leaves no file");
    results.append(&[record(1, TrialStatus::Paused, 32), record(2, TrialStatus::Infeasible, 16)]).unwrap();
    results.append(&[record(1, TrialStatus::Complete, 160)]).unwrap();
    let mut other = Results::open(folder.path(), &study).unwrap();
    other.append(&[record(1, TrialStatus::Paused, 64), record(3, TrialStatus::Cut, 160)]).unwrap();
    let read = Results::open(folder.path(), &study).unwrap();
    let expected = [
        record(1, TrialStatus::Complete, 160),
        record(2, TrialStatus::Infeasible, 16),
        record(3, TrialStatus::Cut, 160),
    ];
    assert_eq!(read.records().cloned().collect::<Vec<_>>(), expected);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "a file for each that writes");
    assert_eq!(results.refresh().unwrap().len(), 2);
    assert_eq!(results.refresh().unwrap(), [], "each line is heard once");
}

#[test]
fn a_torn_last_line_is_skipped_aloud_and_all_others_count() {
    let (folder, study) = (tempfile::tempdir().unwrap(), study(&[]));
    let mut results = Results::open(folder.path(), &study).unwrap();
    results.append(&[record(1, TrialStatus::Complete, 160), record(2, TrialStatus::Cut, 160)]).unwrap();
    let path = folder.path().join("trials-0001.jsonl");
    let intact = fs::read(&path).unwrap();
    // Wherever it was torn.
    for length in 1..intact.len() {
        fs::write(&path, &intact[..length]).unwrap();
        let read = Results::open(folder.path(), &study).unwrap();
        let lines = intact[..length].iter().filter(|&&byte| byte == b'\n').count();
        assert_eq!(read.records().count(), lines.saturating_sub(1));
        let torn = intact[length - 1] != b'\n';
        assert_eq!(read.skipped().len(), usize::from(torn), "{length}");
        if torn {
            let message = format!("{}: the last line is torn, and is skipped", path.display());
            assert_eq!(read.skipped(), [message]);
        }
    }
}

#[test]
fn results_of_another_study_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut results = Results::open(folder.path(), &study(&[])).unwrap();
    results.append(&[record(1, TrialStatus::Complete, 160)]).unwrap();
    let message = Results::open(folder.path(), &study(&["goal.error=0.1"])).unwrap_err().to_string();
    assert!(message.contains("trials-0001.jsonl: results of another study (synthetic "), "{message}");
    assert!(message.ends_with("give it a folder of its own with --out"), "{message}");
    Results::open(folder.path(), &study(&["search.trials=7"])).unwrap();
}

#[test]
fn what_is_no_result_is_refused_with_its_place() {
    let (folder, study) = (tempfile::tempdir().unwrap(), study(&[]));
    let mut results = Results::open(folder.path(), &study).unwrap();
    results.append(&[record(1, TrialStatus::Complete, 160)]).unwrap();
    let path = folder.path().join("trials-0001.jsonl");
    let intact = fs::read_to_string(&path).unwrap();
    let header = intact.lines().next().unwrap().len() + 1;
    // A digit that a disk has changed is another result.
    fs::write(&path, intact.replacen("160", "190", 1)).unwrap();
    let message = Results::open(folder.path(), &study).unwrap_err().to_string();
    let expected =
        format!("the line at byte {header} is no result of a study: its checksum is that of another line");
    assert!(message.ends_with(&expected), "{message}");
    // Of an older program.
    let without = |line: &str| format!("{}}}\n", line.split_once(",\"blake3\"").unwrap().0);
    let old: String = intact.lines().map(without).collect();
    fs::write(&path, &old).unwrap();
    assert_eq!(Results::open(folder.path(), &study).unwrap().records().count(), 1);
    fs::write(&path, format!("{intact}{{\"kind\":\"trial\"}}\n")).unwrap();
    let message = Results::open(folder.path(), &study).unwrap_err().to_string();
    assert!(
        message
            .contains(&format!("the line at byte {} is no result of a study: missing field", intact.len())),
        "{message}"
    );
    fs::write(&path, &intact[header..]).unwrap();
    let message = Results::open(folder.path(), &study).unwrap_err().to_string();
    assert!(message.ends_with("it does not begin as the results of a study do"), "{message}");
    fs::write(&path, old.replace("\"schema\":1", "\"schema\":9")).unwrap();
    let message = Results::open(folder.path(), &study).unwrap_err().to_string();
    assert!(message.ends_with("it has form 9, and this program writes 1"), "{message}");
}
