//! No circle of modules: what imports each other, by however many steps, is one thing in several files, and
//! can neither be read nor changed one file at a time.
//!
//! Every crate's sources are read for the paths that begin with `crate`, `super` or `self`, in imports and
//! elsewhere, tests left out. A name that a module hands on (`pub use`) counts as an import from where it is
//! declared. The modules of one folder are then looked at together, each with all that is under it: among
//! siblings there must be an order. A module and those in its own folder may know each other, since `mod.rs`
//! hands on what they hold, and holds what they share.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn modules_of_a_folder_have_an_order() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("crates/");
    let of = |folder: PathBuf| Crate::read(&stem(&folder), &folder.join("src")).circles();
    let circles = entries(crates).into_iter().flat_map(of).collect::<String>();
    assert!(circles.is_empty(), "modules that import each other:\n{circles}");
}

/// A small crate with a circle through a name that is handed on, one that only tests close, and one of parent
/// and child.
#[test]
fn a_circle_is_found_through_what_is_handed_on() {
    let files = [
        ("", "mod a; mod b; mod c; pub use b::{deep::Thing as Handed, other};"),
        ("a", "use crate::{Handed, b, c::{self, d}}; // use crate::nothing"),
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
    let modules = files.map(|(path, text)| (path.to_owned(), Module::read(text))).into();
    let circles = Crate { name: "example".to_owned(), modules }.circles();
    assert_eq!(circles, ["example: a, b\n    a -> b\n    a -> b::deep\n    b::deep -> a\n"]);
}

/// What a folder holds, by name.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<_> =
        fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()).collect();
    found.sort();
    found
}

fn stem(path: &Path) -> String {
    path.file_stem().expect("a name").to_string_lossy().into_owned()
}

/// A file of a crate: what it names, and what its names mean to others.
#[derive(Default)]
struct Module {
    /// Paths that it names.
    named: Vec<String>,
    /// What `use` brings into it: a name, `*` for all names, and the path behind it.
    brought: Vec<(String, String)>,
    /// Items that it declares.
    declared: BTreeSet<String>,
    /// Modules that exist for tests alone.
    tests: Vec<String>,
}

struct Crate {
    name: String,
    /// By path, `a::b`; the root is the empty one.
    modules: BTreeMap<String, Module>,
}

impl Crate {
    fn read(name: &str, source: &Path) -> Self {
        let mut modules = BTreeMap::new();
        let mut waiting = vec![(source.to_owned(), String::new())];
        while let Some((folder, prefix)) = waiting.pop() {
            for path in entries(&folder) {
                let at = match stem(&path).as_str() {
                    "lib" | "main" | "mod" => prefix.clone(),
                    name => join(&prefix, name),
                };
                if path.is_dir() {
                    waiting.push((path, at));
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    modules.insert(at, Module::read(&fs::read_to_string(&path).expect("a source file")));
                }
            }
        }
        let of_tests = |(at, module): (&String, &Module)| {
            module.tests.iter().map(|name| join(at, name)).collect::<Vec<_>>()
        };
        let tests: Vec<String> = modules.iter().flat_map(of_tests).collect();
        modules.retain(|at, _| !tests.iter().any(|test| at == test || at.starts_with(&format!("{test}::"))));
        Self { name: name.to_owned(), modules }
    }

    /// Where `path`, as the module `from` writes it, is declared. A name that is handed on in a circle ends
    /// where it begins.
    fn resolve(&self, from: &str, path: &str, depth: usize) -> Option<String> {
        let mut at = from.to_owned();
        for (index, segment) in path.split("::").enumerate() {
            let child = join(&at, segment);
            let brought = |name: &str| self.modules[&at].brought.iter().find(|(brought, _)| brought == name);
            match segment {
                "crate" => at.clear(),
                "self" => {}
                "super" => at = at.rsplit_once("::").map_or(String::new(), |(parent, _)| parent.to_owned()),
                _ if self.modules.contains_key(&child) => at = child,
                // Another crate's, or the language's.
                _ if index == 0 && brought(segment).is_none() => return None,
                name => {
                    return (depth < 9).then(|| self.declares(&at, name, depth + 1)).flatten().or(Some(at));
                }
            }
        }
        Some(at)
    }

