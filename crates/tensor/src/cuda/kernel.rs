//! Loaded kernels and their launch.
//!
//! The compiler of kernels and the compiler of this crate do not see each other, so an argument of the wrong
//! size would be read as garbage. Where the driver can tell (CUDA 12.4 and later), a launch compares the number
//! and sizes of its arguments with what the kernel declares.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{
    self, CUdevice_attribute as Attribute, CUfunction, CUfunction_attribute as FunctionAttribute,
    CUlaunchAttribute, CUlaunchAttributeID as AttributeId, CUlaunchAttributeValue as AttributeValue,
    CUlaunchAttributeValue_union__bindgen_ty_1 as ClusterSize, CUlaunchConfig, CUmodule, CUresult,
};

use super::Cuda;
use super::args::Args;
use super::compile::{Build, Source, Target, compile_cached};
use super::status::Status;
use crate::error::Result;

/// Shared memory that any kernel gets without asking.
const PLAIN_SHARED: u32 = 48 << 10;

/// Extents of a grid (in blocks) or of a block (in threads).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent(pub u32, pub u32, pub u32);

impl From<u32> for Extent {
    fn from(x: u32) -> Extent {
        Extent(x, 1, 1)
    }
}
impl From<(u32, u32)> for Extent {
    fn from((x, y): (u32, u32)) -> Extent {
        Extent(x, y, 1)
    }
}
impl From<(u32, u32, u32)> for Extent {
    fn from((x, y, z): (u32, u32, u32)) -> Extent {
        Extent(x, y, z)
    }
}

/// A kernel, ready to run on its card.
#[derive(Debug, Clone)]
pub struct Kernel {
    // Before the card: a function is gone before its context is.
    function: Arc<Function>,
    cuda: Cuda,
}

impl Kernel {
    /// Queues the kernel on the compute stream. `shared` is its dynamic shared memory in bytes.
    ///
    /// # Safety
    /// The arguments are, in order and type, what the kernel declares, and with these sizes it stays within
    /// the tensors it is given.
    ///
    /// # Panics
    /// Where the arguments differ from the kernel's in number or size, or belong to another card.
    pub unsafe fn launch(
        &self,
        grid: impl Into<Extent>,
        block: impl Into<Extent>,
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
                self.cuda.compute().raw(),
                pointers,
                std::ptr::null_mut(),
            )
        };
        self.queue(grid, shared, args, queue)
    }

    /// Queues a kernel that waits by itself for the work before it (`wait_for_work_before` in the prelude): where the card can
    /// (from compute capability 9.0 on), its blocks begin while that work ends, and read what does not depend on it. `cluster` blocks, neighbours along y, run
    /// at the same time and read each other's shared memory; a card that cannot takes 1 alone.
    ///
    /// # Safety
    /// As for [`Kernel::launch`], and the kernel does wait before it reads or writes what earlier work may write or read.
    pub unsafe fn launch_early(
        &self,
        grid: impl Into<Extent>,
        block: impl Into<Extent>,
        cluster: u32,
        args: Args<'_>,
    ) -> Result<()> {
        let (grid, block) = (grid.into(), block.into());
        if !self.cuda.overlaps_kernels() {
            assert_eq!(cluster, 1, "blocks that share memory, on a card that has no such blocks");
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
        self.queue(grid, 0, args, queue)
    }

    /// Checks the arguments, lays them out for the driver and times what `queue` does with them.
    fn queue(
        &self,
        grid: Extent,
        shared: u32,
        args: Args<'_>,
        queue: impl FnOnce(*mut *mut c_void) -> CUresult,
    ) -> Result<()> {
        if grid.0 == 0 || grid.1 == 0 || grid.2 == 0 {
            return Ok(());
        }
        let Function { name, sizes, family, .. } = &*self.function;
        args.match_kernel(&self.cuda, name, sizes.as_deref());
        self.cuda.bind()?;
        self.function.allow_shared(shared)?;
        let timer = self.cuda.time(family, 0.0)?;
        args.with_pointers(queue).check("launching a kernel")?;
        timer.end()
    }
}

