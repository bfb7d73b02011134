//! A tokenizer as a table, for formats that store it beside the weights (GGUF): each id with its text, its kind
//! and its score, merges in their order, which split stands before them, and the tokens that begin and end a
//! text.

use std::path::Path;

use serde_json::Value;

use crate::bpe::{MarkPrefix, WordSplit};
use crate::normalize::TextNormalizer;
use crate::tokenizer::ENDS;
use crate::tokenizer_json::{BpeMerge, byte_of};
use crate::{Bpe, Error, SplitPattern, Tokenizer, TokenizerConfig, error, regular_file::RECORDS};

/// All that a tokenizer of byte pair encoding is.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenTable {
    pub alphabet: TokenAlphabet,
    /// By id; ids without a token are there too, as unused ones.
    pub tokens: Vec<TokenEntry>,
    /// In the order of their ranks.
    pub merges: Vec<(String, String)>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub unknown: Option<u32>,
    pub padding: Option<u32>,
    /// Whether an input begins with `bos`.
    pub add_bos: bool,
    /// How a conversation becomes a text.
    pub chat_template: Option<String>,
}

/// What merging begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenAlphabet {
    /// Bytes, each written as a character (GPT-2's table), behind a split; none: a text is one word.
    Bytes {
        split: Option<SplitPattern>,
        /// Whether a space is put before a text.
        space_prefix: bool,
    },
    /// Characters, spaces as U+2581 (SentencePiece).
    Characters {
        /// Whether a space is put before a text.
        space_prefix: bool,
    },
}

#[derive(Debug, Clone, PartialEq)]
pub struct TokenEntry {
    /// As `tokenizer.json` writes it.
    pub text: String,
    pub kind: TokenKind,
    /// Minus the rank of the first merge that makes it; 0 for what none makes.
    pub score: f32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    Normal,
    /// Stands for what has no token.
    Unknown,
    /// Marks something, and is no text.
    Control,
    /// Added, and text.
    UserDefined,
    Unused,
    /// A byte of a character that has no token, such as `<0x0A>`.
    Byte,
}

impl TokenTable {
    /// That of a tokenizer; none where it is of another kind than byte pair encoding.
    pub fn of(tokenizer: &Tokenizer) -> Result<Option<TokenTable>, Error> {
        let (bpe, json, folder) = match tokenizer {
            Tokenizer::Any(_) => return Ok(None),
            Tokenizer::Bytes | Tokenizer::Arithmetic => {
                let json = tokenizer.to_json().unwrap_or_default();
                (None, json.into_bytes(), None)
            }
            Tokenizer::Bpe(bpe) => {
                let json = match &bpe.json {
                    Some(json) => json.clone().into_bytes(),
                    None => error::read(bpe.path(), "a Hugging Face tokenizer.json", RECORDS)?,
                };
                (Some(&**bpe), json, bpe.path().parent())
            }
        };
        let path = tokenizer.path().unwrap_or(Path::new("tokenizer.json"));
        let file: Value = serde_json::from_slice(&json)
            .map_err(|why| Error::tokenizer(path, "a Hugging Face tokenizer.json", why))?;
        let config = folder.map(TokenizerConfig::of_folder).transpose()?.unwrap_or_default();
        Ok(Some(table(tokenizer.vocab(), &file, bpe, &config)))
    }
}

