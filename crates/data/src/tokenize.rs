//! Text to token files, once, for runs that read them again and again (`data.kind = "tokens"`).
//!
//! What is written appears under its name when it is complete, and not before: one file, or a folder of files of
//! at most so many bytes, which are read in the order of their names.

use crate::{Error, TextFiles, TokenWidth, Tokenizer, encode::encode_files, files};
use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

/// Where ids go, and how.
#[derive(Debug, Clone)]
pub struct TokenFiles {
    /// A file, or with `shard_bytes` a folder, which is not there yet.
    pub path: PathBuf,
    /// How wide an id is.
    pub width: TokenWidth,
    /// Files of at most so many bytes.
    pub shard_bytes: Option<u64>,
    /// Threads that work at once; 0: one for each core.
    pub threads: usize,
}

/// What was written.
#[derive(Debug, Clone)]
pub struct Tokenized {
    /// Ids in all files.
    pub tokens: u64,
    /// Bytes of the text that they stand for.
    pub text_bytes: u64,
    /// Files of text.
    pub documents: usize,
    /// Files of ids, in the order in which they are read.
    pub files: Vec<PathBuf>,
    /// Files of folders that are no text.
    pub skipped: Vec<PathBuf>,
}

/// Writes the ids of a text by a tokenizer. `progress` is called with how many bytes of text were read, and
/// of how many; where it returns false, nothing is left behind, and nothing comes back.
pub fn tokenize(
    text: &TextFiles,
    tokenizer: &Tokenizer,
    to: &TokenFiles,
    progress: impl FnMut(u64, u64) -> bool + Send,
) -> Result<Option<Tokenized>, Error> {
    match rayon::ThreadPoolBuilder::new().num_threads(to.threads).build() {
        Ok(pool) => pool.install(|| tokenize_here(text, tokenizer, to, progress)),
        // Where the system gives no more threads, those that there are do.
        Err(_) => tokenize_here(text, tokenizer, to, progress),
    }
}

fn tokenize_here(
    text: &TextFiles,
    tokenizer: &Tokenizer,
    to: &TokenFiles,
    mut progress: impl FnMut(u64, u64) -> bool,
) -> Result<Option<Tokenized>, Error> {
    if to.path.symlink_metadata().is_ok() {
        return Err(Error::Exists { path: to.path.clone() });
    }
    let most = match to.width {
        TokenWidth::U16 => 1 << 16,
        TokenWidth::U32 => usize::MAX,
    };
    if tokenizer.vocab() > most {
        let got = format!("u16 for {} tokens", tokenizer.vocab());
        return Err(Error::setting("dtype", "u32, which holds more than 65536 tokens", got));
    }
    let found = text.files()?;
    let all = files::total(&found.wanted)?;
    let mut writer = TokenWriter::new(to)?;
    let mut read = 0;
    let mut go_on = progress(0, all);
    let hand_on = |ids: &[u32], bytes: usize| {
        writer.write(ids)?;
        read += bytes as u64;
        go_on = go_on && progress(read, all);
        Ok(go_on)
    };
    encode_files(&found.wanted, tokenizer, hand_on)?;
    if !go_on {
        return Ok(None);
    }
    if writer.tokens == 0 {
        return Err(Error::Empty { path: text.paths[0].clone(), expected: "text".into() });
    }
    let (tokens, text_bytes, documents) = (writer.tokens, read, found.wanted.len());
    Ok(Some(Tokenized { tokens, text_bytes, documents, files: writer.finish()?, skipped: found.skipped }))
}

/// Files on the way; what is dropped before it is finished leaves nothing.
struct TokenWriter<'a> {
    to: &'a TokenFiles,
    /// What stands where the file or folder will be, until it is whole.
    temporary: PathBuf,
    file: Option<BufWriter<File>>,
    /// Names within the folder.
    names: Vec<String>,
    /// Ids in the file that is open.
    length: u64,
    tokens: u64,
    bytes: Vec<u8>,
}

impl<'a> TokenWriter<'a> {
    fn new(to: &'a TokenFiles) -> Result<TokenWriter<'a>, Error> {
        let name = to.path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = to.path.with_file_name(format!(".{name}.writing"));
        // What a killed process has left.
        let _ = fs::remove_file(&temporary).or_else(|_| fs::remove_dir_all(&temporary));
        if to.shard_bytes.is_some() {
            fs::create_dir(&temporary).map_err(writing(&temporary))?;
        }
        let (names, bytes) = (Vec::new(), Vec::new());
        let mut writer = TokenWriter { to, temporary, file: None, names, length: 0, tokens: 0, bytes };
        // What cannot be written is known before anything is read.
        writer.open()?;
        Ok(writer)
    }

    /// Opens the next file, and closes the one before.
    fn open(&mut self) -> Result<(), Error> {
        self.close()?;
        let path = match self.to.shard_bytes {
            None => self.temporary.clone(),
            Some(_) => {
                self.names.push(format!("tokens-{:05}.bin", self.names.len()));
                self.temporary.join(&self.names[self.names.len() - 1])
            }
        };
        let file = File::create(&path).map_err(writing(&path))?;
        (self.file, self.length) = (Some(BufWriter::with_capacity(1 << 20, file)), 0);
        Ok(())
    }

    fn close(&mut self) -> Result<(), Error> {
        let Some(file) = self.file.take() else { return Ok(()) };
        let synced =
            file.into_inner().map_err(io::IntoInnerError::into_error).and_then(|file| file.sync_all());
        synced.map_err(writing(&self.temporary))
    }

    fn write(&mut self, mut ids: &[u32]) -> Result<(), Error> {
        let most =
            self.to.shard_bytes.map_or(u64::MAX, |bytes| (bytes / self.to.width.bytes() as u64).max(1));
        while !ids.is_empty() {
            if self.length == most {
                self.open()?;
            }
            let (now, rest) = ids.split_at(ids.len().min((most - self.length) as usize));
            self.bytes.clear();
            match self.to.width {
                TokenWidth::U16 => self.bytes.extend(now.iter().flat_map(|id| (*id as u16).to_le_bytes())),
                TokenWidth::U32 => self.bytes.extend(now.iter().flat_map(|id| id.to_le_bytes())),
            }
            let file = self.file.as_mut().expect("a file is open until it is finished");
            file.write_all(&self.bytes).map_err(writing(&self.temporary))?;
            self.length += now.len() as u64;
            self.tokens += now.len() as u64;
            ids = rest;
        }
        Ok(())
    }

    /// Gives what was written its name.
    fn finish(mut self) -> Result<Vec<PathBuf>, Error> {
        self.close()?;
        let path = &self.to.path;
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let renamed = fs::rename(&self.temporary, path).and_then(|()| File::open(parent)?.sync_all());
        renamed.map_err(writing(path))?;
        Ok(match self.to.shard_bytes {
            None => vec![path.clone()],
            Some(_) => self.names.iter().map(|name| path.join(name)).collect(),
        })
    }
}

impl Drop for TokenWriter<'_> {
    fn drop(&mut self) {
        // Where it was finished there is none of either.
        let _ = fs::remove_file(&self.temporary).or_else(|_| fs::remove_dir_all(&self.temporary));
    }
}

