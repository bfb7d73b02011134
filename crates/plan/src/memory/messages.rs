//! Bytes of messages of a rank whose gradients are all-reduced as a backward pass makes them.
//!
//! A packet of small gradients is a message from the moment in which the last of them is made until the step
//! waits for it, and the messages of layers in the passes behind that moment lie beside it. So the peak is
//! found by going through the pass that completes the gradients.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use crate::packets::{BUCKET, packets};
use crate::spec::message_sizes::{BackwardEvent, BlockMessages};

/// A gradient that is all-reduced.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReducedGradient {
    /// How many ranks of a replica have a partial sum: gradients of other groups travel in other packets.
    pub partial_ranks: u64,
    /// Bytes that travel.
    pub bytes: u64,
}

/// The most bytes of messages in the passes of a rank's chunks, which have these blocks: of each the messages
/// are known, and of a parameter whether and how it is all-reduced. `copies`: where another rank has a copy of a
/// chunk all packets of that start together, when it is complete.
pub(super) fn most_in_passes(
    chunks: &[Range<usize>],
    blocks: &[BlockMessages],
    size: u64,
    copies: bool,
    summed: impl Fn(usize) -> Option<ReducedGradient>,
) -> u64 {
    // Those behind in the model are complete first.
    let mut chunks = chunks.to_vec();
    chunks.sort_by_key(|chunk| std::cmp::Reverse(chunk.start));
    let held = |chunk: &Range<usize>| blocks.get(chunk.clone()).unwrap_or_default().iter();
    let largest = chunks.iter().flat_map(held).map(|block| block.most).max().unwrap_or(0);
    let (mut most, mut under_way) = (largest.saturating_mul(size), 0u64);
    for chunk in &chunks {
        let events: Vec<&BackwardEvent> = held(chunk).rev().flat_map(|block| &block.backward).collect();
        let mut packing = ChunkPackets::of(&events, &summed);
        for event in events {
            match event {
                BackwardEvent::Message(elements) => {
                    most = most.max(under_way.saturating_add(elements.saturating_mul(size)));
                }
                BackwardEvent::Gradients(ids) if !copies => {
                    let full = ids.iter().filter_map(|id| packing.fill(*id));
                    under_way = full.fold(under_way, u64::saturating_add);
                }
                BackwardEvent::Gradients(_) => {}
            }
        }
        if copies {
            under_way = packing.packets.iter().fold(under_way, |sum, (_, bytes)| sum.saturating_add(*bytes));
        }
    }
    most.max(under_way)
}

/// The packets of a chunk.
struct ChunkPackets {
    /// Of each: gradients that are missing, and the bytes of its message; none of a gradient that is sent as
    /// it is.
    packets: Vec<(usize, u64)>,
    /// The packet of a parameter.
    of: HashMap<usize, usize>,
}

impl ChunkPackets {
    fn of(events: &[&BackwardEvent], summed: impl Fn(usize) -> Option<ReducedGradient>) -> ChunkPackets {
        let mut groups: BTreeMap<u64, Vec<(usize, u64)>> = BTreeMap::new();
        for event in events {
            let BackwardEvent::Gradients(ids) = event else { continue };
            for id in ids {
                if let Some(ReducedGradient { partial_ranks, bytes }) = summed(*id) {
                    groups.entry(partial_ranks).or_default().push((*id, bytes));
                }
            }
        }
        let mut packing = ChunkPackets { packets: Vec::new(), of: HashMap::new() };
        for gradients in groups.into_values() {
            let bytes: Vec<u64> = gradients.iter().map(|(_, bytes)| *bytes).collect();
            for packet in packets(&bytes) {
                let message = packet.iter().map(|i| bytes[*i]).filter(|bytes| *bytes < BUCKET).sum();
                packing.of.extend(packet.iter().map(|i| (gradients[*i].0, packing.packets.len())));
                packing.packets.push((packet.len(), message));
            }
        }
        packing
    }

    /// A gradient is made: the bytes of its packet, where it was the last of it.
    fn fill(&mut self, id: usize) -> Option<u64> {
        let (missing, bytes) = &mut self.packets[*self.of.get(&id)?];
        *missing -= 1;
        (*missing == 0).then_some(*bytes)
    }
}
