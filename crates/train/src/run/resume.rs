//! Going back to a checkpoint, past damaged ones; and what is put aside where a run starts over.

use std::fs;
use std::path::Path;

use espalier_data::regular_file::{self, SETTINGS};

use super::start_point::START_FILE;
use super::{Observer, SUMMARY_FILE};
use crate::checkpoint::{self, Checkpoints};
use crate::resolved::RUN_FILE;
use crate::trainer::Trainer;
use crate::{Error, Result, durable};

/// Goes back to the newest intact checkpoint, if there is any. Damaged ones are put aside; where there are no
/// others, that is refused.
pub(super) fn resume(
    trainer: &mut Trainer,
    checkpoints: &Checkpoints,
    folder: &Path,
    observer: &mut dyn Observer,
) -> Result<bool> {
    let mut damaged = Vec::new();
    let report = |broken: &Error| {
        if let Error::Checkpoint { path, .. } = broken {
            damaged.push((path.clone(), broken.to_string()));
        }
    };
    let loaded = trainer.load(checkpoints, report)?.is_some();
    match (loaded, damaged.first()) {
        (false, None) => observer.warning("there is no checkpoint yet: the run starts from step 0"),
        (false, Some((_, newest))) => return Err(no_intact_checkpoint(folder, newest)),
        (true, _) if trainer.ranks().is_rank0() => {
            for (path, problem) in &damaged {
                let moved = match checkpoint::set_aside(path) {
                    Ok(to) => format!("it is {} now", to.display()),
                    Err(why) => format!("it cannot be moved aside: {why}"),
                };
                observer.warning(&format!("{problem}; {moved}, and the one before it is used"));
            }
        }
        (true, _) => {}
    }
    Ok(loaded)
}

/// That a run cannot be resumed, though there is something that might be rescued; `newest` is what is wrong
/// with the newest.
pub(super) fn no_intact_checkpoint(folder: &Path, newest: &str) -> Error {
    let verify = format!("`espalier verify {}`", folder.display());
    Error::file(
        folder,
        format!(
            "no intact checkpoint is left to resume from ({newest}), and nothing was changed: {verify} checks all of them, \
             and --resume --fresh restarts from step 0 and moves them aside"
        ),
    )
}

/// Puts checkpoints, metrics and summary of a run that starts over, and a copy of its resolved file, into a
/// folder beside them.
pub(super) fn set_aside(folder: &Path, observer: &mut dyn Observer) -> Result<()> {
    let there = |name: &str| folder.join(name).symlink_metadata().is_ok();
    let files = ["checkpoints", "metrics.jsonl", SUMMARY_FILE];
    let files: Vec<&str> = files.into_iter().filter(|name| there(name)).collect();
    if files.is_empty() {
        return Ok(());
    }
    let names = (1..).map(|n| format!("set-aside-{n}"));
    let aside = folder.join(names.into_iter().find(|name| !there(name)).expect("some name is free"));
    let attempt = || -> std::io::Result<()> {
        durable::create_folder(&aside)?;
        for file in files {
            fs::rename(folder.join(file), aside.join(file))?;
        }
        for copied in [RUN_FILE, START_FILE].into_iter().filter(|name| there(name)) {
            durable::replace(&aside.join(copied), &regular_file::read(&folder.join(copied), SETTINGS)?)?;
        }
        durable::sync_folder(folder)
    };
    attempt().map_err(|why| Error::unwritten(&aside, why))?;
    observer.warning(&format!("the run restarts from step 0: the old files are in {}", aside.display()));
    Ok(())
}
