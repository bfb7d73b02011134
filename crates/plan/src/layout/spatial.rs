//! A rank's own model where images are cut: windows slide over its tile and a halo, and a mean over the image ends the cut.
//!
//! Norms, convolutions and what else has weights before that end see other pixels on each rank, so that each has a summand of their
//! gradients; what follows is the same on all of them.

use std::collections::HashSet;

use super::{norms, through};
use crate::error::Error;
use crate::mesh::Axis;
use crate::spec::{
    AdaptiveAvgPool, AvgPool, Branches, Conv, Counted, Crop, Dropout, Halo, Input, Layer, MaxPool, Model,
    Residual, Shape, SharedStatistics, TiledMean,
};
use crate::tiles::{Padding, Tiles, Window};

impl Window {
    /// That of a layer which has one.
    pub fn of(layer: &Layer) -> Option<Window> {
        match *layer {
            Layer::Conv(Conv { kernel, stride, padding, .. })
            | Layer::MaxPool(MaxPool { kernel, stride, padding }) => Some(Window { kernel, stride, padding }),
            Layer::AvgPool(AvgPool { kernel, stride }) => {
                Some(Window { kernel, stride, padding: Padding::default() })
            }
            _ => None,
        }
    }
}

/// The strides that an image meets on its way through layers, in order, those of a residual block's branch among them: what
/// [`Tiles::cut`] wants to know.
pub fn strides(layers: &[Layer]) -> Vec<usize> {
    let of = |layer: &Layer| match (Window::of(layer), layer.entry().sides()) {
        (Some(window), _) => vec![window.stride],
        (None, Some(sides)) => sides.all.first().map_or(Vec::new(), |side| strides(side.layers)),
        (None, None) => Vec::new(),
    };
    layers.iter().flat_map(of).filter(|stride| *stride > 1).collect()
}

/// The model of one of the ranks of a grid, and the names of the parameters of whose gradients each has a summand.
pub(crate) fn shard(model: &Model, grid: [usize; 2], rank: usize) -> Result<(Model, HashSet<String>), Error> {
    let Input::Image { height, width, .. } = model.input else {
        let why = format!("with `model.name` = \"{}\", which reads no images", model.name);
        return Err(Error::NoEffect { field: "parallel.spatial".into(), why });
    };
    let layers: Vec<Layer> = model.blocks.iter().flat_map(|block| block.layers.clone()).collect();
    let tiles = Tiles::cut([height, width], grid, &strides(&layers));
    let crop = Layer::Crop(Crop { of: [height, width], region: tiles.of(rank) });
    let mut sharder = Sharder { rank, tiles: Some(tiles), partial: HashSet::new() };
    let (mut local, mut shape) = (model.clone(), model.input.shape());
    for (block, whole) in local.blocks.iter_mut().zip(&model.blocks) {
        block.layers = sharder.layers(&whole.layers, shape)?;
        shape = through(&whole.layers, shape);
    }
    if let Some(first) = local.blocks.iter_mut().find(|block| !block.layers.is_empty()) {
        first.layers.insert(0, crop);
    }
    if sharder.tiles.is_some() {
        return Err(conflict("the model ends with an image: nothing brings its parts together".into()));
    }
    Ok((local, sharder.partial))
}

struct Sharder {
    rank: usize,
    /// How the image is cut at the place reached; none: it is whole again.
    tiles: Option<Tiles>,
    partial: HashSet<String>,
}

impl Sharder {
    fn layers(&mut self, layers: &[Layer], mut shape: Shape) -> Result<Vec<Layer>, Error> {
        let mut built = Vec::new();
        for layer in layers {
            match &self.tiles {
                Some(tiles) => self.on_tiles(layer, tiles.clone(), shape, &mut built)?,
                None => built.push(layer.clone()),
            }
            shape = layer.output(shape).expect("the shapes were checked");
        }
        Ok(built)
    }

