//! Weights of which each rank has a shard (ZeRO-3) train as those that every rank has, bit for bit, with every
//! method, optimizer, schedule and axis; in the memory that the plan says.

use espalier_nn::weights::WeightStore;
use espalier_plan::schedule::Chunk;
use espalier_tensor::Category;
use espalier_train::RunSummary;
use espalier_train::trainer::Trainer;

use crate::support::{
    Base, dense_and_pruned, images, on_every_rank, planned, take, tiny_cnn, tiny_gpt, written,
};
use crate::tensor::all_same;

/// Samples to evaluate that two and four ranks do not have alike many micro-batches of.
fn gpt() -> Base {
    tiny_gpt("model.layers=3 train.batch=8 train.micro_batches=2 train.eval_samples=9")
        .set("train.eval_batch=2")
}

/// A sample of every kind: each method, schedule and axis is in one of them at least, or in zero.rs, which has
/// every optimizer too.
fn cases() -> Vec<Base> {
    let cnn = tiny_cnn("train.eval_samples=5 train.eval_batch=1");
    let resnet = images().set("model.name=resnet8 data.size=16 data.count=32");
    let all: [(Base, &[&str]); 5] = [
        (
            gpt(),
            &[
                "parallel.data=2 train.clip=0.5",
                "parallel.data=4 train.precision=bf16 model.tied=false",
                "parallel.data=4 train.micro_batches=1",
                "parallel.data=2 train.recompute=attention",
                "parallel.data=2 prune.method=2:4 prune.sparsity=0.5",
                "parallel.data=4 prune.method=magnitude prune.sparsity=0.995",
            ],
        ),
        (
            gpt().set("prune.sparsity=0.8"),
            &[
                "parallel.data=2 prune.method=random train.precision=bf16 optimizer.moments=bf16 optimizer.master=low-bits",
                "parallel.data=2 prune.method=magnitude train.noise_scale=true",
                "parallel.data=4 prune.method=snip prune.samples=9",
                // Fewer samples than ranks.
                "parallel.data=4 prune.method=snip prune.samples=3",
                "parallel.data=2 prune.method=grasp prune.samples=5",
                "parallel.data=4 prune.method=wanda prune.samples=9 train.precision=bf16",
                "parallel.data=2 prune.method=rigl prune.every=2",
                "parallel.data=2 prune.method=gradual prune.every=2 prune.end=4 prune.embeddings=true",
                "parallel.data=2 prune.method=elsa prune.every=2 prune.end=4 prune.embeddings=true",
                "parallel.data=2 prune.method=magnitude prune.at=3 prune.biases=true",
                "parallel.data=2 prune.method=early-bird prune.every=1 prune.latest=3",
                "parallel.data=2 prune.method=lottery prune.rate=0.6 prune.rewind=1",
                "parallel.data=2 prune.method=magnitude prune.kernels=sparse",
                "parallel.data=2 prune.method=magnitude prune.weights=compressed",
                "parallel.data=2 prune.method=magnitude train.recompute=block",
                "parallel.data=2 prune.method=magnitude parallel.tensor=2",
                "parallel.data=2 prune.method=random parallel.tensor=2 parallel.sequence=true",
            ],
        ),
        (
            gpt().set("train.batch=16 parallel.data=2 parallel.pipeline=2"),
            &[
                "parallel.schedule=gpipe",
                "parallel.schedule=1f1b prune.method=snip prune.samples=7",
                "parallel.schedule=1f1b model.tied=false train.micro_batches=4",
                "parallel.schedule=1f1b prune.method=magnitude prune.embeddings=true",
                "parallel.schedule=zb-h1 prune.method=rigl prune.every=2",
                "parallel.schedule=interleaved train.recompute=block",
                "parallel.schedule=axonn train.micro_batches=4",
            ],
        ),
        (
            cnn,
            &[
                "parallel.data=4",
                "parallel.data=2 parallel.batch_norm=synchronised",
                "parallel.data=4 parallel.batch_norm=synchronised prune.method=snip prune.sparsity=0.5 prune.samples=3",
            ],
        ),
        (resnet, &["parallel.data=2 parallel.spatial=2 prune.method=magnitude"]),
    ];
    let with = |(base, sets): (Base, &[&str])| sets.iter().map(|set| base.set(set)).collect::<Vec<_>>();
    all.into_iter().flat_map(with).collect()
}

