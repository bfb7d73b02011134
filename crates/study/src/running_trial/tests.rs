use std::fs;
use std::thread;

use espalier_data::Dataset;
use espalier_plan::RunFile;
use espalier_tensor::Device;
use espalier_train::run::{Launch, RunDir, run};

use super::*;
use crate::synthetic;
use crate::trial::{TrialRecord, TrialStatus};

/// What a search moves between threads, and shares with them.
const _: () = {
    const fn sent<T: Send>() {}
    const fn shared<T: Send + Sync>() {}
    sent::<RunningTrial>();
    shared::<Workload>();
};

/// The study's small network on drawn shapes, pruned as the study prunes.
const RUN: &str = r#"
    seed = 3
    [model]
    name = "simple-cnn"
    init = "fan-in"
    [data]
    kind = "shapes"
    count = 120
    size = 16
    validation = 0.25
    [train]
    steps = 12
    [optimizer]
    name = "momentum"
    [learning_rate]
    schedule = "constant"
    [prune]
    method = "snip"
    samples = 0
    biases = true
"#;

fn workload() -> Workload {
    Workload::open(&RunFile::parse(RUN, &[]).unwrap(), &Device::cpu(1).unwrap()).unwrap()
}

fn settings(batch: usize, sparsity: f64, peak: f64) -> TrialSettings {
    TrialSettings { batch, sparsity, seed: 3, fields: vec![("learning_rate.peak".into(), peak)] }
}

/// All steps with checks after some of them, and the weights that came of it.
fn take(workload: &Workload, settings: &TrialSettings, check_steps: &[u64]) -> (Vec<TrialCheck>, String) {
    let mut trial = RunningTrial::begin(workload, settings).unwrap();
    let checks = check_steps.iter().map(|step| trial.advance(*step).unwrap()).collect();
    (checks, trial.trainer().params().hash().unwrap())
}

/// Successive halving keeps trials and goes on with some of them.
#[test]
fn a_trial_that_is_paused_is_the_trial_that_is_not() {
    let workload = workload();
    for sparsity in [0.0, 0.9] {
        let settings = settings(32, sparsity, 0.05);
        let (unpaused, weights) = take(&workload, &settings, &[12]);
        let (paused, again) = take(&workload, &settings, &[0, 3, 3, 4, 12]);
        assert_eq!((paused[4], again), (unpaused[0], weights));
        assert_eq!(paused[1], paused[2], "a look changes nothing");
        assert!(paused[0].loss != unpaused[0].loss, "it learns");
    }
}

/// What a seed is scored by is made once for all batches, sparsities and rates; masks and weights are those of a
/// trial that scores by itself.
#[test]
fn trials_of_a_seed_share_what_they_are_scored_by() {
    let shared = workload();
    let seeds = |workload: &Workload| {
        let settings = settings(8, 0.5, 0.1);
        workload.scores(&settings, &workload.plan(&settings).unwrap()).shared.len()
    };
    for (batch, sparsity, peak) in [(8, 0.9, 0.05), (8, 0.5, 0.05), (32, 0.9, 0.02)] {
        let settings = settings(batch, sparsity, peak);
        let alone = take(&workload(), &settings, &[3]);
        assert_eq!(take(&shared, &settings, &[3]), alone);
        assert_eq!(seeds(&shared), 1);
    }
    let other = TrialSettings { seed: 4, ..settings(8, 0.9, 0.05) };
    assert_eq!(take(&shared, &other, &[3]), take(&workload(), &other, &[3]));
    assert_eq!(seeds(&shared), 2);
}

