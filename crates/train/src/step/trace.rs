//! What a rank did when: spans of time, and the file in which other tools read them.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::time::Instant;

use espalier_plan::schedule::Pass;
use serde_json::{Value, json};

use crate::data::irregular;

/// The key under which a trace has its events, by which it is known.
const EVENTS: &[u8] = b"\"traceEvents\"";

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

    /// All spans as plain numbers, to be sent to another rank.
    pub fn to_numbers(&self) -> Vec<f64> {
        let number = |span: &Span| {
            let (code, micro_batch, chunk) = match span.kind {
                Kind::Compute { pass, micro_batch, chunk } => {
                    let code = PASSES.iter().position(|other| *other == pass).expect("one of all");
                    (code, micro_batch, chunk)
                }
                Kind::Send => (4, 0, 0),
                Kind::Wait => (5, 0, 0),
                Kind::AllReduce => (6, 0, 0),
                Kind::Step => (7, 0, 0),
            };
            [code as f64, micro_batch as f64, chunk as f64, span.start, span.end]
        };
        self.spans.iter().flat_map(number).collect()
    }

    /// Spans from plain numbers.
    pub fn from_numbers(numbers: &[f64]) -> Vec<Span> {
        let span = |row: &[f64; 5]| {
            let [code, micro_batch, chunk, start, end] = *row;
            let kind = match code as usize {
                pass @ 0..4 => {
                    let (micro_batch, chunk) = (micro_batch as usize, chunk as usize);
                    Kind::Compute { pass: PASSES[pass], micro_batch, chunk }
                }
                4 => Kind::Send,
                5 => Kind::Wait,
                6 => Kind::AllReduce,
                _ => Kind::Step,
            };
            Span { kind, start, end }
        };
        numbers.as_chunks::<5>().0.iter().map(span).collect()
    }
}

const PASSES: [Pass; 4] = [Pass::Forward, Pass::Backward, Pass::BackwardInput, Pass::BackwardWeight];

impl Kind {
    fn name(self) -> String {
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

    fn category(self) -> &'static str {
        match self {
            Kind::Compute { .. } => "compute",
            Kind::Send => "send",
            Kind::Wait => "wait",
            Kind::AllReduce => "all-reduce",
            Kind::Step => "step",
        }
    }
}

/// Refuses to write a trace over a file that is none: an empty one is, as a run leaves it that was killed.
pub fn may_replace(path: &Path) -> Result<(), String> {
    let Ok(found) = fs::metadata(path) else { return Ok(()) };
    if let Some(got) = irregular(found.file_type()) {
        return Err(format!("it is {got}, not a file for a trace"));
    }
    let mut head = Vec::new();
    // What cannot be read cannot be written either, and says so by itself.
    let Ok(_) = File::open(path).and_then(|file| file.take(4096).read_to_end(&mut head)) else {
        return Ok(());
    };
    let is_trace = head.windows(EVENTS.len()).any(|bytes| bytes == EVENTS);
    if head.is_empty() || is_trace {
        return Ok(());
    }
    Err("a file is here that is no trace: choose another name, or remove it".into())
}

/// The traces of all ranks as Chrome's tracing and Perfetto read them: one row a rank.
pub fn chrome(ranks: &[Vec<Span>]) -> Value {
    let names = (0..ranks.len()).map(|rank| {
        json!({ "ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": { "name": format!("rank {rank}") } })
    });
    let events = ranks.iter().enumerate().flat_map(|(rank, spans)| {
        spans.iter().map(move |span| {
            let mut event = json!({
                "ph": "X", "name": span.kind.name(), "cat": span.kind.category(), "pid": 0, "tid": rank,
                "ts": 1e6 * span.start, "dur": 1e6 * (span.end - span.start),
            });
            if let Kind::Compute { micro_batch, chunk, .. } = span.kind {
                event["args"] = json!({ "micro_batch": micro_batch, "chunk": chunk });
            }
            event
        })
    });
    json!({ "traceEvents": names.chain(events).collect::<Vec<_>>(), "displayTimeUnit": "ms" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_survive_the_way_to_another_rank_and_become_rows() {
        let mut trace = Trace::since(Instant::now());
        let kinds = PASSES.map(|pass| Kind::Compute { pass, micro_batch: 3, chunk: 1 });
        for kind in kinds.into_iter().chain([Kind::Send, Kind::Wait, Kind::AllReduce, Kind::Step]) {
            let start = trace.now();
            trace.add(kind, start);
        }
        assert_eq!(Trace::from_numbers(&trace.to_numbers()), trace.spans);
        let file = chrome(&[trace.spans.clone(), trace.spans]);
        let events = file["traceEvents"].as_array().unwrap();
        assert_eq!(events.len(), 2 + 2 * 8);
        assert_eq!((&events[2]["name"], &events[2]["tid"]), (&json!("F3"), &json!(0)));
        assert_eq!((&events[17]["name"], &events[17]["cat"]), (&json!("step"), &json!("step")));
    }
}
