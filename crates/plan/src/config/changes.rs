//! What differs between two run files, and which of it makes another run of the same folder.
//!
//! How long a run is, how it is spread over ranks, how often it evaluates and saves, and what computes it do
//! not say what is learnt: in exact arithmetic the weights after a step are the same. Everything else does.
//! `train.steps` moves the end of schedules that are measured by the length of the run, which is
//! [reported](RunFile::new_length), since a longer run is the usual reason to resume.

use toml::{Table, Value};

use super::{Error, RunFile, fields};

/// Schedules whose gradients are of older weights: they are not a matter of layout.
const ASYNCHRONOUS: [&str; 2] = ["pipedream", "2bw"];

/// A field with two values.
#[derive(Debug, Clone, PartialEq)]
pub struct FieldChange {
    /// Its full path.
    pub field: String,
    /// As TOML; none where the field was not there.
    pub was: Option<String>,
    /// As TOML; none where the field is not there.
    pub is: Option<String>,
    /// Whether other weights come of it.
    pub changes_result: bool,
}

impl std::fmt::Display for FieldChange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let show = |value: &Option<String>| value.clone().unwrap_or_else(|| "not there".into());
        write!(f, "`{}` was {} and is {}", self.field, show(&self.was), show(&self.is))
    }
}

impl RunFile {
    /// What differs from what the run `was`, in the order of names. `same_file` says whether two paths lead
    /// to one file.
    pub fn changes(
        &self,
        was: &RunFile,
        same_file: impl Fn(&str, &str) -> bool,
    ) -> Result<Vec<FieldChange>, Error> {
        let (is, was) = (self.flat()?, was.flat()?);
        let mut fields: Vec<&String> = is.keys().chain(was.keys()).collect();
        fields.sort();
        fields.dedup();
        let change = |field: &&String| {
            let (was, is) = (was.get(*field), is.get(*field));
            let asynchronous = [was, is].into_iter().flatten().any(|value| {
                field.as_str() == "parallel.schedule"
                    && value.as_str().is_some_and(|name| ASYNCHRONOUS.contains(&name))
            });
            let free = fields::hold(field, |row| row.is_free) && !asynchronous;
            let text = |value: &Value| value.to_string();
            let same =
                |a: &Value, b: &Value| a == b || (field.starts_with("data.") && same_files(a, b, &same_file));
            let unchanged = was.zip(is).is_some_and(|(was, is)| same(was, is));
            (!unchanged).then(|| FieldChange {
                field: field.to_string(),
                was: was.map(text),
                is: is.map(text),
                changes_result: !free,
            })
        };
        Ok(fields.iter().filter_map(change).collect())
    }

    /// One sentence where the run has another length than the run `was`, and its rate is another from now on;
    /// `done` steps of both are behind, and the data has `samples` to train on.
    pub fn new_length(&self, was: &RunFile, done: u64, samples: usize) -> Option<String> {
        let steps = |run: &RunFile| run.train.length.steps(samples, run.train.batch);
        let (before, now) = (steps(was), steps(self));
        let rate = |total| self.learning_rate.for_batch(self.train.batch).at(done as usize, total);
        let (old, new) = (rate(before), rate(now));
        (before != now && old != new).then(|| {
            format!(
                "the run has {now} steps now, and had {before}: schedules follow the new length, and the learning rate \
                 continues at {new:.2e} instead of {old:.2e}"
            )
        })
    }

    /// Every field by its full path.
    fn flat(&self) -> Result<Table, Error> {
        let table: Table = self.to_toml()?.parse().expect("what was just written");
        let mut flat = Table::new();
        for (name, value) in table {
            match value {
                Value::Table(section) => {
                    flat.extend(section.into_iter().map(|(key, value)| (format!("{name}.{key}"), value)));
                }
                value => drop(flat.insert(name, value)),
            }
        }
        Ok(flat)
    }
}

/// Whether two values are paths, or lists of them, that lead to the same files.
fn same_files(a: &Value, b: &Value, same: &impl Fn(&str, &str) -> bool) -> bool {
    match (a, b) {
        (Value::String(a), Value::String(b)) => same(a, b),
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same_files(a, b, same))
        }
        _ => false,
    }
}

