//! Layers over an image that is tiled over ranks: each has a tile, and what its windows see of a neighbour's
//! comes here first.
//!
//! Which pixels those are is the plan's matter ([`espalier_plan::tiles`]). Here a [`HaloComm`] sends and
//! receives them; `InputSharding` begins a tiling; [`HaloExchange`] is a layer that does it before any other;
//! [`TiledConv`] is a convolution that goes on meanwhile; [`TiledMean`] ends the tiling. Batch norm needs
//! nothing of its own: the ranks of a tiling are among those with whom `SyncBatchNorm` measures.

mod conv;
mod exchange;
mod halo;
mod mean;

pub use conv::TiledConv;
pub use exchange::HaloExchange;
pub use halo::HaloComm;
pub use mean::TiledMean;
