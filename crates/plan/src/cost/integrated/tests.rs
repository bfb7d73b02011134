//! The cheapest mixture by hand, where it can be worked out, and against all pure ones where not.

use proptest::prelude::*;

use super::super::{AllReduce, AlphaBeta};
use super::*;
use crate::spec::presets::{Gpt, ResNet, StemForm, Vgg, alexnet, gpt, mlp, resnet, simple_cnn, vgg};

fn on(ranks: usize, batch: usize) -> Setting {
    Setting { ranks, batch, link: AlphaBeta::published(4), all_reduce: AllReduce::Ring }
}

/// Seconds of a model whose layers are all split alike, where they can be.
fn pure(model: &ModelSpec, by: Parallelism, at: &Setting) -> Option<f64> {
    let layers = LayerSizes::of_model(model, None).unwrap();
    let costs = layers.iter().map(|sizes| sizes.cost(by, at)).collect::<Option<Vec<_>>>()?;
    Some(at.seconds(costs.into_iter().sum()))
}

/// By hand, with one sample, so that it cannot be data: the first layer by its outputs, the second by its
/// inputs, and the ten logits are all-reduced. Nothing is moved, and nothing goes back: the pair of Shoeybi et
/// al.
#[test]
fn two_linear_layers_make_a_pair() {
    let model = mlp((28, 28, 1), &[1000], 10);
    let found = Integrated::of(&model, None, &on(4, 1)).unwrap();
    assert_eq!(found.cost, Cost { messages: 6.0, words: 15.0 });
    assert_eq!(found.exchanged, Cost::FREE);
    assert!(found.layers.iter().all(|choice| choice.by == Parallelism::Model), "{found:?}");
}

/// A block of a transformer by model parallelism alone is four all-reduces: forward and backward, attention and
/// perceptron.
#[test]
fn a_transformer_needs_four_all_reduces_a_block() {
    let words = |layers| {
        let shape =
            Gpt { layers, width: 64, heads: 8, context: 16, vocab: 512, tied: false, ..Gpt::default() };
        Integrated::of(&gpt("gpt", &shape), None, &on(4, 1)).unwrap().cost.words
    };
    assert_eq!(words(3) - words(2), 4.0 * 1.5 * 16.0 * 64.0);
}

/// The example of Gholami et al.: convolutions by samples while there are enough of them, linear layers by
/// their outputs.
#[test]
fn convolutions_and_linear_layers_want_different_things() {
    for model in [
        alexnet((224, 224, 3), 1000, StemForm::ImageNet),
        vgg(Vgg::V16, (224, 224, 3), 1000, StemForm::ImageNet, false),
    ] {
        let found = Integrated::of(&model, None, &on(8, 64)).unwrap();
        for choice in &found.layers {
            let linear = choice.name.starts_with("classifier");
            let expected = if linear { Parallelism::Model } else { Parallelism::Data };
            assert_eq!(choice.by, expected, "{}: {}", model.name, choice.name);
        }
        assert!(found.exchanged.words > 0.0);
    }
}

/// With more ranks than samples large images are cut by rows, and where weights outweigh activations by outputs.
#[test]
fn slabs_of_images_go_on_where_samples_end() {
    let model = vgg(Vgg::V16, (224, 224, 3), 1000, StemForm::ImageNet, false);
    let found = Integrated::of(&model, None, &on(8, 4)).unwrap();
    let by: Vec<_> = found.layers.iter().map(|choice| choice.by).collect();
    assert!(by[..6].iter().all(|by| *by == Parallelism::Domain), "{by:?}");
    assert!(by[6..].iter().all(|by| *by != Parallelism::Data) && by[15] == Parallelism::Model, "{by:?}");
}

/// By hand, on eight ranks and 64 samples: five convolutions all-reduce their weight gradients; the 9216
/// features of each sample are moved by an all-to-all, and their gradients back; the first linear layer
/// all-reduces its outputs, the second the gradient of its inputs, the third its outputs.
#[test]
fn alexnets_messages_are_these() {
    let found = Integrated::of(&alexnet((224, 224, 3), 1000, StemForm::ImageNet), None, &on(8, 64)).unwrap();
    let moved = 2.0 * 7.0 / 8.0 * (64.0 * 9216.0 / 8.0);
    assert_eq!(found.exchanged, Cost { messages: 14.0, words: moved });
    let summed = 1.75 * (2_469_696.0 + 64.0 * (4096.0 + 4096.0 + 1000.0));
    assert_eq!(found.cost, Cost { messages: 14.0 + 8.0 * 14.0, words: moved + summed });
}

/// By themselves an embedding of few ids would be split by its outputs and a head of many samples by data.
#[test]
fn layers_that_share_a_weight_are_split_alike() {
    for (batch, expected) in [(64, Parallelism::Data), (1, Parallelism::Model)] {
        let shape = Gpt { layers: 1, width: 64, heads: 8, context: 16, vocab: 512, ..Gpt::default() };
        let found = Integrated::of(&gpt("gpt", &shape), None, &on(4, batch)).unwrap();
        let of = |name: &str| found.layers.iter().find(|choice| choice.name == name).unwrap().by;
        assert_eq!((of("wte"), of("tied_linear")), (expected, expected));
    }
}

#[test]
fn every_product_is_listed_once_and_in_order() {
    let model = resnet(ResNet::R18, (64, 64, 3), 10, StemForm::Small);
    let sizes = LayerSizes::of_model(&model, None).unwrap();
    let products: Vec<_> = sizes.iter().filter(|s| s.features.is_some()).map(|s| s.name.clone()).collect();
    let told = Integrated::of(&model, None, &on(4, 16)).unwrap();
    assert_eq!(told.layers.into_iter().map(|choice| choice.name).collect::<Vec<_>>(), products);
}

proptest! {
    #[test]
    fn never_worse_than_any_pure_choice(
        kind in 0..5usize, ranks in 1usize..40, batch in 1usize..200, width in 1usize..40,
        alpha in prop_oneof![Just(0.0), 1e-9..1e-3f64], beta in 1e-12..1e-8f64, how in 0..3usize,
    ) {
        let model = match kind {
            0 => mlp((9, 7, 2), &[50 * width, 30], 40),
            1 => simple_cnn((28, 28, 1), 10 + width),
            2 => alexnet((40, 40, 3), 10 * width + 2, StemForm::Small),
            3 => resnet(ResNet::R18, (16, 16, 3), 10, StemForm::Small),
            _ => gpt("gpt", &Gpt { layers: 2, width: 8 * width, heads: 4, vocab: 300, tied: width % 2 == 0, ..Gpt::default() }),
        };
        let at = Setting { ranks, batch, link: AlphaBeta { alpha, beta }, all_reduce: AllReduce::ALL[how].1 };
        let found = Integrated::of(&model, None, &at);
        for by in Parallelism::ALL {
            if let Some(pure) = pure(&model, by, &at) {
                let found = found.as_ref().expect("a pure choice is a mixture").seconds;
                prop_assert!(found <= pure * (1.0 + 1e-9) + 1e-15, "{by:?}: {found} {pure}");
            }
        }
        if let Some(found) = found {
            prop_assert!(found.exchanged.words <= found.cost.words);
            prop_assert!((found.seconds - at.seconds(found.cost)).abs() <= 1e-12);
        }
    }
}
