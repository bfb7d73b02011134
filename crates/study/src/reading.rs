//! What files of all kinds of study have: a name, a run file, lists; and errors that name fields as the study file has them.

use espalier_plan::Error;
use espalier_plan::config::RunTable;
use espalier_plan::config::reader::{Section, show};
use toml::Value;

/// `name`: what a study is called, on pages and in folders.
pub(crate) fn read_name(top: &mut Section) -> Result<String, Error> {
    let expected = "a word for folders and pages";
    let name = top.text("name", expected)?.ok_or_else(|| missing("name", expected))?;
    let fits = name.chars().all(|letter| letter.is_alphanumeric() || "-_.".contains(letter));
    if !fits || name.starts_with('.') {
        let expected = "letters, digits, `-`, `_` and `.`: it names a folder".into();
        return Err(Error::Value { field: "name".into(), expected, got: format!("{name:?}"), hint: None });
    }
    Ok(name.into())
}

/// `[run]`: the run file, without what the study gives each of its runs.
pub(crate) fn read_run(top: &mut Section) -> Result<RunTable, Error> {
    match top.get("run") {
        Some(Value::Table(run)) if !run.is_empty() => Ok(run.clone().into()),
        None | Some(Value::Table(_)) => {
            Err(missing("run", "a run file, as sections `[run.model]`, `[run.data]` and so on"))
        }
        Some(other) => Err(top.wrong("run", "a run file, as sections `[run.model]` and so on", other)),
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
