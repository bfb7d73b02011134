//! Images with labels, kept as bytes and standardised on the device that reads them.
//!
//! The validation split is held out by a shuffle that depends on the number of images alone, so every run
//! evaluates on the same samples; or it is files of its own. A pixel becomes (value - mean) / std, with the
//! mean and standard deviation of its channel over the training split, both exact since the sums are
//! integers, unless the run file says others. A channel that never varies is divided by 1.

use crate::{
    Batch, DataFacts, DataSplit, Error, HostBatch, ImageBatch, Inputs,
    augment::Augmentation,
    error::{check_validation, held_out},
    image_batch::fill_images,
    order::Permutation,
    raw::RawImages,
};
use espalier_plan::data::PixelScaling;
use espalier_tensor::ops::standardise::{ImageCrop, PixelValues, StoredImages};
use espalier_tensor::{DType, Device};
use std::sync::{Arc, OnceLock};

/// The key of the shuffle that holds out validation images: the same for every run.
pub(crate) const HELD_OUT: u64 = u64::from_be_bytes(*b"held out") | 1;

/// Bytes that are worth a thread of their own to copy.
const BYTES_PER_THREAD: usize = 4 << 20;

/// Images with one label each.
#[derive(Debug)]
pub struct ImageDataset {
    /// All of them; those of files that are held out stand at the end.
    raw: RawImages,
    /// The first `held_out` positions of the shuffle are the validation split; without one, the last images are.
    shuffle: Option<Permutation>,
    held_out: usize,
    standard: PixelStats,
    /// The standardised value of every byte, channel by channel.
    values: Arc<PixelValues>,
    /// How those of the training split are varied.
    augmentation: Augmentation,
    /// All of them on a GPU, where they are kept there.
    stored: OnceLock<Box<StoredImages>>,
}

/// How pixels were standardised, in units of a byte's 0 to 255.
#[derive(Debug, Clone, PartialEq)]
pub struct PixelStats {
    /// Of each channel over the training split.
    pub mean: Vec<f64>,
    /// Of each channel over the training split.
    pub std: Vec<f64>,
}

impl ImageDataset {
    /// Images to learn from, all of them, and others to evaluate on.
    pub(crate) fn with_validation(
        mut raw: RawImages,
        validation: Vec<RawImages>,
    ) -> Result<ImageDataset, Error> {
        let learnt = raw.labels.len();
        for other in validation {
            if other.shape != raw.shape {
                return Err(Error::Shape { path: other.path, expected: raw.shape, got: other.shape });
            }
            let unknown = other.labels.iter().position(|label| usize::from(*label) >= raw.classes);
            if let Some(position) = unknown {
                let got = other.labels[position].into();
                return Err(Error::Label { path: other.path, position, expected: raw.classes, got });
            }
            raw.pixels.extend(other.pixels);
            raw.labels.extend(other.labels);
        }
        let (held_out, standard) = (raw.labels.len() - learnt, PixelStats::of(&raw, 0..learnt));
        Ok(ImageDataset::standardised(raw, None, held_out, standard))
    }

    pub fn shapes(shapes: &super::Shapes, validation: f64) -> Result<ImageDataset, Error> {
        ImageDataset::new(shapes.draw()?, validation)
    }

    pub(crate) fn new(raw: RawImages, validation: f64) -> Result<ImageDataset, Error> {
        check_validation(validation)?;
        let count = raw.labels.len();
        debug_assert_eq!(raw.pixels.len(), count * raw.shape.iter().product::<usize>());
        let held_out = held_out(count, validation);
        if held_out >= count {
            return Err(Error::TooFew { path: raw.path, split: "training", expected: 1, got: 0 });
        }
        let shuffle = Permutation::new(HELD_OUT, count as u64);
        let train = (held_out..count).map(|i| shuffle.at(i as u64) as usize);
        let standard = PixelStats::of(&raw, train);
        Ok(ImageDataset::standardised(raw, Some(shuffle), held_out, standard))
    }

    /// Images of which nothing is learnt: all are to be evaluated on, standardised as those were that a model
    /// learnt from, or by themselves where nobody knows that.
    pub(crate) fn for_evaluation(raw: RawImages, standard: Option<PixelStats>) -> ImageDataset {
        let count = raw.labels.len();
        let standard = standard.unwrap_or_else(|| PixelStats::of(&raw, 0..count));
        ImageDataset::standardised(raw, Some(Permutation::new(HELD_OUT, count as u64)), count, standard)
    }