/// A function of a loaded module.
#[derive(Debug)]
struct Function {
    name: &'static str,
    /// The name of its source, without the ending: what its time is summed under.
    family: &'static str,
    raw: CUfunction,
    /// Bytes of each parameter, where the driver can tell.
    sizes: Option<Vec<usize>>,
    /// The dynamic shared memory it may use now, and the most the card gives.
    shared: Mutex<u32>,
    most_shared: u32,
    _module: Arc<Module>,
}

// SAFETY: the driver locks its functions; any thread may use one.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    fn load(cuda: &Cuda, module: &Arc<Module>, source: &Source, name: &'static str) -> Result<Function> {
        let c_name = CString::new(name).expect("a name without NUL");
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is loaded and the name ends in NUL; the driver writes the handle.
        let status = unsafe { sys::cuModuleGetFunction(&mut raw, module.0, c_name.as_ptr()) };
        assert_ne!(status, CUresult::CUDA_ERROR_NOT_FOUND, "no kernel is named {name}");
        status.check("looking a kernel up")?;
        Ok(Function {
            name,
            family: source.name.strip_suffix(".cu").unwrap_or(source.name),
            raw,
            sizes: parameter_sizes(raw)?,
            shared: Mutex::new(PLAIN_SHARED),
            most_shared: cuda.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            _module: module.clone(),
        })
    }

    /// A kernel gets more than 48 KiB only after asking.
    fn allow_shared(&self, bytes: u32) -> Result<()> {
        let mut shared = self.shared.lock().expect("no panic while locked");
        if bytes <= *shared {
            return Ok(());
        }
        let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded.
        unsafe { sys::cuFuncSetAttribute(self.raw, attribute, bytes as i32) }
            .check("asking for shared memory")
            .map_err(|e| match e {
                crate::Error::Cuda { doing, why } => crate::Error::Cuda {
                    doing,
                    why: format!(
                        "{}: {bytes} bytes, and the card gives a block at most {}: {why}",
                        self.name, self.most_shared
                    ),
                },
                other => other,
            })?;
        *shared = bytes;
        Ok(())
    }
}

/// Bytes of each of a function's parameters; `None` where the driver is too old to tell.
fn parameter_sizes(function: CUfunction) -> Result<Option<Vec<usize>>> {
    if super::driver_version()? < 12040 {
        return Ok(None);
    }
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function is loaded; the driver writes two numbers, or says that there is no such parameter.
        match unsafe { sys::cuFuncGetParamInfo(function, sizes.len(), &mut offset, &mut size) } {
            CUresult::CUDA_SUCCESS => sizes.push(size),
            _ => return Ok(Some(sizes)),
        }
    }
}

/// A loaded image.
#[derive(Debug)]
struct Module(CUmodule);

// SAFETY: as for functions.
unsafe impl Send for Module {}
// SAFETY: as for functions.
unsafe impl Sync for Module {}

impl Module {
    fn load(image: &[u8]) -> Result<Module> {
        // Portable code is text and must end in NUL; a NUL behind machine code does no harm.
        let image = [image, &[0]].concat();
        let mut module = std::ptr::null_mut();
        // SAFETY: a context is current; the image carries its own length or ends in NUL.
        unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) }.check("loading a kernel")?;
        Ok(Module(module))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded by `load`, unloaded once.
        let _ = unsafe { sys::cuModuleUnload(self.0) };
    }
}

impl Module {
    /// A `__constant__` array of the module, copied to the host.
    fn constant<const N: usize>(&self, name: &'static str) -> Result<[i32; N]> {
        let c_name = CString::new(name).expect("a name without NUL");
        let (mut address, mut bytes) = (0, 0);
        let mut values = [0i32; N];
        // SAFETY: the module is loaded and the name ends in NUL; the driver writes an address and a size.
        unsafe { sys::cuModuleGetGlobal_v2(&mut address, &mut bytes, self.0, c_name.as_ptr()) }
            .check("looking a constant up")?;
        assert_eq!(bytes, size_of_val(&values), "the bytes of {name}");
        // SAFETY: the constant has as many bytes as the array, checked above; the copy waits.
        unsafe { sys::cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), address, bytes) }
            .check("reading a constant")?;
        Ok(values)
    }
}

