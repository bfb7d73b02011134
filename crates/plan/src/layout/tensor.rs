//! Tensor parallelism (Shoeybi et al. 2019): linear layers cut by their outputs, then by their inputs, so that between the two
//! nothing is sent.
//!
//! | layers of the model | what a rank runs |
//! |---|---|
//! | linear, activations or attention, linear | `enter`, its columns, its channels or heads, its rows, `leave`, bias |
//! | the head | `enter`, its classes; the loss takes a maximum and a sum over ranks |
//! | an embedding | its rows, zeros for other ids, `leave` |
//! | another linear layer, a convolution | `enter`, its outputs, a gather of them |
//! | norms, positions, dropout, all else | the same on every rank |
//!
//! `enter` is nothing forward and a sum backward, `leave` a sum forward and nothing backward. With sequence-parallel norms
//! (Korthikanti et al. 2022) what lies between `leave` and `enter` is cut along the sequence: `enter` gathers it and `leave` sums and
//! cuts, and gradients of what is there are sums over ranks. A layer too small to be cut runs whole on every rank.

use std::collections::HashMap;
use std::ops::Range;

use super::{Piece, through};
use crate::error::Error;
use crate::mesh::Axis;
use crate::spec::{
    Along, Attention, Bias, Branches, Columns, Conv, Counted, Dropout, Embedding, Exchange, Join, Layer,
    Linear, Model, Move, Parameter, PositionEmbedding, Residual, Shape, TiedLinear, WeightOrder,
};

/// What one of several ranks along the tensor axis has.
pub(super) struct Shard {
    pub model: Model,
    pub parameters: Vec<Parameter>,
    /// Of each parameter its piece, and whether all who have the same have a summand of its gradient.
    pub held: Vec<(Piece, bool)>,
    pub classes: Option<Range<usize>>,
}

/// That of a rank.
pub(super) fn shard(
    model: &Model,
    whole: &[Parameter],
    ranks: usize,
    rank: usize,
    sequence: bool,
) -> Result<Shard, Error> {
    let mut sharder = Sharder { ranks, rank, sequence, held: HashMap::new(), classes: None };
    let (mut local, mut shape) = (model.clone(), model.input.shape());
    let last = model.blocks.len() - 1;
    for (i, block) in model.blocks.iter().enumerate() {
        local.blocks[i].layers = sharder.layers(&block.layers, shape, i == last)?;
        shape = through(&block.layers, shape);
    }
    let parameters = local.parameters();
    let held = parameters.iter().zip(whole).map(|(own, whole)| {
        debug_assert_eq!(
            own.name, whole.name,
            "a rank's model has the parameters of the whole, in their order"
        );
        let everything = || Held { piece: Piece::whole(&whole.shape), is_partial: false };
        let Held { piece, is_partial } = sharder.held.remove(&own.name).unwrap_or_else(everything);
        debug_assert_eq!(piece.shape(), own.shape, "{}", own.name);
        (piece, is_partial)
    });
    let held = held.collect();
    Ok(Shard { model: local, parameters, held, classes: sharder.classes })
}

/// Makes the layers of one rank.
struct Sharder {
    ranks: usize,
    rank: usize,
    sequence: bool,
    /// What the rank holds of a parameter, by name; of the others it is all, and its gradient the same on every rank.
    held: HashMap<String, Held>,
    classes: Option<Range<usize>>,
}

struct Held {
    piece: Piece,
    is_partial: bool,
}

/// A part of a layer that a linear layer opens and another closes.
struct Pair {
    /// Columns of what the opening layers give that are the rank's.
    opening: Vec<Range<usize>>,
    /// Whether other ranks have some of these columns too.
    repeated: bool,
    /// What stands behind the opening layer, where that makes only parts of the keys and values that the rank reads.
    gather: Option<Layer>,
    /// Columns of what the closing layer reads that are the rank's.
    closing: Range<usize>,
    /// The closing layer's place.
    end: usize,
}

