//! A type's name is declared once in the workspace: whoever reads `Shard` or searches for it finds one thing.
//!
//! Sources of all crates are read for `struct`, `enum`, `trait`, `union` and `type`, tests' and benchmarks'
//! own folders left out, and so are types that belong to a trait. What may be there twice is listed with its
//! reason; the list is printed, and an entry that is no longer needed is an error too, so that it only
//! shrinks.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Names that are declared more than once, and why that does not mislead.
const ALLOWED: &[(&str, &[&str])] = &[
    ("a crate's own, as everywhere in Rust", &["Error", "Result"]),
    (
        "what a layer is (plan) and what it does (nn)",
        &[
            "Attention",
            "BatchNorm",
            "Bias",
            "Branches",
            "CollectiveLayer",
            "Dropout",
            "Embedding",
            "Linear",
            "MaxPool",
            "PositionEmbedding",
            "Residual",
            "TiledMean",
        ],
    ),
    ("a feature chooses one of the two", &["AnyTokenizer"]),
];

/// What a type is called must say what it is: these say how something stands to something else.
const NO_NAMES: &[&str] = &[
    "After", "Along", "Among", "Before", "Beside", "Each", "Either", "Found", "Held", "Like", "Made", "Of",
    "Out", "Over", "Own", "Part", "Passed", "Piece", "Place", "Seen", "Shown", "Taken", "Then", "Thing",
    "To", "Told", "Under", "Wanted",
];

#[test]
fn a_type_name_is_declared_once() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("crates/");
    let mut declared = BTreeMap::<String, Vec<String>>::new();
    for file in entries(crates).iter().flat_map(|folder| sources(&folder.join("src"))) {
        let text = fs::read_to_string(&file).expect("a source file");
        let file = file.strip_prefix(crates).expect("under crates/").display().to_string();
        for name in types(&text) {
            declared.entry(name).or_default().push(file.clone());
        }
    }
    assert!(declared.len() > 500, "only {} types were found", declared.len());
    let allowed: BTreeMap<_, _> =
        ALLOWED.iter().flat_map(|(why, names)| names.iter().map(move |name| (*name, *why))).collect();
    let mut wrong = String::new();
    for (name, files) in &declared {
        match (files.len() > 1, allowed.get(name.as_str())) {
            (true, None) => wrong += &format!("{name} is declared in {}\n", files.join(", ")),
            (true, Some(why)) => println!("{name}: {why}"),
            (false, Some(_)) => wrong += &format!("{name} is declared once: take it off the list\n"),
            (false, None) => {}
        }
        if NO_NAMES.contains(&name.as_str()) {
            wrong += &format!("{name} in {}: a name that says what it is\n", files.join(", "));
        }
    }
    for name in allowed.keys().filter(|name| !declared.contains_key(**name)) {
        wrong += &format!("{name} is not declared: take it off the list\n");
    }
    assert!(wrong.is_empty(), "type names:\n{wrong}");
}

#[test]
fn declarations_are_told_from_what_only_looks_like_one() {
    let text = "pub struct A;\n/// struct B\n    pub(crate) enum C {\nimpl X for Y {\n    type D = u8;\n}\ntype E = u8;\nunsafe trait F {}\nlet s = \"struct G\";\n";
    assert_eq!(types(text), ["A", "C", "E", "F"]);
}

/// Names of the types that a file declares.
fn types(text: &str) -> Vec<String> {
    let declared = |line: &str| -> Option<String> {
        let start = line.trim_start();
        let start = match start.strip_prefix("pub") {
            Some(rest) if rest.starts_with('(') => rest.split_once(") ")?.1,
            Some(rest) => rest.trim_start(),
            None => start,
        };
        let (kind, rest) = start.strip_prefix("unsafe ").unwrap_or(start).split_once(' ')?;
        // A type that is set in is one that a trait asks for.
        let is_type = match kind {
            "struct" | "enum" | "trait" | "union" => true,
            "type" => !line.starts_with(' '),
            _ => false,
        };
        let name: String = rest.chars().take_while(|letter| letter.is_alphanumeric()).collect();
        (is_type && name.starts_with(char::is_uppercase)).then_some(name)
    };
    text.lines().filter_map(declared).collect()
}

/// Every source file under a folder.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let under = |path: PathBuf| match path.is_dir() {
        true => sources(&path),
        false => vec![path],
    };
    let mut files: Vec<_> = entries(folder).into_iter().flat_map(under).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "rs"));
    files
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<_> =
        fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()).collect();
    found.sort();
    found
}
