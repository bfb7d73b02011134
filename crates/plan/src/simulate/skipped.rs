//! What a core saves by skipping zeros, layer by layer: those of pruned weights, and those that a max pool leaves
//! of a gradient. The conditions are those of the kernels (`tensor/ops/conv/pruned`, `conv/scattered`,
//! `ops/sparse`).

use super::passes::{PassContext, Passes};
use crate::cluster::SkippedZeros;
use crate::pruning::Pruning;
use crate::spec::{Activation, Conv, LayerSpec};

/// Numbers of a vector, which are images to one of the kernels and channels to the other.
const LANES: usize = 16;

impl PassContext<'_> {
    /// The passes of a layer, `behind` which these stand, where its zeros are skipped.
    pub(super) fn without_zeros(&self, layer: &LayerSpec, behind: &[LayerSpec], passes: Passes) -> Passes {
        let rates = self.kernels.device.matrix(self.kernels.precision);
        let Some(sparse) = rates.sparse.as_ref().filter(|_| self.engine.is_ours()) else { return passes };
        let kept = self.kept(layer);
        // How many times as fast, forward and back.
        let [forward, back] = match layer {
            LayerSpec::Linear(_) if self.pruning.is_some_and(Pruning::multiplies_sparsely) => {
                [SkippedZeros::times(&sparse.linear, kept); 2]
            }
            LayerSpec::Conv(conv) => {
                let skips_weights = conv.stride == 1 && conv.input >= LANES && self.samples >= LANES;
                let of_weights = |kept| SkippedZeros::times(&sparse.convolution, kept);
                [
                    if skips_weights { of_weights(kept) } else { 1.0 },
                    if skips_gradients(conv, behind) { sparse.behind_pool } else { 1.0 },
                ]
            }
            _ => [1.0; 2],
        };
        Passes {
            forward: passes.forward * (1.0 / forward),
            backward_input: passes.backward_input * (1.0 / back),
            backward_weight: passes.backward_weight * (1.0 / back),
            ..passes
        }
    }

    /// The fraction of a layer's weight that is left.
    fn kept(&self, layer: &LayerSpec) -> f64 {
        let parameters = layer.description().parameters();
        match (self.pruning, parameters.first()) {
            (Some(pruning), Some(weight)) if pruning.covers(weight) => 1.0 - pruning.sparsity,
            _ => 1.0,
        }
    }
}

/// Whether a max pool, perhaps behind a ReLU, leaves few numbers of the gradient of a convolution's output, and
/// the kernels that skip the others serve it.
fn skips_gradients(conv: &Conv, behind: &[LayerSpec]) -> bool {
    let is_relu = |layer: &&LayerSpec| matches!(layer, LayerSpec::Activation(Activation::Relu));
    let pool = behind.iter().find(|layer| !is_relu(layer));
    let is_sparse = |layer: &LayerSpec| match layer {
        LayerSpec::MaxPool(pool) => pool.kernel >= 2 && pool.stride >= pool.kernel,
        _ => false,
    };
    let fills_vectors = (conv.kernel * conv.input).is_multiple_of(LANES) && conv.output.is_multiple_of(LANES);
    pool.is_some_and(is_sparse) && fills_vectors && conv.padding == 0.into()
}

#[cfg(test)]
mod tests {
    use super::super::passes::{TimedLayer, layer_passes};
    use super::super::{Candidate, Simulation};
    use crate::cluster::{Cluster, SkippedZeros, builtin};
    use crate::engine::EngineProfile;
    use crate::plan::Plan;

    fn core(sparse: Option<SkippedZeros>) -> Cluster {
        let mut cluster = builtin("this-machine").unwrap();
        cluster.device.f32.sparse = sparse;
        cluster
    }

    /// The passes of each layer of a kind, in seconds: forward, the input's gradient and the weight's.
    fn seconds(cluster: &Cluster, run: &str, kind: &str) -> Vec<[f64; 3]> {
        let plan = Plan::of_text(run);
        let job = Simulation::new(&plan, cluster, EngineProfile::ESPALIER);
        let at = job.pass_context(&Candidate::of(&plan).unwrap());
        let layers = layer_passes(&plan.model, &at).unwrap().into_iter().flatten();
        let of = |TimedLayer { passes, .. }: TimedLayer| {
            [passes.forward, passes.backward_input, passes.backward_weight].map(|pass| pass.compute)
        };
        layers.filter(|timed| timed.layer.kind() == kind).map(of).collect()
    }

    /// How many times as fast each pass is where zeros are skipped.
    fn faster(run: &str, kind: &str) -> Vec<[f64; 3]> {
        let sparse =
            SkippedZeros { linear: vec![[0.4, 2.0]], convolution: vec![[0.4, 4.0]], behind_pool: 8.0 };
        let (dense, skipping) = (seconds(&core(None), run, kind), seconds(&core(Some(sparse)), run, kind));
        let ratio = |a: f64, b: f64| if b == 0.0 { 1.0 } else { (1e6 * a / b).round() * 1e-6 };
        dense.iter().zip(skipping).map(|(a, b)| std::array::from_fn(|i| ratio(a[i], b[i]))).collect()
    }

    const CNN: &str = "[model]\nname = \"simple-cnn\"\n[train]\nsteps = 1\nbatch = 32\n";
    const PRUNED: &str = "[prune]\nmethod = \"random\"\nsparsity = 0.9\n";

    /// Each convolution is followed by a pool; the first sees one channel, which fills no vector, and its input
    /// has no gradient.
    #[test]
    fn gradients_behind_a_pool_and_pruned_filters_are_skipped() {
        assert_eq!(faster(CNN, "conv"), [[1.0, 1.0, 1.0], [1.0, 8.0, 8.0]]);
        assert_eq!(faster(&format!("{CNN}{PRUNED}"), "conv"), [[1.0, 1.0, 1.0], [4.0, 8.0, 8.0]]);
        // Sixteen images are a vector.
        let few = format!("{}{PRUNED}", CNN.replace("32", "8"));
        assert_eq!(faster(&few, "conv")[1], [1.0, 8.0, 8.0]);
        let half = format!("{CNN}{}", PRUNED.replace("0.9", "0.5"));
        assert_eq!(faster(&half, "conv")[1], [1.0, 8.0, 8.0]);
        let bf16 = CNN.replace("steps", "precision = \"bf16\"\nsteps");
        assert_eq!(faster(&bf16, "conv")[1], [1.0; 3]);
    }

    /// Linear layers skip zeros where a run asks for it, and the head's weight is another layer's.
    #[test]
    fn linear_layers_skip_zeros_where_asked() {
        let gpt = "[model]\nname = \"gpt\"\nlayers = 1\nheads = 2\nwidth = 32\ncontext = 8\n[train]\nsteps = 1\nbatch = 4\n";
        let asked = format!("{gpt}{PRUNED}kernels = \"sparse\"\n");
        assert_eq!(faster(&asked, "linear"), [[2.0; 3]; 4]);
        assert!(faster(&format!("{gpt}{PRUNED}"), "linear").iter().all(|each| *each == [1.0; 3]));
        assert!(faster(&asked, "tied_linear").iter().all(|each| *each == [1.0; 3]));
    }
}
