//! What a model learns from: images and streams of tokens, read from files or made up.
//!
//! A dataset is opened once, has a training and a validation split, and gives any sample by its number;
//! `order` says which sample is met when. Nothing here keeps a position, so stopping, resuming and splitting
//! a batch over ranks need no state but the run's sample count. Batches are made on the host; `loader` moves
//! them to a device, ahead of their time where that is a GPU.
//!
//! | where the data come from | file |
//! |---|---|
//! | MNIST, Fashion-MNIST | `idx`; `image_formats` tells it from CIFAR-10's |
//! | CIFAR-10 | `cifar` |
//! | these two as packages have them | `published` |
//! | people's own pictures, a folder for each class | `image_folder` |
//! | drawn shapes | `shapes` |
//! | what random crops and flips make of images | `augment` |
//! | text files, as bytes or through a Hugging Face tokenizer | `text`, `tokenizer_json`, `vocab_merges`, `normalize`, `pre_tokenize`, `bpe`, `any_tokenizer`; `byte_level` writes one |
//! | token files (`.bin`) | `mapped`; `encode` and `tokenize` make them of text |
//! | rows of JSON: text, prompts with completions, conversations | `jsonl`, `answers`, `packing`, `documents` |
//! | synthetic arithmetic | `arithmetic` |
//! | a tokenizer's other files, and conversations as text | `tokenizer_config`, `chat_template`, `jinja`, `clock` |
//! | a tokenizer as a table, to be stored elsewhere | `token_table` |
//! | any of the files, to evaluate a trained model on | `evaluation`; `strided` in windows that overlap |

mod answers;
#[cfg_attr(not(feature = "tokenizers"), path = "no_tokenizer.rs")]
mod any_tokenizer;
mod arithmetic;
mod augment;
mod bpe;
mod byte_level;
#[cfg(feature = "tokenizers")]
mod charsmap;
mod chat_template;
mod cifar;
mod clock;
mod documents;
mod encode;
mod error;
mod evaluation;
mod files;
mod idx;
mod image_batch;
mod image_folder;
mod image_formats;
mod images;
mod jinja;
mod jsonl;
mod loader;
mod mapped;
mod normalize;
mod open;
mod order;
mod packing;
mod pre_tokenize;
mod published;
mod raw;
pub mod regular_file;
mod shapes;
mod stream;
mod strided;
mod text;
mod token_table;
mod tokenize;
mod tokenizer;
mod tokenizer_config;
mod tokenizer_json;
mod tokens;
mod vocab_merges;
mod word_hash;

pub use any_tokenizer::AnyTokenizer;
pub use arithmetic::Arithmetic;
pub use bpe::Bpe;
pub use chat_template::{ChatTemplate, Conversation, RenderedChat};
pub use cifar::CLASS_NAMES as CIFAR10_CLASSES;
pub use clock::CivilTime;
pub use documents::{CutRows, DocumentDataset, RowSettings};
pub use error::{Error, Result};
pub use evaluation::ModelInput;
pub use files::Fingerprint;
pub use image_batch::ImageBatch;
pub use image_folder::{DamagedPicture, ImageFolder, PictureFrame};
pub use images::{ImageDataset, PixelStats};
pub use loader::{Batch, DataLoader, Fetched, Samples};
pub use mapped::TokenWidth;
pub use order::{SampleOrder, spread};
pub use pre_tokenize::SplitPattern;
pub use published::{PublishedFile, PublishedSet};
pub use shapes::{CLASSES as SHAPES, Shapes};
pub use text::TextFiles;
pub use token_table::{TokenAlphabet, TokenEntry, TokenKind, TokenTable};
pub use tokenize::{TokenFiles, Tokenized, tokenize};
pub use tokenizer::Tokenizer;
pub use tokenizer_config::TokenizerConfig;
pub use tokens::{TokenDataset, TokenWindows};

use espalier_plan::DataFacts;
use espalier_tensor::{DType, Device};

/// Samples to learn from, and samples to evaluate on.
#[derive(Debug)]
pub enum Dataset {
    /// Images of one size with one label each.
    Images(ImageDataset),
    /// Pictures of any size, a folder for each class.
    Folder(ImageFolder),
    /// A stream of tokens, cut into windows.
    Tokens(TokenDataset),
    /// Documents of tokens, several to a sequence.
    Documents(DocumentDataset),
}

/// Which split of a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataSplit {
    /// What the model learns from.
    Train,
    /// What it never learns from. The same samples whatever the run's seed.
    Validation,
}

/// A batch in host memory.
#[derive(Debug, Clone, PartialEq)]
pub struct HostBatch {
    /// What the model sees.
    pub inputs: Inputs,
    /// What it should say: a label per image, or the next id for every id, or
    /// [`IGNORED`](espalier_tensor::ops::cross_entropy::IGNORED) where nothing is to be learnt.
    pub targets: Vec<u32>,
    /// Where several documents lie in a sequence, the index of each id in its own.
    pub positions: Option<Vec<u32>>,
}

/// What the model sees.
#[derive(Debug, Clone, PartialEq)]
pub enum Inputs {
    /// Images, to be standardised on the device: each channel has mean 0 and variance 1 over the training split.
    Images(ImageBatch),
    Tokens {
        /// All ids, a row per sample.
        ids: Vec<u32>,
        /// Batch, tokens.
        shape: [usize; 2],
    },
}

