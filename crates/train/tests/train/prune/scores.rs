//! SNIP, GraSP and RigL against derivatives of a perceptron worked out in f64.

use espalier_data::DataSplit;
use espalier_nn::weights::ParameterId;
use espalier_plan::filters::index_in_pytorch;
use espalier_plan::pruning::{Distribution, DynamicSparsity, FlowScore, Scope};
use espalier_tensor::{Category, Tensor, random};
use espalier_train::prune::drop_and_grow::{DropAndGrow, best_free};
use espalier_train::prune::gradient::{ScoringSamples, gradient};
use espalier_train::prune::grasp::Grasp;
use espalier_train::prune::hessian::Curvature;
use espalier_train::prune::rigl::Rigl;
use espalier_train::prune::set::Set;
use espalier_train::prune::snip::Snip;
use espalier_train::prune::wanda::Wanda;
use espalier_train::prune::{count, is_kept, kept_indices, pruner};

use super::bench::{Bench, Reference, assert_best, kept, least_memory, perceptron, perceptron_with};
use crate::support::{assert_says, refused, tiny_cnn, tiny_gpt};

#[test]
fn snip_keeps_the_largest_products_of_weight_and_gradient() {
    // 20 samples in micro-batches of 8, 8 and 4: each sample weighs the same.
    let mut bench = Bench::new(&perceptron("prune.method=snip"));
    let (parameters, candidates) = bench.flat();
    assert_eq!(candidates.len(), 110);
    let picks = bench.context.order.indices(0, 20);
    let gradient = Reference::new(&bench.context.dataset, &picks, 1.0).gradient(&parameters, &candidates);
    let mut snip = Snip { sparsity: 0.8, samples: 20 };
    let computed = snip.gradients(&bench.network(0)).unwrap();
    let computed: Vec<f32> = computed.iter().flat_map(|g| g.to_f32()).collect();
    for (a, b) in computed.iter().zip(&gradient) {
        assert!((f64::from(*a) - b).abs() < 1e-6, "{a} against {b}");
    }
    let draw = bench.choose_masks(&mut snip, 0);
    let scores: Vec<f64> =
        candidates.iter().zip(&gradient).map(|(i, g)| (parameters[*i] * g).abs()).collect();
    assert_best(&kept(&bench, &draw), &scores, 22);
}

/// By hand: of each output the weights whose products with the norms of their inputs are largest.
#[test]
fn wanda_keeps_of_each_output_the_largest_products_of_weight_and_input() {
    let mut bench = Bench::new(&perceptron("prune.method=wanda"));
    let (parameters, candidates) = bench.flat();
    let picks = bench.context.order.indices(0, 20);
    let norms = Reference::new(&bench.context.dataset, &picks, 1.0).input_norms(&parameters);
    let draw = bench.choose_masks(&mut Wanda { sparsity: 0.75, scope: Scope::Row, samples: 20, at: 0 }, 0);
    let kept = kept(&bench, &draw);
    let mut weights = candidates.iter().map(|i| parameters[*i].abs()).zip(kept);
    // Five outputs of twelve inputs, of which three stay, then ten of five, of which one does (1.25).
    for (outputs, norms, stay) in [(5, &norms[0], 3), (10, &norms[1], 1)] {
        for _ in 0..outputs {
            let row: Vec<(f64, bool)> = weights.by_ref().take(norms.len()).collect();
            let scores: Vec<f64> = row.iter().zip(norms).map(|((weight, _), norm)| weight * norm).collect();
            assert_best(&row.iter().map(|(_, kept)| *kept).collect::<Vec<_>>(), &scores, stay);
        }
    }
    assert!(weights.next().is_none());
    let refused = refused(&tiny_cnn("prune.method=wanda"));
    assert_says(&refused, &["is not the weight of one: exclude it with `prune.exclude`"]);
}

