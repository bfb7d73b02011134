//! Element-wise non-linearities.

use serde::{Deserialize, Serialize};

use super::super::shape::Shape;
use super::kind::{Kind, Then};
use super::{Entry, Kernel, Layer, MemoryPass, OnTiles, Properties, Saves, TensorRole, floats};

/// An element-wise non-linearity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// max(x, 0)
    Relu,
    /// x Phi(x), in GPT-2's tanh form
    Gelu,
    /// x sigmoid(x)
    Silu,
}

/// As a run file writes it.
pub(super) const RELU: Kind = Kind {
    word: "relu",
    fields: &[],
    opens: false,
    then: Then::Active,
    complete: |_, _| Ok(Layer::Activation(Activation::Relu)),
};

/// As a run file writes it.
pub(super) const GELU: Kind =
    Kind { word: "gelu", complete: |_, _| Ok(Layer::Activation(Activation::Gelu)), ..RELU };

/// As a run file writes it.
pub(super) const SILU: Kind =
    Kind { word: "silu", complete: |_, _| Ok(Layer::Activation(Activation::Silu)), ..RELU };

impl Entry for Activation {
    fn word(&self) -> &'static str {
        match self {
            Activation::Relu => RELU.word,
            Activation::Gelu => GELU.word,
            Activation::Silu => SILU.word,
        }
    }

    fn output(&self, input: Shape) -> Result<Shape, String> {
        floats(input)
    }

    /// The slope of ReLU follows from its output, that of the smooth ones from their input.
    fn saves(&self, _: Shape, _: u64) -> Saves {
        if *self == Activation::Relu { Saves::OUTPUT } else { Saves::INPUT }
    }

    fn properties(&self) -> Properties {
        let is_smooth = *self != Activation::Relu;
        Properties {
            remakes_output: is_smooth,
            keeps_zeros: true,
            kernel: Kernel::Pass(MemoryPass {
                forward: [1.0, 1.0],
                backward: [1.0, 2.0],
                is_light: !is_smooth,
            }),
            is_gate: is_smooth,
            tensor_role: TensorRole::Elementwise,
            on_tiles: OnTiles::Pixels,
            ..Properties::PLAIN
        }
    }
}