fn table(vocab: usize, file: &Value, bpe: Option<&Bpe>, config: &TokenizerConfig) -> TokenTable {
    let unused = |id| TokenEntry { text: format!("[PAD{id}]"), kind: TokenKind::Unused, score: 0.0 };
    let mut tokens: Vec<TokenEntry> = (0..vocab).map(unused).collect();
    let alphabet = match bpe.map(|bpe| (bpe.split, bpe.normalizer)) {
        Some((WordSplit::Marks { prefix, .. }, normalizer)) => TokenAlphabet::Characters {
            space_prefix: prefix != MarkPrefix::Never
                || normalizer == TextNormalizer::Spaces { prepend: true },
        },
        Some((WordSplit::Pattern { pattern: split, prefix_space: space_prefix }, _)) => {
            TokenAlphabet::Bytes { split, space_prefix }
        }
        None => TokenAlphabet::Bytes { split: None, space_prefix: false },
    };
    let unknown_text = file["model"]["unk_token"].as_str();
    let mut ids = std::collections::HashMap::new();
    for (text, id) in file["model"]["vocab"].as_object().into_iter().flatten() {
        let Some(id) = id.as_u64().map(|id| id as usize).filter(|id| *id < vocab) else { continue };
        ids.insert(text.as_str(), id);
        let kind = match alphabet {
            TokenAlphabet::Characters { .. } if byte_of(text).is_some() => TokenKind::Byte,
            _ if unknown_text == Some(text) => TokenKind::Unknown,
            _ => TokenKind::Normal,
        };
        tokens[id] = TokenEntry { text: text.clone(), kind, score: 0.0 };
    }
    let mut merges = Vec::new();
    for merge in file["model"]["merges"].as_array().into_iter().flatten() {
        let Ok(merge) = serde_json::from_value::<BpeMerge>(merge.clone()) else { continue };
        let Some((a, b)) = merge.pair() else { continue };
        if let Some(&id) = ids.get(format!("{a}{b}").as_str())
            && tokens[id].score == 0.0
        {
            tokens[id].score = -(merges.len() as f32 + 1.0);
        }
        merges.push((a.to_owned(), b.to_owned()));
    }
    for token in file["added_tokens"].as_array().into_iter().flatten() {
        let (Some(id), Some(text)) = (token["id"].as_u64(), token["content"].as_str()) else { continue };
        let kind = match token["special"] == true {
            _ if unknown_text == Some(text) => TokenKind::Unknown,
            true => TokenKind::Control,
            false => TokenKind::UserDefined,
        };
        if let Some(entry) = tokens.get_mut(id as usize) {
            *entry = TokenEntry { text: text.to_owned(), kind, score: 0.0 };
        }
    }
    let named = |name: &str| config.token(name).and_then(|text| id_of(&tokens, text));
    let (bos, padding) = (named("bos_token"), named("pad_token"));
    let unknown = named("unk_token").or_else(|| unknown_text.and_then(|text| id_of(&tokens, text)));
    let eos = named("eos_token").or_else(|| {
        let added = |text: &&str| bpe.is_some_and(|bpe| bpe.added(text).is_some());
        ENDS.iter().find(|text| added(text)).and_then(|text| id_of(&tokens, text))
    });
    let begins = bpe.and_then(|bpe| bpe.around[0].first().copied());
    let add_bos = config.add_bos_token.unwrap_or(begins.is_some() && begins == bos);
    let chat_template = config.templates.get("default").cloned();
    TokenTable { alphabet, tokens, merges, bos, eos, unknown, padding, add_bos, chat_template }
}

fn id_of(tokens: &[TokenEntry], text: &str) -> Option<u32> {
    tokens.iter().position(|token| token.text == text && token.kind != TokenKind::Unused).map(|id| id as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn alphabet(split: Option<SplitPattern>) -> TokenAlphabet {
        TokenAlphabet::Bytes { split, space_prefix: false }
    }

    fn styles() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle/tokenizers")
    }

    #[test]
    fn tables_are_those_of_their_files() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(
            at("tokenizer_config.json"),
            r#"{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "chat_template": "{{ messages }}"}"#,
        )
        .unwrap();
        let table = |style: &str| {
            fs::copy(styles().join(style).with_extension("json"), at("tokenizer.json")).unwrap();
            let tokenizer = Tokenizer::open(folder.path()).unwrap();
            let table = TokenTable::of(&tokenizer).unwrap().unwrap();
            assert_eq!(table.tokens.len(), tokenizer.vocab());
            // What a token stands for is what its text says.
            let unspaced = |text: &str| text.replace(['\u{2581}', 'Ġ'], " ");
            let plain = |entry: &&TokenEntry| entry.kind == TokenKind::Normal && entry.text.is_ascii();
            for entry in table.tokens.iter().filter(plain) {
                let id = table.tokens.iter().position(|other| other.text == entry.text).unwrap() as u32;
                assert_eq!(tokenizer.decode(&[id]), unspaced(&entry.text).as_bytes());
            }
            table
        };
        let llama3 = table("llama3");
        assert_eq!(llama3.alphabet, alphabet(Some(SplitPattern::Llama3)));
        assert_eq!(
            (llama3.eos, llama3.unknown, llama3.add_bos),
            (Some(1), None, false),
            "the file names tokens of others"
        );
        let mistral = table("mistral");
        assert_eq!(mistral.alphabet, TokenAlphabet::Characters { space_prefix: true });
        assert_eq!(
            (mistral.bos, mistral.eos, mistral.padding, mistral.unknown),
            (Some(1), Some(2), Some(2), Some(0))
        );
        assert!(mistral.add_bos);
        assert_eq!(mistral.chat_template.as_deref(), Some("{{ messages }}"));
        let kinds = |id: usize| mistral.tokens[id].kind;
        assert_eq!([0, 1, 3].map(kinds), [TokenKind::Unknown, TokenKind::Control, TokenKind::Byte]);
        let made = |merge: &(String, String)| format!("{}{}", merge.0, merge.1);
        let first = mistral.tokens.iter().find(|entry| entry.text == made(&mistral.merges[0])).unwrap();
        assert_eq!(first.score, -1.0);
        assert_eq!(table("smollm").alphabet, alphabet(Some(SplitPattern::SmolLm)));
    }

    #[test]
    fn tokenizers_without_a_file_are_tables_too() {
        let bytes = TokenTable::of(&Tokenizer::Bytes).unwrap().unwrap();
        assert_eq!((bytes.tokens.len(), bytes.alphabet), (256, alphabet(None)));
        assert_eq!(bytes.tokens[usize::from(b'a')].text, "a");
    }
}
