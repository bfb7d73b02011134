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
    /// Other engines' published runs: the engines, the GPUs, and how far their rows were off.
    const PUBLISHED: [(&'static [&'static str], &'static [&'static str], Accuracy); 4] = [
        (&["fsdp"], &["H100", "H200"], Accuracy { error: 0.08, set: "MosaicML's runs on 8 to 512 H100" }),
        (&["fsdp"], &["A100"], Accuracy { error: 0.14, set: "MosaicML's runs on 8 to 128 A100" }),
        (&["megatron"], &["A100"], Accuracy { error: 0.06, set: "Narayanan's runs on 384 to 2240 A100" }),
        (
            &["axonn", "samo", "sputnik", "deepspeed-3d"],
            &["V100"],
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

    /// Of an engine on GPUs of a family.
    pub fn published(engine: &str, family: &str) -> Option<Accuracy> {
        let known = |(engines, families, _): &&(&[&str], &[&str], Accuracy)| {
            engines.contains(&engine) && families.contains(&family)
        };
        Accuracy::PUBLISHED.iter().find(known).map(|(_, _, accuracy)| *accuracy)
    }
}

/// The published training run of so many GPUs of a kind that reached the most of their peak.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct BestRun {
    #[serde(skip)]
    gpus: usize,
    /// Of the peak, with recomputed flops.
    pub percent_of_peak: f64,
    pub run: &'static str,
}

impl BestRun {
    /// By what GPUs of a kind have in their names, those on fewer of them first. Of H200 nothing is published;
    /// its products are an H100's.
    const ALL: [(&'static [&'static str], &'static [BestRun]); 3] = [
        (&["V100"], &[BestRun::new(256, 53.4, "SAMO's GPT-3 13B on 256 V100")]),
        (
            &["A100"],
            &[
                BestRun::new(8, 78.9, "MosaicML's 13B on 8 A100"),
                BestRun::new(64, 71.0, "MosaicML's 70B on 64 A100"),
                BestRun::new(128, 69.4, "MosaicML's 30B on 128 A100"),
                BestRun::new(280, 57.0, "Korthikanti's 530B on 280 A100"),
            ],
        ),
        (
            &["H100", "H200"],
            &[
                BestRun::new(8, 58.7, "MosaicML's 13B on 8 H100"),
                BestRun::new(32, 58.4, "MosaicML's 30B on 32 H100"),
                BestRun::new(128, 57.7, "MosaicML's 70B on 128 H100"),
                BestRun::new(512, 54.9, "MosaicML's 70B on 512 H100"),
            ],
        ),
    ];

    const fn new(gpus: usize, percent_of_peak: f64, run: &'static str) -> BestRun {
        BestRun { gpus, percent_of_peak, run }
    }

    /// Of about as many GPUs of such a name: a quarter as many at least, or as many as there is a run of. What
    /// eight GPUs reach says little of a thousand.
    fn on(name: &str, gpus: usize) -> Option<BestRun> {
        let family = datasheet::family(name)?;
        let (_, runs) = BestRun::ALL.iter().find(|(families, _)| families.contains(&family))?;
        runs.iter().find(|run| 4 * run.gpus >= gpus).or(runs.last()).copied()
    }
}

impl Simulation<'_> {
    /// The published run that an estimate of ours would surpass, of a kind of which nothing of ours has run:
    /// nobody has reached more of the peak of about as many such GPUs than so much, and until we do, we do not
    /// say that we will.
    pub(super) fn surpassed(&self, candidate: &Candidate, percent_of_peak: f64) -> Option<BestRun> {
        let unmeasured = self.engine.is_ours() && self.accuracy(candidate).is_none();
        let best = BestRun::on(&self.cluster.device.name, candidate.ranks()).filter(|_| unmeasured);
        best.filter(|best| percent_of_peak > best.percent_of_peak)
    }

    /// How far estimates of such a candidate were off; none where nothing of its kind was ever measured: this
    /// program has run on one GPU at a time, Megatron-Core's runs are not among those compared, and those of the
    /// others are of language models, on some GPUs alone.
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
        let family = datasheet::family(&self.cluster.device.name)?;
        Accuracy::published(self.engine.name, family)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of many GPUs a run on few says nothing; of more than any run had, the largest run counts.
    #[test]
    fn what_was_reached_counts_by_how_many_there_were() {
        let most = |name: &str, gpus| BestRun::on(name, gpus).map(|best| best.percent_of_peak);
        assert_eq!(
            [8, 32, 33, 256, 512, 1024, 100_000].map(|gpus| most("A100 80 GB SXM", gpus)),
            [Some(78.9), Some(78.9), Some(71.0), Some(71.0), Some(69.4), Some(57.0), Some(57.0)]
        );
        assert_eq!(most("NVIDIA H200", 1024), Some(54.9));
        assert_eq!(most("a core of something", 2), None);
        for (_, runs) in BestRun::ALL {
            assert!(runs.is_sorted_by(|a, b| a.gpus < b.gpus && a.percent_of_peak > b.percent_of_peak));
        }
    }

    /// Runs on some GPUs are no measure of others.
    #[test]
    fn an_error_bar_is_of_the_gpus_that_ran() {
        assert_eq!(Accuracy::published("fsdp", "H100").unwrap().error, 0.08);
        assert_eq!(Accuracy::published("fsdp", "A100").unwrap().error, 0.14);
        assert_eq!(Accuracy::published("fsdp", "V100"), None);
        assert_eq!(Accuracy::published("megatron-core", "A100"), None);
    }
}
