//! The end of a model: the linear layer that makes the logits, and the loss, as one.
//!
//! x: `[rows, width]`, logits: `[rows, classes]`, a row per prediction.
//!
//! The logits of a language model are its largest tensor. But a row's loss needs that row alone: so rows are
//! taken in chunks, each sent forward to its logits and at once back again, and only one chunk's logits
//! exist, in whose place their gradient is made. Nothing of a chunk stays but its rows of the input's
//! gradient, in the input's place, and a term of the weight's gradient. Those terms are added in f32
//! and rounded once, so that chunks cost no precision. A batch of one chunk goes through at once.
//!
//! Where ranks have the logits of some classes each, a row needs the others' maximum and sum: four numbers of
//! each rank, gathered between two readings of a chunk. The logits themselves are never sent.

#[cfg(test)]
mod tests;

use std::ops::Range;

use espalier_comm::Communicator;
use espalier_plan::spec::WeightOrder;
use espalier_plan::spec::message_sizes::{self, LOGITS_ON_GPU, LOGITS_ON_HOST, NUMBERS_OF_A_ROW};
use espalier_plan::split::split;
use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::cross_entropy::{BatchLoss, LossAccumulator, LossTotal, NUMBERS};
use espalier_tensor::ops::elementwise::{add_into, scale_into};
use espalier_tensor::ops::flat;
use espalier_tensor::ops::matmul::{matmul, matmul_add};
use espalier_tensor::ops::reduce::sum_rows;
use espalier_tensor::ops::rows;
use espalier_tensor::{Category, DType, Device, Operand, Tensor};

use super::{BackwardContext, GradientSink, Linear, WeightGradients};
use crate::Result;
use crate::weights::WeightStore;

/// Bytes of a chunk's logits. Each chunk reads and writes the f32 sum of the weight's gradient, which must
/// cost little beside its products; on the host, it also packs the weight anew.
fn chunk_bytes(device: &Device) -> usize {
    match device {
        Device::Cpu(_) => LOGITS_ON_HOST,
        Device::Cuda(_) => LOGITS_ON_GPU,
    }
}

const _: () = assert!(NUMBERS == NUMBERS_OF_A_ROW, "the plan counts what is gathered");

/// The last linear layer, where a model ends in one, and the loss.
#[derive(Debug)]
pub(crate) struct Head {
    pub linear: Option<Linear>,
    /// The classes whose logits are made here, where others make the rest.
    pub classes: Option<LogitShard>,
}

/// The classes of one of several ranks.
#[derive(Debug)]
pub(crate) struct LogitShard {
    pub group: Communicator,
    pub local: Range<usize>,
    /// All that there are.
    pub count: usize,
}

impl LogitShard {
    /// The most classes that a rank has: all take chunks of as many rows.
    fn widest(&self) -> usize {
        self.count.div_ceil(self.group.size())
    }

    /// A row of all ranks' logits, in the order of classes, from this rank's.
    fn gather(&self, local: &Tensor) -> Result<Vec<f32>> {
        let (ranks, widest) = (self.group.size(), self.widest());
        let buffer =
            |length| Tensor::zeros(&local.device(), &[length], local.dtype(), Category::Communication);
        let mut padded = buffer(widest)?;
        flat::put(&mut padded, 0, local, 0..local.len())?;
        let all = self.group.all_gather(padded, buffer(ranks * widest)?)?.read_f32()?;
        let of_rank = |rank: usize| &all[rank * widest..][..split(self.count, ranks, rank).len()];
        Ok((0..ranks).flat_map(of_rank).copied().collect())
    }

    /// What all ranks have read of the next rows.
    fn read(&self, losses: &LossAccumulator, logits: &Tensor) -> Result<Tensor> {
        let local = losses.read_shard(logits, &self.local)?;
        let shape = [self.group.size(), local.rows(), NUMBERS];
        let buffer =
            Tensor::empty(&local.device(), &[shape.iter().product()], DType::F32, Category::Communication)?;
        let length = local.len();
        Ok(self.group.all_gather(local.reshape(&[length]), buffer)?.reshape(&shape))
    }
}

/// The loss of a batch, and the gradient of the head's input.
#[derive(Debug)]
pub struct HeadOutput {
    /// Its loss and its correct predictions. To read them waits for a GPU, so whoever has more to queue does
    /// that first.
    pub total: BatchLoss,
    /// The gradient of what the head read.
    pub gradient: Tensor,
}

/// What is done to a loss and its logits.
#[derive(Debug, Clone, Copy)]
pub struct LossScaling {
    /// Gradients are those of so many times the loss.
    pub loss: f32,
    /// The logits are divided by this; 1 in training.
    pub temperature: f32,
}

