//! Time to a result as people and programs see it: in words, as a picture and a page, as JSON, and as a folder
//! that `espalier report` makes a page of. The numbers are `plan::result`'s.

mod figure;
mod page;
mod text;

pub use figure::figure;
pub use page::page;
pub use text::{devices, text};

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Result;
use espalier_data::regular_file::{self, RECORDS};
use espalier_plan::simulate::LayoutRecord;
use espalier_plan::time_to_result::{ResultChoice, ResultTimes};
use espalier_train::Error;
use serde_json::{Value, json};

/// What says that a folder is one of a plan.
const FILE: &str = "time-to-result.json";

/// Its file in a folder.
pub fn file_in(folder: &Path) -> PathBuf {
    folder.join(FILE)
}

/// Whether a file begins like one that was written here.
pub fn is_ours(head: &[u8]) -> bool {
    head.starts_with(br#"{"best":"#)
}

/// What was written into a folder; none where it is of another kind.
pub fn read(folder: &Path) -> Result<Option<ResultTimes>> {
    let path = file_in(folder);
    let text = match regular_file::read_text(&path, RECORDS) {
        Err(why) if matches!(why.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        text => text.map_err(|why| Error::of_io(&path, &why, &why))?,
    };
    let unusable = |why| Error::File { path: path.clone(), why: format!("is no time to a result: {why}") };
    Ok(Some(serde_json::from_str(&text).map_err(unusable)?))
}

/// All of it for a program.
pub fn value(result: &ResultTimes) -> Value {
    let mut value = serde_json::to_value(result).expect("plain data");
    for (curve, record) in result.curves.iter().zip(list(&mut value["curves"])) {
        record["expected"] = json!(curve.expected());
        record["critical_batch"] = curve.critical_batch().into();
        record["interval_from"] = curve.interval_source().name().into();
    }
    for (point, record) in result.points.iter().zip(list(&mut value["time_to_result"])) {
        *record = of_point(point);
    }
    value["best"] = result.scaling_limit(None).map(|limit| of_point(limit.point)).into();
    value["why"] = text::best(result).into();
    value["pareto"] = of_sparsities(result, |sparsity| {
        let points = result.pareto(sparsity).into_iter().map(|point| {
            let ResultChoice { gpus, batch, hours, gpu_hours, cost, .. } = point;
            json!({ "gpus": gpus, "batch": batch, "hours": hours, "gpu_hours": gpu_hours, "cost": cost })
        });
        Some(json!({ "points": points.collect::<Vec<_>>() }))
    });
    value["scaling"] = of_sparsities(result, |sparsity| {
        let limit = result.scaling_limit(sparsity)?;
        Some(json!({
            "gpus": limit.point.gpus,
            "hours": limit.point.hours,
            "next_gpus": limit.next.map(|next| next.gpus),
            "next_speedup": limit.next_speedup(),
        }))
    });
    let pruning = result.pruning_gains().into_iter().map(|gain| {
        let speedups = gain.speedups.iter().map(|(gpus, times)| json!({ "gpus": gpus, "speedup": times }));
        json!({
            "sparsity": gain.sparsity,
            "pays_on": gain.pays_on(),
            "only_pruned_fits_on": gain.only_pruned,
            "speedup_over_dense": speedups.collect::<Vec<_>>(),
        })
    });
    value["pruning"] = pruning.collect();
    value
}

fn list(value: &mut Value) -> impl Iterator<Item = &mut Value> {
    value.as_array_mut().into_iter().flatten()
}

fn of_point(point: &ResultChoice) -> Value {
    let mut record = serde_json::to_value(point).expect("plain data");
    let layout = point.candidate.map(|candidate| LayoutRecord::new(&candidate, point.batch));
    record["layout"] = json!(layout);
    record
}

/// One record for each curve, with its sparsity.
fn of_sparsities(result: &ResultTimes, record: impl Fn(Option<f64>) -> Option<Value>) -> Value {
    let of_curve = |sparsity: f64| {
        let mut value = record(Some(sparsity))?;
        value["sparsity"] = sparsity.into();
        Some(value)
    };
    result.curves.iter().filter_map(|curve| of_curve(curve.sparsity)).collect()
}
