//! Settings that do something, but hardly what was meant: each is reported before the first step.

use espalier_plan::Plan;
use espalier_plan::pruning::PruneMethod;

/// A sentence for each; `samples` is what the data has to train on.
pub(super) fn suspicious_settings(plan: &Plan, samples: usize) -> Vec<String> {
    let (batch, steps) = (plan.batch.samples, plan.total_steps(samples));
    let rate = &plan.optimization.learning_rate;
    let mut warnings = Vec::new();
    if batch > samples && steps > 0 {
        warnings.push(format!(
            "`train.batch` = {batch} is more than the {samples} training samples: a step sees some of them more than once"
        ));
    }
    if rate.warmup > steps && steps > 0 {
        warnings.push(format!(
            "`learning_rate.warmup` = {} is longer than the run of {steps} steps: the learning rate ends at {:.2e} and never reaches its peak",
            rate.warmup,
            rate.at(steps - 1, steps)
        ));
    }
    if let Some(PruneMethod::EarlyBird { latest, .. }) = plan.pruning.as_ref().map(|prune| prune.method)
        && latest >= steps
        && steps > 0
        && latest > 0
    {
        warnings.push(format!(
            "`prune.latest` = {latest} is beyond the end of the run of {steps} steps: if masks do not converge, nothing is pruned"
        ));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use espalier_plan::{DataFacts, RunFile};

    use super::*;

    fn warnings(settings: &[&str]) -> Vec<String> {
        let settings: Vec<_> = settings.iter().map(|&text| text.into()).collect();
        let facts = DataFacts { vocab: Some(20), ..DataFacts::default() };
        suspicious_settings(&Plan::new(RunFile::parse("", &settings).unwrap(), facts).unwrap(), 50)
    }

    #[test]
    fn what_is_hardly_meant_is_reported() {
        assert_eq!(warnings(&["train.batch=50", "train.steps=10", "learning_rate.warmup=10"]), [""; 0]);
        assert_eq!(
            warnings(&["train.batch=51"]),
            [
                "`train.batch` = 51 is more than the 50 training samples: a step sees some of them more than once"
            ]
        );
        assert_eq!(
            warnings(&["train.steps=10", "learning_rate.warmup=20", "learning_rate.peak=0.5"]),
            [
                "`learning_rate.warmup` = 20 is longer than the run of 10 steps: the learning rate ends at 2.50e-1 and never reaches its peak"
            ]
        );
        let early_bird = ["train.steps=10", "prune.method=early-bird", "prune.latest=10"];
        assert_eq!(
            warnings(&early_bird),
            [
                "`prune.latest` = 10 is beyond the end of the run of 10 steps: if masks do not converge, nothing is pruned"
            ]
        );
        assert_eq!(warnings(&[&early_bird[..2], &["prune.latest=9"]].concat()), [""; 0]);
        assert_eq!(warnings(&["train.batch=51", "train.steps=0", "learning_rate.warmup=20"]), [""; 0]);
    }
}
