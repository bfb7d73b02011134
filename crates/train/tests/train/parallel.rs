//! Parallel equals serial: any number of ranks trains as one rank does, and the same number twice gives the
//! same bits.

use espalier_nn::layers::{GradientSink, WeightGradients};
use espalier_nn::weights::ParameterId;
use espalier_plan::data_parallel::DataParallelMode;
use espalier_plan::mesh::{Mesh, PerAxis};
use espalier_plan::traffic::{Buckets, Gradient};
use espalier_tensor::{Category, DType, Mask, Tensor};
use espalier_testing::apart;
use espalier_train::parallel::data::{DataParallel, DataParallelSink};
use espalier_train::parallel::on_threads;
use espalier_train::parallel::reduce_groups::ReduceGroups;
use espalier_train::run::RunDir;
use espalier_train::state::ParamStore;
use espalier_train::trainer::Trainer;
use espalier_train::{Error, RunSummary};

use crate::support::{
    Base, RecordingObserver, assert_goes_on, assert_predicted, assert_says, dense_and_pruned, images,
    on_every_rank, prepare, pruned, take, tiny_cnn, tiny_gpt, try_on_every_rank,
};

/// Numbers of ranks, of which one is no power of two.
const ANY: &[usize] = &[2, 3, 4, 8];

fn mesh(data: usize) -> Mesh {
    Mesh::new(PerAxis { data, ..PerAxis::ONES }).unwrap()
}

/// What a rank has to show after some steps: hashes of weights and masks.
#[derive(Debug, Clone, PartialEq)]
pub struct Shown {
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
    pub noise: Option<f64>,
    pub validation: f64,
    pub weights: String,
    pub masks: String,
}

fn shown(mut trainer: Trainer, steps: usize) -> Result<Shown, Error> {
    let reports = take(&mut trainer, steps)?;
    Ok(Shown {
        losses: reports.iter().map(|report| report.loss).collect(),
        norms: reports.iter().map(|report| report.grad_norm).collect(),
        noise: reports.last().and_then(|report| report.noise_scale),
        validation: trainer.evaluate()?.expect("some samples are held out").loss,
        weights: trainer.params().hash()?,
        masks: trainer.params().mask_hash()?,
    })
}

/// Takes steps on so many ranks, which must all show the same.
pub fn on(ranks: usize, base: &Base, steps: usize) -> Shown {
    let all = on_every_rank(&base.steps(steps).replicas(ranks), |trainer| shown(trainer, steps));
    for shown in &all {
        assert_eq!(*shown, all[0], "all ranks report the same numbers and hold the same bits");
    }
    all.into_iter().next().unwrap()
}

/// A GPT that every number of ranks divides the batch of, with dropout, at a rate at which rounding does not grow.
fn gpt() -> Base {
    tiny_gpt("train.batch=24 train.eval_samples=11 model.dropout=0.1")
        .set("optimizer.name=sgd learning_rate.peak=0.3 learning_rate.decay_steps=100")
}

fn cnn(norm: bool) -> Base {
    let base = tiny_cnn("train.batch=24 train.eval_samples=11 model.layers.0.stride=2")
        .set("learning_rate.peak=0.01");
    if norm {
        return base.set("parallel.batch_norm=synchronised");
    }
    base.set("model.layers.1.type=relu")
}

/// On so many ranks over 20 steps (any number over 100 in the long form), dense and with nine weights of ten gone.
fn ranks_give_the_losses_of_one(ranks: &[usize], base: &Base) {
    let (steps, ranks) = if espalier_testing::long() { (100, ANY) } else { (20, ranks) };
    for (number, base) in dense_and_pruned(base).iter().enumerate() {
        let one = on(1, base, steps);
        // With nine of ten weights gone from every layer, some have hardly begun.
        assert!(number == 1 || one.losses[steps - 1] < one.losses[0], "{base}: it learns");
        for &ranks in ranks {
            let many = on(ranks, base, steps);
            let far = apart(&one.losses, &many.losses);
            assert!(far < 1e-6, "{base}: {far:e} apart on {ranks} ranks");
            assert!(apart(&one.norms, &many.norms) < 1e-4, "{base} on {ranks} ranks");
            assert!(apart(&[one.validation], &[many.validation]) < 1e-6, "{base} on {ranks} ranks");
        }
    }
}

