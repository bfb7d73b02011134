//! `[model]`: which network. The name decides which other fields there are.

use serde::{Deserialize, Serialize};

use super::fields;
use super::layers::read_layers;
use super::llama::LlamaConfig;
use super::reader::{FieldValues, Section, integer};
use super::{Error, LAYERS_MOST};
use crate::field::LARGEST;
use crate::spec::Activation;
use crate::spec::WrittenLayer;
use crate::spec::presets::{Gpt, ImageSize, Llama, NormKind, ResNet, StemForm, Vgg};

/// `[model]`
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelConfig {
    /// A family (`gpt`, `mlp`, `custom`) or a published size (`gpt2-124m`, `resnet-50`).
    pub name: String,
    /// What the family lets one choose.
    #[serde(flatten)]
    pub family: Family,
}

/// The fields of each family.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Family {
    /// `gpt`: a transformer of any size.
    Gpt(GptConfig),
    /// `llama`: a model of the Llama family, of any size.
    Llama(LlamaConfig),
    /// `llama-3.2-1b` and the like: sizes are fixed, up to what the data decides.
    LlamaPreset {
        /// Tokens in a sample.
        context: usize,
        /// Tokens there are.
        vocab: usize,
    },
    /// `gpt2-124m` and the like: sizes are fixed, up to what the data decides.
    GptPreset {
        /// Tokens in a sample.
        context: usize,
        /// Tokens there are.
        vocab: usize,
        dropout: f64,
    },
    Mlp {
        /// Widths of the hidden layers.
        hidden: Vec<usize>,
        /// What weights start from.
        init: InitVariance,
        /// Classes; left out: as many as the data has.
        #[serde(skip_serializing_if = "Option::is_none")]
        classes: Option<usize>,
    },
    SimpleCnn {
        /// What weights start from.
        init: InitVariance,
        /// Classes; left out: as many as the data has.
        #[serde(skip_serializing_if = "Option::is_none")]
        classes: Option<usize>,
    },
    Resnet8 {
        /// What weights start from.
        init: InitVariance,
        /// Classes; left out: as many as the data has.
        #[serde(skip_serializing_if = "Option::is_none")]
        classes: Option<usize>,
    },
    /// `resnet-18` and the like.
    ResNet {
        /// Which: the name says it.
        #[serde(skip)]
        net: ResNet,
        /// Classes; left out: as many as the data has.
        #[serde(skip_serializing_if = "Option::is_none")]
        classes: Option<usize>,
        /// For large images or small ones.
        form: FormChoice,
    },
    /// `vgg-16` and `vgg-19`
    Vgg {
        /// Which: the name says it.
        #[serde(skip)]
        net: Vgg,
        /// Classes; left out: as many as the data has.
        #[serde(skip_serializing_if = "Option::is_none")]
        classes: Option<usize>,
        /// For large images or small ones.
        form: FormChoice,
        /// Whether a batch norm follows every convolution.
        batch_norm: bool,
    },
    AlexNet {
        /// Classes; left out: as many as the data has.
        #[serde(skip_serializing_if = "Option::is_none")]
        classes: Option<usize>,
        /// For large images or small ones.
        form: FormChoice,
    },
    /// `custom`: layers written in the run file.
    Custom {
        /// Classes, or tokens there are; left out: as many as the data has.
        #[serde(skip_serializing_if = "Option::is_none")]
        classes: Option<usize>,
        /// Tokens in a sample, where the first layer is an embedding.
        #[serde(skip_serializing_if = "Option::is_none")]
        context: Option<usize>,
        layers: Vec<WrittenLayer>,
    },
}

/// The fields of `gpt`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GptConfig {
    /// Transformer layers.
    pub layers: usize,
    /// Attention heads; they divide the width.
    pub heads: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Tokens in a sample.
    pub context: usize,
    /// Tokens there are; left out: as many as the data has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocab: Option<usize>,
    pub dropout: f64,
    /// Whether the head uses the token embedding's weight.
    pub tied: bool,
    /// `layer` or `rms`.
    pub norm: NormKind,
    /// `gelu`, `relu`, `silu`, `gelu_erf` or `tanh`.
    pub activation: Activation,
    /// Columns inside the perceptron; left out: four widths.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inner: Option<usize>,
    /// Added to variances in norms.
    #[serde(skip_serializing_if = "is_usual_eps")]
    pub eps: f64,
}

impl GptConfig {
    /// As sizes and choices, of a model that knows so many tokens.
    fn shape(&self, vocab: usize) -> Gpt {
        let &GptConfig { layers, heads, width, context, tied, norm, activation, inner, eps, .. } = self;
        let dropout = self.dropout as f32;
        Gpt { layers, width, heads, context, vocab, dropout, tied, norm, activation, inner, eps }
    }
}

