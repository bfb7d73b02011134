//! Element-wise non-linearities.

use serde::{Deserialize, Serialize};

use super::super::shape::Shape;
use super::kind::{Downstream, LayerKind};
use super::{
    LayerDescription, LayerKernel, LayerSpec, MemoryPass, Properties, SavedForBackward, TensorRole, TileRole,
    floats,
};

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
    /// x Phi(x), by the error function
    #[serde(rename = "gelu_erf")]
    GeluErf,
    /// tanh x
    Tanh,
}

/// As a run file writes it.
pub(super) const RELU: LayerKind = LayerKind {
    word: "relu",
    fields: &[],
    opens: false,
    then: Downstream::Active,
    complete: |_, _| Ok(LayerSpec::Activation(Activation::Relu)),
};

/// As a run file writes it.
pub(super) const GELU: LayerKind =
    LayerKind { word: "gelu", complete: |_, _| Ok(LayerSpec::Activation(Activation::Gelu)), ..RELU };

/// As a run file writes it.
pub(super) const SILU: LayerKind =
    LayerKind { word: "silu", complete: |_, _| Ok(LayerSpec::Activation(Activation::Silu)), ..RELU };

/// As a run file writes it.
pub(super) const GELU_ERF: LayerKind =
    LayerKind { word: "gelu_erf", complete: |_, _| Ok(LayerSpec::Activation(Activation::GeluErf)), ..RELU };

/// As a run file writes it.
pub(super) const TANH: LayerKind =
    LayerKind { word: "tanh", complete: |_, _| Ok(LayerSpec::Activation(Activation::Tanh)), ..RELU };

impl Activation {
    /// As a run file writes it.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Activation::Relu => RELU.word,
            Activation::Gelu => GELU.word,
            Activation::Silu => SILU.word,
            Activation::GeluErf => GELU_ERF.word,
            Activation::Tanh => TANH.word,
        }
    }
}

impl LayerDescription for Activation {
    fn output(&self, input: Shape) -> Result<Shape, String> {
        floats(input)
    }

    /// The slope of ReLU follows from its output, that of the smooth ones from their input.
    fn saves(&self, _: Shape, _: u64) -> SavedForBackward {
        if *self == Activation::Relu { SavedForBackward::OUTPUT } else { SavedForBackward::INPUT }
    }

    fn properties(&self) -> Properties {
        let is_smooth = *self != Activation::Relu;
        Properties {
            remakes_output: is_smooth,
            keeps_zeros: true,
            kernel: LayerKernel::Pass(MemoryPass {
                forward: [1.0, 1.0],
                backward: [1.0, 2.0],
                is_light: !is_smooth,
            }),
            is_gate: matches!(self, Activation::Gelu | Activation::Silu),
            tensor_role: TensorRole::Elementwise,
            tile_role: TileRole::Pixels,
            ..Properties::PLAIN
        }
    }
}