#[test]
fn a_gpt_with_dropout_learns_the_same_on_any_number_of_ranks() {
    ranks_give_the_losses_of_one(ANY, &gpt());
}

#[test]
fn an_image_net_learns_the_same_on_any_number_of_ranks() {
    ranks_give_the_losses_of_one(ANY, &cnn(false));
}

#[test]
fn synchronised_batch_norm_learns_the_same_on_any_number_of_ranks() {
    ranks_give_the_losses_of_one(ANY, &cnn(true));
}

/// Adam divides by what it has seen: where that is next to nothing, the rounding of a sum would show most.
#[test]
fn adamw_learns_the_same_on_any_number_of_ranks() {
    let small = "learning_rate.peak=1e-3 learning_rate.decay_steps=100 optimizer.name=adamw";
    ranks_give_the_losses_of_one(&[3, 8], &gpt().set(small));
}

/// At a rate at which kinks do not show: an activation that rounding moves across one changes a gradient by
/// 1e-5 at once.
#[test]
fn a_resnet8_learns_the_same_on_any_number_of_ranks() {
    let small = "model.name=resnet8 data.size=16 data.count=200 train.batch=24 train.eval_samples=5";
    let base = images().set(small);
    ranks_give_the_losses_of_one(&[3, 8], &base.set("optimizer.name=adamw learning_rate.peak=1e-5 seed=4"));
}

/// Dropout would show at once if ranks or micro-batches drew other numbers than one rank does.
#[test]
fn micro_batches_and_ranks_drop_the_same_elements() {
    let base = gpt().set("model.dropout=0.5");
    let one = on(1, &base, 5);
    for (ranks, micro_batches) in [(1, 4), (2, 3), (4, 2), (3, 8)] {
        let many = on(ranks, &base.set(format!("train.micro_batches={micro_batches}")), 5);
        let far = apart(&one.losses, &many.losses);
        assert!(far < 1e-6, "{far:e} apart on {ranks} ranks with {micro_batches} micro-batches");
    }
    assert!(apart(&one.losses, &on(1, &base.set("seed=5"), 5).losses) > 1e-3, "the numbers matter");
}

#[test]
fn the_same_layout_gives_the_same_bits() {
    let bases = [
        gpt().set("train.micro_batches=2 train.precision=bf16 train.clip=0.5"),
        tiny_cnn("train.batch=24"),
        pruned(&cnn(true)).set("train.recompute=block"),
    ];
    for base in bases {
        assert_eq!(on(3, &base, 10), on(3, &base, 10));
    }
}

/// Local statistics differ from those of the full batch; the running ones are the same on all ranks all the same.
#[test]
fn local_batch_norm_is_another_function_with_statistics_that_all_share() {
    let base = tiny_cnn("train.batch=24 train.eval_samples=11");
    let (one, many) = (on(1, &base, 5), on(4, &base, 5));
    assert!(apart(&one.losses, &many.losses) > 1e-4);
    assert!(apart(&one.losses, &many.losses) < 0.1);
    assert!(
        apart(&[one.validation], &[many.validation]) < 0.1,
        "running statistics are near those of one rank"
    );
}

#[test]
fn the_noise_scale_is_that_of_as_many_micro_batches() {
    let scale = |ranks: usize, micro_batches: usize| {
        let base = tiny_gpt("train.batch=24 train.noise_scale=true optimizer.name=sgd")
            .set(format!("train.micro_batches={micro_batches}"))
            .replicas(ranks);
        on_every_rank(&base, |mut trainer| take(&mut trainer, 10))[0][9].noise_scale.expect("defined by then")
    };
    let expected = scale(1, 4);
    assert!(apart(&[expected, expected], &[scale(4, 1), scale(2, 2)]) < 1e-3);
}

