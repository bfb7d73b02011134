//! What every transport must do, in one suite ([`suite`]), and what each does on its own.

mod data;
mod gpu;
#[cfg(feature = "mpi")]
mod mpi;
mod nccl;
mod rendezvous;
mod single_rank;
mod suite;
mod threads;

/// A build without MPI has no tests that could say that they were skipped.
#[cfg(not(feature = "mpi"))]
#[test]
fn mpi_is_built_in() {
    espalier_testing::skipped(
        espalier_testing::Need::Mpi,
        "these tests were built without `--features espalier-cli/mpi`",
    );
}
