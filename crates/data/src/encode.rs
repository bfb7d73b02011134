//! Text files to ids, on all cores, and the same ids whatever their number.
//!
//! Files are read in order, in chunks of about a megabyte where the tokenizer allows it (`can_split`): a
//! chunk ends before a space between two letters or digits of ASCII, where no word that a tokenizer knows
//! goes on. Chunks depend on the text alone. Threads make ids of several chunks at once; these are handed on
//! in order, so no more than a few chunks are in memory.

use crate::{Error, Tokenizer, bpe::WordCache, error::reading};
use rayon::{ThreadPool, ThreadPoolBuilder, prelude::*};
use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

/// Bytes of text in a chunk.
const CHUNK: usize = 1 << 20;

/// Hands on the ids of all files in order, with how many bytes of text they are of; the token that ends a
/// text follows each file that is not empty. `take` says whether to continue.
pub(crate) fn encode_files(
    files: &[PathBuf],
    tokenizer: &Tokenizer,
    take: impl FnMut(&[u32], usize) -> Result<bool, Error>,
) -> Result<(), Error> {
    encode_chunks(files, tokenizer, CHUNK, take)
}

fn encode_chunks(
    files: &[PathBuf],
    tokenizer: &Tokenizer,
    size: usize,
    mut take: impl FnMut(&[u32], usize) -> Result<bool, Error>,
) -> Result<(), Error> {
    let mut chunks =
        TextChunks { files: files.iter(), open: None, size: tokenizer.can_split().then_some(size) };
    let threads = Threads::find(|threads| ThreadPoolBuilder::new().num_threads(threads).build().ok());
    let at_once = 2 * threads.count();
    loop {
        let mut read = Vec::new();
        let mut buffered = 0;
        // What cannot be split may be large.
        while read.len() < at_once && buffered < at_once * size {
            let Some(chunk) = chunks.next()? else { break };
            buffered += chunk.text.len();
            read.push(chunk);
        }
        if read.is_empty() {
            return Ok(());
        }
        let encode = |cache: &mut _, chunk: &TextChunk| chunk.encode(tokenizer, cache);
        let encoded: Vec<_> =
            threads.install(|| read.par_iter().map_init(WordCache::default, encode).collect::<Vec<_>>());
        // The first of several errors, whichever thread met its own first.
        for (chunk, ids) in read.iter().zip(encoded) {
            if !take(&ids?, chunk.text.len())? {
                return Ok(());
            }
        }
    }
}

/// Where chunks are encoded: in the pool that the caller is a thread of, or in one of as many threads as the
/// system gives, be it none.
enum Threads {
    Caller,
    Pool(ThreadPool),
}

impl Threads {
    /// `build` makes a pool of so many threads, 0 for one of each core. Rayon's global pool would panic where
    /// none can be started.
    fn find(build: impl Fn(usize) -> Option<ThreadPool>) -> Threads {
        if rayon::current_thread_index().is_some() {
            return Threads::Caller;
        }
        let this_one = || ThreadPoolBuilder::new().num_threads(1).use_current_thread().build().ok();
        build(0).or_else(|| build(1)).or_else(this_one).map_or(Threads::Caller, Threads::Pool)
    }

    fn count(&self) -> usize {
        match self {
            Threads::Caller => rayon::current_num_threads(),
            Threads::Pool(pool) => pool.current_num_threads(),
        }
    }

    fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match self {
            Threads::Caller => work(),
            Threads::Pool(pool) => pool.install(work),
        }
    }
}

/// Text that ids are made of by itself.
struct TextChunk {
    text: String,
    /// Whether a file that is not empty ends with it.
    ends_file: bool,
    /// Whether another one of the same file comes before it.
    continues: bool,
}

impl TextChunk {
    fn encode(&self, tokenizer: &Tokenizer, cache: &mut WordCache) -> Result<Vec<u32>, Error> {
        let mut ids = match tokenizer {
            Tokenizer::Bpe(bpe) => {
                let mut ids = Vec::new();
                bpe.encode_into(&self.text, self.continues, cache, &mut ids)?;
                ids
            }
            other => other.encode(&self.text)?,
        };
        ids.extend(tokenizer.end().filter(|_| self.ends_file));
        Ok(ids)
    }
}

