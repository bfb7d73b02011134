//! Several training systems side by side: the best layout of each for every number of devices.

use anyhow::Result;
use espalier_plan::engine::EngineProfile;
use espalier_plan::search::LayoutSearch;
use espalier_plan::simulate::Simulation;
use espalier_train::Error;
use serde_json::{Map, Value, json};

use super::compare::DeviceSweep;
use super::record::record;
use super::table::{aligned, step};
use super::{PlanArguments, PlanRequest, curve, wrong};
use crate::output;
use crate::run_file::{conflict, refuse_options};
use crate::spinner::Spinner;

/// Those of `--engine`, at least one. Several are shown in a sweep alone.
pub fn named(arguments: &PlanArguments) -> Result<Vec<EngineProfile>> {
    let find = |name: &String| {
        let names = EngineProfile::ALL.map(|engine| engine.name).join(", ");
        EngineProfile::named(name).map_err(|hint| wrong("--engine", &names, name, hint))
    };
    let found: Vec<EngineProfile> = arguments.engine.iter().map(find).collect::<Result<_, _>>()?;
    let of_one = [
        ("--sparsity", arguments.sparsity.as_deref().is_some_and(|range| range.contains(".."))),
        ("--compare", !arguments.compare.is_empty()),
        ("--trace", arguments.trace.is_some()),
        ("--apply", arguments.apply.is_some()),
        ("--fits", arguments.fits.is_some()),
    ];
    if found.len() > 1 {
        refuse_options(&of_one, "is of one engine, but `--engine` names several")?;
        if arguments.sweep.is_none() {
            let problem =
                "names several, which are compared over numbers of devices: add `--sweep gpus=A..B`";
            return Err(conflict("--engine", problem).into());
        }
    }
    Ok(found)
}

/// A row for each number of devices, a column for each engine, printed, drawn and as the contract has it.
pub fn sweep(request: &PlanRequest) -> Result<Value> {
    let devices = request.devices()?;
    let mut spinner = Spinner::new(request.engines.len() * devices.len());
    let mut all = Vec::new();
    for engine in &request.engines {
        let mut points = Vec::new();
        for &number in &devices {
            spinner.next(&format!("searching layouts of {number} devices, engine {}", engine.name));
            let job = Simulation::new(&request.plan, &request.cluster, *engine);
            let search = LayoutSearch { job: &job, devices: number, fixed: &request.fixed, rows: 1 };
            let best = search.run().map_err(Error::Plan)?.ranked.into_iter().next();
            points.extend(best.map(|best| (number, best)));
        }
        all.push(DeviceSweep { name: engine.name.into(), points });
    }
    drop(spinner);
    let head = ["devices".to_owned()].into_iter().chain(all.iter().map(|sweep| sweep.name.clone()));
    let mut rows = vec![head.collect::<Vec<_>>()];
    for &number in &devices {
        let cell = |sweep: &DeviceSweep| match sweep.at(number) {
            Some(best) => format!("{} ({:.1} %)", step(best), best.percent_of_peak),
            None => "does not fit".into(),
        };
        rows.push([number.to_string()].into_iter().chain(all.iter().map(cell)).collect());
    }
    let (model, batch) = (&request.plan.model.name, request.plan.batch.samples);
    output::on_standard_output(format_args!(
        "{model}, batch {batch} on {}: time of a step, and HFU\n\n{}",
        request.cluster.name,
        aligned(&rows)
    ));
    let of_devices = |number: &usize| {
        let best = |sweep: &DeviceSweep| {
            let fits = sweep.at(*number).map(|best| record(best, &request.plan));
            (sweep.name.clone(), fits.unwrap_or_else(|| json!({ "fits": false })))
        };
        json!({ "gpus": number, "engines": all.iter().map(best).collect::<Map<_, _>>() })
    };
    let value = json!({
        "cluster": request.cluster.name,
        "sweep": devices.iter().map(of_devices).collect::<Vec<_>>(),
    });
    if let Some(output) = &request.outputs.svg {
        curve::draw(request, &devices, all, output)?;
    }
    Ok(value)
}
