//! What a layer sends to other ranks in a step, by the three kinds of parallelism (Gholami et al. 2018).
//!
//! With P ranks, a batch of B samples, d_in and d_out words of a sample before and behind the layer, and |W|
//! weights of which a fraction f is kept:
//!
//! - **data**: each rank has B/P samples and all weights. The weight gradients are all-reduced:
//!   f|W| words.
//! - **model**: each rank has a P-th of the outputs and the weights that make them. Forward the outputs are
//!   all-gathered, B d_out words; backward the gradient of the input is all-reduced, B d_in words, unless
//!   nothing before the layer is trained. The weight gradient stays where it is made.
//! - **domain**: each rank has a slab of the rows of every image and all weights. Forward a convolution needs
//!   its neighbours' edges, backward it gives their gradients back; the weight gradients are all-reduced as
//!   under data.
//!
//! Pruning makes the all-reduces of weight gradients shorter and nothing else.

use std::collections::HashMap;

use serde::Serialize;

use super::{CollectivePattern, Cost, Setting};
use crate::pruning::Pruning;
use crate::spec::{LayerSpec, ModelSpec, ProductSize, Shape, ShapeError, TileRole};
use crate::tiles::SlidingWindow;

/// How the work of a layer is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Parallelism {
    /// By samples: every rank has the full layer.
    Data,
    /// By outputs, with the weights that make them.
    Model,
    /// By rows of the image.
    Domain,
}

impl Parallelism {
    /// All of them, in the order in which they are printed.
    pub const ALL: [Parallelism; 3] = [Parallelism::Data, Parallelism::Model, Parallelism::Domain];

    /// In tables and sentences.
    pub fn name(self) -> &'static str {
        match self {
            Parallelism::Data => "data",
            Parallelism::Model => "model",
            Parallelism::Domain => "domain",
        }
    }
}

/// A layer as the formulas see it. Words are those of one sample.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerSizes {
    /// The prefix of its parameters, or the word for its kind.
    pub name: String,
    /// `linear`, `conv`, `max_pool`, ...
    pub kind: &'static str,
    /// Numbers that are trained; a tied weight belongs to the layer it is tied to.
    pub parameters: u64,
    /// Those of them that are kept: the words of its weight gradient.
    pub kept: u64,
    /// Elements of a sample before it.
    pub input: u64,
    /// Elements of a sample behind it.
    pub output: u64,
    /// Whether something before it is trained, so that its input needs a gradient.
    pub wants_input_gradient: bool,
    /// How its work can be split by features, where there is any worth splitting.
    #[serde(skip)]
    pub features: Option<ProductSize>,
    /// How its work can be split by rows of the image.
    #[serde(skip)]
    pub edges: Option<Edges>,
    /// Sums over the batch that it makes on the way, forward and backward each: those of a batch norm.
    #[serde(skip)]
    pub statistics: usize,
}

/// What a layer reads of an image that is split into slabs of rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Edges {
    /// Rows of the image before and behind the layer.
    pub rows: (usize, usize),
    /// Words of one row of its input.
    pub row: f64,
    /// Rows that a slab needs of the slab before it, where cuts are aligned to the stride.
    pub before: usize,
    /// Rows that it needs of the slab behind it.
    pub behind: usize,
}

impl Edges {
    /// Windows of `kernel` rows at a step of `stride` need `padding` rows before a slab and kernel - stride -
    /// padding behind it; a layer that has no windows reads nothing but its own pixels.
    fn new(layer: &LayerSpec, input: Shape, output: Shape) -> Option<Edges> {
        let (Shape::Image { height, width, channels }, Shape::Image { height: made, .. }) = (input, output)
        else {
            return None;
        };
        let (before, behind) = match layer.properties().tile_role {
            TileRole::Window(SlidingWindow { kernel, stride, padding }) => {
                (padding.top, kernel.saturating_sub(stride + padding.top))
            }
            TileRole::Pixels => (0, 0),
            TileRole::Mean(_) | TileRole::Gathered | TileRole::Apart => return None,
        };
        Some(Edges { rows: (height, made), row: width as f64 * channels as f64, before, behind })
    }

