//! What the three passes of a convolution take: of a full image, of a tile with its neighbours' pixels, and
//! of the first layer, whose input needs no gradient.

use super::passes::{PassContext, PassSeconds, Passes, is_convolution};
use crate::cluster::{Convolution, ConvolutionPass};
use crate::spec::{LayerKernel, LayerSpec, ProductSize, Shape};
use crate::tiles::Region;

impl PassContext<'_> {
    /// Of an image, or of a tile that has its halo.
    pub(super) fn convolution(&self, kernel: usize, size: ProductSize, [read, made]: [Shape; 2]) -> Passes {
        let weights = (kernel * kernel * size.input * size.output) as f64;
        let elements = self.elements(read) + self.elements(made) + weights;
        let pixels = [self.rows(read), self.rows(made)];
        let passes = ConvolutionPass::all(kernel, size.input, size.output, pixels);
        self.three(passes, |pass| self.kernels.convolution(pass, elements))
    }

    /// The passes of a convolution.
    fn three(&self, passes: [ConvolutionPass; 3], seconds: impl Fn(&ConvolutionPass) -> f64) -> Passes {
        let [forward, backward_input, backward_weight] =
            passes.map(|pass| PassSeconds::computing(seconds(&pass)));
        Passes { forward, again: PassSeconds::default(), backward_input, backward_weight }
    }

    /// What a convolution of a tile takes beside its flops for the pixels of each neighbour: they are a
    /// convolution of their own, whose weights are laid out once more.
    pub(super) fn halo_passes(&self, before: Option<&LayerSpec>, layer: &LayerSpec) -> Passes {
        let (Some(LayerSpec::Halo(halo)), LayerKernel::Convolution { kernel, size }) =
            (before, layer.properties().kernel)
        else {
            return Passes::default();
        };
        if !self.engine.is_ours() || !matches!(self.convolutions(), Convolution::Passes(_)) {
            return Passes::default();
        }
        let of_neighbour = |pixels: &Region| {
            let seen = halo.0.contribution(pixels);
            let [read, made] =
                [&seen.input, &seen.output].map(|region| (self.samples as u64 * region.pixels()) as f64);
            let passes = ConvolutionPass::all(kernel, size.input, size.output, [read, made]);
            // Its flops and windows are among those of the whole tile.
            let bare = passes.map(|pass| ConvolutionPass { flops: 0.0, windows: 0.0, ..pass });
            self.three(bare, |pass| self.kernels.convolution(pass, 0.0))
        };
        let taken = halo.0.neighbours.iter().map(|peer| &peer.takes).filter(|takes| !takes.is_empty());
        taken.map(of_neighbour).sum::<Passes>() * self.neighbours
    }

    /// What the gradient of the images would take: the first layer makes none. One efficiency for all passes
    /// counts it.
    pub(super) fn first_input_gradient(&self, layers: &[LayerSpec], input: Shape) -> PassSeconds {
        // A tile is cropped first.
        let crops = layers.iter().take_while(|layer| matches!(layer, LayerSpec::Crop(_))).count();
        let input = layers[..crops].iter().try_fold(input, |shape, crop| crop.output(shape));
        let (layers, input) = (&layers[crops..], input.expect("the shapes were checked"));
        let tile = matches!(layers.first(), Some(LayerSpec::Halo(_)));
        let layer = layers.get(usize::from(tile)).filter(|layer| is_convolution(layer));
        let is_counted = matches!(self.convolutions(), Convolution::Efficiency(_));
        let Some(layer) = layer.filter(|_| self.engine.is_ours() && !is_counted) else {
            return PassSeconds::default();
        };
        let before = tile.then(|| &layers[0]);
        let seen = before.map_or(Ok(input), |halo| halo.output(input)).expect("the shapes were checked");
        let made = layer.output(seen).expect("the shapes were checked");
        let own = self.without_zeros(layer, &layers[usize::from(tile) + 1..], self.layer(layer, seen, made));
        (own + self.halo_passes(before, layer)).backward_input
    }

    fn convolutions(&self) -> &Convolution {
        &self.kernels.device.matrix(self.kernels.precision).convolution
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Candidate, Simulation};
    use crate::cluster::{ByPass, Cluster, Convolution, builtin};
    use crate::engine::EngineProfile;
    use crate::plan::Plan;

    /// A core whose convolutions cost what these fields say.
    fn core(by_pass: ByPass) -> Cluster {
        let mut cluster = builtin("this-machine").unwrap();
        cluster.device.f32.convolution = Convolution::Passes(by_pass);
        cluster
    }

    fn bare(channels: Vec<[f64; 2]>) -> ByPass {
        ByPass { channels, start_us: 0.0, weight_ns: 0.0, pixel_ns: 0.0, window_ns: 0.0 }
    }

    /// Seconds that the ranks of a resnet8 compute in a step.
    fn computing(cluster: &Cluster, axis: &str) -> f64 {
        let text = format!(
            "[model]\nname = \"resnet8\"\n[train]\nsteps = 1\nbatch = 16\nmicro_batches = {}\n[parallel]\n{axis} = 4\n",
            if axis == "data" { 1 } else { 4 }
        );
        let plan = Plan::of_text(&text);
        let job = Simulation::new(&plan, cluster, EngineProfile::ESPALIER);
        job.estimate(&Candidate::of(&plan).unwrap()).unwrap().breakdown.compute
    }

    /// Channels cut in four, of 16 to 64, are 4 to 16; whole ones, of which none has fewer than 16, do not mind.
    #[test]
    fn cut_layers_are_slower_where_few_channels_are() {
        let [flat, narrow] =
            [vec![[16.0, 1.0]], vec![[4.0, 0.25], [16.0, 1.0]]].map(|channels| core(bare(channels)));
        // Both: below the first point a pass takes as long as there.
        assert_eq!(computing(&flat, "tensor"), computing(&narrow, "tensor"));
        let never = core(bare(vec![[1.0, 1.0], [64.0, 1.0]]));
        assert!(computing(&narrow, "tensor") > 1.5 * computing(&never, "tensor"));
        let ratio = computing(&narrow, "data") / computing(&never, "data");
        assert!((ratio - 1.0).abs() < 1e-9, "{ratio}");
    }

    /// A tile makes no gradient of its pixels of the images, as a full image has none: the same flops are
    /// left out of both.
    #[test]
    fn no_layout_makes_the_gradient_of_images() {
        let flat = core(bare(vec![[1.0, 1.0]]));
        let [data, spatial] = ["data", "spatial"].map(|axis| computing(&flat, axis));
        // Tiles walk over the borders of others too, which is little.
        assert!(spatial > 0.95 * data && spatial < 1.1 * data, "{spatial} {data}");
    }

    /// Replicas lay weights out once in a pass; tiles do in each of four micro-batches, and once more for
    /// each neighbour's pixels.
    #[test]
    fn tiles_pay_for_weights_more_often() {
        let never = core(bare(vec![[1.0, 1.0], [64.0, 1.0]]));
        let weights = core(ByPass { weight_ns: 100.0, ..bare(vec![[1.0, 1.0], [64.0, 1.0]]) });
        let more = |axis| computing(&weights, axis) - computing(&never, axis);
        let ratio = more("spatial") / more("data");
        assert!(ratio > 8.0 && ratio < 12.5, "{ratio}");
    }
}
