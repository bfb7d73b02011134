//! Branches from one input: added (a residual), multiplied (a gate), or concatenated.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::super::shape::Shape;
use super::kind::{Downstream, LayerKind};
use super::{Activation, AttentionRole, LayerDescription, LayerKernel, LayerSpec, Properties};
use crate::field::{layers, two_lists, word};

/// What becomes of what the branches give.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BranchJoin {
    /// They are added, element by element.
    Sum,
    /// Element by element: gates, such as that of SwiGLU.
    Product,
    /// Along the last dimension: queries, keys and values.
    Concat,
}

impl BranchJoin {
    /// Whether the backward pass needs what each branch gives.
    pub(crate) fn reads_outputs(self) -> bool {
        self == BranchJoin::Product
    }
}

/// `y = branch(x) + shortcut(x)`; an empty shortcut is x itself.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Residual {
    /// The branch with the weights.
    pub branch: Vec<LayerSpec>,
    /// What is added to it: empty where that is the input itself.
    pub shortcut: Vec<LayerSpec>,
}

/// Branches from one input, joined; an empty one passes x on.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Branches {
    /// What becomes of what they give.
    pub join: BranchJoin,
    /// In the order of execution, and concatenated in this order.
    pub branches: Vec<Vec<LayerSpec>>,
}

/// The branches of a layer.
#[derive(Debug)]
pub struct BranchList<'a> {
    /// What becomes of what they give.
    pub join: BranchJoin,
    /// In the order of execution.
    pub all: Vec<LayerBranch<'a>>,
}

/// One row of layers between the common input and the join.
#[derive(Debug)]
pub struct LayerBranch<'a> {
    /// How messages call its layers, before their number.
    pub label: Cow<'static, str>,
    /// In the order of execution.
    pub layers: &'a [LayerSpec],
}

impl BranchList<'_> {
    /// The shape of all branches together, or what does not fit: `shapes` are theirs, one each.
    pub fn joined(&self, shapes: &[Shape]) -> Result<Shape, String> {
        let (first, rest) = shapes.split_first().ok_or("needs at least one branch")?;
        let other = |fits: &dyn Fn(&Shape) -> bool| rest.iter().position(|shape| !fits(shape)).map(|i| i + 1);
        let gives = |i: usize| match self.join {
            BranchJoin::Sum if self.all[0].label == "branch" => {
                format!("its sides must have one shape: the branch gives {first}, the shortcut {}", shapes[i])
            }
            BranchJoin::Sum | BranchJoin::Product => {
                format!("its branches must have one shape: branch 0 gives {first}, branch {i} {}", shapes[i])
            }
            BranchJoin::Concat => format!(
                "its branches must differ in their last dimension only: branch 0 gives {first}, branch {i} {}",
                shapes[i]
            ),
        };
        match self.join {
            BranchJoin::Sum | BranchJoin::Product => match other(&|shape| shape == first) {
                Some(i) => Err(gives(i)),
                None => Ok(*first),
            },
            BranchJoin::Concat => match other(&|shape| shape.with_last(1) == first.with_last(1)) {
                Some(i) => Err(gives(i)),
                None => {
                    let all = shapes.iter().fold(0, |sum: usize, shape| sum.saturating_add(shape.last()));
                    Ok(first.with_last(all))
                }
            },
        }
    }

    fn output(&self, input: Shape) -> Result<Shape, String> {
        let of = |branch: &LayerBranch<'_>| {
            branch.layers.iter().try_fold(input, |shape, layer| layer.output(shape))
        };
        self.joined(&self.all.iter().map(of).collect::<Result<Vec<_>, _>>()?)
    }
}

/// As a run file writes it.
pub(super) const RESIDUAL: LayerKind = LayerKind {
    word: "residual",
    fields: &[layers("branch").or_missing("a list of at least one layer"), layers("shortcut")],
    opens: true,
    then: Downstream::Inside,
    complete: |written, at| {
        let branch = |i: usize, field| at.branch("residual", &written.branches[i], field, field);
        Ok(LayerSpec::Residual(Residual { branch: branch(0, "branch")?, shortcut: branch(1, "shortcut")? }))
    },
};

