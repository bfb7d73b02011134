//! All-reduce and reduce-scatter in the order of ranks: bf16 on the wire as it is, added in f32, rounded once.
//!
//! NCCL's own sum would round bf16 at every rank that it passes (widened to f32 it would send twice the
//! bytes), and add up f32 of three and more ranks in an order of its own, so that a run on GPUs would not be
//! that on threads. So each rank gets every rank's copy of its shard (all-to-all), adds them up, and hands
//! the sum to all (an all-gather): `2 (P - 1) / P` of the bytes, as any all-reduce. A reduce-scatter is the
//! first half. Shards are equal, as an all-gather needs them; the rest, fewer elements than ranks, goes to
//! all and is added up by all.
//!
//! data: `[elements]`; scratch: `[ranks, shard | rest]`.

use std::ffi::c_int;
use std::ops::Range;

use cudarc::driver::sys::{CUdeviceptr, CUstream};
use espalier_tensor::cuda::Cuda;

use super::library::{Nccl, NcclComm, datatype};
use crate::combine::sum_runs;
use crate::data::ElementType;

/// Which elements go where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OrderedReduce {
    pub(super) elements: usize,
    pub(super) ranks: usize,
    pub(super) rank: usize,
}

/// Runs of elements, one of each rank, that follow each other in the scratch space from `at` on; their sum
/// goes to `to`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ReduceRun {
    at: usize,
    to: Range<usize>,
}

impl OrderedReduce {
    fn shard_len(&self) -> usize {
        self.elements / self.ranks
    }

    /// The elements that a rank reduces.
    fn shard_of(&self, rank: usize) -> Range<usize> {
        rank * self.shard_len()..(rank + 1) * self.shard_len()
    }

    /// What is in no rank's shard: all reduce it.
    fn rest(&self) -> Range<usize> {
        self.ranks * self.shard_len()..self.elements
    }

    /// Elements of the scratch space.
    pub(super) fn scratch(&self) -> usize {
        self.ranks * (self.shard_len() + self.rest().len())
    }

    /// What goes to a rank, by its range in the data.
    fn sent_to(&self, peer: usize) -> [Range<usize>; 2] {
        [self.shard_of(peer), self.rest()]
    }

    /// Where in the scratch space what a rank sends is received, in the same order.
    fn received_from(&self, peer: usize) -> [Range<usize>; 2] {
        let (first, rest) = (self.rest().start, self.rest().len());
        [self.shard_of(peer), first + peer * rest..first + (peer + 1) * rest]
    }

    /// What is added up when all is received.
    fn reductions(&self) -> [ReduceRun; 2] {
        [
            ReduceRun { at: 0, to: self.shard_of(self.rank) },
            ReduceRun { at: self.rest().start, to: self.rest() },
        ]
    }
}

/// Where the data of a reduction lies on the GPU, and what carries and adds it.
pub(super) struct ReduceContext<'a> {
    pub(super) nccl: &'a Nccl,
    pub(super) comm: NcclComm,
    /// Its compute stream is the channel's.
    pub(super) cuda: &'a Cuda,
    pub(super) element: ElementType,
    pub(super) scratch: CUdeviceptr,
}

