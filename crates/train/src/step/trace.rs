//! What a rank did when: spans of time. [`TraceFile`](crate::run::trace::TraceFile) is where other tools read them.

use std::time::Instant;

use espalier_plan::schedule::Pass;

/// What a rank did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A pass of a micro-batch through a chunk.
    Compute {
        /// Which.
        pass: Pass,
        /// Counted through all batches of the list.
        micro_batch: usize,
        /// Which of the rank's chunks.
        chunk: usize,
    },
    /// Handing over a message.
    Send,
    /// Waiting for a message.
    Wait,
    /// Starting sums of gradients, or waiting for them and for all ranks' loss and norm.
    AllReduce,
    /// Updating weights.
    Step,
}

/// A stretch of time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// Spent on this.
    pub kind: Kind,
    /// Seconds since the trace began.
    pub start: f64,
    /// Likewise.
    pub end: f64,
}

/// The spans of one rank.
#[derive(Debug, Clone)]
pub struct Trace {
    origin: Instant,
    /// In the order of their ends.
    pub spans: Vec<Span>,
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
    pub fn add(&mut self, kind: Kind, start: f64) {
        self.spans.push(Span { kind, start, end: self.now() });
    }
}

impl Kind {
    /// What a row of a timeline shows: `F3` is the forward of micro-batch 3.
    pub fn name(self) -> String {
        match self {
            Kind::Compute { pass, micro_batch, .. } => {
                let letter = match pass {
                    Pass::Forward => "F",
                    Pass::Backward => "B",
                    Pass::BackwardInput => "I",
                    Pass::BackwardWeight => "W",
                };
                format!("{letter}{micro_batch}")
            }
            Kind::Send => "send".into(),
            Kind::Wait => "wait".into(),
            Kind::AllReduce => "all-reduce".into(),
            Kind::Step => "step".into(),
        }
    }

    /// The name without the micro-batch: what spans are counted by.
    pub fn category(self) -> &'static str {
        match self {
            Kind::Compute { .. } => "compute",
            Kind::Send => "send",
            Kind::Wait => "wait",
            Kind::AllReduce => "all-reduce",
            Kind::Step => "step",
        }
    }
}
