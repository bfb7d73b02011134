//! A stream of tokens, split into windows.
//!
//! Sample i of an epoch is `ids[offset + i * seq ..][.. seq + 1]`: `seq` inputs, and the same shifted by one
//! as targets. The offset lies in `0..seq` and is a pure function of (seed, epoch), so that a text is not
//! split at the same tokens every time. The validation split is the end of the stream, or another stream, in
//! windows that never move. Of what a trained model is evaluated on no token is left out: the last window may
//! be short, and is filled up with targets that do not count.

use crate::{
    DataFacts, DataSplit, Error, HostBatch, Inputs,
    error::check_validation,
    mapped::{MappedTokens, TokenWidth},
    stream::TokenStream,
    strided::StridedWindows,
    text::TextFiles,
    tokenizer::Tokenizer,
};
use espalier_tensor::{ops::cross_entropy::IGNORED, random};
use std::{
    collections::HashSet,
    iter,
    path::{Path, PathBuf},
};

/// Apart from every other use of the run's seed.
const PURPOSE: u64 = u64::from_be_bytes(*b"windows ");

/// How a stream is split into samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenWindows {
    /// Tokens in a sample.
    pub seq: usize,
    /// The fraction of the stream, at its end, that is held out; one window at least, unless it is 0.
    pub validation: f64,
    /// The run's seed: it moves the training windows from epoch to epoch.
    pub seed: u64,
}

/// A stream of tokens, split into windows.
#[derive(Debug)]
pub struct TokenDataset {
    stream: TokenStream,
    /// What is held out, where that is not the end of `stream`.
    validation_stream: Option<TokenStream>,
    tokenizer: Option<Tokenizer>,
    vocab: usize,
    seq: usize,
    key: u64,
    /// Where the first validation window starts.
    held_out: u64,
    /// Windows of each split.
    train: usize,
    validation: usize,
    /// Tokens that the last validation window lacks.
    missing: usize,
    /// The offset of an epoch is at most this: `seq - 1`, or less in a stream of very few windows.
    slack: u64,
    /// Files of its folders that are no text.
    skipped: Vec<PathBuf>,
    /// How the validation split is read instead, where its windows overlap.
    strided: Option<StridedWindows>,
}

/// What a model is evaluated on.
#[derive(Debug)]
pub(crate) enum EvalTokens<'a> {
    /// Text, as the ids of a tokenizer.
    Text(&'a Tokenizer),
    /// Ids of this width below a vocabulary.
    Files(TokenWidth, usize),
}

impl TokenDataset {
    /// Text files or folders of them; `held_out` are those of the validation split, instead of a fraction.
    pub fn text(
        text: &TextFiles,
        held_out: Option<&[PathBuf]>,
        windows: TokenWindows,
    ) -> Result<TokenDataset, Error> {
        let (stream, tokenizer, skipped) = text.read()?;
        let name = text.paths[0].clone();
        let tokens = TokenDataset {
            skipped,
            ..TokenDataset::new(name, stream, tokenizer.vocab(), Some(tokenizer), windows)?
        };
        let Some(paths) = held_out else { return Ok(tokens) };
        let held_out = text.held_out(paths);
        check_disjoint(&text.files()?.wanted, &held_out.files()?.wanted)?;
        let (stream, _, skipped) = held_out.read()?;
        let mut tokens = tokens.hold_out(&paths[0], stream)?;
        tokens.skipped.extend(skipped);
        Ok(tokens)
    }

    /// Token files or folders of them: ids of this width, little-endian, without a header, all below `vocab`;
    /// `held_out` are those of the validation split, instead of a fraction.
    pub fn files(
        paths: &[PathBuf],
        held_out: Option<&[PathBuf]>,
        width: TokenWidth,
        vocab: usize,
        windows: TokenWindows,
    ) -> Result<TokenDataset, Error> {
        let files = MappedTokens::open(paths, width, vocab)?;
        let trained = files.paths();
        let tokens = TokenDataset::new(paths[0].clone(), TokenStream::Files(files), vocab, None, windows)?;
        let Some(paths) = held_out else { return Ok(tokens) };
        let held_out = MappedTokens::open(paths, width, vocab)?;
        check_disjoint(&trained, &held_out.paths())?;
        tokens.hold_out(&paths[0], TokenStream::Files(held_out))
    }

