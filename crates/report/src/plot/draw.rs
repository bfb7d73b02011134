//! A plot on a canvas: axes, guides, curves, and names at their ends.

use super::axis::Axes;
use super::{Curve, GuidePath, LineStyle, Markers, Plot, guides, names};
use crate::canvas::{Anchor, Canvas, width_of};
use crate::style::{self, fill, stroke};

/// Above the axes: the title, and what the vertical axis counts.
const TOP: f64 = 46.0;
/// Below them: ticks, and what the horizontal axis counts.
const BOTTOM: f64 = 44.0;
/// About the distance of two ticks of the horizontal axis, and of the vertical one.
const APART: (f64, f64) = (68.0, 42.0);

impl Plot {
    pub(crate) fn draw(&self, canvas: &mut Canvas, width: f64, height: f64) {
        let bottom = height - BOTTOM;
        let ys = self.ys();
        let y = self.y.placed_over(ys.into_iter(), bottom, TOP);
        let ticks = match self.y.ticks.is_empty() {
            true => y.ticks(((bottom - TOP) / APART.1) as usize),
            false => self.y.ticks.clone(),
        };
        let widest = ticks.iter().map(|tick| width_of(&tick.1)).fold(0.0, f64::max);
        let left = widest + 12.0;
        let right = width - names::names_width(&self.curves, width);
        let x = self.x.placed_over(self.xs().into_iter(), left, right);
        let axes = Axes { x, y };

        canvas.raw(&format!(
            "<g class=\"plot\" data-x=\"{}\" data-y=\"{}\">\n",
            x.data_attribute(),
            y.data_attribute()
        ));
        canvas.text_within("ink bold", (0.0, 14.0), Anchor::Start, &self.title, width / style::BOLD);
        canvas.text_within("quiet small", (0.0, 32.0), Anchor::Start, &self.y.caption(), width);
        for (value, tick) in &ticks {
            let Some(at) = y.within(*value) else { continue };
            canvas.line("grid", (left, at), (right, at));
            canvas.text("quiet", (left - 7.0, at + 4.0), Anchor::End, tick);
        }
        for at in y.minor_ticks().into_iter().filter_map(|value| y.within(value)) {
            canvas.line("grid", (left - 4.0, at), (left, at));
        }
        self.draw_x(canvas, &axes, height);
        let drawn: Vec<_> = {
            let lines = self.curves.iter().filter(|curve| curve.line != LineStyle::None);
            lines.flat_map(|curve| curve.runs(&axes)).collect()
        };
        guides::draw(canvas, &self.guides, &axes, &drawn);
        for curve in &self.curves {
            curve.draw(canvas, &axes);
        }
        names::draw(canvas, &self.curves, &axes, width);
        canvas.raw("</g>\n");
    }

    fn draw_x(&self, canvas: &mut Canvas, axes: &Axes, height: f64) {
        let (x, bottom) = (&axes.x, axes.y.from);
        let ticks = match self.x.ticks.is_empty() {
            true => x.ticks(((x.to - x.from) / APART.0) as usize),
            false => self.x.ticks.clone(),
        };
        canvas.line("axis", (x.from, bottom), (x.to, bottom));
        for at in x.minor_ticks().into_iter().filter_map(|value| x.within(value)) {
            canvas.line("grid", (at, bottom), (at, bottom + 4.0));
        }
        let places = ticks.iter().filter_map(|(value, tick)| x.within(*value).map(|at| (at, tick)));
        let places: Vec<(f64, &String)> = places.collect();
        for &(at, _) in &places {
            canvas.line("axis", (at, bottom), (at, bottom + 4.0));
        }
        // Where ticks were asked for whose numbers do not fit beside each other, every second one up to the last
        // has its number, or every third ...
        let numbered = |every: usize| places.iter().rev().step_by(every);
        let fits = |&every: &usize| {
            numbered(every).zip(numbered(every).skip(1)).all(|((right, after), (left, before))| {
                right - left >= (width_of(after) + width_of(before)) / 2.0 + 6.0
            })
        };
        let every = (1..).find(fits).expect("the last one alone fits");
        for (at, tick) in numbered(every) {
            canvas.text("quiet", (*at, bottom + 18.0), Anchor::Middle, tick);
        }
        let middle = (x.from + x.to) / 2.0;
        canvas.text("quiet small", (middle, height - 8.0), Anchor::Middle, &self.x.caption());
    }

