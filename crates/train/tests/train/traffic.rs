//! What the plan says that actions move is what the transport counts, to the byte, for every layout.

use std::collections::BTreeMap;
use std::fmt::Display;

use espalier_comm::TrafficKind as Counted;
use espalier_plan::RankTraffic;
use espalier_plan::cost::{AllReduce, AlphaBeta, LayerSizes, Parallelism, Setting};
use espalier_plan::schedule::Action;
use espalier_train::step::TraceKind;

use crate::support::{Base, images, on_every_rank, planned, rotary_llama, tiny_cnn, tiny_gpt, tiny_llama};

/// Under which name the transport counts what an action sends.
fn counted_as(action: &Action, sharded: bool) -> Option<Counted> {
    match action {
        Action::Send(_) | Action::SendControl(_) => Some(Counted::PointToPoint),
        Action::AllReduce { .. } | Action::WaitReduce if sharded => Some(Counted::ReduceScatter),
        Action::Gather => Some(Counted::AllGather),
        // Weights of the blocks that it runs.
        Action::Forward(_) | Action::Backward(_) | Action::BackwardInput(_) => Some(Counted::AllGather),
        // What arrives was sent by another.
        Action::Receive(_) | Action::RecvControl(_) => None,
        _ => Some(Counted::AllReduce),
    }
}

/// Runs a list to its end on all ranks, and compares what each has sent with what the plan says of its actions.
#[track_caller]
pub fn check(base: &Base) {
    let plan = planned(base);
    on_every_rank(base, |mut trainer| {
        let (rank, stage) = (trainer.ranks().rank(), trainer.ranks().stages().rank());
        // The first step may prune, and moves more for that.
        let mut batches = 0;
        while batches == 0 || !trainer.is_idle() {
            trainer.step()?;
            batches += 1;
        }
        let before = trainer.ranks().sent();
        for _ in 0..batches {
            assert!(trainer.step()?.taken);
        }
        let sent = trainer.ranks().sent() - before;
        let mut expected: BTreeMap<&str, u64> = BTreeMap::new();
        let schedule = plan.schedule(batches)?;
        let layers = plan.layer_traffic(rank, &schedule)?;
        for (kind, sent) in [
            (Counted::AllReduce, layers.all_reduces),
            (Counted::AllReduce, layers.norms),
            (Counted::AllGather, layers.all_gathers),
            (Counted::ReduceScatter, layers.reduce_scatters),
            (Counted::PointToPoint, layers.all_to_alls),
            (Counted::Halo, layers.halos),
        ] {
            *expected.entry(kind.name()).or_default() += sent.bytes;
        }
        for action in &schedule.ranks[stage] {
            if let Some(kind) = counted_as(action, plan.data_parallel.is_sharded()) {
                *expected.entry(kind.name()).or_default() += trainer.traffic().bytes(action);
            }
        }
        expected.retain(|_, bytes| *bytes > 0);
        let counted = Counted::ALL.map(|kind| (kind.name(), sent.of(kind)));
        let counted = counted.into_iter().filter(|(_, bytes)| *bytes > 0).collect();
        assert_eq!(expected, counted, "{base}, rank {rank}");
        if plan.pruning.is_none() {
            assert_eq!(*trainer.traffic(), plan.traffic(rank, &plan.gradient_lengths(rank))?, "{base}");
        }
        Ok(())
    });
}

/// Checks a base with each of several settings.
fn check_all(base: &Base, all: impl IntoIterator<Item = impl Display>) {
    all.into_iter().for_each(|more| check(&base.set(more)));
}

