//! How the tensors of a model lie on the mesh.

mod piece;
pub mod spatial;

pub use piece::{Piece, Run};
