//! Lottery tickets (Frankle & Carbin 2019): train, prune the smallest weights that are left, go back, repeat.
//!
//! [`Rounds`] says how many rounds the run is split into and what each keeps. One threshold is over all
//! candidates but the output layer, which loses half as much and has its own. After a round, weights and
//! running statistics are what they were at first, or after `rewind` steps of the first training, and
//! optimizer state and learning rate start there afresh. The data go on: no training meets the same batches
//! again.
//!
//! First values are made again from seed and name, not stored. Others are kept on the host in the precision
//! of the run (in bf16 without the bits that only the master has), and in every checkpoint.

use std::collections::BTreeMap;

use espalier_nn::weights::ParameterId;
use espalier_plan::Plan;
use espalier_plan::pruning::Pruning;
use espalier_plan::rounds::{Rounds, Trainings};
use espalier_tensor::{Category, TrackedBytes};

use super::{Decision, Network, NewMasks, Pruner, PrunerState, StepClock};
use crate::Result;

/// What stands before a name in a checkpoint: a run may be resumed with another method, whose names are not these.
const EARLY: &str = "early/";

/// The search for a lottery ticket.
#[derive(Debug)]
pub struct Lottery {
    rounds: Rounds,
    trainings: Trainings,
    output: Option<String>,
    /// Where the weights go back to, by name; empty where seed and name say it.
    early: BTreeMap<String, Vec<u32>>,
    /// The early weights, in the ledger of the host's memory.
    tracked: Option<TrackedBytes>,
}

impl Lottery {
    /// The search that a run file asks for, in a run of so many steps.
    pub fn new(plan: &Plan, prune: &Pruning, steps: u64) -> Result<Lottery> {
        let rounds = Rounds::of(&plan.model, prune).expect("the fields of a lottery");
        let trainings = rounds.trainings(plan.intervals.length, steps as usize)?;
        let output = plan.model.output_weight();
        Ok(Lottery { rounds, trainings, output, early: BTreeMap::new(), tracked: None })
    }

    /// Keeps the weights as they are now.
    fn remember(&mut self, network: &Network<'_>) -> Result<()> {
        let words = |bytes: &[u8]| {
            let word = |bytes: &[u8]| {
                let mut word = [0; 4];
                word[..bytes.len()].copy_from_slice(bytes);
                u32::from_le_bytes(word)
            };
            bytes.chunks(4).map(word).collect()
        };
        let (params, mut early) = (&network.params, BTreeMap::new());
        for (id, param) in params.iter() {
            early.insert(params.name(id).to_owned(), words(&param.dense()?.read_bytes()?));
        }
        for (id, statistic) in params.statistics() {
            if let Some(statistic) = statistic {
                early.insert(params.statistic_name(id).to_owned(), words(&statistic.read_bytes()?));
            }
        }
        self.early = early;
        self.track_memory(network);
        Ok(())
    }

    fn track_memory(&mut self, network: &Network<'_>) {
        let bytes = self.early.values().map(|words| 4 * words.len()).sum();
        self.tracked = None;
        self.tracked = Some(network.context.device.host_ledger().track(Category::Workspace, bytes));
    }

    /// Puts the weights back.
    fn rewind(&self, network: &mut Network<'_>) -> Result<()> {
        if self.early.is_empty() {
            let context = network.context;
            return network.params.initialise_again(context.local(), context.plan.seed);
        }
        let early = |name: &str| self.early[name].iter().flat_map(|word| word.to_le_bytes()).collect();
        network.params.write_all(|name| early(name))
    }
}

impl Pruner for Lottery {
    fn should_run(&self, at: StepClock) -> bool {
        at.step == self.trainings.rewind() || self.trainings.begins(at.step).is_some()
    }

    /// Those of a checkpoint were read before there was a device.
    fn prepare(&mut self, network: &Network<'_>) -> Result<()> {
        if self.tracked.is_none() && !self.early.is_empty() {
            self.track_memory(network);
        }
        Ok(())
    }

    fn run(&mut self, network: &mut Network<'_>) -> Result<Decision> {
        let (step, rewind) = (network.step, self.trainings.rewind());
        let seed = network.context.plan.seed;
        // A run may start from weights that seed and name do not give.
        let fresh = || network.params.are_initial(network.context.local(), seed);
        if step == rewind && !self.rounds.kept.is_empty() && (step > 0 || !fresh()?) {
            self.remember(network)?;
        }
        let Some(round) = self.trainings.begins(step) else { return Ok(Decision::Wait) };
        if rewind > 0 && self.early.is_empty() {
            let problem = format!(
                "is {rewind}, but the checkpoint that the run resumes from has no weights of that step"
            );
            return Err(espalier_plan::Error::Conflict { field: "prune.rewind".into(), problem }.into());
        }
        let kept = self.rounds.kept[round as usize - 1];
        let is_output = |id: &ParameterId| self.output.as_deref() == Some(network.params.name(*id));
        let (output, others): (Vec<_>, Vec<_>) = network.candidates.iter().partition(|id| is_output(id));
        let mut masks = network.keep(&others, kept.others, |id| network.magnitudes(id))?;
        masks.extend(network.keep(&output, kept.output, |id| network.magnitudes(id))?);
        self.rewind(network)?;
        let note = format!("round {round} of {}, weights as after step {rewind}", self.rounds.kept.len());
        Ok(Decision::Prune(NewMasks { masks, reset_state: true, note, ..NewMasks::default() }))
    }

    fn position(&self, step: u64, _: u64) -> (u64, u64) {
        let standing = self.trainings.at(step);
        (standing.position, standing.length)
    }

    fn save(&self) -> Result<BTreeMap<String, Vec<u32>>> {
        Ok(self.early.iter().map(|(name, words)| (format!("{EARLY}{name}"), words.clone())).collect())
    }

    fn state_kind<'a>(&self, name: &'a str) -> Option<PrunerState<'a>> {
        name.strip_prefix(EARLY).map(PrunerState::ValuesOf)
    }

    fn load(&mut self, saved: BTreeMap<String, Vec<u32>>) {
        let early = |(name, words): (String, _)| Some((name.strip_prefix(EARLY)?.to_owned(), words));
        self.early = saved.into_iter().filter_map(early).collect();
    }
}
