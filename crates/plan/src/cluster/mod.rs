//! A cluster as a planner sees it: what one device computes and holds, and how fast messages travel inside a
//! node and between nodes. It is read from a file that a person can write or `espalier bench` measures.
//!
//! Rates are the datasheet's; what is reached of them is a fraction that grows with the size of the operation.
//! Sizes, rates and times are in the units that datasheets use, and each field's name says which.

mod builtin;
mod convolution;
pub mod datasheet;
mod kernel;
pub mod measured;
pub mod merge;
mod read;
mod sparse;

pub use builtin::{NAMES, builtin};
pub use convolution::{ByPass, Convolution, ConvolutionPass};
pub use kernel::DeviceKernels;
pub use read::ClusterError;
pub use sparse::SkippedZeros;

use serde::{Deserialize, Serialize};

use crate::spec::Precision;

/// Devices, and what joins them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// What a person calls it.
    pub name: String,
    /// Where its numbers come from.
    #[serde(default)]
    pub note: String,
    /// What an hour of a device costs, in whatever currency.
    pub price_per_gpu_hour: Option<f64>,
    /// What a device draws at work, with its share of the machine and its cooling as far as somebody counts these.
    pub watts_per_gpu: Option<f64>,
    /// How many machines there are; none: as many as are asked for.
    pub nodes: Option<usize>,
    /// One device; all are alike.
    pub device: DeviceSpec,
    /// The devices that one machine has.
    pub node: Node,
    /// What joins machines; without it there is one.
    pub network: Option<Fabric>,
}

/// What a rank runs on: a GPU, or a core.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceSpec {
    /// As the datasheet has it.
    pub name: String,
    /// All that it has.
    pub memory_gb: f64,
    /// What of it the driver, the kernels and the communicators have before a run begins.
    #[serde(default)]
    pub reserved_gb: f64,
    /// From the beginning of one small kernel to that of the next.
    pub launch_us: f64,
    /// Products of bf16 numbers; none where it has no such.
    pub bf16: Option<MatmulRates>,
    /// Products of fp16 numbers, where it has these and no bf16.
    pub fp16: Option<MatmulRates>,
    /// Products of 32-bit numbers.
    pub f32: MatmulRates,
    /// What passes through its memory.
    pub memory: Copy,
}

/// How fast products of matrices are.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatmulRates {
    /// The datasheet's.
    pub peak_tflops: f64,
    /// `[Gflop, fraction]`: what a product of so many flops reaches of it. Between two sizes the fraction is
    /// on the line where both are logarithms; below the first a product takes as long as there.
    pub efficiency: Vec<[f64; 2]>,
    /// What fused attention reaches of a product of as many flops: of scores that are not masked, the backward
    /// pass counted as twice the forward one. None where nobody measured it.
    pub attention: Option<f64>,
    /// How many times as fast a product is where nine tenths of its weights are zeros, as dense as they are:
    /// a GPU that multiplies zeros draws less power.
    #[serde(default = "unit", skip_serializing_if = "is_unit")]
    pub zeros: f64,
    /// What a convolution reaches of that. Behind the plain fields: it may be a section of its own.
    #[serde(default = "as_products")]
    pub convolution: Convolution,
    /// What skipping zeros saves, where kernels do: in f32 on a core.
    pub sparse: Option<SkippedZeros>,
}

/// How fast numbers are read and written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Copy {
    /// Read and written together, by the datasheet.
    pub gb_per_s: f64,
    /// `[MB, fraction]`: what an operation over so many bytes reaches of it, of 32-bit numbers.
    pub efficiency: Vec<[f64; 2]>,
    /// What an operation over as many bytes of 16-bit numbers reaches of that: less than 1 where a device
    /// takes its time for each number, as a core does.
    #[serde(default = "unit")]
    pub bf16: f64,
    /// How many times as fast an operation is that only adds, compares or moves numbers, where norms and
    /// exponentials keep a device busy for longer than its memory does.
    #[serde(default = "unit", skip_serializing_if = "is_unit")]
    pub light: f64,
    /// What a batch norm reaches of that, with the ReLU and the sum that it does on its way: it goes through all
    /// samples for its statistics, and through them again to use these.
    #[serde(default = "unit", skip_serializing_if = "is_unit")]
    pub batch_norm: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// How many devices it has.
    pub devices: usize,
    /// Whether they are cores: they are split among ranks, so that fewer ranks have several each, and more
    /// take turns.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cores: bool,
    /// What joins them; one device needs none.
    pub link: Option<Fabric>,
}

