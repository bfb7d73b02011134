//! How a file of a checkpoint is cut into those of several ranks: their names, who writes which tensor, and tensors of
//! which a file has a piece.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Under this key a file's own description says which of its tensors are pieces.
pub(super) const PIECES: &str = "pieces";

/// The pieces of a file, by name.
pub(super) type Pieces = BTreeMap<String, Piece>;

/// Where a tensor that is a part of another belongs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Its first element's place in the flattened whole.
    pub start: usize,
    /// The shape of the whole.
    pub shape: Vec<usize>,
}

/// What the `rank`-th of `size` ranks calls its part of a file: `model-00002-of-00004.safetensors`; one alone has it all.
pub(super) fn file_name(file: &str, rank: usize, size: usize) -> String {
    match file.strip_suffix(".safetensors") {
        Some(stem) if size > 1 => format!("{stem}-{:05}-of-{size:05}.safetensors", rank + 1),
        _ => file.to_owned(),
    }
}

/// The file of which a file is a part, perhaps the only one; nothing for a file that holds no tensors.
pub(super) fn part_of(name: &str) -> Option<String> {
    let stem = name.strip_suffix(".safetensors")?;
    let cut = || {
        let (front, size) = stem.rsplit_once("-of-")?;
        let (front, rank) = front.rsplit_once('-')?;
        let number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
        (number(rank) && number(size)).then_some(front)
    };
    Some(format!("{}.safetensors", cut().unwrap_or(stem)))
}

/// Who of `size` writes each of some tensors that all have: the next largest goes to whoever has the fewest bytes.
pub(super) fn deal(bytes: &[usize], size: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..bytes.len()).collect();
    order.sort_by_key(|&i| (Reverse(bytes[i]), i));
    let (mut load, mut owners) = (vec![0; size], vec![0; bytes.len()]);
    for i in order {
        let owner = (0..size).min_by_key(|&rank| load[rank]).expect("at least one rank");
        load[owner] += bytes[i];
        owners[i] = owner;
    }
    owners
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_of_parts_lead_back_to_their_file() {
        assert_eq!(file_name("model.safetensors", 0, 1), "model.safetensors");
        assert_eq!(file_name("model.safetensors", 1, 4), "model-00002-of-00004.safetensors");
        for name in ["model.safetensors", "model-00002-of-00004.safetensors"] {
            assert_eq!(part_of(name).unwrap(), "model.safetensors");
        }
        assert_eq!(part_of("one-of-00004.safetensors").unwrap(), "one-of-00004.safetensors");
        assert_eq!(part_of("model.safetensors.index.json"), None);
    }

    proptest! {
        /// Nobody writes more than its fair share and the largest tensor.
        #[test]
        fn tensors_are_dealt_out_evenly(bytes in prop::collection::vec(0usize..1000, 0..50), size in 1usize..9) {
            let owners = deal(&bytes, size);
            let mut load = vec![0; size];
            owners.iter().zip(&bytes).for_each(|(owner, bytes)| load[*owner] += bytes);
            let most = bytes.iter().sum::<usize>() / size + bytes.iter().max().unwrap_or(&0);
            prop_assert!(load.iter().all(|load| *load <= most), "{:?}", load);
        }
    }
}
