//! A network outside of any run, to be shown to a method by hand, and a small perceptron worked out in f64.

use espalier_data::{DataSplit, Dataset, Inputs};
use espalier_nn::weights::ParameterId;
use espalier_plan::Plan;
use espalier_tensor::Mask;
use espalier_train::context::TrainContext;
use espalier_train::parallel::Ranks;
use espalier_train::prune::{Decision, MaskBits, Network, NewMasks, Pruner, is_kept};
use espalier_train::state::ParamStore;

use crate::support::{Base, prepare, tiny_cnn};

/// All that a [`Network`] borrows.
pub struct Bench {
    pub context: TrainContext,
    pub params: ParamStore,
    pub candidates: Vec<ParameterId>,
    pub passes: usize,
}

impl Bench {
    pub fn new(base: &Base) -> Bench {
        let (plan, dataset, device) = prepare(base, 2);
        let prune = plan.pruning.as_ref().expect("a run file with pruning");
        let covered = plan.model.parameters().iter().map(|p| prune.covers(p)).collect::<Vec<_>>();
        let context = TrainContext::new(plan, dataset, &device, Ranks::single()).unwrap();
        let TrainContext { plan, params, dtype, .. } = &context;
        Bench {
            params: ParamStore::new(params, context.local(), &device, *dtype, plan.seed, false).unwrap(),
            candidates: (0..covered.len()).filter(|i| covered[*i]).map(ParameterId).collect(),
            passes: 1,
            context: TrainContext { steps: 100, ..context },
        }
    }

    /// The network before step `step` of a hundred, ten of them an epoch.
    pub fn network(&mut self, step: u64) -> Network<'_> {
        Network {
            context: &self.context,
            step,
            epoch: 10,
            candidates: &self.candidates,
            params: &mut self.params,
            passes: self.passes,
        }
    }

    /// Asks a method before a step, and expects it to prune.
    pub fn choose_masks(&mut self, pruner: &mut dyn Pruner, step: u64) -> NewMasks {
        match pruner.before_step(&mut self.network(step)).unwrap() {
            Decision::Prune(draw) => draw,
            other => panic!("before step {step}: {other:?}"),
        }
    }

    /// The parameter of a name.
    pub fn id(&self, name: &str) -> ParameterId {
        self.params.find(name).expect(name)
    }

    /// The values of a parameter.
    pub fn values(&self, id: ParameterId) -> Vec<f32> {
        self.params.param(id).weight().to_f32()
    }

    /// Sets a parameter, which must be f32.
    pub fn set(&mut self, id: ParameterId, values: &[f32]) {
        self.params.param_mut(id).weight_mut().slice_mut().copy_from_slice(values);
    }

    /// Puts masks and weights in force, as the trainer does.
    pub fn apply(&mut self, draw: NewMasks) {
        for (id, words) in draw.masks {
            let kept = values_where(&self.values(id), &words);
            self.set(id, &kept);
            let mask = Mask::new(&self.context.device, kept.len(), &words).unwrap();
            self.params.param_mut(id).set_mask(mask, |_| Ok(None)).unwrap();
        }
    }
}

/// The fewest bytes of a device with which a plan's candidates can still be scored.
pub fn least_memory(plan: &Plan) -> u64 {
    let (mut low, mut high) = (0, 1 << 40);
    while low + 1 < high {
        let middle = (low + high) / 2;
        match plan.scoring(Some(middle)) {
            Ok(_) => high = middle,
            Err(_) => low = middle,
        }
    }
    high
}

/// What a mask leaves of values.
pub fn values_where(values: &[f32], words: &MaskBits) -> Vec<f32> {
    values.iter().enumerate().map(|(i, v)| if is_kept(words, i) { *v } else { 0.0 }).collect()
}

/// Twelve averages of an image of 16 x 16, five hidden units with SiLU, ten classes.
pub fn perceptron(more: &str) -> Base {
    perceptron_with("silu", more)
}

