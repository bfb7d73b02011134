//! Ranks as threads of this process, each with its own device: an equal number of the processor's threads, or the
//! one GPU with streams, a ledger and memory of its own.

use std::time::Duration;

use espalier_comm::{Communicator, threads};
use espalier_plan::mesh::Mesh;
use espalier_tensor::Device;
use espalier_tensor::cpu::Cpu;

use super::Ranks;
use crate::{Error, Result};

/// How long a rank waits for another where nobody says otherwise: as long as `parallel.timeout_s` is by itself.
const LIMIT: Duration = Duration::from_secs(600);

/// What ends the process where a rank hangs, with what to say.
pub type AbortFn = fn(Error) -> !;

/// Runs `work` on the ranks of a mesh, and returns what they return, in the order of ranks.
pub fn on_threads<R: Send>(
    mesh: &Mesh,
    device: &Device,
    work: impl Fn(Ranks, &Device) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    on_threads_with_timeout(LIMIT, None, mesh, device, work)
}

/// The same where a rank waits at most `limit` for another. One that fails is noticed at once; the limit is
/// for one that hangs, and must be longer than rank 0 takes to write a checkpoint. What hangs is waited for,
/// unless there is somebody to `abort`, which is to end the process.
pub fn on_threads_with_timeout<R: Send>(
    limit: Duration,
    abort: Option<AbortFn>,
    mesh: &Mesh,
    device: &Device,
    work: impl Fn(Ranks, &Device) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let device_of = |rank: usize| match device {
        Device::Cpu(cpu) => Cpu::with_isa((cpu.threads() / mesh.size()).max(1), cpu.isa()).map(Device::Cpu),
        // The GPU as it was opened, with what was asked of it, is rank 0's.
        Device::Cuda(_) if rank == 0 => Ok(device.clone()),
        Device::Cuda(cuda) => cuda.another().map(Device::Cuda),
    };
    let rank = |world: Communicator| -> Result<R> {
        let device = device_of(world.rank())?;
        device.enter(|| {
            let _name = Ranks::name(&world);
            work(Ranks::join(world, mesh)?, &device)
        })
    };
    let outcome = match abort {
        None => threads::run(mesh.size(), limit, rank),
        Some(abort) => threads::run_or_abort(mesh.size(), limit, |failure| abort(failure.into()), rank),
    };
    outcome.map_err(Error::from)
}
