//! What an observer is shown: the input of every linear layer, once, whatever runs again and however layers
//! are split.

use std::time::Duration;

use espalier_comm::threads;
use espalier_plan::layout::{Layout, Partition};
use espalier_plan::mesh::{Mesh, PerAxis};
use espalier_plan::spec::presets::{Gpt, gpt};
use espalier_plan::spec::{
    Activation, BlockSpec, Embedding, Init, Input, LayerSpec, Linear, RecomputeMode, Residual, RmsNorm,
    WeightOrder,
};
use espalier_tensor::{Category, DType, Device};

use super::*;
use crate::weights::LocalTensors;
use crate::weights::Weights;

const VOCAB: usize = 7;
const WIDTH: usize = 4;
const HIDDEN: usize = 6;
const IDS: [u32; 6] = [3, 1, 4, 1, 5, 2];
const EPS: f32 = 0.1;

/// Names of weights and what their layers read, in order.
#[derive(Debug, Default, PartialEq)]
struct ObservedInputs(Vec<(ParameterId, Vec<usize>, Vec<f32>)>);

impl InputObserver for ObservedInputs {
    fn observe(&mut self, weight: ParameterId, x: &Tensor) -> Result<()> {
        self.0.push((weight, x.shape().to_vec(), x.to_f32()));
        Ok(())
    }
}

/// Takes gradients and forgets them.
struct DiscardGradients;

impl GradientSink for DiscardGradients {
    fn accept(&mut self, _: &[ParameterId], gradients: WeightGradients) -> Result<()> {
        gradients.make(GradientElements::All).map(drop)
    }
}

/// An embedding, a branch of two linear layers, each stored in another order, and a head.
fn perceptron() -> spec::ModelSpec {
    let init = Init::Normal(0.5);
    let linear = |name: &str, input, output, order| {
        LayerSpec::Linear(Linear { name: name.into(), input, output, bias: true, order, init })
    };
    let branch = vec![
        LayerSpec::RmsNorm(RmsNorm { name: "norm".into(), width: WIDTH, eps: EPS }),
        linear("up", WIDTH, HIDDEN, WeightOrder::InOut),
        LayerSpec::Activation(Activation::Relu),
        linear("down", HIDDEN, WIDTH, WeightOrder::OutIn),
    ];
    let embedding = LayerSpec::Embedding(Embedding {
        name: "embedding".into(),
        vocab: VOCAB,
        first: 0,
        width: WIDTH,
        init,
    });
    let blocks = [
        ("embedding", vec![embedding]),
        ("branch", vec![LayerSpec::Residual(Residual { branch, shortcut: vec![] })]),
        ("head", vec![linear("head", WIDTH, VOCAB, WeightOrder::OutIn)]),
    ];
    let model = spec::ModelSpec {
        name: "perceptron".into(),
        input: Input::Tokens { seq: 3, vocab: VOCAB },
        blocks: blocks.map(|(name, layers)| BlockSpec { name: name.into(), layers }).into(),
        classes: VOCAB,
    };
    model.check().expect("shapes that fit");
    model
}

/// A forward pass and its backward pass: what was shown.
fn run(model: &Model, weights: &Weights) -> Result<ObservedInputs> {
    let device = weights.get(ParameterId(0)).device();
    let x = Tensor::from_slice(&device, &[2, 3], &IDS, Category::Transient)?;
    let targets = Tensor::from_slice(&device, &[6], &IDS, Category::Transient)?;
    let mut shown = ObservedInputs::default();
    let ctx = ForwardContext::new(weights, Mode::Train, 1, BatchSlice { samples: 2, ..Default::default() });
    let mut forward = ForwardContext { observer: Some(&mut shown), ..ctx };
    let x = model.forward(x, &mut forward)?;
    let mut sink = DiscardGradients;
    let mut backward = BackwardContext::of(&mut forward, &mut sink);
    let outcome = model.loss(x, &targets, LossScaling { loss: 1.0, temperature: 1.0 }, &mut backward)?;
    model.backward(outcome.gradient, &mut backward)?;
    Ok(shown)
}

fn weights_of(local: &LocalModel) -> Result<Weights> {
    Weights::initialise_local(local, &LocalTensors::all(&local.model), &Device::cpu(1)?, DType::F32, 3)
}

/// Rows of some columns.
fn columns_of(x: &[f32], width: usize, columns: Range<usize>) -> Vec<f32> {
    x.chunks_exact(width).flat_map(|row| &row[columns.clone()]).copied().collect()
}

/// `x W + b` of rows, by hand.
fn product(x: &[f32], weight: impl Fn(usize, usize) -> f32, bias: &[f32]) -> Vec<f32> {
    let inputs = x.len() / IDS.len();
    let row = |row: &[f32]| -> Vec<f32> {
        let sum = |out: usize| row.iter().enumerate().map(|(i, x)| x * weight(i, out)).sum::<f32>();
        bias.iter().enumerate().map(|(out, bias)| sum(out) + bias).collect()
    };
    x.chunks_exact(inputs).flat_map(row).collect()
}

