//! Early-Bird and lottery tickets by hand.

use std::fs;

use espalier_nn::weights::ParameterId;
use espalier_tensor::random;
use espalier_train::prune::{Decision, Observation, Pruner, count, kept_indices, pruner};
use espalier_train::step::PassMicroBatch;
use espalier_train::trainer::Trainer;

use super::bench::{Bench, perceptron, values_where};
use crate::support::{Base, tiny_cnn, tiny_gpt};
use espalier_train::state::{ParamStore, Penalty};

fn method(bench: &Bench, steps: u64) -> Box<dyn Pruner> {
    pruner(&bench.context.plan, steps).unwrap().expect("a method")
}

fn observe(bench: &mut Bench, pruner: &mut dyn Pruner, step: u64) -> Observation {
    match pruner.before_step(&mut bench.network(step)).unwrap() {
        Decision::Observe(observation) => observation,
        other => panic!("before step {step}: {other:?}"),
    }
}

/// Weights of the perceptron's candidates whose largest stand at `from..from + 11`.
fn peak_at(bench: &mut Bench, from: usize) {
    let mut index = 0;
    for id in bench.candidates.clone() {
        let len = bench.params.param(id).len();
        let value = |i: usize| if (from..from + 11).contains(&(index + i)) { -5.0 } else { 0.01 };
        bench.set(id, &(0..len).map(value).collect::<Vec<f32>>());
        index += len;
    }
}

#[test]
fn a_ticket_is_drawn_when_the_newest_mask_is_near_all_others() {
    // 11 of 110 weights are kept: moving k of them changes 2 k positions, which is k / 11 of them.
    let base = perceptron("prune.method=early-bird prune.scope=global prune.window=3 prune.tolerance=0.2");
    let mut bench = Bench::new(&base);
    let mut early = method(&bench, 100);
    peak_at(&mut bench, 0);
    for step in [0, 1, 9, 11] {
        let decision = early.before_step(&mut bench.network(step)).unwrap();
        assert!(matches!(decision, Decision::Wait), "an epoch of ten steps: {step}");
    }
    let observation = observe(&mut bench, &mut *early, 10);
    assert_eq!(observation, Observation { note: "keeps 11 of 110 weights".into(), distances: vec![] });
    peak_at(&mut bench, 3);
    let observation = observe(&mut bench, &mut *early, 20);
    assert_eq!(observation.distances, [3.0 / 11.0]);
    assert_eq!(observation.note, "keeps 11 of 110 weights; mask distance to earlier masks 0.2727");
    // Near the one before, but not the one before that.
    peak_at(&mut bench, 4);
    assert_eq!(observe(&mut bench, &mut *early, 30).distances, [4.0 / 11.0, 1.0 / 11.0]);
    // A checkpoint in between changes nothing.
    let mut resumed = method(&bench, 100);
    resumed.load(early.save().unwrap());
    peak_at(&mut bench, 5);
    let draw = bench.choose_masks(&mut *early, 40);
    assert_eq!(draw.distances, [2.0 / 11.0, 1.0 / 11.0]);
    assert!(draw.note.starts_with("mask drawn after step 40, converged: keeps 11 of 110"), "{}", draw.note);
    assert_eq!(kept_indices(&draw.masks[0].1), (5..16).collect::<Vec<_>>());
    assert_eq!(bench.choose_masks(&mut *resumed, 40).masks, draw.masks);
    // Once.
    let mut after = method(&bench, 100);
    after.load(early.save().unwrap());
    for pruner in [&mut early, &mut after] {
        assert!(matches!(pruner.before_step(&mut bench.network(50)).unwrap(), Decision::Wait));
    }
}

/// At 95 % masks of random weights differ in at most a tenth of all positions, though they have next to nothing
/// in common.
#[test]
fn random_masks_do_not_settle_at_a_high_sparsity() {
    for scope in ["prune.scope=layer", "prune.scope=global"] {
        let base = tiny_gpt("prune.method=early-bird prune.sparsity=0.95 prune.every=1").set(scope);
        let mut bench = Bench::new(&base);
        let mut early = method(&bench, 100);
        for step in 1..12 {
            for id in bench.candidates.clone() {
                let key = random::key(step, id.0 as u64);
                let value = |i: u64| random::bits(key, i) as f32 / u32::MAX as f32 - 0.5;
                let values: Vec<f32> = (0..bench.params.param(id).len() as u64).map(value).collect();
                bench.set(id, &values);
            }
            let observation = observe(&mut bench, &mut *early, step);
            assert!(
                observation.distances.iter().all(|distance| (0.9..=1.0).contains(distance)),
                "{observation:?}"
            );
        }
    }
}

