//! How the tensors of a model lie on the mesh: each rank's own model, made of the whole one.
//!
//! A rank's model is a spec like any other, of the sizes that the rank has, with what it exchanges with others as layers of their
//! own. Its parameters are as many as the whole's, in the same order and of the same names; a [`Piece`] says where each lies in the
//! whole. All that counts, builds, saves or masks reads that model, so an axis that cuts tensors is known here alone.

mod piece;
pub mod spatial;
mod tensor;

use std::ops::Range;

pub use piece::{Piece, Run, Runs};

use crate::error::Error;
use crate::mesh::{Mesh, PerAxis};
use crate::spec::{Input, Model, Parameter};

/// The models of all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Layout {
    /// By the place along the tensor axis.
    locals: Vec<LocalModel>,
}

/// One rank's own model.
#[derive(Debug, Clone, PartialEq)]
pub struct LocalModel {
    /// The layers, with the sizes that the rank has, and the exchanges between them.
    pub model: Model,
    /// Its parameters, of the shapes that the rank has.
    pub parameters: Vec<Parameter>,
    /// Of each parameter, what the rank holds.
    pub pieces: Vec<Piece>,
    /// Of each parameter, whether the ranks that hold the same piece have a summand of its gradient each. Otherwise what they have is
    /// the same gradient.
    pub is_partial: Vec<bool>,
    /// The classes whose logits the rank makes, where that is not all.
    pub classes: Option<Range<usize>>,
}

impl LocalModel {
    /// That of a rank which has all of the model.
    pub fn whole(model: &Model) -> LocalModel {
        LocalModel::uncut(model, model.parameters())
    }

    fn uncut(model: &Model, parameters: Vec<Parameter>) -> LocalModel {
        let pieces: Vec<Piece> = parameters.iter().map(|parameter| Piece::whole(&parameter.shape)).collect();
        let is_partial = vec![false; pieces.len()];
        LocalModel { model: model.clone(), parameters, pieces, is_partial, classes: None }
    }

    /// Weights of each parameter that a rank keeps where so many of the whole stay: its fair share, since only the run knows
    /// where they lie.
    pub(crate) fn kept(&self, mut whole: Vec<Option<u64>>) -> Vec<Option<u64>> {
        for (kept, piece) in whole.iter_mut().zip(&self.pieces).filter(|(_, piece)| !piece.is_whole()) {
            let share = piece.len() as f64 / piece.of().iter().product::<usize>() as f64;
            *kept = kept.map(|kept| (kept as f64 * share).round() as u64);
        }
        whole
    }
}

impl Layout {
    /// That of a model of these parameters whose shapes were checked; `sequence`: whether what lies between the parallel parts of a layer is cut along
    /// the sequence.
    pub fn new(
        model: &Model,
        parameters: &[Parameter],
        mesh: &Mesh,
        sequence: bool,
    ) -> Result<Layout, Error> {
        let ranks = mesh.extents().tensor;
        match model.input {
            Input::Image { .. } if sequence => {
                let why = format!("with `model.name` = \"{}\", which reads no sequence", model.name);
                return Err(Error::NoEffect { field: "parallel.sequence".into(), why });
            }
            Input::Tokens { seq, .. } if sequence && seq < ranks => {
                let problem =
                    format!("is {ranks}, but a sequence of {seq} positions cannot be cut into so many parts");
                return Err(Error::Conflict { field: "parallel.tensor".into(), problem });
            }
            _ => {}
        }
        let locals = match ranks {
            1 => vec![LocalModel::uncut(model, parameters.to_vec())],
            _ => (0..ranks)
                .map(|rank| tensor::shard(model, parameters, ranks, rank, sequence))
                .collect::<Result<_, _>>()?,
        };
        Ok(Layout { locals })
    }

    /// The model of the rank at a place.
    pub fn of(&self, place: PerAxis) -> &LocalModel {
        &self.locals[place.tensor]
    }

    /// The models of the ranks along the tensor axis.
    pub fn along_tensor(&self) -> &[LocalModel] {
        &self.locals
    }
}
