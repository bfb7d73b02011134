//! The network of a run: what the file names, with the sizes that the data decides.

use super::DataFacts;
use crate::config::{self, Family, InitVariance};
use crate::error::Error;
use crate::spec::custom::custom;
use crate::spec::presets;
use crate::spec::{Input, ModelSpec};

/// Builds it, or says what the data lacks for it.
pub(super) fn build(written: &config::ModelConfig, facts: DataFacts) -> Result<ModelSpec, Error> {
    let image = || {
        facts.image.ok_or_else(|| {
            Error::conflict(
                "data.kind",
                format!("gives no images, but the model {} takes them", written.name),
            )
        })
    };
    let classes = |number| at_least("model.classes", number, facts.classes, "classes");
    let vocab = |field, number| at_least(field, number, facts.vocab, "tokens");
    Ok(match written.family {
        Family::Gpt(_) | Family::GptPreset { .. } => {
            let vocab = vocab("model.vocab", written.vocab())?;
            presets::gpt(&written.name, &written.gpt(vocab).expect("it is one"))
        }
        Family::Llama(_) | Family::LlamaPreset { .. } => {
            let vocab = vocab("model.vocab", written.vocab())?;
            presets::llama(&written.name, &written.llama(vocab).expect("it is one"))
        }
        Family::Mlp { ref hidden, init, classes: number } => {
            started(presets::mlp(image()?, hidden, classes(number)?), init)
        }
        Family::SimpleCnn { init, classes: number } => {
            started(presets::simple_cnn(image()?, classes(number)?), init)
        }
        Family::Resnet8 { init, classes: number } => {
            started(presets::resnet8(image()?, classes(number)?), init)
        }
        Family::ResNet { net, classes: number, form } => {
            let image = image()?;
            presets::resnet(net, image, classes(number)?, form.form(image))
        }
        Family::Vgg { net, classes: number, form, batch_norm } => {
            let image = image()?;
            presets::vgg(net, image, classes(number)?, form.form(image), batch_norm)
        }
        Family::AlexNet { classes: number, form } => {
            let image = image()?;
            presets::alexnet(image, classes(number)?, form.form(image))
        }
        Family::Custom { classes: number, context: Some(seq), ref layers } => {
            let vocab = vocab("model.classes", number)?;
            custom(Input::Tokens { seq, vocab }, vocab, layers)?
        }
        Family::Custom { classes: number, context: None, ref layers } => {
            let (height, width, channels) = image()?;
            custom(Input::Image { height, width, channels }, classes(number)?, layers)?
        }
    })
}

/// A model with the initial weights that the file asks for.
fn started(mut model: ModelSpec, init: InitVariance) -> ModelSpec {
    if init == InitVariance::FanIn {
        model.start_by_fan_in();
    }
    model
}

/// A number of logits: what is written, or else what the data has; never fewer than that.
fn at_least(field: &str, written: Option<usize>, data: Option<usize>, what: &str) -> Result<usize, Error> {
    match (written, data) {
        (Some(n), Some(least)) if n < least => {
            Err(Error::conflict(field, format!("is {n}, but the data has {least} {what}")))
        }
        (Some(n), _) | (None, Some(n)) => Ok(n),
        (None, None) => {
            let expected = format!("the number of {what} in the data is unknown");
            Err(Error::Missing { field: field.into(), expected })
        }
    }
}
