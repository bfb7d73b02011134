//! What a pruning method reports: what it saw, or what it did. Both are written into `metrics.jsonl` as they
//! are here.

use serde::{Deserialize, Serialize};

/// What a method saw where it pruned nothing yet.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Observation {
    /// What it saw, in words.
    pub note: String,
    /// How far the newest mask is from those before it, oldest first: 0 is equal.
    #[serde(rename = "mask_distances")]
    pub distances: Vec<f64>,
}

/// What a method did.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PruneReport {
    /// Candidates that are kept,
    pub kept: u64,
    /// and all of them.
    pub of: u64,
    /// Parameters of which nothing is left.
    #[serde(default)]
    pub emptied: Vec<String>,
    /// Those of which next to nothing is.
    #[serde(default)]
    pub thin: Vec<LayerDensity>,
    /// What the method says of it.
    pub note: String,
    /// As in an [`Observation`], where the method compares masks.
    #[serde(default, rename = "mask_distances", skip_serializing_if = "Vec::is_empty")]
    pub distances: Vec<f64>,
    /// How the masks are stored: `bits`, `index`, or both.
    #[serde(default)]
    pub form: String,
    /// How many parameters are multiplied without their zeros from now on.
    #[serde(default)]
    pub sparse: usize,
    /// Bytes in use before and after, on the rank that writes.
    #[serde(default)]
    pub bytes: [usize; 2],
}

/// What is kept of one prunable parameter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerDensity {
    pub name: String,
    /// Its weights that are kept,
    pub kept: u64,
    /// and all of them.
    pub of: u64,
}

impl LayerDensity {
    /// The fraction that is kept.
    pub fn density(&self) -> f64 {
        self.kept as f64 / self.of.max(1) as f64
    }
}
