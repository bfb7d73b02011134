//! Any `tokenizer.json` at all, through Hugging Face's own crate: what our own reader (`tokenizer_json`, byte
//! pair encoding) refuses, such as BERT's and T5's.
//!
//! Built with the feature `tokenizers` alone: the crate and what it needs take about half as long to build as
//! all the rest of the program together (log/2026-11-16-packages-tokenizers-torchvision.md), and whoever
//! trains on bytes, token files or with a tokenizer of Llama's, Qwen's or GPT-2's kind needs none of it.
//! `no_tokenizer` replaces it otherwise.
//!
//! Ids are those of Python's `encode(text, add_special_tokens=False)`. Truncation and padding are left aside,
//! since they concern single inputs, not a stream to learn from.

use crate::{
    Error, SplitPattern, charsmap,
    regular_file::RECORDS,
    tokenizer_json::{alphabet, byte_of},
};
use serde_json::Value;
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

/// A tokenizer of any kind.
#[derive(Debug)]
pub struct AnyTokenizer {
    path: PathBuf,
    inner: tokenizers::Tokenizer,
    vocab: usize,
    /// Ids that mark something and are no text, ascending.
    special: Vec<u32>,
    spelling: Spelling,
    can_split: bool,
}

/// How a token is written.
#[derive(Debug)]
enum Spelling {
    /// A character for each byte.
    Bytes(HashMap<char, u8>),
    /// As the decoder has it behind another token, which is this one; with `bytes`, `<0x0A>` is a byte.
    Text { behind: Option<u32>, bytes: bool },
}

impl AnyTokenizer {
    /// Reads a `tokenizer.json` that our own reader refuses, for the reason that `_refused` gives.
    pub(crate) fn open(path: &Path, _refused: Error) -> Result<AnyTokenizer, Error> {
        let bytes = crate::error::read(path, "a Hugging Face tokenizer.json", RECORDS)?;
        let refuse = |expected: &str, got: String| {
            Err(Error::Tokenizer { path: path.into(), expected: expected.into(), got })
        };
        let json: Value = match serde_json::from_slice(&bytes) {
            Ok(json) => json,
            Err(why) => return refuse("a Hugging Face tokenizer.json", why.to_string()),
        };
        if json["model"]["dropout"].as_f64().is_some_and(|dropout| dropout > 0.0) {
            // The same text would have other ids each time.
            return refuse("a model without dropout", json["model"]["dropout"].to_string());
        }
        if let Err(got) = charsmap::check(&json["normalizer"]) {
            return refuse("a normalizer that can be followed", got);
        }
        let mut inner = match tokenizers::Tokenizer::from_bytes(&bytes) {
            Ok(inner) => inner,
            Err(why) => return refuse("a Hugging Face tokenizer.json", why.to_string()),
        };
        inner.with_truncation(None).expect("no truncation is always possible").with_padding(None);
        let known = inner.get_vocab(true);
        let Some(&largest) = known.values().max() else {
            return refuse("a vocabulary", "an empty one".into());
        };
        // A gap as wide as the vocabulary is a slip of the pen, and would ask for memory without bound.
        if largest as usize >= 2 * known.len() {
            return refuse("ids that follow each other", largest.to_string());
        }
        let added = inner.get_added_tokens_decoder();
        let mut special: Vec<u32> =
            added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        special.sort_unstable();
        let decoders = kinds(&json["decoder"]);
        let spelling = if decoders.contains(&"ByteLevel") {
            Spelling::Bytes(alphabet().into_iter().zip(0..=255).collect())
        } else {
            let is_text = |id: &u32| {
                let text = inner.decode(&[*id], false).unwrap_or_default();
                !added.contains_key(id) && text.chars().next_back().is_some_and(char::is_alphanumeric)
            };
            let behind = (0..=largest).find(is_text);
            Spelling::Text { behind, bytes: decoders.contains(&"ByteFallback") }
        };
        let breaks = |token: &tokenizers::AddedToken| {
            let ends_in_word = token.content.ends_with(|c: char| c.is_ascii_alphanumeric());
            token.content.contains(' ') || token.rstrip && ends_in_word
        };
        let can_split = can_split(&json) && !added.values().any(breaks);
        let (path, vocab) = (path.into(), largest as usize + 1);
        Ok(AnyTokenizer { path, inner, vocab, special, spelling, can_split })
    }

