//! Every byte is counted, and the plan's prediction is what the ledger measures.

use espalier_data::DataSplit;
use espalier_nn::layers::{BatchSlice, ForwardContext, Mode};
use espalier_nn::model::Model;
use espalier_nn::weights::Weights;
use espalier_plan::storage::StorageForms;
use espalier_tensor::{Category, DType, StashedTensor};

use crate::support::{
    Base, assert_peaks, images, peaks, planned, prepare, rotary_llama, tiny_cnn, tiny_gpt, tiny_llama,
};

const SCHEDULES: [&str; 9] =
    ["gpipe", "1f1b", "interleaved", "pipedream", "2bw", "chimera", "chimera-doubling", "zb-h1", "axonn"];

#[test]
fn kept_activations_are_exactly_those_predicted() {
    for base in [
        tiny_gpt(""),
        tiny_gpt("model.norm=rms model.activation=silu"),
        tiny_gpt("train.precision=bf16"),
        tiny_llama(""),
        tiny_llama("train.precision=bf16"),
        tiny_gpt("train.recompute=attention"),
        tiny_gpt("train.recompute=2 model.layers=4"),
        tiny_gpt("train.recompute=attention train.precision=bf16 model.dropout=0.1"),
        tiny_llama("train.recompute=attention"),
        rotary_llama(""),
        rotary_llama("train.precision=bf16 train.recompute=attention"),
        tiny_cnn(""),
        tiny_cnn("train.precision=bf16"),
        tiny_cnn(NORMED),
        tiny_cnn(NORMED).set("train.precision=bf16 train.recompute=block"),
    ] {
        let (plan, dataset, device) = prepare(&base, 2);
        let dtype = if plan.storage.precision.size() == 2 { DType::Bf16 } else { DType::F32 };
        let weights = Weights::initialise(&plan.model, &device, dtype, 0).unwrap();
        let model = Model::build(&plan.model, plan.storage.recompute);
        let samples: Vec<(u64, usize)> = (0..plan.batch.micro_batch).map(|i| (0, i)).collect();
        let host = dataset.batch(DataSplit::Train, &samples).unwrap();
        let mut pass = ForwardContext::new(&weights, Mode::Train, 0, BatchSlice::default());
        let x = model.forward(host.inputs.upload(&device, dtype).unwrap(), &mut pass).unwrap();
        let x = StashedTensor::new(x);
        let measured = device.ledger().current(Category::Activations) as u64;
        let StorageForms { precision, recompute, .. } = plan.storage;
        let full = std::iter::once(0..plan.model.blocks.len());
        let stages =
            plan.model.stage_activations(full, plan.batch.micro_batch, precision, recompute).unwrap();
        assert_eq!(measured, stages[0].kept, "{}, {recompute}", plan.model.name);
        drop((x, pass));
        assert_eq!(device.ledger().current(Category::Activations), 0);
        // It has the rotations of all positions.
        drop(model);
        assert_eq!(device.ledger().current(Category::Workspace), 0);
    }
}

/// Convolutions behind a batch norm and ReLU, which have their input made again, in a residual branch too.
const NORMED: &str = r#"model.layers=[
    { type = "conv", output = 8, kernel = 3, padding = 1 }, { type = "batch_norm" }, { type = "relu" },
    { type = "conv", output = 8, kernel = 3, padding = 1 }, { type = "relu" }, { type = "max_pool", kernel = 2 },
    { type = "conv", output = 16, kernel = 1 }, { type = "batch_norm" }, { type = "relu" },
    { type = "residual", branch = [
        { type = "conv", output = 8, kernel = 1 }, { type = "batch_norm" }, { type = "relu" },
        { type = "conv", output = 16, kernel = 3, padding = 1 }, { type = "batch_norm" }] },
    { type = "relu" }, { type = "global_avg_pool" }, { type = "linear", output = 10 }]"#;

