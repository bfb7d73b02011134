//! Memory that is filled over the copy stream while the compute stream is at work.
//!
//! A block of the usual kind may still be in use by queued work when it is handed on, which is no matter to those who queue
//! behind that work. The copy stream does not. So these blocks go round among themselves, each with a mark of its last use
//! in the compute stream, and what is copied into one waits for that mark alone.

use std::sync::Mutex;

use super::Cuda;
use super::buffer::{Block, Buffer};
use super::stream::Event;
use crate::error::Result;
use crate::memory::Category;

/// Blocks that wait to be filled, each with its last use.
#[derive(Debug, Default)]
pub(super) struct SentBlocks(Mutex<Vec<(Block, Event)>>);

impl SentBlocks {
    /// The smallest that holds `len` and is not twice as large.
    fn take(&self, len: usize) -> Option<(Block, Event)> {
        let mut blocks = self.0.lock().expect("no panic while locked");
        let fits = |block: &Block| (len..=2 * len.max(1 << 12)).contains(&block.capacity());
        let best =
            (0..blocks.len()).filter(|&i| fits(&blocks[i].0)).min_by_key(|&i| blocks[i].0.capacity())?;
        Some(blocks.swap_remove(best))
    }

    pub(super) fn give(&self, block: Block, last_use: Event) {
        self.0.lock().expect("no panic while locked").push((block, last_use));
    }

    /// Takes all of them out, to be given back to the driver.
    pub(super) fn drain(&self) -> Vec<Block> {
        std::mem::take(&mut *self.0.lock().expect("no panic while locked"))
            .into_iter()
            .map(|(b, _)| b)
            .collect()
    }
}

/// A buffer that is on its way to the card.
#[derive(Debug)]
pub struct Sent {
    buffer: Buffer,
    arrived: Event,
}

impl Cuda {
    /// Starts to copy bytes of the host, which have been read when this returns, beside all queued work.
    pub fn send(&self, bytes: &[u8], category: Category) -> Result<Sent> {
        self.bind()?;
        let block = match self.sent_blocks().take(bytes.len()) {
            Some((block, last_use)) => {
                self.copy().wait(&last_use)?;
                block
            }
            None => Block::fresh(self, bytes.len(), category)?,
        };
        let buffer = Buffer::sent(self, block, bytes.len(), category);
        // SAFETY: the block holds as many bytes, and no queued work that comes after the mark of its last use knows it.
        self.with_sending(|staging, stream| unsafe { staging.upload(stream, buffer.address(), bytes) })?;
        let arrived = Event::new()?;
        arrived.record(self.copy())?;
        Ok(Sent { buffer, arrived })
    }
}

impl Sent {
    /// The buffer, for work that is queued on the compute stream from now on: that waits for the copy, the host does not.
    pub fn land(self) -> Result<Buffer> {
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
    use crate::{Category, Coming, DType, Device, Tensor};

    /// Sent from another thread, while the tensors of earlier rounds are still added up and dropped: every element arrives,
    /// none too early, and no block is overwritten while it is read.
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
                        sender.send(Coming::send(device, &[LEN], data).unwrap()).unwrap();
                    }
                });
                for _ in &rounds {
                    let data = receiver.recv().unwrap().land(Category::Transient).unwrap();
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
    fn what_comes_is_booked() {
        for [shared, ..] in devices() {
            // Other tests write into the ledgers of those that are shared.
            let device = &match shared {
                Device::Cpu(_) => Device::cpu(1).unwrap(),
                Device::Cuda(cuda) => Device::Cuda(cuda.another().unwrap()),
            };
            let before = device.ledger().usage();
            let coming = Coming::send(device, &[3], &[1u32, 2, 3]).unwrap();
            let held = device.ledger().usage();
            assert_eq!(held.0[Category::Workspace as usize], before.0[Category::Workspace as usize] + 12);
            let landed = coming.land(Category::Transient).unwrap();
            assert_eq!(*landed.host_bytes(), *bytemuck::cast_slice::<u32, u8>(&[1, 2, 3]));
            let held = device.ledger().usage();
            assert_eq!(held.0[Category::Transient as usize], before.0[Category::Transient as usize] + 12);
            drop(landed);
            assert_eq!(device.ledger().usage(), before);
            assert!(Coming::send::<u32>(device, &[0], &[]).unwrap().land(Category::Mask).unwrap().is_empty());
        }
    }
}
