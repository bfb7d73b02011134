//! What a transport must offer. [`Communicator`](crate::Communicator) is what is used; this is
//! what it stands on: checked calls whose data the transport owns until they are done.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::call::{Call, Operation};
use crate::data::CommBuffer;
use crate::error::Result;

/// One rank's end of a group.
pub trait Transport: Send + Sync + fmt::Debug {
    /// Its number within the group.
    fn rank(&self) -> usize;

    /// The ranks of the world that form the group, in the group's order.
    fn members(&self) -> &[usize];

    /// Begins a call. `attended` says that the caller goes straight on to wait for it; otherwise it has other
    /// work to do meanwhile, and the call should go on without it.
    ///
    /// Calls of a group are matched in the order in which its members make them, messages between two ranks in the
    /// order of those with the same tag.
    fn start(&self, buffers: CallBuffers, attended: bool) -> Result<Box<dyn Pending>>;

    /// Connects this rank with those of the group that it will send to, where that takes time of its own:
    /// otherwise its first message to each would.
    fn connect(&self, _to: &[usize], _limit: Duration) -> Result<()> {
        Ok(())
    }

    /// Splits the group: those of one colour form a new group, in the order of their keys and, where these are
    /// equal, of their ranks. Without a colour a rank is in no new group. All members must call it.
    fn split(&self, choice: SplitChoice, limit: Duration) -> Result<Option<Arc<dyn Transport>>>;
}

/// A call with its data.
#[derive(Debug)]
pub struct CallBuffers {
    /// The operation and its size.
    pub call: Call,
    /// Data that is only read: what is sent, the shard of an all-gather, the full data of a reduce-scatter.
    pub read: Option<CommBuffer>,
    /// Data that is written: what is received, or both read and written by an all-reduce.
    pub write: Option<CommBuffer>,
}

impl CallBuffers {
    /// Those of a split: a rank's choice, and room for those of all.
    pub(crate) fn of_split(choice: SplitChoice, ranks: usize) -> CallBuffers {
        let choices = CommBuffer::U64(vec![0; 2 * ranks]);
        let call = Call::of(Operation::Split, &choices);
        CallBuffers { call, read: Some(CommBuffer::U64(choice.to_vec())), write: Some(choices) }
    }
}

/// A call that was begun. Dropping it discards its result, not the call: others still get theirs.
pub trait Pending: Send {
    /// Whether it is done, without waiting.
    fn is_done(&mut self) -> Result<bool>;

    /// Waits until it is done, and hands the data back: what was written, or else what was read.
    fn wait(self: Box<Self>, limit: Duration) -> Result<Option<CommBuffer>>;
}

/// What a rank gives to a split, for all to gather: 0, or the number behind its colour's, and its key.
pub type SplitChoice = [u64; 2];

pub(crate) fn choice(colour: Option<usize>, key: usize) -> SplitChoice {
    [colour.map_or(0, |colour| colour as u64 + 1), key as u64]
}

/// A group that a split makes, by the ranks' numbers in the old one.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NewGroup {
    /// Its members, in order.
    pub(crate) members: Vec<usize>,
    /// Which of them the rank is that asks.
    pub(crate) rank: usize,
}

impl NewGroup {
    /// The group that `rank` is in, from the choices of all; `None` where it gave no colour.
    pub(crate) fn of(choices: &[u64], rank: usize) -> Option<NewGroup> {
        let (choices, _) = choices.as_chunks::<2>();
        let [colour, _] = choices[rank];
        if colour == 0 {
            return None;
        }
        let mut members: Vec<usize> = (0..choices.len()).filter(|&r| choices[r][0] == colour).collect();
        members.sort_by_key(|&r| (choices[r][1], r));
        let rank = members.iter().position(|&r| r == rank).expect("a rank is in the group of its colour");
        Some(NewGroup { members, rank })
    }

    /// A number that none of its siblings has, smaller than the number of ranks.
    #[cfg(any(feature = "mpi", test))]
    pub(crate) fn number(&self) -> usize {
        self.members.iter().copied().min().expect("a group has members")
    }

    /// A name for the group of a colour that the `seq_no`-th call of its parent makes: the same on all its
    /// ranks, and no other group's but by a chance of 1 in 2^64.
    pub(crate) fn name(parent: u64, seq_no: u64, colour: u64) -> u64 {
        [seq_no, colour, 1].into_iter().fold(parent, |name, word| {
            let mixed = (name ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            (mixed ^ (mixed >> 29)).wrapping_mul(0x94d0_49bb_1331_11eb)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_follow_colours_and_keys() {
        let choices = [(Some(5), 9), (None, 0), (Some(5), 1), (Some(0), 0), (Some(5), 1)];
        let words: Vec<u64> = choices.iter().flat_map(|&(colour, key)| choice(colour, key)).collect();
        let members = vec![2, 4, 0];
        assert_eq!(NewGroup::of(&words, 4), Some(NewGroup { members: members.clone(), rank: 1 }));
        assert_eq!(NewGroup::of(&words, 0), Some(NewGroup { members, rank: 2 }));
        assert_eq!(NewGroup::of(&words, 3), Some(NewGroup { members: vec![3], rank: 0 }));
        assert_eq!(NewGroup::of(&words, 1), None);
        assert_eq!(
            (0..5).filter_map(|r| Some(NewGroup::of(&words, r)?.number())).collect::<Vec<_>>(),
            [0, 0, 3, 0]
        );
    }
}
