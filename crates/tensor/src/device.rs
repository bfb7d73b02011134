//! Where tensors live and operations run. A closed set, so an enum: an operation matches on it.

use std::time::Duration;

use crate::cpu::Cpu;
use crate::cuda::Cuda;
use crate::error::Result;
use crate::machine::memory_left;
use crate::memory::Ledger;

/// Where tensors are and operations run: a value with threads or streams, a ledger and memory of its own.
#[derive(Debug, Clone)]
pub enum Device {
    /// The host's processor, through a pool of threads of its own.
    Cpu(Cpu),
    Cuda(Cuda),
}

impl Device {
    /// The processor, with this many threads.
    pub fn cpu(threads: usize) -> Result<Device> {
        Ok(Device::Cpu(Cpu::new(threads)?))
    }

    /// A GPU, by the driver's number for it.
    pub fn cuda(ordinal: usize) -> Result<Device> {
        Ok(Device::Cuda(Cuda::open(ordinal)?))
    }

    /// The same device as if it were another one, for work beside its own: a processor with as many threads
    /// again, or a handle of the same GPU with a stream and memory of its own.
    pub fn another(&self) -> Result<Device> {
        match self {
            Device::Cpu(cpu) => Ok(Device::Cpu(Cpu::with_isa(cpu.threads(), cpu.isa())?)),
            Device::Cuda(cuda) => Ok(Device::Cuda(cuda.another()?)),
        }
    }

    /// What its memory is taken for, by category.
    pub fn ledger(&self) -> &Ledger {
        match self {
            Device::Cpu(cpu) => cpu.ledger(),
            Device::Cuda(cuda) => cuda.ledger(),
        }
    }

    /// The same of the host's memory that its work takes: its own ledger where it is the host, another beside
    /// a GPU's.
    pub fn host_ledger(&self) -> &Ledger {
        match self {
            Device::Cpu(cpu) => cpu.ledger(),
            Device::Cuda(cuda) => cuda.host_ledger(),
        }
    }

    /// Bytes that it has for tensors, those that it holds already included: a GPU's memory, or what the
    /// system says is available. None where the system does not say.
    pub fn memory(&self) -> Option<usize> {
        match self {
            Device::Cpu(cpu) => Some(memory_left()? as usize + cpu.ledger().total()),
            Device::Cuda(cuda) => Some(cuda.gpu().memory),
        }
    }

    /// The name used in summaries and JSON.
    pub fn name(&self) -> &'static str {
        match self {
            Device::Cpu(_) => "cpu",
            Device::Cuda(_) => "cuda",
        }
    }

    /// Runs `work` where this device's operations start fastest: for the CPU, on one of its own threads.
    pub fn enter<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match self {
            Device::Cpu(cpu) => cpu.enter(work),
            Device::Cuda(_) => work(),
        }
    }

    /// Does some work that consists of many short operations: for the CPU, with threads that stay awake
    /// between them.
    pub fn awake<R>(&self, work: impl FnOnce() -> R) -> R {
        match self {
            Device::Cpu(cpu) => cpu.awake(work),
            Device::Cuda(_) => work(),
        }
    }

    /// Whether it does work beside what is queued: ahead of its use, on a stream of its own. Not while work
    /// is recorded.
    pub fn works_ahead(&self) -> bool {
        matches!(self, Device::Cuda(cuda) if !cuda.is_recording())
    }

    /// Whether work is being recorded, to be queued again later: what it makes is there only when it runs.
    pub fn is_recording(&self) -> bool {
        matches!(self, Device::Cuda(cuda) if cuda.is_recording())
    }

    /// Counts time that the host took to have a batch of samples ready, where a GPU's time is being profiled.
    pub fn waited_for_data(&self, time: Duration) {
        if let Device::Cuda(cuda) = self {
            cuda.waited_for_data(time.as_secs_f64());
        }
    }

    /// Whether the time of a GPU's kernels is being taken, one by one.
    pub fn is_profiled(&self) -> bool {
        matches!(self, Device::Cuda(cuda) if cuda.is_profiled())
    }

    /// Gives the memory of freed tensors back, where it is kept for reuse: a GPU is waited for.
    pub fn release_unused(&self) -> Result<()> {
        match self {
            Device::Cpu(cpu) => {
                cpu.release_unused();
                Ok(())
            }
            Device::Cuda(cuda) => cuda.release_unused(),
        }
    }

    /// Waits until all queued work is done. A processor queues none.
    pub fn synchronize(&self) -> Result<()> {
        match self {
            Device::Cpu(_) => Ok(()),
            Device::Cuda(cuda) => cuda.synchronize(),
        }
    }
}

/// The end of a host-only path that was handed a tensor of a GPU: each public operation chooses before it
/// comes here.
#[track_caller]
pub(crate) fn host_only() -> ! {
    panic!("the host's code of an operation was given a tensor of a GPU")
}
