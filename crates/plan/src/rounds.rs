//! The rounds of a lottery ticket (Frankle & Carbin 2019): how many, what each keeps, and which steps belong
//! to which.
//!
//! A round removes `rate` of what is left, and half of that rate of the output layer. There are as many
//! rounds as the sparsity needs; the last one removes less, so that exactly the right number is left. One
//! training stands before each round and one behind the last. With k = `rewind`, the first has L steps and
//! the others, which begin where it was after k, L - k:
//!
//! ```text
//! L + rounds (L - k) = steps        what does not divide goes to the last training
//! ```

use crate::error::Error;
use crate::intervals::RunLength;
use crate::pruning::{PruneMethod, Pruning};
use crate::spec::ModelSpec;

/// What each round keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rounds {
    /// Weights left after each round.
    pub kept: Vec<RoundKept>,
    rewind: usize,
}

/// Weights that a round leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundKept {
    /// Of the output layer, if it is a candidate.
    pub output: usize,
    /// Of all other candidates.
    pub others: usize,
}

/// Which steps belong to which training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trainings {
    rounds: u64,
    rewind: u64,
    length: u64,
    steps: u64,
}

/// Where a step stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainingPosition {
    /// Which training, from 0: so many rounds came before it.
    pub training: u64,
    /// The steps that its weights have behind them.
    pub position: u64,
    /// Those that they have at its end.
    pub length: u64,
}

impl Rounds {
    /// The rounds of a model; none for any other method.
    pub fn of(model: &ModelSpec, prune: &Pruning) -> Option<Rounds> {
        let PruneMethod::Lottery { rate, rewind } = prune.method else { return None };
        let (head, mut now) = (model.output_weight(), RoundKept { output: 0, others: 0 });
        for parameter in model.parameters().iter().filter(|parameter| prune.covers(parameter)) {
            let output = Some(&parameter.name) == head.as_ref();
            *(if output { &mut now.output } else { &mut now.others }) += parameter.elements() as usize;
        }
        let goal = prune.kept_of((now.output + now.others) as u64) as usize;
        let mut kept = Vec::new();
        while now.output + now.others > goal {
            now = now.after(rate, goal);
            kept.push(now);
        }
        Some(Rounds { kept, rewind })
    }

    /// The trainings of a run of so many steps, or what is wrong with that number.
    pub fn trainings(&self, length: RunLength, steps: usize) -> Result<Trainings, Error> {
        let (rounds, rewind) = (self.kept.len(), self.rewind);
        let each = steps.saturating_add(rounds * rewind) / (rounds + 1);
        if each <= rewind {
            let (field, given) = match length {
                RunLength::Steps(_) => ("train.steps", format!("is {steps}")),
                RunLength::Epochs(_) => ("train.epochs", format!("gives {steps} steps")),
            };
            let problem = format!(
                "{given}, but the lottery trains {} times ({rounds} rounds of `prune.rate`) and \
                 `prune.rewind` is {rewind}: at least {} are needed",
                rounds + 1,
                rewind + rounds + 1
            );
            return Err(Error::conflict(field, problem));
        }
        let [rounds, rewind, length, steps] = [rounds, rewind, each, steps].map(|n| n as u64);
        Ok(Trainings { rounds, rewind, length, steps })
    }
}

impl RoundKept {
    /// What one more round leaves, or exactly `goal` where that round would leave less.
    fn after(self, rate: f64, goal: usize) -> RoundKept {
        let left =
            |now: usize, rate: f64| now - ((rate * now as f64).round() as usize).clamp(now.min(1), now);
        let next = RoundKept { output: left(self.output, rate / 2.0), others: left(self.others, rate) };
        if next.output + next.others >= goal {
            return next;
        }
        // The rate r at which others (1 - r) + output (1 - r / 2) is the goal.
        let surplus = (self.output + self.others - goal) as f64;
        let rate = surplus / (self.others as f64 + self.output as f64 / 2.0);
        let output = (self.output as f64 * (1.0 - rate / 2.0)).round() as usize;
        // Neither may grow by the rounding of the other.
        let output = output.clamp(goal.saturating_sub(self.others), goal.min(self.output));
        RoundKept { output, others: goal - output }
    }
}

impl Trainings {
    /// The step before which the weights to go back to are kept.
    pub fn rewind(&self) -> u64 {
        self.rewind
    }

    /// Where a step stands.
    pub fn at(&self, step: u64) -> TrainingPosition {
        let Trainings { rounds, rewind, length, steps } = *self;
        if step < length || rounds == 0 {
            return TrainingPosition { training: 0, position: step, length };
        }
        let training = (1 + (step - length) / (length - rewind)).min(rounds);
        let begin = self.begin(training);
        let length = if training == rounds { rewind + steps - begin } else { length };
        TrainingPosition { training, position: rewind + step - begin, length }
    }

    /// The training before whose first step this is, if it is one and not the first.
    pub fn begins(&self, step: u64) -> Option<u64> {
        let training = self.at(step).training;
        (training > 0 && self.begin(training) == step).then_some(training)
    }

