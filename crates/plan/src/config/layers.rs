//! `model.layers` of a custom model: a list of tables, each with a `type`.

use toml::Value;

use super::Error;
use super::reader::{LARGEST, Section};
use crate::spec::custom::Written;

const KINDS: [&str; 19] = [
    "linear",
    "conv",
    "max_pool",
    "avg_pool",
    "global_avg_pool",
    "adaptive_avg_pool",
    "flatten",
    "pad_channels",
    "batch_norm",
    "layer_norm",
    "rms_norm",
    "relu",
    "gelu",
    "silu",
    "dropout",
    "embedding",
    "position",
    "attention",
    "residual",
];

/// Every field that some kind of layer has.
const FIELDS: [&str; 12] = [
    "type", "output", "kernel", "stride", "padding", "bias", "size", "rate", "width", "heads", "branch",
    "shortcut",
];

/// Reads the layers at `path`.
pub(super) fn read_layers(path: &str, items: &[Value]) -> Result<Vec<Written>, Error> {
    let read = |(i, value): (usize, &Value)| {
        let path = format!("{path}.{i}");
        match value {
            Value::Table(table) => read_layer(&mut Section::new(path, table)),
            _ => Err(Error::Value {
                field: path,
                expected: "a layer, such as { type = \"relu\" }".into(),
                got: super::reader::show(value),
                hint: None,
            }),
        }
    };
    items.iter().enumerate().map(read).collect()
}

fn read_layer(section: &mut Section) -> Result<Written, Error> {
    let Some(value) = section.get("type") else {
        let expected = format!("one of {}", KINDS.join(", "));
        return Err(Error::Missing { field: section.field("type"), expected });
    };
    let kind = value.as_str().unwrap_or_default();
    let layer = match kind {
        "linear" => Written::Linear {
            output: section.optional_whole("output", 1, LARGEST)?,
            bias: section.boolean("bias", true)?,
        },
        "conv" => Written::Conv {
            output: size(section, "output")?,
            kernel: size(section, "kernel")?,
            stride: section.whole("stride", 1, 1, LARGEST)?,
            padding: section.whole("padding", 0, 0, LARGEST)?,
            bias: section.boolean("bias", true)?,
        },
        "max_pool" => {
            let kernel = size(section, "kernel")?;
            let stride = section.whole("stride", kernel, 1, LARGEST)?;
            Written::MaxPool { kernel, stride, padding: section.whole("padding", 0, 0, LARGEST)? }
        }
        "avg_pool" => {
            let kernel = size(section, "kernel")?;
            Written::AvgPool { kernel, stride: section.whole("stride", kernel, 1, LARGEST)? }
        }
        "global_avg_pool" => Written::GlobalAvgPool,
        "adaptive_avg_pool" => Written::AdaptiveAvgPool { size: size(section, "size")? },
        "flatten" => Written::Flatten,
        "pad_channels" => Written::PadChannels { output: size(section, "output")? },
        "batch_norm" => Written::BatchNorm,
        "layer_norm" => Written::LayerNorm,
        "rms_norm" => Written::RmsNorm,
        "relu" => Written::Relu,
        "gelu" => Written::Gelu,
        "silu" => Written::Silu,
        "dropout" => Written::Dropout {
            rate: section.number("rate", 0.5, "a number in (0, 1)", |x| x > 0.0 && x < 1.0)?,
        },
        "embedding" => Written::Embedding { width: size(section, "width")? },
        "position" => Written::Position,
        "attention" => Written::Attention { heads: section.whole("heads", 1, 1, LARGEST)? },
        "residual" => {
            let branch = side(section, "branch")?;
            if branch.is_empty() {
                let expected = "a list of at least one layer".into();
                return Err(Error::Missing { field: section.field("branch"), expected });
            }
            Written::Residual { branch, shortcut: side(section, "shortcut")? }
        }
        _ => return Err(section.not_one_of("type", value, KINDS.into_iter())),
    };
    section.finish_variant("type", kind, &FIELDS)?;
    Ok(layer)
}

/// A size that has no default.
fn size(section: &mut Section, key: &'static str) -> Result<usize, Error> {
    let missing = || "a whole number of at least 1".to_string();
    section
        .optional_whole(key, 1, LARGEST)?
        .ok_or_else(|| Error::Missing { field: section.field(key), expected: missing() })
}

fn side(section: &mut Section, key: &'static str) -> Result<Vec<Written>, Error> {
    match section.get(key) {
        None => Ok(Vec::new()),
        Some(Value::Array(items)) => read_layers(&section.field(key), items),
        Some(value) => Err(section.wrong(key, "a list of layers", value)),
    }
}
