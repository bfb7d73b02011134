//! What collectives take on a cluster: rings that run inside a node, or from node to node over what its
//! devices share.

use crate::cluster::{Cluster, Fabric};

/// Ranks that talk to each other, on a cluster whose other ranks do the same at the same time.
#[derive(Debug, Clone, Copy)]
pub struct RankGroup<'a> {
    cluster: &'a Cluster,
    /// How many they are,
    ranks: usize,
    /// and how far apart two neighbours are in the numbering of all ranks.
    stride: usize,
    /// How many such groups there are, where ranks take turns on cores.
    groups: Option<usize>,
    /// Ranks of all of them together, whose messages cross each other.
    world: usize,
}

impl<'a> RankGroup<'a> {
    /// So many ranks, each so far from the next.
    pub fn new(cluster: &'a Cluster, ranks: usize, stride: usize) -> RankGroup<'a> {
        RankGroup { cluster, ranks, stride, groups: None, world: ranks.saturating_mul(stride) }
    }

    /// The same in a world of so many ranks, which may take turns on cores.
    pub fn among(self, world: usize) -> RankGroup<'a> {
        let crowded = self.cluster.node.turns(world) > 1.0;
        RankGroup { groups: crowded.then(|| world / self.ranks.max(1)), world, ..self }
    }

    /// Seconds of an all-reduce of so many bytes.
    pub fn all_reduce(&self, bytes: f64) -> f64 {
        self.around(2.0, bytes)
    }

    /// Seconds of an all-gather, or of a reduce-scatter, of so many bytes in all.
    pub fn gather(&self, bytes: f64) -> f64 {
        self.around(1.0, bytes)
    }

    /// Seconds of a message to the next of them.
    pub fn message(&self, bytes: f64) -> f64 {
        if self.ranks < 2 || bytes == 0.0 {
            return 0.0;
        }
        let (fabric, senders) = self.fabric();
        // What a ring gains by sharing memory is not a message's.
        self.start(1.0) + bytes / (fabric.bandwidth(senders) * fabric.efficiency.min(1.0))
    }

    /// Seconds of messages of so many bytes each to several of them: they travel at once, but a core that
    /// ranks share copies one after the other.
    pub fn messages(&self, bytes: impl Iterator<Item = f64>) -> f64 {
        let each = bytes.map(|bytes| self.message(bytes));
        if self.is_crowded() { each.sum() } else { each.fold(0.0, f64::max) }
    }

    /// Seconds of a message that computing of so many seconds beside it does not hide.
    pub fn exposed(&self, message: f64, beside: f64) -> f64 {
        let hidden = message.min(beside);
        message - hidden + hidden * self.occupies()
    }

    /// What of a device's computing a collective takes while it runs.
    pub fn occupies(&self) -> f64 {
        self.fabric().0.occupies
    }

    /// The fraction of a message that its receiver computes: where ranks take turns on cores, no other core is
    /// left to copy it.
    pub fn copied(&self) -> f64 {
        if self.is_crowded() { self.fabric().0.occupies } else { 0.0 }
    }

    /// Seconds for which cores that ranks take turns on have nothing to do behind a collective. The last to
    /// arrive goes on at once, the others have to be woken: one core works for each group by itself, and any
    /// more wait.
    pub(crate) fn stall(&self) -> f64 {
        let Some(groups) = self.groups.filter(|_| self.ranks > 1) else { return 0.0 };
        let others = (self.cluster.node.devices - 1).max(1) as f64;
        let idle = 1.0 - (groups as f64 - 1.0) / others;
        self.fabric().0.turn_us * 1e-6 * idle.max(0.0)
    }

    /// Whether they are on several nodes.
    pub(crate) fn leaves_node(&self) -> bool {
        let reach = self.ranks.saturating_mul(self.stride);
        self.cluster.network.is_some() && self.ranks > 1 && reach > self.cluster.node.devices
    }

    /// Whether others go between nodes beside this one.
    fn is_crossed(&self) -> bool {
        self.leaves_node() && self.world > self.ranks
    }

    /// How often a node was doubled to make those of all ranks, whose rings cross this one.
    fn doublings(&self) -> f64 {
        match self.is_crossed() {
            true => self.cluster.node_doublings(self.world),
            false => 0.0,
        }
    }

    /// Seconds of an exchange of borders with so many neighbours, beside its messages.
    pub(crate) fn halo(&self, neighbours: f64) -> f64 {
        self.fabric().0.halo_us * 1e-6 * neighbours
    }

    fn is_crowded(&self) -> bool {
        self.groups.is_some()
    }

