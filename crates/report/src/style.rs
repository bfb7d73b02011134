//! Colours and strokes, by class: one sheet for all pictures, with a second set of colours for dark
//! surroundings.
//!
//! The five colours differ in lightness as well as in hue, so that they stay apart for the colour-blind and
//! in print, and each has a contrast of at least 4.5 to its background, since names of curves are written in
//! them. Classes are spelt out, without variables of CSS: a picture that stands alone is also read by
//! programs that know no variables.

use std::fmt::Write;

/// On white, and on nearly black.
const COLOURS: [(&str, &str); 5] = [
    ("#1a73d9", "#4ea1f3"),
    ("#cc4a0a", "#f07a3c"),
    ("#0b8060", "#2fc39a"),
    ("#5e2a84", "#e3b8f5"),
    ("#5b4300", "#f0dc82"),
];
/// Background, ink, quiet ink, grid.
const LIGHT: [&str; 4] = ["#ffffff", "#1c2024", "#5c636b", "#e3e6ea"];
const DARK: [&str; 4] = ["#14171a", "#e8eaed", "#9aa2ab", "#2b3036"];

/// How many colours there are; a style beyond them has a colour again, and dashes.
pub const COUNT: usize = COLOURS.len();

/// How many times as wide as other text a title is: larger, and bold.
pub(crate) const BOLD: f64 = 1.25;

/// The class that gives a stroke a style's colour.
pub fn stroke(style: usize) -> String {
    format!("s{}", style % COUNT)
}

/// The class that fills with it.
pub fn fill(style: usize) -> String {
    format!("f{}", style % COUNT)
}

/// The rules of all classes.
pub fn sheet() -> String {
    let mut sheet = String::from(
        "text{font:12px system-ui,-apple-system,\"Segoe UI\",Roboto,\"Helvetica Neue\",Arial,sans-serif}\n\
         .head{font-size:18px;font-weight:600}.bold{font-weight:600;font-size:13px}.small{font-size:11px}\n\
         .curve{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}.faint{stroke-width:1;opacity:.35}\n\
         .dashed{stroke-dasharray:6 5;stroke-width:1.6}.guide{stroke-dasharray:2 4;stroke-width:1.4;fill:none}\n\
         .interval{stroke-width:1.4}.dot{opacity:.5}.ring{fill:none;stroke-width:2.4}\n\
         .planned{fill:none;stroke-width:1.4}.grid,.axis{stroke-width:1}\n",
    );
    sheet.push_str(&colours(LIGHT, |(light, _)| light));
    let dark = colours(DARK, |(_, dark)| dark);
    let _ = write!(sheet, "@media(prefers-color-scheme:dark){{\n{dark}}}\n");
    sheet
}

fn colours(
    [ground, ink, quiet, grid]: [&str; 4],
    of: impl Fn((&'static str, &'static str)) -> &'static str,
) -> String {
    let mut rules = format!(
        ".ground{{fill:{ground}}}.ink{{fill:{ink}}}.quiet{{fill:{quiet}}}.inverse{{fill:{ground}}}\n\
         .grid{{stroke:{grid}}}.axis{{stroke:{quiet}}}.guide,.leader{{stroke:{quiet}}}.rest{{fill:{grid}}}\n"
    );
    for (style, pair) in COLOURS.into_iter().enumerate() {
        let colour = of(pair);
        let _ = writeln!(rules, ".s{style}{{stroke:{colour}}}.f{style}{{fill:{colour}}}");
    }
    rules
}

/// Colours of a page around its pictures: background, ink, quiet ink and lines, as declarations of CSS
/// variables.
pub(crate) fn of_page() -> String {
    let declared = |[ground, ink, quiet, grid]: [&str; 4], accent: &str| {
        format!(":root{{--ground:{ground};--ink:{ink};--quiet:{quiet};--line:{grid};--accent:{accent}}}")
    };
    let (light, dark) = COLOURS[0];
    format!("{}\n@media(prefers-color-scheme:dark){{{}}}\n", declared(LIGHT, light), declared(DARK, dark))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Relative luminance as WCAG defines it.
    fn luminance(colour: &str) -> f64 {
        let channel = |at: usize| {
            let value = f64::from(u8::from_str_radix(&colour[at..at + 2], 16).unwrap()) / 255.0;
            if value <= 0.040_45 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5)
    }

    fn contrast(a: &str, b: &str) -> f64 {
        let (a, b) = (luminance(a) + 0.05, luminance(b) + 0.05);
        a.max(b) / a.min(b)
    }

    #[test]
    fn words_can_be_read_on_their_background() {
        for (light, dark) in COLOURS {
            assert!(contrast(light, LIGHT[0]) >= 4.5, "{light} on {}", LIGHT[0]);
            assert!(contrast(dark, DARK[0]) >= 4.5, "{dark} on {}", DARK[0]);
        }
        for [ground, ink, quiet, _] in [LIGHT, DARK] {
            assert!(contrast(ink, ground) >= 12.0 && contrast(quiet, ground) >= 4.5, "{ground}");
        }
    }
}
