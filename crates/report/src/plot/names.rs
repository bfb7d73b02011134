//! Names of curves beside their ends: no legend to look up, and none over another.

use super::Curve;
use super::axis::Axes;
use crate::canvas::{Anchor, Canvas, width_of};
use crate::style::fill;

/// The least distance of two names.
const LINE_HEIGHT: f64 = 15.0;
/// Between the axes and the names.
const GAP: f64 = 9.0;
/// Of a picture's width names take at most this fraction; longer ones are cut.
const MAX_FRACTION: f64 = 0.34;

/// What the names need beside the axes.
pub(super) fn names_width(curves: &[Curve], width: f64) -> f64 {
    let widest = curves.iter().map(|curve| width_of(&curve.name)).fold(0.0, f64::max);
    if widest == 0.0 { 14.0 } else { (widest + GAP + 4.0).min(MAX_FRACTION * width) }
}

/// Writes them, each at the height of its curve's end or as near to it as the others let it.
pub(super) fn draw(canvas: &mut Canvas, curves: &[Curve], axes: &Axes, width: f64) {
    let end = |curve: &Curve| {
        let pixel = |point: &(f64, f64)| Some((axes.x.at(point.0)?, axes.y.at(point.1)?));
        curve.points.iter().rev().find_map(pixel)
    };
    let named = curves.iter().filter(|curve| !curve.name.is_empty());
    let mut names: Vec<((f64, f64), &Curve)> = named.filter_map(|curve| Some((end(curve)?, curve))).collect();
    names.sort_by(|a, b| a.0.1.total_cmp(&b.0.1));
    let wanted: Vec<f64> = names.iter().map(|(end, _)| end.1).collect();
    let heights = apart(&wanted, axes.y.to, axes.y.from);
    for ((end, curve), height) in names.iter().zip(heights) {
        let at = axes.x.to + GAP;
        // A curve that ends early, or whose name had to give way, is led to it.
        if axes.x.to - end.0 > 24.0 || (height - end.1).abs() > LINE_HEIGHT {
            canvas.line("leader faint", (end.0 + 5.0, end.1), (at - 2.0, height));
        }
        canvas.text_within(&fill(curve.style), (at, height + 4.0), Anchor::Start, &curve.name, width - at);
    }
}

/// Heights near those that are wanted (ascending), at least a line apart where there is room for that, and
/// between two others.
fn apart(wanted: &[f64], top: f64, bottom: f64) -> Vec<f64> {
    let line = LINE_HEIGHT.min((bottom - top) / wanted.len().saturating_sub(1).max(1) as f64);
    let mut heights = Vec::with_capacity(wanted.len());
    let mut least = top;
    for height in wanted {
        let height = height.max(least);
        heights.push(height);
        least = height + line;
    }
    let mut most = bottom;
    for height in heights.iter_mut().rev() {
        *height = height.min(most);
        most = *height - line;
    }
    heights
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Figure, Plot, PlotAxis};

    #[test]
    fn names_keep_their_distance_and_stay_inside() {
        assert_eq!(apart(&[10.0, 11.0, 90.0], 0.0, 100.0), [10.0, 25.0, 90.0]);
        assert_eq!(apart(&[95.0, 99.0, 100.0], 0.0, 100.0), [70.0, 85.0, 100.0]);
        assert_eq!(apart(&[], 0.0, 100.0), [0.0; 0]);
        let many = apart(&[50.0; 30], 0.0, 100.0);
        assert!(many.iter().all(|height| (-0.1..=100.1).contains(height)), "{many:?}");
    }

    #[test]
    fn each_curve_is_named_once_and_its_name_is_text() {
        let curve = |name: &str, style, y: f64| Curve::new(name, style, vec![(1.0, y), (2.0, y), (4.0, y)]);
        let plot = Plot::new("a < b & c", PlotAxis::log("x"), PlotAxis::log("y"))
            .with(curve("first", 0, 1.0))
            .with(curve("<second>", 1, 1.01))
            .with(curve("third", 2, 50.0));
        let svg = Figure::new("t").with(plot).svg();
        assert!(svg.contains("a &lt; b &amp; c") && !svg.contains("a < b") && !svg.contains("<second>"));
        let height_of = |name: &str| -> f64 {
            let line = svg.lines().find(|line| line.ends_with(&format!(">{name}</text>"))).unwrap();
            line.split(" y=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap()
        };
        assert!((height_of("first") - height_of("&lt;second&gt;")).abs() >= LINE_HEIGHT - 0.2);
        assert!(height_of("third") < height_of("&lt;second&gt;"), "what is more stands higher");
    }
}