    /// Whether each of so many ranks can have a row of the output, and the edges of its slab from its
    /// neighbours alone.
    fn can_be_split(&self, ranks: usize) -> bool {
        self.rows.1 >= ranks && self.rows.0 / ranks >= self.before.max(self.behind)
    }

    /// The edges of a step forward, or of their gradients backward.
    fn halo(&self, at: &Setting) -> CollectivePattern {
        let words = |rows: usize| at.of_batch(rows as f64 * self.row);
        CollectivePattern::Halo(words(self.behind), words(self.before))
    }
}

impl LayerSizes {
    /// The layers of a model that communicate under some parallelism, in the order of execution;
    /// `pruning` says what is kept of their weights.
    pub fn of_model(model: &ModelSpec, pruning: Option<&Pruning>) -> Result<Vec<LayerSizes>, ShapeError> {
        let (kept, mut trained, mut all) = (KeptElements::new(model, pruning), false, Vec::new());
        model.for_each_layer(|_, layer, input, output| {
            let sizes = LayerSizes::new(layer, input, output, &kept, trained);
            trained |= sizes.parameters > 0;
            if sizes.communicates() {
                all.push(sizes);
            }
        })?;
        Ok(all)
    }

    pub(super) fn new(
        layer: &LayerSpec,
        input: Shape,
        output: Shape,
        kept: &KeptElements,
        trained: bool,
    ) -> LayerSizes {
        let parameters = layer.parameters();
        LayerSizes {
            name: layer.name().unwrap_or(layer.kind()).into(),
            kind: layer.kind(),
            parameters: parameters.iter().map(|one| one.elements()).sum(),
            kept: parameters.iter().map(|one| kept.of(&one.name, one.elements())).sum(),
            input: input.elements(),
            output: output.elements(),
            wants_input_gradient: trained,
            features: layer.properties().product_size,
            edges: Edges::new(layer, input, output),
            // A sum and a sum of squares of each channel.
            statistics: layer.properties().batch_statistics.map_or(0, |channels| 2 * channels),
        }
    }

    /// Whether a row of a table is worth it.
    fn communicates(&self) -> bool {
        self.parameters > 0
            || self.features.is_some()
            || self.edges.is_some_and(|edges| edges.before + edges.behind > 0)
    }

    /// What it costs in a step; none where it cannot be split so over so many ranks.
    pub fn cost(&self, by: Parallelism, at: &Setting) -> Option<Cost> {
        Some(self.collectives(by, at)?.into_iter().map(|pattern| at.cost(pattern)).sum())
    }

    /// The collectives of a step, forward first; none where it cannot be split so over so many ranks.
    pub fn collectives(&self, by: Parallelism, at: &Setting) -> Option<Vec<CollectivePattern>> {
        match by {
            Parallelism::Data => (at.ranks <= at.batch).then(|| vec![self.weight_gradient()]),
            // What is no product is done by all ranks alike.
            Parallelism::Model => match self.features {
                None => Some(Vec::new()),
                Some(features) => (at.ranks <= features.output).then(|| {
                    let gathered = CollectivePattern::AllGather(at.of_batch(self.output as f64));
                    [gathered].into_iter().chain(self.input_gradient(at)).collect()
                }),
            },
            Parallelism::Domain => {
                let edges = self.edges.filter(|edges| edges.can_be_split(at.ranks))?;
                let halos = if self.wants_input_gradient { 2 } else { 1 };
                let statistics = [CollectivePattern::AllReduce(self.statistics as f64); 2];
                let halos = std::iter::repeat_n(edges.halo(at), halos);
                Some(halos.chain(statistics).chain([self.weight_gradient()]).collect())
            }
        }
    }

    /// The all-reduce of the weights' gradient where each rank has some of the samples, or of their rows.
    pub(super) fn weight_gradient(&self) -> CollectivePattern {
        CollectivePattern::AllReduce(self.kept as f64)
    }

    /// The all-reduce of the input's gradient where each rank has some of the outputs.
    pub(super) fn input_gradient(&self, at: &Setting) -> Option<CollectivePattern> {
        self.wants_input_gradient.then(|| CollectivePattern::AllReduce(at.of_batch(self.input as f64)))
    }

