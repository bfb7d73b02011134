//! Messages between ranks whose tensors are on one GPU: threads of one process share the GPU's memory as they
//! share the host's.
//!
//! Each rank queues its work on a stream of its own. A rank that makes a call leaves a mark in its stream;
//! when all have made it, a transfer stream waits for their marks, copies and reduces as the call says, and
//! leaves a mark that each rank's stream waits for when the rank takes its data back. The host only queues:
//! nobody waits for the GPU, and a call goes on while its ranks compute. Sums are taken in the order of
//! ranks.

use cudarc::driver::sys::{self, CUdeviceptr};
use espalier_tensor::Device;
use espalier_tensor::cuda::Cuda;

use crate::call::{Call, Operation};
use crate::combine::combine;
use crate::data::CommBuffer;
use crate::stream_event::{StreamEvent, check};
use crate::transport::CallBuffers;

/// The GPU that holds a rank's data, where one does.
pub(super) fn gpu_of(data: &CommBuffer) -> Option<Cuda> {
    match data {
        CommBuffer::Tensor(tensor) => match tensor.device() {
            Device::Cuda(cuda) => Some(cuda),
            Device::Cpu(_) => None,
        },
        CommBuffer::U64(_) | CommBuffer::F64(_) => None,
    }
}

/// A mark in a rank's stream at the moment when it made a call.
#[derive(Debug)]
pub(super) struct ReadyEvent {
    cuda: Cuda,
    mark: StreamEvent,
}

impl ReadyEvent {
    /// `None` for data of the host; an error says why a call cannot be made with this data.
    pub(super) fn of(buffers: &CallBuffers) -> Result<Option<ReadyEvent>, String> {
        let data = [&buffers.read, &buffers.write];
        let mut gpus = data.into_iter().flatten().map(gpu_of);
        let Some(Some(cuda)) = gpus.next() else {
            // A call has one buffer or two.
            return match gpus.next() {
                Some(Some(_)) => Err("a part of its data is on the host, the other on a GPU".into()),
                _ => Ok(None),
            };
        };
        if gpus.any(|other| !other.is_some_and(|other| other.is(&cuda))) {
            return Err("the two parts of its data are not on the same device".into());
        }
        cuda.bind().map_err(|e| e.to_string())?;
        let mark = StreamEvent::new(cuda.compute().raw())?;
        Ok(Some(ReadyEvent { cuda, mark }))
    }

    /// Lets the rank's stream wait until a call is done.
    pub(super) fn make_wait(&self, done: &StreamEvent) -> Result<(), String> {
        self.cuda.bind().map_err(|e| e.to_string())?;
        done.make_wait(self.cuda.compute().raw())
    }
}

/// Where a rank's data lies on the GPU; 0 where the call gives it none.
#[derive(Debug, Clone, Copy)]
struct DeviceAddresses {
    read: CUdeviceptr,
    write: CUdeviceptr,
}

impl DeviceAddresses {
    fn of(buffers: &CallBuffers) -> DeviceAddresses {
        let address = |data: &Option<CommBuffer>| match data {
            Some(CommBuffer::Tensor(tensor)) => tensor.cuda_buffer().address(),
            _ => 0,
        };
        DeviceAddresses { read: address(&buffers.read), write: address(&buffers.write) }
    }
}

/// The stream that copies and reduces messages on a GPU.
#[derive(Debug)]
pub(super) struct TransferStream(Cuda);

impl TransferStream {
    /// On the GPU of this rank.
    pub(super) fn on_gpu_of(ready: &ReadyEvent) -> Result<TransferStream, String> {
        Cuda::open(ready.cuda.gpu().ordinal).map(TransferStream).map_err(|e| e.to_string())
    }

    /// Queues a call that all its ranks have made, by slot; the mark passes when it is done.
    pub(super) fn carry(
        &self,
        call: &Call,
        ranks: &[(&CallBuffers, &ReadyEvent)],
    ) -> Result<StreamEvent, String> {
        let cuda = &self.0;
        let elsewhere = ranks.iter().find(|(_, ready)| ready.cuda.gpu().ordinal != cuda.gpu().ordinal);
        if let Some((_, ready)) = elsewhere {
            let [a, b] = [cuda, &ready.cuda].map(|cuda| cuda.gpu().ordinal);
            return Err(format!("ranks of one process share one GPU; one is on GPU {a}, another on {b}"));
        }
        cuda.bind().map_err(|e| e.to_string())?;
        for (_, ready) in ranks {
            ready.mark.make_wait(cuda.compute().raw())?;
        }
        let addresses: Vec<DeviceAddresses> =
            ranks.iter().map(|(buffers, _)| DeviceAddresses::of(buffers)).collect();
        if call.elements > 0 {
            self.queue(call, &addresses)?;
        }
        StreamEvent::new(cuda.compute().raw())
    }

    fn queue(&self, call: &Call, addresses: &[DeviceAddresses]) -> Result<(), String> {
        let element = call.element.expect("elements have a type");
        let (full_bytes, shard_bytes) = (call.bytes(), call.bytes() / addresses.len());
        let at = |base: CUdeviceptr, rank: usize| base + (rank * shard_bytes) as CUdeviceptr;
        match call.operation {
            Operation::Send { .. } | Operation::Receive { .. } => {
                self.copy(addresses[1].write, addresses[0].read, full_bytes)
            }
            Operation::Broadcast { root } => {
                let others = (0..addresses.len()).filter(|&rank| rank != root);
                others
                    .into_iter()
                    .try_for_each(|r| self.copy(addresses[r].write, addresses[root].write, full_bytes))
            }
            Operation::AllReduce(_) if addresses.len() == 1 => Ok(()),
            Operation::AllReduce(how) => {
                let all: Vec<_> = addresses.iter().map(|peer| peer.write).collect();
                // SAFETY: these are of as many elements, in tensors that the collective owns until the call
                // is done.
                unsafe { combine(&self.0, how, element, &all, &all, call.elements) }
            }
            Operation::ReduceScatter(how) => (0..addresses.len()).try_for_each(|rank| {
                let x: Vec<_> = addresses.iter().map(|peer| at(peer.read, rank)).collect();
                // SAFETY: as above; each rank's shard begins within the full data.
                unsafe {
                    combine(
                        &self.0,
                        how,
                        element,
                        &x,
                        &[addresses[rank].write],
                        call.elements / addresses.len(),
                    )
                }
            }),
            Operation::AllGather => (0..addresses.len()).try_for_each(|rank| {
                let from = addresses[rank].read;
                addresses.iter().try_for_each(|peer| self.copy(at(peer.write, rank), from, shard_bytes))
            }),
            Operation::Barrier | Operation::Split => unreachable!("no tensor takes part in it"),
        }
    }

    fn copy(&self, to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> Result<(), String> {
        // SAFETY: both are `bytes` of tensors on this GPU that the collective owns until the call is done;
        // they are different tensors. The GPU is current on this thread.
        check(unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.0.compute().raw()) })
    }
}
