//! Measures of the loss around weights against PyTorch's f64 (`../oracle/surface.py` says how those were made).

use std::path::Path;

use espalier_nn::weights::Weights;
use espalier_tensor::Mask;
use espalier_tensor::ops::compress::apply;
use espalier_train::context::TrainContext;
use espalier_train::measure::{
    LossSamples, LossSurface, Neighbourhood, Probes, gradient_noise, largest_eigenvalue, sharpness,
    smoothness, spectrum, step_and_measure,
};
use espalier_train::parallel::Ranks;
use espalier_train::state::ParamStore;
use espalier_train::trainer::Trainer;
use serde_json::Value;

use crate::fixture::Fixture;
use crate::support::{Base, base, on_every_rank, prepare, tiny_cnn, tiny_gpt};

/// A network of the file at the end of its step.
struct Measured {
    _folder: tempfile::TempDir,
    context: TrainContext,
    start: Weights,
    after: ParamStore,
    truth: Value,
    epsilon: f64,
}

impl Measured {
    fn read(case: &str, network: &str, layers: &str) -> Measured {
        let fixture = Fixture::read(include_bytes!("../oracle/surface.safetensors"));
        let folder = tempfile::tempdir().unwrap();
        fixture.write_images(&format!("pixels/{network}"), &format!("labels/{network}"), folder.path());
        let context = context(&run_file(folder.path(), layers));
        let fresh = |prefix: String| {
            let TrainContext { plan, params, device, dtype, .. } = &context;
            let mut params =
                ParamStore::new(params, context.local(), device, *dtype, plan.seed, true).unwrap();
            for (_, param) in params.iter_mut() {
                let values = &fixture.f32[&format!("{prefix}/{}", param.plan.name)];
                param.weight_mut().slice_mut().copy_from_slice(values);
            }
            params
        };
        let (start, mut after) = (fresh(format!("start/{network}")), fresh(format!("after/{case}")));
        if case.ends_with("masked") {
            for (_, param) in after.iter_mut() {
                let Some(words) = fixture.words.get(&format!("mask/{}", param.plan.name)) else { continue };
                let mask = Mask::new(&context.device, param.len(), words).unwrap();
                apply(param.weight_mut(), &mask).unwrap();
                param.set_mask(mask, |_| Ok(None)).unwrap();
            }
        }
        let truths: Value = serde_json::from_str(&fixture.metadata["truth"]).unwrap();
        let epsilon = fixture.metadata["epsilon"].parse().unwrap();
        let start = start.dense_copy().unwrap();
        Measured { _folder: folder, context, start, after, truth: truths[case].clone(), epsilon }
    }

    fn all() -> [Measured; 3] {
        let cnn = "{type='conv', output=3, kernel=3}, {type='relu'}, {type='max_pool', kernel=2}, {type='flatten'}, \
                   {type='linear', output=4}";
        let linear = "{type='flatten'}, {type='linear', output=3}";
        [
            Measured::read("cnn-dense", "cnn", cnn),
            Measured::read("cnn-masked", "cnn", cnn),
            Measured::read("linear", "linear", linear),
        ]
    }

    fn surface(&self) -> LossSurface<'_> {
        LossSurface::new(&self.context, &self.after, LossSamples::default()).unwrap()
    }

    fn truth(&self, what: &str) -> f64 {
        self.truth[what].as_f64().unwrap()
    }

    fn eigenvalues(&self) -> Vec<f64> {
        self.truth["eigenvalues"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
    }

    fn assert_near(&self, what: &str, ours: f64, tolerance: f64) {
        let truth = self.truth(what);
        assert!((ours / truth - 1.0).abs() < tolerance, "{what}: {ours}, not {truth}");
    }
}

fn run_file(folder: &Path, layers: &str) -> Base {
    let text = "[model]\nname = \"custom\"\n[data]\nkind = \"idx\"\nvalidation = 0.0";
    let base = base(text).set(format!("model.layers=[{layers}]"));
    base.set(format!("data.path='{}' train.batch=5", folder.display()))
}

fn context(base: &Base) -> TrainContext {
    let (plan, dataset, device) = prepare(base, 1);
    TrainContext::new(plan, dataset, &device, Ranks::single()).unwrap()
}

#[test]
fn loss_and_gradient_over_all_samples_are_pytorchs() {
    for measured in Measured::all() {
        let surface = measured.surface();
        let (loss, gradient) = surface.loss_and_gradient(&surface.center().unwrap()).unwrap();
        measured.assert_near("loss", loss, 1e-6);
        measured.assert_near("gradient", surface.norm(&gradient).unwrap(), 1e-5);
        assert_eq!(surface.dimension().unwrap() as usize, measured.eigenvalues().len());
    }
}

/// At the start weights that will be pruned are still there: a step begins at what is left of them.
#[test]
fn local_smoothness_is_that_of_its_definition_in_f64() {
    for measured in Measured::all() {
        let found = smoothness(&measured.surface(), &measured.start).unwrap().unwrap();
        measured.assert_near("length", found.length, 1e-4);
        measured.assert_near("smoothness", found.value, 1e-3);
        assert_eq!(found.share, measured.truth("share"));
    }
}

#[test]
fn weights_that_did_not_move_have_no_smoothness() {
    let [measured, ..] = Measured::all();
    assert_eq!(smoothness(&measured.surface(), &measured.after.dense_copy().unwrap()).unwrap(), None);
}

#[test]
fn the_largest_eigenvalue_is_lapacks() {
    for measured in Measured::all() {
        let found = largest_eigenvalue(&measured.surface()).unwrap();
        let truth = *measured.eigenvalues().last().unwrap();
        assert!(found.settled, "{found:?}");
        // Power iteration ends where two products agree to a thousandth.
        assert!((found.value / truth - 1.0).abs() < 0.01, "{} is {found:?}, not {truth}", measured.truth);
    }
}

