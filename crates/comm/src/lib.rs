//! Groups of ranks and their messages: one interface, several transports.
//!
//! A [`Communicator`] is one rank's end of a group. It sends and receives, reduces and gathers
//! [`CommBuffer`]: tensors, or plain numbers of the host. Whoever starts a message hands its data over and
//! gets it back when the message is done, so that nobody can touch a buffer while it is on its way; and every
//! wait has a limit, after which an [`Error`] says who waited for whom, in what, and how long.
//!
//! The transports:
//! - [`threads`]: ranks are threads of one process and share its memory;
//! - `mpi`: ranks are processes that MPI starts and connects. It must be linked, so it is a feature of this crate;
//! - [`Communicator::single_rank`]: a world of one;
//! - [`nccl`]: ranks are processes with a GPU each. NCCL is looked for when it is first used.
//!
//! Nothing here knows of models. Which ranks form a group is for the caller to say ([`Communicator::split`]).

pub mod call;
mod combine;
pub mod communicator;
mod control;
pub mod data;
mod delay;
pub mod error;
pub mod failure;
pub mod launch;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod nccl;
mod reduce;
pub mod rendezvous;
mod single_rank;
mod stream_event;
pub mod threads;
mod ticket;
pub mod traffic;
pub mod transport;
mod watch;

pub use call::{Call, Operation, Reduce};
pub use communicator::{Communicator, Request};
pub use data::{CommBuffer, ElementType, IntoCommBuffer};
pub use error::{Error, Result};
pub use failure::Failure;
pub use launch::{LaunchedProcess, Launcher};
pub use traffic::{SentBytes, TrafficKind};
pub use transport::Transport;
