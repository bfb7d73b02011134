//! States in bf16: f32 arithmetic, then rounding by bits that depend on where an element stands in the full
//! tensor and on nothing else.

use super::super::rounding::{of_state, stochastic};
use super::*;
use crate::mask::ones;
use crate::ops::cast::cast;
use crate::ops::flat;
use crate::random::{bits, key};

const KEY: u64 = 0x5eed_0000_0000_0001;

impl TestParam {
    /// Its states, which are zeros, in bf16: those of all elements of a full tensor.
    fn narrow(mut self) -> TestParam {
        let narrow = |state: &Tensor| cast(state, DType::Bf16, Category::Optimizer).unwrap();
        self.states = self.states.iter().map(narrow).collect();
        let rounded = Rounded { key: KEY, kept_by: None, first: 0, positions: Positions::FULL };
        TestParam { rounded: Some(rounded), ..self }
    }
}

/// A copy with a memory of its own.
fn copy(layer: &TestParam) -> TestParam {
    let one = |tensor: &Tensor| tensor.duplicate(Category::Optimizer).unwrap();
    TestParam {
        weight: one(&layer.weight),
        master: layer.master.as_ref().map(one),
        states: layer.states.iter().map(one).collect(),
        rounded: layer.rounded.clone(),
        mask: layer.mask.clone(),
        ..*layer
    }
}

/// The same layer with states of as many bits as they are stepped in.
fn widened(layer: &TestParam) -> TestParam {
    let wide = copy(layer);
    let states = wide.states.iter().map(|state| cast(state, DType::F32, Category::Optimizer).unwrap());
    TestParam { states: states.collect(), rounded: None, ..wide }
}

/// What f32 states become when a step leaves them, given where their elements stand.
fn rounded(states: &[Tensor], step: u64, position: impl Fn(usize) -> usize) -> Vec<Vec<f32>> {
    let stream = key(KEY, step);
    let one = |(state, values): (usize, &Tensor)| {
        let round =
            |(i, x): (usize, f32)| stochastic(x, of_state(bits(stream, position(i) as u64), state)).to_f32();
        values.to_f32().into_iter().enumerate().map(round).collect()
    };
    states.iter().enumerate().map(one).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3))]

    /// On every device: the step is that of f32 states of the same values, and what it leaves is rounded by
    /// the same bits.
    #[test]
    fn a_step_is_one_in_f32_and_a_rounding_by_keyed_bits(n in 1usize..40_000, seed: u64, fraction in 0.0f64..1.0) {
        let (start, words) = (values(seed, n, 0.5), mask_words(seed, n, fraction));
        let kept: Vec<usize> = ones(&words).collect();
        let gradients = [1, 2].map(|number| (number, values(seed ^ number, n, 0.1)));
        for rule in RULES {
            for [device, ..] in devices() {
                for (master, dtype) in MASTERS {
                    let fresh = || TestParam::new(device, &rule, &start, master);
                    for (what, mut layer) in [
                        ("dense", fresh().narrow()),
                        ("compressed", fresh().masked(&words, true).narrow()),
                        ("masked", fresh().masked(&words, false).narrow()),
                    ] {
                        for &(number, ref gradient) in &gradients {
                            let mut gradient = tensor(device, dtype, &[n], gradient);
                            if what == "compressed" {
                                let mask = layer.mask.as_ref().unwrap();
                                gradient = compress(&gradient, mask, Category::Gradients).unwrap();
                            }
                            let mut wide = widened(&layer);
                            wide.step(rule, number, &gradient);
                            layer.step(rule, number, &gradient);
                            let expected = match what {
                                "compressed" => rounded(&wide.states, number, |i| kept[i]),
                                _ => rounded(&wide.states, number, |i| i),
                            };
                            let got: Vec<Vec<f32>> = layer.states.iter().map(Tensor::to_f32).collect();
                            prop_assert!(got == expected, "{}: {:?} {:?}", what, rule, master);
                            let exact = |layer: &TestParam| layer.bytes()[..layer.bytes().len() - layer.states.len()].to_vec();
                            prop_assert!(exact(&layer) == exact(&wide), "{}: {:?} {:?}", what, rule, master);
                        }
                    }
                }
            }
        }
    }

    /// Ranks that split the kept values, or have kept values alone, round as one that has the dense weight.
    #[test]
    fn shards_of_kept_values_are_rounded_as_the_dense_parameter(n in 1usize..60_000, seed: u64, fraction in 0.0f64..1.0) {
        let fraction = if seed.is_multiple_of(3) { fraction / 40.0 } else { fraction };
        let (start, words) = (values(seed, n, 0.5), mask_words(seed, n, fraction));
        let gradients = [1, 2].map(|number| values(seed ^ number, n, 0.1));
        for rule in RULES.into_iter().filter(|rule| !rule.adapts() && rule.states() > 0) {
            for [device, ..] in devices() {
                for (master, dtype) in MASTERS {
                    let mut dense = TestParam::new(device, &rule, &start, master).masked(&words, true).narrow();
                    let mut packed = copy(&dense).packed();
                    let mask = dense.mask.clone().unwrap();
                    let values_of = |weight: &Tensor| compress(weight, &mask, Category::Weights).unwrap();
                    let kept = mask.kept();
                    let mut halves: Vec<TestParam> = [0..kept / 3, kept / 3..kept].map(|at| {
                        let range = |tensor: &Tensor| flat::take(tensor, at.clone(), Category::Optimizer).unwrap();
                        TestParam {
                            weight: range(&values_of(&dense.weight)),
                            master: dense.master.as_ref().map(range),
                            states: dense.states.iter().map(range).collect(),
                            rounded: dense.rounded.clone().map(|one| Rounded {
                                kept_by: Some(mask.clone()), first: at.start, ..one
                            }),
                            mask: None,
                            ..dense
                        }
                    }).into();
                    for number in 1..3 {
                        let gradient = tensor(device, dtype, &[n], &gradients[number as usize - 1]);
                        let gradient = compress(&gradient, &mask, Category::Gradients).unwrap();
                        dense.step(rule, number, &gradient);
                        packed.step(rule, number, &gradient);
                        for (range, at) in halves.iter_mut().zip([0..kept / 3, kept / 3..kept]) {
                            if !at.is_empty() {
                                range.step(rule, number, &flat::take(&gradient, at, Category::Gradients).unwrap());
                            }
                        }
                    }
                    prop_assert!(dense.bytes() == packed.bytes(), "{:?}: kept values alone", rule);
                    let together = |of: &dyn Fn(&TestParam) -> Vec<u8>| [of(&halves[0]), of(&halves[1])].concat();
                    prop_assert!(values_of(&dense.weight).host_bytes() == together(&|one| one.weight.host_bytes().into_owned()));
                    for i in 0..rule.states() {
                        prop_assert!(dense.states[i].host_bytes() == together(&|one| one.states[i].host_bytes().into_owned()), "{:?}", rule);
                    }
                }
            }
        }
    }
}

