//! Networks over tiles against the same networks over whole images: outputs, gradients of the input and of
//! every weight.

use std::collections::BTreeMap;
use std::time::Duration;

use espalier_comm::{Communicator, threads};
use espalier_plan::layout::spatial::strides;
use espalier_plan::spec::{
    self, Activation, AdaptiveAvgPool, BatchNorm, BlockSpec, Conv, Init, Input, Linear, MaxPool, Shape,
    TileRole, WeightOrder,
};
use espalier_plan::tiles::{HaloPlan, Region, TileGrid};
use espalier_tensor::cuda::Cuda;
use espalier_tensor::ops::{activation, conv, pool};
use espalier_tensor::random::{key, normal};
use espalier_tensor::{Category, DType, Device, Tensor};
use espalier_testing::{Need, skipped};

use super::*;
use crate::layers::{
    self, BackwardContext, BatchSlice, ForwardContext, GradientSink, Layer, Mode, NormGroup, WeightGradients,
};
use crate::weights::{ParameterId, Weights};
use crate::{Error, Result};

const SAMPLES: usize = 4;
const CLASSES: usize = 5;

fn conv(
    name: &str,
    [input, output]: [usize; 2],
    kernel: usize,
    stride: usize,
    padding: usize,
) -> spec::LayerSpec {
    let init = Init::Normal(1.0 / ((input * kernel * kernel) as f32).sqrt());
    let (name, padding) = (name.into(), padding.into());
    spec::LayerSpec::Conv(Conv { name, input, output, kernel, stride, padding, bias: true, init })
}

/// Without a bias, whose gradient before a batch norm is zero but for rounding.
fn conv_before_norm(name: &str, channels: [usize; 2], kernel: usize) -> spec::LayerSpec {
    match conv(name, channels, kernel, 1, kernel / 2) {
        spec::LayerSpec::Conv(conv) => spec::LayerSpec::Conv(Conv { bias: false, ..conv }),
        other => other,
    }
}

fn max_pool(kernel: usize, stride: usize, padding: usize) -> spec::LayerSpec {
    spec::LayerSpec::MaxPool(MaxPool { kernel, stride, padding: padding.into() })
}

fn batch_norm(name: &str, channels: usize) -> spec::LayerSpec {
    spec::LayerSpec::BatchNorm(BatchNorm { name: name.into(), channels, scale: 1.0, group: 0, eps: 1e-5 })
}

fn classifier(input: usize) -> spec::LayerSpec {
    let init = Init::Normal(1.0 / (input as f32).sqrt());
    let order = WeightOrder::OutIn;
    spec::LayerSpec::Linear(Linear { name: "fc".into(), input, output: CLASSES, bias: true, order, init })
}

/// What a network in the manner of a ResNet has.
fn residual_like() -> Vec<spec::LayerSpec> {
    vec![
        conv_before_norm("conv1", [3, 8], 3),
        batch_norm("bn1", 8),
        spec::LayerSpec::Activation(Activation::Relu),
        max_pool(3, 2, 1),
        conv("conv2", [8, 12], 5, 2, 2),
        spec::LayerSpec::Activation(Activation::Gelu),
        conv("conv3", [12, 12], 3, 1, 1),
        spec::LayerSpec::GlobalAvgPool,
        classifier(12),
    ]
}

/// Windows without padding, of an even side, wider steps than windows, and means over windows that overlap.
fn odd_windows() -> Vec<spec::LayerSpec> {
    vec![
        conv("conv1", [3, 6], 5, 1, 0),
        spec::LayerSpec::Activation(Activation::Gelu),
        max_pool(2, 2, 0),
        conv("conv2", [6, 8], 4, 1, 1),
        conv("conv3", [8, 8], 1, 2, 0),
        spec::LayerSpec::AdaptiveAvgPool(AdaptiveAvgPool { size: 2 }),
        spec::LayerSpec::Flatten,
        classifier(32),
    ]
}

