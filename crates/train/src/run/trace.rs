//! The file of a run's timeline, as Chrome's tracing and Perfetto read it: written from these types, and read back into them.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::data::irregular;
use crate::step::{Kind, Span};

/// The key under which a trace has its events, by which it is known.
const EVENTS: &[u8] = b"\"traceEvents\"";

/// What all ranks of a run did when.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TraceFile {
    /// A name for each rank's row, and the spans of all.
    #[serde(rename = "traceEvents")]
    pub events: Vec<Event>,
    /// In what a viewer counts time; numbers are microseconds all the same.
    #[serde(rename = "displayTimeUnit")]
    unit: String,
}

/// One event; `ph` says which kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "ph")]
pub enum Event {
    /// Gives a row its name.
    #[serde(rename = "M")]
    Row(Row),
    /// Something that took time.
    #[serde(rename = "X")]
    Spent(Spent),
}

/// A row of the timeline: a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Always `thread_name`: what is named.
    name: String,
    pid: usize,
    /// The rank.
    pub tid: usize,
    /// What it is called.
    pub args: RowName,
}

/// As the format wants it: the arguments of a name are an object.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RowName {
    /// `rank 3`.
    pub name: String,
}

/// Time that a rank spent on something.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Spent {
    /// On what: [`Kind::name`].
    pub name: String,
    /// On what kind of thing: [`Kind::category`].
    pub cat: String,
    pid: usize,
    /// The rank.
    pub tid: usize,
    /// Its beginning, in microseconds since the trace began.
    pub ts: f64,
    /// Microseconds.
    pub dur: f64,
    /// Of a pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub args: Option<PassArguments>,
}

/// What a pass went through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassArguments {
    /// Counted through all batches of the list.
    pub micro_batch: usize,
    /// Which of the rank's chunks.
    pub chunk: usize,
}

impl TraceFile {
    /// Of the spans of all ranks, in their order.
    pub fn new(spent: Vec<Vec<Spent>>) -> TraceFile {
        let row = |tid: usize| {
            let args = RowName { name: format!("rank {tid}") };
            Event::Row(Row { name: "thread_name".into(), pid: 0, tid, args })
        };
        let rows = (0..spent.len()).map(row);
        let events = rows.chain(spent.into_iter().flatten().map(Event::Spent)).collect();
        TraceFile { events, unit: "ms".into() }
    }

    /// What a rank spent its time on.
    pub fn of_rank(&self, rank: usize) -> impl Iterator<Item = &Spent> {
        self.events.iter().filter_map(move |event| match event {
            Event::Spent(spent) if spent.tid == rank => Some(spent),
            _ => None,
        })
    }
}

impl Spent {
    /// Of a span of a rank.
    pub fn new(rank: usize, span: &Span) -> Spent {
        let args = match span.kind {
            Kind::Compute { micro_batch, chunk, .. } => Some(PassArguments { micro_batch, chunk }),
            _ => None,
        };
        Spent {
            name: span.kind.name(),
            cat: span.kind.category().into(),
            pid: 0,
            tid: rank,
            ts: 1e6 * span.start,
            dur: 1e6 * (span.end - span.start),
            args,
        }
    }
}

/// Refuses to write a trace over a file that is none: an empty one is, as a run leaves it that was killed.
pub(super) fn may_replace(path: &Path) -> Result<(), String> {
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