#[test]
fn what_never_settles_is_pruned_at_the_latest() {
    for (latest, step) in [("prune.latest=0", 50), ("prune.latest=37", 37)] {
        let base = perceptron("prune.method=early-bird prune.every=5").set(latest);
        let mut bench = Bench::new(&base);
        let mut early = method(&bench, 100);
        for now in 1..step {
            peak_at(&mut bench, 2 * now as usize % 90);
            let decision = early.before_step(&mut bench.network(now)).unwrap();
            assert!(!matches!(decision, Decision::Prune(_)), "{now}: {decision:?}");
        }
        let draw = bench.choose_masks(&mut *early, step);
        assert!(draw.note.contains("not converged by `prune.latest`"), "{}", draw.note);
    }
}

/// Three convolutions: two with a batch norm, the second of these with a bias.
const NORMED: &str = "model.layers=[{type='conv', output=4, kernel=3, padding=1, bias=false}, {type='batch_norm'}, {type='relu'}, \
     {type='conv', output=6, kernel=1}, {type='batch_norm'}, {type='relu'}, {type='conv', output=5, kernel=1}, \
     {type='global_avg_pool'}, {type='linear', output=10}]";

fn normed(more: &str) -> Base {
    let base = tiny_cnn(NORMED).set("prune.method=early-bird prune.form=channels prune.sparsity=0.3");
    base.set(more)
}

/// The names of the parameters of `normed`, in order: conv, norm, norm, conv, bias, norm, norm, ...
fn names(bench: &Bench) -> Vec<String> {
    bench.params.ids().map(|id| bench.params.name(id).to_owned()).collect()
}

#[test]
fn channels_go_with_all_that_makes_them() {
    let mut bench = Bench::new(&normed("prune.latest=1"));
    let names = names(&bench);
    let (first, second) = (ParameterId(1), ParameterId(5));
    assert_eq!((bench.params.param(first).len(), bench.params.param(second).len()), (4, 6), "{names:?}");
    bench.set(first, &[0.5, -0.01, 0.9, 0.2]);
    bench.set(second, &[-0.6, 0.3, 0.0, 0.7, 0.1, -0.8]);
    let mut early = method(&bench, 100);
    let draw = bench.choose_masks(&mut *early, 1);
    // 7 of 10 stay: 0.01 of the first and 0.0 and 0.1 of the second go.
    let kept = |id: usize| {
        let (_, words) = draw.masks.iter().find(|(other, _)| other.0 == id).expect("a mask");
        kept_indices(words)
    };
    for id in [1, 2] {
        assert_eq!(kept(id), [0, 2, 3], "{}", names[id]);
    }
    for id in [4, 5, 6] {
        assert_eq!(kept(id), [0, 1, 3, 5], "{}", names[id]);
    }
    // Rows of 3 x 3 x 3 weights, and of 4.
    assert_eq!(kept(0), (0..27).chain(54..108).collect::<Vec<_>>());
    // Of these four, that of the first convolution's second channel goes too, and so do the third's inputs.
    let indices = |rows: &[usize], inputs: &[usize], width: usize| -> Vec<usize> {
        rows.iter().flat_map(|row| inputs.iter().map(move |input| row * width + input)).collect()
    };
    assert_eq!(kept(3), indices(&[0, 1, 3, 5], &[0, 2, 3], 4));
    assert_eq!(kept(7), indices(&[0, 1, 2, 3, 4], &[0, 1, 3, 5], 6));
    assert_eq!(
        draw.masks.len(),
        8,
        "the third convolution's own channels, without a norm, and the head stay"
    );
    assert!(draw.note.contains("keeps 7 of 10 channels"), "{}", draw.note);
}

/// A stem, a residual branch, a convolution, and a head that reads it flattened.
fn streamed(stream: usize, last: usize) -> Base {
    let layers = format!(
        "model.layers=[{{type='conv', output={stream}, kernel=3, padding=1, bias=false}}, {{type='batch_norm'}}, {{type='relu'}}, \
         {{type='residual', branch=[{{type='conv', output={stream}, kernel=3, padding=1}}, {{type='batch_norm'}}]}}, {{type='relu'}}, \
         {{type='max_pool', kernel=4}}, {{type='conv', output={last}, kernel=1}}, {{type='batch_norm'}}, {{type='relu'}}, \
         {{type='flatten'}}, {{type='linear', output=10}}]"
    );
    tiny_cnn("prune.method=early-bird prune.form=channels prune.sparsity=0.385 prune.latest=1").set(layers)
}

