//! What kernels take on a device: products by their flops, everything else by the bytes that pass through
//! memory, and never less than it takes the host to start them, where it starts each.

use super::{Convolution, ConvolutionPass, DeviceSpec, share};
use crate::spec::Precision;

/// Flops of a convolution that keep every multiprocessor of a GPU busy.
const FILLING: f64 = 1e10;

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
    /// Whether the host starts them all at once, as a CUDA graph.
    pub captured: bool,
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
            Convolution::Channels(points) => {
                // Fewer flops than keep a GPU busy are slowed down as products of so many are.
                let reached = |flops: f64| share(&matrix.efficiency, flops * 1e-9);
                let filled = (reached(pass.flops) / reached(FILLING)).min(1.0);
                let rate = matrix.peak() * share(points, pass.narrowest) * filled * self.with_zeros();
                (pass.flops / rate).max(self.pass(bytes))
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
        self.each(bytes, seconds).max(self.launch())
    }

    /// Seconds of a batch norm, with what it does on its way, that reads and writes so many bytes.
    pub(crate) fn batch_norm(&self, bytes: f64) -> f64 {
        (self.pass(bytes) / self.device.memory.batch_norm).max(self.launch())
    }

    /// Seconds of a kernel that reads and writes so many bytes and does next to nothing with them.
    pub(crate) fn light_pass(&self, bytes: f64) -> f64 {
        if bytes == 0.0 {
            return 0.0;
        }
        (self.pass(bytes) / self.device.memory.light).max(self.launch())
    }

    /// How many times as fast products are for the zeros among the weights: a file says so of nine tenths.
    fn with_zeros(&self) -> f64 {
        1.0 + (self.device.matrix(self.precision).zeros - 1.0) * (self.zeros / 0.9).min(1.0)
    }

    /// The least seconds from the start of one to that of the next, by the host.
    fn launch(&self) -> f64 {
        if self.captured { 0.0 } else { self.device.launch() }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::builtin;

    /// A layer that sees three colours multiplies slower than one of 64 channels, as does one too small for all
    /// multiprocessors; twice the images take twice as long where there are enough.
    #[test]
    fn narrow_and_small_convolutions_are_slower_on_a_gpu() {
        let cluster = builtin("h200-node").unwrap();
        let kernels = DeviceKernels {
            device: &cluster.device,
            precision: Precision::Bf16,
            zeros: 0.0,
            devices: 1.0,
            captured: false,
        };
        let rate = |channels: usize, pixels: f64| {
            let pass = ConvolutionPass::all(3, channels, 256, [pixels; 2])[0];
            pass.flops / kernels.convolution(&pass, 0.0)
        };
        let wide = rate(256, 1e6);
        assert!((wide / (0.7 * 989e12) - 1.0).abs() < 1e-9, "{wide}");
        assert!((rate(256, 2e6) / wide - 1.0).abs() < 1e-9);
        assert!(rate(3, 1e6) < 0.1 * rate(64, 1e6) && rate(64, 1e6) < wide);
        assert!(rate(256, 200.0) < 0.2 * wide);
        assert!((kernels.batch_norm(1e9) * 0.8 / kernels.pass(1e9) - 1.0).abs() < 1e-9);
    }

    /// What is started with all the rest takes as long as it is busy.
    #[test]
    fn captured_kernels_are_not_started_one_by_one() {
        let device = builtin("h200-node").unwrap().device;
        let of = |captured| {
            let precision = Precision::F32;
            DeviceKernels { device: &device, precision, zeros: 0.0, devices: 1.0, captured }
        };
        assert!((of(false).pass(1000.0) - device.launch()).abs() < 1e-12);
        assert!(of(true).pass(1000.0) < device.launch() && of(true).pass(1000.0) > 1e-6);
        assert!((of(true).pass(1e9) - of(false).pass(1e9)).abs() < 1e-12);
    }
}
