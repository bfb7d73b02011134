//! Kernels from source: NVRTC compiles them on the machine they run on, for the GPU that is there.
//!
//! A source is CUDA C++ that includes nothing; `prelude.cuh` is put before it, and the files that it names in
//! `includes`. One source can be built several ways: for an element type (the define ELEMENT, which the
//! prelude turns into `T`) and with integer defines. What was compiled is kept in a folder of the user's
//! cache under a hash of all that went in, so that only the first run waits for the compiler.

use std::ffi::{CStr, CString};
use std::fmt;
use std::path::PathBuf;

use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};

use super::library;
use super::status::CheckStatus;
use crate::dtype::DType;
use crate::error::{Error, Result};

const PRELUDE: &str = include_str!("prelude.cuh");

/// A file of kernels.
#[derive(Debug)]
pub struct KernelSource {
    /// Its name, unique among sources; compiler messages show it.
    pub name: &'static str,
    /// What is read between the prelude and the text, in this order: what it has in common with other sources, and
    /// what was given a file of its own.
    pub includes: &'static [KernelInclude],
    /// CUDA C++.
    pub text: &'static str,
    /// Whether a product and a sum are always rounded apart, as on the host. Otherwise the compiler joins
    /// them where it likes, and the same formula in two kernels may differ in its last bit.
    pub exact: bool,
    /// The variants in which it is built, for the check that every source compiles.
    pub builds: &'static [Build],
}

/// A file of CUDA C++ that is no source by itself.
#[derive(Debug, Clone, Copy)]
pub struct KernelInclude {
    /// Its name; compiler messages show it.
    pub name: &'static str,
    /// CUDA C++.
    pub text: &'static str,
}

impl KernelInclude {
    /// What most kernels share.
    pub(crate) const LANES: KernelInclude =
        KernelInclude { name: "lanes.cuh", text: include_str!("lanes.cuh") };
    /// What those over kept weights share besides.
    pub(crate) const KEPT: KernelInclude = KernelInclude { name: "kept.cuh", text: include_str!("kept.cuh") };
    /// The numbers of `random.rs`.
    pub(crate) const RANDOM: KernelInclude =
        KernelInclude { name: "random.cuh", text: include_str!("random.cuh") };
    /// What those with products of their own on the tensor cores share.
    pub(crate) const TENSOR_CORES: KernelInclude =
        KernelInclude { name: "tensor_cores.cuh", text: include_str!("tensor_cores.cuh") };
    /// Copies to shared memory that do not wait.
    pub(crate) const COPIES: KernelInclude =
        KernelInclude { name: "copies.cuh", text: include_str!("copies.cuh") };
    /// Blocks that reach into each other's memory.
    pub(crate) const CLUSTER: KernelInclude =
        KernelInclude { name: "cluster.cuh", text: include_str!("cluster.cuh") };
}

/// One variant of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Build {
    /// What `T` stands for.
    pub element: Option<DType>,
    /// Macros with integer values.
    pub defines: &'static [(&'static str, i64)],
}

impl Build {
    /// With no element type and no macro.
    pub const PLAIN: Build = Build { element: None, defines: &[] };
    /// With `T` as float.
    pub const F32: Build = Build::of(DType::F32);
    /// With `T` as bf16.
    pub const BF16: Build = Build::of(DType::Bf16);
    /// Once per floating type.
    pub(crate) const FLOATS: &[Build] = &[Build::F32, Build::BF16];

    /// With `T` as this type.
    pub const fn of(element: DType) -> Build {
        Build { element: Some(element), defines: &[] }
    }

    fn options(&self) -> Vec<String> {
        let element = self.element.map(|dtype| match dtype {
            DType::F32 => "-DELEMENT=float".to_owned(),
            DType::Bf16 => "-DELEMENT=bf16".to_owned(),
            DType::U16 => "-DELEMENT=u16".to_owned(),
            DType::U32 => "-DELEMENT=u32".to_owned(),
            DType::U8 => "-DELEMENT=u8".to_owned(),
        });
        let defines = self.defines.iter().map(|(name, value)| format!("-D{name}={value}"));
        element.into_iter().chain(defines).collect()
    }
}

