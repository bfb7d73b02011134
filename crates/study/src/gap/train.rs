//! Training the arms of a study, and what each came to.

use std::path::Path;
use std::sync::Arc;

use espalier_data::Dataset;
use espalier_plan::{Plan, RunFile};
use espalier_tensor::Device;
use espalier_train::measure::{LossSamples, LossSurface, Neighbourhood, largest_eigenvalue, sharpness};
use espalier_train::parallel::{Ranks, on_threads};
use espalier_train::trainer::Trainer;
use espalier_train::{Error, Result};
use serde::{Deserialize, Serialize};

use super::file::{Arm, GapStudy};
use crate::outcomes::{OutcomeKey, Outcomes};

/// Samples that run at a time when sharpness is measured, whatever the batch: to batch norm another number is
/// another loss, and arms are to be compared.
const MICRO_BATCH: usize = 100;

/// What an arm came to at a batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GapOutcome {
    /// Samples in a step.
    pub batch: usize,
    pub arm: String,
    pub seed: u64,
    /// Steps that it took.
    pub steps: u64,
    /// Whether it came to the study's training loss; an arm that goes on to its end, or a study without one,
    /// has nothing to reach.
    #[serde(default)]
    pub reached: Option<bool>,
    /// How it ended; none where it diverged.
    pub ended: Option<FinalMetrics>,
}

/// The end of a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct FinalMetrics {
    /// The mean loss over the training samples that sharpness is measured over.
    pub training_loss: f64,
    /// The mean loss over what was held out.
    pub validation_loss: f64,
    /// The fraction of it that is answered wrongly.
    pub error: f64,
    /// Keskar's, in percent.
    pub sharpness: f64,
    /// The largest eigenvalue of the Hessian of the training loss.
    #[serde(default)]
    pub eigenvalue: f64,
}

impl FinalMetrics {
    /// How much higher the loss is on what was held out.
    pub fn gap(&self) -> f64 {
        self.validation_loss - self.training_loss
    }
}

/// Runs all arms at all batches, or takes what is in `folder` already; `report` is called as each ends.
/// Paths of the study file are relative to `base_dir`.
pub fn run(
    gap: &GapStudy,
    dataset: &Arc<Dataset>,
    device: &Device,
    folder: &Path,
    base_dir: &Path,
    mut report: impl FnMut(&GapOutcome),
) -> Result<Vec<GapOutcome>> {
    let mut outcomes = Outcomes::open(folder)?;
    let mut all = Vec::new();
    for run in runs(gap, base_dir)? {
        let GapRun { batch, arm, seed, run_file, key } = run;
        let plan = Plan::new(run_file, dataset.facts())?;
        let outcome = outcomes.get_or(&key, || {
            let TrainedArm { steps, reached, ended } = train(plan, dataset, device, gap, arm)?;
            Ok(GapOutcome { batch, arm: arm.name.clone(), seed, steps, reached, ended })
        })?;
        report(&outcome);
        all.push(outcome);
    }
    Ok(all)
}

/// What is known of all arms at all batches by now.
pub fn known(gap: &GapStudy, folder: &Path, base_dir: &Path) -> Result<Vec<GapOutcome>> {
    Outcomes::known(folder, runs(gap, base_dir)?.iter().map(|run| &run.key))
}

/// One of those that are to be trained, and what its outcome is found by.
struct GapRun<'a> {
    batch: usize,
    arm: &'a Arm,
    seed: u64,
    run_file: RunFile,
    key: OutcomeKey,
}

/// All of them, in their order.
fn runs<'a>(gap: &'a GapStudy, base_dir: &Path) -> Result<Vec<GapRun<'a>>> {
    let until = gap.loss.map(|loss| format!(", to {loss} every {}", gap.eval_every)).unwrap_or_default();
    let measured = format!("sharpness over {} within {}, eigenvalue{until}", gap.samples, gap.epsilon);
    let mut runs = Vec::new();
    for &batch in &gap.batches {
        for arm in &gap.arms {
            for seed in 0..gap.seeds {
                let mut run_file = gap.run_file(batch, arm, seed)?;
                run_file.resolve_paths(base_dir);
                let end = if arm.to_end { ", then to its end" } else { "" };
                let key = [arm.name.clone(), run_file.to_toml()?, format!("{measured}{end}")];
                runs.push(GapRun { batch, arm, seed, run_file, key });
            }
        }
    }
    Ok(runs)
}

