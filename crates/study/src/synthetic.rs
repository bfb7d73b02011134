//! Landscapes for tests: trials whose steps to the goal are a known function of their hyperparameters, and
//! take no time.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use espalier_train::Error;

use crate::file::{Goal, Study};
use crate::trial::{ResumedTrial, Trial, TrialCheck, TrialRecord, TrialRunner, TrialStatus};
use crate::workload::TrialSettings;

/// Trials that reach the goal after K steps, K being least at a rate of its own for each cell, and diverge
/// above another. On the way the error falls as a power of the fraction of K that is behind, not the same power
/// for all: who is ahead at first need not be ahead in the end.
#[derive(Debug, Default)]
pub struct Landscape {
    /// How much the powers differ.
    pub crossing: f64,
    /// Moves the best rate, in decades.
    pub shift: f64,
    /// Multiplies K: 0 where the goal is out of reach.
    pub scale: f64,
    /// Steps that all trials have taken.
    pub steps_taken: AtomicU64,
    /// Whether paused trials are saved on disk, and how many were resumed.
    pub saves: bool,
    pub resumed: AtomicU64,
}

/// A study over two batch sizes and two sparsities.
pub const TEXT: &str = r#"
        name = "synthetic"
        [run.model]
        name = "simple-cnn"
        [run.optimizer]
        name = "momentum"
        [run.prune]
        method = "snip"
        [cells]
        batches = [16, 256]
        sparsities = [0, 0.9]
        [goal]
        error = 0.12
        [search]
        trials = 32
        steps = 40000
        [search.ranges]
        learning_rate.peak = { log = [1e-4, 1.0] }
        optimizer.momentum = { one_minus_log = [1e-3, 0.3] }
    "#;

/// The same, whose trials are a landscape's.
pub fn study(overrides: &[&str]) -> Study {
    let overrides: Vec<_> = overrides.iter().map(|&change| change.into()).collect();
    Study::parse(TEXT, &overrides).unwrap()
}

/// What became of a trial, by itself.
pub fn record(batch: usize, sparsity: f64, trial: u32, status: TrialStatus, steps: u64) -> TrialRecord {
    let fields = vec![("learning_rate.peak".into(), 0.01)];
    TrialRecord { batch, sparsity, trial, status, steps, best: Some(0.4), fields, curve: Vec::new() }
}

impl Landscape {
    pub fn new(crossing: f64, shift: f64) -> Landscape {
        Landscape { crossing, shift, scale: 1.0, ..Landscape::default() }
    }

    /// Steps to the goal; none where it diverges.
    pub(crate) fn steps_to_goal(&self, settings: &TrialSettings) -> Option<f64> {
        let field = |name: &str| settings.fields.iter().find(|(field, _)| field == name).unwrap().1;
        let effective = field("learning_rate.peak") / (1.0 - field("optimizer.momentum"));
        let best = 10f64.powf(-0.5 + self.shift) * (settings.batch as f64 / 256.0).sqrt();
        let away = (effective / best).log10();
        let sparse = if settings.sparsity > 0.0 { 3.0 } else { 1.0 };
        let least = sparse * (36_000.0 / settings.batch as f64 + 158.0);
        let luck = 1.0 + 0.2 * uniform(settings.seed, 1);
        (away < 1.0).then_some(self.scale * least * luck * (1.0 + 2.0 * away * away))
    }
}

/// A number in [0, 1) of a seed.
fn uniform(seed: u64, salt: u64) -> f64 {
    let mut z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ salt.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 31)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 29)) >> 11) as f64 / (1u64 << 53) as f64
}

struct SyntheticTrial<'a> {
    landscape: &'a Landscape,
    seed: u64,
    steps_to_goal: Option<f64>,
    step: u64,
}

impl TrialRunner for Landscape {
    fn begin<'a>(
        &'a self,
        _worker: usize,
        settings: &TrialSettings,
    ) -> Result<Box<dyn Trial + Send + 'a>, Error> {
        let steps_to_goal = self.steps_to_goal(settings);
        Ok(Box::new(SyntheticTrial { landscape: self, seed: settings.seed, steps_to_goal, step: 0 }))
    }

    fn resume<'a>(
        &'a self,
        _worker: usize,
        settings: &TrialSettings,
        folder: &Path,
    ) -> Result<Option<ResumedTrial<'a>>, Error> {
        let record: TrialRecord =
            serde_json::from_slice(&fs::read(folder.join("record.json")).unwrap()).unwrap();
        assert_eq!((record.cell(), record.trial), (settings.cell(), settings.seed as u32));
        self.resumed.fetch_add(1, Ordering::Relaxed);
        let (seed, step) = (settings.seed, record.steps);
        let walk =
            SyntheticTrial { landscape: self, seed, steps_to_goal: self.steps_to_goal(settings), step };
        Ok(Some((Box::new(walk), record)))
    }

    fn min_unsaved_time(&self) -> Duration {
        if self.saves { Duration::ZERO } else { Duration::MAX }
    }

    fn chance_level(&self, _goal: Goal) -> f64 {
        0.9
    }

    fn training_samples(&self) -> usize {
        54_000
    }
}

impl Trial for SyntheticTrial<'_> {
    fn advance(&mut self, step: u64) -> Result<TrialCheck, Error> {
        assert!(step > self.step, "a trial goes on from where it was");
        self.landscape.steps_taken.fetch_add(step - self.step, Ordering::Relaxed);
        self.step = step;
        let Some(steps_to_goal) = self.steps_to_goal else {
            return Ok(TrialCheck { step, loss: f64::NAN, error: 1.0, diverged: true, pruned: true });
        };
        let fraction = if steps_to_goal > 0.0 { step as f64 / steps_to_goal } else { 0.5 };
        let power = 0.35 + self.landscape.crossing * (uniform(self.seed, 2) - 0.5);
        let error = 0.9 * (0.12f64 / 0.9).powf(fraction.powf(power));
        Ok(TrialCheck { step, loss: 2.3 * error, error, diverged: false, pruned: true })
    }

    fn save(&mut self, folder: &Path, record: &TrialRecord) -> Result<(), Error> {
        assert_eq!(record.steps, self.step);
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join("record.json"), serde_json::to_vec(record).unwrap()).unwrap();
        Ok(())
    }
}
