//! Tensor parallelism (Shoeybi et al. 2019): linear layers cut by their outputs, then by their inputs, so that between the two
//! nothing is sent.
//!
//! | layers of the model | what a rank runs |
//! |---|---|
//! | linear, activations or attention, linear | `enter`, its columns, its channels or heads, its rows, `leave`, bias |
//! | the head | `enter`, its classes; the loss takes a maximum and a sum over ranks |
//! | an embedding | its rows, zeros for other ids, `leave` |
//! | another linear layer, or any that is to be plain; a convolution | `enter`, its outputs, a gather of them |
//! | norms, positions, dropout, all else | the same on every rank |
//!
//! `enter` is nothing forward and a sum backward, `leave` a sum forward and nothing backward. Where nothing before a layer is trained
//! nobody wants that gradient, and there is no `enter`. With sequence-parallel norms
//! (Korthikanti et al. 2022) what lies between `leave` and `enter` is cut along the sequence: `enter` gathers it and `leave` sums and
//! cuts, and gradients of what is there are sums over ranks. A layer too small to be cut runs whole on every rank.

mod exchanges;
mod held;
mod pair;
mod route;

use std::collections::HashMap;
use std::ops::Range;

use self::exchanges::positions;
use self::held::Held;
pub(super) use self::route::follow;
use super::{Classes, LinearForm, Shard, through};
use crate::error::Error;
use crate::mesh::Axis;
use crate::spec::{
    Along, Branches, Counted, Dropout, Embedding, Layer, Model, Move, Parameter, PositionEmbedding, Residual,
    Shape, TiedLinear,
};
use crate::split::split;

/// What one of several ranks along the tensor axis has.
pub(super) struct Sharded {
    pub model: Model,
    pub parameters: Vec<Parameter>,
    /// Of each parameter its shard, and whether all who have the same have a summand of its gradient.
    pub held: Vec<(Shard, bool)>,
    pub classes: Option<Classes>,
}

/// Which of the ranks along an axis one is, and how they cut.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part<'a> {
    pub axis: Axis,
    pub ranks: usize,
    pub rank: usize,
    /// Whether what lies between layers that are cut is cut along the sequence.
    pub sequence: bool,
    /// How linear layers follow each other.
    pub linear: &'a LinearForm,
}

/// That of a rank.
pub(super) fn shard(model: &Model, whole: &[Parameter], part: Part<'_>) -> Result<Sharded, Error> {
    let mut sharder = Sharder::new(part);
    let (mut local, mut shape) = (model.clone(), model.input.shape());
    let last = model.blocks.len() - 1;
    for (i, block) in model.blocks.iter().enumerate() {
        local.blocks[i].layers = sharder.layers(&block.layers, shape, i == last)?;
        shape = through(&block.layers, shape);
    }
    Ok(finish(sharder, local, whole))
}

/// What a rank has whose layers were made.
fn finish(mut sharder: Sharder<'_>, local: Model, whole: &[Parameter]) -> Sharded {
    let parameters = local.parameters();
    let held = parameters.iter().zip(whole).map(|(own, whole)| {
        debug_assert_eq!(
            own.name, whole.name,
            "a rank's model has the parameters of the whole, in their order"
        );
        let everything = || Held { shard: Shard::full(&whole.shape), is_partial: false };
        let Held { shard, is_partial } = sharder.held.remove(&own.name).unwrap_or_else(everything);
        debug_assert_eq!(shard.shape(), own.shape, "{}", own.name);
        (shard, is_partial)
    });
    let held = held.collect();
    Sharded { model: local, parameters, held, classes: sharder.classes }
}

/// Makes the layers of one rank.
struct Sharder<'a> {
    part: Part<'a>,
    /// Whether a layer before the place reached is trained: what comes behind it has a gradient.
    trained: bool,
    /// What the rank holds of a parameter, by name; of the others it is all, and its gradient the same on every rank.
    held: HashMap<String, Held>,
    classes: Option<Classes>,
}

