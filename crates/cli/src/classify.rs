//! `espalier classify`: what a trained model sees in pictures.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use espalier_plan::config::Override;
use espalier_train::trained::ClassifiedPicture;
use serde::Serialize;

use crate::log::LogArguments;
use crate::output;
use crate::prepared::{PreparedRun, open_trained};
use crate::setting::setting;

#[derive(Args)]
#[command(
    after_help = "Pictures are JPEG, PNG or WebP of any size: the middle of each is seen, resized as in \
                        validation.

Examples:
  espalier classify out/pets photo.jpg
  espalier classify out/pets photos/*.jpg --top 1 --json
  espalier classify resnet50.safetensors photo.jpg"
)]
pub struct ClassifyArguments {
    /// A checkpoint folder, a run folder (its newest checkpoint), or a torchvision state dict.
    checkpoint: PathBuf,
    /// Pictures.
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<PathBuf>,
    /// Number of classes to name, the likeliest first.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    top: u64,
    /// Override a field of the run file, as in `--set data.size=288`. May be repeated.
    #[arg(long = "set", value_name = "FIELD=VALUE", value_parser = setting)]
    overrides: Vec<Override>,
    /// Print the result as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    log: LogArguments,
}

/// The fields are promised in the contract of the command line.
#[derive(Serialize)]
struct ClassifyReport {
    images: Vec<ClassifiedPicture>,
}

pub fn classify(arguments: &ClassifyArguments) -> Result<ExitCode> {
    arguments.log.start(None)?;
    let trained = open_trained(&arguments.checkpoint)?;
    let (plan, dataset) = trained.pictures(&arguments.images, &arguments.overrides)?;
    let prepared = PreparedRun { plan, dataset, process_group: None };
    let device = prepared.open_device()?;
    let PreparedRun { plan, dataset, .. } = prepared;
    let images = trained.classify(&arguments.images, plan, dataset, &device, arguments.top as usize)?;
    for picture in &images {
        if images.len() > 1 {
            output::print_out!("{}", picture.path.display());
        }
        for class in &picture.classes {
            output::print_out!("{:6.2} %  {}", 100.0 * class.probability, class.name);
        }
    }
    output::answer(arguments.json, || ClassifyReport { images })
}
