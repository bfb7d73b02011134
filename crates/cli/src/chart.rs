//! Figures as SVG: curves over logarithmic axes, in panels side by side, each curve named at its end.

use std::fmt::Write;

/// A figure: panels under one title.
pub struct Figure {
    /// What it shows.
    pub title: String,
    /// Under which conditions.
    pub subtitle: String,
    /// From left to right.
    pub panels: Vec<Panel>,
}

/// Curves over one pair of axes, both logarithmic.
pub struct Panel {
    /// What it shows.
    pub title: String,
    /// What the horizontal axis counts, and where it is marked.
    pub x_label: String,
    /// Values with their marks, ascending.
    pub x_ticks: Vec<(f64, String)>,
    /// What the vertical axis counts.
    pub y_label: String,
    /// Each in a colour of its own, in this order.
    pub curves: Vec<Curve>,
    /// A level to compare with, and its name.
    pub level: Option<(f64, String)>,
}

/// A curve; all its numbers are above zero.
pub struct Curve {
    /// What the legend calls it.
    pub name: String,
    /// Its colour and its markers, by number: what means the same looks the same in all panels.
    pub style: usize,
    /// Points by ascending x.
    pub points: Vec<(f64, f64)>,
}

const WIDTH: f64 = 540.0;
const HEIGHT: f64 = 400.0;
/// Room above the panels for the title.
const TOP: f64 = 62.0;
/// From a panel's border to its axes: left, top, right (names of curves), bottom.
const MARGIN: [f64; 4] = [64.0, 34.0, 112.0, 50.0];
/// The least distance of two names.
const LINE: f64 = 15.0;
/// Told apart in print and by most eyes; curves also differ in their markers.
const COLOURS: [&str; 5] = ["#1f5fa8", "#c8443c", "#3f8f5a", "#7a5aa6", "#b07d2b"];
const GREY: &str = "#777777";

impl Figure {
    /// The file's text.
    pub fn svg(&self) -> String {
        let (width, height) = (WIDTH * self.panels.len() as f64, HEIGHT + TOP);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
             height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#222222\">\n\
             <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
        );
        text(&mut svg, 20.0, 28.0, "start", "font-size=\"18\" font-weight=\"bold\"", &self.title);
        text(&mut svg, 20.0, 48.0, "start", "fill=\"#555555\"", &self.subtitle);
        for (i, panel) in self.panels.iter().enumerate() {
            let _ = writeln!(svg, "<g transform=\"translate({} {TOP})\">", WIDTH * i as f64);
            panel.draw(&mut svg);
            svg.push_str("</g>\n");
        }
        svg.push_str("</svg>\n");
        svg
    }
}

impl Panel {
    fn draw(&self, svg: &mut String) {
        let points = || self.curves.iter().flat_map(|curve| &curve.points);
        let xs = points().map(|p| p.0).chain(self.x_ticks.iter().map(|tick| tick.0));
        let ys = points().map(|p| p.1).chain(self.level.iter().map(|level| level.0));
        let [left, top, right, bottom] = MARGIN;
        let x = Scale::new(xs, left, WIDTH - right);
        let y = Scale::new(ys, HEIGHT - bottom, top);

        text(svg, left, top - 12.0, "start", "font-weight=\"bold\"", &self.title);
        for (value, mark) in &self.x_ticks {
            line(svg, (x.at(*value), y.to), (x.at(*value), y.from), "stroke=\"#e4e4e4\"");
            text(svg, x.at(*value), y.from + 18.0, "middle", "", mark);
        }
        for value in ticks(y.low, y.high) {
            line(svg, (x.from, y.at(value)), (x.to, y.at(value)), "stroke=\"#e4e4e4\"");
            text(svg, x.from - 7.0, y.at(value) + 4.0, "end", "", &number(value));
        }
        line(svg, (x.from, y.from), (x.to, y.from), "stroke=\"#222222\"");
        line(svg, (x.from, y.from), (x.from, y.to), "stroke=\"#222222\"");
        text(svg, (x.from + x.to) / 2.0, HEIGHT - 10.0, "middle", "", &self.x_label);
        let middle = (y.from + y.to) / 2.0;
        let turned = format!("transform=\"rotate(-90 16 {middle:.1})\"");
        text(svg, 16.0, middle, "middle", &turned, &self.y_label);
        if let Some((level, name)) = &self.level {
            let at = y.at(*level);
            line(svg, (x.from, at), (x.to, at), &format!("stroke=\"{GREY}\" stroke-dasharray=\"5 4\""));
            text(svg, x.from + 6.0, at + 14.0, "start", &format!("fill=\"{GREY}\""), name);
        }
        for curve in &self.curves {
            curve.draw(svg, &x, &y);
        }
        self.name_curves(svg, &x, &y);
    }

