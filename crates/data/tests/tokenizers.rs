//! Ids of every style of tokenizer that people have are those of Python's `tokenizers`
//! (`oracle/tokenizer_styles.py`).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use espalier_data::{Error, Tokenizer};
use serde::Deserialize;

/// What Python makes of a text.
#[derive(Deserialize)]
struct Expected {
    text: String,
    ids: Vec<u32>,
    input: Vec<u32>,
    decoded: String,
}

fn oracle() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle")
}

fn expected(folder: &Path) -> BTreeMap<String, Vec<Expected>> {
    let styles: BTreeMap<_, Vec<_>> =
        serde_json::from_slice(&fs::read(folder.join("expected.json")).unwrap()).unwrap();
    assert!(styles.len() == 8 && styles.values().all(|texts| texts.len() > 10));
    styles
}

/// The tokenizer of a style; none where this build has no reader for it, and says so.
fn open(folder: &Path, style: &str) -> Option<Tokenizer> {
    match Tokenizer::open(&folder.join(style).with_extension("json")) {
        Err(refused @ Error::OtherTokenizer { .. }) if !cfg!(feature = "tokenizers") => {
            assert!(["bert", "t5"].contains(&style), "{style}: {refused}");
            assert!(refused.to_string().contains("--features tokenizers"), "{refused}");
            None
        }
        opened => Some(opened.unwrap()),
    }
}

fn compare(folder: &Path) {
    for (style, texts) in expected(folder) {
        let Some(tokenizer) = open(folder, &style) else { continue };
        for Expected { text, ids, input, decoded } in texts {
            assert_eq!(tokenizer.encode(&text).unwrap(), ids, "{style}: {text:?}");
            assert_eq!(tokenizer.encode_input(&text).unwrap(), input, "{style}: {text:?}");
            assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab()));
            // Ours is what ids stand for in the middle of a text; at its beginning some styles leave out a space.
            let ours = String::from_utf8(tokenizer.decode(&ids)).unwrap();
            let begins = if ours == decoded { &ours } else { ours.strip_prefix(' ').unwrap_or(&ours) };
            assert_eq!(begins, decoded, "{style}");
        }
    }
}

#[test]
fn ids_are_those_of_python() {
    compare(&oracle().join("tokenizers"));
}

/// The same with files that are made now, by whatever version is installed.
#[test]
fn ids_are_those_of_the_python_that_is_here() {
    let folder = tempfile::tempdir().unwrap();
    let script = oracle().join("tokenizer_styles.py");
    let made = std::process::Command::new("python3").arg(script).arg(folder.path()).output();
    match made {
        Ok(output) if output.status.success() => compare(folder.path()),
        Ok(output) => {
            let error = String::from_utf8_lossy(&output.stderr);
            let why = error.trim().lines().last().unwrap_or("python3 said nothing");
            assert!(why.starts_with("ModuleNotFoundError"), "{error}");
            espalier_testing::skipped(espalier_testing::Need::Tokenizers, why);
        }
        Err(why) => espalier_testing::skipped(espalier_testing::Need::Tokenizers, why),
    }
}

/// A build without them has tests of one style alone.
#[cfg(not(feature = "tokenizers"))]
#[test]
fn tokenizers_are_built_in() {
    let why = "these tests were built without `--features espalier-cli/tokenizers`";
    espalier_testing::skipped(espalier_testing::Need::Tokenizers, why);
}

#[cfg(feature = "tokenizers")]
mod built_in {
    use super::*;

    /// Of each style the token that ends a text, the tokens that are no text, and whether a text may be split
    /// over threads.
    #[test]
    fn what_a_style_has_is_known() {
        let facts = |style| {
            let tokenizer = open(&oracle().join("tokenizers"), style).unwrap();
            (tokenizer.end_token().map(|(content, _)| content), tokenizer.can_split())
        };
        assert_eq!(facts("gpt2"), (Some("<|endoftext|>"), true));
        assert_eq!(facts("llama3"), (Some("<|end_of_text|>"), true));
        assert_eq!(facts("qwen"), (Some("<|endoftext|>"), true));
        assert_eq!(facts("smollm"), (Some("<|endoftext|>"), true));
        assert_eq!(facts("llama2"), (Some("</s>"), true));
        assert_eq!(facts("mistral"), (Some("</s>"), true));
        assert_eq!(facts("bert"), (None, true));
        assert_eq!(facts("t5"), (Some("</s>"), true));
        let llama3 = open(&oracle().join("tokenizers"), "llama3").unwrap();
        let ids = llama3.encode("<|begin_of_text|>To espalier, naïve").unwrap();
        assert_eq!(llama3.text_bytes(&ids), "To espalier, naïve".len());
        let llama2 = open(&oracle().join("tokenizers"), "llama2").unwrap();
        let ids = llama2.encode("x\u{1f333}").unwrap();
        // A tree that the vocabulary lacks is four bytes, and half of it two.
        assert_eq!(llama2.decode(&ids), " x\u{1f333}".as_bytes());
        assert_eq!(llama2.decode(&ids[ids.len() - 2..]), [0x8c, 0xb3]);
    }

    #[test]
    fn what_no_reader_can_read_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        let refused = |pointer: &str, value: serde_json::Value| {
            let text = fs::read(oracle().join("tokenizers/bert.json")).unwrap();
            let mut file: serde_json::Value = serde_json::from_slice(&text).unwrap();
            *file.pointer_mut(pointer).unwrap() = value;
            fs::write(&path, file.to_string()).unwrap();
            // The folder of a model stands for its tokenizer.
            Tokenizer::open(folder.path()).unwrap_err().to_string()
        };
        let error = refused("/model/type", "Wordpiece".into());
        assert!(
            error.contains("is not a tokenizer we can read: expected a Hugging Face tokenizer.json"),
            "{error}"
        );
        let error = refused("/pre_tokenizer", serde_json::json!({ "type": "Unheard" }));
        assert_eq!(error.lines().count(), 1, "{error}");
        // A trie of one unit, which every byte leads out of.
        let map = serde_json::json!({ "type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA=" });
        let error = refused("/normalizer", map);
        assert!(error.ends_with("got a character map whose trie leads out of it"), "{error}");
        let error = refused("/model/vocab/[MASK]", 4_000_000.into());
        assert!(error.contains("4000000") || error.contains("expected"), "{error}");
        let error = refused(
            "/model",
            serde_json::json!({ "type": "BPE", "dropout": 0.1, "vocab": {}, "merges": [] }),
        );
        assert!(error.ends_with("expected a model without dropout, got 0.1"), "{error}");
    }

    /// A word that the vocabulary has no token for, and none in its place.
    #[test]
    fn text_that_cannot_be_spelled_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        let words = serde_json::json!({
            "version": "1.0", "truncation": { "max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right" },
            "padding": null, "added_tokens": [], "normalizer": null, "pre_tokenizer": { "type": "Whitespace" },
            "post_processor": null, "decoder": null,
            "model": { "type": "WordLevel", "vocab": { "a": 0, "b": 1 }, "unk_token": "[UNK]" },
        });
        fs::write(&path, words.to_string()).unwrap();
        let tokenizer = Tokenizer::open(&path).unwrap();
        // Not cut off after two, as the file has it for single inputs.
        assert_eq!(tokenizer.encode("a b b a").unwrap(), [0, 1, 1, 0]);
        assert!(matches!(tokenizer.encode("a c"), Err(Error::Untokenized { .. })));
    }
}