impl LossScaling {
    fn differentiate(
        self,
        losses: &mut LossAccumulator,
        mut logits: Tensor,
        classes: Option<&LogitShard>,
    ) -> Result<Tensor> {
        if self.temperature != 1.0 {
            scale_into(&mut logits, 1.0 / self.temperature)?;
        }
        let scale = self.loss / self.temperature;
        let Some(classes) = classes else { return Ok(losses.differentiate(logits, scale)?) };
        let all = classes.read(losses, &logits)?;
        Ok(losses.differentiate_shard(logits, &classes.local, &all, scale)?)
    }
}

impl Head {
    /// The loss of a batch, and the gradients of `scale` times it: those of the head's own parameters go to
    /// the sink.
    pub fn loss(
        &self,
        x: Tensor,
        targets: &Tensor,
        scale: LossScaling,
        ctx: &mut BackwardContext<'_>,
    ) -> Result<HeadOutput> {
        let Some(linear) = &self.linear else {
            let mut losses = LossAccumulator::new(targets)?;
            let gradient = scale.differentiate(&mut losses, x, None)?;
            return Ok(HeadOutput { total: losses.sum()?, gradient });
        };
        let operands = HeadOperands::new(linear, ctx.weights)?;
        let chunk = self.chunk_rows(&operands, &x);
        let head = LinearHead { linear, classes: self.classes.as_ref() };
        if chunk < x.rows() || operands.outputs() > operands.classes {
            head.in_chunks(&operands, x, targets, scale, chunk, ctx)
        } else {
            head.in_one_chunk(x, targets, scale, ctx)
        }
    }

    /// The loss of a batch alone.
    pub fn evaluate(&self, x: &Tensor, targets: &Tensor, weights: &dyn WeightStore) -> Result<LossTotal> {
        let Some(linear) = &self.linear else {
            let mut losses = LossAccumulator::new(targets)?;
            losses.measure(x)?;
            return Ok(losses.total()?);
        };
        let operands = HeadOperands::new(linear, weights)?;
        let chunk = self.chunk_rows(&operands, x);
        LinearHead { linear, classes: self.classes.as_ref() }.measure(&operands, x, targets, chunk)
    }

    /// The logits of all rows, of the classes that are made here; of so few classes that they can all be held.
    pub fn logits(&self, x: &Tensor, weights: &dyn WeightStore) -> Result<Tensor> {
        match &self.linear {
            Some(linear) => HeadOperands::new(linear, weights)?.logits(x),
            None => Ok(x.clone()),
        }
    }

    /// The logits of the last row alone, of the classes that are made here: what generation samples from.
    pub fn last_logits(&self, x: &Tensor, weights: &dyn WeightStore) -> Result<Tensor> {
        let row = match x.rows() {
            1 => x.clone(),
            rows => rows::take(x, rows - 1..rows, Category::Transient)?,
        };
        match &self.linear {
            Some(linear) => linear.row_product(&row, None, None, None, weights),
            None => Ok(row),
        }
    }

    /// Whether a row of logits has all classes, so that none are made elsewhere.
    pub fn has_all_classes(&self) -> bool {
        self.classes.is_none()
    }

    /// A row of logits on the host, with those of the classes that others make.
    pub fn read_logits(&self, local: &Tensor) -> Result<Vec<f32>> {
        match &self.classes {
            Some(classes) => classes.gather(local),
            None => Ok(local.read_f32()?),
        }
    }

    /// Rows of a chunk, the same on all ranks that share it.
    fn chunk_rows(&self, operands: &HeadOperands, x: &Tensor) -> usize {
        chunk_rows(self.classes.as_ref().map_or(operands.outputs(), LogitShard::widest), x)
    }
}

/// What the products of a head read. On a GPU, a table whose rows are not a multiple of what tensor cores
/// take at once (GPT-2 has 50257 tokens) would be multiplied at a third of the speed: then this is a copy
/// with rows of zeros behind it, and a bias of minus infinity there, so that the added logits count for
/// nothing and have no gradient.
struct HeadOperands {
    weight: Tensor,
    bias: Option<Tensor>,
    order: WeightOrder,
    classes: usize,
}

impl HeadOperands {
    fn new(linear: &Linear, weights: &dyn WeightStore) -> Result<HeadOperands> {
        let (weight, bias) = (weights.dense(linear.weight)?, linear.bias.map(|id| weights.get(id)));
        let (classes, order) = (linear.outputs(weight), linear.order);
        let ragged = order == WeightOrder::OutIn && !classes.is_multiple_of(8) && classes > 1024;
        if matches!(weight.device(), Device::Cpu(_)) || !ragged {
            return Ok(HeadOperands { weight: weight.clone(), bias: bias.cloned(), order, classes });
        }
        HeadOperands::padded(weight, bias, classes, classes.next_multiple_of(128))
    }

