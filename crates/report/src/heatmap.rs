//! Shades in rows and columns: many fractions at a glance, such as the density of each parameter of each block.

use crate::canvas::{Anchor, Canvas, width_of};
use crate::style::{BOLD, fill};

/// A table of shades.
#[derive(Debug, Clone, PartialEq)]
pub struct Heatmap {
    pub title: String,
    /// What is counted from left to right.
    pub x_label: String,
    /// Names of the columns.
    pub columns: Vec<String>,
    /// From above: a name, and a cell for each column, if there is one.
    pub rows: Vec<(String, Vec<Option<HeatmapCell>>)>,
    /// The value without a shade, and that of the full one.
    pub range: (f64, f64),
}

#[derive(Debug, Clone, PartialEq)]
pub struct HeatmapCell {
    /// How dark it is.
    pub value: f64,
    /// Written into it where there is room, and shown where a pointer rests on it.
    pub text: String,
}

const TOP: f64 = 26.0;
const CELL: f64 = 24.0;
const BOTTOM: f64 = 38.0;

impl Heatmap {
    /// No rows yet; shades go from 0 to 1.
    pub fn new(title: impl Into<String>) -> Heatmap {
        let (x_label, columns, rows) = Default::default();
        Heatmap { title: title.into(), x_label, columns, rows, range: (0.0, 1.0) }
    }

    /// With a row more: for each column a value with its text, or nothing.
    pub fn row(&mut self, name: impl Into<String>, cells: Vec<Option<(f64, String)>>) {
        let cell = |(value, text)| HeatmapCell { value, text };
        self.rows.push((name.into(), cells.into_iter().map(|value| value.map(cell)).collect()));
    }

    pub(crate) fn height(&self) -> f64 {
        TOP + self.rows.len() as f64 * CELL + BOTTOM
    }

    pub(crate) fn draw(&self, canvas: &mut Canvas, width: f64) {
        canvas.text_within("ink bold", (0.0, 14.0), Anchor::Start, &self.title, width / BOLD);
        let names = self.rows.iter().map(|row| width_of(&row.0)).fold(0.0, f64::max).min(0.34 * width);
        let columns = self.rows.iter().map(|row| row.1.len()).chain([self.columns.len()]).max().unwrap_or(0);
        let left = names + 10.0;
        // A cell that is much wider than high is a bar.
        let cell = ((width - left) / columns.max(1) as f64).min(3.0 * CELL);
        let gap = if cell > 6.0 { 1.5 } else { 0.0 };
        let bottom = TOP + self.rows.len() as f64 * CELL;
        for (i, (name, cells)) in self.rows.iter().enumerate() {
            let top = TOP + i as f64 * CELL;
            canvas.text_within("ink small", (left - 8.0, top + 16.0), Anchor::End, name, names);
            for (j, found) in cells.iter().enumerate() {
                let Some(HeatmapCell { value, text }) = found else { continue };
                let corner = (left + j as f64 * cell, top);
                let size = (cell - gap, CELL - 1.5);
                let shade = self.shade(*value);
                canvas.rect("rest", corner, size, 1.0, "");
                let column = self.columns.get(j).map_or("", String::as_str);
                canvas.rect(&fill(0), corner, size, shade, &format!("{name} {column}: {text}"));
                if width_of(text) + 2.0 <= cell {
                    let class = if shade > 0.7 { "inverse small" } else { "ink small" };
                    canvas.text(class, (corner.0 + size.0 / 2.0, top + 16.0), Anchor::Middle, text);
                }
            }
        }
        let mut free = f64::NEG_INFINITY;
        for (j, column) in self.columns.iter().enumerate() {
            let (at, half) = (left + (j as f64 + 0.5) * cell - gap / 2.0, width_of(column) / 2.0);
            if at - half >= free {
                canvas.text("quiet small", (at, bottom + 13.0), Anchor::Middle, column);
                free = at + half + 6.0;
            }
        }
        let middle = left + columns as f64 * cell / 2.0;
        canvas.text("quiet small", (middle, bottom + 29.0), Anchor::Middle, &self.x_label);
    }

    /// From hardly anything to all of the colour.
    fn shade(&self, value: f64) -> f64 {
        let (low, high) = self.range;
        let fraction = if high > low { (value - low) / (high - low) } else { 1.0 };
        if fraction.is_finite() { 0.04 + 0.95 * fraction.clamp(0.0, 1.0) } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Figure;

    #[test]
    fn more_is_darker_and_what_is_not_there_is_left_out() {
        let mut heatmap = Heatmap::new("kept");
        heatmap.columns = vec!["0".into(), "1".into()];
        heatmap.row("attn", vec![Some((0.1, "10 %".into())), Some((0.9, "90 %".into()))]);
        heatmap.row("<mlp>", vec![None, Some((f64::NAN, "–".into()))]);
        assert!(
            heatmap.shade(0.9) > heatmap.shade(0.1)
                && heatmap.shade(7.0) <= 1.0
                && heatmap.shade(-7.0) >= 0.0
        );
        let svg = Figure::new("").with(heatmap).svg();
        assert_eq!(svg.matches("class=\"rest\"").count(), 3);
        assert!(svg.contains("attn 1: 90 %") && svg.contains("&lt;mlp&gt;") && !svg.contains("NaN"), "{svg}");
    }
}
