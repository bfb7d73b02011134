//! Batch norms that replicas measure together: before each stands an all-reduce of what they measure, so that the
//! norm itself need not know of other ranks. Over tiles of images `spatial` puts it there.

use std::convert::Infallible;

use crate::mesh::Axis;
use crate::spec::{LayerSpec, ModelSpec, SharedStatistics};

/// The all-reduce before a batch norm of so many channels, over an axis.
pub(super) fn shared(channels: usize, axis: Axis) -> LayerSpec {
    LayerSpec::SharedStatistics(SharedStatistics { channels, over: vec![axis], shares_samples: false })
}

/// The same, where ranks along the axis split the samples of a micro-batch.
pub(super) fn shared_by_samples(channels: usize, axis: Axis) -> LayerSpec {
    LayerSpec::SharedStatistics(SharedStatistics { channels, over: vec![axis], shares_samples: true })
}

/// A model whose batch norms measure over the samples of all replicas.
pub(super) fn over_replicas(model: &ModelSpec) -> ModelSpec {
    let mut model = model.clone();
    for block in &mut model.blocks {
        block.layers = in_row(&block.layers);
    }
    model
}

fn in_row(layers: &[LayerSpec]) -> Vec<LayerSpec> {
    let mut built = Vec::with_capacity(layers.len());
    for layer in layers {
        if let Some(channels) = layer.properties().batch_statistics {
            match built.last_mut() {
                // Ranks with other samples of the same micro-batch measure with it already.
                Some(LayerSpec::SharedStatistics(shared)) => shared.over.insert(0, Axis::Data),
                _ => built.push(shared(channels, Axis::Data)),
            }
        }
        let Ok(layer) = layer.map_branches(|branch| Ok::<_, Infallible>(in_row(branch)));
        built.push(layer);
    }
    built
}

#[cfg(test)]
mod tests {
    use super::super::{Layout, Partition};
    use crate::mesh::Axis;
    use crate::spec::presets::{ResNet, StemForm, resnet};
    use crate::spec::{BatchNorm, LayerSpec, ModelSpec};

    /// The axes over which each batch norm of the first rank measures.
    fn axes(model: &ModelSpec, cuts: Partition) -> Vec<Vec<Axis>> {
        let layout = Layout::new(model, &model.parameters(), cuts).unwrap();
        let (mut found, mut before): (Vec<Vec<Axis>>, Option<&LayerSpec>) = (Vec::new(), None);
        layout.local_models()[0].model.for_each(&mut |layer| {
            if let LayerSpec::BatchNorm(_) = layer {
                found.push(match before {
                    Some(LayerSpec::SharedStatistics(shared)) => shared.over.clone(),
                    _ => Vec::new(),
                });
            }
            before = Some(layer);
        });
        found
    }

    #[test]
    fn a_norm_measures_over_the_axes_that_cut_what_it_sees() {
        let mut model = resnet(ResNet::R18, (32, 32, 3), 10, StemForm::Small);
        let last = model.blocks.last_mut().unwrap();
        let pool = last.layers.iter().position(|layer| matches!(layer, LayerSpec::GlobalAvgPool)).unwrap();
        let channels = 512;
        // Behind the mean over the image every tile's rank sees the same.
        let norm = BatchNorm { name: "late".into(), channels, scale: 1.0, group: 0, eps: 1e-5 };
        last.layers.insert(pool + 1, LayerSpec::BatchNorm(norm));
        let tiles = || Partition { grid: [2, 1], ..Partition::NONE };
        let cases = [
            (Partition::NONE, vec![], vec![]),
            (Partition { synchronised: true, ..Partition::NONE }, vec![Axis::Data], vec![Axis::Data]),
            (tiles(), vec![Axis::Spatial], vec![]),
            (Partition { synchronised: true, ..tiles() }, vec![Axis::Data, Axis::Spatial], vec![Axis::Data]),
            (Partition { tensor: 2, ..tiles() }, vec![Axis::Spatial], vec![]),
        ];
        for (cuts, early, late) in cases {
            let found = axes(&model, cuts.clone());
            let (behind, before) = found.split_last().unwrap();
            assert!(before.iter().all(|axes| *axes == early), "{cuts:?}: {before:?}");
            assert_eq!((before.len(), behind), (20, &late), "{cuts:?}");
        }
    }
}
