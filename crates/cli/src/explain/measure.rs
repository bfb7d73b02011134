//! What the collectives of every layer take on this machine at their real sizes, where ranks are threads of one
//! process.

use anyhow::Result;
use espalier_plan::cost::explanation::LayerCosts;
use espalier_plan::cost::{AlphaBeta, Cost, Explanation, Parallelism, Setting};
use espalier_plan::spec::Precision;
use serde_json::{Map, Value, json};

use crate::comm_timing::{self, BenchRanks, LinkSamples, TimedTransfer};

/// Elements of a short message and of a long one.
const SIZES: [f64; 2] = [1024.0, 1_048_576.0];

pub struct MeasuredCosts {
    /// Of the machine.
    pub links: LinkSamples,
    pub layers: Vec<SecondsByParallelism>,
}

/// Seconds by each parallelism, in the order of [`Parallelism::ALL`]; none where it is impossible.
pub struct SecondsByParallelism([Option<f64>; 3]);

impl SecondsByParallelism {
    fn new(by: impl FnMut(Parallelism) -> Option<f64>) -> SecondsByParallelism {
        SecondsByParallelism(Parallelism::ALL.map(by))
    }

    /// By one of them.
    pub fn of(&self, by: Parallelism) -> Option<f64> {
        self.0[by as usize]
    }

    /// The one that took least.
    pub fn cheapest(&self) -> Option<Parallelism> {
        let all = Parallelism::ALL.into_iter().filter_map(|by| Some((by, self.of(by)?)));
        all.min_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(by, _)| by)
    }

    fn json(&self) -> Value {
        Parallelism::ALL
            .into_iter()
            .map(|by| (by.name().into(), self.of(by).into()))
            .collect::<Map<_, _>>()
            .into()
    }
}

impl MeasuredCosts {
    /// Of all layers by one parallelism, where they all can.
    pub fn total(&self) -> SecondsByParallelism {
        SecondsByParallelism::new(|by| self.layers.iter().map(|layer| layer.of(by)).sum())
    }

    /// As `--json` prints it.
    pub fn json(&self, explanation: &Explanation) -> Value {
        let link = |link: AlphaBeta| json!({ "alpha": link.alpha, "beta": link.beta });
        let named = explanation.layers.iter().zip(&self.layers).map(|(row, layer)| {
            let mut value = layer.json();
            value["name"] = row.sizes.name.clone().into();
            value
        });
        let patterns: Map<_, _> =
            self.links.by_pattern().map(|(name, each)| (name.into(), link(each))).collect();
        json!({
            "fitted": link(self.links.fitted()),
            "by_pattern": patterns,
            "layers": named.collect::<Vec<_>>(),
            "total": self.total().json(),
        })
    }
}

/// Measures messages of two sizes among as many threads as there are ranks.
pub fn links(at: &Setting, precision: Precision) -> Result<LinkSamples> {
    Ok(comm_timing::links(BenchRanks::Threads(at.ranks), at.all_reduce, precision, &SIZES)?)
}

/// Measures the collectives of all layers.
pub fn layers(links: LinkSamples, explanation: &Explanation, precision: Precision) -> Result<MeasuredCosts> {
    let at = &explanation.setting;
    let of = |row: &LayerCosts, by| row.sizes.collectives(by, at).unwrap_or_default();
    // Layers of a transformer are all alike: each collective is measured once.
    let mut work: Vec<TimedTransfer> = Vec::new();
    for collective in
        explanation.layers.iter().flat_map(|row| Parallelism::ALL.map(|by| of(row, by))).flatten()
    {
        let timed = TimedTransfer::Layers(collective);
        if at.cost(collective) != Cost::FREE && !work.contains(&timed) {
            work.push(timed);
        }
    }
    let times = comm_timing::time(BenchRanks::Threads(at.ranks), precision, &work)?;
    let seconds = |collective| {
        work.iter().position(|timed| *timed == TimedTransfer::Layers(collective)).map_or(0.0, |i| times[i])
    };
    let of = |row: &LayerCosts, by| Some(row.sizes.collectives(by, at)?.into_iter().map(seconds).sum());
    let layers = explanation.layers.iter().map(|row| SecondsByParallelism::new(|by| of(row, by)));
    Ok(MeasuredCosts { links, layers: layers.collect() })
}