    /// So many times around a ring of them.
    fn around(&self, times: f64, bytes: f64) -> f64 {
        if self.ranks < 2 || bytes == 0.0 {
            return 0.0;
        }
        let (fabric, senders) = self.fabric();
        let others = (self.ranks - 1) as f64;
        let rounds = f64::from(self.ranks.next_power_of_two().ilog2());
        // No faster between nodes than what leads out of a device.
        let rails = if self.is_crossed() { 1 } else { fabric.rails } as f64;
        let rate = (rails * fabric.bandwidth(senders)).min(self.cluster.node.link().bandwidth(1));
        let contended = 1.0 + fabric.contention * self.doublings();
        let moved = others / self.ranks as f64 * bytes * contended / (rate * fabric.efficiency);
        self.start(times * rounds) + times * moved
    }

    /// What it takes to start so many messages one after the other; on cores that ranks take turns on, what
    /// each has to do to join the others, however many they are: to wait costs no work.
    fn start(&self, messages: f64) -> f64 {
        let fabric = self.fabric().0;
        if self.is_crowded() && fabric.meet_us > 0.0 {
            fabric.meet_us * 1e-6
        } else {
            messages * fabric.alpha()
        }
    }

    /// The slowest that a ring of them goes over, and how many of a node's devices send over it at once.
    fn fabric(&self) -> (&'a Fabric, usize) {
        let node = &self.cluster.node;
        match &self.cluster.network {
            Some(network) if self.leaves_node() => {
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
        (network.alpha_us, network.efficiency, network.contention) = (0.0, 1.0, 0.0);
        let (group, bytes) = (|ranks, stride| RankGroup::new(&summit, ranks, stride), 12.5e9);
        // All six of a node in one ring: it has both links of the node to itself, and one where others cross it.
        assert!((group(12, 1).all_reduce(bytes) - 11.0 / 12.0).abs() < 1e-9);
        assert!((group(12, 1).among(24).all_reduce(bytes) - 2.0 * 11.0 / 12.0).abs() < 1e-9);
        // One of each node: six rings share them.
        assert!((group(2, 6).all_reduce(bytes) - 6.0).abs() < 1e-9);
        assert!((group(2, 6).message(bytes) - 6.0).abs() < 1e-9);
        assert_eq!(group(1, 1).all_reduce(bytes), 0.0);
    }

    /// Rings of a job of eight nodes cross: three doublings slow them down; one of a node, or of all ranks, is not
    /// crossed.
    #[test]
    fn rings_of_more_nodes_are_slower() {
        let mut summit = builtin("summit").unwrap();
        let network = summit.network.as_mut().unwrap();
        (network.contention, network.rails) = (0.0, 1);
        let seconds =
            |summit: &Cluster, ranks, world| RankGroup::new(summit, ranks, 1).among(world).all_reduce(1e12);
        let alone = [seconds(&summit, 12, 48), seconds(&summit, 6, 48)];
        summit.network.as_mut().unwrap().contention = 0.2;
        assert!((seconds(&summit, 12, 48) / alone[0] - 1.6).abs() < 1e-4);
        assert!((seconds(&summit, 12, 24) / alone[0] - 1.4).abs() < 1e-4);
        assert_eq!(seconds(&summit, 12, 12), alone[0]);
        assert_eq!(seconds(&summit, 6, 48), alone[1]);
    }

    /// Two cores: one group of four leaves a core idle until the second of them is awake; of two groups each
    /// keeps a core busy.
    #[test]
    fn a_group_that_waits_is_filled_by_another() {
        let mut cores = builtin("this-machine").unwrap();
        cores.node.link.as_mut().unwrap().turn_us = 50.0;
        let stall = |ranks, world| RankGroup::new(&cores, ranks, 1).among(world).stall();
        assert!((stall(4, 4) - 50e-6).abs() < 1e-12);
        assert_eq!([stall(2, 4), stall(1, 4), stall(4, 8)], [0.0; 3]);
        // With a core each nobody takes turns.
        assert_eq!(stall(2, 2), 0.0);
        // To meet is one coming and going, of however many.
        cores.node.link.as_mut().unwrap().meet_us = 30.0;
        let bytes = 1e-9;
        let met = |ranks, world| RankGroup::new(&cores, ranks, 1).among(world).all_reduce(bytes);
        assert!([met(2, 4), met(4, 4)].iter().all(|seconds| (seconds - 30e-6).abs() < 1e-9));
        assert!((met(2, 2) - 2e-6 * cores.node.link().alpha_us).abs() < 1e-9);
        cores.node.devices = 5;
        let stall = |ranks, world| RankGroup::new(&cores, ranks, 1).among(world).stall();
        assert!((stall(3, 6) - 0.75 * 50e-6).abs() < 1e-12);
    }

    #[test]
    fn a_message_hides_behind_computing_as_far_as_it_leaves_the_device_alone() {
        let mut summit = builtin("summit").unwrap();
        let exposed = |summit: &Cluster| RankGroup::new(summit, 2, 1).exposed(3.0, 2.0);
        summit.node.link.as_mut().unwrap().occupies = 0.0;
        assert_eq!(exposed(&summit), 1.0);
        summit.node.link.as_mut().unwrap().occupies = 0.5;
        assert_eq!(exposed(&summit), 2.0);
    }
}
