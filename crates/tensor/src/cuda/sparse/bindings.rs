//! The functions of cuSPARSE and cuSPARSELt that a product takes, and the numbers of their headers.
//!
//! Bound by hand: they are few, a result code that a later version invents stays a number, and a library that
//! lacks one is an error instead of a panic. Types are those of `cusparse.h` of CUDA 12 and 13 and of
//! `cusparseLt.h` of 0.6 to 0.10.

use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

use crate::cuda::library;
use crate::dtype::DType;
use crate::error::{Error, Result};

/// A struct of functions, each with its name in the library and its type in the header.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident from $library:path { $($field:ident: $name:literal as $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub(crate) struct $table {
            $(pub $field: $type,)*
        }

        impl $table {
            /// The library's functions, or why they cannot be used.
            pub(crate) fn load() -> Result<&'static $table> {
                static LOADED: OnceLock<Result<$table, String>> = OnceLock::new();
                let loaded = LOADED.get_or_init($table::find).as_ref();
                loaded.map_err(|what| Error::Unsupported { what: what.clone() })
            }

            fn find() -> Result<$table, String> {
                let library = $library()?;
                let find = |name: &CStr| {
                    let lacks = || format!("the library has no {}; install a newer one", name.to_string_lossy());
                    library.function(name).ok_or_else(lacks)
                };
                Ok($table {
                    // SAFETY: the header declares the function of this name with this type.
                    $($field: unsafe { std::mem::transmute::<*mut c_void, $type>(find($name)?) },)*
                })
            }

            /// A result code as an error; `doing` names what was tried.
            pub(crate) fn check(&self, code: i32, doing: &'static str) -> Result<()> {
                if code == 0 {
                    return Ok(());
                }
                // SAFETY: the library is loaded; it hands out a static string for any number, or null.
                let text = unsafe { (self.error_string)(code) };
                let text = match text.is_null() {
                    true => "an unknown error".into(),
                    // SAFETY: a string of the library's that ends in NUL.
                    false => unsafe { CStr::from_ptr(text) }.to_string_lossy(),
                };
                Err(Error::Cuda { doing, why: format!("{text} ({code})") })
            }
        }
    };
}

/// cuSPARSE's handle, and its descriptions of matrices.
pub(crate) type Opaque = *mut c_void;

/// `(handle, op(A), op(B), alpha, A, B, beta, C, type of sums, algorithm, ...)`.
pub(super) type SpmmFn<Last> = unsafe extern "C" fn(
    Opaque,
    i32,
    i32,
    *const c_void,
    Opaque,
    Opaque,
    *const c_void,
    Opaque,
    i32,
    i32,
    Last,
) -> i32;

functions! {
    /// cuSPARSE's functions; those that return an `i32` return 0 where all went well.
    CuSparse from library::cusparse {
        error_string: c"cusparseGetErrorString" as unsafe extern "C" fn(i32) -> *const c_char,
        create: c"cusparseCreate" as unsafe extern "C" fn(*mut Opaque) -> i32,
        destroy: c"cusparseDestroy" as unsafe extern "C" fn(Opaque) -> i32,
        set_stream: c"cusparseSetStream" as unsafe extern "C" fn(Opaque, *mut c_void) -> i32,
        create_csr: c"cusparseCreateCsr" as unsafe extern "C" fn(
            *mut Opaque, i64, i64, i64, *mut c_void, *mut c_void, *mut c_void, i32, i32, i32, i32,
        ) -> i32,
        destroy_sparse: c"cusparseDestroySpMat" as unsafe extern "C" fn(Opaque) -> i32,
        create_dense: c"cusparseCreateDnMat" as
            unsafe extern "C" fn(*mut Opaque, i64, i64, i64, *mut c_void, i32, i32) -> i32,
        destroy_dense: c"cusparseDestroyDnMat" as unsafe extern "C" fn(Opaque) -> i32,
        set_values: c"cusparseDnMatSetValues" as unsafe extern "C" fn(Opaque, *mut c_void) -> i32,
        buffer_size: c"cusparseSpMM_bufferSize" as SpmmFn<*mut usize>,
        preprocess: c"cusparseSpMM_preprocess" as SpmmFn<*mut c_void>,
        product: c"cusparseSpMM" as SpmmFn<*mut c_void>,
    }
}

/// What cuSPARSELt lets its callers hold without looking inside. Its own types have 512 bytes, older ones 11,024.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct OpaqueStorage([u8; 16 << 10]);

impl OpaqueStorage {
    /// An empty one, which stays where it is.
    pub(crate) fn new() -> Box<OpaqueStorage> {
        Box::new(OpaqueStorage([0; 16 << 10]))
    }
}

