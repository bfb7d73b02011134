//! Local SGD: ranks go apart and are averaged. Averaged after every step, it is synchronous SGD.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use espalier_plan::mesh::{Mesh, PerAxis};
use espalier_train::parallel::on_threads;
use espalier_train::run::{Observer, Outcome, Place, run};
use espalier_train::trainer::{StepReport, Trainer};
use espalier_train::{Error, Rates};

use crate::support::{Base, prepare, tiny_cnn, tiny_gpt};

fn pruned(base: &Base) -> Base {
    base.set("prune.method=magnitude").set("prune.sparsity=0.8").set("prune.state=compressed")
}

/// Takes steps on so many ranks, coming together after each if asked to, and returns every rank's losses and weights.
fn on(ranks: usize, base: &Base, steps: usize, always: bool) -> Vec<(Vec<f64>, Vec<f32>)> {
    let base = base.set(format!("parallel.data={ranks}")).set(format!("train.steps={steps}"));
    let (plan, dataset, device) = prepare(&base, 2);
    let dataset = Arc::new(dataset);
    let mesh = Mesh::new(PerAxis { data: ranks, ..PerAxis::ONES }).unwrap();
    let all = on_threads(&mesh, &device, |ranks, device| {
        let mut trainer = Trainer::among(plan.clone(), dataset.clone(), device, Some(ranks))?;
        let mut losses = Vec::new();
        for _ in 0..steps {
            losses.push(trainer.step()?.loss);
            if always {
                trainer.come_together()?;
            }
        }
        Ok((losses, trainer.weights().named().flat_map(|(_, tensor)| tensor.to_f32()).collect()))
    });
    all.unwrap()
}

#[test]
fn averaged_after_every_step_it_is_synchronous() {
    for optimizer in ["sgd", "momentum", "nesterov"] {
        for (kind, base) in [
            ("gpt", tiny_gpt(&["train.batch=12", "model.dropout=0.1", "learning_rate.peak=0.1"])),
            ("cnn", tiny_cnn(&["train.batch=12", "train.micro_batches=2"])),
            ("pruned", pruned(&tiny_gpt(&["train.batch=12", "learning_rate.peak=0.1"])).set("prune.at=2")),
        ] {
            let base = base.set(format!("optimizer.name={optimizer}"));
            let synchronous = &on(3, &base, 6, false)[0];
            let local = on(3, &base.set("parallel.average_every=1000"), 6, true);
            assert!(local.iter().all(|rank| *rank == local[0]), "{kind} {optimizer}: all hold the same");
            let far = |a: f64, b: f64| (a - b).abs() / a.abs().max(1.0);
            let losses = synchronous.0.iter().zip(&local[0].0).map(|(a, b)| far(*a, *b));
            assert!(losses.fold(0.0, f64::max) < 1e-5, "{kind} {optimizer}");
            let weights =
                synchronous.1.iter().zip(&local[0].1).map(|(a, b)| far(f64::from(*a), f64::from(*b)));
            let far = weights.fold(0.0, f64::max);
            assert!(far < 1e-5, "{kind} {optimizer}: {far}");
        }
    }
}

#[test]
fn ranks_go_apart_and_come_together() {
    let plain = tiny_gpt(&["train.batch=12", "parallel.average_every=4"]);
    let base = pruned(&plain).set("prune.at=6");
    let pair = |steps: usize| {
        // A run that ends before it prunes is refused; until then both are the same.
        let all = on(2, if steps > 6 { &base } else { &plain }, steps, false);
        (all[0].1 == all[1].1, all[0].0 == all[1].0)
    };
    // Before step 7 they come together to prune; losses are those of all samples.
    for (steps, together) in [(1, false), (3, false), (4, true), (6, false), (7, false), (8, true)] {
        assert_eq!(pair(steps), (together, true), "after {steps} steps");
    }
    assert_eq!(on(2, &base, 8, false), on(2, &base, 8, false), "runs repeat");
}

fn run_heard(
    folder: &Path,
    base: &Base,
    steps: usize,
    stop: &AtomicBool,
    observer: &mut (dyn Observer + Send),
) -> Result<Outcome, Error> {
    let (plan, dataset, device) = prepare(&base.set(format!("train.steps={steps}")), 2);
    let place = Place { resume: folder.join("run.toml").exists(), ..Place::at(folder) };
    run(plan, dataset, &device, &place, stop, observer)
}

fn run_to(folder: &Path, base: &Base, steps: usize) -> Outcome {
    run_heard(folder, base, steps, &AtomicBool::new(false), &mut ()).unwrap()
}

