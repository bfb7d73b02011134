//! `model.layers` of a custom model: a list of tables, each with a `type`. What fields a type has is the layer's own to say
//! ([`Kind`]); here they are read, whatever they are.

use toml::Value as Toml;

use super::Error;
use super::field::LARGEST;
use super::reader::{Section, whole};
use crate::spec::{Field, KINDS, Kind, Takes, Value, Written};

/// Every field that some kind of layer has.
fn all_fields() -> Vec<&'static str> {
    let fields = KINDS.iter().flat_map(|kind| kind.fields).map(|field| field.name);
    ["type"].into_iter().chain(fields).collect()
}

/// Reads the layers at `path`.
pub(super) fn read_layers(path: &str, items: &[Toml]) -> Result<Vec<Written>, Error> {
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

fn read_layer(section: &mut Section) -> Result<Written, Error> {
    let words = || KINDS.iter().map(|kind| kind.word);
    let Some(value) = section.get("type") else {
        let expected = format!("one of {}", words().collect::<Vec<_>>().join(", "));
        return Err(Error::Missing { field: section.field("type"), expected });
    };
    let kind = Kind::find(value.as_str().unwrap_or_default());
    let kind = kind.ok_or_else(|| section.not_one_of("type", value, words()))?;
    let mut values = Vec::with_capacity(kind.fields.len());
    for field in kind.fields {
        let value = read_field(section, field, kind, &values)?;
        values.push(value);
    }
    section.finish_variant("type", kind.word, &all_fields())?;
    Ok(Written { kind, values })
}

/// One field; `before` are the values of those that stand before it.
fn read_field(section: &mut Section, field: &Field, kind: &Kind, before: &[Value]) -> Result<Value, Error> {
    let key = field.name;
    let Some(value) = section.get(key) else {
        let missing = || Error::Missing { field: section.field(key), expected: field.takes.in_words() };
        return field.takes.left_out(kind, before).ok_or_else(missing);
    };
    let wrong = || section.wrong(key, field.takes.in_words(), value);
    let at_least = |least| {
        let size = whole(value, least, LARGEST).map_err(|expected| section.wrong(key, expected, value))?;
        Ok(Value::Whole(size))
    };
    match &field.takes {
        Takes::Size | Takes::SizeOrElse | Takes::SizeLike(_) => at_least(1),
        Takes::Whole { least, .. } => at_least(*least),
        Takes::Flag(_) => value.as_bool().map(Value::Flag).ok_or_else(wrong),
        Takes::Number { fits, .. } => {
            let number = value.as_float().or(value.as_integer().map(|n| n as f64));
            number.filter(|x| x.is_finite() && fits(*x)).map(Value::Number).ok_or_else(wrong)
        }
        Takes::Word(words) => match words.iter().find(|word| value.as_str() == Some(word)) {
            Some(word) => Ok(Value::Word(word)),
            None => Err(section.not_one_of(key, value, words.iter().copied())),
        },
        Takes::Layers { least } => match value {
            Toml::Array(items) if items.is_empty() && *least > 0 => {
                Err(Error::Missing { field: section.field(key), expected: field.takes.in_words() })
            }
            Toml::Array(items) => Ok(Value::Layers(read_layers(&section.field(key), items)?)),
            _ => Err(section.wrong(key, "a list of layers", value)),
        },
        Takes::Lists { least } => match value {
            Toml::Array(lists) if lists.len() >= *least => {
                let list = |(i, list): (usize, &Toml)| match list {
                    Toml::Array(items) => read_layers(&format!("{}.{i}", section.field(key)), items),
                    value => Err(section.wrong(&format!("{key}.{i}"), "a list of layers", value)),
                };
                Ok(Value::Lists(lists.iter().enumerate().map(list).collect::<Result<_, _>>()?))
            }
            _ => Err(wrong()),
        },
    }
}
