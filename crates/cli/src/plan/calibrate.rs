//! `espalier plan --calibrate`: the rates of a cluster file, refitted to what finished runs took. The
//! arithmetic is `simulate::calibrate`'s.

use std::path::{Path, PathBuf};

use anyhow::Result;
use espalier_data::regular_file::{self, RECORDS};
use espalier_plan::cluster::merge::{self, ClusterSection};
use espalier_plan::config::RunFile;
use espalier_plan::device::DeviceKind;
use espalier_plan::simulate::{Calibrated, Candidate, MeasuredRun};
use espalier_plan::{DataFacts, Plan};
use espalier_tensor::cuda::Cuda;
use espalier_train::{Error, RunSummary};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{PlanArguments, seconds};
use crate::bench::cluster_file::ClusterFile;
use crate::local_cluster::{self, LocalCluster};
use crate::output::print_out;
use crate::run_file::{in_file, read_run, resolve};

/// What of plan.json says what the data were: they need not be here any more.
#[derive(Deserialize)]
struct PlanJsonFacts {
    facts: DataFacts,
}

/// Refits, writes and says what changed by how much.
pub fn calibrate(arguments: &PlanArguments) -> Result<Value> {
    let folders = &arguments.calibrate;
    let runs = folders.iter().map(|folder| finished(folder)).collect::<Result<Vec<MeasuredRun>>>()?;
    let (local, cluster_file) = match arguments.cluster.as_deref() {
        Some(name) => {
            let cluster_file = Path::new(name).exists().then(|| PathBuf::from(name));
            (LocalCluster::named("--cluster", Path::new(name))?, cluster_file)
        }
        None => (LocalCluster::here(Path::new(local_cluster::FILE), runs.iter().any(is_on_gpu))?, None),
    };
    let out = arguments.out.clone().or(cluster_file).unwrap_or_else(|| local_cluster::FILE.into());
    let file = ClusterFile::open(&out)?;
    let found = Calibrated::new(&local.cluster, &runs).map_err(Error::Plan)?;
    let times = folders.iter().zip(&runs).zip(found.before.iter().zip(&found.after));
    let mut rows = Vec::new();
    for ((folder, run), (before, after)) in times {
        print_out!(
            "{}: {}: measured {} per step; predicted {} before, {} now",
            folder.display(),
            run.candidate,
            seconds(run.seconds),
            seconds(*before),
            seconds(*after),
        );
        rows.push(json!({
            "run": folder,
            "measured_ms": 1e3 * run.seconds,
            "predicted_ms": 1e3 * before,
            "calibrated_ms": 1e3 * after,
        }));
    }
    print_out!(
        "compute and memory rates of {} scaled by {:.3}; launch overhead and links unchanged",
        local.source,
        found.factor
    );
    let names: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
    let comment = format!("Refitted by `espalier plan --calibrate` to {}.", names.join(", "));
    let section = ClusterSection::device(found.cluster.device.clone());
    let text = merge::insert(&found.cluster.to_toml(), &section, &comment).expect("it was just written");
    file.finish(&section, &comment, |_| text)?;
    Ok(json!({ "file": out, "factor": found.factor, "runs": rows }))
}

/// A run folder whose run has taken steps.
fn finished(folder: &Path) -> Result<MeasuredRun> {
    let refused = |why: String| Error::File { path: folder.into(), why };
    let read = |name: &str| {
        regular_file::read_text(&folder.join(name), RECORDS)
            .map_err(|why| refused(format!("{name} cannot be read: {why}")))
    };
    if !folder.exists() {
        return Err(refused("there is no such folder".into()).into());
    }
    let path = folder.join("run.toml");
    let run_file = RunFile::parse(&read_run(&path)?, &[]).map_err(|error| in_file(&path, error))?;
    let PlanJsonFacts { facts } = serde_json::from_str(&read("plan.json")?)
        .map_err(|why| refused(format!("plan.json is not that of a run: {why}")))?;
    let plan = Plan::new(resolve(run_file, &path)?, facts).map_err(Error::Plan)?;
    let unknown = || refused("its layout is one that the planner does not know".into());
    let candidate = Candidate::of(&plan).ok_or_else(unknown)?;
    let RunSummary { step_ms, .. } = serde_json::from_str(&read("summary.json")?)
        .map_err(|why| refused(format!("summary.json is not that of a run: {why}")))?;
    let step_ms = step_ms.ok_or_else(|| refused("its run is too short: no step was timed".into()))?;
    Ok(MeasuredRun { plan, candidate, seconds: 1e-3 * step_ms })
}

/// Whether a run computed on a GPU, as far as it can be known: one that left it open did where there is one.
fn is_on_gpu(run: &MeasuredRun) -> bool {
    match run.plan.device.kind {
        DeviceKind::Cuda => true,
        DeviceKind::Auto => run.plan.mesh.size() == 1 && Cuda::probe().usable(),
        DeviceKind::Cpu => false,
    }
}
