//! A convolution of images that are tiled over ranks, against one rank: 3 x 3, 64 channels to 64, batch 32,
//! at 128, 256 and 512 pixels a side, which is what Dryden et al. (2019) measured on V100s.
//! `cargo bench -p espalier-nn --bench spatial [-- --sides 128,256,512] [--grid 2x1] [--batch 32] [--rounds 7] [--passes 4]`
//!
//! Ranks are threads, each with one thread to compute. Forward is the exchange of halos and the convolution;
//! backward is the gradients of tile and halo, the halo's return, the gradient of the weight and its
//! all-reduce over the ranks. The slowest rank counts.
//!
//! A round measures one rank, the ranks, and one rank again, each in some passes, of which the shortest
//! counts. Cores that others share change their speed, so the round that is reported is the steadiest: the
//! one in which the passes of all three, for the same work on as many ranks, differ least. It is chosen by
//! that alone; beside it stands the median of all rounds.

use std::time::{Duration, Instant};

use espalier_comm::{Communicator, Reduce, threads};
use espalier_nn::Result;
use espalier_nn::layers::spatial::{HaloComm, TiledConv};
use espalier_nn::layers::{
    BackwardContext, BatchSlice, ForwardContext, GradientElements, GradientSink, Layer, Mode, WeightGradients,
};
use espalier_nn::weights::{ParameterId, Weights};
use espalier_plan::spec::{BlockSpec, Conv, Init, Input, LayerSpec as Spec, ModelSpec};
use espalier_plan::tiles::{SlidingWindow, TileGrid};
use espalier_tensor::{Category, DType, Device, Tensor};

const CHANNELS: usize = 64;
const WINDOW: usize = 3;
/// Seconds of a forward and of a backward pass.
type Times = [f64; 2];

/// Sums a gradient over the ranks, as soon as it is made.
struct Summed(Communicator);

impl GradientSink for Summed {
    fn accept(&mut self, _: &[ParameterId], gradients: WeightGradients) -> Result<()> {
        for gradient in gradients.make(GradientElements::All)? {
            self.0.all_reduce(gradient, Reduce::Sum)?;
        }
        Ok(())
    }
}

fn model(side: usize) -> ModelSpec {
    let conv = Conv {
        name: "conv".into(),
        input: CHANNELS,
        output: CHANNELS,
        kernel: WINDOW,
        stride: 1,
        padding: (WINDOW / 2).into(),
        bias: false,
        init: Init::Normal(0.04),
    };
    let input = Input::Image { height: side, width: side, channels: CHANNELS };
    let blocks = vec![BlockSpec { name: "all".into(), layers: vec![Spec::Conv(conv)] }];
    ModelSpec { name: "conv".into(), input, blocks, classes: CHANNELS }
}

fn image(device: &Device, shape: &[usize]) -> Result<Tensor> {
    let pixel = |i: usize| (i.wrapping_mul(2_654_435_761) % 1024) as f32 / 512.0 - 1.0;
    let pixels: Vec<f32> = (0..shape.iter().product()).map(pixel).collect();
    Ok(Tensor::from_slice(device, shape, &pixels, Category::Transient)?)
}

/// One rank's part of a measurement: the times of the slowest, of each pass but the first.
fn rank(world: &Communicator, tiles: &TileGrid, batch: usize, passes: usize) -> Result<Vec<Times>> {
    let device = Device::cpu(1)?;
    device.enter(|| {
        let spec = model(tiles.size()[0]);
        let weights = Weights::initialise(&spec, &device, DType::F32, 1)?;
        let window = SlidingWindow { kernel: WINDOW, stride: 1, padding: (WINDOW / 2).into() };
        let (_, halo_plans) = tiles.slide("conv", window).expect("slabs thick enough");
        let halo = HaloComm::new(halo_plans[world.rank()].clone(), world);
        let layer = TiledConv::new(weights.parameter("conv.weight").expect("a weight"), None, halo);
        let [rows, columns] = tiles.of(world.rank()).size();
        let (x, dy) = (
            image(&device, &[batch, rows, columns, CHANNELS])?,
            image(&device, &[batch, rows, columns, CHANNELS])?,
        );
        let batch_slice = BatchSlice { samples: batch, ..Default::default() };
        let mut times = Vec::new();
        for _ in 0..=passes {
            let mut sink = Summed(world.clone());
            world.barrier()?;
            let start = Instant::now();
            let mut pass = ForwardContext::new(&weights, Mode::Train, 1, batch_slice);
            layer.forward(x.clone(), &mut pass)?;
            let forward = start.elapsed().as_secs_f64();
            world.barrier()?;
            let start = Instant::now();
            layer.backward(dy.clone(), &mut BackwardContext::of(&mut pass, &mut sink), true)?;
            let backward = start.elapsed().as_secs_f64();
            let slowest = world.all_reduce(vec![forward, backward], Reduce::Max)?;
            times.push([slowest[0], slowest[1]]);
        }
        // The first pass takes new memory.
        Ok(times.split_off(1))
    })
}

