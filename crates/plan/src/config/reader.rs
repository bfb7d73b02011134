//! Reading one section of a run file, or of another file that people write: a table, its path for messages,
//! and the keys that were asked for.
//!
//! A reader written by hand, since errors are for people: each names the full field, what it takes and what was
//! written, and what is left over after reading is either a misspelling or a setting without effect.

use toml::{Table, Value};

use super::{Error, fields, nearest, other_names};
pub use crate::field::FieldValues;
use crate::field::{Field, FieldDefault, FieldType, LARGEST};

/// One section while it is read.
pub struct Section<'a> {
    path: String,
    table: &'a Table,
    known: Vec<&'static str>,
    /// Whether fields of run files can be meant.
    is_of_run_file: bool,
}

impl<'a> Section<'a> {
    /// A table at `path` (empty at the top).
    pub fn new(path: impl Into<String>, table: &'a Table) -> Section<'a> {
        Section { path: path.into(), table, known: Vec::new(), is_of_run_file: true }
    }

    /// The same of a file that is no run file: fields of run files are no hints there.
    pub fn foreign(path: impl Into<String>, table: &'a Table) -> Section<'a> {
        Section { is_of_run_file: false, ..Section::new(path, table) }
    }

    /// The full path of a key.
    pub fn field(&self, key: &str) -> String {
        if self.path.is_empty() { key.into() } else { format!("{}.{key}", self.path) }
    }

    /// Whether the key was written.
    pub fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// Whether nothing was written.
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// The value of a key, if written. From here on the key is known.
    pub fn get(&mut self, key: &'static str) -> Option<&'a Value> {
        self.known.push(key);
        self.table.get(key)
    }

    /// "must be ..., got ..." for a key.
    pub fn wrong(&self, key: &str, expected: impl Into<String>, got: &Value) -> Error {
        Error::value(self.field(key), expected, show(got))
    }

    /// The error for a field that contradicts something.
    pub(crate) fn conflict(&self, key: &str, problem: impl Into<String>) -> Error {
        Error::conflict(self.field(key), problem)
    }

    /// The error for a field that would change nothing.
    pub(crate) fn no_effect(&self, key: &str, why: impl Into<String>) -> Error {
        Error::no_effect(self.field(key), why)
    }

    /// Reads all of some fields, and refuses what is none of them.
    pub fn read(&mut self, fields: &[Field]) -> Result<FieldValues, Error> {
        self.read_with(fields, "")
    }

    /// The same where the word of the first field, or else `usual`, decides which others there are.
    pub(crate) fn read_variant(&mut self, fields: &[Field], usual: &str) -> Result<FieldValues, Error> {
        let word = self.read_field(&fields[0])?;
        let word = word.as_ref().and_then(Value::as_str).unwrap_or(usual);
        let mut values = self.read_with(fields, word)?;
        values.set(fields[0].name, word);
        Ok(values)
    }

    /// The same for a word that is known.
    pub(crate) fn read_with(&mut self, fields: &[Field], word: &str) -> Result<FieldValues, Error> {
        self.known.clear();
        let values = self.read_all(fields, word)?;
        let names: Vec<&str> = fields.iter().map(|field| field.name).collect();
        self.finish_variant(fields[0].name, word, &names)?;
        Ok(values)
    }

    /// The same, whatever else there is.
    pub(super) fn read_all(&mut self, fields: &[Field], word: &str) -> Result<FieldValues, Error> {
        let mut values = Table::new();
        for field in fields.iter().filter(|field| (field.with)(word)) {
            let read = self.read_field(field)?;
            if let Some(value) = read.or_else(|| field.otherwise.like(&values).cloned()) {
                values.insert(field.name.into(), value);
            }
        }
        Ok(FieldValues(values))
    }

    /// A field as it is written, or what it is where it is left out.
    pub fn read_field(&mut self, field: &Field) -> Result<Option<Value>, Error> {
        let Some(value) = self.get(field.name) else {
            self.check_left_out(field)?;
            return Ok(field.otherwise.value());
        };
        let wrong = |expected: &str| self.wrong(field.name, expected, value);
        let text = |value: &Value| value.as_str().is_some_and(|text| !text.is_empty());
        Ok(Some(match field.takes {
            FieldType::Any => value.clone(),
            // What holds layers is read by what reads layers.
            FieldType::Layers | FieldType::Lists(_) => return Ok(None),
            FieldType::Integer(least, most) => match integer(value, least, most) {
                Ok(_) => value.clone(),
                Err(expected) => return Err(wrong(&expected)),
            },
            FieldType::Number((expected, fits)) => {
                let number = finite(value).filter(|number| fits(*number));
                Value::Float(number.ok_or_else(|| wrong(expected))?)
            }
            FieldType::Numbers((expected, fits)) => {
                let number = |value| finite(value).filter(|number| fits(*number)).map(Value::Float);
                let numbers: Option<Vec<Value>> = listed(value).iter().map(number).collect();
                let numbers = numbers.filter(|numbers| !numbers.is_empty());
                Value::Array(numbers.ok_or_else(|| wrong(expected))?)
            }
            FieldType::Flag if value.is_bool() => value.clone(),
            FieldType::Flag => return Err(wrong("true or false")),
            FieldType::Word(words) | FieldType::IntegerOr(_, _, words)
                if value.as_str().is_some_and(|word| words.contains(&word)) =>
            {
                value.clone()
            }
            FieldType::IntegerOr(least, most, words) => match integer(value, least, most) {
                Ok(_) => value.clone(),
                Err(expected) => {
                    let words: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
                    return Err(wrong(&format!("{expected}, or {}", words.join(", "))));
                }
            },
            FieldType::Word(words) => {
                return Err(self.not_one_of(field.name, value, words.iter().copied()));
            }
            FieldType::Text(_) if text(value) => value.clone(),
            FieldType::Text(expected) => return Err(wrong(expected)),
            FieldType::Texts(expected) => match listed(value).iter().find(|value| !text(value)) {
                Some(value) => return Err(self.wrong(field.name, expected, value)),
                None => match (listed(value), field.otherwise) {
                    ([], FieldDefault::Missing(_)) => return self.check_left_out(field).map(|()| None),
                    (texts, _) => Value::Array(texts.to_vec()),
                },
            },
        }))
    }

    /// An error where a field that is left out must be written.
    pub(super) fn check_left_out(&self, field: &Field) -> Result<(), Error> {
        match field.otherwise {
            FieldDefault::Missing(expected) => {
                Err(Error::Missing { field: self.field(field.name), expected: expected.into() })
            }
            _ => Ok(()),
        }
    }

    /// The error for a word outside a closed set, with the nearest one as a hint.
    pub(crate) fn not_one_of(
        &self,
        key: &str,
        value: &Value,
        words: impl Iterator<Item = &'static str>,
    ) -> Error {
        let words: Vec<_> = words.collect();
        // First: "gpu" is one letter from "cpu".
        let hint =
            |word| other_names::our_word(word, &words).or_else(|| nearest(word, words.iter().copied()));
        let hint = value.as_str().and_then(hint).map(String::from);
        let quoted: Vec<_> = words.iter().map(|word| format!("\"{word}\"")).collect();
        let expected = match quoted.split_last() {
            // A long list helps only one who was not close.
            _ if hint.is_some() && words.len() > 8 => format!("one of {} known words", words.len()),
            Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
            _ => quoted.join(""),
        };
        Error::Value { field: self.field(key), expected, got: show(value), hint }
    }

    /// A section inside this one; an empty one where it is not written.
    pub fn section(&mut self, key: &'static str, empty: &'a Table) -> Result<Section<'a>, Error> {
        match self.get(key) {
            None => Ok(self.inner(key, empty)),
            Some(Value::Table(table)) => Ok(self.inner(key, table)),
            Some(value) => Err(Error::Value {
                field: self.field(key),
                expected: format!("a section, `[{}]`", self.field(key)),
                got: show(value),
                hint: fields::usual_field(&self.field(key)).filter(|_| self.is_of_run_file),
            }),
        }
    }

    fn inner(&self, key: &str, table: &'a Table) -> Section<'a> {
        Section { is_of_run_file: self.is_of_run_file, ..Section::new(self.field(key), table) }
    }

    /// Refuses what was not asked for.
    pub fn finish(&self) -> Result<(), Error> {
        self.finish_variant("", "", &[])
    }

    /// The same where the word `word` of `key` decides which fields there are; `others` exist with other words.
    pub(crate) fn finish_variant(&self, key: &str, word: &str, others: &[&str]) -> Result<(), Error> {
        let Some(left) = self.table.keys().find(|left| !self.known.contains(&left.as_str())) else {
            return Ok(());
        };
        let field = self.field(left);
        if others.contains(&left.as_str()) {
            let mut fields: Vec<_> = self.known.iter().copied().filter(|known| *known != key).collect();
            fields.sort_unstable();
            fields.dedup();
            let fields = if fields.is_empty() { "none".into() } else { fields.join(", ") };
            let why = format!("with `{}` = \"{word}\", whose fields are: {fields}", self.field(key));
            return Err(Error::no_effect(field, why));
        }
        let near = |keys: &[&str]| nearest(left, keys.iter().copied()).map(|near| self.field(near));
        let of_run_file = |hint: &dyn Fn() -> Option<String>| if self.is_of_run_file { hint() } else { None };
        // First: `eval_batch_size` is near to `eval_batch`, but `n_layer` is near to nothing.
        let hint = of_run_file(&|| self.by_another_name(left))
            .or_else(|| near(&self.known))
            .or_else(|| of_run_file(&|| fields::elsewhere(left)))
            .or_else(|| near(others));
        Err(Error::UnknownField { field, hint })
    }
}

impl Section<'_> {
    /// The field that other tools call so: one that this section knows, or of another section.
    fn by_another_name(&self, name: &str) -> Option<String> {
        let exists = |ours: &&str| match ours.rsplit_once('.').unwrap_or(("", ours)) {
            (section, key) if section == self.path => self.known.contains(&key),
            _ => true,
        };
        other_names::ours(name).find(exists).map(String::from)
    }
}

/// The values of a list; one alone is a list of one.
fn listed(value: &Value) -> &[Value] {
    match value {
        Value::Array(values) => values,
        one => std::slice::from_ref(one),
    }
}

/// A number, whole or not, that is finite.
fn finite(value: &Value) -> Option<f64> {
    let number = match value {
        Value::Float(x) => *x,
        Value::Integer(n) => *n as f64,
        _ => return None,
    };
    number.is_finite().then_some(number)
}

/// A whole number between bounds, or what was expected.
pub fn integer(value: &Value, least: usize, most: usize) -> Result<usize, String> {
    let number = value.as_integer().and_then(|n| usize::try_from(n).ok());
    match number {
        Some(n) if (least..=most).contains(&n) => Ok(n),
        // A bound far away is mentioned only where it is what is wrong.
        Some(n) if n > most => Err(format!("a whole number of at most {most}")),
        _ if most < LARGEST => Err(format!("a whole number from {least} to {most}")),
        _ => Err(format!("a whole number of at least {least}")),
    }
}

/// A value as it would be written, or in words where that would be long.
pub fn show(value: &Value) -> String {
    match value {
        Value::Table(_) => "a table".into(),
        Value::Array(values) if values.is_empty() => "an empty list".into(),
        Value::Array(values) => format!("a list of {}", values.len()),
        other => other.to_string(),
    }
}