functions! {
    /// cuSPARSELt's functions, as above.
    CuSparseLt from library::cusparse_lt {
        error_string: c"cusparseLtGetErrorString" as unsafe extern "C" fn(i32) -> *const c_char,
        init: c"cusparseLtInit" as unsafe extern "C" fn(*mut OpaqueStorage) -> i32,
        destroy: c"cusparseLtDestroy" as unsafe extern "C" fn(*const OpaqueStorage) -> i32,
        version: c"cusparseLtGetVersion" as unsafe extern "C" fn(*const OpaqueStorage, *mut i32) -> i32,
        structured: c"cusparseLtStructuredDescriptorInit" as
            unsafe extern "C" fn(*const OpaqueStorage, *mut OpaqueStorage, i64, i64, i64, u32, i32, i32, i32) -> i32,
        dense: c"cusparseLtDenseDescriptorInit" as
            unsafe extern "C" fn(*const OpaqueStorage, *mut OpaqueStorage, i64, i64, i64, u32, i32, i32) -> i32,
        destroy_matrix: c"cusparseLtMatDescriptorDestroy" as unsafe extern "C" fn(*const OpaqueStorage) -> i32,
        operation: c"cusparseLtMatmulDescriptorInit" as unsafe extern "C" fn(
            *const OpaqueStorage, *mut OpaqueStorage, i32, i32, *const OpaqueStorage, *const OpaqueStorage, *const OpaqueStorage, *const OpaqueStorage, i32,
        ) -> i32,
        algorithm: c"cusparseLtMatmulAlgSelectionInit" as
            unsafe extern "C" fn(*const OpaqueStorage, *mut OpaqueStorage, *const OpaqueStorage, i32) -> i32,
        plan: c"cusparseLtMatmulPlanInit" as
            unsafe extern "C" fn(*const OpaqueStorage, *mut OpaqueStorage, *const OpaqueStorage, *const OpaqueStorage) -> i32,
        destroy_plan: c"cusparseLtMatmulPlanDestroy" as unsafe extern "C" fn(*const OpaqueStorage) -> i32,
        workspace: c"cusparseLtMatmulGetWorkspace" as
            unsafe extern "C" fn(*const OpaqueStorage, *const OpaqueStorage, *mut usize) -> i32,
        compressed_size: c"cusparseLtSpMMACompressedSize" as
            unsafe extern "C" fn(*const OpaqueStorage, *const OpaqueStorage, *mut usize, *mut usize) -> i32,
        compress: c"cusparseLtSpMMACompress" as unsafe extern "C" fn(
            *const OpaqueStorage, *const OpaqueStorage, *const c_void, *mut c_void, *mut c_void, *mut c_void,
        ) -> i32,
        search: c"cusparseLtMatmulSearch" as unsafe extern "C" fn(
            *const OpaqueStorage, *mut OpaqueStorage, *const c_void, *const c_void, *const c_void, *const c_void, *const c_void,
            *mut c_void, *mut c_void, *mut *mut c_void, i32,
        ) -> i32,
        product: c"cusparseLtMatmul" as unsafe extern "C" fn(
            *const OpaqueStorage, *const OpaqueStorage, *const c_void, *const c_void, *const c_void, *const c_void, *const c_void,
            *mut c_void, *mut c_void, *mut *mut c_void, i32,
        ) -> i32,
    }
}

/// The type of a matrix's elements or of sums, as all of NVIDIA's libraries number it.
pub(crate) fn data_type(dtype: DType) -> i32 {
    match dtype {
        DType::F32 => 0,
        DType::Bf16 => 14,
        DType::U16 | DType::U32 | DType::U8 => panic!("a product of {dtype:?}"),
    }
}

/// An operand as it is.
pub(crate) const NOT_TRANSPOSED: i32 = 0;
pub(crate) const TRANSPOSED: i32 = 1;
/// Column after column.
pub(crate) const BY_COLUMNS: i32 = 1;
/// Row after row.
pub(crate) const BY_ROWS: i32 = 2;
pub(crate) const INDEX_32: i32 = 2;
/// Indices that begin at zero.
pub(crate) const FROM_ZERO: i32 = 0;
/// Two zeros in every four.
pub(crate) const HALF: i32 = 0;
/// cuSPARSELt's number for sums in f32.
pub(crate) const SUMS_IN_F32: i32 = 2;
/// Addresses and rows are multiples of as many bytes.
pub(crate) const ALIGNMENT: u32 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    /// Where a library is there, all functions are found in it; where not, a person is told what to do.
    #[test]
    fn functions_are_all_found_or_it_is_said_what_to_install() {
        let missing = [CuSparse::load().err(), CuSparseLt::load().err()].into_iter().flatten();
        for sentence in missing.map(|error| error.to_string()) {
            assert!(sentence.contains("install") || sentence.contains("cannot be loaded"), "{sentence}");
            assert!(!sentence.contains("has no"), "a function that we need is missing: {sentence}");
        }
    }
}
