//! Bars from the left, a row each: lengths that are compared, with their names and numbers beside them.

use crate::canvas::{Anchor, Canvas, width_of};
use crate::style::{BOLD, fill, stroke};

#[derive(Debug, Clone, PartialEq)]
pub struct Bars {
    pub title: String,
    /// What the bars of a row are, in their order; one alone needs no name. The first of several is drawn as
    /// an outline: what was expected, beside what came.
    pub series: Vec<String>,
    /// From above.
    pub rows: Vec<BarRow>,
    /// The value of a bar as long as there is room; none: the largest there is.
    pub full: Option<f64>,
}

/// Bars under one name.
#[derive(Debug, Clone, PartialEq)]
pub struct BarRow {
    /// Written before them.
    pub name: String,
    /// One for each series.
    pub bars: Vec<Bar>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    /// Its length; not below zero. What is not finite is not drawn.
    pub value: f64,
    /// Written behind it.
    pub text: String,
}

const TOP: f64 = 26.0;
const LEGEND: f64 = 20.0;
const THICK: f64 = 10.0;
/// Between the bars of a row, and between rows.
const GAPS: (f64, f64) = (3.0, 8.0);

impl Bars {
    pub fn new(title: impl Into<String>, series: &[&str]) -> Bars {
        let series = series.iter().map(|name| (*name).to_owned()).collect();
        Bars { title: title.into(), series, rows: Vec::new(), full: None }
    }

    /// Adds a row: values with what is written behind each.
    pub fn row(&mut self, name: impl Into<String>, bars: impl IntoIterator<Item = (f64, String)>) {
        let bars = bars.into_iter().map(|(value, text)| Bar { value, text }).collect();
        self.rows.push(BarRow { name: name.into(), bars });
    }

    fn top(&self) -> f64 {
        if self.series.len() > 1 { TOP + LEGEND } else { TOP }
    }

    fn row_height(&self) -> f64 {
        let bars = self.series.len().max(1) as f64;
        bars * THICK + (bars - 1.0) * GAPS.0 + GAPS.1
    }

    pub(crate) fn height(&self) -> f64 {
        self.top() + self.rows.len() as f64 * self.row_height() + 4.0
    }

    pub(crate) fn draw(&self, canvas: &mut Canvas, width: f64) {
        canvas.text_within("ink bold", (0.0, 14.0), Anchor::Start, &self.title, width / BOLD);
        if self.series.len() > 1 {
            self.legend(canvas);
        }
        let names = self.rows.iter().map(|row| width_of(&row.name)).fold(0.0, f64::max).min(0.42 * width);
        let bars = || self.rows.iter().flat_map(|row| &row.bars).filter(|bar| bar.value.is_finite());
        let texts = bars().map(|bar| width_of(&bar.text)).fold(0.0, f64::max);
        let full = self.full.unwrap_or_else(|| bars().map(|bar| bar.value).fold(0.0, f64::max));
        let left = names + 10.0;
        let full_width = (width - left - texts - 8.0).max(20.0);
        for (i, row) in self.rows.iter().enumerate() {
            let top = self.top() + i as f64 * self.row_height();
            let middle = top + (self.row_height() - GAPS.1) / 2.0;
            canvas.text_within("ink small", (left - 8.0, middle + 4.0), Anchor::End, &row.name, names);
            for (series, bar) in row.bars.iter().enumerate() {
                if !bar.value.is_finite() {
                    continue;
                }
                let top = top + series as f64 * (THICK + GAPS.0);
                let fraction = if full > 0.0 { (bar.value / full).clamp(0.0, 1.0) } else { 0.0 };
                let tip = format!("{}: {}", row.name, bar.text);
                canvas.rect(
                    &self.class(series),
                    (left, top),
                    ((fraction * full_width).max(1.0), THICK),
                    1.0,
                    &tip,
                );
                let behind = left + fraction * full_width + 6.0;
                canvas.text("quiet small", (behind, top + THICK - 1.0), Anchor::Start, &bar.text);
            }
        }
    }

    fn class(&self, series: usize) -> String {
        match (self.series.len(), series) {
            (0 | 1, _) => fill(0),
            (_, 0) => format!("planned {}", stroke(0)),
            (_, series) => fill(series - 1),
        }
    }

    fn legend(&self, canvas: &mut Canvas) {
        let mut at = 0.0;
        for (i, name) in self.series.iter().enumerate() {
            canvas.rect(&self.class(i), (at, TOP - 1.0), (14.0, THICK - 1.0), 1.0, "");
            canvas.text("quiet small", (at + 19.0, TOP + 8.0), Anchor::Start, name);
            at += 19.0 + width_of(name) + 16.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Figure;

    #[test]
    fn lengths_are_in_proportion_and_what_is_unknown_is_left_out() {
        let mut bars = Bars::new("memory", &["predicted", "measured"]);
        bars.row("weights", [(50.0, "50 MB".into()), (100.0, "100 MB".into())]);
        bars.row("<other>", [(f64::NAN, String::new()), (0.0, "0".into())]);
        let svg = Figure::new("").with(bars).svg();
        let width = |tip: &str| -> f64 {
            let line = svg.lines().find(|line| line.contains(&format!("<title>{tip}</title>"))).unwrap();
            line.split(" width=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap()
        };
        assert!((width("weights: 100 MB") - 2.0 * width("weights: 50 MB")).abs() < 0.3);
        assert_eq!(width("&lt;other&gt;: 0"), 1.0, "a bar of nothing is seen to be there");
        assert!(!svg.contains("NaN"));
    }
}
