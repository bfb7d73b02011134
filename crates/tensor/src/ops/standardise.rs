//! Batches of images that are kept as bytes: each is cropped, perhaps mirrored, and standardised on the way
//! into the type that a model computes in.
//!
//! ```text
//! x[i, r, s, k] = values[k, pixels[image_i, r + top_i, s' + left_i, k]]        targets[i] = label_i
//! ```
//! with s' = s, or width - 1 - s where image i is mirrored. Outside of an image every byte is 0, as in one that
//! was padded before it was standardised. pixels: u8 `[count, h, w, channels]`; values: f32 `[channels, 256]`,
//! what each byte stands for; crops: an [`ImageCrop`] for each sample; x: `[n, height, width, channels]`.
//!
//! Bytes are a quarter of what f32 would be on the way to a GPU, which has one launch to make of them what a
//! model reads. A set that fits stays there altogether ([`StoredImages`]): then only the crops are sent.

pub(crate) mod cuda;

use bytemuck::{Pod, Zeroable};

use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;
use crate::with_float;

/// A sample of a batch: which image it is, and what of it is seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
#[repr(C)]
pub struct ImageCrop {
    /// Which of the images.
    pub image: u32,
    /// The first row, which may lie above the image.
    pub top: i32,
    /// The first column, which may lie left of it.
    pub left: i32,
    /// 1 where left and right change places, else 0.
    pub flip: u32,
    /// What the model should say.
    pub label: u32,
}

impl ImageCrop {
    /// All of an image, as it is.
    pub fn full(image: u32, label: u32) -> ImageCrop {
        ImageCrop { image, label, ..ImageCrop::default() }
    }

    /// Crops as numbers that a tensor `[n, 5]` can hold.
    pub fn as_numbers(crops: &[ImageCrop]) -> &[u32] {
        bytemuck::cast_slice(crops)
    }

    /// Numbers of a crop.
    pub const NUMBERS: usize = size_of::<ImageCrop>() / size_of::<u32>();
}

/// What every byte stands for, channel by channel.
pub type PixelValues = Vec<[f32; 256]>;

/// The standardised crops of `size`, height and width, in a float type, and their labels. `pixels` and
/// `values` may be those of another handle of the device's GPU; every crop must be of one of the images.
pub fn standardise(
    device: &Device,
    pixels: &Tensor,
    values: &Tensor,
    crops: &Tensor,
    size: [usize; 2],
    dtype: DType,
) -> Result<(Tensor, Tensor)> {
    let &[count, h, w, channels] = pixels.shape() else { panic!("images are [count, h, w, channels]") };
    assert_eq!((pixels.dtype(), values.shape()), (DType::U8, &[channels, 256][..]), "bytes and their values");
    let &[n, ImageCrop::NUMBERS] = crops.shape() else { panic!("crops are [n, 5], got {:?}", crops.shape()) };
    let [height, width] = size;
    let mut x = Tensor::empty(device, &[n, height, width, channels], dtype, Category::Transient)?;
    let mut targets = Tensor::empty(device, &[n], DType::U32, Category::Transient)?;
    let cpu = match device {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => {
            cuda::standardise(cuda, pixels, values, crops, &mut x, &mut targets)?;
            return Ok((x, targets));
        }
    };
    let crops: &[ImageCrop] = bytemuck::cast_slice(crops.slice::<u32>());
    assert!(crops.iter().all(|crop| (crop.image as usize) < count), "a crop beyond the last image");
    for (target, crop) in targets.slice_mut::<u32>().iter_mut().zip(crops) {
        *target = crop.label;
    }
    let (pixels, values) = (pixels.slice::<u8>(), values.slice::<f32>().as_chunks::<256>().0);
    let len = height * width * channels;
    with_float!(dtype, T => cpu.for_chunks(x.slice_mut::<T>(), len, |range, x| {
        let crop = crops[range.start / len];
        let image = &pixels[crop.image as usize * h * w * channels..][..h * w * channels];
        for (x, row) in x.chunks_exact_mut(width * channels).zip(i64::from(crop.top)..) {
            let line = (0..h as i64).contains(&row).then(|| &image[row as usize * w * channels..][..w * channels]);
            let column = |s: usize| i64::from(crop.left) + if crop.flip == 0 { s } else { width - 1 - s } as i64;
            for (s, x) in x.chunks_exact_mut(channels).enumerate() {
                let at = Some(column(s)).filter(|at| (0..w as i64).contains(at));
                match (line, at) {
                    (Some(line), Some(at)) => {
                        let pixel = &line[at as usize * channels..][..channels];
                        for ((x, byte), values) in x.iter_mut().zip(pixel).zip(values) {
                            *x = T::from_f32(values[usize::from(*byte)]);
                        }
                    }
                    _ => x.iter_mut().zip(values).for_each(|(x, values)| *x = T::from_f32(values[0])),
                }
            }
        }
    }));
    Ok((x, targets))
}

/// What each byte stands for, on a device.
pub fn values_on(device: &Device, values: &[[f32; 256]]) -> Result<Tensor> {
    Tensor::from_slice(device, &[values.len(), 256], values.as_flattened(), Category::Workspace)
}

/// All images of a data set on a device. A GPU's copy serves every handle of that GPU: many small trainings
/// beside each other read the same bytes, each on its own stream.
#[derive(Debug)]
pub struct StoredImages {
    pixels: Tensor,
    values: Tensor,
}

