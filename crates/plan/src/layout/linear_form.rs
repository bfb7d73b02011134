//! How linear layers that are cut follow each other.

use serde::Serialize;

use crate::spec::{LayerSpec, ModelSpec, Named, TensorRole};

/// How linear layers are cut over tensor ranks.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LinearForm {
    /// Two behind one another are a pair, of columns and of rows, with one all-reduce forward and one backward
    /// (Shoeybi et al. 2019).
    #[default]
    Paired,
    /// Each by itself by its columns: an all-gather forward, an all-reduce backward (Gholami et al. 2018).
    Plain,
    /// These by themselves, the others in pairs.
    #[serde(untagged)]
    PlainFor(Named),
}

impl LinearForm {
    /// Whether a linear layer is by itself.
    pub(super) fn is_plain(&self, layer: &LayerSpec) -> bool {
        match self {
            LinearForm::Paired => false,
            LinearForm::Plain => true,
            LinearForm::PlainFor(named) => linear_name(layer).is_some_and(|name| named.means(name)),
        }
    }

    /// The first that is named and is no linear layer of a model.
    pub(super) fn unknown(&self, model: &ModelSpec) -> Option<&str> {
        let LinearForm::PlainFor(named) = self else { return None };
        let mut names = Vec::new();
        model.for_each(&mut |layer| names.extend(linear_name(layer).map(String::from)));
        named.unknown(&names)
    }
}

/// The name of a linear layer; of a tied one that of the layer whose weight it shares.
fn linear_name(layer: &LayerSpec) -> Option<&str> {
    let name = layer.name().filter(|_| layer.properties().tensor_role == TensorRole::ColumnOrRowParallel);
    name.or_else(|| Some(layer.description().tied_weight()?.trim_end_matches(".weight")))
}
