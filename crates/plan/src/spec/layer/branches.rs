//! Ways that part and meet again: added (a residual), multiplied (a gate), or put side by side.

use serde::Serialize;

use super::super::shape::Shape;
use super::kind::{Kind, Then};
use super::{Entry, InAttention, Kernel, Layer, Properties};
use crate::field::{layers, two_lists, word};

/// What becomes of what the branches give.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Join {
    /// They are added, element by element.
    Sum,
    /// Element by element: gates, such as that of SwiGLU.
    Product,
    /// Along the last dimension: queries, keys and values.
    Concat,
}

impl Join {
    const ALL: [(&'static str, Join); 3] =
        [("sum", Join::Sum), ("product", Join::Product), ("concat", Join::Concat)];

    /// Whether the backward pass needs what each way gives.
    pub fn reads_outputs(self) -> bool {
        self == Join::Product
    }
}

/// `y = branch(x) + shortcut(x)`; an empty shortcut is x itself.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Residual {
    /// The way with the weights.
    pub branch: Vec<Layer>,
    /// What is added to it: empty where that is the input itself.
    pub shortcut: Vec<Layer>,
}

/// Ways from one input, joined; an empty one passes x on.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Branches {
    /// What becomes of what they give.
    pub join: Join,
    /// In the order of execution, and side by side in this order.
    pub branches: Vec<Vec<Layer>>,
}

/// The ways through a layer.
#[derive(Debug)]
pub struct Sides<'a> {
    /// What becomes of what they give.
    pub join: Join,
    /// In the order of execution.
    pub all: Vec<Side<'a>>,
}

/// One row of layers between a parting and a meeting.
#[derive(Debug)]
pub struct Side<'a> {
    /// How messages call its layers, before their number.
    pub label: String,
    /// In the order of execution.
    pub layers: &'a [Layer],
}

impl Sides<'_> {
    /// The shape of all ways together, or what does not fit: `shapes` are theirs, one each.
    pub fn meet(&self, shapes: &[Shape]) -> Result<Shape, String> {
        let (first, rest) = shapes.split_first().ok_or("needs at least one branch")?;
        let other = |fits: &dyn Fn(&Shape) -> bool| rest.iter().position(|shape| !fits(shape)).map(|i| i + 1);
        let gives = |i: usize| match self.join {
            Join::Sum if self.all[0].label == "branch" => {
                format!("its sides must have one shape: the branch gives {first}, the shortcut {}", shapes[i])
            }
            Join::Sum | Join::Product => {
                format!("its branches must have one shape: branch 0 gives {first}, branch {i} {}", shapes[i])
            }
            Join::Concat => format!(
                "its branches must differ in their last dimension only: branch 0 gives {first}, branch {i} {}",
                shapes[i]
            ),
        };
        match self.join {
            Join::Sum | Join::Product => match other(&|shape| shape == first) {
                Some(i) => Err(gives(i)),
                None => Ok(*first),
            },
            Join::Concat => match other(&|shape| shape.with_last(1) == first.with_last(1)) {
                Some(i) => Err(gives(i)),
                None => {
                    let all = shapes.iter().fold(0, |sum: usize, shape| sum.saturating_add(shape.last()));
                    Ok(first.with_last(all))
                }
            },
        }
    }

    fn output(&self, input: Shape) -> Result<Shape, String> {
        let of = |side: &Side<'_>| side.layers.iter().try_fold(input, |shape, layer| layer.output(shape));
        self.meet(&self.all.iter().map(of).collect::<Result<Vec<_>, _>>()?)
    }
}

/// As a run file writes it.
pub(super) const RESIDUAL: Kind = Kind {
    word: "residual",
    fields: &[layers("branch").or_missing("a list of at least one layer"), layers("shortcut")],
    opens: true,
    then: Then::Inside,
    complete: |written, at| {
        let side = |field: &str| at.side("residual", written.layers(field), field, field);
        Ok(Layer::Residual(Residual { branch: side("branch")?, shortcut: side("shortcut")? }))
    },
};

/// As a run file writes it.
pub(super) const BRANCHES: Kind = Kind {
    word: "branches",
    fields: &[word("join", "sum", &["sum", "product", "concat"]), two_lists("branches")],
    opens: true,
    then: Then::Inside,
    complete: |written, at| {
        let word = written.word("join");
        let (_, join) = Join::ALL.into_iter().find(|(known, _)| *known == word).expect("a word of the field");
        let side = |(i, layers): (usize, &Vec<_>)| {
            at.side("branches", layers, &format!("branches.{i}"), &format!("branch {i}, layer"))
        };
        let branches = written.lists("branches").iter().enumerate().map(side).collect::<Result<_, _>>()?;
        Ok(Layer::Branches(Branches { join, branches }))
    },
};

/// Of what is done where ways meet; the layers inside have kernels of their own.
const JOINED: Properties = Properties { kernel: Kernel::light([0.0, 3.0], [3.0, 0.0]), ..Properties::PLAIN };

impl Entry for Residual {
    fn word(&self) -> &'static str {
        RESIDUAL.word
    }

    fn output(&self, input: Shape) -> Result<Shape, String> {
        self.both().output(input)
    }

    fn sides(&self) -> Option<Sides<'_>> {
        Some(self.both())
    }

    fn properties(&self) -> Properties {
        JOINED
    }
}

impl Residual {
    fn both(&self) -> Sides<'_> {
        let side = |label: &str, layers| Side { label: label.into(), layers };
        Sides {
            join: Join::Sum,
            all: vec![side("branch", &self.branch[..]), side("shortcut", &self.shortcut[..])],
        }
    }
}

impl Entry for Branches {
    fn word(&self) -> &'static str {
        BRANCHES.word
    }

    fn output(&self, input: Shape) -> Result<Shape, String> {
        self.all().output(input)
    }

    fn sides(&self) -> Option<Sides<'_>> {
        Some(self.all())
    }

    fn properties(&self) -> Properties {
        let mut inner = self.branches.iter().flatten();
        let is_flat = inner.all(|layer| {
            layer.entry().sides().is_none() && layer.properties().in_attention != InAttention::Core
        });
        Properties {
            // Several layers side by side project as one does.
            in_attention: if is_flat { InAttention::Projects } else { InAttention::Apart },
            ..JOINED
        }
    }
}

impl Branches {
    fn all(&self) -> Sides<'_> {
        let all = self.branches.iter().enumerate();
        let all = all.map(|(i, layers)| Side { label: format!("branch {i}, layer"), layers: &layers[..] });
        Sides { join: self.join, all: all.collect() }
    }
}
