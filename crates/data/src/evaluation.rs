//! Data to evaluate a trained model on: all of what a path names is its validation split, and nothing is
//! learnt from it.
//!
//! The model says how it is read: rows of JSON (`.jsonl`) by its tokenizer and chat template, of which answers
//! count; as text by its tokenizer, as token ids where that is what it learnt from or the name ends in `.bin`,
//! as images standardised as those were that it learnt from, of which pictures in folders find their classes by
//! name. Text for a model without a tokenizer is refused,
//! and ids of four bytes are read as such, whatever width it learnt from.

use crate::{
    Dataset, DocumentDataset, Error, ImageDataset, ImageFolder, PictureFrame, PixelStats, TokenDataset,
    TokenWidth, Tokenizer,
    image_formats::{images, picture_folder},
    mapped,
    tokens::EvalTokens,
};
use espalier_plan::data::PixelScaling;
use std::path::Path;

/// What a trained model takes.
#[derive(Debug)]
pub enum ModelInput<'a> {
    Tokens {
        /// What makes ids of it, where that is known.
        tokenizer: Option<&'a Tokenizer>,
        /// Tokens there are.
        vocab: usize,
        /// Tokens in a sample.
        seq: usize,
        /// How wide ids are in token files.
        width: TokenWidth,
    },
    Images {
        /// How those were standardised that it learnt from, where that is known.
        standard: Option<PixelStats>,
        /// What is asked for instead.
        pixels: PixelScaling,
        /// What it sees of a picture of any size.
        frame: PictureFrame,
        /// The names of its classes, where they have some.
        classes: Option<Vec<String>>,
        /// How many it has.
        count: usize,
        /// Whether a damaged picture is an error.
        strict: bool,
    },
}