#[test]
fn actions_move_the_bytes_that_the_plan_predicts() {
    let gpt = tiny_gpt("train.batch=12 model.layers=4");
    let pruned = "prune.method=magnitude prune.sparsity=0.7 parallel.data=3 prune.state=compressed";
    let shared = "train.micro_batches=2 parallel.zero=true";
    let unflushed =
        "parallel.pipeline=3 train.micro_batches=3 model.tied=false parallel.drain=3 train.steps=6";
    check_all(
        &gpt,
        [
            "",
            "parallel.data=3",
            "parallel.data=3 train.precision=bf16 train.micro_batches=2",
            "parallel.data=2 train.noise_scale=true train.micro_batches=2",
            "parallel.pipeline=2 train.micro_batches=3",
            "parallel.pipeline=3 parallel.data=2 train.micro_batches=3",
            "parallel.data=3 parallel.zero=true optimizer.name=adamw",
            "parallel.data=3 parallel.zero=true optimizer.name=lamb",
            &format!("{shared} parallel.pipeline=2 parallel.data=2 optimizer.name=adamw"),
            &format!("{shared} parallel.pipeline=2 parallel.data=2 optimizer.name=lamb"),
            pruned,
            &format!("{pruned} parallel.zero=true"),
        ],
    );
    // Norms of both chunks of a rank are one message.
    let chunks = "parallel.pipeline=2 parallel.data=3 parallel.schedule=interleaved";
    check(&gpt.set(shared).set(chunks).set("optimizer.name=lamb model.tied=false"));
    for schedule in ["interleaved", "chimera", "chimera-doubling", "zb-h1", "axonn"] {
        let base = gpt.set("parallel.pipeline=2 train.micro_batches=6 parallel.data=2");
        check(&base.set(format!("parallel.schedule={schedule}")));
    }
    for schedule in ["pipedream", "2bw"] {
        let data = [1, 2].map(|data| format!("parallel.schedule={schedule} parallel.data={data}"));
        check_all(&gpt.set(unflushed), data);
    }
    for micro_batches in [1, 2, 4] {
        let base = gpt.set(format!("parallel.data=3 parallel.zero=2 train.micro_batches={micro_batches}"));
        check_all(&base, ["", "model.tied=false train.precision=bf16", pruned]);
    }
    for schedule in ["gpipe", "1f1b", "interleaved", "zb-h1", "axonn"] {
        let base = gpt.set("parallel.pipeline=2 train.micro_batches=2 parallel.data=2 parallel.zero=2");
        check(&base.set(format!("parallel.schedule={schedule}")));
    }
}

/// Weights that are gathered when their block runs: twice for a micro-batch, but for blocks that are still
/// there.
#[test]
fn passes_gather_the_bytes_that_the_plan_predicts() {
    let gpt = tiny_gpt("train.batch=12 model.layers=4 parallel.zero=3");
    let pruned = "prune.method=magnitude prune.sparsity=0.7 prune.state=compressed";
    for micro_batches in [1, 2, 4] {
        let base = gpt.set(format!("parallel.data=3 train.micro_batches={micro_batches}"));
        let lamb = "optimizer.name=lamb train.recompute=block";
        check_all(&base, ["", "model.tied=false train.precision=bf16", pruned, lamb]);
    }
    for schedule in ["gpipe", "1f1b", "interleaved", "zb-h1", "axonn"] {
        let base = gpt.set("parallel.pipeline=2 train.micro_batches=6 parallel.data=2");
        let base = base.set(format!("parallel.schedule={schedule}"));
        check_all(&base, ["", &format!("model.tied=false {pruned}")]);
    }
    let tensor = "parallel.data=2 parallel.tensor=2 train.micro_batches=2";
    let several_messages_a_block = "parallel.data=2 model.width=256 model.layers=2";
    check_all(&gpt, [tensor, &format!("{tensor} parallel.sequence=true"), several_messages_a_block]);
    let cnn = tiny_cnn("train.batch=8 parallel.data=2 parallel.zero=3 train.micro_batches=2");
    check_all(&cnn, ["", "parallel.spatial=2 model.layers.0.stride=2"]);
}