    /// The cheapest parallelism by itself, with what it costs; the first of several.
    pub fn cheapest(&self, at: &Setting) -> Option<(Parallelism, Cost)> {
        let costs = Parallelism::ALL.into_iter().filter_map(|by| Some((by, self.cost(by, at)?)));
        costs.min_by(|(_, a), (_, b)| at.seconds(*a).total_cmp(&at.seconds(*b)))
    }
}

/// How many words of each parameter are kept, by name; of others all.
#[derive(Debug)]
pub(super) struct KeptElements(HashMap<String, u64>);

impl KeptElements {
    pub(super) fn new(model: &ModelSpec, pruning: Option<&Pruning>) -> KeptElements {
        let Some(pruning) = pruning else { return KeptElements(HashMap::new()) };
        let parameters = model.parameters();
        let kept = pruning.kept_by_parameter(&parameters);
        let named = parameters.into_iter().zip(kept);
        KeptElements(named.filter_map(|(parameter, kept)| Some((parameter.name, kept?))).collect())
    }

    fn of(&self, name: &str, elements: u64) -> u64 {
        self.0.get(name).copied().unwrap_or(elements)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{AllReduce, AlphaBeta};
    use super::Parallelism::{Data, Domain, Model as ByOutputs};
    use super::*;
    use crate::config::RunFile;
    use crate::spec::presets::{Gpt, ResNet, StemForm, Vgg, alexnet, gpt, mlp, resnet, vgg};

    fn on(ranks: usize, batch: usize) -> Setting {
        Setting { ranks, batch, link: AlphaBeta { alpha: 2e-6, beta: 1e-9 }, all_reduce: AllReduce::Ring }
    }

    fn find(model: &ModelSpec, name: &str) -> LayerSizes {
        let all = LayerSizes::of_model(model, None).unwrap();
        all.into_iter().find(|sizes| sizes.name == name).unwrap()
    }

    fn cost(messages: f64, words: f64) -> Option<Cost> {
        Some(Cost { messages, words })
    }

    /// By hand: AlexNet's second linear layer is 4096 x 4096 with 4096 biases; four ranks, 128 samples.
    #[test]
    fn a_linear_layer_sums_its_weights_or_moves_its_activations() {
        let layer = find(&alexnet((224, 224, 3), 1000, StemForm::ImageNet), "classifier.4");
        assert_eq!(layer.cost(Data, &on(4, 128)), cost(6.0, 1.5 * (4096.0 * 4096.0 + 4096.0)));
        // Outputs are all-gathered, the gradient of the inputs is all-reduced.
        assert_eq!(layer.cost(ByOutputs, &on(4, 128)), cost(9.0, 0.75 * 128.0 * (4096.0 + 2.0 * 4096.0)));
        assert_eq!(layer.cost(Domain, &on(4, 128)), None);
    }

    /// By hand: VGG's second convolution is 3 x 3 from 64 channels to 64 on 224 x 224; two ranks, eight
    /// samples. A neighbour needs one row of 224 x 64 forward, and gives its gradient back.
    #[test]
    fn a_convolution_sends_its_edges_too() {
        let model = vgg(Vgg::V16, (224, 224, 3), 1000, StemForm::ImageNet, false);
        let layer = find(&model, "features.2");
        let weights = 64.0 * 64.0 * 9.0 + 64.0;
        assert_eq!(layer.cost(Data, &on(2, 8)), cost(2.0, weights));
        let row = 8.0 * 224.0 * 64.0;
        assert_eq!(layer.cost(Domain, &on(2, 8)), cost(4.0, 2.0 * row + weights));
        let image = 8.0 * 224.0 * 224.0 * 64.0;
        assert_eq!(layer.cost(ByOutputs, &on(2, 8)), cost(3.0, 0.5 * image + image));
        // Nothing before the first layer is trained, so nothing goes back.
        let first = find(&model, "features.0");
        assert_eq!(first.cost(Domain, &on(2, 8)), cost(3.0, 8.0 * 224.0 * 3.0 + 64.0 * 27.0 + 64.0));
        assert_eq!(first.cost(ByOutputs, &on(2, 8)), cost(1.0, 0.5 * image));
    }

    /// 7 x 7 at stride 2: three rows before and two behind. 2 x 2 pools need none, 3 x 3 at stride 2 with a
    /// border one before.
    #[test]
    fn edges_follow_kernel_stride_and_padding() {
        let net = resnet(ResNet::R18, (224, 224, 3), 1000, StemForm::ImageNet);
        let edges = |name: &str| find(&net, name).edges.map(|edges| (edges.before, edges.behind));
        assert_eq!(edges("conv1"), Some((3, 2)));
        assert_eq!(edges("max_pool"), Some((1, 0)));
        assert_eq!(edges("layer2.0.downsample.0"), Some((0, 0)));
        let vgg = LayerSizes::of_model(&vgg(Vgg::V16, (224, 224, 3), 1000, StemForm::ImageNet, false), None)
            .unwrap();
        assert!(vgg.iter().all(|sizes| sizes.kind != "max_pool"), "they have nothing to say");
    }

    #[test]
    fn more_ranks_than_there_is_to_share_cannot_share_it() {
        let model = alexnet((224, 224, 3), 10, StemForm::ImageNet);
        let (conv, head) = (find(&model, "features.6"), find(&model, "classifier.6"));
        assert!(conv.cost(Data, &on(8, 8)).is_some() && conv.cost(Data, &on(16, 8)).is_none());
        // 13 rows.
        assert!(conv.cost(Domain, &on(13, 8)).is_some() && conv.cost(Domain, &on(14, 8)).is_none());
        assert!(head.cost(ByOutputs, &on(10, 8)).is_some() && head.cost(ByOutputs, &on(11, 8)).is_none());
        // A slab of 3 rows cannot give 5 of them: 224 rows on 64 ranks, 11 x 11 at stride 4.
        assert!(find(&model, "features.0").cost(Domain, &on(44, 8)).is_some());
        assert!(find(&model, "features.0").cost(Domain, &on(45, 8)).is_none());
    }

    /// Statistics of a batch norm are all-reduced where ranks have slabs of an image, forward and backward.
    #[test]
    fn a_batch_norm_measures_over_slabs() {
        let layer = find(&resnet(ResNet::R18, (224, 224, 3), 1000, StemForm::ImageNet), "bn1");
        assert_eq!(layer.cost(Data, &on(2, 8)), cost(2.0, 128.0));
        assert_eq!(layer.cost(Domain, &on(2, 8)), cost(6.0, 3.0 * 128.0));
        assert_eq!(layer.cost(ByOutputs, &on(2, 8)), Some(Cost::FREE));
    }

    /// A tied table is all-reduced once, and ids need no gradient.
    #[test]
    fn a_tied_head_has_no_weights_of_its_own() {
        let shape = Gpt { layers: 1, width: 8, heads: 2, context: 4, vocab: 16, ..Gpt::default() };
        let model = gpt("gpt", &shape);
        assert_eq!(find(&model, "wte").cost(Data, &on(2, 2)), cost(2.0, 128.0));
        assert_eq!(find(&model, "wte").cost(ByOutputs, &on(2, 2)), cost(1.0, 32.0));
        assert_eq!(find(&model, "tied_linear").cost(Data, &on(2, 2)), Some(Cost::FREE));
    }

    #[test]
    fn pruning_shortens_all_reduces_of_weight_gradients_alone() {
        let text = "[model]\nname = \"mlp\"\n[data]\nkind = \"shapes\"\n[prune]\nmethod = \"magnitude\"\nsparsity = 0.9";
        let pruning = RunFile::parse(text, &[]).unwrap().prune;
        let model = mlp((28, 28, 1), &[300, 100], 10);
        let all = |pruning| LayerSizes::of_model(&model, pruning).unwrap();
        for (dense, pruned) in all(None).iter().zip(&all(pruning.as_ref())) {
            assert_eq!(dense.cost(ByOutputs, &on(4, 32)), pruned.cost(ByOutputs, &on(4, 32)));
            // Biases are kept.
            let biases = dense.output;
            let weights = dense.kept - biases;
            assert_eq!(pruned.kept, biases + (0.1 * weights as f64).round() as u64, "{}", dense.name);
            assert_eq!(pruned.cost(Data, &on(4, 32)), cost(6.0, 1.5 * pruned.kept as f64));
        }
    }
}
