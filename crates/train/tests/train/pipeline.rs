//! Pipelines: every schedule gives what one rank gives.

use std::collections::HashMap;
use std::time::Instant;

use espalier_comm::Communicator;
use espalier_data::{DataSplit, SampleOrder};
use espalier_nn::layers::{BatchSlice, NormGroup};
use espalier_nn::model::Model;
use espalier_nn::weights::{ParameterId, Weights};
use espalier_plan::schedule::{ScheduleName, Updates};
use espalier_plan::spec::RecomputeMode;
use espalier_tensor::{Category, DType, random};
use espalier_train::Error;
use espalier_train::stage::Stage;
use espalier_train::step::{LossConfig, NoUpdatePass, Totals};

use crate::support::{
    Base, Collected, images, on_every_rank, peaks, planned, prepare, take, tiny_gpt, try_on_every_rank,
};
use crate::tensor::{Within, on, same_as};

fn gpt() -> Base {
    tiny_gpt("train.eval_samples=11 model.dropout=0.1 model.layers=3")
        .set("optimizer.name=sgd learning_rate.peak=0.1")
}

fn resnet8() -> Base {
    images()
        .set("model.name=resnet8 data.size=16 data.count=120 train.eval_samples=11")
        .set("optimizer.name=sgd learning_rate.peak=0.02")
}

/// Schedules that end every step, with what they cannot do.
fn synchronous(stages: usize, micro_batches: usize) -> impl Iterator<Item = ScheduleName> {
    let all = ScheduleName::ALL.into_iter().filter(|name| name.updates() == Updates::Flush);
    all.filter(move |name| match name {
        ScheduleName::Chimera | ScheduleName::ChimeraDoubling => stages.is_multiple_of(2),
        ScheduleName::Interleaved => micro_batches.is_multiple_of(stages),
        _ => true,
    })
}

/// On every schedule.
fn compare(base: &Base, layouts: &[(usize, usize, usize)], steps: usize) {
    compare_on(|_| true, base, layouts, steps);
}

/// On those of the schedules, by their numbers, that are wanted.
fn compare_on(wanted: impl Fn(usize) -> bool, base: &Base, layouts: &[(usize, usize, usize)], steps: usize) {
    for &(stages, micro_batches, data) in layouts {
        let base = base.set(format!("train.batch={}", 2 * micro_batches * data));
        let single = on(&base.set(format!("train.micro_batches={}", micro_batches * data)), steps).remove(0);
        let schedules = synchronous(stages, micro_batches).enumerate().filter(|(i, _)| wanted(*i));
        for (_, schedule) in schedules {
            let together = base
                .set(format!("train.micro_batches={micro_batches} parallel.pipeline={stages}"))
                .set(format!("parallel.data={data} parallel.schedule={schedule}"));
            same_as(&single, &together, steps, Within { losses: 1e-6, norms: 1e-6, weights: 1e-6 });
        }
    }
}

const LAYOUTS: [(usize, usize, usize); 7] =
    [(2, 4, 1), (3, 7, 1), (4, 4, 1), (2, 4, 2), (2, 1, 1), (3, 3, 1), (4, 10, 1)];

#[test]
fn every_synchronous_schedule_gives_what_one_rank_gives() {
    compare(&gpt(), &LAYOUTS, 3);
    // What differs is the shape of what travels: a few layouts show it.
    compare(&resnet8(), &LAYOUTS[..if espalier_testing::long() { LAYOUTS.len() } else { 4 }], 1);
}

/// The threshold is that of all stages together, and a tied table is counted once. In the short form each
/// method is on every third schedule, and every schedule has several methods.
#[test]
fn pruned_pipelines_too() {
    const METHODS: [&str; 10] = [
        "prune.method=magnitude",
        "prune.method=random",
        "prune.method=snip prune.samples=20",
        "prune.method=grasp prune.samples=20",
        "prune.method=gradual prune.end=3 prune.every=2",
        "prune.method=early-bird prune.every=1 prune.latest=3",
        "prune.method=set prune.every=2",
        "prune.method=rigl prune.every=2",
        "prune.method=lottery prune.sparsity=0.5 prune.rate=0.3",
        "prune.method=elsa prune.end=3 prune.every=1 optimizer.name=adamw learning_rate.peak=0.001 optimizer.eps=1e-2",
    ];
    for (number, prune) in METHODS.into_iter().enumerate() {
        let base = gpt().set("prune.sparsity=0.9 prune.embeddings=true").set(prune);
        // More replicas give RigL more samples to look at.
        let layouts: &[_] = if prune.contains("rigl") { &[(2, 4, 1)] } else { &[(2, 4, 1), (2, 2, 2)] };
        let is_wanted = |schedule: usize| espalier_testing::long() || schedule % 3 == number % 3;
        compare_on(is_wanted, &base, layouts, 4);
    }
    compare(&resnet8().set("prune.method=magnitude prune.sparsity=0.9"), &[(3, 4, 1)], 3);
}

