//! Two linear layers with activations, dropout or an attention between them: the first cut by its outputs,
//! the second by its inputs, so that between the two nothing is sent. An attention is cut by whole heads.

use std::ops::Range;

use super::super::through;
use super::TensorSharder;
use crate::error::Error;
use crate::spec::{
    BranchJoin, Branches, CollectiveOp, DropoutIndices, FeatureSlice, HeadShard, LayerSpec, Shape, ShardDim,
    TensorRole,
};

/// A part of a layer that a linear layer opens and another closes.
pub(super) struct Pair {
    /// Columns of what the opening layers give that are the rank's.
    opening: Vec<Range<usize>>,
    /// Whether other ranks have some of these columns too.
    repeated: bool,
    /// What stands behind the opening layer, where that makes only parts of the keys and values that the rank
    /// reads.
    gather: Option<LayerSpec>,
    /// Columns of what the closing layer reads that are the rank's.
    closing: Range<usize>,
    /// The closing layer's place.
    pub end: usize,
}

impl TensorSharder<'_> {
    /// The pair that layers begin with, where they do and it can be cut.
    pub(super) fn pair(&self, layers: &[LayerSpec], shape: Shape, ends: bool) -> Result<Option<Pair>, Error> {
        let is_plain = |layer: &LayerSpec| self.tensor_split.linear.is_plain(layer);
        if !opens(&layers[0], &is_plain) {
            return Ok(None);
        }
        let between = layers[1..].iter().take_while(|layer| layer.properties().tensor_role.is_between());
        let end = 1 + between.count();
        let is_last = ends && end + 1 == layers.len();
        let closes = layers.get(end).is_some_and(|layer| pairs(layer) && !is_plain(layer)) && !is_last;
        if !closes {
            return Ok(None);
        }
        let width = through(&layers[..1], shape).last();
        let side_by_side =
            matches!(&layers[0], LayerSpec::Branches(Branches { join: BranchJoin::Concat, .. }));
        match layers[1..end].iter().find_map(|layer| self.heads(layer)) {
            Some(heads) => {
                let heads = heads?;
                if heads.repeated && !side_by_side {
                    let (opening, gather) = self.kv_ranges(&heads)?;
                    let (gather, closing) = (Some(gather), heads.gives);
                    return Ok(Some(Pair { opening, repeated: false, gather, closing, end }));
                }
                let (opening, repeated, closing) = (heads.reads.to_vec(), heads.repeated, heads.gives);
                Ok(Some(Pair { opening, repeated, gather: None, closing, end }))
            }
            None if side_by_side || width < self.tensor_split.ranks => Ok(None),
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
        layers: &[LayerSpec],
        mut shape: Shape,
        built: &mut Vec<LayerSpec>,
    ) -> Result<(), Error> {
        built.extend(self.enter(shape));
        let (opening, rest) = layers.split_first().expect("a pair has two layers");
        match opening {
            LayerSpec::Branches(Branches { join, branches }) => {
                let mut first = 0;
                let mut branch = |layers: &Vec<LayerSpec>| {
                    let (linear, rest) = layers.split_first().expect("it was looked at");
                    let outputs = through(std::slice::from_ref(linear), shape).last();
                    let here = first..first + outputs;
                    // Side by side each has its own columns; otherwise all have the same.
                    let (start, is_repeated) = match join {
                        BranchJoin::Concat => {
                            (std::mem::replace(&mut first, here.end), pair.repeated && here.start > 0)
                        }
                        BranchJoin::Sum | BranchJoin::Product => (0, false),
                    };
                    let own: Vec<Range<usize>> = pair
                        .opening
                        .iter()
                        .filter(|range| (start..start + outputs).contains(&range.start))
                        .map(|range| range.start - start..range.end - start)
                        .collect();
                    let linear = self.split_outputs(linear, &own, is_repeated);
                    std::iter::once(linear).chain(rest.iter().cloned()).collect()
                };
                let branches = branches.iter().map(&mut branch).collect();
                built.push(LayerSpec::Branches(Branches { join: *join, branches }));
            }
            linear => built.push(self.split_outputs(linear, &pair.opening, false)),
        }
        built.extend(pair.gather.clone());
        shape = through(&layers[..1], shape);
        let (closing, between) = rest.split_last().expect("a pair has two layers");
        let mut own = &pair.opening;
        let queries = vec![pair.closing.clone()];
        for layer in between {
            let entry = layer.description();
            built.push(if let Some(heads) = self.heads(layer) {
                own = &queries;
                heads?.layer
            } else {
                let Range { start, end } = own[0];
                let elements = DropoutIndices::Runs { first: start, run: end - start, of: shape.last() };
                match entry.counting(elements) {
                    Some(_) if own.len() > 1 => {
                        return Err(
                            self.conflict(format!("but a {} stands before an attention", entry.word()))
                        );
                    }
                    counting => counting.unwrap_or_else(|| layer.clone()),
                }
            });
            shape = layer.output(shape).expect("the shapes were checked");
        }
        self.split_inputs(closing, &pair.closing, shape, built);
        Ok(())
    }

    /// The heads of the rank, where a layer has heads.
    fn heads(&self, layer: &LayerSpec) -> Option<Result<HeadShard, Error>> {
        let heads = layer.description().split_heads(self.tensor_split.ranks, self.tensor_split.rank)?;
        Some(heads.map_err(|few| self.conflict(few)))
    }

    /// Keys and values that several ranks read, made by one linear layer together with the queries. A weight
    /// has one owner for each of its columns, so each rank makes a part of all keys and of all values beside
    /// its queries; behind them stands a layer that gathers all and takes the rank's head. On the way back
    /// gradients of all who read a head are summed.
    fn kv_ranges(&self, heads: &HeadShard) -> Result<(Vec<Range<usize>>, LayerSpec), Error> {
        let ([queries, keys, _], [width, all]) = (&heads.reads, heads.of);
        if all < self.tensor_split.ranks {
            let few = format!("but the keys of an attention have {all} columns in one linear layer");
            return Err(self.conflict(few));
        }
        let own = self.own(all);
        let part = |first: usize| first + own.start..first + own.end;
        let opening = vec![queries.clone(), part(width), part(width + all)];
        let (made, head) = (queries.len() + 2 * own.len(), keys.start - width..keys.end - width);
        let take = |at: Range<usize>, of| LayerSpec::FeatureSlice(FeatureSlice { at, of });
        let gathered = |first: usize| {
            let gather = self.exchange(
                CollectiveOp::AllGather(ShardDim::Last),
                CollectiveOp::ReduceScatter(ShardDim::Last),
                all,
            );
            vec![take(first..first + own.len(), made), gather, take(head.clone(), all)]
        };
        let first = queries.len();
        let branches = vec![vec![take(0..first, made)], gathered(first), gathered(first + own.len())];
        Ok((opening, LayerSpec::Branches(Branches { join: BranchJoin::Concat, branches })))
    }
}

fn pairs(layer: &LayerSpec) -> bool {
    layer.properties().tensor_role == TensorRole::ColumnOrRowParallel
}

/// Whether a layer can be cut by its outputs: one, or several side by side with nothing but elements'
/// functions behind them.
fn opens(layer: &LayerSpec, is_plain: &dyn Fn(&LayerSpec) -> bool) -> bool {
    match layer {
        LayerSpec::Branches(Branches { branches, .. }) => branches.iter().all(|branch| {
            let is_elementwise =
                |layer: &LayerSpec| layer.properties().tensor_role == TensorRole::Elementwise;
            matches!(&branch[..], [first, rest @ ..]
                if pairs(first) && !is_plain(first) && rest.iter().all(is_elementwise))
        }),
        layer => pairs(layer) && !is_plain(layer),
    }
}
