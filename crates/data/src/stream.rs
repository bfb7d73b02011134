//! Where the ids of a stream of tokens lie: in memory, as narrow as they are, or in files.

use crate::{Error, mapped::MappedTokens};

/// Where the ids lie.
#[derive(Debug)]
pub(crate) enum TokenStream {
    /// Ids below 256.
    Bytes(Vec<u8>),
    /// Ids of a tokenizer.
    Ids(Vec<u32>),
    /// Ids in files.
    Files(MappedTokens),
}

impl TokenStream {
    pub(crate) fn len(&self) -> u64 {
        match self {
            TokenStream::Bytes(bytes) => bytes.len() as u64,
            TokenStream::Ids(ids) => ids.len() as u64,
            TokenStream::Files(files) => files.len(),
        }
    }

    /// Appends the ids `start .. start + count`.
    pub(crate) fn read(&self, start: u64, count: usize, out: &mut Vec<u32>) -> Result<(), Error> {
        match self {
            TokenStream::Bytes(bytes) => {
                out.extend(bytes[start as usize..][..count].iter().map(|&b| u32::from(b)))
            }
            TokenStream::Ids(ids) => out.extend_from_slice(&ids[start as usize..][..count]),
            TokenStream::Files(files) => files.read(start, count, out)?,
        }
        Ok(())
    }
}
