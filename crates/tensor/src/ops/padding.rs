//! How far the windows of a convolution or a pool reach past an image, on each side: an image that is tiled
//! over ranks has a border only where the full one has it.

/// Pixels past each side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Padding {
    pub top: usize,
    pub bottom: usize,
    pub left: usize,
    pub right: usize,
}

impl Padding {
    /// No border on any side.
    pub const NONE: Padding = Padding::all(0);

    /// The same on every side.
    pub const fn all(n: usize) -> Padding {
        Padding { top: n, bottom: n, left: n, right: n }
    }

    /// Before the first row and behind the last.
    pub const fn rows(&self) -> [usize; 2] {
        [self.top, self.bottom]
    }

    /// Before the first column and behind the last.
    pub const fn columns(&self) -> [usize; 2] {
        [self.left, self.right]
    }

    /// The most on any side.
    pub fn most(&self) -> usize {
        [self.top, self.bottom, self.left, self.right].into_iter().max().unwrap_or(0)
    }
}

impl From<usize> for Padding {
    fn from(n: usize) -> Padding {
        Padding::all(n)
    }
}

/// How many windows fit along a side of `size` pixels with so many more before and behind them.
pub(super) fn count(size: usize, [before, after]: [usize; 2], kernel: usize, stride: usize) -> usize {
    let padded = size + before + after;
    assert!(padded >= kernel, "a window of {kernel} does not fit {size} pixels");
    (padded - kernel) / stride + 1
}