/// What the compiler makes code for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompileTarget {
    /// Machine code for one compute capability, such as 90 for 9.0.
    Machine(u32),
    /// Portable code that a newer GPU's driver translates: for GPUs that this NVRTC does not know.
    Portable(u32),
}

impl CompileTarget {
    /// The best that this NVRTC can do for a GPU.
    pub fn best(capability: u32) -> Result<CompileTarget> {
        library::nvrtc()?;
        let mut count = 0;
        // SAFETY: NVRTC is loaded; it writes as many numbers as it said.
        let known = unsafe {
            sys::nvrtcGetNumSupportedArchs(&mut count).check("asking NVRTC for its targets")?;
            let mut known = vec![0; count as usize];
            sys::nvrtcGetSupportedArchs(known.as_mut_ptr()).check("asking NVRTC for its targets")?;
            known
        };
        let known: Vec<u32> = known.into_iter().map(|arch| arch as u32).collect();
        if known.contains(&capability) {
            return Ok(CompileTarget::Machine(capability));
        }
        let older = known.iter().filter(|arch| **arch < capability).max();
        older.map(|arch| CompileTarget::Portable(*arch)).ok_or_else(|| Error::NoCuda {
            why: format!(
                "this NVRTC no longer knows compute capability {capability}; install an older CUDA toolkit"
            ),
        })
    }
}

impl fmt::Display for CompileTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // The suffix admits instructions that only this very architecture has, such as wgmma.
            CompileTarget::Machine(arch @ 90..) => write!(f, "sm_{arch}a"),
            CompileTarget::Machine(arch) => write!(f, "sm_{arch}"),
            CompileTarget::Portable(arch) => write!(f, "compute_{arch}"),
        }
    }
}

/// NVRTC's version, where it is found.
pub fn version() -> Result<(u32, u32)> {
    library::nvrtc()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: NVRTC is loaded; it writes two numbers.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.check("asking NVRTC for its version")?;
    Ok((major as u32, minor as u32))
}

/// Compiles a source to an image that a driver loads. Needs no GPU.
pub fn compile(source: &KernelSource, build: &Build, target: CompileTarget) -> Result<Vec<u8>> {
    compile_with(source, options(source, build, target), target)
}

/// As [`compile`], hardly optimised where this NVRTC knows how: a third of the time, for those who only ask
/// whether it compiles.
#[cfg(test)]
pub(crate) fn compile_quickly(
    source: &KernelSource,
    build: &Build,
    target: CompileTarget,
) -> Result<Vec<u8>> {
    let mut options = options(source, build, target);
    if version()? >= (13, 0) {
        options.push("--Ofast-compile=max".to_owned());
    }
    compile_with(source, options, target)
}

fn compile_with(source: &KernelSource, options: Vec<String>, target: CompileTarget) -> Result<Vec<u8>> {
    library::nvrtc()?;
    let text = CString::new(whole_text(source)).expect("a source without NUL");
    let name = CString::new(source.name).expect("a name without NUL");
    let program = NvrtcProgram::new(&text, &name)?;
    let c_options: Vec<CString> =
        options.iter().map(|o| CString::new(o.as_str()).expect("an option without NUL")).collect();
    let pointers: Vec<_> = c_options.iter().map(|o| o.as_ptr()).collect();
    // SAFETY: the program lives, and the pointers are of NUL-terminated strings that outlive the call.
    let status = unsafe { sys::nvrtcCompileProgram(program.0, pointers.len() as i32, pointers.as_ptr()) };
    if status == nvrtcResult::NVRTC_ERROR_COMPILATION {
        return Err(Error::Compile { file: source.name, options: options.join(" "), log: program.log()? });
    }
    status.check("compiling a kernel")?;
    program.image(target)
}