    fn on_tiles(
        &mut self,
        layer: &Layer,
        tiles: Tiles,
        shape: Shape,
        built: &mut Vec<Layer>,
    ) -> Result<(), Error> {
        self.partial.extend(layer.parameters().into_iter().map(|parameter| parameter.name));
        if let Some(window) = Window::of(layer) {
            let called = layer
                .name()
                .map_or(format!("a {}", layer.kind()), |name| format!("{} `{name}`", layer.kind()));
            let (output, mut exchanges) =
                tiles.slide(&called, window).map_err(|thin| conflict(thin.to_string()))?;
            let exchange = exchanges.swap_remove(self.rank);
            let padding = exchange.contribution(&exchange.reads).padding;
            if !(exchange.is_empty() && exchange.own == exchange.reads) {
                built.push(Layer::Halo(Halo(exchange)));
            }
            built.push(match layer {
                Layer::Conv(conv) => Layer::Conv(Conv { padding, ..conv.clone() }),
                Layer::MaxPool(pool) => Layer::MaxPool(MaxPool { padding, ..*pool }),
                &Layer::AvgPool(AvgPool { kernel, stride }) => Layer::AvgPool(AvgPool { kernel, stride }),
                other => unreachable!("{} has no windows", other.kind()),
            });
            self.tiles = Some(output);
            return Ok(());
        }
        let [height, width] = tiles.size();
        let own = tiles.of(self.rank);
        match layer {
            Layer::GlobalAvgPool => self.end(tiles, None, built),
            &Layer::AdaptiveAvgPool(AdaptiveAvgPool { size }) => self.end(tiles, Some(size), built),
            Layer::Flatten => {
                if height != width {
                    return Err(conflict(format!(
                        "a flatten of {height} x {width} pixels cannot be brought together: put an adaptive pool before it"
                    )));
                }
                // A mean over windows of one pixel each is the image.
                self.end(tiles, Some(height), built);
                built.push(Layer::Flatten);
            }
            Layer::Dropout(Dropout { rate, .. }) => {
                if own.columns != (0..width) {
                    return Err(conflict("a dropout over an image that is cut along its width".into()));
                }
                let row = width * shape.last();
                let (first, run, of) = (own.rows.start * row, own.rows.len() * row, height * row);
                built.push(Layer::Dropout(Dropout {
                    rate: *rate,
                    counted: Some(Counted::Runs { first, run, of }),
                }));
            }
            Layer::SharedStatistics(shared) => {
                let over = shared.over.iter().copied().chain([Axis::Spatial]).collect();
                built.push(Layer::SharedStatistics(SharedStatistics { over, ..shared.clone() }));
            }
            Layer::BatchNorm(norm) => {
                if !matches!(built.last(), Some(Layer::SharedStatistics(_))) {
                    built.push(norms::shared(norm, Axis::Spatial));
                }
                built.push(layer.clone());
            }
            Layer::Residual(Residual { branch, shortcut }) => {
                let mut ways = self.ways([branch, shortcut], &tiles, shape)?.into_iter();
                let mut next = || ways.next().expect("two ways");
                built.push(Layer::Residual(Residual { branch: next(), shortcut: next() }));
            }
            Layer::Branches(Branches { join, branches }) => {
                let branches = self.ways(branches.iter(), &tiles, shape)?;
                built.push(Layer::Branches(Branches { join: *join, branches }));
            }
            other => built.push(other.clone()),
        }
        Ok(())
    }

    /// Ways that part here, and must come out cut alike.
    fn ways<'a>(
        &mut self,
        ways: impl IntoIterator<Item = &'a Vec<Layer>>,
        tiles: &Tiles,
        shape: Shape,
    ) -> Result<Vec<Vec<Layer>>, Error> {
        let (mut built, mut ends) = (Vec::new(), Vec::new());
        for way in ways {
            self.tiles = Some(tiles.clone());
            built.push(self.layers(way, shape)?);
            ends.push(self.tiles.clone());
        }
        if ends.windows(2).any(|pair| pair[0] != pair[1]) {
            return Err(conflict(
                "the ways through a block end with images that are cut at different rows".into(),
            ));
        }
        Ok(built)
    }

    fn end(&mut self, tiles: Tiles, size: Option<usize>, built: &mut Vec<Layer>) {
        built.push(Layer::TiledMean(TiledMean { tiles, rank: self.rank, size }));
        self.tiles = None;
    }
}

fn conflict(problem: String) -> Error {
    Error::Conflict { field: "parallel.spatial".into(), problem: format!("does not fit: {problem}") }
}
