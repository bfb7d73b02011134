//! Pooling against plain loops.

use proptest::prelude::*;

use super::*;
use crate::dtype::DType;
use crate::ops::activation::{self, ActivationFn};
use crate::testing::{assert_close, check, devices, dot, gradient, tensor, values, wide};

/// For every output of every image, the elements of x that its window sees, rows first, as indices.
type WindowElements = Vec<Vec<usize>>;

fn windows([batch, h, w, c]: [usize; 4], rows: &[Vec<usize>], columns: &[Vec<usize>]) -> WindowElements {
    let mut all = Vec::new();
    for n in 0..batch {
        for rows in rows {
            for columns in columns {
                for k in 0..c {
                    let row = |i: &usize| {
                        let at = (n * h + i) * w;
                        columns.iter().map(move |j| (at + j) * c + k)
                    };
                    all.push(rows.iter().flat_map(row).collect());
                }
            }
        }
    }
    all
}

/// The pixels that each window sees along a side, as one would slide it by hand.
fn slide(size: usize, [before, after]: [usize; 2], kernel: usize, stride: usize) -> Vec<Vec<usize>> {
    let starts = (0..).step_by(stride).take_while(|start| start + kernel <= before + size + after);
    let on_image = |start: usize| {
        let inside = (start..start + kernel).filter(|at| (before..before + size).contains(at));
        inside.map(|at| at - before).collect()
    };
    starts.map(on_image).collect()
}

fn windows_of_pool(shape: [usize; 4], pool: PoolParams) -> WindowElements {
    let along = |size, padding| slide(size, padding, pool.kernel, pool.stride);
    windows(shape, &along(shape[1], pool.padding.rows()), &along(shape[2], pool.padding.columns()))
}

fn windows_of_cover(shape: [usize; 4], size: usize) -> WindowElements {
    let along = |side| cover(side, size).into_iter().map(Iterator::collect).collect::<Vec<_>>();
    windows(shape, &along(shape[1]), &along(shape[2]))
}

fn plain_max(x: &[f64], windows: &WindowElements) -> Vec<f64> {
    windows.iter().map(|w| w.iter().map(|&i| x[i]).fold(f64::NEG_INFINITY, f64::max)).collect()
}

fn plain_mean(x: &[f64], windows: &WindowElements) -> Vec<f64> {
    windows.iter().map(|w| w.iter().map(|&i| x[i]).sum::<f64>() / w.len() as f64).collect()
}

fn plain_max_take(x: &[f64], like: &[f64], windows: &WindowElements) -> Vec<f64> {
    let first = |w: &Vec<usize>| w.iter().copied().reduce(|a, b| if like[b] > like[a] { b } else { a });
    windows.iter().map(|window| x[first(window).unwrap()]).collect()
}

fn plain_max_backward(dy: &[f64], x: &[f64], windows: &WindowElements) -> Vec<f64> {
    let mut dx = vec![0.0; x.len()];
    for (window, dy) in windows.iter().zip(dy) {
        dx[window.iter().copied().reduce(|a, b| if x[b] > x[a] { b } else { a }).unwrap()] += dy;
    }
    dx
}

fn plain_mean_backward(dy: &[f64], elements: usize, windows: &WindowElements) -> Vec<f64> {
    let mut dx = vec![0.0; elements];
    for (window, dy) in windows.iter().zip(dy) {
        window.iter().for_each(|&i| dx[i] += dy / window.len() as f64);
    }
    dx
}

/// Rows and columns of a tile out of an image of this shape.
fn cut(x: &[f32], [batch, h, w, c]: [usize; 4], rows: Range<usize>, columns: Range<usize>) -> Vec<f32> {
    let pixel = |n, i, j| &x[((n * h + i) * w + j) * c..][..c];
    let row = |(n, i)| columns.clone().flat_map(move |j| pixel(n, i, j));
    (0..batch).flat_map(|n| rows.clone().map(move |i| (n, i))).flat_map(row).copied().collect()
}

