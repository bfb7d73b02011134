//! A rectangle of pixels.

use std::ops::Range;

use serde::Serialize;

/// Some rows and columns of an image.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub struct Region {
    /// Rows, counted in the whole image.
    pub rows: Range<usize>,
    /// Columns, counted in the whole image.
    pub columns: Range<usize>,
}

impl Region {
    /// All of an image.
    pub fn all([height, width]: [usize; 2]) -> Region {
        Region { rows: 0..height, columns: 0..width }
    }

    pub fn size(&self) -> [usize; 2] {
        [self.rows.len(), self.columns.len()]
    }

    pub fn pixels(&self) -> u64 {
        (self.rows.len() as u64).saturating_mul(self.columns.len() as u64)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty() || self.columns.is_empty()
    }

    /// The pixels of both.
    pub fn intersection(&self, other: &Region) -> Region {
        let both = |a: &Range<usize>, b: &Range<usize>| {
            let start = a.start.max(b.start);
            start..a.end.min(b.end).max(start)
        };
        Region { rows: both(&self.rows, &other.rows), columns: both(&self.columns, &other.columns) }
    }

    /// The same pixels, counted from the first of `origin`, within which they must lie.
    pub fn within(&self, origin: &Region) -> Region {
        let shift = |range: &Range<usize>, by: &Range<usize>| {
            assert!(by.start <= range.start && range.end <= by.end, "{self:?} within {origin:?}");
            range.start - by.start..range.end - by.start
        };
        Region { rows: shift(&self.rows, &origin.rows), columns: shift(&self.columns, &origin.columns) }
    }

    /// Its first row and column.
    pub fn first(&self) -> [usize; 2] {
        [self.rows.start, self.columns.start]
    }
}
