//! What is learnt from, and what is held out of it.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Samples to learn from, and samples to be measured on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DatasetSpec {
    /// Which data, and where.
    #[serde(flatten)]
    pub source: DatasetSource,
    /// What validation is measured on.
    #[serde(flatten)]
    pub held_out: HeldOut,
    /// What becomes of pixels.
    #[serde(flatten)]
    pub pixels: PixelScaling,
    /// How images are varied while they are learnt.
    #[serde(flatten)]
    pub variation: ImageVariation,
}

/// Random changes of training images; none of text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageVariation {
    /// Whether every second one is mirrored, left to right.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flip: Option<bool>,
    /// Black pixels around each before it is cropped to its size at a random place.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub padding: Option<usize>,
}

/// What is subtracted from pixels of 0 to 1, and what they are then divided by: one number for all channels
/// or one for each; left out: what makes the channels of the training split standard.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PixelScaling {
    /// Subtracted first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean: Option<Vec<f64>>,
    /// Divided by then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub std: Option<Vec<f64>>,
}

/// Samples that nothing is learnt from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum HeldOut {
    /// The end of the data.
    Fraction {
        /// The fraction of the samples, in [0, 1).
        validation: f64,
    },
    /// Files of their own, of the same kind; all of `path` is then learnt from.
    Files {
        /// Files, or folders of them.
        validation_path: Vec<PathBuf>,
    },
}

/// The fields of each kind of data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum DatasetSource {
    /// Text files, or folders of them.
    Text {
        /// Files and folders.
        path: Vec<PathBuf>,
        /// A Hugging Face `tokenizer.json`; left out: every byte is a token.
        #[serde(skip_serializing_if = "Option::is_none")]
        tokenizer: Option<PathBuf>,
        /// In folders, only files with one of these extensions; empty: all.
        extensions: Vec<String>,
    },
    /// Rows of JSON: text, prompts with completions, or conversations.
    Jsonl {
        /// Files, folders of `.jsonl` files, or names with `*` and `?`.
        path: Vec<PathBuf>,
        /// A Hugging Face `tokenizer.json`; left out: every byte is a token.
        #[serde(skip_serializing_if = "Option::is_none")]
        tokenizer: Option<PathBuf>,
        /// `answers` or `all`.
        loss_on: LossTargets,
        /// Whether several rows share a sequence.
        pack: bool,
    },
    /// Files of token ids, little-endian, without a header.
    Tokens {
        /// Read in this order, as one.
        path: Vec<PathBuf>,
        /// `u16` or `u32`.
        dtype: TokenType,
    },
    /// Images and labels in MNIST's format.
    Idx {
        /// A folder, or two files.
        #[serde(flatten)]
        files: IdxFiles,
    },
    /// CIFAR-10 in its binary form.
    Cifar10 {
        /// The folder of `data_batch_1.bin` and the others.
        path: PathBuf,
    },
    /// Pictures of any size, a folder for each class.
    Images {
        #[serde(flatten)]
        folder: FolderSource,
    },
    /// Drawn shapes with noise: images that need no download.
    Shapes {
        /// Images to draw.
        count: usize,
        /// Rows and columns of each.
        size: usize,
    },
    /// Synthetic arithmetic as text: tokens that need no download.
    Arithmetic {
        /// Lines to write.
        count: usize,
        /// Digits of each number.
        digits: usize,
    },
}

/// Where images and labels in MNIST's format are.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum IdxFiles {
    /// A folder with MNIST's file names.
    Folder {
        /// The folder that holds them.
        path: PathBuf,
    },
    /// Two files of any name.
    Pair {
        /// The file of images.
        images: PathBuf,
        /// The file of their labels, in the same order.
        labels: PathBuf,
    },
}

