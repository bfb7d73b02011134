//! No circle of modules: what imports each other, by however many steps, is one thing in several files, and can neither be read nor
//! changed one file at a time.
//!
//! Every crate's sources are read for the paths that begin with `crate`, `super` or `self`, in imports and elsewhere, tests left out.
//! A name that a module hands on (`pub use`) counts as an import from where it is declared. The modules of one folder are then looked
//! at together, each with all that is under it: among siblings there must be an order. A module and those in its own folder may
//! know each other, since `mod.rs` hands on what they hold, and holds what they share.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Circles that are still there, by folder: to be removed one by one. A circle may have fewer modules than are named here; where none is
/// left, the entry must go.
const ALLOWED: &[(&str, &[&str])] = &[
    // A parameter's state and who shares it, and a run around its trainer: these go with the store of parameters.
    ("train", &["checkpoint", "context", "parallel", "stage", "state", "step"]),
    ("train", &["hub", "infer", "measure", "prune", "run", "summary", "trained", "trainer"]),
    ("train::checkpoint", &["old", "open", "tensors", "write"]),
    ("train::prune", &["select", "ties"]),
    ("train::run", &["lifecycle", "sample"]),
];

#[test]
fn modules_of_a_folder_have_an_order() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("crates/");
    let mut wrong = String::new();
    let mut met = BTreeSet::new();
    for folder in folders(crates) {
        let name = folder.file_name().expect("a crate has a name").to_string_lossy().into_owned();
        for circle in Crate::read(&name, &folder.join("src")).circles() {
            let allowed = ALLOWED.iter().position(|(folder, modules)| {
                *folder == circle.folder
                    && circle.modules.iter().all(|module| modules.contains(&module.as_str()))
            });
            match allowed {
                Some(entry) => drop(met.insert(entry)),
                None => wrong += &circle.describe(),
            }
        }
    }
    for (entry, (folder, modules)) in ALLOWED.iter().enumerate() {
        if !met.contains(&entry) {
            wrong += &format!("{folder}: no circle is left among {}: its entry can go\n", modules.join(", "));
        }
    }
    assert!(wrong.is_empty(), "modules that import each other:\n{wrong}");
}

/// A small crate with a circle through a name that is handed on, one that only tests close, and one of parent and child.
#[test]
fn a_circle_is_found_through_what_is_handed_on() {
    let files = [
        ("", "mod a; mod b; mod c; pub use b::{deep::Thing as Handed, other};"),
        ("a", "use crate::{Handed, c}; // use crate::nothing\nmod inner { use super::super::b; }"),
        (
            "b",
            "pub(crate) mod deep; use deep::Thing; const TEXT: &str = \"crate::c\"; #[cfg(test)] mod tests { use crate::c; }",
        ),
        (
            "b::deep",
            "pub struct Thing<'a>(&'a char); fn f() -> usize { let _ = '\\''; crate::a::g::<u8>() + super::h() }",
        ),
        ("c", "#[cfg(test)] use crate::a;"),
    ];
    let files = files.map(|(path, text)| (path.to_owned(), Module::read(text)));
    let circles = Crate { name: "example".to_owned(), modules: files.into_iter().collect() }.circles();
    let said: Vec<String> = circles.iter().map(Circle::describe).collect();
    assert_eq!(said, ["example: a, b\n    a -> b::deep, b\n    b::deep -> a\n"]);
}

fn folders(of: &Path) -> Vec<std::path::PathBuf> {
    let mut found: Vec<_> =
        fs::read_dir(of).expect("a folder").map(|entry| entry.expect("an entry").path()).collect();
    found.sort();
    found
}

/// A file of a crate: what it names, and what its names mean to others.
#[derive(Default)]
struct Module {
    /// Paths that it names, as segments.
    named: BTreeSet<Vec<String>>,
    /// What `use` brings into it: a name, `*` for all names, and the path behind it.
    brought: Vec<(String, Vec<String>)>,
    /// Modules that exist for tests alone.
    tests: BTreeSet<String>,
    /// Items that it declares.
    declared: BTreeSet<String>,
}

struct Crate {
    name: String,
    /// By path, `a::b`; the root is the empty one.
    modules: BTreeMap<String, Module>,
}

