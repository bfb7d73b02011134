//! Training the base run and its branches.

use std::path::Path;
use std::sync::Arc;

use espalier_data::Dataset;
use espalier_plan::{Error as Refused, Plan, RunFile};
use espalier_tensor::Device;
use espalier_train::checkpoint::{Checkpoint, Checkpoints};
use espalier_train::measure::{LossSamples, LossSurface, gradient_noise};
use espalier_train::parallel::Ranks;
use espalier_train::run::read_resolved;
use espalier_train::trainer::Trainer;
use espalier_train::{Error, Result};
use serde::{Deserialize, Serialize};

use super::file::{BranchStudy, Scaling};
use crate::outcomes::{OutcomeKey, Outcomes};

/// Samples that the noise scale is measured over, or all that there are.
const NOISE_SAMPLES: usize = 2000;

/// A branch at its end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Branch {
    /// Samples in a step.
    pub batch: usize,
    /// Steps that it took.
    pub steps: u64,
    pub lr: f64,
    /// The mean loss over what is held out, a mean over seeds too; none where it diverged with any of them.
    pub loss: Option<f64>,
    /// The same of each seed.
    pub losses: Vec<Option<f64>>,
}

impl Branch {
    fn new(batch: usize, steps: u64, lr: f64, losses: Vec<Option<f64>>) -> Branch {
        let all: Option<Vec<f64>> = losses.iter().copied().collect();
        let loss = all.map(|all| all.iter().sum::<f64>() / all.len() as f64);
        Branch { batch, steps, lr, loss, losses }
    }

    /// How far the mean over seeds may be off: its standard error; none of one seed.
    pub fn uncertainty(&self) -> Option<f64> {
        let (mean, count) = (self.loss?, self.losses.len() as f64);
        let squares: f64 = self.losses.iter().flatten().map(|loss| (loss - mean).powi(2)).sum();
        (count > 1.0).then(|| (squares / (count - 1.0) / count).sqrt())
    }
}

/// What was found at one point of the base run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BranchPoint {
    /// Steps of the base run.
    pub step: u64,
    /// The base run's loss there, over what is held out.
    pub loss: f64,
    /// By batch, ascending; the first is the base run's own.
    pub branches: Vec<Branch>,
    /// The largest batch that is as good as the base run's own.
    pub critical_batch: Option<usize>,
    /// Whether no larger batch was tried: then the critical one may be larger.
    pub at_edge: bool,
    /// The critical batch by the gradient noise scale at this point.
    pub noise_scale: Option<f64>,
}

impl BranchPoint {
    /// The critical batch, as far as it is known.
    pub fn critical_in_words(&self) -> String {
        match self.critical_batch {
            None => "unknown: the run's own batch diverged".into(),
            Some(batch) if self.at_edge => format!("at least {batch}"),
            Some(batch) => batch.to_string(),
        }
    }
}

/// The largest batch whose loss, and that of all smaller ones, is at most `tolerance` above that of the
/// first; none where the first diverged. A larger one that is good again after one that is not has been
/// lucky.
pub fn critical_batch(branches: &[Branch], tolerance: f64) -> Option<usize> {
    let base_loss = branches.first()?.loss?;
    let good = |branch: &&Branch| branch.loss.is_some_and(|loss| loss <= base_loss + tolerance);
    branches.iter().take_while(good).last().map(|branch| branch.batch)
}

/// What branches leave: a run, and the checkpoint of it where the study names one. Paths of the study file
/// are relative to `base_dir`.
#[derive(Debug)]
pub struct BranchOrigin {
    /// Its run file, with paths that are resolved.
    pub run_file: RunFile,
    /// Where branches begin; none: where the study says, on the way of a training.
    checkpoint: Option<Checkpoint>,
    /// What outcomes are found by.
    key: String,
}

impl BranchOrigin {
    /// Reads the checkpoint, where there is one.
    pub fn open(study: &BranchStudy, base_dir: &Path) -> Result<BranchOrigin> {
        let Some(from) = &study.from else {
            let mut run_file = study.base_run_file(None)?;
            run_file.resolve_paths(base_dir);
            let key = run_file.to_toml()?;
            return Ok(BranchOrigin { run_file, checkpoint: None, key });
        };
        let checkpoint = Checkpoint::find(&base_dir.join(from), &Ranks::single(), |_| ())?;
        let path = checkpoint.run_file();
        let missing = || Error::File { path: path.clone(), why: "is not there".into() };
        let text = read_resolved(&path)?.ok_or_else(missing)?;
        let mut run_file = study.base_run_file(Some(&text))?.single_rank();
        run_file.resolve_paths(path.parent().unwrap_or(base_dir));
        let location = checkpoint.path().display();
        let key = format!("{location} {}\n{}", checkpoint.progress().step, run_file.to_toml()?);
        Ok(BranchOrigin { run_file, checkpoint: Some(checkpoint), key })
    }

