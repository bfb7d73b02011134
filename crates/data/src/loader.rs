//! Batches on their way to a GPU before they are asked for.
//!
//! Which samples a step reads is a function of its number, so the next batches can be gathered and sent while
//! the GPU is at work on this one: by a thread of its own, over the GPU's copy stream. That changes when a
//! batch is made and not what is in it, so runs repeat. A processor makes a batch when it is asked for: there
//! is no one else to do it. So does a GPU that keeps the full data set, in one launch: then there is no
//! thread either.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

use espalier_tensor::ops::standardise::standardise;
use espalier_tensor::{AsyncUpload, Category, DType, Device, Tensor};

use crate::{DataSplit, Dataset, HostBatch, Inputs, Result};

/// Batches that are made ahead, at most: so that one which takes long, as images do that are decoded, is not
/// waited for.
const MOST_AHEAD: usize = 3;

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
enum UploadingBatch {
    Tokens {
        ids: AsyncUpload,
        targets: AsyncUpload,
        positions: Option<AsyncUpload>,
    },
    /// With their labels in the crops.
    Images {
        pixels: AsyncUpload,
        values: AsyncUpload,
        crops: AsyncUpload,
        size: [usize; 2],
    },
}

impl UploadingBatch {
    fn send(host: &HostBatch, device: &Device) -> Result<UploadingBatch> {
        match &host.inputs {
            Inputs::Tokens { ids, shape } => {
                let positions = host.positions.as_ref();
                Ok(UploadingBatch::Tokens {
                    ids: AsyncUpload::send(device, shape, ids)?,
                    targets: AsyncUpload::send(device, &[host.targets.len()], &host.targets)?,
                    positions: positions
                        .map(|positions| AsyncUpload::send(device, shape, positions))
                        .transpose()?,
                })
            }
            Inputs::Images(images) => {
                let values = images.values.as_flattened();
                Ok(UploadingBatch::Images {
                    pixels: AsyncUpload::send(device, &images.shape, &images.pixels)?,
                    values: AsyncUpload::send(device, &[values.len() / 256, 256], values)?,
                    crops: AsyncUpload::send(device, &images.crops_shape(), images.crop_numbers())?,
                    size: images.size,
                })
            }
        }
    }

    fn land(self, device: &Device, dtype: DType) -> Result<Batch> {
        let here = |upload: AsyncUpload| upload.wait(Category::Transient);
        match self {
            UploadingBatch::Tokens { ids, targets, positions } => Ok(Batch {
                inputs: here(ids)?,
                targets: here(targets)?,
                positions: positions.map(here).transpose()?,
            }),
            UploadingBatch::Images { pixels, values, crops, size } => {
                let (pixels, values, crops) = (here(pixels)?, here(values)?, here(crops)?);
                let (inputs, targets) = standardise(device, &pixels, &values, &crops, size, dtype)?;
                Ok(Batch { inputs, targets, positions: None })
            }
        }
    }
}

/// Makes batches, the next ones ahead of their time.
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
    requested: VecDeque<Samples>,
    /// How many batches it is asked for: one more each time that they were the right ones, and one again after
    /// a wrong guess, as where a rank of a pipeline reads the same samples twice.
    depth: usize,
    thread: Option<JoinHandle<()>>,
}

impl DataLoader {
    /// For batches of this data on this device; images in this type.
    pub fn new(dataset: Arc<Dataset>, device: &Device, dtype: DType) -> DataLoader {
        DataLoader { dataset, device: device.clone(), dtype, ahead: Mutex::new(None) }
    }

    /// The batch of these training samples: the one that was prepared, or else a new one.
    pub fn take(&self, samples: &[(u64, usize)]) -> Result<Batch> {
        let start = Instant::now();
        let mut ahead = self.ahead.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let prepared = ahead.as_mut().and_then(|ahead| ahead.take(samples));
        let batch = match prepared {
            Some(prepared) => prepared?.land(&self.device, self.dtype),
            None => match self.dataset.fetch(&self.device, self.dtype, DataSplit::Train, samples)? {
                Fetched::Device(batch) => Ok(batch),
                Fetched::Host(host) => {
                    UploadingBatch::send(&host, &self.device)?.land(&self.device, self.dtype)
                }
            },
        };
        self.device.waited_for_data(start.elapsed());
        batch
    }

    /// Announces which samples will be taken: `upcoming(1)` next, `upcoming(2)` behind them, and so on. Where
    /// that is worth while they are made ready now, beside whatever the caller does. Being wrong costs time
    /// alone.
    pub fn prepare(&self, upcoming: impl Fn(usize) -> Samples) {
        if matches!(self.device, Device::Cpu(_)) || self.dataset.is_on(&self.device) {
            return;
        }
        let mut ahead = self.ahead.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if ahead.is_none() {
            *ahead = Prefetcher::start(self.dataset.clone(), self.device.clone());
        }
        if let Some(ahead) = ahead.as_mut() {
            ahead.ask(upcoming);
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
        let requested = VecDeque::new();
        Some(Prefetcher { requests: Some(requests), made, requested, depth: 1, thread: Some(thread) })
    }

    fn ask(&mut self, upcoming: impl Fn(usize) -> Samples) {
        let mut wanted: Vec<Samples> = (1..=self.depth).map(upcoming).collect();
        if self.requested.iter().zip(&wanted).any(|(requested, wanted)| requested != wanted) {
            self.forget();
            wanted.truncate(self.depth);
        }
        let requests = self.requests.as_ref().expect("open until it is dropped");
        for samples in wanted.into_iter().skip(self.requested.len()) {
            // A thread that is gone is noticed when the batch is taken: it is then made there.
            if requests.send(samples.clone()).is_ok() {
                self.requested.push_back(samples);
            }
        }
    }

    /// What was prepared, if it was these; `None` also where the thread has ended.
    fn take(&mut self, samples: &[(u64, usize)]) -> Option<Result<UploadingBatch>> {
        if self.requested.front().is_none_or(|requested| requested != samples) {
            self.forget();
            return None;
        }
        self.requested.pop_front();
        self.depth = MOST_AHEAD.min(self.depth + 1);
        self.made.recv().ok()
    }

    /// Lets go of what was prepared for nothing.
    fn forget(&mut self) {
        for _ in self.requested.drain(..) {
            let _ = self.made.recv();
            self.depth = 1;
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
        let ask = |from| ahead.ahead.lock().unwrap().as_mut().unwrap().ask(|n| samples(from + 4 * (n - 1)));
        let asked_for = || ahead.ahead.lock().unwrap().as_ref().unwrap().requested.len();
        for (requested, taken) in [
            (Some(4), 4),
            (Some(8), 12),
            (None, 16),
            (Some(20), 20),
            (Some(24), 24),
            (Some(28), 28),
            (Some(28), 28),
        ] {
            if let Some(requested) = requested {
                ask(requested);
                ask(requested);
            }
            let expected = bytes(&plain.take(&samples(taken)).unwrap());
            assert_eq!(bytes(&ahead.take(&samples(taken)).unwrap()), expected, "{requested:?}, {taken}");
        }
        ask(32);
        assert_eq!(asked_for(), 2);
        ask(40);
        assert_eq!(asked_for(), 1, "fewer after a wrong guess");
        drop((ahead, plain));
        assert_eq!(device.ledger().total(), 0, "a batch that nobody took is let go");
    }
}
