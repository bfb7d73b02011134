//! Models written in a run file, layer by layer.
//!
//! A person writes what a layer makes; what it takes follows from the layers before it. Parameters are named
//! for their position: `layers.3.weight`, inside a residual `layers.3.branch.0.weight`, inside branches
//! `layers.3.branches.1.0.weight`. Weights start from a truncated normal over the fan-in, of variance
//! 2/fan-in where a non-linearity comes next and 1/fan-in elsewhere; embeddings from a normal of 0.02.
//!
//! A residual, branches, a convolution, a linear layer and a token embedding each open a block, which lasts
//! up to the next.

use super::layer::{LayerContext, WrittenLayer, active};
use super::{BlockSpec, Input, ModelSpec, ShapeError};

/// Completes written layers to a model, or says which of them does not fit.
pub fn custom(input: Input, classes: usize, layers: &[WrittenLayer]) -> Result<ModelSpec, ShapeError> {
    let mut blocks: Vec<BlockSpec> = Vec::new();
    let mut started = false;
    let mut shape = input.shape();
    for (i, written) in layers.iter().enumerate() {
        let (name, path) = (format!("layers.{i}"), format!("layer {i}"));
        let then_active = active(&layers[i + 1..], false);
        let at = LayerContext { name: name.clone(), shape, input, classes, then_active, path: &path };
        let layer = (written.kind.complete)(written, &at)?;
        shape = layer.step(shape, &path, &mut |_, _, _| {})?;
        let opens = written.kind.opens;
        match blocks.last_mut() {
            // What comes before the first such layer belongs to its block.
            Some(block) if !(opens && started) => block.layers.push(layer),
            _ => blocks.push(BlockSpec { name, layers: vec![layer] }),
        }
        started |= opens;
    }
    let model = ModelSpec { name: "custom".into(), input, blocks, classes };
    model.check()?;
    Ok(model)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::field::{Field, FieldDefault, FieldType};
    use crate::spec::{
        Downstream, FieldValue, KINDS, LayerKind, LayerSpec, Precision, RecomputeMode, TileRole,
    };
    use crate::tiles::WindowPadding;

    const IMAGE: Input = Input::Image { height: 28, width: 28, channels: 1 };

    fn conv(output: usize, kernel: usize) -> WrittenLayer {
        WrittenLayer::new(
            "conv",
            &[("output", FieldValue::Integer(output)), ("kernel", FieldValue::Integer(kernel))],
        )
    }

    fn linear(output: usize) -> WrittenLayer {
        WrittenLayer::new("linear", &[("output", FieldValue::Integer(output))])
    }

    fn plain(word: &str) -> WrittenLayer {
        WrittenLayer::new(word, &[])
    }

    fn residual(branch: Vec<WrittenLayer>, shortcut: Vec<WrittenLayer>) -> WrittenLayer {
        WrittenLayer::new(
            "residual",
            &[("branch", FieldValue::Layers(branch)), ("shortcut", FieldValue::Layers(shortcut))],
        )
    }

    fn branches(join: &'static str, branches: Vec<Vec<WrittenLayer>>) -> WrittenLayer {
        WrittenLayer::new(
            "branches",
            &[("join", FieldValue::Word(join)), ("branches", FieldValue::Lists(branches))],
        )
    }

    fn embedding(width: usize) -> WrittenLayer {
        WrittenLayer::new("embedding", &[("width", FieldValue::Integer(width))])
    }

    fn attention(heads: usize, kv_heads: usize) -> WrittenLayer {
        WrittenLayer::new(
            "attention",
            &[("heads", FieldValue::Integer(heads)), ("kv_heads", FieldValue::Integer(kv_heads))],
        )
    }

    fn pool() -> WrittenLayer {
        WrittenLayer::new("max_pool", &[("kernel", FieldValue::Integer(2))])
    }

    #[test]
    fn simple_cnn_written_by_hand_is_the_built_in_one() {
        let layers = [
            conv(32, 5),
            plain("relu"),
            pool(),
            conv(64, 5),
            plain("relu"),
            pool(),
            plain("flatten"),
            linear(10),
        ];
        let model = custom(IMAGE, 10, &layers).unwrap();
        let built_in = super::super::presets::simple_cnn((28, 28, 1), 10);
        let what = |m: &ModelSpec| m.parameters().into_iter().map(|p| (p.shape, p.init)).collect::<Vec<_>>();
        assert_eq!(what(&model), what(&built_in));
        assert_eq!(model.flops(2), built_in.flops(2));
        let blocks: Vec<_> = model.blocks.iter().map(|b| (b.name.as_str(), b.layers.len())).collect();
        assert_eq!(blocks, [("layers.0", 3), ("layers.3", 4), ("layers.7", 1)]);
        assert_eq!(model.parameters()[3].name, "layers.3.bias");
    }

    /// With "same" padding, and a ReLU before both sides of a block that widens.
    #[test]
    fn resnet8_written_by_hand_is_the_built_in_one() {
        let conv = |output, stride| {
            let sizes = [("output", output), ("kernel", 3), ("stride", stride)];
            let mut fields = sizes.map(|(name, n)| (name, FieldValue::Integer(n))).to_vec();
            fields.push(("padding", FieldValue::Word("same")));
            WrittenLayer::new("conv", &fields)
        };
        let pooled = WrittenLayer::new("avg_pool", &[("kernel", FieldValue::Integer(2))]);
        let padded = |n| WrittenLayer::new("pad_channels", &[("output", FieldValue::Integer(n))]);
        let relu = || plain("relu");
        let mut layers = vec![conv(16, 1), residual(vec![relu(), conv(16, 1), relu(), conv(16, 1)], vec![])];
        for width in [32, 64] {
            let branch = vec![conv(width, 2), relu(), conv(width, 1)];
            layers.extend([relu(), residual(branch, vec![pooled.clone(), padded(width)])]);
        }
        layers.extend([relu(), plain("global_avg_pool"), linear(10)]);
        let image = Input::Image { height: 32, width: 20, channels: 3 };
        let written = custom(image, 10, &layers).unwrap();
        let built_in = super::super::presets::resnet8((32, 20, 3), 10);
        let windows = |model: &ModelSpec| {
            let mut all = Vec::new();
            let mut visit = |layer: &LayerSpec| all.push((layer.kind(), layer.properties().tile_role));
            let layers = model.blocks.iter().flat_map(|block| &block.layers);
            layers.for_each(|layer| layer.for_each(&mut visit));
            all
        };
        assert_eq!(windows(&written), windows(&built_in));
        let strided = |role: &TileRole| match role {
            TileRole::Window(window) if window.kernel == 3 && window.stride == 2 => Some(window.padding),
            _ => None,
        };
        let odd = WindowPadding { top: 0, bottom: 1, left: 0, right: 1 };
        assert_eq!(
            windows(&built_in).iter().filter_map(|(_, role)| strided(role)).collect::<Vec<_>>(),
            [odd; 2]
        );
        assert_eq!((written.parameter_count(), written.flops(2)), (75_050, built_in.flops(2)));
    }

    #[test]
    fn a_transformer_can_be_written() {
        let branch = vec![plain("layer_norm"), linear(24), attention(2, 2), linear(8)];
        let head = WrittenLayer::new("linear", &[("bias", FieldValue::Flag(false))]);
        let layers = [embedding(8), plain("position"), residual(branch, vec![]), plain("layer_norm"), head];
        let model = custom(Input::Tokens { seq: 4, vocab: 11 }, 11, &layers).unwrap();
        assert!(model.parameters().iter().any(|p| p.name == "layers.2.branch.1.weight"));
        assert_eq!(model.parameters().last().unwrap().shape, [11, 8]);
        assert_eq!(model.blocks.len(), 3);
    }

    /// A layer of Llama's: RMS norm, separate queries, keys and values with fewer heads of the latter two,
    /// SwiGLU, no biases. Counted by hand: 8 + 8 x 8 + 2 (8 x 4) + 8 x 8 and 8 + 2 (8 x 12) + 12 x 8 weights;
    /// flops twice the products, a position.
    #[test]
    fn llama_s_layers_can_be_written() {
        let bare = |output| {
            WrittenLayer::new(
                "linear",
                &[("output", FieldValue::Integer(output)), ("bias", FieldValue::Flag(false))],
            )
        };
        let qkv = branches("concat", vec![vec![bare(8)], vec![bare(4)], vec![bare(4)]]);
        let gate = branches("product", vec![vec![bare(12), plain("silu")], vec![bare(12)]]);
        let layers = [
            embedding(8),
            residual(vec![plain("rms_norm"), qkv, attention(4, 2), bare(8)], vec![]),
            residual(vec![plain("rms_norm"), gate, bare(8)], vec![]),
            plain("rms_norm"),
            bare(11),
        ];
        let model = custom(Input::Tokens { seq: 5, vocab: 11 }, 11, &layers).unwrap();
        let attention = 8 + 8 * 8 + 2 * (8 * 4) + 8 * 8;
        let gated = 8 + 2 * (8 * 12) + 12 * 8;
        assert_eq!(model.parameter_count(), 11 * 8 + attention + gated + 8 + 8 * 11);
        let products = (attention - 8) + (gated - 8) + 8 * 11 + 2 * 5 * 8;
        assert_eq!(model.flops(3).unwrap(), (3 * 5 * 2 * products) as f64);
        let names: Vec<_> = model.parameters().into_iter().map(|p| p.name).collect();
        assert!(names.contains(&"layers.1.branch.1.branches.2.0.weight".to_string()), "{names:?}");
        assert_eq!(model.blocks.len(), 4);
        // Kept of a position, in f32: the id; the residual's input with its rstd, all queries, keys and values,
        // attention's output with a number a head; then the input with its rstd, the gate before SiLU and
        // what it multiplies; the last norm's input and rstd, and what the head reads. What the norms and the
        // gated unit give linear layers is made again.
        let kept = 1 + (8 + 1 + 16 + 8 + 4) + (8 + 1 + 12 + 12) + (8 + 1 + 8);
        let bytes = model.activation_bytes(3, Precision::F32, RecomputeMode::None).unwrap();
        assert_eq!(bytes, 3 * 5 * 4 * kept);
    }

    #[test]
    fn what_comes_before_the_first_weight_joins_its_block() {
        let model = custom(IMAGE, 10, &[plain("flatten"), linear(20), plain("relu"), linear(10)]).unwrap();
        assert_eq!(model.blocks.iter().map(|b| b.layers.len()).collect::<Vec<_>>(), [3, 1]);
    }

    fn sentence(layers: &[WrittenLayer]) -> String {
        custom(IMAGE, 10, layers).unwrap_err().to_string()
    }

    #[test]
    fn what_does_not_fit_is_named() {
        insta::assert_snapshot!(sentence(&[conv(8, 5), linear(10)]), @"layer 1 (linear): takes vectors, got an image of 24 x 24 x 8; put a flatten before it");
        insta::assert_snapshot!(sentence(&[conv(8, 29)]), @"layer 0 (conv): a window of 29 x 29 is larger than an image of 28 x 28 x 1");
        insta::assert_snapshot!(sentence(&[conv(0, 5)]), @"layer 0 (conv): every dimension must be at least 1, and it gives an image of 24 x 24 x 0");
        insta::assert_snapshot!(sentence(&[plain("flatten"), linear(9)]), @"output: the last layer must give a vector of 10 (one logit a class), got a vector of 9");
        insta::assert_snapshot!(sentence(&[]), @"output: the last layer must give a vector of 10 (one logit a class), got an image of 28 x 28 x 1");
        insta::assert_snapshot!(sentence(&[embedding(8)]), @"layer 0 (embedding): takes token ids, got an image of 28 x 28 x 1");
        insta::assert_snapshot!(sentence(&[conv(8, 5), residual(vec![conv(16, 1)], vec![])]), @"layer 1 (residual): its sides must have one shape: the branch gives an image of 24 x 24 x 16, the shortcut an image of 24 x 24 x 8");
        insta::assert_snapshot!(sentence(&[residual(vec![plain("relu"), conv(1, 99)], vec![])]), @"layer 0 (residual), branch 1 (conv): a window of 99 x 99 is larger than an image of 28 x 28 x 1");
        insta::assert_snapshot!(sentence(&[branches("product", vec![vec![conv(8, 5)], vec![]])]), @"layer 0 (branches): its branches must have one shape: branch 0 gives an image of 24 x 24 x 8, branch 1 an image of 28 x 28 x 1");
        insta::assert_snapshot!(sentence(&[branches("concat", vec![vec![conv(8, 5)], vec![]])]), @"layer 0 (branches): its branches must differ in their last dimension only: branch 0 gives an image of 24 x 24 x 8, branch 1 an image of 28 x 28 x 1");
        insta::assert_snapshot!(sentence(&[branches("sum", vec![vec![], vec![plain("relu"), linear(3)]])]), @"layer 0 (branches), branch 1, layer 1 (linear): takes vectors, got an image of 28 x 28 x 1; put a flatten before it");
        let text = |layers: &[WrittenLayer]| {
            custom(Input::Tokens { seq: 5, vocab: 11 }, 11, layers).unwrap_err().to_string()
        };
        insta::assert_snapshot!(text(&[embedding(8), linear(20), attention(6, 4)]), @"layer 2 (attention): 4 key/value heads do not divide the 6 query heads");
        insta::assert_snapshot!(text(&[embedding(8), linear(20), attention(4, 2)]), @"layer 2 (attention): takes queries, keys and values side by side, 4 + 2 x 2 heads of one size, got a sequence of 5 x 20");
        insta::assert_snapshot!(sentence(&[residual(vec![], vec![])]), @"layer 0 (residual): the branch of a residual needs at least one layer");
    }

    /// Any value that a reader lets through, and sizes that it does not; every kind that there is.
    fn any_value(field: &'static Field, inner: BoxedStrategy<WrittenLayer>) -> BoxedStrategy<FieldValue> {
        let size = prop_oneof![8 => 0usize..6, 1 => Just(1 << 24), 1 => Just(usize::MAX)];
        let size = size.prop_map(FieldValue::Integer).boxed();
        let side = prop::collection::vec(inner, 0..3);
        match (field.takes, field.otherwise) {
            (FieldType::Integer(..), FieldDefault::Nothing) => {
                prop_oneof![Just(FieldValue::None), size].boxed()
            }
            (FieldType::Integer(..), _) => size,
            (FieldType::IntegerOr(_, _, words), _) => {
                prop_oneof![size, prop::sample::select(words).prop_map(FieldValue::Word)].boxed()
            }
            (FieldType::Flag, _) => any::<bool>().prop_map(FieldValue::Flag).boxed(),
            (FieldType::Number(_), FieldDefault::Number(default)) => {
                Just(FieldValue::Number(default)).boxed()
            }
            (FieldType::Number(_), FieldDefault::Nothing) => {
                prop_oneof![Just(FieldValue::None), Just(FieldValue::Number(100.0))].boxed()
            }
            (FieldType::Word(words), _) => prop::sample::select(words).prop_map(FieldValue::Word).boxed(),
            (FieldType::Layers, _) => side.prop_map(FieldValue::Layers).boxed(),
            (FieldType::Lists(_), _) => prop::collection::vec(side, 0..4).prop_map(FieldValue::Lists).boxed(),
            (takes, _) => panic!("no layer has a field of {takes:?}"),
        }
    }

    fn any_of(
        kinds: Vec<&'static LayerKind>,
        inner: BoxedStrategy<WrittenLayer>,
    ) -> BoxedStrategy<WrittenLayer> {
        let layer = move |kind: &'static LayerKind| {
            let values: Vec<_> = kind.fields.iter().map(|field| any_value(field, inner.clone())).collect();
            values.prop_map(move |values| WrittenLayer { kind, values })
        };
        prop::sample::select(kinds).prop_flat_map(layer).boxed()
    }

    fn any_layer() -> BoxedStrategy<WrittenLayer> {
        let leaf = |kind: &&LayerKind| kind.then != Downstream::Inside;
        let leaves = any_of(
            KINDS.iter().copied().filter(leaf).collect(),
            Just(WrittenLayer::new("relu", &[])).boxed(),
        );
        let once = any_of(KINDS.to_vec(), leaves);
        any_of(KINDS.to_vec(), once)
    }

    proptest! {
        /// Whatever is written is a sentence or a model; of a model everything can be counted, and more
        /// samples never keep less.
        #[test]
        fn any_layers_are_refused_or_counted(
            layers in prop::collection::vec(any_layer(), 0..6),
            text in any::<bool>(),
            samples in 1usize..9,
        ) {
            let tokens = Input::Tokens { seq: 4, vocab: 10 };
            let Ok(model) = custom(if text { tokens } else { IMAGE }, 10, &layers) else { return Ok(()) };
            prop_assert!(model.flops(samples).unwrap() >= 0.0);
            prop_assert!(model.blocks.iter().all(|block| !block.layers.is_empty()));
            let bytes = |samples, recompute| model.activation_bytes(samples, Precision::Bf16, recompute).unwrap();
            prop_assert!(bytes(samples, RecomputeMode::None) <= bytes(samples + 1, RecomputeMode::None));
            if model.blocks.len() == 1 {
                prop_assert!(bytes(samples, RecomputeMode::None) <= bytes(samples, RecomputeMode::Block));
            }
        }
    }
}
