//! What every transport must do, in one suite ([`suite`]), and what each does on its own.

mod card;
mod data;
#[cfg(feature = "mpi")]
mod mpi;
mod nccl;
mod rendezvous;
mod suite;
mod threads;
