//! `--set a.b=c`: a value put into the run file before it is read, so that it passes the same checks; `--set a.b=` takes one out.

use std::path::Path;

use toml::{Table, Value};

use super::{Error, check_name};

/// Fields that name files.
const PATHS: [&str; 7] = [
    "data.path",
    "data.validation_path",
    "data.tokenizer",
    "data.images",
    "data.labels",
    "parallel.schedule_file",
    "branch.from",
];

/// Puts one override into the table. The value is TOML where it parses as such and a plain text elsewhere, so that
/// `model.name=gpt` needs no quotes, nor the items of `data.extensions=[rs, md]`. Numbers in the path count items of a
/// list, from 0; the number behind the last item adds one, so that a list need not stand in the file.
pub(super) fn apply(table: &mut Table, text: &str) -> Result<(), Error> {
    let malformed = |expected: &str| Error::Override { text: text.into(), expected: expected.into() };
    let (path, value) = text.split_once('=').ok_or_else(|| malformed("`section.field=value`"))?;
    let keys: Vec<&str> = path.split('.').map(str::trim).collect();
    let Some((last, sections)) = keys.split_last() else { return Err(malformed("`section.field=value`")) };
    if keys.iter().any(|key| key.is_empty()) {
        return Err(malformed("`section.field=value`"));
    }
    let nowhere = || malformed("a path through sections of the run file");
    if value.trim().is_empty() {
        take(table, &keys);
        return Ok(());
    }
    let value = parse(value.trim());
    let Some((first, inner)) = sections.split_first() else {
        table.insert((*last).into(), value);
        return Ok(());
    };
    // A section itself is never a list, whatever stands behind it.
    let mut at = table.entry(*first).or_insert_with(|| Value::Table(Table::new()));
    for (key, next) in inner.iter().zip(&keys[2..]) {
        at = match at {
            Value::Table(t) => t.entry(*key).or_insert_with(|| empty(next)),
            Value::Array(items) => item(items, key, || empty(next)).ok_or_else(nowhere)?,
            _ => return Err(nowhere()),
        };
    }
    match at {
        Value::Table(t) => drop(t.insert((*last).into(), value)),
        Value::Array(items) => *item(items, last, || Value::Boolean(false)).ok_or_else(nowhere)? = value,
        _ => return Err(nowhere()),
    }
    Ok(())
}

/// Takes a field, a section or an item of a list out, where it is there.
fn take(table: &mut Table, keys: &[&str]) {
    let Some((last, above)) = keys.split_last() else { return };
    let Some((first, inner)) = above.split_first() else {
        table.remove(*last);
        return;
    };
    let mut at = table.get_mut(*first);
    for key in inner {
        at = match at {
            Some(Value::Table(t)) => t.get_mut(*key),
            Some(Value::Array(items)) => key.parse::<usize>().ok().and_then(|place| items.get_mut(place)),
            _ => None,
        };
    }
    match (at, last.parse::<usize>()) {
        (Some(Value::Table(t)), _) => drop(t.remove(*last)),
        (Some(Value::Array(items)), Ok(place)) if place < items.len() => drop(items.remove(place)),
        _ => {}
    }
}

/// Refuses overrides that take out what no run file has: nothing else would notice them.
pub(super) fn check_unset(overrides: &[String]) -> Result<(), Error> {
    for text in overrides {
        if let Some((path, "")) = text.split_once('=').map(|(path, value)| (path, value.trim())) {
            let names: Vec<&str> = path.split('.').map(str::trim).collect();
            let items = |key: &&str| key.parse::<usize>().is_err();
            check_name(&names.into_iter().take_while(items).take(2).collect::<Vec<_>>().join("."))?;
        }
    }
    Ok(())
}

/// An override with its relative paths below `folder`.
pub(super) fn below(folder: &Path, text: &str) -> String {
    let Some((path, value)) = text.split_once('=') else { return text.into() };
    let keys: Vec<&str> = path.split('.').map(str::trim).collect();
    // A study file has its run file in a section.
    let keys = keys.strip_prefix(&["run"]).unwrap_or(&keys);
    let field = keys[..keys.len().min(2)].join(".");
    if !PATHS.contains(&&*field) || value.trim().is_empty() {
        return text.into();
    }
    let joined = |value: Value| match value {
        Value::String(path) if !path.is_empty() => {
            Value::String(folder.join(path).to_string_lossy().into_owned())
        }
        other => other,
    };
    let value = match parse(value.trim()) {
        Value::Array(items) => Value::Array(items.into_iter().map(joined).collect()),
        one => joined(one),
    };
    format!("{}={value}", path.trim())
}

/// What holds a key that nothing holds yet: a list where it is a number.
fn empty(key: &str) -> Value {
    if key.parse::<usize>().is_ok() { Value::Array(Vec::new()) } else { Value::Table(Table::new()) }
}

/// An item of a list; the one behind the last is `new`.
fn item<'a>(items: &'a mut Vec<Value>, key: &str, new: impl FnOnce() -> Value) -> Option<&'a mut Value> {
    let place = key.parse::<usize>().ok()?;
    if place == items.len() {
        items.push(new());
    }
    items.get_mut(place)
}

/// The value that an override of this field, in its own words, gives it; the last one counts, and may take it out.
pub(super) fn value_of(overrides: &[String], field: &str) -> Option<Value> {
    let split = overrides.iter().rev().filter_map(|text| text.split_once('='));
    let mut own = split.filter(|(path, _)| path.split('.').map(str::trim).eq(field.split('.')));
    own.next().map(|(_, value)| value.trim()).filter(|value| !value.is_empty()).map(parse)
}