/// Columns of a matrix: those of some queries, fewer keys and fewer values, on two ranks that split them, and
/// slices of such a shard.
#[test]
fn shards_are_rounded_as_the_full_tensor() {
    let (rows, width) = (70, 40);
    let rule = RULES[4];
    // Where the columns 0 to 24, 24 to 32 and 32 to 40 are queries, keys and values.
    let shards = [[0..12, 24..28, 32..36], [12..24, 28..32, 36..40]];
    for [device, ..] in devices() {
        let gradient = |number| values(number, rows * width, 0.1);
        let start = values(9, rows * width, 0.5);
        let mut full = TestParam::new(device, &rule, &start, TestMaster::Itself).narrow();
        for number in 1..4 {
            full.step(rule, number, &tensor(device, DType::F32, &[rows * width], &gradient(number)));
        }
        for columns in &shards {
            let of = |all: &[f32]| -> Vec<f32> {
                let row = |row: &[f32]| {
                    columns.iter().flat_map(|at| row[at.clone()].to_vec()).collect::<Vec<f32>>()
                };
                all.chunks(width).flat_map(row).collect()
            };
            let mut end = 0;
            let ranges = columns.clone().map(|at| {
                let shift = at.start - end;
                end += at.len();
                (end as u64, shift as u64)
            });
            let positions = Positions { row: end as u64, full_row: width as u64, ranges };
            let len = rows * end;
            for at in [0..len, 0..len / 3, len / 3..len] {
                let mut shard =
                    TestParam::new(device, &rule, &of(&start)[at.clone()], TestMaster::Itself).narrow();
                shard.rounded = Some(Rounded { key: KEY, kept_by: None, first: at.start, positions });
                for number in 1..4 {
                    let gradient = &of(&gradient(number))[at.clone()];
                    shard.step(rule, number, &tensor(device, DType::F32, &[at.len()], gradient));
                }
                assert_eq!(shard.weight.to_f32(), of(&full.weight.to_f32())[at.clone()]);
                for (shard, full) in shard.states.iter().zip(&full.states) {
                    assert_eq!(shard.to_f32(), of(&full.to_f32())[at.clone()]);
                }
            }
        }
    }
}

/// A mean square that should halve stands still when it is rounded to the nearest, and falls as it should on
/// average.
#[test]
fn a_mean_square_that_is_rounded_at_random_follows_the_exact_one() {
    let n = 4096;
    let rule = UpdateRule::Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8, decoupled: true };
    for [device, ..] in devices() {
        let mut layer = TestParam::new(device, &rule, &vec![0.0; n], TestMaster::Itself).narrow();
        layer.states[1] = tensor(device, DType::Bf16, &[n], &vec![1.0; n]);
        let none = tensor(device, DType::F32, &[n], &vec![0.0; n]);
        for number in 1..694 {
            layer.step(rule, number, &none);
        }
        let mean = layer.states[1].to_f32().iter().map(|x| f64::from(*x)).sum::<f64>() / n as f64;
        assert!((mean - 0.5).abs() < 0.005, "{mean}");
        assert_eq!(nearest(0.999).to_f32(), 1.0, "to the nearest it never moves");
    }
}
