//! NVIDIA's shared libraries, looked for when they are first needed.
//!
//! The driver comes with the GPU. NVRTC and cuBLASLt come with the toolkit, with a distribution's packages or
//! with Python wheels, cuDNN with the last two; the loader's own path finds what is installed for all, and the
//! folders listed here the rest. A library opened by its full path is afterwards found under its bare name, which
//! is how the bindings ask; cuDNN, of which we need few functions, is asked by its handle.

use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::{cublaslt, driver, nvrtc};

use super::status::CheckStatus;
use crate::error::{Error, Result};

/// Starts the driver, once.
pub(super) fn driver() -> Result<()> {
    static STARTED: OnceLock<Result<(), String>> = OnceLock::new();
    let started = STARTED.get_or_init(|| {
        // SAFETY: loads the library, if it is there, and unloads it again.
        if !unsafe { driver::sys::is_culib_present() } {
            return Err(
                "libcuda.so.1 was not found; install NVIDIA's driver, or set device.kind = \"cpu\"".into()
            );
        }
        // SAFETY: the driver is present; starting it more than once is allowed.
        unsafe { driver::sys::cuInit(0) }.check("starting the driver").map_err(|e| e.to_string())
    });
    started.clone().map_err(|why| Error::NoCuda { why })
}

/// Makes NVRTC loadable: the compiler of kernels.
pub fn nvrtc() -> Result<()> {
    static FOUND: OnceLock<Result<(), String>> = OnceLock::new();
    // SAFETY: loads the library, if it is there, and unloads it again.
    let present = || unsafe { nvrtc::sys::is_culib_present() };
    let found = FOUND.get_or_init(|| find("nvrtc", "ESPALIER_NVRTC", "nvidia-cuda-nvrtc", present));
    found.clone().map_err(|why| Error::NoCuda { why })
}

/// Makes cuBLASLt loadable: matrix products.
pub fn cublas_lt() -> Result<()> {
    static FOUND: OnceLock<Result<(), String>> = OnceLock::new();
    // SAFETY: as above.
    let present = || unsafe { cublaslt::sys::is_culib_present() };
    let found = FOUND.get_or_init(|| find("cublasLt", "ESPALIER_CUBLASLT", "nvidia-cublas", present));
    found.clone().map_err(|why| Error::NoCuda { why })
}

/// cuDNN 9, or why it is not used: convolutions. Only its part for graphs of operations is opened, since the file
/// `libcudnn.so.9` that stands for all parts ends the process where one is missing.
pub(super) fn cudnn() -> Result<Library, String> {
    static FOUND: OnceLock<Result<Library, String>> = OnceLock::new();
    FOUND.get_or_init(find_cudnn).clone()
}

fn find_cudnn() -> Result<Library, String> {
    const FILE: &str = "libcudnn_graph.so.9";
    if std::env::var_os("ESPALIER_NO_CUDNN").is_some_and(|value| !value.is_empty()) {
        return Err("it is switched off by ESPALIER_NO_CUDNN; check that this is meant".into());
    }
    if let Some(named) = std::env::var_os("ESPALIER_CUDNN") {
        let named = PathBuf::from(named);
        let file = if named.is_dir() { named.join(FILE) } else { named.with_file_name(FILE) };
        return Library::open(&file)
            .ok_or_else(|| format!("check ESPALIER_CUDNN: {} cannot be loaded", file.display()));
    }
    let files = || folders().into_iter().map(|folder| folder.join(FILE)).filter(|file| file.exists());
    Library::open(Path::new(FILE)).or_else(|| files().find_map(|file| Library::open(&file))).ok_or_else(|| {
        "libcudnn.so.9 was not found; install cuDNN 9 or the Python package nvidia-cudnn-cu13 (nvidia-cudnn-cu12 \
         for a driver of CUDA 12), and add its folder to LD_LIBRARY_PATH or name the file in ESPALIER_CUDNN"
            .into()
    })
}

