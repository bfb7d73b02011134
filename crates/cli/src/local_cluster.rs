//! The machine at hand as the planner sees it: what `espalier bench` has written down of it, or the nearest
//! cluster that comes with the program.

use std::path::{Path, PathBuf};

use anyhow::Result;
use espalier_data::regular_file::{self, SETTINGS};
use espalier_plan::cluster::{self, Cluster};
use espalier_train::Error;

/// What `espalier bench` writes unless it is told otherwise.
pub const FILE: &str = "cluster.toml";

/// A cluster, and where it was found.
pub struct LocalCluster {
    pub cluster: Cluster,
    /// A file, or the name of one that comes with the program.
    pub source: String,
}

impl LocalCluster {
    /// For ranks on GPUs, or on cores: the cluster file beside the run file, or in the current folder, where
    /// there is one of such devices; else one that comes with the program, of as many cores as there are.
    pub fn here(run_file: &Path, on_gpus: bool) -> Result<LocalCluster> {
        let beside = run_file.parent().unwrap_or(Path::new("")).join(FILE);
        for path in [beside, PathBuf::from(FILE)] {
            if path.exists() {
                let cluster = read(&path)?;
                if cluster.node.cores != on_gpus {
                    return Ok(LocalCluster { cluster, source: path.display().to_string() });
                }
            }
        }
        LocalCluster::builtin(on_gpus)
    }

    /// One that comes with the program.
    pub fn builtin(on_gpus: bool) -> Result<LocalCluster> {
        let name = if on_gpus { "h200-node" } else { "this-machine" };
        let mut cluster = cluster::builtin(name).expect("it comes with the program");
        if !on_gpus {
            cluster.node.devices = std::thread::available_parallelism()?.get();
        }
        Ok(LocalCluster { cluster, source: name.into() })
    }
}

/// Reads a cluster file.
pub fn read(path: &Path) -> Result<Cluster> {
    let why = |why: String| Error::File { path: path.to_owned(), why };
    let unread = |error| Error::of_io(path, &error, format!("the cluster cannot be read: {error}"));
    let text = regular_file::read_text(path, SETTINGS).map_err(unread)?;
    Ok(Cluster::parse(&text).map_err(|error| why(error.to_string()))?)
}
