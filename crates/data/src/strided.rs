//! Windows that overlap, for the perplexity that others publish: each is as long as the context, the next
//! begins `stride` tokens later, and of its predictions those count that the window before did not make. So
//! every token but the first of a text is predicted once, and all but those of the first window from at least
//! `seq - stride` tokens. As in Hugging Face's guide "Perplexity of fixed-length models"; a window holds what
//! is predicted too, so that its last input predicts nothing.

use std::{iter, ops::Range};

use crate::{Error, stream::TokenStream};
use espalier_tensor::ops::cross_entropy::IGNORED;

/// How a stretch of a stream is split into windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StridedWindows {
    /// Where it begins in the stream,
    start: u64,
    /// and how many tokens it has.
    length: u64,
    seq: u64,
    stride: u64,
}

impl StridedWindows {
    /// Windows over what a stream has from `start` on.
    pub(crate) fn new(
        stream: &TokenStream,
        start: u64,
        seq: usize,
        stride: usize,
    ) -> Result<StridedWindows, Error> {
        if stride == 0 || stride > seq {
            let got = format!("{stride}, with a context of {seq}");
            return Err(Error::setting("stride", "at least 1 and at most the context", got));
        }
        Ok(StridedWindows { start, length: stream.len() - start, seq: seq as u64, stride: stride as u64 })
    }

    /// How many there are: the last is the first that reaches the end.
    pub(crate) fn len(&self) -> usize {
        1 + self.length.saturating_sub(self.seq).div_ceil(self.stride) as usize
    }

    /// The tokens of a window, and those of them that it is to predict.
    fn tokens(&self, index: usize) -> (Range<u64>, Range<u64>) {
        let begin = index as u64 * self.stride;
        let end = (begin + self.seq).min(self.length);
        // The first token of a window has nothing to be predicted from.
        let before = if index == 0 { 0 } else { begin - self.stride + self.seq };
        (begin..end, before.max(begin + 1)..end)
    }

    /// Predictions of a window that do not count.
    pub(crate) fn ignored(&self, index: usize) -> usize {
        let (_, predicted) = self.tokens(index);
        (self.seq - (predicted.end - predicted.start)) as usize
    }

    /// Appends the inputs and the targets of a window.
    pub(crate) fn read(
        &self,
        stream: &TokenStream,
        index: usize,
        ids: &mut Vec<u32>,
        targets: &mut Vec<u32>,
    ) -> Result<(), Error> {
        let (tokens, predicted) = self.tokens(index);
        let (first, count) = (ids.len(), (tokens.end - tokens.start) as usize);
        stream.read(self.start + tokens.start, count, ids)?;
        for token in tokens.start + 1..tokens.end {
            let id = ids[first + (token - tokens.start) as usize];
            targets.push(if predicted.contains(&token) { id } else { IGNORED });
        }
        let missing = self.seq as usize - count;
        // No position sees those behind it, so that it does not matter which token stands there.
        ids.extend(iter::repeat_n(0, missing));
        targets.extend(iter::repeat_n(IGNORED, missing + 1));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Windows by hand: ten tokens, four at a time, every third.
    #[test]
    fn windows_overlap_and_predict_what_is_new() {
        let stream = TokenStream::Ids((100..112).collect());
        let windows = StridedWindows::new(&stream, 2, 4, 3).unwrap();
        let no = IGNORED;
        let expected = [
            ([102, 103, 104, 105], [103, 104, 105, no]),
            ([105, 106, 107, 108], [106, 107, 108, no]),
            ([108, 109, 110, 111], [109, 110, 111, no]),
        ];
        assert_eq!(windows.len(), 3);
        for (index, (inputs, outputs)) in expected.into_iter().enumerate() {
            let (mut ids, mut targets) = (Vec::new(), Vec::new());
            windows.read(&stream, index, &mut ids, &mut targets).unwrap();
            assert_eq!((&ids[..], &targets[..]), (&inputs[..], &outputs[..]));
            assert_eq!(windows.ignored(index), 1);
        }
        for stride in [0, 5] {
            let error = StridedWindows::new(&stream, 0, 4, stride).unwrap_err().to_string();
            assert!(error.contains("at most the context"), "{error}");
        }
    }

    proptest! {
        /// Every token but the first is predicted once, from as much as was promised; a stride of the
        /// context leaves out the first of each window.
        #[test]
        fn every_token_is_predicted_once(length in 2_u32..60, seq in 1_usize..20, stride in 1_usize..20) {
            prop_assume!(stride <= seq);
            let stream = TokenStream::Ids((0..length).collect());
            let windows = StridedWindows::new(&stream, 0, seq, stride).unwrap();
            let (mut seen, mut last) = (Vec::new(), 0);
            for index in 0..windows.len() {
                let (mut ids, mut targets) = (Vec::new(), Vec::new());
                windows.read(&stream, index, &mut ids, &mut targets).unwrap();
                prop_assert_eq!((ids.len(), targets.len()), (seq, seq));
                let counted: Vec<(usize, u32)> =
                    targets.iter().copied().enumerate().filter(|(_, id)| *id != IGNORED).collect();
                prop_assert_eq!(windows.ignored(index), seq - counted.len());
                for (i, target) in counted {
                    prop_assert_eq!(ids[i] + 1, target);
                    prop_assert!(index == 0 || i + 1 >= seq - stride);
                    seen.push(target);
                }
                last = (index * stride + seq).min(length as usize);
            }
            prop_assert_eq!(last, length as usize);
            let all: Vec<u32> = (1..length)
                .filter(|token| stride < seq || !token.is_multiple_of(stride as u32))
                .collect();
            prop_assert_eq!(seen, all);
        }
    }
}
