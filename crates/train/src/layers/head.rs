//! The end of a model: the linear layer that makes the logits, and the loss, as one.
//!
//! x: `[rows, width]`, logits: `[rows, classes]`, a row per prediction.
//!
//! The logits of a language model are its largest tensor. But a row's loss needs that row alone: so rows are taken in
//! chunks, each sent forward to its logits and at once back again, and only one chunk's logits exist, in whose place
//! their gradient is made. Nothing of a chunk stays but its rows of the input's gradient, in the input's place, and a
//! summand of the weight's gradient. Those summands are added in f32 and rounded once, so that chunks cost no
//! precision. A batch of one chunk goes through in one piece.
//!
//! Where ranks have the logits of some classes each, a row needs the others' maximum and sum: four numbers of each rank, gathered
//! between two readings of a chunk. The logits themselves are never sent.

use std::ops::Range;

use espalier_comm::Communicator;
use espalier_plan::spec::WeightOrder;
use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::cross_entropy::{Losses, NUMBERS, Summed, Total};
use espalier_tensor::ops::elementwise::{add_into, scale_into};
use espalier_tensor::ops::matmul::{matmul, matmul_add};
use espalier_tensor::ops::reduce::sum_rows;
use espalier_tensor::ops::rows;
use espalier_tensor::{Category, DType, Device, Operand, Tensor};

use super::{Backward, GradientSink, Linear, WeightGradients};
use crate::Result;
use crate::weights::Weights;

/// Bytes of a chunk's logits. Each chunk reads and writes the f32 sum of the weight's gradient, which must cost little
/// beside its products; on the host, it also packs the weight anew.
fn chunk_bytes(device: &Device) -> usize {
    match device {
        Device::Cpu(_) => 64 << 20,
        Device::Cuda(_) => 256 << 20,
    }
}

/// The last linear layer, where a model ends in one, and the loss.
#[derive(Debug)]
pub(crate) struct Head {
    pub linear: Option<Linear>,
    /// The classes whose logits are made here, where others make the rest.
    pub classes: Option<Classes>,
}

/// Some classes of several ranks'.
#[derive(Debug)]
pub(crate) struct Classes {
    pub group: Communicator,
    pub own: Range<usize>,
    /// The most that a rank has: all take chunks of as many rows.
    pub widest: usize,
}

impl Classes {
    /// What all ranks have read of the next rows.
    fn read(&self, losses: &Losses, logits: &Tensor) -> Result<Tensor> {
        let own = losses.read_part(logits, &self.own)?;
        let shape = [self.group.size(), own.rows(), NUMBERS];
        let room =
            Tensor::empty(&own.device(), &[shape.iter().product()], DType::F32, Category::Communication)?;
        let length = own.len();
        Ok(self.group.all_gather(own.reshape(&[length]), room)?.reshape(&shape))
    }
}

/// What a batch was worth, and the gradient that goes on.
#[derive(Debug)]
pub struct Outcome {
    /// Its loss and its hits. To read them waits for a card, so whoever has more to queue does that first.
    pub total: Summed,
    /// The gradient of what the head read.
    pub gradient: Tensor,
}

/// What is done to a loss and its logits.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    /// Gradients are those of so many times the loss.
    pub loss: f32,
    /// The logits are divided by this; 1 in training.
    pub temperature: f32,
}

impl Scale {
    fn differentiate(
        self,
        losses: &mut Losses,
        mut logits: Tensor,
        classes: Option<&Classes>,
    ) -> Result<Tensor> {
        if self.temperature != 1.0 {
            scale_into(&mut logits, 1.0 / self.temperature)?;
        }
        let scale = self.loss / self.temperature;
        let Some(classes) = classes else { return Ok(losses.differentiate(logits, scale)?) };
        let all = classes.read(losses, &logits)?;
        Ok(losses.differentiate_part(logits, &classes.own, &all, scale)?)
    }
}

