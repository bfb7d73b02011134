//! Which documents lie together in a sequence: each goes where the least room is left that it fits into (best
//! fit), so that few tokens of padding remain. The order of documents decides between equals: the same documents
//! in the same order give the same sequences.

use std::collections::BTreeSet;

/// The documents of each sequence, by their numbers, for documents of these lengths, none of which is longer than
/// a sequence. Without packing each has one to itself.
pub(crate) fn pack(
    lengths: impl IntoIterator<Item = (u32, usize)>,
    seq: usize,
    packs: bool,
) -> Vec<Vec<u32>> {
    let mut sequences: Vec<Vec<u32>> = Vec::new();
    // Room that is left in sequences that are not full.
    let mut open: BTreeSet<(usize, usize)> = BTreeSet::new();
    for (document, length) in lengths {
        debug_assert!(length <= seq, "a document of {length} tokens in a sequence of {seq}");
        let found = if packs { open.range((length, 0)..).next().copied() } else { None };
        let (room, sequence) = found.unwrap_or((seq, sequences.len()));
        match found {
            Some(entry) => drop(open.remove(&entry)),
            None => sequences.push(Vec::new()),
        }
        sequences[sequence].push(document);
        if room > length {
            open.insert((room - length, sequence));
        }
    }
    sequences
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_least_room_is_taken() {
        let lengths = |all: &[usize]| (0..).zip(all.to_vec()).collect::<Vec<_>>();
        assert_eq!(pack(lengths(&[6, 5, 4, 5, 10]), 10, true), [vec![0, 2], vec![1, 3], vec![4]]);
        assert_eq!(pack(lengths(&[6, 4]), 10, false), [[0], [1]]);
    }

    proptest! {
        /// Each document is there once, no sequence is too long, and no two could be one.
        #[test]
        fn sequences_hold_all_documents(lengths in prop::collection::vec(1usize..=20, 0..200)) {
            let sequences = pack((0..).zip(lengths.iter().copied()), 20, true);
            let length = |sequence: &Vec<u32>| sequence.iter().map(|i| lengths[*i as usize]).sum::<usize>();
            let mut all: Vec<u32> = sequences.concat();
            all.sort_unstable();
            prop_assert!(all.into_iter().eq(0..lengths.len() as u32));
            prop_assert!(sequences.iter().all(|sequence| length(sequence) <= 20));
            let half_empty = sequences.iter().filter(|sequence| length(sequence) <= 10).count();
            prop_assert!(half_empty <= 1);
        }
    }
}