/// A study that was killed resumes its paused trials, dense and pruned, to the bit; with none that
/// is damaged, of another trial or of another step than its record says.
#[test]
fn a_trial_that_was_saved_is_the_trial_that_was_not() {
    let workload = workload();
    for sparsity in [0.0, 0.9] {
        let settings = settings(32, sparsity, 0.05);
        let (unpaused, weights) = take(&workload, &settings, &[2, 4, 12]);
        let folder = tempfile::tempdir().unwrap();
        let mut trial = RunningTrial::begin(&workload, &settings).unwrap();
        let paused = synthetic::record(32, sparsity, 3, TrialStatus::Paused, 0);
        let mut record = TrialRecord { fields: settings.fields.clone(), ..paused };
        for step in [2, 4] {
            record.steps = trial.advance(step).unwrap().step;
            trial.save(folder.path(), &record).unwrap();
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "one checkpoint");
        }
        drop(trial);
        let (mut again, known) = RunningTrial::resume(&workload, &settings, folder.path()).unwrap().unwrap();
        assert_eq!(known, record);
        assert_eq!(again.advance(4).unwrap(), unpaused[1]);
        assert_eq!(again.advance(12).unwrap(), unpaused[2]);
        assert_eq!(again.trainer().params().hash().unwrap(), weights);

        let none = |settings: &TrialSettings| {
            RunningTrial::resume(&workload, settings, folder.path()).unwrap().is_none()
        };
        assert!(none(&TrialSettings {
            fields: vec![("learning_rate.peak".into(), 0.04)],
            ..settings.clone()
        }));
        assert!(none(&TrialSettings { seed: 4, ..settings.clone() }));
        let checkpoint = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
        let file = checkpoint.join("optimizer.safetensors");
        let bytes = fs::read(&file).unwrap();
        fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
        assert!(none(&settings), "damaged");
    }
}

/// No second training loop: the trial's own run file, given to `espalier train`, ends with the same weights
/// and the same error.
#[test]
fn a_trial_is_what_train_makes_of_its_run_file() {
    let (workload, settings) = (workload(), settings(8, 0.9, 0.05));
    let (checks, weights) = take(&workload, &settings, &[5, 12]);
    let text = workload.plan(&settings).unwrap().record().to_toml().unwrap();
    let file = RunFile::parse(&text, &[]).unwrap();
    let dataset = Dataset::open(&file).unwrap();
    let plan = espalier_plan::Plan::new(file, dataset.facts()).unwrap();
    let (device, folder) = (Device::cpu(2).unwrap(), tempfile::tempdir().unwrap());
    let run_dir = RunDir::at(folder.path());
    let summary = run(plan, dataset, &device, &run_dir, &Launch::default(), &mut ()).unwrap().summary;
    assert_eq!(summary.validation.loss, Some(checks[1].loss));
    assert_eq!(summary.validation.accuracy.map(|right| 1.0 - right), Some(checks[1].error));
    let mut trial = RunningTrial::begin(&workload, &settings).unwrap();
    trial.advance(12).unwrap();
    let digests = trial
        .trainer()
        .params()
        .digests(|param| trial.trainer().model_parallel().digest(param.id(), &param.dense()?))
        .unwrap();
    assert_eq!(summary.weights_hash, Some(espalier_nn::weights::hash_of(&digests)));
    assert_eq!(trial.trainer().params().hash().unwrap(), weights);
}

