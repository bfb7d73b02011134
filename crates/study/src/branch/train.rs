//! Training the trunk and its branches.

use std::path::Path;
use std::sync::Arc;

use espalier_plan::{Error as Refused, Plan};
use espalier_tensor::Device;
use espalier_train::Result;
use espalier_train::checkpoint::{Checkpoint, Checkpoints};
use espalier_train::data::Dataset;
use espalier_train::measure::{Over, gradient_noise};
use espalier_train::parallel::Ranks;
use espalier_train::trainer::Trainer;
use serde::{Deserialize, Serialize};

use super::file::{Branching, Scaling};
use crate::outcomes::Outcomes;

/// Samples that the noise scale is measured over, or all that there are.
const NOISE_SAMPLES: usize = 2000;

/// A branch at its end.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Branch {
    /// Samples in a step.
    pub batch: usize,
    /// Steps that it took.
    pub steps: u64,
    /// Its rate.
    pub lr: f64,
    /// The mean loss over what is held out; none where it diverged.
    pub loss: Option<f64>,
}

/// What was found at one point of the trunk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Fork {
    /// Steps of the trunk.
    pub step: u64,
    /// The trunk's loss there, over what is held out.
    pub loss: f64,
    /// By batch, ascending; the first is the trunk's own.
    pub branches: Vec<Branch>,
    /// The largest batch that is as good as the trunk's own.
    pub critical_batch: Option<usize>,
    /// Whether no larger batch was tried: then the critical one may be larger.
    pub at_edge: bool,
    /// The critical batch by the gradient noise scale at this point.
    pub noise_scale: Option<f64>,
}

impl Fork {
    /// The critical batch, as far as it is known.
    pub fn critical_in_words(&self) -> String {
        match self.critical_batch {
            None => "unknown: the run's own batch diverged".into(),
            Some(batch) if self.at_edge => format!("at least {batch}"),
            Some(batch) => batch.to_string(),
        }
    }
}

/// The largest batch whose loss, and that of all smaller ones, is at most `tolerance` above that of the first; none where the first diverged. A larger one that
/// is good again after one that is not has been lucky.
pub fn critical_batch(branches: &[Branch], tolerance: f64) -> Option<usize> {
    let own = branches.first()?.loss?;
    let good = |branch: &&Branch| branch.loss.is_some_and(|loss| loss <= own + tolerance);
    branches.iter().take_while(good).last().map(|branch| branch.batch)
}

/// Trains the trunk and branches from it; what is in `folder` already is taken from there. `report` hears of each fork. Paths of the study file are relative
/// to `beside`.
pub fn run(
    study: &Branching,
    dataset: &Arc<Dataset>,
    device: &Device,
    folder: &Path,
    beside: &Path,
    mut report: impl FnMut(&Fork),
) -> Result<Vec<Fork>> {
    let mut trunk = study.trunk()?;
    trunk.resolve_paths(beside);
    let text = trunk.to_toml()?;
    let plan = Plan::new(trunk, dataset.facts())?;
    if plan.mesh.size() > 1 {
        let problem = format!("asks for {} ranks, and branches are trained on one", plan.mesh.size());
        return Err(Refused::Conflict { field: "run.parallel".into(), problem }.into());
    }
    let mut outcomes = Outcomes::open(folder)?;
    // Checkpoints of another trunk are in a folder of another name.
    let trunk_folder = folder.join(format!("trunk-{}", &blake3::hash(text.as_bytes()).to_hex()[..8]));
    let begun = || Trunk::start(&plan, dataset, device, &trunk_folder);
    let (mut line, mut forks) = (None, Vec::new());
    for &at in &study.at {
        let asked =
            format!("{at} {:?} {} {:?} {}", study.factors, study.samples, study.scaling, study.tolerance);
        let fork = outcomes.get_or(&["fork", &text, &asked], || {
            let trunk = match &mut line {
                Some(trunk) => trunk,
                none => none.insert(begun()?),
            };
            device.enter(|| trunk.fork(study, &text, at))
        })?;
        report(&fork);
        forks.push(fork);
    }
    Ok(forks)
}

/// The training that branches leave.
struct Trunk<'a> {
    trainer: Trainer,
    plan: &'a Plan,
    dataset: &'a Arc<Dataset>,
    device: &'a Device,
    checkpoints: Checkpoints,
}

