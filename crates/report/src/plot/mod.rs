//! Curves over a pair of axes: what is drawn, as data.

mod axis;
mod draw;
mod guides;
mod names;

pub use axis::{AxisScale, PlotAxis};

/// What lies over one pair of axes.
#[derive(Debug, Clone, PartialEq)]
pub struct Plot {
    pub title: String,
    pub x: PlotAxis,
    pub y: PlotAxis,
    /// Drawn under the curves.
    pub guides: Vec<Guide>,
    /// Later ones lie above earlier ones.
    pub curves: Vec<Curve>,
    /// Whether it takes a row by itself: the one that says most.
    pub wide: bool,
}

/// Points, and how they are drawn. Those that are not finite, or not above zero on a logarithmic axis, are
/// gaps.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    /// Written beside its last point; empty: it has none.
    pub name: String,
    /// Its colour and the shape of its markers, by number: what means the same looks the same in all panels.
    pub style: usize,
    /// Where a line joins them, by ascending x.
    pub points: Vec<(f64, f64)>,
    /// From where to where each point may lie, in the order of the points; empty: nothing is drawn.
    pub intervals: Vec<(f64, f64)>,
    /// Between points.
    pub line: LineStyle,
    /// At points.
    pub markers: Markers,
}

/// What joins the points of a curve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineStyle {
    /// What was measured.
    Solid,
    /// What was fitted, or predicted.
    Dashed,
    /// What stands behind another curve, such as the values of which that is the mean.
    Faint,
    /// Nothing does: a scatter.
    None,
}

/// What marks the points of a curve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Markers {
    /// Nothing, unless it is a single point, which would not be seen.
    None,
    /// A shape that belongs to the style: curves are told apart without their colours.
    Shapes,
    /// Small, where there are many.
    Dots,
    /// A ring around what is best.
    Rings,
}

/// A line to compare with.
#[derive(Debug, Clone, PartialEq)]
pub struct Guide {
    /// Written on it.
    pub name: String,
    pub path: GuidePath,
}

/// Where a guide goes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GuidePath {
    /// At one y from side to side.
    Horizontal(f64),
    /// At one x from top to bottom.
    Vertical(f64),
    /// Straight from one point to another, on whatever axes there are; it does not widen them.
    Segment((f64, f64), (f64, f64)),
}

impl Plot {
    /// Nothing on its axes yet.
    pub fn new(title: impl Into<String>, x: PlotAxis, y: PlotAxis) -> Plot {
        Plot { title: title.into(), x, y, guides: Vec::new(), curves: Vec::new(), wide: false }
    }

    /// Over the full width.
    pub fn wide(self) -> Plot {
        Plot { wide: true, ..self }
    }

    /// With a curve or a guide more.
    pub fn with(mut self, element: impl Into<PlotElement>) -> Plot {
        match element.into() {
            PlotElement::Curve(curve) => self.curves.push(curve),
            PlotElement::Guide(guide) => self.guides.push(guide),
        }
        self
    }

    /// Whether there is anything that can be drawn.
    pub fn is_empty(&self) -> bool {
        let drawn =
            |curve: &Curve| curve.points.iter().any(|(x, y)| self.x.accepts(*x) && self.y.accepts(*y));
        !self.curves.iter().any(drawn)
    }
}

/// What [`Plot::with`] takes.
#[derive(Debug, Clone, PartialEq)]
pub enum PlotElement {
    /// Points.
    Curve(Curve),
    /// A line to compare with.
    Guide(Guide),
}

impl From<Curve> for PlotElement {
    fn from(curve: Curve) -> PlotElement {
        PlotElement::Curve(curve)
    }
}

impl From<Guide> for PlotElement {
    fn from(guide: Guide) -> PlotElement {
        PlotElement::Guide(guide)
    }
}

impl Curve {
    /// A solid line without markers.
    pub fn new(name: impl Into<String>, style: usize, points: Vec<(f64, f64)>) -> Curve {
        let (line, markers) = (LineStyle::Solid, Markers::None);
        Curve { name: name.into(), style, points, intervals: Vec::new(), line, markers }
    }

    /// Points without a line.
    pub fn scatter(name: impl Into<String>, style: usize, points: Vec<(f64, f64)>) -> Curve {
        Curve { line: LineStyle::None, markers: Markers::Dots, ..Curve::new(name, style, points) }
    }

    /// One point, with a ring around it.
    pub fn best(name: impl Into<String>, style: usize, point: (f64, f64)) -> Curve {
        Curve { line: LineStyle::None, markers: Markers::Rings, ..Curve::new(name, style, vec![point]) }
    }

    /// With a marker at each point.
    pub fn with_markers(self) -> Curve {
        Curve { markers: Markers::Shapes, ..self }
    }

    /// As what is fitted or predicted.
    pub fn dashed(self) -> Curve {
        Curve { line: LineStyle::Dashed, ..self }
    }

    /// As what stands behind another.
    pub fn faint(self) -> Curve {
        Curve { line: LineStyle::Faint, ..self }
    }

    /// With an interval around each point, in their order.
    pub fn with_intervals(self, intervals: Vec<(f64, f64)>) -> Curve {
        Curve { intervals, ..self }
    }
}

impl Guide {
    /// At one y; the axis reaches it.
    pub fn horizontal(name: impl Into<String>, y: f64) -> Guide {
        Guide { name: name.into(), path: GuidePath::Horizontal(y) }
    }

    /// At one x; the axis reaches it.
    pub fn vertical(name: impl Into<String>, x: f64) -> Guide {
        Guide { name: name.into(), path: GuidePath::Vertical(x) }
    }

    /// From one point to another; what lies beyond the axes is cut off.
    pub fn line(name: impl Into<String>, from: (f64, f64), to: (f64, f64)) -> Guide {
        Guide { name: name.into(), path: GuidePath::Segment(from, to) }
    }
}
