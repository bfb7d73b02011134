//! The libraries of sparse products, which only a benchmark asks for: cuSPARSE, and cuSPARSELt for the 2:4
//! pattern.
//!
//! Bound by hand and asked by their handles: each offers a few functions that we need among very many.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::{Library, folders};

/// cuSPARSE, or why it cannot be used. CUDA 12 and 13 both have its version 12.
pub(in crate::cuda) fn cusparse() -> Result<Library, String> {
    static FOUND: OnceLock<Result<Library, String>> = OnceLock::new();
    FOUND.get_or_init(|| find("libcusparse.so.12", "ESPALIER_CUSPARSE", "nvidia-cusparse")).clone()
}

/// cuSPARSELt, or why it cannot be used. It is no part of the toolkit.
pub(in crate::cuda) fn cusparse_lt() -> Result<Library, String> {
    static FOUND: OnceLock<Result<Library, String>> = OnceLock::new();
    FOUND.get_or_init(|| find("libcusparseLt.so.0", "ESPALIER_CUSPARSELT", "nvidia-cusparselt-cu13")).clone()
}

fn find(file: &str, variable: &str, wheel: &str) -> Result<Library, String> {
    if let Some(named) = std::env::var_os(variable) {
        let named = PathBuf::from(named);
        return Library::open(&named)
            .ok_or_else(|| format!("{variable} names {}, which cannot be loaded", named.display()));
    }
    // Older wheels put each library into a folder of its own, all of them side by side.
    let beside =
        |folder: PathBuf| ["cusparse/lib", "cusparselt/lib"].map(|other| folder.join("../..").join(other));
    let folders =
        folders().into_iter().flat_map(|folder| [vec![folder.clone()], beside(folder).to_vec()].concat());
    let mut files = folders.map(|folder| folder.join(file)).filter(|file| file.exists());
    Library::open(Path::new(file)).or_else(|| files.find_map(|file| Library::open(&file))).ok_or_else(|| {
        format!(
            "{file} was not found; install the Python package {wheel}, and add its folder to LD_LIBRARY_PATH or name \
             the file in {variable}"
        )
    })
}
