//! `espalier export`: a trained model as a folder of Hugging Face's, or as one file of llama.cpp's.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use espalier_train::hub::{ExportOptions, ExportPrecision, ExportReport, GgufReport, GgufType};
use serde_json::json;

use crate::output;
use crate::prepared::open_trained;
use crate::run_file::{conflict, refuse_options};
use crate::setting::one_of;

#[derive(Args)]
#[command(after_help = "docs/models.md lists the files. An unsharded checkpoint is already in this format.

Examples:
  espalier export out/hello -o hello-hf
  espalier export out/large/checkpoints/step-010000 -o large-hf --dtype bf16 --shards 5GB
  espalier export out/hello -o hello.gguf --format gguf --type q8_0")]
pub struct ExportArguments {
    /// A checkpoint folder, a run folder (its newest checkpoint), or a Hugging Face checkpoint.
    checkpoint: PathBuf,
    /// Output folder, or file with --format gguf; must not exist.
    #[arg(short, long, value_name = "PATH")]
    out: PathBuf,
    /// Format: a Hugging Face folder, or a GGUF file for llama.cpp.
    #[arg(long, value_name = "FORMAT", default_value = "hf", value_parser = ["hf", "gguf"])]
    format: String,
    /// With --format gguf: type of the weights; each is rounded once, from the master weights where there are
    /// any [default: as stored].
    #[arg(long = "type", value_name = "TYPE", value_parser = one_of(&GGUF_TYPES))]
    gguf_type: Option<GgufType>,
    /// Data type of the weights; f32 exports the master weights of a bf16 run [default: as stored].
    #[arg(long, value_name = "TYPE", value_parser = one_of(&DTYPES))]
    dtype: Option<ExportPrecision>,
    /// Max size of a weights file, as in 5GB or 300MB [default: 5GB].
    #[arg(long, value_name = "SIZE")]
    shards: Option<String>,
    /// Print the result as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
}

/// What numbers are stored in.
const DTYPES: [(&str, ExportPrecision); 3] =
    [("f32", ExportPrecision::F32), ("bf16", ExportPrecision::Bf16), ("f16", ExportPrecision::F16)];

/// What weights of a GGUF file are stored in.
const GGUF_TYPES: [(&str, GgufType); 5] = [
    ("f32", GgufType::F32),
    ("f16", GgufType::F16),
    ("bf16", GgufType::Bf16),
    ("q8_0", GgufType::Q8_0),
    ("q4_0", GgufType::Q4_0),
];

pub fn export(arguments: &ExportArguments) -> Result<ExitCode> {
    if arguments.format == "gguf" {
        return export_gguf(arguments);
    }
    if arguments.gguf_type.is_some() {
        return Err(conflict("--type", "is for --format gguf: without it there is --dtype").into());
    }
    if arguments.out.extension().is_some_and(|extension| extension == "gguf") {
        return Err(conflict("--out", "ends in .gguf, and would be a folder: add --format gguf").into());
    }
    let shard_bytes = bytes(arguments.shards.as_deref().unwrap_or("5GB"))?;
    let how = ExportOptions { dtype: arguments.dtype, shard_bytes };
    let trained = open_trained(&arguments.checkpoint)?;
    let ExportReport { files, tensors, bytes, has_config } = trained.export(&arguments.out, &how)?;
    let out = arguments.out.display();
    output::print_out!("{out}: {tensors} tensors, {:.1} MB in {}", bytes as f64 / 1e6, files.join(", "));
    if !has_config {
        output::print_err!(
            "note: transformers has no class for this model, so no config.json is written; weights keep their names"
        );
    }
    output::answer(arguments.json, || {
        json!({ "folder": arguments.out, "files": files, "tensors": tensors, "bytes": bytes, "config": has_config,
                "format": "hf", "type": null, "tokenizer": null })
    })
}

/// One file, of which its folder and its name are the answer.
fn export_gguf(arguments: &ExportArguments) -> Result<ExitCode> {
    let options = [("--dtype", arguments.dtype.is_some()), ("--shards", arguments.shards.is_some())];
    refuse_options(&options, "is for folders: a GGUF file has --type, and is one file")?;
    let trained = open_trained(&arguments.checkpoint)?;
    let GgufReport { dtype, tensors, bytes, has_tokenizer } =
        trained.export_gguf(&arguments.out, arguments.gguf_type)?;
    let out = arguments.out.display();
    output::print_out!("{out}: {tensors} tensors, {:.1} MB, {}", bytes as f64 / 1e6, dtype.name());
    if !has_tokenizer {
        output::print_err!("note: the model has no tokenizer, so the file takes and gives token ids alone");
    }
    let parent = arguments.out.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = parent.unwrap_or(Path::new("."));
    let name = arguments.out.file_name().unwrap_or_default().to_string_lossy();
    output::answer(arguments.json, || {
        json!({ "folder": folder, "files": [name], "tensors": tensors, "bytes": bytes, "config": true,
                "format": "gguf", "type": dtype.name(), "tokenizer": has_tokenizer })
    })
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
