//! How far the windows of a convolution or a pool reach past an image, side by side. A run file writes one
//! number for all four, or "same"; they differ there, and where a rank holds a tile of the image, whose border
//! is the true one on some of its sides only.

use std::fmt;

use serde::{Serialize, Serializer};

/// Pixels past each side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct WindowPadding {
    /// Rows above the first.
    pub top: usize,
    /// Rows below the last.
    pub bottom: usize,
    /// Columns before the first.
    pub left: usize,
    /// Columns behind the last.
    pub right: usize,
}

impl WindowPadding {
    /// What TensorFlow calls "same": windows over an image of `size` rows and columns make one of
    /// ceil(size / stride), and of the pixels that this takes half are before the image, the odd one behind.
    pub fn same(size: [usize; 2], kernel: usize, stride: usize) -> WindowPadding {
        let along = |n: usize| {
            let last = n.saturating_sub(1) / stride.max(1) * stride;
            let past = last.saturating_add(kernel).saturating_sub(n);
            [past / 2, past.div_ceil(2)]
        };
        let [[top, bottom], [left, right]] = size.map(along);
        WindowPadding { top, bottom, left, right }
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
        self.sides().into_iter().max().unwrap_or(0)
    }

    fn sides(&self) -> [usize; 4] {
        [self.top, self.bottom, self.left, self.right]
    }

    /// The number for all sides, where there is one.
    fn uniform(&self) -> Option<usize> {
        self.sides().iter().all(|n| *n == self.top).then_some(self.top)
    }
}

impl From<usize> for WindowPadding {
    fn from(n: usize) -> WindowPadding {
        WindowPadding { top: n, bottom: n, left: n, right: n }
    }
}

/// One number where all sides have it.
impl fmt::Display for WindowPadding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.uniform() {
            Some(n) => write!(f, "{n}"),
            None => write!(f, "{} | {} x {} | {}", self.top, self.bottom, self.left, self.right),
        }
    }
}

/// One number where all sides have it, else top, bottom, left, right.
impl Serialize for WindowPadding {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.uniform() {
            Some(n) => n.serialize(serializer),
            None => self.sides().serialize(serializer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// CIFAR's images, ImageNet's first layer (2 and 3 in TensorFlow), and a pool.
    #[test]
    fn same_keeps_the_size_and_puts_the_odd_pixel_behind() {
        let sides = |top, bottom, left, right| WindowPadding { top, bottom, left, right };
        assert_eq!(WindowPadding::same([32, 32], 3, 1), 1.into());
        assert_eq!(WindowPadding::same([32, 15], 3, 2), sides(0, 1, 1, 1));
        assert_eq!(WindowPadding::same([224, 7], 7, 2), sides(2, 3, 3, 3));
        assert_eq!(WindowPadding::same([9, 8], 2, 2), sides(0, 1, 0, 0));
        assert_eq!(WindowPadding::same([8, 8], 1, 2), 0.into());
    }

    #[test]
    fn one_number_stays_one_number() {
        let sides = WindowPadding { top: 1, bottom: 0, left: 2, right: 2 };
        assert_eq!(
            (WindowPadding::from(1).to_string(), sides.to_string()),
            ("1".into(), "1 | 0 x 2 | 2".into())
        );
        let json = |padding: WindowPadding| serde_json::to_string(&padding).unwrap();
        assert_eq!((json(1.into()), json(sides)), ("1".into(), "[1,0,2,2]".into()));
    }
}
