//! Attention against plain loops with the whole matrix of scores.

use proptest::prelude::*;

use super::scores::{KEYS, QUERIES};
use super::*;
use crate::dtype::DType;
use crate::testing::{assert_close, devices, dot, gradient, indices, tensor, values, wide};

/// `(y, logsumexp)` with the whole matrix of scores.
pub(in crate::ops) fn plain_forward(
    qkv: &[f64],
    positions: &[u32],
    z: &AttentionDims,
) -> (Vec<f64>, Vec<f64>) {
    let (mut y, mut logsumexp) = (vec![0.0; z.batch * z.t * z.c], vec![0.0; z.tasks() * z.t]);
    for task in 0..z.tasks() {
        for i in 0..z.t {
            let start = start(positions, z, task, i);
            let p = plain_scores(qkv, z, task, i, start);
            let total = p.iter().map(|s| s.exp()).sum::<f64>().ln();
            logsumexp[task * z.t + i] = total;
            for (j, s) in (start..).zip(&p) {
                let (p, value) = ((s - total).exp(), z.qkv_rows(task, j)[2]);
                for l in 0..z.d {
                    y[z.row(task, i) + l] += p * qkv[value + l];
                }
            }
        }
    }
    (y, logsumexp)
}

/// A query's scores of the keys it sees.
fn plain_scores(qkv: &[f64], z: &AttentionDims, task: usize, i: usize, start: usize) -> Vec<f64> {
    let at = |j: usize, which: usize| &qkv[z.qkv_rows(task, j)[which]..][..z.d];
    (start..=i).map(|j| dot(at(i, 0), at(j, 1)) / (z.d as f64).sqrt()).collect()
}

/// The first key of a query's document; without positions a sequence is one.
fn start(positions: &[u32], z: &AttentionDims, task: usize, i: usize) -> usize {
    positions.get(task / z.heads * z.t + i).map_or(0, |position| i - *position as usize)
}

/// Documents of some lengths, over and over, another phase in each sequence.
fn documents(lengths: &[usize], z: &AttentionDims) -> Vec<u32> {
    let sequence = |number: usize| {
        let lengths = lengths.iter().cycle().skip(number);
        lengths.flat_map(|length| 0..*length as u32).take(z.t).collect::<Vec<_>>()
    };
    (0..z.batch).flat_map(sequence).collect()
}

fn plain_backward(dy: &[f64], qkv: &[f64], positions: &[u32], z: &AttentionDims) -> Vec<f64> {
    let mut dqkv = vec![0.0; qkv.len()];
    for task in 0..z.tasks() {
        let at = |j: usize, which: usize| z.qkv_rows(task, j)[which];
        for i in 0..z.t {
            let dy = &dy[z.row(task, i)..][..z.d];
            let start = start(positions, z, task, i);
            let scores = plain_scores(qkv, z, task, i, start);
            let total = scores.iter().map(|s| s.exp()).sum::<f64>();
            let p: Vec<f64> = scores.iter().map(|s| s.exp() / total).collect();
            let dp: Vec<f64> = (start..=i).map(|j| dot(dy, &qkv[at(j, 2)..][..z.d])).collect();
            let inner = dot(&p, &dp);
            for j in start..=i {
                let (p, dp) = (p[j - start], dp[j - start]);
                let ds = p * (dp - inner) / (z.d as f64).sqrt();
                let [query, key, value] = [at(i, 0), at(j, 1), at(j, 2)];
                for l in 0..z.d {
                    dqkv[query + l] += ds * qkv[key + l];
                    dqkv[key + l] += ds * qkv[query + l];
                    dqkv[value + l] += p * dy[l];
                }
            }
        }
    }
    dqkv
}

fn sizes(batch: usize, t: usize, heads: usize, d: usize) -> AttentionDims {
    grouped(batch, t, heads, heads, d)
}

