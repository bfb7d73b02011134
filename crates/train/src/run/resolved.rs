//! `run.toml` in a run folder: the resolved run file, which says what the run was to whoever goes on with it, evaluates or prunes it.
//! A digit of it that a disk has changed would make another run of it without a word, so it carries a checksum.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use super::{RUN_FILE, write};
use crate::checkpoint::retry;
use crate::{Error, Result, checksum};

/// The resolved run file at `path`; none where there is no file. An error where it is not what the run wrote.
pub fn read_resolved(path: &Path) -> Result<Option<String>> {
    let text = match retry(|| fs::read(path)) {
        Err(why) if matches!(why.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        read => read.map_err(|why| Error::unread(path, why))?,
    };
    let text = String::from_utf8(text).map_err(|_| Error::file(path, "is no text"))?;
    let text = checksum::check_toml(&text).map_err(|why| Error::file(path, why))?;
    Ok(Some(text.to_owned()))
}

/// Writes that of a run.
pub(super) fn write_resolved(folder: &Path, text: &str) -> Result<()> {
    write(folder, RUN_FILE, &checksum::add_to_toml(text))
}
