//! Ranks as processes that a launcher has started, each with its own device.
//!
//! Which transport joins them follows from what they compute on: MPI carries what is in the memory of the
//! host, NCCL what is on GPUs. Where neither can, one sentence says what to build or how to start instead: a
//! process that trained on by itself would be one of several copies of rank 0.

use std::time::Duration;

use espalier_comm::launch::{LaunchedProcess, Launcher};
use espalier_comm::rendezvous::RendezvousConfig;
use espalier_comm::{Communicator, Failure, nccl};
use espalier_plan::device::DeviceKind;
use espalier_plan::mesh::Mesh;
use espalier_tensor::Device;
use espalier_tensor::cuda::Cuda;

use super::Ranks;
use crate::{Error, Result};

/// NCCL's variable (2.30 and newer) that lets several ranks have one GPU.
const MULTI_RANK: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

/// Whether this program was built with MPI.
pub const MPI: bool = cfg!(feature = "mpi");

/// How the processes of a launcher become the ranks of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessGroup {
    launched: LaunchedProcess,
    transport: ProcessTransport,
    /// Whether several ranks may have one GPU: NCCL does that where it is asked to.
    shares_gpus: bool,
}

/// What carries the messages.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ProcessTransport {
    Mpi,
    Nccl(RendezvousConfig),
}

impl ProcessGroup {
    /// Decides for a rank that is to compute on a device of this kind. `gpus` says whether it has a GPU that
    /// can be used, which decides where the kind is left open; `variable` looks a variable of the launcher
    /// up.
    pub fn new(
        launched: LaunchedProcess,
        kind: DeviceKind,
        gpus: impl FnOnce() -> bool,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<ProcessGroup> {
        let rendezvous = || RendezvousConfig::from_variables(&variable);
        let transport = match kind {
            DeviceKind::Cuda => ProcessTransport::Nccl(rendezvous()?),
            DeviceKind::Cpu => by_mpi(&launched)?,
            // Where nothing says how GPUs could be joined, the processors can be.
            DeviceKind::Auto => match rendezvous() {
                Ok(config) if gpus() => ProcessTransport::Nccl(config),
                _ => by_mpi(&launched)?,
            },
        };
        let shares_gpus = variable(MULTI_RANK).is_some_and(|value| value.trim() == "1");
        Ok(ProcessGroup { launched, transport, shares_gpus })
    }

    /// Its number in the world.
    pub fn rank(&self) -> usize {
        self.launched.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.launched.size
    }

    /// The kind of device that its transport joins.
    pub fn device_kind(&self) -> DeviceKind {
        match self.transport {
            ProcessTransport::Mpi => DeviceKind::Cpu,
            ProcessTransport::Nccl(_) => DeviceKind::Cuda,
        }
    }

    /// Which of its machine's GPUs is its, where there are so many: ranks beyond them share these, where NCCL
    /// is asked to let them.
    pub fn gpu(&self, gpus: usize) -> usize {
        match &self.transport {
            ProcessTransport::Mpi => 0,
            ProcessTransport::Nccl(config) if self.shares_gpus && gpus > 0 => config.local_rank % gpus,
            ProcessTransport::Nccl(config) => config.local_rank,
        }
    }

    /// How many ranks share the memory that it computes in: its machine's, or that of its GPU, of which the
    /// machine has so many.
    pub fn ranks_per_device(&self, gpus: usize) -> usize {
        // Where the launcher does not say how many are here, all may be.
        let here = self.launched.local_size.unwrap_or(self.launched.size).max(1);
        match self.transport {
            ProcessTransport::Mpi => here,
            ProcessTransport::Nccl(_) if !self.shares_gpus || gpus == 0 => 1,
            ProcessTransport::Nccl(_) => {
                let gpu = self.gpu(gpus);
                (0..here).filter(|local| local % gpus == gpu).count().max(1)
            }
        }
    }

    /// The threads that fall to it of those that the machine has.
    pub fn threads(&self, of: usize) -> usize {
        (of / self.local_size()).max(1)
    }

    /// How many ranks share its machine; 1 where the launcher does not say.
    pub fn local_size(&self) -> usize {
        self.launched.local_size.unwrap_or(1).max(1)
    }

    pub fn transport(&self) -> &'static str {
        match self.transport {
            ProcessTransport::Mpi => "MPI",
            ProcessTransport::Nccl(_) => "NCCL",
        }
    }

    /// Joins the others in a mesh and runs `work` as the rank that this process is. A call of its waits at
    /// most `limit`.
    pub fn run<R>(
        &self,
        limit: Duration,
        mesh: &Mesh,
        device: &Device,
        work: impl FnOnce(Ranks) -> Result<R>,
    ) -> Result<R> {
        let work = |world: Communicator| {
            let _name = Ranks::name(&world);
            work(
                Ranks::join(world, mesh)?
                    .with_ranks_per_device(self.ranks_per_device(Cuda::probe().gpus.len())),
            )
        };
        tracing::info!("connects to the others by {}", self.transport());
        let outcome = match (&self.transport, device) {
            (ProcessTransport::Mpi, _) => on_mpi(limit, work),
            (ProcessTransport::Nccl(config), Device::Cuda(cuda)) => nccl::run(cuda, config, limit, work),
            (ProcessTransport::Nccl(_), Device::Cpu(_)) => unreachable!("NCCL was chosen for a GPU"),
        };
        outcome.map_err(Error::from)
    }
}

