//! Numbers as people read them: few digits, and a letter for thousands.

/// Three digits: `0.0312`, `1.5`, `480`, `12.3k`, `1.24M`, `3e-5`; a dash for what is no number.
pub fn short(value: f64) -> String {
    if !value.is_finite() {
        return "–".into();
    }
    let size = value.abs();
    if size == 0.0 {
        return "0".into();
    }
    if size < 9.995e-4 {
        return scientific(value);
    }
    let (unit, letter) = unit_of(size);
    let scaled = value / unit;
    let digits = (2 - scaled.abs().log10().floor() as i32).max(0) as usize;
    let text = format!("{scaled:.digits$}");
    format!("{}{letter}", trimmed(&text))
}

/// The same of a fraction as a percentage: `12.5 %`.
pub fn percent(fraction: f64) -> String {
    match fraction.is_finite() {
        true => format!("{} %", short(100.0 * fraction)),
        false => short(fraction),
    }
}

/// Seconds in the unit in which they are few: `0.12 ms`, `3.4 s`, `12 min`, `2.5 h`.
pub fn seconds(value: f64) -> String {
    match value {
        v if !v.is_finite() => short(v),
        v if v >= 7200.0 => format!("{} h", short(v / 3600.0)),
        v if v >= 120.0 => format!("{} min", short(v / 60.0)),
        v if v >= 1.0 || v == 0.0 => format!("{} s", short(v)),
        v => format!("{} ms", short(1e3 * v)),
    }
}

/// Ticks of an axis that are a step apart: all with the same digits and the same letter.
pub(crate) fn tick_labels(values: &[f64], step: f64) -> Vec<String> {
    let most = values.iter().fold(0f64, |most, value| most.max(value.abs()));
    if most > 0.0 && most < 9.995e-4 {
        return values
            .iter()
            .map(|value| if *value == 0.0 { "0".into() } else { scientific(*value) })
            .collect();
    }
    let (unit, letter) = unit_of(most);
    // A step of 0.1 has a logarithm of -1.0000000000000002 or so.
    let digits = (-((step / unit).log10() + 1e-9).floor()).clamp(0.0, 12.0) as usize;
    let write = |value: &f64| match *value == 0.0 {
        true => "0".into(),
        false => format!("{:.digits$}{letter}", value / unit),
    };
    values.iter().map(write).collect()
}

/// What a number that large is counted in.
fn unit_of(size: f64) -> (f64, &'static str) {
    match size {
        s if s >= 9.995e11 => (1e12, "T"),
        s if s >= 9.995e8 => (1e9, "B"),
        s if s >= 9.995e5 => (1e6, "M"),
        s if s >= 9.995e3 => (1e3, "k"),
        _ => (1.0, ""),
    }
}

/// `1.5e-5`
fn scientific(value: f64) -> String {
    let text = format!("{value:.1e}");
    text.replace(".0e", "e")
}

fn trimmed(text: &str) -> &str {
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.'),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits_are_enough() {
        let numbers =
            [0.0, 1.0, 0.031_23, 0.5, 1.234, 12.34, 480.0, 9_994.0, 9_996.0, 12_345.0, 1e6, 2.5e9, -0.25];
        let expected =
            ["0", "1", "0.0312", "0.5", "1.23", "12.3", "480", "9994", "10k", "12.3k", "1M", "2.5B", "-0.25"];
        assert_eq!(numbers.map(short), expected);
        assert_eq!([3e-5, 1.25e-7, -4.4e-9].map(short), ["3e-5", "1.2e-7", "-4.4e-9"]);
        assert_eq!([f64::NAN, f64::INFINITY].map(short), ["–", "–"]);
    }

    #[test]
    fn units_are_those_in_which_numbers_are_small() {
        assert_eq!([0.000_12, 3.4, 720.0, 9_000.0].map(seconds), ["0.12 ms", "3.4 s", "12 min", "2.5 h"]);
        assert_eq!([0.125, 1.0].map(percent), ["12.5 %", "100 %"]);
    }

    #[test]
    fn marks_of_an_axis_have_the_same_digits() {
        assert_eq!(tick_labels(&[0.0, 0.5, 1.0], 0.5), ["0", "0.5", "1.0"]);
        assert_eq!(tick_labels(&[0.1, 0.2, 0.3], 0.1), ["0.1", "0.2", "0.3"]);
        assert_eq!(tick_labels(&[0.0, 20_000.0, 40_000.0], 20_000.0), ["0", "20k", "40k"]);
        assert_eq!(tick_labels(&[9_000.0, 9_500.0, 10_000.0], 500.0), ["9.0k", "9.5k", "10.0k"]);
        assert_eq!(tick_labels(&[0.0, 1e-5, 2e-5], 1e-5), ["0", "1e-5", "2e-5"]);
    }
}
