//! The data of a call as NCCL sees it: on the GPU.
//!
//! A tensor of the GPU is used where it is. Numbers of the host go there and back, which is meant for few of them.

use cudarc::driver::sys::CUdeviceptr;
use espalier_tensor::cuda::Cuda;
use espalier_tensor::{Category, DType, Device, Tensor};

use crate::data::CommBuffer;

/// Data, and where it lies on the GPU while a call is under way.
pub(super) struct StagedBuffer {
    data: CommBuffer,
    /// Its stand-in on the GPU, where it is not there itself.
    stage: Option<Tensor>,
}

impl StagedBuffer {
    /// Brings data to the GPU. `read` says that the call reads it.
    pub(super) fn new(cuda: &Cuda, data: CommBuffer, read: bool) -> Result<StagedBuffer, String> {
        let device = Device::Cuda(cuda.clone());
        let here = match &data {
            CommBuffer::Tensor(tensor) => match tensor.device() {
                Device::Cuda(other) if !other.is(cuda) => {
                    return Err("the tensor is on another GPU".to_owned());
                }
                Device::Cuda(_) => true,
                Device::Cpu(_) => false,
            },
            CommBuffer::U64(_) | CommBuffer::F64(_) => false,
        };
        let stage = || -> espalier_tensor::Result<Option<Tensor>> {
            if here {
                return Ok(None);
            }
            // No type of tensors has eight bytes, and an odd number of bf16 is no number of words.
            let mut bytes = if read { data.bytes().to_vec() } else { Vec::new() };
            let words = (data.len() * data.element().bytes()).div_ceil(4);
            bytes.resize(4 * words, 0);
            let mut stage = Tensor::empty(&device, &[words], DType::U32, Category::Communication)?;
            if read {
                stage.copy_from_host(&bytes)?;
            }
            Ok(Some(stage))
        };
        let stage = stage().map_err(|e| e.to_string())?;
        Ok(StagedBuffer { data, stage })
    }

    /// Where NCCL finds it.
    pub(super) fn address(&self) -> CUdeviceptr {
        match (&self.stage, &self.data) {
            (Some(stage), _) => stage.cuda_buffer().address(),
            (None, CommBuffer::Tensor(tensor)) => tensor.cuda_buffer().address(),
            (None, _) => unreachable!("numbers of the host have a stand-in"),
        }
    }

    /// The data as it was handed over.
    pub(super) fn untouched(self) -> CommBuffer {
        self.data
    }

    /// The data with what the call wrote, which must be done.
    pub(super) fn written(mut self) -> Result<CommBuffer, String> {
        let Some(stage) = self.stage.take() else { return Ok(self.data) };
        let bytes = self.data.bytes_mut();
        let read = stage.read_bytes().map_err(|e| e.to_string())?;
        bytes.copy_from_slice(&read[..bytes.len()]);
        Ok(self.data)
    }
}
