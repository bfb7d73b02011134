//! Networks over tiles against the same networks over whole images: outputs, gradients of the input and of
//! every weight.

use std::collections::BTreeMap;
use std::time::Duration;

use espalier_comm::threads;
use espalier_plan::layout::spatial::strides;
use espalier_plan::layout::{Layout, Partition};
use espalier_plan::mesh::{Mesh, PerAxis};
use espalier_plan::spec::{
    self, Activation, AdaptiveAvgPool, BatchNorm, BlockSpec, Conv, Init, Input, Linear, MaxPool, WeightOrder,
};
use espalier_plan::tiles::{Region, TileGrid};
use espalier_tensor::cuda::Cuda;
use espalier_tensor::random::{key, normal};
use espalier_tensor::{Category, DType, Device, Tensor};
use espalier_testing::{Need, skipped};

use super::*;
use crate::Result;
use crate::weights::{LocalTensors, Weights};

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
        for (id, gradient) in parameters.iter().zip(gradients.make(GradientElements::All)?) {
            self.gradients.insert(self.weights.name(*id).to_owned(), gradient.to_f32());
        }
        Ok(())
    }
}

/// The layers that a rank has of a network, for an image of which it has been given its tile.
fn build(local: &LocalModel, groups: &AxisGroups) -> Sequence {
    let mut builder = Builder::new(local, groups, spec::RecomputeMode::None, None);
    let layers = &local.model.blocks[0].layers;
    let (crop, behind) = layers.split_at(usize::from(matches!(layers[0], spec::LayerSpec::Crop(_))));
    builder.advance(crop);
    builder.sequence(behind)
}

/// What came of a forward and a backward pass.
#[derive(Debug)]
struct ForwardBackward {
    output: Vec<f32>,
    input_gradient: Option<Vec<f32>>,
    gradients: BTreeMap<String, Vec<f32>>,
}

fn pass(
    local: &LocalModel,
    groups: &AxisGroups,
    x: Tensor,
    batch_slice: BatchSlice,
    dy: &[f32],
    needs_dx: bool,
) -> Result<ForwardBackward> {
    let (device, dtype, samples) = (x.device(), x.dtype(), x.shape()[0]);
    let weights = Weights::initialise_local(local, &LocalTensors::all(&local.model), &device, dtype, 7)?;
    let built = build(local, groups);
    let mut forward = ForwardContext::new(&weights, Mode::Train, 1, batch_slice);
    let output = built.forward(x, &mut forward)?.to_f32();
    let mut sink = NamedGradients { weights: &weights, gradients: BTreeMap::new() };
    let mut backward = BackwardContext::of(&mut forward, &mut sink);
    let dy = Tensor::from_f32(&device, &[samples, CLASSES], dtype, dy, Category::Transient)?;
    let dx = built.backward(dy, &mut backward, needs_dx)?;
    assert!(forward.stash.is_empty(), "the backward pass takes all that the forward pass left");
    Ok(ForwardBackward { output, input_gradient: dx.map(|dx| dx.to_f32()), gradients: sink.gradients })
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
    needs_dx: bool,
) {
    let spec = model(specs, size);
    spec.check().unwrap();
    let [h, w] = size;
    let (image, dy) = (noise(1, SAMPLES * h * w * 3), noise(2, SAMPLES * CLASSES));
    let tiles = TileGrid::cut(size, grid, &strides(specs));
    let cuts = Partition { grid, synchronised: replicas > 1, ..Partition::NONE };
    let layout = Layout::new(&spec, &spec.parameters(), cuts).unwrap();
    let mesh = Mesh::new(PerAxis { data: replicas, spatial: tiles.ranks(), ..PerAxis::ONES }).unwrap();
    let each = SAMPLES / replicas;
    let samples_of = |coords: PerAxis| coords.data * each..(coords.data + 1) * each;
    for device in devices() {
        let x = Tensor::from_f32(&device, &[SAMPLES, h, w, 3], dtype, &image, Category::Transient).unwrap();
        let batch_slice = BatchSlice { samples: SAMPLES, ..Default::default() };
        let full = (LocalModel::unsharded(&spec), AxisGroups::single_rank());
        let one = pass(&full.0, &full.1, x, batch_slice, &dy, needs_dx).unwrap();

        let ranks = threads::run(mesh.size(), Duration::from_secs(60), |world| {
            let coords = mesh.coordinates(world.rank());
            let (samples, tile) = (samples_of(coords), tiles.of(coords.spatial));
            let [rows, columns] = tile.size();
            let x = cut_out(&image, [h, w, 3], samples.clone(), &tile);
            let shape = [each, rows, columns, 3];
            let x = Tensor::from_f32(&another(&device)?, &shape, dtype, &x, Category::Transient)?;
            let batch_slice = BatchSlice { first: samples.start, samples: each, norms: NormGroup::Step };
            let dy = &dy[samples.start * CLASSES..samples.end * CLASSES];
            pass(layout.of(coords), &AxisGroups::form(&world, &mesh)?, x, batch_slice, dy, needs_dx)
        });
        let ranks = ranks.unwrap();

        let mut sums: BTreeMap<String, Vec<f32>> = BTreeMap::new();
        for (rank, passed) in ranks.iter().enumerate() {
            let coords = mesh.coordinates(rank);
            let samples = samples_of(coords);
            let expected = &one.output[samples.start * CLASSES..samples.end * CLASSES];
            assert_close("outputs", &passed.output, expected, tolerance);
            match (&passed.input_gradient, &one.input_gradient) {
                (Some(got), Some(whole)) => {
                    let expected = cut_out(whole, [h, w, 3], samples, &tiles.of(coords.spatial));
                    assert_close("the input's gradient", got, &expected, tolerance);
                }
                (got, whole) => assert!(got.is_none() && whole.is_none() && !needs_dx),
            }
            for (name, gradient) in &passed.gradients {
                // The classifier stands behind the sum: each rank of a tiling has all of its gradient.
                if name.starts_with("fc") && coords.spatial > 0 {
                    let first = &ranks[mesh.rank(PerAxis { spatial: 0, ..coords })].gradients[name];
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
}

const GRIDS: [[usize; 2]; 5] = [[2, 1], [3, 1], [4, 1], [2, 2], [3, 2]];

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
