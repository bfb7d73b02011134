//! Local SGD: ranks go apart and are averaged. Averaged after every step, it is synchronous SGD.

use std::sync::{Mutex, mpsc};
use std::time::Duration;

use espalier_plan::mesh::{Mesh, PerAxis};
use espalier_train::Error;
use espalier_train::parallel::on_threads_with_timeout;
use espalier_train::run::RunDir;
use espalier_train::trainer::Trainer;

use crate::support::{Base, assert_predicted, on_every_rank, prepare, tiny_cnn, tiny_gpt};

fn pruned(base: &Base) -> Base {
    base.set("prune.method=magnitude prune.sparsity=0.8 prune.state=compressed")
}

/// Takes steps on so many ranks, coming together after each if asked to, and returns every rank's losses and
/// weights.
fn on(ranks: usize, base: &Base, steps: usize, always: bool) -> Vec<(Vec<f64>, Vec<f32>)> {
    let base = base.replicas(ranks).steps(steps);
    on_every_rank(&base, |mut trainer| {
        let mut losses = Vec::new();
        for _ in 0..steps {
            losses.push(trainer.step()?.loss);
            if always {
                trainer.average()?;
            }
        }
        Ok((losses, flat(&trainer)))
    })
}

#[test]
fn averaged_after_every_step_it_is_synchronous() {
    for optimizer in ["sgd", "momentum", "nesterov"] {
        for (kind, base) in [
            ("gpt", tiny_gpt("train.batch=12 model.dropout=0.1 learning_rate.peak=0.1")),
            ("cnn", tiny_cnn("train.batch=12 train.micro_batches=2")),
            ("pruned", pruned(&tiny_gpt("train.batch=12 learning_rate.peak=0.1")).set("prune.at=2")),
        ] {
            let base = base.set(format!("optimizer.name={optimizer}"));
            let synchronous = &on(3, &base, 6, false)[0];
            let local = on(3, &base.set("parallel.average_every=1000"), 6, true);
            assert!(local.iter().all(|rank| rank.1 == local[0].1), "{kind} {optimizer}: all hold the same");
            let far = |a: f64, b: f64| (a - b).abs() / a.abs().max(1.0);
            // Each rank has the loss of its own samples.
            let mean = |step: usize| local.iter().map(|rank| rank.0[step]).sum::<f64>() / local.len() as f64;
            let mut losses = synchronous.0.iter().enumerate().map(|(step, loss)| far(*loss, mean(step)));
            assert!(losses.all(|far| far < 1e-5), "{kind} {optimizer}: losses");
            let mut weights =
                synchronous.1.iter().zip(&local[0].1).map(|(a, b)| far(f64::from(*a), f64::from(*b)));
            assert!(weights.all(|far| far < 1e-5), "{kind} {optimizer}: weights");
        }
    }
}

#[test]
fn ranks_go_apart_and_come_together() {
    let plain = tiny_gpt("train.batch=12 parallel.average_every=4");
    let base = pruned(&plain).set("prune.at=6");
    let pair = |steps: usize| {
        // A run that ends before it prunes is refused; until then both are the same.
        let all = on(2, if steps > 6 { &base } else { &plain }, steps, false);
        (all[0].1 == all[1].1, all[0].0 == all[1].0)
    };
    // Before step 7 they come together to prune; losses are those of a rank's own samples.
    for (steps, together) in [(1, false), (3, false), (4, true), (6, false), (7, false), (8, true)] {
        assert_eq!(pair(steps), (together, false), "after {steps} steps");
    }
    assert_eq!(on(2, &base, 8, false), on(2, &base, 8, false), "runs repeat");
}

/// What two ranks return that each do something with a trainer of their own.
fn two<R: Send>(
    base: &Base,
    work: impl Fn(usize, &mut Trainer) -> Result<R, Error> + Sync,
) -> Result<Vec<R>, Error> {
    let (plan, dataset, device) = prepare(&base.set("parallel.data=2"), 2);
    let mesh = Mesh::new(PerAxis { data: 2, ..PerAxis::ONES }).unwrap();
    on_threads_with_timeout(Duration::from_secs(20), None, &mesh, &device, |ranks, device| {
        let rank = ranks.rank();
        work(rank, &mut Trainer::distributed(plan.clone(), dataset.clone(), device, ranks)?)
    })
}

fn flat(trainer: &Trainer) -> Vec<f32> {
    trainer.params().named().flat_map(|(_, tensor)| tensor.to_f32()).collect()
}

