//! Convolutions by cuDNN, where it is found.
//!
//! The library ranks its algorithms for a shape; the first that uses the tensor cores, multiplies what it is
//! given and repeats bit for bit is planned once and kept. Never a measurement: another run would pick
//! another one, whose sums round otherwise. Where cuDNN is missing, or has nothing for a shape, the caller's
//! own kernels serve.

mod bindings;
mod descriptor;
mod plan;

use std::collections::HashMap;
use std::time::Instant;

use super::Cuda;
use crate::error::Result;
use crate::memory::Category;
use bindings::{CudnnFunctions, CudnnHandle};
use plan::ConvPlan;
pub use plan::{AlgorithmTraits, ConvKey, ConvPass};

/// A GPU's convolutions: their settings, and cuDNN's plans.
#[derive(Debug)]
pub(super) struct CudnnConvolutions {
    tf32: bool,
    wanted: bool,
    /// `None` until the first convolution looked for it.
    dnn: Option<Result<Cudnn, String>>,
}

impl Default for CudnnConvolutions {
    fn default() -> Self {
        CudnnConvolutions { tf32: false, wanted: true, dnn: None }
    }
}

impl CudnnConvolutions {
    /// Takes over the settings of another GPU's.
    pub(super) fn as_in(&mut self, other: &CudnnConvolutions) {
        (self.tf32, self.wanted) = (other.tf32, other.wanted);
    }

    /// cuDNN for this GPU, where it is wanted and works.
    fn dnn(&mut self, cuda: &Cuda) -> Option<&mut Cudnn> {
        if !self.wanted {
            return None;
        }
        self.dnn.get_or_insert_with(|| Cudnn::new(cuda)).as_mut().ok()
    }
}

/// Settings of a GPU's convolutions.
impl Cuda {
    /// cuDNN's version as (9, 19, 0), or why it is not used and what to do. Nothing needs it: convolutions run on
    /// our own kernels without it, only slower. So it is not part of the probe, and opened by the first to ask.
    pub fn cudnn() -> Result<(usize, usize, usize), String> {
        // SAFETY: the library is loaded.
        let version = CudnnFunctions::load().map(|cudnn| unsafe { (cudnn.version)() })?;
        Ok((version / 10_000, version / 100 % 100, version % 100))
    }

    /// Lets convolutions in f32 round their operands to TF32 (10 bits of precision), as PyTorch does: several
    /// times faster. Off at first; matrix products have a switch of their own.
    pub fn allow_tf32_in_convolutions(&self, allow: bool) {
        self.convolutions().tf32 = allow;
    }

    /// Whether convolutions go through cuDNN where it is found, as at first, or always through our own kernels.
    pub fn use_cudnn(&self, wanted: bool) {
        self.convolutions().wanted = wanted;
    }

    /// Whether f32 convolutions may use TF32.
    pub(crate) fn tf32_in_convolutions(&self) -> bool {
        self.convolutions().tf32
    }

    /// Whether cuDNN has a plan for a convolution. The first question for a shape makes it.
    pub(crate) fn plans_convolution(&self, key: &ConvKey) -> Result<bool> {
        self.bind()?;
        Ok(self.convolutions().dnn(self).is_some_and(|dnn| dnn.plan(key).is_some()))
    }

    /// Queues a convolution for which there is a plan.
    ///
    /// # Safety
    /// The addresses are those of x, w (as [o, kernel, kernel, c]) and y of `key`, on this GPU.
    pub(crate) unsafe fn run_convolution(&self, key: &ConvKey, tensors: [u64; 3]) -> Result<()> {
        self.bind()?;
        let mut convolutions = self.convolutions();
        let dnn = convolutions.dnn(self).expect("cuDNN made the plan");
        let (cudnn, handle) = (dnn.cudnn, dnn.handle);
        let plan = dnn.plan(key).expect("a plan was made");
        // SAFETY: the caller's addresses.
        unsafe { plan.queue(self, cudnn, handle, tensors) }
    }

    /// Every algorithm that cuDNN ranks for a convolution, best first, measured: for benchmarks. Empty where
    /// cuDNN is not used.
    pub fn convolution_offers(&self, key: &ConvKey) -> Result<Vec<AlgorithmOffer>> {
        const TIMES: u32 = 10;
        self.bind()?;
        let mut buffers = Vec::new();
        for shape in [key.x, [key.y[3], key.kernel, key.kernel, key.x[3]], key.y] {
            let bytes = shape.iter().product::<usize>() * key.dtype.bytes();
            let mut buffer = self.allocate(bytes, Category::Workspace)?;
            buffer.fill(0x3c)?;
            buffers.push(buffer);
        }
        let addresses = [buffers[0].address(), buffers[1].address(), buffers[2].address()];
        let mut offers = Vec::new();
        let mut convolutions = self.convolutions();
        let Some(dnn) = convolutions.dnn(self) else { return Ok(offers) };
        for (plan, planning) in ConvPlan::all(dnn.cudnn, dnn.handle, key)? {
            // SAFETY: the buffers have the shapes that the key says.
            let run = || unsafe { plan.queue(self, dnn.cudnn, dnn.handle, addresses) };
            if run().is_err() {
                continue;
            }
            self.compute().synchronize()?;
            let start = Instant::now();
            for _ in 0..TIMES {
                run()?;
            }
            self.compute().synchronize()?;
            let seconds = start.elapsed().as_secs_f64() / f64::from(TIMES);
            let (traits, workspace) = (plan.traits, plan.workspace);
            offers.push(AlgorithmOffer { traits, used: traits.suit(), workspace, planning, seconds });
        }
        Ok(offers)
    }