/// A network with pruned channels is one that never had them: what is left of its weights fits the smaller
/// one, whose logits are the same.
#[test]
fn a_network_with_pruned_channels_is_a_smaller_network() {
    let mut bench = Bench::new(&streamed(4, 5));
    disturb(&mut bench);
    let shapes: Vec<Vec<usize>> =
        bench.params.ids().map(|id| bench.params.param(id).plan.shard.shape()).collect();
    assert_eq!(shapes[3], [4, 3, 3, 4], "{:?}", names(&bench));
    assert_eq!((&shapes[7][..], &shapes[11][..]), (&[5, 1, 1, 4][..], &[10, 80][..]));
    // Of the stem channels 1 and 2 go, of the branch 1 and 3: of their sum 1. Of the last convolution 0.
    bench.set(ParameterId(1), &[0.9, 0.01, 0.02, 0.8]);
    bench.set(ParameterId(5), &[0.7, 0.03, -0.9, 0.04]);
    bench.set(ParameterId(9), &[0.05, 0.6, 0.7, -0.8, 0.9]);
    let mut early = method(&bench, 100);
    let draw = bench.choose_masks(&mut *early, 1);
    let counts: Vec<(usize, usize)> = draw.masks.iter().map(|(id, words)| (id.0, count(words))).collect();
    // The stem's two rows; the branch's two rows of two inputs; four rows of three inputs; ten of four times
    // sixteen.
    let expected = [(0, 2 * 27), (1, 2), (2, 2), (3, 2 * 2 * 9), (4, 2), (5, 2), (6, 2)];
    assert_eq!(counts[..7], expected);
    assert_eq!(counts[7..], [(7, 4 * 3), (8, 4), (9, 4), (10, 4), (11, 10 * 64)]);
    bench.apply(draw);

    let mut small = Bench::new(&streamed(3, 4));
    let (stream, last): (&[usize], &[usize]) = (&[0, 2, 3], &[1, 2, 3, 4]);
    let flat: Vec<usize> = last.iter().flat_map(|channel| channel * 16..channel * 16 + 16).collect();
    for id in bench.params.ids() {
        // What is left of the outputs and of the inputs, the first and the last dimension; the rest is taken in full.
        let (rows, columns): (&[usize], Option<&[usize]>) = match id.0 {
            0 => (stream, None),
            3 => (stream, Some(stream)),
            1 | 2 | 4 | 5 | 6 => (stream, None),
            7 => (last, Some(stream)),
            8..=10 => (last, None),
            11 => (&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], Some(&flat[..])),
            _ => (&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], None),
        };
        let (shape, values) = (&shapes[id.0], bench.values(id));
        let row = values.len() / shape[0];
        let inputs = if shape.len() > 1 { shape[shape.len() - 1] } else { 1 };
        let all: Vec<usize> = (0..inputs).collect();
        let columns = columns.unwrap_or(&all);
        let left: Vec<f32> = rows
            .iter()
            .flat_map(|r| (0..row / inputs).map(move |position| r * row + position * inputs))
            .flat_map(|first| columns.iter().map(move |column| first + column))
            .map(|index| values[index])
            .collect();
        small.set(id, &left);
    }
    let stream_statistics = |bench: &Bench| -> Vec<f32> {
        let named = bench.params.named().filter(|(name, _)| name.contains("running"));
        named.flat_map(|(_, tensor)| tensor.to_f32()).collect()
    };
    // `disturb` has changed these too: the smaller network takes those of the channels that it has.
    let all = stream_statistics(&bench);
    let kept: Vec<f32> = [(0, stream), (4, stream), (8, stream), (12, stream), (16, last), (21, last)]
        .into_iter()
        .flat_map(|(start, channels)| channels.iter().map(move |channel| start + channel))
        .map(|index| all[index])
        .collect();
    let mut kept = kept.into_iter();
    for (_, tensor) in small.params.named_mut().filter(|(name, _)| name.contains("running")) {
        tensor.slice_mut::<f32>().fill_with(|| kept.next().unwrap());
    }
    let samples: Vec<(u64, usize)> = (0..8).map(|i| (0, i)).collect();
    let [full, small] = [&mut bench, &mut small].map(|bench| {
        bench
            .network(1)
            .no_update_pass()
            .evaluate(&PassMicroBatch::chunks(&samples, samples.len()))
            .unwrap()
            .loss()
    });
    assert!((full - small).abs() < 1e-6 * full.abs(), "{full} pruned, {small} small");
}

