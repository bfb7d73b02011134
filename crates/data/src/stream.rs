//! Where the ids of a stream of tokens lie: in memory, as narrow as they are, or in files.

use crate::{Error, mapped::Mapped};

/// Where the ids lie.
#[derive(Debug)]
pub(crate) enum Stream {
    /// Ids below 256.
    Bytes(Vec<u8>),
    /// Ids of a tokenizer.
    Ids(Vec<u32>),
    /// Ids in files.
    Files(Mapped),
}

impl Stream {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Stream::Bytes(bytes) => bytes.len() as u64,
            Stream::Ids(ids) => ids.len() as u64,
            Stream::Files(files) => files.len(),
        }
    }

    /// Appends the ids `start .. start + count`.
    pub(crate) fn read(&self, start: u64, count: usize, out: &mut Vec<u32>) -> Result<(), Error> {
        match self {
            Stream::Bytes(bytes) => {
                out.extend(bytes[start as usize..][..count].iter().map(|&b| u32::from(b)))
            }
            Stream::Ids(ids) => out.extend_from_slice(&ids[start as usize..][..count]),
            Stream::Files(files) => files.read(start, count, out)?,
        }
        Ok(())
    }
}
