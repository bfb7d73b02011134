//! `parallel = "auto"`: the fastest layout that fits on the machine at hand takes its place, before anything
//! else is done. Ranks that a launcher has started each find it by themselves, by the same rule.

use std::path::{Path, PathBuf};

use anyhow::Result;
use espalier_comm::LaunchedProcess;
use espalier_plan::cluster::Cluster;
use espalier_plan::config::{RunFile, RunTable};
use espalier_plan::device::DeviceKind;
use espalier_plan::engine::EngineProfile;
use espalier_plan::search::{LayoutSearch, SearchConstraints, SearchResult};
use espalier_plan::simulate::{Candidate, Simulation};
use espalier_plan::{DataFacts, Plan};
use espalier_tensor::cuda::Cuda;
use espalier_train::Error;
use espalier_train::parallel::launched::ProcessGroup;
use espalier_train::run::read_resolved;

use crate::local_cluster::LocalCluster;
use crate::plan::seconds;
use crate::prepared::{PreparedRun, prepare_with};
use crate::run_file::{conflict, in_file, resolve};

/// Layouts that are tried before the search gives up: a run file may refuse what the planner does not know of.
const TRIED: usize = 16;

/// A run whose layout is to be found.
pub struct AutoLayout<'a> {
    pub run: &'a RunTable,
    /// Where it stands.
    pub path: &'a Path,
    pub launched: Option<&'a LaunchedProcess>,
    /// What `--ranks` says.
    pub ranks: Option<usize>,
    /// The folder of the run that goes on, where one does.
    pub resumed: Option<PathBuf>,
    /// Its newest checkpoint.
    pub checkpoint: Option<&'a Path>,
}

impl AutoLayout<'_> {
    /// Reads the run file, opens its data, and finds its layout.
    pub fn prepare(&self) -> Result<PreparedRun> {
        let run_file = self.run.read().map_err(|error| in_file(self.path, error))?;
        prepare_with(run_file, self.path, self.launched, self.checkpoint, |run_file, facts, group| match self
            .as_before()
        {
            Some(before) => Ok(run_file.laid_out_as(&before).map_err(Error::Plan)?),
            None => self.lay_out(&run_file, facts, group),
        })
    }

    /// The ranks that are asked for.
    fn asked(&self) -> Option<usize> {
        self.launched.map(|launched| launched.size).or(self.ranks)
    }

    /// What the run in the folder was, where it resumes with as many ranks. What cannot be read there is an
    /// error when it resumes.
    fn as_before(&self) -> Option<RunFile> {
        let path = self.resumed.as_ref()?.join("run.toml");
        let run_file = RunFile::parse(&read_resolved(&path).ok()??, &[]).ok()?;
        let axis_sizes = run_file.parallel.axis_sizes();
        let ranks = axis_sizes.data * axis_sizes.pipeline * axis_sizes.tensor * axis_sizes.spatial;
        if self.asked().is_some_and(|asked| asked != ranks) {
            return None;
        }
        resolve(run_file, &path).ok()
    }

    /// Whether ranks compute on GPUs: those of one process share its processor.
    fn on_gpus(&self, kind: DeviceKind, group: Option<&ProcessGroup>) -> bool {
        match (group.map_or(kind, ProcessGroup::device_kind), self.asked()) {
            (DeviceKind::Cuda, _) => true,
            (DeviceKind::Auto, None | Some(1)) => Cuda::probe().usable(),
            (DeviceKind::Auto | DeviceKind::Cpu, _) => false,
        }
    }

    fn lay_out(&self, run_file: &RunFile, facts: DataFacts, group: Option<&ProcessGroup>) -> Result<RunFile> {
        if self.ranks == Some(0) {
            return Err(conflict("--ranks", "is 0: a run has at least one rank").into());
        }
        let on_gpus = self.on_gpus(run_file.device.kind, group);
        let local = match &run_file.device.cluster {
            Some(name) => LocalCluster::named("device.cluster", name)?,
            None => LocalCluster::here(self.path, on_gpus)?,
        };
        let mismatch = local.mismatch(on_gpus);
        let LocalCluster { cluster, source } = local;
        let single_rank = Plan::new(run_file.single_rank(), facts).map_err(Error::Plan)?;
        let job = Simulation::new(&single_rank, &cluster, EngineProfile::ESPALIER);
        let found = self.search(&job, on_gpus)?;
        let mut refused = None;
        for (index, one) in found.ranked.iter().enumerate() {
            match accepted(run_file, &one.candidate, facts) {
                Ok(mut laid_out) => {
                    let why = if index == 0 { found.why(&cluster) } else { String::new() };
                    let reckoned = match &mismatch {
                        None => format!("predicted {} per step ({source})", seconds(one.step_seconds)),
                        Some(other) => format!("the fastest by the rates of another machine ({other})"),
                    };
                    let note = format!("`parallel` = \"auto\" chose {}: {reckoned}. {why}", one.candidate);
                    laid_out.notes = run_file.notes.clone();
                    laid_out.notes.push(note.trim_end().into());
                    return Ok(laid_out);
                }
                Err(why) => refused = refused.or(Some(why)),
            }
        }
        Err(refused.map_or_else(|| self.none(&found, &cluster), Error::Plan).into())
    }

    /// The best layouts of the ranks that are asked for; else of every number of ranks that divides the
    /// cores evenly. A process has one GPU.
    fn search(&self, job: &Simulation, on_gpus: bool) -> Result<SearchResult> {
        let of = |devices: usize| {
            let search = LayoutSearch { job, devices, fixed: &SearchConstraints::default(), rows: TRIED };
            search.run().map_err(Error::Plan)
        };
        let most = match self.asked() {
            Some(asked) => return Ok(of(asked)?),
            None if on_gpus => 1,
            None => job.cluster.node.devices,
        };
        let mut found = of(1)?;
        let even = (2..=most).filter(|ranks| most.is_multiple_of(*ranks));
        for more in even.filter_map(|ranks| of(ranks).ok()) {
            found.ranked.extend(more.ranked);
            found.too_large.extend(more.too_large);
            let of_both = found.smallest.into_iter().chain(more.smallest);
            found.smallest = of_both.min_by_key(|smallest| smallest.memory);
        }
        // Of equal ones those of fewer ranks stay first.
        found.ranked.sort_by(|a, b| a.step_seconds.total_cmp(&b.step_seconds));
        found.too_large.sort_by(|a, b| a.step_seconds.total_cmp(&b.step_seconds));
        Ok(found)
    }

    /// Why there is no layout at all.
    fn none(&self, found: &SearchResult, cluster: &Cluster) -> Error {
        let gb = |bytes: u64| bytes as f64 / 1e9;
        let ranks = self.asked().map_or(String::new(), |ranks| format!(" of {ranks} ranks"));
        let problem = match found.smallest {
            None => format!("is \"auto\", but the model has no layout{ranks}"),
            Some(smallest) => format!(
                "is \"auto\", but no layout{ranks} fits into the {:.1} GB that {} has for each: at least {:.1} GB are needed ({})",
                gb(cluster.memory()),
                cluster.name,
                gb(smallest.memory),
                smallest.candidate
            ),
        };
        conflict("parallel", &problem)
    }
}

/// The run file with a layout, where a run would take it.
fn accepted(
    run_file: &RunFile,
    candidate: &Candidate,
    facts: DataFacts,
) -> Result<RunFile, espalier_plan::Error> {
    let laid_out = candidate.applied(run_file)?;
    Plan::new(laid_out.clone(), facts)?;
    Ok(laid_out)
}
