//! A batch of images in host memory: bytes as they are stored, and what a device makes of them.
//!
//! Whoever has images of one size in memory, or decodes them into it, fills such a batch; all else, crops,
//! mirrored images and standard values, is one kernel's work on the device
//! ([`standardise`](espalier_tensor::ops::standardise)).

use std::sync::{Arc, Mutex};
use std::thread;

use espalier_tensor::ops::standardise::{ImageCrop, PixelValues, standardise, values_on};
use espalier_tensor::{Category, DType, Device, Tensor};

use crate::Result;

/// Images of one size.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageBatch {
    /// All of them, channels last.
    pub pixels: Vec<u8>,
    /// Batch, height, width, channels, before they are cropped.
    pub shape: [usize; 4],
    /// What is seen of each, in their order, and its label.
    pub crops: Vec<ImageCrop>,
    /// Height and width of what is seen.
    pub size: [usize; 2],
    /// What every byte stands for, channel by channel.
    pub values: Arc<PixelValues>,
}

impl ImageBatch {
    /// What a model sees of them, on a device.
    pub(crate) fn upload(&self, device: &Device, dtype: DType) -> espalier_tensor::Result<Tensor> {
        let pixels = Tensor::from_slice(device, &self.shape, &self.pixels, Category::Transient)?;
        let crops =
            Tensor::from_slice(device, &self.crops_shape(), self.crop_numbers(), Category::Workspace)?;
        let values = values_on(device, &self.values)?;
        Ok(standardise(device, &pixels, &values, &crops, self.size, dtype)?.0)
    }

    pub(crate) fn crop_numbers(&self) -> &[u32] {
        ImageCrop::as_numbers(&self.crops)
    }

    pub(crate) fn crops_shape(&self) -> [usize; 2] {
        [self.crops.len(), ImageCrop::NUMBERS]
    }

    /// The same in f32, for tests and tools.
    ///
    /// # Panics
    /// Where there is no memory for it.
    pub fn to_f32(&self) -> Vec<f32> {
        let made = Device::cpu(1).and_then(|device| Ok(self.upload(&device, DType::F32)?.to_f32()));
        made.expect("memory for a batch")
    }
}

/// Fills images of `len` bytes each, `fill(i, image)` by `fill(i, image)`, on up to so many threads: whoever is
/// done takes the next. The first of all errors, by the number of its image, is the one that is returned.
pub(crate) fn fill_images(
    pixels: &mut [u8],
    len: usize,
    threads: usize,
    fill: impl Fn(usize, &mut [u8]) -> Result<()> + Sync,
) -> Result<()> {
    let images = pixels.chunks_exact_mut(len.max(1)).enumerate();
    if threads <= 1 {
        return images.into_iter().try_for_each(|(i, image)| fill(i, image));
    }
    let (images, failed) = (Mutex::new(images), Mutex::new(None));
    let next = || images.lock().expect("no panic while locked").next();
    let work = || {
        while let Some((i, image)) = next() {
            if let Err(error) = fill(i, image) {
                let mut failed = failed.lock().expect("no panic while locked");
                if failed.as_ref().is_none_or(|(first, _)| i < *first) {
                    *failed = Some((i, error));
                }
            }
        }
    };
    thread::scope(|scope| {
        (1..threads).for_each(|_| drop(scope.spawn(work)));
        work();
    });
    let failed = failed.into_inner().expect("no panic while locked");
    failed.map_or(Ok(()), |(_, error)| Err(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    /// Whoever fills them, every image is filled once, and of several errors the same one is told.
    #[test]
    fn images_are_filled_by_any_number_of_threads() {
        let refuse = |i: usize| Error::Setting { field: "image", expected: "another", got: i.to_string() };
        for threads in [1, 2, 5] {
            let mut pixels = vec![0u8; 7 * 3];
            let fill = |i: usize, image: &mut [u8]| {
                image.iter_mut().for_each(|byte| *byte += 1 + i as u8);
                Ok(())
            };
            fill_images(&mut pixels, 3, threads, fill).unwrap();
            assert!(pixels.chunks_exact(3).zip(1..).all(|(image, i)| image == [i; 3]), "{pixels:?}");
            let failing = |i: usize, _: &mut [u8]| if i % 3 == 2 { Err(refuse(i)) } else { Ok(()) };
            let error = fill_images(&mut pixels, 3, threads, failing).unwrap_err();
            assert_eq!(error.to_string(), refuse(2).to_string());
        }
    }
}
