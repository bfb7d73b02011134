//! A hyperparameter and the values that are searched. Points of the search lie in the unit cube; a range says
//! which value a coordinate stands for, and where between its ends a value lies.

use espalier_plan::Error;
use espalier_plan::config::reader::{Section, show};
use serde::Serialize;
use toml::{Table, Value};

/// The fraction of a range, at either end, in which a best trial says that the range may be too narrow.
const EDGE: f64 = 0.1;

/// By how much of itself a range grows when it is widened.
const GROWTH: f64 = 0.25;

/// A field of the run file and the values that are tried.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SearchRange {
    /// As `--set` names it: `learning_rate.peak`.
    pub field: String,
    /// How values lie between the ends.
    pub scale: RangeScale,
    /// The end that coordinate 0 stands for.
    pub low: f64,
    /// The end that coordinate 1 stands for.
    pub high: f64,
}

/// How the values of a range are distributed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RangeScale {
    /// Evenly in the logarithm.
    Log,
    /// Evenly.
    Linear,
    /// Integers, evenly.
    Whole,
    /// Integers, evenly in the logarithm.
    WholeLog,
    /// One minus the value evenly in the logarithm, as suits a momentum: `low` and `high` are those of one
    /// minus the value.
    OneMinusLog,
}

/// One end of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RangeEnd {
    /// Where coordinate 0 is.
    Low,
    /// Where coordinate 1 is.
    High,
}

impl RangeScale {
    const ALL: [(&'static str, RangeScale); 5] = [
        ("log", RangeScale::Log),
        ("linear", RangeScale::Linear),
        ("whole", RangeScale::Whole),
        ("whole_log", RangeScale::WholeLog),
        ("one_minus_log", RangeScale::OneMinusLog),
    ];

    /// From a number as written to one in which the range is even.
    fn transform(self, end: f64) -> f64 {
        match self {
            RangeScale::Log | RangeScale::WholeLog | RangeScale::OneMinusLog => end.ln(),
            RangeScale::Linear | RangeScale::Whole => end,
        }
    }

    fn inverse(self, even: f64) -> f64 {
        match self {
            RangeScale::Log | RangeScale::WholeLog | RangeScale::OneMinusLog => even.exp(),
            RangeScale::Linear | RangeScale::Whole => even,
        }
    }
}

impl SearchRange {
    /// The value at a coordinate in [0, 1].
    pub fn at(&self, coordinate: f64) -> f64 {
        let (low, high) = (self.scale.transform(self.low), self.scale.transform(self.high));
        let value = self.scale.inverse(low + coordinate * (high - low));
        match self.scale {
            RangeScale::Log | RangeScale::Linear => value,
            RangeScale::Whole | RangeScale::WholeLog => value.round(),
            RangeScale::OneMinusLog => 1.0 - value,
        }
    }

    /// The coordinate of a value; outside of [0, 1] where it lies outside.
    pub fn coordinate(&self, value: f64) -> f64 {
        let written = if self.scale == RangeScale::OneMinusLog { 1.0 - value } else { value };
        let (low, high) = (self.scale.transform(self.low), self.scale.transform(self.high));
        (self.scale.transform(written) - low) / (high - low)
    }

    /// The end in whose outer tenth a value lies.
    pub fn edge(&self, value: f64) -> Option<RangeEnd> {
        let coordinate = self.coordinate(value);
        if coordinate < EDGE {
            Some(RangeEnd::Low)
        } else if coordinate > 1.0 - EDGE {
            Some(RangeEnd::High)
        } else {
            None
        }
    }

    /// The range with a quarter more at one end, and the part of it that is new together with the outer tenth
    /// that was the reason.
    pub fn widened(&self, end: RangeEnd) -> (SearchRange, SearchRange) {
        let (low, high) = (self.scale.transform(self.low), self.scale.transform(self.high));
        let span = high - low;
        let mut wide = self.clone();
        let mut fresh = self.clone();
        match end {
            RangeEnd::Low => {
                wide.low = self.scale.inverse(low - GROWTH * span);
                (fresh.low, fresh.high) = (wide.low, self.scale.inverse(low + EDGE * span));
            }
            RangeEnd::High => {
                wide.high = self.scale.inverse(high + GROWTH * span);
                (fresh.low, fresh.high) = (self.scale.inverse(high - EDGE * span), wide.high);
            }
        }
        (wide, fresh)
    }

