//! Text files, or folders of them, as one stream of bytes or of a tokenizer's ids.
//!
//! A folder is read to its depths in the order of its names, without hidden files and folders, without build
//! outputs (`target`, `node_modules`), without links to folders, and without binary files (a zero byte among
//! the first 8,192, as git has it). Binary files, devices and FIFOs in it are listed as skipped. A regular
//! file that is named itself is read whatever it is.
//!
//! As bytes, files follow each other as they are. A tokenizer that knows what ends a text (`<|endoftext|>`,
//! `</s>`) puts it after each file, as GPT-2's training data had it.

use crate::{Error, Tokenizer, encode::encode_files, error::reading, stream::TokenStream};
use std::{
    fs,
    path::{Path, PathBuf},
};

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TextFiles {
    /// Files and folders.
    pub paths: Vec<PathBuf>,
    /// If any, only files of folders with one of these, with or without the dot.
    pub extensions: Vec<String>,
    /// A Hugging Face `tokenizer.json`; bytes without.
    pub tokenizer: Option<PathBuf>,
}

impl TextFiles {
    /// The text that is held out beside this one, read in the same way.
    pub(crate) fn held_out(&self, paths: &[PathBuf]) -> TextFiles {
        let mut held_out_files = TextFiles { paths: paths.to_vec(), ..self.clone() };
        if !paths.iter().any(|path| path.is_dir()) {
            held_out_files.extensions.clear(); // they are for folders, and may be meant for those of `path` alone
        }
        held_out_files
    }

    /// All the text, as ids; what makes ids of text; and the files that were skipped.
    pub(crate) fn read(&self) -> Result<(TokenStream, Tokenizer, Vec<PathBuf>), Error> {
        let tokenizer = match &self.tokenizer {
            Some(path) => Tokenizer::open(path)?,
            None => Tokenizer::Bytes,
        };
        let (stream, skipped) = self.read_by(&tokenizer)?;
        Ok((stream, tokenizer, skipped))
    }

    /// All the text as the ids of a tokenizer, whichever the settings name; and the files that were skipped.
    pub(crate) fn read_by(&self, tokenizer: &Tokenizer) -> Result<(TokenStream, Vec<PathBuf>), Error> {
        let FoundFiles { wanted: files, skipped } = self.files()?;
        let read = |path: &PathBuf| crate::error::read(path, "a text file", u64::MAX);
        let stream = match tokenizer {
            Tokenizer::Bytes => {
                let mut bytes = Vec::new();
                for file in &files {
                    bytes.append(&mut read(file)?);
                }
                TokenStream::Bytes(bytes)
            }
            Tokenizer::Arithmetic | Tokenizer::Bpe(_) | Tokenizer::Any(_) => {
                let mut ids = Vec::new();
                encode_files(&files, tokenizer, |more, _| {
                    ids.extend_from_slice(more);
                    Ok(true)
                })?;
                TokenStream::Ids(ids)
            }
        };
        if stream.len() == 0 {
            return Err(Error::Empty { path: self.paths[0].clone(), expected: "text".into() });
        }
        Ok((stream, skipped))
    }

    /// The files that are meant, in the order in which they are read, and those that cannot be.
    pub(crate) fn files(&self) -> Result<FoundFiles, Error> {
        if self.paths.is_empty() {
            return Err(Error::setting("paths", "at least one file or folder", "none"));
        }
        // Before it seems that a folder which is not there is a file.
        for path in &self.paths {
            fs::symlink_metadata(path).map_err(reading(path, "a file or folder of text"))?;
        }
        if !self.extensions.is_empty() && !self.paths.iter().any(|path| path.is_dir()) {
            let expected = "a folder among the paths to apply them to";
            return Err(Error::setting("extensions", expected, "only files"));
        }
        let mut files = FoundFiles { wanted: Vec::new(), skipped: Vec::new() };
        for path in &self.paths {
            if !path.is_dir() {
                files.wanted.push(path.clone());
                continue;
            }
            let mut found = Vec::new();
            walk(path, &mut found)?;
            found.retain(|file| self.wanted(file));
            let mut kept = Vec::new();
            for file in found {
                if file.is_file() && !is_binary(&file)? { &mut kept } else { &mut files.skipped }.push(file);
            }
            if kept.is_empty() {
                let with = self.extensions.join(" or ");
                let expected = if with.is_empty() {
                    "text files".into()
                } else {
                    format!("text files ending in {with}")
                };
                return Err(Error::Empty { path: path.clone(), expected });
            }
            kept.sort();
            files.wanted.append(&mut kept);
        }
        files.skipped.sort();
        Ok(files)
    }

    fn wanted(&self, file: &Path) -> bool {
        let has =
            |extension: &String| file.extension().is_some_and(|e| e == extension.trim_start_matches('.'));
        self.extensions.is_empty() || self.extensions.iter().any(has)
    }
}

/// What stands in the folders of a text.
pub(crate) struct FoundFiles {
    /// Files that are read as text.
    pub wanted: Vec<PathBuf>,
    /// Files that cannot be.
    pub skipped: Vec<PathBuf>,
}