/// What messages travel over.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fabric {
    /// Time to start a message.
    pub alpha_us: f64,
    /// In one direction.
    pub gb_per_s: f64,
    /// How many devices share that; 1: each has it for itself.
    #[serde(default = "one")]
    pub shared_by: usize,
    /// How many such links a node has side by side, of which a message goes over one, and a collective that no
    /// other crosses over all. Of those that cross, `contention` says what is left.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub rails: usize,
    /// What of its rate a ring of many devices reaches.
    #[serde(default = "unit")]
    pub efficiency: f64,
    /// What each doubling of the nodes that a collective goes through adds to the time of its bytes, as a
    /// fraction: rings cross in the switches, and the slowest link of more of them counts.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub contention: f64,
    /// What each doubling of the nodes adds to a step, as a fraction: all wait for the slowest of them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub straggle: f64,
    /// What an exchange of borders with one neighbour takes beside its message, which nothing hides: to pack,
    /// to synchronise, to unpack.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub halo_us: f64,
    /// The fraction of a device's computing that a collective takes away while it runs.
    #[serde(default)]
    pub occupies: f64,
    /// What each of several ranks that take turns on a core has to do to join a collective, instead of
    /// `alpha_us`: to yield the core and get it back.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub meet_us: f64,
    /// For how long cores have nothing to do behind a collective of such ranks: until those that arrived
    /// first are awake.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub turn_us: f64,
}

fn is_zero(number: &f64) -> bool {
    *number == 0.0
}

fn is_one(number: &usize) -> bool {
    *number == 1
}

fn is_unit(factor: &f64) -> bool {
    *factor == 1.0
}

fn as_products() -> Convolution {
    Convolution::Efficiency(1.0)
}

fn unit() -> f64 {
    1.0
}

fn one() -> usize {
    1
}

impl Cluster {
    /// Bytes that a run can have of a device.
    pub fn memory(&self) -> u64 {
        ((self.device.memory_gb - self.device.reserved_gb) * 1e9) as u64
    }

    /// How often one node is doubled to have so many devices.
    pub(crate) fn node_doublings(&self, devices: usize) -> f64 {
        match self.network {
            Some(_) => (devices as f64 / self.node.devices as f64).log2().max(0.0),
            None => 0.0,
        }
    }

    /// How many times as long a step of so many devices takes as on one node: the slowest of them counts.
    pub(crate) fn straggle(&self, devices: usize) -> f64 {
        1.0 + self.network.map_or(0.0, |network| network.straggle) * self.node_doublings(devices)
    }
}

impl Node {
    /// What joins its devices, also where there is one.
    pub fn link(&self) -> &Fabric {
        self.link.as_ref().unwrap_or(&Fabric::NONE)
    }

    /// Devices that each of so many ranks has while it works: GPUs have one rank each, cores are split among
    /// ranks.
    pub(crate) fn devices_each(&self, ranks: usize) -> f64 {
        if self.cores { (self.devices as f64 / ranks as f64).max(1.0) } else { 1.0 }
    }

    /// How many of so many ranks take turns on a device.
    pub fn turns(&self, ranks: usize) -> f64 {
        if self.cores { (ranks as f64 / self.devices as f64).max(1.0) } else { 1.0 }
    }
}

impl DeviceSpec {
    /// How fast products of a precision are: of 16 bits those of bf16, or of fp16 where it has no bf16. One
    /// that has neither multiplies in f32, which [`DeviceSpec::has`] tells apart.
    pub fn matrix(&self, precision: Precision) -> &MatmulRates {
        match precision {
            Precision::F32 => &self.f32,
            Precision::Bf16 => self.bf16.as_ref().or(self.fp16.as_ref()).unwrap_or(&self.f32),
        }
    }

    /// Whether it multiplies numbers of so many bits by themselves.
    pub fn has(&self, precision: Precision) -> bool {
        precision == Precision::F32 || self.bf16.is_some() || self.fp16.is_some()
    }

    /// The same, to be changed.
    pub(crate) fn matrix_mut(&mut self, precision: Precision) -> &mut MatmulRates {
        match precision {
            Precision::F32 => &mut self.f32,
            Precision::Bf16 => self.bf16.as_mut().or(self.fp16.as_mut()).unwrap_or(&mut self.f32),
        }
    }

