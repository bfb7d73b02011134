//! Every instruction set, transposition and edge against a plain sum in f64, and the same bits on any threads.
//!
//! Tolerance: an f32 sum of k products in any order is within k units of 2^-23 of the sum of magnitudes, and a
//! result rounded to bf16 within 2^-8 of itself.

use proptest::prelude::*;

use super::*;
use crate::bf16;
use crate::cpu::Isa;
use crate::dtype::DType;
use crate::random;

/// `rows` x `cols` numbers in a matrix that is wider than they are, so that every stride is exercised.
struct StoredMatrix<T> {
    data: Vec<T>,
    stride: usize,
    transposed: bool,
}

impl<T: Float> StoredMatrix<T> {
    fn new(rows: usize, cols: usize, transposed: bool, extra: usize, stream: u64) -> StoredMatrix<T> {
        let (lines, width) = if transposed { (cols, rows) } else { (rows, cols) };
        let stride = width + extra;
        let key = random::key(11, stream);
        // What lies between the lines must never be read as a number.
        let at = |i: usize| match i % stride < width {
            true => random::uniform(key, i as u64) as f32 - 0.4,
            false => f32::NAN,
        };
        let data = (0..lines * stride - extra).map(|i| T::from_f32(at(i))).collect();
        StoredMatrix { data, stride, transposed }
    }

    fn view(&self) -> MatrixRef<'_, T> {
        MatrixRef::of(&self.data, self.stride, self.transposed)
    }

    fn at(&self, i: usize, j: usize) -> f64 {
        let v = self.view();
        f64::from(v.data[i * v.row_stride + j * v.col_stride].to_f32())
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct GemmCase {
    m: usize,
    n: usize,
    k: usize,
    ta: bool,
    tb: bool,
    extra: usize,
    accumulate: bool,
    bias: bool,
    activation: Option<ActivationFn>,
}

/// Leave for one product on this thread.
fn workspace<T: Float>(isa: Isa, m: usize, n: usize, k: usize) -> GemmWorkspace {
    GemmWorkspace::new::<T>(&Cpu::with_isa(1, isa).unwrap(), 1, &[(m, n, k)])
}

fn close<O: Float>(got: O, exact: f64, magnitude: f64, k: usize) -> bool {
    let rounding = if O::DTYPE == DType::Bf16 { exact.abs() / 256.0 } else { 0.0 };
    (f64::from(got.to_f32()) - exact).abs() <= rounding + (k as f64 + 8.0) * magnitude / 8_388_608.0 + 1e-6
}

/// Runs a case; with `compare`, holds all of it against the reference. Returns what was computed.
fn run<T: Float, O: Float>(cpu: Option<&Cpu>, isa: Isa, case: GemmCase, compare: bool) -> Vec<O> {
    let GemmCase { m, n, k, ta, tb, extra, accumulate, bias, activation } = case;
    let (a, b) = (StoredMatrix::<T>::new(m, k, ta, extra, 1), StoredMatrix::<T>::new(k, n, tb, extra, 2));
    let row = StoredMatrix::<T>::new(1, n, false, 0, 3);
    let stride = n + extra;
    let before: Vec<O> = (0..m * stride).map(|i| O::from_f32((i % 7) as f32 - 3.0)).collect();
    let (mut c, mut pre) = (before.clone(), before.clone());
    let out = MatrixMut { data: &mut c[..m * stride - extra], row_stride: stride };
    match cpu {
        None => serial(&workspace::<T>(isa, m, n, k), [m, n, k], a.view(), b.view(), out, accumulate),
        Some(cpu) => {
            let kept = MatrixMut { data: &mut pre, row_stride: stride };
            let epilogue = GemmEpilogue {
                bias: bias.then_some(&row.data[..]),
                activation,
                pre: activation.is_some().then_some(kept),
            };
            parallel(cpu, [m, n, k], a.view(), b.view(), out, accumulate, epilogue);
        }
    }
    let b: Vec<f64> = (0..if compare { k * n } else { 0 }).map(|at| b.at(at / n, at % n)).collect();
    for i in 0..if compare { m } else { 0 } {
        // All columns at once, for the compiler's vectors.
        let (mut sums, mut magnitudes) = (vec![0.0; n], vec![0.0; n]);
        for (p, b) in b.chunks(n).enumerate() {
            let a = a.at(i, p);
            sums.iter_mut().zip(b).for_each(|(sum, b)| *sum += a * b);
            magnitudes.iter_mut().zip(b).for_each(|(sum, b)| *sum += (a * b).abs());
        }
        for j in 0..stride {
            let at = i * stride + j;
            if j >= n {
                assert_eq!(c[at], before[at], "wrote beside the matrix at {i}, {j}: {case:?}");
                continue;
            }
            let (mut sum, mut magnitude) = (sums[j], magnitudes[j]);
            for (wanted, x) in [(accumulate, before[at].to_f32()), (bias, row.data[j].to_f32())] {
                if wanted {
                    sum += f64::from(x);
                    magnitude += f64::from(x).abs();
                }
            }
            let sum_in = if activation.is_some() { pre[at] } else { c[at] };
            assert!(close(sum_in, sum, magnitude, k), "{isa:?} {case:?} ({i}, {j}): {sum_in:?}, not {sum}");
            if let Some(activation) = activation {
                // Vector code may fuse what scalar code does not: a few units in the last place.
                let exact = f64::from(activation.apply(pre[at].to_f32()));
                assert!(close(c[at], exact, exact.abs(), 8), "{activation:?} of {sum_in:?}: {:?}", c[at]);
            }
        }
    }
    c
}

fn check<T: Float, O: Float>(cpu: Option<&Cpu>, isa: Isa, case: GemmCase) {
    run::<T, O>(cpu, isa, case, true);
}

#[test]
fn every_instruction_set_and_transposition_at_the_edges_of_tiles() {
    let sizes =
        [(1, 1, 1), (15, 17, 33), (17, 33, 129), (33, 15, 1), (129, 129, 17), (64, 64, 64), (16, 32, 32)];
    for isa in Isa::available() {
        for (m, n, k) in sizes {
            for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
                for (extra, accumulate) in [(0, false), (5, true)] {
                    let case = GemmCase { m, n, k, ta, tb, extra, accumulate, ..GemmCase::default() };
                    check::<f32, f32>(None, isa, case);
                    check::<bf16, bf16>(None, isa, case);
                    check::<bf16, f32>(None, isa, case);
                    check::<f32, bf16>(None, isa, case);
                }
            }
        }
    }
}

