//! `[model]`: which network. The name decides which other fields there are.

use serde::Serialize;

use super::fields;
use super::layers::read_layers;
use super::open;
use super::reader::{Choice, LARGEST, Section, whole};
use super::{Error, LAYERS_MOST};
use crate::spec::Activation;
use crate::spec::Written;
use crate::spec::presets::{Form, Gpt, ImageSize, Norm, ResNet, Vgg};

/// `[model]`
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Model {
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
    Gpt {
        /// Transformer layers.
        layers: usize,
        /// Attention heads; they divide the width.
        heads: usize,
        /// Width of the residual stream.
        width: usize,
        /// Tokens in a sample.
        context: usize,
        /// Tokens there are; left out: as many as the data has.
        #[serde(skip_serializing_if = "Option::is_none")]
        vocab: Option<usize>,
        /// Dropout rate.
        dropout: f64,
        /// Whether the head uses the token embedding's weight.
        tied: bool,
        /// `layer` or `rms`.
        norm: Norm,
        /// `gelu`, `relu` or `silu`.
        activation: Activation,
    },
    /// `gpt2-124m` and the like: sizes are fixed, up to what the data decides.
    GptPreset {
        /// Tokens in a sample.
        context: usize,
        /// Tokens there are.
        vocab: usize,
        /// Dropout rate.
        dropout: f64,
    },
    /// `mlp`
    Mlp {
        /// Widths of the hidden layers.
        hidden: Vec<usize>,
        /// What weights start from.
        init: Start,
        /// Classes; left out: as many as the data has.
        #[serde(skip_serializing_if = "Option::is_none")]
        classes: Option<usize>,
    },
    /// `simple-cnn`
    SimpleCnn {
        /// What weights start from.
        init: Start,
        /// Classes; left out: as many as the data has.
        #[serde(skip_serializing_if = "Option::is_none")]
        classes: Option<usize>,
    },
    /// `resnet8`
    Resnet8 {
        /// What weights start from.
        init: Start,
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
    /// `alexnet`
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
        /// The layers.
        layers: Vec<Written>,
    },
}

/// Which form of a convolutional model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
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
    pub fn form(self, image: ImageSize) -> Form {
        match self {
            FormChoice::Auto => Form::for_image(image),
            FormChoice::ImageNet => Form::ImageNet,
            FormChoice::Small => Form::Small,
        }
    }
}

impl From<Form> for FormChoice {
    fn from(form: Form) -> FormChoice {
        match form {
            Form::ImageNet => FormChoice::ImageNet,
            Form::Small => FormChoice::Small,
        }
    }
}

/// The variance that weights of the small image models start with; all are truncated normals over the fan-in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Start {
    /// 2 / fan-in where a ReLU follows (He et al. 2015), 1 / fan-in at the logits.
    #[default]
    He,
    /// 1 / fan-in throughout, as in the networks of the data-parallelism study (Lee et al. 2021).
    FanIn,
}

impl Choice for Start {
    const ALL: &'static [(&'static str, Self)] = &[("he", Start::He), ("fan-in", Start::FanIn)];
}

impl Choice for FormChoice {
    const ALL: &'static [(&'static str, Self)] =
        &[("auto", FormChoice::Auto), ("imagenet", FormChoice::ImageNet), ("32x32", FormChoice::Small)];
}

impl Choice for Norm {
    const ALL: &'static [(&'static str, Self)] = &[("layer", Norm::Layer), ("rms", Norm::Rms)];
}

impl Choice for Activation {
    const ALL: &'static [(&'static str, Self)] =
        &[("gelu", Activation::Gelu), ("relu", Activation::Relu), ("silu", Activation::Silu)];
}

impl Model {
    /// Whether it takes text; images otherwise.
    pub fn takes_text(&self) -> bool {
        match &self.family {
            Family::Gpt { .. } | Family::GptPreset { .. } => true,
            Family::Custom { context, .. } => context.is_some(),
            _ => false,
        }
    }

    /// Tokens in a sample, of a model that takes text.
    pub fn context(&self) -> Option<usize> {
        match self.family {
            Family::Gpt { context, .. } | Family::GptPreset { context, .. } => Some(context),
            Family::Custom { context, .. } => context,
            _ => None,
        }
    }

    /// Tokens there are, where the run file says so.
    pub fn vocab(&self) -> Option<usize> {
        match self.family {
            Family::Gpt { vocab, .. } => vocab,
            Family::GptPreset { vocab, .. } => Some(vocab),
            Family::Custom { classes, context: Some(_), .. } => classes,
            _ => None,
        }
    }

    /// The sizes and choices of a GPT that knows so many tokens; none of any other model.
    pub fn gpt(&self, vocab: usize) -> Option<Gpt> {
        match self.family {
            Family::Gpt { layers, heads, width, context, dropout, tied, norm, activation, .. } => {
                let dropout = dropout as f32;
                Some(Gpt { layers, width, heads, context, vocab, dropout, tied, norm, activation })
            }
            Family::GptPreset { context, dropout, .. } => {
                let size = Gpt::preset(&self.name).expect("the name was checked when it was read");
                Some(Gpt { context, vocab, dropout: dropout as f32, ..size })
            }
            _ => None,
        }
    }