    fn xs(&self) -> Vec<f64> {
        let curves = self.curves.iter().flat_map(|curve| curve.points.iter().map(|point| point.0));
        let guides = self.guides.iter().filter_map(|guide| match guide.path {
            GuidePath::Vertical(x) => Some(x),
            _ => None,
        });
        curves.chain(guides).collect()
    }

    fn ys(&self) -> Vec<f64> {
        let curves = self.curves.iter().flat_map(|curve| {
            let intervals = curve.intervals.iter().flat_map(|(low, high)| [*low, *high]);
            curve.points.iter().map(|point| point.1).chain(intervals)
        });
        let guides = self.guides.iter().filter_map(|guide| match guide.path {
            GuidePath::Horizontal(y) => Some(y),
            _ => None,
        });
        curves.chain(guides).collect()
    }
}

impl Curve {
    fn draw(&self, canvas: &mut Canvas, axes: &Axes) {
        let name = crate::canvas::escape(&self.name);
        canvas.raw(&format!("<g data-name=\"{name}\">\n"));
        let class = match self.line {
            LineStyle::Solid if self.style >= style::COUNT => "curve dashed",
            LineStyle::Solid => "curve",
            LineStyle::Dashed => "curve dashed",
            LineStyle::Faint => "curve faint",
            LineStyle::None => "",
        };
        let class = format!("{class} {}", stroke(self.style));
        let mut shown = Vec::new();
        for run in self.runs(axes) {
            match (self.line, &run[..]) {
                (LineStyle::None, _) => shown.extend(run),
                // Alone between two gaps, it would not be seen.
                (_, [single]) => {
                    canvas.circle(&fill(self.style), *single, 2.0);
                    shown.push(*single);
                }
                _ => {
                    canvas.polyline(&class, &run);
                    shown.extend(run);
                }
            }
        }
        for ((x, _), (low, high)) in self.points.iter().zip(&self.intervals) {
            let pixel = |y: f64| Some((axes.x.at(*x)?, axes.y.at(y)?));
            if let (Some(low), Some(high)) = (pixel(*low), pixel(*high)) {
                let class = format!("interval {}", stroke(self.style));
                canvas.line(&class, low, high);
                for (x, y) in [low, high] {
                    canvas.line(&class, (x - 3.0, y), (x + 3.0, y));
                }
            }
        }
        for at in shown {
            self.marker(canvas, at);
        }
        canvas.raw("</g>\n");
    }

    /// Places of the points between gaps, as many as can be told apart.
    fn runs(&self, axes: &Axes) -> Vec<Vec<(f64, f64)>> {
        let pixels = self.points.iter().map(|point| axes.at(*point)).collect::<Vec<_>>();
        let runs = pixels.split(|pixel| pixel.is_none()).filter(|run| !run.is_empty());
        runs.map(|run| decimate(run.iter().copied().flatten().collect())).collect()
    }

    fn marker(&self, canvas: &mut Canvas, (x, y): (f64, f64)) {
        let class = fill(self.style);
        match (self.markers, self.style % 4) {
            (Markers::None, _) => {}
            (Markers::Dots, _) => canvas.circle(&format!("dot {class}"), (x, y), 2.6),
            (Markers::Rings, _) => canvas.circle(&format!("ring {}", stroke(self.style)), (x, y), 6.5),
            (Markers::Shapes, 0) => canvas.circle(&class, (x, y), 3.6),
            (Markers::Shapes, 1) => canvas.rect(&class, (x - 3.2, y - 3.2), (6.4, 6.4), 1.0, ""),
            (Markers::Shapes, 2) => {
                canvas.polygon(&class, &[(x, y - 4.6), (x + 4.6, y), (x, y + 4.6), (x - 4.6, y)]);
            }
            (Markers::Shapes, _) => {
                canvas.polygon(&class, &[(x, y - 4.4), (x + 4.4, y + 3.4), (x - 4.4, y + 3.4)])
            }
        }
    }
}