/// Nothing that jumps where a number is rounded otherwise.
fn smooth() -> Vec<spec::LayerSpec> {
    vec![
        conv("conv1", [3, 8], 3, 1, 1),
        spec::LayerSpec::Activation(Activation::Gelu),
        conv("conv2", [8, 8], 3, 2, 1),
        spec::LayerSpec::GlobalAvgPool,
        classifier(8),
    ]
}

fn model(layers: &[spec::LayerSpec], [height, width]: [usize; 2]) -> spec::ModelSpec {
    let blocks = vec![BlockSpec { name: "all".into(), layers: layers.to_vec() }];
    spec::ModelSpec {
        name: "tiles".into(),
        input: Input::Image { height, width, channels: 3 },
        blocks,
        classes: CLASSES,
    }
}

fn noise(seed: u64, n: usize) -> Vec<f32> {
    (0..n as u64).map(|i| normal(key(seed, n as u64), i) as f32).collect()
}

/// Keeps gradients by name.
struct NamedGradients<'a> {
    weights: &'a Weights,
    gradients: BTreeMap<String, Vec<f32>>,
}

impl GradientSink for NamedGradients<'_> {
    fn accept(&mut self, parameters: &[ParameterId], gradients: WeightGradients) -> Result<()> {
        for (id, gradient) in parameters.iter().zip(gradients.make(layers::GradientElements::All)?) {
            self.gradients.insert(self.weights.name(*id).to_owned(), gradient.to_f32());
        }
        Ok(())
    }
}

/// How an image is tiled: what a rank knows of it on its way through the layers.
struct TiledImage<'a> {
    tiles: TileGrid,
    /// Those with tiles of the same images.
    group: &'a Communicator,
    /// Those whose pixels batch norms measure together.
    world: &'a Communicator,
}

impl TiledImage<'_> {
    /// What this rank exchanges before a layer with windows.
    fn halo(&mut self, layer: &spec::LayerSpec) -> HaloComm {
        let TileRole::Window(window) = layer.properties().tile_role else { panic!("windows") };
        let (output, halo_plans) = self.tiles.slide("a layer", window).unwrap();
        self.tiles = output;
        HaloComm::new(halo_plans[self.group.rank()].clone(), self.group)
    }
}