/// By hand on one rank: the weights of every step are kept, and each stage runs a micro-batch on
/// the version that the definition says. An update may be skipped by a stage. Returns losses, and the weights
/// at the end.
fn by_hand(
    base: &Base,
    steps: usize,
    version: impl Fn(usize, usize) -> usize,
    updates: usize,
    skips: impl Fn(usize, usize) -> bool,
) -> (Vec<f64>, Vec<Vec<f32>>) {
    let (plan, dataset, device) = prepare(base, 2);
    let order = SampleOrder::new(plan.seed, dataset.len(DataSplit::Train));
    let batch = plan.batch.samples;
    let fresh = || Weights::initialise(&plan.model, &device, DType::F32, plan.seed).unwrap();
    let stage = Stage::unsharded(Model::build(&plan.model, RecomputeMode::None), &plan);
    let stage_of: HashMap<ParameterId, usize> = plan
        .stage_blocks
        .iter()
        .enumerate()
        .flat_map(|(stage, blocks)| {
            plan.model
                .block_tensors()
                .parameters(blocks.clone())
                .into_iter()
                .map(move |id| (ParameterId(id), stage))
        })
        .collect();
    let copy = |from: &Weights| {
        let mut to = fresh();
        from.ids().for_each(|id| to.get_mut(id).copy_from_host(&from.get(id).host_bytes()).unwrap());
        to
    };
    let (mut history, mut losses) = (vec![fresh()], Vec::new());
    let micro_batches = plan.batch.micro_batches;
    for step in 0..steps {
        let mut totals = Totals::default();
        let lr = plan.optimization.learning_rate.at(step, steps) as f32;
        for update in 0..updates {
            // What one update is for: a micro-batch, or a batch of them.
            let number = step * updates + update;
            let mut used = copy(&history[0]);
            for id in used.ids() {
                let from = &history[version(number, stage_of[&id])];
                used.get_mut(id).copy_from_host(&from.get(id).host_bytes()).unwrap();
            }
            let mut gradients = Collected::default();
            let size = batch / micro_batches;
            for shard in 0..micro_batches / updates {
                let first = update * size + shard * size;
                let samples = order.indices((step * batch + first) as u64, size);
                let random = random::key(random::key(plan.seed, step as u64), 0);
                let loss = LossConfig { random, samples: batch / updates, ignored: 0, temperature: 1.0 };
                let batch_slice = BatchSlice { first, samples: size, norms: NormGroup::Replica };
                let no_update_pass = NoUpdatePass {
                    stage: &stage,
                    pipeline_group: &Communicator::single_rank(),
                    weights: &used,
                    dataset: &dataset,
                    device: &device,
                    dtype: DType::F32,
                };
                totals.add(
                    no_update_pass
                        .train(&samples, loss, &batch_slice, &mut Vec::new(), &mut gradients)
                        .unwrap(),
                );
            }
            let mut next = copy(history.last().unwrap());
            for id in next.ids().filter(|id| !skips(number, stage_of[id])) {
                let gradient = gradients.0[&id].to_f32();
                let stepped: Vec<u8> = next
                    .get(id)
                    .to_f32()
                    .iter()
                    .zip(gradient)
                    .flat_map(|(w, g)| (w - lr * g).to_le_bytes())
                    .collect();
                next.get_mut(id).copy_from_host(&stepped).unwrap();
            }
            history.push(next);
        }
        losses.push(totals.loss());
    }
    let last = history.last().unwrap();
    (losses, last.ids().map(|id| last.get(id).to_f32()).collect())
}

