//! On a GPU: it learns as the processor does, and ranks that share one learn as one rank does, as copies and
//! as stages.
//!
//! Where there is no GPU, standard error says that nothing was tested.

use std::time::{Duration, Instant};

use espalier_nn::weights::WeightStore;
use espalier_tensor::cuda::Cuda;
use espalier_tensor::{Category, Device};
use espalier_testing::{Need, skipped};
use espalier_train::infer::{Sampler, Sampling};
use espalier_train::parallel::on_threads;
use espalier_train::trained::on_ranks;
use espalier_train::trainer::Trainer;

use crate::support::{Base, images, losses, open, prepare, rotary_llama, settings, tiny_cnn, tiny_gpt};

/// Steps of every run here.
const STEPS: usize = 40;

fn gpu() -> Option<Device> {
    let probe = Cuda::probe();
    if !probe.usable() {
        skipped(Need::Cuda, probe.missing.join("; "));
        return None;
    }
    Some(Device::cuda(0).unwrap())
}

/// What a run has to show.
#[derive(Debug, Clone, PartialEq)]
struct Shown {
    losses: Vec<f64>,
    validation: f64,
    /// Of the weights of every rank.
    hashes: Vec<String>,
}

fn shown(trainer: &mut Trainer) -> espalier_train::Result<Shown> {
    let losses = losses(trainer, STEPS)?;
    let validation = trainer.evaluate()?.expect("some samples are held out").loss;
    Ok(Shown { losses, validation, hashes: vec![trainer.params().hash().unwrap()] })
}

/// A network with batch norm and a transformer, dense, pruned before the first step and pruned while it learns,
/// of data that is on the GPU and of data that is sent there: captured passes change no bit.
#[test]
fn recorded_passes_are_those_that_are_launched_one_by_one() {
    let Some(gpu) = gpu() else { return };
    let cases = [
        (tiny_cnn(""), "", true),
        (tiny_cnn(""), "prune.method=snip prune.sparsity=0.8", true),
        (tiny_cnn(""), "prune.method=rigl prune.sparsity=0.8 prune.every=5", true),
        (tiny_cnn(""), "train.precision=bf16", true),
        (tiny_cnn(""), "", false),
        (gpt(), "model.dropout=0", false),
        (gpt(), "model.dropout=0 train.precision=bf16 prune.method=snip prune.sparsity=0.8", false),
        (llama(), "prune.method=gradual prune.sparsity=0.8 prune.every=5", false),
    ];
    for (base, set, on_gpu) in cases {
        let base = base.set(set);
        let take = |record: bool| {
            let (plan, dataset, _) = prepare(&base.steps(STEPS), 2);
            if on_gpu {
                dataset.keep_on(&gpu).unwrap();
            }
            let mut trainer = Trainer::new(plan, dataset, &gpu).unwrap();
            trainer.trace_since(Instant::now());
            assert!(!record || trainer.enable_graphed_step(), "{set}");
            let shown = shown(&mut trainer).unwrap();
            assert_eq!(trainer.replays_graph(), record, "{set}");
            let spans = &trainer.trace().expect("it was asked for").spans;
            let passes = spans.iter().filter(|span| span.kind.category() == "compute");
            let names: Vec<String> = passes.map(|span| span.kind.name()).collect();
            match record {
                true => {
                    assert!(names.len() == STEPS && names.ends_with(&["F0+B0 graph".into()]), "{names:?}")
                }
                false => assert_eq!(names, ["F0", "B0"].repeat(STEPS), "{set}"),
            }
            shown
        };
        assert_eq!(take(true), take(false), "{set}");
    }
}

/// Where gradients are summed or something is random, steps do not queue the same.
#[test]
fn passes_that_differ_are_not_recorded() {
    const DROPOUT: &str = r#"model.layers=[{ type = "global_avg_pool" }, { type = "dropout", rate = 0.5 }, { type = "linear", output = 10 }]"#;
    let Some(gpu) = gpu() else { return };
    for set in ["train.micro_batches=2", DROPOUT] {
        let (plan, dataset, _) = prepare(&tiny_cnn(set), 2);
        assert!(!Trainer::new(plan, dataset, &gpu).unwrap().enable_graphed_step(), "{set}");
    }
}

