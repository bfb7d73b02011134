//! How a file of a checkpoint is split into those of several ranks: their names, and who writes which tensor.

use std::cmp::Reverse;

/// Folders that are being written start with this.
pub(super) const WRITING: &str = ".writing-";

/// What the `rank`-th of `size` ranks calls its shard of a file: `model-00002-of-00004.safetensors`; a
/// single rank has it all.
pub(crate) fn file_name(file: &str, rank: usize, size: usize) -> String {
    match file.strip_suffix(".safetensors") {
        Some(stem) if size > 1 => format!("{stem}-{:05}-of-{size:05}.safetensors", rank + 1),
        _ => file.to_owned(),
    }
}

/// The file of which a file is a shard, perhaps the only one; nothing for a file that holds no tensors.
pub(super) fn logical_file(name: &str) -> Option<String> {
    let stem = name.strip_suffix(".safetensors")?;
    let front = || {
        let (front, size) = stem.rsplit_once("-of-")?;
        let (front, rank) = front.rsplit_once('-')?;
        let number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
        (number(rank) && number(size)).then_some(front)
    };
    Some(format!("{}.safetensors", front().unwrap_or(stem)))
}

/// A tensor or a shard of one, and the ranks of a replica that hold it; all replicas hold the same.
#[derive(Debug)]
pub(super) struct Holders {
    pub(super) bytes: usize,
    pub(super) members: Vec<usize>,
}

/// Which member of which replica writes each tensor: the next largest goes to whoever of its holders has the
/// fewest bytes.
pub(super) fn assign_writers(tensors: &[&Holders], members: usize, replicas: usize) -> Vec<(usize, usize)> {
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&i| (Reverse(tensors[i].bytes), i));
    let (mut load, mut owners) = (vec![vec![0; replicas]; members], vec![(0, 0); tensors.len()]);
    for i in order {
        let of_member = |member: &usize| (0..replicas).map(|replica| (*member, replica)).collect::<Vec<_>>();
        let holders = tensors[i].members.iter().flat_map(of_member);
        let owner =
            holders.min_by_key(|(member, replica)| load[*member][*replica]).expect("someone holds it");
        load[owner.0][owner.1] += tensors[i].bytes;
        owners[i] = owner;
    }
    owners
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_of_shards_lead_back_to_their_file() {
        assert_eq!(file_name("model.safetensors", 0, 1), "model.safetensors");
        assert_eq!(file_name("model.safetensors", 1, 4), "model-00002-of-00004.safetensors");
        for name in ["model.safetensors", "model-00002-of-00004.safetensors"] {
            assert_eq!(logical_file(name).unwrap(), "model.safetensors");
        }
        assert_eq!(logical_file("one-of-00004.safetensors").unwrap(), "one-of-00004.safetensors");
        assert_eq!(logical_file("model.safetensors.index.json"), None);
    }

    proptest! {
        /// Nobody writes more than its fair share and the largest tensor.
        #[test]
        fn tensors_are_dealt_out_evenly_to_those_that_hold_them(
            bytes in prop::collection::vec((0usize..1000, 0usize..3), 0..50),
            replicas in 1usize..9,
        ) {
            let tensors: Vec<Holders> = bytes.iter().map(|(bytes, member)| Holders {
                bytes: *bytes,
                members: if bytes.is_multiple_of(7) { vec![0, 2] } else { vec![*member] },
            }).collect();
            let tensors: Vec<&Holders> = tensors.iter().collect();
            let owners = assign_writers(&tensors, 3, replicas);
            for member in 0..3 {
                let mut load = vec![0; replicas];
                let written: Vec<_> = owners.iter().zip(&tensors).filter(|((of, _), _)| *of == member).collect();
                for ((_, replica), tensor) in &written {
                    prop_assert!(tensor.members.contains(&member));
                    load[*replica] += tensor.bytes;
                }
                let most = written.iter().map(|(_, tensor)| tensor.bytes).sum::<usize>() / replicas + 1000;
                prop_assert!(load.iter().all(|load| *load <= most), "{:?}", load);
            }
        }
    }
}
