//! What a layer is to those who time it, split it over ranks, run it again or prune it. They ask its
//! properties and know no layer by its name.

use std::ops::Range;

use super::LayerSpec;
use crate::tiles::SlidingWindow;

/// A row of the table that all layers are; a layer says what is special about it and leaves the rest
/// [plain](Properties::PLAIN).
#[derive(Debug, Clone, Copy)]
pub struct Properties {
    /// What its passes run on a device, beside its messages to other ranks.
    pub kernel: LayerKernel,
    /// What the gradients of its parameters are made from, where that is left to be done once the gradient of
    /// its input is there.
    pub weight_reads: GradientReads,
    /// Whether the gradient of its input is that of its output, the same tensor.
    pub passes_gradient: bool,
    /// Whether its output is a cheap function of what it saves, so that a linear layer behind it need not
    /// keep its input.
    pub remakes_output: bool,
    /// Whether it takes what the layer before makes again.
    pub takes_remade: bool,
    /// Whether before a product of branches it belongs to that product.
    pub is_gate: bool,
    /// What it is where an attention's inside runs again.
    pub attention_role: AttentionRole,
    /// Elements that it keeps of each position while a text is written.
    pub cached: usize,
    /// Channels of which it takes statistics over the batch.
    pub batch_statistics: Option<usize>,
    /// Whether it draws random numbers.
    pub is_random: bool,
    /// Whether a channel of zeros leaves it as a channel of zeros.
    pub keeps_zeros: bool,
    /// Its sizes, where it multiplies.
    pub product_size: Option<ProductSize>,
    /// What it is under tensor parallelism.
    pub tensor_role: TensorRole,
    /// The most ranks that can have some of its channels each and need nothing of the others': 0 where each
    /// output sees all of them.
    pub channel_groups: usize,
    /// Whether a position's output depends on other positions.
    pub mixes_positions: bool,
    /// What it is to an image that is split into tiles.
    pub tile_role: TileRole,
    /// Whether it goes on with a tile's own pixels while those of neighbours are on their way.
    pub hides_halo: bool,
}

impl Properties {
    /// Elements are moved, and nothing else is known.
    pub const PLAIN: Properties = Properties {
        kernel: LayerKernel::COPY,
        weight_reads: GradientReads::NOTHING,
        passes_gradient: false,
        remakes_output: false,
        takes_remade: false,
        is_gate: false,
        attention_role: AttentionRole::Apart,
        cached: 0,
        batch_statistics: None,
        is_random: false,
        keeps_zeros: false,
        product_size: None,
        tensor_role: TensorRole::Replicated,
        channel_groups: usize::MAX,
        mixes_positions: false,
        tile_role: TileRole::Apart,
        hides_halo: false,
    };
}

/// The kernels of a layer, forward and backward.
#[derive(Debug, Clone, Copy)]
pub enum LayerKernel {
    /// Elements pass through memory.
    Pass(MemoryPass),
    /// `[rows, input]` by `[input, output]`, and the two products of its gradients.
    Product(ProductSize),
    /// Square filters over images.
    Convolution {
        /// Rows and columns of a filter.
        kernel: usize,
        /// Channels.
        size: ProductSize,
    },
    /// Positions by positions.
    Attention {
        /// Heads of queries,
        heads: usize,
        /// channels of all of them,
        width: usize,
        /// and of queries and keys those that are turned by their positions, or normalised, before.
        turned: usize,
    },
}

/// How often the elements of a layer's input and of its output pass through memory.
#[derive(Debug, Clone, Copy)]
pub struct MemoryPass {
    /// `[input, output]` in the forward pass,
    pub forward: [f64; 2],
    /// and in the backward pass.
    pub backward: [f64; 2],
    /// Whether next to nothing is done with them.
    pub is_light: bool,
}

impl LayerKernel {
    /// Elements are read and written and nothing else, forward and backward.
    pub(crate) const COPY: LayerKernel = LayerKernel::light([1.0, 1.0], [1.0, 1.0]);

    /// Elements that something is done with.
    pub const fn pass(forward: [f64; 2], backward: [f64; 2]) -> LayerKernel {
        LayerKernel::Pass(MemoryPass { forward, backward, is_light: false })
    }