    fn declares(&self, at: &str, name: &str, depth: usize) -> Option<String> {
        let module = &self.modules[at];
        if module.declared.contains(name) {
            return Some(at.to_owned());
        }
        module.brought.iter().find_map(|(brought, path)| match brought.as_str() {
            "*" => self
                .resolve(at, path, depth)
                .filter(|_| depth < 9)
                .and_then(|all| self.declares(&all, name, depth + 1)),
            _ if brought == name => self.resolve(at, path, depth),
            _ => None,
        })
    }

    /// Modules of one folder that import each other, with every import among them.
    fn circles(&self) -> Vec<String> {
        let of = |(from, module): (&String, &Module)| {
            let resolved =
                module.named.iter().filter_map(|path| Some((from.clone(), self.resolve(from, path, 0)?)));
            resolved.collect::<Vec<_>>()
        };
        let imports: BTreeSet<(String, String)> = self.modules.iter().flat_map(of).collect();
        let mut circles = Vec::new();
        for folder in self.modules.keys() {
            // Imports between what is directly in this folder, each with all that is under it.
            let within = |at| child(folder, at);
            let pairs = imports.iter().filter_map(|(from, to)| Some((from, to, within(from)?, within(to)?)));
            let pairs: Vec<_> = pairs.filter(|(_, _, a, b)| a != b).collect();
            let folder =
                if folder.is_empty() { self.name.clone() } else { format!("{}::{folder}", self.name) };
            for modules in knots(&pairs.iter().map(|&(_, _, a, b)| (a, b)).collect()) {
                let names: Vec<&str> = modules.iter().copied().collect();
                let mut circle = format!("{folder}: {}\n", names.join(", "));
                for (from, to, ..) in
                    pairs.iter().filter(|(_, _, a, b)| modules.contains(a) && modules.contains(b))
                {
                    circle += &format!("    {from} -> {to}\n");
                }
                circles.push(circle);
            }
        }
        circles
    }
}

/// Sets of two or more that reach each other.
fn knots<'a>(edges: &BTreeSet<(&'a str, &'a str)>) -> BTreeSet<BTreeSet<&'a str>> {
    let reached = |from: &'a str| {
        let mut reached = BTreeSet::new();
        let mut waiting = vec![from];
        while let Some(at) = waiting.pop() {
            waiting.extend(
                edges.iter().filter(|edge| edge.0 == at).map(|edge| edge.1).filter(|to| reached.insert(*to)),
            );
        }
        reached
    };
    let all: BTreeMap<&str, BTreeSet<&str>> = edges.iter().map(|edge| (edge.0, reached(edge.0))).collect();
    let knot = |(at, to): (&&str, &BTreeSet<&'a str>)| {
        to.iter().copied().filter(|other| all.get(other).is_some_and(|back| back.contains(at))).collect()
    };
    all.iter().map(knot).filter(|knot: &BTreeSet<&str>| knot.len() > 1).collect()
}

fn join(at: &str, name: &str) -> String {
    if at.is_empty() { name.to_owned() } else { format!("{at}::{name}") }
}

/// Which module of `folder` has `at`; none where it is the folder itself, or elsewhere.
fn child<'a>(folder: &str, at: &'a str) -> Option<&'a str> {
    let rest = if folder.is_empty() { at } else { at.strip_prefix(folder)?.strip_prefix("::")? };
    rest.split("::").next().filter(|name| !name.is_empty())
}

impl Module {
    /// Modules within a file count as the file.
    fn read(text: &str) -> Self {
        let mut module = Self::default();
        let text = module.without_tests(&code(text));
        let words: Vec<&str> = text.split_whitespace().collect();
        for pair in words.windows(2) {
            let item =
                ["fn", "struct", "enum", "trait", "type", "const", "static", "union"].contains(&pair[0]);
            module.declared.extend(item.then(|| pair[1].to_owned()));
        }
        let mut rest = words.as_slice();
        while let [word, after @ ..] = rest {
            rest = after;
            if *word == "use" {
                let end = rest.iter().position(|word| *word == ";").unwrap_or(rest.len());
                module.bring("", &rest[..end]);
                rest = &rest[end..];
            } else if ["crate", "super", "self"].contains(word) && rest.first() == Some(&"::") {
                let length = rest
                    .chunks(2)
                    .take_while(|pair| pair[0] == "::" && pair.len() == 2 && is_name(pair[1]))
                    .count();
                module.named.push(format!("{word}{}", rest[..2 * length].concat()));
            }
        }
        module
    }