    /// The steps that branches begin after, each with what its outcome is found by.
    pub fn points(&self, study: &BranchStudy) -> Vec<(u64, OutcomeKey)> {
        let BranchStudy { factors, scaling, tolerance, seeds, .. } = study;
        let samples = study.samples(self.run_file.train.batch);
        let saved_at = self.checkpoint.as_ref().map(|checkpoint| vec![checkpoint.progress().step]);
        let point = |at: u64| {
            let asked = format!("{at} {factors:?} {samples} {scaling:?} {tolerance} {seeds}");
            (at, ["fork".into(), self.key.clone(), asked])
        };
        saved_at.unwrap_or_else(|| study.at.clone()).into_iter().map(point).collect()
    }
}

/// What is known by now of points that branches leave.
pub fn known(points: &[(u64, OutcomeKey)], folder: &Path) -> Result<Vec<BranchPoint>> {
    Outcomes::known(folder, points.iter().map(|(_, key)| key))
}

/// Trains the base run, or takes it up where its checkpoint is, and branches from it; what is in `folder`
/// already is taken from there. `report` is called for each branch point.
pub fn run(
    study: &BranchStudy,
    origin: &BranchOrigin,
    dataset: &Arc<Dataset>,
    device: &Device,
    folder: &Path,
    mut report: impl FnMut(&BranchPoint),
) -> Result<Vec<BranchPoint>> {
    let text = origin.run_file.to_toml()?;
    let plan = Plan::new(origin.run_file.clone(), dataset.facts())?;
    if plan.mesh.size() > 1 {
        let problem = format!("asks for {} ranks, and branches are trained on one", plan.mesh.size());
        return Err(Refused::Conflict { field: "run.parallel".into(), problem }.into());
    }
    let mut outcomes = Outcomes::open(folder)?;
    // Checkpoints of another base run are in a folder of another name.
    let base_folder = folder.join(format!("trunk-{}", &blake3::hash(text.as_bytes()).to_hex()[..8]));
    let start = || BaseRun::start(&plan, dataset, device, &base_folder);
    let (mut started, mut branch_points) = (None, Vec::new());
    for (at, key) in origin.points(study) {
        let branch_point = outcomes.get_or(&key, || {
            let base_run = match &mut started {
                Some(base_run) => base_run,
                none => none.insert(start()?),
            };
            device.enter(|| match &origin.checkpoint {
                Some(checkpoint) => {
                    base_run.trainer.restore(checkpoint)?;
                    base_run.run_branches(study, &origin.run_file, checkpoint)
                }
                None => {
                    let checkpoint = base_run.train_to(at)?;
                    base_run.run_branches(study, &origin.run_file, &checkpoint)
                }
            })
        })?;
        report(&branch_point);
        branch_points.push(branch_point);
    }
    Ok(branch_points)
}

/// The training that branches leave.
struct BaseRun<'a> {
    trainer: Trainer,
    plan: &'a Plan,
    dataset: &'a Arc<Dataset>,
    device: &'a Device,
    checkpoints: Checkpoints,
}

