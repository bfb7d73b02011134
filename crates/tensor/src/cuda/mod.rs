//! An NVIDIA GPU as a device: its streams, its memory, its kernels and its matrix products.
//!
//! The driver, NVRTC, cuBLASLt and cuDNN are looked for when they are first used, so the same program runs where
//! they are not. Work is queued on one compute stream and runs in that order; the host waits only where it reads a
//! result. Nothing here uses atomics or lets timing choose the arithmetic: the same run gives the same bits.
//!
//! - [`library`], [`probe`]: what the machine has;
//! - [`stream`], `staging`, [`buffer`], [`upload`], [`side_stream`]: order, copies, memory, and what is copied
//!   or computed ahead of its use;
//! - [`compile`], `loaded`, [`args`], [`kernel`], [`recording`]: from source to launch, and to many launches
//!   at once;
//! - [`blas`], [`dnn`]: matrix products, convolutions.

pub mod args;
pub mod blas;
pub mod buffer;
pub mod compile;
pub mod dnn;
pub mod kernel;
pub mod library;
mod loaded;
pub mod probe;
mod profile;
pub mod recording;
pub mod side_stream;
mod staging;
mod status;
pub mod stream;
pub mod upload;

use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdevice_attribute};

use crate::error::{Error, Result};
use crate::memory::{Category, Ledger};
pub use args::Args;
use blas::Blas;
use buffer::{CudaBuffer, CudaFreeBlocks};
pub use compile::{Build, KernelInclude, KernelSource};
use dnn::CudnnConvolutions;
pub use kernel::Kernel;
pub use probe::{Gpu, Probe};
pub use profile::KernelTime;
use profile::Profile;
pub use recording::CudaGraph;
use staging::Staging;
use status::CheckStatus;
use stream::{Event, Stream};
use upload::UploadBlocks;

/// A handle to a GPU; clones share its streams, its ledger, its memory and its kernels.
#[derive(Debug, Clone)]
pub struct Cuda(Arc<CudaShared>);

// Fields are dropped in this order: the context, in which all others live, goes last.
#[derive(Debug)]
struct CudaShared {
    blas: Mutex<Option<Blas>>,
    convolutions: Mutex<CudnnConvolutions>,
    loaded: loaded::LoadedKernels,
    staging: Mutex<Option<Staging>>,
    /// Of the copy stream.
    sending: Mutex<Option<Staging>>,
    profile: Profile,
    sent: UploadBlocks,
    free: CudaFreeBlocks,
    copy: Stream,
    side: Stream,
    compute: Stream,
    ledger: Ledger,
    host_ledger: Ledger,
    gpu: Gpu,
    context: CudaContext,
}

impl Cuda {
    /// What this machine has for CUDA. Never fails: what is missing is in the result.
    pub fn probe() -> Probe {
        Probe::new()
    }

    /// Opens a GPU by the driver's number for it.
    pub fn open(ordinal: usize) -> Result<Cuda> {
        let count = probe::count()?;
        if ordinal >= count {
            let word = if count == 1 { "GPU" } else { "GPUs" };
            return Err(Error::NoCuda {
                why: format!("GPU {ordinal} was asked for; there are {count} {word}"),
            });
        }
        Cuda::with_kernels(ordinal, loaded::LoadedKernels::default())
    }

    /// A handle of a GPU with streams and memory of its own.
    fn with_kernels(ordinal: usize, loaded: loaded::LoadedKernels) -> Result<Cuda> {
        let context = CudaContext::retain(ordinal)?;
        context.bind()?;
        Ok(Cuda(Arc::new(CudaShared {
            blas: Mutex::new(None),
            convolutions: Mutex::default(),
            loaded,
            staging: Mutex::new(None),
            sending: Mutex::new(None),
            profile: Profile::default(),
            sent: UploadBlocks::default(),
            free: CudaFreeBlocks::default(),
            copy: Stream::new()?,
            side: Stream::new()?,
            compute: Stream::new()?,
            ledger: Ledger::default(),
            host_ledger: Ledger::default(),
            gpu: Gpu::read(ordinal)?,
            context,
        })))
    }

    /// The same GPU as if it were another one, with the same settings: streams, ledger and memory of its own;
    /// kernels that one of the two has loaded both have. The two can read each other's memory; it is for
    /// whoever does so to put their streams in order.
    pub fn another(&self) -> Result<Cuda> {
        let other = Cuda::with_kernels(self.gpu().ordinal, self.0.loaded.beside())?;
        other.convolutions().as_in(&self.convolutions());
        let tf32 = self.0.blas.lock().unwrap_or_else(|e| e.into_inner()).as_ref().map(Blas::allows_tf32);
        if let Some(tf32) = tf32 {
            other.allow_tf32(tf32)?;
        }
        Ok(other)
    }

    pub fn gpu(&self) -> &Gpu {
        &self.0.gpu
    }

    /// NVIDIA's name for the GPU.
    pub fn name(&self) -> &str {
        &self.0.gpu.name
    }

    /// What its memory is taken for, by category.
    pub fn ledger(&self) -> &Ledger {
        &self.0.ledger
    }

    /// The host's memory that its work takes: copies of tensors that the host reads.
    pub fn host_ledger(&self) -> &Ledger {
        &self.0.host_ledger
    }

    /// Bytes taken from the driver: what the ledger counts, rounding, and freed blocks kept for reuse.
    pub fn held(&self) -> usize {
        self.0.free.held()
    }

