//! Guides and their names: each name stands where it covers no other name and no line, as far as there is such
//! a position.

use super::axis::Axes;
use super::{Guide, GuidePath};
use crate::canvas::{Anchor, Canvas, width_of};

type PixelPoint = (f64, f64);

/// Text of the class `small` is so many times as wide as other text.
const SMALL: f64 = 11.0 / 12.0;
/// Above and below the line that a word stands on, in pixels.
const RISE: f64 = 9.0;
const FALL: f64 = 3.0;
/// Between a guide and a word, to the side, above and below.
const ASIDE: f64 = 5.0;
const ABOVE: f64 = -6.0;
const BELOW: f64 = 14.0;
/// Where along a guide its name may stand, best first.
const FRACTIONS: [f64; 11] = [1.0, 0.0, 0.75, 0.5, 0.25, 0.9, 0.8, 0.6, 0.4, 0.2, 0.1];

/// Draws the guides, and their names where the lines in `drawn`, of the curves, leave room.
pub(super) fn draw(canvas: &mut Canvas, guides: &[Guide], axes: &Axes, drawn: &[Vec<PixelPoint>]) {
    let placed: Vec<(&Guide, (PixelPoint, PixelPoint))> =
        guides.iter().filter_map(|guide| Some((guide, guide.ends(axes)?))).collect();
    let mut lines: Vec<(PixelPoint, PixelPoint)> = placed.iter().map(|(_, ends)| *ends).collect();
    for run in drawn {
        lines.extend(run.windows(2).map(|pair| (pair[0], pair[1])));
    }
    placed.iter().for_each(|(_, (from, to))| canvas.line("guide", *from, *to));
    let named = placed.into_iter().filter(|(guide, _)| !guide.name.is_empty());
    let mut named: Vec<(&Guide, Vec<LabelBox>)> =
        named.map(|(guide, (from, to))| (guide, candidates(&guide.name, from, to))).collect();
    // Those that have few good positions choose first.
    let is_good = |label: &&LabelBox| label.cost(axes, &[], &lines) == 0;
    named.sort_by_key(|(_, candidates)| candidates.iter().filter(is_good).count());
    let mut placed_labels: Vec<LabelBox> = Vec::new();
    for (guide, candidates) in named {
        let best = candidates.into_iter().min_by_key(|label| label.cost(axes, &placed_labels, &lines));
        let label = best.expect("there are some");
        canvas.text("quiet small", label.at, label.anchor, &guide.name);
        placed_labels.push(label);
    }
}

impl Guide {
    /// Where it begins and ends between the axes; none where it lies outside.
    fn ends(&self, axes: &Axes) -> Option<(PixelPoint, PixelPoint)> {
        let (x, y) = (&axes.x, &axes.y);
        match self.path {
            GuidePath::Horizontal(value) => y.within(value).map(|at| ((x.from, at), (x.to, at))),
            GuidePath::Vertical(value) => x.within(value).map(|at| ((at, y.from), (at, y.to))),
            GuidePath::Segment(from, to) => clip(axes.at(from)?, axes.at(to)?, axes),
        }
    }
}

/// A name at a position that it could have.
struct LabelBox {
    at: PixelPoint,
    anchor: Anchor,
    width: f64,
}

/// Beside several points of a guide, above and below it, to either side.
fn candidates(name: &str, from: PixelPoint, to: PixelPoint) -> Vec<LabelBox> {
    let width = SMALL * width_of(name);
    let mut candidates = Vec::new();
    for fraction in FRACTIONS {
        let (x, y) = (from.0 + fraction * (to.0 - from.0), from.1 + fraction * (to.1 - from.1));
        for below in [ABOVE, BELOW] {
            let y = y + below;
            candidates.push(LabelBox { at: (x - ASIDE, y), anchor: Anchor::End, width });
            candidates.push(LabelBox { at: (x + ASIDE, y), anchor: Anchor::Start, width });
        }
    }
    candidates
}

impl LabelBox {
    /// Left, right, top and bottom.
    fn bounds(&self) -> [f64; 4] {
        let left = match self.anchor {
            Anchor::Start => self.at.0,
            Anchor::Middle => self.at.0 - self.width / 2.0,
            Anchor::End => self.at.0 - self.width,
        };
        [left, left + self.width, self.at.1 - RISE, self.at.1 + FALL]
    }

    /// What is wrong with the name here: worst is what is cut off or cannot be read, then what lies over a line.
    fn cost(&self, axes: &Axes, placed_labels: &[LabelBox], lines: &[(PixelPoint, PixelPoint)]) -> usize {
        let [left, right, top, bottom] = self.bounds();
        let (x, y) = (&axes.x, &axes.y);
        let outside = left < x.from || right > x.to || top < y.to || bottom > y.from;
        let covered = placed_labels.iter().filter(|other| {
            let [a, b, c, d] = other.bounds();
            left < b + ASIDE && a - ASIDE < right && top < d && c < bottom
        });
        // Pixels, so that a curve counts the same in a few long pieces and in many short ones.
        let crossed = lines.iter().map(|(from, to)| length_within(*from, *to, [left, right, top, bottom]));
        1000 * usize::from(outside) + 1000 * covered.count() + (crossed.sum::<f64>().ceil() as usize).min(500)
    }
}