impl Sharder<'_> {
    fn new(part: Part<'_>) -> Sharder<'_> {
        Sharder { part, trained: false, held: HashMap::new(), classes: None }
    }

    /// The layers of a rank for a row of layers that begins and ends with what every rank has.
    fn layers(&mut self, layers: &[Layer], mut shape: Shape, ends: bool) -> Result<Vec<Layer>, Error> {
        let (mut built, mut rest) = (Vec::new(), layers);
        while let Some(layer) = rest.first() {
            let is_head = ends && rest.len() == 1;
            let taken = if let [halo @ Layer::Halo(_), Layer::Conv(conv), ..] = rest
                && conv.output >= self.part.ranks
            {
                // What comes from neighbours stays beside the convolution, which goes on meanwhile.
                let own = self.own(conv.output);
                built.extend(self.enter(shape));
                built.extend([halo.clone(), Layer::Conv(self.channels(conv, &own))]);
                built.push(self.exchange(Move::Gather(Along::Last), Move::Slice(Along::Last), conv.output));
                2
            } else if let Some(pair) = self.pair(rest, shape, ends)? {
                self.run_pair(&pair, &rest[..=pair.end], shape, &mut built)?;
                pair.end + 1
            } else {
                self.run_one(layer, shape, is_head, &mut built)?;
                1
            };
            shape = through(&rest[..taken], shape);
            self.trained |= rest[..taken].iter().any(|layer| !layer.parameters().is_empty());
            rest = &rest[taken..];
        }
        Ok(built)
    }

    /// Ways that part here: what one of them trains is not before the others.
    fn ways<'a>(
        &mut self,
        ways: impl IntoIterator<Item = &'a Vec<Layer>>,
        shape: Shape,
    ) -> Result<Vec<Vec<Layer>>, Error> {
        let before = self.trained;
        let ways = ways.into_iter().map(|way| {
            self.trained = before;
            self.layers(way, shape, false)
        });
        ways.collect()
    }

    fn run_one(
        &mut self,
        layer: &Layer,
        shape: Shape,
        is_head: bool,
        built: &mut Vec<Layer>,
    ) -> Result<(), Error> {
        let fits = |outputs: usize| outputs >= self.part.ranks;
        let is_head = is_head && !self.part.linear.is_plain(layer);
        match layer {
            Layer::Linear(linear) if is_head && fits(linear.output) => {
                let own = self.own(linear.output);
                built.extend(self.enter(shape));
                built.push(Layer::Linear(self.columns(linear, std::slice::from_ref(&own), false)));
                self.classes = Some(Classes { axis: self.part.axis, ranks: self.part.ranks, own });
            }
            Layer::TiedLinear(TiedLinear { weight, input, output }) if is_head && fits(*output) => {
                let own = self.own(*output);
                built.extend(self.enter(shape));
                let (weight, input, output) = (weight.clone(), *input, own.len());
                built.push(Layer::TiedLinear(TiedLinear { weight, input, output }));
                self.classes = Some(Classes { axis: self.part.axis, ranks: self.part.ranks, own });
            }
            Layer::Linear(_) | Layer::TiedLinear(_) if is_head => {
                built.extend(self.gathered(shape));
                built.push(layer.clone());
            }
            Layer::Linear(linear) if fits(linear.output) && !self.cuts(shape) => {
                let own = self.own(linear.output);
                built.extend(self.enter(shape));
                built.push(Layer::Linear(self.columns(linear, std::slice::from_ref(&own), false)));
                built.push(self.exchange(Move::Gather(Along::Last), Move::Slice(Along::Last), linear.output));
            }
            Layer::TiedLinear(TiedLinear { weight, input, output }) if fits(*output) && !self.cuts(shape) => {
                let own = self.own(*output);
                built.extend(self.enter(shape));
                let (weight, input) = (weight.clone(), *input);
                built.push(Layer::TiedLinear(TiedLinear { weight, input, output: own.len() }));
                built.push(self.exchange(Move::Gather(Along::Last), Move::Slice(Along::Last), *output));
            }
            Layer::Conv(conv) if fits(conv.output) => {
                let own = self.own(conv.output);
                built.extend(self.enter(shape));
                built.push(Layer::Conv(self.channels(conv, &own)));
                built.push(self.exchange(Move::Gather(Along::Last), Move::Slice(Along::Last), conv.output));
            }
            Layer::Embedding(embedding) if !fits(embedding.vocab) => {
                let after = layer.output(shape).expect("the shapes were checked");
                built.push(layer.clone());
                if self.cuts(after) {
                    let (forward, backward) = (Move::Slice(Along::Sequence), Move::Gather(Along::Sequence));
                    built.push(self.exchange(forward, backward, positions(after)));
                }
            }
            Layer::Embedding(embedding) => {
                let own = self.own(embedding.vocab);
                let shard =
                    Shard::full(&[embedding.vocab, embedding.width]).narrow(0, std::slice::from_ref(&own));
                self.hold(&format!("{}.weight", embedding.name), shard, false);
                let (vocab, first) = (own.len(), own.start);
                built.push(Layer::Embedding(Embedding { vocab, first, ..embedding.clone() }));
                built.push(self.leave(layer.output(shape).expect("the shapes were checked")));
            }
            Layer::PositionEmbedding(positions) => {
                self.whole_of(layer);
                let first = if let (true, Shape::Sequence { seq, .. }) = (self.cuts(shape), shape) {
                    self.own(seq).start
                } else {
                    0
                };
                built.push(Layer::PositionEmbedding(PositionEmbedding { first, ..positions.clone() }));
            }
            Layer::Dropout(Dropout { rate, counted }) => {
                let counted = match shape {
                    Shape::Sequence { seq, width } if self.part.sequence => {
                        let own = self.own(seq);
                        Some(Counted::Runs {
                            first: own.start * width,
                            run: own.len() * width,
                            of: seq * width,
                        })
                    }
                    // Every rank along this axis has all of it; of an image perhaps a tile, which is counted already.
                    _ => *counted,
                };
                built.push(Layer::Dropout(Dropout { rate: *rate, counted }));
            }
            Layer::Attention(_) if self.cuts(shape) => {
                built.extend(self.gathered(shape));
                built.push(layer.clone());
                let seq = positions(shape);
                built.push(self.exchange(Move::Slice(Along::Sequence), Move::Gather(Along::Sequence), seq));
            }
            Layer::Residual(Residual { branch, shortcut }) => {
                let mut ways = self.ways([branch, shortcut], shape)?.into_iter();
                let mut next = || ways.next().expect("two ways");
                built.push(Layer::Residual(Residual { branch: next(), shortcut: next() }));
            }
            Layer::Branches(Branches { join, branches }) => {
                let branches = self.ways(branches, shape)?;
                built.push(Layer::Branches(Branches { join: *join, branches }));
            }
            _ => {
                if self.cuts(shape) {
                    self.whole_of(layer);
                }
                built.push(layer.clone());
            }
        }
        Ok(())
    }

    /// Which of so many a rank has: equal parts, but for one more in some.
    fn own(&self, extent: usize) -> Range<usize> {
        split(extent, self.part.ranks, self.part.rank)
    }

    fn conflict(&self, problem: String) -> Error {
        Error::Conflict {
            field: "parallel.tensor".into(),
            problem: format!("is {}, {problem}", self.part.ranks),
        }
    }
}

#[cfg(test)]
mod tests;
