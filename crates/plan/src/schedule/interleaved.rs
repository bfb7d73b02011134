//! Interleaved 1F1B (Narayanan et al., 2021): the pipeline goes v times round the ranks, so that it fills v
//! times as fast: chunk c of rank s is virtual stage c p + s of the model.
//!
//! Micro-batches go in groups of p: a rank runs a group through its first chunk, then through its second, and
//! so on. Rank s runs 2 (p - 1 - s) + (v - 1) p forwards ahead, then a forward and a backward in turn. The
//! bubble is (p - 1) / (v m) of the ideal time, at the price of v times the messages and of more chunks in
//! flight.

use super::action::PassTask;
use super::{Pass, Placement, Schedule, ScheduleError, ScheduleName, ScheduleOptions};

pub(super) fn schedule(options: &ScheduleOptions) -> Result<Schedule, ScheduleError> {
    let &ScheduleOptions { stages, micro_batches, chunks, .. } = options;
    let chunks = chunks.unwrap_or(2);
    let refuse = |expected, got| {
        Err(ScheduleError::Options { name: ScheduleName::Interleaved.as_str(), expected, got })
    };
    if chunks < 2 {
        return refuse("at least 2 chunks a rank (with 1 it is 1f1b)".into(), chunks.to_string());
    }
    if !micro_batches.is_multiple_of(stages) {
        let expected = format!("micro-batches in a multiple of the {stages} stages");
        return refuse(expected, micro_batches.to_string());
    }
    let all = micro_batches * chunks;
    let order = |stage: usize| {
        let ahead = (2 * (stages - 1 - stage) + (chunks - 1) * stages).min(all);
        let mut order: Vec<PassTask> = (0..ahead).map(|k| forward(stages, chunks, k)).collect();
        for k in 0..all {
            order.extend((k + ahead < all).then(|| forward(stages, chunks, k + ahead)));
            order.push(backward(stages, chunks, k));
        }
        order
    };
    let placement = Placement::round_robin(stages, chunks, micro_batches);
    Ok(Schedule::flushed(ScheduleName::Interleaved, options, placement, (0..stages).map(order).collect()))
}

/// The k-th forward of every rank.
fn forward(stages: usize, chunks: usize, k: usize) -> PassTask {
    let (group, within) = (k / (stages * chunks), k % (stages * chunks));
    PassTask::new(Pass::Forward, group * stages + within % stages, within / stages)
}

/// The k-th backward: the same with the chunks from last to first.
fn backward(stages: usize, chunks: usize, k: usize) -> PassTask {
    let mirrored = forward(stages, chunks, k);
    PassTask::new(Pass::Backward, mirrored.micro_batch, chunks - 1 - mirrored.chunk)
}