/// What training came to.
struct TrainedArm {
    steps: u64,
    reached: Option<bool>,
    ended: Option<FinalMetrics>,
}

/// Trains one, on as many ranks as it asks for.
fn train(
    plan: Plan,
    dataset: &Arc<Dataset>,
    device: &Device,
    gap: &GapStudy,
    arm: &Arm,
) -> Result<TrainedArm> {
    let on_rank = |ranks: Ranks, device: &Device| train_rank(plan.clone(), dataset, device, ranks, gap, arm);
    if plan.mesh.size() == 1 {
        return device.enter(|| on_rank(Ranks::single(), device));
    }
    Ok(on_threads(&plan.mesh, device, on_rank)?.swap_remove(0))
}

fn train_rank(
    plan: Plan,
    dataset: &Arc<Dataset>,
    device: &Device,
    ranks: Ranks,
    gap: &GapStudy,
    arm: &Arm,
) -> Result<TrainedArm> {
    let most = plan.optimization.max_bad_steps;
    let mut trainer = Trainer::distributed(plan, dataset.clone(), device, ranks)?;
    trainer.enable_graphed_step();
    let goal = gap.loss.filter(|_| !arm.to_end);
    let mut reached = goal.map(|_| false);
    let diverged = |steps, reached| Ok(TrainedArm { steps, reached, ended: None });
    while trainer.progress().step < trainer.steps() && reached != Some(true) {
        trainer.step()?;
        let step = trainer.progress().step;
        // Replicas that have gone apart have no one loss, and a pipeline with steps under way no weights yet.
        if !(trainer.is_in_sync() && trainer.is_idle()) {
            continue;
        }
        if trainer.progress().bad_steps >= most {
            return diverged(step, reached);
        }
        if let Some(goal) = goal.filter(|_| step.is_multiple_of(gap.eval_every)) {
            let surface = loss_surface(&trainer, gap)?;
            reached = Some(surface.loss_and_gradient(&surface.center()?)?.0 <= goal);
        }
    }
    let steps = trainer.progress().step;
    let Some(validation) = trainer.evaluate()? else {
        let problem = "leaves no validation split, which a generalization gap needs".into();
        return Err(espalier_plan::Error::Conflict { field: "run.data.validation".into(), problem }.into());
    };
    let surface = loss_surface(&trainer, gap)?;
    let within = Neighbourhood { epsilon: gap.epsilon, ..Neighbourhood::default() };
    let measured = sharpness(&surface, within).and_then(|sharp| Ok((sharp, largest_eigenvalue(&surface)?)));
    let (sharpness, eigenvalue) = match measured {
        Ok(measured) if validation.loss.is_finite() => measured,
        Ok(_) | Err(Error::Unmeasurable { .. }) => return diverged(steps, reached),
        Err(other) => return Err(other),
    };
    let ended = FinalMetrics {
        training_loss: sharpness.loss,
        validation_loss: validation.loss,
        error: 1.0 - validation.accuracy,
        sharpness: sharpness.value,
        eigenvalue: eigenvalue.value,
    };
    Ok(TrainedArm { steps, reached, ended: Some(ended) })
}