/// Losses as rank 0 has them, and the weights of all stages, where a stage's gradient of an update may be
/// spoilt, on all replicas, as their sum would be; also which steps rank 0 says were taken.
fn with_a_fault(
    base: &Base,
    steps: usize,
    fault: Option<(usize, u64)>,
) -> (Vec<f64>, Vec<Vec<f32>>, Vec<bool>) {
    let all = on_every_rank(base, |mut trainer| {
        let stage = trainer.ranks().stages().rank();
        if let Some((_, update)) = fault.filter(|(at, _)| *at == stage) {
            trainer.inject_nan_at(update);
        }
        let reports = take(&mut trainer, steps)?;
        assert!(trainer.is_idle());
        let weights = trainer.params().ids().map(|id| trainer.params().param(id).weight().to_f32());
        Ok((reports, weights.collect::<Vec<_>>(), trainer.progress().clone()))
    });
    assert!(all.iter().all(|(_, _, progress)| *progress == all[0].2), "all stages count alike in the end");
    let losses = all[0].0.iter().map(|report| report.loss).collect();
    let taken = all[0].0.iter().map(|report| report.taken).collect();
    (losses, all.into_iter().flat_map(|(_, weights, _)| weights).collect(), taken)
}

/// Which version of the weights a stage of a schedule has for an update.
fn version(schedule: &str, stages: usize) -> impl Fn(usize, usize) -> usize {
    let is_2bw = schedule == "2bw";
    move |k, stage| if is_2bw { k.saturating_sub(1) } else { (k + 1).saturating_sub(stages - stage) }
}

fn assert_near((a, u): (Vec<f64>, Vec<Vec<f32>>), (b, v): (Vec<f64>, Vec<Vec<f32>>), what: &str) {
    for (a, b) in a.iter().zip(&b) {
        assert!((a - b).abs() < 1e-6 * a.abs(), "{what}: {a} {b}");
    }
    assert_eq!(u.len(), v.len());
    for (u, v) in u.iter().flatten().zip(v.iter().flatten()) {
        assert!((u - v).abs() < 1e-6 + 1e-5 * u.abs(), "{what}: weight {u} {v}");
    }
}

/// A pipeline without a flush, and so many updates in a step.
fn unflushed(schedule: &str, stages: usize, micro_batches: usize, steps: usize) -> (Base, usize) {
    let base = gpt()
        .set("model.tied=false learning_rate.decay_steps=100 train.clip=0")
        .steps(steps)
        .set(format!("train.batch={} train.micro_batches={micro_batches}", 2 * micro_batches))
        .set(format!("parallel.pipeline={stages} parallel.schedule={schedule}"));
    (base, if schedule == "pipedream" { micro_batches } else { 1 })
}

/// A gradient that is not finite, on any stage. 2BW: no stage takes the update. PipeDream: none at or before
/// the stage where it arose takes it; those behind had stepped before that gradient was made. In both the run
/// is from there on the one that the definition gives.
#[test]
fn a_bad_gradient_skips_one_update_on_all_stages() {
    for (stages, micro_batches, bad) in [(3, 4, 2), (3, 2, 1), (3, 3, 5), (2, 1, 3)] {
        for fault in 0..stages {
            for schedule in ["2bw", "pipedream"] {
                let (base, updates) = unflushed(schedule, stages, micro_batches, 6);
                let bad = bad * updates;
                let skips = |k: usize, stage: usize| k == bad && (schedule == "2bw" || stage <= fault);
                let expected = by_hand(&base, 6, version(schedule, stages), updates, skips);
                let (losses, weights, taken) = with_a_fault(&base, 6, Some((fault, bad as u64)));
                let what = format!("{schedule}, {stages} x {micro_batches}, {fault}");
                assert_near(expected, (losses, weights), &what);
                let expected: Vec<bool> = (0..6).map(|t| t != bad / updates).collect();
                assert_eq!(taken, expected, "{what}: rank 0 knows at once");
            }
        }
    }
}

/// Replicas hear of it alike.
#[test]
fn a_bad_gradient_is_skipped_by_all_replicas() {
    for schedule in ["2bw", "pipedream"] {
        let (base, _) = unflushed(schedule, 2, 2, 4);
        let base = base.set("parallel.data=2 train.batch=8");
        let (_, weights, taken) = with_a_fault(&base, 4, Some((1, 1)));
        assert!(weights.iter().flatten().all(|weight| weight.is_finite()));
        assert_eq!(taken.iter().filter(|taken| !**taken).count(), 1, "{schedule}");
    }
}