/// As [`compile`], from the cache folder where it was compiled before. A folder that cannot be written to only
/// costs time.
pub(super) fn compile_cached(source: &KernelSource, build: &Build, target: CompileTarget) -> Result<Vec<u8>> {
    let Some(file) = cache_file(source, build, target)? else { return compile(source, build, target) };
    if let Some(image) = std::fs::read(&file).ok().and_then(unsealed) {
        return Ok(image);
    }
    let image = compile(source, build, target)?;
    let keep = || -> std::io::Result<()> {
        let folder = file.parent().expect("the file is in a folder");
        std::fs::create_dir_all(folder)?;
        // Under a name of this process first: another one may be reading or writing the same kernel.
        let unfinished = file.with_extension(format!("{}.part", std::process::id()));
        std::fs::write(&unfinished, sealed(&image))?;
        std::fs::rename(&unfinished, &file)
    };
    let _ = keep();
    Ok(image)
}

/// The image behind a hash of itself, so that a damaged file is compiled again instead of run.
fn sealed(image: &[u8]) -> Vec<u8> {
    [blake3::hash(image).as_bytes(), image].concat()
}

fn unsealed(file: Vec<u8>) -> Option<Vec<u8>> {
    let (hash, image) = file.split_at_checked(blake3::OUT_LEN)?;
    (blake3::hash(image).as_bytes() == hash).then(|| image.to_vec())
}

fn cache_file(source: &KernelSource, build: &Build, target: CompileTarget) -> Result<Option<PathBuf>> {
    let folder = match (std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME")) {
        (Some(cache), _) if !cache.is_empty() => PathBuf::from(cache),
        (_, Some(home)) if !home.is_empty() => PathBuf::from(home).join(".cache"),
        _ => return Ok(None),
    };
    Ok(Some(folder.join("espalier/kernels").join(cache_name(source, build, target)?)))
}

/// A name for what is compiled: another one for another text, other options and another compiler.
pub(crate) fn cache_name(source: &KernelSource, build: &Build, target: CompileTarget) -> Result<String> {
    let (major, minor) = version()?;
    let mut hash = blake3::Hasher::new();
    for part in [&whole_text(source), &options(source, build, target).join("\n")] {
        hash.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    hash.update(&major.to_le_bytes()).update(&minor.to_le_bytes());
    let hash = hash.finalize().to_hex();
    Ok(format!("{}-{target}-{}", source.name, &hash[..32]))
}

/// Prelude, includes and text, each under its own name and with its own lines.
fn whole_text(source: &KernelSource) -> String {
    let includes = source.includes.iter().map(|include| (include.name, include.text));
    let files = [("prelude.cuh", PRELUDE)].into_iter().chain(includes).chain([(source.name, source.text)]);
    files.map(|(name, text)| format!("#line 1 \"{name}\"\n{text}\n")).collect()
}

fn options(source: &KernelSource, build: &Build, target: CompileTarget) -> Vec<String> {
    let mut options =
        vec!["--std=c++17".to_owned(), "-default-device".to_owned(), format!("--gpu-architecture={target}")];
    if source.exact {
        options.push("--fmad=false".to_owned());
    }
    options.extend(build.options());
    options
}

/// A program of NVRTC's, destroyed in the end.
struct NvrtcProgram(nvrtcProgram);

impl NvrtcProgram {
    fn new(text: &CStr, name: &CStr) -> Result<NvrtcProgram> {
        let mut program = std::ptr::null_mut();
        let none = std::ptr::null();
        // SAFETY: NVRTC is loaded; it copies the strings and writes the handle. There are no headers.
        unsafe { sys::nvrtcCreateProgram(&mut program, text.as_ptr(), name.as_ptr(), 0, none, none) }
            .check("reading a kernel's source")?;
        Ok(NvrtcProgram(program))
    }

    fn log(&self) -> Result<String> {
        let mut size = 0;
        // SAFETY: the program lives; the buffer has the size that NVRTC asked for.
        let log = unsafe {
            sys::nvrtcGetProgramLogSize(self.0, &mut size).check("reading the compiler's log")?;
            let mut log = vec![0u8; size];
            sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()).check("reading the compiler's log")?;
            log
        };
        Ok(String::from_utf8_lossy(&log).trim_end_matches('\0').trim_end().to_owned())
    }

    fn image(&self, target: CompileTarget) -> Result<Vec<u8>> {
        let mut size = 0;
        // SAFETY: the program is compiled; the buffer has the size that NVRTC asked for.
        unsafe {
            match target {
                CompileTarget::Machine(_) => {
                    sys::nvrtcGetCUBINSize(self.0, &mut size).check("reading machine code")?;
                    let mut image = vec![0u8; size];
                    sys::nvrtcGetCUBIN(self.0, image.as_mut_ptr().cast()).check("reading machine code")?;
                    Ok(image)
                }
                CompileTarget::Portable(_) => {
                    sys::nvrtcGetPTXSize(self.0, &mut size).check("reading portable code")?;
                    let mut image = vec![0u8; size];
                    sys::nvrtcGetPTX(self.0, image.as_mut_ptr().cast()).check("reading portable code")?;
                    Ok(image)
                }
            }
        }
    }
}

