//! Integrated parallelism (Gholami et al. 2018): one group of ranks splits each layer in the way that suits
//! it, by samples or by tiles of images where activations outweigh weights, by features where weights
//! outweigh activations.
//!
//! Which way a layer goes is the cheapest [route](Integrated) by the alpha-beta model, or the cheapest of
//! those on which the layers that a person names are by model and the others are not. The layout follows it:
//! `tensor::route` has the layers.

use serde::Serialize;

use crate::cost::integrated::IntegratedGroup;
use crate::cost::{AllReduce, AlphaBeta, Integrated, Setting};
use crate::error::Error;
use crate::mesh::Axis;
use crate::pruning::Pruning;
use crate::spec::{Input, ModelSpec, Named};

const FIELD: &str = "parallel.integrated";

/// Who says which layers are by model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mixture {
    /// The alpha-beta model.
    Auto,
    /// A person.
    #[serde(untagged)]
    ByModel(Named),
}

/// What a mixture is found by.
#[derive(Debug, Clone, PartialEq)]
pub struct Mixing {
    /// Who chooses.
    pub mixture: Mixture,
    /// Samples of a step that the group sees.
    pub samples: usize,
    /// Bytes of a word.
    pub word: u64,
    /// What goes of the weights: it shortens the all-reduces of their gradients.
    pub pruning: Option<Pruning>,
}

impl Mixing {
    /// The mixture for a model and a group of so many ranks along an axis.
    pub(super) fn find(&self, model: &ModelSpec, axis: Axis, ranks: usize) -> Result<Integrated, Error> {
        if !matches!(model.input, Input::Image { .. }) {
            let why = format!("with `model.name` = \"{}\", which has no convolutions", model.name);
            return Err(Error::no_effect(FIELD, why));
        }
        let by_model = match &self.mixture {
            Mixture::Auto => None,
            Mixture::ByModel(named) => Some(named.clone()),
        };
        if let Some(name) = by_model.as_ref().and_then(|named| named.unknown(&products(model))) {
            let expected =
                "\"auto\", or names of convolutions and linear layers, or what such names begin with";
            return Err(Error::value(FIELD, expected, format!("\"{name}\"")));
        }
        let at = Setting {
            ranks,
            batch: self.samples,
            link: AlphaBeta::published(self.word),
            all_reduce: AllReduce::Ring,
        };
        let group = IntegratedGroup { axis, by_model };
        Integrated::on(model, self.pruning.as_ref(), &at, Some(&group)).ok_or_else(|| {
            Error::conflict(FIELD, format!("cannot be: some layer cannot be split over {ranks} ranks"))
        })
    }
}

/// The names of the layers that multiply.
fn products(model: &ModelSpec) -> Vec<String> {
    let mut names = Vec::new();
    model.for_each(&mut |layer| {
        if layer.properties().tensor_role.opens() {
            names.extend(layer.name().map(String::from));
        }
    });
    names
}
