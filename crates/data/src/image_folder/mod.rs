//! People's own pictures: a folder for each class, files of any size, cropped and brought to one size in
//! threads while a batch is made.
//!
//! `DIR/train` and `DIR/val` (ImageNet's layout), or one folder of classes of which a fraction is held out.
//! Training crops as torchvision's reference recipes do: a box of random area and shape, mirrored or not;
//! validation brings the shorter side to one length and takes the middle.
//!
//! | | file |
//! |---|---|
//! | which files there are, and their classes | `listing` |
//! | files as pixels | `decode` |
//! | pixels at another size | `resample` |
//! | pixels on disk | `cache` |

mod cache;
mod decode;
pub(crate) mod listing;
mod resample;
#[cfg(test)]
mod tests;

use crate::augment::SampleRandom;
use crate::error::{check_validation, held_out};
use crate::images::{HELD_OUT, PixelStats, in_bytes};
use crate::order::Permutation;
use crate::{DataFacts, DataSplit, Error, HostBatch, ImageBatch, Inputs};
use cache::{CachedPictures, decoded, intact};
use espalier_plan::data::{FolderSource, HeldOut, PictureCache, PictureCrop, PixelScaling};
use espalier_tensor::ops::standardise::{ImageCrop, PixelValues};
use listing::{FolderListings, PictureFile, PictureListing, learnt_folder};
use rayon::prelude::*;
use resample::{PictureView, PixelBox, ResampledBox, with_shorter_side};
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use cache::DamagedPicture;

/// The mean and standard deviation of ImageNet's pixels, by which most published networks were trained.
const IMAGENET: [[f64; 3]; 2] = [[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]];

/// Pictures in folders, one for each class.
#[derive(Debug)]
pub struct ImageFolder {
    /// In the order of their labels.
    classes: Vec<String>,
    sets: Vec<PictureSet>,
    train: Vec<PictureSample>,
    validation: Vec<PictureSample>,
    frame: PictureFrame,
    crop: PictureCrop,
    flip: bool,
    seed: u64,
    standard: PixelStats,
    /// The standardised value of every byte, channel by channel.
    values: Arc<PixelValues>,
    damaged: Vec<DamagedPicture>,
}

/// Where the pictures of a listing are read.
#[derive(Debug)]
enum PictureSet {
    Cached(CachedPictures),
    /// Decoded whenever they are wanted, the shorter side at most so long.
    Files(Vec<PictureFile>, usize),
}

#[derive(Debug, Clone, Copy)]
struct PictureSample {
    set: u32,
    picture: u32,
    label: u32,
}

/// What a model reads of a picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PictureFrame {
    /// Height, width, and 3 channels or, for grey, 1.
    pub shape: [usize; 3],
    /// The shorter side that a picture is brought to before its middle is taken.
    pub resize: usize,
}

impl PictureFrame {
    /// This shape of a picture whose shorter side is so long, or else as long as it must be.
    pub fn new(shape: [usize; 3], resize: usize) -> PictureFrame {
        PictureFrame { shape, resize: resize.max(shape[0]).max(shape[1]) }
    }

    /// The part of a picture that is evaluated, as recipes for ImageNet have it: 224 of 256; all of a small one.
    pub fn usual([height, width, channels]: [usize; 3]) -> PictureFrame {
        let side = height.max(width);
        let resize = if side <= 64 { side } else { (side * 256).div_ceil(224) };
        PictureFrame { shape: [height, width, channels], resize }
    }

    /// The middle of a picture of this size.
    fn middle(&self, height: usize, width: usize) -> ResampledBox {
        let [rows, columns, _] = self.shape;
        let size = with_shorter_side(height, width, self.resize);
        // Half of an odd difference goes to the even number, as Python rounds.
        let offset = |all: usize, part: usize| ((all - part) as f64 / 2.0).round_ties_even() as usize;
        let (top, left) = (offset(size[0], rows), offset(size[1], columns));
        let window = PixelBox { top, left, height: rows, width: columns };
        ResampledBox { source: PixelBox::all(height, width), size, window, flip: false }
    }
}

/// What a thread needs again for every picture.
#[derive(Default)]
struct PictureBuffers {
    pixels: Vec<u8>,
    rows: Vec<u8>,
    colours: Vec<u8>,
}

