//! A Hugging Face `tokenizer.json` of the byte-level BPE kind: GPT-2's and its descendants'.
//!
//! Why our own: the `tokenizers` crate (0.23, no default features, `fancy-regex`) adds 56 s to a first build on two
//! cores (67 s against 11 s for serde, serde_json, thiserror and rayon alone), more than the rest of this program
//! together, and what we need of it is this page: split the text (`split`), spell each word in bytes, and merge the
//! pair of lowest rank until none is left (Sennrich et al. 2016). The tests hold it to that crate's output. Anything
//! else in the file, such as a normalizer or another split, is refused by name, never approximated; token files
//! (`.bin`) made with any tokenizer at all are the way around.
//!
//! Ids are those of `encode(text, add_special_tokens=False)`, without truncation or padding. In the file, bytes are
//! written as printable characters: those that are printable in Latin-1 stand for themselves, the others follow from
//! U+0100 on.

use super::{Error, error::reading, split::Words};
use serde::Deserialize;
use serde_json::Value;
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    fs,
    path::{Path, PathBuf},
};

/// Words longer than this are not remembered, and no more words than that.
const REMEMBERED: (usize, usize) = (32, 1 << 20);

/// Byte-level pair encoding.
#[derive(Debug)]
pub struct Bpe {
    path: PathBuf,
    /// The id of each single byte.
    bytes: [Option<u32>; 256],
    /// Two ids that stand side by side, the rank of their merge, and what they become.
    merges: HashMap<(u32, u32), (u32, u32)>,
    /// Found in the text before it is split: first those that apply to raw text, then the others. Longest first.
    added: [Vec<(String, u32)>; 2],
    /// What each id stands for.
    pieces: Vec<Vec<u8>>,
    prefix_space: bool,
    split: bool,
}

#[derive(Deserialize)]
struct TokenizerFile {
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    model: Value,
}

#[derive(Deserialize)]
struct Added {
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
}

#[derive(Deserialize)]
struct Model {
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

impl Bpe {
    /// Reads a `tokenizer.json`.
    pub fn open(path: &Path) -> Result<Bpe, Error> {
        let text = fs::read_to_string(path).map_err(reading(path, "a Hugging Face tokenizer.json"))?;
        let refuse = |expected: &str, got: String| Error::Tokenizer {
            path: path.into(),
            expected: expected.into(),
            got,
        };
        let broken = |e: serde_json::Error| refuse("a Hugging Face tokenizer.json", e.to_string());
        let file: TokenizerFile = serde_json::from_str(&text).map_err(broken)?;
        let kind = |part: &Value| part.get("type").unwrap_or(part).to_string();
        let must = |holds: bool, expected: &str, got: String| {
            if holds { Ok(()) } else { Err(refuse(expected, got)) }
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
        let Model { vocab, merges } = Model::deserialize(file.model).map_err(broken)?;

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
        must(dense, "ids that follow each other", largest.to_string())?;
        let mut pieces = vec![Vec::new(); largest as usize + 1];
        for (token, &id) in &vocab {
            let spelling: Option<Vec<u8>> = token.chars().map(|c| spelled.get(&c).copied()).collect();
            pieces[id as usize] = spelling.unwrap_or_else(|| token.as_bytes().to_vec());
        }
        let mut added = [Vec::new(), Vec::new()];
        for token in file.added_tokens.into_iter().filter(|t| !t.content.is_empty()) {
            pieces[token.id as usize] = token.content.as_bytes().to_vec();
            added[usize::from(token.normalized)].push((token.content, token.id));
        }
        added.iter_mut().for_each(|list| list.sort_by_key(|(content, _)| Reverse(content.len())));
        Ok(Bpe { path: path.into(), bytes, merges: ranks, added, pieces, prefix_space, split })
    }

    /// Ids are below this.
    pub fn vocab(&self) -> usize {
        self.pieces.len()
    }

    /// The id of an added token such as `<|endoftext|>`.
    pub fn added(&self, content: &str) -> Option<u32> {
        self.added.iter().flatten().find(|(c, _)| c == content).map(|&(_, id)| id)
    }

    /// What an id stands for; nothing if it has no meaning.
    pub fn piece(&self, id: u32) -> &[u8] {
        self.pieces.get(id as usize).map_or(&[], |piece| piece)
    }

    /// The ids of a text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        let mut ids = Vec::new();
        self.encode_into(text, &mut HashMap::new(), &mut ids)?;
        Ok(ids)
    }

