//! What the planner says of a run, beside what came of it. A run never fails for it: where there is nothing
//! to say, nothing is said.

use std::path::Path;

use espalier_plan::engine::EngineProfile;
use espalier_plan::simulate::{Candidate, Simulation};
use espalier_plan::{Plan, cluster};
use espalier_tensor::Category;
use espalier_train::{CategoryBytes, PredictedStep, RunSummary};

use crate::local_cluster::LocalCluster;
use crate::output::print_err;

/// What differs by less than this fraction is as predicted.
const ALIKE: f64 = 0.01;
/// A set-up of fewer seconds is not worth a word.
const LONG_SETUP: f64 = 5.0;

/// Whose times are wanted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PredictedMachine {
    /// This one's: a run follows.
    Local,
    /// That which the run is planned for, or else this one's.
    Planned,
}

/// The time of a step of a run in its own layout, by the cluster that it names, or the one measured here.
pub fn predict(
    plan: &Plan,
    run_file: &Path,
    on_gpus: bool,
    machine: PredictedMachine,
) -> Option<PredictedStep> {
    let unsaid = |why: String| print_err!("note: no step time is predicted: {why}");
    let local = match &plan.device.cluster {
        Some(name) => LocalCluster::named("device.cluster", name),
        None => LocalCluster::here(run_file, on_gpus),
    };
    let local = local.map_err(|why| unsaid(why.to_string())).ok()?;
    let is_planned = machine == PredictedMachine::Planned && plan.device.cluster.is_some();
    // Nobody has asked for a prediction of a run that names no cluster, on a machine that nobody has measured.
    if let Some(why) = local.mismatch(on_gpus).filter(|_| !is_planned) {
        let is_asked = machine == PredictedMachine::Planned || cluster::builtin(&local.source).is_none();
        is_asked.then(|| unsaid(why));
        return None;
    }
    let LocalCluster { cluster, source } = local;
    let candidate = Candidate::of(plan)?;
    let simulation = Simulation::new(plan, &cluster, EngineProfile::ESPALIER);
    let step_ms = 1e3 * simulation.estimate(&candidate).ok()?.step_seconds;
    let setup_seconds = simulation.setup_seconds(&candidate);
    step_ms.is_finite().then_some(PredictedStep { step_ms, setup_seconds, cluster: source })
}

/// One sentence: the predicted time of a step beside the measured one, and the category of memory that is
/// furthest off, if one is.
pub fn sentence(summary: &RunSummary) -> Option<String> {
    let PredictedStep { step_ms, setup_seconds, cluster } = summary.predicted.as_ref()?;
    let setup = setup_seconds.filter(|seconds| *seconds >= LONG_SETUP);
    let Some(measured) = summary.step_ms else {
        let setup = setup.map_or(String::new(), |seconds| format!(", set-up {seconds:.0} s"));
        return Some(format!("predicted {step_ms:.1} ms/step{setup} ({cluster})"));
    };
    let message = format!("predicted {step_ms:.1} ms/step ({cluster})");
    let mut message = format!("{message}, measured {measured:.1} ({:.2}x)", measured / step_ms);
    if let Some((predicted, measured)) = setup.zip(summary.setup_seconds) {
        message += &format!("; set-up {measured:.1} s, {predicted:.0} predicted");
    }
    let most = memory(summary).into_iter().max_by(|a, b| a.1.ln().abs().total_cmp(&b.1.ln().abs()));
    Some(match most.filter(|(_, ratio)| (ratio - 1.0).abs() > ALIKE) {
        None => message,
        Some((what, ratio)) => format!("{message}; memory for {what} {ratio:.2}x of predicted"),
    })
}

/// What each category of memory took of what was predicted; those that are next to nothing are left out, and
/// so is workspace, of which expanded blocks alone are predicted.
fn memory(summary: &RunSummary) -> Vec<(&str, f64)> {
    let all: usize = summary.memory.values().filter_map(|bytes| bytes.measured).sum();
    let ratio = |bytes: &CategoryBytes| {
        let (predicted, measured) = (bytes.predicted.filter(|bytes| *bytes > 0)?, bytes.measured?);
        let counts = measured as f64 > ALIKE * all as f64;
        counts.then_some(measured as f64 / predicted as f64)
    };
    let all = summary.memory.iter().filter(|(name, _)| *name != Category::Workspace.name());
    all.filter_map(|(name, bytes)| Some((name.as_str(), ratio(bytes)?))).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use espalier_plan::{DataFacts, RunFile};

    use super::*;

    fn summary(step_ms: Option<f64>, activations: usize) -> RunSummary {
        let run = "[model]\nname = \"gpt\"\nlayers = 1\nheads = 1\nwidth = 8\ncontext = 8\n[train]\nsteps = 1\nbatch = 1\n";
        let facts = DataFacts { vocab: Some(16), ..DataFacts::default() };
        let plan = Plan::new(RunFile::parse(run, &[]).unwrap(), facts).unwrap();
        let bytes =
            |predicted, measured| CategoryBytes { predicted: Some(predicted), measured: Some(measured) };
        let memory = [
            ("weights", bytes(1000, 1000)),
            ("mask", bytes(1, 9)),
            ("workspace", bytes(10, 900)),
            ("activations", bytes(1000, activations)),
        ];
        RunSummary {
            step_ms,
            predicted: Some(PredictedStep {
                step_ms: 10.0,
                setup_seconds: None,
                cluster: "cluster.toml".into(),
            }),
            memory: BTreeMap::from(memory.map(|(name, bytes)| (name.to_owned(), bytes))),
            ..RunSummary::planned(&plan, "cpu")
        }
    }

    #[test]
    fn the_time_of_a_step_and_the_largest_difference_of_memory_are_named() {
        let message = |step_ms, activations| sentence(&summary(step_ms, activations)).unwrap();
        assert_eq!(message(None, 1000), "predicted 10.0 ms/step (cluster.toml)");
        let long = |summary: RunSummary| {
            let predicted = summary.predicted.map(|step| PredictedStep { setup_seconds: Some(17.3), ..step });
            sentence(&RunSummary { predicted, setup_seconds: Some(16.1), ..summary }).unwrap()
        };
        assert_eq!(long(summary(None, 1)), "predicted 10.0 ms/step, set-up 17 s (cluster.toml)");
        assert!(long(summary(Some(10.0), 1000)).ends_with("(1.00x); set-up 16.1 s, 17 predicted"));
        assert_eq!(
            message(Some(12.0), 500),
            "predicted 10.0 ms/step (cluster.toml), measured 12.0 (1.20x); memory for activations 0.50x of predicted"
        );
        assert!(message(Some(10.01), 1001).ends_with(", measured 10.0 (1.00x)"));
        assert_eq!(sentence(&RunSummary { predicted: None, ..summary(Some(1.0), 1) }), None);
    }
}