/// Modules of one folder that import each other.
struct Circle {
    folder: String,
    modules: Vec<String>,
    /// Which file of one imports which of another.
    imports: Vec<(String, BTreeSet<String>)>,
}

impl Circle {
    fn describe(&self) -> String {
        let mut text = format!("{}: {}\n", self.folder, self.modules.join(", "));
        for (from, to) in &self.imports {
            let to: Vec<&str> = to.iter().rev().map(String::as_str).collect();
            text += &format!("    {from} -> {}\n", to.join(", "));
        }
        text
    }
}

impl Crate {
    fn read(name: &str, source: &Path) -> Self {
        let mut modules = BTreeMap::new();
        let mut waiting = vec![(source.to_owned(), String::new())];
        while let Some((folder, prefix)) = waiting.pop() {
            for path in folders(&folder) {
                let stem = path.file_stem().expect("a name").to_string_lossy().into_owned();
                if path.is_dir() {
                    waiting.push((path, join(&prefix, &stem)));
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let at = match stem.as_str() {
                        "lib" | "main" | "mod" => prefix.clone(),
                        _ => join(&prefix, &stem),
                    };
                    modules.insert(at, Module::read(&fs::read_to_string(&path).expect("a source file")));
                }
            }
        }
        let tests: Vec<String> = modules
            .iter()
            .flat_map(|(at, module)| module.tests.iter().map(move |name| join(at, name)))
            .collect();
        modules.retain(|at, _| !tests.iter().any(|test| within(at, test)));
        Self { name: name.to_owned(), modules }
    }

    /// Where `path`, as `from` writes it, is declared.
    fn resolve(&self, from: &str, path: &[String], seen: &mut BTreeSet<(String, String)>) -> Option<String> {
        let mut at = from.to_owned();
        for (index, segment) in path.iter().enumerate() {
            let child = join(&at, segment);
            match segment.as_str() {
                "crate" => at.clear(),
                "self" => {}
                "super" => at = parent(&at).to_owned(),
                _ if self.modules.contains_key(&child) => at = child,
                _ if index == 0 && !self.modules[&at].brought.iter().any(|(name, _)| name == segment) => {
                    return None;
                }
                name => return self.declares(&at, name, seen).or(Some(at)),
            }
        }
        Some(at)
    }

    fn declares(&self, at: &str, name: &str, seen: &mut BTreeSet<(String, String)>) -> Option<String> {
        if !seen.insert((at.to_owned(), name.to_owned())) {
            return None;
        }
        let module = &self.modules[at];
        if module.declared.contains(name) {
            return Some(at.to_owned());
        }
        module.brought.iter().find_map(|(brought, path)| match brought.as_str() {
            "*" => self.resolve(at, path, seen).and_then(|behind| self.declares(&behind, name, seen)),
            _ if brought == name => self.resolve(at, path, seen),
            _ => None,
        })
    }

    /// Which file imports which.
    fn imports(&self) -> BTreeSet<(String, String)> {
        let mut imports = BTreeSet::new();
        for (from, module) in &self.modules {
            for path in &module.named {
                if let Some(to) = self.resolve(from, path, &mut BTreeSet::new()) {
                    imports.insert((from.clone(), to));
                }
            }
        }
        imports
    }

    fn circles(&self) -> Vec<Circle> {
        let imports = self.imports();
        let mut circles = Vec::new();
        for folder in self.modules.keys() {
            // Imports between what is directly in this folder, each with all that is under it.
            let mut edges: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
            let pairs = imports
                .iter()
                .filter_map(|(from, to)| Some((from, to, child(folder, from)?, child(folder, to)?)));
            let pairs: Vec<_> = pairs.filter(|(_, _, a, b)| a != b).collect();
            for &(_, _, a, b) in &pairs {
                edges.entry(a).or_default().insert(b);
            }
            for modules in knots(&edges) {
                let mut between: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
                for (from, to, a, b) in &pairs {
                    if modules.contains(a) && modules.contains(b) {
                        between.entry(from).or_default().insert((*to).clone());
                    }
                }
                circles.push(Circle {
                    folder: if folder.is_empty() {
                        self.name.clone()
                    } else {
                        format!("{}::{folder}", self.name)
                    },
                    modules: modules.into_iter().map(str::to_owned).collect(),
                    imports: between.into_iter().map(|(from, to)| (from.to_owned(), to)).collect(),
                });
            }
        }
        circles
    }
}

