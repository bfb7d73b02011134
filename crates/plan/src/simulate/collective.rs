//! What collectives take on a cluster: rings that run inside a node, or from node to node over what its devices share.

use crate::cluster::{Cluster, Fabric};

/// Ranks that talk to each other, on a cluster whose other ranks do the same at the same time.
#[derive(Debug, Clone, Copy)]
pub struct Group<'a> {
    cluster: &'a Cluster,
    /// How many they are,
    ranks: usize,
    /// and how far apart two neighbours are in the numbering of all ranks.
    stride: usize,
    /// Whether they take turns on cores.
    crowded: bool,
}

impl<'a> Group<'a> {
    /// So many ranks, each so far from the next.
    pub fn new(cluster: &'a Cluster, ranks: usize, stride: usize) -> Group<'a> {
        Group { cluster, ranks, stride, crowded: false }
    }

    /// The same in a world of so many ranks: those that meet wait for the last of them to have a core.
    pub fn among(self, world: usize) -> Group<'a> {
        Group { crowded: self.cluster.node.turns(world) > 1.0, ..self }
    }

    /// Seconds of a sum of so many bytes that all get.
    pub fn all_reduce(&self, bytes: f64) -> f64 {
        2.0 * self.once_around(bytes) + self.turn(bytes)
    }

    /// Seconds to put parts of so many bytes in all together, for all; or to sum and keep a part each.
    pub fn gather(&self, bytes: f64) -> f64 {
        self.once_around(bytes) + self.turn(bytes)
    }

    /// Seconds of a message to the next of them.
    pub fn message(&self, bytes: f64) -> f64 {
        if self.ranks < 2 || bytes == 0.0 {
            return 0.0;
        }
        let (fabric, senders) = self.fabric();
        // What a ring gains by sharing memory is not a message's.
        fabric.alpha() + bytes / (fabric.bandwidth(senders) * fabric.efficiency.min(1.0)) + self.turn(bytes)
    }

    /// What of a device's computing a collective takes while it runs.
    pub fn occupies(&self) -> f64 {
        self.fabric().0.occupies
    }

    /// The share of a message that its receiver computes: where ranks take turns on cores, no other core is left to copy it.
    pub fn copied(&self) -> f64 {
        if self.crowded { self.fabric().0.occupies } else { 0.0 }
    }

    /// What it takes until the last of them has a core.
    fn turn(&self, bytes: f64) -> f64 {
        if self.crowded && self.ranks > 1 && bytes > 0.0 { self.fabric().0.turn_us * 1e-6 } else { 0.0 }
    }

    fn once_around(&self, bytes: f64) -> f64 {
        if self.ranks < 2 || bytes == 0.0 {
            return 0.0;
        }
        let (fabric, senders) = self.fabric();
        let others = (self.ranks - 1) as f64;
        let rounds = f64::from(self.ranks.next_power_of_two().ilog2());
        // No faster between nodes than what leads out of a device.
        let rate = fabric.bandwidth(senders).min(self.cluster.node.link().bandwidth(1));
        rounds * fabric.alpha() + others / self.ranks as f64 * bytes / (rate * fabric.efficiency)
    }

    /// The slowest that a ring of them goes over, and how many of a node's devices send over it at once.
    fn fabric(&self) -> (&'a Fabric, usize) {
        let node = &self.cluster.node;
        match &self.cluster.network {
            Some(network) if self.ranks.saturating_mul(self.stride) > node.devices => {
                let members = (node.devices / self.stride).clamp(1, self.ranks);
                (network, node.devices / members)
            }
            _ => (self.cluster.node.link(), 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::builtin;

    #[test]
    fn a_ring_through_nodes_has_what_their_devices_share() {
        let mut summit = builtin("summit").unwrap();
        let network = summit.network.as_mut().unwrap();
        (network.alpha_us, network.efficiency) = (0.0, 1.0);
        let (group, bytes) = (|ranks, stride| Group::new(&summit, ranks, stride), 12.5e9);
        // All six of a node in one ring: it has the node's 12.5 GB/s to itself.
        assert!((group(12, 1).all_reduce(bytes) - 2.0 * 11.0 / 12.0).abs() < 1e-9);
        // One of each node: six rings share them.
        assert!((group(2, 6).all_reduce(bytes) - 6.0).abs() < 1e-9);
        assert!((group(2, 6).message(bytes) - 6.0).abs() < 1e-9);
        assert_eq!(group(1, 1).all_reduce(bytes), 0.0);
    }
}