/// Of many points in one column of pixels the first, the lowest, the highest and the last: what can be seen
/// of them.
fn decimate(run: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    let columns = run.last().map_or(0.0, |last| (last.0 - run[0].0).abs()).ceil() as usize + 1;
    if run.len() <= 3 * columns {
        return run;
    }
    let mut kept = Vec::new();
    for column in run.chunk_by(|a, b| a.0.floor() == b.0.floor()) {
        let by_height = |i: &usize, j: &usize| column[*i].1.total_cmp(&column[*j].1);
        let (lowest, highest) = ((0..column.len()).min_by(by_height), (0..column.len()).max_by(by_height));
        let mut indices =
            [Some(0), lowest, highest, Some(column.len() - 1)].map(|index| index.expect("not empty"));
        indices.sort_unstable();
        let mut last = None;
        for index in indices {
            if last != Some(index) {
                kept.push(column[index]);
            }
            last = Some(index);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Figure, PlotAxis};

    fn plot(curves: Vec<Curve>) -> Plot {
        Plot { curves, ..Plot::new("t", PlotAxis::linear("x"), PlotAxis::log("y")) }
    }

    fn svg(plot: Plot) -> String {
        Figure::new("").with(plot).svg()
    }

    /// What is not finite, or not above zero on a logarithmic axis, is a gap, and no word `NaN` is in the file.
    #[test]
    fn a_curve_has_gaps_where_it_has_no_values() {
        let values = [1.0, 2.0, f64::NAN, 3.0, -1.0, 4.0, 5.0, f64::INFINITY];
        let points = values.iter().enumerate().map(|(i, v)| (i as f64, *v)).collect();
        let drawn = svg(plot(vec![Curve::new("loss", 0, points)]));
        assert_eq!(drawn.matches("<polyline").count(), 2, "{drawn}");
        assert_eq!(drawn.matches("<circle").count(), 1, "the 3 stands alone: {drawn}");
        assert!(!drawn.contains("NaN") && !drawn.contains("inf"), "{drawn}");
    }

    #[test]
    fn nothing_to_draw_is_no_problem() {
        for points in [vec![], vec![(f64::NAN, 1.0)], vec![(1.0, f64::NEG_INFINITY)], vec![(1.0, 0.0)]] {
            let empty = plot(vec![
                Curve::new("none", 1, points.clone()).with_markers().with_intervals(vec![(1.0, f64::NAN)]),
            ]);
            assert!(empty.is_empty(), "{points:?}");
            let drawn = svg(empty);
            assert!(!drawn.contains("NaN") && !drawn.contains("inf"), "{drawn}");
        }
        assert!(!svg(plot(vec![])).contains("NaN"));
    }

    #[test]
    fn one_point_on_logarithmic_axes_is_drawn_with_marks_around_it() {
        let plot = Plot::new("t", PlotAxis::log("x"), PlotAxis::log("y"))
            .with(Curve::new("one", 0, vec![(64.0, 1040.0)]).with_markers());
        let drawn = svg(plot);
        assert!(drawn.contains("<circle") && drawn.contains(">50<") && drawn.contains(">1000<"), "{drawn}");
    }

    /// The largest batch of a study has its number, however many there are.
    #[test]
    fn ticks_that_are_too_many_for_their_numbers_have_every_second_one_up_to_the_last() {
        let numbers = |count: u32| {
            let batches = (1..=count).map(|power| f64::from(1 << power));
            let ticks = batches.clone().map(|batch| (batch, batch.to_string())).collect();
            let curve = Curve::new("one", 0, batches.map(|batch| (batch, 1.0 + 1.0 / batch)).collect());
            let drawn =
                svg(Plot::new("t", PlotAxis::log("x").with_ticks(ticks), PlotAxis::linear("y")).with(curve));
            let shown =
                (1..=count).map(|power| 1 << power).filter(|b| drawn.contains(&format!("\"middle\">{b}<")));
            shown.collect::<Vec<u32>>()
        };
        assert_eq!(numbers(4), [2, 4, 8, 16]);
        assert_eq!(numbers(14), [4, 16, 64, 256, 1024, 4096, 16384]);
    }

    /// Of a million points few are left, and among them the highest.
    #[test]
    fn a_picture_stays_small_whatever_is_drawn() {
        let mut points: Vec<(f64, f64)> =
            (0..1_000_000).map(|i| (f64::from(i), 1.0 + f64::from(i % 7))).collect();
        points[555_555].1 = 1000.0;
        let drawn = svg(plot(vec![Curve::new("many", 0, points)]));
        assert!(drawn.len() < 40_000, "{}", drawn.len());
        let line = drawn.lines().find(|line| line.starts_with("<polyline")).unwrap();
        let list = line.split("points=\"").nth(1).unwrap().trim_end_matches("\"/>");
        let highest = list.split(' ').map(|point| point.split(',').nth(1).unwrap().parse::<f64>().unwrap());
        let highest = highest.fold(f64::INFINITY, f64::min);
        assert!(highest < TOP + 20.0, "the peak is there: {highest}");
    }
}
