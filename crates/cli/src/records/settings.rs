//! Settings of a run, as fields of the run file.

use std::collections::BTreeMap;

use serde_json::Value;

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