/// What layers send within their passes. Heads, positions and the vocabulary do not divide evenly by three.
#[test]
fn layers_send_what_the_plan_says() {
    let gpt = tiny_gpt("model.heads=5 model.width=20 model.context=11 train.batch=8 train.micro_batches=2");
    let stages = "parallel.pipeline=2 parallel.data=2";
    for ranks in [2, 3] {
        let base = gpt.set(format!("parallel.tensor={ranks}"));
        check_all(&base, ["", "train.recompute=1"]);
        let recomputed = ["", "train.recompute=block", "train.recompute=attention", stages];
        let base = base.set("parallel.sequence=true");
        check_all(&base, recomputed);
        check_all(&base.set(stages), ["parallel.zero=true", "parallel.zero=2"]);
    }
    // Keys and values of fewer heads than ranks: as weights of their own, and out of one weight with the queries.
    for recompute in ["none", "attention", "block"] {
        let recompute = format!("train.recompute={recompute}");
        check_all(&tiny_llama("parallel.tensor=4").set(&recompute), ["", "parallel.sequence=true"]);
        for ranks in [2, 4] {
            let family = rotary_llama("train.batch=8 train.micro_batches=2").set(&recompute);
            let stages = format!("{stages} parallel.zero=2");
            let family = family.set(format!("parallel.tensor={ranks}"));
            check_all(&family, ["", "parallel.sequence=true", &stages]);
        }
    }
    let cnn = tiny_cnn("train.batch=8 model.layers.0.stride=2");
    let resnet = images().set("model.name=resnet8 data.size=20 data.count=120 train.batch=8");
    let tiles = [
        "parallel.spatial=2",
        "parallel.spatial=[2,2]",
        "parallel.spatial=2 parallel.tensor=2 train.micro_batches=2",
        "parallel.spatial=2 parallel.data=2 parallel.zero=2 train.micro_batches=2",
    ];
    [cnn, resnet].iter().for_each(|net| check_all(net, tiles));
    check_all(&tiny_cnn("parallel.data=2 parallel.batch_norm=synchronised"), ["", "parallel.spatial=2"]);
}

/// The lecture's form: of each linear layer an all-gather of its outputs forward, an all-reduce of its inputs'
/// gradient backward, whose elements are those of the formulas; so are the bytes that the transport counts.
#[test]
fn plain_linear_layers_send_what_the_formulas_say() {
    let base = images().set("model.name=mlp model.hidden=[48,24,36] data.count=120");
    let base = base.set("train.batch=6 model.classes=12 parallel.linear=plain");
    for ranks in [2, 3, 4] {
        let base = base.set(format!("parallel.tensor={ranks}"));
        let plan = planned(&base);
        let at = Setting { ranks, batch: 6, link: AlphaBeta::published(4), all_reduce: AllReduce::Ring };
        let layers = LayerSizes::of_model(&plan.model, None).unwrap();
        let costs = layers.iter().filter_map(|layer| layer.cost(Parallelism::Model, &at));
        let words = costs.map(|cost| cost.words).sum::<f64>();
        let schedule = plan.schedule(1).unwrap();
        let sent = (0..ranks).map(|rank| plan.layer_traffic(rank, &schedule).unwrap());
        let bytes = sent.map(|sent| sent.all_reduces.bytes + sent.all_gathers.bytes).sum::<u64>();
        assert_eq!(bytes as f64, 4.0 * words * ranks as f64, "{ranks} ranks");
        check_all(&base, ["", "prune.method=magnitude prune.state=compressed"]);
    }
    let gpt = tiny_gpt("model.heads=5 model.width=20 train.batch=8 train.micro_batches=2");
    check(&gpt.set("parallel.tensor=3 parallel.linear=plain"));
}

#[test]
fn running_statistics_are_part_of_the_update() {
    let cnn = tiny_cnn("train.batch=12");
    check_all(&cnn, ["parallel.data=3", "parallel.data=2 train.batch_norm_group=3"]);
    let stages = cnn.set("parallel.data=2 parallel.pipeline=2 train.micro_batches=2");
    check_all(&stages, ["", "parallel.schedule=2bw parallel.drain=2 train.steps=4"]);
}

