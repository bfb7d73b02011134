//! NCCL itself, opened when it is first asked for.
//!
//! Not by way of cudarc: that looks for `libnccl.so` and for endings of CUDA's versions, but NVIDIA's
//! packages and Python wheels only have `libnccl.so.2`. What is used of NCCL has not changed since 2.10, the
//! first with bf16.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

use cudarc::driver::sys::{CUdeviceptr, CUstream};
use espalier_tensor::cuda::library::folders;
use libloading::Library;

use crate::call::Reduce;
use crate::data::ElementType;
use crate::error::{Error, Result};

/// NCCL's handle of a communicator.
pub(super) type NcclComm = *mut c_void;

/// What the ranks of a new communicator must know of each other.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub(super) [c_char; 128]);

/// The functions of NCCL that are used, as `nccl.h` declares them.
pub(super) struct Nccl {
    get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    pub(super) get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    pub(super) comm_init_rank: unsafe extern "C" fn(*mut NcclComm, c_int, UniqueId, c_int) -> c_int,
    pub(super) comm_get_async_error: unsafe extern "C" fn(NcclComm, *mut c_int) -> c_int,
    pub(super) all_reduce:
        unsafe extern "C" fn(CUdeviceptr, CUdeviceptr, usize, c_int, c_int, NcclComm, CUstream) -> c_int,
    pub(super) reduce_scatter:
        unsafe extern "C" fn(CUdeviceptr, CUdeviceptr, usize, c_int, c_int, NcclComm, CUstream) -> c_int,
    pub(super) all_gather:
        unsafe extern "C" fn(CUdeviceptr, CUdeviceptr, usize, c_int, NcclComm, CUstream) -> c_int,
    pub(super) broadcast:
        unsafe extern "C" fn(CUdeviceptr, CUdeviceptr, usize, c_int, c_int, NcclComm, CUstream) -> c_int,
    pub(super) send: unsafe extern "C" fn(CUdeviceptr, usize, c_int, c_int, NcclComm, CUstream) -> c_int,
    pub(super) receive: unsafe extern "C" fn(CUdeviceptr, usize, c_int, c_int, NcclComm, CUstream) -> c_int,
    pub(super) group_start: unsafe extern "C" fn() -> c_int,
    pub(super) group_end: unsafe extern "C" fn() -> c_int,
    // Last: the functions above are in it.
    _library: Library,
}

impl Nccl {
    /// NCCL, or what to do to have it.
    pub(super) fn get() -> Result<&'static Nccl> {
        static NCCL: OnceLock<Result<Nccl, String>> = OnceLock::new();
        let nccl = NCCL.get_or_init(Nccl::open);
        nccl.as_ref().map_err(|what| Error::Unsupported { what: what.clone() })
    }

    fn open() -> Result<Nccl, String> {
        let named = std::env::var_os("ESPALIER_NCCL").map(PathBuf::from);
        let files = match &named {
            Some(file) => vec![file.clone()],
            None => {
                let beside = folders().into_iter().map(|folder| folder.join("libnccl.so.2"));
                std::iter::once(PathBuf::from("libnccl.so.2"))
                    .chain(beside.filter(|file| file.exists()))
                    .collect()
            }
        };
        // SAFETY: the library's initialisers are NVIDIA's, as on every other way to load it.
        let library = files.iter().find_map(|file| unsafe { Library::new(file) }.ok());
        let library = library.ok_or_else(|| match named {
            Some(file) => format!("ESPALIER_NCCL names {}, which cannot be loaded", file.display()),
            None => "libnccl.so.2 was not found; install NCCL or the Python package nvidia-nccl-cu13 (or -cu12), and \
                     add its folder to LD_LIBRARY_PATH or name the file in ESPALIER_NCCL"
                .to_owned(),
        })?;
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the types are those of `nccl.h`.
                *unsafe { library.get($name.as_bytes()) }.map_err(|_| {
                    format!("the NCCL that was found has no {}: it must be 2.10 or newer", $name)
                })?
            };
        }
        Ok(Nccl {
            get_version: function!("ncclGetVersion"),
            get_error_string: function!("ncclGetErrorString"),
            get_unique_id: function!("ncclGetUniqueId"),
            comm_init_rank: function!("ncclCommInitRank"),
            comm_get_async_error: function!("ncclCommGetAsyncError"),
            all_reduce: function!("ncclAllReduce"),
            reduce_scatter: function!("ncclReduceScatter"),
            all_gather: function!("ncclAllGather"),
            broadcast: function!("ncclBroadcast"),
            send: function!("ncclSend"),
            receive: function!("ncclRecv"),
            group_start: function!("ncclGroupStart"),
            group_end: function!("ncclGroupEnd"),
            _library: library,
        })
    }

    /// `2.21.5`
    pub(super) fn version(&self) -> String {
        let mut version = 0;
        // SAFETY: it writes a number.
        unsafe { (self.get_version)(&mut version) };
        format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
    }

    /// What a result code says, unless it is that of success.
    pub(super) fn check(&self, code: c_int) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: it returns a static string for every number.
        let text = unsafe { CStr::from_ptr((self.get_error_string)(code)) };
        Err(format!("NCCL: {} ({code})", text.to_string_lossy()))
    }
}

/// `ncclDataType_t`
pub(super) fn datatype(element: ElementType) -> c_int {
    match element {
        ElementType::U32 => 3,
        ElementType::U64 => 5,
        ElementType::F32 => 7,
        ElementType::F64 => 8,
        ElementType::Bf16 => 9,
    }
}

/// `ncclRedOp_t`
pub(super) fn operation(how: Reduce) -> c_int {
    match how {
        Reduce::Sum => 0,
        Reduce::Max => 2,
    }
}