impl Head {
    /// The loss of a batch, and the gradients of `scale` times it: those of the head's own parameters go to the sink.
    pub fn loss(
        &self,
        x: Tensor,
        targets: &Tensor,
        scale: Scale,
        pass: &mut Backward<'_>,
    ) -> Result<Outcome> {
        let Some(linear) = &self.linear else {
            let mut losses = Losses::new(targets)?;
            let gradient = scale.differentiate(&mut losses, x, None)?;
            return Ok(Outcome { total: losses.sum()?, gradient });
        };
        let operands = Operands::new(linear, pass.weights)?;
        let chunk = self.chunk_rows(&operands, &x);
        let head = Split { linear, classes: self.classes.as_ref() };
        if chunk < x.rows() || operands.outputs() > operands.classes {
            head.in_chunks(&operands, x, targets, scale, chunk, pass)
        } else {
            head.in_one_piece(x, targets, scale, pass)
        }
    }

    /// The loss of a batch alone.
    pub fn evaluate(&self, x: &Tensor, targets: &Tensor, weights: &Weights) -> Result<Total> {
        let Some(linear) = &self.linear else {
            let mut losses = Losses::new(targets)?;
            losses.measure(x)?;
            return Ok(losses.total()?);
        };
        let operands = Operands::new(linear, weights)?;
        let chunk = self.chunk_rows(&operands, x);
        Split { linear, classes: self.classes.as_ref() }.measure(&operands, x, targets, chunk)
    }

    /// Rows of a chunk, the same on all ranks that share it.
    fn chunk_rows(&self, operands: &Operands, x: &Tensor) -> usize {
        chunk_rows(self.classes.as_ref().map_or(operands.outputs(), |classes| classes.widest), x)
    }
}

/// What the products of a head read. On a card, a table whose rows are not a multiple of what tensor cores take at once
/// (GPT-2 has 50257 tokens) would be multiplied at a third of the speed: then this is a copy with rows of zeros behind it,
/// and a bias of minus infinity there, so that the added logits count for nothing and have no gradient.
struct Operands {
    weight: Tensor,
    bias: Option<Tensor>,
    order: WeightOrder,
    classes: usize,
}

impl Operands {
    fn new(linear: &Linear, weights: &Weights) -> Result<Operands> {
        let (weight, bias) = (weights.get(linear.weight), linear.bias.map(|id| weights.get(id)));
        let (classes, order) = (linear.outputs(weights), linear.order);
        let ragged = order == WeightOrder::OutIn && !classes.is_multiple_of(8) && classes > 1024;
        if matches!(weight.device(), Device::Cpu(_)) || !ragged {
            return Ok(Operands { weight: weight.clone(), bias: bias.cloned(), order, classes });
        }
        Operands::padded(weight, bias, classes, classes.next_multiple_of(128))
    }

    fn padded(weight: &Tensor, bias: Option<&Tensor>, classes: usize, outputs: usize) -> Result<Operands> {
        let (device, dtype) = (weight.device(), weight.dtype());
        let mut table = Tensor::zeros(&device, &[outputs, weight.width()], dtype, Category::Workspace)?;
        rows::put(&mut table, 0, weight)?;
        let mut values = bias.map_or_else(|| Ok(vec![0.0; classes]), Tensor::read_f32)?;
        values.resize(outputs, f32::NEG_INFINITY);
        let bias = Tensor::from_f32(&device, &[outputs], dtype, &values, Category::Workspace)?;
        Ok(Operands { weight: table, bias: Some(bias), order: WeightOrder::OutIn, classes })
    }

    /// The width of the logits.
    fn outputs(&self) -> usize {
        match self.order {
            WeightOrder::OutIn => self.weight.rows(),
            WeightOrder::InOut => self.weight.width(),
        }
    }

    fn logits(&self, x: &Tensor) -> Result<Tensor> {
        let transposed = self.order == WeightOrder::OutIn;
        Ok(matmul(x, Operand::new(&self.weight, transposed), self.bias.as_ref(), Category::Workspace)?)
    }

    fn input_gradient(&self, dlogits: &Tensor) -> Result<Tensor> {
        let transposed = self.order == WeightOrder::InOut;
        Ok(matmul(dlogits, Operand::new(&self.weight, transposed), None, Category::Workspace)?)
    }
}