/// What every rank keeps of the micro-batches in flight, at the peak of real steps: the plan's, to the byte.
#[test]
fn activations_in_flight_are_exactly_those_predicted_for_every_rank() {
    let gpt = tiny_gpt("model.tied=false");
    let resnet = images().set("model.name=resnet8 data.count=64 data.size=16 train.batch=8");
    let (transformer, other) = (&["none", "attention", "block", "1"][..], &["none", "block"][..]);
    let models = [
        (2, gpt.clone(), transformer),
        (2, gpt.set("train.precision=bf16 model.norm=rms model.activation=silu"), transformer),
        (4, gpt.set("model.layers=7"), transformer),
        (2, tiny_llama(""), transformer),
        (2, rotary_llama("model.tied=false"), transformer),
        (2, resnet, other),
        (2, tiny_cnn(""), other),
        (2, tiny_cnn("train.batch_norm_group=1 train.precision=bf16"), other),
    ];
    for (number, (stages, base, again)) in models.into_iter().enumerate() {
        for (place, schedule) in SCHEDULES.into_iter().enumerate() {
            for (i, recompute) in again.iter().enumerate() {
                // In the short form one for each model and schedule: each schedule has all of them, and each
                // model.
                if !espalier_testing::long() && i != (number + place) % again.len() {
                    continue;
                }
                let base = base
                    .set("train.batch=8 train.micro_batches=4 train.steps=4")
                    .set(format!("parallel.pipeline={stages} parallel.schedule={schedule}"))
                    .set(format!("train.recompute={recompute}"));
                // Where a step ends before the next begins, all are as the first.
                let steps = if ["pipedream", "2bw"].contains(&schedule) { 4 } else { 2 };
                let [measured, predicted] = peaks(&base, steps, [Category::Activations]);
                let case = format!("model {number}, {schedule} of {stages} stages, recompute = {recompute}");
                if schedule == "axonn" && stages > 2 {
                    // Ranks between the ends run what arrives first: each backward that comes early leaves a
                    // micro-batch less in flight, of which rank r has r fewer in 1F1B.
                    let plan = planned(&base.set("parallel.schedule=1f1b"));
                    let fewer = |rank: usize| {
                        let [most] = predicted[rank];
                        let each = (most - plan.rank(rank).unwrap().memory.activations) / rank as u64;
                        (0..4).map(|less| [most - less * each]).any(|peak| peak == measured[rank])
                    };
                    let ends = [0, stages - 1];
                    let is_right = |rank| {
                        if ends.contains(&rank) { measured[rank] == predicted[rank] } else { fewer(rank) }
                    };
                    assert!((0..stages).all(is_right), "{case}: {measured:?} of {predicted:?}");
                } else {
                    assert_eq!(measured, predicted, "{case}");
                }
            }
        }
    }
}

/// Ranks that have their heads of each attention, and perhaps their shard of the sequence around it, keep what
/// the plan says.
#[test]
fn activations_of_ranks_along_the_tensor_axis_are_exactly_those_predicted() {
    let gpt = tiny_gpt("model.tied=false parallel.tensor=2");
    // Four ranks read the keys and values of two heads, and of one.
    let llama = tiny_llama("parallel.tensor=4");
    let rotary = rotary_llama("parallel.tensor=4");
    for base in [gpt, llama, rotary] {
        for sequence in [false, true] {
            for recompute in ["none", "attention", "block"] {
                let more = format!("parallel.sequence={sequence} train.recompute={recompute}");
                assert_peaks(&base.set(&more), 1, [Category::Activations]);
            }
        }
    }
}

/// The same where gradients of weights are deferred: what they read of a collective's gradient is kept once.
#[test]
fn activations_deferred_along_the_tensor_axis_are_exactly_those_predicted() {
    let stages = "parallel.pipeline=2 parallel.schedule=zb-h1 train.batch=8 train.micro_batches=4";
    let gpt = tiny_gpt("model.tied=false parallel.tensor=2");
    let cnn = tiny_cnn("parallel.tensor=2");
    for base in [
        gpt.clone(),
        gpt.set("parallel.sequence=true"),
        gpt.set("train.recompute=block"),
        gpt.set("train.recompute=1"),
        tiny_llama("parallel.tensor=2"),
        rotary_llama("parallel.tensor=2 model.tied=false"),
        tiny_llama("parallel.tensor=2 parallel.sequence=true"),
        cnn,
    ] {
        assert_peaks(&base.set(stages), 1, [Category::Activations]);
    }
}

