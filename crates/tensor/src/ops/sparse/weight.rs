//! A pruned weight of a linear layer that is trained with sparse products: where its kept elements are, in
//! both directions.
//!
//! Where the weight itself is dense, as everything else knows it, each product takes the kept elements out of
//! it anew, which costs little beside the product and leaves no second copy that could be out of date. Only
//! where they are is held, until the mask changes: by rows, by columns, and in which order the second meets
//! the first.
//!
//! W: `[rows, columns]`, f32, on the processor.

use crate::cpu::Cpu;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::mask::{Mask, ones};
use crate::memory::Category;
use crate::ops::compress::compress;
use crate::tensor::Tensor;

use super::{SparsityPattern, host, sddmm};

/// Kept elements that one task picks.
const PICK: usize = 1 << 14;

/// Where the kept elements of a matrix are. Clones share the memory.
#[derive(Debug, Clone)]
pub struct SparseWeight {
    mask: Mask,
    cpu: Cpu,
    by_rows: SparsityPattern,
    by_columns: SparsityPattern,
    /// u32 `[kept]`: of each kept element by columns, its index among those by rows.
    order: Tensor,
}

impl SparseWeight {
    /// Of a matrix of this shape under a mask; counted as mask.
    pub fn new(mask: &Mask, shape: [usize; 2]) -> Result<SparseWeight> {
        let [rows, columns] = shape;
        assert_eq!(mask.len(), rows * columns, "the mask of a matrix {shape:?}");
        let device = mask.device();
        let Device::Cpu(cpu) = device.clone() else {
            return Err(Error::Unsupported { what: "sparse weights are for processors".to_owned() });
        };
        let col_indices: Vec<usize> = ones(&mask.words()).collect();
        let (mut row_ends, mut column_ends) = (vec![0u32; rows + 1], vec![0u32; columns + 1]);
        for index in &col_indices {
            row_ends[index / columns + 1] += 1;
            column_ends[index % columns + 1] += 1;
        }
        for ends in [&mut row_ends, &mut column_ends] {
            (1..ends.len()).for_each(|i| ends[i] += ends[i - 1]);
        }
        let (mut rows_of, mut order) = (vec![0u32; col_indices.len()], vec![0u32; col_indices.len()]);
        let mut next = column_ends.clone();
        for (k, index) in col_indices.iter().enumerate() {
            let at = &mut next[index % columns];
            (rows_of[*at as usize], order[*at as usize]) = ((index / columns) as u32, k as u32);
            *at += 1;
        }
        let columns_of: Vec<u32> = col_indices.iter().map(|index| (index % columns) as u32).collect();
        Ok(SparseWeight {
            mask: mask.clone(),
            cpu,
            by_rows: SparsityPattern::new(&device, columns, &row_ends, &columns_of)?,
            by_columns: SparsityPattern::new(&device, rows, &column_ends, &rows_of)?,
            order: Tensor::from_slice(&device, &[order.len()], &order, Category::Mask)?,
        })
    }

    /// Bytes that it holds beside the mask.
    pub fn bytes(&self) -> usize {
        let patterns =
            [&self.by_rows, &self.by_columns].into_iter().flat_map(|p| [&p.offsets, &p.col_indices]);
        patterns.chain([&self.order]).map(Tensor::byte_len).sum()
    }

    /// `x W^T + bias` where `transposed`, otherwise `x W + bias`: a row for each row of x. The weight is
    /// dense, or its kept elements.
    pub fn product(
        &self,
        x: &Tensor,
        weight: &Tensor,
        transposed: bool,
        bias: Option<&Tensor>,
        category: Category,
    ) -> Result<Tensor> {
        let mut values = match weight.len() == self.mask.kept() {
            true => weight.clone(),
            false => compress(weight, &self.mask, Category::Workspace)?,
        };
        let pattern = if transposed { &self.by_rows } else { &self.by_columns };
        if !transposed {
            values = self.turned(&values)?;
        }
        assert_eq!(x.width(), pattern.columns, "a product of {:?} and {pattern:?}", x.shape());
        let mut y = Tensor::empty(&x.device(), &[x.rows(), pattern.rows], DType::F32, category)?;
        let bias = bias.map(|bias| bias.slice());
        host::matmul(&self.cpu, x, (pattern, values.slice()), bias, y.slice_mut())?;
        Ok(y)
    }

    /// The kept elements of `a^T b`, in their order: the gradient of W where a row of `a` meets its rows and
    /// one of `b` its columns. a: `[batch, rows]`, b: `[batch, columns]`.
    pub fn sampled_product(&self, a: &Tensor, b: &Tensor, category: Category) -> Result<Tensor> {
        let SparsityPattern { rows, columns, .. } = &self.by_rows;
        assert_eq!((a.width(), b.width(), a.rows()), (*rows, *columns, b.rows()), "a sampled product");
        let mut sums = Tensor::empty(&a.device(), &[self.mask.kept()], DType::F32, category)?;
        sddmm::product(&self.cpu, a, b, &self.by_rows, sums.slice_mut())?;
        Ok(sums)
    }

    /// Kept elements by rows, in the order of columns.
    fn turned(&self, values: &Tensor) -> Result<Tensor> {
        let mut turned = values.empty_like(Category::Workspace)?;
        let (values, order) = (values.slice::<f32>(), self.order.slice::<u32>());
        self.cpu.for_chunks(turned.slice_mut::<f32>(), PICK, |range, turned| {
            turned.iter_mut().zip(&order[range]).for_each(|(to, from)| *to = values[*from as usize]);
        });
        Ok(turned)
    }
}
