//! Two linear layers with activations, dropout or an attention between them: the first cut by its outputs, the second by its inputs,
//! so that between the two nothing is sent. An attention is cut by whole heads.

use std::ops::Range;

use super::super::through;
use super::Sharder;
use crate::error::Error;
use crate::spec::{Along, Attention, Bias, Branches, Columns, Counted, Dropout, Join, Layer, Move, Shape};
use crate::split::split;

/// A part of a layer that a linear layer opens and another closes.
pub(super) struct Pair {
    /// Columns of what the opening layers give that are the rank's.
    opening: Vec<Range<usize>>,
    /// Whether other ranks have some of these columns too.
    repeated: bool,
    /// What stands behind the opening layer, where that makes only parts of the keys and values that the rank reads.
    gather: Option<Layer>,
    /// Columns of what the closing layer reads that are the rank's.
    closing: Range<usize>,
    /// The closing layer's place.
    pub end: usize,
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

impl Sharder<'_> {
    /// The pair that layers begin with, where they do and it can be cut.
    pub(super) fn pair(&self, layers: &[Layer], shape: Shape, ends: bool) -> Result<Option<Pair>, Error> {
        let is_plain = |layer: &Layer| self.part.linear.is_plain(layer);
        if !opens(&layers[0], &is_plain) {
            return Ok(None);
        }
        let between = layers[1..].iter().take_while(|layer| {
            matches!(layer, Layer::Activation(_) | Layer::Dropout(_) | Layer::Attention(_))
        });
        let end = 1 + between.count();
        let is_last = ends && end + 1 == layers.len();
        let closes =
            layers.get(end).is_some_and(|layer| matches!(layer, Layer::Linear(_)) && !is_plain(layer))
                && !is_last;
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
            None if side_by_side || width < self.part.ranks => Ok(None),
            None => {
                let own = self.own(width);
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

    pub(super) fn run_pair(
        &mut self,
        pair: &Pair,
        layers: &[Layer],
        mut shape: Shape,
        built: &mut Vec<Layer>,
    ) -> Result<(), Error> {
        built.extend(self.enter(shape));
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
                    let kv_heads = self.own(*kv_heads).len().max(1);
                    own = &queries;
                    let (heads, width) = (pair.closing.len() / each, pair.closing.len());
                    Layer::Attention(Attention { heads, kv_heads, width })
                }
                Layer::Dropout(Dropout { rate, .. }) => {
                    let [Range { start, end }] = own[..] else {
                        return Err(self.conflict("but a dropout stands before an attention".into()));
                    };
                    let counted = Some(Counted::Runs { first: start, run: end - start, of: shape.last() });
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

    /// The heads of a rank.
    fn heads(&self, attention: &Attention) -> Result<Heads, Error> {
        let &Attention { heads, kv_heads, width } = attention;
        let (each, group) = (width / heads, heads / kv_heads);
        if heads < self.part.ranks {
            return Err(self.conflict(format!("but an attention has {heads} heads")));
        }
        let (kv, queries) = if kv_heads >= self.part.ranks {
            let kv = self.own(kv_heads);
            (kv.clone(), kv.start * group..kv.end * group)
        } else {
            if !self.part.ranks.is_multiple_of(kv_heads) {
                return Err(self.conflict(format!(
                    "but the {kv_heads} heads of keys and values of an attention cannot be repeated evenly on them"
                )));
            }
            let sharers = self.part.ranks / kv_heads;
            if group < sharers {
                return Err(self.conflict(format!("but an attention has {heads} heads")));
            }
            let kv = self.part.rank / sharers;
            let own = split(group, sharers, self.part.rank % sharers);
            (kv..kv + 1, kv * group + own.start..kv * group + own.end)
        };
        let scaled =
            |range: &Range<usize>, first: usize| first + range.start * each..first + range.end * each;
        let columns = vec![scaled(&queries, 0), scaled(&kv, width), scaled(&kv, width + kv_heads * each)];
        Ok(Heads { repeated: kv_heads < self.part.ranks, queries: scaled(&queries, 0), columns })
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
        if all < self.part.ranks {
            let few = format!("but the keys of an attention have {all} columns in one linear layer");
            return Err(self.conflict(few));
        }
        let own = self.own(all);
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
}

/// Whether a layer can be cut by its outputs.
fn opens(layer: &Layer, is_plain: &dyn Fn(&Layer) -> bool) -> bool {
    match layer {
        Layer::Linear(_) => !is_plain(layer),
        Layer::Branches(Branches { branches, .. }) => branches.iter().all(|branch| {
            matches!(&branch[..], [linear @ Layer::Linear(_), rest @ ..]
                if !is_plain(linear) && rest.iter().all(|layer| matches!(layer, Layer::Activation(_))))
        }),
        _ => false,
    }
}
