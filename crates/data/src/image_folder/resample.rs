//! Pictures of another size: antialiased bilinear resampling of bytes as Pillow does it, on which torchvision's
//! recipes stand.
//!
//! ```text
//! out[y, x] = sum over k of weight(k, y) * in[k, x]       weight: a triangle as wide as a step of the output
//! ```
//! along rows first, rounded to a byte, then along columns. A triangle is never narrower than one pixel of the
//! input, so that enlarging interpolates between two and shrinking averages over all. Weights are 22-bit
//! integers, computed in f64 and rounded half away from zero (Pillow's `Resample.c`).

/// pixels: [height, width, 3]
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Picture {
    pub height: usize,
    pub width: usize,
    pub pixels: Vec<u8>,
}

/// The same in somebody else's memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PictureView<'a> {
    pub height: usize,
    pub width: usize,
    pub pixels: &'a [u8],
}

/// Rows and columns of a picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PixelBox {
    pub top: usize,
    pub left: usize,
    pub height: usize,
    pub width: usize,
}

/// A box of a picture, brought to a size, of which a window is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ResampledBox {
    pub source: PixelBox,
    /// Height and width that the box is brought to.
    pub size: [usize; 2],
    pub window: PixelBox,
    /// Whether the window is mirrored, left to right.
    pub flip: bool,
}

const CHANNELS: usize = 3;
/// Bits of a weight behind the point: a sum of bytes by weights stays within 32.
const PRECISION: u32 = 32 - 8 - 2;

impl Picture {
    pub(crate) fn view(&self) -> PictureView<'_> {
        PictureView { height: self.height, width: self.width, pixels: &self.pixels }
    }
}

impl PixelBox {
    pub(crate) fn all(height: usize, width: usize) -> PixelBox {
        PixelBox { top: 0, left: 0, height, width }
    }
}

impl PictureView<'_> {
    /// The window of a resampled box, into `out`, by way of rows that are kept from call to call.
    pub(crate) fn resample_into(&self, how: &ResampledBox, rows: &mut Vec<u8>, out: &mut [u8]) {
        let ResampledBox { source, size, window, flip } = *how;
        debug_assert!(source.top + source.height <= self.height && source.left + source.width <= self.width);
        assert_eq!(out.len(), window.height * window.width * CHANNELS, "room for the window");
        let mut across = ResampleTaps::new(source.width, size[1], window.left, window.width);
        if flip {
            across.ranges.reverse();
        }
        let down = ResampleTaps::new(source.height, size[0], window.top, window.height);
        let (first, last) = down.reach();
        let line = window.width * CHANNELS;
        rows.clear();
        rows.resize((last - first) * line, 0);
        for (y, row) in (first..last).zip(rows.chunks_exact_mut(line)) {
            let from = ((source.top + y) * self.width + source.left) * CHANNELS;
            across.along(&self.pixels[from..][..source.width * CHANNELS], row);
        }
        let mut sums = vec![0i32; line];
        for (range, out) in down.ranges().zip(out.chunks_exact_mut(line)) {
            down.across_rows(range, &rows[(range.start - first) * line..], &mut sums, out);
        }
    }

    /// All of it at another size.
    pub(crate) fn resized(&self, size: [usize; 2]) -> Picture {
        let [height, width] = size;
        let how = ResampledBox {
            source: PixelBox::all(self.height, self.width),
            size,
            window: PixelBox::all(height, width),
            flip: false,
        };
        let mut pixels = vec![0; height * width * CHANNELS];
        self.resample_into(&how, &mut Vec::new(), &mut pixels);
        Picture { height, width, pixels }
    }
}

/// The size at which the shorter side is `short`, as torchvision's `Resize` rounds it.
pub(crate) fn with_shorter_side(height: usize, width: usize, short: usize) -> [usize; 2] {
    let longer = |long: usize, side: usize| (short as f64 * long as f64 / side as f64) as usize;
    if height <= width { [short, longer(width, height)] } else { [longer(height, width), short] }
}

/// The inputs of one output: `count` from `start` on, with weights from `weights` on.
#[derive(Debug, Clone, Copy)]
struct TapRange {
    start: usize,
    count: usize,
    weights: usize,
}

/// What each output along a dimension is made of.
struct ResampleTaps {
    ranges: Vec<TapRange>,
    weights: Vec<i32>,
}

impl ResampleTaps {
    /// From so many pixels to so many, of which `window` from `first` on are wanted.
    fn new(from: usize, to: usize, first: usize, window: usize) -> ResampleTaps {
        let scale = from as f64 / to as f64;
        let support = scale.max(1.0);
        let mut taps = ResampleTaps { ranges: Vec::with_capacity(window), weights: Vec::new() };
        let mut triangle = Vec::new();
        for i in first..first + window {
            let centre = (i as f64 + 0.5) * scale;
            // As C casts: towards zero, both after adding a half.
            let start = (centre - support + 0.5).max(0.0) as usize;
            let end = ((centre + support + 0.5) as usize).min(from);
            triangle.clear();
            triangle.extend((start..end).map(|x| {
                let distance = ((x as f64 - centre + 0.5) * (1.0 / support)).abs();
                (1.0 - distance).max(0.0)
            }));
            let sum: f64 = triangle.iter().sum();
            taps.ranges.push(TapRange { start, count: end - start, weights: taps.weights.len() });
            let scaled = |weight: &f64| {
                if sum == 0.0 { 0 } else { rounded(weight / sum * f64::from(1u32 << PRECISION)) }
            };
            taps.weights.extend(triangle.iter().map(scaled));
        }
        taps
    }