    pub(super) fn convolutions(&self) -> std::sync::MutexGuard<'_, CudnnConvolutions> {
        self.0.convolutions.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// An algorithm of cuDNN's for a convolution, as measured.
#[derive(Debug, Clone, Copy)]
pub struct AlgorithmOffer {
    /// What cuDNN says of it.
    pub traits: AlgorithmTraits,
    /// Whether we would use it.
    pub used: bool,
    pub workspace: usize,
    /// Seconds that its planning took.
    pub planning: f64,
    /// Seconds that a run takes.
    pub seconds: f64,
}

/// cuDNN on one GPU: its handle, and a plan for every convolution seen.
#[derive(Debug)]
struct Cudnn {
    /// `None`: cuDNN has no algorithm for it.
    plans: HashMap<ConvKey, Option<ConvPlan>>,
    handle: CudnnHandle,
    cudnn: &'static CudnnFunctions,
}

// SAFETY: the handle is used by one thread at a time, behind the GPU's lock.
unsafe impl Send for Cudnn {}

impl Cudnn {
    fn new(cuda: &Cuda) -> Result<Cudnn, String> {
        let cudnn = CudnnFunctions::load()?;
        let mut handle = CudnnHandle(std::ptr::null_mut());
        // SAFETY: the library is loaded and a context current; it writes the handle.
        let code = unsafe { (cudnn.create)(&mut handle) };
        cudnn.check(code, "starting cuDNN").map_err(|e| e.to_string())?;
        let dnn = Cudnn { plans: HashMap::new(), handle, cudnn };
        // SAFETY: the handle lives, and the stream as long as the GPU, which is longer.
        let code = unsafe { (cudnn.set_stream)(handle, cuda.compute().raw().cast()) };
        cudnn.check(code, "handing cuDNN a stream").map_err(|e| e.to_string())?;
        Ok(dnn)
    }

    fn plan(&mut self, key: &ConvKey) -> Option<&ConvPlan> {
        if !self.plans.contains_key(key) {
            // What cuDNN refuses even to describe, such as a padding wider than the window, it does not serve.
            let plan = ConvPlan::new(self.cudnn, self.handle, key).ok().flatten();
            self.plans.insert(*key, plan);
        }
        self.plans[key].as_ref()
    }
}

impl Drop for Cudnn {
    fn drop(&mut self) {
        self.plans.clear();
        // SAFETY: created by `new`, destroyed once.
        let _ = unsafe { (self.cudnn.destroy)(self.handle) };
    }
}

impl ConvPlan {
    /// Queues it, with scratch space from the GPU's memory.
    ///
    /// # Safety
    /// As [`ConvPlan::run`], but for the workspace.
    unsafe fn queue(
        &self,
        cuda: &Cuda,
        cudnn: &'static CudnnFunctions,
        handle: CudnnHandle,
        tensors: [u64; 3],
    ) -> Result<()> {
        let workspace = cuda.allocate(self.workspace, Category::Workspace)?;
        let timer = cuda.time("cudnn", 0.0)?;
        // SAFETY: the caller's addresses; the scratch space is handed on in the stream's order only.
        unsafe { self.run(cudnn, handle, tensors, workspace.address()) }?;
        timer.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    fn key(pass: ConvPass, dtype: DType) -> ConvKey {
        let (x, y) = ([2, 9, 7, 4], [2, 5, 4, 8]);
        ConvKey { pass, dtype, x, y, kernel: 3, stride: 2, padding_before: [1, 1], padding_after: [1, 1] }
    }

    #[test]
    fn every_pass_can_be_described_without_a_card() {
        let cudnn = match CudnnFunctions::load() {
            Ok(cudnn) => cudnn,
            Err(why) => {
                assert!(why.contains("install") || why.contains("check"), "it says what to do: {why}");
                espalier_testing::skipped(espalier_testing::Need::Cudnn, why);
                return;
            }
        };
        assert!(Cuda::cudnn().unwrap() >= (9, 0, 0));
        for pass in [ConvPass::Forward, ConvPass::Input, ConvPass::Weight] {
            for dtype in [DType::F32, DType::Bf16] {
                plan::ConvGraph::new(cudnn, &key(pass, dtype)).unwrap();
                // An output of another size is not that of this convolution: the library looks.
                let wrong = ConvKey { y: [2, 9, 7, 8], ..key(pass, dtype) };
                assert!(plan::ConvGraph::new(cudnn, &wrong).is_err(), "{wrong:?}");
            }
        }
    }
}