impl<'a> BaseRun<'a> {
    fn start(
        plan: &'a Plan,
        dataset: &'a Arc<Dataset>,
        device: &'a Device,
        folder: &Path,
    ) -> Result<BaseRun<'a>> {
        let precision = plan.storage.precision.name();
        let checkpoints = Checkpoints::new(folder, usize::MAX, &plan.model.name, precision);
        let trainer = device.enter(|| Trainer::new(plan.clone(), dataset.clone(), device))?;
        Ok(BaseRun { trainer, plan, dataset, device, checkpoints })
    }

    /// Branches where it is, which is saved in `checkpoint`.
    fn run_branches(
        &mut self,
        study: &BranchStudy,
        run: &RunFile,
        checkpoint: &Checkpoint,
    ) -> Result<BranchPoint> {
        let at = checkpoint.progress().step;
        let Some(evaluation) = self.trainer.evaluate()? else {
            let problem = "leaves no validation split, which branches are evaluated on".into();
            return Err(Refused::Conflict { field: "run.data.validation".into(), problem }.into());
        };
        let scaling = study.scaling.unwrap_or_else(|| Scaling::of(self.plan));
        let rate = self.plan.optimization.learning_rate.at(at as usize, self.trainer.steps() as usize);
        let branch =
            |factor: &usize| self.branch(study, run, checkpoint, *factor, rate * scaling.times(*factor));
        let branches = study.factors.iter().map(branch).collect::<Result<Vec<_>>>()?;
        let critical_batch = critical_batch(&branches, study.tolerance);
        Ok(BranchPoint {
            step: at,
            loss: evaluation.loss,
            at_edge: critical_batch == branches.last().map(|branch| branch.batch),
            critical_batch,
            branches,
            noise_scale: self.noise_scale()?,
        })
    }

    /// Goes on to a step, which is not behind it, and saves there, unless a study before this one did.
    fn train_to(&mut self, at: u64) -> Result<Checkpoint> {
        if at > self.trainer.steps() {
            let problem =
                format!("has {at}, and the base run ends after `run.train.steps` = {}", self.trainer.steps());
            return Err(Refused::Conflict { field: "branch.at".into(), problem }.into());
        }
        if let Some((_, path)) = self.checkpoints.numbered()?.into_iter().find(|(step, _)| *step == at) {
            let checkpoint = Checkpoint::read(&path, &Ranks::single())?;
            self.trainer.restore(&checkpoint)?;
            return Ok(checkpoint);
        }
        while self.trainer.progress().step < at {
            let report = self.trainer.step()?;
            if !report.taken {
                let bad_steps = self.trainer.progress().bad_steps;
                return Err(Error::Diverged { step: report.step, bad_steps, loss: report.loss });
            }
        }
        Checkpoint::read(&self.trainer.save(&self.checkpoints)?, &Ranks::single())
    }

    /// A branch to its end, once with each seed.
    fn branch(
        &self,
        study: &BranchStudy,
        run: &RunFile,
        checkpoint: &Checkpoint,
        factor: usize,
        lr: f64,
    ) -> Result<Branch> {
        let (base_batch, after) = (self.plan.batch.samples, checkpoint.progress().step);
        let steps = (study.samples(base_batch) / (factor * base_batch)) as u64;
        let mut losses = Vec::new();
        for seed in 0..study.seeds {
            let seed = self.plan.seed + seed;
            let run_file = study.branch(run, factor, after, lr, seed)?;
            let plan = Plan::new(run_file, self.dataset.facts())?;
            let mut trainer = Trainer::new(plan, self.dataset.clone(), self.device)?;
            trainer.restore(checkpoint)?;
            losses.push(train_to_end(&mut trainer)?);
        }
        Ok(Branch::new(factor * base_batch, steps, lr, losses))
    }

    fn noise_scale(&self) -> Result<Option<f64>> {
        let all = self.dataset.len(espalier_data::DataSplit::Train);
        let samples = Some(all.min(NOISE_SAMPLES));
        let surface = LossSurface::of(&self.trainer, LossSamples { samples, micro_batch: None })?;
        if surface.micro_batches() < 2 {
            return Ok(None);
        }
        Ok(gradient_noise(&surface)?.critical_batch())
    }
}

