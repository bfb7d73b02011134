//! Every backward pass against finite differences of its own forward pass, summed in f64.
//!
//! The loss is that of training. For each parameter tensor the derivative along random directions is compared
//! with the gradient. A layer without parameters stands behind one that has some, so that its input gradient
//! is tested too.

mod differences;
mod images;
mod sequences;
