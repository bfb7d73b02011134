//! What a rank did when: spans of time. [`TraceFile`](crate::run::trace::TraceFile) is where other tools read
//! them.

use std::time::Instant;

use espalier_plan::schedule::{Action, Pass};

/// What a rank did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TraceKind {
    /// A pass of a micro-batch through a chunk.
    Compute {
        /// Forward, backward, or one half of that.
        pass: Pass,
        /// Counted through all batches of the list.
        micro_batch: usize,
        /// Which of the rank's chunks.
        chunk: usize,
    },
    /// Both passes of a batch through a model that is all here, run as one.
    BothPasses {
        /// Counted through all batches of the list.
        micro_batch: usize,
        /// Whether they were replayed from a captured graph, in one call.
        replayed: bool,
    },
    /// Handing over a message.
    Send,
    /// Waiting for a message.
    Wait,
    /// Starting all-reduces of gradients, or waiting for them and for all ranks' loss and norm.
    AllReduce,
    /// The all-reduce of a bucket of gradients, from the backward that completes it to the wait for it:
    /// beside all others.
    Bucket {
        /// Its number in the plan's list.
        number: usize,
        /// The block whose backward completes it.
        block: usize,
        /// How many gradients are in it.
        parameters: usize,
    },
    /// Updating weights.
    Step,
}

/// A stretch of time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TraceSpan {
    /// What the time went to.
    pub kind: TraceKind,
    /// Seconds since the trace began.
    pub start: f64,
    /// Not before `start`, by the same clock.
    pub end: f64,
    /// Bytes that it sent; of a wait for a message, that it received.
    pub bytes: u64,
}

/// A span by the clock of the machine.
#[derive(Debug, Clone, Copy)]
pub struct BucketSpan {
    /// What was under way.
    pub kind: TraceKind,
    pub bytes: u64,
    pub start: Instant,
    pub end: Instant,
}

/// The spans of one rank.
#[derive(Debug, Clone)]
pub struct Trace {
    origin: Instant,
    /// In the order of their ends.
    pub spans: Vec<TraceSpan>,
}

impl Trace {
    /// Begins at `origin`, which ranks of one process share.
    pub fn since(origin: Instant) -> Trace {
        Trace { origin, spans: Vec::new() }
    }

    /// Seconds since it began.
    pub fn now(&self) -> f64 {
        self.origin.elapsed().as_secs_f64()
    }

    /// Adds what began at `start` and ends now.
    pub fn add(&mut self, kind: TraceKind, start: f64, bytes: u64) {
        self.spans.push(TraceSpan { kind, start, end: self.now(), bytes });
    }

    /// Adds what was under way beside the rank's actions.
    pub(crate) fn add_bucket_span(&mut self, span: BucketSpan) {
        let since = |time: Instant| time.saturating_duration_since(self.origin).as_secs_f64();
        let BucketSpan { kind, bytes, start, end } = span;
        self.spans.push(TraceSpan { kind, start: since(start), end: since(end), bytes });
    }
}

impl TraceKind {
    /// What an action is shown as; none where it takes no time.
    pub fn of(action: &Action) -> Option<TraceKind> {
        Some(match action {
            Action::Receive(_) | Action::RecvControl(_) => TraceKind::Wait,
            Action::Send(_) | Action::SendControl(_) => TraceKind::Send,
            // Who is done early waits here for the others: in a pipeline with a flush, for as long as it drains.
            Action::AllReduce { .. }
            | Action::WaitReduce
            | Action::Agree
            | Action::Gather
            | Action::Average
            | Action::Settle => TraceKind::AllReduce,
            Action::Step | Action::Commit => TraceKind::Step,
            Action::Stash { .. } | Action::Drop { .. } => return None,
            _ => {
                let (pass, work) = action.compute().expect("all others compute");
                TraceKind::Compute { pass, micro_batch: work.micro_batch, chunk: work.chunk }
            }
        })
    }

    /// What a row of a timeline shows: `F3` is the forward of micro-batch 3, `F3+B3 graph` both of its passes
    /// replayed.
    pub fn name(self) -> String {
        match self {
            TraceKind::Compute { pass, micro_batch, .. } => {
                let letter = match pass {
                    Pass::Forward => "F",
                    Pass::Backward => "B",
                    Pass::BackwardInput => "I",
                    Pass::BackwardWeight => "W",
                };
                format!("{letter}{micro_batch}")
            }
            TraceKind::BothPasses { micro_batch, replayed } => {
                format!("F{micro_batch}+B{micro_batch}{}", if replayed { " graph" } else { "" })
            }
            TraceKind::Send => "send".into(),
            TraceKind::Wait => "wait".into(),
            TraceKind::AllReduce => "all-reduce".into(),
            TraceKind::Bucket { number, .. } => format!("bucket {number}"),
            TraceKind::Step => "step".into(),
        }
    }

    /// The name without the micro-batch: what spans are counted by.
    pub fn category(self) -> &'static str {
        match self {
            TraceKind::Compute { .. } | TraceKind::BothPasses { .. } => "compute",
            TraceKind::Send => "send",
            TraceKind::Wait => "wait",
            TraceKind::AllReduce => "all-reduce",
            TraceKind::Bucket { .. } => "bucket",
            TraceKind::Step => "step",
        }
    }
}