    /// Elements that next to nothing is done with.
    pub const fn light(forward: [f64; 2], backward: [f64; 2]) -> LayerKernel {
        LayerKernel::Pass(MemoryPass { forward, backward, is_light: true })
    }
}

/// What a layer is to an attention whose inside runs again (`train.recompute = "attention"`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionRole {
    /// Attention itself: runs again.
    Core,
    /// Makes queries, keys and values: runs again where it stands before attention.
    Projects,
    /// Runs again where it stands before what projects.
    Norms,
    /// Never runs again for an attention.
    Apart,
}

/// What a layer is under tensor parallelism (Shoeybi et al. 2019).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorRole {
    /// Multiplies: opens a pair, split by its outputs, or closes one, split by its inputs.
    ColumnOrRowParallel,
    /// Multiplies: split by its outputs alone, which are gathered behind it.
    ColumnParallel,
    /// Multiplies: split by its inputs alone; what ranks make is all-reduced behind it.
    RowParallel,
    /// Stands in a pair, on a rank's own channels, element by element,
    Elementwise,
    /// or on groups of them, or on more than one position or pixel.
    Between,
    /// Every rank runs all of it.
    Replicated,
}

impl TensorRole {
    /// Whether it can be split by its outputs.
    pub fn opens(self) -> bool {
        matches!(self, TensorRole::ColumnOrRowParallel | TensorRole::ColumnParallel)
    }

    /// Whether a rank can run it on its own channels.
    pub(crate) fn is_between(self) -> bool {
        matches!(self, TensorRole::Elementwise | TensorRole::Between)
    }
}

/// The two sizes of a layer that multiplies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProductSize {
    /// Channels of its input, or rows of a table.
    pub input: usize,
    /// Channels of its output.
    pub output: usize,
}

/// A rank's shard of a layer that multiplies.
#[derive(Debug)]
pub struct LayerShard {
    /// The layer, of the rank's sizes.
    pub layer: LayerSpec,
    /// Of each parameter of the full layer the dimension that is split; none where the rank's layer does not
    /// have it.
    pub dims: Vec<Option<usize>>,
    /// What is added once ranks' results are reduced.
    pub behind: Option<LayerSpec>,
}

/// A rank's heads of an attention.
#[derive(Debug)]
pub struct HeadShard {
    /// The layer, of the rank's sizes.
    pub layer: LayerSpec,
    /// Channels of queries, keys and values in what the whole layer reads.
    pub reads: [Range<usize>; 3],
    /// Channels of what the whole layer gives.
    pub gives: Range<usize>,
    /// Channels of all queries, and of all keys, that the whole layer reads.
    pub of: [usize; 2],
    /// Whether other ranks read the same keys and values.
    pub repeated: bool,
}

/// What a layer is to an image that is split into tiles.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TileRole {
    /// Windows slide over it and see pixels of neighbours.
    Window(SlidingWindow),
    /// Each pixel by itself.
    Pixels,
    /// The mean over the image, or over so many windows along each side, all-reduced over tiles: behind it every
    /// rank has all.
    Mean(Option<usize>),
    /// It wants all of the image.
    Gathered,
    /// It is not known to run on tiles any better than on other tensors.
    Apart,
}

/// What the gradients of one layer's parameters read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GradientReads {
    /// What the layer read.
    pub input: bool,
    /// The gradient of what it made.
    pub gradient: bool,
    /// The numbers that it saved.
    pub numbers: bool,
}

impl GradientReads {
    /// There are none.
    pub(crate) const NOTHING: GradientReads = GradientReads { input: false, gradient: false, numbers: false };
    /// Of a product of the two.
    pub(crate) const PRODUCT: GradientReads = GradientReads { input: true, gradient: true, numbers: false };
    /// Of a sum of it.
    pub(crate) const GRADIENT: GradientReads = GradientReads { input: false, gradient: true, numbers: false };
    /// Of a norm: input, gradient and statistics.
    pub const ALL: GradientReads = GradientReads { input: true, gradient: true, numbers: true };
}
