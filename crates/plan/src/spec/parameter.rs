//! What a layer holds: tensors that are trained, with the values they start from, and tensors that are only kept.

use serde::Serialize;

/// A tensor that is trained.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Parameter {
    /// As in a checkpoint: `h.0.attn.c_attn.weight`.
    pub name: String,
    /// As in memory; in a checkpoint too, but for filters of convolutions, which PyTorch has in another order.
    pub shape: Vec<usize>,
    /// What its elements are before the first step.
    pub init: Init,
    /// Whether a mask may cover it: weights of two dimensions and more.
    pub prunable: bool,
    /// Whether weight decay applies where biases and norm parameters are left out: weights of two dimensions
    /// and more.
    pub decays: bool,
    /// Whether it is a table of tokens or positions, which pruning methods often leave whole.
    pub embedding: bool,
    /// The dimension along which outputs lie: at each index of it are the weights of one output.
    #[serde(skip)]
    pub output_dim: usize,
}

impl Parameter {
    /// How many elements it has.
    pub fn elements(&self) -> u64 {
        product(&self.shape)
    }

    /// How many outputs it makes, and how many of its weights each of them has: rows of a weight
    /// `[output, input]`. What has one dimension is one row.
    pub fn output_rows(&self) -> (u64, u64) {
        let rows = if self.shape.len() < 2 { 1 } else { self.shape[self.output_dim] as u64 };
        (rows, self.elements() / rows.max(1))
    }

    /// Whether it is added to what a layer makes: the shift of a norm is one too.
    pub(crate) fn is_bias(&self) -> bool {
        self.name.ends_with(".bias")
    }
}

/// A tensor that is kept and saved but not trained: running statistics, always f32.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BufferSpec {
    /// As in a checkpoint: `bn1.running_mean`.
    pub name: String,
    /// As in a checkpoint.
    pub shape: Vec<usize>,
    /// What all its elements start at.
    pub start: f32,
}

impl BufferSpec {
    /// How many elements it has.
    pub fn elements(&self) -> u64 {
        product(&self.shape)
    }
}

fn product(shape: &[usize]) -> u64 {
    shape.iter().fold(1, |n: u64, &d| n.saturating_mul(d as u64))
}

/// `name.weight`, and `name.bias` where it has a width. What has two dimensions is pruned and decays.
pub(super) fn weight_and_bias(
    name: &str,
    shape: Vec<usize>,
    init: Init,
    bias: Option<usize>,
) -> Vec<Parameter> {
    let mut all = vec![parameter(format!("{name}.weight"), shape, init)];
    all.extend(bias.map(|width| self::bias(name, width)));
    all
}

pub(super) fn bias(name: &str, width: usize) -> Parameter {
    parameter(format!("{name}.bias"), vec![width], Init::Constant(0.0))
}

fn parameter(name: String, shape: Vec<usize>, init: Init) -> Parameter {
    let matrix = shape.len() >= 2;
    Parameter { name, shape, init, prunable: matrix, decays: matrix, embedding: false, output_dim: 0 }
}

/// How the elements of a parameter start.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub enum Init {
    /// All the same: 0 for biases, 1 for norm scales.
    Constant(f32),
    /// Normal with this standard deviation.
    Normal(f32),
    /// Normal with this standard deviation, cut at two of them and rescaled so that the deviation is the one
    /// given.
    TruncatedNormal(f32),
}

impl Init {
    /// Truncated normal over the fan-in. `gain` is 2 where a ReLU follows, which halves the variance (He et
    /// al. 2015), and 1 at the logits, where nothing follows.
    pub(crate) fn fan_in(gain: f32, fan: usize) -> Init {
        Init::TruncatedNormal((gain / fan.max(1) as f32).sqrt())
    }
}