#[test]
fn depths_beyond_one_pass_and_one_slab() {
    for isa in Isa::available() {
        for k in [513, 1100, 2049, 5000] {
            let case = GemmCase { m: 37, n: 50, k, tb: true, accumulate: true, ..GemmCase::default() };
            check::<f32, f32>(None, isa, case);
            check::<bf16, bf16>(None, isa, case);
            check::<bf16, f32>(None, isa, case);
        }
    }
}

#[test]
fn a_product_of_no_depth_is_zero() {
    for isa in Isa::available() {
        let mut c = [7.0f32; 6];
        let nothing = MatrixRef { data: &[] as &[bf16], row_stride: 0, col_stride: 1 };
        serial(
            &workspace::<bf16>(isa, 2, 3, 0),
            [2, 3, 0],
            nothing,
            nothing,
            MatrixMut { data: &mut c, row_stride: 3 },
            false,
        );
        assert_eq!(c, [0.0; 6]);
    }
}

#[test]
fn strides_that_are_contiguous_in_neither_direction() {
    for isa in Isa::available() {
        let a = StoredMatrix::<bf16>::new(40, 80, false, 0, 1);
        let mut c = vec![0.0f32; 20 * 20];
        // Every second row and column of `a`, times itself transposed.
        let (left, right) = (
            MatrixRef { data: &a.data, row_stride: 160, col_stride: 2 },
            MatrixRef { data: &a.data, row_stride: 2, col_stride: 160 },
        );
        serial(
            &workspace::<bf16>(isa, 20, 20, 40),
            [20, 20, 40],
            left,
            right,
            MatrixMut { data: &mut c, row_stride: 20 },
            false,
        );
        for i in 0..20 {
            for j in 0..20 {
                let exact: f64 = (0..40).map(|p| a.at(2 * i, 2 * p) * a.at(2 * j, 2 * p)).sum();
                assert!(close(c[i * 20 + j], exact, 20.0, 40), "{isa:?} {i} {j}");
            }
        }
    }
}

