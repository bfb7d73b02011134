//! Documents of tokens, several to a sequence: rows of JSON, packed.
//!
//! A sample is a sequence of `seq` inputs with their targets. A document of n tokens takes n - 1 of them: all
//! but its last token are read, all but its first predicted, and those that are not to be learnt have the
//! target [`IGNORED`]. Positions begin anew with each document; behind the last one each token of padding is
//! a document of its own.
//!
//! The documents that are held out are spread evenly over the files and do not depend on the seed; the others are
//! shuffled by it once, so that neighbours in a file do not share a sequence, and packed in that order. Which
//! sequence comes when is `order`'s, as everywhere.

use std::path::PathBuf;

use espalier_plan::data::LossTargets;
use espalier_tensor::{ops::cross_entropy::IGNORED, random};

use crate::answers::{LearntTokens, RowEncoder};
use crate::order::Permutation;
use crate::packing::pack;
use crate::tokens::check_disjoint;
use crate::{
    DataFacts, DataSplit, Error, HostBatch, Inputs, TokenWindows, Tokenizer, error, files, jsonl, spread,
};

/// Apart from every other use of the run's seed.
const PURPOSE: u64 = u64::from_be_bytes(*b"packing ");

/// What becomes of rows.
#[derive(Debug, Clone, Copy)]
pub struct RowSettings {
    pub loss_on: LossTargets,
    /// Whether several rows share a sequence.
    pub pack: bool,
}

/// Samples of packed documents.
#[derive(Debug)]
pub struct DocumentDataset {
    tokenizer: Tokenizer,
    seq: usize,
    /// Whether sequences hold several documents, whose positions begin anew.
    packed: bool,
    /// The ids of all documents, one after the other.
    ids: Vec<u32>,
    /// Whether an id is to be predicted.
    counted: Vec<bool>,
    /// Where each document begins in these; the last entry is their end.
    starts: Vec<usize>,
    train: Vec<PackedSequence>,
    validation: Vec<PackedSequence>,
    cut: CutRows,
}

/// A sample.
#[derive(Debug)]
struct PackedSequence {
    documents: Vec<u32>,
    /// Targets that do not count, padding included.
    ignored: usize,
}

/// Rows that were longer than a sequence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CutRows {
    /// Rows whose end was cut off.
    pub cut: usize,
    /// Rows of which no answer was left, and which were dropped.
    pub dropped: usize,
}

