//! `--set a.b=c`: a field and the value that it is given before the run file is read, so that it passes the
//! same checks; `--set a.b=` takes one out. What a person types is text until here; what the program itself
//! sets has a constructor of its own.

use std::fmt;
use std::path::Path;

use serde::Serialize;
use toml::{Table, Value};

use super::{Error, check_name, fields};
use crate::device::DeviceKind;
use crate::spec::Precision;

/// A field and what it is set to. Numbers in its path count items of a list, from 0; the number behind the
/// last item adds one, so that a list need not stand in the file.
#[derive(Debug, Clone, PartialEq)]
pub struct Override {
    /// As it is typed.
    text: String,
    /// The path of the field; an empty one is that of a text that is no setting, which is reported where it
    /// is put in.
    keys: Vec<String>,
    /// None takes the field out.
    value: Option<Value>,
}

impl From<&str> for Override {
    fn from(text: &str) -> Override {
        let (path, value) = text.split_once('=').unwrap_or_default();
        let keys = path.split('.').map(|key| key.trim().to_owned()).collect();
        let value = Some(value.trim()).filter(|value| !value.is_empty()).map(parse);
        Override { text: text.into(), keys, value }
    }
}

impl From<String> for Override {
    fn from(text: String) -> Override {
        text.as_str().into()
    }
}

impl fmt::Display for Override {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Override {
    /// A field that somebody else names, in a file of another kind.
    pub fn new(field: &str, value: Value) -> Override {
        let keys = field.split('.').map(String::from).collect();
        Override { text: format!("{field}={value}"), keys, value: Some(value) }
    }

    fn of(field: &str, value: impl Serialize) -> Override {
        Override::new(field, Value::try_from(value).expect("plain data"))
    }

    /// A number that TOML has none for is refused as it would be where somebody wrote it.
    fn integer(field: &str, number: u64) -> Override {
        match i64::try_from(number) {
            Ok(number) => Override::new(field, Value::Integer(number)),
            Err(_) => Override::from(format!("{field}={number}")),
        }
    }

    pub fn seed(seed: u64) -> Override {
        Override::integer("seed", seed)
    }

    /// `train.batch`
    pub fn batch(samples: usize) -> Override {
        Override::integer("train.batch", samples as u64)
    }

    /// `train.steps`
    pub fn steps(steps: u64) -> Override {
        Override::integer("train.steps", steps)
    }

    /// `train.precision`
    pub fn precision(precision: Precision) -> Override {
        Override::of("train.precision", precision)
    }

    /// `prune.sparsity`
    pub fn sparsity(fraction: f64) -> Override {
        Override::of("prune.sparsity", fraction)
    }

    /// `parallel.data`
    pub fn replicas(ranks: usize) -> Override {
        Override::integer("parallel.data", ranks as u64)
    }

    /// `data.path`
    pub fn data_path(path: &Path) -> Override {
        Override::of("data.path", path.to_string_lossy())
    }

    /// `device.kind`
    pub fn device(kind: DeviceKind) -> Override {
        Override::of("device.kind", kind)
    }

    /// The full name of its field.
    pub fn field(&self) -> String {
        self.keys.join(".")
    }

    /// With its relative paths below `folder`: a field that names files, set by whoever stands there, means
    /// files there.
    pub fn below(self, folder: &Path) -> Override {
        // A study file has its run file in a section.
        let skipped = usize::from(self.keys[0] == "run");
        let field = self.keys[skipped..].iter().take(2).cloned().collect::<Vec<_>>().join(".");
        let joined = |value: Value| match value {
            Value::String(path) if !path.is_empty() => {
                Value::String(folder.join(path).to_string_lossy().into_owned())
            }
            other => other,
        };
        // A section by itself is no path, though fields of it are.
        let is_path = field.contains('.') && fields::named(&field).any(|row| row.is_path);
        match self.value {
            Some(value) if field == "branch.from" || is_path => {
                let value = match value {
                    Value::Array(items) => Value::Array(items.into_iter().map(joined).collect()),
                    one => joined(one),
                };
                Override::new(&self.keys.join("."), value)
            }
            _ => self,
        }
    }