/// The layers of a network; over tiles where the image is cut, else those that are there for whole images.
fn build(
    specs: &[spec::LayerSpec],
    size: [usize; 2],
    weights: &Weights,
    mut tiled: Option<TiledImage<'_>>,
) -> Vec<Box<dyn Layer>> {
    let id = |name: &str, of: &str| weights.parameter(&format!("{name}.{of}")).unwrap();
    let mut shape = Shape::Image { height: size[0], width: size[1], channels: 3 };
    let mut built: Vec<Box<dyn Layer>> = Vec::new();
    for layer in specs {
        let image = match shape {
            Shape::Image { height, width, channels } => [height, width, channels],
            _ => [0; 3],
        };
        match (layer, &mut tiled) {
            (spec::LayerSpec::Conv(Conv { name, bias, kernel, stride, padding, .. }), tiled) => {
                let (weight, bias) = (id(name, "weight"), bias.then(|| id(name, "bias")));
                match tiled {
                    Some(tiled) => built.push(Box::new(TiledConv::new(weight, bias, tiled.halo(layer)))),
                    None => {
                        let conv = conv::ConvParams {
                            kernel: *kernel,
                            stride: *stride,
                            padding: layers::padding_of(*padding),
                        };
                        built.push(Box::new(layers::ConvLayer {
                            weight,
                            bias,
                            conv,
                            relu: false,
                            normed: false,
                        }));
                    }
                }
            }
            (&spec::LayerSpec::MaxPool(MaxPool { kernel, stride, padding }), tiled) => {
                let (mut padding, mut input) = (padding, image);
                if let Some(tiled) = tiled {
                    let halo = tiled.halo(layer);
                    let plan: &HaloPlan = halo.plan();
                    padding = plan.contribution(&plan.reads).padding;
                    let [rows, columns] = plan.reads.size();
                    input = [rows, columns, image[2]];
                    built.push(Box::new(HaloExchange(halo)));
                }
                let pool = pool::PoolParams { kernel, stride, padding: layers::padding_of(padding) };
                built.push(Box::new(layers::MaxPool { input, pool, relu: false }));
            }
            (spec::LayerSpec::GlobalAvgPool, Some(tiled)) => {
                built.push(Box::new(TiledMean::global(&tiled.tiles, image[2], tiled.group)));
            }
            (spec::LayerSpec::GlobalAvgPool, None) => {
                built.push(Box::new(layers::GlobalAvgPool { input: image }))
            }
            (spec::LayerSpec::AdaptiveAvgPool(AdaptiveAvgPool { size }), Some(tiled)) => {
                built.push(Box::new(TiledMean::adaptive(&tiled.tiles, image[2], *size, tiled.group)));
            }
            (spec::LayerSpec::AdaptiveAvgPool(AdaptiveAvgPool { size }), None) => {
                built.push(Box::new(layers::AdaptiveAvgPool { input: image, size: *size }));
            }
            (spec::LayerSpec::Flatten, _) => built.push(Box::new(layers::Flatten { input: image })),
            (spec::LayerSpec::BatchNorm(BatchNorm { name, eps, .. }), tiled) => {
                let norm = layers::BatchNorm {
                    scale: id(name, "weight"),
                    shift: id(name, "bias"),
                    running_mean: weights.statistic(&format!("{name}.running_mean")).unwrap(),
                    running_variance: weights.statistic(&format!("{name}.running_var")).unwrap(),
                    group: 0,
                    eps: *eps,
                    relu: false,
                    bias_before: None,
                };
                built.push(match tiled {
                    Some(tiled) => {
                        let (in_step, in_sweep) = (Some(tiled.world.clone()), Some(tiled.group.clone()));
                        let (over_replicas, shared) = (in_step.clone(), None);
                        Box::new(layers::SyncBatchNorm { norm, in_step, in_sweep, over_replicas, shared })
                    }
                    None => Box::new(layers::SyncBatchNorm::local(norm)),
                });
            }
            (spec::LayerSpec::Activation(kind), _) => {
                built.push(Box::new(layers::ActivationLayer(match kind {
                    Activation::Relu => activation::ActivationFn::Relu,
                    _ => activation::ActivationFn::Gelu,
                })))
            }
            (spec::LayerSpec::Linear(Linear { name, order, .. }), _) => built.push(Box::new(layers::Chain {
                enter: None,
                before: layers::ChainPrologue::Nothing,
                first: layers::Projection {
                    linears: vec![layers::Linear {
                        weight: id(name, "weight"),
                        bias: Some(id(name, "bias")),
                        order: *order,
                    }],
                    widths: vec![layer.output(shape).unwrap().last()],
                },
                rest: Vec::new(),
                gate: None,
            })),
            (other, _) => panic!("no {} here", other.kind()),
        }
        shape = layer.output(shape).unwrap();
    }
    built
}

/// What came of a forward and a backward pass.
#[derive(Debug)]
struct ForwardBackward {
    output: Vec<f32>,
    input_gradient: Option<Vec<f32>>,
    gradients: BTreeMap<String, Vec<f32>>,
}

