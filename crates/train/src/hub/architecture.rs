//! A family of models as other programs write them: what their configuration says of the network, what they
//! call its tensors, and the configuration of one of ours. The next family is a file with one of these, and
//! its line in `families`.
//!
//! A weight has no rule of transposition: the spec of a linear layer says in which order it lies
//! (`WeightOrder`), and a family's network has the order of the family's files.

use std::collections::BTreeMap;

use espalier_plan::config::ModelConfig;
use espalier_plan::spec::presets::ImageSize;
use serde_json::Value;

/// The weight of a head that is not the token embedding's, in every family of text models.
pub(super) const HEAD: &str = "lm_head.weight";

pub(super) trait Architecture: Sync {
    /// What the `model_type` of config.json calls it; none where its files have no such file.
    fn model_type(&self) -> Option<&'static str>;

    /// What it is, or what of it is missing here.
    fn read(&self, files: &ForeignFiles<'_>) -> Result<ForeignModel, String>;

    /// Our name of a tensor; none where it is made anew wherever it is needed.
    fn our_name(&self, theirs: &str) -> Option<String>;

    /// Their name of a tensor.
    fn their_name(&self, ours: &str) -> String {
        ours.into()
    }

    /// Our name of the token embedding whose weight the head uses too, where the configuration says so.
    fn tied_to(&self, _config: &Value) -> Result<Option<&'static str>, String> {
        Ok(None)
    }

    /// The configuration of a network of ours that is one of these, where they have one.
    fn config(&self, _network: &OurModel<'_>) -> Option<Value> {
        None
    }
}

/// What is known of somebody's files.
pub(super) struct ForeignFiles<'a> {
    pub(super) config: &'a Value,
    /// Of every tensor, under our names.
    pub(super) shapes: BTreeMap<&'a str, &'a [usize]>,
}

/// A network as a run file would name it.
#[derive(Debug, PartialEq)]
pub(super) struct ForeignModel {
    pub(super) model: ModelConfig,
    /// What images it takes, unless others are at hand; none where it takes text.
    pub(super) image: Option<ImageSize>,
}

/// A network of ours that is to be described.
pub(super) struct OurModel<'a> {
    pub(super) model: &'a ModelConfig,
    /// Tokens that it knows.
    pub(super) vocab: usize,
    /// What PyTorch calls the type of its weights.
    pub(super) dtype: &'a str,
    /// The token that ends a document.
    pub(super) end: Option<u32>,
}
