//! What kinds of studies share: whose their folder is, where their files are, and the device that runs have
//! to themselves which are trained one after the other.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use espalier_data::Dataset;
use espalier_plan::RunFile;
use espalier_report::Page;
use espalier_study::StudyLock;
use espalier_tensor::Device;
use espalier_train::Error;

use super::{StudyArguments, live};
use crate::device;
use crate::output::{print_err, print_out};
use crate::run_file::refuse_options;

/// What a study works with whose runs are trained one after the other; the folder is its own for as long as
/// this is there.
pub struct StudyResources {
    pub dataset: Arc<Dataset>,
    pub device: Device,
    pub folder: PathBuf,
    _lock: StudyLock,
}

/// Says what the study is to do, and opens what that takes, the data of one of its runs; nothing where that
/// is all that was asked for.
pub fn open(
    arguments: &StudyArguments,
    name: &str,
    described: &str,
    run_file: impl FnOnce() -> Result<RunFile>,
) -> Result<Option<StudyResources>> {
    if arguments.dry_run {
        print_out!("{described}");
        return Ok(None);
    }
    print_err!("{described}");
    let run_file = run_file()?;
    let dataset = Arc::new(Dataset::open(&run_file).map_err(Error::Data)?);
    let device = device::open_here(&run_file.device, 1)?;
    let folder = arguments.out.clone().unwrap_or_else(|| Path::new("out").join(name));
    let _lock = lock_folder(arguments, &folder)?;
    live::begin(arguments, &folder)?;
    Ok(Some(StudyResources { dataset, device, folder, _lock }))
}

/// Refuses options that are for studies of many trials.
pub fn refuse_others(arguments: &StudyArguments) -> Result<()> {
    let options = [
        ("--shard", arguments.shard.is_some()),
        ("--widen", arguments.widen),
        ("--workers", arguments.workers.is_some()),
    ];
    refuse_options(&options, "is for a study of kind \"steps-to-result\"")
}

/// Locks the folder of a study that is about to run, unless another process is at work in it.
pub fn lock_folder(arguments: &StudyArguments, folder: &Path) -> Result<StudyLock> {
    let lock = StudyLock::acquire(folder, arguments.shard)?;
    if !lock.is_locked() {
        print_err!(
            "warning: the file system of {} has no locks: nothing keeps another process out of this study",
            folder.display()
        );
    }
    Ok(lock)
}

/// Writes `study.html` into the study's folder; returns its path.
pub fn write_page(folder: &Path, page: &Page) -> Result<String> {
    let path = folder.join("study.html");
    let unwritten = |why| Error::Disk { path: path.clone(), why: format!("cannot be written: {why}") };
    fs::write(&path, page.html()).map_err(unwritten)?;
    print_out!("page: {}", path.display());
    Ok(path.display().to_string())
}
