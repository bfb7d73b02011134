//! What a machine has for CUDA, and what to do where something is missing.

use std::ffi::CStr;
use std::fmt;

use cudarc::cublaslt;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::status::CheckStatus;
use super::{compile, library};
use crate::error::{Error, Result};

/// What the driver says of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// The driver's number for it.
    pub ordinal: usize,
    /// NVIDIA's name for it.
    pub name: String,
    /// Bytes of its memory.
    pub memory: usize,
    /// Its compute capability: 90 for 9.0.
    pub capability: u32,
    /// How many multiprocessors it has.
    pub multiprocessors: u32,
}

impl Gpu {
    pub(super) fn read(ordinal: usize) -> Result<Gpu> {
        let device = device(ordinal)?;
        let mut name = [0u8; 256];
        let mut memory = 0;
        // SAFETY: the driver is started and the device valid; it writes at most the 256 bytes, ended by NUL.
        unsafe {
            sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device)
                .check("reading a GPU's name")?;
            sys::cuDeviceTotalMem_v2(&mut memory, device).check("reading a GPU's memory")?;
        }
        let name = CStr::from_bytes_until_nul(&name).map(|n| n.to_string_lossy().into_owned());
        let major = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok(Gpu {
            ordinal,
            name: name.unwrap_or_default(),
            memory,
            capability: major * 10 + minor,
            multiprocessors: attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        })
    }
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = self.memory as f64 / (1u64 << 30) as f64;
        let (major, minor) = (self.capability / 10, self.capability % 10);
        write!(f, "{}, {gib:.0} GiB, compute capability {major}.{minor}", self.name)
    }
}

pub(super) fn device(ordinal: usize) -> Result<sys::CUdevice> {
    let mut device = 0;
    // SAFETY: the driver is started; it writes a number.
    unsafe { sys::cuDeviceGet(&mut device, i32::try_from(ordinal).unwrap_or(i32::MAX)) }
        .check("opening a GPU")?;
    Ok(device)
}

pub(super) fn attribute(device: sys::CUdevice, attribute: Attribute) -> Result<u32> {
    let mut value = 0;
    // SAFETY: the driver is started and the device valid; it writes a number.
    unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) }.check("asking a GPU for a limit")?;
    Ok(value as u32)
}

/// How many GPUs there are.
pub(super) fn count() -> Result<usize> {
    library::driver()?;
    let mut count = 0;
    // SAFETY: the driver is started; it writes a number.
    unsafe { sys::cuDeviceGetCount(&mut count) }.check("counting the GPUs")?;
    Ok(count as usize)
}

/// The libraries and GPUs that were found on this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Probe {
    /// The newest CUDA that the driver serves, such as (13, 0).
    pub driver: Option<(u32, u32)>,
    pub gpus: Vec<Gpu>,
    pub nvrtc: Option<(u32, u32)>,
    /// cuBLASLt's version, as it numbers itself.
    pub cublas_lt: Option<usize>,
    /// A sentence for each thing that is missing, with what to do.
    pub missing: Vec<String>,
}

impl Probe {
    /// Whether training can run on a GPU here.
    pub fn usable(&self) -> bool {
        self.missing.is_empty()
    }

    pub(super) fn new() -> Probe {
        let mut probe = Probe::default();
        if let Err(e) = probe.look_for_gpus() {
            probe.missing.push(sentence(e));
        }
        match compile::version() {
            Ok(version) => probe.nvrtc = Some(version),
            Err(e) => probe.missing.push(sentence(e)),
        }
        match library::cublas_lt() {
            // SAFETY: the library is loaded.
            Ok(()) => probe.cublas_lt = Some(unsafe { cublaslt::sys::cublasLtGetVersion() }),
            Err(e) => probe.missing.push(sentence(e)),
        }
        probe
    }

    /// What is missing as one error, where something is.
    pub fn require(&self) -> Result<()> {
        match self.usable() {
            true => Ok(()),
            false => Err(Error::NoCuda { why: self.missing.join("; also, ") }),
        }
    }

    fn look_for_gpus(&mut self) -> Result<()> {
        library::driver()?;
        let version = super::driver_version()?;
        self.driver = Some((version / 1000, version % 1000 / 10));
        self.gpus = (0..count()?).map(Gpu::read).collect::<Result<_>>()?;
        if self.gpus.is_empty() {
            self.missing.push(
                "the driver sees no GPU; check nvidia-smi, and that CUDA_VISIBLE_DEVICES hides none".into(),
            );
        }
        Ok(())
    }
}

/// The sentence without what every such error starts with.
fn sentence(error: Error) -> String {
    match error {
        Error::NoCuda { why } => why,
        other => other.to_string(),
    }
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = |v: Option<(u32, u32)>| match v {
            Some((major, minor)) => format!("{major}.{minor}"),
            None => "not found".to_owned(),
        };
        writeln!(f, "CUDA driver  {}", version(self.driver))?;
        for gpu in &self.gpus {
            writeln!(f, "GPU {}       {gpu}", gpu.ordinal)?;
        }
        writeln!(f, "NVRTC        {}", version(self.nvrtc))?;
        match self.cublas_lt {
            Some(version) => writeln!(f, "cuBLASLt     {version}")?,
            None => writeln!(f, "cuBLASLt     not found")?,
        }
        for sentence in &self.missing {
            writeln!(f, "{sentence}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_cuda_is_told_what_to_do_and_nothing_panics() {
        let probe = Probe::new();
        assert_eq!(probe.usable(), probe.missing.is_empty());
        assert_eq!(probe.driver.is_none(), super::super::Cuda::open(0).is_err() && probe.gpus.is_empty());
        for sentence in &probe.missing {
            assert!(sentence.contains("install") || sentence.contains("check"), "{sentence}");
        }
    }
}
