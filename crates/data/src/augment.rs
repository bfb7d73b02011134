//! What random crops and flips do to a training image, as a function of (seed, epoch, sample): so that any
//! thread, any layout of ranks and a resumed run see the same.
//!
//! A set of images of one size is padded with black and cropped to its size again, which is an offset; pictures
//! of any size are cropped at a random place, area and shape and brought to one size (`RandomCrop`,
//! `RandomResizedCrop` and `RandomHorizontalFlip` of torchvision).

use espalier_tensor::{ops::standardise::ImageCrop, random};

/// Apart from every other use of the run's seed.
const PURPOSE: u64 = u64::from_be_bytes(*b"augment ");

/// How often a box is tried that may not fit the picture.
const TRIES: u64 = 10;

/// Random numbers of one sample in one epoch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SampleRandom {
    key: u64,
    drawn: u64,
}

impl SampleRandom {
    pub(crate) fn new(seed: u64, epoch: u64, sample: usize) -> SampleRandom {
        let epoch_key = random::key(random::key(seed, PURPOSE), epoch);
        SampleRandom { key: random::key(epoch_key, sample as u64), drawn: 0 }
    }

    /// A number in (0, 1).
    pub(crate) fn uniform(&mut self) -> f64 {
        self.drawn += 1;
        random::uniform(self.key, self.drawn)
    }

    fn between(&mut self, [low, high]: [f64; 2]) -> f64 {
        low + (high - low) * self.uniform()
    }

    /// A number from 0 to `most`.
    pub(crate) fn up_to(&mut self, most: usize) -> usize {
        ((most + 1) as f64 * self.uniform()) as usize
    }

    pub(crate) fn coin(&mut self) -> bool {
        self.uniform() < 0.5
    }

    /// A box of a random area, as a fraction of the picture's, and a random ratio of width to height: its top,
    /// left, height and width. Where ten tries do not fit, the largest in the middle whose ratio is allowed.
    pub(crate) fn resized_crop(
        &mut self,
        height: usize,
        width: usize,
        scale: [f64; 2],
        ratio: [f64; 2],
    ) -> [usize; 4] {
        let area = (height * width) as f64;
        for _ in 0..TRIES {
            let target = area * self.between(scale);
            let aspect = self.between(ratio.map(f64::ln)).exp();
            let wide = (target * aspect).sqrt().round_ties_even() as usize;
            let high = (target / aspect).sqrt().round_ties_even() as usize;
            if (1..=width).contains(&wide) && (1..=height).contains(&high) {
                return [self.up_to(height - high), self.up_to(width - wide), high, wide];
            }
        }
        let is = width as f64 / height as f64;
        let rounded = |x: f64, most: usize| (x.round_ties_even() as usize).clamp(1, most);
        let (high, wide) = match is {
            _ if is < ratio[0] => (rounded(width as f64 / ratio[0], height), width),
            _ if is > ratio[1] => (height, rounded(height as f64 * ratio[1], width)),
            _ => (height, width),
        };
        [(height - high) / 2, (width - wide) / 2, high, wide]
    }
}

/// How images of one size are varied while a model learns from them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Augmentation {
    /// Another seed, other crops.
    pub seed: u64,
    /// Black pixels around an image before it is cropped to its size.
    pub padding: usize,
    /// Whether every second image is mirrored.
    pub flip: bool,
}

impl Augmentation {
    /// What is seen of a sample of the training split in an epoch; beyond an edge pixels are black.
    pub(crate) fn applied(&self, image: ImageCrop, epoch: u64, sample: usize) -> ImageCrop {
        if self.padding == 0 && !self.flip {
            return image;
        }
        let mut random = SampleRandom::new(self.seed, epoch, sample);
        let mut shift = || random.up_to(2 * self.padding) as i32 - self.padding as i32;
        let (top, left) = (shift(), shift());
        ImageCrop { top, left, flip: u32::from(self.flip && random.coin()), ..image }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All shifts up to the padding, as often as each other, and half of them flipped.
    #[test]
    fn shifts_and_flips_are_even() {
        let augmentation = Augmentation { seed: 3, padding: 4, flip: true };
        let crop = |augmentation: Augmentation, epoch, sample| {
            augmentation.applied(ImageCrop::full(9, 8), epoch, sample)
        };
        let crops: Vec<ImageCrop> = (0..9000).map(|i| crop(augmentation, i as u64 % 3, i / 3)).collect();
        for shift in -4..=4 {
            for of in [|crop: &ImageCrop| crop.top, |crop: &ImageCrop| crop.left] {
                let count = crops.iter().filter(|crop| of(crop) == shift).count();
                assert!((880..1120).contains(&count), "{count} of 9000 are shifted by {shift}");
            }
        }
        assert!(crops.iter().all(|crop| crop.top.abs() <= 4 && crop.left.abs() <= 4));
        assert!(crops.iter().all(|crop| (crop.image, crop.label) == (9, 8)));
        let flipped = crops.iter().filter(|crop| crop.flip == 1).count();
        assert!((4300..4700).contains(&flipped), "{flipped}");
        assert_ne!(crop(augmentation, 0, 5), crop(augmentation, 1, 5), "epochs");
        assert_ne!(crop(augmentation, 0, 5), crop(Augmentation { seed: 4, ..augmentation }, 0, 5), "seeds");
    }

    /// Boxes lie in the picture, their areas and ratios are what was asked for, and all of it is seen.
    #[test]
    fn boxes_have_the_areas_and_ratios_that_are_asked_for() {
        let (height, width) = (300, 400);
        let (mut areas, mut tall) = (Vec::new(), 0);
        for sample in 0..2000 {
            let [top, left, high, wide] =
                SampleRandom::new(1, 0, sample).resized_crop(height, width, [0.08, 1.0], [0.75, 4.0 / 3.0]);
            assert!(top + high <= height && left + wide <= width && high > 0 && wide > 0);
            let ratio = wide as f64 / high as f64;
            assert!((0.74..1.35).contains(&ratio), "{ratio}");
            areas.push((high * wide) as f64 / (height * width) as f64);
            tall += usize::from(ratio < 1.0);
        }
        assert!(areas.iter().all(|area| (0.079..=1.0).contains(area)));
        let mean = areas.iter().sum::<f64>() / areas.len() as f64;
        // Large areas with a ratio below 1 do not fit a wide picture and are drawn again.
        assert!((0.42..0.54).contains(&mean), "{mean}");
        assert!((600..1100).contains(&tall), "{tall}");
    }

    /// A picture that no box fits: its middle, at the ratio nearest to its own.
    #[test]
    fn a_narrow_picture_is_cropped_in_its_middle() {
        let crop = |height, width| {
            SampleRandom::new(0, 0, 0).resized_crop(height, width, [1.0, 1.0], [0.75, 4.0 / 3.0])
        };
        assert_eq!(crop(1000, 30), [480, 0, 40, 30]);
        assert_eq!(crop(30, 1000), [0, 480, 30, 40]);
        assert_eq!(crop(1, 1), [0, 0, 1, 1]);
    }
}
