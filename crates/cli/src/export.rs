//! `espalier export`: a trained model as a folder of Hugging Face's.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, ValueEnum};
use espalier_train::Error;
use espalier_train::hub::{ExportOptions, ExportPrecision, ExportReport};
use espalier_train::trained::TrainedModel;
use serde_json::json;

use crate::output;
use crate::run_file::conflict;

#[derive(Args)]
#[command(after_help = "docs/models.md lists the files. An unsharded checkpoint is already in this format.

Examples:
  espalier export out/hello -o hello-hf
  espalier export out/large/checkpoints/step-010000 -o large-hf --dtype bf16 --shards 5GB")]
pub struct ExportArguments {
    /// A checkpoint folder, a run folder (its newest checkpoint), or a Hugging Face checkpoint.
    checkpoint: PathBuf,
    /// Output folder; must not exist.
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,
    /// Data type of the weights; f32 exports the master weights of a bf16 run [default: as stored].
    #[arg(long, value_name = "TYPE")]
    dtype: Option<ExportDtypeArg>,
    /// Max size of a weights file, as in 5GB or 300MB.
    #[arg(long, value_name = "SIZE", default_value = "5GB")]
    shards: String,
    /// Print the result as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
}

/// What numbers are stored in.
#[derive(Clone, Copy, ValueEnum)]
enum ExportDtypeArg {
    F32,
    Bf16,
    F16,
}

pub fn export(arguments: &ExportArguments) -> Result<ExitCode> {
    let report = |broken: &Error| output::print_err!("warning: {broken}; the one before it is used");
    let dtype = arguments.dtype.map(|dtype| match dtype {
        ExportDtypeArg::F32 => ExportPrecision::F32,
        ExportDtypeArg::Bf16 => ExportPrecision::Bf16,
        ExportDtypeArg::F16 => ExportPrecision::F16,
    });
    let how = ExportOptions { dtype, shard_bytes: bytes(&arguments.shards)? };
    let trained = TrainedModel::open(&arguments.checkpoint, report)?;
    let ExportReport { files, tensors, bytes, has_config } = trained.export(&arguments.out, &how)?;
    let out = arguments.out.display();
    output::print_out!("{out}: {tensors} tensors, {:.1} MB in {}", bytes as f64 / 1e6, files.join(", "));
    if !has_config {
        output::print_err!(
            "note: transformers has no class for this model, so no config.json is written; weights keep their names"
        );
    }
    if arguments.json {
        output::json(
            &json!({ "folder": arguments.out, "files": files, "tensors": tensors, "bytes": bytes, "config": has_config }),
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// `5GB`, `300 MB` or `20kB` in bytes, as `--shards` has it.
pub fn bytes(text: &str) -> Result<usize> {
    let wrong = || conflict("--shards", &format!("is {text:?}, which is no size, as 5GB or 300MB are"));
    let (number, scale) = [("GB", 1e9), ("MB", 1e6), ("kB", 1e3)]
        .into_iter()
        .find_map(|(unit, scale)| Some((text.trim().strip_suffix(unit)?, scale)))
        .ok_or_else(wrong)?;
    let size = number.trim().parse::<f64>().ok().filter(|size| size.is_finite() && *size > 0.0);
    Ok(size.map(|size| (size * scale) as usize).filter(|bytes| *bytes > 0).ok_or_else(wrong)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_a_unit() {
        assert_eq!(bytes("5GB").unwrap(), 5_000_000_000);
        assert_eq!(bytes("0.5 kB").unwrap(), 500);
        for text in ["5", "GB", "-1GB", "infGB"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }
}
