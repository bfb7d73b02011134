//! Layers without parameters that change the shape of an image: pools, flattening, added channels.

use espalier_tensor::Tensor;
use espalier_tensor::ops::pool::PoolParams;
use espalier_tensor::ops::{layout, pool};

use super::{BackwardContext, ForwardContext, Layer};
use crate::Result;

/// The largest of each window. Leaves the places of the maxima, which say what ReLU behind it lets through too.
#[derive(Debug)]
pub(crate) struct MaxPool {
    /// Height, width and channels of the input.
    pub input: [usize; 3],
    pub pool: PoolParams,
    /// Whether ReLU stands behind it.
    pub relu: bool,
}

impl Layer for MaxPool {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        let (y, places) = pool::max_forward(&x, self.pool, self.relu)?;
        ctx.stash.push(places);
        Ok(y)
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, _: bool) -> Result<Option<Tensor>> {
        let [h, w, c] = self.input;
        let shape = [dy.shape()[0], h, w, c];
        Ok(Some(pool::max_backward(&dy, &ctx.stash.pop(), self.pool, &shape)?))
    }
}

/// Declares a layer whose backward pass needs nothing of its input but the shape of one sample.
macro_rules! shape_layer {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $ty:ty),* },
     |$s:ident, $x:ident| $forward:expr, |$b:ident, $dy:ident, $shape:ident| $backward:expr) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub(crate) struct $name {
            /// Height, width and channels of the input.
            pub input: [usize; 3],
            $(pub $field: $ty,)*
        }

        impl Layer for $name {
            fn forward(&self, $x: Tensor, _: &mut ForwardContext<'_>) -> Result<Tensor> {
                let $s = self;
                Ok($forward?)
            }

            fn backward(&self, $dy: Tensor, _: &mut BackwardContext<'_>, _: bool) -> Result<Option<Tensor>> {
                let $b = self;
                let [h, w, c] = self.input;
                let $shape = &[$dy.shape()[0], h, w, c];
                Ok(Some($backward?))
            }
        }
    };
}

shape_layer! {
    /// The mean of each window.
    AvgPool { pool: PoolParams },
    |s, x| pool::avg_forward(&x, s.pool), |s, dy, shape| pool::avg_backward(&dy, s.pool, shape)
}

shape_layer! {
    /// The mean over all positions.
    GlobalAvgPool {},
    |_s, x| pool::global_avg_forward(&x), |_s, dy, shape| pool::global_avg_backward(&dy, shape)
}

shape_layer! {
    /// An average pool to a given size.
    AdaptiveAvgPool { size: usize },
    |s, x| pool::adaptive_avg_forward(&x, s.size), |_s, dy, shape| pool::adaptive_avg_backward(&dy, shape)
}

shape_layer! {
    /// An image to a vector in PyTorch's order.
    Flatten {},
    |_s, x| layout::flatten(&x), |_s, dy, shape| layout::unflatten(&dy, shape)
}

shape_layer! {
    /// Zero channels at the end.
    PadChannels { channels: usize },
    |s, x| layout::pad_channels(&x, s.channels), |s, dy, _shape| layout::crop_channels(&dy, s.input[2])
}
