//! How far the windows of a convolution or a pool reach past an image, side by side. A run file writes one
//! number for all four; they differ where a rank holds a tile of the image, whose border is the true one on
//! some of its sides only.

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
