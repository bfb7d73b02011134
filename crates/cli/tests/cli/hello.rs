//! `runs/hello.toml`, the first thing that anybody runs: it takes its text along, and that text stays what it
//! is.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use espalier_plan::RunFile;

use crate::{TestDir, espalier, json_of, refused_in_a_sentence, root};

fn runs() -> PathBuf {
    root().join("runs")
}

fn dry_run(folder: &Path) -> Output {
    espalier(folder, "train hello.toml --dry-run --json")
}

/// FNV-1a.
fn hash(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[test]
fn it_works_elsewhere_or_says_what_is_missing() {
    let folder = TestDir::new();
    let files = ["hello.toml", "hello-tokenizer.json", "hello.txt"];
    for (i, name) in files.iter().enumerate() {
        fs::copy(runs().join(name), folder.join(name)).unwrap();
        let output = dry_run(&folder);
        if i + 1 == files.len() {
            assert!(json_of(output)["parameters"].as_u64().unwrap() > 500_000);
            continue;
        }
        let text = refused_in_a_sentence(output, &[]);
        let is_named = |name: &&str| text.contains(&format!("{} is not there", folder.join(name).display()));
        assert!(files[i + 1..].iter().any(is_named), "{text}");
    }
}

/// README's numbers are of these bytes. Who changes them changes README.
#[test]
fn its_text_is_frozen() {
    let text = fs::read(runs().join("hello.txt")).unwrap();
    assert!(text.is_ascii() && text.len() <= 500_000, "{}", text.len());
    assert_eq!(hash(&text), 0xdee8_4296_bae9_cbc3);
    assert_eq!(hash(&fs::read(runs().join("hello-tokenizer.json")).unwrap()), 0xa0b6_9bb4_89b4_3f23);
    // What it writes at the end is a paragraph, which its context has room for.
    let run = RunFile::parse(&fs::read_to_string(runs().join("hello.toml")).unwrap(), &[]).unwrap();
    assert!(run.sample.unwrap().tokens >= 60);
}