/// MPI, or what to do where it cannot be used.
fn by_mpi(launched: &LaunchedProcess) -> Result<ProcessTransport> {
    let LaunchedProcess { size, variable, .. } = launched;
    let what = match launched.launcher {
        Launcher::Torchrun => format!(
            "torchrun's variables are set ({variable}={size}), and they connect ranks with one GPU each (device.kind = \
             \"cuda\"): CPU ranks are started by mpirun, or as threads of one process by --ranks {size}"
        ),
        Launcher::Mpi | Launcher::Slurm if !MPI => format!(
            "the launcher started {size} processes ({variable}={size}), but this program was built without MPI: build \
             it with `cargo build --release --features mpi`, or start one process with --ranks {size}"
        ),
        Launcher::Mpi | Launcher::Slurm => return Ok(ProcessTransport::Mpi),
    };
    Err(Error::Comm(espalier_comm::Error::Variables { what }))
}

#[cfg(feature = "mpi")]
fn on_mpi<R>(limit: Duration, work: impl FnOnce(Communicator) -> Result<R>) -> Result<R, Failure<Error>> {
    espalier_comm::mpi::run(limit, work)
}

#[cfg(not(feature = "mpi"))]
fn on_mpi<R>(_: Duration, _: impl FnOnce(Communicator) -> Result<R>) -> Result<R, Failure<Error>> {
    unreachable!("MPI was chosen by a program that is built with it")
}

#[cfg(test)]
mod tests {
    use super::*;

    const VARIABLES: [(&str, &str); 5] = [
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "node7"),
        ("MASTER_PORT", "29500"),
    ];

    /// The second of so many ranks of a machine.
    fn join(
        launcher: Launcher,
        size: usize,
        kind: DeviceKind,
        gpus: bool,
        variables: &[(&str, &str)],
    ) -> Result<ProcessGroup, String> {
        let launched = LaunchedProcess { launcher, rank: 1, size, local_size: Some(size), variable: "SIZE" };
        let variable = |name: &str| Some(variables.iter().find(|(n, _)| *n == name)?.1.to_owned());
        ProcessGroup::new(launched, kind, || gpus, variable).map_err(|e| e.to_string())
    }

    #[test]
    fn gpus_are_joined_by_nccl_whoever_starts_them() {
        for launcher in [Launcher::Mpi, Launcher::Slurm, Launcher::Torchrun] {
            for kind in [DeviceKind::Cuda, DeviceKind::Auto] {
                let join = join(launcher, 2, kind, true, &VARIABLES).unwrap();
                let found = (join.transport(), join.device_kind(), join.gpu(8));
                assert_eq!(found, ("NCCL", DeviceKind::Cuda, 1));
            }
        }
        let missing = join(Launcher::Slurm, 2, DeviceKind::Cuda, true, &VARIABLES[..3]).unwrap_err();
        assert!(missing.starts_with("MASTER_ADDR is not set"), "{missing}");
    }

    /// Four ranks of a machine with one GPU, and with three of them.
    #[test]
    fn ranks_share_a_gpu_where_nccl_is_asked_to() {
        let of = |local: &str, shared: bool| {
            let own = [("LOCAL_RANK", local), ("NCCL_MULTI_RANK_GPU_ENABLE", if shared { "1" } else { "0" })];
            join(Launcher::Torchrun, 4, DeviceKind::Cuda, true, &[&own[..], &VARIABLES].concat()).unwrap()
        };
        assert_eq!((of("3", true).gpu(1), of("3", true).ranks_per_device(1)), (0, 4));
        assert_eq!((of("3", true).gpu(3), of("3", true).ranks_per_device(3)), (0, 2));
        assert_eq!((of("2", true).gpu(3), of("2", true).ranks_per_device(3)), (2, 1));
        // As it is: the GPU is asked for, and the machine says that it has no such one.
        assert_eq!((of("3", false).gpu(1), of("3", false).ranks_per_device(1)), (3, 1));
    }

    #[test]
    fn processors_are_joined_by_mpi_or_the_sentence_says_how() {
        for (kind, variables) in
            [(DeviceKind::Cpu, &VARIABLES[..]), (DeviceKind::Auto, &VARIABLES[..]), (DeviceKind::Auto, &[])]
        {
            for launcher in [Launcher::Mpi, Launcher::Slurm] {
                let join = join(launcher, 2, kind, false, variables);
                if MPI {
                    let join = join.unwrap();
                    assert_eq!((join.transport(), join.device_kind()), ("MPI", DeviceKind::Cpu));
                    assert_eq!([join.threads(1), join.threads(8)], [1, 4]);
                } else {
                    let why = join.unwrap_err();
                    assert!(why.contains("2 processes (SIZE=2)") && why.contains("--features mpi"), "{why}");
                }
            }
            let why = join(Launcher::Torchrun, 2, kind, false, variables).unwrap_err();
            assert!(why.contains("SIZE=2") && why.contains("mpirun") && why.contains("--ranks 2"), "{why}");
        }
    }
}
