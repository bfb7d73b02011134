//! `run.toml` in a run folder: the resolved run file, which says what the run was to whoever goes on with it,
//! evaluates or prunes it. A digit of it that a disk has changed would make another run of it without a word,
//! so it carries a checksum.

use std::io::ErrorKind;
use std::path::Path;

use espalier_data::regular_file::{self, SETTINGS};

use crate::checkpoint::retry;
use crate::{Error, Result, checksum, durable};

pub(crate) const RUN_FILE: &str = "run.toml";

/// Beside it, what the data files of the run held.
pub(crate) const DATA_FILE: &str = "data.json";

/// The resolved run file at `path`; none where there is no file. An error where it is not what the run wrote.
pub fn read_resolved(path: &Path) -> Result<Option<String>> {
    let text = match retry(|| regular_file::read(path, SETTINGS)) {
        Err(why) if matches!(why.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        read => read.map_err(|why| Error::unread(path, why))?,
    };
    let text = String::from_utf8(text).map_err(|_| Error::file(path, "is no text"))?;
    let text = checksum::check_toml(&text).map_err(|why| Error::file(path, why))?;
    Ok(Some(text.to_owned()))
}

/// Writes that of a run.
pub(crate) fn write_resolved(folder: &Path, text: &str) -> Result<()> {
    let path = folder.join(RUN_FILE);
    let text = checksum::add_to_toml(text);
    let written = durable::create_folder(folder).and_then(|()| durable::replace(&path, text.as_bytes()));
    written.map_err(|why| Error::unwritten(&path, why))
}
