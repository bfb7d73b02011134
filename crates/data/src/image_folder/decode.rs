//! A file of a picture as pixels: JPEG, PNG and WebP, told apart by their first bytes and not by their names.
//!
//! Everything becomes three bytes a pixel, as Pillow's `convert("RGB")` has it: grey is repeated, transparency
//! dropped, and of 16 bits the upper eight stay. A file that ends too soon is damaged, not half a picture.

use super::resample::Picture;
use png::{ColorType, Transformations};
use std::io::Cursor;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::{colorspace::ColorSpace, options::DecoderOptions};

/// The most pixels of a picture: one gigabyte of colours. More is a bomb, or a slip.
const MOST_PIXELS: usize = 1 << 28;

/// What the first bytes of a file say that it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PictureFormat {
    Jpeg,
    Png,
    WebP,
}

impl PictureFormat {
    fn of(bytes: &[u8]) -> Option<PictureFormat> {
        match bytes {
            [0xff, 0xd8, 0xff, ..] => Some(PictureFormat::Jpeg),
            [0x89, b'P', b'N', b'G', ..] => Some(PictureFormat::Png),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some(PictureFormat::WebP),
            _ => None,
        }
    }
}

/// The picture in these bytes, or what is wrong with them, as the end of a sentence.
pub(crate) fn decode(bytes: &[u8]) -> Result<Picture, String> {
    let format = PictureFormat::of(bytes).ok_or("it is neither JPEG nor PNG nor WebP")?;
    match format {
        PictureFormat::Jpeg => jpeg(bytes),
        PictureFormat::Png => png(bytes),
        PictureFormat::WebP => webp(bytes),
    }
}

fn checked(height: usize, width: usize) -> Result<(), String> {
    match height.checked_mul(width) {
        Some(0) => Err("it has no pixels".into()),
        Some(pixels) if pixels <= MOST_PIXELS => Ok(()),
        _ => Err(format!("it has {width} x {height} pixels, more than a picture may have")),
    }
}

fn jpeg(bytes: &[u8]) -> Result<Picture, String> {
    let options = DecoderOptions::new_fast()
        .set_strict_mode(true)
        .set_max_width(usize::from(u16::MAX))
        .set_max_height(usize::from(u16::MAX))
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    let mut decoder = zune_jpeg::JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(|why| why.to_string())?;
    let (width, height) = decoder.dimensions().ok_or("its header has no size")?;
    checked(height, width)?;
    let mut pixels = decoder.decode().map_err(|why| why.to_string())?;
    let channels = pixels.len() / (height * width);
    if channels != 3 {
        pixels = coloured(pixels, channels)?;
    }
    Ok(Picture { height, width, pixels })
}

fn png(bytes: &[u8]) -> Result<Picture, String> {
    let mut decoder = png::Decoder::new(Cursor::new(bytes));
    decoder.set_transformations(Transformations::normalize_to_color8());
    let mut reader = decoder.read_info().map_err(|why| why.to_string())?;
    let (width, height) = (reader.info().width as usize, reader.info().height as usize);
    checked(height, width)?;
    let mut pixels = vec![0; reader.output_buffer_size().ok_or("it is larger than memory")?];
    let frame = reader.next_frame(&mut pixels).map_err(|why| why.to_string())?;
    pixels.truncate(frame.buffer_size());
    let channels = match frame.color_type {
        ColorType::Grayscale => 1,
        ColorType::GrayscaleAlpha => 2,
        ColorType::Rgb => 3,
        ColorType::Rgba => 4,
        ColorType::Indexed => return Err("its palette is missing".into()),
    };
    Ok(Picture { height, width, pixels: coloured(pixels, channels)? })
}

fn webp(bytes: &[u8]) -> Result<Picture, String> {
    let mut decoder = image_webp::WebPDecoder::new(Cursor::new(bytes)).map_err(|why| why.to_string())?;
    let (width, height) = decoder.dimensions();
    let (width, height) = (width as usize, height as usize);
    checked(height, width)?;
    let channels = if decoder.has_alpha() { 4 } else { 3 };
    let mut pixels = vec![0; height * width * channels];
    decoder.read_image(&mut pixels).map_err(|why| why.to_string())?;
    Ok(Picture { height, width, pixels: coloured(pixels, channels)? })
}

/// Pixels of one to four channels as red, green and blue.
fn coloured(pixels: Vec<u8>, channels: usize) -> Result<Vec<u8>, String> {
    match channels {
        1 | 2 => Ok(pixels.chunks_exact(channels).flat_map(|pixel| [pixel[0]; 3]).collect()),
        3 => Ok(pixels),
        4 => Ok(pixels.as_chunks::<4>().0.iter().flat_map(|pixel| [pixel[0], pixel[1], pixel[2]]).collect()),
        _ => Err(format!("it has {channels} channels")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::BTreeMap, fs, path::Path};

    /// Every kind of file as Pillow reads it (`tests/oracle/pictures.py`): to the byte where nothing is lost,
    /// else within what decoders differ by.
    #[test]
    fn files_are_what_pillow_reads() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle/pictures");
        let read = fs::read_to_string(folder.join("read.json")).unwrap();
        let read: BTreeMap<String, (usize, usize, String)> = serde_json::from_str(&read).unwrap();
        assert_eq!(read.len(), 14);
        for (name, (height, width, expected)) in read {
            let picture =
                decode(&fs::read(folder.join(&name)).unwrap()).unwrap_or_else(|why| panic!("{name}: {why}"));
            assert_eq!((picture.height, picture.width), (height, width), "{name}");
            assert_eq!(2 * picture.pixels.len(), expected.len(), "{name}");
            let byte = |i: usize| u8::from_str_radix(&expected[2 * i..][..2], 16).unwrap();
            let differences = picture.pixels.iter().enumerate().map(|(i, found)| found.abs_diff(byte(i)));
            let most = differences.max().unwrap();
            let allowed = match &*name {
                "cmyk.jpg" => 5,
                _ if name.ends_with(".jpg") || name == "lossy.webp" => 3,
                _ => 0,
            };
            assert!(most <= allowed, "{name} differs by {most}");
        }
    }

    /// Cut off anywhere, it is refused and does not become a picture with a grey end.
    #[test]
    fn half_a_file_is_no_picture() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle/pictures");
        for name in ["colours.png", "colours.jpg", "progressive.jpg", "exact.webp"] {
            let bytes = fs::read(folder.join(name)).unwrap();
            for kept in [1, 2, 3, 4, 6, 7] {
                let cut = &bytes[..bytes.len() * kept / 8];
                assert!(decode(cut).is_err(), "{name} with {kept} of 8 parts");
            }
        }
        let error = |bytes: &[u8]| decode(bytes).unwrap_err();
        assert_eq!(error(b"some notes"), "it is neither JPEG nor PNG nor WebP");
        assert_eq!(error(b""), "it is neither JPEG nor PNG nor WebP");
        assert_eq!(
            checked(1 << 20, 1 << 20).unwrap_err(),
            "it has 1048576 x 1048576 pixels, more than a picture may have"
        );
    }
}