impl Sharder {
    /// The layers of a rank for a row of layers that begins and ends with what every rank has.
    fn layers(&mut self, layers: &[Layer], mut shape: Shape, ends: bool) -> Result<Vec<Layer>, Error> {
        let (mut built, mut rest) = (Vec::new(), layers);
        while let Some(layer) = rest.first() {
            let is_head = ends && rest.len() == 1;
            if let [halo @ Layer::Halo(_), Layer::Conv(conv), ..] = rest
                && conv.output >= self.ranks
            {
                // What comes from neighbours stays beside the convolution, which goes on meanwhile.
                let own = self.part(conv.output);
                built.push(self.enter(shape));
                built.extend([halo.clone(), Layer::Conv(self.channels(conv, &own))]);
                built.push(self.exchange(Move::Gather(Along::Last), Move::Slice(Along::Last), conv.output));
                shape = through(&rest[..2], shape);
                rest = &rest[2..];
                continue;
            }
            let taken = match self.pair(rest, shape, ends)? {
                Some(pair) => {
                    self.run_pair(&pair, &rest[..=pair.end], shape, &mut built)?;
                    pair.end + 1
                }
                None => {
                    self.run_one(layer, shape, is_head, &mut built)?;
                    1
                }
            };
            shape = through(&rest[..taken], shape);
            rest = &rest[taken..];
        }
        Ok(built)
    }

    /// The pair that layers begin with, where they do and it can be cut.
    fn pair(&self, layers: &[Layer], shape: Shape, ends: bool) -> Result<Option<Pair>, Error> {
        if !opens(&layers[0]) {
            return Ok(None);
        }
        let between = layers[1..].iter().take_while(|layer| {
            matches!(layer, Layer::Activation(_) | Layer::Dropout(_) | Layer::Attention(_))
        });
        let end = 1 + between.count();
        let closes = matches!(layers.get(end), Some(Layer::Linear(_))) && !(ends && end + 1 == layers.len());
        if !closes {
            return Ok(None);
        }
        let width = through(&layers[..1], shape).last();
        let attention = layers[1..end].iter().find_map(|layer| match layer {
            Layer::Attention(attention) => Some(attention),
            _ => None,
        });
        let side_by_side = matches!(&layers[0], Layer::Branches(Branches { join: Join::Concat, .. }));
        match attention {
            Some(attention) => {
                let heads = self.heads(attention)?;
                if heads.repeated && !side_by_side {
                    let (opening, gather) = self.parts_of_keys(attention, &heads)?;
                    let (gather, closing) = (Some(gather), heads.queries);
                    return Ok(Some(Pair { opening, repeated: false, gather, closing, end }));
                }
                let (opening, repeated, closing) = (heads.columns, heads.repeated, heads.queries);
                Ok(Some(Pair { opening, repeated, gather: None, closing, end }))
            }
            None if side_by_side || width < self.ranks => Ok(None),
            None => {
                let own = self.part(width);
                Ok(Some(Pair {
                    opening: vec![own.clone()],
                    repeated: false,
                    gather: None,
                    closing: own,
                    end,
                }))
            }
        }
    }

    fn run_pair(
        &mut self,
        pair: &Pair,
        layers: &[Layer],
        mut shape: Shape,
        built: &mut Vec<Layer>,
    ) -> Result<(), Error> {
        built.push(self.enter(shape));
        let (opening, rest) = layers.split_first().expect("a pair has two layers");
        match opening {
            Layer::Linear(linear) => built.push(Layer::Linear(self.columns(linear, &pair.opening, false))),
            Layer::Branches(Branches { join, branches }) => {
                let mut first = 0;
                let mut branch = |layers: &Vec<Layer>| {
                    let [Layer::Linear(linear), rest @ ..] = &layers[..] else {
                        unreachable!("it was looked at")
                    };
                    let here = first..first + linear.output;
                    // Side by side each has its own columns; otherwise all have the same.
                    let (start, is_repeated) = match join {
                        Join::Concat => {
                            (std::mem::replace(&mut first, here.end), pair.repeated && here.start > 0)
                        }
                        Join::Sum | Join::Product => (0, false),
                    };
                    let own: Vec<Range<usize>> = pair
                        .opening
                        .iter()
                        .filter(|range| (start..start + linear.output).contains(&range.start))
                        .map(|range| range.start - start..range.end - start)
                        .collect();
                    let linear = Layer::Linear(self.columns(linear, &own, is_repeated));
                    std::iter::once(linear).chain(rest.iter().cloned()).collect()
                };
                let branches = branches.iter().map(&mut branch).collect();
                built.push(Layer::Branches(Branches { join: *join, branches }));
            }
            _ => unreachable!("nothing else opens a pair"),
        }
        built.extend(pair.gather.clone());
        shape = through(&layers[..1], shape);
        let (closing, between) = rest.split_last().expect("a pair has two layers");
        let mut own = &pair.opening;
        let queries = vec![pair.closing.clone()];
        for layer in between {
            built.push(match layer {
                Layer::Attention(Attention { heads, kv_heads, width }) => {
                    let each = width / heads;
                    // Of those that are repeated a rank reads one.
                    let kv_heads = self.part(*kv_heads).len().max(1);
                    own = &queries;
                    let (heads, width) = (pair.closing.len() / each, pair.closing.len());
                    Layer::Attention(Attention { heads, kv_heads, width })
                }
                Layer::Dropout(Dropout { rate, .. }) => {
                    let [Range { start, end }] = own[..] else {
                        return Err(self.conflict("but a dropout stands before an attention".into()));
                    };
                    let counted = Some(Counted { first: start, run: end - start, of: shape.last() });
                    Layer::Dropout(Dropout { rate: *rate, counted })
                }
                other => other.clone(),
            });
            shape = layer.output(shape).expect("the shapes were checked");
        }
        let Layer::Linear(linear) = closing else { unreachable!("it was looked at") };
        built.push(Layer::Linear(self.rows(linear, &pair.closing)));
        built.push(self.leave(shape));
        if linear.bias {
            let bias = Bias { name: linear.name.clone(), width: linear.output };
            self.whole(&format!("{}.bias", linear.name), &[linear.output]);
            built.push(Layer::Bias(bias));
        }
        Ok(())
    }

