//! Pruning methods: each by hand on a small network, and what all of them promise.

mod bench;
mod flow;
mod promises;
mod ranks;
mod scores;
mod sharded;
mod tickets;
