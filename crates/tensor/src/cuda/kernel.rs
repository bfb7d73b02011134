//! Kernels and their launch.
//!
//! The compiler of kernels and the compiler of this crate do not see each other, so an argument of the wrong
//! size would be read as garbage. Where the driver can tell (CUDA 12.4 and later), a launch compares the number
//! and sizes of its arguments with what the kernel declares.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUlaunchAttribute, CUlaunchAttributeID as AttributeId, CUlaunchAttributeValue as AttributeValue,
    CUlaunchAttributeValue_union__bindgen_ty_1 as ClusterSize, CUlaunchConfig, CUresult,
};

use super::Cuda;
use super::args::Args;
use super::loaded::KernelFunction;
use super::status::CheckStatus;
use super::stream::Stream;
use crate::error::Result;

/// Extents of a grid (in blocks) or of a block (in threads).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dim3(pub u32, pub u32, pub u32);

impl From<u32> for Dim3 {
    fn from(x: u32) -> Dim3 {
        Dim3(x, 1, 1)
    }
}
impl From<(u32, u32)> for Dim3 {
    fn from((x, y): (u32, u32)) -> Dim3 {
        Dim3(x, y, 1)
    }
}
impl From<(u32, u32, u32)> for Dim3 {
    fn from((x, y, z): (u32, u32, u32)) -> Dim3 {
        Dim3(x, y, z)
    }
}

/// A kernel, ready to run on its GPU.
#[derive(Debug, Clone)]
pub struct Kernel {
    // Before the GPU: a function is gone before its context is.
    function: Arc<KernelFunction>,
    cuda: Cuda,
}

impl Kernel {
    pub(super) fn new(cuda: &Cuda, function: Arc<KernelFunction>) -> Kernel {
        Kernel { function, cuda: cuda.clone() }
    }

    /// Queues the kernel on the compute stream. `shared` is its dynamic shared memory in bytes.
    ///
    /// # Safety
    /// The arguments are, in order and type, what the kernel declares, and with these sizes it stays within
    /// the tensors it is given.
    ///
    /// # Panics
    /// Where the arguments differ from the kernel's in number or size, or belong to another GPU.
    pub unsafe fn launch(
        &self,
        grid: impl Into<Dim3>,
        block: impl Into<Dim3>,
        shared: u32,
        args: Args<'_>,
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.launch_on(self.cuda.compute(), grid, block, shared, args) }
    }

    /// Queues the kernel on a stream of its GPU.
    ///
    /// # Safety
    /// As for [`Kernel::launch`], and the streams that use the tensors are in order.
    pub(crate) unsafe fn launch_on(
        &self,
        stream: &Stream,
        grid: impl Into<Dim3>,
        block: impl Into<Dim3>,
        shared: u32,
        args: Args<'_>,
    ) -> Result<()> {
        let (grid, block) = (grid.into(), block.into());
        // SAFETY: the function is loaded; the driver copies each argument before it returns.
        let queue = |pointers: *mut *mut c_void| unsafe {
            sys::cuLaunchKernel(
                self.function.raw,
                grid.0,
                grid.1,
                grid.2,
                block.0,
                block.1,
                block.2,
                shared,
                stream.raw(),
                pointers,
                std::ptr::null_mut(),
            )
        };
        self.queue(stream, grid, shared, args, queue)
    }

    /// Queues a kernel that waits by itself for the work before it (`wait_for_work_before` in the prelude):
    /// where the GPU can (from compute capability 9.0 on), its blocks begin while that work ends, and read
    /// what does not depend on it. `cluster` blocks, neighbours along y, run at the same time and read each
    /// other's shared memory; a GPU that cannot takes 1 alone.
    ///
    /// # Safety
    /// As for [`Kernel::launch`], and the kernel does wait before it reads or writes what earlier work may
    /// write or read.
    pub(crate) unsafe fn launch_early(
        &self,
        grid: impl Into<Dim3>,
        block: impl Into<Dim3>,
        cluster: u32,
        args: Args<'_>,
    ) -> Result<()> {
        let (grid, block) = (grid.into(), block.into());
        if !self.cuda.overlaps_kernels() {
            assert_eq!(cluster, 1, "blocks that share memory, on a GPU that has no such blocks");
            // SAFETY: the caller's.
            return unsafe { self.launch(grid, block, 0, args) };
        }
        let attribute = |id, value| CUlaunchAttribute { id, pad: [0; 4], value };
        let size = ClusterSize { x: 1, y: cluster, z: 1 };
        let mut attributes = [
            attribute(
                AttributeId::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                AttributeValue { programmaticStreamSerializationAllowed: 1 },
            ),
            attribute(
                AttributeId::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                AttributeValue { clusterDim: size },
            ),
        ];
        let config = CUlaunchConfig {
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: grid.2,
            blockDimX: block.0,
            blockDimY: block.1,
            blockDimZ: block.2,
            sharedMemBytes: 0,
            hStream: self.cuda.compute().raw(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        // SAFETY: as in `launch`; the driver reads the attributes before it returns.
        let queue = |pointers: *mut *mut c_void| unsafe {
            sys::cuLaunchKernelEx(&config, self.function.raw, pointers, std::ptr::null_mut())
        };
        self.queue(self.cuda.compute(), grid, 0, args, queue)
    }

    /// Checks the arguments, lays them out for the driver and times what `queue` does with them.
    fn queue(
        &self,
        stream: &Stream,
        grid: Dim3,
        shared: u32,
        args: Args<'_>,
        queue: impl FnOnce(*mut *mut c_void) -> CUresult,
    ) -> Result<()> {
        if grid.0 == 0 || grid.1 == 0 || grid.2 == 0 {
            return Ok(());
        }
        let KernelFunction { name, sizes, family, .. } = &*self.function;
        args.match_kernel(&self.cuda, name, sizes.as_deref());
        self.cuda.bind()?;
        self.function.allow_shared(shared)?;
        let timer = self.cuda.time_on(stream, family, 0.0)?;
        args.with_pointers(queue).check("launching a kernel")?;
        timer.end()
    }
}
