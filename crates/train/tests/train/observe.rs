//! Forward-only passes over training samples, for methods that use activations.

use std::collections::BTreeMap;

use espalier_nn::layers::InputObserver;
use espalier_nn::weights::ParameterId;
use espalier_tensor::Tensor;
use espalier_train::context::TrainContext;
use espalier_train::parallel::on_threads;
use espalier_train::step::{NoUpdatePass, PassMicroBatch};
use espalier_train::trainer::Trainer;

use crate::support::{prepare, tiny_gpt};

/// What linear layers read: of each weight, how many rows and the sum of squares of each input.
#[derive(Default)]
struct Squares(BTreeMap<usize, (usize, Vec<f64>)>);

impl InputObserver for Squares {
    fn observe(&mut self, weight: ParameterId, x: &Tensor) -> espalier_nn::Result<()> {
        let (rows, squares) = self.0.entry(weight.0).or_insert_with(|| (0, vec![0.0; x.width()]));
        *rows += x.rows();
        let values = x.to_f32();
        for row in values.chunks(x.width()) {
            squares.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x).powi(2));
        }
        Ok(())
    }
}

/// A forward-only pass over training samples: every linear layer is seen once a sample, wherever it is, and
/// without dropout.
#[test]
fn what_layers_read_of_training_samples_does_not_depend_on_stages() {
    let samples: Vec<(u64, usize)> = (0..7).map(|i| (0, 3 * i)).collect();
    let observed = |changes: &str| {
        let base = tiny_gpt("model.dropout=0.2 train.batch=8").set(changes);
        let (plan, dataset, device) = prepare(&base, 2);
        let mesh = plan.mesh;
        let ranks = on_threads(&mesh, &device, |ranks, device| {
            let trainer = Trainer::distributed(plan.clone(), dataset.clone(), device, ranks.clone())?;
            let context = TrainContext::new(plan.clone(), dataset.clone(), device, ranks)?;
            let mut seen = Squares::default();
            NoUpdatePass::of(&context, trainer.params())
                .observe(&PassMicroBatch::chunks(&samples, 2), &mut seen)?;
            Ok(seen.0)
        });
        let mut all = BTreeMap::new();
        for (id, seen) in ranks.unwrap().into_iter().flatten() {
            assert!(all.insert(id, seen).is_none(), "{changes}: {id} twice");
        }
        all
    };
    let one = observed("");
    // Four of each block, and the head.
    assert_eq!(one.len(), 2 * 4 + 1);
    assert!(one.values().all(|(rows, _)| *rows == 7 * 12), "all positions of all samples");
    let chimera = "parallel.pipeline=2 train.micro_batches=2 parallel.schedule=chimera";
    for changes in ["parallel.pipeline=2", "parallel.pipeline=3", chimera] {
        assert_eq!(observed(changes), one, "{changes}");
    }
}