    /// Bytes of the GPU that can still be taken, by whomever: what the driver says is free, and freed blocks
    /// kept for reuse.
    pub fn memory_left(&self) -> Result<usize> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the GPU's context is current; the driver writes the two numbers.
        unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }.check("asking for a GPU's free memory")?;
        Ok(free + self.held().saturating_sub(self.ledger().total()))
    }

    /// Gives the memory of freed buffers back to the driver.
    pub fn release_unused(&self) -> Result<()> {
        self.synchronize()?;
        self.0.sent.drain().into_iter().for_each(|block| self.0.free.give(block));
        self.0.free.clear();
        Ok(())
    }

    /// Waits until all queued work is done. What went wrong in it shows here.
    pub fn synchronize(&self) -> Result<()> {
        self.bind()?;
        self.compute().synchronize()?;
        self.0.side.synchronize()?;
        self.0.copy.synchronize()
    }

    /// The stream on which operations run.
    pub fn compute(&self) -> &Stream {
        &self.0.compute
    }

    /// The stream for transfers beside the compute stream; see [`Cuda::fork`] and [`Cuda::join`].
    pub fn copy(&self) -> &Stream {
        &self.0.copy
    }

    /// Lets later work of the copy stream wait for the compute stream's work so far.
    pub fn fork(&self) -> Result<()> {
        self.order(self.compute(), self.copy())
    }

    /// Lets later work of the compute stream wait for the copy stream's work so far.
    pub fn join(&self) -> Result<()> {
        self.order(self.copy(), self.compute())
    }

    fn order(&self, first: &Stream, then: &Stream) -> Result<()> {
        self.bind()?;
        let event = Event::new()?;
        event.record(first)?;
        then.wait(&event)
    }

    /// A block of memory counted under `category`; see [`CudaBuffer`].
    pub fn allocate(&self, bytes: usize, category: Category) -> Result<CudaBuffer> {
        CudaBuffer::new(self, bytes, category)
    }

    /// A kernel of a source, compiled and loaded where this is its first use.
    pub fn kernel(&self, source: &KernelSource, build: Build, name: &'static str) -> Result<Kernel> {
        Ok(Kernel::new(self, self.0.loaded.function(self, source, build, name)?))
    }

    /// A `__constant__ int` array of a source: what its kernels say of their launch.
    pub fn constant<const N: usize>(
        &self,
        source: &KernelSource,
        build: Build,
        name: &'static str,
    ) -> Result<[i32; N]> {
        self.0.loaded.constant(self, source, build, name)
    }

    /// Whether a kernel can begin while the one before it ends, and blocks of it share memory: from compute
    /// capability 9.0 on.
    pub(crate) fn overlaps_kernels(&self) -> bool {
        self.gpu().capability >= 90
    }

    /// A limit of the GPU.
    pub(crate) fn attribute(&self, attribute: CUdevice_attribute) -> Result<u32> {
        probe::attribute(self.0.context.device, attribute)
    }

    /// Whether the two are handles of one device.
    pub fn is(&self, other: &Cuda) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Makes the GPU current on this thread. Every call of the driver needs it.
    pub fn bind(&self) -> Result<()> {
        self.0.context.bind()
    }

    fn profile(&self) -> &Profile {
        &self.0.profile
    }

    fn free_blocks(&self) -> &CudaFreeBlocks {
        &self.0.free
    }

    fn sent_blocks(&self) -> &UploadBlocks {
        &self.0.sent
    }

    /// Copies in the order of the compute stream.
    fn with_staging<R>(&self, work: impl FnOnce(&mut Staging, &Stream) -> Result<R>) -> Result<R> {
        self.bind()?;
        self.is_not_recording("copying between host and GPU")?;
        Staging::with(&self.0.staging, |staging| work(staging, self.compute()))
    }

    /// Copies in the order of the copy stream, through slots of its own: whoever waits for the one does not
    /// hold up the other.
    fn with_sending<R>(&self, work: impl FnOnce(&mut Staging, &Stream) -> Result<R>) -> Result<R> {
        self.bind()?;
        Staging::with(&self.0.sending, |staging| work(staging, self.copy()))
    }

    /// Works with the GPU's cuBLASLt, one thread at a time.
    pub(crate) fn with_blas<R>(&self, work: impl FnOnce(&mut Blas) -> Result<R>) -> Result<R> {
        self.bind()?;
        let mut blas = self.0.blas.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if blas.is_none() {
            *blas = Some(Blas::new(self)?);
        }
        work(blas.as_mut().expect("just made"))
    }
}

impl Drop for CudaShared {
    fn drop(&mut self) {
        // What is dropped after this frees what the GPU may still be using, in this context.
        if self.context.bind().is_ok() {
            let _ = self.compute.synchronize();
            let _ = self.side.synchronize();
            let _ = self.copy.synchronize();
        }
    }
}

/// The newest CUDA that the driver serves: 12040 for 12.4.
fn driver_version() -> Result<u32> {
    let mut version = 0;
    // SAFETY: callers have started the driver; it writes a number.
    unsafe { sys::cuDriverGetVersion(&mut version) }.check("asking the driver for its version")?;
    Ok(version as u32)
}

/// The GPU's primary context, the one that all libraries of a process share.
#[derive(Debug)]
struct CudaContext {
    raw: CUcontext,
    device: CUdevice,
}

// SAFETY: the driver locks its contexts; any thread may make one current.
unsafe impl Send for CudaContext {}
// SAFETY: as above.
unsafe impl Sync for CudaContext {}

impl CudaContext {
    fn retain(ordinal: usize) -> Result<CudaContext> {
        let device = probe::device(ordinal)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the device is valid; the driver writes the handle.
        unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) }.check("opening a GPU")?;
        Ok(CudaContext { raw, device })
    }

    fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained as long as `self` lives.
        unsafe { sys::cuCtxSetCurrent(self.raw) }.check("switching to a GPU")
    }
}

impl Drop for CudaContext {
    fn drop(&mut self) {
        // SAFETY: retained by `retain`, released once.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}
