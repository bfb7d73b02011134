//! Tensors as arguments of a GPU's kernels: here rather than with the kernels, which know buffers alone.

use super::Tensor;
use crate::cuda::Args;

impl<'a> Args<'a> {
    /// A tensor to read: `const T*`.
    pub fn input(self, tensor: &'a Tensor) -> Args<'a> {
        self.reads(tensor.cuda_buffer())
    }

    /// A tensor to write, whose only owner this is: `T*`.
    pub fn output(self, tensor: &'a mut Tensor) -> Args<'a> {
        self.writes(tensor.cuda_buffer_mut())
    }

    /// A tensor to read, or a null pointer.
    pub(crate) fn optional_input(self, tensor: Option<&'a Tensor>) -> Args<'a> {
        match tensor {
            Some(tensor) => self.input(tensor),
            None => self.null(),
        }
    }

    /// A tensor to write, or a null pointer.
    pub(crate) fn optional_output(self, tensor: Option<&'a mut Tensor>) -> Args<'a> {
        match tensor {
            Some(tensor) => self.output(tensor),
            None => self.null(),
        }
    }
}
