//! Ranks as threads of this process, each with its own device and a fair part of its processor's threads.

use std::time::Duration;

use espalier_comm::threads;
use espalier_plan::config;
use espalier_plan::mesh::Mesh;
use espalier_tensor::Device;

use super::Ranks;
use crate::{Error, Result};

/// How long a rank waits for another. A rank that fails is noticed at once; this is for one that hangs, and must be longer
/// than a rank takes to write its part of a checkpoint.
const LIMIT: Duration = Duration::from_secs(600);

/// Runs `work` on the ranks of a mesh, and returns what they return, in the order of ranks.
pub fn on_threads<R: Send>(
    mesh: &Mesh,
    device: &Device,
    work: impl Fn(Ranks, &Device) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let Device::Cpu(cpu) = device else {
        let problem = format!(
            "is a card, but the {} ranks of one process share its processor: set it to \"cpu\"",
            mesh.size()
        );
        return Err(Error::Plan(config::Error::Conflict { field: "device.kind".into(), problem }));
    };
    let each = (cpu.threads() / mesh.size()).max(1);
    let outcome = threads::run(mesh.size(), LIMIT, |world| -> Result<R> {
        let device = Device::cpu(each)?;
        device.enter(|| work(Ranks::join(world, mesh)?, &device))
    });
    outcome.map_err(Error::from)
}