/// On one device, whose thread they take in turn, and on devices of their own.
#[test]
fn trials_beside_each_other_do_not_disturb_each_other() {
    let shared = workload();
    let all = [settings(8, 0.0, 0.05), settings(4, 0.9, 0.02), settings(16, 0.5, 0.01)];
    let check_steps = [4, 12];
    let sequential: Vec<_> = all.iter().map(|settings| take(&shared, settings, &check_steps)).collect();
    for own_device in [false, true] {
        let concurrent: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = all
                .iter()
                .map(|settings| {
                    let workload =
                        if own_device { shared.on_device(&Device::cpu(1).unwrap()) } else { shared.clone() };
                    scope.spawn(move || take(&workload, settings, &check_steps))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(sequential, concurrent, "devices of their own: {own_device}");
    }
}

/// 16 x 16 images of three colours: 2432 + 51,264 + 650 parameters, of which 106 are biases. These start at
/// 0, so that nothing depends on them at first, and go before any weight that something depends on.
#[test]
fn sparsity_counts_biases_and_takes_them_first() {
    let mut trial = RunningTrial::begin(&workload(), &settings(8, 0.9, 0.05)).unwrap();
    trial.advance(1).unwrap();
    let trainer = trial.trainer();
    assert_eq!(trainer.kept(), (5435, 54_346));
    let biases = trainer.kept_by_layer().into_iter().filter(|layer| layer.name.ends_with(".bias"));
    assert_eq!(biases.map(|layer| (layer.kept, layer.of)).collect::<Vec<_>>(), [(0, 32), (0, 64), (0, 10)]);
}

/// Without a wasted step, and for good.
#[test]
fn a_rate_that_is_far_too_large_is_seen_at_the_step_that_diverges() {
    let mut trial = RunningTrial::begin(&workload(), &settings(8, 0.0, 1e30)).unwrap();
    let check = trial.advance(12).unwrap();
    assert!(check.diverged && check.error == 1.0 && !check.loss.is_finite(), "{check:?}");
    // The first step is finite and throws the weights far out; the second has no finite loss.
    assert_eq!((check.step, trial.trainer().progress().step), (2, 2));
    assert_eq!(format!("{:?}", trial.advance(12).unwrap()), format!("{check:?}"));
}

/// Whether a trial is there yet is known exactly, from fewer samples as long as it is far away.
#[test]
fn a_goal_leaves_samples_out_and_decides_as_all_of_them_would() {
    let workload = workload();
    let settings = settings(8, 0.0, 0.05);
    let (full, weights) = take(&workload, &settings, &[4, 12]);
    let goals = [0.0, full[1].error - 1e-9, full[1].error, 1.0];
    for goal in goals {
        let (checks, same) = take(&workload.with_goal(goal), &settings, &[4, 12]);
        for (check, full) in checks.iter().zip(&full) {
            assert_eq!(check.error <= goal, full.error <= goal, "{goal}: {check:?} {full:?}");
            assert!(check.error > goal || check == full, "{goal}: {check:?} {full:?}");
        }
        assert_eq!(same, weights);
    }
}

/// Whatever order samples are seen in, and however few, the answer is that of all; and training is the same.
#[test]
fn a_trial_asked_for_its_goal_alone_reaches_it_at_the_same_step() {
    let (workload, settings) = (workload(), settings(32, 0.5, 0.1));
    let steps: Vec<u64> = (1..=12).collect();
    let (full, weights) = take(&workload, &settings, &steps);
    let mut errors: Vec<f64> = full.iter().map(|check| check.error).collect();
    errors.sort_by(f64::total_cmp);
    errors.dedup();
    assert!(errors.len() > 3, "it learns: {errors:?}");
    for goal in errors {
        let mut trial = RunningTrial::begin(&workload.with_goal(goal), &settings).unwrap();
        for (step, full) in steps.iter().zip(&full) {
            let found = trial.advance_to_goal(*step).unwrap();
            assert_eq!(found, (full.error <= goal).then_some(*full), "{goal}");
        }
        assert_eq!(trial.trainer().params().hash().unwrap(), weights);
    }
}

#[test]
fn what_a_trial_cannot_be_is_refused() {
    let refused = |overrides: &[&str]| {
        let overrides: Vec<_> = overrides.iter().map(|&text| text.into()).collect();
        let run = RunFile::parse(RUN, &overrides).unwrap();
        let workload = Workload::open(&run, &Device::cpu(1).unwrap());
        workload.and_then(|workload| workload.plan(&settings(8, 0.5, 0.05))).unwrap_err().to_string()
    };
    assert!(refused(&["data.validation=0"]).contains("data.validation"));
    assert!(refused(&["parallel.data=2"]).contains("ranks"));
    let workload = workload();
    let misspelt =
        TrialSettings { fields: vec![("learning_rate.pek".into(), 0.1)], ..settings(8, 0.5, 0.05) };
    assert!(workload.plan(&misspelt).unwrap_err().to_string().contains("peak"));
    let mut trial = RunningTrial::begin(&workload, &settings(8, 0.0, 0.05)).unwrap();
    assert!(trial.advance(13).unwrap_err().to_string().contains("train.steps"));
    trial.advance(2).unwrap();
    assert!(trial.advance(1).is_err(), "there is no way back");
}

/// A network that is pruned as it learns has reached nothing while it has more weights than its cell asks for.
#[test]
fn a_trial_says_when_it_is_as_sparse_as_asked() {
    let run = RUN.replace(
        "method = \"snip\"\n    samples = 0\n    biases = true",
        "method = \"gradual\"\n    every = 2\n    end = 6",
    );
    let workload = Workload::open(&RunFile::parse(&run, &[]).unwrap(), &Device::cpu(1).unwrap()).unwrap();
    let mut trial = RunningTrial::begin(&workload, &settings(8, 0.9, 0.01)).unwrap();
    for (step, expected) in [(2, false), (6, false), (7, true), (12, true)] {
        let check = trial.advance(step).unwrap();
        let sparse = trial.trainer().sparsity();
        assert_eq!((check.pruned, sparse > 0.89), (expected, expected), "step {step}: {sparse}");
    }
    assert!(RunningTrial::begin(&workload, &settings(8, 0.0, 0.01)).unwrap().advance(1).unwrap().pruned);
}