/// The distance from one set of weights to another.
fn distance(from: &[f32], to: &[f32]) -> f64 {
    from.iter().zip(to).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
}

/// Rank 1 does not even begin before rank 0 has taken its three steps: anything that one asked of the other
/// would wait for ever. And no byte is counted.
#[test]
fn between_averages_ranks_say_nothing() {
    let base = tiny_gpt("train.batch=12 train.clip=0.5 train.steps=8 parallel.average_every=4");
    let (done, begin) = (Mutex::new(None), Mutex::new(None));
    let (sender, receiver) = mpsc::channel();
    (*done.lock().unwrap(), *begin.lock().unwrap()) = (Some(sender), Some(receiver));
    let sent = two(&base, |rank, trainer| {
        if rank == 1 {
            let begin = begin.lock().unwrap().take().expect("one waits");
            begin.recv_timeout(Duration::from_secs(60)).expect("rank 0 needs nobody");
        }
        let mut sent = Vec::new();
        for step in 1..=8 {
            let before = trainer.ranks().sent();
            trainer.step()?;
            sent.push((trainer.ranks().sent() - before).total());
            if (rank, step) == (0, 3) {
                done.lock().unwrap().take().expect("one is done").send(()).unwrap();
            }
        }
        Ok(sent)
    });
    for sent in sent.unwrap() {
        assert_eq!(
            sent.iter().map(|bytes| *bytes > 0).collect::<Vec<_>>(),
            [false, false, false, true, false, false, false, true]
        );
    }
}

/// A step that is clipped is as long as the rate and the limit say, on every rank: by the norm of all ranks'
/// gradients it would be shorter on one and longer on the other.
#[test]
fn each_rank_clips_by_its_own_norm() {
    let base = tiny_gpt("train.batch=12 train.steps=4 parallel.average_every=4")
        .set("optimizer.name=sgd train.clip=0.01 learning_rate.warmup=0");
    let steps = two(&base, |_, trainer| {
        let before = flat(trainer);
        let report = trainer.step()?;
        Ok((report.grad_norm, distance(&before, &flat(trainer)), report.lr))
    });
    let steps = steps.unwrap();
    assert_ne!(steps[0].0, steps[1].0, "norms are each rank's own");
    for (norm, length, lr) in steps {
        assert!(norm > 0.01, "{norm} is clipped");
        assert!((length / (lr * 0.01) - 1.0).abs() < 1e-3, "a step of {length} at a rate of {lr}");
    }
}

/// A gradient that is not finite is one rank's own affair: it skips its step, and the others take theirs.
/// When they are averaged, all count alike.
#[test]
fn a_bad_gradient_skips_the_step_of_its_rank() {
    for optimizer in ["momentum", "adamw"] {
        let base = tiny_gpt("train.batch=12 train.steps=4 parallel.average_every=4")
            .set(format!("optimizer.name={optimizer}"));
        let ranks = two(&base, |rank, trainer| {
            if rank == 1 {
                trainer.inject_nan_at(1);
            }
            let mut moved = Vec::new();
            for _ in 0..4 {
                let before = flat(trainer);
                let report = trainer.step()?;
                moved.push((report.taken, flat(trainer) != before));
            }
            Ok((moved, flat(trainer), trainer.progress().clone()))
        });
        let ranks = ranks.unwrap();
        assert_eq!(ranks[0].0, [(true, true); 4]);
        assert_eq!(ranks[1].0, [(true, true), (false, false), (true, true), (true, true)]);
        assert_eq!(ranks[0].1, ranks[1].1, "{optimizer}: averaged");
        assert_eq!(ranks[0].2, ranks[1].2);
        assert!(ranks[0].1.iter().all(|weight| weight.is_finite()));
    }
}

/// Bad steps of one rank alone end all of them, with one error, when they next are together.
#[test]
fn a_rank_that_diverges_alone_ends_the_run() {
    let base = tiny_gpt("train.batch=12 parallel.data=2 parallel.average_every=3")
        .set("optimizer.name=sgd learning_rate.peak=1e38 train.max_bad_steps=2");
    let (ended, _) = base.steps(9).run_observed();
    assert!(matches!(ended, Err(Error::Diverged { step: 3, bad_steps: 2, .. })), "{ended:?}");
}

