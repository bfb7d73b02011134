//! SVG as it is written: shapes by their class, words as text and never as markup.

use std::borrow::Cow;
use std::fmt::Write;

/// Which end of a text is at its coordinates.
#[derive(Debug, Clone, Copy)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

/// Elements of a drawing, in their order: what comes later lies above.
#[derive(Debug, Default)]
pub struct Canvas {
    svg: String,
}

impl Canvas {
    pub fn finish(self) -> String {
        self.svg
    }

    /// Everything that `draw` adds, moved.
    pub(crate) fn translated(&mut self, x: f64, y: f64, draw: impl FnOnce(&mut Canvas)) {
        self.raw(&format!("<g transform=\"translate({} {})\">\n", coordinate(x), coordinate(y)));
        draw(self);
        self.raw("</g>\n");
    }

    /// Markup of ours.
    pub fn raw(&mut self, markup: &str) {
        self.svg.push_str(markup);
    }

    pub fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        let [x1, y1, x2, y2] = [from.0, from.1, to.0, to.1].map(coordinate);
        let _ =
            writeln!(self.svg, "<line class=\"{class}\" x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\"/>");
    }

    /// A line through all of these; one alone would be nothing to see.
    pub(crate) fn polyline(&mut self, class: &str, points: &[(f64, f64)]) {
        let _ = writeln!(self.svg, "<polyline class=\"{class}\" points=\"{}\"/>", list(points));
    }

    pub(crate) fn polygon(&mut self, class: &str, points: &[(f64, f64)]) {
        let _ = writeln!(self.svg, "<polygon class=\"{class}\" points=\"{}\"/>", list(points));
    }

    pub fn circle(&mut self, class: &str, at: (f64, f64), radius: f64) {
        let [x, y, r] = [at.0, at.1, radius].map(coordinate);
        let _ = writeln!(self.svg, "<circle class=\"{class}\" cx=\"{x}\" cy=\"{y}\" r=\"{r}\"/>");
    }

    /// A rectangle; `tip` is shown where a pointer rests on it, if it is not empty. `opacity` is 1 for what
    /// is solid.
    pub(crate) fn rect(
        &mut self,
        class: &str,
        corner: (f64, f64),
        size: (f64, f64),
        opacity: f64,
        tip: &str,
    ) {
        let [x, y, width, height] = [corner.0, corner.1, size.0.max(0.0), size.1.max(0.0)].map(coordinate);
        let _ = write!(
            self.svg,
            "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\""
        );
        if opacity < 1.0 {
            let _ = write!(self.svg, " fill-opacity=\"{opacity:.2}\"");
        }
        match tip.is_empty() {
            true => self.svg.push_str("/>\n"),
            false => {
                let _ = writeln!(self.svg, "><title>{}</title></rect>", escape(tip));
            }
        }
    }

    pub fn text(&mut self, class: &str, at: (f64, f64), anchor: Anchor, text: &str) {
        self.text_within(class, at, anchor, text, f64::INFINITY);
    }

    /// A text that is cut where it would be wider than that; all of it is shown where a pointer rests on it.
    pub(crate) fn text_within(
        &mut self,
        class: &str,
        at: (f64, f64),
        anchor: Anchor,
        text: &str,
        width: f64,
    ) {
        let shortened = shorten_to(text, width);
        let [x, y] = [at.0, at.1].map(coordinate);
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        };
        let _ = write!(
            self.svg,
            "<text class=\"{class}\" x=\"{x}\" y=\"{y}\"{anchor}>{}",
            escape(shortened.as_ref())
        );
        if shortened != text {
            let _ = write!(self.svg, "<title>{}</title>", escape(text));
        }
        self.svg.push_str("</text>\n");
    }
}

/// Coordinates to a tenth of a pixel, without a tenth that is none.
fn coordinate(value: f64) -> String {
    let text = format!("{value:.1}");
    match text.strip_suffix(".0") {
        Some("-0") => "0".into(),
        Some(integer) => integer.into(),
        None => text,
    }
}

fn list(points: &[(f64, f64)]) -> String {
    let pairs: Vec<String> =
        points.iter().map(|(x, y)| format!("{},{}", coordinate(*x), coordinate(*y))).collect();
    pairs.join(" ")
}

/// Escapes a text for HTML and XML, in elements and in attributes. Control characters, which XML does not
/// have at all, become U+FFFD.
pub fn escape(text: &str) -> Cow<'_, str> {
    let is_plain =
        |c: char| !matches!(c, '&' | '<' | '>' | '"' | '\'' | '\u{fffe}' | '\u{ffff}') && !c.is_control();
    if text.chars().all(is_plain) {
        return text.into();
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            '\n' | '\t' => escaped.push(c),
            c if is_plain(c) => escaped.push(c),
            _ => escaped.push('\u{fffd}'),
        }
    }
    escaped.into()
}

/// About how wide a text of 12 pixels is, in the widest of the common sans-serif fonts (DejaVu): what room to
/// leave for it.
pub fn width_of(text: &str) -> f64 {
    let of = |c: char| match c {
        'i' | 'j' | 'l' | '\'' | '|' => 3.4,
        ' ' | '.' | ',' | ':' | ';' | '!' | '/' => 4.0,
        'f' | 't' | 'r' | '(' | ')' | '-' | '[' | ']' => 4.8,
        'm' | 'M' | 'W' | '%' | '@' | '…' => 12.0,
        'w' | 'G' | 'O' | 'Q' | 'N' | 'D' | 'H' | 'U' => 9.6,
        'A'..='Z' => 8.4,
        c if c.is_ascii() => 7.6,
        _ => 10.0,
    };
    text.chars().map(of).sum()
}

fn shorten_to(text: &str, width: f64) -> Cow<'_, str> {
    if width_of(text) <= width {
        return text.into();
    }
    let mut shortened = String::new();
    for c in text.chars() {
        if width_of(&shortened) + width_of("…") + width_of(c.encode_utf8(&mut [0; 4])) > width {
            break;
        }
        shortened.push(c);
    }
    format!("{}…", shortened.trim_end()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_never_markup() {
        assert_eq!(escape("plain – text"), "plain – text");
        assert_eq!(escape("a<b> & \"c\" 'd'"), "a&lt;b&gt; &amp; &quot;c&quot; &#39;d&#39;");
        // A colour of a terminal and a NUL would make the file unreadable to an XML parser.
        assert_eq!(escape("\u{1b}[31mred\0\nnext"), "\u{fffd}[31mred\u{fffd}\nnext");
    }

    #[test]
    fn what_is_too_long_is_cut_and_can_be_read_in_full() {
        let mut canvas = Canvas::default();
        canvas.text_within("t", (0.0, 0.0), Anchor::Start, "a name that <goes> on and on", 60.0);
        let svg = canvas.finish();
        assert!(
            svg.contains('…') && svg.contains("<title>a name that &lt;goes&gt; on and on</title>"),
            "{svg}"
        );
        assert_eq!(shorten_to("short", 60.0), "short");
        assert_eq!(shorten_to("anything", 0.0), "…");
    }

    #[test]
    fn coordinates_have_a_tenth_where_they_need_it() {
        assert_eq!([1.0, -0.04, 2.25, -3.5, 120.96].map(coordinate), ["1", "0", "2.2", "-3.5", "121"]);
    }
}
