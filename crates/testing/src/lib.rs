//! What the tests of all crates share: how one says that it could not test something here, how long it may
//! take, and how far two lists are apart.
//!
//! A test that finds no GPU, no MPI or no Python passes, since there is nothing wrong with the program. So
//! that nobody takes that for having been tested, it goes through [`skipped`]: `./check` lists all of them at
//! its end, and where `ESPALIER_REQUIRE=cuda,mpi` says that a machine has these, skipping for want of them is
//! a failure.
//!
//! | variable | meaning |
//! |---|---|
//! | `ESPALIER_REQUIRE` | names of [`Need`]s, with commas: what must not be missing |
//! | `ESPALIER_SKIPPED` | a file to which each skip adds a line: need, reason, test, with tabs |
//! | `ESPALIER_LONG` | `1`: tests that have a long form run it |

#![forbid(unsafe_code)]

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;

/// What a machine may lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// A CUDA device with driver, NVRTC and cuBLASLt.
    Cuda,
    /// Two CUDA devices.
    TwoCuda,
    /// cuDNN's library; for most tests a device too.
    Cudnn,
    /// NCCL's library, and a device.
    Nccl,
    /// NVRTC's library alone, which compiles kernels without a device.
    Nvrtc,
    /// A build with `--features espalier-cli/mpi`, and its launcher.
    Mpi,
    /// `python3` on the path.
    Python,
    /// Python's packages `tokenizers` and `sentencepiece`, and a build with `--features espalier-cli/tokenizers`.
    Tokenizers,
    /// Python's packages `torch`, `transformers`, `safetensors` and `numpy`.
    Transformers,
    /// Chromium or Chrome on the path, as a real browser to open a page in.
    Browser,
    /// The Debian package dataset-fashion-mnist.
    FashionMnist,
}

/// All of them, as they are written in `ESPALIER_REQUIRE`.
const NEEDS: [(Need, &str); 11] = [
    (Need::Cuda, "cuda"),
    (Need::TwoCuda, "two-cuda"),
    (Need::Cudnn, "cudnn"),
    (Need::Nccl, "nccl"),
    (Need::Nvrtc, "nvrtc"),
    (Need::Mpi, "mpi"),
    (Need::Python, "python"),
    (Need::Tokenizers, "tokenizers"),
    (Need::Transformers, "transformers"),
    (Need::Browser, "browser"),
    (Need::FashionMnist, "fashion-mnist"),
];

/// Says that the test on this thread leaves out what needs something that is not here, and why it is not. The
/// caller then returns, or goes on with the rest.
///
/// # Panics
/// Where `ESPALIER_REQUIRE` names the need.
#[track_caller]
pub fn skipped(need: Need, why: impl Display) {
    let (_, name) = NEEDS.iter().find(|(of, _)| *of == need).expect("all are in the table");
    let why = why.to_string().replace(['\n', '\t'], " ");
    let required = std::env::var("ESPALIER_REQUIRE").unwrap_or_default();
    assert!(!parse(&required).contains(&need), "ESPALIER_REQUIRE names {name}, which is missing: {why}");
    eprintln!("SKIPPED for want of {name}: {why}");
    let Some(path) = std::env::var_os("ESPALIER_SKIPPED") else { return };
    let test = std::thread::current().name().unwrap_or("a thread").to_owned();
    // One write for a line: many tests of many processes add to the file.
    let written = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&path)
        .and_then(|mut file| file.write_all(format!("{name}\t{why}\t{test}\n").as_bytes()));
    written.unwrap_or_else(|problem| panic!("{}: {problem}", path.display()));
}

/// Where two lists are farthest apart, and how far; at the first NaN where there is one. Models have millions of
/// weights and tests are compiled without optimisation: this crate is not.
pub fn farthest(a: &[f32], b: &[f32]) -> (usize, f32) {
    assert_eq!(a.len(), b.len());
    let mut most = (0, 0.0);
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        let apart = (a - b).abs();
        if apart.is_nan() {
            return (i, apart);
        }
        if apart > most.1 {
            most = (i, apart);
        }
    }
    most
}

/// The largest relative difference of two lists of numbers, such as losses; NaN, and one that is infinite, are
/// infinitely far from any other.
pub fn apart(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let far = |(a, b): (&f64, &f64)| match (a - b).abs() / a.abs() {
        _ if a == b => 0.0,
        far if far.is_nan() => f64::INFINITY,
        far => far,
    };
    a.iter().zip(b).map(far).fold(0.0, f64::max)
}

/// The largest magnitude of a list.
pub fn largest(of: &[f32]) -> f32 {
    of.iter().fold(0.0, |most, x| most.max(x.abs()))
}

/// Whether long forms of tests are to run: more rounds, sizes or moments of the same; the short form can fail
/// for the same bug.
pub fn long() -> bool {
    std::env::var("ESPALIER_LONG").is_ok_and(|value| value == "1")
}

/// The needs that a list names.
fn parse(list: &str) -> Vec<Need> {
    let names = list.split(',').map(str::trim).filter(|name| !name.is_empty());
    let known = |name: &str| match NEEDS.iter().find(|(_, of)| *of == name) {
        Some((need, _)) => *need,
        None => panic!("ESPALIER_REQUIRE: `{name}` is none of {}", NEEDS.map(|(_, name)| name).join(", ")),
    };
    names.map(known).collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn what_is_no_number_is_far_from_any() {
        let far = |a, b| apart(&[1.0, a], &[1.0, b]);
        assert_eq!([far(0.0, 0.0), far(2.0, 1.0)], [0.0, 0.5]);
        let (nan, infinite) = (f64::NAN, f64::INFINITY);
        for (a, b) in [(nan, 1.0), (1.0, nan), (nan, nan), (infinite, 1.0), (1.0, infinite)] {
            assert_eq!(far(a, b), infinite, "{a} and {b}");
        }
    }

    /// A misspelt need would be required of nobody: also where no test is skipped, somebody has to read the list.
    #[test]
    fn what_is_required_is_known() {
        parse(&std::env::var("ESPALIER_REQUIRE").unwrap_or_default());
        assert_eq!(parse(" cuda, mpi,"), [Need::Cuda, Need::Mpi]);
        assert!(std::panic::catch_unwind(|| parse("coda")).is_err());
    }

    /// Not a test by itself: what the test below runs under other variables.
    #[test]
    #[ignore = "run by the test of skipping"]
    fn skips() {
        skipped(Need::FashionMnist, "only\nacted");
    }

    #[test]
    fn a_skip_is_listed_and_where_it_is_required_a_failure() {
        let list = std::env::temp_dir().join(format!("espalier-skipped-{}", std::process::id()));
        let run = |required: &str| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "tests::skips", "--ignored"]);
            let variables = [("ESPALIER_REQUIRE", required), ("RUST_BACKTRACE", "0")];
            command.envs(variables).env("ESPALIER_SKIPPED", &list).output().unwrap()
        };
        assert!(run("cuda,mpi").status.success());
        assert!(run("").status.success());
        let failed = run("mpi,fashion-mnist");
        assert_eq!(failed.status.code(), Some(101), "{}", String::from_utf8_lossy(&failed.stdout));
        let lines = std::fs::read_to_string(&list).unwrap();
        std::fs::remove_file(&list).unwrap();
        assert_eq!(lines, "fashion-mnist\tonly acted\ttests::skips\n".repeat(2));
    }
}