/// The same with another activation.
pub fn perceptron_with(activation: &str, more: &str) -> Base {
    let layers = "model.layers=[{type='avg_pool', kernel=8}, {type='flatten'}, {type='linear', output=5}, \
                  {type='ACTIVATION'}, {type='linear', output=10}]";
    let layers = layers.replace("ACTIVATION", activation);
    tiny_cnn(layers).set(more)
}

/// The same in f64, by its definition. Parameters are flat: weight, bias, weight, bias.
pub struct Reference {
    samples: Vec<(Vec<f64>, usize)>,
    temperature: f64,
    /// Which hidden units of each sample are open, where they are ReLUs.
    gates: Option<Vec<Vec<bool>>>,
}

const SIZES: [usize; 3] = [12, 5, 10];

fn layer(x: &[f64], parameters: &[f64], inputs: usize, outputs: usize) -> Vec<f64> {
    let (weight, bias) = parameters.split_at(inputs * outputs);
    let row = |o: usize| x.iter().zip(&weight[o * inputs..]).map(|(x, w)| x * w).sum::<f64>();
    (0..outputs).map(|o| row(o) + bias[o]).collect()
}

impl Reference {
    pub fn new(dataset: &Dataset, picks: &[(u64, usize)], temperature: f64) -> Reference {
        let batch = dataset.batch(DataSplit::Train, picks).unwrap();
        let Inputs::Images(images) = batch.inputs else { panic!("images") };
        let pixels = images.to_f32();
        // channels, rows and columns of windows: the order in which images are flattened.
        let mean = |image: &[f32], feature: usize| {
            let (channel, row, column) = (feature / 4, feature / 2 % 2, feature % 2);
            let pixel = |i: usize| {
                let (y, x) = (8 * row + i / 8, 8 * column + i % 8);
                f64::from(image[(16 * y + x) * 3 + channel])
            };
            (0..64).map(pixel).sum::<f64>() / 64.0
        };
        let features = |image: &[f32]| (0..SIZES[0]).map(|feature| mean(image, feature)).collect();
        let labels = batch.targets.iter().map(|label| *label as usize);
        let samples = pixels.chunks_exact(16 * 16 * 3).map(features).zip(labels).collect();
        Reference { samples, temperature, gates: None }
    }

    /// With ReLUs that stay open or closed as they are at these parameters, which is how their derivatives
    /// are meant.
    pub fn with_relu(mut self, parameters: &[f64]) -> Reference {
        let open = |(x, _): &(Vec<f64>, usize)| -> Vec<bool> {
            layer(x, parameters, SIZES[0], SIZES[1]).iter().map(|h| *h > 0.0).collect()
        };
        self.gates = Some(self.samples.iter().map(open).collect());
        self
    }

    /// Of each linear layer the norm of every input over the samples.
    pub fn input_norms(&self, parameters: &[f64]) -> [Vec<f64>; 2] {
        let hidden = |x: &Vec<f64>| -> Vec<f64> {
            layer(x, parameters, SIZES[0], SIZES[1]).iter().map(|h| h / (1.0 + (-h).exp())).collect()
        };
        let first: Vec<Vec<f64>> = self.samples.iter().map(|(x, _)| x.clone()).collect();
        let second = first.iter().map(hidden).collect();
        let norm = |inputs: &Vec<Vec<f64>>, i: usize| inputs.iter().map(|x| x[i] * x[i]).sum::<f64>().sqrt();
        [first, second].map(|inputs: Vec<Vec<f64>>| (0..inputs[0].len()).map(|i| norm(&inputs, i)).collect())
    }