/// All files, chunk by chunk.
struct TextChunks<'a> {
    files: std::slice::Iter<'a, PathBuf>,
    open: Option<OpenFile<'a>>,
    /// Bytes of a chunk, about; none: a file is one.
    size: Option<usize>,
}

/// A file on the way.
struct OpenFile<'a> {
    path: &'a Path,
    file: File,
    /// Where in the file what is pending begins.
    offset: usize,
    /// What was read of it and is in no chunk yet.
    pending: Vec<u8>,
}

impl TextChunks<'_> {
    fn next(&mut self) -> Result<Option<TextChunk>, Error> {
        if self.open.is_none() {
            let Some(path) = self.files.next() else { return Ok(None) };
            let file = crate::error::open(path, "a text file")?;
            self.open = Some(OpenFile { path, file, offset: 0, pending: Vec::new() });
        }
        let open = self.open.as_mut().expect("a file was opened");
        let end = open.read_chunk(self.size)?;
        let rest = open.pending.split_off(end.unwrap_or(open.pending.len()));
        let bytes = std::mem::replace(&mut open.pending, rest);
        let (offset, length) = (open.offset, bytes.len());
        open.offset += length;
        let text = String::from_utf8(bytes).map_err(|e| {
            let position = offset + e.utf8_error().valid_up_to();
            Error::NotText { path: open.path.into(), position }
        })?;
        let ends_file = end.is_none() && open.offset > 0;
        if end.is_none() {
            self.open = None;
        }
        Ok(Some(TextChunk { text, ends_file, continues: offset > 0 }))
    }
}

impl OpenFile<'_> {
    /// Reads until a chunk is pending; returns where it ends, or none where the file does.
    fn read_chunk(&mut self, size: Option<usize>) -> Result<Option<usize>, Error> {
        let failed = || reading(self.path, "a text file");
        let Some(size) = size else {
            self.file.read_to_end(&mut self.pending).map_err(failed())?;
            return Ok(None);
        };
        loop {
            let (before, wanted) = (self.pending.len(), size as u64);
            let read = (&mut self.file).take(wanted).read_to_end(&mut self.pending).map_err(failed())?;
            if (read as u64) < wanted {
                return Ok(None);
            }
            // The first byte cannot be told apart from its neighbours that are not there.
            if let Some(end) = last_boundary(&self.pending, before.saturating_sub(1).max(1)) {
                return Ok(Some(end));
            }
        }
    }
}