    fn padded(
        weight: &Tensor,
        bias: Option<&Tensor>,
        classes: usize,
        outputs: usize,
    ) -> Result<HeadOperands> {
        let (device, dtype) = (weight.device(), weight.dtype());
        let mut table = Tensor::zeros(&device, &[outputs, weight.width()], dtype, Category::Workspace)?;
        rows::put(&mut table, 0, weight)?;
        let mut values = bias.map_or_else(|| Ok(vec![0.0; classes]), Tensor::read_f32)?;
        values.resize(outputs, f32::NEG_INFINITY);
        let bias = Tensor::from_f32(&device, &[outputs], dtype, &values, Category::Workspace)?;
        Ok(HeadOperands { weight: table, bias: Some(bias), order: WeightOrder::OutIn, classes })
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
struct LinearHead<'a> {
    linear: &'a Linear,
    classes: Option<&'a LogitShard>,
}

impl LinearHead<'_> {
    fn in_one_chunk(
        self,
        x: Tensor,
        targets: &Tensor,
        scale: LossScaling,
        ctx: &mut BackwardContext<'_>,
    ) -> Result<HeadOutput> {
        let LinearHead { linear, classes } = self;
        let mut losses = LossAccumulator::new(targets)?;
        let logits = linear.product(&x, ctx.weights, Category::Workspace)?;
        let dlogits = scale.differentiate(&mut losses, logits, classes)?;
        let gradient = linear.input_gradient(&dlogits, x.shape(), ctx.weights)?;
        linear.send_gradients(x, dlogits, ctx)?;
        Ok(HeadOutput { total: losses.sum()?, gradient })
    }

    fn in_chunks(
        self,
        operands: &HeadOperands,
        mut x: Tensor,
        targets: &Tensor,
        scale: LossScaling,
        chunk: usize,
        ctx: &mut BackwardContext<'_>,
    ) -> Result<HeadOutput> {
        let LinearHead { linear, classes } = self;
        let mut losses = LossAccumulator::new(targets)?;
        let mut gradients = HeadGradients::new(linear, operands)?;
        // The gradient of rows that are done takes their place, unless somebody still wants them.
        let mut elsewhere = if x.is_unique() { None } else { Some(x.empty_like(Category::Transient)?) };
        for at in chunks(x.rows(), chunk) {
            let x_chunk = rows::take(&x, at.clone(), Category::Workspace)?;
            let dlogits = scale.differentiate(&mut losses, operands.logits(&x_chunk)?, classes)?;
            let gradient = operands.input_gradient(&dlogits)?;
            rows::put(elsewhere.as_mut().unwrap_or(&mut x), at.start, &gradient)?;
            gradients.add(linear, &x_chunk, &dlogits)?;
        }
        gradients.send(linear, ctx.sink)?;
        Ok(HeadOutput { total: losses.sum()?, gradient: elsewhere.unwrap_or(x) })
    }

    fn measure(
        self,
        operands: &HeadOperands,
        x: &Tensor,
        targets: &Tensor,
        chunk: usize,
    ) -> Result<LossTotal> {
        let mut losses = LossAccumulator::new(targets)?;
        for at in chunks(x.rows(), chunk) {
            let logits = operands.logits(&rows::take(x, at, Category::Workspace)?)?;
            match self.classes {
                None => losses.measure(&logits)?,
                Some(classes) => {
                    let all = classes.read(&losses, &logits)?;
                    losses.measure_shard(&logits, &all)?;
                }
            }
        }
        Ok(losses.total()?)
    }
}

fn chunk_rows(outputs: usize, x: &Tensor) -> usize {
    message_sizes::chunk_rows(x.rows(), outputs * x.dtype().bytes(), chunk_bytes(&x.device()))
}

fn chunks(rows: usize, chunk: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(chunk).map(move |start| start..rows.min(start + chunk))
}

/// The gradients of weight and bias, summed over chunks in f32.
struct HeadGradients {
    weight: Tensor,
    bias: Option<Tensor>,
    dtype: DType,
    /// Rows that belong to a class.
    classes: Option<usize>,
}

impl HeadGradients {
    fn new(linear: &Linear, operands: &HeadOperands) -> Result<HeadGradients> {
        let zeros =
            |like: &Tensor| Tensor::zeros(&like.device(), like.shape(), DType::F32, Category::Workspace);
        let bias = linear.bias.and(operands.bias.as_ref());
        Ok(HeadGradients {
            weight: zeros(&operands.weight)?,
            bias: bias.map(zeros).transpose()?,
            dtype: operands.weight.dtype(),
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
        let HeadGradients { weight, bias, dtype, classes } = self;
        let make = move |_| {
            let without_padding = |sum: Tensor| match classes {
                None => Ok(sum),
                Some(classes) if sum.shape().len() == 1 => {
                    Ok(rows::take(&column(sum), 0..classes, Category::Workspace)?.reshape(&[classes]))
                }
                Some(classes) => rows::take(&sum, 0..classes, Category::Workspace),
            };
            let all = [weight].into_iter().chain(bias);
            all.map(|sum| rounded(without_padding(sum)?, dtype)).collect::<Result<_>>()
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
