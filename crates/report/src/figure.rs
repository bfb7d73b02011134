//! A figure: panels under one title, as a file of its own or as part of a page.

use crate::canvas::{Anchor, Canvas, escape, width_of};
use crate::{Bars, Heatmap, Plot, TimelineChart, style};

/// Panels under one title.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    pub title: String,
    /// Under which conditions; may be empty.
    pub subtitle: String,
    /// From left to right, and then below.
    pub panels: Vec<Panel>,
}

/// One picture of a figure.
#[derive(Debug, Clone, PartialEq)]
pub enum Panel {
    /// Curves over axes.
    Plot(Plot),
    /// Lengths beside names.
    Bars(Bars),
    /// Shades in rows and columns.
    Heatmap(Heatmap),
    /// What happened when, a row each.
    Timeline(TimelineChart),
}

/// Of a panel, and of one that takes a row by itself.
const WIDTH: f64 = 460.0;
const WIDE: f64 = 2.0 * WIDTH + GAP;
const HEIGHT: f64 = 290.0;
const WIDE_HEIGHT: f64 = 360.0;
/// Between panels, and around them.
const GAP: f64 = 36.0;
const MARGIN: f64 = 20.0;
/// A rule of our style that no other drawing has.
const STYLED: &[u8] = b".ground{fill:";

impl Figure {
    pub fn new(title: impl Into<String>) -> Figure {
        Figure { title: title.into(), subtitle: String::new(), panels: Vec::new() }
    }

    /// With what should be known of it.
    pub fn with_subtitle(self, subtitle: impl Into<String>) -> Figure {
        Figure { subtitle: subtitle.into(), ..self }
    }

    /// With a panel more.
    pub fn with(mut self, panel: impl Into<Panel>) -> Figure {
        self.panels.push(panel.into());
        self
    }

    /// The text of an SVG file that needs nothing else, light or dark as its reader prefers.
    pub fn svg(&self) -> String {
        let rows = self.rows();
        let across = rows.iter().map(|row| row.iter().map(|panel| panel.width() + GAP).sum::<f64>() - GAP);
        // A title is wider than other text, by half.
        let titles = [1.5 * width_of(&self.title), width_of(&self.subtitle)];
        let width = across.chain(titles).fold(WIDTH, f64::max) + 2.0 * MARGIN;
        let mut canvas = Canvas::default();
        let mut top = MARGIN;
        if !self.title.is_empty() {
            canvas.text("ink head", (MARGIN, top + 14.0), Anchor::Start, &self.title);
            top += 26.0;
        }
        if !self.subtitle.is_empty() {
            canvas.text("quiet", (MARGIN, top + 10.0), Anchor::Start, &self.subtitle);
            top += 20.0;
        }
        top += if top > MARGIN { 14.0 } else { 0.0 };
        for row in rows {
            let mut left = MARGIN;
            for panel in &row {
                canvas.translated(left, top, |canvas| panel.draw(canvas, panel.width(), panel.height()));
                left += panel.width() + GAP;
            }
            top += row.iter().map(|panel| panel.height()).fold(0.0, f64::max) + GAP;
        }
        let height = (top - GAP).max(0.0) + MARGIN;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
             height=\"{height:.0}\" role=\"img\">\n<title>{}</title>\n<style>\n{}</style>\n\
             <rect class=\"ground\" width=\"100%\" height=\"100%\"/>\n{}</svg>\n",
            escape(&self.title),
            style::sheet(),
            canvas.finish()
        )
    }

    /// Whether a file that begins like this is a figure that was written here: it has our style.
    pub fn is_figure(head: &[u8]) -> bool {
        head.starts_with(b"<svg") && head.windows(STYLED.len()).any(|bytes| bytes == STYLED)
    }

    /// Two beside each other, unless one takes a row by itself.
    fn rows(&self) -> Vec<Vec<&Panel>> {
        let mut rows: Vec<Vec<&Panel>> = Vec::new();
        for panel in &self.panels {
            match rows.last_mut() {
                Some(row) if row.len() == 1 && !row[0].is_wide() && !panel.is_wide() => row.push(panel),
                _ => rows.push(vec![panel]),
            }
        }
        rows
    }

    /// As part of a page, which has the style: a picture for each panel, which the page arranges.
    pub(crate) fn html(&self) -> String {
        let mut html = String::from("<figure>\n");
        if !self.title.is_empty() {
            html += &format!("<h2>{}</h2>\n", escape(&self.title));
        }
        if !self.subtitle.is_empty() {
            html += &format!("<p class=\"quiet-text\">{}</p>\n", escape(&self.subtitle));
        }
        html += "<div class=\"panels\">\n";
        for panel in &self.panels {
            // A plot over the full width would be too small to read on a telephone: it is there in both
            // sizes, one of which shows.
            let (class, sizes): (_, &[(&str, f64, f64)]) = match panel {
                Panel::Plot(plot) if plot.wide => {
                    ("panel wide full", &[("broad", WIDE, WIDE_HEIGHT), ("slim", WIDTH, HEIGHT)])
                }
                _ if panel.is_wide() => ("panel wide", &[("", WIDE, panel.height())]),
                _ => ("panel", &[("", WIDTH, panel.height())]),
            };
            html += &format!("<div class=\"{class}\">");
            for (name, width, height) in sizes {
                let mut canvas = Canvas::default();
                panel.draw(&mut canvas, *width, *height);
                let name = if name.is_empty() { String::new() } else { format!(" class=\"{name}\"") };
                html += &format!(
                    "<svg{name} viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" aria-label=\"{}\">\n{}</svg>",
                    escape(panel.title()),
                    canvas.finish()
                );
            }
            html += "</div>\n";
        }
        html + "</div>\n</figure>\n"
    }
}

