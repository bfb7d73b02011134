//! `manifest.json`: what a checkpoint is, the hash of every other file, and one of itself.
//!
//! Its own hash is that of its bytes with zeros in the place of the hash, so that a bit that flips anywhere
//! in it, in `step` as in a space, makes it damaged instead of another run. Manifests of older programs have
//! no hash of themselves; they are read as before.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use espalier_data::regular_file;
use serde::{Deserialize, Serialize};

use super::{FORMAT, MANIFEST, RunProgress};

/// The format in which filters of convolutions were in memory, and so in shards, as they are in files.
pub(super) const OLDER_FORMAT: u32 = 1;

/// What stands in the place of the hash while it is computed.
const NO_HASH: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// Unknown fields are refused: `blake3` with a flipped letter must not pass for a manifest of an older program.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    pub(super) format: u32,
    pub(super) model: String,
    pub(super) precision: String,
    pub(super) progress: RunProgress,
    pub(super) files: BTreeMap<String, FileRecord>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    blake3: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileRecord {
    pub(super) bytes: u64,
    pub(super) blake3: String,
}

impl FileRecord {
    /// What is written down of a file with these bytes.
    pub(super) fn of(bytes: &[u8]) -> FileRecord {
        FileRecord { bytes: bytes.len() as u64, blake3: blake3::hash(bytes).to_hex().to_string() }
    }
}

impl Manifest {
    pub(super) fn new(
        model: &str,
        precision: &str,
        progress: &RunProgress,
        files: BTreeMap<String, FileRecord>,
    ) -> Manifest {
        let (model, precision, progress) = (model.into(), precision.into(), progress.clone());
        Manifest { format: FORMAT, model, precision, progress, files, blake3: Some(NO_HASH.into()) }
    }

    /// The bytes of the file.
    pub(super) fn encode(&self) -> Vec<u8> {
        let text = serde_json::to_string_pretty(self).expect("a manifest is plain data");
        let hash = blake3::hash(text.as_bytes()).to_hex();
        // The last one: it is the last field, and a file's record ahead of it may hold anything.
        let at = text.rfind(NO_HASH).expect("it was made with this place for its hash");
        [&text[..at], &hash, &text[at + NO_HASH.len()..]].concat().into_bytes()
    }

    /// What the bytes of a file say, if they are those that were written.
    pub(super) fn decode(bytes: &[u8]) -> Result<Manifest, String> {
        let damaged = |why: String| format!("{MANIFEST} is damaged: {why}");
        let text = std::str::from_utf8(bytes).map_err(|why| damaged(why.to_string()))?;
        let manifest: Manifest = serde_json::from_str(text).map_err(|why| damaged(why.to_string()))?;
        if ![OLDER_FORMAT, FORMAT].contains(&manifest.format) {
            return Err(format!(
                "its format is {}, this program reads {OLDER_FORMAT} and {FORMAT}",
                manifest.format
            ));
        }
        if let Some(hash) = &manifest.blake3 {
            let found = text.rfind(hash).map(|at| {
                let zeroed = [&text[..at], NO_HASH, &text[at + hash.len()..]].concat();
                blake3::hash(zeroed.as_bytes()).to_hex()
            });
            if found.is_none_or(|found| found.as_str() != hash) {
                return Err(damaged("its hash does not match its content".into()));
            }
        }
        Ok(manifest)
    }
}

/// Bytes and hash of a file.
pub(super) fn hash(path: &Path) -> io::Result<FileRecord> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(regular_file::open(path)?)?;
    Ok(FileRecord { bytes: hasher.count(), blake3: hasher.finalize().to_hex().to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let record = |bytes| FileRecord { bytes, blake3: NO_HASH.into() };
        let progress = RunProgress {
            step: 300,
            updates: 299,
            best_validation: Some(1.0 / 3.0),
            ..RunProgress::default()
        };
        let files = [("model.safetensors", 17), ("optimizer.safetensors", 4)];
        let files = files.map(|(name, bytes)| (name.to_owned(), record(bytes)));
        Manifest::new("gpt", "f32", &progress, BTreeMap::from(files))
    }

    /// Of 4,026 flips of a manifest, seven used to pass and to change the run.
    #[test]
    fn every_flipped_bit_is_noticed() {
        let bytes = manifest().encode();
        assert_eq!(Manifest::decode(&bytes).unwrap().progress, manifest().progress);
        for index in 0..8 * bytes.len() {
            let mut flipped = bytes.clone();
            flipped[index / 8] ^= 1 << (index % 8);
            let read = Manifest::decode(&flipped);
            assert!(read.is_err(), "bit {index}: {}", String::from_utf8_lossy(&flipped));
        }
    }

    #[test]
    fn a_manifest_of_an_older_program_is_read() {
        let old = Manifest { blake3: None, ..manifest() };
        let text = serde_json::to_string_pretty(&old).unwrap();
        assert!(!text.lines().any(|line| line.starts_with("  \"blake3\"")), "{text}");
        assert_eq!(Manifest::decode(text.as_bytes()).unwrap().progress.step, 300);
    }
}