/// Pictures in folders, and what a model sees of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FolderSource {
    /// A folder of classes, or one with the folders `train` and `val` of these.
    pub path: PathBuf,
    /// Rows and columns that the model sees.
    pub size: usize,
    /// The shorter side of a picture before its middle is taken.
    pub resize: usize,
    /// What of a picture is learnt.
    #[serde(flatten)]
    pub crop: PictureCrop,
    /// A larger picture is shrunk first, once, until its shorter side has so many pixels.
    pub max_side: usize,
    /// Whether a damaged file is an error.
    pub strict: bool,
    /// Where decoded pictures are kept.
    pub cache: PictureCache,
    /// In which folder; left out: that of the user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_path: Option<PathBuf>,
}

/// What of a picture is learnt.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "crop", rename_all = "lowercase")]
pub enum PictureCrop {
    /// A box of random area and shape, brought to the size.
    Resized {
        /// The least and largest area, as fractions of the picture's.
        scale: [f64; 2],
        /// The least and largest width for a height of 1.
        ratio: [f64; 2],
    },
    /// A random part of the resized picture.
    Random,
    /// The middle, as in validation.
    Center,
}

/// Where decoded pictures are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PictureCache {
    /// In a file, so that each is decoded once.
    Disk,
    /// Nowhere: each is decoded whenever it is wanted.
    None,
}

/// Which tokens of a row are learnt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LossTargets {
    /// Texts, completions, and what a model answers.
    #[default]
    Answers,
    /// Prompts and questions too.
    All,
}

/// How a token id is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenType {
    /// Two bytes, little-endian: up to 65,536 tokens.
    #[default]
    U16,
    /// Four bytes, little-endian.
    U32,
}

impl DatasetSpec {
    /// `data.kind` as written.
    pub fn kind(&self) -> &'static str {
        match self.source {
            DatasetSource::Text { .. } => "text",
            DatasetSource::Jsonl { .. } => "jsonl",
            DatasetSource::Tokens { .. } => "tokens",
            DatasetSource::Idx { .. } => "idx",
            DatasetSource::Cifar10 { .. } => "cifar10",
            DatasetSource::Images { .. } => "images",
            DatasetSource::Shapes { .. } => "shapes",
            DatasetSource::Arithmetic { .. } => "arithmetic",
        }
    }

    /// Whether samples are text; images otherwise.
    pub fn is_text(&self) -> bool {
        matches!(
            self.source,
            DatasetSource::Text { .. }
                | DatasetSource::Jsonl { .. }
                | DatasetSource::Tokens { .. }
                | DatasetSource::Arithmetic { .. }
        )
    }

    /// Whether samples are made up by the run's seed, and read from no file.
    pub(crate) fn is_synthetic(&self) -> bool {
        matches!(self.source, DatasetSource::Shapes { .. } | DatasetSource::Arithmetic { .. })
    }

    /// Whether nothing is held out, so that there is nothing to validate on.
    pub(crate) fn holds_out_nothing(&self) -> bool {
        self.held_out == HeldOut::Fraction { validation: 0.0 }
    }

    /// Makes relative paths relative to `folder`, that of the run file.
    pub fn resolve_paths(&mut self, folder: &Path) {
        // Joining keeps an absolute path as it is.
        let resolve = |path: &mut PathBuf| *path = folder.join(&*path);
        if let HeldOut::Files { validation_path } = &mut self.held_out {
            validation_path.iter_mut().for_each(resolve);
        }
        match &mut self.source {
            DatasetSource::Text { path, tokenizer, .. } | DatasetSource::Jsonl { path, tokenizer, .. } => {
                path.iter_mut().chain(tokenizer).for_each(resolve)
            }
            DatasetSource::Tokens { path, .. } => path.iter_mut().for_each(resolve),
            DatasetSource::Idx { files: IdxFiles::Folder { path } } | DatasetSource::Cifar10 { path } => {
                resolve(path)
            }
            DatasetSource::Images { folder: FolderSource { path, cache_path, .. } } => {
                [path].into_iter().chain(cache_path).for_each(resolve)
            }
            DatasetSource::Idx { files: IdxFiles::Pair { images, labels } } => {
                [images, labels].into_iter().for_each(resolve);
            }
            DatasetSource::Shapes { .. } | DatasetSource::Arithmetic { .. } => {}
        }
    }
}
