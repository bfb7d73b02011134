//! Training the trunk and its branches.

use std::path::Path;
use std::sync::Arc;

use espalier_data::Dataset;
use espalier_plan::{Error as Refused, Plan, RunFile};
use espalier_tensor::Device;
use espalier_train::checkpoint::{Checkpoint, Checkpoints};
use espalier_train::measure::{Over, Surface, gradient_noise};
use espalier_train::parallel::Ranks;
use espalier_train::run::read_resolved;
use espalier_train::trainer::Trainer;
use espalier_train::{Error, Result};
use serde::{Deserialize, Serialize};

use super::file::{Branching, Scaling};
use crate::outcomes::Outcomes;

/// Samples that the noise scale is measured over, or all that there are.
const NOISE_SAMPLES: usize = 2000;

/// A branch at its end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Branch {
    /// Samples in a step.
    pub batch: usize,
    /// Steps that it took.
    pub steps: u64,
    /// Its rate.
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

/// What branches leave: a run, and the checkpoint of it where the study names one. Paths of the study file are relative to `beside`.
#[derive(Debug)]
pub struct Source {
    /// Its run file, with paths that are resolved.
    pub run_file: RunFile,
    /// Where branches begin; none: where the study says, on the way of a training.
    checkpoint: Option<Checkpoint>,
    /// What outcomes are found by.
    of: String,
}

impl Source {
    /// Reads the checkpoint, where there is one.
    pub fn open(study: &Branching, beside: &Path) -> Result<Source> {
        let Some(from) = &study.from else {
            let mut run_file = study.trunk(None)?;
            run_file.resolve_paths(beside);
            let of = run_file.to_toml()?;
            return Ok(Source { run_file, checkpoint: None, of });
        };
        let checkpoint = Checkpoint::find(&beside.join(from), &Ranks::alone(), |_| ())?;
        let path = checkpoint.run_file();
        let missing = || Error::File { path: path.clone(), why: "is not there".into() };
        let text = read_resolved(&path)?.ok_or_else(missing)?;
        let mut run_file = study.trunk(Some(&text))?.alone();
        run_file.resolve_paths(path.parent().unwrap_or(beside));
        let place = checkpoint.path().display();
        let of = format!("{place} {}\n{}", checkpoint.progress().step, run_file.to_toml()?);
        Ok(Source { run_file, checkpoint: Some(checkpoint), of })
    }

    /// The steps that branches begin after, each with what its outcome is found by.
    pub fn points(&self, study: &Branching) -> Vec<(u64, [String; 3])> {
        let Branching { factors, scaling, tolerance, seeds, .. } = study;
        let samples = study.samples(self.run_file.train.batch);
        let own = self.checkpoint.as_ref().map(|checkpoint| vec![checkpoint.progress().step]);
        let of = |at: u64| {
            let asked = format!("{at} {factors:?} {samples} {scaling:?} {tolerance} {seeds}");
            (at, ["fork".into(), self.of.clone(), asked])
        };
        own.unwrap_or_else(|| study.at.clone()).into_iter().map(of).collect()
    }
}

/// What is known by now of points that branches leave.
pub fn known(points: &[(u64, [String; 3])], folder: &Path) -> Result<Vec<Fork>> {
    let outcomes = Outcomes::read(folder)?;
    let fork = |(_, of): &(u64, [String; 3])| outcomes.get(&of.each_ref().map(String::as_str)).cloned();
    Ok(points.iter().filter_map(fork).collect())
}