#[test]
fn scales_are_pulled_until_the_ticket_and_then_no_more() {
    let steps = |l1: &str, count: usize| {
        let base = normed("optimizer.name=sgd learning_rate.peak=0.5 prune.latest=1").set(l1);
        let mut trainer = base.trainer(1);
        (0..count).for_each(|_| drop(trainer.step().unwrap()));
        trainer.params().ids().map(|id| trainer.params().param(id).weight().to_f32()).collect::<Vec<_>>()
    };
    let (free, pulled) = (steps("prune.l1=0", 1), steps("prune.l1=0.1", 1));
    for (id, (a, b)) in free.iter().zip(&pulled).enumerate() {
        for (a, b) in a.iter().zip(b) {
            // Scales start at 1: the pull is 0.5 * 0.1.
            let expected = if [1, 5].contains(&id) { a - 0.05 } else { *a };
            assert!((b - expected).abs() < 1e-6, "parameter {id}: {a} free, {b} pulled");
        }
    }
    // After the ticket, before the second step, the gradient alone moves a scale of 0.95.
    let base = normed("optimizer.name=sgd learning_rate.peak=0.5 prune.latest=1 prune.l1=0.1");
    let early = method(&Bench::new(&base), 100);
    let Some(Penalty::L1 { ids, strength }) = early.penalty() else { panic!("a penalty of scales") };
    assert_eq!((ids, strength), (vec![ParameterId(1), ParameterId(5)], 0.1));
    let mut bench = Bench::new(&base);
    let mut early = method(&bench, 100);
    bench.choose_masks(&mut *early, 1);
    assert!(early.penalty().is_none());
}

#[test]
fn distances_and_the_step_of_the_ticket_are_written_down() {
    let base = tiny_gpt("prune.method=early-bird prune.every=1 prune.window=3 train.steps=12")
        .set("prune.tolerance=0.99");
    let folder = tempfile::tempdir().unwrap();
    base.run_in(folder.path());
    let text = fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap();
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let observations: Vec<_> = lines.iter().filter(|line| line.get("pruner").is_some()).collect();
    assert_eq!(observations.len(), 2);
    assert_eq!(observations[1]["pruner"]["mask_distances"].as_array().unwrap().len(), 1);
    let ticket = lines.iter().find(|line| line.get("pruned").is_some()).expect("a ticket");
    assert_eq!(ticket["step"], 4);
    assert_eq!(ticket["pruned"]["mask_distances"].as_array().unwrap().len(), 2);
    assert!(ticket["pruned"]["note"].as_str().unwrap().starts_with("mask drawn after step 3, converged"));
}

/// Changes every parameter, as training would, and every running statistic.
fn disturb(bench: &mut Bench) {
    for (i, (_, tensor)) in bench.params.named_mut().enumerate() {
        for (j, value) in tensor.slice_mut::<f32>().iter_mut().enumerate() {
            *value = *value * 1.5 + 0.01 * ((i * 31 + j * 17) % 23) as f32 - 0.1;
        }
    }
}

fn all_values(weights: &ParamStore) -> Vec<(String, Vec<f32>)> {
    weights.named().map(|(name, tensor)| (name.to_owned(), tensor.to_f32())).collect()
}

#[test]
fn a_round_prunes_what_was_trained_and_goes_back_to_the_start() {
    // One threshold for the convolutions, which lose half, and one for the head, which loses a quarter.
    let base = tiny_cnn("prune.method=lottery prune.rate=0.5 prune.sparsity=0.7 train.steps=100");
    let mut bench = Bench::new(&base);
    let first = all_values(&bench.params);
    let mut lottery = method(&bench, 100);
    let ids = bench.candidates.clone();
    let sizes: Vec<usize> = ids.iter().map(|id| bench.params.param(*id).len()).collect();
    assert_eq!(sizes, [216, 576, 80]);
    // 792 and 80 to 262: 396 + 60 = 456, 198 + 45 = 243 would be too few; two trainings stand before, one behind.
    for step in 0..33 {
        assert!(matches!(lottery.before_step(&mut bench.network(step)).unwrap(), Decision::Wait), "{step}");
        assert_eq!(lottery.position(step, 100), (step, 33));
    }
    disturb(&mut bench);
    let magnitudes = |bench: &Bench, ids: &[ParameterId]| -> Vec<f32> {
        let mut all: Vec<f32> = ids.iter().flat_map(|id| bench.values(*id)).map(f32::abs).collect();
        all.sort_by(|a, b| b.total_cmp(a));
        all
    };
    let thresholds = [magnitudes(&bench, &ids[..2])[395], magnitudes(&bench, &ids[2..])[59]];
    let trained: Vec<Vec<f32>> = ids.iter().map(|id| bench.values(*id)).collect();
    let draw = bench.choose_masks(&mut *lottery, 33);
    assert!(draw.reset_state);
    assert_eq!(draw.note, "round 1 of 2, weights as after step 0");
    assert_eq!(lottery.position(33, 100), (0, 33));
    let kept: Vec<usize> = draw.masks.iter().map(|(_, words)| count(words)).collect();
    assert_eq!((kept[0] + kept[1], kept[2]), (396, 60));
    for (((id, words), trained), threshold) in
        draw.masks.iter().zip(&trained).zip([thresholds[0], thresholds[0], thresholds[1]])
    {
        let kept = values_where(trained, words);
        let least = kept.iter().filter(|w| **w != 0.0).map(|w| w.abs());
        assert!(least.fold(f32::INFINITY, f32::min) >= threshold, "{}", bench.params.name(*id));
    }
    assert_eq!(all_values(&bench.params), first, "weights, norms and running statistics");
    bench.apply(draw);

    disturb(&mut bench);
    let draw = bench.choose_masks(&mut *lottery, 66);
    assert_eq!(draw.masks.iter().map(|(_, words)| count(words)).sum::<usize>(), 262);
    // r = (456 - 262) / (396 + 30) = 0.4554: 60 (1 - 0.2277) = 46.3 of the head.
    assert_eq!(count(&draw.masks[2].1), 46);
    for (id, words) in &draw.masks {
        let before = bench.params.mask(*id).unwrap().words();
        assert!(words.iter().zip(before).all(|(now, before)| now & !before == 0), "nothing comes back");
    }
    // What does not divide goes to the last training.
    assert_eq!((lottery.position(66, 100), lottery.position(99, 100)), ((0, 34), (33, 34)));
}