#[test]
fn grasp_multiplies_by_the_hessian_and_removes_the_highest_scores() {
    for (precision, activation) in [("f32", "silu"), ("bf16", "silu"), ("f32", "relu"), ("bf16", "relu")] {
        for temperature in [1.0, 200.0] {
            let base = perceptron_with(activation, "prune.method=grasp");
            let base = base.set(format!("train.precision={precision}"));
            let mut bench = Bench::new(&base);
            let (parameters, candidates) = bench.flat();
            let mut grasp = Grasp {
                sparsity: 0.8,
                samples: 20,
                temperature: temperature as f32,
                score: FlowScore::Signed,
            };
            let picks = grasp.chosen(&bench.network(0));
            let labels: Vec<u32> = picks
                .iter()
                .map(|(_, i)| bench.context.dataset.label(DataSplit::Train, *i).unwrap())
                .collect();
            assert!((0..10).all(|class| labels.iter().filter(|label| **label == class).count() == 2));

            let mut reference = Reference::new(&bench.context.dataset, &picks, temperature);
            if activation == "relu" {
                reference = reference.with_relu(&parameters);
            }
            let gradient = reference.gradient(&parameters, &candidates);
            let expected = reference.hessian_times(&parameters, &candidates, &gradient);
            let flow = grasp.hessian_gradient(&bench.network(0)).unwrap();
            let flow: Vec<f64> = flow.iter().flat_map(|t| t.to_f32()).map(f64::from).collect();
            let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
            let error = norm(&mut flow.iter().zip(&expected).map(|(a, b)| a - b));
            let size = norm(&mut expected.iter().copied());
            assert!(error < 1e-3 * size, "{activation}, {precision} at {temperature}: {error} off {size}");

            let draw = bench.choose_masks(&mut grasp, 0);
            // The score is -w (H g), and the lowest stay.
            let scores: Vec<f64> =
                candidates.iter().zip(&expected).map(|(i, hg)| parameters[*i] * hg).collect();
            assert_best(&kept(&bench, &draw), &scores, 22);
            // By magnitude the furthest from 0 stay, in whichever direction they change the flow.
            grasp.score = FlowScore::Magnitude;
            let draw = bench.choose_masks(&mut grasp, 0);
            let sizes: Vec<f64> = scores.iter().map(|score| score.abs()).collect();
            assert_best(&kept(&bench, &draw), &sizes, 22);
        }
    }
}

/// u (H v) = v (H u), for any two directions, through convolutions, batch norm, ReLU, max pool and a residual.
#[test]
fn the_hessian_of_a_network_with_kinks_is_symmetric() {
    let mut bench = Bench::new(&tiny_cnn("prune.method=grasp"));
    let picks = bench.context.order.indices(0, 12);
    let network = bench.network(0);
    let scored = ScoringSamples::new(&picks, 8, network.context);
    let mut curvature = Curvature::new(network.params, network.candidates, scored).unwrap();
    let direction = |seed: u64| -> Vec<Tensor> {
        let of = |id: &ParameterId| {
            let weight = network.params.param(*id).weight();
            let key = random::key(seed, id.0 as u64);
            let number = |i| random::normal(key, index_in_pytorch(weight.shape(), i) as u64) as f32;
            let values: Vec<f32> = (0..weight.len()).map(number).collect();
            Tensor::from_slice(&weight.device(), weight.shape(), &values, Category::Workspace).unwrap()
        };
        network.candidates.iter().map(of).collect()
    };
    let dot = |a: &[Tensor], b: &[Tensor]| -> f64 {
        let flat = |t: &[Tensor]| t.iter().flat_map(|t| t.to_f32()).map(f64::from).collect::<Vec<_>>();
        flat(a).iter().zip(flat(b)).map(|(a, b)| a * b).sum()
    };
    let size = |a: &[Tensor]| dot(a, a).sqrt();
    for seed in 0..3 {
        let (u, v) = (direction(2 * seed), direction(2 * seed + 1));
        let (hu, hv) = (curvature.hessian_product(&u).unwrap(), curvature.hessian_product(&v).unwrap());
        let (a, b) = (dot(&u, &hv), dot(&v, &hu));
        let scale = (size(&u) * size(&hv)).max(size(&v) * size(&hu));
        assert!((a - b).abs() < 2e-4 * scale, "{a} and {b}, of up to {scale}");
        assert!(a.abs() > 5e-3 * scale, "{a} is too small to tell");
    }
}

