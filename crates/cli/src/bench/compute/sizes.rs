//! How large what is timed is: from where only the start of an operation counts to where a device is at its
//! best.

use std::ops::RangeInclusive;

use espalier_tensor::DType;

use super::layers::ConvolutionSize;
use super::op::BenchOp;
use super::sparse::SparseSizes;

/// What is timed on a device, smaller ones first.
pub struct BenchSizes {
    /// Decades of flops of a product, by precision.
    pub products: fn(DType) -> RangeInclusive<i32>,
    /// Widths are multiples of this.
    pub granule: usize,
    pub convolutions: ConvolutionSizes,
    pub attention: &'static [BenchOp],
    /// Linear layers and convolutions whose zeros kernels skip, where any do, in f32.
    pub sparse: Option<SparseSizes>,
    /// Decades of bytes of a pass.
    pub elementwise: RangeInclusive<i32>,
    /// Those of them that activations of a layer have.
    pub light: RangeInclusive<i32>,
    /// The width of its rows.
    pub width: usize,
}

/// Convolutions that are timed.
pub enum ConvolutionSizes {
    /// The three passes together, for a fraction of the peak by channels, in ascending order.
    Together(&'static [ConvolutionSize]),
    /// Each pass by itself, for what passes take by their sizes: the convolutions of a core are our own, and
    /// cut layers are narrow.
    EachPass(&'static [ConvolutionSize]),
}

pub const CORE: BenchSizes = BenchSizes {
    products: |dtype| if dtype == DType::F32 { 5..=9 } else { 5..=10 },
    granule: 16,
    convolutions: ConvolutionSizes::EachPass(&[
        // As wide as they are deep, down to what ranks have that cut a narrow layer,
        conv_size(4, 32, 4, 4, 3, 1),
        conv_size(4, 32, 8, 8, 3, 1),
        conv_size(4, 32, 16, 16, 3, 1),
        conv_size(4, 16, 32, 32, 3, 1),
        conv_size(4, 16, 64, 64, 3, 1),
        conv_size(8, 8, 128, 128, 3, 1),
        // cut by their output or by their input,
        conv_size(4, 32, 16, 4, 3, 1),
        conv_size(4, 32, 4, 16, 3, 1),
        conv_size(4, 8, 64, 16, 3, 1),
        conv_size(4, 8, 16, 64, 3, 1),
        // with few pixels to a weight, as tiles and their halos have,
        conv_size(4, 1, 16, 16, 3, 1),
        conv_size(4, 2, 64, 64, 3, 1),
        conv_size(4, 4, 32, 32, 3, 1),
        conv_size(4, 4, 128, 128, 3, 1),
        // and with few flops to a pixel.
        conv_size(8, 32, 4, 4, 1, 1),
        conv_size(8, 16, 16, 32, 1, 1),
        conv_size(8, 16, 32, 64, 3, 2),
    ]),
    attention: &[attention(4, 64, 4, 256), attention(4, 128, 4, 128), attention(1, 256, 8, 512)],
    sparse: Some(SparseSizes {
        linear: &[[1024, 256], [1024, 512]],
        convolutions: &[conv_size(32, 8, 32, 64, 5, 1), conv_size(32, 14, 64, 64, 3, 1)],
        of_linear: &[0.05, 0.1, 0.2, 0.3, 0.4],
        of_filters: &[0.05, 0.1, 0.15, 0.2, 0.25],
    }),
    elementwise: 3..=8,
    light: 5..=6,
    width: 256,
};

pub const GPU: BenchSizes = BenchSizes {
    products: |dtype| if dtype == DType::F32 { 7..=12 } else { 7..=13 },
    granule: 64,
    // From narrow layers on large images to wide ones on small images.
    convolutions: ConvolutionSizes::Together(&[
        conv_size(64, 224, 3, 64, 7, 2),
        conv_size(64, 56, 64, 64, 3, 1),
        conv_size(64, 56, 64, 256, 1, 1),
        conv_size(64, 28, 128, 128, 3, 1),
        conv_size(64, 14, 256, 256, 3, 1),
        conv_size(64, 7, 512, 512, 3, 1),
    ]),
    attention: &[attention(16, 1024, 12, 768), attention(8, 2048, 16, 2048), attention(8, 2048, 32, 4096)],
    sparse: None,
    elementwise: 4..=9,
    light: 7..=9,
    width: 1024,
};

/// So small that a test has time for it.
pub const QUICK: BenchSizes = BenchSizes {
    products: |_| 5..=6,
    granule: 16,
    convolutions: ConvolutionSizes::EachPass(&[conv_size(1, 4, 4, 4, 3, 1), conv_size(1, 2, 16, 16, 1, 1)]),
    attention: &[attention(1, 16, 2, 32)],
    sparse: Some(SparseSizes {
        linear: &[[16, 32]],
        convolutions: &[conv_size(16, 2, 16, 16, 1, 1)],
        of_linear: &[0.1],
        of_filters: &[0.1],
    }),
    elementwise: 3..=4,
    light: 3..=4,
    width: 64,
};

const fn conv_size(
    batch: usize,
    side: usize,
    input: usize,
    output: usize,
    kernel: usize,
    stride: usize,
) -> ConvolutionSize {
    ConvolutionSize { batch, side, input, output, kernel, stride }
}

const fn attention(batch: usize, positions: usize, heads: usize, width: usize) -> BenchOp {
    BenchOp::Attention { batch, positions, heads, width }
}

impl BenchSizes {
    /// Linear layers of about so many flops a product: square, with eight times as many rows as they are
    /// wide, and with an eighth.
    pub fn layers(&self, decade: i32) -> Vec<BenchOp> {
        let layer = |ratio: f64| {
            let width = (10f64.powi(decade) / (2.0 * ratio)).cbrt() / self.granule as f64;
            let width = self.granule * width.round().max(1.0) as usize;
            let rows = ((ratio * width as f64) as usize).max(1);
            BenchOp::Linear { rows, input: width, output: width }
        };
        [1.0, 8.0, 0.125].map(layer).to_vec()
    }

    /// Passes of about so many bytes.
    pub fn elementwise_of(&self, decade: i32, dtype: DType) -> BenchOp {
        let row = BenchOp::Elementwise { rows: 1, width: self.width }.size(dtype);
        BenchOp::Elementwise { rows: (10f64.powi(decade) / row).round().max(1.0) as usize, width: self.width }
    }

    /// Light ones over tensors of the same shapes, of 32-bit numbers.
    pub fn light(&self) -> Vec<BenchOp> {
        let of_decade = |decade| match self.elementwise_of(decade, DType::F32) {
            BenchOp::Elementwise { rows, width } => BenchOp::LightElementwise { rows, width },
            other => other,
        };
        self.light.clone().map(of_decade).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_and_passes_are_of_their_decade() {
        for sizes in [&CORE, &GPU, &QUICK] {
            for dtype in [DType::F32, DType::Bf16] {
                let nearest = |op: &BenchOp| op.size(dtype).log10().round() as i32;
                for decade in (sizes.products)(dtype) {
                    for op in sizes.layers(decade) {
                        assert_eq!(nearest(&op), decade, "{op}");
                    }
                }
                for decade in sizes.elementwise.clone() {
                    let op = sizes.elementwise_of(decade, dtype);
                    assert_eq!(nearest(&op), decade, "{op}");
                }
            }
        }
    }
}