pub(in crate::ops) fn grouped(
    batch: usize,
    t: usize,
    heads: usize,
    kv_heads: usize,
    d: usize,
) -> AttentionDims {
    AttentionDims { batch, t, c: heads * d, heads, kv_heads, d, scale: 1.0 / (d as f32).sqrt() }
}

/// Both passes against the plain loops, everywhere. The gradient in bf16 may be off by a 48th of its largest
/// element: y, the probabilities and ds are rounded on the way to it (heads of two numbers have been seen
/// 2^-5.98 off).
fn compare(z: &AttentionDims, seed: u64) {
    compare_within(z, &[], seed);
}

/// The same within documents.
fn compare_within(z: &AttentionDims, positions: &[u32], seed: u64) {
    let shape = [z.batch, z.t, z.width()];
    let qkv = values(seed, shape.iter().product(), 1.5);
    let dy = values(seed + 1, z.batch * z.t * z.c, 1.0);
    let (y, logsumexp) = plain_forward(&wide(&qkv), positions, z);
    let dqkv = plain_backward(&wide(&dy), &wide(&qkv), positions, z);
    let run = |device: &Device, dtype| {
        let qkv = tensor(device, dtype, &shape, &qkv);
        let dy = tensor(device, dtype, &[z.batch, z.t, z.c], &dy);
        let positions = (!positions.is_empty()).then(|| indices(device, &[z.batch, z.t], positions));
        let (y, logsumexp) = forward_within(&qkv, positions.as_ref(), z.heads, z.kv_heads).unwrap();
        let dqkv =
            backward_within(&dy, &qkv, &y, &logsumexp, positions.as_ref(), z.heads, z.kv_heads).unwrap();
        [y, logsumexp, dqkv]
    };
    for (dtype, of_forward, of_gradient) in [(DType::F32, 5e-5, 5e-5), (DType::Bf16, 1.0 / 128.0, 1.0 / 48.0)]
    {
        for threads in devices() {
            let [one, two, three] = threads.each_ref().map(|device| run(device, dtype));
            for (i, x) in one.iter().enumerate() {
                let alike = [&two, &three].map(|other| x.host_bytes() == other[i].host_bytes());
                assert!(alike == [true; 2], "bits on more threads, output {i}");
            }
            let [got_y, got_logsumexp, got_dqkv] = one;
            assert_close(&got_y.to_f32(), &y, of_forward);
            assert_close(&got_logsumexp.to_f32(), &logsumexp, 5e-5);
            assert_close(&got_dqkv.to_f32(), &dqkv, of_gradient);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn both_passes_agree_with_plain_loops(
        (batch, t, heads, d) in (1usize..4, 1usize..90, 1usize..4, 1usize..40),
        seed in 0u64..1000,
    ) {
        compare(&sizes(batch, t, heads, d), seed);
    }
}

#[test]
fn sequences_longer_than_a_block_agree_with_plain_loops() {
    for (t, d) in [(KEYS + 1, 8), (QUERIES, 16), (2 * KEYS + QUERIES + 3, 64)] {
        compare(&sizes(1, t, 2, d), 3);
    }
}

/// A GPU has kernels of their own for the first five; 256 is the largest that it takes.
#[test]
fn usual_head_sizes_agree_with_plain_loops() {
    for d in [32, 64, 80, 96, 128, 160, 256] {
        compare(&sizes(1, 150, 2, d), 5);
    }
}

/// Heads of keys and values that serve several heads of queries, one of them all; head sizes with kernels of
/// their own on a GPU, in both forms of the backward one, and without.
#[test]
fn grouped_queries_agree_with_plain_loops() {
    for (heads, kv_heads, d) in [(4, 2, 32), (6, 2, 64), (4, 1, 128), (2, 1, 80), (6, 3, 24)] {
        compare(&grouped(2, 70, heads, kv_heads, d), 7);
    }
}

/// Documents of one token and of many, within a block and over several, in both forms of a GPU's backward pass
/// over keys (heads above 64 have their own) and in its plain kernels. The long form has every shape with every
/// list of lengths.
#[test]
fn documents_see_themselves_alone() {
    const SINGLE: &[usize] = &[1];
    const SHORT: &[usize] = &[5, 1, 64, 90, 2];
    const LONG: &[usize] = &[130, 200];
    const WHOLE: &[usize] = &[1000];
    for (z, lengths) in [
        (grouped(2, 97, 2, 2, 24), SINGLE),
        (grouped(2, 150, 2, 2, 64), SHORT),
        (grouped(2, 333, 2, 1, 32), WHOLE),
        (grouped(1, 200, 4, 2, 128), SHORT),
        (grouped(1, 700, 1, 1, 80), LONG),
    ] {
        let lists = if espalier_testing::long() { vec![SINGLE, SHORT, LONG, WHOLE] } else { vec![lengths] };
        for lengths in lists {
            compare_within(&z, &documents(lengths, &z), 11);
        }
    }
}

/// A document's outputs and gradients do not change with its neighbours: to the bit, where it lies at the same
/// place.
#[test]
fn neighbours_do_not_matter() {
    let z = sizes(1, 100, 2, 32);
    let shape = [1, z.t, z.width()];
    let positions: Vec<u32> = (0..40).chain(0..35).chain(0..25).collect();
    let (qkv, other) = (values(1, shape.iter().product(), 1.5), values(2, shape.iter().product(), 1.5));
    let (dy, other_dy) = (values(3, z.t * z.c, 1.0), values(4, z.t * z.c, 1.0));
    let mix = |a: &[f32], b: &[f32], width: usize| -> Vec<f32> {
        let own = 40 * width..75 * width;
        (0..a.len()).map(|i| if own.contains(&i) { a[i] } else { b[i] }).collect()
    };
    for [device, ..] in devices() {
        for dtype in [DType::F32, DType::Bf16] {
            let run = |qkv: &[f32], dy: &[f32]| {
                let qkv = tensor(device, dtype, &shape, qkv);
                let dy = tensor(device, dtype, &[1, z.t, z.c], dy);
                let positions = indices(device, &[1, z.t], &positions);
                let (y, logsumexp) = forward_within(&qkv, Some(&positions), 2, 2).unwrap();
                let dqkv = backward_within(&dy, &qkv, &y, &logsumexp, Some(&positions), 2, 2).unwrap();
                [
                    y.to_f32()[40 * z.c..75 * z.c].to_vec(),
                    dqkv.to_f32()[40 * z.width()..75 * z.width()].to_vec(),
                ]
            };
            assert_eq!(run(&qkv, &dy), run(&mix(&qkv, &other, z.width()), &mix(&dy, &other_dy, z.c)));
        }
    }
}

#[test]
fn large_scores_do_not_overflow() {
    let device = Device::cpu(1).unwrap();
    let qkv = tensor(&device, DType::F32, &[1, 70, 24], &values(1, 70 * 24, 60.0));
    let (y, logsumexp) = forward(&qkv, 2, 2).unwrap();
    let dqkv = backward(&y, &qkv, &y, &logsumexp, 2, 2).unwrap();
    assert!(y.to_f32().iter().chain(&dqkv.to_f32()).all(|x| x.is_finite()));
}

#[test]
fn the_plain_backward_is_the_derivative_of_the_plain_forward() {
    for z in [sizes(1, 4, 2, 3), grouped(1, 4, 4, 2, 3)] {
        let columns = z.width();
        let (qkv, dy) = (wide(&values(1, 4 * columns, 1.0)), wide(&values(2, 4 * z.c, 1.0)));
        for positions in [&[][..], &[0, 1, 0, 1]] {
            let dqkv: Vec<f32> =
                plain_backward(&dy, &qkv, positions, &z).into_iter().map(|x| x as f32).collect();
            let loss = |qkv: &[f64]| dot(&plain_forward(qkv, positions, &z).0, &dy);
            assert_close(&dqkv, &gradient(&qkv, loss), 1e-6);
        }
    }
}
