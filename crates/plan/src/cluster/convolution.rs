//! How fast convolutions are: one fraction of a product's rate, a fraction of the peak by channels, or pass
//! by pass.
//!
//! A GPU multiplies tiles of channels by tiles of channels: a layer with few of them on either side, such as
//! the first, which sees three colours, leaves most of each tile empty. On a core, layers that are split over
//! ranks have so few channels that most of a vector is empty, and so few pixels to each weight that laying
//! the weights out costs as much as multiplying them. So there a pass takes
//!
//! ```text
//! start_us + flops / (peak x efficiency of its channels) + weights x weight_ns + pixels x pixel_ns + numbers under all windows x window_ns
//! ```
//!
//! which is linear in what it says of a machine, so [`ByPass::fit`] finds all of it from passes of several shapes.

use std::fmt;

use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::measured::rounded;
use super::share;

/// What convolutions reach.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Convolution {
    /// Of a product of as many flops, all three passes alike.
    Efficiency(f64),
    /// `[channels, fraction]`: of the peak, all three passes alike, by channels of whichever of input and
    /// output has fewer; between two points as efficiencies are.
    Channels(Vec<[f64; 2]>),
    /// Each pass by its own sizes.
    Passes(ByPass),
}

/// What a pass of a convolution takes, by its sizes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ByPass {
    /// `[channels, fraction]`: what a pass that makes so many channels reaches of the peak. Between two points
    /// the fraction is on the line where both are logarithms; with fewer channels than the first, a pass takes
    /// as long as there.
    pub channels: Vec<[f64; 2]>,
    /// To begin: microseconds.
    pub start_us: f64,
    /// For each weight, to lay it out: nanoseconds.
    pub weight_ns: f64,
    /// For each pixel of the image that is made.
    pub pixel_ns: f64,
    /// For each number under a window, of all windows: where windows are copied into a matrix.
    pub window_ns: f64,
}

/// One of the passes of a convolution.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ConvolutionPass {
    /// Channels of what is made: the output's, and the input's in the pass that makes its gradient.
    pub channels: f64,
    /// Of whichever of input and output has fewer.
    pub narrowest: f64,
    /// Multiplications and additions.
    pub flops: f64,
    /// Of the whole kernel.
    pub weights: f64,
    /// Of the image that is walked along.
    pub pixels: f64,
    /// Numbers under a window, over all windows.
    pub windows: f64,
}

impl ConvolutionPass {
    /// Forward, the input's gradient and the weight's, of a convolution whose windows are as many as the
    /// output has pixels. Pixels are those of all images.
    pub fn all(kernel: usize, input: usize, output: usize, pixels: [f64; 2]) -> [ConvolutionPass; 3] {
        let (area, [read, made]) = ((kernel * kernel) as f64, pixels);
        let (input, output) = (input as f64, output as f64);
        let windows = made * area * input;
        let forward = ConvolutionPass {
            channels: output,
            narrowest: input.min(output),
            flops: 2.0 * windows * output,
            weights: area * input * output,
            pixels: made,
            windows,
        };
        [forward, ConvolutionPass { channels: input, pixels: read, ..forward }, forward]
    }
}

impl ByPass {
    /// Seconds of a pass on a device with such a peak, in flops a second.
    pub fn seconds(&self, pass: &ConvolutionPass, peak: f64) -> f64 {
        let laid_out =
            pass.weights * self.weight_ns + pass.pixels * self.pixel_ns + pass.windows * self.window_ns;
        let multiplied = pass.flops / (peak * share(&self.channels, pass.channels));
        self.start_us * 1e-6 + multiplied + laid_out * 1e-9
    }

