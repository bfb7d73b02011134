//! Scores that ranks split: the masks of one rank, but where scores are nearly equal.

use std::collections::BTreeMap;

use espalier_nn::weights::ParameterId;
use espalier_train::prune::{count, differing};

use super::bench::least_memory;
use crate::support::{Base, on_every_rank, planned, tiny_cnn, tiny_gpt};

/// The masks after some steps, and the loss of the last one.
fn masks(base: &Base, ranks: usize, steps: usize) -> (Vec<Vec<u32>>, f64) {
    let base = base.replicas(ranks).set(format!("train.steps={}", 4 * steps));
    let mut all = on_every_rank(&base, |mut trainer| {
        let mut loss = 0.0;
        for _ in 0..steps {
            loss = trainer.step()?.loss;
        }
        Ok((trainer.params().masks().map(|(_, mask)| mask.words()).collect(), loss))
    });
    all.remove(0)
}

#[test]
fn scores_of_all_ranks_are_those_of_one() {
    let gpt = tiny_gpt("train.batch=24 model.dropout=0.2 optimizer.name=sgd learning_rate.peak=0.1");
    let cnn = tiny_cnn("train.batch=24 model.layers.1.type=relu");
    for (kind, base) in [("gpt", gpt), ("cnn", cnn)] {
        let base = base.set("prune.sparsity=0.7");
        for (method, base, steps) in [
            ("snip", base.set("prune.method=snip prune.samples=37"), 1),
            ("few", base.set("prune.method=snip prune.samples=5"), 1),
            ("grasp", base.set("prune.method=grasp prune.samples=30"), 1),
            ("rigl", base.set("prune.method=rigl prune.every=1"), 4),
        ] {
            let (one, loss) = masks(&base, 1, steps);
            let all: usize = one.iter().map(|words| words.len() * 32).sum();
            let other_samples = match method {
                "rigl" => masks(&base.set("seed=9"), 1, steps).0,
                _ => masks(&base.set("prune.samples=12"), 1, steps).0,
            };
            let far = |other: &[Vec<u32>]| {
                one.iter().zip(other).map(|(a, b)| differing(a, b)).sum::<usize>() as f64 / all as f64
            };
            assert!(far(&other_samples) > 0.01, "{kind} {method}: samples matter");
            for ranks in [2, 3, 8] {
                let (many, near) = masks(&base, ranks, steps);
                for (a, b) in one.iter().zip(&many) {
                    // Ties of one threshold over all layers may be broken in another.
                    assert!(count(a).abs_diff(count(b)) <= 2, "{kind} {method} on {ranks} ranks");
                }
                let counts = |masks: &[Vec<u32>]| masks.iter().map(|words| count(words)).sum::<usize>();
                assert_eq!(counts(&one), counts(&many), "{kind} {method} on {ranks} ranks");
                assert!(far(&many) < 2e-3, "{kind} {method}: {} differs on {ranks} ranks", far(&many));
                assert!(
                    (loss - near).abs() < 1e-3 * loss,
                    "{kind} {method}: {loss}, {near} on {ranks} ranks"
                );
            }
        }
    }
}

/// Batch norms see the groups of samples that they see on one rank, however replicas split them: also a last
/// group of fewer samples than there are ranks, groups of a size that is asked for, and ghost groups, full
/// and not.
#[test]
fn scores_behind_batch_norms_are_those_of_one_rank() {
    let cnn = tiny_cnn("train.batch=24 model.layers.2.type=gelu prune.sparsity=0.7");
    let synchronised = "parallel.batch_norm=synchronised";
    for (what, fields, more) in [
        ("snip", "prune.method=snip prune.samples=37", ""),
        ("snip, few", "prune.method=snip prune.samples=27", ""),
        ("snip, eleven", "prune.method=snip prune.samples=37 prune.score_batch=11", ""),
        ("snip, ghosts", "prune.method=snip prune.samples=37 train.batch_norm_group=3", ""),
        ("grasp", "prune.method=grasp prune.samples=30", ""),
        ("snip, synchronised", "prune.method=snip prune.samples=37", synchronised),
        ("rigl", "prune.method=rigl prune.every=1 learning_rate.peak=0.001", synchronised),
    ] {
        let steps = if what == "rigl" { 3 } else { 1 };
        let base = cnn.set(fields);
        let (one, _) = masks(&base, 1, steps);
        let kept: usize = one.iter().map(|words| count(words)).sum();
        let many = base.set(more);
        for ranks in [2, 4, 8] {
            let (many, _) = masks(&many, ranks, steps);
            let apart: usize = one.iter().zip(&many).map(|(a, b)| differing(a, b)).sum();
            // Two positions for each whose score rounds to the other side of the threshold; GraSP's are
            // differences of gradients.
            let most = if what == "grasp" { kept / 100 } else { 2 };
            assert!(apart <= most, "{what}: {apart} places of {kept} differ on {ranks} ranks");
        }
    }
}

/// The masks that ranks on two axes choose before the first step, by parameter, with as much memory as they
/// want or as little as they can; and in how many passes.
fn masks_within(
    base: &Base,
    data: usize,
    stages: usize,
    little: bool,
) -> (BTreeMap<ParameterId, Vec<u32>>, usize) {
    let mut base = base.set(format!("parallel.data={data}"));
    if stages > 1 {
        base = base.set(format!("parallel.pipeline={stages} train.micro_batches=2"));
    }
    let plan = planned(&base);
    let all = on_every_rank(&base, |mut trainer| {
        if little {
            trainer.limit_memory(least_memory(&plan));
        }
        trainer.prune()?;
        let passes = trainer.scoring().expect("a method that scores").passes;
        Ok((trainer.params().masks().map(|(id, mask)| (id, mask.words())).collect::<Vec<_>>(), passes))
    });
    let passes = all[0].1;
    (all.into_iter().flat_map(|(masks, _)| masks).collect(), passes)
}

/// Stages with less in a pass than others, and a table on both ends, come through every pass, to the masks of one.
#[test]
fn ranks_that_score_some_weights_at_a_time_choose_the_same_masks() {
    let base = tiny_gpt("prune.embeddings=true prune.sparsity=0.7 prune.samples=6");
    for method in ["snip", "grasp"] {
        let base = base.set(format!("prune.method={method}"));
        for (data, stages) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
            let (unlimited, one) = masks_within(&base, data, stages, false);
            let (limited, many) = masks_within(&base, data, stages, true);
            assert!(one == 1 && many > 1, "{method}: {one} and {many} passes");
            assert_eq!(unlimited, limited, "{method} on {data} x {stages} ranks");
        }
    }
}
