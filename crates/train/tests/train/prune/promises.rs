//! What every method promises: the same masks on any number of threads, the same bits after a stop, nothing
//! back to life but where a method grows it, and one sentence for what cannot be.

use espalier_tensor::mask::ones;
use espalier_train::checkpoint::Checkpoints;
use espalier_train::prune::is_kept;
use espalier_train::run::RunDir;
use espalier_train::trainer::Trainer;

use crate::support::{Base, checkpoints, planned, prepare, rotary_llama, tiny_cnn, tiny_gpt};

const STEPS: usize = 12;

/// Every method on a network that it suits, with all of its prunings within twelve steps.
fn methods() -> Vec<(&'static str, Base)> {
    let gpt = |settings: &str| tiny_gpt("model.dropout=0.1 prune.sparsity=0.6").set(settings);
    let cnn = |settings: &str| tiny_cnn("prune.sparsity=0.6").set(settings);
    let llama = |settings: &str| rotary_llama("prune.sparsity=0.6").set(settings);
    let early = "prune.method=early-bird prune.every=1 prune.window=4 prune.tolerance=0.4";
    let moving = "prune.every=2 prune.fraction=0.5";
    vec![
        ("random", gpt("prune.method=random prune.at=4")),
        ("magnitude", gpt("prune.method=magnitude prune.at=4 train.precision=bf16")),
        ("magnitude by row", gpt("prune.method=magnitude prune.at=4 prune.scope=row")),
        ("gradual", cnn("prune.method=gradual prune.every=2")),
        ("gradual by row", cnn("prune.method=gradual prune.every=2 prune.scope=row")),
        ("elsa", gpt("prune.method=elsa prune.every=2 prune.penalty=0.5")),
        (
            "elsa in bf16",
            cnn("prune.method=elsa prune.every=2 prune.start=0 optimizer.name=adamw train.precision=bf16"),
        ),
        ("wanda by row", gpt("prune.method=wanda prune.at=2 prune.samples=20")),
        ("snip", cnn("prune.method=snip prune.samples=20")),
        ("snip in bf16", gpt("prune.method=snip prune.samples=10 train.precision=bf16")),
        ("grasp", cnn("prune.method=grasp prune.samples=20")),
        ("grasp in bf16", gpt("prune.method=grasp train.precision=bf16")),
        ("early-bird", gpt(early)),
        ("early-bird channels", cnn(early).set("prune.form=channels prune.l1=0.01")),
        ("lottery", cnn("prune.method=lottery prune.rate=0.4")),
        (
            "lottery with rewinding",
            gpt("prune.method=lottery prune.rate=0.4 prune.rewind=2 train.precision=bf16"),
        ),
        ("set", gpt("prune.method=set").set(moving)),
        ("rigl", gpt("prune.method=rigl prune.embeddings=true").set(moving)),
        ("rigl in bf16", cnn("prune.method=rigl train.precision=bf16").set(moving)),
        ("2:4", tiny_gpt("prune.method=2:4 prune.at=3")),
        ("magnitude of llama by row", llama("prune.method=magnitude prune.at=4 prune.scope=row")),
        ("wanda of llama by row", llama("prune.method=wanda prune.at=2 prune.samples=20")),
        ("snip of llama", llama("prune.method=snip prune.samples=10 train.precision=bf16")),
        ("grasp of llama", llama("prune.method=grasp prune.samples=10")),
        ("gradual of llama", llama("prune.method=gradual prune.every=2")),
        ("rigl of llama", llama("prune.method=rigl").set(moving)),
        ("lottery of llama", llama("prune.method=lottery prune.rate=0.4 prune.rewind=2")),
        ("early-bird of llama", llama(early)),
        ("2:4", rotary_llama("prune.method=2:4 prune.at=3")),
    ]
}

fn trainer(base: &Base, threads: usize) -> Trainer {
    base.steps(STEPS).trainer(threads)
}