impl Dataset {
    /// All of a file or folder, for a model that takes this.
    pub fn for_evaluation(path: &Path, takes: ModelInput<'_>) -> Result<Dataset, Error> {
        match takes {
            ModelInput::Tokens { tokenizer, vocab, seq, width } => {
                let is_rows = path.extension().is_some_and(|extension| extension == "jsonl");
                if let (true, Some(tokenizer)) = (is_rows, tokenizer) {
                    return Ok(Dataset::Documents(DocumentDataset::for_evaluation(path, tokenizer, seq)?));
                }
                let is_binary = path.extension().is_some_and(|extension| extension == "bin");
                let source = match tokenizer.filter(|_| !is_binary) {
                    Some(tokenizer) => EvalTokens::Text(tokenizer),
                    None if !is_binary && path.is_file() && mapped::is_text(&mapped::head(path)?) => {
                        let expected = "a file of token ids, since the model comes without a tokenizer (tokenizer.json, or vocab.json \
                                        and merges.txt)";
                        return Err(Error::IsText { path: path.into(), expected });
                    }
                    None => EvalTokens::Files(mapped::width_of(path, width)?, vocab),
                };
                Ok(Dataset::Tokens(TokenDataset::for_evaluation(&source, &[path.to_owned()], seq)?))
            }
            ModelInput::Images { standard, pixels, frame, classes, count, strict } => {
                if let Some(folder) = picture_folder(path) {
                    let folder =
                        ImageFolder::for_evaluation(&folder, frame, classes.as_deref(), count, strict)?;
                    return Ok(Dataset::Folder(folder.with_pixels(standard, &pixels)?));
                }
                let images = ImageDataset::for_evaluation(images(path)?, standard);
                Ok(Dataset::Images(images.with_pixels(&pixels)?))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DataSplit, Inputs};
    use espalier_tensor::ops::cross_entropy::IGNORED;
    use std::fs;

    fn tokens(tokenizer: Option<&Tokenizer>) -> ModelInput<'_> {
        ModelInput::Tokens { tokenizer, vocab: 256, seq: 4, width: TokenWidth::U16 }
    }

    #[test]
    fn all_of_a_text_is_judged_by_and_none_learnt_from() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("a.txt"), "abcdefghi").unwrap();
        fs::write(at("b.bin"), [7u8, 0, 1, 1, 9, 0, 10, 0, 11, 0]).unwrap();
        let text = Dataset::for_evaluation(&at("a.txt"), tokens(Some(&Tokenizer::Bytes))).unwrap();
        assert_eq!((text.len(DataSplit::Train), text.len(DataSplit::Validation)), (0, 2));
        let all = text.batch(DataSplit::Validation, &[(0, 0), (0, 1)]).unwrap();
        assert_eq!(all.targets, b"bcdefghi".map(u32::from));
        assert_eq!(text.ignored(DataSplit::Validation, &[(0, 0), (0, 1)]), 0);
        // The tail of a longer one, and a text that is shorter than a window.
        for (short, windows, ignored) in [("abcdefghijk", 3, 2), ("ab", 1, 3)] {
            fs::write(at("c.txt"), short).unwrap();
            let text = Dataset::for_evaluation(&at("c.txt"), tokens(Some(&Tokenizer::Bytes))).unwrap();
            assert_eq!(text.len(DataSplit::Validation), windows);
            let last = [(0, windows - 1)];
            let batch = text.batch(DataSplit::Validation, &last).unwrap();
            let (there, behind) = batch.targets.split_at(4 - ignored);
            let end: Vec<u32> = short.bytes().map(u32::from).collect();
            assert_eq!(there, &end[end.len() - there.len()..]);
            assert!(behind.len() == ignored && behind.iter().all(|target| *target == IGNORED));
            assert_eq!(text.ignored(DataSplit::Validation, &last), ignored);
        }
        fs::write(at("c.txt"), "a").unwrap();
        let error = Dataset::for_evaluation(&at("c.txt"), tokens(Some(&Tokenizer::Bytes))).unwrap_err();
        assert!(matches!(error, Error::TooShort { expected: 2, got: 1, .. }), "{error}");
        let error = Dataset::for_evaluation(&at("b.bin"), tokens(Some(&Tokenizer::Bytes))).unwrap_err();
        assert!(matches!(error, Error::Vocabulary { got: 257, expected: 256, .. }), "{error}");
        let error = Dataset::for_evaluation(&at("a.txt"), tokens(None)).unwrap_err();
        assert!(error.to_string().contains("a.txt is text: expected a file of token ids"), "{error}");
        let sums = Dataset::for_evaluation(&at("a.txt"), tokens(Some(&Tokenizer::Arithmetic))).unwrap_err();
        assert!(matches!(sums, Error::NoToken { .. }));
    }

    /// By the mean and deviation of what was learnt from, not its own.
    #[test]
    fn images_of_one_file_are_standardised_as_told() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let idx = |magic: u8, sizes: &[u8], bytes: &[u8]| {
            let head = [0, 0, 8, magic].into_iter().chain(sizes.iter().flat_map(|n| [0, 0, 0, *n]));
            head.chain(bytes.iter().copied()).collect::<Vec<u8>>()
        };
        fs::write(at("t10k-images-idx3-ubyte"), idx(3, &[2, 1, 2], &[10, 20, 30, 40])).unwrap();
        fs::write(at("t10k-labels-idx1-ubyte"), idx(1, &[2], &[0, 1])).unwrap();
        fs::write(at("test_batch.bin"), vec![3; 2 * 3073]).unwrap();
        let standard = PixelStats { mean: vec![20.0], std: vec![10.0] };
        let frame = PictureFrame::usual([1, 2, 1]);
        let (classes, count, strict) = (None, 10, false);
        let asked = |standard, pixels| ModelInput::Images {
            standard,
            pixels,
            frame,
            classes: classes.clone(),
            count,
            strict,
        };
        let takes = |standard| asked(standard, PixelScaling::default());
        let path = at("t10k-images-idx3-ubyte");
        let images = Dataset::for_evaluation(&path, takes(Some(standard.clone()))).unwrap();
        assert_eq!((images.len(DataSplit::Train), images.len(DataSplit::Validation)), (0, 2));
        let batch = images.batch(DataSplit::Validation, &[(0, 0), (0, 1)]).unwrap();
        let Inputs::Images(of_two) = batch.inputs else { panic!() };
        let mut pixels = of_two.to_f32();
        pixels.sort_by(f32::total_cmp);
        assert_eq!(pixels, [-1.0, 0.0, 1.0, 2.0]);
        // Of pixels of 0 to 1, as a run file has them.
        let pixels = PixelScaling { mean: None, std: Some(vec![20.0 / 255.0]) };
        let asked = Dataset::for_evaluation(&path, asked(Some(standard), pixels)).unwrap();
        let batch = asked.batch(DataSplit::Validation, &[(0, 0), (0, 1)]).unwrap();
        let Inputs::Images(of_two) = batch.inputs else { panic!() };
        let mut pixels = of_two.to_f32();
        pixels.sort_by(f32::total_cmp);
        assert_eq!(pixels, [-0.5, 0.0, 0.5, 1.0]);
        let cifar = Dataset::for_evaluation(&at("test_batch.bin"), takes(None)).unwrap();
        assert_eq!(cifar.len(DataSplit::Validation), 2);
        // In colour, of any size; the labels beside it have one name whatever the images are.
        fs::write(at("t10k-images-idx4-ubyte"), idx(4, &[2, 1, 1, 3], &[0, 1, 2, 3, 4, 5])).unwrap();
        let colour = Dataset::for_evaluation(&at("t10k-images-idx4-ubyte"), takes(None)).unwrap();
        assert_eq!(colour.facts().image, Some((1, 1, 3)));
    }
}
