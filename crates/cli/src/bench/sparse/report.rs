//! What was measured, for people and programs: the table, the sentences, the figure, the JSON.

use std::fmt::Write;
use std::path::Path;

use espalier_report::{Curve, Figure, Guide, Plot, PlotAxis};
use espalier_tensor::DType;
use serde_json::{Value, json};

use super::measure::{SparseBench, SparseRow};
use crate::device;

/// All that was measured.
pub struct SparseReport {
    device: &'static str,
    device_name: String,
    precision: &'static str,
    batch: usize,
    sparsity: f64,
    /// On a GPU there is a third product.
    gpu: bool,
    /// One for each size, ascending.
    pub rows: Vec<SparseRow>,
    /// For the largest sizes, descending.
    pub sweeps: Vec<SparsitySweep>,
}

/// One layer under more and more zeros.
pub struct SparsitySweep {
    /// Inputs and outputs of the layer.
    pub size: usize,
    /// Shares of zeros, ascending, and how many times as long as the dense product the sparse one takes there.
    pub points: Vec<(f64, f64)>,
}

/// Where a sparse product overtakes the dense one.
#[derive(Debug, PartialEq)]
enum Crossing {
    /// It is faster wherever it was measured, from this fraction of zeros on.
    Before(f64),
    /// Here.
    At(f64),
    /// It is slower up to this fraction of zeros.
    Beyond(f64),
    /// It was never measured.
    Unknown,
}

impl SparsitySweep {
    /// After the last sparsity at which the sparse product lost; between two, where a line through the
    /// logarithms of the density and of the ratio is at 1: times grow as powers of what is kept.
    fn crossing(&self) -> Crossing {
        let (Some(first), Some(last)) = (self.points.first(), self.points.last()) else {
            return Crossing::Unknown;
        };
        match self.points.iter().rposition(|(_, ratio)| *ratio >= 1.0) {
            None => Crossing::Before(first.0),
            Some(i) if i + 1 == self.points.len() => Crossing::Beyond(last.0),
            Some(i) => {
                let ((s0, r0), (s1, r1)) = (self.points[i], self.points[i + 1]);
                let fraction = r0.ln() / (r0.ln() - r1.ln());
                let kept = (1.0 - s0).ln() * (1.0 - fraction) + (1.0 - s1).ln() * fraction;
                Crossing::At(1.0 - kept.exp())
            }
        }
    }

    fn sentence(&self) -> String {
        let (layer, crossing) = (square(self.size), self.crossing());
        match crossing {
            Crossing::Before(s) => {
                format!(
                    "at {layer} sparse matmul is faster already at {} sparsity, the lowest measured",
                    percent(s)
                )
            }
            Crossing::At(s) => format!("at {layer} sparse matmul is faster from {} sparsity on", percent(s)),
            Crossing::Beyond(s) => {
                format!("at {layer} sparse matmul is slower even at {} sparsity", percent(s))
            }
            Crossing::Unknown => format!("at {layer} no sparse matmul ran"),
        }
    }
}

impl SparseReport {
    pub fn new(bench: &SparseBench, sparsity: f64) -> SparseReport {
        SparseReport {
            device: bench.device.name(),
            device_name: device::describe(&bench.device),
            precision: if bench.dtype == DType::F32 { "f32" } else { "bf16" },
            batch: bench.batch,
            sparsity,
            gpu: bench.device.name() == "cuda",
            rows: Vec::new(),
            sweeps: Vec::new(),
        }
    }

    fn conditions(&self) -> String {
        let (batch, precision, device) = (self.batch, self.precision, &self.device_name);
        format!("y = x W^T, batch {batch}, {precision}, {device}; medians of interleaved rounds")
    }

    /// What stands above the table.
    pub fn heading(&self) -> String {
        let mut text =
            format!("{}\nmilliseconds at {} sparsity\n", self.conditions(), percent(self.sparsity));
        let _ = write!(text, "{:>13} {:>10} {:>10} {:>13}", "W", "dense", "sparse", "sparse/dense");
        if self.gpu {
            let _ = write!(text, " {:>10}  fastest cuSPARSE algorithm", "2:4");
        }
        text.push('\n');
        text
    }

    /// A line of the table.
    pub fn line(&self, row: &SparseRow) -> String {
        let ms = |outcome: &Result<f64, String>| outcome.as_ref().map_or("-".into(), |ms| format!("{ms:.4}"));
        let ratio = row.ratio().map_or("-".into(), |ratio| format!("{ratio:.2}"));
        let mut line =
            format!("{:>13} {:>10.4} {:>10} {ratio:>13}", square(row.size), row.dense, ms(&row.sparse));
        if self.gpu {
            let algorithm = row.algorithm.map_or(String::new(), |algorithm| algorithm.to_string());
            let _ = write!(line, " {:>10}  {algorithm}", row.two_four.as_ref().map_or("-".into(), ms));
        }
        line
    }