/// Whether an epsilon goes without saying.
fn is_usual_eps(eps: &f64) -> bool {
    *eps == Gpt::EPS
}

/// Which form of a convolutional model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum FormChoice {
    /// The small one for images of up to 64 pixels a side.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    /// As published, for 224 x 224.
    #[serde(rename = "imagenet")]
    ImageNet,
    /// For 32 x 32.
    #[serde(rename = "32x32")]
    Small,
}

impl FormChoice {
    /// The form for an image of this size.
    pub fn form(self, image: ImageSize) -> StemForm {
        match self {
            FormChoice::Auto => StemForm::for_image(image),
            FormChoice::ImageNet => StemForm::ImageNet,
            FormChoice::Small => StemForm::Small,
        }
    }
}

impl From<StemForm> for FormChoice {
    fn from(form: StemForm) -> FormChoice {
        match form {
            StemForm::ImageNet => FormChoice::ImageNet,
            StemForm::Small => FormChoice::Small,
        }
    }
}

/// The variance that weights of the small image models start with; all are truncated normals over the fan-in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InitVariance {
    /// 2 / fan-in where a ReLU follows (He et al. 2015), 1 / fan-in at the logits.
    #[default]
    He,
    /// 1 / fan-in throughout, as in the networks of the data-parallelism study (Lee et al. 2021).
    FanIn,
}

impl ModelConfig {
    /// Whether it takes text; images otherwise.
    pub(crate) fn takes_text(&self) -> bool {
        self.context().is_some()
    }

    /// Tokens in a sample, of a model that takes text.
    pub fn context(&self) -> Option<usize> {
        match self.family {
            Family::GptPreset { context, .. } | Family::LlamaPreset { context, .. } => Some(context),
            Family::Gpt(ref gpt) => Some(gpt.context),
            Family::Llama(ref llama) => Some(llama.context),
            Family::Custom { context, .. } => context,
            _ => None,
        }
    }

    /// Tokens there are, where the run file says so.
    pub fn vocab(&self) -> Option<usize> {
        match self.family {
            Family::Gpt(ref gpt) => gpt.vocab,
            Family::Llama(ref llama) => llama.vocab,
            Family::GptPreset { vocab, .. } | Family::LlamaPreset { vocab, .. } => Some(vocab),
            Family::Custom { classes, context: Some(_), .. } => classes,
            _ => None,
        }
    }

    /// The sizes and choices of a GPT that knows so many tokens; none of any other model.
    pub fn gpt(&self, vocab: usize) -> Option<Gpt> {
        match self.family {
            Family::Gpt(ref gpt) => Some(gpt.shape(vocab)),
            Family::GptPreset { context, dropout, .. } => {
                let size = Gpt::preset(&self.name).expect("the name was checked when it was read");
                Some(Gpt { context, vocab, dropout: dropout as f32, ..size })
            }
            _ => None,
        }
    }

    /// The sizes and choices of a model of the Llama family that knows so many tokens; none of any other.
    pub fn llama(&self, vocab: usize) -> Option<Llama> {
        match &self.family {
            Family::Llama(llama) => Some(llama.shape(vocab)),
            Family::LlamaPreset { context, .. } => {
                let size = Llama::preset(&self.name).expect("the name was checked when it was read");
                Some(Llama { context: *context, vocab, ..size })
            }
            _ => None,
        }
    }

    /// The `[model]` of such sizes and choices.
    pub fn of_gpt(shape: &Gpt) -> ModelConfig {
        let &Gpt { layers, heads, width, context, tied, norm, activation, inner, eps, .. } = shape;
        let (vocab, dropout) = (Some(shape.vocab), shape.dropout.into());
        let gpt =
            GptConfig { layers, heads, width, context, vocab, dropout, tied, norm, activation, inner, eps };
        ModelConfig { name: "gpt".into(), family: Family::Gpt(gpt) }
    }

    /// The same of the Llama family.
    pub fn of_llama(shape: &Llama) -> ModelConfig {
        ModelConfig { name: "llama".into(), family: Family::Llama(LlamaConfig::of(shape)) }
    }

    /// Kinds of image that it tells apart, where the run file says so.
    pub fn classes(&self) -> Option<usize> {
        match self.family {
            Family::Mlp { classes, .. }
            | Family::SimpleCnn { classes, .. }
            | Family::Resnet8 { classes, .. } => classes,
            Family::ResNet { classes, .. } | Family::Vgg { classes, .. } => classes,
            Family::AlexNet { classes, .. } | Family::Custom { classes, context: None, .. } => classes,
            Family::Gpt(_) | Family::GptPreset { .. } | Family::Custom { .. } => None,
            Family::Llama(_) | Family::LlamaPreset { .. } => None,
        }
    }