#[test]
fn a_plain_set_is_balanced_and_text_has_plain_samples() {
    let label = |bench: &Bench, picks: &[(u64, usize)], class| {
        let labels = picks.iter().map(|(_, i)| bench.context.dataset.label(DataSplit::Train, *i));
        labels.filter(|label| *label == Some(class)).count()
    };
    let grasp = |samples| Grasp { sparsity: 0.9, samples, temperature: 200.0, score: FlowScore::Signed };
    let mut bench = Bench::new(&perceptron("prune.method=grasp"));
    let picks = grasp(0).chosen(&bench.network(0));
    assert!((0..10).all(|class| label(&bench, &picks, class) == 10), "ten of each class");
    let picks = grasp(13).chosen(&bench.network(0));
    let counts: Vec<usize> = (0..10).map(|class| label(&bench, &picks, class)).collect();
    assert_eq!(counts, [2, 2, 2, 1, 1, 1, 1, 1, 1, 1]);
    let picks = grasp(100_000).chosen(&bench.network(0));
    assert_eq!(picks.len(), bench.context.dataset.len(DataSplit::Train), "all there are");
    let mut text = Bench::new(&tiny_gpt("prune.method=grasp"));
    assert_eq!(grasp(0).chosen(&text.network(0)), text.context.order.indices(0, 10));
    assert_eq!(grasp(7).chosen(&text.network(0)), text.context.order.indices(0, 7));
}

#[test]
fn scoring_changes_nothing_of_the_model() {
    for precision in ["f32", "bf16"] {
        let base = tiny_cnn(format!("prune.method=snip train.precision={precision}"));
        let mut bench = Bench::new(&base);
        let before = bench.params.hash().unwrap();
        bench.choose_masks(&mut Snip { sparsity: 0.5, samples: 20 }, 0);
        bench.choose_masks(
            &mut Grasp { sparsity: 0.5, samples: 20, temperature: 200.0, score: FlowScore::Signed },
            0,
        );
        assert_eq!(bench.params.hash().unwrap(), before, "{precision}: weights and running statistics");
    }
}

/// Where the sums of all candidates would not fit, they are made for some at a time: the same masks, from
/// fewer bytes at once, which are those that the plan says.
#[test]
fn masks_do_not_depend_on_how_much_is_scored_at_a_time() {
    let forms = [("snip", "f32"), ("grasp", "bf16"), ("snip", "bf16"), ("grasp", "f32")];
    for (number, (method, precision)) in forms.into_iter().enumerate() {
        let models =
            [tiny_gpt("prune.embeddings=true"), tiny_cnn("")].map(|base| base.set("prune.samples=10"));
        // In the short form each method and each precision has both models, though not with each other.
        let models = if espalier_testing::long() { &models[..] } else { &models[number / 2..][..1] };
        for base in models {
            let base = base.set(format!("prune.method={method} train.precision={precision}"));
            let chosen = |memory: Option<u64>| {
                let mut bench = Bench::new(&base);
                let scoring = bench.context.plan.scoring(memory).unwrap().unwrap();
                bench.passes = scoring.passes;
                let mut pruner = pruner(&bench.context.plan, 100).unwrap().unwrap();
                let masks = bench.choose_masks(&mut *pruner, 0).masks;
                assert_eq!(
                    bench.context.device.ledger().peak(Category::Scoring) as u64,
                    scoring.bytes,
                    "{method} {precision}"
                );
                assert_eq!(bench.context.device.ledger().current(Category::Scoring), 0);
                (scoring, masks)
            };
            let (one, masks) = chosen(None);
            assert_eq!(one.passes, 1);
            let plan = Bench::new(&base).context.plan;
            let least = least_memory(&plan);
            let (many, same) = chosen(Some(least));
            assert!(many.passes > 1 && many.bytes < one.bytes, "{many:?} after {one:?}");
            assert_eq!(same, masks, "{method} {precision}");
            assert_says(plan.scoring(Some(least - 1)).unwrap_err(), &["even one parameter at a time"]);
        }
    }
}

fn moves() -> DropAndGrow {
    let (distribution, dense_first) = (Distribution::Uniform, false);
    DropAndGrow::new(DynamicSparsity { every: 10, fraction: 0.4, until: 0.5, distribution, dense_first })
}

