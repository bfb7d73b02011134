//! `model.layers` of a custom model: a list of tables, each with a `type`. What fields a type has is the
//! layer's own to say ([`LayerKind`]); here they are read, whatever they are.

use toml::Value as Toml;

use super::Error;
use super::reader::{Section, show};
use crate::field::{Field, FieldType};
use crate::spec::{KINDS, LayerKind, WrittenLayer};

/// Every field that some kind of layer has.
fn all_fields() -> Vec<&'static str> {
    let fields = KINDS.iter().flat_map(|kind| kind.fields).map(|field| field.name);
    ["type"].into_iter().chain(fields).collect()
}

/// Reads the layers at `path`.
pub(super) fn read_layers(path: &str, items: &[Toml]) -> Result<Vec<WrittenLayer>, Error> {
    let read = |(i, value): (usize, &Toml)| {
        let path = format!("{path}.{i}");
        match value {
            Toml::Table(table) => read_layer(&mut Section::new(path, table)),
            _ => Err(Error::value(path, "a layer, such as { type = \"relu\" }", show(value))),
        }
    };
    items.iter().enumerate().map(read).collect()
}

fn read_layer(section: &mut Section) -> Result<WrittenLayer, Error> {
    let words = || KINDS.iter().map(|kind| kind.word);
    let Some(value) = section.get("type") else {
        let expected = format!("one of {}", words().collect::<Vec<_>>().join(", "));
        return Err(Error::Missing { field: section.field("type"), expected });
    };
    let kind = LayerKind::find(value.as_str().unwrap_or_default());
    let kind = kind.ok_or_else(|| section.not_one_of("type", value, words()))?;
    let values = section.read_all(kind.fields, kind.word)?;
    let branches = read_branches(section, kind.fields)?;
    section.finish_variant("type", kind.word, &all_fields())?;
    Ok(WrittenLayer { kind, values, branches })
}

/// The lists of layers inside a layer, in the order of its fields.
fn read_branches(section: &mut Section, fields: &[Field]) -> Result<Vec<Vec<WrittenLayer>>, Error> {
    let mut branches = Vec::new();
    for field in fields {
        let (key, value) = (field.name, section.get(field.name));
        let list = |path: &str, value: &Toml| match value {
            Toml::Array(items) => read_layers(&section.field(path), items),
            _ => Err(section.wrong(path, "a list of layers", value)),
        };
        match (field.takes, value) {
            (FieldType::Layers, value) => {
                let layers = value.map_or(Ok(Vec::new()), |value| list(key, value))?;
                // Where there must be one, this says so.
                if layers.is_empty() {
                    section.check_left_out(field)?;
                }
                branches.push(layers);
            }
            (FieldType::Lists(least), Some(Toml::Array(lists))) if lists.len() >= least => {
                for (i, value) in lists.iter().enumerate() {
                    branches.push(list(&format!("{key}.{i}"), value)?);
                }
            }
            (FieldType::Lists(least), Some(value)) => {
                return Err(section.wrong(key, format!("a list of at least {least} lists of layers"), value));
            }
            _ => {}
        }
    }
    Ok(branches)
}
