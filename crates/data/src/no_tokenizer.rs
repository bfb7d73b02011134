//! Instead of `any_tokenizer` where the program is built without the feature `tokenizers`: there is no
//! tokenizer but our own.

use crate::Error;
use std::path::Path;

/// Nobody has one.
#[derive(Debug)]
pub enum AnyTokenizer {}

impl AnyTokenizer {
    /// Says why our own reader refused it, and which build would not.
    pub(crate) fn open(_path: &Path, refused: Error) -> Result<AnyTokenizer, Error> {
        Err(refused)
    }

    /// The file that it was read from.
    pub fn path(&self) -> &Path {
        match *self {}
    }

    /// Ids are below this.
    pub fn vocab(&self) -> usize {
        match *self {}
    }

    /// The id of an added token such as `</s>`.
    pub fn added(&self, _content: &str) -> Option<u32> {
        match *self {}
    }

    /// Whether an id marks something and is no text.
    pub(crate) fn is_special(&self, _id: u32) -> bool {
        match *self {}
    }

    /// Whether ids are the same where a text is cut before a space between two letters or digits of ASCII.
    pub fn can_split(&self) -> bool {
        match *self {}
    }

    /// What an id stands for in the middle of a text; nothing if it has no meaning.
    pub(crate) fn token_bytes(&self, _id: u32) -> Vec<u8> {
        match *self {}
    }

    /// What the post-processor puts before a text.
    pub(crate) fn input_start(&self) -> Vec<u32> {
        match *self {}
    }

    /// The ids of a text with what the post-processor puts around it.
    pub(crate) fn encode_input(&self, _text: &str) -> Result<Vec<u32>, Error> {
        match *self {}
    }

    /// The ids of a text.
    pub fn encode(&self, _text: &str) -> Result<Vec<u32>, Error> {
        match *self {}
    }
}
