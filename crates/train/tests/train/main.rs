//! What the crate promises as a whole, one file a promise.

mod accumulation;
mod card;
mod compressed;
mod damage;
mod evaluate;
mod fixture;
mod golden;
mod gradients;
mod layouts;
mod local;
mod memory;
mod norms;
mod oracle;
mod parallel;
mod pieces;
mod pipeline;
mod prune;
mod records;
mod resume;
mod shards;
mod sparse;
mod spatial;
mod steps;
mod support;
mod tensor;
mod zero;
