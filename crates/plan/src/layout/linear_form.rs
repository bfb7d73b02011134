//! Layers that a run file names, and how linear layers that are cut follow each other.

use serde::{Serialize, Serializer};

use crate::spec::{Layer, Model};

/// Layers by their names in a checkpoint, or by what such names begin with: `classifier` is `classifier.1` and `classifier.4`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(transparent)]
pub struct Named(pub Vec<String>);

impl Named {
    /// Whether a layer of this name is meant.
    pub fn means(&self, name: &str) -> bool {
        self.0.iter().any(|one| means(one, name))
    }

    /// The first of these that no layer among some has.
    pub(crate) fn unknown(&self, names: &[String]) -> Option<&str> {
        self.0.iter().find(|one| !names.iter().any(|name| means(one, name))).map(String::as_str)
    }
}

fn means(one: &str, name: &str) -> bool {
    name.strip_prefix(one).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// How linear layers are cut over tensor ranks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum LinearForm {
    /// Two behind one another are a pair, of columns and of rows, with one sum forward and one backward (Shoeybi et al. 2019).
    #[default]
    Paired,
    /// Each by itself by its columns: a gather forward, a sum backward (Gholami et al. 2018).
    Plain,
    /// These by themselves, the others in pairs.
    PlainFor(Named),
}

impl LinearForm {
    /// Whether a linear layer is by itself.
    pub(super) fn is_plain(&self, layer: &Layer) -> bool {
        match self {
            LinearForm::Paired => false,
            LinearForm::Plain => true,
            LinearForm::PlainFor(named) => linear_name(layer).is_some_and(|name| named.means(name)),
        }
    }

    /// The first that is named and is no linear layer of a model.
    pub(super) fn unknown(&self, model: &Model) -> Option<&str> {
        let LinearForm::PlainFor(named) = self else { return None };
        let mut names = Vec::new();
        model.for_each(&mut |layer| names.extend(linear_name(layer).map(String::from)));
        named.unknown(&names)
    }
}

/// As it is written.
impl Serialize for LinearForm {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            LinearForm::Paired => serializer.serialize_str("paired"),
            LinearForm::Plain => serializer.serialize_str("plain"),
            LinearForm::PlainFor(named) => named.serialize(serializer),
        }
    }
}

/// The name of a linear layer; of a tied one that of the layer whose weight it shares.
fn linear_name(layer: &Layer) -> Option<&str> {
    match layer {
        Layer::Linear(linear) => Some(&linear.name),
        Layer::TiedLinear(tied) => Some(tied.weight.trim_end_matches(".weight")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_means_a_layer_or_all_whose_names_begin_with_it() {
        let named = Named(vec!["classifier".into(), "features.1".into()]);
        for (name, is_meant) in [
            ("classifier.1", true),
            ("classifier", true),
            ("classifiers.1", false),
            ("features.1", true),
            ("features.10", false),
        ] {
            assert_eq!(named.means(name), is_meant, "{name}");
        }
        assert_eq!(named.unknown(&["classifier.1".into()]), Some("features.1"));
    }
}
