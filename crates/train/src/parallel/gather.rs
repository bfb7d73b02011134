//! Work that all ranks do at once and of which all must know how it went: one disk that is full is everyone's.

use std::path::PathBuf;

use espalier_comm::Communicator;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Ranks;
use crate::{Error, Result};

/// The bytes of each rank of a group, in the order of ranks: of any length, and not often.
pub(crate) fn all_gather_bytes(group: &Communicator, local: &[u8]) -> Result<Vec<Vec<u8>>> {
    let size = group.size();
    let lengths: Vec<u64> = group.all_gather(vec![local.len() as u64], vec![0; size])?;
    let words = lengths.iter().map(|length| length.div_ceil(8)).max().unwrap_or(0) as usize;
    let mut padded = local.to_vec();
    padded.resize(8 * words, 0);
    let padded = padded.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
    let all: Vec<u64> = group.all_gather(padded, vec![0; words * size])?;
    let gathered = |(i, length): (usize, &u64)| {
        let mut bytes: Vec<u8> =
            all[i * words..(i + 1) * words].iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.truncate(*length as usize);
        bytes
    };
    Ok(lengths.iter().enumerate().map(gathered).collect())
}

/// Does this rank's work, and gathers how that of all went: their results in the order of ranks or, the same
/// on every rank, what the first of those that failed said. The outer error is that of a rank that is no
/// longer there.
pub fn all_gather_results<T: Serialize + DeserializeOwned>(
    ranks: &Ranks,
    work: impl FnOnce() -> Result<T, String>,
) -> Result<Result<Vec<T>, String>> {
    let local = work();
    if ranks.is_single() {
        return Ok(local.map(|local| vec![local]));
    }
    let local = serde_json::to_vec(&local).expect("a report is plain data");
    let read = |bytes: &Vec<u8>| -> Result<T, String> {
        serde_json::from_slice(bytes).expect("what a rank of the same program wrote")
    };
    let all = all_gather_bytes(ranks.world(), &local)?;
    let all = all.iter().enumerate();
    Ok(all.map(|(rank, bytes)| read(bytes).map_err(|why| format!("rank {rank}: {why}"))).collect())
}

/// What the first rank finds, on every rank: what they are to check in the same order, or to do alike. All
/// must call it.
pub(crate) fn from_rank0<T: Serialize + DeserializeOwned>(
    ranks: &Ranks,
    find: impl FnOnce() -> Result<T>,
) -> Result<T> {
    if ranks.is_single() {
        return find();
    }
    /// Whose fault it is stays known to the others.
    #[derive(Serialize, Deserialize)]
    enum Rank0Result<T> {
        Found(T),
        Disk(PathBuf, String),
        File(PathBuf, String),
        Other(String),
    }
    let mut kept = None;
    let local = ranks.is_rank0().then(|| match find() {
        Ok(found) => Rank0Result::Found(found),
        Err(Error::Disk { path, why }) => Rank0Result::Disk(path, why),
        Err(Error::File { path, why }) => Rank0Result::File(path, why),
        Err(other) => {
            let gathered = Rank0Result::Other(other.to_string());
            kept = Some(other);
            gathered
        }
    });
    let local =
        local.map_or(Vec::new(), |local| serde_json::to_vec(&local).expect("what is found is plain data"));
    let gathered = all_gather_bytes(ranks.world(), &local)?;
    match serde_json::from_slice(&gathered[0]).expect("what a rank of the same program wrote") {
        Rank0Result::Found(found) => Ok(found),
        Rank0Result::Disk(path, why) => Err(Error::Disk { path, why }),
        Rank0Result::File(path, why) => Err(Error::File { path, why }),
        // The first rank itself has the error, and not only its text.
        Rank0Result::Other(why) => Err(kept.unwrap_or(Error::RankEnded { rank: 0, how: "failed", why })),
    }
}
