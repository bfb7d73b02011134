//! Bytes for each parameter, dense and pruned, and of whole ranks.

use super::*;
use crate::config::{Override, RunFile};
use crate::schedule::{ScheduleName, ScheduleOptions};
use crate::spec::Precision;
use crate::spec::presets::{ResNet, StemForm, resnet};

/// On one rank.
fn of_run(model: &ModelSpec, run: &RunFile) -> MemoryPlan {
    let (pruning, batch) = (run.prune.clone(), BatchSizes { micro_batch: 2, ..run.batch() });
    let parameters = model.parameters();
    let kept = pruning.as_ref().map(|pruning| pruning.kept_by_parameter(&parameters));
    let prediction = Prediction {
        inputs: PredictionInputs::of(model, &parameters, batch.micro_batch),
        parameters: &parameters,
        storage: run.storage(),
        data_parallel: run.data_parallel(),
        batch,
        pruning: pruning.as_ref(),
        kept,
        is_pruned: false,
        model_parallel: ModelParallelRank::none(&parameters),
    };
    let schedule = ScheduleName::OneFOneB.schedule(&ScheduleOptions::new(1, 1)).unwrap();
    let full: StageBlocks = std::iter::once(0..model.blocks.len()).collect();
    prediction.stages(model, &full, &schedule).unwrap()[0]
}

fn predict(model: &ModelSpec, optimizer: &str, precision: Precision) -> MemoryPlan {
    let set = [format!("optimizer.name={optimizer}"), format!("train.precision={}", precision.name())];
    of_run(model, &RunFile::parse("", &set.map(Override::from)).unwrap())
}

/// 16 bytes a parameter for Adam in either precision; the split differs.
#[test]
fn bytes_for_each_parameter() {
    let model = resnet(ResNet::R18, (32, 32, 3), 10, StemForm::Small);
    let parameters = model.parameter_count();
    let buffers = 4 * 2 * 4800; // two statistics for each of its 4800 channels
    for (name, moments) in
        [("sgd", 0), ("momentum", 4), ("nesterov", 4), ("lars", 4), ("adam", 8), ("adamw", 8), ("lamb", 8)]
    {
        let full = predict(&model, name, Precision::F32);
        assert_eq!(full.weights, 4 * parameters + buffers);
        assert_eq!(full.gradients, 4 * parameters);
        assert_eq!(full.optimizer, moments * parameters, "{name}");
        let half = predict(&model, name, Precision::Bf16);
        assert_eq!(half.weights, 2 * parameters + buffers);
        assert_eq!(half.gradients, 2 * parameters);
        assert_eq!(half.optimizer, (4 + moments) * parameters, "{name}");
        assert_eq!(half.total(), half.weights + half.gradients + half.optimizer + half.activations);
    }
}

/// 2 bytes more for each gradient in bf16, but only where several micro-batches are added up.
#[test]
fn gradients_of_several_micro_batches_are_summed_in_f32() {
    let bytes = |set: &[&str]| {
        let set: Vec<Override> = set.iter().map(|one| (*one).into()).collect();
        RunFile::parse("", &set).unwrap().storage().gradient_bytes()
    };
    let many = "train.micro_batches=4";
    assert_eq!((bytes(&[]), bytes(&[many])), (4, 4));
    let bf16 = "train.precision=bf16";
    assert_eq!((bytes(&[bf16]), bytes(&[bf16, many])), (2, 4));
    let stages = "parallel.pipeline=2";
    assert_eq!(bytes(&[bf16, many, stages, "parallel.schedule=2bw"]), 4);
    assert_eq!(bytes(&[bf16, many, stages, "parallel.schedule=pipedream"]), 2, "a step after each");
}

/// bf16 with Adam: 2.125 + 14 f bytes and the directory (SAMO: 24 f + 2, dense: 20), or 12 f with the low
/// bits, and 8 f with moments in bf16.
#[test]
fn bytes_for_each_pruned_parameter() {
    let model = resnet(ResNet::R18, (32, 32, 3), 10, StemForm::Small);
    for (sparsity, master, moments, most) in [
        (0.9, "f32", "f32", 3.55),
        (0.8, "f32", "f32", 4.95),
        (0.9, "low-bits", "f32", 3.35),
        (0.9, "low-bits", "bf16", 2.95),
    ] {
        let text = format!(
            "[prune]\nmethod = \"random\"\nsparsity = {sparsity}\n[train]\nprecision = \"bf16\"\n[optimizer]\nmaster = \"{master}\"\nmoments = \"{moments}\""
        );
        let run = RunFile::parse(&text, &[]).unwrap();
        let (memory, dense) = (of_run(&model, &run), predict(&model, "adamw", Precision::Bf16));
        let prune = run.prune.clone().unwrap();
        let candidates: u64 =
            model.parameters().iter().filter(|p| prune.covers(p)).map(|p| p.elements()).sum();
        let others = 16 * (model.parameter_count() - candidates);
        let state = memory.weights + memory.gradients + memory.optimizer + memory.mask;
        let buffers = memory.weights - 2 * model.parameter_count();
        // Those not pruned have 16 bytes each, 2 less with the low bits and 4 less with moments in bf16.
        let less = if master == "f32" { 0 } else { 2 } + if moments == "f32" { 0 } else { 4 };
        let each = (state - buffers - others / 16 * (16 - less)) as f64 / candidates as f64;
        assert!(each <= most && each > most - 0.03, "{sparsity}: {each}");
        assert_eq!(memory.weights, dense.weights);
    }
}