fn pass(
    built: &[Box<dyn Layer>],
    weights: &Weights,
    x: Tensor,
    batch_slice: &BatchSlice,
    dy: &[f32],
    input_gradient: bool,
) -> Result<ForwardBackward> {
    let (device, dtype, samples) = (x.device(), x.dtype(), x.shape()[0]);
    let mut forward = ForwardContext::new(weights, Mode::Train, 1, *batch_slice);
    let y = built.iter().try_fold(x, |x, layer| layer.forward(x, &mut forward))?;
    let output = y.to_f32();
    let mut sink = NamedGradients { weights, gradients: BTreeMap::new() };
    let mut backward = BackwardContext::of(&mut forward, &mut sink);
    let mut dy = Some(Tensor::from_f32(&device, &[samples, CLASSES], dtype, dy, Category::Transient)?);
    for (i, layer) in built.iter().enumerate().rev() {
        let dx = layer.backward(dy.take().expect("a gradient"), &mut backward, input_gradient || i > 0)?;
        dy = dx;
    }
    assert!(forward.stash.is_empty(), "the backward pass takes all that the forward pass left");
    Ok(ForwardBackward { output, input_gradient: dy.map(|dx| dx.to_f32()), gradients: sink.gradients })
}

/// Rows and columns of some samples out of [batch, h, w, c].
fn cut_out(x: &[f32], [h, w, c]: [usize; 3], samples: std::ops::Range<usize>, tile: &Region) -> Vec<f32> {
    let mut pixels = Vec::new();
    for n in samples {
        for i in tile.rows.clone() {
            let at = ((n * h + i) * w + tile.columns.start) * c;
            pixels.extend_from_slice(&x[at..at + tile.columns.len() * c]);
        }
    }
    pixels
}

#[track_caller]
fn assert_close(what: &str, got: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1e-6f32, |m, x| m.max(x.abs()));
    let far = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
    assert!(far <= tolerance * largest, "{what}: {far} apart, allowed are {tolerance} of {largest}");
}

/// A processor's thread and, where there is one, a GPU.
fn devices() -> Vec<Device> {
    let probe = Cuda::probe();
    if !probe.usable() {
        skipped(Need::Cuda, probe.missing.join("; "));
        return vec![Device::cpu(1).unwrap()];
    }
    vec![Device::cpu(1).unwrap(), Device::cuda(0).unwrap()]
}

/// A rank's own device like this one.
fn another(device: &Device) -> Result<Device> {
    Ok(match device {
        Device::Cpu(_) => Device::cpu(1)?,
        Device::Cuda(card) => Device::Cuda(card.another()?),
    })
}

/// Compares one rank with replicas x a grid of ranks, everywhere.
fn compare(
    specs: &[spec::LayerSpec],
    size: [usize; 2],
    replicas: usize,
    grid: [usize; 2],
    dtype: DType,
    tolerance: f32,
    input_gradient: bool,
) {
    for device in devices() {
        compare_on(&device, specs, size, replicas, grid, dtype, tolerance, input_gradient);
    }
}

