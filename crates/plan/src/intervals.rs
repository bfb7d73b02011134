//! What happens after which step: how long a run is, and when it is evaluated, saved and logged.

use serde::{Deserialize, Serialize};

/// How long a run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunLength {
    /// So many optimizer steps.
    Steps(usize),
    /// So many times through the training data.
    Epochs(usize),
}

impl RunLength {
    /// Steps of the run when an epoch has `samples` samples; the last, smaller batch of an epoch is left out,
    /// but a run has at least one step.
    pub fn steps(self, samples: usize, batch: usize) -> usize {
        match self {
            RunLength::Steps(steps) => steps,
            RunLength::Epochs(epochs) => epochs.saturating_mul((samples / batch.max(1)).max(1)),
        }
    }
}

/// When the state is saved, and how many times back one can go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointPolicy {
    /// Steps between checkpoints; 0: only at the end.
    pub every: usize,
    /// How many are kept, the newest.
    pub keep: usize,
    /// Whether there is one at the end.
    pub last: bool,
}

/// After which steps something is done beside training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrainIntervals {
    /// When the run is over.
    pub length: RunLength,
    /// Steps between validations; none: only at the end.
    pub eval_every: Option<u64>,
    /// Validation samples used each time; none: all.
    pub eval_samples: Option<usize>,
    /// Validation samples that run at a time; none: a micro-batch.
    pub eval_batch: Option<usize>,
    /// Steps between lines of the log.
    pub log_every: u64,
    /// When it is saved.
    pub checkpoint: CheckpointPolicy,
}

impl TrainIntervals {
    /// Whether the model is evaluated after a step that is not the last.
    pub fn evaluates(&self, step: u64) -> bool {
        self.eval_every.is_some_and(|every| step.is_multiple_of(every))
    }

    /// Whether the state is saved after a step that is not the last.
    pub fn saves(&self, step: u64) -> bool {
        self.save_every().is_some_and(|every| step.is_multiple_of(every))
    }

    /// Steps between checkpoints; none: only at the end.
    pub fn save_every(&self) -> Option<u64> {
        Some(self.checkpoint.every as u64).filter(|every| *every > 0)
    }

    /// The first step after so many that something is evaluated or saved behind.
    pub fn next_check(&self, step: u64) -> Option<u64> {
        let every = [self.eval_every, self.save_every()].into_iter().flatten();
        every.map(|every| (step / every + 1) * every).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_come_at_multiples_of_either() {
        let checkpoint = CheckpointPolicy { every: 4, keep: 3, last: true };
        let both = TrainIntervals {
            length: RunLength::Steps(100),
            eval_every: Some(6),
            eval_samples: None,
            eval_batch: None,
            log_every: 1,
            checkpoint,
        };
        let looks: Vec<u64> = std::iter::successors(Some(0), |step| both.next_check(*step)).take(6).collect();
        assert_eq!(looks, [0, 4, 6, 8, 12, 16]);
        assert!(both.evaluates(12) && both.saves(12) && !both.saves(6) && !both.evaluates(4));
        let never = TrainIntervals {
            eval_every: None,
            checkpoint: CheckpointPolicy { every: 0, ..checkpoint },
            ..both
        };
        assert_eq!(never.next_check(7), None);
    }
}
