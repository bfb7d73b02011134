//! What is loaded of the kernels' sources: modules, the functions and constants in them, once for all handles
//! of a GPU.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{
    self, CUdevice_attribute as Attribute, CUfunction, CUfunction_attribute as FunctionAttribute, CUmodule,
    CUresult,
};

use super::Cuda;
use super::compile::{Build, CompileTarget, KernelSource, compile_cached};
use super::status::{CheckStatus, destroyed_by};
use crate::error::Result;

/// Shared memory that any kernel gets without asking.
const PLAIN_SHARED: u32 = 48 << 10;

/// A function of a loaded module.
#[derive(Debug)]
pub(super) struct KernelFunction {
    pub name: &'static str,
    /// The name of its source, without the ending: what its time is summed under.
    pub family: &'static str,
    pub raw: CUfunction,
    /// Bytes of each parameter, where the driver can tell.
    pub sizes: Option<Vec<usize>>,
    /// The dynamic shared memory it may use now, and the most the GPU gives.
    shared: Mutex<u32>,
    most_shared: u32,
    _module: Arc<CudaModule>,
}

// SAFETY: the driver locks its functions; any thread may use one.
unsafe impl Send for KernelFunction {}
// SAFETY: as above.
unsafe impl Sync for KernelFunction {}

impl KernelFunction {
    fn load(
        cuda: &Cuda,
        module: &Arc<CudaModule>,
        source: &KernelSource,
        name: &'static str,
    ) -> Result<KernelFunction> {
        let c_name = CString::new(name).expect("a name without NUL");
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is loaded and the name ends in NUL; the driver writes the handle.
        let status = unsafe { sys::cuModuleGetFunction(&mut raw, module.0, c_name.as_ptr()) };
        assert_ne!(status, CUresult::CUDA_ERROR_NOT_FOUND, "no kernel is named {name}");
        status.check("looking a kernel up")?;
        Ok(KernelFunction {
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
    pub(crate) fn allow_shared(&self, bytes: u32) -> Result<()> {
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
                        "{}: {bytes} bytes, and the GPU gives a block at most {}: {why}",
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
struct CudaModule(CUmodule);

// SAFETY: as for functions.
unsafe impl Send for CudaModule {}
// SAFETY: as for functions.
unsafe impl Sync for CudaModule {}

impl CudaModule {
    fn load(image: &[u8]) -> Result<CudaModule> {
        // Portable code is text and must end in NUL; a NUL behind machine code does no harm.
        let image = [image, &[0]].concat();
        let mut module = std::ptr::null_mut();
        // SAFETY: a context is current; the image carries its own length or ends in NUL.
        unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) }.check("loading a kernel")?;
        Ok(CudaModule(module))
    }

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

destroyed_by!(CudaModule, sys::cuModuleUnload);

/// A source's name and how it was built.
type BuildKey = (&'static str, Build);
/// What is named in it.
type Symbol = (BuildKey, &'static str);

/// What a handle of a GPU has used, and all that was loaded for any handle of it.
#[derive(Debug, Default)]
pub(super) struct LoadedKernels {
    /// Its own list, so that threads with a handle each do not wait for one another at every launch.
    used: Mutex<HashMap<Symbol, Arc<KernelFunction>>>,
    of_gpu: Arc<GpuKernels>,
}

/// Kernels of a GPU in this process.
#[derive(Debug, Default)]
struct GpuKernels {
    functions: Mutex<HashMap<Symbol, Arc<KernelFunction>>>,
    constants: Mutex<HashMap<Symbol, Arc<[i32]>>>,
    modules: Mutex<HashMap<BuildKey, Arc<CudaModule>>>,
    target: Mutex<Option<CompileTarget>>,
}

impl LoadedKernels {
    /// The list of another handle of the same GPU.
    pub(super) fn beside(&self) -> LoadedKernels {
        LoadedKernels { used: Mutex::default(), of_gpu: self.of_gpu.clone() }
    }

    /// A kernel of a source, compiled and loaded where this is its first use.
    pub(super) fn function(
        &self,
        cuda: &Cuda,
        source: &KernelSource,
        build: Build,
        name: &'static str,
    ) -> Result<Arc<KernelFunction>> {
        let key = ((source.name, build), name);
        let known = self.used.lock().expect("no panic while locked").get(&key).cloned();
        if let Some(function) = known {
            return Ok(function);
        }
        let function = self.of_gpu.function(cuda, source, build, name)?;
        self.used.lock().expect("no panic while locked").insert(key, function.clone());
        Ok(function)
    }

    /// A `__constant__` array of a source, which says how its kernels want to be launched.
    pub(super) fn constant<const N: usize>(
        &self,
        cuda: &Cuda,
        source: &KernelSource,
        build: Build,
        name: &'static str,
    ) -> Result<[i32; N]> {
        self.of_gpu.constant(cuda, source, build, name)
    }
}

impl GpuKernels {
    /// Two handles must not have two of the same function: what one is allowed of shared memory the other
    /// would take back.
    fn function(
        &self,
        cuda: &Cuda,
        source: &KernelSource,
        build: Build,
        name: &'static str,
    ) -> Result<Arc<KernelFunction>> {
        let key = ((source.name, build), name);
        let mut functions = self.functions.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(function) = functions.get(&key) {
            return Ok(function.clone());
        }
        cuda.bind()?;
        let module = self.module(cuda, source, build)?;
        let function = Arc::new(KernelFunction::load(cuda, &module, source, name)?);
        functions.insert(key, function.clone());
        Ok(function)
    }

    fn constant<const N: usize>(
        &self,
        cuda: &Cuda,
        source: &KernelSource,
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

    fn module(&self, cuda: &Cuda, source: &KernelSource, build: Build) -> Result<Arc<CudaModule>> {
        // Held while compiling: two threads that want the same source compile it once.
        let mut modules = self.modules.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(module) = modules.get(&(source.name, build)) {
            return Ok(module.clone());
        }
        let target = {
            let mut target = self.target.lock().expect("no panic while locked");
            match *target {
                Some(target) => target,
                None => *target.insert(CompileTarget::best(cuda.gpu().capability)?),
            }
        };
        let module = Arc::new(CudaModule::load(&compile_cached(source, &build, target)?)?);
        modules.insert((source.name, build), module.clone());
        Ok(module)
    }
}