    /// Seconds from one small kernel to the next.
    pub fn launch(&self) -> f64 {
        self.launch_us * 1e-6
    }
}

impl MatmulRates {
    /// Flops a second of the datasheet.
    pub fn peak(&self) -> f64 {
        self.peak_tflops * 1e12
    }

    /// Seconds of a product of so many flops.
    pub fn seconds(&self, flops: f64) -> f64 {
        if flops == 0.0 { 0.0 } else { flops / (self.peak() * share(&self.efficiency, flops * 1e-9)) }
    }
}

impl Copy {
    /// Seconds to pass over so many bytes of numbers of a precision.
    pub fn pass(&self, precision: Precision, bytes: f64) -> f64 {
        match precision {
            Precision::F32 => self.seconds(bytes),
            Precision::Bf16 => self.seconds(bytes) / self.bf16,
        }
    }

    /// Seconds to pass over so many bytes of 32-bit numbers.
    pub fn seconds(&self, bytes: f64) -> f64 {
        if bytes == 0.0 { 0.0 } else { bytes / (self.gb_per_s * 1e9 * share(&self.efficiency, bytes * 1e-6)) }
    }
}

impl Fabric {
    /// Of a device that is alone: what is sent nowhere takes no time.
    pub const NONE: Fabric = Fabric {
        alpha_us: 0.0,
        gb_per_s: f64::INFINITY,
        shared_by: 1,
        rails: 1,
        efficiency: 1.0,
        contention: 0.0,
        straggle: 0.0,
        halo_us: 0.0,
        occupies: 0.0,
        meet_us: 0.0,
        turn_us: 0.0,
    };

    /// Seconds to start a message.
    pub fn alpha(&self) -> f64 {
        self.alpha_us * 1e-6
    }

    /// Bytes a second that each of so many devices of a node has when all of them send at once.
    pub fn bandwidth(&self, senders: usize) -> f64 {
        self.gb_per_s * 1e9 / senders.clamp(1, self.shared_by) as f64
    }
}

/// The fraction at a size, from points in the order of sizes.
fn share(points: &[[f64; 2]], size: f64) -> f64 {
    let after = points.partition_point(|point| point[0] <= size);
    match (after.checked_sub(1).map(|before| points[before]), points.get(after)) {
        (None, Some(first)) => {
            // Below the first point time stays what it is there, down to nothing.
            first[1] * (size / first[0]).max(f64::MIN_POSITIVE)
        }
        (Some(last), None) => last[1],
        (Some(low), Some(high)) => {
            // Of the logarithms: where no point takes less time than the one before, nothing between them does.
            let along = (size / low[0]).ln() / (high[0] / low[0]).ln();
            low[1] * (high[1] / low[1]).powf(along)
        }
        (None, None) => 1.0,
    }
}

#[cfg(test)]
impl MatmulRates {
    /// Of products alone.
    fn plain(peak_tflops: f64, efficiency: Vec<[f64; 2]>) -> MatmulRates {
        MatmulRates {
            peak_tflops,
            efficiency,
            attention: None,
            zeros: 1.0,
            convolution: as_products(),
            sparse: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_lies_on_the_line_between_two_sizes() {
        let points = [[1.0, 0.2], [100.0, 0.8]];
        assert_eq!([share(&points, 1.0), share(&points, 100.0), share(&points, 1e9)], [0.2, 0.8, 0.8]);
        assert!((share(&points, 10.0) - 0.4).abs() < 1e-12);
        let matrix = MatmulRates::plain(1e-3, points.to_vec());
        // Smaller than the first: as long as that.
        assert!((matrix.seconds(1e8) / matrix.seconds(1e9) - 1.0).abs() < 1e-12);
        assert_eq!(matrix.seconds(0.0), 0.0);
    }

    /// Points of which none takes less time than a smaller one: the way between them does not either.
    #[test]
    fn more_flops_never_take_less_time() {
        let efficiency = vec![[0.1, 0.02], [10.0, 0.3], [1000.0, 0.7]];
        let matrix = MatmulRates::plain(989.0, efficiency);
        let seconds: Vec<f64> = (0..60).map(|i| matrix.seconds(1e7 * 1.3f64.powi(i))).collect();
        assert!(seconds.windows(2).all(|pair| pair[0] <= pair[1] * (1.0 + 1e-12)), "{seconds:?}");
    }
}
