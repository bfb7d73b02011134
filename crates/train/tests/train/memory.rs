//! Every byte is counted, and the plan's prediction is what the ledger measures.

use espalier_plan::spec::Recompute;
use espalier_tensor::{Category, DType};
use espalier_train::data::Split;
use espalier_train::layers::{Forward, Mode, Share, Stash};
use espalier_train::model::Model;
use espalier_train::trainer::Trainer;
use espalier_train::weights::Weights;

use crate::support::{prepare, tiny_cnn, tiny_gpt};

#[test]
fn kept_activations_are_exactly_those_predicted() {
    for base in [
        tiny_gpt(&[]),
        tiny_gpt(&["model.norm=rms", "model.activation=silu"]),
        tiny_gpt(&["train.precision=bf16"]),
        tiny_cnn(&[]),
        tiny_cnn(&["train.precision=bf16"]),
    ] {
        let (plan, dataset, device) = prepare(&base, 2);
        let dtype = if plan.run.train.precision.size() == 2 { DType::Bf16 } else { DType::F32 };
        let weights = Weights::initialise(&plan.model, &device, dtype, 0).unwrap();
        let model = Model::build(&plan.model, false);
        let samples: Vec<(u64, usize)> = (0..plan.micro_batch).map(|i| (0, i)).collect();
        let host = dataset.batch(Split::Train, &samples).unwrap();
        let mut stash = Stash::new();
        let mut statistics = Vec::new();
        let mut pass = Forward {
            weights: &weights,
            mode: Mode::Train,
            random: 0,
            share: &Share::default(),
            stash: &mut stash,
            statistics: &mut statistics,
        };
        let x = model.forward(host.inputs.upload(&device, dtype).unwrap(), &mut pass).unwrap();
        let measured = device.ledger().current(Category::Activations) as u64;
        let predicted =
            plan.model.activation_bytes(plan.micro_batch, plan.run.train.precision, Recompute::None).unwrap();
        assert_eq!(measured, predicted, "{}", plan.model.name);
        drop((x, stash, statistics));
        assert_eq!(device.ledger().current(Category::Activations), 0);
        assert_eq!(device.ledger().current(Category::Workspace), 0);
    }
}

#[test]
fn weights_gradients_and_state_are_exactly_those_predicted() {
    for optimizer in ["sgd", "momentum", "adamw", "lars", "lamb"] {
        for precision in ["f32", "bf16"] {
            let base = tiny_gpt(&["model.tied=false"])
                .set(format!("optimizer.name={optimizer}"))
                .set(format!("train.precision={precision}"));
            let (plan, dataset, device) = prepare(&base, 1);
            let predicted = plan.memory;
            let mut trainer = Trainer::new(plan, dataset, &device).unwrap();
            trainer.step().unwrap();
            let ledger = device.ledger();
            for (category, bytes) in [
                (Category::Weights, predicted.weights),
                (Category::Gradients, predicted.gradients),
                (Category::Optimizer, predicted.optimizer),
            ] {
                assert_eq!(ledger.peak(category) as u64, bytes, "{optimizer} {precision} {category}");
            }
            drop(trainer);
            assert_eq!(ledger.total(), 0, "nothing is left");
        }
    }
}

#[test]
fn recomputation_lowers_the_peak_of_activations() {
    let peak = |recompute: &str| {
        let base = tiny_gpt(&["model.layers=6"]).set(format!("train.recompute={recompute}"));
        let (plan, dataset, device) = prepare(&base, 1);
        Trainer::new(plan, dataset, &device).unwrap().step().unwrap();
        device.ledger().peak(Category::Activations)
    };
    let (all, block) = (peak("none"), peak("block"));
    assert!(block * 2 < all, "{block} with recomputation, {all} without");
}
