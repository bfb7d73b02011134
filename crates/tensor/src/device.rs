//! Where tensors live and operations run. A closed set, so an enum: an operation matches on it.

use crate::cpu::Cpu;
use crate::error::Result;
use crate::memory::Ledger;

/// A device.
#[derive(Debug, Clone)]
pub enum Device {
    /// The host's processor, through a pool of threads of its own.
    Cpu(Cpu),
}

impl Device {
    /// The processor, with this many threads.
    pub fn cpu(threads: usize) -> Result<Device> {
        Ok(Device::Cpu(Cpu::new(threads)?))
    }

    /// Its books.
    pub fn ledger(&self) -> &Ledger {
        let Device::Cpu(cpu) = self;
        cpu.ledger()
    }

    /// The name used in summaries and JSON.
    pub fn name(&self) -> &'static str {
        match self {
            Device::Cpu(_) => "cpu",
        }
    }

    /// Runs `work` where this device's operations start fastest: for the CPU, on one of its own threads.
    pub fn enter<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        let Device::Cpu(cpu) = self;
        cpu.enter(work)
    }
}
