//! Expanding ahead of use: on a GPU beside the compute stream, so that it hides behind the work that is
//! queued there next.

use super::{cuda, expand};
use crate::cuda::side_stream::SideWork;
use crate::device::Device;
use crate::error::Result;
use crate::mask::Mask;
use crate::memory::Category;
use crate::tensor::Tensor;

/// A tensor as its kept elements.
#[derive(Debug, Clone, Copy)]
pub struct Compressed<'a> {
    /// `[mask.kept()]`.
    pub kept: &'a Tensor,
    /// Where they stand.
    pub mask: &'a Mask,
    /// That of the dense tensor.
    pub shape: &'a [usize],
}

impl Compressed<'_> {
    pub fn expand(&self, category: Category) -> Result<Tensor> {
        expand(self.kept, self.mask, self.shape, category)
    }
}

/// Dense tensors that are being made. As long as this lives nobody may change or free what they are made of;
/// its end puts whatever the compute stream is given next behind them.
#[derive(Debug)]
pub struct Expanding {
    // Before the tensors: these are freed to whoever queues next on the compute stream.
    side_work: JoinOnDrop,
    dense: Vec<Tensor>,
}

#[derive(Debug)]
struct JoinOnDrop(Option<SideWork>);

impl Drop for JoinOnDrop {
    fn drop(&mut self) {
        // A GPU that fails here fails at the next call too.
        let _ = self.0.take().map(|side_work| side_work.join());
    }
}

/// Makes dense tensors of some on one device, for any work that is queued from now on.
pub fn expand_all(all: &[Compressed<'_>], category: Category) -> Result<Vec<Tensor>> {
    let dense = all.iter().map(|one| one.expand(category)).collect::<Result<_>>()?;
    if let Some(Device::Cuda(gpu)) = all.first().map(|one| one.kept.device()) {
        cuda::fence(&gpu)?;
    }
    Ok(dense)
}

/// Starts to make dense tensors of some on one device: at once where that does nothing beside its queue.
pub fn expand_ahead(all: &[Compressed<'_>], category: Category) -> Result<Expanding> {
    let device = all.first().map(|one| one.kept.device());
    let Some(Device::Cuda(gpu)) = device.filter(Device::works_ahead) else {
        return Ok(Expanding::ready(expand_all(all, category)?));
    };
    let device = Device::Cuda(gpu.clone());
    // Memory first: what it was used for before is on the compute stream by then, behind which the side
    // stream comes.
    let empty = |one: &Compressed<'_>| {
        assert_eq!(one.shape.iter().product::<usize>(), one.mask.len(), "expand");
        assert_eq!(one.kept.len(), one.mask.kept(), "expand");
        Tensor::empty(&device, one.shape, one.kept.dtype(), category)
    };
    let mut dense = all.iter().map(empty).collect::<Result<Vec<_>>>()?;
    let side_work = gpu.on_side_stream(|stream| {
        let mut pairs = all.iter().zip(&mut dense);
        pairs.try_for_each(|(one, dense)| cuda::expand(&gpu, stream, one.kept, one.mask, dense))
    })?;
    Ok(Expanding { side_work: JoinOnDrop(Some(side_work)), dense })
}

impl Expanding {
    /// Tensors that are dense.
    pub fn ready(dense: Vec<Tensor>) -> Expanding {
        Expanding { side_work: JoinOnDrop(None), dense }
    }

    /// The tensors, for work that is queued from now on: that waits for them, the host does not.
    pub fn wait(mut self) -> Result<Vec<Tensor>> {
        if let Some(side_work) = self.side_work.0.take() {
            side_work.join()?;
            cuda::fence(side_work.cuda())?;
        }
        Ok(std::mem::take(&mut self.dense))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::compress::compress;
    use crate::ops::elementwise::add_into;
    use crate::testing::{devices, mask_words, tensor, values};
    use crate::{DType, Mask};

    /// Rounds of what training does: the next tensors are made while those before are read, what they are
    /// made of then changes, and memory goes from one to the other. Each round sees its own numbers.
    #[test]
    fn what_is_expanded_ahead_is_what_is_expanded() {
        const LEN: usize = 300_007;
        let rounds: Vec<Vec<f32>> = (0..8).map(|round| values(round, LEN, 1.0)).collect();
        for [device, ..] in devices() {
            for (share, dtype) in [(0.1, DType::F32), (0.1, DType::Bf16), (0.01, DType::Bf16)] {
                let words = mask_words(7, LEN, share);
                let mask = Mask::new(device, LEN, &words).unwrap();
                let of = |round: usize| tensor(device, dtype, &[LEN], &rounds[round]);
                let small = |round| compress(&of(round), &mask, Category::Weights).unwrap();
                let mut sum = Tensor::zeros(device, &[LEN], DType::F32, Category::Weights).unwrap();
                let mut expected = sum.duplicate(Category::Weights).unwrap();
                let mut kept = small(0);
                for round in 1..8 {
                    let source = Compressed { kept: &kept, mask: &mask, shape: &[LEN] };
                    let ahead = expand_ahead(&[source, source], Category::Workspace).unwrap();
                    // One that nobody waits for.
                    drop(expand_ahead(&[source], Category::Workspace).unwrap());
                    let plain = source.expand(Category::Workspace).unwrap();
                    add_into(&mut expected, &plain).unwrap();
                    let dense = ahead.wait().unwrap();
                    assert_eq!(dense[1].to_f32(), plain.to_f32());
                    add_into(&mut sum, &dense[0]).unwrap();
                    drop((dense, plain));
                    kept = small(round);
                }
                assert_eq!(sum.to_f32(), expected.to_f32());
            }
        }
        assert!(expand_ahead(&[], Category::Workspace).unwrap().wait().unwrap().is_empty());
    }
}