/// Dense, and where pruning comes first of what is left; moments of either type, masters of either form.
#[test]
fn weights_gradients_and_state_are_exactly_those_predicted() {
    let all = [Category::Weights, Category::Gradients, Category::Optimizer, Category::Mask];
    let dense = tiny_gpt("model.tied=false");
    let pruned = dense.set("prune.scope=layer prune.method=random prune.sparsity=0.75");
    for optimizer in ["sgd", "momentum", "adamw", "lars", "lamb"] {
        // Sums over several micro-batches are f32.
        for (precision, micro_batches) in [("f32", 1), ("bf16", 1), ("f32", 2), ("bf16", 2)] {
            let more = format!(
                "optimizer.name={optimizer} train.precision={precision} train.micro_batches={micro_batches}"
            );
            assert_peaks(&dense.set(&more), 1, all);
        }
    }
    for more in [
        "train.precision=f32",
        "train.precision=bf16",
        "train.precision=bf16 optimizer.master=low-bits",
        "train.precision=bf16 train.micro_batches=4",
    ] {
        assert_peaks(&pruned.set(more), 1, all);
        let narrow = format!("{more} optimizer.moments=bf16");
        assert_peaks(&dense.set(&narrow), 1, all);
        assert_peaks(&pruned.set(&narrow), 1, all);
    }
}

/// Rounded for the wire a gradient at a time: no rank holds a sum and its rounding of all of them.
#[test]
fn gradients_of_ranks_are_exactly_those_predicted() {
    for (data, stages, zero) in [(2, 1, 0), (2, 1, 1), (1, 2, 0), (2, 2, 0), (2, 1, 2), (3, 1, 2), (2, 2, 2)]
    {
        for (precision, micro_batches) in [("bf16", 1), ("bf16", 2), ("f32", 2)] {
            let base = tiny_gpt("model.tied=false train.batch=24")
                .set(format!("train.precision={precision} train.micro_batches={micro_batches}"))
                .set(format!("parallel.data={data} parallel.pipeline={stages} parallel.zero={zero}"));
            let [measured, _] = peaks(&base, 1, [Category::Gradients]);
            let layout = format!("{data} x {stages}, shared {zero}, {precision} in {micro_batches}");
            assert_eq!(measured.into_iter().max(), Some([planned(&base).memory.gradients]), "{layout}");
        }
    }
}

/// Masks that move: state and masks stay as large as they are, one parameter's old and new ones side by side
/// for a moment as scratch space; where several micro-batches make a gradient, RigL accumulates a quarter of
/// the dense one in f32.
#[test]
fn moving_masks_hold_exactly_what_is_predicted() {
    let gpt = tiny_gpt("model.tied=false train.batch=8 model.layers=3 prune.every=2");
    let cnn = tiny_cnn("prune.every=2");
    for (what, base) in [("gpt", gpt), ("cnn", cnn)] {
        for (method, precision, micro_batches, layout) in [
            ("rigl", "f32", 1, ""),
            ("rigl", "f32", 4, ""),
            ("rigl", "bf16", 2, ""),
            ("set", "bf16", 2, ""),
            ("rigl", "f32", 2, "parallel.tensor=2"),
            ("rigl", "f32", 2, "parallel.data=2"),
            ("rigl", "bf16", 2, "parallel.pipeline=2"),
        ] {
            let base = base
                .set(format!("prune.method={method} prune.sparsity=0.75 train.precision={precision}"))
                .set(format!("train.micro_batches={micro_batches} train.steps=12"));
            let case = format!("{what}, {method}, {precision} in {micro_batches} {layout}");
            let all = [Category::Mask, Category::Scoring, Category::Optimizer];
            let [mut measured, mut predicted] = peaks(&base.set(layout), 4, all);
            assert_eq!(predicted[0][1] > 0, method == "rigl" && micro_batches > 1, "{case}");
            if layout.starts_with("parallel.tensor") {
                // Of a parameter in shards only the run knows where kept weights lie: a fair share is planned.
                measured.iter_mut().chain(&mut predicted).for_each(|bytes| bytes[2] = 0);
            }
            assert_eq!(measured, predicted, "{case}");
        }
    }
}

