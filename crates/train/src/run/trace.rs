//! The file of a run's timeline, as Chrome's tracing and Perfetto read it: written from these types, and read
//! back into them.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};

use espalier_data::regular_file::{self, irregular};

use crate::Error;
use crate::step::{TraceKind, TraceSpan};

/// The key under which a trace has its events, by which it is known.
const EVENTS: &[u8] = b"\"traceEvents\"";

/// What all ranks of a run did when.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TraceFile {
    /// A name for each rank's row, and the spans of all.
    #[serde(rename = "traceEvents")]
    pub events: Vec<TraceEvent>,
    /// In what a viewer counts time; numbers are microseconds all the same.
    #[serde(rename = "displayTimeUnit")]
    unit: String,
}

/// One event; `ph` says which kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "ph")]
pub enum TraceEvent {
    /// Gives a row its name.
    #[serde(rename = "M")]
    ThreadName(TraceRow),
    /// Something that took time.
    #[serde(rename = "X")]
    Complete(CompleteEvent),
    /// Something that is under way beside it begins,
    #[serde(rename = "b")]
    Begin(AsyncEvent),
    /// and ends.
    #[serde(rename = "e")]
    End(AsyncEvent),
}

/// A row of the timeline: a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TraceRow {
    /// Always `thread_name`: what is named.
    name: String,
    pid: usize,
    /// The rank.
    pub tid: usize,
    /// What it is called.
    pub args: TraceRowName,
}

/// As the format wants it: the arguments of a name are an object.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TraceRowName {
    /// `rank 3`.
    pub name: String,
}

/// Time that a rank spent on something.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CompleteEvent {
    /// On what: [`TraceKind::name`].
    pub name: String,
    /// On what kind of thing: [`TraceKind::category`].
    pub cat: String,
    pid: usize,
    /// The rank.
    pub tid: usize,
    /// Its beginning, in microseconds since the trace began.
    pub ts: f64,
    /// Microseconds.
    pub dur: f64,
    /// What more is known of it.
    pub args: TraceArgs,
}

/// One end of what is under way while a rank does other things: the all-reduce of a bucket of gradients.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AsyncEvent {
    /// What: [`TraceKind::name`].
    pub name: String,
    /// What kind of thing: [`TraceKind::category`].
    pub cat: String,
    /// The same at both ends, and nowhere else.
    pub id: String,
    pid: usize,
    /// The rank.
    pub tid: usize,
    /// Microseconds since the trace began.
    pub ts: f64,
    /// What more is known of it.
    pub args: TraceArgs,
}

/// What more is known of something, where it applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TraceArgs {
    /// Of a pass: counted through all batches of the list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_batch: Option<usize>,
    /// Of a pass: which of the rank's chunks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunk: Option<usize>,
    /// Of a bucket: the block of the model whose backward completes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block: Option<usize>,
    /// Of a bucket: how many gradients are in it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parameters: Option<usize>,
    /// Sent to other ranks, as the plan predicts it; of a wait for a message, received.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

impl TraceFile {
    /// Of the events of all ranks, in their order.
    pub fn new(ranks: Vec<Vec<TraceEvent>>) -> TraceFile {
        TraceFile::of_ranks(ranks.into_iter().enumerate().collect())
    }

    /// Of the events of some ranks, each with its number.
    pub fn of_ranks(ranks: Vec<(usize, Vec<TraceEvent>)>) -> TraceFile {
        let row = |&(tid, _): &(usize, Vec<TraceEvent>)| {
            let args = TraceRowName { name: format!("rank {tid}") };
            TraceEvent::ThreadName(TraceRow { name: "thread_name".into(), pid: 0, tid, args })
        };
        let rows: Vec<TraceEvent> = ranks.iter().map(row).collect();
        let events = rows.into_iter().chain(ranks.into_iter().flat_map(|(_, events)| events)).collect();
        TraceFile { events, unit: "ms".into() }
    }

    /// What a rank spent its time on.
    pub fn of_rank(&self, rank: usize) -> impl Iterator<Item = &CompleteEvent> {
        self.events.iter().filter_map(move |event| match event {
            TraceEvent::Complete(spent) if spent.tid == rank => Some(spent),
            _ => None,
        })
    }
}

impl TraceEvent {
    /// The events of a rank's span, which is the `number`-th.
    pub fn of(rank: usize, number: usize, span: &TraceSpan) -> Vec<TraceEvent> {
        let (name, cat) = (span.kind.name(), span.kind.category().to_owned());
        let (ts, end) = (1e6 * span.start, 1e6 * span.end);
        let mut args =
            TraceArgs { bytes: Some(span.bytes).filter(|bytes| *bytes > 0), ..TraceArgs::default() };
        match span.kind {
            TraceKind::Bucket { block, parameters, .. } => {
                (args.block, args.parameters) = (Some(block), Some(parameters));
                let id = format!("{rank}.{number}");
                let begun = AsyncEvent { name, cat, id, pid: 0, tid: rank, ts, args };
                return vec![
                    TraceEvent::Begin(begun.clone()),
                    TraceEvent::End(AsyncEvent { ts: end, ..begun }),
                ];
            }
            TraceKind::Compute { micro_batch, chunk, .. } => {
                (args.micro_batch, args.chunk) = (Some(micro_batch), Some(chunk));
            }
            TraceKind::BothPasses { micro_batch, .. } => {
                (args.micro_batch, args.chunk) = (Some(micro_batch), Some(0));
            }
            _ => {}
        }
        let spent = CompleteEvent { name, cat, pid: 0, tid: rank, ts, dur: end - ts, args };
        vec![TraceEvent::Complete(spent)]
    }
}

/// Makes sure that a trace can be written to a file, which is there from then on.
pub(super) fn open_trace(path: &Path) -> crate::Result<()> {
    may_replace(path).map_err(|why| Error::file(path, why))?;
    let opened = File::options().append(true).create(true).open(path);
    opened.map_err(|why| Error::of_io(path, &why, format!("the trace cannot be written: {why}")))?;
    Ok(())
}

/// Refuses to write a trace over a file that is none: an empty one is, as a run leaves it that was killed.
pub fn may_replace(path: &Path) -> Result<(), String> {
    let Ok(found) = fs::metadata(path) else { return Ok(()) };
    if let Some(got) = irregular(found.file_type()) {
        return Err(format!("it is {got}, not a file for a trace"));
    }
    let mut head = Vec::new();
    // What cannot be read cannot be written either, and says so by itself.
    let Ok(_) = regular_file::open(path).and_then(|file| file.take(4096).read_to_end(&mut head)) else {
        return Ok(());
    };
    let is_trace = head.windows(EVENTS.len()).any(|bytes| bytes == EVENTS);
    if head.is_empty() || is_trace {
        return Ok(());
    }
    Err("a file is here that is no trace: choose another name, or remove it".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_passes_in_one_call_are_one_event() {
        let shown = |replayed| {
            let kind = TraceKind::BothPasses { micro_batch: 0, replayed };
            let events = TraceEvent::of(2, 0, &TraceSpan { kind, start: 1.0, end: 1.5, bytes: 0 });
            let [TraceEvent::Complete(spent)] = &events[..] else { panic!("{events:?}") };
            (spent.name.clone(), spent.cat.clone(), spent.dur, spent.args.micro_batch)
        };
        assert_eq!(shown(true), ("F0+B0 graph".into(), "compute".into(), 5e5, Some(0)));
        assert_eq!(shown(false).0, "F0+B0");
    }
}