/// The gradient is that of the full batch, in however many micro-batches; what was just dropped may grow again.
#[test]
fn rigl_drops_the_smallest_and_grows_where_the_gradient_is_largest() {
    for micro_batches in ["train.micro_batches=1", "train.micro_batches=4"] {
        let mut bench = Bench::new(&perceptron("prune.method=rigl prune.sparsity=0.8").set(micro_batches));
        let mut rigl = Rigl(moves());
        let start = bench.choose_masks(&mut rigl, 0);
        // Uniform: a fifth of 60 and of 50.
        assert_eq!(start.masks.iter().map(|(_, words)| count(words)).collect::<Vec<_>>(), [12, 10]);
        bench.apply(start);
        let before: Vec<Vec<u32>> = bench.params.masks().map(|(_, mask)| mask.words()).collect();
        let (parameters, candidates) = bench.flat();
        let picks = bench.context.order.indices(10 * 8, 8);
        let gradient = Reference::new(&bench.context.dataset, &picks, 1.0).gradient(&parameters, &candidates);
        let draw = bench.choose_masks(&mut rigl, 10);
        // alpha = 0.2 (1 + cos(pi 10 / 50)) = 0.3618: 4.34 of 12 and 3.62 of 10.
        let mut offset = 0;
        for (((id, after), before), moving) in draw.masks.iter().zip(&before).zip([4, 4]) {
            let len = bench.params.param(*id).len();
            let size = |i: &usize| parameters[candidates[offset + i]].abs();
            let slope = |i: &usize| gradient[offset + i].abs();
            let mut kept: Vec<usize> = (0..len).filter(|i| is_kept(before, *i)).collect();
            kept.sort_by(|i, j| size(j).total_cmp(&size(i)));
            kept.truncate(kept.len() - moving);
            let mut free: Vec<usize> = (0..len).filter(|i| !kept.contains(i)).collect();
            free.sort_by(|i, j| slope(j).total_cmp(&slope(i)));
            assert!(slope(&free[moving - 1]) > slope(&free[moving]) + 1e-7, "rounding decides nothing here");
            kept.extend(&free[..moving]);
            kept.sort_unstable();
            assert_eq!(kept_indices(after), kept, "{micro_batches}");
            offset += len;
        }
    }
}

/// Where the gradient is largest at what was just dropped, it stays, with its value.
#[test]
fn what_was_just_dropped_may_grow_again() {
    let mut bench = Bench::new(&perceptron("prune.method=set prune.sparsity=0.8"));
    let mut set = Set(moves());
    let start = bench.choose_masks(&mut set, 0);
    bench.apply(start);
    let id = bench.candidates[0];
    let before = kept_indices(&bench.params.mask(id).unwrap().words());
    let network = bench.network(10);
    let dropped = *before
        .iter()
        .min_by(|i, j| {
            let values = network.params.param(id).weight().to_f32();
            values[**i].abs().total_cmp(&values[**j].abs())
        })
        .unwrap();
    let keys: Vec<u32> = (0..network.len(id)).map(|i| u32::from(i == dropped) + 1).collect();
    let keys =
        Tensor::from_slice(&network.context.device, &[keys.len()], &keys, Category::Workspace).unwrap();
    let grown = best_free(&network, id, keys, 4).unwrap();
    assert!(is_kept(&grown, dropped));
}

#[test]
fn layers_keep_what_the_distribution_says() {
    let kept = |settings: &str| {
        let base = perceptron("prune.sparsity=0.8").set(settings);
        let mut bench = Bench::new(&base);
        let mut method = pruner(&bench.context.plan, 100).unwrap().unwrap();
        let draw = bench.choose_masks(&mut *method, 0);
        draw.masks.iter().map(|(_, words)| count(words)).collect::<Vec<_>>()
    };
    // 17 / 60 and 15 / 50 of 60 and of 50: 22 in proportion 17 : 15.
    let erk = "prune.distribution=erdos-renyi-kernel";
    assert_eq!(kept(&format!("prune.method=rigl {erk}")), [12, 10]);
    assert_eq!(kept("prune.method=set prune.dense_first=true"), [60, 10]);
    let narrow = "model.layers=[{type='avg_pool', kernel=2}, {type='flatten'}, {type='linear', output=20}, {type='linear', output=10}]";
    // 192 x 20 and 20 x 10: 404 in proportion 212 : 30.
    assert_eq!(kept(&format!("prune.method=rigl prune.sparsity=0.9 {erk} {narrow}")), [354, 50]);
}

