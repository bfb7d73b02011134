//! Two linear layers with activations, dropout or an attention between them: the first split by its outputs,
//! the second by its inputs, so that between the two nothing is sent. An attention is split by whole heads.

use std::ops::Range;

use super::super::through;
use super::TensorSharder;
use crate::error::Error;
use crate::spec::{
    BranchJoin, Branches, CollectiveOp, DropoutIndices, FeatureSlice, HeadShard, LayerSpec, Shape, ShardDim,
    TensorRole,
};

/// Consecutive layers that a linear layer opens and another closes.
pub(super) struct Pair {
    /// Features of what the opening layers give that are the rank's.
    opening: Vec<Range<usize>>,
    /// Whether other ranks have some of these features too.
    repeated: bool,
    /// What stands behind the opening layer, where that makes only slices of the keys and values that the
    /// rank reads.
    gather: Option<LayerSpec>,
    /// Features of what the closing layer reads that are the rank's.
    closing: Range<usize>,
    /// The closing layer's index.
    pub end: usize,
}

impl TensorSharder<'_> {
    /// The pair that layers begin with, where they do and it can be split.
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
        let concatenated =
            matches!(&layers[0], LayerSpec::Branches(Branches { join: BranchJoin::Concat, .. }));
        match layers[1..end].iter().find_map(|layer| self.heads(layer)) {
            Some(heads) => {
                let heads = heads?;
                if heads.repeated && !concatenated {
                    let (opening, gather) = self.kv_ranges(&heads)?;
                    let (gather, closing) = (Some(gather), heads.gives);
                    return Ok(Some(Pair { opening, repeated: false, gather, closing, end }));
                }
                let (opening, repeated, closing) = (heads.reads.to_vec(), heads.repeated, heads.gives);
                Ok(Some(Pair { opening, repeated, gather: None, closing, end }))
            }
            None if concatenated || width < self.tensor_split.ranks => Ok(None),
            None => {
                let range = self.local_range(width);
                Ok(Some(Pair {
                    opening: vec![range.clone()],
                    repeated: false,
                    gather: None,
                    closing: range,
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
                    // Concatenated, each has features of its own; otherwise all have the same.
                    let (start, is_repeated) = match join {
                        BranchJoin::Concat => {
                            (std::mem::replace(&mut first, here.end), pair.repeated && here.start > 0)
                        }
                        BranchJoin::Sum | BranchJoin::Product => (0, false),
                    };
                    let ranges: Vec<Range<usize>> = pair
                        .opening
                        .iter()
                        .filter(|range| (start..start + outputs).contains(&range.start))
                        .map(|range| range.start - start..range.end - start)
                        .collect();
                    let linear = self.split_outputs(linear, &ranges, is_repeated);
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
        let mut ranges = &pair.opening;
        let queries = vec![pair.closing.clone()];
        for layer in between {
            let entry = layer.description();
            built.push(if let Some(heads) = self.heads(layer) {
                ranges = &queries;
                let local = heads?.layer;
                // Norms of heads have one scale for all of them: each rank's heads make a term of its gradient.
                self.hold_full(&local, true);
                local
            } else {
                let Range { start, end } = ranges[0];
                let elements = DropoutIndices::Runs { first: start, run: end - start, of: shape.last() };
                match entry.counting(elements) {
                    Some(_) if ranges.len() > 1 => {
                        return Err(
                            self.conflict(format!("but a {} stands before an attention", layer.kind()))
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
    /// has one owner for each of its columns, so each rank makes a slice of all keys and of all values beside
    /// its queries; behind them stands a layer that all-gathers them and takes the rank's head. Backward, the
    /// gradients of all who read a head are summed.
    fn kv_ranges(&self, heads: &HeadShard) -> Result<(Vec<Range<usize>>, LayerSpec), Error> {
        let ([queries, keys, _], [width, all]) = (&heads.reads, heads.of);
        if all < self.tensor_split.ranks {
            let few = format!("but the keys of an attention have {all} columns in one linear layer");
            return Err(self.conflict(few));
        }
        let range = self.local_range(all);
        let shifted = |first: usize| first + range.start..first + range.end;
        let opening = vec![queries.clone(), shifted(width), shifted(width + all)];
        let (made, head) = (queries.len() + 2 * range.len(), keys.start - width..keys.end - width);
        let take = |at: Range<usize>, of| LayerSpec::FeatureSlice(FeatureSlice { at, of });
        let gathered = |first: usize| {
            let gather = self.collective(
                CollectiveOp::AllGather(ShardDim::Last),
                CollectiveOp::ReduceScatter(ShardDim::Last),
                all,
            );
            vec![take(first..first + range.len(), made), gather, take(head.clone(), all)]
        };
        let first = queries.len();
        let branches = vec![vec![take(0..first, made)], gathered(first), gathered(first + range.len())];
        Ok((opening, LayerSpec::Branches(Branches { join: BranchJoin::Concat, branches })))
    }
}

fn pairs(layer: &LayerSpec) -> bool {
    layer.properties().tensor_role == TensorRole::ColumnOrRowParallel
}

/// Whether a layer can be split by its outputs: one, or several branches with nothing but element-wise
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
