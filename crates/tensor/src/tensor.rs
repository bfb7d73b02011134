//! A tensor: a shape over a contiguous piece of a buffer.
//!
//! Cloning shares the buffer. Writing asks for the only owner, so that no one else can see the change;
//! a shared tensor that is written to is a mistake of ours and panics.

use std::borrow::Cow;
use std::sync::Arc;

use crate::cpu::buffer::Buffer;
use crate::device::Device;
use crate::dtype::{DType, Element, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::with_float;

/// A contiguous, row-major, reference-counted array on a device.
#[derive(Debug, Clone)]
pub struct Tensor {
    buffer: Arc<Buffer>,
    dtype: DType,
    shape: Vec<usize>,
}

impl Tensor {
    /// Allocates without setting the elements: each is some valid number, but not a chosen one.
    pub fn empty(device: &Device, shape: &[usize], dtype: DType, category: Category) -> Result<Tensor> {
        let bytes = shape.iter().product::<usize>() * dtype.bytes();
        let Device::Cpu(cpu) = device;
        Ok(Tensor { buffer: Arc::new(cpu.allocate(bytes, category)?), dtype, shape: shape.to_vec() })
    }

    /// Allocates zeros.
    pub fn zeros(device: &Device, shape: &[usize], dtype: DType, category: Category) -> Result<Tensor> {
        let mut t = Tensor::empty(device, shape, dtype, category)?;
        t.bytes_mut().fill(0);
        Ok(t)
    }

    /// Copies a slice onto the device.
    pub fn from_slice<T: Element>(
        device: &Device,
        shape: &[usize],
        data: &[T],
        category: Category,
    ) -> Result<Tensor> {
        let mut t = Tensor::empty(device, shape, T::DTYPE, category)?;
        t.slice_mut::<T>().copy_from_slice(data);
        Ok(t)
    }

    /// An uninitialised tensor of this one's shape, type and device.
    pub fn empty_like(&self, category: Category) -> Result<Tensor> {
        Tensor::empty(&self.device(), &self.shape, self.dtype, category)
    }

    /// The device that holds it.
    pub fn device(&self) -> Device {
        Device::Cpu(self.buffer.cpu().clone())
    }

    /// Its extents, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of its elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The last extent: the width of a row.
    pub fn width(&self) -> usize {
        *self.shape.last().expect("a tensor with at least one dimension")
    }

    /// How many rows of [`Tensor::width`] it has.
    pub fn rows(&self) -> usize {
        self.shape[..self.shape.len() - 1].iter().product()
    }

    /// Bytes of its elements.
    pub fn byte_len(&self) -> usize {
        self.len() * self.dtype.bytes()
    }

    /// The same elements under another shape.
    pub fn reshape(mut self, shape: &[usize]) -> Tensor {
        assert_eq!(self.len(), shape.iter().product(), "reshape {:?} to {shape:?}", self.shape);
        self.shape = shape.to_vec();
        self
    }

    /// A copy with a buffer of its own.
    pub fn duplicate(&self, category: Category) -> Result<Tensor> {
        let mut copy = self.empty_like(category)?;
        copy.bytes_mut().copy_from_slice(self.bytes());
        Ok(copy)
    }

    /// Its elements; `T` must be its type.
    pub fn slice<T: Element>(&self) -> &[T] {
        assert_eq!(T::DTYPE, self.dtype, "a tensor was read as another type");
        bytemuck::cast_slice(self.bytes())
    }

    /// Its elements for writing; `T` must be its type and this its only owner.
    pub fn slice_mut<T: Element>(&mut self) -> &mut [T] {
        assert_eq!(T::DTYPE, self.dtype, "a tensor was written as another type");
        bytemuck::cast_slice_mut(self.bytes_mut())
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        self.buffer.bytes()
    }

    /// Its bytes for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        Arc::get_mut(&mut self.buffer).expect("a tensor that is written to has one owner").bytes_mut()
    }

    /// Its bytes on the host: borrowed where the device is the host, a copy otherwise.
    pub fn host_bytes(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.bytes())
    }

    /// Overwrites it with bytes of the host.
    pub fn copy_from_host(&mut self, bytes: &[u8]) {
        self.bytes_mut().copy_from_slice(bytes);
    }

    /// Whether nobody else holds its buffer, so that it may be written to.
    pub fn is_unique(&mut self) -> bool {
        Arc::get_mut(&mut self.buffer).is_some()
    }

    /// A floating-point tensor's elements, widened, on the host.
    pub fn to_f32(&self) -> Vec<f32> {
        with_float!(self.dtype, T => self.slice::<T>().iter().map(|x| x.to_f32()).collect())
    }

    /// A tensor of the given floating type from f32 values, rounded where need be.
    pub fn from_f32(
        device: &Device,
        shape: &[usize],
        dtype: DType,
        data: &[f32],
        category: Category,
    ) -> Result<Tensor> {
        let mut t = Tensor::empty(device, shape, dtype, category)?;
        with_float!(dtype, T => for (y, x) in t.slice_mut::<T>().iter_mut().zip(data) {
            *y = T::from_f32(*x);
        });
        Ok(t)
    }
}