impl ReduceContext<'_> {
    fn stream(&self) -> CUstream {
        self.cuda.compute().raw()
    }

    /// Queues an all-reduce in place.
    ///
    /// # Safety
    /// The data has the layout's elements, and so has the scratch space; both are on the GPU, and are kept and
    /// left alone until the call is done.
    pub(super) unsafe fn all_reduce(&self, layout: OrderedReduce, data: CUdeviceptr) -> Result<(), String> {
        let kind = datatype(self.element);
        // SAFETY: what the caller promises; the stream adds up when all is received, and gathers when all is
        // added up. A rank's shard of the data is where an all-gather in place expects it.
        unsafe {
            self.all_to_all(layout, data)?;
            for ReduceRun { at, to } in layout.reductions() {
                self.sum(layout, at, data + self.bytes(to.start), to.len())?;
            }
            let local = data + self.bytes(layout.shard_of(layout.rank).start);
            let shard_len = layout.shard_len();
            self.nccl.check((self.nccl.all_gather)(local, data, shard_len, kind, self.comm, self.stream()))
        }
    }

    /// Queues a reduce-scatter of data whose elements can be split evenly.
    ///
    /// # Safety
    /// As for [`ReduceContext::all_reduce`]; `local` has the elements of a rank's shard.
    pub(super) unsafe fn reduce_scatter(
        &self,
        layout: OrderedReduce,
        full: CUdeviceptr,
        local: CUdeviceptr,
    ) -> Result<(), String> {
        assert!(layout.rest().is_empty(), "the parts of a reduce-scatter are equal");
        // SAFETY: what the caller promises.
        unsafe {
            self.all_to_all(layout, full)?;
            self.sum(layout, 0, local, layout.shard_len())
        }
    }

    /// Brings all ranks' copies of what this one reduces to the scratch space.
    ///
    /// # Safety
    /// As for [`ReduceContext::all_reduce`].
    unsafe fn all_to_all(&self, layout: OrderedReduce, data: CUdeviceptr) -> Result<(), String> {
        let (nccl, kind) = (self.nccl, datatype(self.element));
        // SAFETY: the two open and close a group of calls on this thread.
        nccl.check(unsafe { (nccl.group_start)() })?;
        let queued = (0..layout.ranks).try_for_each(|peer| {
            let pairs = layout.sent_to(peer).into_iter().zip(layout.received_from(peer));
            for (out, into) in pairs.filter(|(out, _)| !out.is_empty()) {
                let (peer, n) = (peer as c_int, out.len());
                let (out, into) = (data + self.bytes(out.start), self.scratch + self.bytes(into.start));
                // SAFETY: both are within the data and the scratch space.
                unsafe {
                    nccl.check((nccl.send)(out, n, kind, peer, self.comm, self.stream()))?;
                    nccl.check((nccl.receive)(into, n, kind, peer, self.comm, self.stream()))?;
                }
            }
            Ok(())
        });
        // SAFETY: as above.
        let ended = nccl.check(unsafe { (nccl.group_end)() });
        queued.and(ended)
    }

    /// # Safety
    /// As for [`ReduceContext::all_reduce`]; `to` is of at least so many elements.
    unsafe fn sum(
        &self,
        layout: OrderedReduce,
        at: usize,
        to: CUdeviceptr,
        elements: usize,
    ) -> Result<(), String> {
        // SAFETY: the scratch space has as many from there on for each rank; it is no part of the data.
        unsafe {
            sum_runs(self.cuda, self.element, self.scratch + self.bytes(at), layout.ranks, to, elements)
        }
    }

    /// Of so many elements.
    fn bytes(&self, elements: usize) -> CUdeviceptr {
        (elements * self.element.bytes()) as CUdeviceptr
    }
}

#[cfg(test)]
mod tests {
    use espalier_tensor::cuda::Cuda;
    use espalier_tensor::ops::flat;
    use espalier_tensor::{Category, DType, Device, Tensor, bf16};
    use proptest::prelude::*;

    use super::*;

    fn layouts(elements: usize, ranks: usize) -> Vec<OrderedReduce> {
        (0..ranks).map(|rank| OrderedReduce { elements, ranks, rank }).collect()
    }

    fn bytes(element: ElementType, elements: usize) -> CUdeviceptr {
        (elements * element.bytes()) as CUdeviceptr
    }

    /// Carries elements as NCCL would, between ranks that are all here: `data` of each becomes the sum of all.
    fn all_reduce(
        elements: usize,
        data: &mut [Tensor],
        sum: impl Fn(&Tensor, usize, &mut Tensor, Range<usize>),
    ) {
        let all = layouts(elements, data.len());
        let scratch_of = |at: &OrderedReduce| {
            Tensor::zeros(&data[0].device(), &[at.scratch()], data[0].dtype(), Category::Communication)
                .unwrap()
        };
        let mut scratch: Vec<Tensor> = all.iter().map(scratch_of).collect();
        for (from, data) in all.iter().zip(&*data) {
            for (to, scratch) in all.iter().zip(&mut scratch) {
                let pairs = from.sent_to(to.rank).into_iter().zip(to.received_from(from.rank));
                for (out, into) in pairs {
                    assert_eq!(out.len(), into.len(), "what is sent is what is expected");
                    flat::put(scratch, into.start, data, out).unwrap();
                }
            }
        }
        for (at, (scratch, data)) in all.iter().zip(scratch.iter().zip(&mut *data)) {
            for one in at.reductions() {
                sum(scratch, one.at, data, one.to);
            }
        }
        let shards: Vec<Tensor> = all
            .iter()
            .map(|at| flat::take(&data[at.rank], at.shard_of(at.rank), Category::Communication).unwrap())
            .collect();
        for data in data {
            for (at, shard) in all.iter().zip(&shards) {
                flat::put(data, at.rank * at.shard_len(), shard, 0..shard.len()).unwrap();
            }
        }
    }