impl StoredImages {
    /// Copies images to a device; `shape` is `[count, h, w, channels]`.
    pub fn new(
        device: &Device,
        pixels: &[u8],
        shape: [usize; 4],
        values: &[[f32; 256]],
    ) -> Result<StoredImages> {
        let stored = StoredImages {
            pixels: Tensor::from_slice(device, &shape, pixels, Category::Data)?,
            values: values_on(device, values)?,
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

    /// A batch of them on a device that they [serve](StoredImages::serve): see [`standardise`].
    pub fn batch(
        &self,
        device: &Device,
        dtype: DType,
        crops: &[ImageCrop],
        size: [usize; 2],
    ) -> Result<(Tensor, Tensor)> {
        assert!(self.serve(device), "images of another device");
        let count = self.pixels.shape()[0];
        assert!(crops.iter().all(|crop| (crop.image as usize) < count), "a crop beyond the last image");
        let shape = [crops.len(), ImageCrop::NUMBERS];
        let crops = Tensor::from_slice(device, &shape, ImageCrop::as_numbers(crops), Category::Workspace)?;
        standardise(device, &self.pixels, &self.values, &crops, size, dtype)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{check, devices, integers};

    fn bytes(seed: u64, n: usize) -> Vec<u8> {
        integers(seed, n, 256).iter().map(|x| *x as u8).collect()
    }

    /// Numbers that bf16 holds exactly, others for each channel.
    fn values(channels: usize) -> PixelValues {
        (0..channels).map(|c| std::array::from_fn(|v| (v as f32 - 128.0) / (1 << c) as f32)).collect()
    }

    fn plain(pixels: &[u8], [_, h, w, c]: [usize; 4], crops: &[ImageCrop], size: [usize; 2]) -> Vec<f64> {
        let values = values(c);
        let mut x = Vec::new();
        for crop in crops {
            for (r, s, k) in (0..size[0] * size[1] * c).map(|i| (i / c / size[1], i / c % size[1], i % c)) {
                let s = if crop.flip == 1 { size[1] - 1 - s } else { s };
                let (row, column) = (r as i64 + i64::from(crop.top), s as i64 + i64::from(crop.left));
                let inside = (0..h as i64).contains(&row) && (0..w as i64).contains(&column);
                let at = ((crop.image as i64 * h as i64 + row) * w as i64 + column) * c as i64 + k as i64;
                x.push(f64::from(values[k][if inside { usize::from(pixels[at as usize]) } else { 0 }]));
            }
        }
        x
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        /// Crops within, beyond and altogether outside of images, smaller and larger than these.
        #[test]
        fn crops_agree_with_plain_loops(
            (count, h, w, c) in (1usize..6, 1usize..12, 1usize..12, 1usize..5),
            size in [1usize..14, 1usize..17],
            picks in proptest::collection::vec((0u32..6, -13i32..14, -13i32..14, 0u32..2, 0u32..9), 1..9),
        ) {
            let (shape, pixels) = ([count, h, w, c], bytes(1, count * h * w * c));
            let crops: Vec<ImageCrop> = picks
                .into_iter()
                .map(|(image, top, left, flip, label)| ImageCrop { image: image % count as u32, top, left, flip, label })
                .collect();
            let labels: Vec<u32> = crops.iter().map(|crop| crop.label).collect();
            check(&[plain(&pixels, shape, &crops, size)], |device, dtype| {
                let stored = StoredImages::new(device, &pixels, shape, &values(c)).unwrap();
                let (x, targets) = stored.batch(device, dtype, &crops, size).unwrap();
                assert_eq!(targets.read_u32().unwrap(), labels);
                vec![x]
            });
        }
    }

    /// Rows that a GPU writes 16 bytes at a time, and more of them than a block takes.
    #[test]
    fn large_crops_agree_with_plain_loops() {
        let (shape, pixels) = ([3, 40, 48, 3], bytes(2, 3 * 40 * 48 * 3));
        let crop = |image, top, left, flip| ImageCrop { image, top, left, flip, label: 1 };
        let crops = [crop(2, 0, 0, 0), crop(0, 3, 8, 1), crop(1, -4, -4, 0), crop(1, 9, 17, 1)];
        for size in [[40, 48], [32, 40], [40, 41]] {
            check(&[plain(&pixels, shape, &crops, size)], |device, dtype| {
                let stored = StoredImages::new(device, &pixels, shape, &values(3)).unwrap();
                vec![stored.batch(device, dtype, &crops, size).unwrap().0]
            });
        }
    }

    #[test]
    fn another_handle_of_a_card_reads_them_and_another_device_does_not() {
        for [device, ..] in devices() {
            let (shape, pixels) = ([6, 2, 2, 2], bytes(3, 48));
            let stored = StoredImages::new(device, &pixels, shape, &values(2)).unwrap();
            let (other, foreign) = match device {
                Device::Cuda(handle) => (Device::Cuda(handle.another().unwrap()), Device::cpu(1).unwrap()),
                Device::Cpu(_) => (Device::cpu(2).unwrap(), device.clone()),
            };
            assert!(stored.serve(&other));
            assert_eq!(stored.serve(&foreign), matches!(device, Device::Cpu(_)));
            let crops = [5, 0, 3].map(|image| ImageCrop::full(image, 0));
            let batch = |device| stored.batch(device, DType::F32, &crops, [2, 2]).unwrap().0.to_f32();
            assert_eq!(batch(device), batch(&other));
        }
    }
}
