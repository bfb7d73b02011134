//! What runs where, and what it should cost: pure arithmetic on a run file. No device, no thread, no file.
//!
//! [`RunFile::parse`](config::RunFile::parse) reads what a person wrote; [`Plan::new`] joins it with what the data
//! says and resolves it: the model as data ([`spec`]), the bytes it should take ([`memory`]), and how
//! a lottery ticket's rounds divide its steps ([`rounds`]).

pub mod config;
pub mod memory;
pub mod plan;
pub mod rounds;
pub mod spec;

pub use config::RunFile;
pub use memory::Memory;
pub use plan::{DataFacts, Plan};
