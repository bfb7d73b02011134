//! What kernels take on a device: products by their flops, everything else by the bytes that pass through
//! memory, and never less than it takes to start them.

use super::{Convolution, ConvolutionPass, DeviceSpec};
use crate::spec::Precision;

/// A device at some precision.
#[derive(Debug, Clone, Copy)]
pub struct DeviceKernels<'a> {
    /// What they run on.
    pub device: &'a DeviceSpec,
    /// Of what is multiplied.
    pub precision: Precision,
    /// The fraction of the weights that are zeros.
    pub zeros: f64,
    /// How many such devices a rank has: cores can be several.
    pub devices: f64,
}

impl DeviceKernels<'_> {
    /// Seconds of a product of `[rows, depth]` by `[depth, columns]`.
    pub fn product(&self, rows: f64, depth: f64, columns: f64) -> f64 {
        let bytes = self.element() * (rows * depth + depth * columns + rows * columns);
        self.work(2.0 * rows * depth * columns, self.with_zeros(), bytes)
    }

    /// Seconds of a pass of a convolution that touches so many elements.
    pub fn convolution(&self, pass: &ConvolutionPass, elements: f64) -> f64 {
        let (matrix, bytes) = (self.device.matrix(self.precision), self.element() * elements);
        match &matrix.convolution {
            Convolution::Efficiency(efficiency) => {
                self.work(pass.flops, efficiency * self.with_zeros(), bytes)
            }
            Convolution::Passes(by_pass) => {
                (by_pass.seconds(pass, matrix.peak()) / self.devices).max(self.pass(bytes))
            }
        }
    }

    /// Seconds of a kernel that multiplies and reads and writes so many bytes: whichever is longer. `share`
    /// is what it reaches of a product of as many flops.
    pub fn work(&self, flops: f64, share: f64, bytes: f64) -> f64 {
        let matrix = self.device.matrix(self.precision);
        (self.each(flops, |flops| matrix.seconds(flops)) / share).max(self.pass(bytes))
    }

    /// Seconds of a kernel that reads and writes so many bytes.
    pub fn pass(&self, bytes: f64) -> f64 {
        if bytes == 0.0 {
            return 0.0;
        }
        let seconds = |bytes| self.device.memory.pass(self.precision, bytes);
        self.each(bytes, seconds).max(self.device.launch())
    }

    /// Seconds of a kernel that reads and writes so many bytes and does next to nothing with them.
    pub(crate) fn light_pass(&self, bytes: f64) -> f64 {
        if bytes == 0.0 {
            return 0.0;
        }
        (self.pass(bytes) / self.device.memory.light).max(self.device.launch())
    }

    /// How many times as fast products are for the zeros among the weights: a file says so of nine tenths.
    fn with_zeros(&self) -> f64 {
        1.0 + (self.device.matrix(self.precision).zeros - 1.0) * (self.zeros / 0.9).min(1.0)
    }

    /// Several devices split the work.
    fn each(&self, work: f64, seconds: impl Fn(f64) -> f64) -> f64 {
        seconds(work / self.devices)
    }

    /// Bytes of an element.
    pub fn element(&self) -> f64 {
        self.precision.size() as f64
    }
}
