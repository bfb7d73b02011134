//! Layers that a run file names.

use serde::Serialize;

/// Layers by their names in a checkpoint, or by what such names begin with: `classifier` is `classifier.1`
/// and `classifier.4`.
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
