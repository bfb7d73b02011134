//! Settings of runs, as fields of the run file, and where they differ.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::folder::RunRecord;

/// Every field with its value: `train.batch` is `16`. A list is one value.
pub fn flat(run: &Value) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    collect(run, String::new(), &mut found);
    found
}

fn collect(value: &Value, path: String, found: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                collect(value, path, found);
            }
        }
        Value::Null => {}
        Value::String(text) => {
            found.insert(path, text.clone());
        }
        other => {
            found.insert(path, other.to_string());
        }
    }
}

/// Fields that are not the same in all runs, with the value of each run; null where it has none.
pub fn differing(runs: &[RunRecord]) -> BTreeMap<String, Vec<Option<String>>> {
    let known: Vec<&RunRecord> = runs.iter().filter(|run| !run.settings.is_empty()).collect();
    let fields: BTreeSet<&String> = known.iter().flat_map(|run| run.settings.keys()).collect();
    let differs = |field: &&String| {
        let first = known[0].settings.get(*field);
        known.iter().any(|run| run.settings.get(*field) != first)
    };
    let values = |field: &String| runs.iter().map(|run| run.settings.get(field).cloned()).collect();
    fields.into_iter().filter(differs).map(|field| (field.clone(), values(field))).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_are_named_as_a_run_file_names_them() {
        let run = json!({ "seed": 1, "train": { "batch": 16, "note": "a" }, "data": { "path": ["x", "y"], "none": null } });
        let flat: Vec<(String, String)> = flat(&run).into_iter().collect();
        let expected =
            [("data.path", "[\"x\",\"y\"]"), ("seed", "1"), ("train.batch", "16"), ("train.note", "a")];
        assert_eq!(flat, expected.map(|(field, value)| (field.to_owned(), value.to_owned())));
    }
}