fn measured(side: usize, grid: [usize; 2], batch: usize, passes: usize) -> Vec<Times> {
    let tiles = TileGrid::cut([side, side], grid, &[]);
    let run = |world: Communicator| rank(&world, &tiles, batch, passes);
    let ranks = threads::run(tiles.ranks(), Duration::from_secs(600), run);
    ranks.expect("all ranks end well").swap_remove(0)
}

/// The shortest and the longest of some passes, forward and backward.
fn extremes<'a>(passes: impl Iterator<Item = &'a Times> + Clone) -> [(f64, f64); 2] {
    [0, 1].map(|i| {
        let times = || passes.clone().map(|times| times[i]);
        (times().fold(f64::INFINITY, f64::min), times().fold(0.0, f64::max))
    })
}

/// One rank before and after, and the ranks in between.
struct Round {
    one: Times,
    many: Times,
    /// How much longer the longest pass took than the shortest.
    spread: f64,
}

impl Round {
    fn measure(side: usize, grid: [usize; 2], batch: usize, passes: usize) -> Round {
        let [before, many, after] = [[1, 1], grid, [1, 1]].map(|grid| measured(side, grid, batch, passes));
        let (one, many) = (extremes(before.iter().chain(&after)), extremes(many.iter()));
        let spread = one.iter().chain(&many).map(|(short, long)| long / short - 1.0).fold(0.0, f64::max);
        Round { one: one.map(|(short, _)| short), many: many.map(|(short, _)| short), spread }
    }

    /// How many times faster the ranks are, forward and backward.
    fn gain(&self) -> [f64; 2] {
        [self.one[0] / self.many[0], self.one[1] / self.many[1]]
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let value = |name: &str, default: &str| {
        let at = arguments.iter().position(|argument| argument == name);
        at.and_then(|at| arguments.get(at + 1)).map_or(default, String::as_str).to_owned()
    };
    let numbers = |text: String, apart: char| -> Vec<usize> {
        text.split(apart).map(|n| n.parse().expect("a number")).collect()
    };
    let grid = numbers(value("--grid", "2x1"), 'x');
    let number = |name: &str, default: &str| numbers(value(name, default), ',')[0];
    let (batch, rounds, passes) = (number("--batch", "32"), number("--rounds", "7"), number("--passes", "4"));
    println!(
        "{WINDOW} x {WINDOW}, {CHANNELS} channels, batch {batch}, f32; {} x {} ranks of one thread against one, {rounds} rounds",
        grid[0], grid[1]
    );
    println!(
        "{:>5} {:>21} {:>21} {:>15} {:>15} {:>7}",
        "side", "one rank, ms", "ranks, ms", "steadiest", "median", "spread"
    );
    for side in numbers(value("--sides", "128,256,512"), ',') {
        let mut of: Vec<Round> =
            (0..rounds).map(|_| Round::measure(side, [grid[0], grid[1]], batch, passes)).collect();
        of.sort_by(|a, b| a.spread.total_cmp(&b.spread));
        let median = [0, 1].map(|pass: usize| {
            let mut gains: Vec<f64> = of.iter().map(|round| round.gain()[pass]).collect();
            gains.sort_by(f64::total_cmp);
            gains[gains.len() / 2]
        });
        let Round { one, many, spread } = &of[0];
        let gain = of[0].gain();
        let ms = |times: &Times| format!("{:.1} / {:.1}", times[0] * 1e3, times[1] * 1e3);
        let times = |gain: [f64; 2]| format!("{:.2}x / {:.2}x", gain[0], gain[1]);
        println!(
            "{side:>5} {:>21} {:>21} {:>15} {:>15} {:>6.1}%",
            ms(one),
            ms(many),
            times(gain),
            times(median),
            100.0 * spread
        );
    }
}
