//! docs/run-file.md says what the reader takes.

use super::round_trip::valid_files;
use super::*;
use crate::field::{Field, FieldDefault};
use crate::spec::KINDS;

/// Every field of every variant has a line in the documentation, and is in the list that hints come from.
#[test]
fn every_field_is_documented() {
    let page = include_str!("../../../../../docs/run-file.md");
    for (section, names) in fields::ALL {
        for Field { name, .. } in *names {
            assert!(page.contains(&format!("| `{name}` |")), "docs/run-file.md lacks `{section}.{name}`");
        }
    }
    for text in valid_files() {
        let table: Table = parse(&text).unwrap().to_toml().unwrap().parse().unwrap();
        for (section, value) in &table {
            let listed = |name: &str, key: &str| {
                fields::ALL
                    .iter()
                    .any(|(section, names)| *section == name && names.iter().any(|field| field.name == key))
            };
            match value.as_table() {
                Some(fields) => {
                    fields.keys().for_each(|key| assert!(listed(section, key), "{section}.{key}"));
                }
                None => assert!(listed("", section), "{section}"),
            }
        }
    }
    for name in ModelConfig::names() {
        assert!(page.contains(&format!("`{name}`")), "docs/run-file.md lacks the model {name}");
    }
}

/// The table of layers has a row for each kind, with its fields in their order and their defaults.
#[test]
fn every_field_of_a_layer_is_documented() {
    let page = include_str!("../../../../../docs/run-file.md");
    let table = page.split("### Layers of a custom model").nth(1).unwrap().split("\n## ").next().unwrap();
    let rows = table.lines().filter(|line| line.starts_with("| `"));
    let rows: Vec<Vec<&str>> = rows.map(|row| row.split('|').map(str::trim).collect()).collect();
    let words =
        |row: &[&str]| row[1].split(", ").map(|word| word.trim_matches('`').to_owned()).collect::<Vec<_>>();
    let documented: Vec<String> = rows.iter().flat_map(|row| words(row)).collect();
    assert_eq!(documented, KINDS.iter().map(|kind| kind.word).collect::<Vec<_>>());
    for kind in KINDS {
        let row = rows.iter().find(|row| words(row).iter().any(|word| word == kind.word)).unwrap();
        // Commas inside of parentheses belong to a default.
        let mut depth = 0;
        let outside = |letter: char| {
            depth += i32::from(letter == '(') - i32::from(letter == ')');
            letter == ',' && depth == 0
        };
        let written: Vec<&str> =
            row[2].split(outside).map(str::trim).filter(|field| !field.is_empty()).collect();
        assert_eq!(written.len(), kind.fields.len(), "{}: {written:?}", kind.word);
        for (written, field) in written.into_iter().zip(kind.fields) {
            let name = format!("`{}`", field.name);
            let with = |default: &dyn std::fmt::Display| format!("{name} ({default})");
            let exact = match field.otherwise {
                FieldDefault::Missing(_) => name,
                FieldDefault::Like(other) => with(&format!("the {other}")),
                FieldDefault::Integer(default) => with(&default),
                FieldDefault::Flag(default) => with(&default),
                FieldDefault::Number(default) => with(&default),
                FieldDefault::Word(default) => with(&format!("`\"{default}\"`")),
                FieldDefault::Nothing | FieldDefault::Empty => {
                    assert!(written.starts_with(&format!("{name} (")), "{}: {written}", kind.word);
                    continue;
                }
            };
            assert_eq!(written, exact, "{}", kind.word);
        }
    }
}
