//! Tiles, halos and padding against the whole image.

use proptest::prelude::*;

use super::*;
use crate::layout::spatial::strides;
use crate::spec::LayerSpec;
use crate::spec::presets::{ResNet, StemForm, resnet};

/// A number for each pixel of an image.
struct Image {
    size: [usize; 2],
    pixels: Vec<i64>,
}

impl Image {
    fn new(size: [usize; 2], pixel: impl Fn(usize, usize) -> i64) -> Image {
        let at = |index: usize| pixel(index / size[1], index % size[1]);
        Image { size, pixels: (0..size[0] * size[1]).map(at).collect() }
    }

    fn at(&self, row: usize, column: usize) -> i64 {
        self.pixels[row * self.size[1] + column]
    }

    /// Numbers that tell pixels apart.
    fn noise(size: [usize; 2]) -> Image {
        Image::new(size, |i, j| ((i * 7919 + j * 104_729 + i * j * 31) % 1009) as i64)
    }

    fn cut(&self, region: &Region) -> Image {
        Image::new(region.size(), |i, j| self.at(region.rows.start + i, region.columns.start + j))
    }

    /// A weighted sum under each window, zeros past the image: what a convolution makes of one channel.
    fn convolved(&self, kernel: usize, stride: usize, padding: WindowPadding) -> Image {
        let [h, w] = self.size;
        let count = |n: usize, [before, after]: [usize; 2]| (n + before + after - kernel) / stride + 1;
        let size = [count(h, padding.rows()), count(w, padding.columns())];
        Image::new(size, |i, j| {
            let mut sum = 0;
            for (u, v) in (0..kernel * kernel).map(|tap| (tap / kernel, tap % kernel)) {
                let (row, column) = (i * stride + u, j * stride + v);
                if (padding.top..padding.top + h).contains(&row)
                    && (padding.left..padding.left + w).contains(&column)
                {
                    sum += self.at(row - padding.top, column - padding.left) * (1 + u * 13 + v * 5) as i64;
                }
            }
            sum
        })
    }
}

/// That the tiles of a grid, each from its own pixels, its halo and its padding, make the full output: at
/// once over all that they read, and as a sum of what each region adds.
fn check(tiles: &TileGrid, output: &TileGrid, halos: &[HaloPlan], window: SlidingWindow) {
    let image = Image::noise(tiles.size());
    let full = image.convolved(window.kernel, window.stride, window.padding);
    assert_eq!(output.size(), full.size);
    let mut made = 0;
    for (rank, plan) in halos.iter().enumerate() {
        assert_eq!((&plan.own, &plan.output), (&tiles.of(rank), &output.of(rank)));
        let expected = full.cut(&plan.output);
        made += expected.pixels.len();

        // Every pixel that is read is here or comes from exactly one neighbour, who sends what is taken.
        let here = plan.own.intersection(&plan.reads).pixels();
        let received: u64 = plan.neighbours.iter().map(|peer| peer.takes.pixels()).sum();
        assert_eq!(here + received, plan.reads.pixels());
        for peer in &plan.neighbours {
            let back = halos[peer.rank].neighbours.iter().find(|other| other.rank == rank).unwrap();
            assert_eq!((&peer.takes, &peer.gives), (&back.gives, &back.takes));
        }

        let all = plan.contribution(&plan.reads);
        assert_eq!((&all.input, &all.output), (&plan.reads, &plan.output));
        let at_once = image.cut(&all.input).convolved(window.kernel, window.stride, all.padding);
        assert_eq!((at_once.size, &at_once.pixels), (expected.size, &expected.pixels), "{plan:?}");

        let local = plan.contribution(&plan.own);
        assert_eq!(local.output, plan.output, "the own tile has a part in every output");
        let mut sum = Image::new(expected.size, |_, _| 0);
        for region in [&plan.own].into_iter().chain(plan.neighbours.iter().map(|peer| &peer.takes)) {
            let added_by = plan.contribution(region);
            assert_eq!(
                added_by.output.is_empty(),
                region.is_empty(),
                "whatever comes has a part in some output"
            );
            if region.is_empty() {
                continue;
            }
            let added = image.cut(&added_by.input).convolved(window.kernel, window.stride, added_by.padding);
            let at = added_by.output.within(&plan.output);
            assert_eq!(added.size, at.size());
            for (i, j) in at.rows.clone().flat_map(|i| at.columns.clone().map(move |j| (i, j))) {
                sum.pixels[i * expected.size[1] + j] += added.at(i - at.rows.start, j - at.columns.start);
            }
        }
        assert_eq!(sum.pixels, expected.pixels, "{plan:?}");
    }
    assert_eq!(made, full.pixels.len());
}

