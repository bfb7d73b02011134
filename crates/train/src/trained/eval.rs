//! How well a trained model does on data: what `espalier eval` says.

use std::sync::Arc;

use espalier_data::{DataSplit, Dataset, spread};
use espalier_plan::Plan;
use espalier_plan::spec::Input;
use espalier_tensor::Device;
use espalier_tensor::ops::cross_entropy::IGNORED;
use serde::Serialize;

use super::TrainedModel;
use crate::Result;
use crate::parallel::{AbortFn, Ranks, on_threads_with_timeout};
use crate::trainer::Evaluation;

/// What a model comes to on some samples; the fields are promised in the contract of the command line.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct EvalResult {
    /// The mean loss of a prediction, in nats.
    pub loss: f64,
    /// e to the loss, for text: one of the two below.
    pub perplexity: Option<f64>,
    /// That of windows that do not overlap: a token is predicted from those before it in its window, the
    /// first of a window from one.
    pub windowed_perplexity: Option<f64>,
    /// That of windows that overlap by all but `stride` tokens, as others publish it.
    pub strided_perplexity: Option<f64>,
    /// Tokens of a window, for text.
    pub context: Option<usize>,
    /// Tokens from the start of a window to that of the next, where they overlap.
    pub stride: Option<usize>,
    /// The loss in bits for each byte of text: comparable between tokenizers. None where nobody knows what
    /// ids stand for.
    pub bits_per_byte: Option<f64>,
    /// The fraction of right predictions, for images.
    pub accuracy: Option<f64>,
    /// Samples that were evaluated.
    pub samples: usize,
    /// Tokens that were predicted, for text.
    pub tokens: Option<usize>,
}

/// Which windows of the data a model is evaluated on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EvalWindows {
    /// So many of them, spread evenly; all without a number.
    pub samples: Option<usize>,
    /// Tokens from the start of one to that of the next; they do not overlap without a number.
    pub stride: Option<usize>,
}

impl TrainedModel {
    /// Runs it over the validation split of a data set, or over so many samples of it, spread evenly, on the
    /// ranks of a plan that was made [for it](TrainedModel::plan_for). Windows of a text overlap by all but
    /// `stride` tokens, where one is given. `abort` ends a process in which a rank hangs.
    pub fn evaluate(
        &self,
        plan: Plan,
        dataset: Dataset,
        windows: EvalWindows,
        device: &Device,
        abort: Option<AbortFn>,
    ) -> Result<EvalResult> {
        let EvalWindows { samples, stride } = windows;
        let dataset = match stride {
            Some(stride) => dataset.strided(stride)?,
            None => dataset,
        };
        let dataset = Arc::new(dataset);
        let all = dataset.len(DataSplit::Validation);
        let count = samples.map_or(all, |samples| samples.min(all));
        let work = |ranks: Ranks, device: &Device| {
            let mut rank = self.trainer(plan.clone(), dataset.clone(), device, ranks)?;
            rank.evaluate_samples(Some(count))
        };
        let evaluation = match plan.mesh.size() {
            1 => device.enter(|| work(Ranks::single(), device))?,
            _ => {
                let all = on_threads_with_timeout(plan.timeout, abort, &plan.mesh, device, work)?;
                all.into_iter().next().expect("there is a rank 0")
            }
        };
        let Some(Evaluation { loss, accuracy, .. }) = evaluation else {
            return Err(self
                .checkpoint()
                .refuse("there is nothing to evaluate on: the data have no validation split"));
        };
        if !loss.is_finite() {
            if let Some(name) = self.checkpoint().first_not_finite(&plan.model)? {
                return Err(self.checkpoint().not_finite(&name));
            }
            return Err(self.checkpoint().refuse(format!("its loss on these data is {loss}")));
        }
        if plan.facts.vocab.is_none() {
            let accuracy = Some(accuracy);
            return Ok(EvalResult { loss, accuracy, samples: count, ..EvalResult::default() });
        }
        let (mut tokens, mut bytes) = (0, 0);
        for i in 0..count {
            let mut targets = dataset.batch(DataSplit::Validation, &[(0, spread(i, count, all))])?.targets;
            targets.retain(|target| *target != IGNORED);
            tokens += targets.len();
            bytes += self.tokenizer().map_or(0, |tokenizer| tokenizer.text_bytes(&targets));
        }
        let context = match plan.model.input {
            Input::Tokens { seq, .. } => Some(seq),
            Input::Image { .. } => None,
        };
        let bits = loss * tokens as f64 / std::f64::consts::LN_2;
        Ok(EvalResult {
            loss,
            perplexity: Some(loss.exp()),
            windowed_perplexity: stride.is_none().then(|| loss.exp()),
            strided_perplexity: stride.map(|_| loss.exp()),
            context,
            stride,
            bits_per_byte: (bytes > 0).then(|| bits / bytes as f64),
            accuracy: None,
            samples: count,
            tokens: Some(tokens),
        })
    }
}