    /// The step before which all rounds are over.
    pub(crate) fn last_begins(&self) -> u64 {
        if self.rounds == 0 { 0 } else { self.begin(self.rounds) }
    }

    fn begin(&self, training: u64) -> u64 {
        self.length + (training - 1) * (self.length - self.rewind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RunFile;
    use crate::spec::presets::simple_cnn;
    use proptest::prelude::*;

    fn run(settings: &[&str]) -> RunFile {
        let settings: Vec<_> = settings.iter().map(|text| (*text).into()).collect();
        RunFile::parse("[model]\nname = \"simple-cnn\"\n[prune]\nmethod = \"lottery\"", &settings).unwrap()
    }

    fn rounds(run: &RunFile) -> Rounds {
        Rounds::of(&simple_cnn((28, 28, 1), 10), &run.prune.clone().unwrap()).unwrap()
    }

    #[test]
    fn a_fifth_goes_each_round_and_a_tenth_of_the_output_layer() {
        // By hand, for 1000 and 100 weights to half: 800 + 90, 640 + 81, then a smaller rate to exactly 550.
        let mut now = RoundKept { output: 100, others: 1000 };
        let mut all = Vec::new();
        for _ in 0..3 {
            now = now.after(0.2, 550);
            all.push((now.others, now.output));
        }
        // r = (721 - 550) / (640 + 40.5) = 0.2513: above 0.2, so a third full round comes first.
        assert_eq!(all, [(800, 90), (640, 81), (512, 73)]);
        // r = (585 - 550) / (512 + 36.5) = 0.0638: 73 (1 - 0.0319) = 70.67, and 550 - 71.
        assert_eq!(now.after(0.2, 550), RoundKept { output: 71, others: 479 });
    }

    #[test]
    fn the_last_round_ends_at_the_sparsity_exactly() {
        for sparsity in [0.0, 0.1, 0.2, 0.5, 0.9, 0.99, 0.9999] {
            let run = run(&[&format!("prune.sparsity={sparsity}")]);
            let prune = run.prune.clone().unwrap();
            let candidates: u64 = simple_cnn((28, 28, 1), 10)
                .parameters()
                .iter()
                .filter(|p| prune.covers(p))
                .map(|p| p.elements())
                .sum();
            let rounds = rounds(&run);
            let last = rounds.kept.last().map_or(candidates, |k| (k.output + k.others) as u64);
            assert_eq!(last, prune.kept_of(candidates), "{sparsity}");
        }
        assert_eq!(rounds(&run(&["prune.sparsity=0"])).kept, []);
        // 52,000 weights and 10,240 of the output layer to 6,224: 52000 0.8^12 + 10240 0.9^12 = 6465, with
        // 13: 5461.
        assert_eq!(rounds(&run(&["prune.sparsity=0.9"])).kept.len(), 13);
    }

    #[test]
    fn too_few_steps_are_named() {
        let run = run(&["prune.rewind=3"]);
        let all = rounds(&run);
        insta::assert_snapshot!(all.trainings(run.train.length, 16).unwrap_err(), @"`train.steps` is 16, but the lottery trains 14 times (13 rounds of `prune.rate`) and `prune.rewind` is 3: at least 17 are needed");
        let least = all.trainings(run.train.length, 17).unwrap();
        assert_eq!(least.at(16), TrainingPosition { training: 13, position: 3, length: 4 });
        let epochs = self::run(&["train.epochs=1"]);
        insta::assert_snapshot!(rounds(&epochs).trainings(epochs.train.length, 7).unwrap_err(), @"`train.epochs` gives 7 steps, but the lottery trains 14 times (13 rounds of `prune.rate`) and `prune.rewind` is 0: at least 14 are needed");
    }

    proptest! {
        /// Each training counts on from the one it goes back to, and together they are the run.
        #[test]
        fn trainings_tile_the_run(rounds in 0usize..12, rewind in 0usize..20, more in 1usize..300) {
            let kept = vec![RoundKept { output: 0, others: 0 }; rounds];
            let steps = rewind + rounds + more;
            let trainings = Rounds { kept, rewind }.trainings(RunLength::Steps(steps), steps).unwrap();
            let mut before: Option<TrainingPosition> = None;
            for step in 0..steps as u64 {
                let now = trainings.at(step);
                prop_assert!(now.position < now.length);
                match before {
                    Some(old) if old.training == now.training => {
                        prop_assert_eq!((now.position, now.length), (old.position + 1, old.length));
                    }
                    Some(old) => {
                        prop_assert_eq!(now.training, old.training + 1);
                        prop_assert_eq!((now.position, old.position + 1), (rewind as u64, old.length));
                    }
                    None => prop_assert_eq!((now.training, now.position), (0, 0)),
                }
                let begins = now.training > 0 && now.position == rewind as u64;
                prop_assert_eq!(trainings.begins(step), begins.then_some(now.training));
                before = Some(now);
            }
            let last = before.unwrap();
            prop_assert_eq!((last.training, last.position + 1), (rounds as u64, last.length));
        }
    }
}