/// How much of a straight line lies in a rectangle (left, right, top, bottom).
fn length_within(from: PixelPoint, to: PixelPoint, rectangle: [f64; 4]) -> f64 {
    let fraction = within(from, to, rectangle).map_or(0.0, |(begin, end)| (end - begin).max(0.0));
    fraction * (to.0 - from.0).hypot(to.1 - from.1)
}

/// The fractions of a straight line between which it lies in a rectangle (Liang and Barsky).
fn within(from: PixelPoint, to: PixelPoint, [left, right, top, bottom]: [f64; 4]) -> Option<(f64, f64)> {
    let (dx, dy) = (to.0 - from.0, to.1 - from.1);
    let bounds = [(-dx, from.0 - left), (dx, right - from.0), (-dy, from.1 - top), (dy, bottom - from.1)];
    let (mut begin, mut end) = (0f64, 1f64);
    for (p, q) in bounds {
        match p {
            0.0 if q < 0.0 => return None,
            0.0 => {}
            p if p < 0.0 => begin = begin.max(q / p),
            p => end = end.min(q / p),
        }
    }
    Some((begin, end))
}

/// What of a straight line lies between the axes.
fn clip(from: PixelPoint, to: PixelPoint, axes: &Axes) -> Option<(PixelPoint, PixelPoint)> {
    let (begin, end) = within(from, to, [axes.x.from, axes.x.to, axes.y.to, axes.y.from])?;
    let at = |t: f64| (from.0 + t * (to.0 - from.0), from.1 + t * (to.1 - from.1));
    (begin < end).then(|| (at(begin), at(end)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Curve, Figure, Plot, PlotAxis};

    #[test]
    fn guides_end_where_the_axes_end() {
        let axes = Axes {
            x: PlotAxis::linear("").placed_over([0.0, 1.0].into_iter(), 0.0, 100.0),
            y: PlotAxis::linear("").placed_over([0.0, 1.0].into_iter(), 100.0, 0.0),
        };
        let (from, to) = clip((-100.0, 50.0), (300.0, 50.0), &axes).unwrap();
        assert_eq!((from, to), ((0.0, 50.0), (100.0, 50.0)));
        assert!(clip((-50.0, -10.0), (150.0, -10.0), &axes).is_none());
        let plot = Plot::new("t", PlotAxis::log("x"), PlotAxis::log("y"))
            .with(Curve::new("a", 0, vec![(1.0, 1.0), (100.0, 10.0)]))
            .with(Guide::line("linear scaling", (1.0, 10.0), (1e6, 1e-5)))
            .with(Guide::horizontal("goal", 4.0))
            .with(Guide::vertical("critical batch", 80.0));
        let drawn = Figure::new("").with(plot).svg();
        assert_eq!(drawn.matches("class=\"guide\"").count(), 3, "{drawn}");
    }

    /// The first picture of a study: both guides end where the lower curve does, which is where both names
    /// would be.
    #[test]
    fn names_of_guides_cover_neither_each_other_nor_a_curve() {
        let axes = Axes {
            x: PlotAxis::log("").placed_over([4.0, 4096.0].into_iter(), 40.0, 370.0),
            y: PlotAxis::log("").placed_over([112.0, 10_192.0].into_iter(), 246.0, 46.0),
        };
        let pixel = |point: PixelPoint| axes.at(point).unwrap();
        let dense = [
            (4.0, 10_192.0),
            (16.0, 2048.0),
            (64.0, 880.0),
            (256.0, 224.0),
            (1024.0, 160.0),
            (4096.0, 112.0),
        ];
        let sparse = [(16.0, 8816.0), (64.0, 2592.0), (256.0, 960.0), (1024.0, 880.0), (4096.0, 480.0)];
        let drawn = [dense.map(pixel).to_vec(), sparse.map(pixel).to_vec()];
        let guides = [
            Guide::line("linear scaling", (4.0, 10_192.0), (4096.0, 10.0)),
            Guide::line("maximal data parallelism", (4.0, 112.0), (4096.0, 112.0)),
        ];
        let mut canvas = Canvas::default();
        draw(&mut canvas, &guides, &axes, &drawn);
        let svg = canvas.finish();
        let text = |name: &str| -> LabelBox {
            let line = svg.lines().find(|line| line.contains(&format!(">{name}</text>"))).unwrap();
            let number = |key: &str| -> f64 {
                let from = line.split(&format!(" {key}=\"")).nth(1).unwrap();
                from.split('"').next().unwrap().parse().unwrap()
            };
            let anchor = if line.contains("anchor=\"end\"") { Anchor::End } else { Anchor::Start };
            LabelBox { at: (number("x"), number("y")), anchor, width: SMALL * width_of(name) }
        };
        let (linear, level) = (text("linear scaling"), text("maximal data parallelism"));
        let mut lines: Vec<(PixelPoint, PixelPoint)> =
            guides.iter().map(|guide| guide.ends(&axes).unwrap()).collect();
        lines.extend(drawn.iter().flat_map(|run| run.windows(2).map(|pair| (pair[0], pair[1]))));
        assert_eq!(linear.cost(&axes, std::slice::from_ref(&level), &lines), 0, "{svg}");
        assert_eq!(level.cost(&axes, std::slice::from_ref(&linear), &lines), 0, "{svg}");
    }
}