/// As a run file writes it.
pub(super) const BRANCHES: LayerKind = LayerKind {
    word: "branches",
    fields: &[word("join", "sum", &["sum", "product", "concat"]), two_lists("branches")],
    opens: true,
    then: Downstream::Inside,
    complete: |written, at| {
        let branch = |(i, layers): (usize, &Vec<_>)| {
            at.branch("branches", layers, &format!("branches.{i}"), &format!("branch {i}, layer"))
        };
        let branches = written.branches.iter().enumerate().map(branch).collect::<Result<_, _>>()?;
        Ok(LayerSpec::Branches(Branches { join: written.values.get("join"), branches }))
    },
};

/// Of what is done where branches join; the layers inside have kernels of their own.
const JOINED: Properties =
    Properties { kernel: LayerKernel::light([0.0, 3.0], [3.0, 0.0]), ..Properties::PLAIN };

impl LayerDescription for Residual {
    fn output(&self, input: Shape) -> Result<Shape, String> {
        self.both().output(input)
    }

    fn branches(&self) -> Option<BranchList<'_>> {
        Some(self.both())
    }

    fn properties(&self) -> Properties {
        JOINED
    }
}

impl Residual {
    fn both(&self) -> BranchList<'_> {
        let branch = |label: &'static str, layers| LayerBranch { label: label.into(), layers };
        BranchList {
            join: BranchJoin::Sum,
            all: vec![branch("branch", &self.branch[..]), branch("shortcut", &self.shortcut[..])],
        }
    }
}

impl LayerDescription for Branches {
    fn output(&self, input: Shape) -> Result<Shape, String> {
        self.all().output(input)
    }

    fn branches(&self) -> Option<BranchList<'_>> {
        Some(self.all())
    }

    fn properties(&self) -> Properties {
        let mut inner = self.branches.iter().flatten();
        let is_flat = inner.all(|layer| {
            layer.description().branches().is_none()
                && layer.properties().attention_role != AttentionRole::Core
        });
        let projection = self.projection();
        Properties {
            // Several layers side by side project as one does.
            attention_role: if is_flat { AttentionRole::Projects } else { AttentionRole::Apart },
            takes_remade: projection.is_some(),
            remakes_output: projection.is_some_and(|one| one.gate.is_some()),
            ..JOINED
        }
    }
}

/// Linear layers that read the same tensor and are nothing but concatenated, or multiplied behind one gate.
#[derive(Debug)]
pub struct JointProjection<'a> {
    /// In their order.
    pub linears: Vec<&'a LayerSpec>,
    /// The function of the first of two, which the second is multiplied by.
    pub gate: Option<Activation>,
}

impl Branches {
    /// Where the branches are linear layers that run as one: several side by side, or a gated unit such as
    /// SwiGLU. What they read is kept once, or made again, and a gated unit's result is made again too.
    pub fn projection(&self) -> Option<JointProjection<'_>> {
        let linear = |layer: &LayerSpec| matches!(layer, LayerSpec::Linear(_));
        match (self.join, &self.branches[..]) {
            (BranchJoin::Concat, all) => {
                let one = |branch: &'_ Vec<LayerSpec>| matches!(&branch[..], [layer] if linear(layer));
                let linears = || all.iter().map(|branch| &branch[0]).collect();
                all.iter().all(one).then(|| JointProjection { linears: linears(), gate: None })
            }
            (BranchJoin::Product, [gate, up]) => match (&gate[..], &up[..]) {
                ([first, LayerSpec::Activation(function)], [second])
                    if linear(first) && linear(second) && function.properties().is_gate =>
                {
                    Some(JointProjection { linears: vec![first, second], gate: Some(*function) })
                }
                _ => None,
            },
            _ => None,
        }
    }

    fn all(&self) -> BranchList<'_> {
        let all = self.branches.iter().enumerate();
        let all = all.map(|(i, layers)| LayerBranch {
            label: format!("branch {i}, layer").into(),
            layers: &layers[..],
        });
        BranchList { join: self.join, all: all.collect() }
    }
}