fn parse(value: &str) -> Value {
    match format!("value = {value}").parse::<Table>() {
        // More than one key: the text held a line break and was not one value.
        Ok(mut table) if table.len() == 1 => table.remove("value").expect("the only key"),
        _ => match value.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            // Shells take the quotes away.
            Some(items) if !items.contains(['[', ']', '{', '}', '"', '\'']) => {
                Value::Array(items.split(',').map(|item| parse(item.trim())).collect())
            }
            _ => Value::String(value.into()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(text: &str) -> Result<String, Error> {
        let mut table: Table = "seed = 1\n[model]\nlayers = [{ output = 3 }]\n".parse().unwrap();
        apply(&mut table, text)?;
        Ok(table.to_string())
    }

    #[test]
    fn values_are_toml_or_text() {
        let mut table = Table::new();
        for text in ["a=1", "b.c = gpt", "b.d=[1, 2]", "b.e=x=y", "f=\"\"", "g=\"quoted\"", "h=1\ni=2"] {
            apply(&mut table, text).unwrap();
        }
        assert_eq!(table["a"], Value::Integer(1));
        assert_eq!(table["b"]["c"].as_str(), Some("gpt"));
        assert_eq!(table["b"]["d"].as_array().unwrap().len(), 2);
        assert_eq!(table["b"]["e"].as_str(), Some("x=y"));
        assert_eq!(table["f"].as_str(), Some(""));
        assert_eq!(table["g"].as_str(), Some("quoted"));
        assert_eq!(table["h"].as_str(), Some("1\ni=2"));
    }

    /// It had to stand in the file, and to be written as TOML, whose quotes a shell takes away.
    #[test]
    fn a_list_can_be_set_that_is_not_in_the_file() {
        let mut table = Table::new();
        for text in
            ["data.extensions=[rs, md]", "prune.exclude.0=attn", "prune.exclude.1=mlp", "parallel.cut=[2, 4]"]
        {
            apply(&mut table, text).unwrap();
        }
        let texts = |list: &Value| -> Vec<String> {
            list.as_array().unwrap().iter().map(|text| text.as_str().unwrap().into()).collect()
        };
        assert_eq!(texts(&table["data"]["extensions"]), ["rs", "md"]);
        assert_eq!(texts(&table["prune"]["exclude"]), ["attn", "mlp"]);
        assert_eq!(table["parallel"]["cut"].as_array().unwrap()[1], Value::Integer(4));
        assert!(apply(&mut table, "prune.exclude.3=x").is_err(), "none is left out");
        assert_eq!(parse("[odd").as_str(), Some("[odd"));
    }

    #[test]
    fn a_field_without_a_value_is_taken_out() {
        let mut table: Table =
            "seed = 1\n[train]\nsteps = 5\nbatch = 2\n[model]\nhidden = [1, 2]\n[prune]\nmethod = \"snip\"\n"
                .parse()
                .unwrap();
        for text in
            ["seed=", "train.steps = ", "model.hidden.0=", "prune=", "train.epochs=", "sample.prompt="]
        {
            apply(&mut table, text).unwrap();
        }
        assert_eq!(table.to_string().replace("\n\n", "\n"), "[model]\nhidden = [2]\n[train]\nbatch = 2\n");
        assert_eq!(value_of(&["seed=1".into(), "seed=".into()], "seed"), None);
        for known in ["seed=", "prune=", "model.hidden.0=", "train.steps="] {
            check_unset(&[known.into()]).unwrap();
        }
        insta::assert_snapshot!(check_unset(&["train.bacth=".into()]).unwrap_err(), @"`train.bacth` is not a field; did you mean `train.batch`?");
    }

    #[test]
    fn paths_that_are_set_lie_where_the_command_is_run() {
        let here = |text: &str| below(Path::new("/here"), text);
        assert_eq!(here("data.path=a/b.txt"), "data.path=\"/here/a/b.txt\"");
        assert_eq!(here("data.path = [a, /abs/b]"), "data.path=[\"/here/a\", \"/abs/b\"]");
        assert_eq!(here("data.path.1=\"b c\""), "data.path.1=\"/here/b c\"");
        assert_eq!(here("run.data.path=a"), "run.data.path=\"/here/a\"");
        assert_eq!(here("data.path="), "data.path=");
        for other in ["train.batch=4", "data.kind=text", "seed", "sample.prompt=data.path=x"] {
            assert_eq!(here(other), other);
        }
    }

    #[test]
    fn lists_have_numbered_items() {
        assert!(with("model.layers.0.output=5").unwrap().contains("output = 5"));
        assert!(with("model.layers.1.output=5").unwrap().contains("output = 5"), "the next one is added");
        insta::assert_snapshot!(with("model.layers.2.output=5").unwrap_err(), @"override `model.layers.2.output=5` must be a path through sections of the run file");
        insta::assert_snapshot!(with("seed.x=5").unwrap_err(), @"override `seed.x=5` must be a path through sections of the run file");
        insta::assert_snapshot!(with("seed").unwrap_err(), @"override `seed` must be `section.field=value`");
        insta::assert_snapshot!(with(".=3").unwrap_err(), @"override `.=3` must be `section.field=value`");
    }
}