    /// Puts it into a table.
    pub(super) fn apply(&self, table: &mut Table) -> Result<(), Error> {
        let malformed =
            |expected: &str| Error::Override { text: self.text.clone(), expected: expected.into() };
        if self.keys.iter().any(|key| key.is_empty()) {
            return Err(malformed("`section.field=value`"));
        }
        let Some(value) = &self.value else {
            take(table, &self.keys);
            return Ok(());
        };
        let (last, sections) = self.keys.split_last().expect("a path has at least one key");
        let Some((first, inner)) = sections.split_first() else {
            table.insert(last.clone(), value.clone());
            return Ok(());
        };
        let nowhere = || malformed("a path through sections of the run file");
        // A section itself is never a list, whatever stands behind it.
        let mut at = table.entry(first.as_str()).or_insert_with(|| Value::Table(Table::new()));
        for (key, next) in inner.iter().zip(&self.keys[2..]) {
            at = match at {
                Value::Table(t) => t.entry(key.as_str()).or_insert_with(|| empty(next)),
                Value::Array(items) => item(items, key, || empty(next)).ok_or_else(nowhere)?,
                _ => return Err(nowhere()),
            };
        }
        match at {
            Value::Table(t) => drop(t.insert(last.clone(), value.clone())),
            Value::Array(items) => {
                *item(items, last, || Value::Boolean(false)).ok_or_else(nowhere)? = value.clone();
            }
            _ => return Err(nowhere()),
        }
        Ok(())
    }

    /// Every field of a table as one.
    pub fn all_of(table: &Table) -> Vec<Override> {
        let mut all = Vec::new();
        collect("", table, &mut all);
        all
    }
}

fn collect(path: &str, table: &Table, into: &mut Vec<Override>) {
    for (key, value) in table {
        let field = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        match value {
            Value::Table(inner) => collect(&field, inner, into),
            value => into.push(Override::new(&field, value.clone())),
        }
    }
}

/// Takes a field, a section or an item of a list out, where it is there.
fn take(table: &mut Table, keys: &[String]) {
    let Some((last, above)) = keys.split_last() else { return };
    let Some((first, inner)) = above.split_first() else {
        table.remove(last);
        return;
    };
    let mut at = table.get_mut(first);
    for key in inner {
        at = match at {
            Some(Value::Table(t)) => t.get_mut(key),
            Some(Value::Array(items)) => key.parse::<usize>().ok().and_then(|index| items.get_mut(index)),
            _ => None,
        };
    }
    match (at, last.parse::<usize>()) {
        (Some(Value::Table(t)), _) => drop(t.remove(last)),
        (Some(Value::Array(items)), Ok(index)) if index < items.len() => drop(items.remove(index)),
        _ => {}
    }
}

/// Refuses overrides that take out what no run file has: nothing else would notice them.
pub(super) fn check_unset(overrides: &[Override]) -> Result<(), Error> {
    for setting in overrides.iter().filter(|setting| setting.value.is_none()) {
        let names = setting.keys.iter().map(String::as_str).take_while(|key| key.parse::<usize>().is_err());
        check_name(&names.take(2).collect::<Vec<_>>().join("."))?;
    }
    Ok(())
}

/// What holds a key that nothing holds yet: a list where it is a number.
fn empty(key: &str) -> Value {
    if key.parse::<usize>().is_ok() { Value::Array(Vec::new()) } else { Value::Table(Table::new()) }
}

/// An item of a list; the one behind the last is `new`.
fn item<'a>(items: &'a mut Vec<Value>, key: &str, new: impl FnOnce() -> Value) -> Option<&'a mut Value> {
    let index = key.parse::<usize>().ok()?;
    if index == items.len() {
        items.push(new());
    }
    items.get_mut(index)
}

/// The value that overrides of this very field give it; the last one counts, and may take it out.
pub(super) fn value_of<'a>(overrides: &'a [Override], field: &str) -> Option<&'a Value> {
    let mut own = overrides.iter().rev().filter(|setting| setting.field() == field);
    own.next().and_then(|setting| setting.value.as_ref())
}