    /// Text or token files of which nothing is learnt: all windows are to be evaluated on. Text becomes ids
    /// by `tokenizer`; an error names the first of the paths.
    pub(crate) fn for_evaluation(
        source: &EvalTokens<'_>,
        paths: &[PathBuf],
        seq: usize,
    ) -> Result<TokenDataset, Error> {
        let (stream, vocab, skipped) = match source {
            EvalTokens::Text(tokenizer) => {
                let text = TextFiles { paths: paths.to_vec(), ..TextFiles::default() };
                let (stream, skipped) = text.read_by(tokenizer)?;
                (stream, tokenizer.vocab(), skipped)
            }
            &EvalTokens::Files(width, vocab) => {
                (TokenStream::Files(MappedTokens::open(paths, width, vocab)?), vocab, Vec::new())
            }
        };
        // One to predict, and one to predict it from.
        let (got, expected) = (stream.len(), 2);
        if got < expected {
            return Err(Error::TooShort { path: paths[0].clone(), split: "validation", expected, got });
        }
        let validation = (got - 1).div_ceil(seq as u64) as usize;
        let missing = validation * seq - (got - 1) as usize;
        Ok(TokenDataset { validation, missing, skipped, ..TokenDataset::unsplit(stream, vocab, None, seq) })
    }

    /// A stream that no window is cut from yet.
    fn unsplit(stream: TokenStream, vocab: usize, tokenizer: Option<Tokenizer>, seq: usize) -> TokenDataset {
        TokenDataset {
            stream,
            validation_stream: None,
            tokenizer,
            vocab,
            seq,
            key: 0,
            held_out: 0,
            train: 0,
            validation: 0,
            missing: 0,
            slack: 0,
            skipped: Vec::new(),
            strided: None,
        }
    }

    pub fn arithmetic(text: &super::Arithmetic, windows: TokenWindows) -> Result<TokenDataset, Error> {
        let tokenizer = Tokenizer::Arithmetic;
        let stream = TokenStream::Bytes(text.write()?);
        TokenDataset::new("data.arithmetic".into(), stream, tokenizer.vocab(), Some(tokenizer), windows)
    }

    fn new(
        path: PathBuf,
        stream: TokenStream,
        vocab: usize,
        tokenizer: Option<Tokenizer>,
        windows: TokenWindows,
    ) -> Result<TokenDataset, Error> {
        let TokenWindows { seq, validation, seed } = windows;
        check_validation(validation)?;
        if seq == 0 {
            return Err(Error::setting("seq", "at least one token", seq));
        }
        // Every window needs the token after its last, too.
        let (length, window) = (stream.len(), seq as u64 + 1);
        let kept_back =
            if validation > 0.0 { ((length as f64 * validation).round() as u64).max(window) } else { 0 };
        let train_end = length.saturating_sub(kept_back);
        if train_end < window {
            let split = if kept_back > 0 { "training and validation" } else { "training" };
            let expected = if kept_back > 0 { 2 * window } else { window };
            if length < expected {
                return Err(Error::TooShort { path, split, expected, got: length });
            }
            return Err(Error::TooShort { path, split: "training", expected: window, got: train_end });
        }
        // As many windows as fit after the largest offset, so that every epoch has the same number.
        let train = ((train_end - seq as u64) / seq as u64).max(1);
        let slack = (train_end - 1 - train * seq as u64).min(seq as u64 - 1);
        let (train, validation) = (train as usize, (kept_back.saturating_sub(1) / seq as u64) as usize);
        let (key, held_out) = (random::key(seed, PURPOSE), train_end);
        let unsplit = TokenDataset::unsplit(stream, vocab, tokenizer, seq);
        Ok(TokenDataset { key, held_out, train, validation, slack, ..unsplit })
    }

