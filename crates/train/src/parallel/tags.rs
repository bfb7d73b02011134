//! The tags of messages between stages: a communicator tells messages of the same two ranks apart by them.
//! Those within a layer have groups, and tags, of their own.

use espalier_plan::schedule::{Action, Schedule};

/// The tag of a message of a schedule, with a tensor or with control numbers.
pub(crate) fn tag(schedule: &Schedule, rank: usize, action: &Action) -> u32 {
    let tag = schedule.tag(rank, action).expect("a message has a tag");
    u32::try_from(tag).expect("lists are short enough for their tags")
}
