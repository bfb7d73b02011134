//! Training the arms of a study, and what each came to.

use std::path::Path;
use std::sync::Arc;

use espalier_data::Dataset;
use espalier_plan::{Plan, RunFile};
use espalier_tensor::Device;
use espalier_train::measure::{LossSamples, LossSurface, Neighbourhood, sharpness};
use espalier_train::parallel::{Ranks, on_threads};
use espalier_train::trainer::Trainer;
use espalier_train::{Error, Result};
use serde::{Deserialize, Serialize};

use super::file::{Arm, GapStudy};
use crate::outcomes::Outcomes;

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
    /// Steps of the run.
    pub steps: u64,
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
        let outcome = outcomes.get_or(&key.each_ref().map(String::as_str), || {
            let (steps, ended) = train(plan, dataset, device, gap)?;
            Ok(GapOutcome { batch, arm: arm.name.clone(), seed, steps, ended })
        })?;
        report(&outcome);
        all.push(outcome);
    }
    Ok(all)
}

/// What is known of all arms at all batches by now.
pub fn known(gap: &GapStudy, folder: &Path, base_dir: &Path) -> Result<Vec<GapOutcome>> {
    let outcomes = Outcomes::read(folder)?;
    let runs = runs(gap, base_dir)?;
    Ok(runs.iter().filter_map(|run| outcomes.get(&run.key.each_ref().map(String::as_str)).cloned()).collect())
}

/// One of those that are to be trained, and what its outcome is found by.
struct GapRun<'a> {
    batch: usize,
    arm: &'a Arm,
    seed: u64,
    run_file: RunFile,
    key: [String; 3],
}

/// All of them, in their order.
fn runs<'a>(gap: &'a GapStudy, base_dir: &Path) -> Result<Vec<GapRun<'a>>> {
    let measured = format!("sharpness over {} within {}", gap.samples, gap.epsilon);
    let mut runs = Vec::new();
    for &batch in &gap.batches {
        for arm in &gap.arms {
            for seed in 0..gap.seeds {
                let mut run_file = gap.run_file(batch, arm, seed)?;
                run_file.resolve_paths(base_dir);
                let key = [arm.name.clone(), run_file.to_toml()?, measured.clone()];
                runs.push(GapRun { batch, arm, seed, run_file, key });
            }
        }
    }
    Ok(runs)
}

/// Trains one to its end, on as many ranks as it asks for.
fn train(
    plan: Plan,
    dataset: &Arc<Dataset>,
    device: &Device,
    gap: &GapStudy,
) -> Result<(u64, Option<FinalMetrics>)> {
    let on_rank = |ranks: Ranks, device: &Device| train_rank(plan.clone(), dataset, device, ranks, gap);
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
) -> Result<(u64, Option<FinalMetrics>)> {
    let most = plan.optimization.max_bad_steps;
    let mut trainer = Trainer::distributed(plan, dataset.clone(), device, ranks)?;
    let steps = trainer.steps();
    while trainer.progress().step < steps {
        trainer.step()?;
        if trainer.is_in_sync() && trainer.is_idle() && trainer.progress().bad_steps >= most {
            return Ok((steps, None));
        }
    }
    let Some(validation) = trainer.evaluate()? else {
        let problem = "leaves no validation split, which a generalization gap needs".into();
        return Err(espalier_plan::Error::Conflict { field: "run.data.validation".into(), problem }.into());
    };
    let surface = LossSurface::of(
        &trainer,
        LossSamples { samples: Some(gap.samples), micro_batch: Some(MICRO_BATCH) },
    )?;
    let within = Neighbourhood { epsilon: gap.epsilon, ..Neighbourhood::default() };
    let sharpness = match sharpness(&surface, within) {
        Ok(sharpness) if validation.loss.is_finite() => sharpness,
        Ok(_) | Err(Error::Unmeasurable { .. }) => return Ok((steps, None)),
        Err(other) => return Err(other),
    };
    let ended = FinalMetrics {
        training_loss: sharpness.loss,
        validation_loss: validation.loss,
        error: 1.0 - validation.accuracy,
        sharpness: sharpness.value,
    };
    Ok((steps, Some(ended)))
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
            assert_eq!(outcome.steps, 2 * (270 / outcome.batch) as u64, "{outcome:?}");
            match (&*outcome.arm, outcome.ended) {
                ("too-fast", ended) => assert_eq!(ended, None),
                (_, Some(ended)) => {
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
}
