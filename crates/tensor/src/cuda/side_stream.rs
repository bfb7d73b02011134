//! Kernels that run beside the compute stream, ahead of those that need what they make.
//!
//! They wait for what the compute stream has been given so far, so that they may write to memory which that
//! work was the last to use, and run while it takes what it is given next. Whoever needs what they make, or
//! is about to change or free what they read, orders the compute stream behind them.

use super::Cuda;
use super::stream::{Event, Stream};
use crate::error::Result;

/// Work of the side stream, up to its last kernel.
#[derive(Debug)]
pub struct SideWork {
    done: Event,
    cuda: Cuda,
}

impl Cuda {
    /// Queues what `work` launches on the side stream, behind what the compute stream has now.
    pub(crate) fn on_side_stream(&self, work: impl FnOnce(&Stream) -> Result<()>) -> Result<SideWork> {
        let side = &self.0.side;
        self.order(self.compute(), side)?;
        let queued = work(side);
        let done = Event::new()?;
        done.record(side)?;
        let work_queued = SideWork { done, cuda: self.clone() };
        if queued.is_err() {
            // What was launched of it may still write.
            work_queued.join()?;
        }
        queued.map(|()| work_queued)
    }

    /// Whether work is being recorded, for which there is one stream.
    pub fn is_recording(&self) -> bool {
        self.free_blocks().is_setting_aside()
    }
}

impl SideWork {
    /// The GPU that does it.
    pub fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    /// Lets later work of the compute stream wait for it; the host does not.
    pub fn join(&self) -> Result<()> {
        self.cuda.bind()?;
        self.cuda.compute().wait(&self.done)
    }
}
