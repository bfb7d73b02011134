//! `espalier doctor`: what this machine has for training, and what to do about what it lacks.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use espalier_comm::nccl;
use espalier_tensor::cpu::Isa;
use espalier_tensor::cuda::{Cuda, Gpu, Probe};
use espalier_tensor::memory::ByteSize;
use espalier_train::parallel::launched::MPI;
use serde_json::{Value, json};

use crate::output;
use crate::text_table::wrapped;

#[derive(Args)]
#[command(after_help = "Example:
  espalier doctor --json")]
pub struct DoctorArguments {
    /// Print what was found as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
}

pub fn doctor(arguments: &DoctorArguments) -> Result<ExitCode> {
    let findings = Findings::probe()?;
    output::on_standard_output(findings.table(output::width()));
    output::answer(arguments.json, || findings.json())
}

/// All that was looked for.
struct Findings {
    cores: usize,
    isa: Isa,
    cuda: Probe,
    /// Why no GPU can be used, where none can.
    cuda_why: Option<String>,
    /// cuDNN's version, or why it is not used and what to do.
    cudnn: Result<String, String>,
    /// NCCL's version, or what to do to have it.
    nccl: Result<String, String>,
    /// Whether there is a launcher of MPI.
    mpirun: bool,
    /// Free bytes where we stand.
    disk: Option<u64>,
}

impl Findings {
    fn probe() -> Result<Findings> {
        let cuda = Cuda::probe();
        // What was found may still refuse to start, as a GPU in exclusive use does.
        let cuda_why = match cuda.usable() {
            true => Cuda::open(0).err().map(|why| why.to_string()),
            false => Some(cuda.missing.join("; also, ")),
        };
        Ok(Findings {
            cores: std::thread::available_parallelism()?.get(),
            isa: Isa::best(),
            cuda,
            cuda_why,
            cudnn: Cuda::cudnn().map(|(major, minor, patch)| format!("{major}.{minor}.{patch}")),
            nccl: nccl::version().map_err(|why| why.to_string()),
            mpirun: on_path("mpirun") || on_path("mpiexec"),
            disk: rustix::fs::statvfs(".").ok().map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize)),
        })
    }

    fn json(&self) -> Value {
        let version = |v: Option<(u32, u32)>| v.map(|(major, minor)| format!("{major}.{minor}"));
        let mut cuda = json!({
            "found": self.cuda_why.is_none(),
            "cards": self.cuda.gpus.iter().map(gpu_json).collect::<Vec<_>>(),
            "driver": version(self.cuda.driver),
            "nvrtc": version(self.cuda.nvrtc),
            "cublaslt": self.cuda.cublas_lt.map(cublas_version),
            "cudnn": library_json(&self.cudnn),
        });
        match (&self.cuda_why, self.cuda.gpus.first()) {
            (Some(why), _) => cuda["why"] = json!(why),
            (None, Some(gpu)) => {
                cuda.as_object_mut()
                    .expect("an object")
                    .extend(gpu_json(gpu).as_object().cloned().expect("an object"));
            }
            (None, None) => {}
        }
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "cpu": {
                "cores": self.cores,
                "avx512": self.isa.avx512().is_some(),
                "amx_bf16": self.isa.amx().is_some(),
            },
            "cuda": cuda,
            "nccl": library_json(&self.nccl),
            "mpi": { "built": MPI, "found": self.mpirun },
            "disk": { "free": self.disk },
        })
    }

    fn table(&self, width: usize) -> String {
        let mut lines = vec![("espalier", env!("CARGO_PKG_VERSION").to_owned())];
        lines.push(("cpu", format!("{} cores, {}", self.cores, instructions(self.isa))));
        for gpu in &self.cuda.gpus {
            lines.push(("GPU", gpu.to_string()));
        }
        let found = |v: Option<(u32, u32)>| v.map(|(major, minor)| format!("{major}.{minor}"));
        let libraries = [
            ("CUDA driver", found(self.cuda.driver)),
            ("NVRTC", found(self.cuda.nvrtc)),
            ("cuBLASLt", self.cuda.cublas_lt.map(cublas_version)),
            ("cuDNN", self.cudnn.clone().ok()),
        ];
        lines.extend(libraries.map(|(name, version)| (name, version.unwrap_or("not found".into()))));
        match &self.cuda_why {
            None => lines.push(("cuda", "works: device.kind = \"auto\" uses it".into())),
            Some(_) if !self.cuda.missing.is_empty() => {
                lines.extend(self.cuda.missing.iter().map(|sentence| ("cuda", sentence.clone())));
            }
            Some(why) => lines.push(("cuda", why.clone())),
        }
        if let Err(why) = &self.cudnn {
            lines
                .push(("cudnn", format!("optional, but convolutions on a GPU are slower without it: {why}")));
        }
        lines.push((
            "nccl",
            match &self.nccl {
                Ok(version) => format!("{version}: connects ranks with one GPU each"),
                Err(why) => format!("only needed for several GPUs: {why}"),
            },
        ));
        let mpi = match (MPI, self.mpirun) {
            (true, true) => "built in, and mpirun was found",
            (true, false) => "built in, but no mpirun was found",
            (false, true) => {
                "mpirun was found, but this program was built without MPI: cargo build --release --features mpi"
            }
            (false, false) => "not built in, and no mpirun was found",
        };
        lines.push(("mpi", mpi.into()));
        let free = self.disk.map_or("unknown".into(), |free| ByteSize(free as usize).to_string());
        lines.push(("disk", format!("{free} free here")));
        let line = |(name, text): (&str, String)| {
            wrapped(&format!("{name:<13}{text}"), 13, width)
                .into_iter()
                .map(|line| line + "\n")
                .collect::<String>()
        };
        lines.into_iter().map(line).collect()
    }
}

/// What a processor's products are made with.
pub fn instructions(isa: Isa) -> &'static str {
    match isa {
        Isa::Portable => "no AVX2: slow",
        Isa::Avx2(_) => "AVX2",
        Isa::Avx512(_) => "AVX-512",
        Isa::Amx(_) => "AVX-512, AMX with bf16",
    }
}

fn library_json(version: &Result<String, String>) -> Value {
    match version {
        Ok(version) => json!({ "found": true, "version": version }),
        Err(why) => json!({ "found": false, "why": why }),
    }
}

fn gpu_json(gpu: &Gpu) -> Value {
    json!({
        "name": gpu.name,
        "memory": gpu.memory,
        "compute_capability": format!("{}.{}", gpu.capability / 10, gpu.capability % 10),
    })
}

/// 130200 is 13.2.0.
fn cublas_version(number: usize) -> String {
    format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100)
}

fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder: std::path::PathBuf| Path::new(&folder).join(program).is_file())
}