/// TOML where it parses as such and a plain text elsewhere, so that `model.name=gpt` needs no quotes, nor the
/// items of `data.extensions=[rs, md]`.
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
    use crate::config::RunFile;
    use crate::data::DatasetSource;
    use crate::intervals::RunLength;

    fn with(text: &str) -> Result<String, Error> {
        let mut table: Table = "seed = 1\n[model]\nlayers = [{ output = 3 }]\n".parse().unwrap();
        Override::from(text).apply(&mut table)?;
        Ok(table.to_string())
    }

    #[test]
    fn values_are_toml_or_text() {
        let mut table = Table::new();
        for text in ["a=1", "b.c = gpt", "b.d=[1, 2]", "b.e=x=y", "f=\"\"", "g=\"quoted\"", "h=1\ni=2"] {
            Override::from(text).apply(&mut table).unwrap();
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
            Override::from(text).apply(&mut table).unwrap();
        }
        let texts = |list: &Value| -> Vec<String> {
            list.as_array().unwrap().iter().map(|text| text.as_str().unwrap().into()).collect()
        };
        assert_eq!(texts(&table["data"]["extensions"]), ["rs", "md"]);
        assert_eq!(texts(&table["prune"]["exclude"]), ["attn", "mlp"]);
        assert_eq!(table["parallel"]["cut"].as_array().unwrap()[1], Value::Integer(4));
        assert!(Override::from("prune.exclude.3=x").apply(&mut table).is_err(), "none is left out");
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
            Override::from(text).apply(&mut table).unwrap();
        }
        assert_eq!(table.to_string().replace("\n\n", "\n"), "[model]\nhidden = [2]\n[train]\nbatch = 2\n");
        assert_eq!(value_of(&["seed=1".into(), "seed=".into()], "seed"), None);
        for known in ["seed=", "prune=", "model.hidden.0=", "train.steps="] {
            check_unset(&[known.into()]).unwrap();
        }
        insta::assert_snapshot!(check_unset(&["train.bacth=".into()]).unwrap_err(), @"`train.bacth` is not a field; did you mean `train.batch`?");
    }

    /// The program names fields here alone, and reads back what it sets.
    #[test]
    fn what_is_set_by_the_program_is_read() {
        let text = "[data]\nkind = \"text\"\n[prune]\nmethod = \"random\"";
        let set = [
            Override::seed(7),
            Override::batch(6),
            Override::steps(9),
            Override::precision(Precision::Bf16),
            Override::sparsity(0.25),
            Override::replicas(3),
            Override::data_path(Path::new("a b")),
            Override::device(DeviceKind::Cpu),
        ];
        let run = RunFile::parse(text, &set).unwrap();
        assert_eq!((run.seed, run.train.batch, run.train.length), (7, 6, RunLength::Steps(9)));
        assert_eq!((run.train.precision, run.device.kind), (Precision::Bf16, DeviceKind::Cpu));
        assert_eq!((run.prune.unwrap().sparsity, run.parallel.data), (0.25, 3));
        let DatasetSource::Text { path, .. } = run.data.source else { panic!("not text") };
        assert_eq!(path, [Path::new("a b")]);
        assert_eq!(set[5].to_string(), "parallel.data=3");
    }

    #[test]
    fn paths_that_are_set_lie_where_the_command_is_run() {
        let here = |text: &str| Override::from(text).below(Path::new("/here")).to_string();
        assert_eq!(here("data.path=a/b.txt"), "data.path=\"/here/a/b.txt\"");
        assert_eq!(here("data.path = [a, /abs/b]"), "data.path=[\"/here/a\", \"/abs/b\"]");
        assert_eq!(here("data.path.1=\"b c\""), "data.path.1=\"/here/b c\"");
        assert_eq!(here("run.data.path=a"), "run.data.path=\"/here/a\"");
        assert_eq!(here("data.path="), "data.path=");
        for other in [
            "train.batch=4",
            "data.kind=text",
            "seed",
            "sample.prompt=data.path=x",
            "parallel=auto",
            "run.parallel=auto",
        ] {
            assert_eq!(here(other), other);
        }
    }

    #[test]
    fn a_number_that_toml_has_not_is_refused() {
        let refused = RunFile::parse("", &[Override::replicas(usize::MAX)]).unwrap_err().to_string();
        assert!(refused.starts_with("`parallel.data` must be a whole number"), "{refused}");
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