fn writing(path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Write { path: path.into(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Bpe, DataSplit, Dataset, TokenDataset, TokenWindows};

    const JSON: &str = r#"{"added_tokens": [{"id": 2, "content": "<|endoftext|>"}], "pre_tokenizer": {"type": "ByteLevel"},
        "model": {"vocab": {"a": 0, "b": 1}, "merges": []}}"#;

    fn setting(folder: &Path) -> (TextFiles, Tokenizer) {
        for (name, text) in [("1.txt", "abab"), ("2.txt", ""), ("3.txt", "ba"), ("t.json", JSON)] {
            fs::write(folder.join(name), text).unwrap();
        }
        let text = TextFiles { paths: vec![folder.into()], extensions: vec!["txt".into()], tokenizer: None };
        (text, Tokenizer::Bpe(Box::new(Bpe::open(&folder.join("t.json")).unwrap())))
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_is_written_is_what_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let (text, tokenizer) = setting(folder.path());
        for (name, width, shard_bytes) in [
            ("one.bin", TokenWidth::U16, None),
            ("wide.bin", TokenWidth::U32, None),
            ("many", TokenWidth::U16, Some(7)),
        ] {
            let path = folder.path().join(name);
            let to = TokenFiles { path: path.clone(), width, shard_bytes, threads: 2 };
            let mut progress_calls = Vec::new();
            let mut progress = |read, of| {
                progress_calls.push((read, of));
                true
            };
            let done = tokenize(&text, &tokenizer, &to, &mut progress).unwrap().unwrap();
            assert_eq!((done.tokens, done.text_bytes, done.documents), (8, 6, 3));
            assert_eq!((progress_calls[0], progress_calls[progress_calls.len() - 1]), ((0, 6), (6, 6)));
            assert_eq!(done.files.len(), if shard_bytes.is_some() { 3 } else { 1 });
            let windows = TokenWindows { seq: 7, validation: 0.0, seed: 0 };
            let data = Dataset::Tokens(TokenDataset::files(&[path], None, width, 3, windows).unwrap());
            assert_eq!(data.batch(DataSplit::Train, &[(0, 0)]).unwrap().targets, [1, 0, 1, 2, 1, 0, 2]);
        }
        assert_eq!(
            names(&folder.path().join("many")),
            ["tokens-00000.bin", "tokens-00001.bin", "tokens-00002.bin"]
        );
        assert_eq!(
            names(folder.path()),
            ["1.txt", "2.txt", "3.txt", "many", "one.bin", "t.json", "wide.bin"]
        );
    }

    /// Whatever ends it early, nothing is left.
    #[test]
    fn what_is_not_whole_is_not_there() {
        let folder = tempfile::tempdir().unwrap();
        let (text, tokenizer) = setting(folder.path());
        let before = names(folder.path());
        let to = |name: &str, shard_bytes| TokenFiles {
            path: folder.path().join(name),
            width: TokenWidth::U16,
            shard_bytes,
            threads: 1,
        };
        for shard_bytes in [None, Some(4)] {
            let stopped = tokenize(&text, &tokenizer, &to("out", shard_bytes), |read, _| read == 0).unwrap();
            assert!(stopped.is_none());
            assert_eq!(names(folder.path()), before);
        }
        let go_on = |_, _| true;
        let there = tokenize(&text, &tokenizer, &to("1.txt", None), go_on).unwrap_err();
        assert!(there.to_string().ends_with("1.txt is there already: choose another name"), "{there}");
        let nowhere = tokenize(&text, &tokenizer, &to("none/out.bin", None), go_on).unwrap_err();
        assert!(matches!(nowhere, Error::Write { .. }), "{nowhere}");
        fs::write(folder.path().join("4.txt"), "abc").unwrap();
        let spelled = tokenize(&text, &tokenizer, &to("out", None), go_on).unwrap_err();
        assert!(matches!(spelled, Error::NoToken { .. }), "{spelled}");
        fs::remove_file(folder.path().join("4.txt")).unwrap();
        assert_eq!(names(folder.path()), before);
        let empty = TextFiles { paths: vec![folder.path().join("2.txt")], ..TextFiles::default() };
        assert!(matches!(tokenize(&empty, &tokenizer, &to("out", None), go_on), Err(Error::Empty { .. })));
        assert_eq!(names(folder.path()), before);
    }
}
