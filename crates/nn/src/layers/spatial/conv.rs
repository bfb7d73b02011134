//! A convolution over a tile, while the halo is on its way.
//!
//! A convolution is linear in its image: the output is what the local tile makes, zeros around it, plus what
//! each neighbour's pixels add to the few outputs whose windows see them. The first is nearly all of the work
//! and needs no message. Nothing is computed twice, and nothing is copied but the halo: each contribution is
//! a convolution of its own with padding where its pixels end. Backwards the gradients of the halo are made
//! first and sent; those of tile and weight are made while they travel.

use espalier_plan::tiles::{Contribution, Region, SlidingWindow};
use espalier_tensor::ops::conv::{self, ConvParams};
use espalier_tensor::ops::elementwise::add_into;
use espalier_tensor::ops::reduce::sum_rows;
use espalier_tensor::ops::region;
use espalier_tensor::{Category, Tensor};

use super::HaloComm;
use super::halo::PixelFormat;
use crate::Result;
use crate::layers::{BackwardContext, ForwardContext, Layer, WeightGradients, padding_of};
use crate::weights::ParameterId;

/// A convolution of an image that is tiled over ranks.
#[derive(Debug)]
pub struct TiledConv {
    weight: ParameterId,
    bias: Option<ParameterId>,
    halo: HaloComm,
    /// What the local tile makes.
    tile: ConvRegion,
    /// What each neighbour's pixels add, where any come from it.
    from: Vec<Option<ConvRegion>>,
}

/// Some pixels, and the outputs that they contribute to.
#[derive(Debug)]
struct ConvRegion {
    /// All pixels that are there, and those of them that windows see: counted from the first.
    size: [usize; 2],
    visible: Region,
    /// Counted from the first of the rank's outputs.
    output: Region,
    conv: ConvParams,
}

impl TiledConv {
    /// With the kernel, stride and padding of the halo's windows.
    pub fn new(weight: ParameterId, bias: Option<ParameterId>, halo: HaloComm) -> TiledConv {
        let plan = halo.plan();
        let conv_region = |pixels: &Region| {
            let Contribution { input, output, padding } = plan.contribution(pixels);
            let SlidingWindow { kernel, stride, .. } = plan.window;
            (!output.is_empty()).then(|| ConvRegion {
                size: pixels.size(),
                visible: input.within(pixels),
                output: output.within(&plan.output),
                conv: ConvParams { kernel, stride, padding: padding_of(padding) },
            })
        };
        let tile =
            conv_region(&plan.own).expect("an output belongs to the tile under the middle of its window");
        // What is received at all is visible: the outermost of it to the outermost window.
        let from = plan.neighbours.iter().map(|peer| conv_region(&peer.takes)).collect();
        TiledConv { weight, bias, halo, tile, from }
    }
}

impl ConvRegion {
    /// Of its pixels those that windows see.
    fn visible(&self, pixels: &Tensor) -> Result<Tensor> {
        if self.visible == Region::all(self.size) {
            return Ok(pixels.clone());
        }
        let Region { rows, columns } = self.visible.clone();
        Ok(region::take(pixels, rows, columns, Category::Workspace)?)
    }

    /// Of the gradients of all outputs those that its pixels contribute to.
    fn gradients(&self, dy: &Tensor) -> Result<Tensor> {
        let Region { rows, columns } = self.output.clone();
        Ok(region::take(dy, rows, columns, Category::Workspace)?)
    }

    /// The gradient of its pixels from that of its outputs.
    fn input_gradient(&self, dy: &Tensor, w: &Tensor) -> Result<Tensor> {
        let (batch, c) = (dy.shape()[0], w.width());
        let [rows, columns] = self.visible.size();
        let dx = conv::backward_input(dy, w, self.conv, &[batch, rows, columns, c])?;
        if self.visible == Region::all(self.size) {
            return Ok(dx);
        }
        let mut all = PixelFormat::of(&dx).zeros(&Region::all(self.size), Category::Transient)?;
        region::put(&mut all, self.visible.first(), &dx)?;
        Ok(all)
    }
}

/// Leaves its tile and what came from the neighbours, in this order.
impl Layer for TiledConv {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        let in_flight = self.halo.start_forward(&x)?;
        let w = ctx.weights.get(self.weight);
        let bias = self.bias.map(|id| ctx.weights.get(id));
        let mut y = conv::forward(&self.tile.visible(&x)?, w, bias, self.tile.conv)?;
        ctx.stash.push(x);
        let received = in_flight.wait()?;
        for (conv_region, (_, pixels)) in self.from.iter().flatten().zip(received) {
            let added = conv::forward(&conv_region.visible(&pixels)?, w, None, conv_region.conv)?;
            region::add(&mut y, conv_region.output.first(), &added)?;
            ctx.stash.push(pixels);
        }
        Ok(y)
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, needs_dx: bool) -> Result<Option<Tensor>> {
        let w = ctx.weights.get(self.weight);
        // Of each neighbour that sent pixels: these, and the gradients of the outputs that they contribute to.
        let mut halo = Vec::new();
        for conv_region in self.from.iter().flatten().rev() {
            halo.push((conv_region, conv_region.visible(&ctx.stash.pop())?, conv_region.gradients(&dy)?));
        }
        halo.reverse();
        let x = ctx.stash.pop();
        let mut in_flight = None;
        if needs_dx {
            let halo_gradients = halo.iter().map(|(conv_region, _, dy)| conv_region.input_gradient(dy, w));
            in_flight =
                Some(self.halo.start_backward(halo_gradients.collect::<Result<_>>()?, PixelFormat::of(&x))?);
        }
        let dx = needs_dx.then(|| self.tile.input_gradient(&dy, w)).transpose()?;

        let (bias, ids) = (self.bias, [self.weight].into_iter().chain(self.bias).collect::<Vec<_>>());
        let tile = (self.tile.conv, self.tile.visible(&x)?, dy);
        let halo: Vec<_> =
            halo.into_iter().map(|(conv_region, pixels, dy)| (conv_region.conv, pixels, dy)).collect();
        let all = [&tile].into_iter().chain(&halo);
        let reads: Vec<Tensor> = all.flat_map(|(_, pixels, dy)| [pixels.clone(), dy.clone()]).collect();
        let make = move |_| {
            let (conv, pixels, dy) = tile;
            let mut weight = conv::backward_weight(&pixels, &dy, conv)?;
            for (conv, pixels, dy) in halo {
                add_into(&mut weight, &conv::backward_weight(&pixels, &dy, conv)?)?;
            }
            let bias = bias.map(|_| sum_rows(&dy, Category::Workspace)).transpose()?;
            Ok([weight].into_iter().chain(bias).collect())
        };
        ctx.sink.accept(&ids, WeightGradients::new(reads, make))?;

        let (Some(mut dx), Some(in_flight)) = (dx, in_flight) else { return Ok(None) };
        for (index, gradient) in in_flight.wait()? {
            let at = self.halo.neighbour(index).gives.within(&self.halo.plan().own);
            region::add(&mut dx, at.first(), &gradient)?;
        }
        Ok(Some(dx))
    }
}
