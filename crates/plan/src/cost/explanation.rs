//! Everything about a model's messages in one value: each layer by each parallelism, which wins, where that
//! changes, totals, and the cheapest mixture. What `espalier explain` prints.

use serde::Serialize;

use super::crossing::Crossover;
use super::{Cost, Integrated, LayerSizes, Parallelism, Setting};
use crate::pruning::Pruning;
use crate::spec::{ModelSpec, ShapeError};

/// The messages of a step of a model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Explanation {
    pub model: String,
    /// The ranks, samples and machine that it is worked out for.
    #[serde(flatten)]
    pub setting: Setting,
    /// The fraction of the prunable weights that is gone; 0 without pruning.
    pub sparsity: f64,
    /// The layers that have something to say, in the order of execution.
    pub layers: Vec<LayerCosts>,
    /// All layers by the same parallelism, where they all can.
    pub total: ByParallelism,
    /// The cheapest mixture, moves between layers included; none where the model cannot be split over so many
    /// ranks.
    pub integrated: Option<Integrated>,
}

/// A layer, and what each way to split it sends.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerCosts {
    /// The layer as the formulas see it.
    #[serde(flatten)]
    pub sizes: LayerSizes,
    /// Messages, words and seconds of each parallelism.
    #[serde(flatten)]
    pub costs: ByParallelism,
    /// The cheapest of a layer that multiplies, where it can be split over so many ranks; what does not
    /// follows its neighbours.
    pub cheapest: Option<Parallelism>,
    /// The smallest batch at which data costs no more than model.
    pub data_from_batch: Option<usize>,
    /// With how many more ranks the cheapest becomes another.
    pub change: Option<Crossover>,
}

/// A cost by each parallelism, none where it is impossible.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ByParallelism {
    /// By samples: all-reduces of weight gradients.
    pub data: Option<TimedCost>,
    /// By outputs: all-gathers of activations, all-reduces of their gradients.
    pub model: Option<TimedCost>,
    /// By rows of the image.
    pub domain: Option<TimedCost>,
}

/// A cost, and the seconds that it takes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TimedCost {
    /// Messages and words.
    #[serde(flatten)]
    pub cost: Cost,
    /// What they take by alpha and beta.
    pub seconds: f64,
}

impl ByParallelism {
    fn new(at: &Setting, cost: impl Fn(Parallelism) -> Option<Cost>) -> ByParallelism {
        let timed = |by| cost(by).map(|cost| TimedCost { cost, seconds: at.seconds(cost) });
        ByParallelism {
            data: timed(Parallelism::Data),
            model: timed(Parallelism::Model),
            domain: timed(Parallelism::Domain),
        }
    }

    /// By one of them.
    pub fn of(&self, by: Parallelism) -> Option<TimedCost> {
        match by {
            Parallelism::Data => self.data,
            Parallelism::Model => self.model,
            Parallelism::Domain => self.domain,
        }
    }

    /// The cheapest, where there is one.
    pub fn cheapest(&self) -> Option<(Parallelism, TimedCost)> {
        let all = Parallelism::ALL.into_iter().filter_map(|by| Some((by, self.of(by)?)));
        all.min_by(|(_, a), (_, b)| a.seconds.total_cmp(&b.seconds))
    }
}

impl Explanation {
    /// Costs each layer of a model, and the cheapest mixture.
    pub fn new(model: &ModelSpec, pruning: Option<&Pruning>, at: Setting) -> Result<Explanation, ShapeError> {
        let sizes = LayerSizes::of_model(model, pruning)?;
        let total = |by| sizes.iter().map(|sizes| sizes.cost(by, &at)).sum::<Option<Cost>>();
        Ok(Explanation {
            model: model.name.clone(),
            setting: at,
            sparsity: pruning.map_or(0.0, |pruning| pruning.sparsity),
            total: ByParallelism::new(&at, total),
            integrated: Integrated::of(model, pruning, &at),
            layers: sizes.into_iter().map(|sizes| LayerCosts::new(sizes, &at)).collect(),
        })
    }
}

impl LayerCosts {
    /// Whether it multiplies, so that its work is worth sharing.
    pub fn is_product(&self) -> bool {
        self.sizes.features.is_some()
    }

    fn new(sizes: LayerSizes, at: &Setting) -> LayerCosts {
        let costs = ByParallelism::new(at, |by| sizes.cost(by, at));
        LayerCosts {
            costs,
            cheapest: costs.cheapest().map(|(by, _)| by).filter(|_| sizes.features.is_some()),
            data_from_batch: sizes.data_from_batch(at),
            change: sizes.features.and_then(|_| sizes.change_with_ranks(at)),
            sizes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{AllReduce, AlphaBeta};
    use super::*;
    use crate::spec::presets::{StemForm, Vgg, vgg};

    #[test]
    fn totals_are_sums_and_the_mixture_is_below_them() {
        let model = vgg(Vgg::V16, (224, 224, 3), 1000, StemForm::ImageNet, false);
        let at = Setting { ranks: 8, batch: 64, link: AlphaBeta::published(4), all_reduce: AllReduce::Ring };
        let found = Explanation::new(&model, None, at).unwrap();
        assert_eq!(found.layers.len(), 16);
        let data = found.total.data.unwrap();
        assert!((data.cost.words / (2.0 * 7.0 / 8.0 * 138_357_544.0) - 1.0).abs() < 1e-12);
        assert_eq!(data.cost.messages, 16.0 * 14.0);
        assert_eq!(found.total.domain, None, "linear layers have no rows");
        assert!(found.integrated.unwrap().seconds < data.seconds);
        assert_eq!(found.total.cheapest().unwrap().0, Parallelism::Data);
    }
}