impl ImageFolder {
    /// Opens the folders of a run file; decodes what the cache does not have.
    pub(crate) fn open(
        source: &FolderSource,
        flip: bool,
        held_out: &HeldOut,
        seed: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<ImageFolder, Error> {
        let FolderSource { size, resize, crop, strict, .. } = source;
        let FolderListings { learnt, held_out: others } = FolderListings::of(source, held_out)?;
        let (folder, classes) = (learnt.folder.clone(), learnt.classes.clone());
        let frame = PictureFrame { shape: [*size, *size, 3], resize: *resize };
        let mut data = ImageFolder::new(classes, frame, *crop, flip, seed);
        data.train = data.add(learnt, source, progress)?;
        let fraction = match held_out {
            HeldOut::Fraction { validation } if others.is_empty() => Some(*validation),
            _ => None,
        };
        for listing in others {
            let mut samples = data.add(listing, source, progress)?;
            data.validation.append(&mut samples);
        }
        if *strict {
            data.refuse_damaged()?;
        }
        if let Some(fraction) = fraction {
            data.hold_out(&folder, fraction)?;
        }
        match data.train.is_empty() {
            true => Err(Error::TooFew { path: folder, split: "training", expected: 1, got: 0 }),
            false => Ok(data),
        }
    }

    /// What a model must know of the folders of a run file, without opening a picture.
    pub(crate) fn facts_of(source: &FolderSource) -> Result<DataFacts, Error> {
        let classes = PictureListing::classes(&learnt_folder(source))?;
        let image = Some((source.size, source.size, 3));
        Ok(DataFacts { vocab: None, image, classes: Some(classes.len()) })
    }

    /// All pictures of a folder of classes, to evaluate a model on, which knows `classes` of them, or as
    /// many; less the damaged ones, unless they are an error.
    pub(crate) fn for_evaluation(
        path: &Path,
        frame: PictureFrame,
        classes: Option<&[String]>,
        most: usize,
        strict: bool,
    ) -> Result<ImageFolder, Error> {
        let PictureListing { classes, files, .. } = PictureListing::read(path, classes)?;
        if let Some(class) = classes.get(most) {
            return Err(Error::UnknownClass { path: path.join(class), expected: most });
        }
        let mut damaged = Vec::new();
        let files = intact(files, &mut damaged, &mut |_, _| ());
        let data = ImageFolder { damaged, ..ImageFolder::of_files(classes, files, frame) };
        match data.validation.is_empty() {
            _ if strict => data.refuse_damaged().map(|()| data),
            true => Err(Error::TooFew { path: path.into(), split: "evaluation", expected: 1, got: 0 }),
            false => Ok(data),
        }
    }

    /// These pictures, of which nobody knows what they show.
    pub fn of_pictures(paths: &[PathBuf], frame: PictureFrame) -> ImageFolder {
        let file = |path: &PathBuf| PictureFile { path: path.clone(), label: 0, bytes: 0, modified: 0 };
        ImageFolder::of_files(Vec::new(), paths.iter().map(file).collect(), frame)
    }

    fn of_files(classes: Vec<String>, files: Vec<PictureFile>, frame: PictureFrame) -> ImageFolder {
        let mut data = ImageFolder::new(classes, frame, PictureCrop::Center, false, 0);
        let sample =
            |(i, file): (usize, &PictureFile)| PictureSample { set: 0, picture: i as u32, label: file.label };
        data.validation = files.iter().enumerate().map(sample).collect();
        data.sets.push(PictureSet::Files(files, usize::MAX));
        data
    }

    fn new(
        classes: Vec<String>,
        frame: PictureFrame,
        crop: PictureCrop,
        flip: bool,
        seed: u64,
    ) -> ImageFolder {
        let [mean, std] = IMAGENET.map(|channels| match frame.shape[2] {
            3 => channels.map(|value| 255.0 * value).to_vec(),
            count => vec![255.0 * channels.iter().sum::<f64>() / 3.0; count],
        });
        let standard = PixelStats { mean, std };
        ImageFolder {
            classes,
            sets: Vec::new(),
            train: Vec::new(),
            validation: Vec::new(),
            frame,
            crop,
            flip,
            seed,
            values: Arc::new(standard.values()),
            standard,
            damaged: Vec::new(),
        }
    }

    /// Takes the pictures of a listing, less the damaged ones.
    fn add(
        &mut self,
        mut listing: PictureListing,
        source: &FolderSource,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Vec<PictureSample>, Error> {
        // Where a damaged one is an error, it is found when it is wanted.
        if source.cache == PictureCache::None && !source.strict {
            listing.files = intact(listing.files, &mut self.damaged, progress);
        }
        let set = self.sets.len() as u32;
        let sample =
            |(i, file): (usize, &PictureFile)| PictureSample { set, picture: i as u32, label: file.label };
        let mut samples: Vec<PictureSample> = listing.files.iter().enumerate().map(sample).collect();
        match source.cache {
            PictureCache::Disk => {
                let folder = source.cache_path.clone().map_or_else(cache::usual_folder, Ok)?;
                let mut cached = CachedPictures::open(&listing, &folder, source.max_side, progress)?;
                samples.retain(|sample| cached.size(sample.picture as usize).is_some());
                self.damaged.append(&mut cached.damaged);
                self.sets.push(PictureSet::Cached(cached));
            }
            PictureCache::None => self.sets.push(PictureSet::Files(listing.files, source.max_side)),
        }
        Ok(samples)
    }

    /// An error that names the first damaged file, where there is one.
    fn refuse_damaged(&self) -> Result<(), Error> {
        let Some(DamagedPicture { path, why }) = self.damaged.first() else { return Ok(()) };
        Err(Error::Damaged { path: path.clone(), why: why.clone(), more: self.damaged.len() - 1 })
    }

    /// Holds a fraction of the samples out: the same in every run.
    fn hold_out(&mut self, folder: &Path, fraction: f64) -> Result<(), Error> {
        check_validation(fraction)?;
        let count = self.train.len();
        let held_out = held_out(count, fraction);
        if held_out >= count {
            return Err(Error::TooFew { path: folder.into(), split: "training", expected: 1, got: 0 });
        }
        let shuffle = Permutation::new(HELD_OUT, count as u64);
        let mut shuffled: Vec<PictureSample> =
            (0..count as u64).map(|i| self.train[shuffle.at(i) as usize]).collect();
        self.train = shuffled.split_off(held_out);
        self.validation = shuffled;
        Ok(())
    }

    /// The same pictures, standardised as others were, or as somebody asks for.
    pub fn with_pixels(
        mut self,
        standard: Option<PixelStats>,
        asked: &PixelScaling,
    ) -> Result<ImageFolder, Error> {
        let found = standard.unwrap_or(self.standard);
        let channels = self.frame.shape[2];
        let PixelStats { mean, std } = match found.mean.len() == channels {
            true => found,
            false => PixelStats { mean: vec![found.mean[0]; channels], std: vec![found.std[0]; channels] },
        };
        self.standard = PixelStats {
            mean: in_bytes("mean", &asked.mean, &mean)?,
            std: in_bytes("std", &asked.std, &std)?,
        };
        self.values = Arc::new(self.standard.values());
        Ok(self)
    }

    /// The classes, in the order of their labels.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// Files that are no samples, being no pictures.
    pub fn damaged(&self) -> &[DamagedPicture] {
        &self.damaged
    }

    /// What a model sees of a picture that it is evaluated on.
    pub fn frame(&self) -> PictureFrame {
        self.frame
    }

    /// How pixels are standardised.
    pub fn standard(&self) -> &PixelStats {
        &self.standard
    }

    pub(crate) fn facts(&self) -> DataFacts {
        let [height, width, channels] = self.frame.shape;
        DataFacts { vocab: None, image: Some((height, width, channels)), classes: Some(self.classes.len()) }
    }

    pub(crate) fn len(&self, split: DataSplit) -> usize {
        self.samples(split).len()
    }

    pub(crate) fn label(&self, split: DataSplit, index: usize) -> u32 {
        self.samples(split)[index].label
    }

    fn samples(&self, split: DataSplit) -> &[PictureSample] {
        match split {
            DataSplit::Train => &self.train,
            DataSplit::Validation => &self.validation,
        }
    }

    pub(crate) fn batch(&self, split: DataSplit, picks: &[(u64, usize)]) -> Result<HostBatch, Error> {
        let [height, width, channels] = self.frame.shape;
        let pixels = self.bytes(split, picks)?;
        let targets: Vec<u32> = picks.iter().map(|pick| self.label(split, pick.1)).collect();
        let crops = targets.iter().zip(0..).map(|(label, i)| ImageCrop::full(i, *label)).collect();
        let (shape, size) = ([picks.len(), height, width, channels], [height, width]);
        let images = ImageBatch { pixels, shape, crops, size, values: self.values.clone() };
        Ok(HostBatch { inputs: Inputs::Images(images), targets, positions: None })
    }

    /// What the model sees of these samples, by all cores: [picks, height, width, channels].
    fn bytes(&self, split: DataSplit, picks: &[(u64, usize)]) -> Result<Vec<u8>, Error> {
        let stride = self.frame.shape.iter().product();
        let mut bytes = vec![0; picks.len() * stride];
        let crops = bytes.par_chunks_exact_mut(stride).zip(picks.par_iter());
        crops.try_for_each_init(PictureBuffers::default, |buffers, (out, &(epoch, index))| {
            self.show(split, epoch, index, buffers, out)
        })?;
        Ok(bytes)
    }

    /// One sample as the model sees it.
    fn show(
        &self,
        split: DataSplit,
        epoch: u64,
        index: usize,
        buffers: &mut PictureBuffers,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let PictureSample { set, picture, .. } = self.samples(split)[index];
        let PictureBuffers { pixels, rows, colours } = buffers;
        let random = || SampleRandom::new(self.seed, epoch, index);
        let choose = |height: usize, width: usize| match split {
            DataSplit::Train => self.varied(height, width, random()),
            DataSplit::Validation => self.frame.middle(height, width),
        };
        let out_colours = match self.frame.shape[2] {
            3 => &mut *out,
            _ => {
                colours.resize(3 * out.len(), 0);
                &mut colours[..]
            }
        };
        match &self.sets[set as usize] {
            PictureSet::Cached(cached) => {
                let (height, width) = cached.size(picture as usize).expect("damaged pictures are no samples");
                let mut how = choose(height, width);
                let wanted = how.source.top..how.source.top + how.source.height;
                cached.rows(picture as usize, wanted.clone(), pixels)?;
                how.source.top = 0;
                PictureView { height: wanted.len(), width, pixels }.resample_into(&how, rows, out_colours);
            }
            PictureSet::Files(files, side) => {
                let path = &files[picture as usize].path;
                let found = decoded(path, *side);
                let found = found.map_err(|why| match path.exists() {
                    true => Error::Damaged { path: path.clone(), why, more: 0 },
                    false => Error::Missing { path: path.clone(), expected: "a picture".into(), hint: "" },
                })?;
                found.view().resample_into(&choose(found.height, found.width), rows, out_colours);
            }
        }
        if self.frame.shape[2] == 1 {
            out.iter_mut().zip(colours.as_chunks().0).for_each(|(grey, colour)| *grey = luminance(*colour));
        }
        Ok(())
    }

    /// What of a picture is learnt from this time.
    fn varied(&self, height: usize, width: usize, mut random: SampleRandom) -> ResampledBox {
        let [rows, columns, _] = self.frame.shape;
        let mut how = self.frame.middle(height, width);
        match self.crop {
            PictureCrop::Resized { scale, ratio } => {
                let [top, left, high, wide] = random.resized_crop(height, width, scale, ratio);
                how.source = PixelBox { top, left, height: high, width: wide };
                (how.size, how.window) = ([rows, columns], PixelBox::all(rows, columns));
            }
            PictureCrop::Random => {
                how.window.top = random.up_to(how.size[0] - rows);
                how.window.left = random.up_to(how.size[1] - columns);
            }
            PictureCrop::Center => {}
        }
        how.flip = self.flip && random.coin();
        how
    }
}

/// As Pillow turns colours into grey.
fn luminance([red, green, blue]: [u8; 3]) -> u8 {
    ((u32::from(red) * 19595 + u32::from(green) * 38470 + u32::from(blue) * 7471 + 0x8000) >> 16) as u8
}