/// Gradients of every size and shape, packed or single, come back as the sum over ranks.
#[test]
fn buckets_of_any_size_give_the_same_sums() {
    let (.., device) = prepare(&tiny_gpt(""), 1);
    let sizes: [&[usize]; 5] = [&[7], &[3, 5], &[40, 2], &[0], &[1]];
    let sums = |bytes: u64| {
        let all = on_threads(&mesh(3), &device, |ranks, device| {
            let weight = |shape: &[usize]| Tensor::zeros(device, shape, DType::F32, Category::Weights);
            let weights =
                sizes.iter().map(|shape| Ok(("w", weight(shape)?))).collect::<Result<_, Error>>()?;
            let mut params = ParamStore::of_tensors(weights, true);
            let mut words = [0u32; 3];
            (0..80).step_by(3).for_each(|i| words[i / 32] |= 1 << (i % 32));
            params.param_mut(ParameterId(2)).set_mask(Mask::new(device, 80, &words)?, |_| Ok(None))?;
            let groups = ReduceGroups::of_replicas(&ranks);
            let mut buckets = Buckets::default();
            let of = |parameter: usize| {
                let kept = if parameter == 2 { 27 } else { sizes[parameter].iter().product() };
                Gradient { parameter, block: 0, bytes: 4 * kept as u64 }
            };
            buckets.pack(Some(0), &[4, 2, 1, 3].map(of), bytes);
            // The tied one waits for the end of the pass.
            buckets.pack(None, &[of(0)], bytes);
            let mut shared =
                DataParallel::new(DataParallelMode::Replicated, false, &params, None, &groups, &buckets);
            let gradient = |id: usize, scale: f32| {
                let (shape, device) = (sizes[id], device.clone());
                let values: Vec<f32> = (0..shape.iter().product()).map(|i| scale * (i + id) as f32).collect();
                let of = Tensor::from_slice(&device, shape, &values, Category::Workspace);
                move |_| Ok(vec![of?])
            };
            let local = (ranks.rank() + 1) as f32;
            for last in [false, true] {
                shared.last_micro_batch(last);
                // The tied one comes twice.
                for id in [0, 4, 2, 1, 0, 3] {
                    let made = WeightGradients::new([], gradient(id, local));
                    DataParallelSink::new(&mut shared, &params).accept(&[ParameterId(id)], made)?;
                }
            }
            shared.finish(&mut params)?;
            let gradient = |id| params.param(ParameterId(id)).gradient.as_ref().expect("it came");
            let shown = |id| (gradient(id).shape().to_vec(), gradient(id).to_f32());
            Ok((0..sizes.len()).map(shown).collect::<Vec<_>>())
        });
        let all = all.unwrap();
        assert!(all.iter().all(|one| *one == all[0]));
        all.into_iter().next().unwrap()
    };
    // 1 + 2 + 3 over ranks, twice over micro-batches, and twice again for the tied one.
    let expected: Vec<(Vec<usize>, Vec<f32>)> = (0..sizes.len())
        .map(|id| {
            let len: usize = sizes[id].iter().product();
            let all = (0..len).map(|i| if id == 0 { 24.0 } else { 12.0 } * (i + id) as f32);
            match id {
                2 => (vec![27], all.enumerate().filter(|(i, _)| i % 3 == 0).map(|(_, x)| x).collect()),
                _ => (sizes[id].to_vec(), all.collect()),
            }
        })
        .collect();
    for bytes in [0, 1, 28, 64, 1 << 20] {
        assert_eq!(sums(bytes), expected, "buckets of {bytes}");
    }
}

/// Bytes are those of a ring's all-reduce, 2 (P - 1) / P for each byte of gradient; compressed, those of kept
/// weights alone.
#[test]
fn bytes_on_the_wire_are_those_of_kept_weights() {
    let base =
        tiny_gpt("train.batch=8 train.steps=2 model.width=64 prune.method=magnitude prune.sparsity=0.9");
    for ranks in [2, 4, 8] {
        let run = |form: &str| base.replicas(ranks).set(form).run();
        let sent = |summary: &RunSummary| summary.bytes_sent.values().sum::<u64>() as f64;
        let (dense, compressed) = (run("prune.state=dense"), run("prune.state=compressed"));
        for summary in [&dense, &compressed] {
            assert_eq!(summary.bytes_sent["all_reduce"] as f64, sent(summary), "nothing else is sent");
        }
        let ring = |elements: u64| 2.0 * (ranks - 1) as f64 / ranks as f64 * 4.0 * elements as f64;
        // Beside the gradients: three numbers of the loss. A rank's shard is rounded up to full elements.
        let slack = 8.0 * 3.0 * 2.0 + 64.0;
        assert!((sent(&dense) - ring(dense.parameters)).abs() < slack, "{} on {ranks} ranks", sent(&dense));
        let prunable = (dense.kept as f64 / (1.0 - dense.sparsity)).round() as u64;
        let others = sent(&dense) - ring(prunable);
        // What a reduce-scatter and an all-gather move is what an all-reduce moves.
        for summary in [compressed, run("parallel.zero=true")] {
            let ratio = (sent(&summary) - others) / ring(prunable);
            assert!(ratio <= 0.101, "{ratio} of the bytes of dense gradients on {ranks} ranks");
            assert!(ratio > 0.09, "{ratio}: the kept weights must travel");
        }
    }
}

