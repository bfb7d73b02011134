//! Samples that the model of a run generates on the way, for a person to see.

use espalier_data::{Dataset, Tokenizer};
use espalier_plan::Plan;

use super::Observer;
use crate::infer::{Sampler, Sampling, TextStream};
use crate::trainer::Trainer;
use crate::{Error, Result};

/// The tokens of a run's prompt, where it has one. All ranks ask, before the first step.
pub(super) fn prompt(plan: &Plan, dataset: &Dataset) -> Result<Option<Vec<u32>>> {
    let Some(sample) = &plan.sample else { return Ok(None) };
    let ids = tokenizer(dataset).encode(&sample.prompt)?;
    let context = plan.model.input.context().unwrap_or(0);
    match ids.len() <= context {
        true => Ok(Some(ids)),
        false => {
            let problem =
                format!("has {} tokens, more than `model.context` = {context}: shorten it", ids.len());
            Err(Error::Plan(espalier_plan::Error::Conflict { field: "sample.prompt".into(), problem }))
        }
    }
}

fn tokenizer(dataset: &Dataset) -> &Tokenizer {
    dataset.tokenizer().expect("a run file with a sample has text")
}

/// Lets the model generate behind the tokens of a prompt, where it is time to. All ranks must.
pub(super) fn sample(
    trainer: &Trainer,
    plan: &Plan,
    prompt: &[u32],
    last: bool,
    observer: &mut dyn Observer,
) -> Result<()> {
    let step = trainer.progress().step;
    let Some(sample) = &plan.sample else { return Ok(()) };
    // A run that is to stop does so first.
    let stops = trainer.progress().evaluation_due;
    if stops || !sample.is_due(step, last, &plan.intervals) {
        return Ok(());
    }
    let sampling = Sampling {
        temperature: sample.temperature,
        top_k: sample.top_k,
        top_p: sample.top_p,
        seed: plan.seed,
        ..Sampling::GREEDY
    };
    observer.sampled(step, &sample.prompt, &generate(trainer, prompt, sample.tokens, sampling)?);
    Ok(())
}

/// What the model in training generates behind some tokens.
fn generate(trainer: &Trainer, prompt: &[u32], tokens: usize, sampling: Sampling) -> Result<String> {
    let mut generator = trainer.generator()?;
    let tokenizer = tokenizer(trainer.dataset());
    let mut stream = TextStream::new(tokenizer, &[]);
    let mut should_continue = |token: u32| {
        let is_end = tokenizer.end() == Some(token);
        if !is_end {
            stream.push(token);
        }
        !is_end
    };
    generator.generate(prompt, tokens, &mut Sampler::new(sampling), &mut should_continue)?;
    stream.finish();
    Ok(stream.text().to_owned())
}