/// A head that has a linear layer.
#[derive(Clone, Copy)]
struct Split<'a> {
    linear: &'a Linear,
    classes: Option<&'a Classes>,
}

impl Split<'_> {
    fn in_one_piece(
        self,
        x: Tensor,
        targets: &Tensor,
        scale: Scale,
        pass: &mut Backward<'_>,
    ) -> Result<Outcome> {
        let Split { linear, classes } = self;
        let mut losses = Losses::new(targets)?;
        let logits = linear.product(&x, pass.weights, Category::Workspace)?;
        let dlogits = scale.differentiate(&mut losses, logits, classes)?;
        let gradient = linear.input_gradient(&dlogits, x.shape(), pass.weights)?;
        linear.send_gradients(x, dlogits, pass)?;
        Ok(Outcome { total: losses.sum()?, gradient })
    }

    fn in_chunks(
        self,
        operands: &Operands,
        mut x: Tensor,
        targets: &Tensor,
        scale: Scale,
        chunk: usize,
        pass: &mut Backward<'_>,
    ) -> Result<Outcome> {
        let Split { linear, classes } = self;
        let mut losses = Losses::new(targets)?;
        let mut sums = Sums::new(linear, operands, pass.weights)?;
        // The gradient of rows that are done takes their place, unless somebody still wants them.
        let mut elsewhere = if x.is_unique() { None } else { Some(x.empty_like(Category::Transient)?) };
        for at in chunks(x.rows(), chunk) {
            let part = rows::take(&x, at.clone(), Category::Workspace)?;
            let dlogits = scale.differentiate(&mut losses, operands.logits(&part)?, classes)?;
            let gradient = operands.input_gradient(&dlogits)?;
            rows::put(elsewhere.as_mut().unwrap_or(&mut x), at.start, &gradient)?;
            sums.add(linear, &part, &dlogits)?;
        }
        sums.send(linear, pass.sink)?;
        Ok(Outcome { total: losses.sum()?, gradient: elsewhere.unwrap_or(x) })
    }

    fn measure(self, operands: &Operands, x: &Tensor, targets: &Tensor, chunk: usize) -> Result<Total> {
        let mut losses = Losses::new(targets)?;
        for at in chunks(x.rows(), chunk) {
            let logits = operands.logits(&rows::take(x, at, Category::Workspace)?)?;
            match self.classes {
                None => losses.measure(&logits)?,
                Some(classes) => {
                    let all = classes.read(&losses, &logits)?;
                    losses.measure_part(&logits, &all)?;
                }
            }
        }
        Ok(losses.total()?)
    }
}

/// Rows of a chunk: about equal ones, and whole tiles of the products.
fn chunk_rows(outputs: usize, x: &Tensor) -> usize {
    let row = outputs * x.dtype().bytes();
    let most = (chunk_bytes(&x.device()) / row).max(1);
    let count = x.rows().div_ceil(most).max(1);
    x.rows().div_ceil(count).next_multiple_of(128)
}

fn chunks(rows: usize, chunk: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(chunk).map(move |start| start..rows.min(start + chunk))
}

/// The gradients of weight and bias, summed over chunks in f32.
struct Sums {
    weight: Tensor,
    bias: Option<Tensor>,
    dtype: DType,
    /// Rows that belong to a class.
    classes: Option<usize>,
}

impl Sums {
    fn new(linear: &Linear, operands: &Operands, weights: &Weights) -> Result<Sums> {
        let zeros =
            |like: &Tensor| Tensor::zeros(&like.device(), like.shape(), DType::F32, Category::Workspace);
        let bias = linear.bias.and(operands.bias.as_ref());
        Ok(Sums {
            weight: zeros(&operands.weight)?,
            bias: bias.map(zeros).transpose()?,
            dtype: weights.get(linear.weight).dtype(),
            classes: (operands.outputs() > operands.classes).then_some(operands.classes),
        })
    }