    fn ranges(&self) -> impl Iterator<Item = TapRange> {
        self.ranges.iter().copied()
    }

    /// The first input that is read, and the first that is not any more.
    fn reach(&self) -> (usize, usize) {
        let first = self.ranges.first().map_or(0, |range| range.start);
        (first, self.ranges.last().map_or(0, |range| range.start + range.count))
    }

    fn along(&self, row: &[u8], out: &mut [u8]) {
        for (range, out) in self.ranges.iter().zip(out.as_chunks_mut::<CHANNELS>().0) {
            let mut sums = [1i32 << (PRECISION - 1); CHANNELS];
            let pixels = row[range.start * CHANNELS..][..range.count * CHANNELS].as_chunks::<CHANNELS>().0;
            for (pixel, weight) in pixels.iter().zip(&self.weights[range.weights..]) {
                for (sum, byte) in sums.iter_mut().zip(pixel) {
                    *sum += i32::from(*byte) * weight;
                }
            }
            *out = sums.map(clipped);
        }
    }

    fn across_rows(&self, range: TapRange, rows: &[u8], sums: &mut [i32], out: &mut [u8]) {
        sums.fill(1 << (PRECISION - 1));
        let weights = &self.weights[range.weights..][..range.count];
        for (row, weight) in rows.chunks_exact(sums.len()).zip(weights) {
            for (sum, byte) in sums.iter_mut().zip(row) {
                *sum += i32::from(*byte) * weight;
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = clipped(*sum);
        }
    }
}

fn rounded(weight: f64) -> i32 {
    if weight < 0.0 { (weight - 0.5) as i32 } else { (weight + 0.5) as i32 }
}

fn clipped(sum: i32) -> u8 {
    (sum >> PRECISION).clamp(0, 255) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn picture(height: usize, width: usize, seed: u64) -> Picture {
        let key = espalier_tensor::random::key(seed, 0);
        let byte = |i: usize| espalier_tensor::random::bits(key, i as u64) as u8;
        Picture { height, width, pixels: (0..height * width * CHANNELS).map(byte).collect() }
    }

    /// What Pillow 13 makes of a few pictures (`crates/data/tests/oracle/pictures.py`): the same to the bit, but
    /// for two that it resamples along columns first, as they lose many rows, and that are rounded elsewhere.
    #[test]
    fn sizes_are_pillows() {
        let cases: Vec<(usize, usize, usize, usize, String)> =
            serde_json::from_str(include_str!("../../tests/oracle/resized.json")).unwrap();
        assert_eq!(cases.len(), 10);
        for (height, width, to_height, to_width, expected) in cases {
            let pixel = |i: usize| {
                let (y, x, c) = (i / 3 / width, i / 3 % width, i % 3);
                ((y * y * 7 + x * 13 + (x * y) % 31 * 5 + c * 50) % 256) as u8
            };
            let pixels = (0..height * width * 3).map(pixel).collect();
            let resized = Picture { height, width, pixels }.view().resized([to_height, to_width]);
            let byte = |i: usize| u8::from_str_radix(&expected[2 * i..][..2], 16).unwrap();
            let differences = resized.pixels.iter().enumerate().map(|(i, found)| found.abs_diff(byte(i)));
            let allowed = u8::from(matches!((height, width), (13, 2) | (33, 21)));
            let most = differences.max().unwrap();
            assert!(most <= allowed, "{height} x {width} to {to_height} x {to_width} differs by {most}");
        }
    }

    proptest! {
        /// A window of a box is the same window of the box cut out and resized.
        #[test]
        fn a_window_is_part_of_the_whole(
            height in 1usize..20, width in 1usize..20, to in (1usize..24, 1usize..24), at: [u8; 8], flip: bool, seed: u64
        ) {
            let picture = picture(height, width, seed);
            let part = |from: usize, a: u8, b: u8| {
                let start = usize::from(a) % from;
                (start, 1 + usize::from(b) % (from - start))
            };
            let ((top, high), (left, wide)) = (part(height, at[0], at[1]), part(width, at[2], at[3]));
            let source = PixelBox { top, left, height: high, width: wide };
            let cut: Vec<u8> = (top..top + high)
                .flat_map(|y| picture.pixels[(y * width + left) * 3..][..wide * 3].to_vec())
                .collect();
            let whole = Picture { height: high, width: wide, pixels: cut }.view().resized([to.0, to.1]);
            let ((y, rows), (x, columns)) = (part(to.0, at[4], at[5]), part(to.1, at[6], at[7]));
            let window = PixelBox { top: y, left: x, height: rows, width: columns };
            let mut out = vec![0; rows * columns * 3];
            let how = ResampledBox { source, size: [to.0, to.1], window, flip };
            picture.view().resample_into(&how, &mut vec![9; 5], &mut out);
            let column = |s: usize| x + if flip { columns - 1 - s } else { s };
            let expected: Vec<u8> = (0..rows * columns)
                .flat_map(|i| whole.pixels[((y + i / columns) * to.1 + column(i % columns)) * 3..][..3].to_vec())
                .collect();
            prop_assert_eq!(out, expected);
        }

        #[test]
        fn the_same_size_is_the_same_picture(height in 1usize..9, width in 1usize..9, seed: u64) {
            let picture = picture(height, width, seed);
            prop_assert_eq!(picture.view().resized([height, width]), picture);
        }
    }

    #[test]
    fn the_shorter_side_decides() {
        assert_eq!(with_shorter_side(375, 500, 256), [256, 341]);
        assert_eq!(with_shorter_side(500, 375, 256), [341, 256]);
        assert_eq!(with_shorter_side(10, 10, 256), [256, 256]);
    }
}
