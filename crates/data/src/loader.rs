//! Batches on their way to a GPU before they are asked for.
//!
//! Which samples a step reads is a function of its number, so the next batch can be gathered and sent while
//! the GPU is at work on this one: by a thread of its own, over the GPU's copy stream. That changes when a
//! batch is made and not what is in it, so runs repeat. A processor makes a batch when it is asked for: there
//! is no one else to do it. So does a GPU that keeps the full data set, in one launch: then there is no
//! thread either.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};

use espalier_tensor::ops::cast::cast;
use espalier_tensor::{AsyncUpload, Category, DType, Device, Tensor};

use crate::{DataSplit, Dataset, HostBatch, Inputs, Result};

/// Training samples, each as (epoch, index).
pub type Samples = Vec<(u64, usize)>;

/// A batch on a device.
#[derive(Debug)]
pub struct Batch {
    /// What the model sees, images in the type that its kernels compute in.
    pub inputs: Tensor,
    /// What it should say.
    pub targets: Tensor,
    /// Where several documents lie in a sequence, the index of each id in its own.
    pub positions: Option<Tensor>,
}

/// A batch as the data set has made it.
#[derive(Debug)]
pub enum Fetched {
    /// In host memory, to be sent.
    Host(HostBatch),
    Device(Batch),
}

impl Fetched {
    /// What the model sees, on the device, images in the type that its kernels compute in.
    pub fn inputs(&self, device: &Device, dtype: DType) -> Result<Tensor> {
        match self {
            Fetched::Host(host) => Ok(host.inputs.upload(device, dtype)?),
            Fetched::Device(batch) => Ok(batch.inputs.clone()),
        }
    }

    /// Where documents begin, on the device; none where a sequence is one document.
    pub fn positions(&self, device: &Device) -> Result<Option<Tensor>> {
        match self {
            Fetched::Host(HostBatch {
                inputs: Inputs::Tokens { shape, .. },
                positions: Some(positions),
                ..
            }) => Ok(Some(Tensor::from_slice(device, shape, positions, Category::Transient)?)),
            Fetched::Host(_) => Ok(None),
            Fetched::Device(batch) => Ok(batch.positions.clone()),
        }
    }

    /// What it should say, on the device.
    pub fn targets(&self, device: &Device) -> Result<Tensor> {
        match self {
            Fetched::Host(HostBatch { targets, .. }) => {
                Ok(Tensor::from_slice(device, &[targets.len()], targets, Category::Transient)?)
            }
            Fetched::Device(batch) => Ok(batch.targets.clone()),
        }
    }
}

/// A batch in flight.
#[derive(Debug)]
struct UploadingBatch {
    inputs: AsyncUpload,
    targets: AsyncUpload,
    positions: Option<AsyncUpload>,
}

impl UploadingBatch {
    fn send(host: &HostBatch, device: &Device) -> Result<UploadingBatch> {
        let inputs = match &host.inputs {
            Inputs::Tokens { ids, shape } => AsyncUpload::send(device, shape, ids)?,
            Inputs::Images { pixels, shape } => AsyncUpload::send(device, shape, pixels)?,
        };
        let positions = match (&host.inputs, &host.positions) {
            (Inputs::Tokens { shape, .. }, Some(positions)) => {
                Some(AsyncUpload::send(device, shape, positions)?)
            }
            _ => None,
        };
        let targets = AsyncUpload::send(device, &[host.targets.len()], &host.targets)?;
        Ok(UploadingBatch { inputs, targets, positions })
    }

    fn land(self, dtype: DType) -> Result<Batch> {
        let mut inputs = self.inputs.wait(Category::Transient)?;
        if inputs.dtype() != DType::U32 && inputs.dtype() != dtype {
            inputs = cast(&inputs, dtype, Category::Transient)?;
        }
        let positions = self.positions.map(|positions| positions.wait(Category::Transient)).transpose()?;
        Ok(Batch { inputs, targets: self.targets.wait(Category::Transient)?, positions })
    }
}

/// Makes batches, the next one ahead of its time.
#[derive(Debug)]
pub struct DataLoader {
    dataset: Arc<Dataset>,
    device: Device,
    dtype: DType,
    ahead: Mutex<Option<Prefetcher>>,
}

/// The thread that works ahead, and what it was asked for.
#[derive(Debug)]
struct Prefetcher {
    requests: Option<Sender<Samples>>,
    made: Receiver<Result<UploadingBatch>>,
    requested: Option<Samples>,
    thread: Option<JoinHandle<()>>,
}

