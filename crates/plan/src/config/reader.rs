//! Reading one section of a run file, or of another file that people write: a table, its path for messages, and the keys that were asked for.
//!
//! A reader written by hand, since errors are for people: each names the full field, what it takes and what was
//! written, and what is left over after reading is either a misspelling or a setting without effect.

use toml::{Table, Value};

use super::{Error, fields, nearest, other_names};

/// The largest size of a dimension; larger ones are slips of the finger, and products of these stay in range.
pub const LARGEST: usize = 1 << 24;

/// The largest count of samples, steps and the like.
pub const MOST: usize = 1 << 48;

/// A closed set of words in a run file.
pub trait Choice: Copy + 'static {
    /// Every word with its meaning.
    const ALL: &'static [(&'static str, Self)];
}

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
        Error::Value { field: self.field(key), expected: expected.into(), got: show(got), hint: None }
    }

    /// A whole number between two bounds, both allowed.
    pub fn whole(
        &mut self,
        key: &'static str,
        default: usize,
        least: usize,
        most: usize,
    ) -> Result<usize, Error> {
        Ok(self.optional_whole(key, least, most)?.unwrap_or(default))
    }

    /// The same without a default.
    pub fn optional_whole(
        &mut self,
        key: &'static str,
        least: usize,
        most: usize,
    ) -> Result<Option<usize>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match whole(value, least, most) {
            Ok(n) => Ok(Some(n)),
            Err(expected) => Err(self.wrong(key, expected, value)),
        }
    }

    /// A finite number for which `fits` holds; `expected` says in words what that is.
    pub fn number(
        &mut self,
        key: &'static str,
        default: f64,
        expected: &str,
        fits: impl Fn(f64) -> bool,
    ) -> Result<f64, Error> {
        let Some(value) = self.get(key) else { return Ok(default) };
        finite(value).filter(|number| fits(*number)).ok_or_else(|| self.wrong(key, expected, value))
    }

    /// Some such numbers; one alone is a list of one.
    pub fn numbers(
        &mut self,
        key: &'static str,
        expected: &str,
        fits: impl Fn(f64) -> bool,
    ) -> Result<Option<Vec<f64>>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let numbers: Option<Vec<f64>> =
            listed(value).iter().map(|value| finite(value).filter(|number| fits(*number))).collect();
        match numbers.filter(|numbers| !numbers.is_empty()) {
            None => Err(self.wrong(key, expected, value)),
            numbers => Ok(numbers),
        }
    }

    /// true or false.
    pub fn boolean(&mut self, key: &'static str, default: bool) -> Result<bool, Error> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Boolean(b)) => Ok(*b),
            Some(value) => Err(self.wrong(key, "true or false", value)),
        }
    }

    /// A text that is not empty; `expected` says what it is.
    pub fn text(&mut self, key: &'static str, expected: &str) -> Result<Option<&'a str>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(s)) if !s.is_empty() => Ok(Some(s)),
            Some(value) => Err(self.wrong(key, expected, value)),
        }
    }

    /// A list of texts; one text alone is a list of one.
    pub fn texts(&mut self, key: &'static str, expected: &str) -> Result<Vec<&'a str>, Error> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let text = |value: &'a Value| match value {
            Value::String(s) if !s.is_empty() => Ok(s.as_str()),
            _ => Err(self.wrong(key, expected, value)),
        };
        listed(value).iter().map(text).collect()
    }

    /// One word of a closed set.
    pub fn choice<T: Choice>(&mut self, key: &'static str, default: T) -> Result<T, Error> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let words = || T::ALL.iter().map(|(word, _)| *word);
        let word = value.as_str().unwrap_or_default();
        match T::ALL.iter().find(|(known, _)| *known == word) {
            Some(&(_, meaning)) => Ok(meaning),
            None => Err(self.not_one_of(key, value, words())),
        }
    }

    /// The error for a word outside a closed set, with the nearest one as a hint.
    pub fn not_one_of(&self, key: &str, value: &Value, words: impl Iterator<Item = &'static str>) -> Error {
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
                hint: fields::usual_field(&self.field(key)).filter(|_| self.is_of_run_file).map(String::from),
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
    pub fn finish_variant(&self, key: &str, word: &str, others: &[&str]) -> Result<(), Error> {
        let Some(left) = self.table.keys().find(|left| !self.known.contains(&left.as_str())) else {
            return Ok(());
        };
        let field = self.field(left);
        if others.contains(&left.as_str()) {
            let mut fields: Vec<_> = self.known.iter().copied().filter(|known| *known != key).collect();
            fields.sort_unstable();
            let fields = if fields.is_empty() { "none".into() } else { fields.join(", ") };
            let why = format!("with `{}` = \"{word}\", whose fields are: {fields}", self.field(key));
            return Err(Error::NoEffect { field, why });
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
pub fn whole(value: &Value, least: usize, most: usize) -> Result<usize, String> {
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
