//! How well a model does on what it never learns from: the validation split, or a part of it that is spread
//! evenly.

use espalier_data::{DataSplit, spread};

use super::Trainer;
use crate::Result;
use crate::step::{NoUpdatePass, PassMicroBatch, Totals};

/// How well the model does on held-out data.
#[derive(Debug, Clone, Copy)]
pub struct Evaluation {
    /// The mean loss.
    pub loss: f64,
    /// The fraction of right predictions.
    pub accuracy: f64,
    pub wrong: usize,
    pub predictions: usize,
}

impl Evaluation {
    fn of(totals: Totals) -> Evaluation {
        Evaluation {
            loss: totals.loss(),
            accuracy: totals.accuracy(),
            wrong: totals.predictions - totals.correct,
            predictions: totals.predictions,
        }
    }

    /// The fraction of wrong predictions, as one division: 120 of 6000 is the 0.02 that a person writes.
    pub fn error(&self) -> f64 {
        self.wrong as f64 / self.predictions as f64
    }
}

impl Trainer {
    /// Runs the model over the validation split, or `eval_samples` of it, spread evenly; nothing where none
    /// is held out.
    pub fn evaluate(&mut self) -> Result<Option<Evaluation>> {
        self.evaluate_unless_stopped(&|| false)
    }

    /// The same; between batches every rank is asked whether to `stop`. Where one says so there is no
    /// evaluation, and [`RunProgress::evaluation_due`](super::RunProgress::evaluation_due) stays set on all
    /// of them.
    pub fn evaluate_unless_stopped(&mut self, stop: &dyn Fn() -> bool) -> Result<Option<Evaluation>> {
        self.progress.evaluation_due = true;
        let samples = self.context.plan.intervals.eval_samples;
        let found = self.evaluate_until(samples, &|_| stop())?;
        self.progress.evaluation_due = found.is_some_and(|(_, complete)| !complete);
        let Some((totals, true)) = found else { return Ok(None) };
        let evaluation = Evaluation::of(totals);
        if evaluation.loss.is_finite() {
            let best = self.progress.best_validation.get_or_insert(evaluation.loss);
            *best = best.min(evaluation.loss);
        }
        Ok(Some(evaluation))
    }

    /// The same as [`Trainer::evaluate`] for one who asks whether at most so many predictions are wrong: once
    /// more are, the rest is left out, and what comes back is of the samples seen. On several ranks one that
    /// has seen so many ends it for all.
    pub fn evaluate_up_to(&mut self, wrong: usize) -> Result<Option<Evaluation>> {
        let enough = |seen: &Totals| seen.predictions - seen.correct > wrong;
        let samples = self.context.plan.intervals.eval_samples;
        Ok(self.evaluate_until(samples, &enough)?.map(|(totals, _)| Evaluation::of(totals)))
    }

    /// The same as [`Trainer::evaluate`] over so many samples, or all, whatever the run asks for; its
    /// progress stays what it was.
    pub(crate) fn evaluate_samples(&mut self, samples: Option<usize>) -> Result<Option<Evaluation>> {
        Ok(self.evaluate_until(samples, &|_| false)?.map(|(totals, _)| Evaluation::of(totals)))
    }

    /// The logits of a sample of the validation split, of all classes; where this rank has all of the model.
    pub(crate) fn logits(&self, sample: usize) -> Result<Vec<f32>> {
        NoUpdatePass::of(&self.context, &self.params).last_logits(sample)
    }

    /// What came of so many samples, or all, seen until a rank has seen `enough`, and whether these are all;
    /// nothing where none is held out.
    fn evaluate_until(
        &mut self,
        samples: Option<usize>,
        enough: &dyn Fn(&Totals) -> bool,
    ) -> Result<Option<(Totals, bool)>> {
        let _span = tracing::error_span!("evaluation after step", number = self.progress.step).entered();
        self.average()?;
        let all = self.context.dataset.len(DataSplit::Validation);
        let intervals = &self.context.plan.intervals;
        let count = samples.map_or(all, |samples| samples.min(all));
        if count == 0 {
            return Ok(None);
        }
        let local = self.context.ranks.batch_range(count);
        let samples: Vec<(u64, usize)> = local.map(|i| (0, spread(i, count, all))).collect();
        let micro_batch = intervals.eval_batch.unwrap_or(self.context.plan.batch.micro_batch);
        // As many micro-batches are under way as there are stages.
        let micro_batches = PassMicroBatch::of_replica(&self.context, &samples, count, micro_batch);
        let mut groups = micro_batches.chunks(self.context.stage.placement().ranks());
        let (mut totals, mut complete) = (Totals::default(), true);
        // All ask as often as the rank with most to do.
        let rounds = self.context.ranks.all_reduce_max(vec![groups.len() as u64])?[0];
        for _ in 0..rounds {
            if self.context.ranks.any_rank(enough(&totals))? {
                complete = false;
                break;
            }
            if let Some(group) = groups.next() {
                totals.add(NoUpdatePass::of(&self.context, &self.params).evaluate(group)?);
            }
        }
        Ok(Some((totals.of_all(&self.context.ranks)?, complete)))
    }
}
