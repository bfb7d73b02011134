//! From text to ids and back: bytes, the alphabet of sums, or a Hugging Face tokenizer.

use super::{Bpe, Error, arithmetic, tokenizer_json};

/// What turns text into ids and ids into text.
#[derive(Debug)]
pub enum Tokenizer {
    /// Every byte is its own id.
    Bytes,
    /// The few characters of made-up sums.
    Arithmetic,
    /// Byte-level pair encoding, from a `tokenizer.json`.
    Bpe(Box<Bpe>),
}

impl Tokenizer {
    /// A `tokenizer.json` that gives the same ids, of those that have no file.
    pub fn to_json(&self) -> Option<String> {
        match self {
            Tokenizer::Bytes => Some(tokenizer_json::write((0..=255).zip(0..))),
            Tokenizer::Arithmetic => {
                Some(tokenizer_json::write(arithmetic::ALPHABET.iter().copied().zip(0..)))
            }
            Tokenizer::Bpe(_) => None,
        }
    }

    /// Ids are below this.
    pub fn vocab(&self) -> usize {
        match self {
            Tokenizer::Bytes => 256,
            Tokenizer::Arithmetic => arithmetic::VOCAB,
            Tokenizer::Bpe(bpe) => bpe.vocab(),
        }
    }

    /// The id that ends a text, where there is one.
    pub fn end(&self) -> Option<u32> {
        match self {
            Tokenizer::Bytes | Tokenizer::Arithmetic => None,
            Tokenizer::Bpe(bpe) => bpe.added("<|endoftext|>"),
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
                .map_err(|c| Error::NoToken { path: "the alphabet of sums".into(), got: c.to_string() }),
            Tokenizer::Bpe(bpe) => bpe.encode(text),
        }
    }

    /// How many bytes of text these ids stand for: those that only mark something, such as the end of a document, for none.
    pub fn text_bytes(&self, ids: &[u32]) -> usize {
        match self {
            Tokenizer::Bpe(bpe) => {
                ids.iter().filter(|id| !bpe.is_special(**id)).map(|&id| bpe.piece(id).len()).sum()
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
            Tokenizer::Bpe(bpe) => ids.iter().flat_map(|&id| bpe.piece(id)).copied().collect(),
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