    /// The same images with the mean or the standard deviation that somebody asks for.
    pub(crate) fn with_pixels(self, pixels: &PixelScaling) -> Result<ImageDataset, Error> {
        let PixelStats { mean, std } = &self.standard;
        let standard = PixelStats {
            mean: in_bytes("mean", &pixels.mean, mean)?,
            std: in_bytes("std", &pixels.std, std)?,
        };
        Ok(ImageDataset::standardised(self.raw, self.shuffle, self.held_out, standard))
    }

    /// The same images, cropped and mirrored at random while they are learnt.
    pub(crate) fn augmented(self, augmentation: Augmentation) -> ImageDataset {
        ImageDataset { augmentation, ..self }
    }

    fn standardised(
        raw: RawImages,
        shuffle: Option<Permutation>,
        held_out: usize,
        standard: PixelStats,
    ) -> ImageDataset {
        let values = Arc::new(standard.values());
        let augmentation = Augmentation::default();
        ImageDataset { raw, shuffle, held_out, standard, values, augmentation, stored: OnceLock::new() }
    }

    /// Copies all images to a GPU, for whoever trains there from now on; the first GPU stays.
    pub(crate) fn keep_on(&self, device: &Device) -> espalier_tensor::Result<()> {
        if self.stored.get().is_none() {
            let [height, width, channels] = self.raw.shape;
            let shape = [self.raw.labels.len(), height, width, channels];
            let stored = StoredImages::new(device, &self.raw.pixels, shape, &self.values)?;
            // Another thread may have been faster: its copy is as good.
            let _ = self.stored.set(Box::new(stored));
        }
        Ok(())
    }

    /// Whether batches for a device are made there.
    pub(crate) fn are_on(&self, device: &Device) -> bool {
        self.stored.get().is_some_and(|stored| stored.serve(device))
    }

    /// The same as [`ImageDataset::batch`] of what a GPU keeps; nothing where that is not the device.
    pub(crate) fn batch_on(
        &self,
        device: &Device,
        dtype: DType,
        split: DataSplit,
        picks: &[(u64, usize)],
    ) -> Option<espalier_tensor::Result<Batch>> {
        let stored = self.stored.get().filter(|stored| stored.serve(device))?;
        let crops: Vec<ImageCrop> = picks.iter().map(|pick| self.crop(split, *pick)).collect();
        let made = stored.batch(device, dtype, &crops, self.size());
        Some(made.map(|(inputs, targets)| Batch { inputs, targets, positions: None }))
    }

    /// What is seen of a sample: of which of all images.
    fn crop(&self, split: DataSplit, (epoch, index): (u64, usize)) -> ImageCrop {
        let sample = self.sample(split, index);
        let full = ImageCrop::full(sample as u32, self.raw.labels[sample].into());
        match split {
            DataSplit::Train => self.augmentation.applied(full, epoch, index),
            DataSplit::Validation => full,
        }
    }

    /// Height and width of what is seen.
    fn size(&self) -> [usize; 2] {
        [self.raw.shape[0], self.raw.shape[1]]
    }

    /// Bytes of all images.
    pub(crate) fn bytes(&self) -> u64 {
        self.raw.pixels.len() as u64
    }

    /// How pixels are standardised.
    pub fn standard(&self) -> &PixelStats {
        &self.standard
    }

    pub(crate) fn len(&self, split: DataSplit) -> usize {
        match split {
            DataSplit::Train => self.raw.labels.len() - self.held_out,
            DataSplit::Validation => self.held_out,
        }
    }

    pub(crate) fn facts(&self) -> DataFacts {
        let [height, width, channels] = self.raw.shape;
        DataFacts { vocab: None, image: Some((height, width, channels)), classes: Some(self.raw.classes) }
    }

    pub(crate) fn batch(&self, split: DataSplit, picks: &[(u64, usize)]) -> Result<HostBatch, Error> {
        let ([height, width, channels], stride) = (self.raw.shape, self.raw.stride());
        let mut crops: Vec<ImageCrop> = picks.iter().map(|pick| self.crop(split, *pick)).collect();
        let mut pixels = vec![0; picks.len() * stride];
        let threads = (pixels.len() / BYTES_PER_THREAD).clamp(1, 4);
        fill_images(&mut pixels, stride, threads, |i, image| {
            image.copy_from_slice(self.raw.image(crops[i].image as usize));
            Ok(())
        })?;
        let targets = crops.iter().map(|crop| crop.label).collect();
        crops.iter_mut().zip(0..).for_each(|(crop, i)| crop.image = i);
        let shape = [picks.len(), height, width, channels];
        let images = ImageBatch { pixels, shape, crops, size: self.size(), values: self.values.clone() };
        Ok(HostBatch { inputs: Inputs::Images(images), targets, positions: None })
    }

