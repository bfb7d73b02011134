//! Axes: from values to pixels, and where they have a tick.

use crate::number;

/// An axis as it is asked for; what it spans follows from what is drawn over it.
#[derive(Debug, Clone, PartialEq)]
pub struct PlotAxis {
    /// What is counted, with its unit.
    pub label: String,
    /// Equal differences or equal ratios.
    pub scale: AxisScale,
    /// Values that have a tick, with what is written there, ascending; empty: round ones are found.
    pub ticks: Vec<(f64, String)>,
    /// Values that it reaches whatever is drawn.
    pub includes: Vec<f64>,
}

/// What are equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AxisScale {
    /// Equal differences.
    Linear,
    /// Equal ratios: of values above zero.
    Log,
}

impl PlotAxis {
    /// Equal distances are equal differences.
    pub fn linear(label: impl Into<String>) -> PlotAxis {
        PlotAxis { label: label.into(), scale: AxisScale::Linear, ticks: Vec::new(), includes: Vec::new() }
    }

    /// Equal distances are equal ratios.
    pub fn log(label: impl Into<String>) -> PlotAxis {
        PlotAxis { scale: AxisScale::Log, ..PlotAxis::linear(label) }
    }

    /// With ticks at these values instead of round ones; it reaches all of them.
    pub fn with_ticks(self, ticks: Vec<(f64, String)>) -> PlotAxis {
        PlotAxis { ticks, ..self }
    }

    /// Reaching a value whatever is drawn: `0`, so that heights are compared and not differences.
    pub fn including(mut self, value: f64) -> PlotAxis {
        self.includes.push(value);
        self
    }

    /// The axis from one value to another, without room around them.
    pub(crate) fn placed_exactly(&self, (low, high): (f64, f64), (from, to): (f64, f64)) -> PlacedAxis {
        PlacedAxis { scale: self.scale, low, high, from, to }
    }

    /// What is counted, and that equal distances are ratios where they are: nobody should have to find that
    /// out by the ticks.
    pub(super) fn caption(&self) -> String {
        match (self.scale, self.label.as_str()) {
            (AxisScale::Linear, label) => label.into(),
            (AxisScale::Log, "") => "log scale".into(),
            (AxisScale::Log, label) => format!("{label} (log scale)"),
        }
    }

    /// Whether the value can be drawn on the axis.
    pub(super) fn accepts(&self, value: f64) -> bool {
        value.is_finite() && (self.scale == AxisScale::Linear || value > 0.0)
    }

    /// The axis over these values, and those that it reaches in any case, between two pixel coordinates.
    pub(crate) fn placed_over(&self, values: impl Iterator<Item = f64>, from: f64, to: f64) -> PlacedAxis {
        let ticks = self.ticks.iter().map(|tick| tick.0);
        let all =
            values.chain(ticks).chain(self.includes.iter().copied()).filter(|value| self.accepts(*value));
        let (low, high) = all.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        let (low, high) = match self.scale {
            AxisScale::Linear => around_linear(low, high),
            AxisScale::Log => around_log(low, high),
        };
        PlacedAxis { scale: self.scale, low, high, from, to }
    }
}

/// With a little room at both ends, but not below zero where nothing is; a single value gets room too.
fn around_linear(low: f64, high: f64) -> (f64, f64) {
    if low > high {
        return (0.0, 1.0);
    }
    let margin = match high - low {
        d if d > 1e-12 * high.abs().max(low.abs()) => 0.04 * d,
        _ if high != 0.0 => 0.1 * high.abs(),
        _ => 1.0,
    };
    let bottom = if low >= 0.0 { (low - margin).max(0.0) } else { low - margin };
    // Differences of huge numbers must stay finite.
    (bottom.max(f64::MIN / 4.0), (high + margin).min(f64::MAX / 4.0))
}

fn around_log(low: f64, high: f64) -> (f64, f64) {
    if low > high {
        return (1.0, 10.0);
    }
    let margin = if high / low > 1.0 + 1e-9 { (high / low).powf(0.04) } else { 2.0 };
    ((low / margin).max(f64::MIN_POSITIVE), (high * margin).min(f64::MAX))
}