impl DataLoader {
    /// For batches of this data on this device; images in this type.
    pub fn new(dataset: Arc<Dataset>, device: &Device, dtype: DType) -> DataLoader {
        DataLoader { dataset, device: device.clone(), dtype, ahead: Mutex::new(None) }
    }

    /// The batch of these training samples: the one that was prepared, or else a new one.
    pub fn take(&self, samples: &[(u64, usize)]) -> Result<Batch> {
        let mut ahead = self.ahead.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(under) = ahead.as_mut().and_then(|ahead| ahead.take(samples)) {
            return under?.land(self.dtype);
        }
        match self.dataset.fetch(&self.device, self.dtype, DataSplit::Train, samples)? {
            Fetched::Device(batch) => Ok(batch),
            Fetched::Host(host) => UploadingBatch::send(&host, &self.device)?.land(self.dtype),
        }
    }

    /// Announces which samples will be taken next. Where that is worth while they are made ready now, beside
    /// whatever the caller does. Being wrong costs time alone.
    pub fn prepare(&self, samples: impl FnOnce() -> Samples) {
        if matches!(self.device, Device::Cpu(_)) || self.dataset.is_on(&self.device) {
            return;
        }
        let mut ahead = self.ahead.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if ahead.is_none() {
            *ahead = Prefetcher::start(self.dataset.clone(), self.device.clone());
        }
        if let Some(ahead) = ahead.as_mut() {
            ahead.ask(samples());
        }
    }
}

impl Prefetcher {
    /// `None` where the system gives no thread: then batches are made when they are asked for.
    fn start(dataset: Arc<Dataset>, device: Device) -> Option<Prefetcher> {
        let (requests, wanted) = channel::<Samples>();
        let (maker, made) = channel();
        let work = move || {
            for samples in wanted {
                let batch = dataset.batch(DataSplit::Train, &samples);
                if maker.send(batch.and_then(|host| UploadingBatch::send(&host, &device))).is_err() {
                    return;
                }
            }
        };
        let thread = Builder::new().name("espalier-feed".into()).spawn(work).ok()?;
        Some(Prefetcher { requests: Some(requests), made, requested: None, thread: Some(thread) })
    }

    fn ask(&mut self, samples: Samples) {
        if self.requested.as_ref() == Some(&samples) {
            return;
        }
        self.forget();
        let requests = self.requests.as_ref().expect("open until it is dropped");
        // A thread that is gone is noticed when the batch is taken: it is then made there.
        self.requested = requests.send(samples.clone()).is_ok().then_some(samples);
    }

    /// What was prepared, if it was these; `None` also where the thread has ended.
    fn take(&mut self, samples: &[(u64, usize)]) -> Option<Result<UploadingBatch>> {
        if self.requested.as_deref() != Some(samples) {
            self.forget();
            return None;
        }
        self.requested = None;
        self.made.recv().ok()
    }

    /// Lets go of what was prepared for nothing.
    fn forget(&mut self) {
        if self.requested.take().is_some() {
            let _ = self.made.recv();
        }
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed, and its batch was made elsewhere.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ImageDataset, Shapes};

    fn data() -> Arc<Dataset> {
        let shapes = Shapes { count: 60, size: 16, seed: 1 };
        Arc::new(Dataset::Images(ImageDataset::shapes(&shapes, 0.1).unwrap()))
    }

    fn samples(from: usize) -> Samples {
        (from..from + 4).map(|i| (0, i)).collect()
    }

    fn bytes(batch: &Batch) -> (Vec<u8>, Vec<u8>) {
        (batch.inputs.host_bytes().into_owned(), batch.targets.host_bytes().into_owned())
    }

    /// Whether prepared, prepared wrongly or not at all, a batch is the same; with the thread also on a processor.
    #[test]
    fn what_was_prepared_is_what_would_have_been_made() {
        let (data, device) = (data(), Device::cpu(1).unwrap());
        let plain = DataLoader::new(data.clone(), &device, DType::F32);
        let ahead = DataLoader::new(data.clone(), &device, DType::F32);
        *ahead.ahead.lock().unwrap() = Prefetcher::start(data.clone(), device.clone());
        let ask = |from| ahead.ahead.lock().unwrap().as_mut().unwrap().ask(samples(from));
        for (requested, taken) in [(Some(4), 4), (Some(8), 12), (None, 16), (Some(20), 20)] {
            if let Some(requested) = requested {
                ask(requested);
                ask(requested);
            }
            let expected = bytes(&plain.take(&samples(taken)).unwrap());
            assert_eq!(bytes(&ahead.take(&samples(taken)).unwrap()), expected, "{requested:?}, {taken}");
        }
        ask(24);
        drop(ahead);
        assert_eq!(device.ledger().total(), 0, "a batch that nobody took is let go");
    }
}
