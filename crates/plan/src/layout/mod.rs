//! How the tensors of a model lie on the mesh.

mod piece;

pub use piece::{Piece, Run};