/// With as many steps as there are dimensions the nodes are the eigenvalues that the direction reaches; with
/// a quarter of them the ends are as good as exact.
#[test]
fn the_spectrum_has_lapacks_ends_and_trace() {
    for measured in Measured::all() {
        let truth = measured.eigenvalues();
        let (surface, size) = (measured.surface(), truth.last().unwrap().max(-truth[0]));
        let trace: f64 = truth.iter().sum();
        for (directions, steps) in [(1, truth.len()), (8, truth.len().div_ceil(4).max(12))] {
            let found = spectrum(&surface, Probes { directions, steps }).unwrap();
            let (low, high) = found.ends().unwrap();
            assert!((low - truth[0]).abs() < 5e-3 * size, "{steps} steps: {low}, not {}", truth[0]);
            assert!((high - truth.last().unwrap()).abs() < 1e-3 * size, "{steps} steps: {high}");
            let fractions: f64 = found.nodes.iter().map(|(_, fraction)| fraction).sum();
            assert!((fractions - 1.0).abs() < 1e-6, "{fractions}");
            // Eight directions of signs: off by the elements beside the diagonal.
            let apart = (found.trace() / trace - 1.0).abs();
            assert!(directions < 8 || apart < 0.25, "{} is not {trace}", found.trace());
        }
    }
}

/// Where the loss is convex its maximum over the box is at a corner, and all corners were tried;
/// elsewhere twenty ascents of a hundred steps each found hardly more.
#[test]
fn sharpness_is_the_highest_corner_of_a_convex_loss() {
    for measured in Measured::all() {
        let within = Neighbourhood { epsilon: measured.epsilon, steps: 10 };
        let found = sharpness(&measured.surface(), within).unwrap();
        let is_convex = measured.after.len() == 2;
        measured.assert_near("highest", found.highest, if is_convex { 1e-6 } else { 1e-3 });
        let (loss, highest) = (measured.truth("loss"), measured.truth("highest"));
        let percent = 100.0 * (highest - loss) / (1.0 + loss);
        assert!((found.value / percent - 1.0).abs() < 0.01, "{found:?}, not {percent}");
    }
}

#[test]
fn variance_and_signal_are_those_of_samples_gradients_one_by_one() {
    for measured in Measured::all() {
        let over = LossSamples { micro_batch: Some(1), ..LossSamples::default() };
        let surface = LossSurface::new(&measured.context, &measured.after, over).unwrap();
        let found = gradient_noise(&surface).unwrap();
        measured.assert_near("variance", found.variance, 1e-4);
        let signal = measured.truth("signal");
        assert!((found.signal - signal).abs() < 1e-4 * found.variance, "{found:?}, not {signal}");
        if signal > 0.0 {
            assert!(
                (found.critical_batch().unwrap() * signal / measured.truth("variance") - 1.0).abs() < 1e-2
            );
        }
    }
}

/// Replicas split the samples: what they find together is what one rank finds, up to the order of sums.
#[test]
fn two_ranks_measure_what_one_does() {
    let show = |trainer: Trainer| {
        let surface = LossSurface::of(&trainer, LossSamples { samples: Some(16), micro_batch: None })?;
        let noise = gradient_noise(&surface)?;
        let (sharpness, largest) =
            (sharpness(&surface, Neighbourhood::default())?, largest_eigenvalue(&surface)?);
        Ok([noise.variance, noise.signal, sharpness.loss, sharpness.value, largest.value])
    };
    let run = tiny_gpt("train.batch=8 model.layers=1");
    let one = on_every_rank(&run.set("train.micro_batches=2"), show)[0];
    for split in ["parallel.data=2", "parallel.pipeline=2"] {
        let run = run.set(split).set(if split.contains("data") {
            "train.micro_batches=1"
        } else {
            "train.micro_batches=2"
        });
        for two in on_every_rank(&run, show) {
            for (one, two) in one.iter().zip(two) {
                assert!((two / one - 1.0).abs() < 5e-3, "{split}: {two}, not {one}");
            }
        }
    }
}

/// A run that is measured on the way is the run that it would have been.
#[test]
fn measuring_changes_nothing_of_a_run() {
    let run = tiny_cnn("prune.method=snip prune.sparsity=0.5");
    let hash = |measures: bool| {
        let mut trainer = run.trainer(2);
        for _ in 0..3 {
            let over = LossSamples { samples: Some(40), micro_batch: None };
            match measures {
                false => drop(trainer.step().unwrap()),
                true => {
                    let (report, found) = step_and_measure(&mut trainer, over).unwrap();
                    assert!(report.taken && found.unwrap().value > 0.0);
                    sharpness(&LossSurface::of(&trainer, over).unwrap(), Neighbourhood::default()).unwrap();
                }
            }
        }
        trainer.params().hash().unwrap()
    };
    assert_eq!(hash(true), hash(false));
}

#[test]
fn samples_that_there_are_not_are_refused_in_a_sentence() {
    let trainer = tiny_cnn("").trainer(2);
    let refused = |samples| {
        let surface = LossSurface::of(&trainer, LossSamples { samples: Some(samples), micro_batch: None });
        surface.and_then(|surface| gradient_noise(&surface)).unwrap_err().to_string()
    };
    assert_eq!(
        [0, 181, 12].map(refused),
        [
            "`samples` is 0, and there are 180 training samples: it must be 1 to 180",
            "`samples` is 181, and there are 180 training samples: it must be 1 to 180",
            "`samples` is 12, and noise is measured between micro-batches of 8: it must be 16 or more",
        ]
    );
}