    /// Reads `{ log = [1e-4, 1.0] }` at a path of the study file.
    fn read(field: String, path: &str, table: &Table) -> Result<SearchRange, Error> {
        let mut section = Section::foreign(path, table);
        let mut found = Vec::new();
        for (word, scale) in RangeScale::ALL {
            found.extend(section.get(word).map(|value| (word, scale, value)));
        }
        section.finish()?;
        let [(word, scale, value)] = found[..] else {
            return Err(Error::Value {
                field: path.into(),
                expected: "one of { log = [a, b] }, { linear = [a, b] }, { whole = [a, b] }, { whole_log = [a, b] } and { one_minus_log = [a, b] }".into(),
                got: if found.is_empty() { "none".into() } else { "several".into() },
                hint: None,
            });
        };
        let ends = value.as_array().filter(|ends| ends.len() == 2);
        let ends: Option<Vec<f64>> = ends.and_then(|ends| ends.iter().map(number).collect());
        let Some(&[low, high]) = ends.as_deref() else {
            return Err(section.wrong(word, "two numbers, as in [0.001, 1.0]", value));
        };
        let fits = match scale {
            RangeScale::Log => low > 0.0,
            RangeScale::Linear => true,
            RangeScale::Whole => low.fract() == 0.0 && high.fract() == 0.0,
            RangeScale::WholeLog => low.fract() == 0.0 && high.fract() == 0.0 && low > 0.0,
            RangeScale::OneMinusLog => low > 0.0 && high <= 1.0,
        };
        let expected = match scale {
            _ if low >= high => "a range that is not empty: the smaller number first",
            RangeScale::Log => "a range above 0, since its logarithm is taken",
            RangeScale::Linear => "two finite numbers",
            RangeScale::Whole => "a range of whole numbers",
            RangeScale::WholeLog => "a range of whole numbers above 0",
            RangeScale::OneMinusLog => "a range above 0 and up to 1, of one minus the value",
        };
        if !fits || low >= high || !low.is_finite() || !high.is_finite() {
            return Err(Error::Value {
                field: section.field(word),
                expected: expected.into(),
                got: format!("[{low}, {high}]"),
                hint: None,
            });
        }
        Ok(SearchRange { field, scale, low, high })
    }
}

/// Reads `[search.ranges]`. A field stands there with its full path, in quotes or as sections:
/// `"learning_rate.peak" = ..` and `learning_rate.peak = ..` are the same.
pub(crate) fn read_all(path: &str, table: &Table) -> Result<Vec<SearchRange>, Error> {
    let mut ranges = Vec::new();
    for (key, value) in table {
        collect(key.clone(), &format!("{path}.{key}"), value, &mut ranges)?;
    }
    Ok(ranges)
}

fn collect(field: String, path: &str, value: &Value, ranges: &mut Vec<SearchRange>) -> Result<(), Error> {
    let Value::Table(table) = value else {
        let expected = "a range, as in { log = [1e-4, 1.0] }".into();
        return Err(Error::Value { field: path.into(), expected, got: show(value), hint: None });
    };
    // Sections hold tables, a range holds a list.
    if !table.is_empty() && table.values().all(Value::is_table) {
        for (key, value) in table {
            collect(format!("{field}.{key}"), &format!("{path}.{key}"), value, ranges)?;
        }
        return Ok(());
    }
    ranges.push(SearchRange::read(field, path, table)?);
    Ok(())
}

/// An integer or a float.
pub fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Float(x) => Some(*x),
        Value::Integer(n) => Some(*n as f64),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(scale: RangeScale, low: f64, high: f64) -> SearchRange {
        SearchRange { field: "learning_rate.peak".into(), scale, low, high }
    }

