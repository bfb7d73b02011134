//! Parameters, buffers and flops of a model.
//!
//! Flops count two for a multiply-add, in the products alone: linear layers, convolutions, and attention's
//! two (counted in full, as is usual, although the causal half would do). Biases, norms and element-wise
//! work, below one per cent in every model here, are left out, so that the figures compare with published
//! ones.

use std::collections::HashSet;

use super::recompute::attention_spans;
use super::{
    BlockSpec, BufferSpec, Conv, Init, LayerSpec, Linear, ModelSpec, Parameter, RecomputeMode, Shape,
    ShapeError,
};

impl BlockSpec {
    /// All layers in the order of execution, those inside residuals included.
    pub fn for_each<'a>(&'a self, visit: &mut dyn FnMut(&'a LayerSpec)) {
        self.layers.iter().for_each(|layer| layer.for_each(visit));
    }
}

impl ModelSpec {
    /// Lets all batch norms take their statistics over so many samples at a time; 0: over a micro-batch.
    pub(crate) fn group_batch_norms(&mut self, samples: usize) {
        self.for_each_mut(&mut |layer| {
            if let LayerSpec::BatchNorm(norm) = layer {
                norm.group = samples;
            }
        });
    }

    /// Lets all linear layers and convolutions start from a truncated normal with a variance of 1 / fan-in,
    /// whatever follows them: TensorFlow's `variance_scaling_initializer`.
    pub(crate) fn start_by_fan_in(&mut self) {
        self.for_each_mut(&mut |layer| match layer {
            LayerSpec::Linear(Linear { init, input, .. }) => *init = Init::fan_in(1.0, *input),
            LayerSpec::Conv(Conv { init, input, kernel, .. }) => {
                *init = Init::fan_in(1.0, input.saturating_mul(*kernel * *kernel));
            }
            _ => {}
        });
    }

    fn for_each_mut(&mut self, visit: &mut dyn FnMut(&mut LayerSpec)) {
        let layers = self.blocks.iter_mut().flat_map(|block| &mut block.layers);
        layers.for_each(|layer| layer.for_each_mut(visit));
    }

    /// All layers in the order of execution, those inside residuals included.
    pub fn for_each<'a>(&'a self, visit: &mut dyn FnMut(&'a LayerSpec)) {
        self.blocks.iter().for_each(|block| block.for_each(visit));
    }

    /// Whether a GPU can capture the passes of a step as a CUDA graph: each step queues the same work, where one
    /// rank takes a batch at once and nothing in it is random.
    pub fn can_capture(&self, ranks: usize, micro_batches: usize) -> bool {
        let is_random = || {
            let mut is_random = false;
            self.for_each(&mut |layer| is_random |= layer.properties().is_random);
            is_random
        };
        ranks == 1 && micro_batches == 1 && !is_random()
    }

    /// The linear layer that makes the logits, where the model ends in one. It runs together with the loss.
    pub fn head(&self) -> Option<&LayerSpec> {
        let last = self.blocks.last()?.layers.last()?;
        matches!(last, LayerSpec::Linear(_) | LayerSpec::TiedLinear(_)).then_some(last)
    }

    /// The weights of all linear layers, the head's too, by name: an observer sees what these read.
    pub(crate) fn observed_weights(&self) -> HashSet<String> {
        let mut all = HashSet::new();
        self.for_each(&mut |layer| match layer {
            LayerSpec::Linear(Linear { name, .. }) => drop(all.insert(format!("{name}.weight"))),
            LayerSpec::TiedLinear(tied) => drop(all.insert(tied.weight.clone())),
            _ => {}
        });
        all
    }

    /// The weights of linear layers other than the head, by name.
    pub fn linear_weights(&self) -> Vec<String> {
        // Of a rank's own model too: there its logits may be gathered behind it.
        let behind = self.blocks.last().and_then(|block| {
            block.layers.iter().rev().find(|layer| !matches!(layer, LayerSpec::Collective(_)))
        });
        let (mut all, head) = (Vec::new(), behind);
        self.for_each(&mut |layer| {
            if let LayerSpec::Linear(Linear { name, .. }) = layer
                && head != Some(layer)
            {
                all.push(format!("{name}.weight"));
            }
        });
        all
    }

    /// All parameters in the order of first use, each once.
    pub fn parameters(&self) -> Vec<Parameter> {
        let mut all = Vec::new();
        self.for_each(&mut |layer| all.extend(layer.parameters()));
        all
    }

