//! From text to ids and back: bytes, the arithmetic vocabulary, or a Hugging Face tokenizer.

use crate::{AnyTokenizer, Bpe, Error, arithmetic, normalize::TextNormalizer, tokenizer_json, vocab_merges};
use std::path::{Path, PathBuf};

/// Vocabulary and rules in one file.
const FILE: &str = "tokenizer.json";

/// What ends a text in the tokenizers that people have, the likeliest first.
pub(crate) const ENDS: [&str; 4] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"];

/// What turns text into ids and ids into text.
#[derive(Debug)]
pub enum Tokenizer {
    /// Every byte is its own id.
    Bytes,
    /// The few characters of synthetic arithmetic.
    Arithmetic,
    /// Byte pair encoding, from a `tokenizer.json`.
    Bpe(Box<Bpe>),
    /// Of any other kind, from a `tokenizer.json`.
    Any(Box<AnyTokenizer>),
}

impl Tokenizer {
    /// Reads a `tokenizer.json`, or GPT-2's `vocab.json` with its `merges.txt`, or those of a folder:
    /// byte pair encoding by ourselves, every other kind where the program is built with the feature
    /// `tokenizers`.
    pub fn open(path: &Path) -> Result<Tokenizer, Error> {
        let path = Tokenizer::file_at(path);
        match Bpe::open(&path) {
            Ok(bpe) => Ok(Tokenizer::Bpe(Box::new(bpe))),
            Err(refused @ Error::OtherTokenizer { .. }) => {
                Ok(Tokenizer::Any(Box::new(AnyTokenizer::open(&path, refused)?)))
            }
            Err(broken) => Err(broken),
        }
    }

    /// The file to open of a folder that has a tokenizer: its `tokenizer.json`, or else its `vocab.json`,
    /// where `merges.txt` is there too.
    pub fn in_folder(folder: &Path) -> Option<PathBuf> {
        let one = Some(folder.join(FILE)).filter(|path| path.is_file());
        one.or_else(|| vocab_merges::of_folder(folder).map(|[vocab, _]| vocab))
    }

    /// The file that [`Tokenizer::open`] opens at a path, which may be a folder; a `vocab.json` stands for
    /// the `merges.txt` beside it too.
    pub(crate) fn file_at(path: &Path) -> PathBuf {
        match path.is_dir() {
            true => Tokenizer::in_folder(path).unwrap_or_else(|| path.join(FILE)),
            false => path.to_owned(),
        }
    }

    /// The `tokenizer.json` that replaces a `vocab.json` and its `merges.txt`, whether or not we can read
    /// it ourselves.
    pub fn joined(vocab: &Path) -> Result<Option<String>, Error> {
        vocab_merges::is_vocab(vocab).then(|| vocab_merges::to_json(vocab)).transpose()
    }