    #[test]
    fn values_lie_as_the_scale_says_and_are_found_again() {
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12 * b.abs().max(1.0), "{a} is not {b}");
        close(range(RangeScale::Log, 1e-4, 1.0).at(0.5), 1e-2);
        close(range(RangeScale::Linear, 2.0, 6.0).at(0.25), 3.0);
        close(range(RangeScale::Whole, 30_000.0, 60_000.0).at(0.50001), 45_000.0);
        close(range(RangeScale::WholeLog, 10.0, 1000.0).at(0.50001), 100.0);
        close(range(RangeScale::OneMinusLog, 1e-4, 0.1).at(1.0), 0.9);
        close(range(RangeScale::OneMinusLog, 1e-4, 0.1).at(0.0), 0.9999);
        for scale in [RangeScale::Log, RangeScale::Linear, RangeScale::OneMinusLog] {
            let range = range(scale, 1e-3, 0.5);
            close(range.coordinate(range.at(0.3)), 0.3);
        }
    }

    #[test]
    fn the_outer_tenths_are_edges() {
        let range = range(RangeScale::Log, 1e-4, 1.0);
        assert_eq!(range.edge(2e-4), Some(RangeEnd::Low));
        assert_eq!(range.edge(0.5), Some(RangeEnd::High));
        assert_eq!(range.edge(0.1), None);
        assert_eq!(range.edge(3.0), Some(RangeEnd::High), "what lies outside lies beyond the edge");
    }

    #[test]
    fn a_range_is_widened_by_a_quarter_and_searched_where_it_is_new() {
        let range = range(RangeScale::Log, 1e-4, 1.0);
        let (wide, fresh) = range.widened(RangeEnd::High);
        assert!((wide.high - 10.0).abs() < 1e-9 && wide.low == 1e-4, "{wide:?}");
        assert!((fresh.low - 10f64.powf(-0.4)).abs() < 1e-9 && fresh.high == wide.high, "{fresh:?}");
        assert_eq!(wide.edge(1.5), None);
        let (wide, fresh) = range.widened(RangeEnd::Low);
        assert!((wide.low - 1e-5).abs() < 1e-12 && wide.high == 1.0);
        assert!(fresh.low == wide.low && (fresh.high - 10f64.powf(-3.6)).abs() < 1e-9);
    }

    fn read(text: &str) -> Result<Vec<SearchRange>, Error> {
        read_all("search.ranges", &text.parse().unwrap())
    }

    #[test]
    fn a_field_is_written_in_quotes_or_as_sections() {
        let quoted = read("\"learning_rate.peak\" = { log = [1e-4, 1] }").unwrap();
        let nested = read("learning_rate.peak = { log = [1e-4, 1.0] }").unwrap();
        assert_eq!(quoted, nested);
        assert_eq!(quoted, [range(RangeScale::Log, 1e-4, 1.0)]);
    }

    #[test]
    fn a_range_that_is_none_gets_a_sentence() {
        let message = |text: &str| read(text).unwrap_err().to_string();
        let refused = r#"
            a.b = { log = [1.0, 1e-4] } => `search.ranges.a.b.log` must be a range that is not empty: the smaller number first, got [1, 0.0001]
            a.b = { log = [0.1, 0.1] } => `search.ranges.a.b.log` must be a range that is not empty: the smaller number first, got [0.1, 0.1]
            a.b = { log = [0, 1] } => `search.ranges.a.b.log` must be a range above 0, since its logarithm is taken, got [0, 1]
            a.b = { one_minus_log = [0.1, 2] } => `search.ranges.a.b.one_minus_log` must be a range above 0 and up to 1, of one minus the value, got [0.1, 2]
            a.b = { whole = [1.5, 2] } => `search.ranges.a.b.whole` must be a range of whole numbers, got [1.5, 2]
            a.b = { whole_log = [0, 2] } => `search.ranges.a.b.whole_log` must be a range of whole numbers above 0, got [0, 2]
            a.b = { linaer = [1, 2] } => `search.ranges.a.b.linaer` is not a field; did you mean `search.ranges.a.b.linear`?
            a.b = { log = [1] } => `search.ranges.a.b.log` must be two numbers, as in [0.001, 1.0], got a list of 1
            a = 3 => `search.ranges.a` must be a range, as in { log = [1e-4, 1.0] }, got 3
        "#;
        for line in refused.trim().lines() {
            let (text, expected) = line.split_once(" => ").expect("a range, and a sentence");
            assert_eq!(message(text), expected);
        }
    }
}