/// An axis between two pixel coordinates of a picture.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlacedAxis {
    scale: AxisScale,
    pub low: f64,
    pub high: f64,
    /// Where the least value lies,
    pub from: f64,
    /// and the greatest.
    pub to: f64,
}

impl PlacedAxis {
    /// The pixel coordinate of a value that lies on the axis.
    pub fn at(&self, value: f64) -> Option<f64> {
        let fraction = match self.scale {
            AxisScale::Linear => (value - self.low) / (self.high - self.low),
            AxisScale::Log => (value.ln() - self.low.ln()) / (self.high.ln() - self.low.ln()),
        };
        fraction.is_finite().then_some(self.from + fraction * (self.to - self.from))
    }

    /// The same for a value that lies on the axis.
    pub fn within(&self, value: f64) -> Option<f64> {
        self.at(value).filter(|_| (self.low..=self.high).contains(&value))
    }

    /// How a script finds values by pixels: the scale, the least and the greatest value, and their coordinates.
    pub(crate) fn data_attribute(&self) -> String {
        let name = if self.scale == AxisScale::Log { "log" } else { "linear" };
        format!("{name} {:e} {:e} {:.1} {:.1}", self.low, self.high, self.from, self.to)
    }

    /// Values between the ticks of a logarithmic axis, which get a tick without a number; none over many
    /// powers of ten.
    pub(crate) fn minor_ticks(&self) -> Vec<f64> {
        if self.scale == AxisScale::Linear || self.high / self.low > 1e6 {
            return Vec::new();
        }
        let powers = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
        let all = powers.flat_map(|power| (1..10).map(move |digit| f64::from(digit) * 10f64.powi(power)));
        all.filter(|tick| (self.low..=self.high).contains(tick)).collect()
    }

    /// Round values to mark, at most about `most` of them, with what is written there.
    pub fn ticks(&self, most: usize) -> Vec<(f64, String)> {
        match self.scale {
            AxisScale::Linear => linear_ticks(self.low, self.high, most),
            AxisScale::Log => log_ticks(self.low, self.high, most),
        }
    }
}

/// Multiples of 1, 2 or 5 times a power of ten.
fn linear_ticks(low: f64, high: f64, most: usize) -> Vec<(f64, String)> {
    let rough = (high - low) / most.max(1) as f64;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|k| k * power).into_iter().find(|step| *step >= rough * 0.999);
    let step = step.unwrap_or(10.0 * power);
    let first = (low / step).ceil() as i64;
    let values: Vec<f64> =
        (first..).map(|k| k as f64 * step).take_while(|v| *v <= high).take(2 * most + 2).collect();
    let labels = number::tick_labels(&values, step);
    values.into_iter().zip(labels).collect()
}

/// The values at which people mark such an axis.
const LADDERS: [&[f64]; 3] = [&[1.0, 2.0, 5.0], &[1.0, 3.0], &[1.0]];

/// Powers of ten; between them 2 and 5, or 3, as far as there is room, and three in all even where there is
/// less; over less than that the ticks of a linear axis.
fn log_ticks(low: f64, high: f64, most: usize) -> Vec<(f64, String)> {
    let powers = low.log10().floor() as i32..=high.log10().ceil() as i32;
    let through = |steps: &'static [f64]| -> Vec<f64> {
        let all = powers.clone().flat_map(|power| steps.iter().map(move |step| step * 10f64.powi(power)));
        all.filter(|tick| (low..=high).contains(tick)).collect()
    };
    let fine = through(&[1.0, 2.0, 5.0]);
    if fine.len() < 3 {
        let linear = linear_ticks(low, high, most.min(4));
        return if linear.len() > fine.len() { linear } else { labelled(fine) };
    }
    let ladders = LADDERS.map(through);
    let fits = ladders.iter().find(|ticks| (3..=most.max(3)).contains(&ticks.len()));
    if let Some(ticks) = fits.or_else(|| ladders.iter().rfind(|ticks| (3..=6).contains(&ticks.len()))) {
        return labelled(ticks.clone());
    }
    let [.., tens] = ladders;
    let every = tens.len().div_ceil(most.max(1)).max(1);
    labelled(tens.into_iter().step_by(every).collect())
}

fn labelled(values: Vec<f64>) -> Vec<(f64, String)> {
    values.into_iter().map(|value| (value, number::short(value))).collect()
}