/// Sets of two or more that reach each other.
fn knots<'a>(edges: &BTreeMap<&'a str, BTreeSet<&'a str>>) -> Vec<BTreeSet<&'a str>> {
    let reached = |from: &'a str| {
        let mut reached = BTreeSet::new();
        let mut waiting = vec![from];
        while let Some(at) = waiting.pop() {
            waiting.extend(edges.get(at).into_iter().flatten().copied().filter(|to| reached.insert(*to)));
        }
        reached
    };
    let all: BTreeMap<&str, BTreeSet<&str>> = edges.keys().map(|&at| (at, reached(at))).collect();
    let mut knots: Vec<BTreeSet<&str>> = Vec::new();
    for (at, to) in &all {
        let knot: BTreeSet<&str> =
            to.iter().copied().filter(|other| all.get(other).is_some_and(|back| back.contains(at))).collect();
        if knot.len() > 1 && !knots.contains(&knot) {
            knots.push(knot);
        }
    }
    knots
}

fn join(at: &str, name: &str) -> String {
    if at.is_empty() { name.to_owned() } else { format!("{at}::{name}") }
}

fn parent(at: &str) -> &str {
    at.rsplit_once("::").map_or("", |(parent, _)| parent)
}

fn within(at: &str, folder: &str) -> bool {
    at == folder || at.strip_prefix(folder).is_some_and(|rest| rest.starts_with("::"))
}

/// Which module of `folder` has `at`; none where it is the folder itself, or elsewhere.
fn child<'a>(folder: &str, at: &'a str) -> Option<&'a str> {
    let rest = if folder.is_empty() { at } else { at.strip_prefix(folder)?.strip_prefix("::")? };
    rest.split("::").next().filter(|name| !name.is_empty())
}

impl Module {
    fn read(text: &str) -> Self {
        let mut module = Self::default();
        let tokens = without_tests(tokens(text), &mut module.tests);
        let mut depth = 0;
        // Depths at which modules within this file were opened: each takes one `super`.
        let mut inline: Vec<usize> = Vec::new();
        let mut at = 0;
        while at < tokens.len() {
            let token = tokens[at].as_str();
            let next = |n: usize| tokens.get(at + n).map_or("", String::as_str);
            match token {
                "{" => depth += 1,
                "}" => {
                    depth -= 1;
                    inline.retain(|opened| *opened < depth + 1);
                }
                "mod" if next(2) == "{" => inline.push(depth + 1),
                "fn" | "struct" | "enum" | "trait" | "type" | "const" | "static" | "union" => {
                    module.declared.insert(next(1).to_owned());
                }
                "use" => {
                    let mut end = at + 1;
                    let mut paths = Vec::new();
                    tree(&tokens, &mut end, &mut Vec::new(), &mut paths);
                    for (name, path) in paths {
                        let path = outward(path, inline.len());
                        if inline.is_empty() {
                            module.brought.push((name, path.clone()));
                        }
                        module.named.insert(path);
                    }
                    at = end;
                    continue;
                }
                "crate" | "super" | "self" if next(1) == "::" => {
                    let mut path = vec![token.to_owned()];
                    while next(2 * path.len() - 1) == "::" && is_name(next(2 * path.len())) {
                        path.push(next(2 * path.len()).to_owned());
                    }
                    at += 2 * path.len() - 1;
                    module.named.insert(outward(path, inline.len()));
                    continue;
                }
                _ => {}
            }
            at += 1;
        }
        module
    }
}

/// A path within so many modules of a file, as the file itself would write it.
fn outward(mut path: Vec<String>, inline: usize) -> Vec<String> {
    for _ in 0..inline {
        match path.first().map(String::as_str) {
            Some("super") => drop(path.remove(0)),
            Some("crate") => break,
            _ => return vec!["self".to_owned()],
        }
    }
    if path.is_empty() { vec!["self".to_owned()] } else { path }
}