/// The hashes of weights and masks.
fn state(trainer: &Trainer) -> (String, String) {
    (trainer.params().hash().unwrap(), trainer.params().mask_hash().unwrap())
}

/// Takes steps up to `steps`, on the device's own threads.
fn train_to(trainer: &mut Trainer, steps: usize) {
    let device = trainer.device().clone();
    device.enter(|| {
        while trainer.progress().step < steps as u64 {
            trainer.step().unwrap();
        }
    });
}

/// A training from which the other promises are seen: nothing that was pruned comes back unless it is grown.
/// Returns the state after each step.
fn uninterrupted(name: &str, trainer: &mut Trainer) -> Vec<(String, String)> {
    let grows = name.starts_with("set") || name.starts_with("rigl");
    let mut before: Vec<Option<Vec<u32>>> = Vec::new();
    let (mut prunings, mut grown, mut states) = (0, false, Vec::new());
    let device = trainer.device().clone();
    for step in 0..STEPS {
        let report = device.enter(|| trainer.step()).unwrap();
        prunings += usize::from(report.pruned.is_some());
        let masks: Vec<Option<Vec<u32>>> =
            trainer.params().ids().map(|id| trainer.params().mask(id).map(|mask| mask.words())).collect();
        for (id, words) in trainer.params().ids().zip(&masks) {
            let Some(words) = words else { continue };
            let values = trainer.params().param(id).weight().to_f32();
            let alive = (0..values.len()).find(|i| !is_kept(words, *i) && values[*i].to_bits() != 0);
            assert_eq!(alive, None, "{name}, step {step}: {}", trainer.params().name(id));
            if let Some(Some(old)) = before.get(id.0) {
                let back = words.iter().zip(old).any(|(now, old)| now & !old != 0);
                assert!(grows || !back, "{name}, step {step}: {}", trainer.params().name(id));
                grown |= back;
            }
        }
        before = masks;
        states.push(state(trainer));
    }
    assert!(prunings > 0 && trainer.sparsity() > 0.1, "{name} has pruned");
    assert_eq!(grown, grows, "{name}");
    states
}

/// Exact counts; and on one thread, on two and on three the same masks and weights, wherever it is stopped.
#[test]
fn every_method_keeps_its_promises() {
    for (number, (name, base)) in methods().into_iter().enumerate() {
        let mut on_three = trainer(&base, 3);
        let states = uninterrupted(name, &mut on_three);
        assert_counts(name, &base, &on_three);
        // Before, between and after the prunings of every method above; in the short form after every third step of
        // each method, beginning with another one for the next. That saving itself changes nothing is seen too.
        let (first_stop, every) = if espalier_testing::long() { (1, 1) } else { (1 + number % 3, 3) };
        let mut on_one = trainer(&base, 1);
        for stopped_after in (first_stop..STEPS).step_by(every) {
            let folder = tempfile::tempdir().unwrap();
            let checkpoints = checkpoints(&base, folder.path());
            train_to(&mut on_one, stopped_after);
            on_one.save(&checkpoints).unwrap();
            let mut second = trainer(&base, 2);
            second.load(&checkpoints, |broken| panic!("{broken}")).unwrap().expect("the checkpoint");
            let end = (stopped_after + 3).min(STEPS);
            train_to(&mut second, end);
            assert_eq!(
                state(&second),
                states[end - 1],
                "{name} on two threads, stopped after {stopped_after}"
            );
        }
        train_to(&mut on_one, STEPS);
        assert_eq!(state(&on_one), states[STEPS - 1], "{name} on one thread");
    }
}

