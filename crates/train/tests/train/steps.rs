//! What a step does: it learns, it repeats, it accumulates, it clips, and it refuses numbers that are not finite.

use espalier_train::Error;
use espalier_train::trainer::StepReport;

use crate::support::{self, Base, rotary_llama, tiny_cnn, tiny_gpt, tiny_llama};

fn steps(base: &Base, count: usize, threads: usize) -> (Vec<StepReport>, String) {
    let mut trainer = base.trainer(threads);
    let reports = (0..count).map(|_| trainer.step().unwrap()).collect();
    (reports, trainer.params().hash().unwrap())
}

fn losses(base: &Base, count: usize) -> Vec<f64> {
    steps(base, count, 2).0.iter().map(|report| report.loss).collect()
}

#[test]
fn the_loss_falls_in_both_precisions_and_they_stay_close() {
    let base = tiny_gpt("learning_rate.decay_steps=1000 train.batch=16 model.width=32 model.context=24");
    let exact = losses(&base, 60);
    let rounded = losses(&base.set("train.precision=bf16"), 60);
    assert!(exact[59] < exact[0] - 0.3, "{} -> {}", exact[0], exact[59]);
    for (step, (a, b)) in exact.iter().zip(&rounded).enumerate() {
        assert!((a - b).abs() < 0.05, "step {step}: {a} in f32, {b} in bf16");
    }
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    for base in [tiny_gpt("model.dropout=0.1"), tiny_gpt("train.precision=bf16"), tiny_cnn("")] {
        let one = steps(&base, 4, 1).1;
        assert_eq!(one, steps(&base, 4, 2).1);
        assert_eq!(one, steps(&base, 4, 3).1);
    }
}

#[test]
fn recomputation_changes_no_bit() {
    for base in [tiny_gpt("model.dropout=0.2"), tiny_cnn("")] {
        for recompute in ["block", "1"] {
            let remade = base.set(format!("train.recompute={recompute}"));
            assert_eq!(steps(&base, 3, 2).1, steps(&remade, 3, 2).1, "{recompute}");
        }
    }
    for base in [
        tiny_gpt("model.dropout=0.2"),
        tiny_gpt("train.precision=bf16 train.micro_batches=2"),
        tiny_llama(""),
        rotary_llama(""),
        rotary_llama("train.precision=bf16 train.micro_batches=2"),
    ] {
        assert_eq!(steps(&base, 3, 2).1, steps(&base.set("train.recompute=attention"), 3, 2).1);
    }
}

#[test]
fn every_optimizer_learns() {
    for (optimizer, lr) in [
        ("sgd", 1.0),
        ("momentum", 0.2),
        ("nesterov", 0.2),
        ("adam", 1e-2),
        ("adamw", 1e-2),
        ("lars", 20.0),
        ("lamb", 0.05),
    ] {
        let base = tiny_gpt("learning_rate.decay_steps=1000 train.batch=16")
            .set(format!("optimizer.name={optimizer} learning_rate.peak={lr}"));
        let curve = losses(&base, 40);
        assert!(curve[39] < curve[0] - 0.12, "{optimizer}: {} -> {}", curve[0], curve[39]);
    }
}

#[test]
fn clipping_bounds_the_step_and_not_the_report() {
    let after_a_step = |base: &Base| -> (f64, Vec<f32>) {
        let mut trainer = base.trainer(1);
        let norm = trainer.step().unwrap().grad_norm;
        (norm, trainer.params().named().flat_map(|(_, tensor)| tensor.to_f32()).collect())
    };
    let base = tiny_gpt("optimizer.name=sgd learning_rate.peak=1.0");
    let (norm, _) = after_a_step(&base);
    let (reported, clipped) = after_a_step(&base.set(format!("train.clip={}", norm / 2.0)));
    assert_eq!(reported, norm, "the norm is reported before clipping");
    // Half of the gradient at the full rate is the full gradient at half the rate, up to rounding.
    let (_, halved) = after_a_step(&base.set("learning_rate.peak=0.5"));
    assert!(clipped.iter().zip(&halved).all(|(a, b)| (a - b).abs() <= 1e-6), "clipped by half");
}

#[test]
fn the_noise_scale_is_measured_where_asked_for() {
    let base = tiny_gpt("train.batch=16 train.micro_batches=4 train.noise_scale=true");
    let reports = steps(&base, 10, 2).0;
    let last = reports.last().unwrap().noise_scale.expect("defined after ten steps");
    assert!(last > 0.0 && last.is_finite(), "{last}");
    let untied = steps(&base.set("model.tied=false"), 10, 2).0;
    assert!(untied.last().unwrap().noise_scale.is_some());
    assert_eq!(steps(&tiny_gpt(""), 1, 1).0[0].noise_scale, None);
}

#[test]
fn bad_steps_change_nothing_and_end_the_run_after_a_few() {
    // A rate that overflows the weights at the first step makes every later loss infinite or NaN.
    let base = tiny_gpt("optimizer.name=sgd learning_rate.peak=1e38 learning_rate.warmup=0")
        .set("train.max_bad_steps=3 train.steps=20");
    let mut trainer = base.trainer(2);
    while trainer.step().unwrap().taken {}
    let broken = trainer.params().hash().unwrap();
    assert!(!trainer.step().unwrap().taken);
    assert_eq!(trainer.params().hash().unwrap(), broken, "a bad step leaves the weights");
    assert_eq!(trainer.progress().bad_steps, 2);

    let (ended, observer) = base.run_observed();
    let error = ended.unwrap_err();
    assert!(matches!(error, Error::Diverged { bad_steps: 3, .. }), "{error}");
    assert_eq!(observer.warnings.len(), 3);
}

#[test]
fn every_family_of_image_models_takes_a_step() {
    let shapes = |settings: &str| {
        let base = support::images().set("train.batch=2 optimizer.name=sgd").set(settings);
        base.trainer(2).step().unwrap().loss
    };
    for settings in [
        "model.name=mlp model.hidden=[32, 16]",
        "model.name=simple-cnn",
        "model.name=resnet8 train.precision=bf16",
        "model.name=resnet-18 train.recompute=block",
        "model.name=resnet-50",
        "model.name=vgg-16 model.batch_norm=true",
    ] {
        let loss = shapes(settings);
        assert!(loss.is_finite() && loss > 0.1, "{settings}: {loss}");
    }
}
