//! NVIDIA's shared libraries, looked for when they are first needed.
//!
//! The driver comes with the card. NVRTC and cuBLASLt come with the toolkit, with a distribution's packages or
//! with Python wheels; the loader's own path finds the first two kinds, and the folders listed here the rest.
//! A library opened by its full path is afterwards found under its bare name, which is how the bindings ask.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::{cublaslt, driver, nvrtc};

use super::status::Status;
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

fn find(name: &str, variable: &str, wheel: &str, present: impl Fn() -> bool) -> Result<(), String> {
    if let Some(file) = std::env::var_os(variable) {
        if !open(Path::new(&file)) {
            return Err(format!("{variable} names {}, which cannot be loaded", Path::new(&file).display()));
        }
    } else if !present() {
        let files = folders()
            .into_iter()
            .flat_map(|folder| ["13", "12"].map(|version| folder.join(format!("lib{name}.so.{version}"))));
        files.filter(|file| file.exists()).any(|file| open(&file));
    }
    if present() {
        return Ok(());
    }
    Err(format!(
        "lib{name} was not found; install the CUDA toolkit (12 or 13) or the Python package {wheel}, and add \
         its folder to LD_LIBRARY_PATH or name the file in {variable}"
    ))
}

/// Opens a library for as long as the process lives.
fn open(file: &Path) -> bool {
    let Ok(path) = CString::new(file.as_os_str().as_bytes()) else { return false };
    // SAFETY: a NUL-terminated path; the library's initialisers are NVIDIA's, as on every other way to load it.
    !unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) }.is_null()
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
    for environment in variables(&["VIRTUAL_ENV", "CONDA_PREFIX"]) {
        folders.push(environment.join("lib"));
        let Ok(pythons) = environment.join("lib").read_dir() else { continue };
        for python in pythons.flatten().filter(|e| e.file_name().as_bytes().starts_with(b"python3")) {
            let nvidia = python.path().join("site-packages/nvidia");
            folders
                .extend(["cu13/lib", "cuda_nvrtc/lib", "cublas/lib", "nccl/lib"].map(|lib| nvidia.join(lib)));
        }
    }
    folders
}
