//! `model.layers` of a custom model: a list of tables, each with a `type`. What fields a type has is the
//! layer's own to say ([`LayerKind`]); here they are read, whatever they are.

use toml::Value as Toml;

use super::Error;
use super::reader::Section;
use crate::field::{Field, FieldDefault, FieldType};
use crate::spec::{FieldValue, KINDS, LayerKind, WrittenLayer};

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

fn read_layer(section: &mut Section) -> Result<WrittenLayer, Error> {
    let words = || KINDS.iter().map(|kind| kind.word);
    let Some(value) = section.get("type") else {
        let expected = format!("one of {}", words().collect::<Vec<_>>().join(", "));
        return Err(Error::Missing { field: section.field("type"), expected });
    };
    let kind = LayerKind::find(value.as_str().unwrap_or_default());
    let kind = kind.ok_or_else(|| section.not_one_of("type", value, words()))?;
    let mut values = Vec::with_capacity(kind.fields.len());
    for field in kind.fields {
        let value = read_field(section, field, kind, &values)?;
        values.push(value);
    }
    section.finish_variant("type", kind.word, &all_fields())?;
    Ok(WrittenLayer { kind, values })
}

/// One field; `before` are the values of those that stand before it.
fn read_field(
    section: &mut Section,
    field: &Field,
    kind: &LayerKind,
    before: &[FieldValue],
) -> Result<FieldValue, Error> {
    let key = field.name;
    let value = section.get(key).filter(|value| match (field.takes, field.otherwise) {
        (FieldType::Layers, FieldDefault::Missing(_)) => {
            value.as_array().is_none_or(|items| !items.is_empty())
        }
        _ => true,
    });
    let Some(value) = value else {
        // Where it must be written, this says so.
        section.check_left_out(field)?;
        return Ok(FieldValue::left_out(field, kind, before).expect("it may be left out"));
    };
    let list = |path: &str, value: &Toml| match value {
        Toml::Array(items) => read_layers(&section.field(path), items),
        _ => Err(section.wrong(path, "a list of layers", value)),
    };
    match (field.takes, value) {
        (FieldType::Layers, value) => Ok(FieldValue::Layers(list(key, value)?)),
        (FieldType::Lists(least), Toml::Array(lists)) if lists.len() >= least => {
            let lists = lists.iter().enumerate().map(|(i, value)| list(&format!("{key}.{i}"), value));
            Ok(FieldValue::Lists(lists.collect::<Result<_, _>>()?))
        }
        (FieldType::Lists(least), _) => {
            Err(section.wrong(key, format!("a list of at least {least} lists of layers"), value))
        }
        (takes, _) => Ok(match (section.read_field(field)?, takes) {
            (Some(Toml::Integer(number)), _) => FieldValue::Integer(number as usize),
            (Some(Toml::Boolean(flag)), _) => FieldValue::Flag(flag),
            (Some(Toml::Float(number)), _) => FieldValue::Number(number),
            (Some(Toml::String(word)), FieldType::Word(words) | FieldType::IntegerOr(_, _, words)) => {
                FieldValue::Word(words.iter().find(|known| **known == word).expect("one of the words"))
            }
            _ => FieldValue::None,
        }),
    }
}