/// 60 % of the weights are gone, exactly so many: globally, or in each layer where a method works by layers.
fn assert_counts(name: &str, base: &Base, trainer: &Trainer) {
    let (kept, all) = trainer.kept();
    let fraction = |all: usize| (0.4 * all as f64).round() as usize;
    match name {
        "early-bird channels" => {
            // Eight channels of one convolution: 3.2 stay, which is 3, with 27 weights each; the next
            // reads these.
            let masks: Vec<_> = trainer.params().masks().map(|(_, mask)| (mask.len(), mask.kept())).collect();
            assert_eq!(masks, [(8 * 27, 3 * 27), (8, 3), (8, 3), (8 * 72, 8 * 27)]);
        }
        "2:4" => assert_eq!(2 * kept, all, "{name}"),
        // As the distribution has it, which `plan` computes; together as many as asked for.
        _ if name.starts_with("set") || name.starts_with("rigl") => {
            let plan = planned(base);
            let wanted = plan.pruning.as_ref().unwrap().kept_by_parameter(&plan.model.parameters());
            for (id, mask) in trainer.params().masks() {
                assert_eq!(Some(mask.kept() as u64), wanted[id.0], "{name}: {}", trainer.params().name(id));
            }
            assert!((kept as f64 / all as f64 - 0.4).abs() < 1e-3, "{name}: {kept} of {all}");
        }
        _ if planned(base).pruning.unwrap().method.is_by_layer() => {
            for (id, mask) in trainer.params().masks() {
                let plan = &trainer.params().param(id).plan;
                let (layer, shape) = (&plan.name, plan.shard.shape());
                // GPT-2's weights lie input first.
                let rows = if layer.starts_with("h.") { shape[1] } else { shape[0] };
                let rows = if name.ends_with("by row") { rows } else { 1 };
                assert_eq!(mask.kept(), rows * fraction(mask.len() / rows), "{name}: {layer}");
            }
        }
        _ => assert_eq!(kept as usize, fraction(all as usize), "{name}"),
    }
}

/// Sorted by hand: over all candidates, or in each; the earlier of two alike stays.
#[test]
fn the_largest_weights_stay() {
    let by_hand = |groups: &[Vec<f32>], kept: usize| -> Vec<Vec<usize>> {
        let mut all: Vec<(usize, usize)> = groups
            .iter()
            .enumerate()
            .flat_map(|(g, values)| (0..values.len()).map(move |i| (g, i)))
            .collect();
        all.sort_by(|&(g, i), &(h, j)| groups[h][j].abs().total_cmp(&groups[g][i].abs()));
        let mut indices = vec![Vec::new(); groups.len()];
        all[..kept].iter().for_each(|&(g, i)| indices[g].push(i));
        indices.iter_mut().for_each(|indices| indices.sort_unstable());
        indices
    };
    for (settings, fraction, global) in [
        ("prune.method=magnitude prune.sparsity=0.7 prune.scope=global", 0.3, true),
        ("prune.method=magnitude prune.sparsity=0.7", 0.3, false),
        ("prune.method=gradual prune.initial=0.6 prune.start=0", 0.4, false),
        ("prune.method=gradual prune.initial=0.6 prune.start=0 prune.scope=global", 0.4, true),
    ] {
        let before = trainer(&tiny_cnn(settings), 1);
        let mut after = trainer(&tiny_cnn(settings), 1);
        after.step().unwrap();
        let found: Vec<(_, Vec<usize>)> =
            after.params().masks().map(|(id, mask)| (id, ones(&mask.words()).collect())).collect();
        assert_eq!(found.len(), 3, "all matrices are candidates");
        let values: Vec<Vec<f32>> =
            found.iter().map(|(id, _)| before.params().param(*id).weight().to_f32()).collect();
        let kept = |values: &[Vec<f32>]| {
            (fraction * values.iter().map(Vec::len).sum::<usize>() as f64).round() as usize
        };
        let expected = match global {
            true => by_hand(&values, kept(&values)),
            false => values.chunks(1).flat_map(|layer| by_hand(layer, kept(layer))).collect(),
        };
        let found: Vec<Vec<usize>> = found.into_iter().map(|(_, indices)| indices).collect();
        assert_eq!(found, expected, "{settings}");
    }
}

