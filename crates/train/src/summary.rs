//! The closing summary of a run, as programs read it; the fields are promised in the contract of the command line.

use std::collections::BTreeMap;

use espalier_comm::TrafficKind;
use espalier_plan::intervals::RunLength;
use espalier_plan::memory::StateBytes;
use espalier_plan::spec::Parameter;
use espalier_plan::{Axis, Plan, Scoring};
use espalier_tensor::Category;
use serde::{Deserialize, Serialize};

use crate::prune::LayerDensity;
use crate::trainer::{Evaluation, Trainer};

/// What a run, or the plan of one, comes to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunSummary {
    /// Steps done.
    pub steps: u64,
    /// The loss of the last step taken.
    pub loss: Option<f64>,
    /// On held-out data, at the end.
    pub validation: Validation,
    /// Tokens a second, for text.
    pub tokens_per_s: Option<f64>,
    /// Images a second, for images.
    pub images_per_s: Option<f64>,
    /// The median time of a step.
    pub step_ms: Option<f64>,
    /// What the planner says of it; none where it has no rates for this machine, or does not know such a layout.
    #[serde(default)]
    pub predicted: Option<PredictedStep>,
    /// `cpu` or `cuda`.
    pub device: String,
    /// `f32` or `bf16`.
    pub precision: String,
    /// How the run is spread over ranks.
    pub layout: LayoutSummary,
    pub parameters: u64,
    /// Prunable parameters that are kept.
    pub kept: u64,
    /// The fraction of prunable parameters that is gone.
    pub sparsity: f64,
    /// What is kept of each, in the order of the model; none where nothing is pruned, or where only a run can
    /// know.
    pub kept_by_layer: Option<Vec<LayerDensity>>,
    /// What it has learnt from, as far as it has come.
    #[serde(default)]
    pub trained_on: Option<TrainedData>,
    /// Bytes of weights, gradients, optimizer state and mask for each prunable parameter.
    pub state_bytes_per_parameter: f64,
    /// The same by category.
    pub state_bytes: StateBytes,
    /// What the model itself takes before and after pruning.
    #[serde(default)]
    pub state_peak: StatePeak,
    /// Peak bytes by category, predicted and measured.
    pub memory: BTreeMap<String, CategoryBytes>,
    /// The most bytes in use at once, on the device.
    pub peak_bytes: Option<usize>,
    /// The most bytes in use at once of the host's copies of what is on a GPU. A processor's are among its
    /// workspace: none.
    pub host_peak_bytes: Option<usize>,
    /// Bytes that a rank must send in a step at least, whatever carries them: not counted on the wire.
    pub bytes_sent: BTreeMap<String, u64>,
    /// Wall-clock seconds before the first step: weights are initialized or read, and perhaps pruned.
    #[serde(default)]
    pub setup_seconds: Option<f64>,
    /// Wall-clock seconds, evaluation and checkpoints included.
    pub seconds: Option<f64>,
    /// blake3 of all weights in the order of their names.
    pub weights_hash: Option<String>,
    /// The run folder.
    pub run: Option<String>,
}

/// What a run has learnt from: losses of runs that saw other amounts of data say nothing of each other.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TrainedData {
    /// Samples of all steps.
    pub samples: u64,
    /// How many of these are different ones: an epoch's at most.
    pub unique_samples: u64,
    /// The same in tokens, for text; padding counts.
    pub tokens: Option<u64>,
    pub unique_tokens: Option<u64>,
    /// Times that the training data was gone through.
    pub epochs: f64,
    /// Tokens, or samples of images, for each parameter of the dense network.
    pub per_parameter: f64,
    /// The same for each parameter that is kept.
    pub per_kept_parameter: f64,
}

impl TrainedData {
    /// After so many samples of a data set with `epoch` of them, by networks of so many parameters: dense, and
    /// as far as it is kept.
    pub fn new(
        samples: u64,
        epoch: u64,
        tokens_per_sample: Option<u64>,
        parameters: [u64; 2],
    ) -> TrainedData {
        let unique_samples = samples.min(epoch);
        let in_tokens = |samples: u64| tokens_per_sample.map(|each| samples * each);
        let [per_parameter, per_kept_parameter] =
            parameters.map(|count| in_tokens(samples).unwrap_or(samples) as f64 / count.max(1) as f64);
        TrainedData {
            samples,
            unique_samples,
            tokens: in_tokens(samples),
            unique_tokens: in_tokens(unique_samples),
            epochs: samples as f64 / epoch.max(1) as f64,
            per_parameter,
            per_kept_parameter,
        }
    }
}