    fn add(&mut self, linear: &Linear, x: &Tensor, dy: &Tensor) -> Result<()> {
        match linear.order {
            WeightOrder::OutIn => matmul_add(dy.t(), x, &mut self.weight)?,
            WeightOrder::InOut => matmul_add(x.t(), dy, &mut self.weight)?,
        }
        if let Some(bias) = &mut self.bias {
            add_into(bias, &sum_rows(dy, Category::Workspace)?)?;
        }
        Ok(())
    }

    fn send(self, linear: &Linear, sink: &mut dyn GradientSink) -> Result<()> {
        let Sums { weight, bias, dtype, classes } = self;
        let make = move |_| {
            let whole = |sum: Tensor| match classes {
                None => Ok(sum),
                Some(classes) if sum.shape().len() == 1 => {
                    Ok(rows::take(&column(sum), 0..classes, Category::Workspace)?.reshape(&[classes]))
                }
                Some(classes) => rows::take(&sum, 0..classes, Category::Workspace),
            };
            let all = [weight].into_iter().chain(bias);
            all.map(|sum| rounded(whole(sum)?, dtype)).collect::<Result<_>>()
        };
        sink.accept(&linear.parameters(), WeightGradients::new([], make))
    }
}

fn column(x: Tensor) -> Tensor {
    let rows = x.len();
    x.reshape(&[rows, 1])
}

fn rounded(sum: Tensor, dtype: DType) -> Result<Tensor> {
    if sum.dtype() == dtype { Ok(sum) } else { Ok(cast(&sum, dtype, Category::Workspace)?) }
}

#[cfg(test)]
mod tests {
    use espalier_plan::spec::{self, Init, Input};
    use espalier_tensor::random::{key, normal};

    use super::*;
    use crate::layers::{BatchSlice, Stash};
    use crate::state::{Gradients, Masks};
    use crate::weights::ParameterId;

    const ROWS: usize = 50;
    const WIDTH: usize = 24;
    const CLASSES: usize = 300;
    const HALF: Scale = Scale { loss: 0.5, temperature: 1.0 };

