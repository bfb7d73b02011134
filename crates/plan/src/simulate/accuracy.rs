//! How far predictions of a kind were off where somebody measured: the error bar of an estimate, and the word
//! for kinds that nobody has.
//!
//! The fractions are those of `cargo bench -p espalier-plan --bench published` (rows that constants were not
//! fitted to) and of docs/results.md; a test holds the published ones to the rows.

use serde::Serialize;

use super::{Candidate, Simulation};
use crate::cluster::datasheet;
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
    /// Ours with images, likewise. Rates of convolutions and batch norms are fitted to all of them, which are
    /// at most 4 % off: of others it may be more.
    const ONE_GPU_IMAGES: Accuracy =
        Accuracy { error: 0.10, set: "six networks of 224 x 224 pixels on one H200" };
    /// Ours on cores.
    const CORES: Accuracy = Accuracy { error: 0.19, set: "34 layouts of four ranks on two cores" };
}

/// The published training run of several GPUs of a kind that reached the most of their peak.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct BestRun {
    /// Of the peak, with recomputed flops.
    pub percent_of_peak: f64,
    pub run: &'static str,
}

impl BestRun {
    /// By what GPUs of a kind have in their names. Of H200 nothing is published; its products are an H100's.
    const ALL: [(&'static [&'static str], BestRun); 3] = [
        (&["V100"], BestRun { percent_of_peak: 53.4, run: "SAMO's GPT-3 13B on 256 V100" }),
        (&["A100"], BestRun { percent_of_peak: 57.0, run: "Korthikanti's 530B on 280 A100" }),
        (&["H100", "H200"], BestRun { percent_of_peak: 58.7, run: "MosaicML's 13B on 8 H100" }),
    ];

    /// Of GPUs of such a name.
    fn on(name: &str) -> Option<BestRun> {
        let family = datasheet::family(name)?;
        BestRun::ALL.iter().find(|(families, _)| families.contains(&family)).map(|(_, run)| *run)
    }
}

impl Simulation<'_> {
    /// The published run that an estimate of ours would surpass, of a kind of which nothing of ours has run:
    /// nobody has reached more of the peak of several such GPUs than so much, and until we do, we do not say
    /// that we will.
    pub(super) fn surpassed(&self, candidate: &Candidate, percent_of_peak: f64) -> Option<BestRun> {
        let unmeasured = self.engine.is_ours() && self.accuracy(candidate).is_none();
        let best = BestRun::on(&self.cluster.device.name).filter(|_| unmeasured);
        best.filter(|best| percent_of_peak > best.percent_of_peak)
    }

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