#[test]
fn one_rank_sends_nothing_and_several_are_in_the_summary() {
    let base = tiny_gpt("train.batch=8 train.steps=2 train.micro_batches=2");
    let one = base.replicas(1).run();
    assert!(one.bytes_sent.values().all(|bytes| *bytes == 0));
    assert_eq!(one.memory["communication"].measured, Some(0));
    let four = base.replicas(4).run();
    let json = serde_json::to_value(&four).unwrap();
    assert_eq!((&json["layout"]["data"], &json["layout"]["micro_batches"]), (&4.into(), &2.into()));
    assert_predicted(&four, &["weights", "optimizer", "communication"], "four ranks");
    assert!(four.memory["activations"].measured < one.memory["activations"].measured);
}

/// A checkpoint knows nothing of ranks: whoever goes on from it has the bits of the one who wrote it.
#[test]
fn a_run_goes_on_with_another_number_of_ranks() {
    let bases = [gpt(), pruned(&gpt()).set("prune.at=2"), cnn(true).set("optimizer.name=momentum")];
    let bases = bases.map(|base| base.set("checkpoint.keep=1 checkpoint.every=3"));
    for (number, base) in bases.iter().enumerate() {
        let steps = |n: usize| base.steps(n);
        // In the short form each of them with one pair.
        let (from, count) = if espalier_testing::long() { (0, 3) } else { (number, 1) };
        for (first, second) in [(4, 2), (1, 3), (8, 1)].into_iter().skip(from).take(count) {
            let folder = tempfile::tempdir().unwrap();
            let half = steps(3).replicas(first).run_in(folder.path());
            // Nothing left to do: what was loaded is what was saved, bit for bit.
            let loaded = steps(3).replicas(second).run_in(folder.path());
            assert_eq!(half.weights_hash, loaded.weights_hash, "{first} to {second}");
            let uninterrupted = steps(6).replicas(second).run();
            let resumed = steps(6).replicas(second).run_in(folder.path());
            assert!(
                apart(&[uninterrupted.loss.unwrap()], &[resumed.loss.unwrap()]) < 1e-5,
                "{first} to {second}"
            );
        }
        assert_goes_on(&base.replicas(4), [3, 6]);
    }
}

#[test]
fn a_stop_ends_all_ranks_after_the_same_step() {
    let folder = tempfile::tempdir().unwrap();
    let (outcome, observer) = gpt().steps(50).replicas(4).run_stopped_after(3, &RunDir::at(folder.path()));
    // The other ranks may see it a step later, never at different steps.
    let steps = outcome.summary.steps;
    assert!(outcome.interrupted && (3..=4).contains(&steps), "stopped after {steps}");
    assert_eq!(observer.losses.len() as u64, steps, "rank 0 alone talks");
    assert!(folder.path().join(format!("checkpoints/step-{steps:06}/manifest.json")).exists());
}

