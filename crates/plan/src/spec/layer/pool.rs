//! Pools: the largest or the mean of windows of an image.

use serde::Serialize;

use super::super::shape::Shape;
use super::kind::{Downstream, LayerKind, PADDING};
use super::{
    LayerDescription, LayerSpec, Properties, SavedForBackward, TensorRole, TileRole, WindowPadding, image,
    windows,
};
use crate::field::{size, size_like};
use crate::tiles::SlidingWindow;

/// The largest of each window.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MaxPool {
    /// Rows and columns of the window.
    pub kernel: usize,
    /// Pixels from one window to the next, along both sides.
    pub stride: usize,
    /// Border, never chosen as the largest.
    pub padding: WindowPadding,
}

/// The widest window of a maximum: a byte numbers its elements, and says that ReLU behind it lets none through.
const WIDEST: usize = 15;

/// The mean of each window.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct AvgPool {
    /// Rows and columns of the window.
    pub kernel: usize,
    /// Pixels from one window to the next, along both sides.
    pub stride: usize,
}

/// The mean over all positions: `[h, w, c]` becomes `[c]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GlobalAvgPool;

/// Average pool to exactly `size` x `size` (the heads of VGG and AlexNet).
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct AdaptiveAvgPool {
    /// Rows and columns of the result.
    pub size: usize,
}

/// As a run file writes it.
pub(super) const MAX_POOL: LayerKind = LayerKind {
    word: "max_pool",
    fields: &[size("kernel"), size_like("stride", "kernel"), PADDING],
    opens: false,
    then: Downstream::Passes,
    complete: |written, at| {
        let [kernel, stride] = ["kernel", "stride"].map(|field| written.values.get(field));
        Ok(LayerSpec::MaxPool(MaxPool { kernel, stride, padding: written.padding(at.shape) }))
    },
};

/// As a run file writes it.
pub(super) const AVG_POOL: LayerKind = LayerKind {
    word: "avg_pool",
    fields: &[size("kernel"), size_like("stride", "kernel")],
    opens: false,
    then: Downstream::Passes,
    complete: |written, _| {
        Ok(LayerSpec::AvgPool(AvgPool {
            kernel: written.values.get("kernel"),
            stride: written.values.get("stride"),
        }))
    },
};

/// As a run file writes it.
pub(super) const GLOBAL_AVG_POOL: LayerKind = LayerKind {
    word: "global_avg_pool",
    fields: &[],
    opens: false,
    then: Downstream::Passes,
    complete: |_, _| Ok(LayerSpec::GlobalAvgPool),
};

/// As a run file writes it.
pub(super) const ADAPTIVE_AVG_POOL: LayerKind = LayerKind {
    word: "adaptive_avg_pool",
    fields: &[size("size")],
    opens: false,
    then: Downstream::Passes,
    complete: |written, _| {
        Ok(LayerSpec::AdaptiveAvgPool(AdaptiveAvgPool { size: written.values.get("size") }))
    },
};

/// Of all of them: channel by channel.
const POOL: Properties =
    Properties { keeps_zeros: true, tensor_role: TensorRole::Between, ..Properties::PLAIN };

impl LayerDescription for MaxPool {
    fn output(&self, input: Shape) -> Result<Shape, String> {
        let MaxPool { kernel, stride, padding } = *self;
        if padding.most() > kernel / 2 {
            return Err(format!("padding {padding} is more than half of the window of {kernel}"));
        }
        if kernel > WIDEST {
            let most = format!("{WIDEST} x {WIDEST}, the most that a max pool takes");
            return Err(format!("a window of {kernel} x {kernel} is larger than {most}"));
        }
        windows(image(input)?, kernel, stride, padding)
    }

    /// The places of the maxima, a byte each.
    fn saves(&self, input: Shape, samples: u64) -> SavedForBackward {
        let places = self.output(input).map_or(0, |output| output.elements());
        SavedForBackward { bytes: places.saturating_mul(samples), ..SavedForBackward::default() }
    }

    fn padded(&self, padding: WindowPadding) -> Option<LayerSpec> {
        Some(LayerSpec::MaxPool(MaxPool { padding, ..*self }))
    }

    fn properties(&self) -> Properties {
        let MaxPool { kernel, stride, padding } = *self;
        Properties { tile_role: TileRole::Window(SlidingWindow { kernel, stride, padding }), ..POOL }
    }
}

impl LayerDescription for AvgPool {
    fn output(&self, input: Shape) -> Result<Shape, String> {
        windows(image(input)?, self.kernel, self.stride, WindowPadding::default())
    }

    fn padded(&self, _: WindowPadding) -> Option<LayerSpec> {
        Some(LayerSpec::AvgPool(*self))
    }

    fn properties(&self) -> Properties {
        let AvgPool { kernel, stride } = *self;
        Properties {
            tile_role: TileRole::Window(SlidingWindow { kernel, stride, padding: WindowPadding::default() }),
            ..POOL
        }
    }
}

impl LayerDescription for GlobalAvgPool {
    fn output(&self, input: Shape) -> Result<Shape, String> {
        Ok(Shape::Vector { width: image(input)?.last() })
    }

    fn properties(&self) -> Properties {
        Properties { tile_role: TileRole::Mean(None), ..POOL }
    }
}

impl LayerDescription for AdaptiveAvgPool {
    fn output(&self, input: Shape) -> Result<Shape, String> {
        Ok(Shape::Image { height: self.size, width: self.size, channels: image(input)?.last() })
    }

    fn properties(&self) -> Properties {
        Properties { tile_role: TileRole::Mean(Some(self.size)), ..POOL }
    }
}
