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
        shape = layer.step(shape, format_args!("{path}"), &mut |_, _, _| {})?;
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
    use toml::Value;

    use super::*;
    use crate::field::{Field, FieldDefault, FieldType, FieldValues};
    use crate::spec::{Downstream, KINDS, LayerKind, LayerSpec, Precision, RecomputeMode, TileRole};
    use crate::tiles::WindowPadding;

    const IMAGE: Input = Input::Image { height: 28, width: 28, channels: 1 };

    /// A layer by its word and some fields, whatever they are; the others have their defaults.
    fn layer(word: &str, fields: &str, branches: Vec<Vec<WrittenLayer>>) -> WrittenLayer {
        let kind = LayerKind::find(word).unwrap();
        let mut values = FieldValues(fields.parse().unwrap());
        let defaults = kind.fields.iter().filter_map(|field| Some((field.name, field.otherwise.value()?)));
        defaults.for_each(|(name, default)| values.set_left_out(name, default));
        WrittenLayer { kind, values, branches }
    }

    fn plain(word: &str) -> WrittenLayer {
        layer(word, "", vec![])
    }

    fn conv(output: usize, kernel: usize) -> WrittenLayer {
        layer("conv", &format!("output = {output}\nkernel = {kernel}"), vec![])
    }

    fn linear(output: usize) -> WrittenLayer {
        layer("linear", &format!("output = {output}"), vec![])
    }

    fn residual(branch: Vec<WrittenLayer>, shortcut: Vec<WrittenLayer>) -> WrittenLayer {
        layer("residual", "", vec![branch, shortcut])
    }

    fn branches(join: &str, branches: Vec<Vec<WrittenLayer>>) -> WrittenLayer {
        layer("branches", &format!("join = \"{join}\""), branches)
    }

    fn embedding(width: usize) -> WrittenLayer {
        layer("embedding", &format!("width = {width}"), vec![])
    }

    fn attention(heads: usize, kv_heads: usize) -> WrittenLayer {
        layer("attention", &format!("heads = {heads}\nkv_heads = {kv_heads}"), vec![])
    }

    fn pool() -> WrittenLayer {
        layer("max_pool", "kernel = 2\nstride = 2", vec![])
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
            let fields = format!("output = {output}\nkernel = 3\nstride = {stride}\npadding = \"same\"");
            layer("conv", &fields, vec![])
        };
        let pooled = layer("avg_pool", "kernel = 2\nstride = 2", vec![]);
        let padded = |n: usize| layer("pad_channels", &format!("output = {n}"), vec![]);
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
        let head = layer("linear", "bias = false", vec![]);
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
        let bare = |output: usize| layer("linear", &format!("output = {output}\nbias = false"), vec![]);
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
    fn any_value(field: &'static Field) -> BoxedStrategy<Option<Value>> {
        let size = prop_oneof![8 => 0i64..6, 1 => Just(1 << 24), 1 => Just(i64::MAX)].prop_map(Value::from);
        let word = |words| prop::sample::select::<&str>(words).prop_map(Value::from);
        let value = match (field.takes, field.otherwise) {
            (FieldType::Integer(..), _) => size.boxed(),
            (FieldType::IntegerOr(_, _, words), _) => prop_oneof![size, word(words)].boxed(),
            (FieldType::Flag, _) => any::<bool>().prop_map(Value::from).boxed(),
            (FieldType::Number(_), FieldDefault::Number(default)) => Just(default.into()).boxed(),
            (FieldType::Number(_), _) => Just(100.0.into()).boxed(),
            (FieldType::Word(words), _) => word(words).boxed(),
            (FieldType::Layers | FieldType::Lists(_), _) => return Just(None).boxed(),
            (takes, _) => panic!("no layer has a field of {takes:?}"),
        };
        match field.otherwise {
            FieldDefault::Nothing => prop::option::of(value).boxed(),
            _ => value.prop_map(Some).boxed(),
        }
    }

    fn any_of(
        kinds: Vec<&'static LayerKind>,
        inner: BoxedStrategy<WrittenLayer>,
    ) -> BoxedStrategy<WrittenLayer> {
        let layer = move |kind: &'static LayerKind| {
            let values: Vec<_> = kind.fields.iter().map(any_value).collect();
            let lists = match kind.fields.last().map(|field| field.takes) {
                Some(FieldType::Layers) => 2..3,
                Some(FieldType::Lists(_)) => 0..4,
                _ => 0..1,
            };
            let branches = prop::collection::vec(prop::collection::vec(inner.clone(), 0..3), lists);
            (values, branches).prop_map(move |(values, branches)| {
                let named = kind.fields.iter().zip(values);
                let values = named.filter_map(|(field, value)| Some((field.name.into(), value?)));
                WrittenLayer { kind, values: FieldValues(values.collect()), branches }
            })
        };
        prop::sample::select(kinds).prop_flat_map(layer).boxed()
    }

    fn any_layer() -> BoxedStrategy<WrittenLayer> {
        let leaf = |kind: &&LayerKind| kind.then != Downstream::Inside;
        let leaves = any_of(KINDS.iter().copied().filter(leaf).collect(), Just(plain("relu")).boxed());
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