    /// What comes closest, by relative error, to passes that took so many seconds on a device with such a
    /// peak. There is a point for each number of channels that was seen.
    pub fn fit(seen: &[(ConvolutionPass, f64)], peak: f64) -> ByPass {
        let mut points: Vec<f64> = seen.iter().map(|(pass, _)| pass.channels).collect();
        points.sort_by(f64::total_cmp);
        points.dedup();
        let rows = seen.iter().map(|(pass, seconds)| {
            let at_point = |point: &f64| if *point == pass.channels { pass.flops / peak } else { 0.0 };
            let others = [1e-6, pass.weights * 1e-9, pass.pixels * 1e-9, pass.windows * 1e-9];
            points.iter().map(at_point).chain(others).map(|x| x / seconds).collect()
        });
        let rows: Vec<Vec<f64>> = rows.collect();
        let least: Vec<f64> = points.iter().map(|_| 1.0 / MOST_SHARE).chain([0.0; 4]).collect();
        let found = nearest_to_one(&rows, &least);
        // A picosecond is nothing.
        let number = |i: usize| rounded((found[points.len() + i] * 1e3).round() * 1e-3);
        let [start_us, weight_ns, pixel_ns, window_ns] = [0, 1, 2, 3].map(number);
        let channels =
            points.iter().zip(&found).map(|(point, slower)| [*point, rounded(1.0 / slower)]).collect();
        ByPass { channels, start_us, weight_ns, pixel_ns, window_ns }
    }
}

/// The most of a peak that is believed: the peak itself was measured with products.
const MOST_SHARE: f64 = 1.5;
/// Rounds of the descent below; a dozen unknowns settle in hundreds.
const ROUNDS: usize = 20_000;

/// Numbers, none below its least, by which every row's sum comes nearest to 1 by least squares: one number
/// after the other is set to where the squares are least.
fn nearest_to_one(rows: &[Vec<f64>], least: &[f64]) -> Vec<f64> {
    let mut found = least.to_vec();
    let mut missing: Vec<f64> =
        rows.iter().map(|row| 1.0 - row.iter().zip(&found).map(|(x, a)| x * a).sum::<f64>()).collect();
    for _ in 0..ROUNDS {
        for (i, least) in least.iter().enumerate() {
            let [along, square] =
                rows.iter().zip(&missing).fold([0.0; 2], |[along, square], (row, missing)| {
                    [along + row[i] * missing, square + row[i] * row[i]]
                });
            if square > 0.0 {
                let change = (found[i] + along / square).max(*least) - found[i];
                found[i] += change;
                rows.iter().zip(&mut missing).for_each(|(row, missing)| *missing -= change * row[i]);
            }
        }
    }
    found
}

impl<'de> Deserialize<'de> for Convolution {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Convolution, D::Error> {
        struct ConvolutionVisitor;
        impl<'de> Visitor<'de> for ConvolutionVisitor {
            type Value = Convolution;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a fraction, a list of [channels, fraction], or a section with `channels`, `start_us`, `weight_ns`, `pixel_ns` and `window_ns`")
            }

            fn visit_f64<E>(self, efficiency: f64) -> Result<Convolution, E> {
                Ok(Convolution::Efficiency(efficiency))
            }

