//! Pools: the largest or the mean of windows of an image.

use serde::Serialize;

use super::super::shape::Shape;
use super::kind::{Kind, Then};
use super::{Entry, Layer, OnTiles, Padding, Properties, Saves, TensorRole, image, windows};
use crate::field::{LARGEST, size, size_like, whole};
use crate::tiles::Window;

/// The largest of each window.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MaxPool {
    /// Rows and columns of the window.
    pub kernel: usize,
    /// Pixels from one window to the next, along both sides.
    pub stride: usize,
    /// Border, never chosen as the largest.
    pub padding: Padding,
}

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
pub(super) const MAX_POOL: Kind = Kind {
    word: "max_pool",
    fields: &[size("kernel"), size_like("stride", "kernel"), whole("padding", 0, 0, LARGEST)],
    opens: false,
    then: Then::Passes,
    complete: |written, _| {
        let [kernel, stride, padding] = ["kernel", "stride", "padding"].map(|field| written.whole(field));
        Ok(Layer::MaxPool(MaxPool { kernel, stride, padding: padding.into() }))
    },
};

/// As a run file writes it.
pub(super) const AVG_POOL: Kind = Kind {
    word: "avg_pool",
    fields: &[size("kernel"), size_like("stride", "kernel")],
    opens: false,
    then: Then::Passes,
    complete: |written, _| {
        Ok(Layer::AvgPool(AvgPool { kernel: written.whole("kernel"), stride: written.whole("stride") }))
    },
};

/// As a run file writes it.
pub(super) const GLOBAL_AVG_POOL: Kind = Kind {
    word: "global_avg_pool",
    fields: &[],
    opens: false,
    then: Then::Passes,
    complete: |_, _| Ok(Layer::GlobalAvgPool),
};

/// As a run file writes it.
pub(super) const ADAPTIVE_AVG_POOL: Kind = Kind {
    word: "adaptive_avg_pool",
    fields: &[size("size")],
    opens: false,
    then: Then::Passes,
    complete: |written, _| Ok(Layer::AdaptiveAvgPool(AdaptiveAvgPool { size: written.whole("size") })),
};

/// Of all of them: channel by channel.
const POOL: Properties =
    Properties { keeps_zeros: true, tensor_role: TensorRole::Between, ..Properties::PLAIN };

impl Entry for MaxPool {
    fn word(&self) -> &'static str {
        MAX_POOL.word
    }

    fn output(&self, input: Shape) -> Result<Shape, String> {
        let MaxPool { kernel, stride, padding } = *self;
        if padding.most() > kernel / 2 {
            return Err(format!("padding {padding} is more than half of the window of {kernel}"));
        }
        windows(image(input)?, kernel, stride, padding)
    }

    fn saves(&self, _: Shape, _: u64) -> Saves {
        Saves::INPUT
    }

    fn padded(&self, padding: Padding) -> Option<Layer> {
        Some(Layer::MaxPool(MaxPool { padding, ..*self }))
    }

    fn properties(&self) -> Properties {
        let MaxPool { kernel, stride, padding } = *self;
        Properties { on_tiles: OnTiles::Window(Window { kernel, stride, padding }), ..POOL }
    }
}

impl Entry for AvgPool {
    fn word(&self) -> &'static str {
        AVG_POOL.word
    }

    fn output(&self, input: Shape) -> Result<Shape, String> {
        windows(image(input)?, self.kernel, self.stride, Padding::default())
    }

    fn padded(&self, _: Padding) -> Option<Layer> {
        Some(Layer::AvgPool(*self))
    }

    fn properties(&self) -> Properties {
        let AvgPool { kernel, stride } = *self;
        Properties {
            on_tiles: OnTiles::Window(Window { kernel, stride, padding: Padding::default() }),
            ..POOL
        }
    }
}

impl Entry for GlobalAvgPool {
    fn word(&self) -> &'static str {
        GLOBAL_AVG_POOL.word
    }

    fn output(&self, input: Shape) -> Result<Shape, String> {
        Ok(Shape::Vector { width: image(input)?.last() })
    }

    fn properties(&self) -> Properties {
        Properties { on_tiles: OnTiles::Mean(None), ..POOL }
    }
}

impl Entry for AdaptiveAvgPool {
    fn word(&self) -> &'static str {
        ADAPTIVE_AVG_POOL.word
    }

    fn output(&self, input: Shape) -> Result<Shape, String> {
        Ok(Shape::Image { height: self.size, width: self.size, channels: image(input)?.last() })
    }

    fn properties(&self) -> Properties {
        Properties { on_tiles: OnTiles::Mean(Some(self.size)), ..POOL }
    }
}