/// The last index, from `start` on, before which a text may be split.
fn last_boundary(text: &[u8], start: usize) -> Option<usize> {
    let is_boundary = |i: &usize| {
        text[*i] == b' ' && text[i - 1].is_ascii_alphanumeric() && text[i + 1].is_ascii_alphanumeric()
    };
    (start..text.len().saturating_sub(1)).rev().find(is_boundary)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Ids of files, by so many threads, in chunks of so many bytes.
    fn ids(files: &[PathBuf], tokenizer: &Tokenizer, threads: usize, size: usize) -> Result<Vec<u32>, Error> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let (mut all, mut bytes) = (Vec::new(), 0);
        pool.install(|| {
            encode_chunks(files, tokenizer, size, |ids, of| {
                all.extend_from_slice(ids);
                bytes += of;
                Ok(true)
            })
        })?;
        assert_eq!(bytes, files.iter().map(|file| fs::read(file).unwrap().len()).sum::<usize>());
        Ok(all)
    }

    /// The caller's thread does what there are no others for, and finds the same.
    #[test]
    fn a_text_is_encoded_where_no_thread_can_be_started() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        fs::write(&path, "a tree ").unwrap();
        // A thread of its own, since it becomes one of a pool.
        let counts = std::thread::spawn(|| {
            let single = Threads::find(|_| None);
            (single.count(), single.install(|| (0..100).into_par_iter().sum::<u32>()))
        });
        assert_eq!(counts.join().unwrap(), (1, 4950));
        let one =
            Threads::find(|n| (n == 1).then(|| ThreadPoolBuilder::new().num_threads(1).build().unwrap()));
        assert_eq!(one.count(), 1);
        let mut all = Vec::new();
        encode_files(&[path], &Tokenizer::Bytes, |ids, _| {
            all.extend_from_slice(ids);
            Ok(true)
        })
        .unwrap();
        assert_eq!(all, b"a tree ".map(u32::from));
    }

    #[test]
    fn chunks_are_whole_words_and_together_the_text() {
        assert_eq!(last_boundary(b"one two three", 1), Some(7));
        assert_eq!(last_boundary(b"one two three", 8), None);
        for unsplit in ["one  two", "one. two", "one .two", "one\ntwo", " one", "one ", "é e", ""] {
            assert_eq!(last_boundary(unsplit.as_bytes(), 1), None, "{unsplit:?}");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        let text = "a tree is trained along a lattice, ünd  pruned ".repeat(20);
        fs::write(&path, &text).unwrap();
        let files = [path];
        for size in [1, 7, 64, 500, 10_000] {
            let mut chunks = TextChunks { files: files.iter(), open: None, size: Some(size) };
            let mut found = Vec::new();
            while let Some(chunk) = chunks.next().unwrap() {
                found.push(chunk);
            }
            assert!(size > text.len() || found.len() > 1, "{size}");
            assert_eq!(found.iter().map(|chunk| chunk.text.as_str()).collect::<String>(), text);
            assert_eq!(found.iter().filter(|chunk| chunk.ends_file).count(), 1);
        }
    }

    /// Of every style that may be split, on text with all kinds of things beside the points where it is.
    #[test]
    fn a_text_in_chunks_has_the_ids_of_the_full_text() {
        let styles = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle/tokenizers");
        let expected: serde_json::Value =
            serde_json::from_slice(&fs::read(styles.join("expected.json")).unwrap()).unwrap();
        let texts = expected["gpt2"].as_array().unwrap().iter().map(|one| one["text"].as_str().unwrap());
        let text = texts.collect::<Vec<_>>().join(" and a 3 x ");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        fs::write(&path, &text).unwrap();
        let mut splittable = 0;
        for style in expected.as_object().unwrap().keys() {
            let Ok(tokenizer) = Tokenizer::open(&styles.join(style).with_extension("json")) else { continue };
            let mut expected_ids = tokenizer.encode(&text).unwrap();
            expected_ids.extend(tokenizer.end());
            splittable += usize::from(tokenizer.can_split());
            for size in [1, 30, 200] {
                let chunks = ids(std::slice::from_ref(&path), &tokenizer, 2, size).unwrap();
                assert_eq!(chunks, expected_ids, "{style} in chunks of {size}");
            }
        }
        assert_eq!(splittable, if cfg!(feature = "tokenizers") { 8 } else { 6 });
    }

    #[test]
    fn the_same_ids_on_any_number_of_threads() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("1.txt"), "12+13=25\n7-9=-2\n".repeat(100)).unwrap();
        fs::write(at("2.txt"), "").unwrap();
        fs::write(at("3.txt"), "1+1=2\n").unwrap();
        let files = ["1.txt", "2.txt", "3.txt"].map(at);
        let one = ids(&files, &Tokenizer::Arithmetic, 1, CHUNK).unwrap();
        assert_eq!(one.len(), 100 * 16 + 6);
        for (threads, size) in [(1, 5), (3, 5), (2, 100)] {
            assert_eq!(ids(&files, &Tokenizer::Arithmetic, threads, size).unwrap(), one);
        }
        // Of several mistakes the first one, and where it stands in its file.
        fs::write(at("2.txt"), [&b"1 1 ".repeat(50)[..], b"\xff", &b" 1 1".repeat(50)].concat()).unwrap();
        fs::write(at("3.txt"), b"\xff").unwrap();
        for threads in [1, 2] {
            let error = ids(&files[1..], &Tokenizer::Bytes, threads, 8).unwrap_err();
            assert!(matches!(error, Error::NotText { position: 200, .. }), "{error}");
        }
    }
}
