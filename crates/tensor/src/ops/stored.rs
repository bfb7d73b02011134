//! Labelled images that stay on a device as bytes, and batches picked out of them by number, standardised on
//! the way.
//!
//! ```text
//! x[i, p] = values[p mod channels, pixels[picks[i], p]]        targets[i] = labels[picks[i]]
//! ```
//! pixels: bytes `[count, len]`; labels: u32 `[count]`; values: f32 `[channels, 256]`; picks: u32 `[n]`; x:
//! `[n, len]`.
//!
//! A GPU's copy serves every handle of that GPU: many small trainings beside each other read the same bytes,
//! each on its own stream, and the only thing that is sent for a batch is which images are in it.

pub(crate) mod cuda;

use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;
use crate::with_float;

/// All images of a data set on a device.
#[derive(Debug)]
pub struct StoredImages {
    /// Four bytes in each number, zeros behind the last.
    pixels: Tensor,
    labels: Tensor,
    values: Tensor,
    len: usize,
}

impl StoredImages {
    /// Copies images of `len` bytes to a device; `values` is what each byte stands for, channel by channel.
    pub fn new(device: &Device, pixels: &[u8], labels: &[u8], values: &[[f32; 256]]) -> Result<StoredImages> {
        assert!(
            !labels.is_empty() && pixels.len().is_multiple_of(labels.len()),
            "as many bytes for each image"
        );
        let len = pixels.len() / labels.len();
        assert!(len.is_multiple_of(values.len()), "{len} bytes of {} channels", values.len());
        let category = Category::Workspace;
        let (whole, rest) = pixels.as_chunks::<4>();
        let mut last = [0; 4];
        last[..rest.len()].copy_from_slice(rest);
        let words: Vec<u32> = whole.iter().chain([&last]).map(|bytes| u32::from_le_bytes(*bytes)).collect();
        let labels: Vec<u32> = labels.iter().map(|label| u32::from(*label)).collect();
        let stored = StoredImages {
            pixels: Tensor::from_slice(device, &[words.len()], &words, category)?,
            labels: Tensor::from_slice(device, &[labels.len()], &labels, category)?,
            values: Tensor::from_slice(device, &[values.len(), 256], values.as_flattened(), category)?,
            len,
        };
        // Other streams do not wait for this one.
        device.synchronize()?;
        Ok(stored)
    }

    /// Whether a device can read them: the one that has them, or another handle of the same GPU.
    pub fn serve(&self, device: &Device) -> bool {
        match (self.pixels.device(), device) {
            (Device::Cuda(own), Device::Cuda(other)) => own.gpu().ordinal == other.gpu().ordinal,
            (Device::Cpu(_), Device::Cpu(_)) => true,
            _ => false,
        }
    }

    pub fn count(&self) -> usize {
        self.labels.len()
    }

    /// These images as `[n, len]` in a float type, and their labels, on a device that they
    /// [serve](StoredImages::serve).
    pub fn batch(&self, device: &Device, dtype: DType, picks: &[u32]) -> Result<(Tensor, Tensor)> {
        assert!(self.serve(device), "images of another device");
        assert!(picks.iter().all(|pick| (*pick as usize) < self.count()), "a pick beyond the last image");
        let mut x = Tensor::empty(device, &[picks.len(), self.len], dtype, Category::Transient)?;
        let mut targets = Tensor::empty(device, &[picks.len()], DType::U32, Category::Transient)?;
        if let Device::Cuda(cuda) = device {
            cuda::batch(cuda, self, picks, &mut x, &mut targets)?;
            return Ok((x, targets));
        }
        let (pixels, labels) = (self.pixels.bytes(), self.labels.slice::<u32>());
        let values = self.values.slice::<f32>().as_chunks::<256>().0;
        for (target, pick) in targets.slice_mut::<u32>().iter_mut().zip(picks) {
            *target = labels[*pick as usize];
        }
        with_float!(dtype, T => for (x, pick) in x.slice_mut::<T>().chunks_exact_mut(self.len).zip(picks) {
            let image = &pixels[*pick as usize * self.len..][..self.len];
            for (x, pixel) in x.chunks_exact_mut(values.len()).zip(image.chunks_exact(values.len())) {
                for ((x, byte), values) in x.iter_mut().zip(pixel).zip(values) {
                    *x = T::from_f32(values[usize::from(*byte)]);
                }
            }
        });
        Ok((x, targets))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, devices, integers};

    fn stored(
        device: &Device,
        count: usize,
        len: usize,
        channels: usize,
    ) -> (StoredImages, Vec<u8>, Vec<u8>) {
        let bytes = |seed, n, most| integers(seed, n, most).iter().map(|x| *x as u8).collect::<Vec<u8>>();
        let (pixels, labels) = (bytes(1, count * len, 256), bytes(2, count, 10));
        let values: Vec<[f32; 256]> =
            (0..channels).map(|c| std::array::from_fn(|v| (v as f32 - 128.0) / (1 << c) as f32)).collect();
        (StoredImages::new(device, &pixels, &labels, &values).unwrap(), pixels, labels)
    }

    /// Also where the bytes do not fill whole numbers, and where an image is picked twice.
    #[test]
    fn picked_images_are_standardised_and_keep_their_labels() {
        for (count, len, channels) in [(7, 12, 3), (5, 9, 1), (300, 784, 1), (3, 3072, 3)] {
            let picks: Vec<u32> = integers(3, 20, count);
            let (_, pixels, labels) = stored(&devices()[0][0], count, len, channels);
            let image = |pick: &u32| pixels[*pick as usize * len..][..len].iter().enumerate();
            let value = |(p, byte): (usize, &u8)| (f64::from(*byte) - 128.0) / f64::from(1 << (p % channels));
            let expected: Vec<f64> = picks.iter().flat_map(|pick| image(pick).map(value)).collect();
            let targets: Vec<u32> = picks.iter().map(|pick| labels[*pick as usize].into()).collect();
            check(&[expected], |device, dtype| {
                let (stored, ..) = stored(device, count, len, channels);
                let (x, found) = stored.batch(device, dtype, &picks).unwrap();
                assert_eq!(found.read_u32().unwrap(), targets);
                vec![x]
            });
        }
    }

    #[test]
    fn another_handle_of_a_card_reads_them_and_another_device_does_not() {
        for [device, ..] in devices() {
            let (stored, ..) = stored(device, 6, 8, 2);
            let (other, foreign) = match device {
                Device::Cuda(handle) => (Device::Cuda(handle.another().unwrap()), Device::cpu(1).unwrap()),
                Device::Cpu(_) => (Device::cpu(2).unwrap(), device.clone()),
            };
            assert!(stored.serve(&other));
            assert_eq!(stored.serve(&foreign), matches!(device, Device::Cpu(_)));
            let picks = [5, 0, 3];
            let [own, seen] =
                [device, &other].map(|device| stored.batch(device, DType::F32, &picks).unwrap().0.to_f32());
            assert_eq!(own, seen);
        }
    }
}
