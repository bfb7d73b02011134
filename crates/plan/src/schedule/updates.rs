//! When weights change, and which version of them a micro-batch uses.
//!
//! Versions are counted in steps: version 0 is what the lists begin with, and the n-th step makes version n.
//! A step overwrites the newest version, unless it was stashed before; what was stashed is held until it is
//! dropped.

/// The rule of the versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Updates {
    /// One step at the end of a batch, when nothing is in flight: batch t uses version t on all ranks.
    Flush,
    /// PipeDream: a step after every micro-batch; a forward uses the newest version of its rank, and the backward
    /// the one that its forward used.
    EveryMicroBatch,
    /// PipeDream-2BW: batch t uses version max(t - 1, 0), so W(t+1) = W(t) - lr grad f(W(t-1)), and two are held.
    DoubleBuffered,
    /// As a file says: only that a backward uses the version of its forward.
    Free,
}

impl Updates {
    /// As it is written in a file.
    pub fn as_str(self) -> &'static str {
        match self {
            Updates::Flush => "flush",
            Updates::EveryMicroBatch => "every-micro-batch",
            Updates::DoubleBuffered => "double-buffered",
            Updates::Free => "free",
        }
    }

    pub const ALL: [Updates; 4] =
        [Updates::Flush, Updates::EveryMicroBatch, Updates::DoubleBuffered, Updates::Free];
}
