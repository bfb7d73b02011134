//! The head in chunks, in precisions and over ranks, against one product and one loss.

use std::collections::HashMap;

use espalier_plan::spec::{self, Init, Input};
use espalier_tensor::random::{key, normal};

use super::*;
use crate::layers::{BatchSlice, ForwardContext, GradientElements, Mode};
use crate::weights::{ParameterId, Weights};

const ROWS: usize = 50;
const WIDTH: usize = 24;
const CLASSES: usize = 300;
const HALF: LossScaling = LossScaling { loss: 0.5, temperature: 1.0 };

/// Keeps gradients as a step does.
#[derive(Default)]
struct RecordedGradients(HashMap<ParameterId, Tensor>);

impl GradientSink for RecordedGradients {
    fn accept(&mut self, parameters: &[ParameterId], gradients: WeightGradients) -> Result<()> {
        for (id, mut gradient) in parameters.iter().zip(gradients.make(GradientElements::All)?) {
            gradient.tag_memory(Category::Gradients);
            self.0.insert(*id, gradient);
        }
        Ok(())
    }
}

/// A head of its own weights in either order, with a bias.
fn head(order: WeightOrder, dtype: DType) -> (Linear, Weights) {
    let layer = spec::LayerSpec::Linear(spec::Linear {
        name: "head".into(),
        input: WIDTH,
        output: CLASSES,
        bias: true,
        order,
        init: Init::Normal(0.2),
    });
    let spec = spec::ModelSpec {
        name: "head".into(),
        input: Input::Image { height: 1, width: 1, channels: WIDTH },
        blocks: vec![spec::BlockSpec { name: "all".into(), layers: vec![layer] }],
        classes: CLASSES,
    };
    let device = Device::cpu(2).unwrap();
    let weights = Weights::initialise(&spec, &device, dtype, 5).unwrap();
    (Linear { weight: ParameterId(0), bias: Some(ParameterId(1)), order }, weights)
}

fn batch(weights: &Weights) -> (Tensor, Tensor) {
    let weight = weights.get(ParameterId(0));
    let x: Vec<f32> = (0..(ROWS * WIDTH) as u64).map(|i| normal(key(1, 2), i) as f32).collect();
    let targets: Vec<u32> = (0..ROWS as u32).map(|i| i * 37 % CLASSES as u32).collect();
    let device = weight.device();
    let category = Category::Transient;
    let x = Tensor::from_f32(&device, &[5, ROWS / 5, WIDTH], weight.dtype(), &x, category).unwrap();
    (x, Tensor::from_slice(&device, &[ROWS], &targets, category).unwrap())
}

fn unsharded(linear: &Linear) -> LinearHead<'_> {
    LinearHead { linear, classes: None }
}

fn operands(linear: &Linear, weights: &Weights) -> HeadOperands {
    HeadOperands::new(linear, weights).unwrap()
}

/// Loss, hits, and the gradients of input, weight and bias.
fn run(linear: &Linear, weights: &Weights, chunk: usize, shared: bool) -> (LossTotal, [Vec<f32>; 3]) {
    let ((x, targets), mut sink) = (batch(weights), RecordedGradients::default());
    let kept_alive = shared.then(|| x.clone());
    let before = x.to_f32();
    let mut forward = ForwardContext::new(weights, Mode::Train, 0, BatchSlice::default());
    let mut ctx = BackwardContext::of(&mut forward, &mut sink);
    let HeadOutput { total, gradient } = match chunk < ROWS {
        true => unsharded(linear)
            .in_chunks(&operands(linear, weights), x, &targets, HALF, chunk, &mut ctx)
            .unwrap(),
        false => unsharded(linear).in_one_chunk(x, &targets, HALF, &mut ctx).unwrap(),
    };
    assert_eq!(gradient.shape(), [5, ROWS / 5, WIDTH]);
    assert!(
        kept_alive.is_none_or(|kept_alive| kept_alive.to_f32() == before),
        "somebody's x was overwritten"
    );
    let [weight, bias] = [0, 1].map(|id| &sink.0[&ParameterId(id)]);
    assert_eq!(weight.dtype(), weights.get(ParameterId(0)).dtype());
    (total.read().unwrap(), [gradient.to_f32(), weight.to_f32(), bias.to_f32()])
}

#[test]
fn chunks_give_what_all_rows_at_once_give() {
    for order in [WeightOrder::OutIn, WeightOrder::InOut] {
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::Bf16, 0.01)] {
            let (linear, weights) = head(order, dtype);
            let (total, at_once) = run(&linear, &weights, ROWS, false);
            for (chunk, shared) in [(1, false), (7, true), (16, false), (25, true), (49, false)] {
                let (in_chunks, chunked) = run(&linear, &weights, chunk, shared);
                assert_eq!(in_chunks.correct, total.correct);
                assert!((in_chunks.loss_sum - total.loss_sum).abs() < 1e-9 * total.loss_sum);
                // A row of the input's gradient is one product either way.
                assert_eq!(chunked[0], at_once[0], "chunks of {chunk}");
                for (chunked, at_once) in chunked.iter().zip(&at_once) {
                    let largest = at_once.iter().fold(0f32, |m, x| m.max(x.abs()));
                    let worst = chunked.iter().zip(at_once).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
                    assert!(worst <= tolerance * largest, "chunks of {chunk}: {worst} of {largest}");
                }
            }
        }
    }
}