/// A source's name and how it was built.
type Built = (&'static str, Build);
/// What is named in it.
type Symbol = (Built, &'static str);

/// What a handle of a card has used, and all that was loaded for any handle of it.
#[derive(Debug, Default)]
pub(super) struct Loaded {
    /// Its own list, so that threads with a handle each do not wait for one another at every launch.
    used: Mutex<HashMap<Symbol, Arc<Function>>>,
    of_card: Arc<OfCard>,
}

/// Kernels of a card in this process.
#[derive(Debug, Default)]
struct OfCard {
    functions: Mutex<HashMap<Symbol, Arc<Function>>>,
    constants: Mutex<HashMap<Symbol, Arc<[i32]>>>,
    modules: Mutex<HashMap<Built, Arc<Module>>>,
    target: Mutex<Option<Target>>,
}

impl Loaded {
    /// The list of another handle of the same card.
    pub(super) fn beside(&self) -> Loaded {
        Loaded { used: Mutex::default(), of_card: self.of_card.clone() }
    }

    /// A kernel of a source, compiled and loaded where this is its first use.
    pub(super) fn kernel(
        &self,
        cuda: &Cuda,
        source: &Source,
        build: Build,
        name: &'static str,
    ) -> Result<Kernel> {
        let key = ((source.name, build), name);
        let known = self.used.lock().expect("no panic while locked").get(&key).cloned();
        let function = match known {
            Some(function) => function,
            None => {
                let function = self.of_card.function(cuda, source, build, name)?;
                self.used.lock().expect("no panic while locked").insert(key, function.clone());
                function
            }
        };
        Ok(Kernel { cuda: cuda.clone(), function })
    }

    /// A `__constant__` array of a source, which says how its kernels want to be launched.
    pub(super) fn constant<const N: usize>(
        &self,
        cuda: &Cuda,
        source: &Source,
        build: Build,
        name: &'static str,
    ) -> Result<[i32; N]> {
        self.of_card.constant(cuda, source, build, name)
    }
}

impl OfCard {
    /// Two handles must not have two of the same function: what one is allowed of shared memory the other would take back.
    fn function(
        &self,
        cuda: &Cuda,
        source: &Source,
        build: Build,
        name: &'static str,
    ) -> Result<Arc<Function>> {
        let key = ((source.name, build), name);
        let mut functions = self.functions.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(function) = functions.get(&key) {
            return Ok(function.clone());
        }
        cuda.bind()?;
        let module = self.module(cuda, source, build)?;
        let function = Arc::new(Function::load(cuda, &module, source, name)?);
        functions.insert(key, function.clone());
        Ok(function)
    }

    fn constant<const N: usize>(
        &self,
        cuda: &Cuda,
        source: &Source,
        build: Build,
        name: &'static str,
    ) -> Result<[i32; N]> {
        let key = ((source.name, build), name);
        let known = self.constants.lock().expect("no panic while locked").get(&key).cloned();
        if let Some(known) = known {
            return Ok(known[..].try_into().expect("a constant is always read with its own length"));
        }
        cuda.bind()?;
        let values = self.module(cuda, source, build)?.constant::<N>(name)?;
        self.constants.lock().expect("no panic while locked").insert(key, values.into());
        Ok(values)
    }

    fn module(&self, cuda: &Cuda, source: &Source, build: Build) -> Result<Arc<Module>> {
        // Held while compiling: two threads that want the same source compile it once.
        let mut modules = self.modules.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(module) = modules.get(&(source.name, build)) {
            return Ok(module.clone());
        }
        let target = {
            let mut target = self.target.lock().expect("no panic while locked");
            match *target {
                Some(target) => target,
                None => *target.insert(Target::best(cuda.gpu().capability)?),
            }
        };
        let module = Arc::new(Module::load(&compile_cached(source, &build, target)?)?);
        modules.insert((source.name, build), module.clone());
        Ok(module)
    }
}