fn compare_on(
    device: &Device,
    specs: &[spec::LayerSpec],
    size: [usize; 2],
    replicas: usize,
    grid: [usize; 2],
    dtype: DType,
    tolerance: f32,
    input_gradient: bool,
) {
    let spec = model(specs, size);
    spec.check().unwrap();
    let [h, w] = size;
    let (image, dy) = (noise(1, SAMPLES * h * w * 3), noise(2, SAMPLES * CLASSES));
    let one = || {
        let device = another(device)?;
        let weights = Weights::initialise(&spec, &device, dtype, 7)?;
        let x = Tensor::from_f32(&device, &[SAMPLES, h, w, 3], dtype, &image, Category::Transient)?;
        let built = build(specs, size, &weights, None);
        pass(&built, &weights, x, &BatchSlice { samples: SAMPLES, ..Default::default() }, &dy, input_gradient)
    };
    let one: ForwardBackward = one().unwrap();

    let tiles = TileGrid::cut(size, grid, &strides(specs));
    let each = SAMPLES / replicas;
    let ranks =
        threads::run(replicas * tiles.ranks(), Duration::from_secs(60), |world| -> Result<_, Error> {
            let replica = world.rank() / tiles.ranks();
            let group = world.split(Some(replica), world.rank())?.expect("a colour");
            let samples = replica * each..(replica + 1) * each;
            let device = another(device)?;
            let weights = Weights::initialise(&spec, &device, dtype, 7)?;
            let tile = tiles.of(group.rank());
            let [rows, columns] = tile.size();
            let x = cut_out(&image, [h, w, 3], samples.clone(), &tile);
            let x = Tensor::from_f32(&device, &[each, rows, columns, 3], dtype, &x, Category::Transient)?;
            let built = build(
                specs,
                size,
                &weights,
                Some(TiledImage { tiles: tiles.clone(), group: &group, world: &world }),
            );
            let batch_slice = BatchSlice { first: samples.start, samples: each, norms: NormGroup::Step };
            let dy = &dy[samples.start * CLASSES..samples.end * CLASSES];
            pass(&built, &weights, x, &batch_slice, dy, input_gradient)
        });
    let ranks = ranks.unwrap();

    let mut sums: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for (rank, passed) in ranks.iter().enumerate() {
        let (replica, tile) = (rank / tiles.ranks(), rank % tiles.ranks());
        let samples = replica * each..(replica + 1) * each;
        let expected = &one.output[samples.start * CLASSES..samples.end * CLASSES];
        assert_close("outputs", &passed.output, expected, tolerance);
        match (&passed.input_gradient, &one.input_gradient) {
            (Some(got), Some(whole)) => {
                let expected = cut_out(whole, [h, w, 3], samples, &tiles.of(tile));
                assert_close("the input's gradient", got, &expected, tolerance);
            }
            (got, whole) => assert!(got.is_none() && whole.is_none() && !input_gradient),
        }
        for (name, gradient) in &passed.gradients {
            // The classifier stands behind the sum: each rank of a tiling has all of its gradient.
            if name.starts_with("fc") && tile > 0 {
                let first = &ranks[replica * tiles.ranks()].gradients[name];
                assert_close(name, gradient, first, tolerance);
                continue;
            }
            let sum = sums.entry(name.clone()).or_insert_with(|| vec![0.0; gradient.len()]);
            sum.iter_mut().zip(gradient).for_each(|(sum, x)| *sum += x);
        }
    }
    assert_eq!(sums.keys().collect::<Vec<_>>(), one.gradients.keys().collect::<Vec<_>>());
    for (name, sum) in &sums {
        assert_close(name, sum, &one.gradients[name], tolerance);
    }
}

const GRIDS: [[usize; 2]; 6] = [[1, 1], [2, 1], [3, 1], [4, 1], [2, 2], [3, 2]];

#[test]
fn a_network_over_tiles_is_the_network_over_the_image() {
    for grid in GRIDS {
        // 26 rows divide by neither of the strides' products nor most of the ranks: cuts are uneven, and not
        // all at strides.
        for size in [[32, 32], [26, 19]] {
            compare(&residual_like(), size, 1, grid, DType::F32, 1e-5, true);
        }
    }
}

#[test]
fn windows_of_any_kind_go_over_tiles() {
    for grid in GRIDS {
        for size in [[45, 23], [40, 36]] {
            compare(&odd_windows(), size, 1, grid, DType::F32, 1e-5, true);
        }
    }
}

#[test]
fn replicas_of_tiles_measure_batch_norm_together() {
    compare(&residual_like(), [24, 16], 2, [2, 1], DType::F32, 1e-5, true);
}

/// Where nobody asks for the gradient of the image, no ghosts travel.
#[test]
fn the_first_layer_sends_nothing_back() {
    compare(&residual_like(), [24, 16], 1, [2, 2], DType::F32, 1e-5, false);
}

#[test]
fn tiles_in_bf16_agree_to_its_rounding() {
    compare(&smooth(), [24, 24], 1, [2, 2], DType::Bf16, 1.0 / 64.0, true);
}
