//! The tags of all messages between two ranks: a communicator tells messages of the same two ranks apart by them.

use espalier_plan::schedule::{Action, Schedule};

/// Of halos, which have a group of their own and come in the order in which they were sent.
pub(crate) const HALO: u32 = 0;

/// Of what ranks along an axis deal out to each other, likewise.
pub(crate) const DEAL: u32 = 1;

/// Of a message or a notice of a schedule.
pub(crate) fn tag(schedule: &Schedule, rank: usize, action: &Action) -> u32 {
    let tag = schedule.tag(rank, action).expect("a message has a tag");
    u32::try_from(tag).expect("lists are short enough for their tags")
}
