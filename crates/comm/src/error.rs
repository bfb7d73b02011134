//! What can go wrong between ranks. Every wait that ends badly says who waited, for whom and in what: ranks
//! are those of the world, as the launcher numbers them, whatever group the call was made in.

use std::fmt;
use std::time::Duration;

use crate::call::Call;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What a peer, a machine or a wrong call can cause.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// A rank did not make the call within the limit.
    #[error(
        "rank {rank} waited {} for {} in {call}{}; a rank that is missing has stopped, is slower than the limit, or \
         made another call",
        DisplaySeconds(*.waited), ranks(.missing), group(.among)
    )]
    TimedOut {
        rank: usize,
        /// The call that it was in.
        call: Call,
        /// The ranks that take part in it.
        among: Vec<usize>,
        /// How long it did, which is the limit or a little more.
        waited: Duration,
        /// Those of them that had not made it.
        missing: Vec<usize>,
    },
    /// Another rank failed, and with it all that is waited for.
    #[error("rank {rank} stopped in {call} because rank {failed} {how}: {why}")]
    PeerFailed {
        /// The rank that was stopped by it.
        rank: usize,
        /// The call that it was in.
        call: Call,
        /// The first rank that failed.
        failed: usize,
        /// `failed` or `panicked`.
        how: &'static str,
        why: String,
    },
    /// Another rank ended without making a call that this one waits for.
    #[error("rank {rank} waits in {call} for {}, which ended without it", ranks(.ended))]
    PeerEnded {
        /// The rank that would wait for ever.
        rank: usize,
        /// The call that it was in.
        call: Call,
        /// Those that will not make it.
        ended: Vec<usize>,
    },
    /// Two ranks made calls that do not belong together.
    #[error(
        "rank {rank} called {call} where rank {other} called {theirs}; all ranks must make the same calls"
    )]
    Mismatch {
        /// The rank that made the call.
        rank: usize,
        /// What the rank had called.
        call: Call,
        /// The first whose call is another one.
        other: usize,
        /// What that one called.
        theirs: Call,
    },
    /// More ranks than one process can have threads.
    #[error(
        "{ranks} ranks are more than one process can have as threads on this machine, which is {most}: start them with a \
         launcher on several machines, or use fewer"
    )]
    TooManyThreads {
        /// How many were asked for.
        ranks: usize,
        /// How many there can be.
        most: usize,
    },
    /// A call that can never work.
    #[error("rank {rank} called {call}: {problem}")]
    Argument {
        /// The rank that made the call.
        rank: usize,
        /// What the rank had called.
        call: Call,
        /// Why it cannot work.
        problem: String,
    },
    /// What carries the messages refused one, or lost it.
    #[error("rank {rank} called {call}, which failed: {why}")]
    Carrier {
        /// The rank that made the call.
        rank: usize,
        /// What the rank had called.
        call: Call,
        /// What MPI, NCCL or CUDA says.
        why: String,
    },
    /// A transport cannot be used, or not for this.
    #[error("{what}")]
    Unsupported {
        /// What is missing, and what to do about it.
        what: String,
    },
    /// What a launcher says in its variables cannot be used, or not by this program.
    #[error("{what}")]
    Variables {
        /// Which variable, and what to do about it.
        what: String,
    },
    /// The ranks of a run could not find each other.
    #[error("{what}")]
    Launch {
        /// What is wrong with the launch, and what to do about it.
        what: String,
    },
}

/// A duration as a person reads it.
pub(crate) struct DisplaySeconds(pub(crate) Duration);

impl fmt::Display for DisplaySeconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_secs_f64() {
            s if s < 0.9995 => write!(f, "{:.0} ms", s * 1e3),
            s => write!(f, "{s:.1} s"),
        }
    }
}

/// `rank 3`, `ranks 3 and 5`, `ranks 1, 2 and 3`; a long list is cut.
pub(crate) fn ranks(ranks: &[usize]) -> String {
    const SHOWN: usize = 8;
    match ranks {
        [] => "no rank".to_owned(),
        [one] => format!("rank {one}"),
        [most @ .., last] if ranks.len() <= SHOWN => format!("ranks {} and {last}", list(most)),
        _ => format!("ranks {} and {} more", list(&ranks[..SHOWN]), ranks.len() - SHOWN),
    }
}

fn list(ranks: &[usize]) -> String {
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

fn group(members: &[usize]) -> String {
    if members.is_empty() { String::new() } else { format!(" among {}", ranks(members)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{Operation, Reduce};
    use crate::data::ElementType;

    #[test]
    fn a_time_out_names_everything() {
        let call = Call {
            operation: Operation::AllReduce(Reduce::Sum),
            element: Some(ElementType::F32),
            elements: 1024,
        };
        let error = |missing: Vec<usize>, ms| Error::TimedOut {
            rank: 2,
            call,
            among: vec![2, 3, 4],
            waited: Duration::from_millis(ms),
            missing,
        };
        assert_eq!(
            error(vec![3], 5000).to_string(),
            "rank 2 waited 5.0 s for rank 3 in all_reduce (sum) of 1024 f32 among ranks 2, 3 and 4; a rank that is \
             missing has stopped, is slower than the limit, or made another call"
        );
        assert!(error(vec![3, 4], 20).to_string().starts_with("rank 2 waited 20 ms for ranks 3 and 4 in"));
        assert_eq!(ranks(&(0..12).collect::<Vec<_>>()), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more");
    }
}