    /// Kinds of image that it tells apart, where the run file says so.
    pub fn classes(&self) -> Option<usize> {
        match self.family {
            Family::Mlp { classes, .. }
            | Family::SimpleCnn { classes, .. }
            | Family::Resnet8 { classes, .. } => classes,
            Family::ResNet { classes, .. } | Family::Vgg { classes, .. } => classes,
            Family::AlexNet { classes, .. } | Family::Custom { classes, context: None, .. } => classes,
            Family::Gpt { .. } | Family::GptPreset { .. } | Family::Custom { .. } => None,
        }
    }

    /// Every name that `model.name` takes.
    pub fn names() -> impl Iterator<Item = &'static str> {
        ["gpt"]
            .into_iter()
            .chain(Gpt::PRESETS)
            .chain(["mlp", "simple-cnn", "resnet8"])
            .chain(ResNet::ALL.map(ResNet::name))
            .chain(Vgg::ALL.map(Vgg::name))
            .chain(["alexnet", "custom"])
    }

    pub(super) fn read(section: &mut Section) -> Result<Model, Error> {
        let written = section.get("name");
        let name = match written {
            None => "gpt",
            Some(value) => match Model::names().find(|name| Some(*name) == value.as_str()) {
                Some(name) => name,
                None if open::is_word(value) => return Err(open::no_model()),
                None => return Err(section.not_one_of("name", value, Model::names())),
            },
        };
        let family = match name {
            "gpt" => read_gpt(section)?,
            "mlp" => Family::Mlp {
                hidden: read_hidden(section)?,
                init: read_start(section)?,
                classes: read_classes(section)?,
            },
            "simple-cnn" => Family::SimpleCnn { init: read_start(section)?, classes: read_classes(section)? },
            "resnet8" => Family::Resnet8 { init: read_start(section)?, classes: read_classes(section)? },
            "custom" => read_custom(section)?,
            _ => read_preset(section, name)?,
        };
        section.finish_variant("name", name, fields::MODEL)?;
        Ok(Model { name: name.into(), family })
    }
}

fn read_gpt(section: &mut Section) -> Result<Family, Error> {
    let standard = Gpt::default();
    let heads = section.whole("heads", standard.heads, 1, LARGEST)?;
    let width = section.whole("width", standard.width, 1, LARGEST)?;
    if width % heads != 0 {
        let problem = format!("is {heads}, which does not divide `model.width` = {width}");
        return Err(Error::Conflict { field: section.field("heads"), problem });
    }
    Ok(Family::Gpt {
        layers: section.whole("layers", standard.layers, 1, LAYERS_MOST)?,
        heads,
        width,
        context: section.whole("context", standard.context, 1, LARGEST)?,
        vocab: section.optional_whole("vocab", 1, LARGEST)?,
        dropout: read_dropout(section)?,
        tied: section.boolean("tied", standard.tied)?,
        norm: section.choice("norm", standard.norm)?,
        activation: section.choice("activation", standard.activation)?,
    })
}

/// One of the published sizes.
fn read_preset(section: &mut Section, name: &str) -> Result<Family, Error> {
    if let Some(gpt) = Gpt::preset(name) {
        return Ok(Family::GptPreset {
            context: section.whole("context", gpt.context, 1, LARGEST)?,
            vocab: section.whole("vocab", gpt.vocab, 1, LARGEST)?,
            dropout: read_dropout(section)?,
        });
    }
    let classes = read_classes(section)?;
    let form = section.choice("form", FormChoice::Auto)?;
    if name == "alexnet" {
        return Ok(Family::AlexNet { classes, form });
    }
    if let Some(net) = ResNet::ALL.into_iter().find(|net| net.name() == name) {
        return Ok(Family::ResNet { net, classes, form });
    }
    let net = Vgg::ALL.into_iter().find(|net| net.name() == name).expect("the name is one of the list");
    Ok(Family::Vgg { net, classes, form, batch_norm: section.boolean("batch_norm", false)? })
}

fn read_custom(section: &mut Section) -> Result<Family, Error> {
    let expected = "a list of layers, such as [{ type = \"flatten\" }, { type = \"linear\" }]";
    let layers = match section.get("layers") {
        None => return Err(Error::Missing { field: section.field("layers"), expected: expected.into() }),
        Some(toml::Value::Array(items)) if !items.is_empty() => read_layers(&section.field("layers"), items)?,
        Some(value) => return Err(section.wrong("layers", expected, value)),
    };
    let text = layers[0].kind.word == "embedding";
    let context =
        if text { Some(section.whole("context", Gpt::default().context, 1, LARGEST)?) } else { None };
    if !text && section.has("context") {
        let why = "with images: only a model whose first layer is an embedding takes text".into();
        return Err(Error::NoEffect { field: section.field("context"), why });
    }
    Ok(Family::Custom { classes: read_classes(section)?, context, layers })
}

fn read_start(section: &mut Section) -> Result<Start, Error> {
    section.choice("init", Start::He)
}

fn read_classes(section: &mut Section) -> Result<Option<usize>, Error> {
    section.optional_whole("classes", 2, LARGEST)
}

fn read_dropout(section: &mut Section) -> Result<f64, Error> {
    section.number("dropout", 0.0, "a number in [0, 1)", |x| (0.0..1.0).contains(&x))
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
        whole(value, 1, LARGEST).map_err(|expected| section.wrong(&key, expected, value))
    };
    items.iter().enumerate().map(read).collect()
}