/// What the planner says of a run's steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PredictedStep {
    /// The time of a step.
    pub step_ms: f64,
    /// Before the first one; none where weights are scored by passes over samples.
    #[serde(default)]
    pub setup_seconds: Option<f64>,
    /// Whose rates it was computed with: a cluster file, or the name of one that comes with the program.
    pub cluster: String,
}

/// Bytes of one category.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CategoryBytes {
    /// What the plan says, where it says something.
    pub predicted: Option<u64>,
    /// The peak that the ledger saw.
    pub measured: Option<usize>,
}

/// The most that weights, gradients, optimizer state and masks take together, on the rank where that is most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StatePeak {
    /// Until all is pruned that is to go: measured, in any step since the run was begun or resumed.
    pub before: CategoryBytes,
    /// From then on, the same where that is before the first step: measured, in the last step.
    pub after: CategoryBytes,
    /// Steps after which all is pruned, at the latest: 0 before the first one; none where nothing is pruned,
    /// or where only the data says how long the run is.
    pub pruned_after: Option<u64>,
    /// Whether that may also be earlier.
    pub may_prune_earlier: bool,
    /// Predicted, while weights are scored by gradients: scores and whatever of these is there by then;
    /// none for methods that do not.
    pub scoring: Option<u64>,
}

impl StatePeak {
    /// What is known before the first step.
    pub fn planned(plan: &Plan) -> StatePeak {
        let predicted = |bytes| CategoryBytes { predicted: Some(bytes), measured: None };
        let steps = match plan.intervals.length {
            RunLength::Steps(steps) => Some(steps as u64),
            RunLength::Epochs(_) => None,
        };
        StatePeak {
            before: predicted(plan.state_phases.before),
            after: predicted(plan.state_phases.after),
            pruned_after: steps.and_then(|steps| plan.pruned_after(steps)),
            may_prune_earlier: plan.pruning.as_ref().is_some_and(|one| one.method.may_prune_earlier()),
            scoring: plan.state_phases.scoring,
        }
    }
}

/// How a run is spread over ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayoutSummary {
    /// Replicas.
    pub data: usize,
    /// Stages.
    pub pipeline: usize,
    /// Ranks that share a layer.
    pub tensor: usize,
    /// Ranks that share an image.
    pub spatial: usize,
    /// Of the pipeline, where there is one.
    pub schedule: Option<String>,
    /// Of each rank.
    pub micro_batches: usize,
}

/// The last evaluation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Validation {
    /// The mean loss.
    pub loss: Option<f64>,
    /// The fraction of right predictions, for images.
    pub accuracy: Option<f64>,
    /// e to the loss, for text.
    pub perplexity: Option<f64>,
    /// The lowest loss of all evaluations.
    pub best_loss: Option<f64>,
}

impl Validation {
    /// From an evaluation of a text or an image model.
    pub fn new(evaluation: Option<Evaluation>, best_loss: Option<f64>, text: bool) -> Validation {
        Validation {
            loss: evaluation.map(|e| e.loss),
            accuracy: evaluation.filter(|_| !text).map(|e| e.accuracy),
            perplexity: evaluation.filter(|_| text).map(|e| e.loss.exp()),
            best_loss,
        }
    }
}

/// How fast steps go.
#[derive(Debug, Clone, Copy)]
pub struct Throughput {
    /// The median time of a step.
    pub step_ms: f64,
    /// Samples a second at that time.
    pub samples_per_s: f64,
    /// Tokens a second at that time, for text.
    pub tokens_per_s: Option<f64>,
}

impl Throughput {
    /// From the times of some steps.
    pub(crate) fn from_steps(seconds: &[f64], batch: usize, tokens_per_sample: Option<usize>) -> Throughput {
        let mut sorted = seconds.to_vec();
        sorted.sort_by(f64::total_cmp);
        let median = sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN);
        let samples_per_s = batch as f64 / median;
        let tokens_per_s = tokens_per_sample.map(|tokens| samples_per_s * tokens as f64);
        Throughput { step_ms: median * 1e3, samples_per_s, tokens_per_s }
    }
}

