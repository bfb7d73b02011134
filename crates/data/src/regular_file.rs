//! Files that a person or a run folder names, read without waiting and with an end.
//!
//! A FIFO would be waited for until somebody writes into it, a device may have no end, and opening one may do
//! something. So only regular files are opened, and of these no more is read than a file of its kind can be
//! large.

use espalier_tensor::memory::ByteSize;
use std::{
    fs::{self, File, FileType},
    io::{self, Read, Seek, SeekFrom},
    path::Path,
};

/// The most bytes of what people write and programs describe a run by: run, study, cluster and schedule
/// files, configurations.
pub const SETTINGS: u64 = 64 << 20;
/// The most bytes of what grows with the work that is done: metrics, trials, timelines, vocabularies.
pub const RECORDS: u64 = 4 << 30;

/// Opens a regular file. What else has this name is refused before it is opened; what takes its place in
/// between is refused behind, and not waited for.
pub fn open(path: &Path) -> io::Result<File> {
    check(fs::metadata(path)?.file_type())?;
    let mut options = File::options();
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32);
    }
    let file = options.read(true).open(path)?;
    check(file.metadata()?.file_type())?;
    Ok(file)
}

/// All bytes of a regular file that has at most `limit` of them.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    read_from(path, 0, limit)
}

/// The bytes from an offset on, which are at most `limit`.
pub fn read_from(path: &Path, start: u64, limit: u64) -> io::Result<Vec<u8>> {
    let mut file = open(path)?;
    let too_long = || {
        io::Error::new(io::ErrorKind::InvalidData, format!("it has more than {}", ByteSize(limit as usize)))
    };
    let size = file.metadata()?.len().saturating_sub(start);
    file.seek(SeekFrom::Start(start))?;
    if size > limit {
        return Err(too_long());
    }
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(size as usize)?;
    // Some files are longer than they say, and some grow.
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(too_long());
    }
    Ok(bytes)
}

/// The same as text.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    let not_text = |_| io::Error::new(io::ErrorKind::InvalidData, "it is not text in UTF-8");
    String::from_utf8(read(path, limit)?).map_err(not_text)
}

fn check(kind: FileType) -> io::Result<()> {
    match irregular(kind) {
        Some(got) => {
            Err(io::Error::new(io::ErrorKind::InvalidInput, format!("it is {got}, not a regular file")))
        }
        None => Ok(()),
    }
}

/// What a file is that is neither regular nor a folder.
pub fn irregular(kind: FileType) -> Option<&'static str> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return Some("a FIFO");
        }
        if kind.is_char_device() || kind.is_block_device() {
            return Some("a device");
        }
        if kind.is_socket() {
            return Some("a socket");
        }
    }
    let _ = kind;
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// In no time: a test that waits for somebody to write into the FIFO does not end.
    #[test]
    fn what_never_begins_or_ends_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let [fifo, link, long, text] = ["fifo", "link", "long", "text"].map(|name| folder.path().join(name));
        assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        // A terabyte that takes no room.
        File::create(&long).unwrap().set_len(1 << 40).unwrap();
        fs::write(&text, "seed = 1").unwrap();
        let error = |path: &Path| read_text(path, SETTINGS).unwrap_err().to_string();
        assert_eq!(error(&fifo), "it is a FIFO, not a regular file");
        assert_eq!(error(&link), "it is a device, not a regular file");
        assert_eq!(error(&long), "it has more than 67.1 MB");
        assert_eq!(read_text(&text, 8).unwrap(), "seed = 1");
        assert_eq!(read_text(&text, 7).unwrap_err().to_string(), "it has more than 7 B");
        fs::write(&text, [0xff, b'a']).unwrap();
        assert_eq!(error(&text), "it is not text in UTF-8");
        // Files of the system have no size, and an end.
        assert!(!read("/proc/self/status".as_ref(), SETTINGS).unwrap().is_empty());
        assert_eq!(error(&folder.path().join("none")), "No such file or directory (os error 2)");
    }
}