/// Whether a field, or a section, is or holds a field.
pub fn covers(name: &str, field: &str) -> bool {
    field == name || field.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'))
}

/// An error if `name` is neither a field nor a section.
pub fn check_name(name: &str) -> Result<(), Error> {
    let all = fields::names();
    match all.iter().any(|field| field == name) {
        true => Ok(()),
        false => {
            let theirs = super::other_names::ours(name.rsplit('.').next().unwrap_or(name)).next();
            let hint =
                theirs.or_else(|| super::nearest(name, all.iter().map(String::as_str))).map(String::from);
            Err(Error::UnknownField { field: name.into(), hint })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(overrides: &[&str]) -> RunFile {
        RunFile::parse("", &overrides.iter().map(|text| (*text).into()).collect::<Vec<_>>()).unwrap()
    }

    fn changed(overrides: &[&str]) -> Vec<(String, bool)> {
        let changes = run(overrides).changes(&run(&[]), |_, _| false).unwrap();
        changes.into_iter().map(|change| (change.field, change.changes_result)).collect()
    }

    #[test]
    fn what_is_learnt_is_told_from_how() {
        assert_eq!(changed(&[]), []);
        for free in [
            "train.steps=7",
            "train.micro_batches=4",
            "train.eval_every=3",
            "checkpoint.every=2",
            "device.kind=cpu",
            "device.threads=3",
            "parallel.data=4",
        ] {
            let field = free.split('=').next().unwrap();
            assert_eq!(changed(&[free]), [(field.to_string(), false)], "{free}");
        }
        for other in
            ["seed=3", "train.batch=64", "optimizer.beta2=0.95", "learning_rate.peak=0.5", "data.count=77"]
        {
            let field = other.split('=').next().unwrap();
            assert_eq!(changed(&[other]), [(field.to_string(), true)], "{other}");
        }
        let changes = changed(&["optimizer.name=sgd"]);
        assert!(changes.contains(&("optimizer.name".into(), true)), "{changes:?}");
        assert!(changes.contains(&("optimizer.beta1".into(), true)), "it has gone: {changes:?}");
    }

    #[test]
    fn stale_gradients_are_no_layout() {
        let on = |schedule: &str| {
            run(&["train.micro_batches=4", "parallel.pipeline=2", &format!("parallel.schedule={schedule}")])
        };
        let result = |is: &str, was: &str| {
            on(is).changes(&on(was), |_, _| false).unwrap().iter().any(|c| c.changes_result)
        };
        assert!(!result("gpipe", "1f1b"));
        assert!(result("2bw", "1f1b") && result("1f1b", "2bw"));
    }

    #[test]
    fn a_change_is_one_clause() {
        let changes = run(&["train.batch=64"]).changes(&run(&[]), |_, _| false).unwrap();
        insta::assert_snapshot!(changes[0], @"`train.batch` was 32 and is 64");
        insta::assert_snapshot!(
            run(&["train.steps=200"]).new_length(&run(&[]), 100, 1000).unwrap(),
            @"the run has 200 steps now, and had 100: schedules follow the new length, and the learning rate continues at 5.50e-4 instead of 1.00e-4"
        );
        let constant = |steps: &str| run(&["learning_rate.schedule=constant", steps]);
        assert_eq!(constant("train.steps=200").new_length(&constant("train.steps=100"), 100, 1000), None);
    }

    #[test]
    fn a_path_is_the_file_that_it_leads_to() {
        let on = |path: &str| run(&["data.kind=text", &format!("data.path={path}")]);
        let same = |a: &str, b: &str| a.trim_end_matches('/') == b.trim_end_matches('/');
        assert_eq!(on("books/").changes(&on("books"), same).unwrap(), []);
        assert_eq!(on("[\"books/\", \"a\"]").changes(&on("[\"books\", \"a\"]"), same).unwrap(), []);
        assert_eq!(on("others").changes(&on("books"), same).unwrap()[0].field, "data.path");
    }

    #[test]
    fn names_are_fields_or_sections() {
        for name in ["seed", "train.batch", "optimizer"] {
            check_name(name).unwrap();
        }
        insta::assert_snapshot!(check_name("train.bacth").unwrap_err(), @"`train.bacth` is not a field; did you mean `train.batch`?");
        check_name("").unwrap_err();
    }
}