    /// Appends the ids of a text; `seen` remembers words from one text to the next.
    pub(super) fn encode_into(
        &self,
        text: &str,
        seen: &mut HashMap<String, Vec<u32>>,
        ids: &mut Vec<u32>,
    ) -> Result<(), Error> {
        let [raw, normalized] = &self.added;
        each_part(text, raw, &mut |part| match part {
            Part::Added(id) => Ok(ids.push(id)),
            Part::Text(text) => each_part(text, normalized, &mut |part| match part {
                Part::Added(id) => Ok(ids.push(id)),
                Part::Text(text) if self.prefix_space && !text.starts_with(' ') => {
                    self.plain(&format!(" {text}"), seen, ids)
                }
                Part::Text(text) => self.plain(text, seen, ids),
            }),
        })
    }

    /// Text without added tokens.
    fn plain(
        &self,
        text: &str,
        seen: &mut HashMap<String, Vec<u32>>,
        ids: &mut Vec<u32>,
    ) -> Result<(), Error> {
        if !self.split {
            return Ok(ids.extend(self.merge(text)?));
        }
        for word in Words(text) {
            if let Some(known) = seen.get(word) {
                ids.extend_from_slice(known);
                continue;
            }
            let merged = self.merge(word)?;
            ids.extend_from_slice(&merged);
            if word.len() <= REMEMBERED.0 && seen.len() < REMEMBERED.1 {
                seen.insert(word.to_owned(), merged);
            }
        }
        Ok(())
    }

    /// Merges the bytes of a word, lowest rank first and leftmost among equals. A heap holds the pairs that can merge,
    /// so that a word of a million bytes takes n log n steps.
    fn merge(&self, word: &str) -> Result<Vec<u32>, Error> {
        const NONE: usize = usize::MAX;
        let id = |byte: u8| {
            let missing =
                || Error::NoToken { path: self.path.clone(), got: format!("byte {byte:#04x} of {word}") };
            self.bytes[usize::from(byte)].ok_or_else(missing)
        };
        let mut ids: Vec<Option<u32>> = word.bytes().map(|b| id(b).map(Some)).collect::<Result<_, _>>()?;
        let count = ids.len();
        let mut next: Vec<usize> = (1..=count).map(|i| if i < count { i } else { NONE }).collect();
        let mut previous: Vec<usize> = (0..count).map(|i| i.wrapping_sub(1)).collect();
        let pair = |ids: &[Option<u32>], left: usize, right: usize| {
            let pair = (*ids.get(left)?.as_ref()?, *ids.get(right)?.as_ref()?);
            self.merges.get(&pair).map(|&(rank, merged)| Reverse((rank, left, merged)))
        };
        let mut heap: BinaryHeap<_> = (0..count).filter_map(|i| pair(&ids, i, next[i])).collect();
        while let Some(Reverse(top)) = heap.pop() {
            let (_, left, merged) = top;
            let right = next[left];
            // The pair may have changed since it was pushed.
            if pair(&ids, left, right) != Some(Reverse(top)) {
                continue;
            }
            ids[left] = Some(merged);
            ids[right] = None;
            next[left] = next[right];
            if next[left] != NONE {
                previous[next[left]] = left;
            }
            heap.extend(pair(&ids, previous[left], left));
            heap.extend(pair(&ids, left, next[left]));
        }
        Ok(ids.into_iter().flatten().collect())
    }
}

enum Part<'a> {
    Text(&'a str),
    Added(u32),
}

/// Cuts a text at added tokens: leftmost first, longest among those.
fn each_part(
    text: &str,
    added: &[(String, u32)],
    visit: &mut dyn FnMut(Part) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut opens = [false; 256];
    added.iter().for_each(|(content, _)| opens[usize::from(content.as_bytes()[0])] = true);
    let (mut start, mut at) = (0, 0);
    while at < text.len() {
        let rest = &text.as_bytes()[at..];
        let found = || added.iter().find(|(content, _)| rest.starts_with(content.as_bytes()));
        if let Some((content, id)) = opens[usize::from(rest[0])].then(found).flatten() {
            if start < at {
                visit(Part::Text(&text[start..at]))?;
            }
            visit(Part::Added(*id))?;
            at += content.len();
            start = at;
        } else {
            at += 1;
        }
    }
    if start < at { visit(Part::Text(&text[start..])) } else { Ok(()) }
}

/// The character each byte is written as.
fn alphabet() -> [char; 256] {
    let mut others = ('\u{100}'..).take(68);
    std::array::from_fn(|byte| match byte as u8 {
        b @ (b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) => char::from(b),
        _ => others.next().expect("68 bytes are not printable in Latin-1"),
    })
}