    fn run_one(
        &mut self,
        layer: &Layer,
        shape: Shape,
        is_head: bool,
        built: &mut Vec<Layer>,
    ) -> Result<(), Error> {
        let fits = |outputs: usize| outputs >= self.ranks;
        match layer {
            Layer::Linear(linear) if is_head && fits(linear.output) => {
                let own = self.part(linear.output);
                built.push(self.enter(shape));
                built.push(Layer::Linear(self.columns(linear, std::slice::from_ref(&own), false)));
                self.classes = Some(own);
            }
            Layer::TiedLinear(TiedLinear { weight, input, output }) if is_head && fits(*output) => {
                let own = self.part(*output);
                built.push(self.enter(shape));
                let (weight, input, output) = (weight.clone(), *input, own.len());
                built.push(Layer::TiedLinear(TiedLinear { weight, input, output }));
                self.classes = Some(own);
            }
            Layer::Linear(_) | Layer::TiedLinear(_) if is_head => {
                built.extend(self.gathered(shape));
                built.push(layer.clone());
            }
            Layer::Linear(linear) if fits(linear.output) && !self.cuts(shape) => {
                let own = self.part(linear.output);
                built.push(self.enter(shape));
                built.push(Layer::Linear(self.columns(linear, std::slice::from_ref(&own), false)));
                built.push(self.exchange(Move::Gather(Along::Last), Move::Slice(Along::Last), linear.output));
            }
            Layer::Conv(conv) if fits(conv.output) => {
                let own = self.part(conv.output);
                built.push(self.enter(shape));
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
                let own = self.part(embedding.vocab);
                let piece =
                    Piece::whole(&[embedding.vocab, embedding.width]).cut(0, std::slice::from_ref(&own));
                self.hold(&format!("{}.weight", embedding.name), piece, false);
                let (vocab, first) = (own.len(), own.start);
                built.push(Layer::Embedding(Embedding { vocab, first, ..embedding.clone() }));
                built.push(self.leave(layer.output(shape).expect("the shapes were checked")));
            }
            Layer::PositionEmbedding(positions) => {
                self.whole_of(layer);
                let first = if let (true, Shape::Sequence { seq, .. }) = (self.cuts(shape), shape) {
                    self.part(seq).start
                } else {
                    0
                };
                built.push(Layer::PositionEmbedding(PositionEmbedding { first, ..positions.clone() }));
            }
            Layer::Dropout(Dropout { rate, .. }) => {
                let counted = match shape {
                    Shape::Sequence { seq, width } if self.sequence => {
                        let own = self.part(seq);
                        Some(Counted { first: own.start * width, run: own.len() * width, of: seq * width })
                    }
                    _ => None,
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
                let (branch, shortcut) =
                    (self.layers(branch, shape, false)?, self.layers(shortcut, shape, false)?);
                built.push(Layer::Residual(Residual { branch, shortcut }));
            }
            Layer::Branches(Branches { join, branches }) => {
                let branches = branches
                    .iter()
                    .map(|branch| self.layers(branch, shape, false))
                    .collect::<Result<_, _>>()?;
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
    fn part(&self, extent: usize) -> Range<usize> {
        part(extent, self.ranks, self.rank)
    }

    /// Whether what every rank has in plain tensor parallelism is cut along the sequence here.
    fn cuts(&self, shape: Shape) -> bool {
        self.sequence && matches!(shape, Shape::Sequence { .. })
    }

    fn hold(&mut self, name: &str, piece: Piece, is_partial: bool) {
        self.held.insert(name.to_owned(), Held { piece, is_partial });
    }

    /// A parameter that every rank has, where activations are cut along the sequence.
    fn whole(&mut self, name: &str, shape: &[usize]) {
        self.hold(name, Piece::whole(shape), self.sequence);
    }

    fn whole_of(&mut self, layer: &Layer) {
        for parameter in layer.parameters() {
            self.whole(&parameter.name, &parameter.shape);
        }
    }

    /// Some outputs of a linear layer.
    fn columns(&mut self, linear: &Linear, own: &[Range<usize>], is_partial: bool) -> Linear {
        let Linear { name, input, output, order, .. } = linear;
        let (shape, dim) = match order {
            WeightOrder::OutIn => ([*output, *input], 0),
            WeightOrder::InOut => ([*input, *output], 1),
        };
        self.hold(&format!("{name}.weight"), Piece::whole(&shape).cut(dim, own), is_partial);
        if linear.bias {
            self.hold(&format!("{name}.bias"), Piece::whole(&[*output]).cut(0, own), is_partial);
        }
        Linear { output: own.iter().map(ExactSizeIterator::len).sum(), ..linear.clone() }
    }

    /// Some inputs of a linear layer, whose bias is added after the sum.
    fn rows(&mut self, linear: &Linear, own: &Range<usize>) -> Linear {
        let Linear { name, input, output, order, .. } = linear;
        let (shape, dim) = match order {
            WeightOrder::OutIn => ([*output, *input], 1),
            WeightOrder::InOut => ([*input, *output], 0),
        };
        let piece = Piece::whole(&shape).cut(dim, std::slice::from_ref(own));
        self.hold(&format!("{name}.weight"), piece, false);
        Linear { input: own.len(), bias: false, ..linear.clone() }
    }

    /// Some outputs of a convolution.
    fn channels(&mut self, conv: &Conv, own: &Range<usize>) -> Conv {
        let local = Conv { output: own.len(), ..conv.clone() };
        for parameter in Layer::Conv(conv.clone()).parameters() {
            let piece = Piece::whole(&parameter.shape).cut(0, std::slice::from_ref(own));
            self.hold(&parameter.name, piece, false);
        }
        local
    }

    /// The heads of a rank.
    fn heads(&self, attention: &Attention) -> Result<Heads, Error> {
        let &Attention { heads, kv_heads, width } = attention;
        let (each, group) = (width / heads, heads / kv_heads);
        if heads < self.ranks {
            return Err(self.conflict(format!("but an attention has {heads} heads")));
        }
        let (kv, queries) = if kv_heads >= self.ranks {
            let kv = self.part(kv_heads);
            (kv.clone(), kv.start * group..kv.end * group)
        } else {
            if !self.ranks.is_multiple_of(kv_heads) {
                return Err(self.conflict(format!(
                    "but the {kv_heads} heads of keys and values of an attention cannot be repeated evenly on them"
                )));
            }
            let sharers = self.ranks / kv_heads;
            if group < sharers {
                return Err(self.conflict(format!("but an attention has {heads} heads")));
            }
            let kv = self.rank / sharers;
            let own = part(group, sharers, self.rank % sharers);
            (kv..kv + 1, kv * group + own.start..kv * group + own.end)
        };
        let scaled =
            |range: &Range<usize>, first: usize| first + range.start * each..first + range.end * each;
        let columns = vec![scaled(&queries, 0), scaled(&kv, width), scaled(&kv, width + kv_heads * each)];
        Ok(Heads { repeated: kv_heads < self.ranks, queries: scaled(&queries, 0), columns })
    }

    /// Keys and values that several ranks read, made by one linear layer together with the queries. A weight has one owner for each of
    /// its columns, so each rank makes a part of all keys and of all values beside its queries; behind them stands a layer that
    /// gathers all and takes the rank's head. On the way back gradients of all who read a head are summed.
    fn parts_of_keys(
        &self,
        attention: &Attention,
        heads: &Heads,
    ) -> Result<(Vec<Range<usize>>, Layer), Error> {
        let [queries, keys, _] = &heads.columns[..] else { unreachable!("queries, keys and values") };
        let width = attention.width;
        let all = keys.len() * attention.kv_heads;
        if all < self.ranks {
            let few = format!("but the keys of an attention have {all} columns in one linear layer");
            return Err(self.conflict(few));
        }
        let own = self.part(all);
        let part = |first: usize| first + own.start..first + own.end;
        let opening = vec![queries.clone(), part(width), part(width + all)];
        let (made, head) = (queries.len() + 2 * own.len(), keys.start - width..keys.end - width);
        let take = |at: Range<usize>, of| Layer::Columns(Columns { at, of });
        let gathered = |first: usize| {
            let gather = self.exchange(Move::Gather(Along::Last), Move::ReduceScatter(Along::Last), all);
            vec![take(first..first + own.len(), made), gather, take(head.clone(), all)]
        };
        let first = queries.len();
        let branches = vec![vec![take(0..first, made)], gathered(first), gathered(first + own.len())];
        Ok((opening, Layer::Branches(Branches { join: Join::Concat, branches })))
    }

    fn exchange(&self, forward: Move, backward: Move, extent: usize) -> Layer {
        let parts = (0..self.ranks).map(|rank| part(extent, self.ranks, rank).len()).collect();
        Layer::Exchange(Exchange { axis: Axis::Tensor, forward, backward, parts, rank: self.rank })
    }

    /// Before a layer that is cut by its outputs.
    fn enter(&self, shape: Shape) -> Layer {
        match self.cuts(shape) {
            true => {
                let (forward, backward) =
                    (Move::Gather(Along::Sequence), Move::ReduceScatter(Along::Sequence));
                self.exchange(forward, backward, positions(shape))
            }
            false => self.exchange(Move::Nothing, Move::Sum, 0),
        }
    }

    /// Behind a layer that is cut by its inputs.
    fn leave(&self, shape: Shape) -> Layer {
        match self.cuts(shape) {
            true => {
                let (forward, backward) =
                    (Move::ReduceScatter(Along::Sequence), Move::Gather(Along::Sequence));
                self.exchange(forward, backward, positions(shape))
            }
            false => self.exchange(Move::Sum, Move::Nothing, 0),
        }
    }

    /// Before a layer that every rank runs on the whole sequence: all have the same gradient.
    fn gathered(&self, shape: Shape) -> Option<Layer> {
        let (forward, backward) = (Move::Gather(Along::Sequence), Move::Slice(Along::Sequence));
        self.cuts(shape).then(|| self.exchange(forward, backward, positions(shape)))
    }

    fn conflict(&self, problem: String) -> Error {
        Error::Conflict { field: "parallel.tensor".into(), problem: format!("is {}, {problem}", self.ranks) }
    }
}

/// The heads of one rank.
struct Heads {
    /// Columns of queries, keys and values in what the attention reads.
    columns: Vec<Range<usize>>,
    /// Columns of what it gives.
    queries: Range<usize>,
    /// Whether other ranks have the same keys and values.
    repeated: bool,
}

/// Whether a layer can be cut by its outputs.
fn opens(layer: &Layer) -> bool {
    match layer {
        Layer::Linear(_) => true,
        Layer::Branches(Branches { branches, .. }) => branches.iter().all(|branch| {
            matches!(&branch[..], [Layer::Linear(_), rest @ ..]
                if rest.iter().all(|layer| matches!(layer, Layer::Activation(_))))
        }),
        _ => false,
    }
}

/// The part of a rank: equal ones, but for one more in some.
pub(super) fn part(extent: usize, ranks: usize, rank: usize) -> Range<usize> {
    extent * rank / ranks..extent * (rank + 1) / ranks
}

fn positions(shape: Shape) -> usize {
    match shape {
        Shape::Sequence { seq, .. } => seq,
        other => unreachable!("only sequences are cut along the sequence, not {other}"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Cuts, Layout, LocalModel};
    use super::*;
    use crate::spec::presets::{Gpt, gpt, resnet8};
    use crate::spec::{Precision, Recompute};

    fn locals(model: &Model, tensor: usize, sequence: bool) -> Vec<LocalModel> {
        let cuts = Cuts { tensor, sequence, ..Cuts::NONE };
        Layout::new(model, &model.parameters(), cuts).unwrap().peers().to_vec()
    }

    /// Every element of every parameter is on one rank, or whole on all of them.
    fn covers(model: &Model, locals: &[LocalModel]) {
        for (id, parameter) in model.parameters().iter().enumerate() {
            let pieces: Vec<&Piece> = locals.iter().map(|local| &local.pieces[id]).collect();
            if pieces.iter().all(|piece| piece.is_whole()) {
                continue;
            }
            let mut places: Vec<usize> = pieces
                .iter()
                .flat_map(|piece| piece.runs().flat_map(|run| run.in_whole..run.in_whole + run.length))
                .collect();
            places.sort_unstable();
            assert_eq!(places, (0..parameter.elements() as usize).collect::<Vec<_>>(), "{}", parameter.name);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn shapes_fit_and_pieces_cover(
            heads in 1usize..7, each in 1usize..5, vocab in 2usize..40, ranks in 2usize..7, seq in 6usize..12, sequence: bool, tied: bool,
        ) {
            prop_assume!(heads >= ranks);
            let shape = Gpt { layers: 2, width: heads * each, heads, context: seq, vocab, tied, dropout: 0.1, ..Gpt::default() };
            let model = gpt("gpt", &shape);
            let locals = locals(&model, ranks, sequence);
            covers(&model, &locals);
            let mut flops = 0.0;
            for local in &locals {
                let names = |model: &Model| model.parameters().into_iter().map(|p| p.name).collect::<Vec<_>>();
                prop_assert_eq!(names(&local.model), names(&model));
                flops += local.model.flops(1).unwrap();
                for (parameter, piece) in local.model.parameters().iter().zip(&local.pieces) {
                    prop_assert_eq!(&parameter.shape, &piece.shape());
                }
                local.model.activation_bytes(3, Precision::F32, Recompute::None).unwrap();
            }
            let whole = model.flops(1).unwrap();
            // A head with fewer classes than ranks is on each of them.
            prop_assert!(vocab < ranks || (flops / whole - 1.0).abs() < 1e-9, "{flops} {whole}");
        }
    }

    /// Words of a row of layers, those inside residuals included.
    fn words(layers: &[Layer]) -> String {
        let word = |layer: &Layer| match layer {
            Layer::Residual(Residual { branch, .. }) => format!("({})", words(branch)),
            Layer::Exchange(exchange) => match (exchange.forward, exchange.backward) {
                (Move::Nothing, Move::Sum) => "enter".into(),
                (Move::Sum, Move::Nothing) => "leave".into(),
                (Move::Gather(Along::Sequence), Move::ReduceScatter(_)) => "gather".into(),
                (Move::ReduceScatter(_), Move::Gather(_)) => "scatter".into(),
                other => format!("{other:?}"),
            },
            other => other.kind().into(),
        };
        layers.iter().map(word).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn one_sum_forward_and_one_backward_for_attention_and_for_the_perceptron() {
        let model = gpt("gpt", &Gpt { dropout: 0.0, ..Gpt::default() });
        let local = &locals(&model, 2, false)[1];
        assert_eq!(
            words(&local.model.blocks[1].layers),
            "(layer_norm enter linear attention linear leave bias) (layer_norm enter linear gelu linear leave bias)"
        );
        assert_eq!(words(&local.model.blocks[0].layers), "embedding leave position");
        assert_eq!(words(&local.model.blocks[5].layers), "layer_norm enter tied_linear");
        assert_eq!(local.classes, Some(128..256));
        let local = &locals(&model, 2, true)[0];
        assert_eq!(
            words(&local.model.blocks[1].layers),
            "(layer_norm gather linear attention linear scatter bias) (layer_norm gather linear gelu linear scatter bias)"
        );
        let partial = local.parameters.iter().zip(&local.partial).filter(|(_, partial)| partial.tensor);
        assert!(
            partial
                .map(|(p, _)| &p.name)
                .all(|name| name.contains("ln") || name.ends_with(".c_proj.bias") || *name == "wpe.weight")
        );
    }

    #[test]
    fn a_convolution_is_cut_by_its_channels() {
        let model = resnet8((32, 32, 3), 10);
        let locals = locals(&model, 3, false);
        covers(&model, &locals);
        let all: u64 = locals.iter().map(|local| local.model.parameter_count()).sum();
        assert!(all < model.parameter_count() * 11 / 10, "{all}");
    }

    #[test]
    fn too_many_ranks_for_the_heads_are_refused() {
        let model = gpt("gpt", &Gpt::default());
        let cuts = Cuts { tensor: 8, ..Cuts::NONE };
        let error = Layout::new(&model, &model.parameters(), cuts).unwrap_err().to_string();
        assert!(error.contains("parallel.tensor") && error.contains("4 heads"), "{error}");
    }
}