/// Blocks, shared columns, cut depths and epilogues, on one, two and three threads.
#[test]
fn threads_do_not_change_the_bits() {
    let cases = [
        (130, 700, 600, false, false),
        (300, 70, 1030, true, false),
        (130, 1100, 70, false, true),
        (25, 16, 9000, true, false),
        (1, 515, 2100, false, false),
    ];
    for isa in Isa::available() {
        let cpus = [1, 2, 3].map(|threads| Cpu::with_isa(threads, isa).unwrap());
        for (number, (m, n, k, ta, tb)) in cases.into_iter().enumerate() {
            for activation in [None, Some(ActivationFn::Gelu)] {
                // What is cut and what is done to a finished sum know nothing of each other: one of each is
                // enough.
                if !espalier_testing::long() && activation.is_some() != (number % 2 == 1) {
                    continue;
                }
                let bias = activation.is_some();
                let case = GemmCase { m, n, k, ta, tb, activation, bias, ..GemmCase::default() };
                let f32s =
                    cpus.each_ref().map(|cpu| run::<f32, f32>(Some(cpu), isa, case, cpu.threads() == 2));
                let halves =
                    cpus.each_ref().map(|cpu| run::<bf16, bf16>(Some(cpu), isa, case, cpu.threads() == 2));
                assert!(f32s[0] == f32s[1] && f32s[0] == f32s[2], "{isa:?} {case:?}");
                assert!(halves[0] == halves[1] && halves[0] == halves[2], "{isa:?} {case:?}");
            }
        }
    }
}

/// A bf16 result so large that it is streamed past the caches.
#[test]
fn large_results_are_streamed_whole() {
    for isa in Isa::available() {
        let cpu = Cpu::with_isa(2, isa).unwrap();
        for n in [1024, 1056, 1030] {
            check::<bf16, bf16>(Some(&cpu), isa, GemmCase { m: 1050, n, k: 3, ..GemmCase::default() });
        }
    }
}

/// Every byte is counted, those of packing too: what is counted is at most what the sizes say (16 MiB or 512
/// columns of `b`, partial sums where `k` is cut, and for each thread 1 MiB of `a`, rounded up to tiles and
/// to at least 64 rows, and its sums), and gone afterwards.
#[test]
fn packing_is_counted_and_bounded() {
    // The second has more of `a` than a thread packs at once, the third more of `b` than all of them do.
    let sizes =
        [(300, 700, 600), (300, 40, 1024), (9, 4200, 1024), (40, 30, 9000), (8, 8, 8), (20, 900, 5000)];
    for (m, n, k) in sizes {
        let (a, b) =
            (StoredMatrix::<f32>::new(m, k, true, 0, 1), StoredMatrix::<f32>::new(k, n, false, 0, 2));
        let mut c = vec![0.0f32; m * n];
        for isa in Isa::available() {
            for threads in [1, 2, 3] {
                let cpu = Cpu::with_isa(threads, isa).unwrap();
                let out = MatrixMut { data: &mut c, row_stride: n };
                parallel(&cpu, [m, n, k], a.view(), b.view(), out, false, GemmEpilogue::none());
                let peak = cpu.ledger().peak(Category::Workspace);
                let panels = (4 * n.next_multiple_of(32) * k).min((16 << 20).max(4 * 512 * k));
                let partial = if k >= 8192 && m * n <= 1 << 16 { 4 * m * n * k.div_ceil(4096) } else { 0 };
                let block = (1 << 20) + 64 * 64 * 1024 + 2 * 4 * 1024 * (512 + 32 + 16);
                let bound = partial + if partial > 0 { threads * panels } else { panels } + threads * block;
                assert!(peak <= bound, "{isa:?} {threads} {m} {n} {k}: {peak} of {bound}");
                assert!(peak >= (4 * n * k).min(16 << 20) / k.div_ceil(4096), "panels at least: {peak}");
                assert_eq!(cpu.ledger().total(), 0, "{isa:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_product_agrees_with_the_reference(
        (m, n, k) in (1usize..100, 1usize..100, 1usize..600),
        (ta, tb, accumulate, bias) in any::<(bool, bool, bool, bool)>(),
        extra in 0usize..9,
        which in 0usize..4,
    ) {
        let activation = [None, Some(ActivationFn::Relu), Some(ActivationFn::Gelu), Some(ActivationFn::Silu)][which];
        let case = GemmCase { m, n, k, ta, tb, extra, accumulate, bias, activation };
        for isa in Isa::available() {
            let cpu = Cpu::with_isa(2, isa).unwrap();
            check::<f32, f32>(Some(&cpu), isa, case);
            check::<bf16, bf16>(Some(&cpu), isa, case);
        }
    }
}