/// The paths of a `use`, each with the name that it gets.
fn tree(tokens: &[String], at: &mut usize, prefix: &mut Vec<String>, paths: &mut Vec<(String, Vec<String>)>) {
    let begin = prefix.len();
    let mut renamed = None;
    while *at < tokens.len() {
        let token = tokens[*at].as_str();
        *at += 1;
        match token {
            "::" => {}
            "{" => {
                while tokens[*at - 1] != "}" {
                    tree(tokens, at, prefix, paths);
                }
                prefix.truncate(begin);
                // What follows the brace ends this path.
                *at += 1;
                return;
            }
            "as" => {
                renamed = Some(tokens[*at].clone());
                *at += 1;
            }
            "," | "}" | ";" => {
                let mut path = prefix.clone();
                let all = path.last().is_some_and(|last| last == "*");
                if path.len() > begin {
                    // `use a::{self}` is `a` itself; so is what `*` takes its names from.
                    if all || (path.len() > 1 && path.last().is_some_and(|last| last == "self")) {
                        path.pop();
                    }
                    let own = if all { Some("*".to_owned()) } else { path.last().cloned() };
                    paths.extend(renamed.or(own).map(|name| (name, path)));
                }
                prefix.truncate(begin);
                return;
            }
            name => prefix.push(name.to_owned()),
        }
    }
}

/// Drops what `#[cfg(test)]` stands before, and notes the modules among it.
fn without_tests(tokens: Vec<String>, tests: &mut BTreeSet<String>) -> Vec<String> {
    let mark = ["#", "[", "cfg", "(", "test", ")", "]"];
    let mut kept = Vec::with_capacity(tokens.len());
    let mut at = 0;
    while at < tokens.len() {
        if !tokens[at..].iter().take(mark.len()).eq(mark.iter()) {
            kept.push(tokens[at].clone());
            at += 1;
            continue;
        }
        let mut depth = 0;
        let mut last = String::new();
        at += mark.len();
        while at < tokens.len() {
            let token = tokens[at].clone();
            at += 1;
            match token.as_str() {
                "{" | "(" | "[" => depth += 1,
                "}" | ")" | "]" => depth -= 1,
                _ if last == "mod" && depth == 0 => drop(tests.insert(token.clone())),
                _ => {}
            }
            if depth == 0 && (token == ";" || token == "}") {
                break;
            }
            last = token;
        }
    }
    kept
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphanumeric() || c == '_')
}

/// Names, `::` and single characters; comments, texts and lifetimes are left out.
fn tokens(text: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let name = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        rest = if rest.starts_with("//") {
            &rest[rest.find('\n').unwrap_or(rest.len())..]
        } else if rest.starts_with("/*") {
            rest.split_once("*/").map_or("", |(_, rest)| rest)
        } else if let Some(text) = raw_text(rest) {
            text
        } else if first == '"' {
            closed(&rest[1..], '"')
        } else if first == '\'' {
            character(rest)
        } else if name > 0 {
            tokens.push(rest[..name].to_owned());
            &rest[name..]
        } else if let Some(rest) = rest.strip_prefix("::") {
            tokens.push("::".to_owned());
            rest
        } else {
            if !first.is_whitespace() {
                tokens.push(first.to_string());
            }
            &rest[first.len_utf8()..]
        };
    }
    tokens
}

/// What follows `r"..."` or `r#"..."#`, perhaps of bytes.
fn raw_text(text: &str) -> Option<&str> {
    let rest =
        text.strip_prefix("br").or_else(|| text.strip_prefix("cr")).or_else(|| text.strip_prefix('r'))?;
    let hashes = rest.len() - rest.trim_start_matches('#').len();
    let rest = rest[hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    Some(rest.split_once(&end).map_or("", |(_, rest)| rest))
}

/// What follows the quote that ends `text`.
fn closed(text: &str, quote: char) -> &str {
    let mut characters = text.char_indices();
    while let Some((at, c)) = characters.next() {
        match c {
            '\\' => drop(characters.next()),
            c if c == quote => return &text[at + 1..],
            _ => {}
        }
    }
    ""
}

/// What follows a character, or the quote of a lifetime.
fn character(text: &str) -> &str {
    let mut characters = text[1..].chars();
    let first = characters.next().unwrap_or(' ');
    if first == '\\' || characters.next() == Some('\'') { closed(&text[1..], '\'') } else { &text[1..] }
}
