//! Which gradients travel together: a large one by itself, small ones packed, since a message has a cost
//! however short it is.

use crate::packets::packets_of;

/// Gradients that are all-reduced in one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// Indices in [`ModelSpec::parameters`](crate::spec::ModelSpec::parameters).
    pub parameters: Vec<usize>,
    /// The chunk that uses them; none for tied ones, for which the complete pass must be over.
    pub chunk: Option<usize>,
    /// The block whose backward completes it: the first that uses one of them.
    pub block: usize,
    /// Bytes of the gradients.
    pub bytes: u64,
}

/// A rank's buckets, those of a chunk in the order in which its backward completes them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Buckets {
    list: Vec<Bucket>,
    /// The bucket of each parameter.
    of: Vec<Option<usize>>,
}

/// A parameter's gradient, in the backward of a chunk or of several.
#[derive(Debug, Clone, Copy)]
pub struct Gradient {
    /// Its index in [`ModelSpec::parameters`](crate::spec::ModelSpec::parameters).
    pub parameter: usize,
    /// The first block that uses it.
    pub block: usize,
    /// Bytes that travel.
    pub bytes: u64,
}

impl Buckets {
    /// Packs gradients that are made in this order: one of at least so many bytes goes alone.
    pub fn pack(&mut self, chunk: Option<usize>, gradients: &[Gradient], most: u64) {
        let bytes: Vec<u64> = gradients.iter().map(|gradient| gradient.bytes).collect();
        for packet in packets_of(&bytes, most) {
            let packed: Vec<Gradient> = packet.into_iter().map(|i| gradients[i]).collect();
            for Gradient { parameter, .. } in &packed {
                self.of.resize(self.of.len().max(parameter + 1), None);
                self.of[*parameter] = Some(self.list.len());
            }
            self.list.push(Bucket {
                parameters: packed.iter().map(|gradient| gradient.parameter).collect(),
                chunk,
                block: packed.iter().map(|gradient| gradient.block).min().unwrap_or(0),
                bytes: packed.iter().fold(0, |sum: u64, gradient| sum.saturating_add(gradient.bytes)),
            });
        }
    }

    pub fn list(&self) -> &[Bucket] {
        &self.list
    }

    /// The number of a parameter's bucket.
    pub fn of(&self, parameter: usize) -> Option<usize> {
        self.of.get(parameter).copied().flatten()
    }
}