    /// A head of its own weights in either order, with a bias.
    fn head(order: WeightOrder, dtype: DType) -> (Linear, Weights) {
        let layer = spec::Layer::Linear(spec::Linear {
            name: "head".into(),
            input: WIDTH,
            output: CLASSES,
            bias: true,
            order,
            init: Init::Normal(0.2),
        });
        let spec = spec::Model {
            name: "head".into(),
            input: Input::Image { height: 1, width: 1, channels: WIDTH },
            blocks: vec![spec::Block { name: "all".into(), layers: vec![layer] }],
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

    fn alone(linear: &Linear) -> Split<'_> {
        Split { linear, classes: None }
    }

    fn operands(linear: &Linear, weights: &Weights) -> Operands {
        Operands::new(linear, weights).unwrap()
    }

    /// Loss, hits, and the gradients of input, weight and bias.
    fn run(linear: &Linear, weights: &Weights, chunk: usize, shared: bool) -> (Total, [Vec<f32>; 3]) {
        let masks = Masks::new(2, false);
        let ((x, targets), mut sink) = (batch(weights), Gradients::new(&masks));
        let held = shared.then(|| x.clone());
        let before = x.to_f32();
        let mut pass = Backward {
            weights,
            random: 0,
            share: &BatchSlice::default(),
            stash: &mut Stash::new(),
            sink: &mut sink,
        };
        let Outcome { total, gradient } = match chunk < ROWS {
            true => alone(linear)
                .in_chunks(&operands(linear, weights), x, &targets, HALF, chunk, &mut pass)
                .unwrap(),
            false => alone(linear).in_one_piece(x, &targets, HALF, &mut pass).unwrap(),
        };
        assert_eq!(gradient.shape(), [5, ROWS / 5, WIDTH]);
        assert!(held.is_none_or(|held| held.to_f32() == before), "somebody's x was overwritten");
        let [weight, bias] = [0, 1].map(|id| sink.get(ParameterId(id)).unwrap());
        assert_eq!(weight.dtype(), weights.get(ParameterId(0)).dtype());
        (total.read().unwrap(), [gradient.to_f32(), weight.to_f32(), bias.to_f32()])
    }

    #[test]
    fn chunks_give_what_one_piece_gives() {
        for order in [WeightOrder::OutIn, WeightOrder::InOut] {
            for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::Bf16, 0.01)] {
                let (linear, weights) = head(order, dtype);
                let (total, whole) = run(&linear, &weights, ROWS, false);
                for (chunk, shared) in [(1, false), (7, true), (16, false), (25, true), (49, false)] {
                    let (in_parts, parts) = run(&linear, &weights, chunk, shared);
                    assert_eq!(in_parts.correct, total.correct);
                    assert!((in_parts.loss_sum - total.loss_sum).abs() < 1e-9 * total.loss_sum);
                    // A row of the input's gradient is one product either way.
                    assert_eq!(parts[0], whole[0], "chunks of {chunk}");
                    for (part, whole) in parts.iter().zip(&whole) {
                        let largest = whole.iter().fold(0f32, |m, x| m.max(x.abs()));
                        let worst = part.iter().zip(whole).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
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
            let padded = Operands::padded(weight, Some(bias), CLASSES, 384).unwrap();
            let masks = Masks::new(2, false);
            let run = |operands: &Operands| {
                let ((x, targets), mut sink) = (batch(&weights), Gradients::new(&masks));
                let mut pass = Backward {
                    weights: &weights,
                    random: 0,
                    share: &BatchSlice::default(),
                    stash: &mut Stash::new(),
                    sink: &mut sink,
                };
                let outcome = alone(&linear).in_chunks(operands, x, &targets, HALF, 20, &mut pass).unwrap();
                let [weight, bias] = [0, 1].map(|id| sink.get(ParameterId(id)).unwrap());
                assert_eq!(
                    (weight.shape(), bias.shape()),
                    ([CLASSES, WIDTH].as_slice(), [CLASSES].as_slice())
                );
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
            assert_eq!(alone(&linear).measure(&padded, &x, &targets, 20).unwrap(), added.0);
        }
    }

    /// Sums over chunks are rounded once: as near to the f32 gradient as one product's is.
    #[test]
    fn many_chunks_cost_no_precision() {
        let (linear, weights) = head(WeightOrder::OutIn, DType::Bf16);
        let error = |chunk| {
            let weight = &run(&linear, &weights, chunk, false).1[1];
            let (x, targets) = batch(&weights);
            let mut losses = Losses::new(&targets).unwrap();
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

    /// Ten chunks take no more scratch space than one, whatever the products in them take; in one piece all logits exist.
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
            let masks = Masks::new(2, false);
            let mut sink = Gradients::new(&masks);
            let (share, mut stash) = (BatchSlice::default(), Stash::new());
            let mut pass =
                Backward { weights: &weights, random: 0, share: &share, stash: &mut stash, sink: &mut sink };
            alone(&linear).in_chunks(&operands(&linear, &weights), x, &targets, HALF, 5, &mut pass).unwrap();
            device.ledger().peak(Category::Workspace)
        };
        let (one, ten) = (peak(5), peak(ROWS));
        assert!(ten <= one + 1024, "{ten} bytes of scratch space, and {one} for one chunk");
        let (linear, weights) = head(WeightOrder::InOut, DType::Bf16);
        run(&linear, &weights, ROWS, false);
        let whole = weights.get(ParameterId(0)).device().ledger().peak(Category::Workspace);
        assert!(whole > 2 * ROWS * CLASSES, "in one piece all logits exist");
    }

    #[test]
    fn evaluation_gives_the_loss_of_training() {
        let (linear, weights) = head(WeightOrder::OutIn, DType::Bf16);
        let (x, targets) = batch(&weights);
        for chunk in [1, 7, 25, ROWS] {
            let total = alone(&linear).measure(&operands(&linear, &weights), &x, &targets, chunk).unwrap();
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
            chunk_rows(linear.outputs(&weights), &x.unwrap())
        };
        let most = (64 << 20) / (4 * CLASSES);
        assert!(rows(ROWS) >= ROWS && rows(most) >= most);
        assert_eq!(rows(2 * most + 2), (2 * most + 2).div_ceil(3).next_multiple_of(128));
    }
}
