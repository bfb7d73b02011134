//! A rank's own model where images are split: windows slide over its tile and a halo, and a mean over the
//! image ends the split.
//!
//! Norms, convolutions and what else has weights before that end see other pixels on each rank, so that each
//! has a partial sum of their gradients; what follows is the same on all of them.

use std::collections::HashSet;

use super::{norms, through};
use crate::error::Error;
use crate::mesh::Axis;
use crate::spec::{
    Crop, DropoutIndices, Halo, Input, LayerSpec, ModelSpec, Shape, SharedStatistics, TileRole, TiledMean,
};
use crate::tiles::{SlidingWindow, TileGrid};

/// The strides that an image meets on its way through layers, in order, those of a residual block's branch
/// among them: what [`TileGrid::cut`] wants to know.
pub fn strides(layers: &[LayerSpec]) -> Vec<usize> {
    let of = |layer: &LayerSpec| match (layer.properties().tile_role, layer.description().branches()) {
        (TileRole::Window(window), _) => vec![window.stride],
        (_, Some(branches)) => branches.all.first().map_or(Vec::new(), |branch| strides(branch.layers)),
        (_, None) => Vec::new(),
    };
    layers.iter().flat_map(of).filter(|stride| *stride > 1).collect()
}

/// The model of one of the ranks of a grid, and the names of the parameters of whose gradients each has a
/// partial sum.
pub(crate) fn shard(
    model: &ModelSpec,
    grid: [usize; 2],
    rank: usize,
) -> Result<(ModelSpec, HashSet<String>), Error> {
    let Input::Image { height, width, .. } = model.input else {
        let why = format!("with `model.name` = \"{}\", which reads no images", model.name);
        return Err(Error::no_effect("parallel.spatial", why));
    };
    let layers: Vec<LayerSpec> = model.blocks.iter().flat_map(|block| block.layers.clone()).collect();
    let tiles = TileGrid::cut([height, width], grid, &strides(&layers));
    let crop = LayerSpec::Crop(Crop { of: [height, width], region: tiles.of(rank) });
    let mut sharder = SpatialSharder { rank, tiles: Some(tiles), partial: HashSet::new() };
    let (mut local, mut shape) = (model.clone(), model.input.shape());
    for (block, full) in local.blocks.iter_mut().zip(&model.blocks) {
        block.layers = sharder.layers(&full.layers, shape)?;
        shape = through(&full.layers, shape);
    }
    if let Some(first) = local.blocks.iter_mut().find(|block| !block.layers.is_empty()) {
        first.layers.insert(0, crop);
    }
    if sharder.tiles.is_some() {
        return Err(conflict("the model ends with an image: nothing gathers its tiles".into()));
    }
    Ok((local, sharder.partial))
}

struct SpatialSharder {
    rank: usize,
    /// How the image is split at the point reached; none: it is complete again.
    tiles: Option<TileGrid>,
    partial: HashSet<String>,
}

impl SpatialSharder {
    fn layers(&mut self, layers: &[LayerSpec], mut shape: Shape) -> Result<Vec<LayerSpec>, Error> {
        let mut built = Vec::new();
        for layer in layers {
            match &self.tiles {
                Some(tiles) => self.tile_role(layer, tiles.clone(), shape, &mut built)?,
                None => built.push(layer.clone()),
            }
            shape = layer.output(shape).expect("the shapes were checked");
        }
        Ok(built)
    }

    fn tile_role(
        &mut self,
        layer: &LayerSpec,
        tiles: TileGrid,
        shape: Shape,
        built: &mut Vec<LayerSpec>,
    ) -> Result<(), Error> {
        self.partial.extend(layer.parameters().into_iter().map(|parameter| parameter.name));
        let entry = layer.description();
        let ([height, width], own) = (tiles.size(), tiles.of(self.rank));
        match entry.properties().tile_role {
            TileRole::Window(window) => return self.slide(layer, &tiles, window, built),
            TileRole::Mean(size) => {
                self.end(tiles, size, built);
                return Ok(());
            }
            TileRole::Gathered => {
                if height != width {
                    return Err(conflict(format!(
                        "a {} of {height} x {width} pixels cannot be gathered: put an adaptive pool before it",
                        layer.kind()
                    )));
                }
                // A mean over windows of one pixel each is the image.
                self.end(tiles, Some(height), built);
                built.push(layer.clone());
                return Ok(());
            }
            TileRole::Pixels | TileRole::Apart => {}
        }
        if let Some(channels) = entry.properties().batch_statistics
            && !matches!(built.last(), Some(LayerSpec::SharedStatistics(_)))
        {
            built.push(norms::shared(channels, Axis::Spatial));
        }
        let row = width * shape.last();
        let elements =
            DropoutIndices::Runs { first: own.rows.start * row, run: own.rows.len() * row, of: height * row };
        built.push(match (layer, entry.counting(elements)) {
            (_, Some(_)) if own.columns != (0..width) => {
                let word = layer.kind();
                return Err(conflict(format!("a {word} over an image that is split along its width")));
            }
            (_, Some(counting)) => counting,
            (LayerSpec::SharedStatistics(shared), _) => {
                let over = shared.over.iter().copied().chain([Axis::Spatial]).collect();
                LayerSpec::SharedStatistics(SharedStatistics { over, ..shared.clone() })
            }
            (layer, None) if entry.branches().is_some() => self.split_branches(layer, &tiles, shape)?,
            (layer, None) => layer.clone(),
        });
        Ok(())
    }

    /// Windows over a tile and what they see of its neighbours.
    fn slide(
        &mut self,
        layer: &LayerSpec,
        tiles: &TileGrid,
        window: SlidingWindow,
        built: &mut Vec<LayerSpec>,
    ) -> Result<(), Error> {
        let called =
            layer.name().map_or(format!("a {}", layer.kind()), |name| format!("{} `{name}`", layer.kind()));
        let (output, mut halos) = tiles.slide(&called, window).map_err(|thin| conflict(thin.to_string()))?;
        let halo = halos.swap_remove(self.rank);
        let padding = halo.contribution(&halo.reads).padding;
        if !(halo.is_empty() && halo.own == halo.reads) {
            built.push(LayerSpec::Halo(Halo(halo)));
        }
        built.push(layer.description().padded(padding).expect("windows have a padding"));
        self.tiles = Some(output);
        Ok(())
    }

    /// Each branch by itself; all must come out split alike.
    fn split_branches(
        &mut self,
        layer: &LayerSpec,
        tiles: &TileGrid,
        shape: Shape,
    ) -> Result<LayerSpec, Error> {
        let mut ends = Vec::new();
        let built = layer.map_branches(|branch| {
            self.tiles = Some(tiles.clone());
            let built = self.layers(branch, shape)?;
            ends.push(self.tiles.clone());
            Ok::<_, Error>(built)
        })?;
        if ends.windows(2).any(|pair| pair[0] != pair[1]) {
            return Err(conflict(
                "the branches of a block end with images that are split at different rows".into(),
            ));
        }
        Ok(built)
    }

    fn end(&mut self, tiles: TileGrid, size: Option<usize>, built: &mut Vec<LayerSpec>) {
        built.push(LayerSpec::TiledMean(TiledMean { tiles, rank: self.rank, size }));
        self.tiles = None;
    }
}

fn conflict(problem: String) -> Error {
    Error::conflict("parallel.spatial", format!("does not fit: {problem}"))
}