    /// The file that it was read from.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Tokenizer::Bytes | Tokenizer::Arithmetic => None,
            Tokenizer::Bpe(bpe) => Some(bpe.path()),
            Tokenizer::Any(any) => Some(any.path()),
        }
    }

    /// A `tokenizer.json` that gives the same ids, of those that have no such file.
    pub fn to_json(&self) -> Option<String> {
        match self {
            Tokenizer::Bytes => Some(tokenizer_json::write((0..=255).zip(0..))),
            Tokenizer::Arithmetic => {
                Some(tokenizer_json::write(arithmetic::ALPHABET.iter().copied().zip(0..)))
            }
            Tokenizer::Bpe(bpe) => bpe.json.clone(),
            Tokenizer::Any(_) => None,
        }
    }

    /// Ids are below this.
    pub fn vocab(&self) -> usize {
        match self {
            Tokenizer::Bytes => 256,
            Tokenizer::Arithmetic => arithmetic::VOCAB,
            Tokenizer::Bpe(bpe) => bpe.vocab(),
            Tokenizer::Any(any) => any.vocab(),
        }
    }

    /// The id that ends a text, where there is one.
    pub fn end(&self) -> Option<u32> {
        self.end_token().map(|(_, id)| id)
    }

    /// The token that ends a text, as it is written, and its id.
    pub fn end_token(&self) -> Option<(&'static str, u32)> {
        ENDS.into_iter().find_map(|content| Some((content, self.added(content)?)))
    }

    /// Whether a text that is cut before a space between two letters or digits of ASCII has the same ids.
    pub fn can_split(&self) -> bool {
        match self {
            Tokenizer::Bytes | Tokenizer::Arithmetic => true,
            Tokenizer::Bpe(bpe) => bpe.can_split(),
            Tokenizer::Any(any) => any.can_split(),
        }
    }

    /// The ids of a text, such as a prompt.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        match self {
            Tokenizer::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Tokenizer::Arithmetic => text
                .chars()
                .map(|c| u8::try_from(c).ok().and_then(arithmetic::id).map(u32::from).ok_or(c))
                .collect::<Result<_, char>>()
                .map_err(|c| Error::NoToken { path: "the arithmetic vocabulary".into(), got: c.to_string() }),
            Tokenizer::Bpe(bpe) => bpe.encode(text),
            Tokenizer::Any(any) => any.encode(text),
        }
    }

    /// The id of a token that was added to the vocabulary, such as `<|im_end|>`.
    pub fn added(&self, content: &str) -> Option<u32> {
        match self {
            Tokenizer::Bytes | Tokenizer::Arithmetic => None,
            Tokenizer::Bpe(bpe) => bpe.added(content),
            Tokenizer::Any(any) => any.added(content),
        }
    }

    /// What the tokenizer's post-processor puts before a single input.
    pub(crate) fn input_start(&self) -> Vec<u32> {
        match self {
            Tokenizer::Bytes | Tokenizer::Arithmetic => Vec::new(),
            Tokenizer::Bpe(bpe) => bpe.input_start(),
            Tokenizer::Any(any) => any.input_start(),
        }
    }

    /// A text with its characters composed where that is the first thing that the tokenizer does.
    pub(crate) fn composed<'a>(&self, text: &'a str) -> std::borrow::Cow<'a, str> {
        match self {
            Tokenizer::Bpe(bpe) if bpe.normalizer == TextNormalizer::Composed => {
                bpe.normalizer.apply(text, false)
            }
            _ => text.into(),
        }
    }

    /// The same once more.
    pub(crate) fn reopen(&self) -> Result<Tokenizer, Error> {
        match self {
            Tokenizer::Bytes => Ok(Tokenizer::Bytes),
            Tokenizer::Arithmetic => Ok(Tokenizer::Arithmetic),
            Tokenizer::Bpe(bpe) => Tokenizer::open(bpe.path()),
            Tokenizer::Any(any) => Tokenizer::open(any.path()),
        }
    }

    /// The ids of a text as a single input has them: with what the tokenizer's post-processor puts before and
    /// behind it, such as `<s>`.
    pub fn encode_input(&self, text: &str) -> Result<Vec<u32>, Error> {
        match self {
            Tokenizer::Bpe(bpe) => bpe.encode_input(text),
            Tokenizer::Any(any) => any.encode_input(text),
            Tokenizer::Bytes | Tokenizer::Arithmetic => self.encode(text),
        }
    }

    /// The ids of a text that is to be continued: with what stands before a single input, such as `<s>`.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, Error> {
        let mut ids = self.input_start();
        ids.extend(self.encode(text)?);
        Ok(ids)
    }

    /// How many bytes of text these ids stand for: those that only mark something, such as the end of a
    /// document, for none.
    pub fn text_bytes(&self, ids: &[u32]) -> usize {
        match self {
            Tokenizer::Bpe(bpe) => {
                ids.iter().filter(|id| !bpe.is_special(**id)).map(|&id| bpe.token_bytes(id).len()).sum()
            }
            Tokenizer::Any(any) => {
                ids.iter().filter(|id| !any.is_special(**id)).map(|&id| any.token_bytes(id).len()).sum()
            }
            Tokenizer::Bytes | Tokenizer::Arithmetic => self.decode(ids).len(),
        }
    }

    /// The bytes these ids stand for. They need not be whole characters, and an id without a meaning is left out.
    pub fn decode(&self, ids: &[u32]) -> Vec<u8> {
        match self {
            Tokenizer::Bytes => ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect(),
            Tokenizer::Arithmetic => {
                ids.iter().filter_map(|&id| arithmetic::ALPHABET.get(id as usize)).copied().collect()
            }
            Tokenizer::Bpe(bpe) => ids.iter().flat_map(|&id| bpe.token_bytes(id)).copied().collect(),
            Tokenizer::Any(any) => ids.iter().flat_map(|&id| any.token_bytes(id).to_vec()).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_return_to_their_text() {
        for (tokenizer, text) in [(Tokenizer::Bytes, "naïve\0"), (Tokenizer::Arithmetic, "12-15=-3\n")] {
            let ids = tokenizer.encode(text).unwrap();
            assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab()));
            assert_eq!(tokenizer.decode(&ids), text.as_bytes());
            assert_eq!(tokenizer.decode(&[u32::MAX]), b"");
        }
    }

    /// Read back from the file it is another kind of tokenizer, with the same ids.
    #[test]
    fn tokenizers_without_a_file_can_be_written_as_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        for (tokenizer, text) in [(Tokenizer::Bytes, "naïve \0\n"), (Tokenizer::Arithmetic, "12-15=-3\n")] {
            std::fs::write(&path, tokenizer.to_json().unwrap()).unwrap();
            let read = Tokenizer::Bpe(Box::new(Bpe::open(&path).unwrap()));
            assert_eq!(read.encode(text).unwrap(), tokenizer.encode(text).unwrap());
            assert_eq!(read.decode(&tokenizer.encode(text).unwrap()), text.as_bytes());
        }
    }

    #[test]
    fn a_character_without_an_id_is_refused() {
        for text in ["2*3", "2＋3"] {
            assert!(matches!(Tokenizer::Arithmetic.encode(text), Err(Error::NoToken { .. })));
        }
    }
}
