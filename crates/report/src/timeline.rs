//! What happened when, a row for each rank: gaps are time in which nothing did.

use crate::PlotAxis;
use crate::canvas::{Anchor, Canvas, width_of};
use crate::number;
use crate::style::{BOLD, fill};

/// Rows of spans over one axis of time.
#[derive(Debug, Clone, PartialEq)]
pub struct TimelineChart {
    pub title: String,
    /// In what time is counted.
    pub unit: String,
    /// What spans can be, in the order of their colours: `kind` of a span is the index here.
    pub kinds: Vec<String>,
    /// From above.
    pub rows: Vec<TimelineRow>,
}

/// What one of them did.
#[derive(Debug, Clone, PartialEq)]
pub struct TimelineRow {
    /// Written before it.
    pub name: String,
    /// In any order; later ones lie above earlier ones.
    pub spans: Vec<TimelineSpan>,
}

/// Time that was spent on something.
#[derive(Debug, Clone, PartialEq)]
pub struct TimelineSpan {
    pub start: f64,
    pub end: f64,
    /// An index into [`TimelineChart::kinds`].
    pub kind: usize,
    /// Written into it where there is room, and shown where a pointer rests on it.
    pub text: String,
}

const TOP: f64 = 46.0;
const ROW: f64 = 26.0;
const BOTTOM: f64 = 40.0;
/// Narrower spans of one kind that follow each other are drawn as one.
const NARROW: f64 = 0.7;

impl TimelineChart {
    pub fn new(title: impl Into<String>, unit: impl Into<String>, kinds: &[&str]) -> TimelineChart {
        let kinds = kinds.iter().map(|kind| (*kind).to_owned()).collect();
        TimelineChart { title: title.into(), unit: unit.into(), kinds, rows: Vec::new() }
    }

    pub(crate) fn height(&self) -> f64 {
        TOP + self.rows.len() as f64 * ROW + BOTTOM
    }

    pub(crate) fn draw(&self, canvas: &mut Canvas, width: f64) {
        canvas.text_within("ink bold", (0.0, 14.0), Anchor::Start, &self.title, width / BOLD);
        self.legend(canvas);
        let spans = || self.rows.iter().flat_map(|row| &row.spans).filter(|span| is_drawn(span));
        let from = spans().map(|span| span.start).fold(f64::INFINITY, f64::min);
        let to = spans().map(|span| span.end).fold(f64::NEG_INFINITY, f64::max);
        let (from, to) = if from < to { (from, to) } else { (0.0, 1.0) };
        let names = self.rows.iter().map(|row| width_of(&row.name)).fold(0.0, f64::max).min(0.2 * width);
        let (left, right) = (names + 10.0, width - 8.0);
        let at = |time: f64| left + (time - from) / (to - from) * (right - left);
        let bottom = TOP + self.rows.len() as f64 * ROW;
        for (i, row) in self.rows.iter().enumerate() {
            let top = TOP + i as f64 * ROW;
            canvas.text_within("ink small", (left - 8.0, top + 15.0), Anchor::End, &row.name, names);
            canvas.rect("rest", (left, top), (right - left, ROW - 5.0), 0.5, "");
            let drawn: Vec<&TimelineSpan> = row.spans.iter().filter(|span| is_drawn(span)).collect();
            let is_narrow = |span: &TimelineSpan| at(span.end) - at(span.start) < NARROW;
            let one = |a: &&TimelineSpan, b: &&TimelineSpan| {
                a.kind == b.kind && is_narrow(a) && is_narrow(b) && at(b.start) - at(a.end) < NARROW
            };
            for group in drawn.chunk_by(one) {
                let (first, last) = (group[0], group[group.len() - 1]);
                let (start, end) = (at(first.start), at(last.end));
                let tip = match group.len() {
                    1 => format!("{}: {} {}", first.text, number::short(first.end - first.start), self.unit),
                    n => format!("{n} x {}", self.kinds.get(first.kind).map_or("", String::as_str)),
                };
                let size = ((end - start - 0.4).max(0.4), ROW - 5.0);
                canvas.rect(&fill(first.kind), (start, top), size, 1.0, &tip);
                if group.len() == 1 && width_of(&first.text) + 4.0 <= end - start {
                    canvas.text(
                        "inverse small",
                        ((start + end) / 2.0, top + 15.0),
                        Anchor::Middle,
                        &first.text,
                    );
                }
            }
        }
        self.time(canvas, (left, right), (0.0, to - from), bottom);
    }

    /// The axis, from zero.
    fn time(&self, canvas: &mut Canvas, pixels: (f64, f64), times: (f64, f64), bottom: f64) {
        let axis = PlotAxis::linear("").placed_exactly(times, pixels);
        for (value, tick) in axis.ticks(8) {
            let Some(at) = axis.within(value) else { continue };
            canvas.line("axis", (at, bottom), (at, bottom + 4.0));
            canvas.text("quiet small", (at, bottom + 16.0), Anchor::Middle, &tick);
        }
        let middle = (pixels.0 + pixels.1) / 2.0;
        canvas.text("quiet small", (middle, bottom + 32.0), Anchor::Middle, &self.unit);
    }

    fn legend(&self, canvas: &mut Canvas) {
        let mut left = 0.0;
        let occurs = |kind: usize| self.rows.iter().flat_map(|row| &row.spans).any(|span| span.kind == kind);
        for (kind, name) in self.kinds.iter().enumerate().filter(|(kind, _)| occurs(*kind)) {
            canvas.rect(&fill(kind), (left, 24.0), (14.0, 10.0), 1.0, "");
            canvas.text("quiet small", (left + 19.0, 33.0), Anchor::Start, name);
            left += 19.0 + width_of(name) + 16.0;
        }
    }
}

fn is_drawn(span: &TimelineSpan) -> bool {
    span.start.is_finite() && span.end.is_finite() && span.end >= span.start
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Figure;

    fn span(start: f64, end: f64, kind: usize) -> TimelineSpan {
        TimelineSpan { start, end, kind, text: format!("<{kind}>") }
    }

    #[test]
    fn a_million_short_spans_are_few_shapes() {
        let mut timeline = TimelineChart::new("t", "ms", &["forward", "backward"]);
        let spans =
            (0..200_000).map(|i| span(f64::from(i), f64::from(i) + 0.9, (i / 50_000) as usize % 2)).collect();
        timeline.rows.push(TimelineRow { name: "rank 0".into(), spans });
        let svg = Figure::new("").with(timeline).svg();
        assert!(svg.len() < 20_000, "{}", svg.len());
        assert_eq!(svg.matches("50000 x forward").count(), 2);
    }

    #[test]
    fn spans_lie_where_they_were_and_their_words_are_text() {
        let mut timeline = TimelineChart::new("t", "ms", &["forward", "backward"]);
        timeline.rows.push(TimelineRow {
            name: "rank 0".into(),
            spans: vec![span(10.0, 20.0, 0), span(20.0, 40.0, 1)],
        });
        timeline.rows.push(TimelineRow { name: "rank 1".into(), spans: vec![span(f64::NAN, 20.0, 0)] });
        let svg = Figure::new("").with(timeline).svg();
        assert!(
            svg.contains("&lt;0&gt;: 10 ms") && svg.contains("&lt;1&gt;: 20 ms") && !svg.contains("NaN"),
            "{svg}"
        );
    }
}
