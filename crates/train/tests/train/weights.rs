//! Weights that are stored as kept values train as dense ones do, bit for bit, with every method, optimizer,
//! schedule and axis; in the memory that the plan says.

use std::fs;

use espalier_tensor::Category;
use espalier_train::RunSummary;
use espalier_train::trainer::Trainer;
use tempfile::TempDir;

use crate::sharded_weights::{dense_at_once, shown};
use crate::support::{
    Base, checkpoints, contents, hash, images, on_every_rank, planned, rotary_llama, take, tiny_cnn,
    tiny_gpt, written,
};

const COMPRESSED: &str = "prune.weights=compressed";

fn llama() -> Base {
    rotary_llama("train.batch=8 train.micro_batches=4 train.eval_samples=8")
}

fn gpt() -> Base {
    tiny_gpt("model.layers=3 train.batch=8 train.micro_batches=4 train.eval_samples=8")
}

/// A sample of every kind: each method, optimizer, schedule and axis is in one of them at least.
fn cases() -> Vec<Base> {
    let replicas = gpt().set("train.micro_batches=2 parallel.data=2");
    let resnet = images().set("model.name=resnet8 data.size=16 data.count=32 parallel.spatial=2");
    let all: [(Base, &[&str]); 6] = [
        (
            gpt(),
            &[
                "prune.method=magnitude train.clip=0.5",
                "prune.method=random train.precision=bf16 optimizer.master=low-bits",
                // Places of what is kept, instead of bits.
                "prune.method=magnitude prune.sparsity=0.98 optimizer.name=adam",
                "prune.method=snip optimizer.name=lamb prune.samples=8",
                "prune.method=grasp optimizer.name=lars prune.samples=8",
                "prune.method=wanda train.precision=bf16 prune.samples=8",
                "prune.method=rigl prune.every=2 train.precision=bf16",
                "prune.method=set prune.every=2 optimizer.name=momentum",
                "prune.method=gradual prune.every=2 prune.end=4 prune.embeddings=true",
                "prune.method=magnitude prune.at=3 prune.biases=true",
                "prune.method=early-bird prune.every=1 prune.latest=3",
                "prune.method=lottery prune.sparsity=0.5 prune.rate=0.5 prune.rewind=1",
                "prune.method=2:4 prune.sparsity=0.5 optimizer.name=nesterov",
                "prune.method=magnitude prune.kernels=sparse",
                "prune.method=magnitude train.recompute=block",
                "prune.method=magnitude train.recompute=attention",
                "prune.method=magnitude train.noise_scale=true",
                "prune.method=magnitude parallel.tensor=2 train.precision=bf16",
                "prune.method=random parallel.tensor=2 parallel.sequence=true",
            ],
        ),
        (
            replicas,
            &[
                "prune.method=magnitude",
                "prune.method=magnitude parallel.zero=1 optimizer.name=lamb",
                "prune.method=rigl prune.every=2 parallel.zero=2",
                "prune.method=rigl prune.every=2 parallel.zero=2 optimizer.moments=bf16",
                "prune.method=magnitude parallel.average_every=3",
                "prune.method=gradual prune.every=2 prune.end=4 parallel.pipeline=2 parallel.zero=1",
            ],
        ),
        (
            gpt().set("parallel.pipeline=2"),
            &[
                "parallel.schedule=1f1b prune.method=magnitude prune.embeddings=true",
                "parallel.schedule=zb-h1 prune.method=snip prune.samples=8",
                "parallel.schedule=interleaved prune.method=magnitude train.recompute=block",
                "parallel.schedule=chimera prune.method=rigl prune.every=2",
                "parallel.schedule=pipedream prune.method=magnitude model.tied=false train.precision=bf16",
                "parallel.schedule=2bw prune.method=random model.tied=false",
            ],
        ),
        (
            llama(),
            &[
                "prune.method=magnitude train.recompute=attention",
                "prune.method=magnitude prune.kernels=sparse",
                "prune.method=wanda parallel.tensor=2 prune.samples=8",
            ],
        ),
        (
            tiny_cnn(""),
            &[
                "prune.method=rigl prune.every=2 prune.dense_first=true",
                "prune.method=early-bird prune.form=channels prune.every=1 prune.latest=3",
                "prune.method=lottery prune.sparsity=0.6 prune.rate=0.4",
                "prune.method=magnitude optimizer.name=sgd",
            ],
        ),
        (resnet, &["prune.method=magnitude"]),
    ];
    let with = |(base, sets): (Base, &[&str])| {
        sets.iter().map(|set| base.set("prune.sparsity=0.8").set(set)).collect::<Vec<_>>()
    };
    all.into_iter().flat_map(with).collect()
}