/// Along the input of each matrix: GPT-2's lie input first.
#[test]
fn two_of_every_four_inputs_stay() {
    let mut trainer = trainer(&tiny_gpt("prune.method=2:4 model.tied=false"), 1);
    trainer.step().unwrap();
    let mut seen = 0;
    for (id, mask) in trainer.params().masks() {
        let (name, words) = (trainer.params().name(id), mask.words());
        let shape = trainer.params().param(id).weight().shape();
        let (stride, inputs) = if name == "lm_head.weight" { (1, shape[1]) } else { (shape[1], shape[0]) };
        let kept = |i: usize| usize::from(is_kept(&words, i));
        for start in (0..mask.len()).filter(|i| (i / stride % inputs).is_multiple_of(4)) {
            let four: usize = (0..4).map(|n| kept(start + n * stride)).sum();
            assert_eq!(four, 2, "{name} at {start}");
            seen += 1;
        }
    }
    assert_eq!(4 * seen, trainer.kept().1);
}

#[test]
fn a_layer_of_which_nothing_is_left_is_named() {
    let settings = "prune.method=magnitude prune.scope=global prune.sparsity=0.999 train.steps=2";
    let (_, observer) = tiny_cnn(settings).run_observed();
    // One of 872 weights stays, so two of three layers are empty.
    assert_eq!(observer.warnings.len(), 2, "{:?}", observer.warnings);
    for warning in &observer.warnings {
        assert!(warning.starts_with("nothing is left of ") && warning.contains(".weight"), "{warning}");
    }
}

/// A GPT's output projections start smaller than its other matrices by the root of twice its depth. One
/// threshold for all magnitudes leaves next to nothing of them, which is reported by name and once; by default
/// each layer keeps its fraction.
#[test]
fn no_layer_is_emptied_for_the_scale_it_starts_at() {
    let settings = "prune.method=gradual prune.initial=0.89 prune.end=3 train.steps=4";
    let base =
        tiny_gpt(settings).set("model.width=32 model.layers=4 model.context=24 learning_rate.peak=1e-5");
    let (summary, observer) = base.run_observed();
    let summary = summary.unwrap();
    assert_eq!(observer.warnings, [""; 0]);
    let layers = summary.kept_by_layer.unwrap();
    assert_eq!(layers.len(), 16, "four matrices in each layer, no tables");
    assert!(layers.iter().all(|layer| (layer.density() - 0.1).abs() < 1e-3), "{layers:?}");
    assert_eq!(layers.iter().map(|layer| layer.kept).sum::<u64>(), summary.kept);

    let (summary, observer) = base.set("prune.scope=global").run_observed();
    let summary = summary.unwrap();
    let layers = summary.kept_by_layer.unwrap();
    let thin: Vec<_> = layers.iter().filter(|layer| layer.density() < 0.01).collect();
    assert!(thin.len() == 8 && thin.iter().all(|layer| layer.name.ends_with("c_proj.weight")), "{layers:?}");
    assert_eq!(observer.warnings.len(), 8, "each once, though it is pruned twice: {:?}", observer.warnings);
    for layer in thin {
        let named = |warning: &&String| warning.contains(&format!("left of {}", layer.name));
        assert_eq!(
            observer.warnings.iter().filter(named).count(),
            1,
            "{}: {:?}",
            layer.name,
            observer.warnings
        );
    }
}

/// A run that ends before its method prunes is not what was asked for.
#[test]
fn a_run_too_short_to_prune_says_so() {
    let cases = [
        ("prune.method=early-bird prune.latest=9", "nothing was pruned: 4 steps are too few for early-bird"),
        (
            "prune.method=gradual prune.every=1 prune.start=0 prune.end=9",
            "4 steps were too few: pruned to 0.",
        ),
    ];
    for (settings, expected) in cases {
        let (ended, observer) = tiny_gpt(settings).set("train.steps=4").run_observed();
        ended.unwrap();
        let last = observer.warnings.last().unwrap();
        assert!(last.starts_with(expected), "{:?}", observer.warnings);
        // What of it could be known before the first step was reported then.
        let early =
            observer.warnings.iter().any(|text| text.starts_with("`prune.latest` = 9 is beyond the end"));
        assert_eq!(
            (early, observer.warnings.len()),
            (settings.contains("early-bird"), 1 + usize::from(early))
        );
    }
}