    pub(crate) fn label(&self, split: DataSplit, index: usize) -> u32 {
        u32::from(self.raw.labels[self.sample(split, index)])
    }

    /// Where an image of a split stands among all.
    fn sample(&self, split: DataSplit, index: usize) -> usize {
        assert!(index < self.len(split), "image {index} of a split of {}", self.len(split));
        match (&self.shuffle, split) {
            (Some(shuffle), DataSplit::Train) => shuffle.at((self.held_out + index) as u64) as usize,
            (Some(shuffle), DataSplit::Validation) => shuffle.at(index as u64) as usize,
            (None, DataSplit::Train) => index,
            (None, DataSplit::Validation) => self.len(DataSplit::Train) + index,
        }
    }
}

/// What is asked for, for pixels of 0 to 1, for each channel and in units of a byte; `found` where nothing is.
pub(crate) fn in_bytes(
    field: &'static str,
    asked: &Option<Vec<f64>>,
    found: &[f64],
) -> Result<Vec<f64>, Error> {
    match asked.as_deref() {
        None => Ok(found.into()),
        Some([one]) => Ok(vec![255.0 * one; found.len()]),
        Some(some) if some.len() == found.len() => Ok(some.iter().map(|value| 255.0 * value).collect()),
        Some(some) => {
            let got = format!("{} numbers for {} channels", some.len(), found.len());
            Err(Error::setting(field, "one number, or one for each channel", got))
        }
    }
}

impl PixelStats {
    /// The standardised value of every byte, channel by channel.
    pub(crate) fn values(&self) -> PixelValues {
        let value = |(mean, std): (&f64, &f64)| std::array::from_fn(|v| ((v as f64 - mean) / std) as f32);
        self.mean.iter().zip(&self.std).map(value).collect()
    }