impl Panel {
    pub fn title(&self) -> &str {
        match self {
            Panel::Plot(plot) => &plot.title,
            Panel::Bars(bars) => &bars.title,
            Panel::Heatmap(heatmap) => &heatmap.title,
            Panel::Timeline(timeline) => &timeline.title,
        }
    }

    fn is_wide(&self) -> bool {
        match self {
            Panel::Plot(plot) => plot.wide,
            Panel::Bars(_) => false,
            Panel::Heatmap(_) | Panel::Timeline(_) => true,
        }
    }

    fn width(&self) -> f64 {
        if self.is_wide() { WIDE } else { WIDTH }
    }

    fn height(&self) -> f64 {
        match self {
            Panel::Plot(plot) if plot.wide => WIDE_HEIGHT,
            Panel::Plot(_) => HEIGHT,
            Panel::Bars(bars) => bars.height(),
            Panel::Heatmap(heatmap) => heatmap.height(),
            Panel::Timeline(timeline) => timeline.height(),
        }
    }

    fn draw(&self, canvas: &mut Canvas, width: f64, height: f64) {
        match self {
            Panel::Plot(plot) => plot.draw(canvas, width, height),
            Panel::Bars(bars) => bars.draw(canvas, width),
            Panel::Heatmap(heatmap) => heatmap.draw(canvas, width),
            Panel::Timeline(timeline) => timeline.draw(canvas, width),
        }
    }
}

impl From<Plot> for Panel {
    fn from(plot: Plot) -> Panel {
        Panel::Plot(plot)
    }
}

impl From<Bars> for Panel {
    fn from(bars: Bars) -> Panel {
        Panel::Bars(bars)
    }
}

impl From<Heatmap> for Panel {
    fn from(heatmap: Heatmap) -> Panel {
        Panel::Heatmap(heatmap)
    }
}

impl From<TimelineChart> for Panel {
    fn from(timeline: TimelineChart) -> Panel {
        Panel::Timeline(timeline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Curve, PlotAxis};

    fn plot(title: &str) -> Plot {
        Plot::new(title, PlotAxis::linear("x"), PlotAxis::linear("y")).with(Curve::new(
            "c",
            0,
            vec![(0.0, 1.0), (1.0, 2.0)],
        ))
    }

    #[test]
    fn panels_stand_two_beside_each_other() {
        let figure = Figure::new("t")
            .with(plot("a"))
            .with(plot("b"))
            .with(plot("c"))
            .with(Heatmap::new("d"))
            .with(plot("e"));
        let titles: Vec<Vec<&str>> =
            figure.rows().iter().map(|row| row.iter().map(|panel| panel.title()).collect()).collect();
        assert_eq!(titles, [vec!["a", "b"], vec!["c"], vec!["d"], vec!["e"]]);
    }

    /// A file stands alone: it names no other, has its own colours for both modes, and every tag that is
    /// opened is closed.
    #[test]
    fn a_file_needs_nothing_else() {
        let svg = Figure::new("\"t\" <script>").with_subtitle("& so on").with(plot("a")).svg();
        assert!(svg.contains("prefers-color-scheme:dark") && !svg.contains("<script"), "{svg}");
        let without_namespace = svg.replace("http://www.w3.org/2000/svg", "");
        assert!(!without_namespace.contains("http") && !without_namespace.contains("url("));
        for tag in ["svg", "g", "text", "title", "style"] {
            let opened = svg.matches(&format!("<{tag} ")).count() + svg.matches(&format!("<{tag}>")).count();
            assert_eq!(opened, svg.matches(&format!("</{tag}>")).count(), "{tag}: {svg}");
        }
    }

    /// Broad where there is room, and as narrow as the others where there is not.
    #[test]
    fn what_says_most_takes_the_full_width() {
        let figure = Figure::new("").with(plot("a").wide()).with(plot("b"));
        let html = figure.html();
        assert_eq!(html.matches("<svg").count(), 3, "{html}");
        assert!(html.contains("<svg class=\"broad\" viewBox=\"0 0 956 360\""), "{html}");
        assert!(html.contains("<svg class=\"slim\" viewBox=\"0 0 460 290\""), "{html}");
        assert_eq!(figure.rows().len(), 2);
        assert!(figure.svg().starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 996 "));
    }

    #[test]
    fn what_is_empty_is_its_title() {
        let empty: [Panel; 3] = [
            Bars::new("nothing", &[]).into(),
            Heatmap::new("nothing").into(),
            TimelineChart::new("nothing", "ms", &[]).into(),
        ];
        let figures = empty.map(|panel| Figure::new("").with(panel));
        for figure in figures.iter().chain([&Figure::new("nothing")]) {
            let svg = figure.svg();
            assert!(svg.contains(">nothing</text>") && !svg.contains("NaN"), "{svg}");
        }
    }
}
