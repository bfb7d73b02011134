//! Result codes of the driver and the libraries as [`Error`]s.

use std::ffi::CStr;

use cudarc::cublaslt::sys::cublasStatus_t;
use cudarc::driver::sys::{self as driver, CUresult};
use cudarc::nvrtc::sys::nvrtcResult;

use crate::error::{Error, Result};

/// Destroys the handle that a type has of the driver's or of a library's when it is dropped.
macro_rules! destroyed_by {
    ($owner:ty, $destroy:path) => {
        impl Drop for $owner {
            fn drop(&mut self) {
                // SAFETY: its maker got the handle from the library, and it is destroyed nowhere else. At the
                // process's end the driver may be gone: no matter.
                let _ = unsafe { $destroy(self.0) };
            }
        }
    };
}
pub(super) use destroyed_by;

/// A result code; `doing` names what was tried.
pub(super) trait CheckStatus {
    fn check(self, doing: &'static str) -> Result<()>;
}

impl CheckStatus for CUresult {
    fn check(self, doing: &'static str) -> Result<()> {
        if self == CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: a code came back, so the driver is loaded; it hands out a static string, or leaves null.
        let why = unsafe {
            match driver::cuGetErrorString(self, &mut text) {
                CUresult::CUDA_SUCCESS if !text.is_null() => {
                    CStr::from_ptr(text).to_string_lossy().into_owned()
                }
                _ => "an unknown error".to_owned(),
            }
        };
        Err(Error::Cuda { doing, why: format!("{why} ({self:?})") })
    }
}

impl CheckStatus for nvrtcResult {
    fn check(self, doing: &'static str) -> Result<()> {
        match self {
            nvrtcResult::NVRTC_SUCCESS => Ok(()),
            _ => Err(Error::Cuda { doing, why: format!("{self:?}") }),
        }
    }
}

impl CheckStatus for cublasStatus_t {
    fn check(self, doing: &'static str) -> Result<()> {
        match self {
            cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
            _ => Err(Error::Cuda { doing, why: format!("{self:?}") }),
        }
    }
}
