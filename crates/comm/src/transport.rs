//! What a way of carrying messages must offer. [`Communicator`](crate::Communicator) is what is used; this is what it
//! stands on: checked calls whose data the transport owns until they are done.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::call::Call;
use crate::data::Data;
use crate::error::Result;

/// One rank's end of a group.
pub trait Transport: Send + Sync + fmt::Debug {
    /// Its number within the group.
    fn rank(&self) -> usize;

    /// The ranks of the world that form the group, in the group's order.
    fn members(&self) -> &[usize];

    /// Begins a call. `attended` says that the caller goes straight on to wait for it; otherwise it has other work to do
    /// meanwhile, and the call should go on without it.
    ///
    /// Calls of a group are matched in the order in which its members make them, messages between two ranks in the
    /// order of those with the same tag.
    fn start(&self, parcel: Parcel, attended: bool) -> Result<Box<dyn Pending>>;

    /// Parts the group: those of one colour form a new group, in the order of their keys and, where these are equal, of
    /// their ranks. Without a colour a rank is in no new group. All members must call it.
    fn split(&self, colour: Option<usize>, key: usize, limit: Duration)
    -> Result<Option<Arc<dyn Transport>>>;
}

/// A call with its data.
#[derive(Debug)]
pub struct Parcel {
    /// What is asked for.
    pub call: Call,
    /// Data that is only read: what is sent, the parts of an all-gather, the whole of a reduce-scatter.
    pub read: Option<Data>,
    /// Data that is written: what is received, or both read and written by an all-reduce.
    pub write: Option<Data>,
}

/// A call that was begun. Dropping it gives up its result, not the call: others still get theirs.
pub trait Pending: Send {
    /// Whether it is done, without waiting.
    fn is_done(&mut self) -> Result<bool>;

    /// Waits until it is done, and hands the data back: what was written, or else what was read.
    fn wait(self: Box<Self>, limit: Duration) -> Result<Option<Data>>;
}

/// The members of the new group that a rank is in, by their numbers in the old one.
///
/// `choices` holds what each rank asked for, in the order of ranks; `rank` has a colour.
pub(crate) fn new_group(choices: &[(Option<usize>, usize)], rank: usize) -> Vec<usize> {
    let (colour, _) = choices[rank];
    let mut members: Vec<usize> = (0..choices.len()).filter(|&r| choices[r].0 == colour).collect();
    members.sort_by_key(|&r| (choices[r].1, r));
    members
}