#[test]
fn compressed_weights_train_as_dense_weights_bit_for_bit() {
    for base in cases() {
        let base = base.steps(5).set("train.eval_every=3");
        let [dense, compressed] = [base.clone(), base.set(COMPRESSED)].map(|base| base.run());
        assert_eq!(shown(&dense), shown(&compressed), "{base}");
        // The optimizer has not a byte more; where it is pruned from the start, weights have as many fewer as
        // the plan says.
        let peak = |of: &RunSummary, category: &str| of.memory[category].measured.unwrap();
        assert_eq!(peak(&dense, "optimizer"), peak(&compressed, "optimizer"), "{base}");
    }
}

/// Checkpoints are the same files, and a run goes on with the other form, in both directions.
#[test]
fn a_run_goes_on_with_the_other_form() {
    for set in [
        "prune.method=magnitude",
        "prune.method=rigl prune.every=2 train.precision=bf16",
        "prune.method=magnitude prune.at=4",
        "prune.method=lottery prune.sparsity=0.5 prune.rate=0.3 prune.rewind=1",
        "prune.method=magnitude parallel.tensor=2 prune.embeddings=true",
        "prune.method=magnitude parallel.data=2 parallel.zero=1",
    ] {
        let base = gpt().set("checkpoint.every=3 train.micro_batches=2").set(set).steps(6);
        let (dense, compressed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let expected = hash(base.run_in(dense.path()));
        assert_eq!(hash(base.set(COMPRESSED).run_in(compressed.path())), expected, "{base}");
        let saved =
            |folder: &TempDir, step| contents(&folder.path().join(format!("checkpoints/step-00000{step}")));
        for step in [3, 6] {
            assert!(saved(&dense, step) == saved(&compressed, step), "{base}: checkpoints after step {step}");
        }
        for (folder, set) in [(&dense, COMPRESSED), (&compressed, "prune.weights=dense")] {
            fs::remove_dir_all(folder.path().join("checkpoints/step-000006")).unwrap();
            assert_eq!(hash(base.set(set).run_in(folder.path())), expected, "{base}: on with {set}");
        }
    }
}

/// What stands before the first step is what dense weights are too: they are initialised when they are asked for.
#[test]
fn weights_that_were_not_initialised_yet_are_what_they_will_be() {
    let base = gpt().set("prune.method=random prune.sparsity=0.9");
    let [mut dense, mut compressed] = [base.clone(), base.set(COMPRESSED)].map(|base| base.trainer(2));
    let total =
        |trainer: &Trainer| trainer.params().iter().map(|(_, param)| param.weight_bytes()).sum::<usize>();
    assert!(total(&compressed) < total(&dense) / 2, "nothing is there of what will be pruned");
    for _ in 0..2 {
        let loss = |trainer: &mut Trainer| trainer.evaluate().unwrap().unwrap().loss;
        assert_eq!(loss(&mut dense), loss(&mut compressed));
        assert_eq!(dense.params().hash().unwrap(), compressed.params().hash().unwrap());
        let folder = tempfile::tempdir().unwrap();
        let save = |trainer: &mut Trainer, name: &str| {
            contents(&trainer.save(&checkpoints(&base, &folder.path().join(name))).unwrap())
        };
        assert!(save(&mut dense, "dense") == save(&mut compressed, "compressed"));
        dense.step().unwrap();
        compressed.step().unwrap();
    }
}

/// From the first step on, where the method needs no pass over dense weights: weights, state and mask to the
/// byte, at the peak.
#[test]
fn every_byte_is_predicted() {
    for set in [
        "prune.method=random train.precision=bf16 optimizer.master=low-bits",
        "prune.method=magnitude train.recompute=block",
        "prune.method=rigl train.precision=bf16 prune.every=2",
        "prune.method=snip prune.samples=8",
        "prune.method=magnitude train.precision=bf16 parallel.pipeline=2",
        "prune.method=random parallel.data=2",
        "prune.method=magnitude prune.kernels=sparse",
    ] {
        let base = gpt().set("model.tied=false prune.sparsity=0.75").set(COMPRESSED).set(set);
        let plan = planned(&base);
        let ranks = on_every_rank(&base, |mut trainer| {
            take(&mut trainer, 3)?;
            let ledger = trainer.device().ledger();
            let in_use =
                [Category::Weights, Category::Optimizer, Category::Mask].map(|one| ledger.peak(one) as u64);
            let at_rest = ledger.current(Category::Weights) as u64;
            Ok((in_use, at_rest, dense_at_once(&trainer), ledger.peak(Category::Workspace) as u64))
        });
        for (rank, (in_use, at_rest, expanded, workspace)) in ranks.into_iter().enumerate() {
            let predicted = plan.rank(rank).unwrap().memory;
            let case = format!("{set}, rank {rank}");
            assert_eq!(in_use, [predicted.weights, predicted.optimizer, predicted.mask], "{case}");
            assert_eq!(at_rest, predicted.weights_at_rest, "{case}");
            assert_eq!(
                Some(expanded),
                predicted.workspace,
                "{case}: the largest block that is dense at once"
            );
            assert!(expanded <= workspace, "{case}");
        }
    }
}

/// 2 f + 2 f + 10 f bytes and the mask, where each kept weight had 2 / f of its own before.
#[test]
fn bytes_of_a_prunable_weight() {
    for (master, most) in [("f32", 1.75), ("low-bits", 1.55)] {
        let base = tiny_gpt(COMPRESSED)
            .set("train.precision=bf16 model.width=64 prune.sparsity=0.9")
            .set(format!("prune.method=magnitude optimizer.master={master}"));
        let mut trainer = base.trainer(1);
        trainer.step().unwrap();
        let each = trainer.state_bytes().unwrap();
        assert!(each.total() <= most, "{each:?}");
        let planned = planned(&base).state_bytes();
        assert!((each.total() - planned.total()).abs() < 1e-3, "{each:?} {planned:?}");
    }
}

/// Initialised, pruned and compressed one parameter at a time.
#[test]
fn the_dense_model_is_never_there() {
    for method in ["random", "magnitude", "2:4", "set", "rigl"] {
        let sparsity = if method == "2:4" { 0.5 } else { 0.9 };
        let base = gpt()
            .set("model.layers=8 model.width=64 model.tied=false")
            .set(COMPRESSED)
            .set(format!("prune.method={method} prune.sparsity={sparsity}"));
        let (predicted, mut trainer) = (planned(&base).memory, base.trainer(1));
        trainer.prune().unwrap().expect("it prunes before the first step");
        let ledger = trainer.device().ledger();
        let dense: usize = trainer.params().iter().map(|(_, param)| 4 * param.len()).sum();
        let peak = ledger.total_peak() as u64;
        assert_eq!(ledger.peak(Category::Weights) as u64, predicted.weights, "{method}");
        // Counts of keys, and tiles of them, are a few pages.
        let most = predicted.weights + predicted.mask + predicted.setup + (1 << 20);
        assert!(peak <= most && peak < dense as u64, "{method}: {peak} of {most}, dense {dense}");
    }
}

/// A method that prunes on the way gives the memory back.
#[test]
fn weights_that_are_pruned_on_the_way_are_compressed_from_then_on() {
    let base = gpt().set("prune.method=magnitude prune.sparsity=0.9 prune.at=2").set(COMPRESSED);
    let mut trainer = base.steps(4).trainer(1);
    let weights = |trainer: &Trainer| trainer.device().ledger().current(Category::Weights);
    (0..2).for_each(|_| drop(trainer.step().unwrap()));
    let before = weights(&trainer);
    assert_eq!(before as u64, planned(&base).memory.weights, "dense until then");
    trainer.step().unwrap();
    let gone: usize = trainer.params().masks().map(|(_, mask)| 4 * (mask.len() - mask.kept())).sum();
    assert_eq!(weights(&trainer), before - gone);
    let in_use = trainer.device().ledger().peak(Category::Weights);
    assert_eq!(in_use, before, "no second copy");
}

/// Text that a model generates while it trains.
#[test]
fn a_model_of_compressed_weights_writes_the_same_text() {
    for set in ["", "prune.kernels=sparse", "parallel.tensor=2", "parallel.pipeline=2"] {
        let base = gpt().set("prune.method=magnitude prune.sparsity=0.8").set(set);
        assert_eq!(written(&base), written(&base.set(COMPRESSED)), "{set}");
    }
}
