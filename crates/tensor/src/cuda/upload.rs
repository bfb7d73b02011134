//! Memory that is filled over the copy stream while the compute stream is at work.
//!
//! A block of the usual kind may still be in use by queued work when it is handed on, which is no matter to
//! those who queue behind that work. The copy stream does not. So these blocks go round among themselves,
//! each with a mark of its last use in the compute stream, and what is copied into one waits for that mark
//! alone.

use std::sync::Mutex;

use super::Cuda;
use super::buffer::{CudaBlock, CudaBuffer};
use super::stream::Event;
use crate::error::Result;
use crate::memory::Category;

/// Blocks that wait to be filled, each with its last use.
#[derive(Debug, Default)]
pub(super) struct UploadBlocks(Mutex<Vec<(CudaBlock, Event)>>);

impl UploadBlocks {
    /// The smallest that holds `len` and is not twice as large.
    fn take(&self, len: usize) -> Option<(CudaBlock, Event)> {
        let mut blocks = self.0.lock().expect("no panic while locked");
        let fits = |block: &CudaBlock| (len..=2 * len.max(1 << 12)).contains(&block.capacity());
        let best =
            (0..blocks.len()).filter(|&i| fits(&blocks[i].0)).min_by_key(|&i| blocks[i].0.capacity())?;
        Some(blocks.swap_remove(best))
    }

    pub(super) fn give(&self, block: CudaBlock, last_use: Event) {
        self.0.lock().expect("no panic while locked").push((block, last_use));
    }

    /// Takes all of them out, to be given back to the driver.
    pub(super) fn drain(&self) -> Vec<CudaBlock> {
        std::mem::take(&mut *self.0.lock().expect("no panic while locked"))
            .into_iter()
            .map(|(b, _)| b)
            .collect()
    }
}

/// A buffer that is on its way to the GPU.
#[derive(Debug)]
pub struct CudaUpload {
    buffer: CudaBuffer,
    arrived: Event,
}

impl Cuda {
    /// Starts to copy bytes of the host, which have been read when this returns, beside all queued work.
    pub fn send(&self, bytes: &[u8], category: Category) -> Result<CudaUpload> {
        self.bind()?;
        let block = match self.sent_blocks().take(bytes.len()) {
            Some((block, last_use)) => {
                self.copy().wait(&last_use)?;
                block
            }
            None => CudaBlock::fresh(self, bytes.len(), category)?,
        };
        let buffer = CudaBuffer::sent(self, block, bytes.len(), category);
        // SAFETY: the block holds as many bytes, and no queued work that comes after the mark of its last use
        // knows it.
        self.with_sending(|staging, stream| unsafe { staging.upload(stream, buffer.address(), bytes) })?;
        let arrived = Event::new()?;
        arrived.record(self.copy())?;
        Ok(CudaUpload { buffer, arrived })
    }
}

impl CudaUpload {
    /// The buffer, for work that is queued on the compute stream from now on: that waits for the copy, the
    /// host does not.
    pub fn wait(self) -> Result<CudaBuffer> {
        let cuda = self.buffer.cuda();
        cuda.bind()?;
        cuda.compute().wait(&self.arrived)?;
        Ok(self.buffer)
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::elementwise::add_into;
    use crate::testing::{devices, values};
    use crate::{AsyncUpload, Category, DType, Device, Tensor};

    /// Sent from another thread, while the tensors of earlier rounds are still added up and dropped: every
    /// element arrives, none too early, and no block is overwritten while it is read.
    #[test]
    fn what_is_sent_ahead_arrives_whole_and_in_its_turn() {
        const LEN: usize = 100_003;
        for [device, ..] in devices() {
            let rounds: Vec<Vec<f32>> = (0..12).map(|round| values(round, LEN, 1.0)).collect();
            let mut sum = Tensor::zeros(device, &[LEN], DType::F32, Category::Weights).unwrap();
            let (sender, receiver) = std::sync::mpsc::sync_channel(1);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let sender = sender;
                    for data in &rounds {
                        sender.send(AsyncUpload::send(device, &[LEN], data).unwrap()).unwrap();
                    }
                });
                for _ in &rounds {
                    let data = receiver.recv().unwrap().wait(Category::Transient).unwrap();
                    // Work enough that the next ones come while this is queued.
                    for _ in 0..20 {
                        add_into(&mut sum, &data).unwrap();
                    }
                }
            });
            let mut expected = vec![0.0f32; LEN];
            for data in &rounds {
                for _ in 0..20 {
                    expected.iter_mut().zip(data).for_each(|(sum, x)| *sum += x);
                }
            }
            assert_eq!(sum.to_f32(), expected);
        }
    }

    #[test]
    fn what_comes_is_counted() {
        for [shared, ..] in devices() {
            // Other tests write into the ledgers of those that are shared.
            let device = &match shared {
                Device::Cpu(_) => Device::cpu(1).unwrap(),
                Device::Cuda(cuda) => Device::Cuda(cuda.another().unwrap()),
            };
            let before = device.ledger().usage();
            let in_flight = AsyncUpload::send(device, &[3], &[1u32, 2, 3]).unwrap();
            let used = device.ledger().usage();
            assert_eq!(used.0[Category::Workspace as usize], before.0[Category::Workspace as usize] + 12);
            let uploaded = in_flight.wait(Category::Transient).unwrap();
            assert_eq!(*uploaded.host_bytes(), *bytemuck::cast_slice::<u32, u8>(&[1, 2, 3]));
            let used = device.ledger().usage();
            assert_eq!(used.0[Category::Transient as usize], before.0[Category::Transient as usize] + 12);
            drop(uploaded);
            assert_eq!(device.ledger().usage(), before);
            assert!(
                AsyncUpload::send::<u32>(device, &[0], &[]).unwrap().wait(Category::Mask).unwrap().is_empty()
            );
        }
    }
}
