//! `[data]`: what is learnt from. The kind decides which other fields there are.

use std::path::PathBuf;

use super::Error;
use super::fields;
use super::reader::{Choice, MOST, Section};
use crate::data::{Data, HeldOut, IdxFiles, Pixels, Source, TokenType};

impl Choice for TokenType {
    const ALL: &'static [(&'static str, Self)] = &[("u16", TokenType::U16), ("u32", TokenType::U32)];
}

/// `data.kind` alone.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Text,
    Tokens,
    Idx,
    Cifar10,
    Shapes,
    Arithmetic,
}

impl Choice for Kind {
    const ALL: &'static [(&'static str, Self)] = &[
        ("text", Kind::Text),
        ("tokens", Kind::Tokens),
        ("idx", Kind::Idx),
        ("cifar10", Kind::Cifar10),
        ("shapes", Kind::Shapes),
        ("arithmetic", Kind::Arithmetic),
    ];
}

impl Data {
    /// Without a kind: what the model can learn from without any file.
    pub(super) fn read(section: &mut Section, text: bool) -> Result<Data, Error> {
        let kind = section.choice("kind", if text { Kind::Arithmetic } else { Kind::Shapes })?;
        let source = match kind {
            Kind::Text => Source::Text {
                path: read_paths(section, TEXT_FILES)?,
                tokenizer: section.text("tokenizer", "the path of a tokenizer.json")?.map(PathBuf::from),
                extensions: section
                    .texts("extensions", "a list of extensions, such as [\"txt\"]")?
                    .into_iter()
                    .map(|extension| extension.trim_start_matches('.').to_string())
                    .collect(),
            },
            Kind::Tokens => Source::Tokens {
                path: read_paths(section, TOKEN_FILES)?,
                dtype: section.choice("dtype", TokenType::U16)?,
            },
            Kind::Idx => Source::Idx { files: read_idx(section)? },
            Kind::Cifar10 => Source::Cifar10 {
                path: read_path(section, "path", "the folder of CIFAR-10's .bin files, or one of them")?,
            },
            Kind::Shapes => Source::Shapes {
                count: section.whole("count", 10_000, 1, MOST)?,
                size: section.whole("size", 32, 16, 4096)?,
            },
            Kind::Arithmetic => Source::Arithmetic {
                count: section.whole("count", 10_000, 1, MOST)?,
                digits: section.whole("digits", 2, 1, 9)?,
            },
        };
        let held_out = match kind {
            Kind::Text => read_held_out(section, TEXT_FILES)?,
            Kind::Tokens => read_held_out(section, TOKEN_FILES)?,
            Kind::Idx | Kind::Cifar10 => read_held_out(section, IMAGE_FILES)?,
            Kind::Shapes | Kind::Arithmetic => read_share(section)?,
        };
        let pixels = match kind {
            Kind::Idx | Kind::Cifar10 | Kind::Shapes => Pixels {
                mean: section.numbers("mean", "a number, or one for each channel", |_| true)?,
                std: section.numbers("std", "a number above 0, or one for each channel", |std| std > 0.0)?,
            },
            Kind::Text | Kind::Tokens | Kind::Arithmetic => Pixels::default(),
        };
        let data = Data { source, held_out, pixels };
        section.finish_variant("kind", data.kind(), fields::DATA)?;
        Ok(data)
    }
}

const TEXT_FILES: &str = "a text file or folder, or a list of them";
const TOKEN_FILES: &str = "a file of token ids, or a list of them";
const IMAGE_FILES: &str = "a file or folder of images, or a list of them";

fn read_share(section: &mut Section) -> Result<HeldOut, Error> {
    let validation = section.number("validation", 0.1, "a number in [0, 1)", |x| (0.0..1.0).contains(&x))?;
    Ok(HeldOut::Share { validation })
}

fn read_held_out(section: &mut Section, expected: &str) -> Result<HeldOut, Error> {
    let paths = section.texts("validation_path", expected)?;
    if paths.is_empty() {
        return read_share(section);
    }
    if section.has("validation") {
        let problem = "and `data.validation_path` exclude each other: hold out a share, or other files";
        return Err(Error::Conflict { field: section.field("validation"), problem: problem.into() });
    }
    section.get("validation");
    Ok(HeldOut::Files { validation_path: paths.into_iter().map(PathBuf::from).collect() })
}

fn read_idx(section: &mut Section) -> Result<IdxFiles, Error> {
    let folder = section.text("path", "the folder of MNIST's files")?.map(PathBuf::from);
    let pair = ["images", "labels"].into_iter().find(|key| section.has(key));
    match (folder, pair) {
        (Some(_), Some(key)) => {
            let problem = "and `data.path` exclude each other: name the folder or the two files".into();
            Err(Error::Conflict { field: section.field(key), problem })
        }
        (Some(path), None) => {
            section.get("images");
            section.get("labels");
            Ok(IdxFiles::Folder { path })
        }
        (None, Some(_)) => Ok(IdxFiles::Pair {
            images: read_path(section, "images", "the file of images")?,
            labels: read_path(section, "labels", "the file of labels")?,
        }),
        (None, None) => Err(Error::Missing {
            field: section.field("path"),
            expected: "the folder of MNIST's files (or `data.images` and `data.labels`)".into(),
        }),
    }
}

fn read_path(section: &mut Section, key: &'static str, expected: &str) -> Result<PathBuf, Error> {
    let path = section.text(key, expected)?.map(PathBuf::from);
    path.ok_or_else(|| Error::Missing { field: section.field(key), expected: expected.into() })
}

fn read_paths(section: &mut Section, expected: &str) -> Result<Vec<PathBuf>, Error> {
    let paths: Vec<_> = section.texts("path", expected)?.into_iter().map(PathBuf::from).collect();
    if paths.is_empty() {
        return Err(Error::Missing { field: section.field("path"), expected: expected.into() });
    }
    Ok(paths)
}