/// What is known before the first step is not reported behind the last.
#[test]
fn a_run_of_too_few_epochs_is_refused() {
    for (settings, expected) in [
        (
            "prune.method=magnitude prune.at=2",
            "`prune.at` is 2, but the run has 2 steps: nothing would ever be pruned",
        ),
        ("prune.method=lottery", "`train.epochs` gives 2 steps, but the lottery trains 13 times"),
    ] {
        let (plan, dataset, device) = prepare(&tiny_cnn("train.epochs=1 train.batch=64").set(settings), 1);
        let error = Trainer::new(plan, dataset, &device).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn a_resumed_lottery_without_its_early_weights_says_so() {
    let base =
        |rewind: usize| tiny_gpt(format!("prune.method=lottery prune.sparsity=0.2 prune.rewind={rewind}"));
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path(), 1, "gpt", "f32");
    let mut first = trainer(&base(0), 1);
    train_to(&mut first, 4);
    first.save(&checkpoints).unwrap();
    let mut second = trainer(&base(2), 1);
    second.load(&checkpoints, |broken| panic!("{broken}")).unwrap();
    let error = loop {
        match second.step() {
            Ok(report) => assert!(report.pruned.is_none()),
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.starts_with("`prune.rewind` is 2, but the checkpoint"), "{error}");
}

/// Adam divides by a mean square. One that starts at zero late in a run makes the first step of a grown
/// weight `sqrt(1 / (1 - beta2))` rates long, here 3.2 for every one of them, and the loss jumps. Starting at
/// the mean of its layer, a grown weight moves as the others do.
#[test]
fn grown_weights_move_as_the_others_do() {
    let base = tiny_gpt("prune.method=set prune.every=40 prune.until=1.0 train.steps=60")
        .set("optimizer.beta1=0 optimizer.beta2=0.9 optimizer.weight_decay=0");
    for state in ["prune.state=dense", "prune.state=compressed"] {
        let mut trainer = base.set(state).trainer(1);
        train_to(&mut trainer, 40);
        let before: Vec<Vec<u32>> = trainer.params().masks().map(|(_, mask)| mask.words()).collect();
        let report = trainer.step().unwrap();
        assert!(report.pruned.is_some(), "it moves before step 41");
        let mut moves = Vec::new();
        for ((id, mask), before) in trainer.params().masks().zip(&before) {
            let values = trainer.params().param(id).weight().to_f32();
            let grown = ones(&mask.words()).filter(|i| !is_kept(before, *i)).collect::<Vec<_>>();
            moves.extend(grown.iter().map(|i| f64::from(values[*i].abs()) / report.lr));
        }
        moves.sort_by(f64::total_cmp);
        assert!(moves.len() > 30, "{}", moves.len());
        let median = moves[moves.len() / 2];
        assert!(median > 0.01 && median < 1.5, "{median} rates");
    }
}

#[test]
fn elsa_refuses_weights_that_are_pruned_already() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second] = ["first", "second"].map(|name| folder.path().join(name));
    tiny_gpt("prune.method=magnitude prune.sparsity=0.5 train.steps=2").run_in(&first);
    let run_dir = RunDir { from: Some(first), ..RunDir::at(&second) };
    let elsa = tiny_gpt("prune.method=elsa train.steps=8");
    let error = elsa.fails(&run_dir).to_string();
    assert_eq!(
        error,
        "`prune.method` is \"elsa\", which chooses among all weights, but the run starts from weights that are \
         pruned already: use \"gradual\", or \"keep\""
    );
}