impl RunSummary {
    /// What is known before the first step: what `--dry-run` prints.
    pub fn planned(plan: &Plan, device: &str) -> RunSummary {
        let predicted = &plan.memory;
        let memory = Category::ALL
            .into_iter()
            .map(|category| {
                let predicted = match category {
                    Category::Weights => Some(predicted.weights),
                    Category::Gradients => Some(predicted.gradients),
                    Category::Optimizer => Some(predicted.optimizer),
                    Category::Mask => Some(predicted.mask),
                    Category::Scoring => Some(predicted.scoring),
                    Category::Activations => Some(predicted.activations),
                    Category::Transient => None,
                    // Training keeps none; a run that writes samples shows what it measured.
                    Category::Cache => None,
                    Category::Data => Some(predicted.data),
                    Category::Workspace => predicted.workspace,
                    Category::Communication => Some(predicted.communication),
                };
                (category.name().into(), CategoryBytes { predicted, measured: None })
            })
            .collect();
        let prune = plan.pruning.as_ref();
        let covered = |p: &Parameter| prune.map_or(p.prunable, |prune| prune.covers(p));
        let parameters = plan.model.parameters();
        let candidates: u64 = parameters.iter().filter(|p| covered(p)).map(|p| p.elements()).sum();
        let of_layer = |(parameter, kept): (&Parameter, Option<u64>)| {
            Some(LayerDensity { name: parameter.name.clone(), kept: kept?, of: parameter.elements() })
        };
        let kept_by_layer = prune.filter(|prune| prune.method.is_by_layer()).map(|prune| {
            let kept = prune.kept_by_parameter(&parameters);
            parameters.iter().zip(kept).filter_map(of_layer).collect::<Vec<_>>()
        });
        let kept = match (&kept_by_layer, prune) {
            (Some(layers), _) => layers.iter().map(|layer| layer.kept).sum(),
            (None, Some(prune)) => prune.kept_of(candidates),
            (None, None) => candidates,
        };
        let state_bytes = plan.state_bytes();
        RunSummary {
            steps: 0,
            loss: None,
            validation: Validation::default(),
            tokens_per_s: None,
            images_per_s: None,
            step_ms: None,
            predicted: None,
            device: device.into(),
            precision: plan.storage.precision.name().into(),
            layout: LayoutSummary {
                data: plan.batch.replicas,
                pipeline: plan.pipeline.stages,
                tensor: plan.mesh.extent(Axis::Tensor),
                spatial: plan.mesh.extent(Axis::Spatial),
                schedule: plan.pipeline.name(),
                micro_batches: plan.batch.micro_batches,
            },
            parameters: plan.parameters,
            kept,
            sparsity: if candidates == 0 { 0.0 } else { 1.0 - kept as f64 / candidates as f64 },
            kept_by_layer,
            trained_on: None,
            state_bytes_per_parameter: state_bytes.total(),
            state_bytes,
            state_peak: StatePeak::planned(plan),
            memory,
            peak_bytes: None,
            host_peak_bytes: None,
            bytes_sent: TrafficKind::ALL.map(|traffic| (traffic.name().into(), 0)).into(),
            setup_seconds: None,
            seconds: None,
            weights_hash: None,
            run: None,
        }
    }

    /// Records in how many passes the candidates are scored, and what that holds.
    pub fn scored(&mut self, scoring: Option<Scoring>) {
        if let Some((scoring, entry)) = scoring.zip(self.memory.get_mut(Category::Scoring.name())) {
            let before = entry.predicted.replace(scoring.bytes).unwrap_or(0);
            if let Some(bytes) = &mut self.state_peak.scoring {
                *bytes = *bytes - before + scoring.bytes;
            }
        }
    }

    /// Records how fast the run went.
    pub fn rate(&mut self, rates: Throughput) {
        self.step_ms = rates.step_ms.is_finite().then_some(rates.step_ms);
        self.tokens_per_s = rates.tokens_per_s.filter(|r| r.is_finite());
        let images = self.tokens_per_s.is_none() && rates.samples_per_s.is_finite();
        self.images_per_s = images.then_some(rates.samples_per_s);
    }

    /// Records what is left of the prunable parameters, and what each holds.
    pub fn pruned(&mut self, trainer: &Trainer, state_bytes: StateBytes) {
        (self.kept, self.sparsity, self.state_bytes) = (trainer.kept().0, trainer.sparsity(), state_bytes);
        self.kept_by_layer = (self.sparsity > 0.0).then(|| trainer.kept_by_layer());
        self.state_bytes_per_parameter = state_bytes.total();
    }

    /// Records a category's measured peak.
    pub fn measured(&mut self, category: Category, bytes: usize) {
        if let Some(entry) = self.memory.get_mut(category.name()) {
            entry.measured = Some(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten samples of four tokens out of eight, by 20 parameters of which 5 are left.
    #[test]
    fn data_that_is_met_again_is_not_counted_twice() {
        let text = TrainedData::new(10, 8, Some(4), [20, 5]);
        assert_eq!((text.unique_samples, text.tokens, text.unique_tokens), (8, Some(40), Some(32)));
        assert_eq!((text.epochs, text.per_parameter, text.per_kept_parameter), (1.25, 2.0, 8.0));
        let images = TrainedData::new(6, 8, None, [20, 20]);
        assert_eq!((images.unique_samples, images.tokens, images.unique_tokens), (6, None, None));
        assert_eq!((images.epochs, images.per_parameter), (0.75, 0.3));
    }
}