/// Cuts anywhere, or those of [`TileGrid::cut`].
fn slabs(extent: usize, ranks: usize, seeds: &[u64], free: bool) -> Slabs {
    if !free {
        return Slabs::cut(extent, ranks, &[2, 2]);
    }
    let mut bounds: Vec<usize> = seeds[1..ranks].iter().map(|seed| *seed as usize % (extent + 1)).collect();
    bounds.extend([0, extent]);
    bounds.sort_unstable();
    Slabs::at(bounds)
}

prop_compose! {
    fn window()(kernel in 1usize..8, stride in 1usize..5, sides in [0usize..4, 0..4, 0..4, 0..4]) -> SlidingWindow {
        let [top, bottom, left, right] = sides.map(|n| n.min(kernel - 1));
        SlidingWindow { kernel, stride, padding: WindowPadding { top, bottom, left, right } }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    /// A chain of windows over an image that is cut anywhere: each layer is right, or one sentence says which
    /// cannot be cut.
    #[test]
    fn every_output_comes_from_local_pixels_halo_and_padding(
        (h, w, down, across, free) in (1usize..40, 1usize..24, 1usize..5, 1usize..4, any::<bool>()),
        seeds in prop::collection::vec(any::<u64>(), 8),
        chain in prop::collection::vec(window(), 1..4),
    ) {
        let mut tiles = TileGrid { rows: slabs(h, down, &seeds[..4], free), columns: slabs(w, across, &seeds[4..], free) };
        for window in chain {
            let [h, w] = tiles.size();
            let fits = |n: usize, padding: [usize; 2]| n + padding[0] + padding[1] >= window.kernel;
            if !fits(h, window.padding.rows()) || !fits(w, window.padding.columns()) {
                break;
            }
            match tiles.slide("conv", window) {
                Ok((output, halos)) => {
                    check(&tiles, &output, &halos, window);
                    tiles = output;
                }
                Err(thin) => {
                    prop_assert!(thin.to_string().contains("conv"));
                    prop_assert!(down * across > 1, "one rank can always: {}", thin);
                    break;
                }
            }
        }
    }

    #[test]
    fn cuts_follow_strides_and_stay_balanced(
        (extent, ranks) in (1usize..300, 1usize..9),
        strides in prop::collection::vec(1usize..4, 0..5),
    ) {
        let slabs = Slabs::cut(extent, ranks, &strides);
        prop_assert_eq!((slabs.extent(), slabs.ranks()), (extent, ranks));
        let even = extent.div_ceil(ranks);
        let longest = (0..ranks).map(|rank| slabs.of(rank).len()).max().unwrap();
        prop_assert!(longest <= even + even / 8, "{:?}", slabs);
    }
}

/// The halos of a rank in the middle: rows from before and from behind.
fn halo(extent: usize, ranks: usize, kernel: usize, stride: usize, padding: usize) -> [usize; 2] {
    let tiles = TileGrid::cut([extent, extent], [ranks, 1], &[stride]);
    let window = SlidingWindow { kernel, stride, padding: padding.into() };
    let (_, halos) = tiles.slide("conv", window).unwrap();
    let HaloPlan { own, reads, .. } = &halos[1];
    [own.rows.start.saturating_sub(reads.rows.start), reads.rows.end.saturating_sub(own.rows.end)]
}

/// p rows before and k - s - p behind.
#[test]
fn halos_are_as_thin_as_the_formula_says() {
    assert_eq!(halo(48, 3, 3, 1, 1), [1, 1]);
    assert_eq!(halo(48, 3, 5, 1, 2), [2, 2]);
    assert_eq!(halo(48, 3, 7, 2, 3), [3, 2]);
    assert_eq!(halo(48, 3, 3, 2, 1), [1, 0]);
    assert_eq!(halo(48, 3, 2, 2, 0), [0, 0]);
    assert_eq!(halo(48, 3, 1, 2, 0), [0, 0]);
    // Without padding both neighbours give alike: outputs follow the middles of windows, not their beginnings.
    assert_eq!(halo(48, 3, 5, 1, 0), [2, 2]);
}

#[test]
fn padding_is_left_at_the_true_border_alone() {
    let tiles = TileGrid::cut([32, 32], [2, 2], &[]);
    let window = SlidingWindow { kernel: 3, stride: 1, padding: 1.into() };
    let (_, halos) = tiles.slide("conv", window).unwrap();
    let padding = |rank: usize| halos[rank].contribution(&halos[rank].reads).padding;
    assert_eq!(padding(0), WindowPadding { top: 1, bottom: 0, left: 1, right: 0 });
    assert_eq!(padding(3), WindowPadding { top: 0, bottom: 1, left: 0, right: 1 });
    // Two sides of sixteen pixels and a corner, to three neighbours.
    assert_eq!(halos[0].neighbours.iter().map(|peer| peer.rank).collect::<Vec<_>>(), [1, 2, 3]);
    let pixels = |of: fn(&Neighbour) -> &Region| -> u64 {
        halos[0].neighbours.iter().map(|peer| of(peer).pixels()).sum()
    };
    assert_eq!([pixels(|peer| &peer.gives), pixels(|peer| &peer.takes)], [33, 33]);
}

#[test]
fn a_slab_thinner_than_its_halo_is_one_sentence() {
    let slide = |extent, ranks, kernel, stride, padding: usize| {
        let tiles = TileGrid::cut([extent, 8], [ranks, 1], &[]);
        let window = SlidingWindow { kernel, stride, padding: padding.into() };
        tiles.slide("layer1.0.conv1", window).unwrap_err()
    };
    insta::assert_snapshot!(slide(8, 4, 7, 1, 3), @"layer1.0.conv1 needs 3 rows from rank 1, whose tile has 2: split the image over fewer ranks");
    insta::assert_snapshot!(slide(8, 8, 2, 2, 0), @"rank 1 of 8 gets none of the 4 rows of layer1.0.conv1: split the image over fewer ranks");
    insta::assert_snapshot!(slide(8, 2, 3, 1, 3), @"layer1.0.conv1 has a padding of 3 for windows of 3: with spatial parallelism padding must be smaller than the window");
}

/// Cuts of a ResNet's image lie where all of its strides allow it, and all branches of a block come out cut alike.
#[test]
fn a_resnet_is_cut_where_its_strides_are() {
    let model = resnet(ResNet::R50, (224, 224, 3), 1000, StemForm::ImageNet);
    let layers: Vec<LayerSpec> = model.blocks.iter().flat_map(|block| block.layers.clone()).collect();
    assert_eq!(strides(&layers), [2, 2, 2, 2, 2]);
    let tiles = TileGrid::cut([224, 224], [2, 2], &strides(&layers));
    assert_eq!((tiles.rows.of(0), tiles.rows.of(1)), (0..112, 112..224));
    let slide = |tiles: &TileGrid, kernel, stride, padding: usize| {
        tiles.slide("conv", SlidingWindow { kernel, stride, padding: padding.into() }).unwrap().0
    };
    for size in [21, 28, 33, 56] {
        let tiles = TileGrid::cut([size, size], [3, 2], &[]);
        assert_eq!(slide(&tiles, 3, 2, 1), slide(&tiles, 1, 2, 0));
    }
}