/// Trains the trunk, or takes it up where its checkpoint is, and branches from it; what is in `folder` already is taken from there. `report` hears of each fork.
pub fn run(
    study: &Branching,
    source: &Source,
    dataset: &Arc<Dataset>,
    device: &Device,
    folder: &Path,
    mut report: impl FnMut(&Fork),
) -> Result<Vec<Fork>> {
    let text = source.run_file.to_toml()?;
    let plan = Plan::new(source.run_file.clone(), dataset.facts())?;
    if plan.mesh.size() > 1 {
        let problem = format!("asks for {} ranks, and branches are trained on one", plan.mesh.size());
        return Err(Refused::Conflict { field: "run.parallel".into(), problem }.into());
    }
    let mut outcomes = Outcomes::open(folder)?;
    // Checkpoints of another trunk are in a folder of another name.
    let trunk_folder = folder.join(format!("trunk-{}", &blake3::hash(text.as_bytes()).to_hex()[..8]));
    let begun = || Trunk::start(&plan, dataset, device, &trunk_folder);
    let (mut line, mut forks) = (None, Vec::new());
    for (at, of) in source.points(study) {
        let fork = outcomes.get_or(&of.each_ref().map(String::as_str), || {
            let trunk = match &mut line {
                Some(trunk) => trunk,
                none => none.insert(begun()?),
            };
            device.enter(|| match &source.checkpoint {
                Some(checkpoint) => {
                    trunk.trainer.restore(checkpoint)?;
                    trunk.fork(study, &source.run_file, checkpoint)
                }
                None => {
                    let checkpoint = trunk.reach(at)?;
                    trunk.fork(study, &source.run_file, &checkpoint)
                }
            })
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

    /// Branches where it is, which is saved in `whole`.
    fn fork(&mut self, study: &Branching, run: &RunFile, whole: &Checkpoint) -> Result<Fork> {
        let at = whole.progress().step;
        let Some(evaluation) = self.trainer.evaluate()? else {
            let problem = "leaves no validation split, which branches are evaluated on".into();
            return Err(Refused::Conflict { field: "run.data.validation".into(), problem }.into());
        };
        let scaling = study.scaling.unwrap_or_else(|| Scaling::of(self.plan));
        let rate = self.plan.optimization.learning_rate.at(at as usize, self.trainer.steps() as usize);
        let branch = |factor: &usize| self.branch(study, run, whole, *factor, rate * scaling.times(*factor));
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
        if at > self.trainer.steps() {
            let problem =
                format!("has {at}, and the base run ends after `run.train.steps` = {}", self.trainer.steps());
            return Err(Refused::Conflict { field: "branch.at".into(), problem }.into());
        }
        if let Some((_, path)) = self.checkpoints.numbered()?.into_iter().find(|(step, _)| *step == at) {
            let whole = Checkpoint::read(&path, &Ranks::alone())?;
            self.trainer.restore(&whole)?;
            return Ok(whole);
        }
        while self.trainer.progress().step < at {
            let report = self.trainer.step()?;
            if !report.taken {
                let bad_steps = self.trainer.progress().bad_steps;
                return Err(Error::Diverged { step: report.step, bad_steps, loss: report.loss });
            }
        }
        Checkpoint::read(&self.trainer.save(&self.checkpoints)?, &Ranks::alone())
    }

    /// A branch to its end, once with each seed.
    fn branch(
        &self,
        study: &Branching,
        run: &RunFile,
        whole: &Checkpoint,
        factor: usize,
        lr: f64,
    ) -> Result<Branch> {
        let (own, after) = (self.plan.batch.samples, whole.progress().step);
        let steps = (study.samples(own) / (factor * own)) as u64;
        let mut losses = Vec::new();
        for seed in 0..study.seeds {
            let seed = self.plan.seed + seed;
            let run_file = study.branch(run, factor, after, lr, seed)?;
            let plan = Plan::new(run_file, self.dataset.facts())?;
            let mut trainer = Trainer::new(plan, self.dataset.clone(), self.device)?;
            trainer.restore(whole)?;
            losses.push(go_to_end(&mut trainer)?);
        }
        Ok(Branch::new(factor * own, steps, lr, losses))
    }

    fn noise_scale(&self) -> Result<Option<f64>> {
        let all = self.dataset.len(espalier_data::Split::Train);
        let samples = Some(all.min(NOISE_SAMPLES));
        let surface = Surface::of(&self.trainer, Over { samples, micro_batch: None })?;
        if surface.micro_batches() < 2 {
            return Ok(None);
        }
        Ok(gradient_noise(&surface)?.critical_batch())
    }
}

/// The loss over what is held out when a branch has come to its end; none where it diverges.
fn go_to_end(trainer: &mut Trainer) -> Result<Option<f64>> {
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
    fn branches_leave_the_trunk_as_it_was_and_are_found_again() {
        let study = Branching::parse(TEXT, &[]).unwrap();
        let dataset = Arc::new(Dataset::open(&study.trunk(None).unwrap()).unwrap());
        let (folder, device) = (tempfile::tempdir().unwrap(), Device::cpu(2).unwrap());
        let go = |study: &Branching, folder: &Path| {
            let source = Source::open(study, Path::new("/")).unwrap();
            let forks = run(study, &source, &dataset, &device, folder, |_| ()).unwrap();
            assert_eq!(known(&source.points(study), folder).unwrap(), forks);
            forks
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
        // With a second seed the first is as it was, and the other saw samples in another order.
        let twice = Branching::parse(TEXT, &["branch.at=[30]".into(), "branch.seeds=2".into()]).unwrap();
        let branches = &go(&twice, elsewhere.path())[0].branches;
        for (two, one) in branches.iter().zip(&forks[1].branches) {
            assert_eq!(two.losses[0], one.loss);
            assert_ne!(two.losses[1], one.loss);
            let [Some(a), Some(b)] = two.losses[..] else { panic!("{two:?}") };
            assert!((two.loss.unwrap() - (a + b) / 2.0).abs() < 1e-12, "{two:?}");
            assert!((two.uncertainty().unwrap() - (a - b).abs() / 2.0).abs() < 1e-12, "{two:?}");
        }
    }

    /// The trunk of another study stands where a run's checkpoints do: branches from there are those of that study.
    #[test]
    fn branches_from_a_checkpoint_are_those_of_its_run() {
        let study = Branching::parse(TEXT, &["branch.at=[10]".into()]).unwrap();
        let source = Source::open(&study, Path::new("/")).unwrap();
        let dataset = Arc::new(Dataset::open(&source.run_file).unwrap());
        let (folder, device) = (tempfile::tempdir().unwrap(), Device::cpu(2).unwrap());
        let at = folder.path();
        let forks = run(&study, &source, &dataset, &device, &at.join("study"), |_| ()).unwrap();
        let trunk = fs::read_dir(at.join("study")).unwrap().map(|entry| entry.unwrap().path());
        let trunk = trunk.into_iter().find(|path| path.is_dir()).unwrap();
        fs::create_dir(at.join("run")).unwrap();
        fs::rename(trunk, at.join("run/checkpoints")).unwrap();
        fs::write(at.join("run/run.toml"), source.run_file.to_toml().unwrap()).unwrap();
        let text = "kind = \"critical-batch\"\nname = \"from\"\n[branch]\nfrom = \"run\"\nfactors = [1, 4, 16]\nsamples = 192";
        let study = Branching::parse(text, &[]).unwrap();
        let source = Source::open(&study, at).unwrap();
        assert_eq!(run(&study, &source, &dataset, &device, &at.join("again"), |_| ()).unwrap(), forks);
        let missing = Branching::parse(text, &["branch.from=nowhere".into()]).unwrap();
        let said = Source::open(&missing, at).unwrap_err().to_string();
        assert!(said.contains("nowhere: there is no such folder"), "{said}");
    }

    #[test]
    fn a_fork_behind_the_end_of_the_trunk_is_refused() {
        let study = Branching::parse(&TEXT.replace("30]", "41]"), &[]).unwrap();
        let source = Source::open(&study, Path::new("/")).unwrap();
        let dataset = Arc::new(Dataset::open(&source.run_file).unwrap());
        let (folder, device) = (tempfile::tempdir().unwrap(), Device::cpu(2).unwrap());
        let error = run(&study, &source, &dataset, &device, folder.path(), |_| ()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "`branch.at` has 41, and the base run ends after `run.train.steps` = 40"
        );
    }
}