    /// The paths of a `use`, each with the name that it gets.
    fn bring(&mut self, prefix: &str, tree: &[&str]) {
        if let Some(brace) = tree.iter().position(|word| *word == "{") {
            let prefix = prefix.to_owned() + &tree[..brace].concat();
            let (mut depth, mut begin) = (0, brace + 1);
            for (at, word) in tree.iter().enumerate().skip(brace) {
                depth += i32::from(*word == "{") - i32::from(*word == "}");
                if (*word == "," && depth == 1) || depth == 0 {
                    self.bring(&prefix, &tree[begin..at]);
                    begin = at + 1;
                }
            }
        } else if let Some(last) = tree.last() {
            let end = tree.iter().position(|word| *word == "as").unwrap_or(tree.len());
            let path = prefix.to_owned() + &tree[..end].concat();
            // `use a::{self}` is `a` itself; so is what `*` takes its names from.
            let path = path.trim_end_matches("::*").trim_end_matches("::self");
            let name = if *last == "self" { path.rsplit("::").next().unwrap_or(path) } else { last };
            self.named.push(path.to_owned());
            self.brought.push((name.to_owned(), path.to_owned()));
        }
    }

    /// Drops what `#[cfg(test)]` stands before, and notes the modules among it.
    fn without_tests(&mut self, text: &str) -> String {
        let mut pieces = text.split("# [ cfg ( test ) ]");
        let mut kept = pieces.next().unwrap_or_default().to_owned();
        for piece in pieces {
            let words: Vec<&str> = piece.split_whitespace().collect();
            let (mut depth, mut end) = (0, words.len());
            for (at, word) in words.iter().enumerate() {
                depth +=
                    i32::from(["{", "(", "["].contains(word)) - i32::from(["}", ")", "]"].contains(word));
                if depth == 0 && [";", "}"].contains(word) {
                    end = at + 1;
                    break;
                }
            }
            let module = words[..end].windows(2).find(|pair| pair[0] == "mod").map(|pair| pair[1].to_owned());
            self.tests.extend(module);
            kept = kept + " " + &words[end..].join(" ");
        }
        kept
    }
}

fn is_name(word: &str) -> bool {
    word.starts_with(|c: char| c.is_alphanumeric() || c == '_')
}

/// Names, `::` and single characters, with spaces between them; comments, texts and lifetimes are left out.
fn code(text: &str) -> String {
    let mut code = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let name = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let hashes = rest.trim_start_matches(['b', 'r']).len()
            - rest.trim_start_matches(['b', 'r']).trim_start_matches('#').len();
        let is_raw = (rest.starts_with('r') || rest.starts_with("br"))
            && rest.trim_start_matches(['b', 'r', '#']).starts_with('"');
        rest = if rest.starts_with("//") {
            &rest[rest.find('\n').unwrap_or(rest.len())..]
        } else if is_raw {
            let inside = &rest[rest.find('"').map_or(0, |quote| quote + 1)..];
            inside.split_once(&format!("\"{}", "#".repeat(hashes))).map_or("", |(_, rest)| rest)
        } else if first == '"' {
            behind(&rest[1..], '"')
        } else if first == '\'' && (rest[1..].starts_with('\\') || rest.chars().nth(2) == Some('\'')) {
            behind(&rest[1..], '\'')
        } else {
            let length = if name > 0 {
                name
            } else if rest.starts_with("::") {
                2
            } else {
                first.len_utf8()
            };
            code += &rest[..length];
            code.push(' ');
            &rest[length..]
        };
    }
    code
}

/// What follows the quote that ends `text`.
fn behind(text: &str, quote: char) -> &str {
    let mut escaped = false;
    let is_end = |c: char| {
        let end = c == quote && !escaped;
        escaped = c == '\\' && !escaped;
        end
    };
    text.find(is_end).map_or("", |end| &text[end + 1..])
}
