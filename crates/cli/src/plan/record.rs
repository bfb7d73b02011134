//! A layout as programs read it.

use espalier_plan::Plan;
use espalier_plan::simulate::{Estimate, LayoutRecord};
use serde_json::{Value, json};

/// One candidate of `espalier plan --json`.
pub fn record(estimate: &Estimate, plan: &Plan) -> Value {
    let memory = &estimate.memory;
    json!({
        "layout": LayoutRecord::new(&estimate.candidate, plan.batch.samples),
        "fits": estimate.fits,
        "memory_bytes": memory.total(),
        "memory": memory,
        "step_seconds": estimate.step_seconds,
        "accuracy": estimate.accuracy,
        "slowest_seconds": estimate.slowest_seconds(),
        "surpasses": estimate.surpassed,
        "percent_of_peak": estimate.percent_of_peak,
        "model_percent_of_peak": estimate.model_percent_of_peak,
        "breakdown": estimate.breakdown,
    })
}