    /// The file that it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Ids are below this.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// The id of an added token such as `</s>`.
    pub fn added(&self, content: &str) -> Option<u32> {
        let id = self.inner.token_to_id(content)?;
        self.inner.get_added_vocabulary().get_added_tokens_decoder().contains_key(&id).then_some(id)
    }

    /// Whether an id marks something and is no text.
    pub(crate) fn is_special(&self, id: u32) -> bool {
        self.special.binary_search(&id).is_ok()
    }

    /// Whether ids are the same where a text is cut before a space between two letters or digits of ASCII.
    pub fn can_split(&self) -> bool {
        self.can_split
    }

    /// What an id stands for in the middle of a text; nothing if it has no meaning.
    pub(crate) fn token_bytes(&self, id: u32) -> Vec<u8> {
        let Some(token) = self.inner.id_to_token(id) else { return Vec::new() };
        let is_added = || self.inner.get_added_vocabulary().get_added_tokens_decoder().contains_key(&id);
        match &self.spelling {
            Spelling::Bytes(_) if is_added() => token.into_bytes(),
            Spelling::Bytes(spelled) => {
                let bytes: Option<Vec<u8>> = token.chars().map(|c| spelled.get(&c).copied()).collect();
                bytes.unwrap_or_else(|| token.into_bytes())
            }
            Spelling::Text { bytes: true, .. } if byte_of(&token).is_some() => {
                byte_of(&token).into_iter().collect()
            }
            Spelling::Text { behind: Some(behind), .. } => {
                let decoded = |ids: &[u32]| self.inner.decode(ids, false).unwrap_or_default();
                let (before, both) = (decoded(&[*behind]), decoded(&[*behind, id]));
                both.strip_prefix(&before).unwrap_or(&token).as_bytes().to_vec()
            }
            Spelling::Text { .. } => token.into_bytes(),
        }
    }

    /// The ids of a text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        self.encode_with(text, false)
    }

    /// The ids of a text with what the post-processor puts around it.
    pub(crate) fn encode_input(&self, text: &str) -> Result<Vec<u32>, Error> {
        self.encode_with(text, true)
    }

    /// What the post-processor puts before a text.
    pub(crate) fn input_start(&self) -> Vec<u32> {
        let (bare, around) =
            (self.encode("a").unwrap_or_default(), self.encode_input("a").unwrap_or_default());
        let at = around.windows(bare.len().max(1)).position(|window| window == bare);
        around[..at.unwrap_or(0)].to_vec()
    }

    fn encode_with(&self, text: &str, around: bool) -> Result<Vec<u32>, Error> {
        match self.inner.encode_fast(text, around) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(why) => Err(Error::Untokenized { path: self.path.clone(), why: why.to_string() }),
        }
    }
}

/// The types of a value of the file and of all values in it.
fn kinds(value: &Value) -> Vec<&str> {
    match value {
        Value::Object(fields) => {
            let kind = fields.get("type").and_then(Value::as_str);
            kind.into_iter().chain(fields.values().flat_map(kinds)).collect()
        }
        Value::Array(json) => json.iter().flat_map(kinds).collect(),
        _ => Vec::new(),
    }
}

/// Whether normalizer and pre-tokenizer are known not to look across a space between two words.
fn can_split(json: &Value) -> bool {
    const NORMALIZERS: [&str; 10] = [
        "BertNormalizer",
        "Lowercase",
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Nmt",
        "Precompiled",
        "Sequence",
        "StripAccents",
    ];
    let splitter = &json["pre_tokenizer"];
    let (first, rest) = match splitter["pretokenizers"].as_array() {
        Some(all) => (all.first().unwrap_or(&Value::Null), all.get(1..).unwrap_or_default()),
        None => (splitter, &[][..]),
    };
    let splits = match first["type"].as_str() {
        Some("BertPreTokenizer" | "Whitespace" | "WhitespaceSplit") => true,
        Some("ByteLevel") => first["use_regex"] != false && first["add_prefix_space"] != true,
        Some("Split") => {
            let regex = first["pattern"]["Regex"].as_str();
            let isolates = first["behavior"] == "Isolated" && first["invert"] != true;
            isolates && regex.is_some_and(|regex| SplitPattern::of_regex(regex).is_some())
        }
        _ => false,
    };
    // The first word of a text is another than the first of a chunk.
    let same_everywhere = |value: &Value| value["prepend_scheme"] != "first";
    let normalizers = kinds(&json["normalizer"]);
    splits && rest.iter().all(same_everywhere) && normalizers.iter().all(|kind| NORMALIZERS.contains(kind))
}