impl DocumentDataset {
    /// Files of rows; `held_out` are those of the validation split, instead of a fraction. `progress` learns how
    /// many bytes of how many have been read.
    pub fn rows(
        paths: &[PathBuf],
        held_out: Option<&[PathBuf]>,
        tokenizer: Tokenizer,
        settings: RowSettings,
        windows: TokenWindows,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<DocumentDataset, Error> {
        let TokenWindows { validation, seed, .. } = windows;
        error::check_validation(validation)?;
        let learnt = jsonl::files(paths)?;
        let held_out = held_out.map(jsonl::files).transpose()?.unwrap_or_default();
        check_disjoint(&learnt, &held_out)?;
        let total = files::total(&learnt)? + files::total(&held_out)?;
        let mut all = DocumentDataset::read(&learnt, tokenizer, settings, windows.seq, &mut |read| {
            progress(read, total)
        })?;
        let of_learnt = all.starts.len() - 1;
        if of_learnt == 0 {
            return Err(Error::Empty { path: paths[0].clone(), expected: "rows".into() });
        }
        let (train, validation): (Vec<u32>, Vec<u32>) = if held_out.is_empty() {
            let count = error::held_out(of_learnt, validation);
            if count >= of_learnt {
                let (path, expected) = (paths[0].clone(), count + 1);
                return Err(Error::TooFewRows { path, expected, got: of_learnt });
            }
            let mut is_held_out = vec![false; of_learnt];
            (0..count).for_each(|i| is_held_out[spread(i, count, of_learnt)] = true);
            (0..of_learnt as u32).partition(|document| !is_held_out[*document as usize])
        } else {
            let before = files::total(&learnt)?;
            all.append(&held_out, settings, &mut |read| progress(before + read, total))?;
            ((0..of_learnt as u32).collect(), (of_learnt as u32..all.starts.len() as u32 - 1).collect())
        };
        let order = Permutation::new(random::key(seed, PURPOSE), train.len() as u64);
        let shuffled = (0..train.len() as u64).map(|i| train[order.at(i) as usize]);
        all.train = all.packed_in_order(shuffled);
        all.validation = all.packed_in_order(validation.into_iter());
        Ok(all)
    }

    /// Files of rows of which nothing is learnt.
    pub(crate) fn for_evaluation(
        path: &std::path::Path,
        tokenizer: &Tokenizer,
        seq: usize,
    ) -> Result<DocumentDataset, Error> {
        let files = jsonl::files(&[path.to_owned()])?;
        let settings = RowSettings { loss_on: LossTargets::Answers, pack: true };
        let mut all = DocumentDataset::read(&files, tokenizer.reopen()?, settings, seq, &mut |_| ())?;
        if all.starts.len() == 1 {
            return Err(Error::Empty { path: path.into(), expected: "rows".into() });
        }
        all.validation = all.packed_in_order(0..all.starts.len() as u32 - 1);
        Ok(all)
    }

    fn read(
        files: &[PathBuf],
        tokenizer: Tokenizer,
        settings: RowSettings,
        seq: usize,
        progress: &mut dyn FnMut(u64),
    ) -> Result<DocumentDataset, Error> {
        let (ids, counted, starts) = (Vec::new(), Vec::new(), vec![0]);
        let (train, validation, cut) = (Vec::new(), Vec::new(), CutRows::default());
        let packed = settings.pack;
        let mut all =
            DocumentDataset { tokenizer, seq, packed, ids, counted, starts, train, validation, cut };
        all.append(files, settings, progress)?;
        Ok(all)
    }

    /// Reads more files.
    fn append(
        &mut self,
        files: &[PathBuf],
        settings: RowSettings,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), Error> {
        let DocumentDataset { tokenizer, seq, ids, counted, starts, cut, .. } = self;
        let encoder = RowEncoder::new(tokenizer, settings.loss_on == LossTargets::All)?;
        jsonl::read(files, &encoder, progress, |document| {
            let LearntTokens { ids: tokens, counted: ranges } = document;
            // One more than is read: the last is only predicted.
            let length = tokens.len().min(*seq + 1);
            cut.cut += usize::from(length < tokens.len());
            if !ranges.iter().any(|range| range.start < length) {
                cut.dropped += 1;
                return Ok(());
            }
            let start = ids.len();
            ids.extend_from_slice(&tokens[..length]);
            counted.resize(ids.len(), false);
            for range in ranges {
                counted[start..][range.start.min(length)..range.end.min(length)].fill(true);
            }
            starts.push(ids.len());
            Ok(())
        })
    }

    fn packed_in_order(&self, documents: impl Iterator<Item = u32>) -> Vec<PackedSequence> {
        let lengths = documents.map(|document| (document, self.length(document) - 1));
        let sequence = |documents: Vec<u32>| {
            let counted: usize = documents.iter().map(|document| self.counted(*document)).sum();
            PackedSequence { documents, ignored: self.seq - counted }
        };
        pack(lengths, self.seq, self.packed).into_iter().map(sequence).collect()
    }

    /// Tokens of a document that are to be predicted; its first has nothing before it.
    fn counted(&self, document: u32) -> usize {
        let range = self.starts[document as usize] + 1..self.starts[document as usize + 1];
        self.counted[range].iter().filter(|counted| **counted).count()
    }

    fn length(&self, document: u32) -> usize {
        self.starts[document as usize + 1] - self.starts[document as usize]
    }

    fn sequences(&self, split: DataSplit) -> &[PackedSequence] {
        match split {
            DataSplit::Train => &self.train,
            DataSplit::Validation => &self.validation,
        }
    }

    /// What makes ids of text and text of ids.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Rows that were longer than a sequence.
    pub fn cut_rows(&self) -> CutRows {
        self.cut
    }

    /// Rows, and sequences that hold them, of both splits.
    pub fn counts(&self) -> (usize, usize) {
        (self.starts.len() - 1, self.train.len() + self.validation.len())
    }

    pub(crate) fn len(&self, split: DataSplit) -> usize {
        self.sequences(split).len()
    }

    pub(crate) fn has_positions(&self) -> bool {
        self.packed
    }

    pub(crate) fn facts(&self) -> DataFacts {
        DataFacts { vocab: Some(self.tokenizer.vocab()), image: None, classes: None }
    }

    /// Targets of a sample that do not count.
    pub(crate) fn ignored(&self, split: DataSplit, index: usize) -> usize {
        self.sequences(split)[index].ignored
    }

    pub(crate) fn batch(&self, split: DataSplit, picks: &[(u64, usize)]) -> HostBatch {
        let room = picks.len() * self.seq;
        let (mut ids, mut targets, mut positions) =
            (Vec::with_capacity(room), Vec::with_capacity(room), Vec::with_capacity(room));
        for (number, &(_, index)) in picks.iter().enumerate() {
            for &document in &self.sequences(split)[index].documents {
                let (start, end) = (self.starts[document as usize], self.starts[document as usize + 1]);
                ids.extend_from_slice(&self.ids[start..end - 1]);
                let target = |at: usize| if self.counted[at] { self.ids[at] } else { IGNORED };
                targets.extend((start + 1..end).map(target));
                positions.extend(0..(end - 1 - start) as u32);
            }
            let filled = (number + 1) * self.seq;
            ids.resize(filled, 0);
            targets.resize(filled, IGNORED);
            positions.resize(filled, 0);
        }
        let inputs = Inputs::Tokens { ids, shape: [picks.len(), self.seq] };
        HostBatch { inputs, targets, positions: self.packed.then_some(positions) }
    }
}
