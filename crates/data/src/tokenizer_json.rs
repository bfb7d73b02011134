//! Hugging Face's `tokenizer.json`, of byte pair encoding: byte-level (GPT-2, Llama 3, Qwen, SmolLM), or of
//! characters with spaces as U+2581 and bytes for what is no token (Llama 2, Mistral, Gemma).
//!
//! Whatever in the file would change ids and is not done here, such as another normalizer or split, is
//! refused by name, never approximated; `any_tokenizer` reads these, in a build that has it. Truncation and
//! padding are left aside: they concern single inputs, not a stream to learn from.

use crate::{
    Bpe, Error, SplitPattern,
    bpe::{Alphabet, MarkPrefix, MarkedWords, WordSplit},
    byte_level::ByteLevelFile,
    normalize::{SPACE, TextNormalizer},
    regular_file::RECORDS,
    vocab_merges,
    word_hash::WordMap,
};
use serde::Deserialize;
use serde_json::Value;
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
    let refuse = |expected: &str, got: String| Error::tokenizer(path, expected, got);
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

    let normalizer = TextNormalizer::of_json(&file.normalizer);
    must(normalizer.is_some(), "no normalizer, NFC, or spaces as U+2581", kind(&file.normalizer))?;
    let normalizer = normalizer.unwrap_or(TextNormalizer::None);
    let splitter = &file.pre_tokenizer;
    let splits = word_split(splitter, normalizer);
    must(
        splits.is_some(),
        "the pre-tokenizer \"ByteLevel\", Llama 3's, Qwen's, SmolLM's or \"Metaspace\"",
        kind(splitter),
    )?;
    let Some(mut split) = splits else { unreachable!("refused above") };
    let byte_level = matches!(split, WordSplit::Pattern { .. });
    let typed = file.model["type"] == "BPE" || file.model["type"].is_null();
    must(typed, "a model of type \"BPE\"", kind(&file.model))?;
    let mut without = vec!["dropout", "continuing_subword_prefix", "end_of_word_suffix"];
    without.extend(byte_level.then_some("byte_fallback"));
    for field in without {
        let value = &file.model[field];
        let off = value.is_null() || *value == false || *value == "" || *value == 0.0;
        must(off, &format!("a model without {field}"), value.to_string())?;
    }
    for token in &file.added_tokens {
        let plain = !(token.single_word || token.lstrip || token.rstrip);
        must(plain, "added tokens without single_word, lstrip or rstrip", token.content.clone())?;
    }
    let around = around(&file.post_processor);
    let BpeModel { vocab, merges, unk_token, fuse_unk, byte_fallback, ignore_merges } =
        BpeModel::deserialize(file.model).map_err(broken)?;

    let known = |token: &str| {
        vocab.get(token).copied().ok_or_else(|| refuse("merges of known tokens", token.to_owned()))
    };
    let mut ranks = WordMap::with_capacity_and_hasher(merges.len(), Default::default());
    let mut crosses_spaces = !vocab.contains_key("\u{2581}");
    let mut merged = String::new();
    for (merge, rank) in merges.iter().zip(0..) {
        let (a, b) = merge.pair().ok_or_else(|| refuse("two tokens in a merge", merge.to_string()))?;
        merged.clear();
        merged.push_str(a);
        merged.push_str(b);
        crosses_spaces |= !byte_level && merged.trim_start_matches(SPACE).contains(SPACE);
        ranks.insert((known(a)?, known(b)?), (rank, known(&merged)?));
    }
    if let WordSplit::Marks { words: words @ MarkedWords::Runs, .. } = &mut split
        && crosses_spaces
    {
        *words = MarkedWords::One;
    }

    let largest = vocab.values().copied().chain(file.added_tokens.iter().map(|t| t.id)).max();
    let largest = largest.ok_or_else(|| refuse("a vocabulary", "an empty one".into()))?;
    // A gap as wide as the vocabulary is a slip of the pen, and would ask for memory without bound.
    let dense = (largest as usize) < 2 * (vocab.len() + file.added_tokens.len());
    if !dense {
        return Err(refuse("ids that follow each other", largest.to_string()));
    }
    check_ids(path, &vocab, &file.added_tokens)?;
    let spelling = alphabet();
    let spelled: HashMap<char, u8> = spelling.iter().copied().zip(0..=255).collect();
    let mut token_bytes = vec![Vec::new(); largest as usize + 1];
    for (token, &id) in &vocab {
        token_bytes[id as usize] = match byte_level {
            true => token
                .chars()
                .map(|c| spelled.get(&c).copied())
                .collect::<Option<_>>()
                .unwrap_or_else(|| token.as_bytes().to_vec()),
            false => match byte_of(token).filter(|_| byte_fallback) {
                Some(byte) => vec![byte],
                None => token.replace(SPACE, " ").into_bytes(),
            },
        };
    }
    let alphabet = match byte_level {
        true => Alphabet::Bytes(Box::new(
            spelling.map(|c| vocab.get(c.encode_utf8(&mut [0; 4]) as &str).copied()),
        )),
        false => {
            let single = |(token, &id): (&String, &u32)| {
                let mut chars = token.chars();
                chars.next().filter(|_| chars.next().is_none()).map(|c| (c, id))
            };
            let bytes = || std::array::from_fn(|byte| vocab.get(&format!("<0x{byte:02X}>")).copied());
            Alphabet::Characters {
                ids: vocab.iter().filter_map(single).collect(),
                bytes: byte_fallback.then(|| Box::new(bytes())),
                unknown: unk_token.as_deref().and_then(|token| vocab.get(token).copied()),
                fuses_unknown: fuse_unk,
            }
        }
    };
    let mut whole_words = WordMap::default();
    if ignore_merges {
        // A word that is a token is that token, as it is spelled.
        let spell = |token: &str, id: u32| match byte_level {
            true => token_bytes[id as usize].clone(),
            false => token.as_bytes().to_vec(),
        };
        whole_words = vocab.iter().map(|(token, &id)| (spell(token, id).into(), id)).collect();
    }
    let mut special: Vec<u32> = file.added_tokens.iter().filter(|t| t.special).map(|t| t.id).collect();
    special.sort_unstable();
    let (mut added, mut added_tokens) = ([Vec::new(), Vec::new()], Vec::new());
    for token in file.added_tokens.into_iter().filter(|t| !t.content.is_empty()) {
        token_bytes[token.id as usize] = token.content.as_bytes().to_vec();
        added_tokens.push((token.content.clone(), token.id));
        match token.normalized {
            false => added[0].push((token.content, token.id)),
            true => added[1].push((normalizer.apply(&token.content, false).into_owned(), token.id)),
        }
    }
    added.iter_mut().for_each(|list| list.sort_by_key(|(content, _)| Reverse(content.len())));
    Ok(Bpe {
        path: path.into(),
        json: None,
        normalizer,
        split,
        alphabet,
        merges: ranks,
        whole_words,
        added,
        added_tokens,
        token_bytes,
        special,
        around,
    })
}