impl Dataset {
    /// Samples in a split; for training, in one epoch.
    pub fn len(&self, split: DataSplit) -> usize {
        match self {
            Dataset::Images(images) => images.len(split),
            Dataset::Folder(folder) => folder.len(split),
            Dataset::Tokens(tokens) => tokens.len(split),
            Dataset::Documents(documents) => documents.len(split),
        }
    }

    /// Whether a split has no samples: the validation split, where none was held out.
    pub fn is_empty(&self, split: DataSplit) -> bool {
        self.len(split) == 0
    }

    /// The samples named by (epoch, index), in this order, as `SampleOrder::indices` gives them. The epoch
    /// moves the windows of training tokens, decides about random crops, and is ignored elsewhere. Fails only on
    /// a token file with an id past the vocabulary that was too large to check when it was opened, and on
    /// pictures that are decoded now.
    pub fn batch(&self, split: DataSplit, picks: &[(u64, usize)]) -> Result<HostBatch> {
        match self {
            Dataset::Images(images) => images.batch(split, picks),
            Dataset::Folder(folder) => folder.batch(split, picks),
            Dataset::Tokens(tokens) => tokens.batch(split, picks),
            Dataset::Documents(documents) => Ok(documents.batch(split, picks)),
        }
    }

    /// Targets of these samples that do not count, being
    /// [`IGNORED`](espalier_tensor::ops::cross_entropy::IGNORED): where a text that a model is evaluated on
    /// ends within a window, and what is not to be learnt of documents.
    pub fn ignored(&self, split: DataSplit, picks: &[(u64, usize)]) -> usize {
        match self {
            Dataset::Images(_) | Dataset::Folder(_) => 0,
            Dataset::Tokens(tokens) => picks.iter().map(|&(_, index)| tokens.missing(split, index)).sum(),
            Dataset::Documents(documents) => {
                picks.iter().map(|&(_, index)| documents.ignored(split, index)).sum()
            }
        }
    }

    /// Whether there are training targets that do not count.
    pub fn ignores_targets(&self) -> bool {
        matches!(self, Dataset::Documents(_))
    }

    /// Whether sequences hold several documents, so that every layer that looks back must know where they begin.
    pub fn has_positions(&self) -> bool {
        matches!(self, Dataset::Documents(documents) if documents.has_positions())
    }

    /// What turns text into its ids and back; none for images and token files.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        match self {
            Dataset::Images(_) | Dataset::Folder(_) => None,
            Dataset::Tokens(tokens) => tokens.tokenizer(),
            Dataset::Documents(documents) => Some(documents.tokenizer()),
        }
    }

    /// The same with a validation split of windows that overlap: the next begins `stride` tokens later, and
    /// predicts what the one before it did not. Images have none.
    pub fn strided(self, stride: usize) -> Result<Dataset> {
        match self {
            Dataset::Images(_) | Dataset::Folder(_) | Dataset::Documents(_) => {
                let got = if matches!(self, Dataset::Documents(_)) { "rows" } else { "images" };
                Err(Error::setting("stride", "text, which is read in windows", got))
            }
            Dataset::Tokens(tokens) => tokens.strided(stride).map(Dataset::Tokens),
        }
    }

    /// Copies a data set of images to a GPU, once: batches for it, and for other handles of it, are then made
    /// there of the numbers of their samples. Text stays where it is, and so does everything where the device
    /// is the host.
    pub fn keep_on(&self, device: &Device) -> espalier_tensor::Result<()> {
        match (self, device) {
            (Dataset::Images(images), Device::Cuda(_)) => images.keep_on(device),
            _ => Ok(()),
        }
    }

    /// Bytes that [`Dataset::keep_on`] would copy; nothing for text.
    pub fn device_bytes(&self) -> u64 {
        match self {
            Dataset::Images(images) => images.bytes(),
            Dataset::Folder(_) | Dataset::Tokens(_) | Dataset::Documents(_) => 0,
        }
    }

    /// Whether batches for a device are made there.
    pub fn is_on(&self, device: &Device) -> bool {
        matches!(self, Dataset::Images(images) if images.are_on(device))
    }

    /// A batch wherever it is made: on the device that keeps the data, or on the host.
    pub fn fetch(
        &self,
        device: &Device,
        dtype: DType,
        split: DataSplit,
        picks: &[(u64, usize)],
    ) -> Result<Fetched> {
        let there = match self {
            Dataset::Images(images) => images.batch_on(device, dtype, split, picks),
            Dataset::Folder(_) | Dataset::Tokens(_) | Dataset::Documents(_) => None,
        };
        match there {
            Some(batch) => Ok(Fetched::Device(batch?)),
            None => Ok(Fetched::Host(self.batch(split, picks)?)),
        }
    }

    /// The class of a sample; none for text.
    pub fn label(&self, split: DataSplit, index: usize) -> Option<u32> {
        match self {
            Dataset::Images(images) => Some(images.label(split, index)),
            Dataset::Folder(folder) => Some(folder.label(split, index)),
            Dataset::Tokens(_) | Dataset::Documents(_) => None,
        }
    }

    /// What a model must know of the data.
    pub fn facts(&self) -> DataFacts {
        match self {
            Dataset::Images(images) => images.facts(),
            Dataset::Folder(folder) => folder.facts(),
            Dataset::Tokens(tokens) => tokens.facts(),
            Dataset::Documents(documents) => documents.facts(),
        }
    }
}