    /// All buffers in the order of first use.
    pub fn buffers(&self) -> Vec<BufferSpec> {
        let mut all = Vec::new();
        self.for_each(&mut |layer| all.extend(layer.buffers()));
        all
    }

    /// How many numbers are trained.
    pub fn parameter_count(&self) -> u64 {
        self.parameters().iter().fold(0, |n, p| n.saturating_add(p.elements()))
    }

    /// Flops of the forward pass.
    pub fn flops(&self, samples: usize) -> Result<f64, ShapeError> {
        Ok(self.block_flops(samples)?.iter().sum())
    }

    /// Flops of the forward pass, block by block.
    pub(crate) fn block_flops(&self, samples: usize) -> Result<Vec<f64>, ShapeError> {
        let mut blocks = vec![0.0; self.blocks.len()];
        self.for_each_layer(|block, layer, input, output| {
            blocks[block] += layer.description().flops(input, output) * samples as f64;
        })?;
        Ok(blocks)
    }

    /// Flops of forward and backward: the backward costs twice the forward, one product for the gradient of
    /// the input and one for that of the weight. Recomputing adds the forward of blocks, at most of all but
    /// the last, whose backward follows at once; for GPT this is the formula of Narayanan et al. 2021. Or it
    /// adds attention, and what gives it queries, keys and values.
    pub fn train_flops(&self, samples: usize, recompute: RecomputeMode) -> Result<f64, ShapeError> {
        let blocks = self.block_flops(samples)?;
        let again: f64 = match recompute {
            RecomputeMode::Attention => {
                let starts = self.blocks.iter().zip(self.borders()?);
                let each = starts.map(|(block, shape)| inside_flops(&block.layers, shape));
                each.sum::<Result<f64, ShapeError>>()? * samples as f64
            }
            _ => {
                let remade = |block: &usize| recompute.remakes(*block, blocks.len().saturating_sub(1));
                (0..blocks.len()).filter(remade).map(|block| blocks[block]).sum()
            }
        };
        Ok(3.0 * blocks.iter().sum::<f64>() + again)
    }
}

/// Flops of what stands inside the attentions of some layers, for one sample.
fn inside_flops(layers: &[LayerSpec], mut shape: Shape) -> Result<f64, ShapeError> {
    let (insides, mut flops) = (attention_spans(layers), 0.0);
    for (i, layer) in layers.iter().enumerate() {
        let mut of_layer = 0.0;
        let behind = layer.step(shape, format_args!(""), &mut |layer, from, to| {
            of_layer += layer.description().flops(from, to)
        })?;
        flops += match layer.description().branches() {
            _ if insides.iter().any(|inside| inside.again.contains(&i)) => of_layer,
            Some(branches) => {
                let each = branches.all.iter().map(|branch| inside_flops(branch.layers, shape));
                each.sum::<Result<f64, ShapeError>>()?
            }
            None => 0.0,
        };
        shape = behind;
    }
    Ok(flops)
}

#[cfg(test)]
mod tests {
    use super::super::presets::*;
    use super::*;

    #[test]
    fn parameters_match_published_counts() {
        let image = (224, 224, 3);
        let resnet = |net| self::resnet(net, image, 1000, StemForm::ImageNet);
        let vgg = |net| self::vgg(net, image, 1000, StemForm::ImageNet, false);
        for (model, count) in [
            (simple_cnn((28, 28, 1), 10), 62_346),
            (resnet8((32, 32, 3), 10), 75_050),
            (resnet(ResNet::R18), 11_689_512),
            (resnet(ResNet::R34), 21_797_672),
            (resnet(ResNet::R50), 25_557_032),
            (resnet(ResNet::R101), 44_549_160),
            (resnet(ResNet::R152), 60_192_808),
            (resnet(ResNet::Wide50), 68_883_240),
            (resnet(ResNet::Wide101), 126_886_696),
            (alexnet(image, 1000, StemForm::ImageNet), 61_100_840),
            (alexnet((227, 227, 3), 1000, StemForm::ImageNet), 61_100_840),
            (vgg(Vgg::V11), 132_863_336),
            (vgg(Vgg::V13), 133_047_848),
            (vgg(Vgg::V16), 138_357_544),
            (vgg(Vgg::V19), 143_667_240),
            (gpt("gpt2-124m", &Gpt::preset("gpt2-124m").unwrap()), 124_439_808),
            (gpt("gpt2-350m", &Gpt::preset("gpt2-350m").unwrap()), 354_823_168),
        ] {
            model.check().unwrap();
            assert_eq!(model.parameter_count(), count, "{}", model.name);
        }
    }

