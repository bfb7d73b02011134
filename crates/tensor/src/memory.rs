//! Every byte is counted: an allocation names its [`Category`], and a device's [`Ledger`] keeps what each
//! category holds now and the most it ever held. The plan predicts the same table; a test holds them together.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// What a chunk of memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Category {
    /// The weights that the kernels read.
    Weights,
    /// Gradients of weights, as the gradient sink keeps them.
    Gradients,
    /// Master weights, moments, momentum.
    Optimizer,
    /// Which weights are kept.
    Mask,
    /// What pruning scores weights by: sums of gradients in f32, and copies of weights to take them at.
    Scoring,
    /// What the forward pass keeps for the backward pass; see [`StashedTensor`](crate::StashedTensor).
    Activations,
    /// What flows between layers and ranks: outputs on their way, gradients of activations, samples, messages
    /// of a pipeline.
    Transient,
    /// Keys and values of the positions that a text which is being written has so far.
    Cache,
    /// Samples that stay on a device for the whole of a run.
    Data,
    /// Scratch space of one operation.
    Workspace,
    /// Buffers that only exist to be sent or received.
    Communication,
}

impl Category {
    /// All of them, in the order in which they are printed.
    pub const ALL: [Category; 11] = [
        Category::Weights,
        Category::Gradients,
        Category::Optimizer,
        Category::Mask,
        Category::Scoring,
        Category::Activations,
        Category::Transient,
        Category::Cache,
        Category::Data,
        Category::Workspace,
        Category::Communication,
    ];

    /// The name used in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Category::Weights => "weights",
            Category::Gradients => "gradients",
            Category::Optimizer => "optimizer",
            Category::Mask => "mask",
            Category::Scoring => "scoring",
            Category::Activations => "activations",
            Category::Transient => "transient",
            Category::Cache => "cache",
            Category::Data => "data",
            Category::Workspace => "workspace",
            Category::Communication => "communication",
        }
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A count that remembers its maximum.
#[derive(Debug, Default)]
struct Gauge {
    now: AtomicUsize,
    peak: AtomicUsize,
    /// The maximum since the last call of `take_recent_peak`.
    recent: AtomicUsize,
}

impl Gauge {
    fn add(&self, bytes: usize) {
        let now = self.now.fetch_add(bytes, Relaxed) + bytes;
        self.peak.fetch_max(now, Relaxed);
        self.recent.fetch_max(now, Relaxed);
    }
    fn subtract(&self, bytes: usize) {
        self.now.fetch_sub(bytes, Relaxed);
    }
}

/// A number of bytes as a person reads it: `1.21 GB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteSize(pub usize);

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 as f64 {
            n if n >= 1e9 => write!(f, "{:.2} GB", n / 1e9),
            n if n >= 1e6 => write!(f, "{:.1} MB", n / 1e6),
            n if n >= 1e3 => write!(f, "{:.1} kB", n / 1e3),
            n => write!(f, "{n} B"),
        }
    }
}

/// What the categories held at one moment, in the order of [`Category::ALL`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage(pub [usize; Category::ALL.len()]);

/// `1.21 GB (weights 0.40 GB, activations 0.81 GB)`
impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", ByteSize(self.0.iter().sum()))?;
        let used = Category::ALL.into_iter().zip(self.0).filter(|(_, bytes)| *bytes > 0);
        for (i, (category, bytes)) in used.enumerate() {
            write!(f, "{}{category} {}", if i == 0 { " (" } else { ", " }, ByteSize(bytes))?;
        }
        if self.0.iter().any(|bytes| *bytes > 0) { f.write_str(")") } else { Ok(()) }
    }
}

/// The accounts of one device; clones are the same accounts.
#[derive(Debug, Clone, Default)]
pub struct Ledger(Arc<Gauges>);

#[derive(Debug, Default)]
struct Gauges {
    categories: [Gauge; Category::ALL.len()],
    total: Gauge,
}

/// What a buffer is counted as: its category or, where that is transient and a backward pass waits for it,
/// activations.
#[derive(Debug)]
pub(crate) struct BufferLabel {
    category: Category,
    /// How many [`StashedTensor`](crate::StashedTensor) hold the buffer.
    saved: AtomicUsize,
}

impl BufferLabel {
    pub fn new(category: Category) -> BufferLabel {
        BufferLabel { category, saved: AtomicUsize::new(0) }
    }

    /// The category of a buffer that nothing waits for.
    pub fn category(&self) -> Category {
        self.category
    }

