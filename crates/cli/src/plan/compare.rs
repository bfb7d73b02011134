//! What compressed state buys: the same search with dense state, with SAMO's and with ours.

use anyhow::Result;
use espalier_plan::Plan;
use espalier_plan::engine::EngineProfile;
use espalier_plan::search::{LayoutSearch, SearchConstraints};
use espalier_plan::simulate::{Estimate, Simulation};
use espalier_train::Error;
use serde_json::{Map, Value};

use super::record::record;
use super::table::{aligned, seconds};
use super::{PlanRequest, wrong};
use crate::output::print_out;

/// What can be compared: the name, and how state is kept under it. Everything else is as the engine has it.
const KINDS: [&str; 3] = ["dense", "samo", "espalier"];

/// The best layout of each kind, on so many devices: printed, and as the contract has it.
pub fn compare(request: &PlanRequest, devices: usize) -> Result<Value> {
    let mut found = Vec::new();
    for kind in &request.arguments.compare {
        found.push((kind.as_str(), best(request, &request.plan, kind, devices)?));
    }
    let dense = match found.iter().find(|(kind, _)| *kind == "dense") {
        Some((_, dense)) => dense.clone(),
        None => best(request, &request.plan, "dense", devices)?,
    };
    print_out!("{}", text(&found, dense.as_ref()));
    let found = found.iter().map(|(kind, estimate)| (*kind, estimate.as_ref()));
    Ok(records(&request.plan, found, dense.as_ref()))
}

/// The best layout of each kind, as the contract has it.
fn records<'a>(
    plan: &Plan,
    found: impl Iterator<Item = (&'a str, Option<&'a Estimate>)>,
    dense: Option<&Estimate>,
) -> Value {
    let of = |estimate: Option<&Estimate>| {
        let Some(estimate) = estimate else { return serde_json::json!({ "fits": false }) };
        let mut value = record(estimate, plan);
        value["speedup_over_dense"] = dense.map(|dense| dense.step_seconds / estimate.step_seconds).into();
        value
    };
    Value::Object(found.map(|(kind, estimate)| (kind.to_owned(), of(estimate))).collect::<Map<_, _>>())
}

/// The best layouts over numbers of devices, by a name.
pub struct DeviceSweep {
    /// The form of state.
    pub name: String,
    /// Devices, and the best layout of so many.
    pub points: Vec<(usize, Estimate)>,
}

/// The best layouts of each kind; those that do not fit are left out.
pub fn sweeps(request: &PlanRequest, devices: &[usize]) -> Result<Vec<DeviceSweep>> {
    let of_kind = |kind: &String| {
        let mut points = Vec::new();
        for number in devices {
            points.extend(best(request, &request.plan, kind, *number)?.map(|best| (*number, best)));
        }
        Ok(DeviceSweep { name: kind.clone(), points })
    };
    request.arguments.compare.iter().map(of_kind).collect()
}

impl DeviceSweep {
    /// The best layout of so many devices.
    pub fn at(&self, devices: usize) -> Option<&Estimate> {
        self.points.iter().find(|(number, _)| *number == devices).map(|(_, best)| best)
    }
}

fn dense_of(sweeps: &[DeviceSweep], devices: usize) -> Option<&Estimate> {
    sweeps.iter().find(|sweep| sweep.name == "dense")?.at(devices)
}

/// What `compare` of a sweep's row says.
pub fn at(plan: &Plan, sweeps: &[DeviceSweep], devices: usize) -> Value {
    let found = sweeps.iter().map(|sweep| (sweep.name.as_str(), sweep.at(devices)));
    records(plan, found, dense_of(sweeps, devices))
}

/// A row for each number of devices, a column for each form of state: the time of a step, and the speed-up over
/// dense state where that is compared, too.
pub fn sweep_text(devices: &[usize], sweeps: &[DeviceSweep]) -> String {
    let mut rows = vec![vec!["devices".to_owned()]];
    rows[0].extend(sweeps.iter().map(|sweep| sweep.name.clone()));
    for &number in devices {
        let dense = dense_of(sweeps, number);
        let mut row = vec![number.to_string()];
        row.extend(sweeps.iter().map(|sweep| match (sweep.at(number), dense) {
            (None, _) => "does not fit".into(),
            (Some(best), Some(dense)) if sweep.name != "dense" => {
                format!("{} ({:.2}x)", seconds(best.step_seconds), dense.step_seconds / best.step_seconds)
            }
            (Some(best), _) => seconds(best.step_seconds),
        }));
        rows.push(row);
    }
    aligned(&rows)
}

/// That a kind is one.
pub fn check(kind: &str) -> Result<()> {
    match KINDS.contains(&kind) {
        true => Ok(()),
        false => Err(wrong("--compare", &KINDS.join(", "), kind, None).into()),
    }
}

/// The best layout where state is kept in a way.
fn best(request: &PlanRequest, plan: &Plan, kind: &str, devices: usize) -> Result<Option<Estimate>> {
    let engine = match kind {
        "samo" => EngineProfile {
            state: EngineProfile::SAMO.state,
            sink: EngineProfile::SAMO.sink,
            ..request.engine
        },
        _ => request.engine,
    };
    let job = Simulation::new(plan, &request.cluster, engine);
    let fixed = SearchConstraints {
        compressed: Some(kind != "dense" && plan.pruning.is_some()),
        ..request.fixed.clone()
    };
    let search = LayoutSearch { job: &job, devices, fixed: &fixed, rows: 1 };
    Ok(search.run().map_err(Error::Plan)?.ranked.into_iter().next())
}

fn text(found: &[(&str, Option<Estimate>)], dense: Option<&Estimate>) -> String {
    let mut rows =
        vec![["state", "stages", "GB", "step", "HFU", "speed-up", "layout"].map(String::from).to_vec()];
    for (kind, estimate) in found {
        let mut row = vec![(*kind).to_owned()];
        match estimate {
            Some(estimate) => row.extend([
                estimate.candidate.pipeline.to_string(),
                format!("{:.2}", estimate.memory.total() as f64 / 1e9),
                seconds(estimate.step_seconds),
                format!("{:.1} %", estimate.percent_of_peak),
                dense.map_or("-".into(), |dense| {
                    format!("{:.2}x", dense.step_seconds / estimate.step_seconds)
                }),
                estimate.candidate.to_string(),
            ]),
            None => row.extend(["", "", "", "", "", "does not fit"].map(String::from)),
        }
        rows.push(row);
    }
    aligned(&rows)
}
