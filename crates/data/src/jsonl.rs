//! Rows of JSON, one object a line, as documents of tokens: read in order, some at a time, and encoded on all
//! cores. A line that is wrong is named by its file and number, the first of several.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use espalier_tensor::memory::ByteSize;
use rayon::prelude::*;

use crate::answers::{JsonRow, LearntTokens, RowEncoder};
use crate::{Error, error};

/// The most bytes of a line: far more than any context holds, and far less than memory.
const LINE: u64 = 64 << 20;
/// Bytes of lines that are encoded at once.
const AT_ONCE: usize = 8 << 20;

/// The files that are meant: files, all `.jsonl` files of folders, and those that a name with `*` and `?` stands
/// for, in the order of their names.
pub(crate) fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, Error> {
    let mut all = Vec::new();
    for path in paths {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let (folder, pattern) = match path.is_dir() {
            true => (path.clone(), "*.jsonl".to_owned()),
            false if !path.exists() && name.contains(['*', '?']) => {
                let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
                (parent.unwrap_or(Path::new(".")).to_owned(), name)
            }
            false => {
                all.push(path.clone());
                continue;
            }
        };
        let entries =
            std::fs::read_dir(&folder).map_err(error::reading(&folder, "a folder of .jsonl files"))?;
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry.map_err(error::reading(&folder, "a folder of .jsonl files"))?;
            let fits =
                entry.file_name().to_str().is_some_and(|name| matches(pattern.as_bytes(), name.as_bytes()));
            found.extend(Some(entry.path()).filter(|path| fits && path.is_file()));
        }
        if found.is_empty() {
            return Err(Error::Empty { path: path.clone(), expected: format!("files named {pattern}") });
        }
        found.sort();
        all.append(&mut found);
    }
    Ok(all)
}

/// Whether a name is what a pattern stands for: `*` any characters, `?` one.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    match (pattern.split_first(), name.split_first()) {
        (None, None) => true,
        (Some((b'*', rest)), _) => {
            matches(rest, name) || name.split_first().is_some_and(|(_, name)| matches(pattern, name))
        }
        (Some((b'?', rest)), Some((_, name))) => matches(rest, name),
        (Some((a, rest)), Some((b, name))) => a == b && matches(rest, name),
        _ => false,
    }
}

/// Hands on the documents of all rows, in order; `progress` learns how many bytes have been read.
pub(crate) fn read(
    files: &[PathBuf],
    encoder: &RowEncoder<'_>,
    progress: &mut dyn FnMut(u64),
    mut take: impl FnMut(LearntTokens) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut done = 0;
    for path in files {
        let mut rows = RowReader::open(path)?;
        loop {
            let (mut lines, mut bytes) = (Vec::new(), 0);
            while bytes < AT_ONCE {
                let Some(line) = rows.next()? else { break };
                bytes += line.text.len();
                lines.push(line);
            }
            if lines.is_empty() {
                break;
            }
            let encode = |line: &RowLine| line.encode(path, encoder);
            let documents: Vec<_> = lines.par_iter().map(encode).collect();
            for document in documents {
                take(document?)?;
            }
            progress(done + rows.offset);
        }
        done += rows.offset;
    }
    Ok(())
}

/// A line with something in it.
struct RowLine {
    /// From 1.
    number: u64,
    text: Vec<u8>,
}

impl RowLine {
    fn encode(&self, path: &Path, encoder: &RowEncoder<'_>) -> Result<LearntTokens, Error> {
        let refuse = |why: String| Error::Row { path: path.into(), line: self.number, why };
        let row: JsonRow = serde_json::from_slice(&self.text).map_err(|why| {
            let text = why.to_string();
            // Where in the file it stands is said already.
            let reason = text.rsplit_once(" at line ").map_or(text.as_str(), |(reason, _)| reason);
            refuse(format!("is not a JSON object of a row: {reason} at column {}", why.column()))
        })?;
        encoder.encode(row).map_err(refuse)
    }
}

/// The lines of a file.
struct RowReader<'a> {
    path: &'a Path,
    file: BufReader<File>,
    number: u64,
    /// Bytes read.
    offset: u64,
}

impl RowReader<'_> {
    fn open(path: &Path) -> Result<RowReader<'_>, Error> {
        let file = BufReader::with_capacity(1 << 20, error::open(path, "a .jsonl file")?);
        Ok(RowReader { path, file, number: 0, offset: 0 })
    }

    /// The next line that is not blank.
    fn next(&mut self) -> Result<Option<RowLine>, Error> {
        loop {
            let mut text = Vec::new();
            let read = (&mut self.file).take(LINE + 1).read_until(b'\n', &mut text);
            let read = read.map_err(error::reading(self.path, "a .jsonl file"))? as u64;
            if read == 0 {
                return Ok(None);
            }
            self.number += 1;
            self.offset += read;
            if read > LINE {
                let why = format!("is longer than {}: a row is one line", ByteSize(LINE as usize));
                return Err(Error::Row { path: self.path.into(), line: self.number, why });
            }
            if text.iter().any(|byte| !byte.is_ascii_whitespace()) {
                return Ok(Some(RowLine { number: self.number, text }));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_matched() {
        for (pattern, name, fits) in [
            ("*.jsonl", "a.jsonl", true),
            ("*.jsonl", "a.json", false),
            ("part-??.jsonl", "part-01.jsonl", true),
            ("part-??.jsonl", "part-1.jsonl", false),
            ("*a*b", "xxaxxab", true),
            ("", "", true),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), fits, "{pattern} {name}");
        }
    }
}
