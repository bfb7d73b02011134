//! Weights as checkpoints hold them: parameters in the pieces that a rank has, and running statistics.

use std::iter;

use espalier_nn::weights::{ParameterId, Weights};
use espalier_tensor::Tensor;

use super::tensors::tensor_is_finite;
use super::{MODEL, Room, Saved, Stored, Wanted};
use crate::Result;
use crate::parallel::pieces::Pieces;

/// What is held of weights, to be saved.
pub(crate) fn saved_weights<'a>(weights: &'a Weights, pieces: &Pieces) -> Saved<'a> {
    let stored = |((name, tensor), id): ((&str, &'a Tensor), Option<ParameterId>)| {
        let stored = id.map_or(Stored::Tensor(tensor), |id| Stored::of(tensor, pieces.own(id)));
        (name.to_owned(), stored)
    };
    weights.named().zip(ids(weights)).map(stored).collect()
}

/// Room for what is held of weights, to be filled from a checkpoint.
pub(crate) fn wanted_weights<'a>(weights: &'a mut Weights, pieces: &Pieces) -> Wanted<'a> {
    let (all, ids) = (weights.parameters() + weights.statistics(), ids(weights));
    let room = |((name, tensor), id): ((&str, &'a mut Tensor), Option<ParameterId>)| match id {
        Some(id) => (name.to_owned(), Room::of(tensor, pieces.own(id))),
        None => (name.to_owned(), Room::Tensor(tensor)),
    };
    let tensors: Vec<_> = weights.named_mut().zip(ids).map(room).collect();
    Wanted { file: MODEL, elsewhere: all - tensors.len(), tensors, converts: false }
}

/// The first parameter or statistic held that has a NaN or an infinity.
pub(crate) fn first_not_finite(weights: &Weights) -> Result<Option<String>> {
    for (name, tensor) in weights.named() {
        if !tensor_is_finite(tensor)? {
            return Ok(Some(name.to_owned()));
        }
    }
    Ok(None)
}

/// Of each tensor in the order of [`Weights::named`] which parameter it is, if it is one.
fn ids(weights: &Weights) -> impl Iterator<Item = Option<ParameterId>> + use<> {
    weights.ids().map(Some).chain(iter::repeat(None))
}