            fn visit_i64<E>(self, efficiency: i64) -> Result<Convolution, E> {
                Ok(Convolution::Efficiency(efficiency as f64))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Convolution, A::Error> {
                Deserialize::deserialize(SeqAccessDeserializer::new(list)).map(Convolution::Channels)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Convolution, A::Error> {
                ByPass::deserialize(MapAccessDeserializer::new(map)).map(Convolution::Passes)
            }
        }
        from.deserialize_any(ConvolutionVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Cluster, builtin};
    use super::*;

    fn by_pass() -> ByPass {
        let channels = vec![[4.0, 0.25], [16.0, 1.0]];
        ByPass { channels, start_us: 3.0, weight_ns: 2.0, pixel_ns: 10.0, window_ns: 0.5 }
    }

    /// A vector of sixteen with four numbers in it takes as long as a full one, and so does one with two.
    #[test]
    fn few_channels_take_as_long_as_a_full_vector() {
        let bare = ByPass { start_us: 0.0, weight_ns: 0.0, pixel_ns: 0.0, window_ns: 0.0, ..by_pass() };
        let seconds = |output| bare.seconds(&ConvolutionPass::all(3, 16, output, [100.0; 2])[0], 1e9);
        for few in [2, 4, 8] {
            assert!((seconds(few) / seconds(16) - 1.0).abs() < 1e-12, "{few}");
        }
        assert!((seconds(64) / seconds(16) - 4.0).abs() < 1e-12);
    }

    #[test]
    fn a_pass_is_the_sum_of_what_it_is_made_of() {
        let [forward, input, weight] = ConvolutionPass::all(3, 16, 4, [400.0, 100.0]);
        let flops = 2.0 * 100.0 * 9.0 * 64.0;
        let others = |pixels: f64| 3e-6 + 1e-9 * (2.0 * 576.0 + 10.0 * pixels + 0.5 * 100.0 * 144.0);
        assert!((by_pass().seconds(&forward, 1e9) - (4e-9 * flops + others(100.0))).abs() < 1e-12);
        assert_eq!(by_pass().seconds(&weight, 1e9), by_pass().seconds(&forward, 1e9));
        assert!((by_pass().seconds(&input, 1e9) - (1e-9 * flops + others(400.0))).abs() < 1e-12);
    }

    /// A machine with nothing to pay for windows: that is found, as is all else, and no number is below 0.
    #[test]
    fn a_machine_is_found_again() {
        let machine = ByPass { window_ns: 0.0, ..by_pass() };
        let shapes =
            [(3, 4, 4, 32), (3, 16, 4, 32), (3, 4, 16, 16), (3, 16, 16, 1), (1, 4, 4, 32), (1, 16, 16, 2)];
        let passes = shapes.map(|(kernel, input, output, side)| {
            ConvolutionPass::all(kernel, input, output, [(side * side) as f64; 2])
        });
        let seen = passes.concat().into_iter().map(|pass| (pass, machine.seconds(&pass, 1e11)));
        let found = ByPass::fit(&seen.collect::<Vec<_>>(), 1e11);
        assert_eq!(found, machine);
    }

    /// A section instead of a number, both in files that a person wrote.
    #[test]
    fn a_fraction_or_a_section_is_read_and_nothing_else() {
        let text = builtin("summit").unwrap().to_toml();
        let with = |section: &str| {
            Cluster::parse(&text.replacen("convolution = 0.75\n", section, 1))
                .map_err(|error| error.to_string())
        };
        assert!(text.contains("convolution = 0.75\n"), "{text}");
        assert_eq!(with("").unwrap().device.f32, builtin("summit").unwrap().device.f32);
        assert_eq!(with("convolution = 0.75\n").unwrap(), builtin("summit").unwrap());
        let section = |fields: &str| with(&format!("convolution = {{ {fields} }}\n"));
        let rest = "start_us = 3, weight_ns = 2, pixel_ns = 10, window_ns = 0.5";
        let read = section(&format!("channels = [[4, 0.25], [16, 1]], {rest}")).unwrap();
        assert_eq!(read.device.fp16.as_ref().unwrap().convolution, Convolution::Passes(by_pass()));
        assert_eq!(Cluster::parse(&read.to_toml()).unwrap(), read);
        let said = |fields: &str| section(fields).unwrap_err();
        for (field, value) in [("start_us", 3.0), ("weight_ns", 2.0), ("pixel_ns", 10.0), ("window_ns", 0.5)]
        {
            let bad = rest.replace(&format!("{field} = {value}"), &format!("{field} = -1"));
            assert_eq!(
                said(&format!("channels = [[4, 0.25]], {bad}")),
                format!("`device.fp16.convolution.{field}` must be a number of at least 0, got -1")
            );
        }
        assert!(said(&format!("channels = [], {rest}")).starts_with(
            "`device.fp16.convolution.channels` must be a list of [size, fraction] with ascending sizes and fractions above 0, got []"
        ));
        assert!(said(&format!("channels = [[16, 1], [4, 0.25]], {rest}")).contains("ascending sizes"));
        assert!(said(&format!("channels = [[4, 0]], {rest}")).contains("fractions above 0"));
        assert!(said("channels = [[4, 0.25]]").ends_with("missing field `start_us`"));
        assert!(
            said(&format!("channels = [[4, 1]], colours = 3, {rest}")).contains("unknown field `colours`")
        );
        assert!(with("convolution = \"fast\"\n").unwrap_err().contains("expected a fraction, a list of"));
        let listed = with("convolution = [[3, 0.02], [64, 0.5]]\n").unwrap();
        let points = Convolution::Channels(vec![[3.0, 0.02], [64.0, 0.5]]);
        assert_eq!(listed.device.fp16.as_ref().unwrap().convolution, points);
        assert_eq!(Cluster::parse(&listed.to_toml()).unwrap(), listed);
        assert!(with("convolution = [[64, 0.5], [3, 0.02]]\n").unwrap_err().contains("ascending sizes"));
        assert!(with("convolution = 0\n").unwrap_err().contains("must be a number above 0, got 0"));
    }
}
