//! Every file of kernels, gathered for the test that compiles them all without a GPU. Nothing else reads the
//! list: an operation hands its own source to the GPU, so that `cuda` knows no operation.

use crate::cuda::KernelSource;
use crate::cuda::compile::{CompileTarget, cache_name, compile, compile_quickly, version};
use crate::ops;

const SOURCES: &[&KernelSource] = &[
    &ops::activation::cuda::SOURCE,
    &ops::argmax::cuda::SOURCE,
    &ops::attention::cuda::SOURCE,
    &ops::attention::cuda::SOURCE_F32,
    &ops::batch_norm::cuda::SOURCE,
    &ops::cached_attention::cuda::SOURCE,
    &ops::cast::cuda::SOURCE,
    &ops::columns::cuda::SOURCE,
    &ops::compress::cuda::SOURCE,
    &ops::compress::cuda::EXPAND,
    &ops::conv::kernels::SOURCE,
    &ops::cross_entropy::cuda::SOURCE,
    &ops::dropout::cuda::SOURCE,
    &ops::elementwise::cuda::SOURCE,
    &ops::embedding::cuda::SOURCE,
    &ops::gated::cuda::SOURCE,
    &ops::layer_norm::SOURCE,
    &ops::layout::cuda::SOURCE,
    &ops::matmul::cuda::SOURCE,
    &ops::matvec::cuda::SOURCE,
    &ops::pool::cuda::SOURCE,
    &ops::qk_norm::cuda::SOURCE,
    &ops::reduce::cuda::SOURCE,
    &ops::region::cuda::SOURCE,
    &ops::rms_norm::SOURCE,
    &ops::sample::cuda::SOURCE,
    &ops::rotary::cuda::SOURCE,
    &ops::select::cuda::SOURCE,
    &ops::standardise::cuda::SOURCE,
    &ops::update::cuda::SOURCE,
];

/// The files of a folder and of those below it whose name ends so.
fn files(folder: &std::path::Path, ending: &str) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let of = |path: std::path::PathBuf| match path.is_dir() {
        true => files(&path, ending),
        false => vec![path.file_name().unwrap().to_str().unwrap().to_owned()],
    };
    entries.flat_map(of).filter(|name| name.ends_with(ending)).collect()
}

/// A file of kernels that is not in the list would be compiled for the first time on somebody's GPU.
#[test]
fn every_file_of_kernels_is_in_the_list() {
    let mut found = files(std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src")), ".cu");
    let mut listed: Vec<&str> = SOURCES.iter().map(|source| source.name).collect();
    found.sort();
    listed.sort();
    assert_eq!(found, listed);
}

/// Whether it compiles does not depend on how well: the long form makes the code that GPUs run. The short form
/// leaves out what this very compiler has compiled before, as it is: a file beside the test program says so.
#[test]
fn every_source_compiles_for_ampere_and_hopper() {
    if let Err(e) = version() {
        return espalier_testing::skipped(espalier_testing::Need::Nvrtc, e);
    }
    let long = espalier_testing::long();
    let compile = if long { compile } else { compile_quickly };
    let done = std::env::current_exe().unwrap().with_file_name("compiled-kernels");
    std::fs::create_dir_all(&done).unwrap();
    for source in SOURCES {
        assert!(!source.builds.is_empty(), "{} is never built", source.name);
        // What compiles for the older of the two compiles for the newer one, but for lines of its own: those
        // here, and those behind two functions of the prelude.
        let own = ["__CUDA_ARCH__", "wait_for_work_before", "let_next_begin"];
        let mut texts = source.includes.iter().map(|include| include.text).chain([source.text]);
        let both = long || texts.any(|text| own.iter().any(|word| text.contains(word)));
        for build in source.builds {
            for target in [80, 90].into_iter().take(1 + usize::from(both)).map(CompileTarget::Machine) {
                let marker = done.join(cache_name(source, build, target).unwrap());
                if marker.exists() && !long {
                    continue;
                }
                let image = compile(source, build, target).unwrap_or_else(|e| panic!("{e}"));
                assert!(image.starts_with(b"\x7fELF"), "{} {target}: not machine code", source.name);
                std::fs::write(marker, "").unwrap();
            }
        }
    }
}
