//! The timeline of a run's ranks, of its last steps, with what of their time is spent on what.

use espalier_report::{Figure, TimelineChart, TimelineRow, TimelineSpan, number};
use espalier_train::run::trace::{CompleteEvent, TraceEvent, TraceFile};

use crate::records::RunRecord;

/// Steps that are shown; a trace may have many.
const STEPS: usize = 2;
/// Ranks that are shown.
const RANKS: usize = 32;

/// What a rank does, in the order of colours. Waiting has none: it is the bubble.
const KINDS: [&str; 5] = ["forward", "backward", "weight gradients", "communication", "update"];
const UPDATE: usize = 4;
const MESSAGES: usize = 3;

/// None where the run has no trace, or one without anything in it.
pub fn figure(run: &RunRecord, of: &str) -> Option<Figure> {
    let mut timeline = timeline(run.trace.as_ref()?)?;
    let (ranks, mut title) = (timeline.rows.len(), format!("Timeline of the last steps{of}"));
    if ranks > RANKS {
        title += &format!(", the first {RANKS} of {ranks} ranks");
    }
    timeline.rows.truncate(RANKS);
    Some(Figure::new(title).with(timeline))
}

/// The last steps of all ranks, in milliseconds since they began; the title says what their time was spent on.
fn timeline(trace: &TraceFile) -> Option<TimelineChart> {
    let spent = trace.events.iter().filter_map(|event| match event {
        TraceEvent::Complete(spent) => Some(spent),
        _ => None,
    });
    let spent: Vec<&CompleteEvent> = spent.collect();
    let ranks = spent.iter().map(|spent| spent.tid + 1).max()?;
    let (from, to) = window(&spent)?;
    let mut fractions = TimeByKind::default();
    let row = |rank: usize| TimelineRow { name: format!("rank {rank}"), spans: Vec::new() };
    let mut rows: Vec<TimelineRow> = (0..ranks).map(row).collect();
    for spent in spent {
        let (start, end) = (spent.ts.max(from), (spent.ts + spent.dur).min(to));
        let Some(kind) = kind(spent).filter(|_| start < end) else { continue };
        fractions.add(kind, end - start);
        let (start, end) = ((start - from) / 1e3, (end - from) / 1e3);
        rows[spent.tid].spans.push(TimelineSpan { start, end, kind, text: spent.name.clone() });
    }
    let mut timeline =
        TimelineChart::new(fractions.sentence((to - from) * ranks as f64), "milliseconds", &KINDS);
    timeline.rows = rows;
    Some(timeline)
}

/// By the categories and names of docs/outputs.md.
fn kind(spent: &CompleteEvent) -> Option<usize> {
    match (spent.cat.as_str(), spent.name.as_bytes().first()) {
        // Most of both passes in one call is the backward.
        ("compute", Some(b'F')) if !spent.name.contains('+') => Some(0),
        ("compute", Some(b'W')) => Some(2),
        ("compute", _) => Some(1),
        ("send" | "all-reduce", _) => Some(MESSAGES),
        ("step", _) => Some(UPDATE),
        _ => None,
    }
}

/// From the end of the update before the last steps to the end of the last one, in microseconds. Updates are
/// those of the first rank; several in a row are one.
fn window(spent: &[&CompleteEvent]) -> Option<(f64, f64)> {
    let begin = spent.iter().map(|spent| spent.ts).fold(f64::INFINITY, f64::min);
    let end = spent.iter().map(|spent| spent.ts + spent.dur).fold(f64::NEG_INFINITY, f64::max);
    let mut rank0: Vec<&&CompleteEvent> =
        spent.iter().filter(|spent| spent.tid == 0 && kind(spent).is_some()).collect();
    rank0.sort_by(|a, b| a.ts.total_cmp(&b.ts));
    let runs = rank0.chunk_by(|a, b| (kind(a) == Some(UPDATE)) == (kind(b) == Some(UPDATE)));
    let updates = runs.filter(|run| kind(run[0]) == Some(UPDATE));
    let ends: Vec<f64> = updates.map(|run| run[run.len() - 1]).map(|last| last.ts + last.dur).collect();
    let from = ends.len().checked_sub(STEPS + 1).map_or(begin, |i| ends[i]);
    (from < end).then_some((from, end))
}

/// Time that was spent on each kind.
#[derive(Default)]
struct TimeByKind([f64; KINDS.len()]);

impl TimeByKind {
    fn add(&mut self, kind: usize, time: f64) {
        self.0[kind] += time;
    }

    fn sentence(&self, all: f64) -> String {
        let computing = self.0.iter().sum::<f64>() - self.0[MESSAGES];
        let [computing, messages] = [computing, self.0[MESSAGES]].map(|time| time / all);
        let idle = (1.0 - computing - messages).max(0.0);
        let percent = |fraction: f64| number::percent((1e3 * fraction).round() / 1e3);
        format!(
            "Of the ranks' time, {} compute, {} communication, {} idle",
            percent(computing),
            percent(messages),
            percent(idle)
        )
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn trace(events: &[Value]) -> TraceFile {
        serde_json::from_value(json!({ "traceEvents": events, "displayTimeUnit": "ms" })).unwrap()
    }

    fn span(rank: usize, cat: &str, name: &str, ts: f64, dur: f64) -> Value {
        json!({ "ph": "X", "name": name, "cat": cat, "pid": 0, "tid": rank, "ts": ts, "dur": dur, "args": {} })
    }

    /// Of four steps the last two, and of their 20 ms on each of two ranks what was spent on what.
    #[test]
    fn the_last_steps_are_shown_with_what_their_time_went_to() {
        let mut events = Vec::new();
        for step in 0..4 {
            let begin = 10_000.0 * f64::from(step);
            let spans = [
                ("compute", "F0", 0.0, 2_000.0),
                ("compute", "B0", 2_000.0, 4_000.0),
                ("wait", "wait", 6_000.0, 2_000.0),
            ];
            let more = [("all-reduce", "all-reduce", 8_000.0, 1_000.0), ("step", "step", 9_000.0, 1_000.0)];
            for (cat, name, at, dur) in spans.into_iter().chain(more) {
                events.push(span(0, cat, name, begin + at, dur));
            }
            events.push(span(1, "compute", "F0", begin, 10_000.0));
        }
        let timeline = timeline(&trace(&events)).unwrap();
        assert_eq!(timeline.title, "Of the ranks' time, 85 % compute, 5 % communication, 10 % idle");
        assert_eq!(timeline.rows.iter().map(|row| row.spans.len()).collect::<Vec<_>>(), [8, 2]);
        let ends = |row: &TimelineRow| (row.spans[0].start, row.spans[row.spans.len() - 1].end);
        assert_eq!((ends(&timeline.rows[0]), ends(&timeline.rows[1])), ((0.0, 20.0), (0.0, 20.0)));
    }

    #[test]
    fn a_trace_of_nothing_is_no_timeline() {
        assert!(timeline(&trace(&[])).is_none());
        assert!(timeline(&trace(&[span(0, "compute", "F0", 5.0, 0.0)])).is_none());
    }
}