/// What a run has to show but for its memory and traffic.
pub fn shown(of: &RunSummary) -> (Option<String>, Option<f64>, String) {
    (of.weights_hash.clone(), of.loss, format!("{:?} {:?}", of.validation, of.kept_by_layer))
}

#[test]
fn sharded_weights_train_as_full_ones_bit_for_bit() {
    for base in cases() {
        let base = base.steps(5).set("train.eval_every=3 parallel.timeout_s=30");
        let [full, sharded] = [2, 3].map(|zero| base.set(format!("parallel.zero={zero}")).run());
        assert_eq!(shown(&full), shown(&sharded), "{base}");
        let peak = |of: &RunSummary, category: &str| of.memory[category].measured.unwrap();
        assert_eq!(peak(&full, "optimizer"), peak(&sharded, "optimizer"), "{base}");
        assert!(peak(&sharded, "weights") < peak(&full, "weights"), "{base}");
    }
}

/// As every layout is one rank's run.
#[test]
fn sharded_weights_are_those_of_one_rank() {
    let gpt = tiny_gpt("train.batch=12 train.clip=0.5 train.micro_batches=2 train.eval_samples=11")
        .set("model.layers=4 optimizer.name=sgd learning_rate.peak=0.1");
    let layouts = [
        "parallel.data=2",
        "parallel.data=2 parallel.tensor=2",
        "parallel.data=3 parallel.pipeline=2 parallel.schedule=1f1b",
    ];
    for base in dense_and_pruned(&gpt) {
        all_same(&base, layouts.map(|layout| format!("{layout} parallel.zero=3")), 6, 1e-5);
    }
}

/// Weights at the peak and at rest, gradients, state, mask, and the block that is dense: to the byte. Messages
/// keep below what is predicted, and are not much less.
#[test]
fn every_byte_is_predicted() {
    let base = gpt().set("model.tied=false model.width=64 parallel.zero=3").steps(3);
    let pruned = base.set("prune.method=magnitude prune.scope=layer prune.sparsity=0.75");
    for base in [
        base.set("parallel.data=2"),
        base.set("parallel.data=4 train.precision=bf16"),
        base.set("parallel.data=3 train.batch=12"),
        base.set("parallel.data=2 train.recompute=block"),
        pruned.set("parallel.data=2"),
        pruned.set("parallel.data=4 train.precision=bf16 optimizer.master=low-bits"),
        pruned.set("parallel.data=2 prune.kernels=sparse"),
        pruned.set("parallel.data=2 prune.at=2"),
        pruned.set("parallel.data=2 parallel.pipeline=2"),
        base.set("parallel.data=2 parallel.pipeline=2 model.tied=true"),
        base.set("parallel.data=2 model.tied=true"),
        base.set("parallel.data=2 model.tied=true train.precision=bf16"),
        // Two buckets.
        base.set("parallel.data=2 model.tied=true train.precision=bf16 model.width=128"),
        base.set("parallel.data=2 parallel.tensor=2 parallel.sequence=true"),
    ] {
        let plan = planned(&base);
        let is_late = base.to_string().contains("prune.at=2");
        let ranks = on_every_rank(&base, |mut trainer| {
            take(&mut trainer, 3)?;
            let ledger = trainer.device().ledger();
            let peak = |category| ledger.peak(category) as u64;
            let at_rest = ledger.current(Category::Weights) as u64;
            let in_use =
                [Category::Weights, Category::Gradients, Category::Optimizer, Category::Mask].map(peak);
            let communication = peak(Category::Communication);
            // All ranks enter blocks alike.
            Ok((in_use, at_rest, communication, dense_at_once(&trainer), peak(Category::Workspace)))
        });
        let coords = |rank: usize| plan.mesh.coordinates(rank);
        for (rank, (in_use, at_rest, communication, dense, workspace)) in ranks.into_iter().enumerate() {
            let predicted = plan.rank(rank).unwrap().memory;
            let case = format!("{base}, rank {rank}");
            // The first of a group has the largest shards, and these are predicted.
            if coords(rank).data == 0 && coords(rank).tensor == 0 {
                let expected = [predicted.weights, predicted.gradients, predicted.optimizer, predicted.mask];
                assert_eq!(in_use, expected, "{case}");
                if !is_late {
                    assert_eq!(at_rest, predicted.weights_at_rest, "{case}");
                }
            }
            assert_eq!(Some(dense), predicted.workspace, "{case}: the largest block that is dense");
            assert!(dense <= workspace, "{case}");
            assert!(communication <= predicted.communication, "{case}: {communication} bytes of messages");
            assert!(
                2 * communication > predicted.communication,
                "{case}: {communication} of {}",
                predicted.communication
            );
        }
    }
}

