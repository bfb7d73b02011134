//! The machine at hand as the planner sees it: what `espalier bench` has written down of it, a cluster that the
//! run names, or the nearest one that comes with the program. Rates of other machines are good for ranking
//! layouts; a time is predicted of a machine by its own.

use std::path::{Path, PathBuf};

use anyhow::Result;
use espalier_data::regular_file::{self, SETTINGS};
use espalier_plan::Error as PlanError;
use espalier_plan::cluster::{self, Cluster, datasheet};
use espalier_tensor::cpu::Isa;
use espalier_tensor::cuda::Cuda;
use espalier_train::Error;

use crate::doctor;

/// What `espalier bench` writes unless it is told otherwise.
pub const FILE: &str = "cluster.toml";

/// Begins the name of a core of which it is known what processor it belongs to.
const CORE: &str = "a core of ";

/// A cluster, and where it was found.
pub struct LocalCluster {
    pub cluster: Cluster,
    /// A file, or the name of one that comes with the program.
    pub source: String,
}

impl LocalCluster {
    /// For ranks on GPUs, or on cores: the cluster file beside the run file, or in the current folder, where
    /// there is one of such devices.
    pub fn measured(run_file: &Path, on_gpus: bool) -> Result<Option<LocalCluster>> {
        let found = LocalCluster::beside(run_file)?;
        Ok(found.into_iter().find(|local| local.cluster.node.cores != on_gpus))
    }

    /// The cluster files beside a run file and in the current folder.
    pub fn beside(run_file: &Path) -> Result<Vec<LocalCluster>> {
        let beside = run_file.parent().unwrap_or(Path::new("")).join(FILE);
        let paths = [beside, PathBuf::from(FILE)].into_iter().filter(|path| path.exists());
        let read =
            |path: PathBuf| Ok(LocalCluster { cluster: read(&path)?, source: path.display().to_string() });
        paths.map(read).collect()
    }

    /// The same, or else one that comes with the program: that of the GPU that is here, an H200's where there is
    /// none, or cores like those that `this-machine` was measured on, as many as there are.
    pub fn here(run_file: &Path, on_gpus: bool) -> Result<LocalCluster> {
        if let Some(measured) = LocalCluster::measured(run_file, on_gpus)? {
            return Ok(measured);
        }
        let name = if on_gpus { gpu_cluster() } else { "this-machine" };
        let mut found = LocalCluster::named("--cluster", Path::new(name))?;
        if !on_gpus {
            found.cluster.node.devices = std::thread::available_parallelism()?.get();
        }
        Ok(found)
    }

    /// One that comes with the program, or a file, as `field` names it. The name of the former may have been
    /// made a path, as files are.
    pub fn named(field: &str, name: &Path) -> Result<LocalCluster> {
        let builtin = name.file_name().filter(|_| !name.is_file()).and_then(|name| name.to_str());
        if let Some(known) = builtin.and_then(cluster::builtin) {
            return Ok(LocalCluster { source: known.name.clone(), cluster: known });
        }
        if !name.exists() {
            let expected = format!("{}, or a file", cluster::NAMES.join(", "));
            let got = format!("\"{}\"", name.display());
            return Err(
                Error::Plan(PlanError::Value { field: field.into(), expected, got, hint: None }).into()
            );
        }
        Ok(LocalCluster { cluster: read(name)?, source: name.display().to_string() })
    }

    /// Why its times are not those of this machine; none where they are.
    pub fn mismatch(&self, on_gpus: bool) -> Option<String> {
        let Cluster { device, node, .. } = &self.cluster;
        let of = &self.source;
        if node.cores == on_gpus {
            let kinds = ["cores", "GPUs"].map(String::from);
            return Some(format!(
                "{of} is of {}, and the ranks are on {}",
                kinds[usize::from(!node.cores)],
                kinds[usize::from(on_gpus)]
            ));
        }
        if on_gpus {
            let here = Cuda::probe().gpus.first().map(|gpu| gpu.name.clone())?;
            let family = datasheet::family(&here);
            let is_alike =
                family.map_or(here == device.name, |family| datasheet::family(&device.name) == Some(family));
            return (!is_alike).then(|| format!("{of} is of {}, and this is {here}", device.name));
        }
        if cluster::builtin(of).is_some() {
            return Some(format!(
                "{of} is of other cores than these: `espalier bench compute` and `espalier bench comm` measure these"
            ));
        }
        let cores = std::thread::available_parallelism().map_or(node.devices, usize::from);
        let name = core_name();
        let is_alike = cores == node.devices && (device.name == name || !device.name.starts_with(CORE));
        (!is_alike).then(|| {
            format!("{of} is of {} x {}, and this machine has {cores} x {name}", node.devices, device.name)
        })
    }
}

/// The cluster that comes with the program whose GPUs are those of this machine; where there are none, of which
/// most was measured.
fn gpu_cluster() -> &'static str {
    let gpus = Cuda::probe().gpus;
    let family = gpus.first().and_then(|gpu| datasheet::family(&gpu.name));
    let is_alike = |name: &&&str| {
        let known = cluster::builtin(name).map(|cluster| cluster.device.name);
        family.is_some() && known.is_some_and(|name| datasheet::family(&name) == family)
    };
    cluster::NAMES.iter().find(is_alike).unwrap_or(&"h200-node")
}

/// What a core of this machine is called in a cluster file.
pub fn core_name() -> String {
    let instructions = doctor::instructions(Isa::best());
    let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = processors.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    match model {
        Some((_, model)) => format!("{CORE}{}, {instructions}", model.trim()),
        None => format!("a core, {instructions}"),
    }
}

/// Reads a cluster file.
pub fn read(path: &Path) -> Result<Cluster> {
    let why = |why: String| Error::File { path: path.to_owned(), why };
    let unread = |error| Error::of_io(path, &error, format!("the cluster cannot be read: {error}"));
    let text = regular_file::read_text(path, SETTINGS).map_err(unread)?;
    Ok(Cluster::parse(&text).map_err(|error| why(error.to_string()))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rates of other cores, of as many of them, of GPUs: each is named; those that were measured here are not.
    #[test]
    fn rates_of_other_machines_are_told_apart() {
        let mut local = LocalCluster::named("--cluster", Path::new("runs/this-machine")).unwrap();
        assert!(local.mismatch(false).unwrap().starts_with("this-machine is of other cores than these"));
        assert_eq!(local.mismatch(true).unwrap(), "this-machine is of cores, and the ranks are on GPUs");
        local.source = "cluster.toml".into();
        local.cluster.node.devices = std::thread::available_parallelism().unwrap().get();
        local.cluster.device.name = core_name();
        assert_eq!(local.mismatch(false), None);
        local.cluster.node.devices += 1;
        assert!(local.mismatch(false).unwrap().contains(", and this machine has "));
        local.cluster.node.devices -= 1;
        local.cluster.device.name = "a core of an abacus".into();
        assert!(local.mismatch(false).is_some());
        let refused = LocalCluster::named("--cluster", Path::new("sumit")).err().unwrap().to_string();
        assert!(refused.starts_with("`--cluster` must be summit, ") && refused.ends_with("got \"sumit\""));
    }
}