fn walk(folder: &Path, found: &mut Vec<PathBuf>) -> Result<(), Error> {
    let failed = |source| Error::Read { path: folder.into(), source };
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let (name, path, kind) = (entry.file_name(), entry.path(), entry.file_type().map_err(failed)?);
        if name.as_encoded_bytes().starts_with(b".") {
            continue;
        }
        if kind.is_dir() {
            if name != "target" && name != "node_modules" {
                walk(&path, found)?;
            }
        } else if !path.is_dir() {
            // Also what is no file: whoever has it there should hear that it is skipped.
            found.push(path);
        }
    }
    Ok(())
}

fn is_binary(path: &Path) -> Result<bool, Error> {
    use std::io::Read;
    let mut head = Vec::new();
    let file = crate::error::open(path, "a text file")?;
    file.take(8192).read_to_end(&mut head).map_err(reading(path, "a text file"))?;
    Ok(head.contains(&0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DataFacts, DataSplit, Dataset, TokenDataset, TokenWindows};

    fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        folder
    }

    fn bytes(text: &TextFiles) -> Vec<u8> {
        let Ok((TokenStream::Bytes(bytes), Tokenizer::Bytes, _)) = text.read() else { panic!() };
        bytes
    }

    /// Depth, order, and what is left out.
    #[test]
    fn a_folder_is_read_in_order() {
        let folder = folder(&[
            ("b.txt", b"two "),
            ("a/z.rs", b"one "),
            ("c/d/e.txt", b"three"),
            (".hidden", b"no"),
            (".git/config.txt", b"no"),
            ("target/out.txt", b"no"),
            ("picture.png", b"no\0"),
        ]);
        let mut text = TextFiles { paths: vec![folder.path().into()], ..TextFiles::default() };
        assert_eq!(bytes(&text), b"one two three");
        assert_eq!(crate::files::total(&text.files().unwrap().wanted).unwrap(), 13);
        assert_eq!(text.read().unwrap().2, [folder.path().join("picture.png")]);
        text.extensions = vec![".txt".into()];
        assert_eq!(bytes(&text), b"two three");
        text.paths.insert(0, folder.path().join("picture.png"));
        assert_eq!(bytes(&text), b"no\0two three");
    }

    #[test]
    fn text_becomes_windows() {
        let folder = folder(&[("a.txt", b"abcdefghij")]);
        let text = TextFiles { paths: vec![folder.path().join("a.txt")], ..TextFiles::default() };
        let tokens =
            TokenDataset::text(&text, None, TokenWindows { seq: 4, validation: 0.5, seed: 0 }).unwrap();
        let data = Dataset::Tokens(tokens);
        assert_eq!(data.facts(), DataFacts { vocab: Some(256), image: None, classes: None });
        assert_eq!(data.batch(DataSplit::Validation, &[(0, 0)]).unwrap().targets, b"ghij".map(u32::from));
    }

    /// A tokenizer's end-of-text follows each file; what is not UTF-8 is an error that says where.
    #[test]
    fn a_tokenizer_closes_each_file() {
        let json = br#"{"added_tokens": [{"id": 2, "content": "<|endoftext|>"}], "pre_tokenizer": {"type": "ByteLevel"},
            "model": {"vocab": {"a": 0, "b": 1}, "merges": []}}"#;
        let folder = folder(&[
            ("1.txt", b"ab"),
            ("2.txt", b"b"),
            ("3.txt", b""),
            ("bad.md", b"ab\xff"),
            ("t.json", json),
        ]);
        let tokenizer = Some(folder.path().join("t.json"));
        let mut text =
            TextFiles { paths: vec![folder.path().into()], extensions: vec!["txt".into()], tokenizer };
        let Ok((TokenStream::Ids(ids), Tokenizer::Bpe(_), _)) = text.read() else { panic!() };
        assert_eq!(ids, [0, 1, 2, 1, 2]);
        text.extensions = vec!["md".into()];
        assert!(matches!(text.read(), Err(Error::NotText { position: 2, .. })));
    }

    #[test]
    fn nothing_to_read_is_named() {
        let folder = folder(&[("empty.txt", b""), ("bare/.hidden", b"no")]);
        let error = |paths: &[&str], extensions: &[&str]| {
            let paths = paths.iter().map(|path| folder.path().join(path)).collect();
            let extensions = extensions.iter().map(|e| e.to_string()).collect();
            TextFiles { paths, extensions, tokenizer: None }.read().unwrap_err()
        };
        assert!(
            error(&["empty.txt"], &[])
                .to_string()
                .ends_with("empty.txt holds nothing to train on: expected text")
        );
        assert!(matches!(error(&["bare"], &[]), Error::Empty { .. }));
        assert!(error(&[""], &["py"]).to_string().ends_with("expected text files ending in py"));
        assert!(matches!(error(&["none.txt"], &[]), Error::Missing { .. }));
        assert!(matches!(error(&[], &[]), Error::Setting { field: "paths", .. }));
        assert!(matches!(error(&["empty.txt"], &["txt"]), Error::Setting { field: "extensions", .. }));
    }
}
