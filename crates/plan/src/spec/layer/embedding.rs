//! Tables of tokens and of positions.

use std::ops::Range;

use serde::Serialize;

use super::super::parameter::{Parameter, weight_and_bias};
use super::super::shape::Shape;
use super::super::{Init, Input};
use super::kind::{Downstream, LayerKind};
use super::{
    GradientReads, LayerDescription, LayerKernel, LayerShard, LayerSpec, ProductSize, Properties,
    SavedForBackward, TensorRole, expect_last, sequence,
};
use crate::field::size;

/// Token ids to vectors.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Embedding {
    /// Prefix of `.weight`.
    pub name: String,
    /// Rows of the table: one for each token that it knows.
    pub vocab: usize,
    /// The id of the first row: a rank that has some of a table gives zeros for the ids of others.
    pub first: usize,
    /// Columns: elements of a vector.
    pub width: usize,
    /// How the table starts.
    pub init: Init,
}

/// Adds a learnt vector for each position.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PositionEmbedding {
    /// Prefix of `.weight`.
    pub name: String,
    /// Rows: the longest sequence.
    pub context: usize,
    /// The position of the first vector that comes in: that of a rank's slice of a sequence.
    pub first: usize,
    /// Columns: elements of a vector.
    pub width: usize,
    /// How the table starts.
    pub init: Init,
}

/// As a run file writes it.
pub(super) const EMBEDDING: LayerKind = LayerKind {
    word: "embedding",
    fields: &[size("width")],
    opens: true,
    then: Downstream::Linear,
    complete: |written, at| {
        // Ids are what only text has; elsewhere the shape check refuses the layer, whatever its size.
        let vocab = match at.input {
            Input::Tokens { vocab, .. } => vocab,
            Input::Image { .. } => 1,
        };
        let (name, width) = (at.name.clone(), written.values.get("width"));
        Ok(LayerSpec::Embedding(Embedding { name, vocab, first: 0, width, init: Init::Normal(0.02) }))
    },
};

/// As a run file writes it.
pub(super) const POSITION: LayerKind = LayerKind {
    word: "position",
    fields: &[],
    opens: false,
    then: Downstream::Linear,
    complete: |_, at| {
        let context = usize::try_from(at.shape.rows()).unwrap_or(usize::MAX);
        let (name, width) = (at.name.clone(), at.shape.last());
        let init = Init::Normal(0.02);
        Ok(LayerSpec::PositionEmbedding(PositionEmbedding { name, context, first: 0, width, init }))
    },
};

impl LayerDescription for Embedding {
    fn name(&self) -> Option<&str> {
        Some(&self.name)
    }

    fn output(&self, input: Shape) -> Result<Shape, String> {
        match input {
            Shape::Tokens { .. } if self.vocab == 0 => Err("needs a vocabulary of at least 1".into()),
            Shape::Tokens { .. } => Ok(input.with_last(self.width)),
            _ => Err(format!("takes token ids, got {input}")),
        }
    }

    fn parameters(&self) -> Vec<Parameter> {
        table(&self.name, self.vocab, self.width, self.init)
    }

    fn saves(&self, _: Shape, _: u64) -> SavedForBackward {
        SavedForBackward::INPUT
    }

    /// Some rows of the table; ids of others give zeros.
    fn split_inputs(&self, range: &Range<usize>) -> Option<LayerShard> {
        let layer =
            LayerSpec::Embedding(Embedding { vocab: range.len(), first: range.start, ..self.clone() });
        Some(LayerShard { layer, dims: vec![Some(0)], behind: None })
    }

    fn properties(&self) -> Properties {
        Properties {
            weight_reads: GradientReads::PRODUCT,
            kernel: LayerKernel::pass([0.0, 2.0], [0.0, 3.0]),
            product_size: Some(ProductSize { input: self.vocab, output: self.width }),
            tensor_role: TensorRole::RowParallel,
            ..Properties::PLAIN
        }
    }
}

impl LayerDescription for PositionEmbedding {
    fn name(&self) -> Option<&str> {
        Some(&self.name)
    }

    fn output(&self, input: Shape) -> Result<Shape, String> {
        match sequence(input)? {
            (seq, _) if self.first.saturating_add(seq) > self.context => {
                Err(format!("has {} positions, got a sequence of {seq}", self.context))
            }
            _ => expect_last(input, self.width),
        }
    }

    fn parameters(&self) -> Vec<Parameter> {
        table(&self.name, self.context, self.width, self.init)
    }

    fn at_position(&self, first: usize) -> Option<LayerSpec> {
        Some(LayerSpec::PositionEmbedding(PositionEmbedding { first, ..self.clone() }))
    }

    fn properties(&self) -> Properties {
        Properties {
            weight_reads: GradientReads::GRADIENT,
            passes_gradient: true,
            kernel: LayerKernel::pass([0.0, 2.0], [0.0, 1.0]),
            ..Properties::PLAIN
        }
    }
}

fn table(name: &str, rows: usize, width: usize, init: Init) -> Vec<Parameter> {
    let mut all = weight_and_bias(name, vec![rows, width], init, None);
    all[0].embedding = true;
    all
}
