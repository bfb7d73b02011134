//! A file that grows by lines: what it has got since it was read last. A line that is not complete yet is
//! left for the next.

use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use espalier_data::regular_file;

/// Where the last reading ended.
pub struct Tail {
    path: PathBuf,
    /// Of the file that was looked at: another under its name is read from its beginning.
    file: Option<(u64, u64)>,
    offset: u64,
}

#[derive(Debug, Default, PartialEq)]
pub struct NewLines {
    /// Whether what was read before is not there any more.
    pub restarted: bool,
    /// Whole lines, without their ends.
    pub lines: Vec<Vec<u8>>,
}

impl Tail {
    pub fn of(path: PathBuf) -> Tail {
        Tail { path, file: None, offset: 0 }
    }

    /// A file that is not there, or no file, has no lines.
    pub fn read_new(&mut self) -> NewLines {
        self.read().unwrap_or_default()
    }

    fn read(&mut self) -> std::io::Result<NewLines> {
        let mut new_lines = NewLines::default();
        let mut file = regular_file::open(&self.path)?;
        let found = file.metadata()?;
        let identity = Some((found.dev(), found.ino()));
        if self.file != identity || found.len() < self.offset {
            new_lines.restarted = self.file.is_some();
            (self.file, self.offset) = (identity, 0);
        }
        file.seek(SeekFrom::Start(self.offset))?;
        let mut bytes = Vec::new();
        file.take(found.len() - self.offset).read_to_end(&mut bytes)?;
        let complete = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        self.offset += complete as u64;
        let lines = bytes[..complete].split_inclusive(|byte| *byte == b'\n');
        new_lines.lines = lines.map(|line| line[..line.len() - 1].to_vec()).collect();
        Ok(new_lines)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn lines_come_once_and_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut tail = Tail::of(path.clone());
        let lines = |new_lines: NewLines| -> Vec<String> {
            new_lines.lines.into_iter().map(|line| String::from_utf8(line).unwrap()).collect()
        };
        assert_eq!(tail.read_new(), NewLines::default(), "it need not be there yet");
        fs::write(&path, "1\n2\n3").unwrap();
        assert_eq!(lines(tail.read_new()), ["1", "2"]);
        fs::write(&path, "1\n2\n34\n5\n").unwrap();
        assert_eq!(lines(tail.read_new()), ["34", "5"]);
        assert_eq!(lines(tail.read_new()), [""; 0]);
        // Resumed from before: shorter, or another file.
        fs::write(&path, "1\n").unwrap();
        let new_lines = tail.read_new();
        assert!(new_lines.restarted);
        assert_eq!(lines(new_lines), ["1"]);
        fs::write(folder.path().join("new"), "1\n2\n3\n").unwrap();
        fs::rename(folder.path().join("new"), &path).unwrap();
        let new_lines = tail.read_new();
        assert!(new_lines.restarted);
        assert_eq!(lines(new_lines), ["1", "2", "3"]);
    }
}