/// All passes of a pool, on every device and in every type.
fn agrees_with_plain_loops(pool: PoolParams, shape: [usize; 4], seed: u64) {
    // Few distinct values, so that windows have several maxima and the first one must be found.
    let x: Vec<f32> = values(seed, shape.iter().product(), 2.0).iter().map(|x| x.round()).collect();
    let windows = windows_of_pool(shape, pool);
    let output = pool.grid(&shape).output_shape();
    let (dy, other) = (values(seed + 1, windows.len(), 1.0), values(seed + 3, x.len(), 1.0));
    let x64 = wide(&x);
    let largest = plain_max(&x64, &windows);
    let open: Vec<f64> =
        wide(&dy).iter().zip(&largest).map(|(dy, y)| if *y > 0.0 { *dy } else { 0.0 }).collect();
    let expected = [
        largest.clone(),
        plain_max_take(&wide(&other), &x64, &windows),
        plain_max_backward(&wide(&dy), &x64, &windows),
        largest.iter().map(|y| y.max(0.0)).collect(),
        plain_max_backward(&open, &x64, &windows),
        plain_mean(&x64, &windows),
        plain_mean_backward(&wide(&dy), x.len(), &windows),
    ];
    check(&expected, |device, dtype| {
        let x = tensor(device, dtype, &shape, &x);
        let dy = tensor(device, dtype, &output, &dy);
        let [(y, places), (relu_y, open)] = [false, true].map(|relu| max_forward(&x, pool, relu).unwrap());
        let back = |places| max_backward(&dy, places, pool, &shape).unwrap();
        vec![
            y,
            max_take(&tensor(device, dtype, &shape, &other), &places, pool).unwrap(),
            back(&places),
            relu_y,
            back(&open),
            avg_forward(&x, pool).unwrap(),
            avg_backward(&dy, pool, &shape).unwrap(),
        ]
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    /// Padding may differ from side to side.
    #[test]
    fn windows_of_any_geometry_agree_with_plain_loops(
        (kernel, stride, sides) in (1usize..6, 1usize..5, [0usize..3, 0..3, 0..3, 0..3]),
        (batch, h, w, c) in (1usize..4, 4usize..11, 4usize..11, 1usize..150),
        seed in 0u64..1000,
    ) {
        let [top, bottom, left, right] = sides.map(|n| n.min(kernel / 2));
        let pool = PoolParams { kernel, stride, padding: Padding { top, bottom, left, right } };
        prop_assume!(h + top + bottom >= kernel && w + left + right >= kernel);
        agrees_with_plain_loops(pool, [batch, h, w, c], seed);
    }

    /// Every pixel lies in one window, or in none where a rest is left at the end of a side.
    #[test]
    fn windows_side_by_side_agree_with_plain_loops(
        (kernel, down, across, rest) in (1usize..5, 1usize..5, 1usize..5, 0usize..2),
        (batch, c) in (1usize..4, 1usize..80),
        seed in 0u64..1000,
    ) {
        let pool = PoolParams { kernel, stride: kernel, padding: 0.into() };
        let shape = [batch, down * kernel, across * kernel + rest.min(kernel - 1), c];
        agrees_with_plain_loops(pool, shape, seed);
    }

    #[test]
    fn covering_windows_agree_with_plain_loops(
        (batch, h, w, c) in (1usize..4, 1usize..11, 1usize..11, 1usize..90),
        size in 1usize..6,
    ) {
        let shape = [batch, h, w, c];
        let x = values(5, shape.iter().product(), 1.0);
        let (grid, full) = (windows_of_cover(shape, size), windows_of_cover(shape, 1));
        let (dy, whole_dy) = (values(6, grid.len(), 1.0), values(7, full.len(), 1.0));
        let expected = [
            plain_mean(&wide(&x), &grid),
            plain_mean_backward(&wide(&dy), x.len(), &grid),
            plain_mean(&wide(&x), &full),
            plain_mean_backward(&wide(&whole_dy), x.len(), &full),
        ];
        check(&expected, |device, dtype| {
            let x = tensor(device, dtype, &shape, &x);
            let dy = tensor(device, dtype, &[batch, size, size, c], &dy);
            let whole_dy = tensor(device, dtype, &[batch, c], &whole_dy);
            vec![
                adaptive_avg_forward(&x, size).unwrap(),
                adaptive_avg_backward(&dy, &shape).unwrap(),
                global_avg_forward(&x).unwrap(),
                global_avg_backward(&whole_dy, &shape).unwrap(),
            ]
        });
    }

    /// A tile of the image adds its pixels of each window, and gets its pixels of each gradient; windows that it
    /// has nothing of get a zero from it.
    #[test]
    fn tiles_add_up_to_the_means_of_the_whole(
        (batch, h, w, c) in (1usize..3, 2usize..11, 2usize..11, 1usize..40),
        (size, above, left) in (1usize..6, 0.0f64..1.0, 0.0f64..1.0),
    ) {
        let shape = [batch, h, w, c];
        let (x, dy) = (values(5, shape.iter().product(), 1.0), values(6, batch * size * size * c, 1.0));
        let (row, column) = (1 + (above * (h - 1) as f64) as usize, 1 + (left * (w - 1) as f64) as usize);
        let windows = windows_of_cover(shape, size);
        let dx: Vec<f32> = plain_mean_backward(&wide(&dy), x.len(), &windows).iter().map(|x| *x as f32).collect();
        for (rows, columns) in [(0..row, 0..column), (0..row, column..w), (row..h, 0..column), (row..h, column..w)] {
            let tile_shape = [batch, rows.len(), columns.len(), c];
            if tile_shape.contains(&0) {
                continue;
            }
            let tile = Tile { full_size: [h, w], first: [rows.start, columns.start] };
            let inside = |index: &usize| {
                let (i, j) = (index / c / w % h, index / c % w);
                rows.contains(&i) && columns.contains(&j)
            };
            let mean = |w: &Vec<usize>| {
                w.iter().filter(|i| inside(i)).map(|&i| f64::from(x[i])).sum::<f64>() / w.len() as f64
            };
            let expected =
                [windows.iter().map(mean).collect(), wide(&cut(&dx, shape, rows.clone(), columns.clone()))];
            let here = cut(&x, shape, rows.clone(), columns.clone());
            check(&expected, |device, dtype| {
                let dy = tensor(device, dtype, &[batch, size, size, c], &dy);
                vec![
                    adaptive_avg_forward_tile(&tensor(device, dtype, &tile_shape, &here), size, tile).unwrap(),
                    adaptive_avg_backward_tile(&dy, &tile_shape, tile).unwrap(),
                ]
            });
        }
    }
}

/// So a network may have either, and ReLU behind the pool takes no pass of its own. Rounded values have windows of
/// several maxima, of zeros, and of nothing above zero.
#[test]
fn relu_behind_a_maximum_is_relu_before_it() {
    let (pool, shape) = (PoolParams { kernel: 2, stride: 2, padding: 0.into() }, [3, 6, 8, 20]);
    let x: Vec<f32> = values(1, shape.iter().product(), 1.5).iter().map(|x| x.round()).collect();
    let relu = |x: &Tensor| activation::forward(ActivationFn::Relu, x).unwrap();
    let back = |saved: &Tensor, dy: Tensor| activation::backward(ActivationFn::Relu, saved, dy).unwrap();
    for (device, dtype) in devices().iter().flat_map(|d| [(&d[1], DType::F32), (&d[1], DType::Bf16)]) {
        let x = tensor(device, dtype, &shape, &x);
        let dy = tensor(device, dtype, &[3, 3, 4, 20], &values(2, 720, 1.0));
        let before = relu(&x);
        let [(first, first_places), (largest, places), (fused, open)] =
            [(&before, false), (&x, false), (&x, true)].map(|(x, relu)| max_forward(x, pool, relu).unwrap());
        let last = relu(&largest);
        assert_eq!((first.to_f32(), fused.to_f32()), (last.to_f32(), last.to_f32()));
        let gradient = |dy: &Tensor, places: &Tensor| max_backward(dy, places, pool, &shape).unwrap();
        let dx = gradient(&back(&last, dy.clone()), &places).to_f32();
        assert_eq!(back(&before, gradient(&dy, &first_places)).to_f32(), dx);
        assert_eq!(gradient(&dy, &open).to_f32(), dx);
    }
}

/// By hand: of equal numbers the first, of NaNs the last, as PyTorch has it; padding is counted and never
/// chosen, not even by a window of minus infinities.
#[test]
fn places_are_numbers_within_the_window() {
    let (nan, low) = (f32::NAN, f32::NEG_INFINITY);
    let pool = PoolParams { kernel: 3, stride: 2, padding: Padding { top: 1, bottom: 0, left: 1, right: 0 } };
    let x = [low, low, -3.0, -2.0, low, low, -2.0, -2.0, 1.0, 1.0, 0.0, 3.0, 1.0, 0.0, nan, nan];
    for device in devices() {
        let x = tensor(&device[0], DType::F32, &[1, 4, 4, 1], &x);
        let places = |relu| max_forward(&x, pool, relu).unwrap().1.host_bytes().into_owned();
        assert_eq!(places(false), [4, 5, 4, 8]);
        assert_eq!(places(true), [NOWHERE, NOWHERE, 4, NOWHERE]);
    }
}

#[test]
fn the_plain_backwards_are_derivatives_of_the_plain_forwards() {
    let padding = Padding { top: 1, bottom: 0, left: 0, right: 1 };
    let windows = windows_of_pool([1, 5, 6, 2], PoolParams { kernel: 3, stride: 2, padding });
    let x = wide(&values(1, 60, 1.0));
    let dy = wide(&values(2, windows.len(), 1.0));
    let narrow = |x: Vec<f64>| x.into_iter().map(|x| x as f32).collect::<Vec<_>>();
    let numeric = gradient(&x, |x| dot(&plain_max(x, &windows), &dy));
    assert_close(&narrow(plain_max_backward(&dy, &x, &windows)), &numeric, 1e-6);
    let numeric = gradient(&x, |x| dot(&plain_mean(x, &windows), &dy));
    assert_close(&narrow(plain_mean_backward(&dy, x.len(), &windows)), &numeric, 1e-6);
}

#[test]
fn adaptive_windows_follow_pytorch() {
    assert_eq!(cover(7, 3), [0..3, 2..5, 4..7]);
    assert_eq!(cover(2, 4), [0..1, 0..1, 1..2, 1..2]);
}