/// How a pre-tokenizer splits; none where it is not known here.
fn word_split(splitter: &Value, normalizer: TextNormalizer) -> Option<WordSplit> {
    let marks = |prefix, words| Some(WordSplit::Marks { prefix, words });
    let is_marked = matches!(normalizer, TextNormalizer::Spaces { .. });
    let all: &[Value] = match splitter["type"].as_str() {
        None if splitter.is_null() && is_marked => return marks(MarkPrefix::Never, MarkedWords::Runs),
        // There are no spaces left that it could split at.
        Some("Split") if is_marked && splitter["pattern"]["String"] == " " => {
            return marks(MarkPrefix::Never, MarkedWords::Runs);
        }
        Some("Sequence") => splitter["pretokenizers"].as_array()?,
        _ => std::slice::from_ref(splitter),
    };
    let is_byte_level = |one: &Value| one["type"] == "ByteLevel";
    match all {
        [metaspace] if metaspace["type"] == "Metaspace" && metaspace["replacement"] == "\u{2581}" => {
            let prefix = match (metaspace["prepend_scheme"].as_str(), &metaspace["add_prefix_space"]) {
                (Some("never"), _) | (None, Value::Bool(false)) => MarkPrefix::Never,
                (Some("first"), _) => MarkPrefix::First,
                (Some("always") | None, _) => MarkPrefix::Always,
                _ => return None,
            };
            marks(prefix, if metaspace["split"] == false { MarkedWords::Runs } else { MarkedWords::Each })
        }
        _ if is_marked => None,
        [byte_level] if is_byte_level(byte_level) => Some(WordSplit::Pattern {
            pattern: (byte_level["use_regex"] != false).then_some(SplitPattern::Gpt2),
            prefix_space: byte_level["add_prefix_space"] == true,
        }),
        [first, byte_level] if is_byte_level(byte_level) && byte_level["add_prefix_space"] != true => {
            let pattern = match first["type"].as_str() {
                Some("Digits") if first["individual_digits"] == true && byte_level["use_regex"] != false => {
                    SplitPattern::SmolLm
                }
                Some("Split") if byte_level["use_regex"] == false => {
                    let isolates = first["behavior"] == "Isolated" && first["invert"] != true;
                    let regex = first["pattern"]["Regex"].as_str().filter(|_| isolates)?;
                    SplitPattern::of_regex(regex)?
                }
                _ => return None,
            };
            Some(WordSplit::Pattern { pattern: Some(pattern), prefix_space: false })
        }
        _ => None,
    }
}

