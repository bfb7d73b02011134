//! What is on its way between the ranks of a pipeline.
//!
//! A send never waits: what it sends is held until it has arrived. A receive is posted before it is needed,
//! so that it arrives while the rank computes.

use std::collections::HashMap;

use espalier_comm::{Communicator, Request};
use espalier_plan::schedule::{Payload, StageMessage};
use espalier_tensor::Tensor;

use crate::Result;

/// Which tensor: what it is, of which micro-batch, for which chunk of this rank.
pub(super) type TensorKey = (Payload, usize, usize);

/// The key of what a message brings.
pub(super) fn key(message: &StageMessage) -> TensorKey {
    (message.payload, message.micro_batch, message.chunk)
}

/// Messages of one rank.
#[derive(Debug, Default)]
pub(super) struct Messages {
    /// Arrived, or made here for another chunk of this rank.
    here: HashMap<TensorKey, Tensor>,
    /// Made here for another rank.
    to_send: HashMap<TensorKey, Tensor>,
    posted: HashMap<TensorKey, Request<Tensor>>,
    sending: Vec<Request<Tensor>>,
}

impl Messages {
    /// Whether the receive of a message is posted, or behind us.
    pub fn expects(&self, message: &StageMessage) -> bool {
        self.posted.contains_key(&key(message)) || self.here.contains_key(&key(message))
    }

    /// Keeps a receive that was posted.
    pub fn post(&mut self, message: &StageMessage, request: Request<Tensor>) {
        self.posted.insert(key(message), request);
    }

    /// Waits for a message that was posted.
    pub fn wait(&mut self, message: &StageMessage) -> Result<()> {
        if let Some(request) = self.posted.remove(&key(message)) {
            self.here.insert(key(message), request.wait()?);
        }
        Ok(())
    }

    /// Whether a message that was posted has arrived.
    pub(crate) fn has_arrived(&mut self, message: &StageMessage) -> Result<bool> {
        match self.posted.get_mut(&key(message)) {
            Some(request) => Ok(request.is_done()?),
            None => Ok(self.here.contains_key(&key(message))),
        }
    }

    /// Takes what has arrived.
    pub fn take(&mut self, key: TensorKey) -> Option<Tensor> {
        self.here.remove(&key)
    }

    /// How many receives are posted.
    pub(crate) fn posted(&self) -> usize {
        self.posted.len()
    }

    /// Leaves a tensor for another chunk of this rank.
    pub fn store(&mut self, key: TensorKey, tensor: Tensor) {
        self.here.insert(key, tensor);
    }

    /// Leaves a tensor for the send that follows.
    pub(crate) fn queue_send(&mut self, key: TensorKey, tensor: Tensor) {
        self.to_send.insert(key, tensor);
    }

    /// Sends what was left for it.
    pub fn send(&mut self, message: &StageMessage, tag: u32, pipeline_group: &Communicator) -> Result<()> {
        let tensor =
            self.to_send.remove(&key(message)).expect("a send follows the pass that made what it sends");
        self.release_sent()?;
        self.sending.push(pipeline_group.start_send(tensor, message.peer, tag)?);
        Ok(())
    }

    /// Lets go of what has arrived at the others.
    fn release_sent(&mut self) -> Result<()> {
        let mut failed = None;
        self.sending.retain_mut(|request| match request.is_done() {
            Ok(done) => !done,
            Err(error) => {
                failed = Some(error);
                false
            }
        });
        failed.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Waits until all that was sent has arrived.
    pub fn finish(&mut self) -> Result<()> {
        self.sending.drain(..).try_for_each(|request| request.wait().map(drop))?;
        Ok(())
    }
}