/// The loss over what is held out when a branch has come to its end; none where it diverges.
fn train_to_end(trainer: &mut Trainer) -> Result<Option<f64>> {
    while trainer.progress().step < trainer.steps() {
        if !trainer.step()?.taken {
            return Ok(None);
        }
    }
    Ok(trainer.evaluate()?.map(|evaluation| evaluation.loss).filter(|loss| loss.is_finite()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const TEXT: &str = r#"
        kind = "critical-batch"
        name = "small"
        [run.model]
        name = "mlp"
        hidden = [16]
        [run.data]
        kind = "shapes"
        count = 400
        size = 16
        [run.train]
        batch = 4
        steps = 40
        [run.optimizer]
        name = "momentum"
        [run.learning_rate]
        peak = 0.01
        [branch]
        at = [10, 30]
        factors = [1, 4, 16]
        samples = 192
    "#;

    #[test]
    fn the_critical_batch_is_the_last_before_the_first_that_is_worse() {
        let branch = |(i, loss): (usize, &Option<f64>)| Branch::new(8 << i, 1, 0.1, vec![*loss]);
        let critical = |losses: &[Option<f64>]| {
            critical_batch(&losses.iter().enumerate().map(branch).collect::<Vec<_>>(), 0.01)
        };
        assert_eq!(critical(&[Some(1.0), Some(0.9), Some(1.009), Some(1.1), Some(0.8)]), Some(32));
        assert_eq!(critical(&[Some(1.0), Some(1.02)]), Some(8));
        assert_eq!(critical(&[Some(1.0), None, Some(1.0)]), Some(8));
        assert_eq!(critical(&[None, Some(1.0)]), None);
    }

    #[test]
    fn branches_leave_the_base_run_as_it_was_and_are_found_again() {
        let study = BranchStudy::parse(TEXT, &[]).unwrap();
        let dataset = Arc::new(Dataset::open(&study.base_run_file(None).unwrap()).unwrap());
        let (folder, device) = (tempfile::tempdir().unwrap(), Device::cpu(2).unwrap());
        let run_study = |study: &BranchStudy, folder: &Path| {
            let origin = BranchOrigin::open(study, Path::new("/")).unwrap();
            let branch_points = run(study, &origin, &dataset, &device, folder, |_| ()).unwrap();
            assert_eq!(known(&origin.points(study), folder).unwrap(), branch_points);
            branch_points
        };
        let branch_points = run_study(&study, folder.path());
        assert_eq!(branch_points.iter().map(|branch_point| branch_point.step).collect::<Vec<_>>(), [10, 30]);
        for branch_point in &branch_points {
            let steps_by_batch: Vec<_> =
                branch_point.branches.iter().map(|branch| (branch.batch, branch.steps)).collect();
            assert_eq!(steps_by_batch, [(4, 48), (16, 12), (64, 3)]);
            assert!(
                (branch_point.branches[2].lr / branch_point.branches[0].lr - 16.0).abs() < 1e-9,
                "{branch_point:?}"
            );
            assert!(
                branch_point.branches[0].loss.unwrap() < branch_point.loss,
                "it learns: {branch_point:?}"
            );
            assert!(
                branch_point.critical_batch.is_some()
                    && branch_point.noise_scale.is_none_or(|scale| scale > 0.0)
            );
        }
        assert_eq!(run_study(&study, folder.path()), branch_points);
        // The second branch point alone, from nothing: what was branched before it makes no difference.
        let later = BranchStudy::parse(&TEXT.replace("at = [10, 30]", "at = [30]"), &[]).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        assert_eq!(run_study(&later, elsewhere.path()), branch_points[1..]);
        // With a second seed the first is as it was, and the other saw samples in another order.
        let twice = BranchStudy::parse(TEXT, &["branch.at=[30]".into(), "branch.seeds=2".into()]).unwrap();
        let branches = &run_study(&twice, elsewhere.path())[0].branches;
        for (two, one) in branches.iter().zip(&branch_points[1].branches) {
            assert_eq!(two.losses[0], one.loss);
            assert_ne!(two.losses[1], one.loss);
            let [Some(a), Some(b)] = two.losses[..] else { panic!("{two:?}") };
            assert!((two.loss.unwrap() - (a + b) / 2.0).abs() < 1e-12, "{two:?}");
            assert!((two.uncertainty().unwrap() - (a - b).abs() / 2.0).abs() < 1e-12, "{two:?}");
        }
    }

    /// The base run of another study stands where a run's checkpoints do: branches from there are those of
    /// that study.
    #[test]
    fn branches_from_a_checkpoint_are_those_of_its_run() {
        let study = BranchStudy::parse(TEXT, &["branch.at=[10]".into()]).unwrap();
        let origin = BranchOrigin::open(&study, Path::new("/")).unwrap();
        let dataset = Arc::new(Dataset::open(&origin.run_file).unwrap());
        let (folder, device) = (tempfile::tempdir().unwrap(), Device::cpu(2).unwrap());
        let at = folder.path();
        let branch_points = run(&study, &origin, &dataset, &device, &at.join("study"), |_| ()).unwrap();
        let base_run = fs::read_dir(at.join("study")).unwrap().map(|entry| entry.unwrap().path());
        let base_run = base_run.into_iter().find(|path| path.is_dir()).unwrap();
        fs::create_dir(at.join("run")).unwrap();
        fs::rename(base_run, at.join("run/checkpoints")).unwrap();
        fs::write(at.join("run/run.toml"), origin.run_file.to_toml().unwrap()).unwrap();
        let text = "kind = \"critical-batch\"\nname = \"from\"\n[branch]\nfrom = \"run\"\nfactors = [1, 4, 16]\nsamples = 192";
        let study = BranchStudy::parse(text, &[]).unwrap();
        let origin = BranchOrigin::open(&study, at).unwrap();
        assert_eq!(
            run(&study, &origin, &dataset, &device, &at.join("again"), |_| ()).unwrap(),
            branch_points
        );
        let missing = BranchStudy::parse(text, &["branch.from=nowhere".into()]).unwrap();
        let message = BranchOrigin::open(&missing, at).unwrap_err().to_string();
        assert!(message.contains("nowhere: there is no such folder"), "{message}");
    }

    #[test]
    fn a_fork_behind_the_end_of_the_trunk_is_refused() {
        let study = BranchStudy::parse(&TEXT.replace("30]", "41]"), &[]).unwrap();
        let origin = BranchOrigin::open(&study, Path::new("/")).unwrap();
        let dataset = Arc::new(Dataset::open(&origin.run_file).unwrap());
        let (folder, device) = (tempfile::tempdir().unwrap(), Device::cpu(2).unwrap());
        let error = run(&study, &origin, &dataset, &device, folder.path(), |_| ()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "`branch.at` has 41, and the base run ends after `run.train.steps` = 40"
        );
    }
}
