//! What a rank asks of its group, as data: transports match on it, and errors print it.

use std::fmt;

use crate::data::{CommBuffer, ElementType};

/// How elements of several ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reduce {
    /// Their sum. bf16 is summed in f32 and rounded once; integers wrap.
    Sum,
    /// The largest; NaN where there is one.
    Max,
}

/// An operation of a group. Ranks are numbers within the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// To one rank.
    Send {
        to: usize,
        /// What the receiver tells messages apart by.
        tag: u32,
    },
    /// From one rank.
    Receive {
        from: usize,
        /// The sender's tag.
        tag: u32,
    },
    /// From one rank to all.
    Broadcast {
        /// Whose data it is.
        root: usize,
    },
    /// All get the reduction of all.
    AllReduce(Reduce),
    /// Each gets its shard of the reduction of all.
    ReduceScatter(Reduce),
    /// All get the shards of all, in the order of ranks.
    AllGather,
    /// Nobody goes on before all have made the call.
    Barrier,
    /// The group splits into smaller ones.
    Split,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reduce = |how: &Reduce| match how {
            Reduce::Sum => "sum",
            Reduce::Max => "max",
        };
        match self {
            Operation::Send { tag, .. } => write!(f, "send (tag {tag})"),
            Operation::Receive { tag, .. } => write!(f, "receive (tag {tag})"),
            Operation::Broadcast { root } => write!(f, "broadcast (root {root})"),
            Operation::AllReduce(how) => write!(f, "all_reduce ({})", reduce(how)),
            Operation::ReduceScatter(how) => write!(f, "reduce_scatter ({})", reduce(how)),
            Operation::AllGather => f.write_str("all_gather"),
            Operation::Barrier => f.write_str("barrier"),
            Operation::Split => f.write_str("split"),
        }
    }
}

/// An operation and how much it moves: all members of a group must make the same calls in the same order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Call {
    /// With its peers.
    pub operation: Operation,
    /// The type of its elements; `None` where no data moves.
    pub element: Option<ElementType>,
    /// How many elements: of the full data where ranks have shards of it.
    pub elements: usize,
}

impl Call {
    /// A call without data.
    pub fn empty(operation: Operation) -> Call {
        Call { operation, element: None, elements: 0 }
    }

    /// A call on this data.
    pub fn of(operation: Operation, data: &CommBuffer) -> Call {
        Call { operation, element: Some(data.element()), elements: data.len() }
    }

    /// Bytes of its elements.
    pub fn bytes(&self) -> usize {
        self.elements * self.element.map_or(0, ElementType::bytes)
    }
}

/// `all_reduce (sum) of 1024 f32`
impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.operation)?;
        match self.element {
            Some(element) if self.operation != Operation::Split => {
                write!(f, " of {} {element}", self.elements)
            }
            _ => Ok(()),
        }
    }
}