/// The most that entering a block makes.
pub fn dense_at_once(trainer: &Trainer) -> u64 {
    let (params, ledger) = (trainer.params(), trainer.device().ledger());
    let chunks = trainer.context().stage.chunks().iter();
    let blocks = chunks
        .flat_map(|Chunk { virtual_stage, .. }| trainer.context().plan.stage_blocks[*virtual_stage].clone());
    let of_block = |block: usize| {
        let entered = params.enter(block, None).unwrap();
        let in_use = ledger.current(Category::Workspace) as u64;
        drop(entered);
        in_use
    };
    blocks.map(of_block).max().unwrap_or(0)
}

/// A rank of four has a quarter of what it has alone, and the sum of all is the model.
#[test]
fn no_rank_ever_has_the_model() {
    let base = gpt().set("model.width=64 model.layers=8 parallel.zero=3 train.micro_batches=1");
    let ranks = on_every_rank(&base.replicas(4), |mut trainer| {
        trainer.step()?;
        let all: usize = trainer.params().iter().map(|(_, param)| param.len()).sum();
        let local: usize =
            trainer.params().iter().map(|(_, param)| param.weight_shard().unwrap().len()).sum();
        assert!(trainer.device().ledger().peak(Category::Weights) <= 4 * all / 4 + 1024);
        // Blocks are small beside the model: not even one more is dense at a time.
        assert!(trainer.device().ledger().peak(Category::Workspace) < 4 * all / 2);
        Ok((all, local))
    });
    let (all, sum) = (ranks[0].0, ranks.iter().map(|(_, local)| local).sum::<usize>());
    assert_eq!(all, sum);
}

/// Text that a model generates while it trains.
#[test]
fn a_model_of_sharded_weights_writes_the_same_text() {
    for set in ["parallel.data=2", "parallel.data=2 parallel.pipeline=2"] {
        let [full, sharded] =
            ["parallel.zero=2", "parallel.zero=3"].map(|zero| written(&gpt().set(set).set(zero)));
        assert_eq!(full, sharded, "{set}");
    }
}

/// An update that is not finite leaves every shard as it was, and the run goes on.
#[test]
fn a_bad_step_changes_no_shard() {
    let base = gpt().set("parallel.data=2 parallel.zero=3").steps(4);
    on_every_rank(&base, |mut trainer| {
        trainer.step()?;
        let before = trainer.params().hash()?;
        trainer.inject_nan_at(1);
        assert!(!trainer.step()?.taken);
        assert_eq!(trainer.params().hash()?, before);
        assert!(trainer.step()?.taken);
        assert_ne!(trainer.params().hash()?, before);
        Ok(())
    });
}
