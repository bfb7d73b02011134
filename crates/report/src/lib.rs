//! Records in, pictures out. Knows no tensors: whoever has something to show makes a [`Figure`] of it, and a
//! figure becomes SVG or part of a [`Page`].
//!
//! ```
//! use espalier_report::{PlotAxis, Curve, Figure, Guide, Page, Plot};
//!
//! let steps = Curve::new("90 % sparse", 0, vec![(64.0, 1040.0), (256.0, 480.0), (1024.0, 512.0)])
//!     .with_markers()
//!     .with_intervals(vec![(1000.0, 1100.0), (460.0, 500.0), (480.0, 560.0)]);
//! let plot = Plot::new("Steps to the goal", PlotAxis::log("batch"), PlotAxis::log("steps"))
//!     .with(steps)
//!     .with(Guide::line("linear scaling", (64.0, 1040.0), (256.0, 260.0)));
//! let figure = Figure::new("MNIST, simple-cnn").with(plot);
//! assert!(figure.svg().starts_with("<svg"));
//!
//! let mut page = Page::new("A study");
//! page.figure(figure);
//! assert!(page.html().starts_with("<!doctype html>"));
//! ```

#![forbid(unsafe_code)]

mod bars;
mod canvas;
mod figure;
mod heatmap;
pub mod number;
mod page;
mod plot;
pub mod serve;
mod style;
mod timeline;

pub use bars::{Bar, BarRow, Bars};
pub use figure::{Figure, Panel};
pub use heatmap::{Heatmap, HeatmapCell};
pub use page::{Column, Page, Table};
pub use plot::{AxisScale, Curve, Guide, GuidePath, LineStyle, Markers, Plot, PlotAxis, PlotElement};
pub use timeline::{TimelineChart, TimelineRow, TimelineSpan};