/// The two axes, placed.
pub(super) struct Axes {
    pub x: PlacedAxis,
    pub y: PlacedAxis,
}

impl Axes {
    pub fn at(&self, point: (f64, f64)) -> Option<(f64, f64)> {
        Some((self.x.at(point.0)?, self.y.at(point.1)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(ticks: &[(f64, String)]) -> Vec<f64> {
        ticks.iter().map(|tick| tick.0).collect()
    }

    #[test]
    fn marks_are_round_and_within() {
        assert_eq!(values(&log_ticks(0.3, 40.0, 7)), [0.5, 1.0, 2.0, 5.0, 10.0, 20.0]);
        assert_eq!(values(&log_ticks(0.05, 90.0, 4)), [0.1, 1.0, 10.0]);
        // Less than two powers of ten in little room: three ticks, where there was one.
        assert_eq!(values(&log_ticks(150.0, 6000.0, 4)), [300.0, 1000.0, 3000.0]);
        assert_eq!(values(&log_ticks(15.0, 1100.0, 1)).len(), 4);
        let axis = PlotAxis::log("steps").placed_exactly((150.0, 1200.0), (0.0, 1.0));
        assert_eq!(axis.minor_ticks().len(), 9, "from 200 to 1000");
        assert_eq!(
            (PlotAxis::log("steps").caption(), PlotAxis::linear("x").caption()),
            ("steps (log scale)".into(), "x".into())
        );
        let labels = |ticks: Vec<(f64, String)>| ticks.into_iter().map(|tick| tick.1).collect::<Vec<_>>();
        assert_eq!(labels(log_ticks(0.05, 90.0, 6)), ["0.1", "0.3", "1", "3", "10", "30"]);
        assert_eq!(labels(log_ticks(1.3, 1.9, 6)), ["1.4", "1.6", "1.8"]);
        assert_eq!(labels(linear_ticks(0.0, 2.3, 5)), ["0", "0.5", "1.0", "1.5", "2.0"]);
        assert_eq!(values(&linear_ticks(-3.0, 3.0, 4)), [-2.0, 0.0, 2.0]);
        assert_eq!(log_ticks(1e-12, 1e12, 6).len(), 5, "not one for each of 24 powers");
    }

    #[test]
    fn equal_ratios_are_equal_distances() {
        let axis = PlotAxis::log("x").placed_over([1.0, 100.0].into_iter(), 0.0, 300.0);
        let [one, ten, hundred] = [1.0, 10.0, 100.0].map(|value| axis.at(value).unwrap());
        assert!((ten - one - (hundred - ten)).abs() < 1e-9 && one > 0.0 && hundred < 300.0);
    }

    /// A coordinate for every value that can be drawn, and ticks, whatever there is to draw: one value, none,
    /// the largest.
    #[test]
    fn an_axis_has_a_length_whatever_lies_on_it() {
        let cases: [&[f64]; 8] =
            [&[], &[0.0], &[5.0], &[-5.0], &[1e-300], &[1e300, -1e300], &[f64::NAN], &[1.0, 1.0 + 1e-15]];
        for values in cases {
            for axis in [PlotAxis::linear(""), PlotAxis::log("")] {
                let placed = axis.placed_over(values.iter().copied(), 0.0, 100.0);
                assert!(placed.low < placed.high, "{axis:?} {values:?} {placed:?}");
                for value in values.iter().filter(|value| axis.accepts(**value)) {
                    let at = placed.within(*value);
                    assert!(at.is_some_and(|at| (0.0..=100.0).contains(&at)), "{axis:?} {value} {placed:?}");
                }
                let ticks = placed.ticks(5);
                assert!((1..=12).contains(&ticks.len()), "{axis:?} {values:?} {ticks:?}");
            }
        }
    }

    #[test]
    fn what_is_counted_is_not_shown_below_zero() {
        assert_eq!(PlotAxis::linear("").placed_over([0.0, 10.0].into_iter(), 0.0, 1.0).low, 0.0);
        assert!(PlotAxis::linear("").placed_over([-1.0, 10.0].into_iter(), 0.0, 1.0).low < -1.0);
        let reached = PlotAxis::linear("").including(0.0).placed_over([8.0, 10.0].into_iter(), 0.0, 1.0);
        assert_eq!(reached.low, 0.0);
    }
}