    /// The same with another stream as its validation split.
    fn hold_out(mut self, path: &Path, stream: TokenStream) -> Result<TokenDataset, Error> {
        let (got, expected) = (stream.len(), self.seq as u64 + 1);
        if got < expected {
            return Err(Error::TooShort { path: path.into(), split: "validation", expected, got });
        }
        (self.held_out, self.validation) = (0, ((got - 1) / self.seq as u64) as usize);
        self.validation_stream = Some(stream);
        Ok(self)
    }

    /// The same with windows of the validation split that begin every `stride` tokens, of which each predicts
    /// what the one before it did not.
    pub(crate) fn strided(mut self, stride: usize) -> Result<TokenDataset, Error> {
        let stream = self.validation_stream.as_ref().unwrap_or(&self.stream);
        // Without a validation split there is none with a stride either.
        if self.validation > 0 {
            let windows = StridedWindows::new(stream, self.held_out, self.seq, stride)?;
            self.validation = windows.len();
            self.strided = Some(windows);
        }
        Ok(self)
    }

    /// What turns text into these ids and back; none for token files.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// Files in the folders of a text that were not read, since they are binary or no files at all.
    pub fn skipped(&self) -> &[PathBuf] {
        &self.skipped
    }

    pub(crate) fn len(&self, split: DataSplit) -> usize {
        match split {
            DataSplit::Train => self.train,
            DataSplit::Validation => self.validation,
        }
    }

    pub(crate) fn facts(&self) -> DataFacts {
        DataFacts { vocab: Some(self.vocab), image: None, classes: None }
    }

    pub(crate) fn batch(&self, split: DataSplit, picks: &[(u64, usize)]) -> Result<HostBatch, Error> {
        let mut ids = Vec::with_capacity(picks.len() * self.seq);
        let mut targets = Vec::with_capacity(picks.len() * self.seq);
        let mut window = Vec::with_capacity(self.seq + 1);
        for &(epoch, index) in picks {
            assert!(index < self.len(split), "window {index} of a split of {}", self.len(split));
            let (stream, offset) = match split {
                DataSplit::Train => (&self.stream, self.offset(epoch)),
                DataSplit::Validation => {
                    (self.validation_stream.as_ref().unwrap_or(&self.stream), self.held_out)
                }
            };
            if let (DataSplit::Validation, Some(windows)) = (split, &self.strided) {
                windows.read(stream, index, &mut ids, &mut targets)?;
                continue;
            }
            window.clear();
            let missing = self.missing(split, index);
            let there = self.seq - missing;
            stream.read(offset + (index * self.seq) as u64, there + 1, &mut window)?;
            ids.extend_from_slice(&window[..there]);
            targets.extend_from_slice(&window[1..]);
            // No position sees those behind it, so that it does not matter which token stands there.
            ids.extend(iter::repeat_n(0, missing));
            targets.extend(iter::repeat_n(IGNORED, missing));
        }
        let inputs = Inputs::Tokens { ids, shape: [picks.len(), self.seq] };
        Ok(HostBatch { inputs, targets, positions: None })
    }

    /// Targets of a window that do not count.
    pub(crate) fn missing(&self, split: DataSplit, index: usize) -> usize {
        if let (DataSplit::Validation, Some(windows)) = (split, &self.strided) {
            return windows.ignored(index);
        }
        if split == DataSplit::Validation && index + 1 == self.validation { self.missing } else { 0 }
    }

    /// Where the first window of an epoch starts.
    fn offset(&self, epoch: u64) -> u64 {
        u64::from(random::bits(self.key, epoch)) % (self.slack + 1)
    }
}

