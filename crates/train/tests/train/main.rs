//! What the crate promises as a whole, one file a promise.

mod accumulation;
mod compressed;
mod damage;
mod evaluate;
mod fixture;
mod generate;
mod golden;
mod gpu;
mod hub;
mod integrated;
mod latency;
mod lattice;
mod layouts;
mod local;
mod measure;
mod memory;
mod norms;
mod oracle;
#[path = "../../benches/paced/mod.rs"]
mod paced;
mod parallel;
mod pieces;
mod pipeline;
mod prune;
mod records;
mod rehearsal;
mod resume;
mod shards;
mod sparse;
mod spatial;
mod steps;
mod support;
mod tensor;
mod traffic;
mod trained;
mod zero;