#[test]
fn set_drops_the_smallest_and_grows_anywhere_by_seed_and_step() {
    let chosen = |step: u64, seed: &str| {
        let mut bench = Bench::new(&perceptron("prune.method=set prune.sparsity=0.8").set(seed));
        let mut set = Set(moves());
        let start = bench.choose_masks(&mut set, 0);
        bench.apply(start);
        let before = bench.params.masks().map(|(_, mask)| mask.words()).collect::<Vec<_>>();
        let (parameters, _) = bench.flat();
        let draw = bench.choose_masks(&mut set, step);
        let (_, after) = &draw.masks[0];
        let of = |i: usize| (is_kept(&before[0], i), is_kept(after, i));
        let size = |i: usize| parameters[i].abs();
        let stays = (0..60).filter(|i| of(*i) == (true, true)).map(size).fold(f64::INFINITY, f64::min);
        assert!((0..60).filter(|i| of(*i) == (true, false)).all(|i| size(i) <= stays));
        assert_eq!(count(after), 12);
        (0..60).filter(|i| of(*i) == (false, true)).collect::<Vec<_>>()
    };
    let grown = chosen(10, "seed=1");
    assert!((1..=4).contains(&grown.len()), "four, less those that were just dropped: {grown:?}");
    assert_eq!(grown, chosen(10, "seed=1"));
    assert_ne!(grown, chosen(10, "seed=2"));
    assert_ne!(grown, chosen(20, "seed=1"));
}

/// A tied table's gradient comes from the embedding and from the head: growth follows their sum.
#[test]
fn rigl_adds_up_the_parts_of_a_tied_gradient() {
    let base = tiny_gpt("prune.method=rigl prune.embeddings=true");
    let mut bench = Bench::new(&base);
    let mut rigl = Rigl(moves());
    let start = bench.choose_masks(&mut rigl, 0);
    bench.apply(start);
    let id = bench.id("wte.weight");
    let before = bench.params.mask(id).unwrap().words();
    let picks = bench.context.order.indices(10 * 4, 4);
    let network = bench.network(10);
    let scored = ScoringSamples::new(&picks, 4, network.context);
    let sum = gradient(network.no_update_pass(), &[id], scored).unwrap()[0].to_f32();
    let draw = bench.choose_masks(&mut rigl, 10);
    let (_, after) = draw.masks.iter().find(|(other, _)| *other == id).unwrap();
    let slope = |i: &usize| sum[*i].abs();
    let all = 0..sum.len();
    let grown = all.clone().filter(|i| !is_kept(&before, *i) && is_kept(after, *i));
    let least = grown.map(|i| slope(&i)).fold(f32::INFINITY, f32::min);
    let left_out = all.filter(|i| !is_kept(&before, *i) && !is_kept(after, *i));
    assert!(least > 0.0 && left_out.map(|i| slope(&i)).fold(0.0, f32::max) <= least);
}

/// Where nearly all positions are kept, most of what is dropped grows again, and the count stays.
#[test]
fn a_nearly_dense_network_keeps_its_count() {
    let mut bench = Bench::new(&perceptron("prune.method=set prune.sparsity=0.05"));
    let mut set = Set(moves());
    let start = bench.choose_masks(&mut set, 0);
    bench.apply(start);
    let before = bench.params.masks().map(|(_, mask)| mask.words()).collect::<Vec<_>>();
    let draw = bench.choose_masks(&mut set, 10);
    for ((_, after), before) in draw.masks.iter().zip(&before) {
        assert_eq!(count(after), count(before));
    }
    let moved: usize = draw.note.split(' ').next().unwrap().parse().unwrap();
    // Three free positions of 60, and two of 50 (47.5 are kept, which is 48).
    assert!((1..=5).contains(&moved), "{}", draw.note);
}

#[test]
fn rigl_holds_no_dense_gradient_of_the_model() {
    let peak = |method: &str| {
        let base = tiny_gpt("model.layers=8 model.width=64 train.steps=20 prune.sparsity=0.9")
            .set(format!("prune.method={method} prune.every=2"));
        let mut trainer = base.trainer(1);
        let moved = (0..4).filter(|_| trainer.step().unwrap().pruned.is_some()).count();
        assert_eq!(moved, 2);
        let largest = trainer.params().masks().map(|(_, mask)| 4 * mask.len()).max().unwrap();
        (trainer.device().ledger().total_peak(), largest)
    };
    // SET takes no gradient but that of the step; RigL's own holds one layer's at a time.
    let ((set, largest), (rigl, _)) = (peak("set"), peak("rigl"));
    assert!(rigl <= set + largest, "{rigl} with, {set} without, {largest} for the largest layer");
}