    /// Names beside the last points, moved apart where they would overlap.
    fn name_curves(&self, svg: &mut String, x: &Scale, y: &Scale) {
        let end = |curve: &'_ Curve| curve.points.last().map(|end| y.at(end.1));
        let mut names: Vec<(f64, &Curve)> =
            self.curves.iter().filter_map(|curve| Some((end(curve)?, curve))).collect();
        names.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut lowest = f64::NEG_INFINITY;
        for (at, curve) in names {
            let at = at.max(lowest + LINE);
            lowest = at;
            let end = curve.points.last().expect("a curve with an end").0;
            let colour = format!("fill=\"{}\"", curve.colour());
            text(svg, x.at(end) + 10.0, at + 4.0, "start", &colour, &curve.name);
        }
    }
}

impl Curve {
    fn colour(&self) -> &'static str {
        COLOURS[self.style % COLOURS.len()]
    }

    fn draw(&self, svg: &mut String, x: &Scale, y: &Scale) {
        let colour = self.colour();
        let places: Vec<(f64, f64)> = self.points.iter().map(|p| (x.at(p.0), y.at(p.1))).collect();
        let list: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            list.join(" ")
        );
        for (x, y) in places {
            let _ = match self.style % 3 {
                0 => writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{colour}\"/>"),
                1 => writeln!(
                    svg,
                    "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"7\" height=\"7\" fill=\"{colour}\"/>",
                    x - 3.5,
                    y - 3.5
                ),
                _ => writeln!(
                    svg,
                    "<path d=\"M{x:.1} {:.1} l5 5 l-5 5 l-5 -5 z\" fill=\"{colour}\"/>",
                    y - 5.0
                ),
            };
        }
    }
}

/// From values to places, by their logarithms.
struct Scale {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Scale {
    /// Values from the least to the greatest, with a little room at both ends, lie between two places.
    fn new(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Scale {
        let (low, high) = values.fold((f64::INFINITY, 0f64), |(low, high), v| (low.min(v), high.max(v)));
        let (low, high) = if low <= high { (low, high) } else { (1.0, 1.0) };
        // A single value gets room too.
        let room = (high / low).powf(0.05).max(1.05);
        Scale { low: low / room, high: high * room, from, to }
    }

    fn at(&self, value: f64) -> f64 {
        let share = (value / self.low).ln() / (self.high / self.low).ln();
        self.from + share * (self.to - self.from)
    }
}

/// Marks of an axis: powers of ten, with 2 and 5 between them where there are few.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let steps: &[f64] = if high / low > 300.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
    let powers = low.log10().floor() as i32..=high.log10().ceil() as i32;
    let all = powers.flat_map(|power| steps.iter().map(move |step| step * 10f64.powi(power)));
    all.filter(|tick| (low..=high).contains(tick)).collect()
}

/// `0.05`, `1`, `200`.
fn number(value: f64) -> String {
    let digits = (-value.log10().floor()).max(0.0) as usize;
    format!("{value:.digits$}")
}

fn line(svg: &mut String, from: (f64, f64), to: (f64, f64), style: &str) {
    let _ = writeln!(
        svg,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" {style}/>",
        from.0, from.1, to.0, to.1
    );
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, style: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" {style}>{words}</text>");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_round_and_within() {
        assert_eq!(ticks(0.3, 40.0), [0.5, 1.0, 2.0, 5.0, 10.0, 20.0]);
        assert_eq!(ticks(0.05, 90.0), [0.1, 1.0, 10.0]);
        assert_eq!([0.05, 0.1, 1.0, 20.0, 500.0].map(number), ["0.05", "0.1", "1", "20", "500"]);
    }

    #[test]
    fn equal_ratios_are_equal_distances() {
        let scale = Scale::new([1.0, 100.0].into_iter(), 0.0, 300.0);
        let (one, ten, hundred) = (scale.at(1.0), scale.at(10.0), scale.at(100.0));
        assert!((ten - one - (hundred - ten)).abs() < 1e-9 && one > 0.0 && hundred < 300.0);
    }

    /// Each curve is drawn through all its points, names do not overlap, and what is written is text, not markup.
    #[test]
    fn a_figure_holds_its_curves_and_their_names() {
        let curve = |name: &str, style: usize, y: f64| {
            let points = vec![(1.0, y), (2.0, y), (4.0, y)];
            Curve { name: name.into(), style, points }
        };
        let panel = Panel {
            title: "a < b & c".into(),
            x_label: "x".into(),
            x_ticks: vec![(1.0, "1".into()), (4.0, "4".into())],
            y_label: "y".into(),
            curves: vec![curve("first", 0, 1.0), curve("second", 1, 1.01), curve("third", 2, 50.0)],
            level: Some((2.0, "level".into())),
        };
        let svg = Figure { title: "t".into(), subtitle: "s".into(), panels: vec![panel] }.svg();
        assert_eq!(svg.matches("<polyline").count(), 3);
        assert_eq!(svg.matches("<circle").count() + svg.matches("<path").count(), 6);
        assert!(svg.contains("a &lt; b &amp; c") && !svg.contains("a < b"));
        let place = |name: &str| -> f64 {
            let line = svg.lines().find(|line| line.ends_with(&format!(">{name}</text>"))).unwrap();
            line.split("y=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap()
        };
        assert!((place("first") - place("second")).abs() >= LINE - 0.2);
        assert!(place("third") < place("second"), "what is more stands higher");
    }
}
