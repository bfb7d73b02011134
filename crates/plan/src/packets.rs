//! Which vectors travel in one message, and what messages of sharded vectors take (ZeRO, Rajbhandari et al.
//! 2020): every parameter's vector of kept weights is split over the ranks that share it, so that one large
//! embedding does not sit on one of them.
//!
//! In a message the shards of all ranks have the length of the longest, as messages need them.

/// Gradients of at least so many bytes are all-reduced one by one, smaller ones packed into messages of
/// at most so many: enough to make the cost of starting a message small beside the cost of its bytes.
pub const BUCKET: u64 = 1 << 20;

/// Buckets that are in flight at once where each micro-batch's gradients are scattered as they are made:
/// one more is sent when the one before the last has arrived, so that what waits for its reduction does not add up
/// to a model's gradients.
pub const SCATTERED_AT_ONCE: usize = 2;

/// Which parameters travel together, given the bytes of each, in their order: large ones alone, small ones packed.
pub fn packets(bytes: &[u64]) -> Vec<Vec<usize>> {
    packets_of(bytes, BUCKET)
}

/// The same for packets of at most so many bytes.
pub(crate) fn packets_of(bytes: &[u64], most: u64) -> Vec<Vec<usize>> {
    let (mut packets, mut open, mut waiting) = (Vec::new(), Vec::new(), 0);
    for (i, &bytes) in bytes.iter().enumerate() {
        if bytes >= most {
            packets.push(vec![i]);
            continue;
        }
        if waiting + bytes > most {
            packets.push(std::mem::take(&mut open));
            waiting = 0;
        }
        open.push(i);
        waiting += bytes;
    }
    if !open.is_empty() {
        packets.push(open);
    }
    packets
}

/// The vector of a parameter that ranks share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SharedVector {
    /// Numbers of its gradient, and of its weights that are sent.
    pub elements: u64,
    /// Ranks that share it.
    pub ranks: u64,
}

impl SharedVector {
    /// The largest shard of a rank.
    pub(crate) fn shard_elements(self) -> u64 {
        self.elements.div_ceil(self.ranks)
    }

    /// A message with all shards, padded to one length, and one more of them: that of the rank itself.
    fn message(self) -> u64 {
        self.shard_elements().saturating_mul(self.ranks + 1)
    }

    /// Whether its gradient is sent as it is: one that is large and need not be padded.
    fn is_sent_as_it_is(self, size: u64) -> bool {
        self.elements.saturating_mul(size) >= BUCKET && self.elements.is_multiple_of(self.ranks)
    }
}

/// Bytes of messages at their peak when vectors of numbers of so many bytes are shared: gradients are all in
/// flight at once, new weights in two packets.
pub(crate) fn message_bytes(vectors: &[SharedVector], size: u64) -> u64 {
    let gradient =
        |one: &SharedVector| if one.is_sent_as_it_is(size) { one.shard_elements() } else { one.message() };
    let gradients = sum(vectors.iter().map(gradient)).saturating_mul(size);
    gradients.max(gathered_bytes(vectors, size))
}