    /// A sum that rounds once, in the order of ranks.
    fn expected(data: &[Tensor]) -> Vec<f32> {
        let all: Vec<Vec<f32>> = data.iter().map(Tensor::to_f32).collect();
        let sum = |i: usize| all.iter().map(|of| of[i]).sum::<f32>();
        let rounded =
            |sum: f32| if data[0].dtype() == DType::Bf16 { bf16::from_f32(sum).to_f32() } else { sum };
        (0..all[0].len()).map(|i| rounded(sum(i))).collect()
    }

    fn numbers(device: &Device, dtype: DType, rank: usize, elements: usize) -> Tensor {
        let number = |i: usize| ((7 * i + 13 * rank) % 101) as f32 * 1.37 - 60.0;
        let numbers: Vec<f32> = (0..elements).map(number).collect();
        Tensor::from_f32(device, &[elements], dtype, &numbers, Category::Gradients).unwrap()
    }

    fn check(
        device: &Device,
        dtype: DType,
        elements: usize,
        ranks: usize,
        sum: impl Fn(&Tensor, usize, &mut Tensor, Range<usize>),
    ) {
        let mut data: Vec<Tensor> = (0..ranks).map(|rank| numbers(device, dtype, rank, elements)).collect();
        let expected = expected(&data);
        all_reduce(elements, &mut data, sum);
        for (rank, data) in data.iter().enumerate() {
            assert_eq!(data.to_f32(), expected, "{elements} elements of {ranks} ranks: rank {rank}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Every element of every rank is summed once, by whoever is to, whatever is left over; and nothing
        /// lies on another.
        #[test]
        fn every_element_comes_to_the_one_who_adds_it_up(elements in 0usize..200, ranks in 1usize..20) {
            let device = Device::cpu(1).unwrap();
            check(&device, DType::Bf16, elements, ranks, |scratch, at, data, to| {
                let all = scratch.to_f32();
                let sum = |i: usize| (0..ranks).map(|r| all[at + r * to.len() + i]).sum::<f32>();
                let sums: Vec<bf16> = (0..to.len()).map(|i| bf16::from_f32(sum(i))).collect();
                let sums = Tensor::from_slice(&device, &[to.len()], &sums, Category::Workspace).unwrap();
                flat::put(data, to.start, &sums, 0..to.len()).unwrap();
            });
            for at in layouts(elements, ranks) {
                let mut offsets: Vec<usize> = (0..ranks).flat_map(|peer| at.received_from(peer)).flatten().collect();
                offsets.sort_unstable();
                prop_assert_eq!(offsets, (0..at.scratch()).collect::<Vec<_>>());
            }
        }
    }

    /// The same with the GPU's sum: aligned or not, long and short, more ranks than any one process has.
    #[test]
    fn a_gpu_adds_up_what_was_received() {
        let probe = Cuda::probe();
        if !probe.usable() {
            return espalier_testing::skipped(espalier_testing::Need::Cuda, probe.missing.join("; "));
        }
        let cuda = Cuda::open(0).unwrap();
        let device = Device::Cuda(cuda.clone());
        let sizes = [(1, 1), (5, 3), (64, 8), (70_003, 3), (70_003, 16), (1 << 20, 2)];
        for (dtype, element) in [(DType::Bf16, ElementType::Bf16), (DType::F32, ElementType::F32)] {
            for (elements, ranks) in sizes {
                check(&device, dtype, elements, ranks, |scratch, at, data, to| {
                    let x = scratch.cuda_buffer().address() + bytes(element, at);
                    let y = data.cuda_buffer().address() + bytes(element, to.start);
                    // SAFETY: both are within tensors that live until the GPU has been read from.
                    unsafe { sum_runs(&cuda, element, x, ranks, y, to.len()) }.unwrap();
                });
            }
        }
    }
}