    #[test]
    fn gpt3_sizes_are_what_their_names_say() {
        for (name, billions) in [("gpt3-xl", 1.3), ("gpt3-2.7b", 2.7), ("gpt3-6.7b", 6.7), ("gpt3-13b", 13.0)]
        {
            let model = gpt(name, &Gpt::preset(name).unwrap());
            model.check().unwrap();
            let ratio = model.parameter_count() as f64 / 1e9 / billions;
            assert!((ratio - 1.0).abs() < 0.02, "{name}: {ratio}");
        }
    }

    #[test]
    fn flops_match_published_ones() {
        let gmacs = |model: &ModelSpec| model.flops(1).unwrap() / 2e9;
        let resnet50 = gmacs(&resnet(ResNet::R50, (224, 224, 3), 1000, StemForm::ImageNet));
        assert!((resnet50 / 4.09 - 1.0).abs() < 0.02, "{resnet50}");
        let alexnet = gmacs(&alexnet((224, 224, 3), 1000, StemForm::ImageNet));
        assert!((alexnet / 0.714 - 1.0).abs() < 0.01, "{alexnet}");
        let vgg19 = gmacs(&vgg(Vgg::V19, (224, 224, 3), 1000, StemForm::ImageNet, false));
        assert!((vgg19 / 19.6 - 1.0).abs() < 0.02, "{vgg19}");
    }

    /// Narayanan et al. 2021: 96 B s l h^2 (1 + s/6h + V/16lh) with recomputation. Forward alone, where the
    /// layers are a quarter of it and the head a third: 24 B s l h^2 (1 + s/6h + V/12lh).
    #[test]
    fn gpt_flops_follow_the_formula() {
        let shape = Gpt::preset("gpt3-2.7b").unwrap();
        let model = gpt("gpt3-2.7b", &shape);
        let [b, s, l, h, v] = [8, shape.context, shape.layers, shape.width, shape.vocab].map(|n| n as f64);
        let forward = 24.0 * b * s * l * h * h * (1.0 + s / (6.0 * h) + v / (12.0 * l * h));
        let trained = 96.0 * b * s * l * h * h * (1.0 + s / (6.0 * h) + v / (16.0 * l * h));
        assert!((model.flops(8).unwrap() / forward - 1.0).abs() < 1e-12);
        assert_eq!(model.train_flops(8, RecomputeMode::None).unwrap(), 3.0 * model.flops(8).unwrap());
        assert!((model.train_flops(8, RecomputeMode::Block).unwrap() / trained - 1.0).abs() < 1e-12);
        // Queries, keys and values: 6 h^2 a token; attention itself 4 s h.
        let attention = 3.0 * forward + b * s * l * (6.0 * h * h + 4.0 * s * h);
        assert!((model.train_flops(8, RecomputeMode::Attention).unwrap() / attention - 1.0).abs() < 1e-12);
    }

    #[test]
    fn a_tied_weight_is_counted_once_and_flags_are_right() {
        let small = Gpt { layers: 1, width: 8, heads: 2, context: 4, vocab: 16, ..Gpt::default() };
        let names =
            |gpt_: &Gpt| gpt("gpt", gpt_).parameters().into_iter().map(|p| p.name).collect::<Vec<_>>();
        let tied = names(&small);
        assert_eq!(tied.iter().filter(|n| *n == "wte.weight").count(), 1);
        assert!(!tied.contains(&"lm_head.weight".to_string()));
        assert_eq!(names(&Gpt { tied: false, ..small }).last().unwrap(), "lm_head.weight");
        for p in gpt("gpt", &small).parameters() {
            assert_eq!(p.prunable, p.shape.len() >= 2, "{}", p.name);
            assert_eq!(p.embedding, ["wte.weight", "wpe.weight"].contains(&p.name.as_str()), "{}", p.name);
        }
    }

    #[test]
    fn batch_norm_has_buffers_that_are_not_parameters() {
        let model = resnet(ResNet::R18, (32, 32, 3), 10, StemForm::Small);
        let buffers = model.buffers();
        assert_eq!(buffers[0].name, "bn1.running_mean");
        assert_eq!(buffers.len(), 2 * 20);
        assert!(model.parameters().iter().all(|p| !p.name.contains("running")));
    }
}
