//! One side of an image, cut into slabs, and windows that slide along it.

use std::ops::Range;

use serde::Serialize;

use super::TileError;

/// Where a side is cut: slabs in the order of ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Slabs {
    /// From 0 to the side's extent: slab r lies between the r-th and the next.
    bounds: Vec<usize>,
}

impl Slabs {
    /// `extent` pixels for so many ranks. Cuts lie at multiples of as many of the `strides` to come, first
    /// ones first, as the balance allows: the longest slab has at most an eighth more than the even cut's. So
    /// halos stay thin and every rank's the same.
    pub fn cut(extent: usize, ranks: usize, strides: &[usize]) -> Slabs {
        assert!(ranks > 0, "a side is cut over at least one rank");
        let at_multiples_of = |unit: usize| {
            let units = extent.div_ceil(unit);
            let bound = |rank: usize| (rank * units / ranks * unit).min(extent);
            Slabs { bounds: (0..=ranks).map(bound).collect() }
        };
        let even = extent.div_ceil(ranks);
        let products = strides.iter().scan(1usize, |unit, stride| {
            *unit = unit.saturating_mul(*stride);
            Some(*unit)
        });
        let balanced = |slabs: &Slabs| {
            let longest = (0..ranks).map(|rank| slabs.of(rank).len()).max().unwrap_or(0);
            longest <= even + even / 8
        };
        let aligned =
            products.take_while(|unit| *unit <= extent).map(at_multiples_of).filter(balanced).last();
        aligned.unwrap_or_else(|| at_multiples_of(1))
    }

    /// Slabs between these bounds, the first 0 and the last the extent.
    pub fn at(bounds: Vec<usize>) -> Slabs {
        assert!(bounds.len() > 1 && bounds[0] == 0 && bounds.is_sorted(), "slabs between {bounds:?}");
        Slabs { bounds }
    }

    /// How many there are.
    pub fn ranks(&self) -> usize {
        self.bounds.len() - 1
    }

    /// Pixels of all of them.
    pub fn extent(&self) -> usize {
        self.bounds[self.ranks()]
    }

    /// That of a rank.
    pub fn of(&self, rank: usize) -> Range<usize> {
        self.bounds[rank]..self.bounds[rank + 1]
    }

    /// The slabs of what windows make; `along` is what an error calls the pixels.
    pub(super) fn slide(
        &self,
        layer: &str,
        along: &'static str,
        windows: &SideWindows,
    ) -> Result<Slabs, TileError> {
        let (layer, extent) = (|| layer.to_owned(), self.extent());
        let count = windows.count(extent);
        let mut bounds: Vec<usize> =
            self.bounds.iter().map(|bound| windows.before_cut(*bound, extent)).collect();
        bounds[self.ranks()] = count;
        let output = Slabs { bounds };
        for rank in 0..self.ranks() {
            for (slabs, count) in [(self, extent), (&output, count)] {
                if slabs.of(rank).is_empty() {
                    return Err(TileError::Empty { layer: layer(), along, count, rank, ranks: self.ranks() });
                }
            }
            let (own, reads) = (self.of(rank), windows.see(output.of(rank), extent));
            let before = own.start.saturating_sub(reads.start);
            let behind = reads.end.saturating_sub(own.end);
            for (needs, from) in [(before, rank.checked_sub(1)), (behind, Some(rank + 1))] {
                let (Some(from), true) = (from, needs > 0) else { continue };
                let has = self.of(from).len();
                if needs > has {
                    return Err(TileError::Halo { layer: layer(), along, needs, from, has });
                }
            }
        }
        Ok(output)
    }
}

/// Windows along one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SideWindows {
    /// Pixels of one.
    pub kernel: usize,
    /// From one to the next.
    pub stride: usize,
    /// Padding before the first pixel.
    pub before: usize,
    /// Padding behind the last.
    pub after: usize,
}

/// What some pixels of a side are to windows.
pub(super) struct WindowReach {
    /// Those that any window sees.
    pub input: Range<usize>,
    /// The windows that see any.
    pub output: Range<usize>,
    /// How far they reach past the pixels, before and behind.
    pub padding: [usize; 2],
}

impl SideWindows {
    /// How many there are along so many pixels, which must be enough for one.
    fn count(&self, extent: usize) -> usize {
        (extent + self.before + self.after - self.kernel) / self.stride + 1
    }

    /// How many have their middle before a cut. A middle past an end of the side counts as that end. Where the
    /// padding differs, the middle is that of a window with the mean of both: so windows of any size that make
    /// as many outputs are cut alike.
    fn before_cut(&self, bound: usize, extent: usize) -> usize {
        let padded = (2 * bound + self.before + self.after + 1).saturating_sub(self.kernel - 1) / 2;
        let count = if bound == 0 { 0 } else { padded.div_ceil(self.stride) };
        count.min(self.count(extent))
    }

    /// The pixels that these windows see.
    pub(super) fn see(&self, windows: Range<usize>, extent: usize) -> Range<usize> {
        if windows.is_empty() {
            return 0..0;
        }
        let on_side = |padded: usize| padded.saturating_sub(self.before).min(extent);
        on_side(windows.start * self.stride)..on_side((windows.end - 1) * self.stride + self.kernel)
    }

    /// What pixels are to those of the windows `among`.
    pub(super) fn reach(&self, pixels: Range<usize>, among: Range<usize>) -> WindowReach {
        // Counted from the first pixel of padding, so that no index is negative.
        let (start, end) = (pixels.start + self.before, pixels.end + self.before);
        let first = (start + 1).saturating_sub(self.kernel).div_ceil(self.stride).max(among.start);
        let output = first..end.div_ceil(self.stride).min(among.end).max(first);
        if output.is_empty() || pixels.is_empty() {
            return WindowReach { input: pixels.start..pixels.start, output: first..first, padding: [0, 0] };
        }
        let (low, high) = (output.start * self.stride, (output.end - 1) * self.stride + self.kernel);
        let (from, to) = (start.max(low), end.min(high));
        WindowReach { input: from - self.before..to - self.before, output, padding: [from - low, high - to] }
    }
}