/// Bytes of messages at most when gradients are scattered as each of so many micro-batches makes them, in
/// this order: those of a packet until it is full, its message, and [those before](SCATTERED_AT_ONCE) that
/// have not arrived. `last` are scattered once, at the end; new weights of `gathered` come after the step.
pub(crate) fn scattered_bytes(
    vectors: &[SharedVector],
    last: &[SharedVector],
    size: u64,
    micro_batches: usize,
    gathered: &[SharedVector],
) -> u64 {
    let bytes: Vec<u64> = vectors.iter().map(|one| one.elements.saturating_mul(size)).collect();
    // What a packet holds while it is in flight, and before, while it is copied into its message.
    let mut sent: Vec<[u64; 2]> = Vec::new();
    let mut waiting = 0;
    let packets = packets(&bytes);
    for packet in &packets {
        let (all, message) =
            (sum(packet.iter().map(|&i| bytes[i])), sum(packet.iter().map(|&i| vectors[i].message())));
        match packet[..] {
            [only] if vectors[only].is_sent_as_it_is(size) => sent.push([message.saturating_mul(size); 2]),
            _ => sent.push([message.saturating_mul(size), message.saturating_mul(size).saturating_add(all)]),
        }
        if packet.len() > 1 {
            waiting = all.max(waiting);
        }
    }
    if micro_batches > 1 {
        // The last of one micro-batch are in flight with the first of the next.
        sent.extend(sent.clone());
    }
    sent.sort_unstable_by(|a, b| b.cmp(a));
    let most = |at: usize, state: usize| sent.get(at).map_or(0, |one| one[state]);
    let copying = (0..sent.len()).map(|at| most(usize::from(at == 0), 0).saturating_add(sent[at][1]));
    // A layer's weight may come before the bias that fills the packet before.
    let early = bytes.iter().copied().filter(|bytes| *bytes < BUCKET).max().unwrap_or(0);
    let early = if packets.len() > 1 { early } else { 0 };
    let copying = copying.max().unwrap_or(0).saturating_add(early);
    let waiting = if sent.len() > SCATTERED_AT_ONCE { waiting } else { 0 };
    let flying = sum((0..SCATTERED_AT_ONCE).map(|at| most(at, 0))).saturating_add(waiting);
    let end = message_bytes(last, size).saturating_add(flying.saturating_sub(waiting));
    [copying, flying, end, gathered_bytes(gathered, size)].into_iter().max().unwrap_or(0)
}

/// Whether shards of the last of these arrive only when the last micro-batch is over, since too few packets follow
/// them for anybody to wait for theirs.
pub(crate) fn arrive_last(vectors: &[SharedVector], size: u64, micro_batches: usize) -> bool {
    let bytes: Vec<u64> = vectors.iter().map(|one| one.elements.saturating_mul(size)).collect();
    micro_batches.saturating_sub(1) * packets(&bytes).len() < SCATTERED_AT_ONCE
}

/// Bytes of the messages in which shards of some vectors come from all ranks at once.
pub(crate) fn gather_messages(vectors: impl Iterator<Item = SharedVector>, size: u64) -> u64 {
    sum(vectors.map(SharedVector::message)).saturating_mul(size)
}

/// Bytes of messages when new weights come back from all ranks: two packets at once.
fn gathered_bytes(vectors: &[SharedVector], size: u64) -> u64 {
    let bytes: Vec<u64> = vectors.iter().map(|one| one.elements.saturating_mul(size)).collect();
    let packet = |packet: &Vec<usize>| sum(packet.iter().map(|&i| vectors[i].message()));
    let packets: Vec<u64> = packets(&bytes).iter().map(packet).collect();
    let pair = |i: usize| packets[i].saturating_add(packets.get(i + 1).copied().unwrap_or(0));
    (0..packets.len()).map(pair).max().unwrap_or(0).saturating_mul(size)
}

/// A sum that stops at the largest number: nothing of that size fits anyway.
fn sum(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}

/// Bytes of the largest message when parameters of so many elements are averaged, each in so many vectors of f32.
pub(crate) fn average_bytes(elements: &[u64], vectors: u64) -> u64 {
    let bytes: Vec<u64> =
        elements.iter().flat_map(|n| (0..vectors).map(move |_| n.saturating_mul(4))).collect();
    packets(&bytes).iter().map(|packet| sum(packet.iter().map(|&i| bytes[i]))).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_parameter_travels_once_in_a_packet_that_is_not_too_large(bytes in prop::collection::vec(0u64..2 * BUCKET, 0..40)) {
            let packets = packets(&bytes);
            let mut all: Vec<usize> = packets.iter().flatten().copied().collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..bytes.len()).collect::<Vec<_>>());
            for packet in packets {
                let sum: u64 = packet.iter().map(|&i| bytes[i]).sum();
                prop_assert!(packet.len() == 1 || sum <= BUCKET);
            }
        }
    }
}