#[test]
fn a_rank_that_panics_or_fails_ends_the_run_by_its_name() {
    let (base, folder) = (gpt().steps(50).replicas(4), tempfile::tempdir().unwrap());
    let mut falls_over = RecordingObserver::then(2, || panic!("the observer fell over"));
    let error = base.run_at(&RunDir::at(folder.path()), &mut falls_over).unwrap_err();
    assert_eq!(error.to_string(), "rank 0 panicked: the observer fell over");

    let failing = |fail: &(dyn Fn() -> Result<(), Error> + Sync)| {
        let outcome = try_on_every_rank(&base, |mut trainer| {
            for step in 0..50 {
                trainer.step()?;
                if step == 2 && trainer.ranks().rank() == 2 {
                    fail()?;
                }
            }
            Ok(())
        });
        outcome.unwrap_err()
    };
    let error = failing(&|| panic!("out of luck"));
    assert!(matches!(error, Error::RankEnded { rank: 2, .. }), "{error}");
    assert_eq!(error.to_string(), "rank 2 panicked: out of luck");
    let refused = || espalier_tensor::Error::Threads { threads: 3, why: "enough".into() };
    let error = failing(&|| Err(refused().into()));
    assert_eq!(error.to_string(), format!("rank 2 failed: {}", refused()));
    // What concerns the run needs no rank.
    let error = failing(&|| Err(Error::Diverged { step: 3, bad_steps: 1, loss: f64::NAN }));
    assert!(matches!(error, Error::Diverged { .. }), "{error}");
}

/// Whichever step it falls over at, what is left is intact, and two halves are the uninterrupted run.
#[test]
fn a_run_that_panicked_goes_on_with_the_same_bits() {
    let base = pruned(&gpt()).set("train.steps=6 checkpoint.every=1 optimizer.name=adamw");
    for ranks in [1, 4] {
        let base = base.replicas(ranks);
        let expected = base.run().weights_hash;
        for step in [1, 4, 6] {
            let folder = tempfile::tempdir().unwrap();
            let mut falls_over = RecordingObserver::then(step, || panic!("out of luck"));
            let broken = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                base.run_at(&RunDir::at(folder.path()), &mut falls_over)
            }));
            match broken {
                Ok(outcome) => assert_eq!(outcome.unwrap_err().to_string(), "rank 0 panicked: out of luck"),
                // One rank is no group: its panic is the process's.
                Err(_) => assert_eq!(ranks, 1),
            }
            let (again, observer) = base.resume_observed(folder.path());
            assert_eq!(again.weights_hash, expected, "{ranks} ranks, step {step}");
            // The step at which it fell over was not saved yet; before the first there is nothing to go on from.
            assert_eq!(observer.resumed_after, Some(step - 1), "{ranks} ranks, step {step}");
            assert_eq!(observer.warnings.len(), usize::from(step == 1), "{:?}", observer.warnings);
        }
    }
}

/// A rank that hangs is named once `parallel.timeout_s` is over; what was on its way is given up.
#[test]
fn a_rank_that_hangs_is_named() {
    let base = gpt().steps(50).set("parallel.timeout_s=1").replicas(4);
    let hang = || std::thread::sleep(std::time::Duration::from_millis(2500));
    let run_dir = RunDir::at(tempfile::tempdir().unwrap().path());
    assert_says(
        base.run_at(&run_dir, &mut RecordingObserver::then(2, hang)).unwrap_err(),
        &[" waited ", " s for rank 0 in "],
    );
}

#[test]
fn bad_steps_are_bad_on_all_ranks() {
    let base = gpt().set("learning_rate.peak=1e38 learning_rate.warmup=0");
    let (ended, observer) = base.set("train.max_bad_steps=3").steps(20).replicas(3).run_observed();
    let error = ended.unwrap_err();
    assert!(matches!(error, Error::Diverged { bad_steps: 3, .. }), "{error}");
    assert_eq!(observer.warnings.len(), 3, "rank 0 alone warns: {:?}", observer.warnings);
}

#[test]
fn ranks_that_differ_are_named() {
    let (.., device) = prepare(&gpt(), 2);
    let say = |hashes: [&str; 4]| {
        let outcome = on_threads(&mesh(4), &device, |ranks, _| {
            ranks.check_replicas_agree("pruning masks", hashes[ranks.rank()])
        });
        outcome.map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(say(["a"; 4]), Ok(()));
    let one = "the pruning masks of rank 2 differ from those of rank 0: the run cannot continue";
    assert_eq!(say(["a", "a", "b", "a"]), Err(one.into()));
    let all = "the pruning masks of ranks 1, 2 and 3 differ from those of rank 0: the run cannot continue";
    assert_eq!(say(["b", "a", "a", "a"]), Err(all.into()));
}