    /// What it comes to, in words.
    pub fn sentences(&self) -> Vec<String> {
        let mut sentences = Vec::new();
        if let Some(row) = self.rows.last() {
            let (zeros, layer) = (percent(self.sparsity), square(row.size));
            match &row.sparse {
                Err(why) => sentences.push(format!("the sparse column is empty: {why}")),
                Ok(ms) if (0.95..=1.05).contains(&(ms / row.dense)) => sentences.push(format!(
                    "at {zeros} sparsity and {layer} sparse matmul takes about as long as dense"
                )),
                Ok(ms) if *ms >= row.dense => sentences.push(format!(
                    "at {zeros} sparsity and {layer} sparse matmul takes {:.1} times as long as dense",
                    ms / row.dense
                )),
                Ok(ms) => sentences.push(format!(
                    "at {zeros} sparsity and {layer} sparse matmul is {:.1} times as fast as dense",
                    row.dense / ms
                )),
            }
            match &row.two_four {
                None => {}
                Some(Err(why)) => sentences.push(format!("the 2:4 column is empty: {why}")),
                Some(Ok(ms)) => sentences
                    .push(format!("2:4 sparsity: {layer} takes {:.2} of the dense time", ms / row.dense)),
            }
        }
        sentences.extend(self.sweeps.iter().map(SparsitySweep::sentence));
        sentences
    }

    /// The table as curves; beside it, where there is one, the sweep.
    pub fn figure(&self) -> Figure {
        let curve = |style: usize, name: &str, ms: &dyn Fn(&SparseRow) -> Option<f64>| {
            let points = self.rows.iter().filter_map(|row| Some((row.size as f64, ms(row)?))).collect();
            Curve::new(name, style, points).with_markers()
        };
        let sparse = if self.gpu { "sparse (cuSPARSE)" } else { "sparse (CSR)" };
        let curves = [
            curve(0, "dense", &|row| Some(row.dense)),
            curve(1, sparse, &|row| row.sparse.clone().ok()),
            curve(2, "2:4 (50 %)", &|row| row.two_four.clone()?.ok()),
        ];
        let sizes = self.rows.iter().map(|row| (row.size as f64, row.size.to_string())).collect();
        let mut times = Plot::new(
            format!("Time at {} sparsity", percent(self.sparsity)),
            PlotAxis::log("layer width").with_ticks(sizes),
            PlotAxis::log("milliseconds"),
        );
        times.curves.extend(curves.into_iter().filter(|curve| !curve.points.is_empty()));
        let mut figure = Figure::new("A linear layer: dense against sparse matmul")
            .with_subtitle(self.conditions())
            .with(times);
        let swept: Vec<&SparsitySweep> =
            self.sweeps.iter().filter(|sweep| !sweep.points.is_empty()).collect();
        if !swept.is_empty() {
            // Zeros are marked by what is kept, one in so many, for a logarithmic axis.
            let one_in = |sparsity: f64| 1.0 / (1.0 - sparsity);
            let zeros = [0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999].map(|s| (one_in(s), percent(s))).into();
            let mut ratios = Plot::new(
                "Sparse time over dense time, by sparsity",
                PlotAxis::log("sparsity").with_ticks(zeros),
                PlotAxis::log("times as long as dense"),
            )
            .with(Guide::horizontal("as fast as dense", 1.0));
            for (i, sweep) in swept.into_iter().enumerate() {
                let points =
                    sweep.points.iter().map(|(sparsity, ratio)| (one_in(*sparsity), *ratio)).collect();
                ratios = ratios.with(Curve::new(square(sweep.size), 3 + i, points).with_markers());
            }
            figure = figure.with(ratios);
        }
        figure
    }

    pub fn json(&self, figure: &Path) -> Value {
        let reason = |outcome: Option<&Result<f64, String>>| outcome.and_then(|o| o.as_ref().err().cloned());
        let last = self.rows.last();
        json!({
            "device": self.device,
            "device_name": self.device_name,
            "precision": self.precision,
            "batch": self.batch,
            "sparsity": self.sparsity,
            "rows": self.rows.iter().map(|row| json!({
                "size": row.size,
                "kept": row.kept,
                "dense_ms": row.dense,
                "sparse_ms": row.sparse.as_ref().ok(),
                "ratio": row.ratio(),
                "way": row.algorithm.map(|algorithm| algorithm.to_string()),
                "two_four_ms": row.two_four.as_ref().and_then(|outcome| outcome.as_ref().ok()),
            })).collect::<Vec<_>>(),
            "missing": {
                "sparse": reason(last.map(|row| &row.sparse)),
                "two_four": reason(last.and_then(|row| row.two_four.as_ref())),
            },
            "sweeps": self.sweeps.iter().map(|sweep| json!({
                "size": sweep.size,
                "wins_from": match sweep.crossing() {
                    Crossing::Before(s) | Crossing::At(s) => Some(s),
                    Crossing::Beyond(_) | Crossing::Unknown => None,
                },
                "points": sweep.points.iter().map(|(sparsity, ratio)| json!({"sparsity": sparsity, "ratio": ratio}))
                    .collect::<Vec<_>>(),
            })).collect::<Vec<_>>(),
            "words": self.sentences(),
            "figure": figure,
        })
    }
}