fn loss_surface<'a>(trainer: &'a Trainer, gap: &GapStudy) -> Result<LossSurface<'a>> {
    LossSurface::of(trainer, LossSamples { samples: Some(gap.samples), micro_batch: Some(MICRO_BATCH) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        kind = "generalisation-gap"
        name = "small"
        [run.model]
        name = "mlp"
        hidden = [16]
        [run.data]
        kind = "shapes"
        count = 300
        size = 16
        [run.train]
        epochs = 2
        [run.optimizer]
        name = "momentum"
        [gap]
        batches = [10, 90]
        samples = 100
        [arms.as-it-is]
        [arms.post-local]
        parallel.data = 2
        parallel.average_every = 4
        [arms.too-fast]
        learning_rate.peak = 1e20
    "#;

    #[test]
    fn every_arm_ends_with_numbers_unless_it_diverges_and_is_trained_once() {
        let gap = GapStudy::parse(TEXT, &[]).unwrap();
        let run_file = gap.run_file(10, &gap.arms[0], 0).unwrap();
        let dataset = Arc::new(Dataset::open(&run_file).unwrap());
        let (folder, device) = (tempfile::tempdir().unwrap(), Device::cpu(2).unwrap());
        let run_study = || run(&gap, &dataset, &device, folder.path(), Path::new("/"), |_| ()).unwrap();
        let first = run_study();
        assert_eq!(first.len(), 6);
        for outcome in &first {
            if outcome.arm != "too-fast" {
                assert_eq!(outcome.steps, 2 * (270 / outcome.batch) as u64, "{outcome:?}");
            }
            assert_eq!(outcome.reached, None);
            match (&*outcome.arm, outcome.ended) {
                ("too-fast", ended) => assert_eq!(ended, None),
                (_, Some(ended)) => {
                    assert!(ended.eigenvalue > 0.0 && ended.eigenvalue.is_finite(), "{outcome:?}");
                    assert!(ended.sharpness > 0.0 && (0.0..=1.0).contains(&ended.error), "{outcome:?}");
                    assert!(ended.training_loss > 0.0 && ended.validation_loss > 0.0, "{outcome:?}");
                }
                (_, None) => panic!("{outcome:?}"),
            }
        }
        let arms = |name: &str| first.iter().find(|outcome| outcome.arm == name).unwrap().ended;
        assert_ne!(arms("as-it-is"), arms("post-local"));
        let lines = std::fs::read_to_string(folder.path().join("outcomes.jsonl")).unwrap();
        assert_eq!(run_study(), first);
        assert_eq!(known(&gap, folder.path(), Path::new("/")).unwrap(), first);
        assert_eq!(std::fs::read_to_string(folder.path().join("outcomes.jsonl")).unwrap(), lines);
    }
    /// Small batches and large ones end with one training loss, each after steps of its own; an arm may go on,
    /// and one that has too few steps says that it did not get there.
    #[test]
    fn every_batch_is_trained_to_the_same_loss() {
        let overrides = [
            "gap.loss=2.1",
            "gap.eval_every=2",
            "run.train.epochs=40",
            "arms.post-local=",
            "arms.too-fast=",
            "arms.longer.to_end=true",
            "arms.longer.train.steps=60",
            "arms.short.train.steps=2",
        ];
        let overrides: Vec<_> = overrides.iter().map(|&text| text.into()).collect();
        let gap = GapStudy::parse(TEXT, &overrides).unwrap();
        let dataset = Arc::new(Dataset::open(&gap.run_file(10, &gap.arms[0], 0).unwrap()).unwrap());
        let (folder, device) = (tempfile::tempdir().unwrap(), Device::cpu(2).unwrap());
        let all = run(&gap, &dataset, &device, folder.path(), Path::new("/"), |_| ()).unwrap();
        let of = |arm: &str, batch| all.iter().find(|run| run.arm == arm && run.batch == batch).unwrap();
        for batch in [10, 90] {
            let (plain, longer, short) = (of("as-it-is", batch), of("longer", batch), of("short", batch));
            assert_eq!((plain.reached, longer.reached, short.reached), (Some(true), None, Some(false)));
            assert_eq!((plain.steps % 2, longer.steps, short.steps), (0, 60, 2));
            let loss = |run: &GapOutcome| run.ended.unwrap().training_loss;
            assert!(loss(plain) <= 2.1 && loss(plain) > 1.0 && loss(short) > 2.1, "{plain:?} {short:?}");
        }
        assert!(of("as-it-is", 10).steps != of("as-it-is", 90).steps);
    }
}
