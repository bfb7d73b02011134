//! What the layers of a CNN take of those beside them: convolutions, batch norms and max pools the ReLU
//! behind them, a norm the sum of a residual layer, or the pool or convolution that reads it, and halo
//! exchanges and synchronised statistics the layer that they stand before. Each saves a pass over memory, or
//! the exchange another message.

use espalier_plan::mesh::Axis;
use espalier_plan::spec;
use espalier_tensor::ops::conv::ConvParams;
use espalier_tensor::ops::pool::PoolParams;

use super::Builder;
use crate::layers::spatial::TiledConv;
use crate::layers::*;
use crate::weights::BufferId;

impl Builder<'_> {
    /// The first of `layers` with those that it takes, and how many they are; none where it takes nothing and is
    /// built alone.
    pub(super) fn cnn(&mut self, layers: &[spec::LayerSpec]) -> Option<(Box<dyn Layer>, usize)> {
        Some(match layers {
            [spec::LayerSpec::Halo(halo), spec::LayerSpec::Conv(spec::Conv { name, bias, .. }), ..] => {
                let (weight, bias) = (self.weight(name), bias.then(|| self.bias(name)));
                (Box::new(TiledConv::new(weight, bias, self.halo(halo))), 2)
            }
            [spec::LayerSpec::Residual(residual), relu, ..]
                if self.is_fused_relu(relu) && norm_at_end(&residual.branch).is_some() =>
            {
                (Box::new(self.relu_residual(residual)), 2)
            }
            [spec::LayerSpec::Conv(conv), behind @ ..] => {
                let conv = self.conv(conv, behind);
                let count = 1 + usize::from(conv.relu);
                (Box::new(conv), count)
            }
            [spec::LayerSpec::MaxPool(pool), relu, ..] if self.is_fused_relu(relu) => {
                (Box::new(self.max_pool(pool, true)), 2)
            }
            _ => {
                let norm = norm_at_start(layers)?;
                self.norm_and_behind(norm, &layers[norm.len()..])
            }
        })
    }

    /// A batch norm with the ReLU behind it, and perhaps the convolution behind that, or with the max pool
    /// behind it; how many layers that is.
    fn norm_and_behind(
        &mut self,
        norm: &[spec::LayerSpec],
        behind: &[spec::LayerSpec],
    ) -> (Box<dyn Layer>, usize) {
        let relu = behind.first().is_some_and(|next| self.is_fused_relu(next));
        let count = norm.len() + usize::from(relu);
        let built = self.batch_norm(norm, relu);
        match behind {
            [_, spec::LayerSpec::Conv(conv), behind @ ..] if relu => {
                let conv = self.conv(conv, behind);
                let count = count + 1 + usize::from(conv.relu);
                (Box::new(NormConv { norm: built, conv }), count)
            }
            [spec::LayerSpec::MaxPool(pool), behind @ ..] if self.frozen_gates.is_none() => {
                let relu = behind.first().is_some_and(|next| self.is_fused_relu(next));
                let pool = self.max_pool(pool, relu);
                (Box::new(NormPool { norm: built, pool }), count + 1 + usize::from(relu))
            }
            _ => (Box::new(built), count),
        }
    }

    /// A convolution with the ReLU behind it, or before a batch norm, which is then built with its bias.
    fn conv(&mut self, conv: &spec::Conv, behind: &[spec::LayerSpec]) -> ConvLayer {
        let spec::Conv { name, kernel, stride, padding, bias, .. } = conv;
        let relu = behind.first().is_some_and(|next| self.is_fused_relu(next));
        let (bias, normed) = (bias.then(|| self.bias(name)), norm_at_start(behind).is_some());
        self.bias_before = bias.filter(|_| normed);
        let conv = ConvParams { kernel: *kernel, stride: *stride, padding: padding_of(*padding) };
        ConvLayer { weight: self.weight(name), bias, conv, relu, normed }
    }

    /// A max pool, perhaps with the ReLU behind it.
    pub(super) fn max_pool(&self, pool: &spec::MaxPool, relu: bool) -> MaxPool {
        let &spec::MaxPool { kernel, stride, padding } = pool;
        let pool = PoolParams { kernel, stride, padding: padding_of(padding) };
        MaxPool { input: self.image(), pool, relu }
    }

    /// A residual layer whose branch ends in a batch norm, and the ReLU behind it.
    fn relu_residual(&mut self, spec::Residual { branch, shortcut }: &spec::Residual) -> ReluResidual {
        let norm = norm_at_end(branch).expect("the caller has looked");
        ReluResidual {
            before: self.branch(&branch[..branch.len() - norm.len()]).0,
            norm: self.batch_norm(norm, true),
            shortcut: self.branch(shortcut).0,
        }
    }

    /// A batch norm, with what shares its statistics, if anything does, and perhaps with the ReLU behind it.
    fn batch_norm(&mut self, layers: &[spec::LayerSpec], relu: bool) -> SyncBatchNorm {
        let (shared, norm) = match layers {
            [spec::LayerSpec::SharedStatistics(shared), spec::LayerSpec::BatchNorm(norm)] => {
                (Some(shared), norm)
            }
            [spec::LayerSpec::BatchNorm(norm)] => (None, norm),
            other => unreachable!("no batch norm: {other:?}"),
        };
        let norm = self.local_batch_norm(norm, relu);
        match (shared, self.groups.along(Axis::Data)) {
            (Some(shared), _) => self.sync_batch_norm(shared, norm),
            (None, replicas) if replicas.size() > 1 => {
                SyncBatchNorm { over_replicas: Some(replicas.clone()), ..SyncBatchNorm::local(norm) }
            }
            (None, _) => SyncBatchNorm::local(norm),
        }
    }

    fn local_batch_norm(
        &mut self,
        spec::BatchNorm { name, group, eps, .. }: &spec::BatchNorm,
        relu: bool,
    ) -> BatchNorm {
        BatchNorm {
            relu,
            bias_before: self.bias_before.take(),
            group: *group,
            eps: *eps,
            scale: self.weight(name),
            shift: self.bias(name),
            running_mean: BufferId(self.buffers[&format!("{name}.running_mean")]),
            running_variance: BufferId(self.buffers[&format!("{name}.running_var")]),
        }
    }

    fn sync_batch_norm(&self, shared: &spec::SharedStatistics, norm: BatchNorm) -> SyncBatchNorm {
        let within = shared.over.iter().find(|axis| **axis != Axis::Data);
        let in_sweep = within.map(|axis| self.groups.along(*axis).clone());
        let with_data: Vec<Axis> = std::iter::once(Axis::Data).chain(within.copied()).collect();
        SyncBatchNorm {
            norm,
            in_step: Some(self.groups.over(&shared.over).clone()),
            over_replicas: Some(self.groups.over(&with_data).clone()),
            shared: in_sweep
                .as_ref()
                .filter(|_| shared.shares_samples)
                .map(|group| (group.size(), group.rank())),
            in_sweep,
        }
    }

    /// Whether a layer is a ReLU that those before it may take over.
    fn is_fused_relu(&self, layer: &spec::LayerSpec) -> bool {
        let relu = spec::Activation::Relu;
        matches!(layer, spec::LayerSpec::Activation(kind) if *kind == relu) && !self.is_frozen(relu)
    }
}

/// The batch norm that layers begin with, and what shares its statistics.
fn norm_at_start(layers: &[spec::LayerSpec]) -> Option<&[spec::LayerSpec]> {
    match layers {
        [spec::LayerSpec::SharedStatistics(_), spec::LayerSpec::BatchNorm(_), ..] => Some(&layers[..2]),
        [spec::LayerSpec::BatchNorm(_), ..] => Some(&layers[..1]),
        _ => None,
    }
}

/// The batch norm that layers end in, likewise.
fn norm_at_end(layers: &[spec::LayerSpec]) -> Option<&[spec::LayerSpec]> {
    let ends = |len: usize| layers.len().checked_sub(len).and_then(|at| norm_at_start(&layers[at..]));
    ends(2).filter(|norm| norm.len() == 2).or_else(|| ends(1))
}