/// What is trained on must not be what is measured on.
pub(crate) fn check_disjoint(trained: &[PathBuf], held_out: &[PathBuf]) -> Result<(), Error> {
    let same = |path: &PathBuf| path.canonicalize().unwrap_or_else(|_| path.clone());
    let trained: HashSet<PathBuf> = trained.iter().map(same).collect();
    match held_out.iter().find(|path| trained.contains(&same(path))) {
        Some(path) => {
            let expected = "files that `data.path` does not train on";
            Err(Error::setting("validation_path", expected, path.display()))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dataset;
    use proptest::prelude::*;

    /// A stream that counts: each id is its own position.
    fn counting(length: u32, windows: TokenWindows) -> Result<Dataset, Error> {
        let stream = TokenStream::Ids((0..length).collect());
        TokenDataset::new("counting".into(), stream, length as usize, None, windows).map(Dataset::Tokens)
    }

    fn batch(data: &Dataset, split: DataSplit, epoch: u64) -> (Vec<u32>, Vec<u32>) {
        let picks: Vec<_> = (0..data.len(split)).map(|i| (epoch, i)).collect();
        let batch = data.batch(split, &picks).unwrap();
        let Inputs::Tokens { ids, shape } = batch.inputs else { panic!() };
        assert_eq!((shape[0], shape[0] * shape[1]), (picks.len(), ids.len()));
        (ids, batch.targets)
    }

    proptest! {
        /// An epoch's windows lie end to end, targets follow inputs, and no training window touches what is
        /// held out.
        #[test]
        fn windows_tile_their_split(length in 2u32..3000, seq in 1usize..80, percent in 0u32..60, seed: u64, epoch in 0u64..50) {
            let windows = TokenWindows { seq, validation: f64::from(percent) / 100.0, seed };
            let Ok(data) = counting(length, windows) else { return Ok(()) };
            let (train, next) = batch(&data, DataSplit::Train, epoch);
            prop_assert!((train[0] as usize) < seq);
            prop_assert!(train.windows(2).all(|w| w[1] == w[0] + 1));
            prop_assert!(train.iter().zip(&next).all(|(a, b)| *b == a + 1));
            let (held_out, _) = batch(&data, DataSplit::Validation, epoch);
            prop_assert_eq!(held_out.is_empty(), percent == 0);
            if let Some(first) = held_out.first() {
                prop_assert!(next.last().unwrap() < first);
                prop_assert_eq!(&held_out, &batch(&data, DataSplit::Validation, epoch + 1).0);
            }
        }
    }

    /// The offset moves with the epoch and the seed, and over time every offset comes up.
    #[test]
    fn windows_move_between_epochs() {
        let starts = |seed| -> Vec<u32> {
            let data = counting(1000, TokenWindows { seq: 8, validation: 0.1, seed }).unwrap();
            (0..200).map(|epoch| batch(&data, DataSplit::Train, epoch).0[0]).collect()
        };
        let mut seen = starts(1);
        assert_ne!(seen, starts(2));
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn fewer_tokens_than_a_window_are_refused() {
        let windows = |seq, validation| TokenWindows { seq, validation, seed: 0 };
        let short = counting(8, windows(8, 0.0)).unwrap_err();
        assert_eq!(
            short.to_string(),
            "counting is too short for the training windows: expected at least 9 tokens, got 8"
        );
        assert_eq!(counting(9, windows(8, 0.0)).unwrap().len(DataSplit::Train), 1);
        assert!(matches!(counting(17, windows(8, 0.1)), Err(Error::TooShort { expected: 18, got: 17, .. })));
        assert_eq!(counting(18, windows(8, 0.1)).unwrap().len(DataSplit::Validation), 1);
        assert!(matches!(counting(100, windows(8, 0.95)), Err(Error::TooShort { expected: 9, got: 5, .. })));
        assert!(matches!(counting(100, windows(0, 0.1)), Err(Error::Setting { field: "seq", .. })));
        assert!(matches!(counting(100, windows(8, -0.1)), Err(Error::Setting { field: "validation", .. })));
    }
}