    fn of(raw: &RawImages, samples: impl Iterator<Item = usize>) -> PixelStats {
        let channels = raw.shape[2];
        let mut histograms = vec![[0u64; 256]; channels];
        for sample in samples {
            for pixel in raw.image(sample).chunks_exact(channels) {
                pixel.iter().zip(&mut histograms).for_each(|(&v, histogram)| histogram[usize::from(v)] += 1);
            }
        }
        let moment = |histogram: &[u64; 256], power: u32| -> f64 {
            histogram.iter().zip(0u64..).map(|(n, v)| n * v.pow(power)).sum::<u64>() as f64
                / histogram.iter().sum::<u64>() as f64
        };
        let mean: Vec<f64> = histograms.iter().map(|s| moment(s, 1)).collect();
        let variance = histograms.iter().zip(&mean).map(|(s, m)| moment(s, 2) - m * m);
        let std = variance.map(|v| if v > 1e-6 { v.sqrt() } else { 1.0 }).collect();
        PixelStats { mean, std }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dataset;

    /// `count` images of 2 x 3 pixels and 2 channels; the second channel is constant.
    fn raw(count: usize) -> RawImages {
        let pixels = (0..count * 6).flat_map(|i| [(i * 37 % 251) as u8, 9]).collect();
        let labels = (0..count).map(|i| i as u8).collect();
        RawImages { path: "made up".into(), pixels, labels, shape: [2, 3, 2], classes: 256 }
    }

    fn all(data: &Dataset, split: DataSplit) -> HostBatch {
        let picks: Vec<_> = (0..data.len(split)).map(|i| (0, i)).collect();
        data.batch(split, &picks).unwrap()
    }

    /// The two splits are disjoint, together they are the set, and another run finds the same.
    #[test]
    fn splits_part_the_set() {
        let data = Dataset::Images(ImageDataset::new(raw(100), 0.2).unwrap());
        assert_eq!((data.len(DataSplit::Train), data.len(DataSplit::Validation)), (80, 20));
        let mut labels = all(&data, DataSplit::Train).targets;
        let held_out = all(&data, DataSplit::Validation).targets;
        assert!(held_out.windows(2).any(|w| w[0] > w[1]), "held out without a shuffle: {held_out:?}");
        labels.extend(&held_out);
        labels.sort_unstable();
        assert!(labels.into_iter().eq(0..100));
        assert_eq!(
            held_out,
            all(&Dataset::Images(ImageDataset::new(raw(100), 0.2).unwrap()), DataSplit::Validation).targets
        );
    }

    #[test]
    fn training_pixels_are_standard() {
        let data = Dataset::Images(ImageDataset::new(raw(100), 0.1).unwrap());
        assert_eq!(data.facts(), DataFacts { vocab: None, image: Some((2, 3, 2)), classes: Some(256) });
        let Inputs::Images(images) = all(&data, DataSplit::Train).inputs else { panic!() };
        assert_eq!(images.shape, [90, 2, 3, 2]);
        let pixels = images.to_f32();
        let n = (pixels.len() / 2) as f32;
        let first = || pixels.iter().step_by(2);
        assert!((first().sum::<f32>() / n).abs() < 1e-4);
        assert!((first().map(|x| x * x).sum::<f32>() / n - 1.0).abs() < 1e-4);
        assert!(pixels.iter().skip(1).step_by(2).all(|&x| x == 0.0));
    }

    /// As torchvision's `Normalize` has them: of pixels from 0 to 1, one for all or one for each channel.
    #[test]
    fn pixels_are_standardised_as_asked() {
        let first = |mean: Option<&[f64]>, std: Option<&[f64]>| {
            let pixels = PixelScaling { mean: mean.map(Into::into), std: std.map(Into::into) };
            let images = ImageDataset::new(raw(100), 0.1).unwrap().with_pixels(&pixels)?;
            let byte = f64::from(images.raw.pixels[images.sample(DataSplit::Train, 0) * 12]);
            let Inputs::Images(batch) = images.batch(DataSplit::Train, &[(0, 0)])?.inputs else { panic!() };
            let pixels = batch.to_f32();
            Ok::<_, Error>((byte / 255.0, pixels[0], pixels[1]))
        };
        let near = |a: f32, b: f64| assert!((f64::from(a) - b).abs() < 1e-6, "{a} is not {b}");
        let (pixel, value, constant) = first(Some(&[0.0]), Some(&[1.0])).unwrap();
        near(value, pixel);
        near(constant, 9.0 / 255.0);
        let (pixel, value, constant) = first(Some(&[0.5, 0.25]), Some(&[0.5, 2.0])).unwrap();
        near(value, (pixel - 0.5) / 0.5);
        near(constant, (9.0 / 255.0 - 0.25) / 2.0);
        // Only the mean is the split's own.
        near(first(None, Some(&[1.0])).unwrap().2, 0.0);
        let refused = first(Some(&[0.1, 0.2, 0.3]), None).unwrap_err().to_string();
        assert_eq!(
            refused,
            "data.mean is wrong: expected one number, or one for each channel, got 3 numbers for 2 channels"
        );
    }

    /// Crops and flips as drawn for the epoch and the sample, black beyond the edge; none in validation.
    #[test]
    fn training_images_are_varied() {
        let augmentation = Augmentation { seed: 2, padding: 1, flip: true };
        let plain = ImageDataset::new(raw(40), 0.2).unwrap();
        let varied = ImageDataset::new(raw(40), 0.2).unwrap().augmented(augmentation);
        let crops = |data: &ImageDataset, split, epoch| {
            let picks: Vec<_> = (0..data.len(split)).map(|i| (epoch, i)).collect();
            match data.batch(split, &picks).unwrap().inputs {
                Inputs::Images(images) => images.crops,
                Inputs::Tokens { .. } => panic!("images"),
            }
        };
        let of = |crop: ImageCrop| (crop.top, crop.left, crop.flip);
        assert!(crops(&plain, DataSplit::Train, 0).into_iter().all(|crop| of(crop) == (0, 0, 0)));
        assert!(crops(&varied, DataSplit::Validation, 0).into_iter().all(|crop| of(crop) == (0, 0, 0)));
        let mut seen: Vec<_> =
            (0..20).flat_map(|epoch| crops(&varied, DataSplit::Train, epoch)).map(of).collect();
        seen.sort_unstable();
        seen.dedup();
        let all = (-1..=1).flat_map(|top| (-1..=1).flat_map(move |left| [(top, left, 0), (top, left, 1)]));
        assert!(seen.into_iter().eq(all), "each shift by up to the padding, flipped and not");
        // The same in the middle of an epoch, and by itself.
        let one = varied.batch(DataSplit::Train, &[(3, 7)]).unwrap();
        let Inputs::Images(one) = one.inputs else { panic!("images") };
        assert_eq!(of(one.crops[0]), of(crops(&varied, DataSplit::Train, 3)[7]));
    }

    #[test]
    fn what_cannot_be_split_is_refused() {
        assert!(matches!(ImageDataset::new(raw(10), 1.0), Err(Error::Setting { field: "validation", .. })));
        assert!(matches!(ImageDataset::new(raw(1), 0.5), Err(Error::TooFew { .. })));
        assert!(Dataset::Images(ImageDataset::new(raw(10), 0.0).unwrap()).is_empty(DataSplit::Validation));
        assert_eq!(ImageDataset::new(raw(10), 0.001).unwrap().len(DataSplit::Validation), 1);
    }
}
