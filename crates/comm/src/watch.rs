//! What a rank waits for, for whoever listens (`tracing`): reported before the wait, so that the last line of a
//! rank that hangs says what it hangs in. Ranks are those of the world, as in errors.

use std::fmt;
use std::time::Instant;

use tracing::{Level, debug, enabled, trace};

use crate::call::{Call, Operation};
use crate::error::ranks;

/// A call that `tracing` reports.
pub(crate) struct WaitTrace {
    /// As text that outlives the call's data.
    what: String,
    begin: Instant,
    /// Whether it was reported that the rank waits for it.
    awaited: bool,
}

impl WaitTrace {
    /// Reports that a call begins. Nothing where nobody listens, or there is nobody to wait for.
    pub(crate) fn begin(call: Call, members: &[usize], attended: bool) -> Option<WaitTrace> {
        if !enabled!(Level::DEBUG) || members.len() == 1 {
            return None;
        }
        let what = CallDisplay(call, members).to_string();
        if !attended {
            trace!("begins {what}");
        }
        let mut watch = WaitTrace { what, begin: Instant::now(), awaited: false };
        if attended {
            watch.wait();
        }
        Some(watch)
    }

    /// Reports that the rank only waits from now on.
    pub(crate) fn wait(&mut self) {
        if !self.awaited {
            debug!("waits for {}", self.what);
            self.awaited = true;
        }
    }

    /// Reports that the wait is over, if its beginning was.
    pub(crate) fn done(watch: Option<WaitTrace>) {
        if let Some(WaitTrace { what, begin, .. }) = watch {
            trace!("done: {what}, {:.3} ms after it began", begin.elapsed().as_secs_f64() * 1e3);
        }
    }
}

/// `receive (tag 3) of 1024 f32, 4096 bytes, from rank 2`
struct CallDisplay<'a>(Call, &'a [usize]);

impl fmt::Display for CallDisplay<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CallDisplay(call, members) = *self;
        write!(f, "{call}")?;
        if call.element.is_some() {
            write!(f, ", {} bytes,", call.bytes())?;
        }
        match call.operation {
            Operation::Send { to, .. } => write!(f, " to rank {}", members[to]),
            Operation::Receive { from, .. } => write!(f, " from rank {}", members[from]),
            _ => write!(f, " among {}", ranks(members)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Reduce;
    use crate::data::ElementType;

    #[test]
    fn a_call_names_ranks_of_the_world_and_bytes() {
        let text = |operation, element: Option<ElementType>| {
            CallDisplay(Call { operation, element, elements: 12 }, &[1, 3, 5]).to_string()
        };
        let f32 = Some(ElementType::F32);
        assert_eq!(
            text(Operation::Receive { from: 2, tag: 7 }, f32),
            "receive (tag 7) of 12 f32, 48 bytes, from rank 5"
        );
        assert_eq!(
            text(Operation::Send { to: 1, tag: 7 }, f32),
            "send (tag 7) of 12 f32, 48 bytes, to rank 3"
        );
        assert_eq!(
            text(Operation::AllReduce(Reduce::Sum), f32),
            "all_reduce (sum) of 12 f32, 48 bytes, among ranks 1, 3 and 5"
        );
        assert_eq!(text(Operation::Barrier, None), "barrier among ranks 1, 3 and 5");
    }
}
