//! Images as their readers deliver them, bytes with labels, before any of them is held out or standardised.

use std::path::PathBuf;

/// pixels: [count, height, width, channels], labels: [count]
#[derive(Debug)]
pub(crate) struct RawImages {
    /// Where they come from, for errors.
    pub path: PathBuf,
    pub pixels: Vec<u8>,
    pub labels: Vec<u8>,
    /// Height, width, channels.
    pub shape: [usize; 3],
    pub classes: usize,
}

impl RawImages {
    pub(crate) fn stride(&self) -> usize {
        self.shape.iter().product()
    }

    pub(crate) fn image(&self, i: usize) -> &[u8] {
        &self.pixels[i * self.stride()..][..self.stride()]
    }
}
