//! Records in, pictures out. Knows no tensors: whoever has something to show makes a [`Figure`] of it, and a figure becomes SVG or
//! part of a [`Page`].
//!
//! ```
//! use espalier_report::{Axis, Curve, Figure, Guide, Page, Plot};
//!
//! let steps = Curve::new("90 % sparse", 0, vec![(64.0, 1040.0), (256.0, 480.0), (1024.0, 512.0)])
//!     .marked()
//!     .between(vec![(1000.0, 1100.0), (460.0, 500.0), (480.0, 560.0)]);
//! let plot = Plot::new("Steps to the goal", Axis::log("batch"), Axis::log("steps"))
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
mod heat;
pub mod number;
mod page;
mod plot;
pub mod serve;
mod style;
mod timeline;

pub use bars::{Bar, BarRow, Bars};
pub use figure::{Figure, Panel};
pub use heat::{Cell, Heat};
pub use page::{Column, Page, Table};
pub use plot::{Axis, Band, Course, Curve, Element, Guide, Line, Markers, Plot, Scale};
pub use timeline::{Row, Span, Timeline};