/// On as many ranks as the run file asks for, all on this device.
fn run(base: &Base, device: &Device) -> Shown {
    let (plan, dataset, _) = prepare(&base.steps(STEPS), 2);
    let mesh = plan.mesh;
    if mesh.size() == 1 {
        return shown(&mut Trainer::new(plan, dataset, device).unwrap()).unwrap();
    }
    let all = on_threads(&mesh, device, |ranks, device| {
        shown(&mut Trainer::distributed(plan.clone(), dataset.clone(), device, ranks)?)
    })
    .unwrap();
    let hashes = all.iter().flat_map(|shown| shown.hashes.clone()).collect();
    Shown { hashes, ..all.into_iter().next().unwrap() }
}

fn apart(a: &Shown, b: &Shown) -> f64 {
    let all = |of: &Shown| [&of.losses[..], &[of.validation]].concat();
    espalier_testing::apart(&all(a), &all(b))
}

/// A run is near another one, and has the same bits again.
fn assert_learns_as(one: &Shown, base: &Base, gpu: &Device, tolerance: f64) -> Shown {
    let many = run(base, gpu);
    let far = apart(one, &many);
    assert!(far < tolerance, "{base}: {far:e} apart");
    assert_eq!(run(base, gpu), many, "{base}: the same bits again");
    many
}

fn gpt() -> Base {
    tiny_gpt("train.batch=8 train.eval_samples=11 model.dropout=0.1 model.layers=4 model.context=24")
        .set("optimizer.name=sgd learning_rate.peak=0.3 learning_rate.decay_steps=100")
}

/// With every field of the family, and products whose columns begin at a GPU's 16 bytes.
fn llama() -> Base {
    rotary_llama("train.batch=8 train.eval_samples=11 model.head_dim=8 model.inner=24 model.context=24")
        .set("optimizer.name=sgd learning_rate.peak=0.3 learning_rate.decay_steps=100")
}

fn resnet8() -> Base {
    images()
        .set("model.name=resnet8 data.size=16 data.count=120 train.batch=8 train.eval_samples=11")
        .set("optimizer.name=momentum learning_rate.peak=0.01")
}

/// Biases before batch norms, which a GPU leaves out, before ReLU and before a max pool.
fn vgg() -> Base {
    const LAYERS: &str = r#"model.layers=[
        { type = "conv", output = 8, kernel = 3, padding = 1 }, { type = "batch_norm" }, { type = "relu" },
        { type = "conv", output = 8, kernel = 3, padding = 1 }, { type = "relu" }, { type = "max_pool", kernel = 2 },
        { type = "conv", output = 16, kernel = 1 }, { type = "relu" },
        { type = "conv", output = 16, kernel = 3, padding = 1 }, { type = "batch_norm" },
        { type = "global_avg_pool" }, { type = "linear", output = 10 }]"#;
    tiny_cnn(LAYERS)
        .set("train.eval_samples=11 learning_rate.peak=0.01")
        .set("parallel.batch_norm=synchronised")
}

/// Blocks whose sum and ReLU are parts of a batch norm, one behind the other.
fn residual_blocks() -> Base {
    const LAYERS: &str = r#"model.layers=[
        { type = "conv", output = 8, kernel = 3, padding = 1, bias = false }, { type = "batch_norm" }, { type = "relu" },
        { type = "residual", branch = [{ type = "conv", output = 8, kernel = 3, padding = 1, bias = false }, { type = "batch_norm" }] },
        { type = "relu" },
        { type = "residual", branch = [{ type = "conv", output = 16, kernel = 3, padding = 1, stride = 2, bias = false }, { type = "batch_norm" }],
          shortcut = [{ type = "conv", output = 16, kernel = 1, stride = 2, bias = false }, { type = "batch_norm" }] },
        { type = "relu" },
        { type = "residual", branch = [{ type = "conv", output = 16, kernel = 3, padding = 1, bias = false }, { type = "batch_norm" }] },
        { type = "relu" },
        { type = "global_avg_pool" }, { type = "linear", output = 10 }]"#;
    tiny_cnn(LAYERS)
        .set("train.eval_samples=11 learning_rate.peak=0.01")
        .set("parallel.batch_norm=synchronised")
}

