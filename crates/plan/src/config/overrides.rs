//! `--set a.b=c`: a value put into the run file before it is read, so that it passes the same checks.

use toml::{Table, Value};

use super::Error;

/// Puts one override into the table. The value is TOML where it parses as such and a plain text elsewhere, so that
/// `model.name=gpt` needs no quotes. Numbers in the path count items of a list, from 0.
pub(super) fn apply(table: &mut Table, text: &str) -> Result<(), Error> {
    let malformed = |expected: &str| Error::Override { text: text.into(), expected: expected.into() };
    let (path, value) = text.split_once('=').ok_or_else(|| malformed("`section.field=value`"))?;
    let keys: Vec<&str> = path.split('.').map(str::trim).collect();
    let Some((last, sections)) = keys.split_last() else { return Err(malformed("`section.field=value`")) };
    if keys.iter().any(|key| key.is_empty()) {
        return Err(malformed("`section.field=value`"));
    }
    let nowhere = || malformed("a path through sections of the run file");
    let value = parse(value.trim());
    let Some((first, inner)) = sections.split_first() else {
        table.insert((*last).into(), value);
        return Ok(());
    };
    let mut at = table.entry(*first).or_insert_with(|| Value::Table(Table::new()));
    for key in inner {
        at = match at {
            Value::Table(t) => t.entry(*key).or_insert_with(|| Value::Table(Table::new())),
            Value::Array(items) => item(items, key).ok_or_else(nowhere)?,
            _ => return Err(nowhere()),
        };
    }
    match at {
        Value::Table(t) => drop(t.insert((*last).into(), value)),
        Value::Array(items) => *item(items, last).ok_or_else(nowhere)? = value,
        _ => return Err(nowhere()),
    }
    Ok(())
}

fn item<'a>(items: &'a mut [Value], key: &str) -> Option<&'a mut Value> {
    items.get_mut(key.parse::<usize>().ok()?)
}

fn parse(value: &str) -> Value {
    match format!("value = {value}").parse::<Table>() {
        // More than one key: the text held a line break and was not one value.
        Ok(mut table) if table.len() == 1 => table.remove("value").expect("the only key"),
        _ => Value::String(value.into()),
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
        for text in ["a=1", "b.c = gpt", "b.d=[1, 2]", "b.e=x=y", "f=", "g=\"quoted\"", "h=1\ni=2"] {
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

    #[test]
    fn lists_have_numbered_items() {
        assert!(with("model.layers.0.output=5").unwrap().contains("output = 5"));
        insta::assert_snapshot!(with("model.layers.1.output=5").unwrap_err(), @"override `model.layers.1.output=5` must be a path through sections of the run file");
        insta::assert_snapshot!(with("seed.x=5").unwrap_err(), @"override `seed.x=5` must be a path through sections of the run file");
        insta::assert_snapshot!(with("seed").unwrap_err(), @"override `seed` must be `section.field=value`");
        insta::assert_snapshot!(with(".=3").unwrap_err(), @"override `.=3` must be `section.field=value`");
    }
}