impl<'a> Trunk<'a> {
    fn start(
        plan: &'a Plan,
        dataset: &'a Arc<Dataset>,
        device: &'a Device,
        folder: &Path,
    ) -> Result<Trunk<'a>> {
        let precision = plan.storage.precision.name();
        let checkpoints = Checkpoints::new(folder, usize::MAX, &plan.model.name, precision);
        let trainer = device.enter(|| Trainer::new(plan.clone(), dataset.clone(), device))?;
        Ok(Trunk { trainer, plan, dataset, device, checkpoints })
    }

    /// Goes on to a step, and branches there.
    fn fork(&mut self, study: &Branching, text: &str, at: u64) -> Result<Fork> {
        if at > self.trainer.steps() {
            let problem =
                format!("has {at}, and the trunk ends after `run.train.steps` = {}", self.trainer.steps());
            return Err(Refused::Conflict { field: "branch.at".into(), problem }.into());
        }
        let whole = self.reach(at)?;
        let Some(evaluation) = self.trainer.evaluate()? else {
            let problem = "holds nothing out, and branches are judged by what is held out".into();
            return Err(Refused::Conflict { field: "run.data.validation".into(), problem }.into());
        };
        let scaling = study.scaling.unwrap_or_else(|| Scaling::of(self.plan));
        let rate = self.plan.optimization.learning_rate.at(at as usize, self.trainer.steps() as usize);
        let branch =
            |factor: &usize| self.branch(study, text, &whole, *factor, rate * scaling.times(*factor));
        let branches = study.factors.iter().map(branch).collect::<Result<Vec<_>>>()?;
        let critical_batch = critical_batch(&branches, study.tolerance);
        Ok(Fork {
            step: at,
            loss: evaluation.loss,
            at_edge: critical_batch == branches.last().map(|branch| branch.batch),
            critical_batch,
            branches,
            noise_scale: self.noise_scale()?,
        })
    }

    /// Goes on to a step, which is not behind it, and saves there, unless a study before this one did.
    fn reach(&mut self, at: u64) -> Result<Checkpoint> {
        if let Some((_, path)) = self.checkpoints.numbered()?.into_iter().find(|(step, _)| *step == at) {
            let whole = Checkpoint::read(&path, &Ranks::alone())?;
            self.trainer.restore(&whole)?;
            return Ok(whole);
        }
        while self.trainer.progress().step < at {
            let report = self.trainer.step()?;
            if !report.taken {
                let bad_steps = self.trainer.progress().bad_steps;
                return Err(espalier_train::Error::Diverged {
                    step: report.step,
                    bad_steps,
                    loss: report.loss,
                });
            }
        }
        Checkpoint::read(&self.trainer.save(&self.checkpoints)?, &Ranks::alone())
    }

    /// A branch to its end.
    fn branch(
        &self,
        study: &Branching,
        text: &str,
        whole: &Checkpoint,
        factor: usize,
        lr: f64,
    ) -> Result<Branch> {
        let after = whole.progress().step;
        let run_file = study.branch(text, self.plan.batch.samples, factor, after, lr)?;
        let plan = Plan::new(run_file, self.dataset.facts())?;
        let batch = plan.batch.samples;
        let mut trainer = Trainer::new(plan, self.dataset.clone(), self.device)?;
        trainer.restore(whole)?;
        let steps = trainer.steps() - after;
        while trainer.progress().step < trainer.steps() {
            if !trainer.step()?.taken {
                return Ok(Branch { batch, steps, lr, loss: None });
            }
        }
        let loss = trainer.evaluate()?.map(|evaluation| evaluation.loss).filter(|loss| loss.is_finite());
        Ok(Branch { batch, steps, lr, loss })
    }

    fn noise_scale(&self) -> Result<Option<f64>> {
        let all = self.dataset.len(espalier_train::data::Split::Train);
        let samples = Some(all.min(NOISE_SAMPLES));
        let surface = self.trainer.surface(Over { samples, micro_batch: None })?;
        if surface.micro_batches() < 2 {
            return Ok(None);
        }
        Ok(gradient_noise(&surface)?.critical_batch())
    }
}

#[cfg(test)]
mod tests {
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
        let branch =
            |(i, loss): (usize, &Option<f64>)| Branch { batch: 8 << i, steps: 1, lr: 0.1, loss: *loss };
        let critical = |losses: &[Option<f64>]| {
            critical_batch(&losses.iter().enumerate().map(branch).collect::<Vec<_>>(), 0.01)
        };
        assert_eq!(critical(&[Some(1.0), Some(0.9), Some(1.009), Some(1.1), Some(0.8)]), Some(32));
        assert_eq!(critical(&[Some(1.0), Some(1.02)]), Some(8));
        assert_eq!(critical(&[Some(1.0), None, Some(1.0)]), Some(8));
        assert_eq!(critical(&[None, Some(1.0)]), None);
    }

    #[test]
    fn branches_leave_the_trunk_as_it_was_and_are_found_again() {
        let study = Branching::parse(TEXT, &[]).unwrap();
        let dataset = Arc::new(Dataset::open(&study.trunk().unwrap()).unwrap());
        let (folder, device) = (tempfile::tempdir().unwrap(), Device::cpu(2).unwrap());
        let go = |study: &Branching, folder: &Path| {
            run(study, &dataset, &device, folder, Path::new("/"), |_| ()).unwrap()
        };
        let forks = go(&study, folder.path());
        assert_eq!(forks.iter().map(|fork| fork.step).collect::<Vec<_>>(), [10, 30]);
        for fork in &forks {
            let seen: Vec<_> = fork.branches.iter().map(|branch| (branch.batch, branch.steps)).collect();
            assert_eq!(seen, [(4, 48), (16, 12), (64, 3)]);
            assert!((fork.branches[2].lr / fork.branches[0].lr - 16.0).abs() < 1e-9, "{fork:?}");
            assert!(fork.branches[0].loss.unwrap() < fork.loss, "it learns: {fork:?}");
            assert!(fork.critical_batch.is_some() && fork.noise_scale.is_none_or(|scale| scale > 0.0));
        }
        assert_eq!(go(&study, folder.path()), forks);
        // The second fork alone, from nothing: what was branched before it makes no difference.
        let later = Branching::parse(&TEXT.replace("at = [10, 30]", "at = [30]"), &[]).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        assert_eq!(go(&later, elsewhere.path()), forks[1..]);
    }

    #[test]
    fn a_fork_behind_the_end_of_the_trunk_is_refused() {
        let study = Branching::parse(&TEXT.replace("30]", "41]"), &[]).unwrap();
        let dataset = Arc::new(Dataset::open(&study.trunk().unwrap()).unwrap());
        let folder = tempfile::tempdir().unwrap();
        let error = run(&study, &dataset, &Device::cpu(2).unwrap(), folder.path(), Path::new("/"), |_| ())
            .unwrap_err();
        assert_eq!(error.to_string(), "`branch.at` has 41, and the trunk ends after `run.train.steps` = 40");
    }
}
