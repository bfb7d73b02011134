//! What can stop a pass.

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can stop a pass.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device failed.
    #[error(transparent)]
    Tensor(#[from] espalier_tensor::Error),
    /// Ranks could not talk to each other.
    #[error(transparent)]
    Comm(#[from] espalier_comm::Error),
    /// A [`GradientSink`](crate::layers::GradientSink) failed in a way of its own.
    #[error(transparent)]
    Sink(Box<dyn std::error::Error + Send + Sync>),
}