/// Beside all-reduces of gradients: what ranks gather between layers, and of logits.
#[test]
fn messages_of_ranks_along_the_tensor_axis_are_exactly_those_predicted() {
    let gpt = tiny_gpt("train.batch=8 parallel.tensor=2");
    for (what, base) in [
        ("paired", gpt.clone()),
        ("bf16", gpt.set("train.precision=bf16")),
        ("several micro-batches", gpt.set("train.micro_batches=2")),
        ("stages", gpt.set("parallel.pipeline=2 train.micro_batches=2 model.tied=false")),
        ("sequence", gpt.set("parallel.sequence=true")),
        ("plain", gpt.set("parallel.linear=plain")),
        ("replicas", gpt.set("parallel.data=2")),
        ("llama", tiny_llama("parallel.tensor=2")),
        ("llama family", rotary_llama("parallel.tensor=2")),
        ("images", tiny_cnn("parallel.tensor=2")),
    ] {
        let [measured, predicted] = peaks(&base.set("train.steps=2"), 2, [Category::Communication]);
        assert_eq!(measured, predicted, "{what}");
        assert!(measured.iter().any(|[bytes]| *bytes > 0), "{what}: something is sent");
    }
}

/// What choosing masks takes is in the ledger: the keys of a parameter at a time, all of it gone afterwards,
/// and the weights that a lottery goes back to for as long as it may.
#[test]
fn what_pruning_takes_is_counted() {
    let counts = |base: &Base| -> (usize, usize) {
        let plan = planned(base);
        let prune = plan.pruning.clone().unwrap();
        let candidates = plan.model.parameters().into_iter().filter(|p| prune.covers(p));
        (candidates.map(|p| p.elements() as usize).max().unwrap(), plan.model.parameter_count() as usize)
    };
    for method in ["magnitude", "random", "snip"] {
        let base = tiny_gpt(format!("prune.sparsity=0.5 prune.method={method}"));
        let (largest, _) = counts(&base);
        let mut trainer = base.trainer(1);
        let device = trainer.device().clone();
        trainer.prune().unwrap().unwrap();
        assert!(device.ledger().peak(Category::Workspace) >= 4 * largest, "{method}");
        assert_eq!(device.ledger().current(Category::Workspace), 0, "{method}");
    }
    let base = tiny_gpt("prune.method=lottery prune.sparsity=0.5 prune.rewind=1 train.steps=8");
    let (_, parameters) = counts(&base);
    let mut trainer = base.trainer(1);
    let device = trainer.device().clone();
    for _ in 0..2 {
        trainer.prune().unwrap();
        trainer.step().unwrap();
    }
    assert_eq!(device.ledger().current(Category::Workspace), 4 * parameters);
    drop(trainer);
    assert_eq!(device.ledger().total(), 0);
}

/// Scratch space is measured, not predicted, and is what sizes and threads say: the same in every run, and on
/// each thread more no more than that thread's packed rows and sums.
#[test]
fn workspace_is_the_same_in_every_run_and_bounded() {
    let peak = |threads: usize| {
        let mut trainer = tiny_gpt("").trainer(threads);
        let device = trainer.device().clone();
        (0..2).for_each(|_| drop(trainer.step().unwrap()));
        device.ledger().peak(Category::Workspace)
    };
    let peaks = [1, 2, 3].map(|threads| [peak(threads), peak(threads)]);
    assert!(peaks.iter().all(|[first, again]| first == again && *first > 0), "{peaks:?}");
    let [one, two, three] = peaks.map(|[peak, _]| peak);
    assert!(one <= two && two <= three && three <= 3 * one, "{peaks:?}");
}

#[test]
fn recomputation_lowers_the_peak_of_activations() {
    let peak = |recompute: &str| {
        let base = tiny_gpt(format!("model.layers=6 train.recompute={recompute}"));
        let mut trainer = base.trainer(1);
        trainer.step().unwrap();
        let device = trainer.device();
        device.ledger().peak(Category::Activations)
    };
    // Of each token in f32: the id; of six layers ten widths and 6 numbers, or six widths and 2; of the head
    // two widths and 2. By blocks: five layers' inputs, and the sixth in full as it runs again.
    let bytes = |numbers: usize| 4 * 4 * 12 * numbers;
    assert_eq!(peak("none"), bytes(1 + 6 * (10 * 16 + 6) + 34));
    assert_eq!(peak("attention"), bytes(1 + 6 * (6 * 16 + 2) + 34));
    assert_eq!(peak("block"), bytes(1 + 5 * 16 + 10 * 16 + 6));
    // Two of them: the inputs of the first and the fifth layer, the others and the head in full.
    assert_eq!(peak("2"), bytes(1 + 2 * 16 + 4 * (10 * 16 + 6) + 34));
}
