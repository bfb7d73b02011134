//! Work that is recorded once and then queued again and again in one call: CUDA's graphs.
//!
//! A launch costs the host several microseconds, more than many kernels of a single token take on the GPU.
//! Recorded work is checked and laid out by the driver once. It reads and writes the same addresses each
//! time: what changes from one run to the next must lie in tensors that the work reads, and the blocks of
//! memory that it used on the way are its own as long as it lives, so that nobody else's tensors come to lie
//! there.

use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUstreamCaptureMode};

use super::Cuda;
use super::buffer::CudaBlock;
use super::status::{CheckStatus, destroyed_by};
use crate::error::{Error, Result};

/// Recorded work, and what it gives: tensors that each run of it overwrites.
#[derive(Debug)]
pub struct CudaGraph<R> {
    // Before the blocks that it works on, and before the GPU.
    graph: GraphExec,
    gives: R,
    blocks: Vec<CudaBlock>,
    cuda: Cuda,
}

impl Cuda {
    /// Records what `work` queues on the compute stream, without running it. It may launch kernels and
    /// products and copy on the GPU; it may not read from the GPU nor copy to it, which is an error here.
    /// What it needs loaded or planned should have been used before. Nobody else may take memory of this
    /// handle meanwhile.
    pub fn record<R, E: From<Error>>(&self, work: impl FnOnce() -> Result<R, E>) -> Result<CudaGraph<R>, E> {
        self.bind()?;
        let stream = self.compute().raw();
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives; where work is being recorded on it already, the driver refuses.
        unsafe { sys::cuStreamBeginCapture_v2(stream, mode) }.check("beginning to record work")?;
        self.free_blocks().set_aside();
        let gives = work();
        let blocks = self.free_blocks().end_setting_aside();
        let mut raw = std::ptr::null_mut();
        // SAFETY: recording began above, on this stream; the driver writes a handle.
        let ended = unsafe { sys::cuStreamEndCapture(stream, &mut raw) }.check("recording work");
        let recorded = RawGraph(raw);
        let finished = || -> Result<GraphExec> {
            ended?;
            recorded.finished()
        };
        match gives.and_then(|gives| Ok((gives, finished()?))) {
            Ok((gives, graph)) => Ok(CudaGraph { graph, gives, blocks, cuda: self.clone() }),
            Err(error) => {
                blocks.into_iter().for_each(|block| self.free_blocks().give(block));
                Err(error)
            }
        }
    }

    /// An error where work is being recorded: what follows waits for the GPU, or lies in host memory that is
    /// used again.
    pub(super) fn is_not_recording(&self, doing: &'static str) -> Result<()> {
        match self.free_blocks().is_setting_aside() {
            true => Err(Error::Cuda { doing, why: "work is being recorded".into() }),
            false => Ok(()),
        }
    }
}

impl<R> CudaGraph<R> {
    /// Bytes of the blocks that it holds as long as it lives.
    pub fn bytes(&self) -> usize {
        self.blocks.iter().map(CudaBlock::capacity).sum()
    }

    /// Queues the work once more; what it gives is there for work that is queued behind it.
    pub fn replay(&self) -> Result<&R> {
        self.cuda.bind()?;
        // SAFETY: the graph and all memory that it knows live; the stream puts runs of it one after the other.
        unsafe { sys::cuGraphLaunch(self.graph.0, self.cuda.compute().raw()) }
            .check("running recorded work")?;
        Ok(&self.gives)
    }
}

impl<R> Drop for CudaGraph<R> {
    fn drop(&mut self) {
        // Whoever gets them queues behind the last run.
        self.blocks.drain(..).for_each(|block| self.cuda.free_blocks().give(block));
    }
}

/// What was recorded, as the driver lists it.
struct RawGraph(CUgraph);

impl RawGraph {
    fn finished(&self) -> Result<GraphExec> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: recorded without an error, so it is there; the driver writes a handle.
        unsafe { sys::cuGraphInstantiateWithFlags(&mut graph, self.0, 0) }
            .check("preparing recorded work")?;
        Ok(GraphExec(graph))
    }
}

impl Drop for RawGraph {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by the driver, destroyed once.
            let _ = unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}

/// Work that is ready to be queued.
#[derive(Debug)]
struct GraphExec(CUgraphExec);

// SAFETY: the driver locks what it is given; any thread may queue it.
unsafe impl Send for GraphExec {}
// SAFETY: `replay` only queues it, which the driver locks.
unsafe impl Sync for GraphExec {}

// The driver lets a run that is under way end first.
destroyed_by!(GraphExec, sys::cuGraphExecDestroy);

#[cfg(test)]
mod tests {
    use crate::ops::elementwise::{add, add_into};
    use crate::testing::{devices, tensor};
    use crate::{Category, DType, Device, Tensor};

    /// The work reads a tensor that changes and adds up in another; tensors that come and go meanwhile do not
    /// disturb what it holds, nor does it disturb them.
    #[test]
    fn recorded_work_runs_again_on_what_its_tensors_hold_by_then() {
        for [shared, ..] in devices() {
            let Device::Cuda(shared) = shared else { continue };
            let cuda = shared.another().unwrap();
            let device = Device::Cuda(cuda.clone());
            let of = |x: f32| tensor(&device, DType::F32, &[1000], &[x; 1000]);
            let mut input = of(1.0);
            let work = |input: &Tensor| -> crate::Result<Tensor> {
                let twice = add(input, input)?;
                let mut sum = add(&twice, input)?;
                add_into(&mut sum, &twice)?;
                Ok(sum)
            };
            drop(work(&input).unwrap());
            let recorded = cuda.record(|| work(&input)).unwrap();
            assert!(recorded.bytes() >= 8000, "two tensors of 4000 bytes: {}", recorded.bytes());
            let mut others = Vec::new();
            for round in 1..5 {
                let x = round as f32;
                input.copy_from_host(bytemuck::cast_slice(&[x; 1000])).unwrap();
                others.push((of(-x), x));
                assert_eq!(recorded.replay().unwrap().to_f32(), [5.0 * x; 1000]);
                assert!(others.iter().all(|(other, x)| other.to_f32() == [-x; 1000]));
            }
            let held = cuda.held();
            drop(recorded);
            drop(of(0.0));
            assert_eq!(cuda.held(), held, "its memory is used again");
        }
    }

    #[test]
    fn what_reads_or_waits_cannot_be_recorded() {
        for [shared, ..] in devices() {
            let Device::Cuda(shared) = shared else { continue };
            let cuda = shared.another().unwrap();
            let device = Device::Cuda(cuda.clone());
            let x = tensor(&device, DType::F32, &[3], &[1.0, 2.0, 3.0]);
            let read = cuda.record(|| x.read_f32());
            assert!(read.unwrap_err().to_string().contains("being recorded"));
            let send = cuda.record(|| Tensor::from_slice(&device, &[1], &[1.0f32], Category::Transient));
            assert!(send.unwrap_err().to_string().contains("being recorded"));
            assert_eq!(x.to_f32(), [1.0, 2.0, 3.0], "the GPU goes on as if nothing had been recorded");
        }
    }
}