/// Where all stages skip too often, all of them end with the same error, when the pipeline is next empty.
#[test]
fn bad_updates_of_all_stages_end_the_run() {
    for schedule in ["2bw", "pipedream"] {
        let (base, _) = unflushed(schedule, 2, 2, 12);
        let base = base.set("learning_rate.peak=1e38 train.max_bad_steps=2 parallel.drain=4");
        let (ended, _) = base.run_observed();
        assert!(matches!(ended, Err(Error::Diverged { step: 4, .. })), "{schedule}: {ended:?}");
    }
}

#[test]
fn pipedream_and_2bw_do_what_their_definitions_say() {
    for (stages, micro_batches) in [(2, 1), (2, 4), (3, 2), (4, 3)] {
        for schedule in ["pipedream", "2bw"] {
            let (base, updates) = unflushed(schedule, stages, micro_batches, 6);
            let expected = by_hand(&base, 6, version(schedule, stages), updates, |_, _| false);
            let (losses, weights, _) = with_a_fault(&base, 6, None);
            let what = format!("{schedule}, {stages} x {micro_batches}");
            assert_near(expected, (losses, weights), &what);
        }
    }
}

/// That evaluating changes training is said where a run starts; where nothing is due on the way, nothing is said.
#[test]
fn a_run_says_that_looking_changes_it() {
    for (schedule, every, says) in [("2bw", 2, true), ("pipedream", 0, false), ("1f1b", 2, false)] {
        let (base, _) = unflushed(schedule, 2, 2, 4);
        let (ended, observer) = base.set(format!("train.eval_every={every}")).run_observed();
        ended.unwrap();
        let message =
            observer.warnings.iter().any(|text| text.contains("`train.eval_every` = 2 changes the result"));
        assert_eq!(message, says, "{schedule}: {:?}", observer.warnings);
    }
}

/// A stage that is gone ends the others, by its name, in the middle of a step too.
#[test]
fn a_stage_that_panics_or_fails_ends_the_run_by_its_name() {
    for schedule in ["1f1b", "axonn", "pipedream", "chimera"] {
        let base = gpt()
            .set("model.tied=false train.clip=0 train.batch=8 train.micro_batches=4 train.steps=50")
            .set(format!("parallel.pipeline=2 parallel.schedule={schedule}"));
        let begin = Instant::now();
        let ended = try_on_every_rank(&base, |mut trainer| {
            for step in 0..50 {
                assert!(trainer.ranks().rank() == 0 || step < 3, "out of luck");
                trainer.step()?;
            }
            Ok(())
        });
        let message = ended.unwrap_err().to_string();
        assert!(message.starts_with("rank 1 panicked: out of luck"), "{schedule}: {message}");
        assert!(begin.elapsed().as_secs() < 60, "nobody waits for the limit");
    }
}

/// Weights, gradients and state are predicted to the byte for the rank that has most of each; what is in
/// flight, no less than it is.
#[test]
fn bytes_of_stages_are_those_predicted() {
    for (schedule, stages, prune) in
        [("1f1b", 2, false), ("gpipe", 3, true), ("chimera", 2, false), ("2bw", 2, false)]
    {
        let mut base = gpt()
            .set("model.tied=false train.clip=0 train.batch=8 train.micro_batches=4 train.steps=6")
            .set(format!("optimizer.name=adamw parallel.pipeline={stages}"))
            .set(format!("parallel.schedule={schedule}"));
        if prune {
            base = base.set("prune.method=magnitude prune.scope=layer prune.sparsity=0.9");
        }
        let categories = [Category::Weights, Category::Optimizer, Category::Mask, Category::Activations];
        let [measured, _] = peaks(&base, 6, categories);
        let largest = |i: usize| measured.iter().map(|rank| rank[i]).max().unwrap();
        let predicted = planned(&base).memory;
        let expected = [predicted.weights, predicted.optimizer, predicted.mask];
        assert_eq!([0, 1, 2].map(largest), expected, "{schedule}: weights, optimizer, masks");
        let (measured, least) = (largest(3), predicted.activations);
        assert!(
            (least..2 * least).contains(&measured),
            "{schedule}: {measured} in flight, {least} predicted"
        );
    }
}