/// A table with rows added for the tensor cores' sake has the same loss and the same gradients.
#[test]
fn added_rows_count_for_nothing() {
    for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::Bf16, 1e-6)] {
        let (linear, weights) = head(WeightOrder::OutIn, dtype);
        let [weight, bias] = [0, 1].map(|id| weights.get(ParameterId(id)));
        let padded = HeadOperands::padded(weight, Some(bias), CLASSES, 384).unwrap();
        let run = |operands: &HeadOperands| {
            let ((x, targets), mut sink) = (batch(&weights), RecordedGradients::default());
            let mut forward = ForwardContext::new(&weights, Mode::Train, 0, BatchSlice::default());
            let mut ctx = BackwardContext::of(&mut forward, &mut sink);
            let outcome = unsharded(&linear).in_chunks(operands, x, &targets, HALF, 20, &mut ctx).unwrap();
            let [weight, bias] = [0, 1].map(|id| &sink.0[&ParameterId(id)]);
            assert_eq!((weight.shape(), bias.shape()), ([CLASSES, WIDTH].as_slice(), [CLASSES].as_slice()));
            (outcome.total.read().unwrap(), [outcome.gradient.to_f32(), weight.to_f32(), bias.to_f32()])
        };
        let (plain, added) = (run(&operands(&linear, &weights)), run(&padded));
        assert_eq!(plain.0.correct, added.0.correct);
        assert!((plain.0.loss_sum / added.0.loss_sum - 1.0).abs() < 1e-6);
        for (a, b) in plain.1.iter().zip(&added.1) {
            let largest = a.iter().fold(0f32, |m, x| m.max(x.abs()));
            assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() <= tolerance * largest));
        }
        let (x, targets) = batch(&weights);
        assert_eq!(unsharded(&linear).measure(&padded, &x, &targets, 20).unwrap(), added.0);
    }
}

/// Sums over chunks are rounded once: as near to the f32 gradient as one product's is.
#[test]
fn many_chunks_cost_no_precision() {
    let (linear, weights) = head(WeightOrder::OutIn, DType::Bf16);
    let error = |chunk| {
        let weight = &run(&linear, &weights, chunk, false).1[1];
        let (x, targets) = batch(&weights);
        let mut losses = LossAccumulator::new(&targets).unwrap();
        let logits = linear.product(&x, &weights, Category::Workspace).unwrap();
        let dlogits = losses.differentiate(logits, HALF.loss).unwrap();
        let mut exact =
            Tensor::zeros(&x.device(), &[CLASSES, WIDTH], DType::F32, Category::Workspace).unwrap();
        matmul_add(dlogits.t(), &x, &mut exact).unwrap();
        let difference = weight.iter().zip(exact.to_f32()).map(|(a, b)| f64::from(a - b).powi(2));
        difference.sum::<f64>().sqrt()
    };
    let (one, many) = (error(ROWS), error(1));
    assert!(many < 1.01 * one, "{many} with a chunk a row, {one} in one piece");
}

/// Ten chunks take no more scratch space than one, whatever the products in them take; in one piece all
/// logits exist.
#[test]
fn one_chunk_of_logits_exists_at_a_time() {
    let peak = |rows: usize| {
        let (linear, weights) = head(WeightOrder::InOut, DType::Bf16);
        let (x, targets) = batch(&weights);
        let (device, category) = (x.device(), Category::Transient);
        let first = &x.to_f32()[..rows * WIDTH];
        let x = Tensor::from_f32(&device, &[1, rows, WIDTH], DType::Bf16, first, category).unwrap();
        let targets: Vec<u32> = targets.read_u32().unwrap()[..rows].to_vec();
        let targets = Tensor::from_slice(&device, &[rows], &targets, category).unwrap();
        let mut sink = RecordedGradients::default();
        let mut forward = ForwardContext::new(&weights, Mode::Train, 0, BatchSlice::default());
        let mut ctx = BackwardContext::of(&mut forward, &mut sink);
        unsharded(&linear).in_chunks(&operands(&linear, &weights), x, &targets, HALF, 5, &mut ctx).unwrap();
        device.ledger().peak(Category::Workspace)
    };
    let (one, ten) = (peak(5), peak(ROWS));
    assert!(ten <= one + 1024, "{ten} bytes of scratch space, and {one} for one chunk");
    let (linear, weights) = head(WeightOrder::InOut, DType::Bf16);
    run(&linear, &weights, ROWS, false);
    let peak = weights.get(ParameterId(0)).device().ledger().peak(Category::Workspace);
    assert!(peak > 2 * ROWS * CLASSES, "in one chunk all logits exist");
}

#[test]
fn evaluation_gives_the_loss_of_training() {
    let (linear, weights) = head(WeightOrder::OutIn, DType::Bf16);
    let (x, targets) = batch(&weights);
    for chunk in [1, 7, 25, ROWS] {
        let total = unsharded(&linear).measure(&operands(&linear, &weights), &x, &targets, chunk).unwrap();
        assert_eq!(total, run(&linear, &weights, chunk, false).0);
    }
}

#[test]
fn chunks_are_about_equal_and_end_with_the_rows() {
    assert_eq!(chunks(10, 4).collect::<Vec<_>>(), [0..4, 4..8, 8..10]);
    assert_eq!(chunks(8, 4).collect::<Vec<_>>(), [0..4, 4..8]);
    let (linear, weights) = head(WeightOrder::OutIn, DType::F32);
    let rows = |n: usize| {
        let x = Tensor::empty(
            &weights.get(ParameterId(0)).device(),
            &[n, WIDTH],
            DType::F32,
            Category::Workspace,
        );
        chunk_rows(linear.outputs(weights.get(linear.weight)), &x.unwrap())
    };
    let most = (64 << 20) / (4 * CLASSES);
    assert!(rows(ROWS) >= ROWS && rows(most) >= most);
    assert_eq!(rows(2 * most + 2), (2 * most + 2).div_ceil(3).next_multiple_of(128));
}
