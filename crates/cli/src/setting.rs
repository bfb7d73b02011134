//! `--set FIELD=VALUE`: what is put into a run file, as whoever types it means it.

use std::convert::Infallible;

use espalier_plan::config::Override;

/// A setting. Paths in it are relative to where the command is run, as everything else on a command line is,
/// and not to the run file.
pub fn setting(text: &str) -> Result<Override, Infallible> {
    let setting = Override::from(text);
    Ok(match std::env::current_dir() {
        Ok(here) => setting.below(&here),
        // A folder that was removed under us: relative paths lead nowhere in any case.
        Err(_) => setting,
    })
}