impl Drop for NvrtcProgram {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether NVRTC can be loaded; says so where it cannot.
    fn nvrtc_found() -> bool {
        match version() {
            Ok((major, minor)) => {
                eprintln!("compiling with NVRTC {major}.{minor}");
                true
            }
            Err(e) => {
                espalier_testing::skipped(espalier_testing::Need::Nvrtc, e);
                false
            }
        }
    }

    /// What is said of a source that does not compile; none without NVRTC.
    fn said_of(name: &'static str, includes: &'static [KernelInclude], text: &'static str) -> Option<String> {
        let source = KernelSource { name, includes, text, exact: false, builds: &[Build::PLAIN] };
        let failed = || compile(&source, &Build::PLAIN, CompileTarget::Machine(80)).unwrap_err();
        nvrtc_found().then(|| failed().to_string())
    }

    #[test]
    fn a_mistake_in_a_kernel_is_shown_with_its_file_and_line() {
        let Some(message) = said_of("wrong.cu", &[], "\nKERNEL(32) wrong() { nonsense(); }") else { return };
        assert!(message.contains("wrong.cu(2)") && message.contains("nonsense"), "{message}");
        assert!(message.contains("sm_80"), "{message}");
    }

    #[test]
    fn a_mistake_in_an_include_is_shown_with_its_name_and_line() {
        const INCLUDES: &[KernelInclude] = &[
            KernelInclude { name: "first.cuh", text: "DEVICE int one() { return 1; }" },
            KernelInclude { name: "second.cuh", text: "\n\nDEVICE int two() { return one() + nonsense(); }" },
        ];
        let message = said_of("right.cu", INCLUDES, "KERNEL(32) right(int* to) { *to = two(); }");
        let Some(message) = message else { return };
        assert!(message.contains("second.cuh(3)") && message.contains("nonsense"), "{message}");
        assert!(!message.contains("\"one\"") && !message.contains("right.cu("), "{message}");
    }

    #[test]
    fn a_damaged_image_is_not_used() {
        let image = b"some machine code".to_vec();
        assert_eq!(unsealed(sealed(&image)), Some(image.clone()));
        let mut damaged = sealed(&image);
        damaged.pop();
        assert_eq!(unsealed(damaged), None);
        assert_eq!(unsealed(vec![1, 2, 3]), None);
    }

    #[test]
    fn the_cache_tells_builds_and_targets_apart() {
        if !nvrtc_found() {
            return;
        }
        let source = KernelSource { name: "a.cu", includes: &[], text: "", exact: false, builds: &[] };
        let file = |build, target| cache_file(&source, &build, target).unwrap();
        let all = [
            file(Build::F32, CompileTarget::Machine(80)),
            file(Build::BF16, CompileTarget::Machine(80)),
            file(Build::F32, CompileTarget::Machine(90)),
            file(Build { element: Some(DType::F32), defines: &[("WIDTH", 64)] }, CompileTarget::Machine(80)),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| a.is_none() || a != b));
        }
    }
}