    /// Every name that `model.name` takes.
    pub fn names() -> impl Iterator<Item = &'static str> {
        ["gpt"]
            .into_iter()
            .chain(Gpt::PRESETS.map(|(name, _)| name))
            .chain(["llama"])
            .chain(Llama::PRESETS.map(|(name, _)| name))
            .chain(["mlp", "simple-cnn", "resnet8"])
            .chain(ResNet::ALL.map(ResNet::name))
            .chain(Vgg::ALL.map(Vgg::name))
            .chain(["alexnet", "custom"])
    }

    pub(super) fn read(section: &mut Section) -> Result<ModelConfig, Error> {
        let written = section.get("name");
        let name = match written {
            None => "gpt",
            Some(value) => match ModelConfig::names().find(|name| Some(*name) == value.as_str()) {
                Some(name) => name,
                None if is_open(value) => return Err(left_open()),
                None => return Err(section.not_one_of("name", value, ModelConfig::names())),
            },
        };
        let values = section.read_with(fields::MODEL, name)?;
        let classes = values.find("classes");
        let family = match name {
            "gpt" => Family::Gpt(read_gpt(section, values)?),
            "llama" => Family::Llama(LlamaConfig::read(section, values)?),
            "mlp" => Family::Mlp { hidden: read_hidden(section)?, init: values.get("init"), classes },
            "simple-cnn" => Family::SimpleCnn { init: values.get("init"), classes },
            "resnet8" => Family::Resnet8 { init: values.get("init"), classes },
            "alexnet" => Family::AlexNet { classes, form: values.get("form") },
            "custom" => read_custom(section, &values)?,
            _ => sized(name, &values),
        };
        Ok(ModelConfig { name: name.into(), family })
    }
}

/// Whether a name leaves the model to what a run starts from.
pub(super) fn is_open(name: &toml::Value) -> bool {
    name.as_str() == Some("auto")
}

/// What such a name means where nobody has put a model in.
fn left_open() -> Error {
    let problem = "is \"auto\", the model of the checkpoint to start from, and there is none: give one with \
                   `espalier train --from`";
    Error::conflict("model.name", problem)
}

fn read_gpt(section: &Section, values: FieldValues) -> Result<GptConfig, Error> {
    let gpt: GptConfig = values.all();
    if !gpt.width.is_multiple_of(gpt.heads) {
        let problem = format!("is {}, which does not divide `model.width` = {}", gpt.heads, gpt.width);
        return Err(section.conflict("heads", problem));
    }
    Ok(gpt)
}

/// One of the published sizes.
fn sized(name: &str, values: &FieldValues) -> Family {
    if let Some(gpt) = Gpt::preset(name) {
        return Family::GptPreset {
            context: values.find("context").unwrap_or(gpt.context),
            vocab: values.find("vocab").unwrap_or(gpt.vocab),
            dropout: values.get("dropout"),
        };
    }
    if let Some(llama) = Llama::preset(name) {
        return Family::LlamaPreset {
            context: values.find("context").unwrap_or(llama.context),
            vocab: values.find("vocab").unwrap_or(llama.vocab),
        };
    }
    let (classes, form) = (values.find("classes"), values.get("form"));
    if let Some(net) = ResNet::ALL.into_iter().find(|net| net.name() == name) {
        return Family::ResNet { net, classes, form };
    }
    let net = Vgg::ALL.into_iter().find(|net| net.name() == name).expect("the name is one of the list");
    Family::Vgg { net, classes, form, batch_norm: values.get("batch_norm") }
}

fn read_custom(section: &mut Section, values: &FieldValues) -> Result<Family, Error> {
    let expected = "a list of layers, such as [{ type = \"flatten\" }, { type = \"linear\" }]";
    let layers = match section.get("layers") {
        None => return Err(Error::Missing { field: section.field("layers"), expected: expected.into() }),
        Some(toml::Value::Array(items)) if !items.is_empty() => read_layers(&section.field("layers"), items)?,
        Some(value) => return Err(section.wrong("layers", expected, value)),
    };
    let context = match layers[0].kind.word == "embedding" {
        true => Some(values.find("context").unwrap_or(Gpt::default().context)),
        false => None,
    };
    if context.is_none() && section.has("context") {
        let why = "with images: only a model whose first layer is an embedding takes text";
        return Err(section.no_effect("context", why));
    }
    Ok(Family::Custom { classes: values.find("classes"), context, layers })
}

fn read_hidden(section: &mut Section) -> Result<Vec<usize>, Error> {
    let expected = "a list of widths, such as [256, 128]";
    let items = match section.get("hidden") {
        None => return Ok(vec![256]),
        Some(toml::Value::Array(items)) if items.len() <= LAYERS_MOST => items,
        Some(value) => return Err(section.wrong("hidden", expected, value)),
    };
    let read = |(i, value)| {
        let key = format!("hidden.{i}");
        integer(value, 1, LARGEST).map_err(|expected| section.wrong(&key, expected, value))
    };
    items.iter().enumerate().map(read).collect()
}