/// A list of one action, run by the same executor.
#[test]
fn averages_move_what_the_plan_predicts() {
    for base in [tiny_gpt("train.batch=12"), tiny_cnn("train.batch=12 optimizer.name=momentum")] {
        let base = base.set("parallel.data=3 parallel.average_every=4");
        on_every_rank(&base, |mut trainer| {
            trainer.step()?;
            let before = trainer.ranks().sent();
            trainer.step()?;
            assert_eq!((trainer.ranks().sent() - before).total(), 0, "replicas are apart");
            trainer.average()?;
            let sent = (trainer.ranks().sent() - before).total();
            assert_eq!(sent, trainer.traffic().bytes(&Action::Average));
            Ok(())
        });
    }
}

/// Both holders of a stage start its all-reduces when their copies are complete, and compute their other stage
/// meanwhile: only then do they wait for all of them.
#[test]
fn chimera_starts_the_all_reduces_of_complete_copies_before_its_last_backward() {
    for (stages, micro_batches) in [(2, 4), (4, 4)] {
        let base = tiny_gpt("model.tied=false model.layers=4 train.batch=20 parallel.schedule=chimera")
            .set(format!("parallel.pipeline={stages} train.micro_batches={micro_batches}"));
        let ranks = on_every_rank(&base, |mut trainer| {
            trainer.trace_since(std::time::Instant::now());
            trainer.step()?;
            let chunk = |number: usize| trainer.traffic().buckets.list()[number].chunk;
            let spans = &trainer.trace().expect("it was asked for").spans;
            let mut started: Vec<(f64, Option<usize>)> = spans
                .iter()
                .filter_map(|span| match span.kind {
                    TraceKind::Bucket { number, .. } => Some((span.start, chunk(number))),
                    _ => None,
                })
                .collect();
            started.sort_by(|a, b| a.0.total_cmp(&b.0));
            let last = spans.iter().filter(|span| span.kind.name().starts_with('B')).map(|span| span.start);
            let last = last.fold(0.0, f64::max);
            let eager = started.iter().filter(|(start, _)| *start < last).count();
            Ok((started.into_iter().map(|(_, chunk)| chunk).collect::<Vec<_>>(), eager))
        });
        for (rank, (order, eager)) in ranks.iter().enumerate() {
            let what =
                format!("rank {rank} of {stages}, {micro_batches} micro-batches: {order:?}, {eager} early");
            let first = order.iter().take_while(|chunk| **chunk == order[0]).count();
            assert!(*eager == first && first > 0 && first < order.len(), "{what}");
        }
    }
}

/// The list of the plan is the one that the backward works through: a bucket starts when its block is done,
/// and the last of them when the pass is over.
#[test]
fn the_timeline_shows_every_bucket_of_the_plan() {
    // The first weight has 3 * 32 * 32 * 90 numbers, more than a bucket takes.
    let base = images().set("train.batch=4 data.count=60 model.name=mlp parallel.data=2");
    let mut lists = on_every_rank(&base.set("model.hidden=[90, 9]"), |mut trainer| {
        trainer.trace_since(std::time::Instant::now());
        trainer.step()?;
        let traffic: &RankTraffic = trainer.traffic();
        let spans = &trainer.trace().expect("it was asked for").spans;
        let backward = spans.iter().find(|span| span.kind.name() == "B0").expect("a backward");
        let buckets = spans.iter().filter_map(|span| match span.kind {
            TraceKind::Bucket { number, .. } => Some((number, span)),
            _ => None,
        });
        let mut order = Vec::new();
        for (number, span) in buckets {
            assert_eq!(span.bytes, traffic.of_bucket(number));
            assert!(backward.start < span.start && span.start < backward.end, "{number} starts within");
            assert!(span.end > backward.end, "{number} is waited for behind it");
            order.push(number);
        }
        let list = traffic.buckets.list();
        order.sort_unstable();
        assert_eq!(order, (0..list.len()).collect::<Vec<_>>());
        Ok(list.to_vec())
    });
    let list = lists.remove(0);
    assert_eq!(list.iter().map(|bucket| bucket.parameters.len()).collect::<Vec<_>>(), [1, 5]);
    // Of the small ones too one is of the first block.
    assert!(list.iter().all(|bucket| (bucket.chunk, bucket.block) == (Some(0), 0)), "{list:?}");
    assert_eq!(list[0].bytes, 4 * 3 * 32 * 32 * 90);
}
