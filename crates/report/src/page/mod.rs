//! One HTML page that needs nothing else: no network, no other file, no library. Everything in it that comes
//! from elsewhere is text.

mod table;

pub use table::{Column, Table};

use crate::canvas::escape;
use crate::{Figure, style};

const STYLE: &str = include_str!("style.css");
/// Shows values under the pointer; the page is whole without it.
const HOVER: &str = include_str!("hover.js");
/// Asks for newer content while the page is looked at.
const LIVE: &str = include_str!("live.js");

/// Headings, text, tables and figures, from above.
#[derive(Debug, Clone, PartialEq)]
pub struct Page {
    title: String,
    /// As HTML.
    blocks: Vec<String>,
}

impl Page {
    /// Nothing but a title.
    pub fn new(title: impl Into<String>) -> Page {
        Page { title: title.into(), blocks: Vec::new() }
    }

    pub fn heading(&mut self, text: impl AsRef<str>) {
        self.blocks.push(format!("<h2>{}</h2>\n", escape(text.as_ref())));
    }

    /// Adds a paragraph.
    pub fn text(&mut self, text: impl AsRef<str>) {
        self.blocks.push(format!("<p>{}</p>\n", escape(text.as_ref())));
    }

    /// Adds a paragraph that should not be overlooked.
    pub fn note(&mut self, text: impl AsRef<str>) {
        self.blocks.push(note(text.as_ref()));
    }

    /// The same before everything else.
    pub fn note_first(&mut self, text: impl AsRef<str>) {
        self.blocks.insert(0, note(text.as_ref()));
    }

    /// Adds a few numbers that say most, each under its name.
    pub fn facts(&mut self, facts: Vec<(String, String)>) {
        let fact = |(name, value): &(String, String)| {
            format!("<div><dt>{}</dt><dd>{}</dd></div>\n", escape(name), escape(value))
        };
        let facts: String = facts.iter().map(fact).collect();
        self.blocks.push(format!("<dl class=\"facts\">\n{facts}</dl>\n"));
    }

    pub fn table(&mut self, table: Table) {
        self.blocks.push(table.html());
    }

    /// Adds a table that is shown when its heading is clicked.
    pub fn folded(&mut self, heading: impl AsRef<str>, table: Table) {
        let (heading, table) = (escape(heading.as_ref()), table.html());
        self.blocks.push(format!("<details><summary>{heading}</summary>\n{table}</details>\n"));
    }

    pub fn figure(&mut self, figure: Figure) {
        self.blocks.push(figure.html());
    }

    /// The text of the file.
    pub fn html(&self) -> String {
        self.document(&self.content(), "")
    }

    /// The same for a server that has newer [`content`](Page::content) under the path `live`, which the page
    /// asks for by itself.
    pub(crate) fn live_html(&self) -> String {
        self.document(&self.content(), LIVE)
    }

    /// What stands between the page's head and its end: what is replaced when there is something newer.
    pub fn content(&self) -> String {
        format!("<h1>{}</h1>\n{}", escape(&self.title), self.blocks.concat())
    }

    fn document(&self, content: &str, script: &str) -> String {
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n<link rel=\"icon\" href=\"data:,\">\n\
             <title>{}</title>\n<style>\n{}{}{STYLE}</style>\n</head>\n<body>\n<main>\n{content}</main>\n\
             <script>\n{HOVER}{script}</script>\n</body>\n</html>\n",
            escape(&self.title),
            style::of_page(),
            style::sheet(),
        )
    }
}

fn note(text: &str) -> String {
    format!("<p class=\"note\">{}</p>\n", escape(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Curve, Plot, PlotAxis};

    fn page() -> Page {
        let mut page = Page::new("a <b>");
        page.text("1 < 2 & \"more\"");
        page.note("<img src=x onerror=alert(1)>");
        page.facts(vec![("<dt>".into(), "<dd>".into())]);
        let mut table = Table::new(vec![Column::text("<name>"), Column::number("loss")]);
        table.row(["<script>alert(1)</script>".into(), "1.5".into()]);
        page.table(table.clone());
        page.folded("<more>", table);
        let curve = Curve::new("\"><script>", 0, vec![(0.0, 1.0), (1.0, 2.0)]);
        page.figure(
            Figure::new("<f>")
                .with_subtitle("<u>")
                .with(Plot::new("<p>", PlotAxis::linear("<x>"), PlotAxis::log("<y>")).with(curve)),
        );
        page
    }

    /// Whatever names and settings say, the only tags are ours.
    #[test]
    fn everything_from_elsewhere_is_text() {
        let html = page().html();
        assert_eq!(html.matches("<script").count(), 1, "ours: {html}");
        for foreign in ["<b>", "<img", "<name>", "<more>", "<f>", "<u>", "<p><", "<x>", "<y>", "<dt><dt>"] {
            assert!(!page().content().contains(foreign), "{foreign}");
        }
    }

    /// Nothing is loaded from anywhere.
    #[test]
    fn a_page_stands_alone() {
        let html = page().live_html();
        for outside in ["http:", "https:", "src=", "@import", "url("] {
            let ours = html.replace("&lt;img src=x", "");
            assert!(!ours.contains(outside), "{outside}");
        }
        assert!(html.contains("prefers-color-scheme:dark") && html.contains("name=\"viewport\""));
        assert!(Page::new("").html().len() < 12_000, "{}", Page::new("").html().len());
    }
}