#[test]
fn rewinding_goes_back_to_an_early_step() {
    for precision in ["f32", "bf16"] {
        // One of its biases has five numbers, which in bf16 are no whole number of words.
        let base = tiny_cnn(NORMED)
            .set("prune.method=lottery prune.rewind=3 prune.sparsity=0.2")
            .set(format!("train.precision={precision} train.steps=21"));
        let mut trainer = base.trainer(1);
        let mut bench = Bench::new(&base);
        let mut lottery = method(&bench, 21);
        let copy = |bench: &mut Bench, trainer: &Trainer| {
            for ((_, to), (_, from)) in bench.params.named_mut().zip(trainer.params().named()) {
                to.copy_from_host(&from.host_bytes()).unwrap();
            }
        };
        for step in 0..9 {
            copy(&mut bench, &trainer);
            assert!(matches!(lottery.before_step(&mut bench.network(step)).unwrap(), Decision::Wait));
            if step == 3 {
                assert_eq!(
                    lottery.save().unwrap().len(),
                    bench.params.named().count(),
                    "in every checkpoint"
                );
            }
            trainer.step().unwrap();
        }
        // 162 and 50 to 170: 130 + 45, and a little more. Trainings of 9, 6 and 6 steps.
        let mut early = base.trainer(1);
        (0..3).for_each(|_| drop(early.step().unwrap()));
        let draw = bench.choose_masks(&mut *lottery, 9);
        assert_eq!(draw.note, "round 1 of 2, weights as after step 3");
        assert_eq!(lottery.position(9, 21), (3, 9));
        assert_eq!(bench.params.hash().unwrap(), early.params().hash().unwrap(), "{precision}");
    }
}

#[test]
fn a_lottery_that_did_not_start_from_its_seed_remembers_its_start() {
    let mut bench = Bench::new(&tiny_cnn("prune.method=lottery prune.sparsity=0.2"));
    disturb(&mut bench);
    let start = all_values(&bench.params);
    let mut lottery = method(&bench, 100);
    assert!(matches!(lottery.before_step(&mut bench.network(0)).unwrap(), Decision::Wait));
    disturb(&mut bench);
    let mut resumed = method(&bench, 100);
    resumed.load(lottery.save().unwrap());
    bench.choose_masks(&mut *resumed, 33);
    assert_eq!(all_values(&bench.params), start);
}

#[test]
fn every_round_starts_with_fresh_state_and_a_full_schedule() {
    let base = tiny_gpt("prune.method=lottery prune.sparsity=0.3 train.steps=9 optimizer.name=adam")
        .set("learning_rate.decay_steps=0");
    let mut trainer = base.trainer(1);
    let mut rates = Vec::new();
    for step in 0..9 {
        rates.push(trainer.step().unwrap().lr);
        assert_eq!(trainer.progress().updates, step % 3 + 1);
    }
    // 0.8, then to 0.7: two rounds, three trainings of three steps.
    assert_eq!((&rates[..3], &rates[..3]), (&rates[3..6], &rates[6..]));
    assert!(rates[0] > rates[2]);
}