/// Dense, and with eight weights of ten gone.
fn all() -> Vec<(&'static str, Base)> {
    let pruned = "prune.method=random prune.sparsity=0.8 prune.state=compressed";
    let both = |(name, base): (&'static str, Base)| [(name, base.set(pruned)), (name, base)];
    let blocks = residual_blocks();
    let all =
        [("gpt", gpt()), ("llama", llama()), ("resnet8", resnet8()), ("vgg", vgg()), ("blocks", blocks)];
    all.into_iter().flat_map(both).collect()
}

#[test]
fn a_gpu_learns_as_the_processor_does() {
    let Some(gpu) = gpu() else { return };
    for (name, base) in all() {
        let there = assert_learns_as(&run(&base, &Device::cpu(2).unwrap()), &base, &gpu, 1e-4);
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        let (first, last) = (mean(&there.losses[..10]), mean(&there.losses[STEPS - 10..]));
        assert!(last < first, "{name}: it learns: {first} at first, {last} at last");
    }
}

#[test]
fn ranks_that_share_a_gpu_learn_as_one() {
    let Some(gpu) = gpu() else { return };
    let normed = tiny_cnn("train.batch=8 train.eval_samples=11 learning_rate.peak=0.01")
        .set("parallel.batch_norm=synchronised");
    for (name, base) in all().into_iter().chain([("batch norm over ranks", normed)]) {
        let one = run(&base, &gpu);
        for ranks in [2, 4] {
            let many = assert_learns_as(&one, &base.replicas(ranks), &gpu, 1e-5);
            assert!(many.hashes.iter().all(|hash| *hash == many.hashes[0]), "{name}: all hold the same bits");
        }
    }
}

#[test]
fn stages_that_share_a_gpu_learn_as_one() {
    let Some(gpu) = gpu() else { return };
    for (name, base) in all() {
        let base = base.set("train.micro_batches=4");
        let one = run(&base, &gpu);
        // What batch norms measure together are the samples of a micro-batch, which replicas split otherwise.
        let normed = ["vgg", "blocks"].contains(&name);
        for (pipeline, data) in [(2, 1), (4, 1), (2, 2)].into_iter().filter(|(_, data)| !normed || *data == 1)
        {
            let base =
                base.set(format!("parallel.pipeline={pipeline} parallel.data={data} parallel.schedule=1f1b"));
            assert_learns_as(&one, &base, &gpu, 1e-5);
        }
    }
}

/// Ranks with shards of the same layers, and with tiles of the same images. In bf16 a sum over ranks is
/// rounded once more.
#[test]
fn shards_and_tiles_that_share_a_gpu_learn_as_one() {
    let Some(gpu) = gpu() else { return };
    let smooth = tiny_cnn("train.batch=8 train.eval_samples=11 model.layers.2.type=gelu")
        .set("model.layers.4.branch.1.type=gelu learning_rate.peak=0.01");
    let tensor = [
        "parallel.tensor=2",
        "parallel.tensor=2 parallel.sequence=true",
        "parallel.tensor=2 parallel.data=2",
    ];
    let tiles = ["parallel.spatial=2", "parallel.spatial=[2,2]", "parallel.spatial=2 parallel.tensor=2"];
    for (base, layouts) in [
        (gpt(), tensor),
        (gpt().set("prune.method=magnitude prune.sparsity=0.9"), tensor),
        (smooth.clone(), tiles),
        (smooth.set("prune.method=magnitude prune.sparsity=0.8"), tiles),
    ] {
        for (precision, tolerance) in [("f32", 1e-5), ("bf16", 0.02)] {
            let base = base.set(format!("train.precision={precision}"));
            let one = run(&base, &gpu);
            for layout in layouts {
                assert_learns_as(&one, &base.set(layout), &gpu, tolerance);
            }
        }
    }
}

/// Moments in bf16: the same bits with dense state, compressed state and compressed weights, and on ranks
/// that shard it; near those of the CPU, whose gradients differ in their last bits.
#[test]
fn moments_in_bf16_are_rounded_alike_on_a_gpu() {
    let Some(gpu) = gpu() else { return };
    let base = tiny_gpt("train.batch=8 train.eval_samples=11 model.context=24 optimizer.moments=bf16")
        .set("prune.method=magnitude prune.sparsity=0.8");
    let bf16 = base.set("train.precision=bf16 optimizer.master=low-bits");
    for base in [&base, &bf16] {
        let dense = run(&base.set("prune.state=dense"), &gpu);
        assert_eq!(run(&base.set("prune.state=compressed"), &gpu), dense, "compressed state");
        assert_eq!(run(&base.set("prune.weights=compressed"), &gpu), dense, "compressed weights");
        let replicas = run(&base.replicas(2), &gpu);
        for zero in [1, 2, 3] {
            let shared = run(&base.replicas(2).set(format!("parallel.zero={zero}")), &gpu);
            assert_eq!((&shared.losses, &shared.hashes), (&replicas.losses, &replicas.hashes), "zero {zero}");
        }
    }
    let far = apart(&run(&base, &Device::cpu(2).unwrap()), &run(&base, &gpu));
    assert!(far < 1e-2, "{far:e} apart from the CPU");
}

/// Weights that are stored as kept values: a block's are expanded beside the work of the block before it. The bits
/// of dense weights, for every path through the blocks.
#[test]
fn compressed_weights_give_the_bits_of_dense_weights_on_a_gpu() {
    let Some(gpu) = gpu() else { return };
    let wide = gpt().set("model.width=128 model.context=32");
    let cases: [(&str, Base, &str); 10] = [
        ("random", wide.clone(), "prune.method=random"),
        ("places", wide.clone(), "prune.method=random prune.sparsity=0.98"),
        ("blocks recomputed", wide.clone(), "prune.method=magnitude train.recompute=block"),
        ("micro-batches", wide.clone(), "prune.method=magnitude train.micro_batches=2"),
        ("embeddings", wide.clone(), "prune.method=magnitude prune.embeddings=true"),
        ("snip", wide.clone(), "prune.method=snip prune.samples=16"),
        ("rigl, adamw", wide.clone(), "prune.method=rigl prune.every=5 optimizer.name=adamw"),
        ("late, lamb", wide.clone(), "prune.method=magnitude prune.at=7 optimizer.name=lamb"),
        ("resnet8", resnet8(), "prune.method=magnitude"),
        ("stages", wide, "prune.method=magnitude parallel.pipeline=2 train.micro_batches=4"),
    ];
    for (name, base, set) in cases {
        for precision in ["f32", "bf16"] {
            let base = base.set("prune.sparsity=0.9").set(set).set(format!("train.precision={precision}"));
            let dense = run(&base, &gpu);
            let compressed = run(&base.set("prune.weights=compressed"), &gpu);
            assert_eq!(dense, compressed, "{name} in {precision}");
            if precision == "bf16" {
                let low = base.set("optimizer.master=low-bits");
                assert_eq!(dense, run(&low.set("prune.weights=compressed"), &gpu), "{name}: the low bits");
            }
        }
    }
}

/// Weights of which each of several ranks on one GPU has a shard: gathered beside the work of the block before.
#[test]
fn sharded_weights_give_the_bits_of_full_weights_on_a_gpu() {
    let Some(gpu) = gpu() else { return };
    let wide = gpt().set("model.width=128 model.context=32 train.eval_samples=9");
    let cases: [(&str, Base, &str); 8] = [
        ("dense", wide.clone(), "parallel.data=2"),
        ("large", wide.clone(), "parallel.data=2 model.width=512"),
        ("random", wide.clone(), "parallel.data=4 prune.method=random prune.sparsity=0.9"),
        ("places", wide.clone(), "parallel.data=2 prune.method=random prune.sparsity=0.98"),
        ("blocks recomputed", wide.clone(), "parallel.data=2 train.recompute=block"),
        ("snip", wide.clone(), "parallel.data=2 prune.method=snip prune.samples=7"),
        ("rigl", wide.clone(), "parallel.data=2 prune.method=rigl prune.every=5"),
        ("stages", wide, "parallel.data=2 parallel.pipeline=2 train.micro_batches=2"),
    ];
    for (name, base, set) in cases {
        for precision in ["f32", "bf16"] {
            let base = base.set(set).set(format!("train.precision={precision}"));
            let [full, sharded] = [2, 3].map(|zero| run(&base.set(format!("parallel.zero={zero}")), &gpu));
            assert_eq!(full, sharded, "{name} in {precision}");
        }
    }
}

/// Recorded passes have one stream, on which blocks are expanded as they come.
#[test]
fn captured_passes_over_compressed_weights_give_the_bits_of_dense_ones() {
    let Some(gpu) = gpu() else { return };
    let base = tiny_cnn("prune.method=magnitude prune.sparsity=0.8").steps(STEPS);
    let take = |base: &Base, record: bool| {
        let (plan, dataset, _) = prepare(base, 2);
        dataset.keep_on(&gpu).unwrap();
        let mut trainer = Trainer::new(plan, dataset, &gpu).unwrap();
        assert!(!record || trainer.enable_graphed_step());
        let shown = shown(&mut trainer).unwrap();
        assert_eq!(trainer.replays_graph(), record);
        shown
    };
    let expected = take(&base, false);
    for record in [false, true] {
        assert_eq!(take(&base.set("prune.weights=compressed"), record), expected, "recorded: {record}");
    }
}

/// Two blocks at once, of which the plan knows; and text generated by the model as it trains.
#[test]
fn compressed_weights_on_a_gpu_take_what_is_planned_and_write_the_same_text() {
    let Some(gpu) = gpu() else { return };
    let base = gpt()
        .set("prune.method=magnitude prune.sparsity=0.9 model.width=128 model.tied=false")
        .set("device.kind=cuda train.precision=bf16");
    let text = |set: &str| {
        // A ledger that no other test writes to.
        let gpu = gpu.another().unwrap();
        let (plan, dataset, _) = prepare(&base.set(set).steps(STEPS), 2);
        let (predicted, blocks) = (plan.memory, plan.model.blocks.len());
        let mut trainer = Trainer::new(plan, dataset, &gpu).unwrap();
        (0..3).for_each(|_| drop(trainer.step().unwrap()));
        let ledger = gpu.ledger();
        let measured =
            [Category::Weights, Category::Optimizer, Category::Mask].map(|one| ledger.peak(one) as u64);
        assert_eq!(measured, [predicted.weights, predicted.optimizer, predicted.mask], "{set}");
        let (params, before) = (trainer.params(), ledger.current(Category::Workspace));
        let dense_bytes = |block: usize| {
            let _entered = params.enter(block, Some(block + 1).filter(|next| *next < blocks)).unwrap();
            (ledger.current(Category::Workspace) - before) as u64
        };
        let expanded = (0..blocks).map(dense_bytes).max().unwrap();
        assert_eq!(expanded, predicted.workspace.unwrap_or(0), "{set}");
        assert!(ledger.peak(Category::Workspace) as u64 >= expanded, "{set}");
        let mut sampler = Sampler::new(Sampling::GREEDY);
        let mut generator = trainer.generator().unwrap();
        generator.generate(&[1, 2, 3], 12, &mut sampler, &mut |_| true).unwrap().tokens
    };
    assert_eq!(text("prune.weights=dense"), text("prune.weights=compressed"));
}

/// With a cache and without, on one rank and on two that share the GPU: in f32 the tokens of the processor;
/// in bf16 the same every time.
#[test]
fn a_gpu_generates_what_the_processor_generates() {
    let Some(gpu) = gpu() else { return };
    [gpt(), llama()].iter().for_each(|base| generates_alike(base, &gpu));
}

fn generates_alike(base: &Base, gpu: &Device) {
    let folder = tempfile::tempdir().unwrap();
    base.set("train.steps=40").run_in(folder.path());
    let host = Device::cpu(2).unwrap();
    let trained = open(folder.path());
    let write = |device: &Device, set: &str, read_again: bool| {
        let plan = trained.plan(&settings(set)).unwrap();
        on_ranks(&trained, &plan, device, Duration::from_secs(60), None, |generator| {
            let mut sampler = Sampler::new(Sampling::GREEDY);
            if !read_again {
                return Ok(generator.generate(&[1, 2, 3], 20, &mut sampler, &mut |_| true)?.tokens);
            }
            let mut all = vec![1, 2, 3];
            for _ in 0..20 {
                generator.reset_cache();
                all.push(generator.read(&all, &mut |logits| sampler.choose(logits))?);
            }
            Ok(all.split_off(3))
        })
        .unwrap()
    };
    let expected = write(&host, "", false);
    assert_eq!(write(gpu, "", false), expected);
    assert_eq!(write(gpu, "", true), expected);
    assert_eq!(write(gpu, "parallel.pipeline=2 device.kind=cuda", false), expected);
    let half = || write(gpu, "train.precision=bf16", false);
    assert_eq!(half(), half());
}
