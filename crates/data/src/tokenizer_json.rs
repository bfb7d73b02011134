//! Hugging Face's `tokenizer.json`, of the byte-level BPE kind.
//!
//! Whatever in the file would change ids and is not done here, such as a normalizer or another split, is
//! refused by name, never approximated; `any_tokenizer` reads these, in a build that has it. Post-processing,
//! truncation and padding are left aside: they concern single inputs, not a stream to learn from.

use crate::{Bpe, Error, regular_file::RECORDS, vocab_merges};
use serde::Deserialize;
use serde_json::{Value, json};
use std::{cmp::Reverse, collections::HashMap, path::Path};

impl Bpe {
    /// Reads a `tokenizer.json`, or a `vocab.json` with the `merges.txt` beside it.
    pub fn open(path: &Path) -> Result<Bpe, Error> {
        if !vocab_merges::is_vocab(path) {
            return parse(path, &crate::error::read(path, "a Hugging Face tokenizer.json", RECORDS)?);
        }
        let json = vocab_merges::to_json(path)?;
        match parse(path, json.as_bytes()) {
            // No build reads it: the other reader knows one file alone.
            Err(Error::OtherTokenizer { path, expected, got }) => {
                Err(Error::Tokenizer { path, expected, got })
            }
            read => Ok(Bpe { json: Some(json), ..read? }),
        }
    }
}

/// Vocabulary and merges of a `tokenizer.json` of Hugging Face's; errors name `path`.
fn parse(path: &Path, text: &[u8]) -> Result<Bpe, Error> {
    let refuse =
        |expected: &str, got: String| Error::Tokenizer { path: path.into(), expected: expected.into(), got };
    let broken = |e: serde_json::Error| refuse("a Hugging Face tokenizer.json", e.to_string());
    let file: TokenizerFile = serde_json::from_slice(text).map_err(broken)?;
    let kind = |value: &Value| value.get("type").unwrap_or(value).to_string();
    let must = |holds: bool, expected: &str, got: String| {
        if holds {
            Ok(())
        } else {
            Err(Error::OtherTokenizer { path: path.into(), expected: expected.into(), got })
        }
    };

    must(file.normalizer.is_null(), "no normalizer", kind(&file.normalizer))?;
    let splitter = &file.pre_tokenizer;
    must(splitter["type"] == "ByteLevel", "the pre-tokenizer \"ByteLevel\"", kind(splitter))?;
    let typed = file.model["type"] == "BPE" || file.model["type"].is_null();
    must(typed, "a model of type \"BPE\"", kind(&file.model))?;
    for field in
        ["dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges"]
    {
        let value = &file.model[field];
        let off = value.is_null() || *value == false || *value == "" || *value == 0.0;
        must(off, &format!("a model without {field}"), value.to_string())?;
    }
    for token in &file.added_tokens {
        let plain = !(token.single_word || token.lstrip || token.rstrip);
        must(plain, "added tokens without single_word, lstrip or rstrip", token.content.clone())?;
    }
    let prefix_space = splitter["add_prefix_space"] == true;
    let split = splitter["use_regex"] != false;
    let BpeModel { vocab, merges } = BpeModel::deserialize(file.model).map_err(broken)?;

    let alphabet = alphabet();
    let spelled: HashMap<char, u8> = alphabet.iter().copied().zip(0..=255).collect();
    let bytes = alphabet.map(|c| vocab.get(c.encode_utf8(&mut [0; 4]) as &str).copied());
    let known = |token: &str| {
        vocab.get(token).copied().ok_or_else(|| refuse("merges of known tokens", token.to_owned()))
    };
    let mut ranks = HashMap::with_capacity(merges.len());
    for (merge, rank) in merges.iter().zip(0..) {
        let (a, b) = match merge {
            Merge::Pair(a, b) => (a.as_str(), b.as_str()),
            Merge::Line(line) => {
                line.split_once(' ').ok_or_else(|| refuse("two tokens in a merge", line.clone()))?
            }
        };
        ranks.insert((known(a)?, known(b)?), (rank, known(&format!("{a}{b}"))?));
    }

    let largest = vocab.values().copied().chain(file.added_tokens.iter().map(|t| t.id)).max();
    let largest = largest.ok_or_else(|| refuse("a vocabulary", "an empty one".into()))?;
    // A gap as wide as the vocabulary is a slip of the pen, and would ask for memory without bound.
    let dense = (largest as usize) < 2 * (vocab.len() + file.added_tokens.len());
    if !dense {
        return Err(refuse("ids that follow each other", largest.to_string()));
    }
    let mut token_bytes = vec![Vec::new(); largest as usize + 1];
    check_ids(path, &vocab, &file.added_tokens)?;
    for (token, &id) in &vocab {
        let spelling: Option<Vec<u8>> = token.chars().map(|c| spelled.get(&c).copied()).collect();
        token_bytes[id as usize] = spelling.unwrap_or_else(|| token.as_bytes().to_vec());
    }
    let mut special: Vec<u32> = file.added_tokens.iter().filter(|t| t.special).map(|t| t.id).collect();
    special.sort_unstable();
    let mut added = [Vec::new(), Vec::new()];
    for token in file.added_tokens.into_iter().filter(|t| !t.content.is_empty()) {
        token_bytes[token.id as usize] = token.content.as_bytes().to_vec();
        added[usize::from(token.normalized)].push((token.content, token.id));
    }
    added.iter_mut().for_each(|list| list.sort_by_key(|(content, _)| Reverse(content.len())));
    Ok(Bpe {
        path: path.into(),
        json: None,
        bytes,
        merges: ranks,
        added,
        token_bytes,
        special,
        prefix_space,
        split,
    })
}

