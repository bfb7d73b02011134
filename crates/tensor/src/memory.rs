//! Every byte is counted: an allocation names its [`Category`], and a device's [`Ledger`] keeps what each
//! category holds now and the most it ever held. The plan predicts the same table; a test holds them together.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// What a piece of memory is for.
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
    /// What the forward pass leaves for the backward pass, and what flows between layers.
    Activations,
    /// Scratch space of one operation.
    Workspace,
    /// Buffers that only exist to be sent or received.
    Communication,
}

impl Category {
    /// All of them, in the order in which they are printed.
    pub const ALL: [Category; 7] = [
        Category::Weights,
        Category::Gradients,
        Category::Optimizer,
        Category::Mask,
        Category::Activations,
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
            Category::Activations => "activations",
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
}

impl Gauge {
    fn add(&self, bytes: usize) {
        let now = self.now.fetch_add(bytes, Relaxed) + bytes;
        self.peak.fetch_max(now, Relaxed);
    }
    fn subtract(&self, bytes: usize) {
        self.now.fetch_sub(bytes, Relaxed);
    }
}

/// The books of one device.
#[derive(Debug, Default)]
pub struct Ledger {
    categories: [Gauge; Category::ALL.len()],
    total: Gauge,
}

impl Ledger {
    /// Books an allocation.
    pub fn allocate(&self, category: Category, bytes: usize) {
        self.categories[category as usize].add(bytes);
        self.total.add(bytes);
    }

    /// Books its end.
    pub fn free(&self, category: Category, bytes: usize) {
        self.categories[category as usize].subtract(bytes);
        self.total.subtract(bytes);
    }

    /// Bytes that a category holds now.
    pub fn current(&self, category: Category) -> usize {
        self.categories[category as usize].now.load(Relaxed)
    }

    /// The most bytes that a category has held at once.
    pub fn peak(&self, category: Category) -> usize {
        self.categories[category as usize].peak.load(Relaxed)
    }

    /// Bytes held now, all categories.
    pub fn total(&self) -> usize {
        self.total.now.load(Relaxed)
    }

    /// The most bytes held at once, all categories; at most the sum of the categories' own peaks.
    pub fn total_peak(&self) -> usize {
        self.total.peak.load(Relaxed)
    }
}