fn square(side: usize) -> String {
    format!("{side} x {side}")
}

/// `90 %`, `98.6 %`, `99.95 %`: the more zeros, the more their last digits matter.
fn percent(fraction: f64) -> String {
    let digits = match 1.0 - fraction {
        kept if kept >= 0.0095 => 1,
        kept if kept >= 0.00095 => 2,
        _ => 3,
    };
    let text = format!("{:.digits$}", fraction * 100.0);
    format!("{} %", text.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use espalier_report::Panel;

    use super::*;

    #[test]
    fn shares_are_written_as_people_say_them() {
        let fractions = [0.0, 0.5, 0.9, 0.95, 0.986, 0.99, 0.9914, 0.995, 0.999, 0.9996];
        let texts =
            ["0 %", "50 %", "90 %", "95 %", "98.6 %", "99 %", "99.14 %", "99.5 %", "99.9 %", "99.96 %"];
        assert_eq!(fractions.map(percent), texts);
    }

    #[test]
    fn the_crossing_is_where_the_ratio_is_one() {
        let crossing = |points: &[(f64, f64)]| SparsitySweep { size: 8, points: points.to_vec() }.crossing();
        // A time that is proportional to what is kept: 10 times the density is 1 at 90 %.
        let fair: Vec<(f64, f64)> = [0.5, 0.8, 0.95, 0.99].map(|s: f64| (s, 10.0 * (1.0 - s))).into();
        let Crossing::At(at) = crossing(&fair) else { panic!("{:?}", crossing(&fair)) };
        assert!((at - 0.9).abs() < 1e-9, "{at}");
        // A point of luck before it does not count.
        let Crossing::At(at) = crossing(&[(0.5, 0.9), (0.8, 2.0), (0.95, 0.5)]) else { panic!() };
        assert!((at - 0.9).abs() < 1e-9, "{at}");
        assert_eq!(crossing(&[(0.5, 0.9), (0.9, 0.2)]), Crossing::Before(0.5));
        assert_eq!(crossing(&[(0.5, 9.0), (0.999, 1.2)]), Crossing::Beyond(0.999));
        assert_eq!(crossing(&[]), Crossing::Unknown);
    }

    fn report(sparse: Result<f64, String>) -> SparseReport {
        let row = SparseRow { size: 4096, kept: 10, dense: 2.0, sparse, algorithm: None, two_four: None };
        let sweep = SparsitySweep { size: 4096, points: vec![(0.8, 2.0), (0.95, 0.5)] };
        SparseReport {
            device: "cpu",
            device_name: "2 threads".into(),
            precision: "bf16",
            batch: 576,
            sparsity: 0.9,
            gpu: false,
            rows: vec![row],
            sweeps: vec![sweep],
        }
    }

    #[test]
    fn what_was_measured_is_said_in_words() {
        assert_eq!(
            report(Ok(12.0)).sentences(),
            [
                "at 90 % sparsity and 4096 x 4096 sparse matmul takes 6.0 times as long as dense",
                "at 4096 x 4096 sparse matmul is faster from 90 % sparsity on"
            ]
        );
        let faster = "at 90 % sparsity and 4096 x 4096 sparse matmul is 4.0 times as fast as dense";
        assert_eq!(report(Ok(0.5)).sentences()[0], faster);
        let even = "at 90 % sparsity and 4096 x 4096 sparse matmul takes about as long as dense";
        assert_eq!(report(Ok(2.05)).sentences()[0], even);
        assert_eq!(report(Err("no library".into())).sentences()[0], "the sparse column is empty: no library");
    }

    #[test]
    fn a_column_that_is_empty_is_no_curve() {
        let names = |report: SparseReport| -> Vec<String> {
            let Panel::Plot(times) = &report.figure().panels[0] else {
                panic!("the first panel is of times")
            };
            times.curves.iter().map(|curve| curve.name.clone()).collect()
        };
        assert_eq!(names(report(Ok(3.0))), ["dense", "sparse (CSR)"]);
        assert_eq!(names(report(Err("no library".into()))), ["dense"]);
        let json = report(Err("no library".into())).json(Path::new("f.svg"));
        assert!(
            json["rows"][0]["sparse_ms"].is_null() && json["missing"]["sparse"] == "no library",
            "{json}"
        );
        assert!((json["sweeps"][0]["wins_from"].as_f64().unwrap() - 0.9).abs() < 1e-9);
    }
}