    pub fn save(&self, ledger: &Ledger, bytes: usize) {
        if self.saved.fetch_add(1, Relaxed) == 0 && self.category == Category::Transient {
            ledger.retag(Category::Transient, Category::Activations, bytes);
        }
    }

    pub fn release(&self, ledger: &Ledger, bytes: usize) {
        if self.saved.fetch_sub(1, Relaxed) == 1 && self.category == Category::Transient {
            ledger.retag(Category::Activations, Category::Transient, bytes);
        }
    }
}

/// Bytes that are counted for as long as this lives: of memory that is no buffer of the device.
#[derive(Debug)]
#[must_use = "what is counted is freed when this is dropped"]
pub struct TrackedBytes {
    ledger: Ledger,
    category: Category,
    bytes: usize,
}

impl Drop for TrackedBytes {
    fn drop(&mut self) {
        self.ledger.free(self.category, self.bytes);
    }
}

/// Numbers in host memory that are no tensor (a copy of one, keys by which weights are compared), counted as
/// workspace.
#[derive(Debug)]
pub struct HostCopy<T> {
    values: Vec<T>,
    _counted: TrackedBytes,
}

impl<T> HostCopy<T> {
    /// Counts a vector of the host as workspace, until it is dropped.
    pub fn new(ledger: &Ledger, values: Vec<T>) -> HostCopy<T> {
        let _counted = ledger.track(Category::Workspace, values.len() * size_of::<T>());
        HostCopy { values, _counted }
    }
}

impl<T> Deref for HostCopy<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.values
    }
}

impl<T> DerefMut for HostCopy<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.values
    }
}

impl Ledger {
    pub fn allocate(&self, category: Category, bytes: usize) {
        self.0.categories[category as usize].add(bytes);
        self.0.total.add(bytes);
    }

    /// Counts the end of an allocation.
    pub fn free(&self, category: Category, bytes: usize) {
        self.0.categories[category as usize].subtract(bytes);
        self.0.total.subtract(bytes);
    }

    /// Counts bytes until the result is dropped.
    pub fn track(&self, category: Category, bytes: usize) -> TrackedBytes {
        self.allocate(category, bytes);
        TrackedBytes { ledger: self.clone(), category, bytes }
    }

    /// Moves an allocation to another category; the total stays.
    pub(crate) fn retag(&self, from: Category, to: Category, bytes: usize) {
        self.0.categories[from as usize].subtract(bytes);
        self.0.categories[to as usize].add(bytes);
    }

    /// Bytes that a category holds now.
    pub fn current(&self, category: Category) -> usize {
        self.0.categories[category as usize].now.load(Relaxed)
    }

    /// The most bytes that a category has held at once.
    pub fn peak(&self, category: Category) -> usize {
        self.0.categories[category as usize].peak.load(Relaxed)
    }

    /// The most bytes that a category has held at once since the last such call; what it holds now begins the
    /// next span.
    pub fn take_recent_peak(&self, category: Category) -> usize {
        let gauge = &self.0.categories[category as usize];
        gauge.recent.swap(gauge.now.load(Relaxed), Relaxed)
    }

    /// What each category holds now.
    pub fn usage(&self) -> Usage {
        Usage(Category::ALL.map(|category| self.current(category)))
    }

    /// Bytes held now, all categories.
    pub fn total(&self) -> usize {
        self.0.total.now.load(Relaxed)
    }

    /// The most bytes held at once, all categories; at most the sum of the categories' own peaks.
    pub fn total_peak(&self) -> usize {
        self.0.total.peak.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_names_what_is_held() {
        let ledger = Ledger::default();
        assert_eq!(ledger.usage().to_string(), "0 B");
        ledger.allocate(Category::Weights, 400_000_000);
        ledger.allocate(Category::Activations, 2_100_000_000);
        assert_eq!(ledger.usage().to_string(), "2.50 GB (weights 400.0 MB, activations 2.10 GB)");
        ledger.free(Category::Weights, 400_000_000);
        assert_eq!(ledger.usage().to_string(), "2.10 GB (activations 2.10 GB)");
        ledger.retag(Category::Activations, Category::Gradients, 100_000_000);
        assert_eq!(ledger.usage().to_string(), "2.10 GB (gradients 100.0 MB, activations 2.00 GB)");
        assert_eq!((ledger.total(), ledger.total_peak()), (2_100_000_000, 2_500_000_000));
        assert_eq!(ledger.take_recent_peak(Category::Weights), 400_000_000);
        assert_eq!(ledger.take_recent_peak(Category::Weights), 0, "nothing was held since");
        assert_eq!(ledger.peak(Category::Weights), 400_000_000);
    }
}
