//! What files of all kinds of study have: a name, a run file, sections, lists; and errors that name fields as
//! the study file has them.

use espalier_plan::Error;
use espalier_plan::config::reader::{Section, show};
use espalier_plan::config::{self, Override, RunTable};
use espalier_plan::field::{Field, LARGEST, text};
use toml::{Table, Value};

use crate::range::number;

/// A study file of any kind while it is read.
pub(crate) struct StudyTable {
    /// What the study is called, on pages and in folders.
    pub(crate) name: String,
    run: Option<RunTable>,
    table: Table,
    empty: Table,
}

impl StudyTable {
    /// Reads a study file's text after putting in overrides, up to the `sections` that its kind has.
    pub(crate) fn parse(
        file: &str,
        overrides: &[Override],
        sections: &[&'static str],
    ) -> Result<StudyTable, Error> {
        let (table, empty) = (config::table(file, overrides)?, Table::new());
        let mut top = Section::foreign("", &table);
        // Whoever reads this file knows of which kind it is.
        top.get("kind");
        let name = read_name(&mut top)?;
        let run = match top.get("run") {
            None => None,
            Some(Value::Table(run)) => Some(run.clone()).filter(|run| !run.is_empty()).map(RunTable::from),
            Some(other) => {
                return Err(top.wrong("run", "a run file, as sections `[run.model]` and so on", other));
            }
        };
        for section in sections {
            top.get(section);
        }
        top.finish()?;
        Ok(StudyTable { name, run, table, empty })
    }

    /// `[run]`: the run file, without what the study gives each of its runs.
    pub(crate) fn run(&self) -> Result<RunTable, Error> {
        let expected = "a run file, as sections `[run.model]`, `[run.data]` and so on";
        self.run.clone().ok_or_else(|| missing("run", expected))
    }

    /// A section of the kind's own.
    pub(crate) fn section(&self, name: &'static str) -> Result<Section<'_>, Error> {
        Section::foreign("", &self.table).section(name, &self.empty)
    }

    /// What stands at the top of the file under a name.
    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        self.table.get(name)
    }
}

/// `name`: what a study is called, on pages and in folders.
fn read_name(top: &mut Section) -> Result<String, Error> {
    const NAME: Field = text("name", "a name for folders and pages").required();
    let name = top.read_field(&NAME)?;
    let name = name.as_ref().and_then(Value::as_str).unwrap_or_default();
    let fits = name.chars().all(|letter| letter.is_alphanumeric() || "-_.".contains(letter));
    if !fits || name.starts_with('.') {
        let expected = "letters, digits, `-`, `_` and `.`: it names a folder".into();
        return Err(Error::Value { field: "name".into(), expected, got: format!("{name:?}"), hint: None });
    }
    Ok(name.into())
}

/// Refuses fields of the run file that something else of the study decides, each with what that is.
pub(crate) fn refuse_given(run: &RunTable, given: &[(&str, &str)]) -> Result<(), Error> {
    match given.iter().find(|(field, _)| run.has(field)) {
        None => Ok(()),
        Some((field, from)) => {
            let why = format!("in a study: {from} decides it");
            Err(Error::NoEffect { field: format!("run.{field}"), why })
        }
    }
}

/// A list that is not empty, each of its items once.
pub(crate) fn read_list<T: PartialEq>(
    section: &mut Section,
    key: &'static str,
    expected: &str,
    item: impl Fn(&Value) -> Option<T>,
) -> Result<Vec<T>, Error> {
    let Some(value) = section.get(key) else { return Err(missing(&section.field(key), expected)) };
    let Some(values) = value.as_array().filter(|values| !values.is_empty()) else {
        return Err(section.wrong(key, expected, value));
    };
    let mut items = Vec::new();
    for value in values {
        let read = item(value).ok_or_else(|| section.wrong(key, expected, value))?;
        if items.contains(&read) {
            let problem = format!("has {} twice", show(value));
            return Err(Error::Conflict { field: section.field(key), problem });
        }
        items.push(read);
    }
    Ok(items)
}

/// `batches`: sizes of a batch.
pub(crate) fn read_batches(section: &mut Section, expected: &str) -> Result<Vec<usize>, Error> {
    read_list(section, "batches", expected, |value| positive_integer(value, LARGEST))
}

/// `sparsities`: fractions of weights that are pruned.
pub(crate) fn read_sparsities(section: &mut Section) -> Result<Vec<f64>, Error> {
    read_list(section, "sparsities", "a list of numbers in [0, 1), such as [0, 0.9]", |value| {
        number(value).filter(|sparsity| (0.0..1.0).contains(sparsity))
    })
}

/// An integer from 1.
pub(crate) fn positive_integer(value: &Value, most: usize) -> Option<usize> {
    let number = value.as_integer().and_then(|number| usize::try_from(number).ok());
    number.filter(|number| (1..=most).contains(number))
}

/// A field that must be written.
pub(crate) fn missing(field: &str, expected: &str) -> Error {
    Error::Missing { field: field.into(), expected: expected.into() }
}

/// An error of the run file within a study file, whose fields stand below `run`.
pub(crate) fn in_run(error: Error) -> Error {
    let below = |field: String| format!("run.{field}");
    match error {
        Error::UnknownField { field, hint } => {
            Error::UnknownField { field: below(field), hint: hint.map(below) }
        }
        Error::Value { field, expected, got, hint } => {
            Error::Value { field: below(field), expected, got, hint }
        }
        Error::Missing { field, expected } => Error::Missing { field: below(field), expected },
        Error::NoEffect { field, why } => Error::NoEffect { field: below(field), why },
        Error::Conflict { field, problem } => Error::Conflict { field: below(field), problem },
        other => other,
    }
}
