//! Axes: from values to places, and where they are marked.

use crate::number;

/// An axis as it is asked for; what it spans follows from what is drawn over it.
#[derive(Debug, Clone, PartialEq)]
pub struct Axis {
    /// What is counted, with its unit.
    pub label: String,
    /// Equal differences or equal ratios.
    pub scale: Scale,
    /// Values that are marked, with what is written there, ascending; empty: round ones are found.
    pub marks: Vec<(f64, String)>,
    /// Values that it reaches whatever is drawn.
    pub reaches: Vec<f64>,
}

/// What are equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// Equal differences.
    Linear,
    /// Equal ratios: of values above zero.
    Log,
}

impl Axis {
    /// Equal distances are equal differences.
    pub fn linear(label: impl Into<String>) -> Axis {
        Axis { label: label.into(), scale: Scale::Linear, marks: Vec::new(), reaches: Vec::new() }
    }

    /// Equal distances are equal ratios.
    pub fn log(label: impl Into<String>) -> Axis {
        Axis { scale: Scale::Log, ..Axis::linear(label) }
    }

    /// Marked at these values instead of round ones; it reaches all of them.
    pub fn marked(self, marks: Vec<(f64, String)>) -> Axis {
        Axis { marks, ..self }
    }

    /// Reaching a value whatever is drawn: `0`, so that heights are compared and not differences.
    pub fn reaching(mut self, value: f64) -> Axis {
        self.reaches.push(value);
        self
    }

    /// The axis from one value to another, without room around them.
    pub(crate) fn exactly(&self, (low, high): (f64, f64), (from, to): (f64, f64)) -> Placed {
        Placed { scale: self.scale, low, high, from, to }
    }

    /// What is counted, and that equal distances are ratios where they are: nobody should have to find that out by the marks.
    pub(super) fn caption(&self) -> String {
        match (self.scale, self.label.as_str()) {
            (Scale::Linear, label) => label.into(),
            (Scale::Log, "") => "log scale".into(),
            (Scale::Log, label) => format!("{label} (log scale)"),
        }
    }

    /// Whether the axis has a place for the value.
    pub(super) fn takes(&self, value: f64) -> bool {
        value.is_finite() && (self.scale == Scale::Linear || value > 0.0)
    }

    /// The axis over these values, and those that it reaches in any case, between two places.
    pub(crate) fn over(&self, values: impl Iterator<Item = f64>, from: f64, to: f64) -> Placed {
        let marks = self.marks.iter().map(|mark| mark.0);
        let all = values.chain(marks).chain(self.reaches.iter().copied()).filter(|value| self.takes(*value));
        let (low, high) = all.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        let (low, high) = match self.scale {
            Scale::Linear => around_linear(low, high),
            Scale::Log => around_log(low, high),
        };
        Placed { scale: self.scale, low, high, from, to }
    }
}

/// With a little room at both ends, but not below zero where nothing is; a single value gets room too.
fn around_linear(low: f64, high: f64) -> (f64, f64) {
    if low > high {
        return (0.0, 1.0);
    }
    let room = match high - low {
        d if d > 1e-12 * high.abs().max(low.abs()) => 0.04 * d,
        _ if high != 0.0 => 0.1 * high.abs(),
        _ => 1.0,
    };
    let bottom = if low >= 0.0 { (low - room).max(0.0) } else { low - room };
    // Differences of huge numbers must stay finite.
    (bottom.max(f64::MIN / 4.0), (high + room).min(f64::MAX / 4.0))
}

fn around_log(low: f64, high: f64) -> (f64, f64) {
    if low > high {
        return (1.0, 10.0);
    }
    let room = if high / low > 1.0 + 1e-9 { (high / low).powf(0.04) } else { 2.0 };
    ((low / room).max(f64::MIN_POSITIVE), (high * room).min(f64::MAX))
}

/// An axis between two places of a picture.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Placed {
    scale: Scale,
    pub low: f64,
    pub high: f64,
    /// Where the least value lies,
    pub from: f64,
    /// and the greatest.
    pub to: f64,
}

