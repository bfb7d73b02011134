//! Where the parallelism that costs a layer least becomes another one.

use serde::Serialize;

use super::{LayerSizes, Parallelism, Setting};

/// No machine has more ranks.
const MOST_RANKS: usize = 1 << 20;

/// Another parallelism is the cheapest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Crossover {
    /// On so many ranks.
    pub ranks: usize,
    /// Which; none where the layer cannot be split over so many ranks in any way.
    pub to: Option<Parallelism>,
}

impl LayerSizes {
    /// The smallest batch at which data parallelism costs no more than model parallelism, were there samples
    /// for all ranks: weight gradients do not grow with the batch, activations do. None where the layer is no
    /// product.
    ///
    /// With a square weight of width d and no time to start messages it is d / 1.5: 2 d^2 words against 3 B d.
    pub fn data_from_batch(&self, at: &Setting) -> Option<usize> {
        self.features?;
        let model = |batch| Some(at.seconds(self.cost(Parallelism::Model, &Setting { batch, ..*at })?));
        let slope = model(2)? - model(1)?;
        let started = model(1)? - slope;
        let batch = (at.seconds(at.cost(self.weight_gradient())) - started) / slope;
        // A whole number that rounding has lifted is still that number.
        batch.is_finite().then(|| ((batch - 1e-6).ceil() as usize).max(1))
    }

    /// How many times as many ranks, in powers of two, have another cheapest parallelism.
    pub(crate) fn change_with_ranks(&self, at: &Setting) -> Option<Crossover> {
        let cheapest = |ranks| self.cheapest(&Setting { ranks, ..*at }).map(|(by, _)| by);
        let now = cheapest(at.ranks);
        let more = std::iter::successors(Some(at.ranks), |ranks| ranks.checked_mul(2)).skip(1);
        more.take_while(|ranks| *ranks <= MOST_RANKS)
            .map(|ranks| Crossover { ranks, to: cheapest(ranks) })
            .find(|change| change.to != now)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{AllReduce, AlphaBeta};
    use super::*;
    use crate::spec::presets::{StemForm, alexnet};
    use crate::spec::{Init, LayerSpec, Linear, ModelSpec, WeightOrder};

    fn square(width: usize) -> LayerSizes {
        let linear = |name: &str| {
            let (name, order, init) = (name.into(), WeightOrder::OutIn, Init::Constant(0.0));
            LayerSpec::Linear(Linear { name, input: width, output: width, bias: false, order, init })
        };
        let mut model: ModelSpec = crate::spec::presets::mlp((1, 1, width), &[], width);
        model.blocks[0].layers = vec![LayerSpec::Flatten, linear("first"), linear("second")];
        LayerSizes::of_model(&model, None).unwrap().pop().unwrap()
    }

    fn on(ranks: usize, batch: usize, alpha: f64) -> Setting {
        Setting { ranks, batch, link: AlphaBeta { alpha, beta: 1e-9 }, all_reduce: AllReduce::Ring }
    }

    /// Model parallelism pays where d > 1.5 B: 2 d^2 words against 3 B d.
    #[test]
    fn a_square_layer_crosses_at_two_thirds_of_its_width() {
        let layer = square(3000);
        for ranks in [2, 8, 100] {
            assert_eq!(layer.data_from_batch(&on(ranks, 1, 0.0)), Some(2000));
            let cheapest = |batch| layer.cheapest(&on(ranks, batch, 0.0)).unwrap().0;
            assert_eq!(cheapest(1999), Parallelism::Model);
            assert_eq!(cheapest(2000), Parallelism::Data);
        }
    }

    /// An all-gather and an all-reduce are three rounds of a ring, one all-reduce is two: 3 alpha (P - 1)
    /// against 2 alpha (P - 1), which is alpha P / beta words in favour of data.
    #[test]
    fn messages_that_take_long_to_start_favour_data() {
        let saved: f64 = 2.0 * 9e6 - 1e-6 * 8.0 / 1e-9;
        let expected = (saved / 9000.0).ceil() as usize;
        assert_eq!(square(3000).data_from_batch(&on(8, 1, 1e-6)), Some(expected));
    }

    #[test]
    fn with_more_ranks_than_samples_a_convolution_is_cut_otherwise() {
        let model = alexnet((224, 224, 3), 1000, StemForm::ImageNet);
        let all = LayerSizes::of_model(&model, None).unwrap();
        let conv = &all[0];
        assert_eq!(conv.cheapest(&on(8, 8, 2e-6)).unwrap().0, Parallelism::Data);
        // 55 rows of output, 64 channels.
        for (now, then) in [
            (8, Some((16, Some(Parallelism::Domain)))),
            (32, Some((64, Some(Parallelism::Model)))),
            (64, Some((128, None))),
            (1 << 20, None),
        ] {
            let then = then.map(|(ranks, to)| Crossover { ranks, to });
            assert_eq!(conv.change_with_ranks(&on(now, 8, 2e-6)), then);
        }
    }
}
