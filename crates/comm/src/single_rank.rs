//! A world of one rank: a reduction or a gather gives back what went in, and there is nobody to send to.
//!
//! So a program need not ask whether there are others.

use std::sync::Arc;
use std::time::Duration;

use espalier_tensor::ops::flat;

use crate::call::Operation;
use crate::communicator::Communicator;
use crate::data::CommBuffer;
use crate::error::{Error, Result};
use crate::transport::{CallBuffers, Pending, SplitChoice, Transport};

impl Communicator {
    /// The only rank of its world.
    ///
    /// ```
    /// use espalier_comm::{Communicator, Reduce};
    ///
    /// let comm = Communicator::single_rank();
    /// assert_eq!(comm.all_reduce(vec![7u64], Reduce::Sum)?, [7]);
    /// assert_eq!(comm.sent().total(), 0);
    /// # Ok::<(), espalier_comm::Error>(())
    /// ```
    pub fn single_rank() -> Communicator {
        // Nothing is ever waited for.
        Communicator::new(Arc::new(SingleRank::new(0)), Duration::MAX)
    }
}

/// The only rank of a group, which may have others in the world.
#[derive(Debug)]
pub(crate) struct SingleRank {
    /// Its number in the world.
    member: [usize; 1],
}

impl SingleRank {
    pub(crate) fn new(world_rank: usize) -> SingleRank {
        SingleRank { member: [world_rank] }
    }
}

impl Transport for SingleRank {
    fn rank(&self) -> usize {
        0
    }

    fn members(&self) -> &[usize] {
        &self.member
    }

    fn start(&self, buffers: CallBuffers, _: bool) -> Result<Box<dyn Pending>> {
        let CallBuffers { call, read, write } = buffers;
        if let Operation::Send { .. } | Operation::Receive { .. } = call.operation {
            let problem = "a rank that is alone has nobody to talk to".into();
            return Err(Error::Argument { rank: self.member[0], call, problem });
        }
        let data = match (read, write) {
            (Some(read), Some(mut write)) => {
                let refused = |problem: String| Error::Argument { rank: self.member[0], call, problem };
                copy(&read, &mut write).map_err(|why| refused(why.to_string()))?;
                Some(write)
            }
            (read, write) => write.or(read),
        };
        Ok(Box::new(CompletedCall(data)))
    }

    fn split(&self, [colour, _]: SplitChoice, _: Duration) -> Result<Option<Arc<dyn Transport>>> {
        Ok((colour > 0).then(|| Arc::new(SingleRank { ..*self }) as Arc<dyn Transport>))
    }
}

/// The shard of a single rank is the full data.
fn copy(from: &CommBuffer, into: &mut CommBuffer) -> espalier_tensor::Result<()> {
    match (from, into) {
        (CommBuffer::Tensor(from), CommBuffer::Tensor(into)) => flat::put(into, 0, from, 0..from.len()),
        (from, into) => {
            into.bytes_mut().copy_from_slice(from.bytes());
            Ok(())
        }
    }
}

struct CompletedCall(Option<CommBuffer>);

impl Pending for CompletedCall {
    fn is_done(&mut self) -> Result<bool> {
        Ok(true)
    }

    fn wait(self: Box<Self>, _: Duration) -> Result<Option<CommBuffer>> {
        Ok(self.0)
    }
}