#[test]
fn a_run_that_goes_apart_learns_and_sends_little() {
    for optimizer in ["momentum", "adamw"] {
        let base = tiny_gpt(&["train.batch=12", "parallel.data=3", "train.eval_samples=40"])
            .set("learning_rate.decay_steps=1000")
            .set(format!("optimizer.name={optimizer}"))
            .set(if optimizer == "adamw" { "learning_rate.peak=3e-3" } else { "learning_rate.peak=0.1" });
        let folder = || tempfile::tempdir().unwrap();
        let one = run_to(folder().path(), &base, 1).summary.validation.loss.unwrap();
        let both = [base.clone(), base.set("parallel.average_every=8")];
        let [every, local] = both.map(|base| run_to(folder().path(), &base, 80).summary);
        let (synchronous, loss) = (every.validation.loss.unwrap(), local.validation.loss.unwrap());
        assert!(
            one - loss > 0.6 * (one - synchronous),
            "{optimizer}: {one} to {loss}, together {synchronous}"
        );
        assert_ne!(every.weights_hash, local.weights_hash, "it is another path");
        // Weights and moments once in eight steps, in the place of gradients in each.
        let vectors = if optimizer == "adamw" { 3.0 } else { 2.0 };
        let ratio = local.bytes_sent["all_reduce"] as f64 / every.bytes_sent["all_reduce"] as f64;
        assert!((ratio / (vectors / 8.0) - 1.0).abs() < 0.02, "{optimizer}: {ratio} of the bytes");
        for category in ["weights", "optimizer", "communication"] {
            let bytes = local.memory[category];
            assert_eq!(bytes.predicted, bytes.measured.map(|b| b as u64), "{optimizer} {category}");
        }
    }
}

/// Masks are drawn from averaged weights, whenever that is, or ranks would disagree and the run would end.
#[test]
fn every_method_prunes_alike_on_ranks_that_go_apart() {
    let gpt =
        tiny_gpt(&["train.batch=12", "parallel.data=2", "parallel.average_every=5", "prune.sparsity=0.7"]);
    let bf16 = gpt.set("train.precision=bf16");
    for (what, base) in [
        ("gradual", gpt.set("prune.method=gradual").set("prune.start=2").set("prune.every=3")),
        ("rigl", bf16.set("prune.method=rigl").set("prune.every=3")),
        ("set", gpt.set("prune.method=set").set("prune.every=4")),
        ("lottery", bf16.set("prune.method=lottery").set("prune.rate=0.5").set("prune.rewind=2")),
        ("early bird", gpt.set("prune.method=early-bird").set("prune.every=3").set("prune.latest=7")),
        ("snip", gpt.set("prune.method=snip")),
        ("2:4", gpt.set("prune.method=2:4").set("prune.at=3").set("prune.sparsity=0.5")),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let summary = run_to(folder.path(), &base, 16).summary;
        assert!(summary.sparsity > 0.45, "{what}: {}", summary.sparsity);
        // The last step is not one after which they come together by themselves: evaluation and checkpoint make them.
        let other = tempfile::tempdir().unwrap();
        assert_eq!(summary.weights_hash, run_to(other.path(), &base, 16).summary.weights_hash, "{what}");
    }
}

/// An observer that asks for a stop at a step.
struct StopAt<'a>(u64, &'a AtomicBool);

impl Observer for StopAt<'_> {
    fn step(&mut self, report: &StepReport, _: Rates, _: usize) {
        if report.step == self.0 {
            self.1.store(true, Ordering::Relaxed);
        }
    }
}

/// A stop waits until ranks are together, and the run goes on as if there had been none.
#[test]
fn a_stop_changes_nothing() {
    for optimizer in ["momentum", "lamb"] {
        let base = tiny_cnn(&["train.batch=12", "parallel.data=3", "parallel.average_every=4"])
            .set(format!("optimizer.name={optimizer}"));
        let expected = run_to(tempfile::tempdir().unwrap().path(), &base, 12).summary.weights_hash;
        let (folder, stop) = (tempfile::tempdir().unwrap(), AtomicBool::new(false));
        let stopped = run_heard(folder.path(), &base, 12, &stop, &mut StopAt(2, &stop)).unwrap();
        assert!(stopped.interrupted);
        assert_eq!(stopped.summary.steps, 4);
        assert_eq!(run_to(folder.path(), &base, 12).summary.weights_hash, expected, "{optimizer}");
    }
}