/// A `tokenizer.json` in which each of these bytes is a token, with its id, and nothing is merged.
pub(crate) fn write(bytes: impl Iterator<Item = (u8, u32)>) -> String {
    let alphabet = alphabet();
    let vocab: serde_json::Map<String, Value> =
        bytes.map(|(byte, id)| (alphabet[usize::from(byte)].to_string(), id.into())).collect();
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let file = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocab,
            "merges": [],
        },
    });
    serde_json::to_string_pretty(&file).expect("plain data")
}

/// Every id has one token. One that is in the vocabulary may be named again among those added.
fn check_ids(path: &Path, vocab: &HashMap<String, u32>, added: &[JsonAddedToken]) -> Result<(), Error> {
    let added = added.iter().map(|token| (token.content.as_str(), token.id));
    let mut tokens: Vec<(u32, &str)> = vocab
        .iter()
        .map(|(token, &id)| (token.as_str(), id))
        .chain(added)
        .map(|(token, id)| (id, token))
        .collect();
    tokens.sort_unstable();
    match tokens.windows(2).find(|pair| pair[0].0 == pair[1].0 && pair[0].1 != pair[1].1) {
        None => Ok(()),
        Some(pair) => {
            let (first, second) = (pair[0].1.to_owned(), pair[1].1.to_owned());
            Err(Error::SameId { path: path.into(), first, second, id: pair[0].0 })
        }
    }
}

#[derive(Deserialize)]
struct TokenizerFile {
    #[serde(default)]
    added_tokens: Vec<JsonAddedToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    model: Value,
}

#[derive(Deserialize)]
struct JsonAddedToken {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
struct BpeModel {
    vocab: HashMap<String, u32>,
    merges: Vec<Merge>,
}

/// Older files write a merge as "a b", newer ones as ["a", "b"].
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Line(String),
    Pair(String, String),
}

/// The character each byte is written as: those that are printable in Latin-1 stand for themselves, the
/// others follow from U+0100 on.
pub(crate) fn alphabet() -> [char; 256] {
    let mut unprintable = ('\u{100}'..).take(68);
    std::array::from_fn(|byte| match byte as u8 {
        b @ (b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) => char::from(b),
        _ => unprintable.next().expect("68 bytes are not printable in Latin-1"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn open(file: &Value) -> Result<Bpe, Error> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        fs::write(&path, file.to_string()).unwrap();
        Bpe::open(&path)
    }

    fn small() -> Value {
        json!({
            "added_tokens": [{"id": 3, "content": "<e>"}],
            "pre_tokenizer": {"type": "ByteLevel"},
            "model": {"type": "BPE", "vocab": {"a": 0, "Ġ": 1, "Ġa": 2}, "merges": ["Ġ a"]},
        })
    }

    /// Merges as lines and as pairs mean the same.
    #[test]
    fn both_spellings_of_merges_are_read() {
        let mut file = small();
        assert_eq!(open(&file).unwrap().encode("a a<e>").unwrap(), [0, 2, 3]);
        file["model"]["merges"] = json!([["Ġ", "a"]]);
        assert_eq!(open(&file).unwrap().encode("a a<e>").unwrap(), [0, 2, 3]);
    }

    #[test]
    fn what_we_cannot_do_is_refused_by_name() {
        let cases = [
            ("/normalizer", json!({"type": "NFC"}), "expected no normalizer, got \"NFC\""),
            ("/pre_tokenizer", json!({"type": "Split"}), "\"ByteLevel\", got \"Split\""),
            ("/pre_tokenizer", json!(null), "\"ByteLevel\", got null"),
            ("/model/type", json!("WordPiece"), "\"BPE\", got \"WordPiece\""),
            ("/model/byte_fallback", json!(true), "a model without byte_fallback, got true"),
            ("/added_tokens/0/lstrip", json!(true), "lstrip or rstrip, got <e>"),
            ("/model/merges/0", json!("Ġ b"), "merges of known tokens, got b"),
            ("/model/merges/0", json!("Ġ"), "two tokens in a merge, got Ġ"),
            ("/model/vocab", json!([]), "a Hugging Face tokenizer.json, got invalid type"),
            ("/added_tokens/0/id", json!(4_000_000), "ids that follow each other, got 4000000"),
        ];
        for (pointer, value, message) in cases {
            let mut file = small();
            let (parent, field) = pointer.rsplit_once('/').unwrap();
            match file.pointer_mut(parent).unwrap() {
                Value::Array(list) => list[field.parse::<usize>().unwrap()] = value,
                object => object[field] = value,
            }
            let error = open(&file).unwrap_err();
            assert!(matches!(error, Error::Tokenizer { .. } | Error::OtherTokenizer { .. }));
            assert!(error.to_string().contains(message), "{pointer}: {error}");
        }
        assert!(matches!(Bpe::open(Path::new("/no/tokenizer.json")), Err(Error::Missing { .. })));
    }
}