/// The ids that a post-processor puts before and behind a single input.
fn around(processor: &Value) -> [Vec<u32>; 2] {
    match processor["type"].as_str() {
        Some("Sequence") => {
            let all = processor["processors"].as_array().into_iter().flatten();
            all.map(around).find(|found| found.iter().any(|side| !side.is_empty())).unwrap_or_default()
        }
        Some("TemplateProcessing") => {
            let mut sides = [Vec::new(), Vec::new()];
            let mut side = 0;
            for item in processor["single"].as_array().into_iter().flatten() {
                match item["SpecialToken"]["id"].as_str() {
                    None => side = 1,
                    Some(token) => {
                        let ids = processor["special_tokens"][token]["ids"].as_array();
                        let ids = ids.into_iter().flatten().filter_map(Value::as_u64);
                        sides[side].extend(ids.filter_map(|id| u32::try_from(id).ok()));
                    }
                }
            }
            sides
        }
        _ => Default::default(),
    }
}

/// The byte that a token such as `<0x0A>` stands for.
pub(crate) fn byte_of(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

/// A `tokenizer.json` in which each of these bytes is a token, with its id, and nothing is merged.
pub(crate) fn write(bytes: impl Iterator<Item = (u8, u32)>) -> String {
    let alphabet = alphabet();
    let vocab = bytes.map(|(byte, id)| (alphabet[usize::from(byte)].to_string(), id.into())).collect();
    let (added_tokens, merges) = (Vec::new(), Vec::new());
    let (prefix_space, use_regex, affix) = ([false, false], false, None);
    ByteLevelFile { added_tokens, prefix_space, use_regex, affix, vocab, merges }.to_json()
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
    #[serde(default)]
    post_processor: Value,
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
    merges: Vec<BpeMerge>,
    #[serde(default)]
    unk_token: Option<String>,
    #[serde(default)]
    fuse_unk: bool,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
}

/// Older files write a merge as "a b", newer ones as ["a", "b"].
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum BpeMerge {
    Line(String),
    Pair(String, String),
}

impl std::fmt::Display for BpeMerge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            BpeMerge::Pair(a, b) => write!(f, "{a} {b}"),
            BpeMerge::Line(line) => f.write_str(line),
        }
    }
}

impl BpeMerge {
    /// What is merged; none where a line has no space.
    pub(crate) fn pair(&self) -> Option<(&str, &str)> {
        match self {
            BpeMerge::Pair(a, b) => Some((a, b)),
            BpeMerge::Line(line) => line.split_once(' '),
        }
    }
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
    use serde_json::json;
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
            (
                "/normalizer",
                json!({"type": "Lowercase"}),
                "expected no normalizer, NFC, or spaces as U+2581, got \"Lowercase\"",
            ),
            ("/pre_tokenizer", json!({"type": "Split"}), "\"Metaspace\", got \"Split\""),
            (
                "/pre_tokenizer",
                json!(null),
                "the pre-tokenizer \"ByteLevel\", Llama 3's, Qwen's, SmolLM's or",
            ),
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
