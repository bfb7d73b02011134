//! From `[device]` in a run file to a device that works.

use clap::builder::TypedValueParser;
use espalier_plan::device::{DeviceChoice, DeviceKind};
use espalier_plan::spec::Precision;
use espalier_tensor::cuda::{Cuda, Probe};
use espalier_tensor::{Device, Result};
use espalier_train::parallel::launched::ProcessGroup;

use crate::output::print_err;
use crate::setting::one_of;

/// Threads on a core, or on a few, beyond which they do nothing but wait for each other: a step of
/// microseconds takes seconds.
const MOST_ON_A_CORE: usize = 4;
const MOST_ON_FEW_CORES: usize = 64;

/// An argument that names a kind of device.
pub fn kind() -> impl TypedValueParser<Value = DeviceKind> {
    one_of(&[("auto", DeviceKind::Auto), ("cpu", DeviceKind::Cpu), ("cuda", DeviceKind::Cuda)])
}

/// An argument that names what weights are stored in.
pub fn precision() -> impl TypedValueParser<Value = Precision> {
    one_of(&[("f32", Precision::F32), ("bf16", Precision::Bf16)])
}

/// Threads of the processor for a run whose `device.threads` is this; 0 is all cores, `all`. The same run on
/// far fewer cores than it was written for gets fewer threads, and the same bits.
pub fn threads(asked: usize, all: usize) -> std::io::Result<usize> {
    let cores = std::thread::available_parallelism()?.get();
    let most = MOST_ON_FEW_CORES.max(MOST_ON_A_CORE * cores);
    if asked > most {
        print_err!(
            "note: device.threads is {asked}, and this machine has {cores} cores: {most} threads are started"
        );
    }
    Ok(if asked == 0 { all } else { asked.min(most) })
}

/// Opens what is asked for by so many ranks of this process, on all cores.
pub fn open_here(asked: &DeviceChoice, ranks: usize) -> anyhow::Result<Device> {
    let threads = threads(asked.threads, std::thread::available_parallelism()?.get())?;
    Ok(open(&shared(asked, ranks), threads).map_err(espalier_train::Error::Tensor)?)
}

/// What so many ranks of this process ask for: they share its processor, and where the choice is ours, that
/// is it.
pub fn shared(asked: &DeviceChoice, ranks: usize) -> DeviceChoice {
    let kind = if ranks > 1 && asked.kind == DeviceKind::Auto { DeviceKind::Cpu } else { asked.kind };
    DeviceChoice { kind, ..asked.clone() }
}

/// Opens what was asked for; `threads` are those of the processor. A choice that was left to us is said on
/// standard error where there was one.
pub fn open(asked: &DeviceChoice, threads: usize) -> Result<Device> {
    configure(choose(asked.kind, threads)?, asked)
}

/// Opens what a rank computes on that a launcher has started: its own GPU, or its part of the processor.
pub fn open_for(group: &ProcessGroup, asked: &DeviceChoice, threads: usize) -> Result<Device> {
    let device = match group.device_kind() {
        DeviceKind::Cuda => {
            let probe = Cuda::probe();
            probe.require()?;
            Device::cuda(group.gpu(probe.gpus.len()))?
        }
        DeviceKind::Cpu | DeviceKind::Auto => Device::cpu(threads)?,
    };
    configure(device, asked)
}

fn configure(device: Device, asked: &DeviceChoice) -> Result<Device> {
    if let Device::Cuda(gpu) = &device {
        gpu.allow_tf32_in_convolutions(asked.tf32);
    }
    Ok(device)
}

/// Opens a device of a kind, its settings as they are.
pub fn choose(kind: DeviceKind, threads: usize) -> Result<Device> {
    match kind {
        DeviceKind::Cpu => Device::cpu(threads),
        DeviceKind::Cuda => open_gpu(&Cuda::probe()),
        DeviceKind::Auto => {
            let probe = Cuda::probe();
            let Some(gpu) = probe.gpus.first() else { return Device::cpu(threads) };
            match open_gpu(&probe) {
                Ok(device) => {
                    print_err!("device: {gpu} (set device.kind = \"cpu\" for the CPU)");
                    Ok(device)
                }
                Err(why) => {
                    print_err!("device: CPU, although there is a GPU ({}): {why}", gpu.name);
                    Device::cpu(threads)
                }
            }
        }
    }
}

/// The first GPU, once all that it takes was found.
fn open_gpu(probe: &Probe) -> Result<Device> {
    probe.require()?;
    Device::cuda(0)
}

/// What a device is, in a few words.
pub fn describe(device: &Device) -> String {
    match device {
        Device::Cpu(cpu) => threads_in_words(cpu.threads()),
        Device::Cuda(cuda) => cuda.name().into(),
    }
}

/// The kind of device that would be opened, and what it is in a few words; a GPU need not be there.
pub fn plan(kind: DeviceKind, threads: usize) -> (&'static str, String) {
    match kind {
        DeviceKind::Cuda => {
            let found = Cuda::probe().gpus.first().map(|gpu| gpu.name.to_string());
            ("cuda", found.unwrap_or_else(|| "a GPU (none was found on this machine)".into()))
        }
        DeviceKind::Auto if Cuda::probe().usable() => plan(DeviceKind::Cuda, threads),
        DeviceKind::Auto | DeviceKind::Cpu => ("cpu", threads_in_words(threads)),
    }
}

fn threads_in_words(threads: usize) -> String {
    match threads {
        1 => "CPU (1 thread)".into(),
        threads => format!("CPU ({threads} threads)"),
    }
}
