//! Whether a model has reached a goal, asked of few samples: those first that it got wrong when it was last
//! asked. A model that is somewhat above the goal is mostly wrong where it was wrong before, so that it has
//! failed for certain once these are seen, which are about as many as the goal allows.

use espalier_data::{DataSplit, spread};
use espalier_tensor::ops::argmax;

use super::Trainer;
use crate::Result;
use crate::step::NoUpdatePass;

/// The fewest samples that are worth a wait for a GPU.
const MIN_SAMPLES: usize = 256;

/// The question whether at most so many images of the validation split are wrong.
#[derive(Debug)]
pub struct GoalCheck {
    max_wrong: usize,
    /// Those that were wrong when last seen, then those that were not seen, then those that were right.
    order: Vec<usize>,
    /// How many run at a time.
    most_samples: usize,
}

impl GoalCheck {
    /// For a trainer that is its only rank; nothing where samples have no classes.
    pub fn new(trainer: &Trainer, max_wrong: usize) -> Option<GoalCheck> {
        let (dataset, plan) = (&trainer.context.dataset, &trainer.context.plan);
        let all = dataset.len(DataSplit::Validation);
        let count = plan.intervals.eval_samples.map_or(all, |samples| samples.min(all));
        let most_samples = plan.intervals.eval_batch.unwrap_or(plan.batch.micro_batch);
        let order = (0..count).map(|i| spread(i, count, all)).collect();
        let has_classes = plan.mesh.size() == 1 && dataset.label(DataSplit::Validation, 0).is_some();
        has_classes.then_some(GoalCheck { max_wrong, order, most_samples })
    }

    /// Whether the model has reached the goal. One that has is seen with all samples.
    pub fn is_reached(&mut self, trainer: &Trainer) -> Result<bool> {
        let (mut wrong, mut right) = (Vec::new(), Vec::new());
        while wrong.len() <= self.max_wrong {
            let unseen = &self.order[wrong.len() + right.len()..];
            if unseen.is_empty() {
                break;
            }
            let fewest = MIN_SAMPLES.min(self.most_samples);
            let count = (self.max_wrong + 1 - wrong.len()).clamp(fewest, self.most_samples);
            let samples = &unseen[..count.min(unseen.len())];
            for (&sample, is_wrong) in samples.iter().zip(trainer.mistakes(samples)?) {
                (if is_wrong { &mut wrong } else { &mut right }).push(sample);
            }
        }
        let is_reached = wrong.len() <= self.max_wrong;
        let unseen = self.order.split_off(wrong.len() + right.len());
        self.order = [wrong, unseen, right].concat();
        Ok(is_reached)
    }
}

impl Trainer {
    /// Which of some images of the validation split the model gets wrong.
    fn mistakes(&self, samples: &[usize]) -> Result<Vec<bool>> {
        let picks: Vec<(u64, usize)> = samples.iter().map(|sample| (0, *sample)).collect();
        let (logits, classes) = NoUpdatePass::of(&self.context, &self.params).logits(&picks)?;
        let likeliest = logits.chunks(classes).map(argmax::of_slice);
        let label = |sample: &usize| self.context.dataset.label(DataSplit::Validation, *sample);
        Ok(samples.iter().zip(likeliest).map(|(sample, class)| label(sample) != Some(class)).collect())
    }
}