impl Placed {
    /// The place of a value, if the axis has one for it.
    pub fn at(&self, value: f64) -> Option<f64> {
        let share = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => (value.ln() - self.low.ln()) / (self.high.ln() - self.low.ln()),
        };
        share.is_finite().then_some(self.from + share * (self.to - self.from))
    }

    /// The same for a value that lies on the axis.
    pub fn within(&self, value: f64) -> Option<f64> {
        self.at(value).filter(|_| (self.low..=self.high).contains(&value))
    }

    /// How a script finds values by places: the scale, the least and the greatest value, and their places.
    pub fn attribute(&self) -> String {
        let name = if self.scale == Scale::Log { "log" } else { "linear" };
        format!("{name} {:e} {:e} {:.1} {:.1}", self.low, self.high, self.from, self.to)
    }

    /// Values between the marks of a logarithmic axis, which get a tick without a number; none over many powers of ten.
    pub fn ticks_between(&self) -> Vec<f64> {
        if self.scale == Scale::Linear || self.high / self.low > 1e6 {
            return Vec::new();
        }
        let powers = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
        let all = powers.flat_map(|power| (1..10).map(move |digit| f64::from(digit) * 10f64.powi(power)));
        all.filter(|tick| (self.low..=self.high).contains(tick)).collect()
    }

    /// Round values to mark, at most about `most` of them, with what is written there.
    pub fn marks(&self, most: usize) -> Vec<(f64, String)> {
        match self.scale {
            Scale::Linear => linear_marks(self.low, self.high, most),
            Scale::Log => log_marks(self.low, self.high, most),
        }
    }
}

/// Multiples of 1, 2 or 5 times a power of ten.
fn linear_marks(low: f64, high: f64, most: usize) -> Vec<(f64, String)> {
    let rough = (high - low) / most.max(1) as f64;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|k| k * power).into_iter().find(|step| *step >= rough * 0.999);
    let step = step.unwrap_or(10.0 * power);
    let first = (low / step).ceil() as i64;
    let values: Vec<f64> =
        (first..).map(|k| k as f64 * step).take_while(|v| *v <= high).take(2 * most + 2).collect();
    let words = number::alike(&values, step);
    values.into_iter().zip(words).collect()
}

/// The values at which people mark such an axis.
const LADDERS: [&[f64]; 3] = [&[1.0, 2.0, 5.0], &[1.0, 3.0], &[1.0]];

/// Powers of ten; between them 2 and 5, or 3, as far as there is room, and three in all even where there is less; over less than
/// that the marks of a linear axis.
fn log_marks(low: f64, high: f64, most: usize) -> Vec<(f64, String)> {
    let powers = low.log10().floor() as i32..=high.log10().ceil() as i32;
    let through = |steps: &'static [f64]| -> Vec<f64> {
        let all = powers.clone().flat_map(|power| steps.iter().map(move |step| step * 10f64.powi(power)));
        all.filter(|tick| (low..=high).contains(tick)).collect()
    };
    let fine = through(&[1.0, 2.0, 5.0]);
    if fine.len() < 3 {
        let linear = linear_marks(low, high, most.min(4));
        return if linear.len() > fine.len() { linear } else { written(fine) };
    }
    let ladders = LADDERS.map(through);
    let fits = ladders.iter().find(|marks| (3..=most.max(3)).contains(&marks.len()));
    if let Some(marks) = fits.or_else(|| ladders.iter().rfind(|marks| (3..=6).contains(&marks.len()))) {
        return written(marks.clone());
    }
    let [.., tens] = ladders;
    let every = tens.len().div_ceil(most.max(1)).max(1);
    written(tens.into_iter().step_by(every).collect())
}

fn written(values: Vec<f64>) -> Vec<(f64, String)> {
    values.into_iter().map(|value| (value, number::short(value))).collect()
}

/// The two axes, placed.
pub(super) struct Axes {
    pub x: Placed,
    pub y: Placed,
}