/// What the three linear layers read, by hand.
fn by_hand(weights: &Weights) -> [(&'static str, Vec<f32>); 3] {
    let of = |name: &str| weights.get(weights.parameter(name).expect("a parameter")).to_f32();
    let table = of("embedding.weight");
    let embedded: Vec<f32> =
        IDS.iter().flat_map(|id| &table[*id as usize * WIDTH..][..WIDTH]).copied().collect();
    let scale = of("norm.weight");
    let normed: Vec<f32> = embedded
        .chunks_exact(WIDTH)
        .flat_map(|row| {
            let mean = row.iter().map(|x| x * x).sum::<f32>() / WIDTH as f32;
            row.iter().zip(&scale).map(|(x, scale)| x / (mean + EPS).sqrt() * scale).collect::<Vec<_>>()
        })
        .collect();
    let (up, down) = (of("up.weight"), of("down.weight"));
    let hidden = product(&normed, |i, out| up[i * HIDDEN + out], &of("up.bias"));
    let hidden: Vec<f32> = hidden.iter().map(|x| x.max(0.0)).collect();
    let long = product(&hidden, |i, out| down[out * HIDDEN + i], &of("down.bias"));
    let sum = long.iter().zip(&embedded).map(|(long, short)| long + short).collect();
    [("up.weight", normed), ("down.weight", hidden), ("head.weight", sum)]
}

fn assert_near(seen: &[f32], expected: &[f32]) {
    assert_eq!(seen.len(), expected.len());
    assert!(seen.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{seen:?}, not {expected:?}");
}

#[test]
fn an_observer_sees_what_a_hand_computation_gives() {
    let spec = perceptron();
    let weights = weights_of(&LocalModel::unsharded(&spec)).unwrap();
    let ObservedInputs(shown) = run(&Model::build(&spec, RecomputeMode::None), &weights).unwrap();
    let expected = by_hand(&weights);
    assert_eq!(shown.len(), expected.len());
    for ((id, shape, x), (name, expected)) in shown.iter().zip(&expected) {
        assert_eq!(weights.name(*id), *name);
        assert_eq!(shape[..], [IDS.len(), expected.len() / IDS.len()]);
        assert_near(x, expected);
    }
}

/// Blocks and the insides of attentions that run again on the way back are shown on the way forward alone.
#[test]
fn what_runs_again_is_shown_once() {
    let shape = Gpt { layers: 2, width: 8, heads: 2, context: 3, vocab: VOCAB, ..Gpt::default() };
    let spec = gpt("gpt", &shape);
    let weights = weights_of(&LocalModel::unsharded(&spec)).unwrap();
    let shown = |recompute| run(&Model::build(&spec, recompute), &weights).unwrap();
    let plain = shown(RecomputeMode::None);
    assert_eq!(plain.0.len(), 2 * 4 + 1, "four linear layers a block, and the head");
    for recompute in [RecomputeMode::Attention, RecomputeMode::Block, RecomputeMode::Blocks(1)] {
        assert_eq!(shown(recompute), plain, "{recompute}");
    }
}

/// A layer that is split by its outputs reads all of its input, one that is split by its inputs the rank's
/// own; the same where positions are split in between.
#[test]
fn layers_of_tensor_parallel_ranks_show_what_they_read_there() {
    let spec = perceptron();
    let expected = by_hand(&weights_of(&LocalModel::unsharded(&spec)).unwrap());
    for sequence in [false, true] {
        let cuts = Partition { tensor: 2, sequence, ..Partition::NONE };
        let layout = Layout::new(&spec, &spec.parameters(), cuts).unwrap();
        let mesh = Mesh::new(PerAxis { data: 1, pipeline: 1, spatial: 1, tensor: 2 }).unwrap();
        threads::run(2, Duration::from_secs(60), |world| -> Result<()> {
            let (rank, local) = (world.rank(), &layout.local_models()[world.rank()]);
            let groups = AxisGroups::form(&world, &mesh)?;
            let (model, weights) =
                (Model::of_rank(local, &groups, RecomputeMode::None, None), weights_of(local)?);
            let ObservedInputs(shown) = run(&model, &weights)?;
            assert_eq!(shown.len(), expected.len());
            for ((id, _, x), (name, expected)) in shown.iter().zip(&expected) {
                assert_eq!(weights.name(*id), *name);
                match *name {
                    "down.weight" => {
                        let own = rank * HIDDEN / 2..(rank + 1) * HIDDEN / 2;
                        assert_near(x, &columns_of(expected, HIDDEN, own));
                    }
                    _ => assert_near(x, expected),
                }
            }
            Ok(())
        })
        .unwrap();
    }
}

/// What the head reads of one token that is read by itself.
fn one_row(model: &Model, weights: &Weights, id: u32, observer: Option<&mut dyn InputObserver>) -> Vec<f32> {
    let device = weights.get(ParameterId(0)).device();
    let mut cache = KvCache::new(3, &device).unwrap();
    let x = Tensor::from_slice(&device, &[1, 1], &[id], Category::Transient).unwrap();
    let batch_slice = BatchSlice { samples: 1, ..Default::default() };
    let ctx = ForwardContext::new(weights, Mode::Evaluate, 0, batch_slice);
    let mut ctx = ForwardContext { cache: Some(&mut cache), ..ctx };
    if let Some(observer) = observer {
        ctx.observer = Some(observer);
    }
    model.forward(x, &mut ctx).unwrap().to_f32()
}

/// A text that is written one token after the other runs norms in its products: what comes of them is shown
/// all the same, and what is written does not depend on who looks.
#[test]
fn one_position_at_a_time_shows_what_a_whole_sequence_shows() {
    let spec = perceptron();
    let (weights, model) =
        (weights_of(&LocalModel::unsharded(&spec)).unwrap(), Model::build(&spec, RecomputeMode::None));
    let expected = by_hand(&weights);
    for (i, id) in IDS[..3].iter().enumerate() {
        let mut shown = ObservedInputs::default();
        let seen = one_row(&model, &weights, *id, Some(&mut shown));
        assert_eq!(seen, one_row(&model, &weights, *id, None));
        for ((_, _, x), (_, expected)) in shown.0.iter().zip(&expected) {
            assert_near(x, &expected[i * x.len()..][..x.len()]);
        }
        assert_eq!(shown.0.len(), expected.len());
    }
}