    /// The mean loss.
    pub fn loss(&self, parameters: &[f64]) -> f64 {
        let one = |(n, (x, label)): (usize, &(Vec<f64>, usize))| {
            let activated = |(unit, h): (usize, &f64)| match &self.gates {
                Some(gates) => {
                    if gates[n][unit] {
                        *h
                    } else {
                        0.0
                    }
                }
                None => h / (1.0 + (-h).exp()),
            };
            let hidden = layer(x, parameters, SIZES[0], SIZES[1]);
            let hidden: Vec<f64> = hidden.iter().enumerate().map(activated).collect();
            let logits = layer(&hidden, &parameters[(SIZES[0] + 1) * SIZES[1]..], SIZES[1], SIZES[2]);
            let logits: Vec<f64> = logits.iter().map(|y| y / self.temperature).collect();
            logits.iter().map(|y| y.exp()).sum::<f64>().ln() - logits[*label]
        };
        self.samples.iter().enumerate().map(one).sum::<f64>() / self.samples.len() as f64
    }

    /// Its derivatives with respect to some parameters, by central differences.
    pub fn gradient(&self, parameters: &[f64], wanted: &[usize]) -> Vec<f64> {
        let mut p = parameters.to_vec();
        let h = 1e-4;
        let mut one = |i: &usize| {
            let mut at = |by: f64| {
                p[*i] = parameters[*i] + by;
                self.loss(&p)
            };
            let slope = (at(h) - at(-h)) / (2.0 * h);
            p[*i] = parameters[*i];
            slope
        };
        wanted.iter().map(&mut one).collect()
    }

    /// Second derivatives with respect to each of them and to a direction in them, by central differences of
    /// the loss: the product of the Hessian and the direction.
    pub fn hessian_times(&self, parameters: &[f64], wanted: &[usize], direction: &[f64]) -> Vec<f64> {
        let length = direction.iter().map(|d| d * d).sum::<f64>().sqrt();
        let h = 3e-3;
        let moved = |by: f64| {
            let mut p = parameters.to_vec();
            wanted.iter().zip(direction).for_each(|(i, d)| p[*i] += by * d / length);
            p
        };
        let (mut ahead, mut behind) = (moved(h), moved(-h));
        let mut one = |i: &usize| {
            let slope = |p: &mut Vec<f64>| {
                let middle = p[*i];
                let mut at = |by: f64| {
                    p[*i] = middle + by;
                    self.loss(p)
                };
                let rise = at(h) - at(-h);
                p[*i] = middle;
                rise
            };
            length * (slope(&mut ahead) - slope(&mut behind)) / (4.0 * h * h)
        };
        wanted.iter().map(&mut one).collect()
    }
}

impl Bench {
    /// The parameters as the reference has them, and which of them are candidates.
    pub fn flat(&self) -> (Vec<f64>, Vec<usize>) {
        let (mut all, mut candidates) = (Vec::new(), Vec::new());
        for id in self.params.ids() {
            let values = self.values(id);
            if self.candidates.contains(&id) {
                candidates.extend(all.len()..all.len() + values.len());
            }
            all.extend(values.iter().map(|v| f64::from(*v)));
        }
        (all, candidates)
    }
}

/// Which candidates new masks keep, one after the other.
pub fn kept(bench: &Bench, draw: &NewMasks) -> Vec<bool> {
    let of = |id: &ParameterId| {
        let (_, words) = draw.masks.iter().find(|(other, _)| other == id).expect("a mask for each");
        (0..bench.params.param(*id).len()).map(|i| is_kept(words, i)).collect::<Vec<_>>()
    };
    bench.candidates.iter().flat_map(of).collect()
}

/// Exactly `count` are kept, and none of those that go has a higher score, up to rounding, than one that stays.
pub fn assert_best(kept: &[bool], scores: &[f64], count: usize) {
    assert_eq!(kept.iter().filter(|kept| **kept).count(), count);
    let of = |state: bool| {
        let kept = kept.iter();
        kept.zip(scores).filter(move |(kept, _)| **kept == state).map(|(_, score)| *score)
    };
    let (worst, best) = (of(true).fold(f64::INFINITY, f64::min), of(false).fold(f64::NEG_INFINITY, f64::max));
    let largest = scores.iter().fold(0.0, |a: f64, b| a.max(b.abs()));
    assert!(worst >= best - 1e-4 * largest, "{worst} stays and {best} goes, of up to {largest}");
}