impl Axes {
    pub fn at(&self, point: (f64, f64)) -> Option<(f64, f64)> {
        Some((self.x.at(point.0)?, self.y.at(point.1)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(marks: &[(f64, String)]) -> Vec<f64> {
        marks.iter().map(|mark| mark.0).collect()
    }

    #[test]
    fn marks_are_round_and_within() {
        assert_eq!(values(&log_marks(0.3, 40.0, 7)), [0.5, 1.0, 2.0, 5.0, 10.0, 20.0]);
        assert_eq!(values(&log_marks(0.05, 90.0, 4)), [0.1, 1.0, 10.0]);
        // Less than two powers of ten in little room: three marks, where there was one.
        assert_eq!(values(&log_marks(150.0, 6000.0, 4)), [300.0, 1000.0, 3000.0]);
        assert_eq!(values(&log_marks(15.0, 1100.0, 1)).len(), 4);
        let axis = Axis::log("steps").exactly((150.0, 1200.0), (0.0, 1.0));
        assert_eq!(axis.ticks_between().len(), 9, "from 200 to 1000");
        assert_eq!(
            (Axis::log("steps").caption(), Axis::linear("x").caption()),
            ("steps (log scale)".into(), "x".into())
        );
        let words = |marks: Vec<(f64, String)>| marks.into_iter().map(|mark| mark.1).collect::<Vec<_>>();
        assert_eq!(words(log_marks(0.05, 90.0, 6)), ["0.1", "0.3", "1", "3", "10", "30"]);
        assert_eq!(words(log_marks(1.3, 1.9, 6)), ["1.4", "1.6", "1.8"]);
        assert_eq!(words(linear_marks(0.0, 2.3, 5)), ["0", "0.5", "1.0", "1.5", "2.0"]);
        assert_eq!(values(&linear_marks(-3.0, 3.0, 4)), [-2.0, 0.0, 2.0]);
        assert_eq!(log_marks(1e-12, 1e12, 6).len(), 5, "not one for each of 24 powers");
    }

    #[test]
    fn equal_ratios_are_equal_distances() {
        let axis = Axis::log("x").over([1.0, 100.0].into_iter(), 0.0, 300.0);
        let [one, ten, hundred] = [1.0, 10.0, 100.0].map(|value| axis.at(value).unwrap());
        assert!((ten - one - (hundred - ten)).abs() < 1e-9 && one > 0.0 && hundred < 300.0);
    }

    /// A place for every value that can be drawn, and marks, whatever there is to draw: one value, none, the largest.
    #[test]
    fn an_axis_has_a_length_whatever_lies_on_it() {
        let cases: [&[f64]; 8] =
            [&[], &[0.0], &[5.0], &[-5.0], &[1e-300], &[1e300, -1e300], &[f64::NAN], &[1.0, 1.0 + 1e-15]];
        for values in cases {
            for axis in [Axis::linear(""), Axis::log("")] {
                let placed = axis.over(values.iter().copied(), 0.0, 100.0);
                assert!(placed.low < placed.high, "{axis:?} {values:?} {placed:?}");
                for value in values.iter().filter(|value| axis.takes(**value)) {
                    let at = placed.within(*value);
                    assert!(at.is_some_and(|at| (0.0..=100.0).contains(&at)), "{axis:?} {value} {placed:?}");
                }
                let marks = placed.marks(5);
                assert!((1..=12).contains(&marks.len()), "{axis:?} {values:?} {marks:?}");
            }
        }
    }

    #[test]
    fn what_is_counted_is_not_shown_below_zero() {
        assert_eq!(Axis::linear("").over([0.0, 10.0].into_iter(), 0.0, 1.0).low, 0.0);
        assert!(Axis::linear("").over([-1.0, 10.0].into_iter(), 0.0, 1.0).low < -1.0);
        let reached = Axis::linear("").reaching(0.0).over([8.0, 10.0].into_iter(), 0.0, 1.0);
        assert_eq!(reached.low, 0.0);
    }
}