/// Post-local SGD: bit for bit the synchronous run up to the switch, and local SGD from then on.
#[test]
fn ranks_can_go_apart_later() {
    let base = tiny_gpt("train.batch=12 train.clip=0.5 learning_rate.peak=0.1 optimizer.name=momentum");
    let late = base.set("parallel.average_every=3 parallel.local_after=4");
    for steps in [3, 4] {
        assert_eq!(on(2, &base, steps, false), on(2, &late, steps, false), "after {steps} steps");
    }
    let same = |steps: usize| {
        let all = on(2, &late, steps, false);
        all[0].1 == all[1].1
    };
    // Averages stand where they would have stood: after 6 steps, and 9.
    assert_eq!([4, 5, 6, 7, 9].map(same), [true, false, true, false, true]);
    let late = late.replicas(2).steps(9);
    let (uninterrupted, again) = (late.run(), tempfile::tempdir().unwrap());
    assert!(late.run_stopped_after(3, &RunDir::at(again.path())).0.interrupted);
    assert_eq!(
        late.run_in(again.path()).weights_hash,
        uninterrupted.weights_hash,
        "resumed before the switch"
    );
    assert_predicted(&uninterrupted, &["communication"], "either kind of message");
}

#[test]
fn a_run_that_goes_apart_learns_and_sends_little() {
    for optimizer in ["momentum", "adamw"] {
        let base = tiny_gpt("train.batch=12 parallel.data=3 train.eval_samples=40")
            .set(format!("learning_rate.decay_steps=1000 optimizer.name={optimizer}"))
            .set(if optimizer == "adamw" { "learning_rate.peak=3e-3" } else { "learning_rate.peak=0.1" });
        let one = base.steps(1).run().validation.loss.unwrap();
        let both = [base.clone(), base.set("parallel.average_every=8")];
        let [every, local] = both.map(|base| base.steps(48).run());
        let (synchronous, loss) = (every.validation.loss.unwrap(), local.validation.loss.unwrap());
        assert!(
            one - loss > 0.6 * (one - synchronous),
            "{optimizer}: {one} to {loss}, together {synchronous}"
        );
        assert_ne!(every.weights_hash, local.weights_hash, "it is another path");
        // Weights and moments once in eight steps, instead of gradients in each.
        let vectors = if optimizer == "adamw" { 3.0 } else { 2.0 };
        let ratio = local.bytes_sent["all_reduce"] as f64 / every.bytes_sent["all_reduce"] as f64;
        assert!((ratio / (vectors / 8.0) - 1.0).abs() < 0.02, "{optimizer}: {ratio} of the bytes");
        assert_predicted(&local, &["weights", "optimizer", "communication"], optimizer);
    }
}

/// Masks are chosen from averaged weights, whenever that is, or ranks would disagree and the run would end.
#[test]
fn every_method_prunes_alike_on_ranks_that_go_apart() {
    let gpt = tiny_gpt("train.batch=12 parallel.data=2 parallel.average_every=5 prune.sparsity=0.7");
    let bf16 = gpt.set("train.precision=bf16");
    for (what, base) in [
        ("gradual", gpt.set("prune.method=gradual prune.start=2 prune.every=3")),
        ("elsa", bf16.set("prune.method=elsa prune.every=3")),
        ("rigl", bf16.set("prune.method=rigl prune.every=3")),
        ("set", gpt.set("prune.method=set prune.every=4")),
        ("lottery", bf16.set("prune.method=lottery prune.rate=0.5 prune.rewind=2")),
        ("early bird", gpt.set("prune.method=early-bird prune.every=3 prune.latest=7")),
        ("snip", gpt.set("prune.method=snip")),
        ("2:4", gpt.set("prune.method=2:4 prune.at=3 prune.sparsity=0.5")),
    ] {
        let summary = base.steps(12).run();
        assert!(summary.sparsity > 0.45, "{what}: {}", summary.sparsity);
        // The last step is not one after which they come together by themselves: evaluation and checkpoint
        // make them.
        assert_eq!(summary.weights_hash, base.steps(12).run().weights_hash, "{what}");
    }
}

/// A stop waits until ranks are together, and the run goes on as if there had been none.
#[test]
fn a_stop_changes_nothing() {
    for optimizer in ["momentum", "lamb"] {
        let base = tiny_cnn("train.batch=12 parallel.data=3 parallel.average_every=4")
            .set(format!("optimizer.name={optimizer}"))
            .steps(12);
        let (expected, folder) = (base.run().weights_hash, tempfile::tempdir().unwrap());
        let (stopped, _) = base.run_stopped_after(2, &RunDir::at(folder.path()));
        assert!(stopped.interrupted);
        assert_eq!(stopped.summary.steps, 4);
        assert_eq!(base.run_in(folder.path()).weights_hash, expected, "{optimizer}");
    }
}