fn find(name: &str, variable: &str, wheel: &str, present: impl Fn() -> bool) -> Result<(), String> {
    if let Some(file) = std::env::var_os(variable) {
        if Library::open(Path::new(&file)).is_none() {
            return Err(format!("{variable} names {}, which cannot be loaded", Path::new(&file).display()));
        }
    } else if !present() {
        let files = folders()
            .into_iter()
            .flat_map(|folder| ["13", "12"].map(|version| folder.join(format!("lib{name}.so.{version}"))));
        files.filter(|file| file.exists()).any(|file| Library::open(&file).is_some());
    }
    if present() {
        return Ok(());
    }
    Err(format!(
        "lib{name} was not found; install the CUDA toolkit (12 or 13) or the Python package {wheel}, and add \
         its folder to LD_LIBRARY_PATH or name the file in {variable}"
    ))
}

/// A library that stays open for as long as the process lives.
#[derive(Debug, Clone)]
pub(super) struct Library(*mut c_void);

// SAFETY: a handle of the loader's, which any thread may ask for symbols.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    fn open(file: &Path) -> Option<Library> {
        let path = CString::new(file.as_os_str().as_bytes()).ok()?;
        // SAFETY: a NUL-terminated path; the library's initialisers are NVIDIA's, as on every other way to
        // load it.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        (!handle.is_null()).then_some(Library(handle))
    }

    /// The address of a function, where the library has it.
    pub(super) fn function(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the handle is open and the name ends in NUL.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }
}

/// Where toolkits and Python wheels put their libraries, NCCL's among them.
pub fn folders() -> Vec<PathBuf> {
    let variables = |names: &[&str]| -> Vec<PathBuf> {
        names.iter().filter_map(std::env::var_os).map(PathBuf::from).collect()
    };
    let mut folders = Vec::new();
    let mut toolkits = variables(&["CUDA_HOME", "CUDA_PATH"]);
    toolkits.extend(["/usr/local/cuda", "/opt/cuda"].map(PathBuf::from));
    for toolkit in toolkits {
        folders.extend(["lib64", "lib", "targets/x86_64-linux/lib"].map(|lib| toolkit.join(lib)));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let pythons = std::env::split_paths(&path).filter(|folder| folder.join("python3").is_file());
    let mut environments = variables(&["VIRTUAL_ENV", "CONDA_PREFIX"]);
    environments.extend(pythons.filter_map(|folder| folder.parent().map(Path::to_owned)));
    for environment in environments {
        folders.push(environment.join("lib"));
        folders.extend(wheels(&environment));
    }
    folders
}

/// The folders of NVIDIA's wheels in a Python environment, which is where its `bin` stands.
fn wheels(environment: &Path) -> Vec<PathBuf> {
    const LIBRARIES: [&str; 5] = ["cu13/lib", "cuda_nvrtc/lib", "cublas/lib", "cudnn/lib", "nccl/lib"];
    let Ok(entries) = environment.join("lib").read_dir() else { return Vec::new() };
    let pythons = entries.flatten().filter(|e| e.file_name().as_bytes().starts_with(b"python3"));
    let mut pythons: Vec<PathBuf> = pythons.map(|e| e.path()).collect();
    pythons.sort();
    let packages = |python: PathBuf| ["site-packages", "dist-packages"].map(|name| python.join(name));
    let nvidia = pythons.into_iter().flat_map(packages).map(|packages| packages.join("nvidia"));
    nvidia.filter(|folder| folder.is_dir()).flat_map(|nvidia| LIBRARIES.map(|lib| nvidia.join(lib))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheels_are_looked_for_beside_the_interpreter() {
        let environment = std::env::temp_dir().join(format!("espalier-wheels-{}", std::process::id()));
        let nvidia = environment.join("lib/python3.12/site-packages/nvidia");
        assert_eq!(wheels(&environment), Vec::<PathBuf>::new());
        std::fs::create_dir_all(&nvidia).unwrap();
        std::fs::create_dir_all(environment.join("lib/python3.11/site-packages")).unwrap();
        let found = wheels(&environment);
        std::fs::remove_dir_all(&environment).unwrap();
        assert!(found.contains(&nvidia.join("cudnn/lib")) && found.contains(&nvidia.join("cu13/lib")));
        assert!(found.iter().all(|folder| folder.starts_with(&nvidia)), "{found:?}");
    }

    #[test]
    fn a_file_that_is_no_library_is_not_opened() {
        assert!(Library::open(Path::new("/dev/null")).is_none());
        assert!(Library::open(Path::new("libespalier-no-such-thing.so.9")).is_none());
    }
}
