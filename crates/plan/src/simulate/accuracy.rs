//! How far predictions of a kind were off where somebody measured: the error bar of an estimate, and the word
//! for kinds that nobody has.
//!
//! The fractions are those of `cargo bench -p espalier-plan --bench published` (rows that constants were not
//! fitted to) and of docs/results.md; a test holds the published ones to the rows.

use serde::Serialize;

use super::{Candidate, Simulation};
use crate::spec::Input;

/// What predictions of a kind were compared with.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Accuracy {
    /// The error, as a fraction of the measured time, that nine of ten comparisons stayed below.
    pub error: f64,
    /// Measured runs that these were.
    pub set: &'static str,
}

impl Accuracy {
    /// Other engines' published runs, by the engine's name.
    pub const PUBLISHED: [(&'static [&'static str], Accuracy); 3] = [
        (&["fsdp"], Accuracy { error: 0.08, set: "MosaicML's runs on 8 to 64 H100" }),
        (&["megatron"], Accuracy { error: 0.06, set: "Narayanan's runs on 384 to 2240 A100" }),
        (
            &["axonn", "samo", "sputnik", "deepspeed-3d"],
            Accuracy { error: 0.12, set: "SAMO's runs on 512 and 1024 V100" },
        ),
    ];
    /// Ours on one GPU.
    const ONE_GPU: Accuracy = Accuracy { error: 0.08, set: "steps of 124M to 13B on one H200" };
    /// Ours with images, likewise: all of them.
    const ONE_GPU_IMAGES: Accuracy =
        Accuracy { error: 0.36, set: "six networks of 224 x 224 pixels on one H200" };
    /// Ours on cores.
    const CORES: Accuracy = Accuracy { error: 0.19, set: "34 layouts of four ranks on two cores" };
}

impl Simulation<'_> {
    /// How far estimates of such a candidate were off; none where nothing of its kind was ever measured: this
    /// program has run on one GPU at a time, Megatron-Core's runs are not among those compared, and those of the
    /// others are of language models.
    pub fn accuracy(&self, candidate: &Candidate) -> Option<Accuracy> {
        let images = matches!(self.plan.model.input, Input::Image { .. });
        if self.engine.is_ours() {
            return match (self.cluster.node.cores, candidate.ranks()) {
                (true, _) => Some(Accuracy::CORES),
                (false, 1) if images => Some(Accuracy::ONE_GPU_IMAGES),
                (false, 1) => Some(Accuracy::ONE_GPU),
                (false, _) => None,
            };
        }
        if images {
            return None;
        }
        let known = Accuracy::PUBLISHED.iter().find(|(engines, _)| engines.contains(&self.engine.name));
        known.map(|(_, accuracy)| *accuracy)
    }
}
