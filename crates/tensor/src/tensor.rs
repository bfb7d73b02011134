//! A tensor: a shape over a contiguous chunk of a buffer.
//!
//! Cloning shares the buffer. Writing asks for the only owner, so that no one else can see the change;
//! a shared tensor that is written to is a mistake of ours and panics.

mod arguments;

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use crate::cpu;
use crate::cuda;
use crate::device::Device;
use crate::dtype::{DType, Element, Float};
use crate::error::Result;
use crate::memory::{Category, HostCopy};
use crate::with_float;

/// A contiguous, row-major, reference-counted array on a device.
#[derive(Debug, Clone)]
pub struct Tensor {
    storage: TensorStorage,
    dtype: DType,
    shape: Vec<usize>,
}

/// Whose memory holds the elements.
#[derive(Debug, Clone)]
enum TensorStorage {
    Cpu(Arc<cpu::buffer::HostBuffer>),
    Cuda(Arc<cuda::buffer::CudaBuffer>),
}

impl Tensor {
    /// Allocates without setting the elements: each is some valid number, but not a chosen one.
    pub fn empty(device: &Device, shape: &[usize], dtype: DType, category: Category) -> Result<Tensor> {
        let bytes = shape.iter().product::<usize>() * dtype.bytes();
        let storage = match device {
            Device::Cpu(cpu) => TensorStorage::Cpu(Arc::new(cpu.allocate(bytes, category)?)),
            Device::Cuda(cuda) => TensorStorage::Cuda(Arc::new(cuda.allocate(bytes, category)?)),
        };
        Ok(Tensor { storage, dtype, shape: shape.to_vec() })
    }

    pub fn zeros(device: &Device, shape: &[usize], dtype: DType, category: Category) -> Result<Tensor> {
        let mut t = Tensor::empty(device, shape, dtype, category)?;
        t.fill_zero()?;
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
        t.copy_from_host(bytemuck::cast_slice(data))?;
        Ok(t)
    }

    /// An uninitialised tensor of this one's shape, type and device.
    pub fn empty_like(&self, category: Category) -> Result<Tensor> {
        Tensor::empty(&self.device(), &self.shape, self.dtype, category)
    }

    /// The device that holds it.
    pub fn device(&self) -> Device {
        match &self.storage {
            TensorStorage::Cpu(buffer) => Device::Cpu(buffer.cpu().clone()),
            TensorStorage::Cuda(buffer) => Device::Cuda(buffer.cuda().clone()),
        }
    }

    /// The sizes of its dimensions, outermost first.
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

    /// The size of the last dimension: the width of a row.
    pub fn width(&self) -> usize {
        *self.shape.last().expect("a tensor with at least one dimension")
    }

    /// How many rows of [`Tensor::width`] it has.
    pub fn rows(&self) -> usize {
        self.shape[..self.shape.len() - 1].iter().product()
    }

    /// Its shape with rows of another width.
    pub fn shape_with_width(&self, width: usize) -> Vec<usize> {
        let (_, rows) = self.shape.split_last().expect("a tensor with at least one dimension");
        [rows, &[width]].concat()
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

    /// The same bytes read as another type of the same size: what only moves need not be what it says it is.
    pub fn reinterpret(mut self, dtype: DType) -> Tensor {
        assert_eq!(self.dtype.bytes(), dtype.bytes(), "{:?} read as {dtype:?}", self.dtype);
        self.dtype = dtype;
        self
    }

    /// A copy with a buffer of its own, on the same device.
    pub fn duplicate(&self, category: Category) -> Result<Tensor> {
        let mut copy = self.empty_like(category)?;
        match &self.storage {
            TensorStorage::Cpu(buffer) => copy.bytes_mut().copy_from_slice(buffer.bytes()),
            TensorStorage::Cuda(buffer) => copy.cuda_buffer_mut().copy_from(buffer)?,
        }
        Ok(copy)
    }

    /// Sets all its elements to zero; this must be its only owner.
    pub fn fill_zero(&mut self) -> Result<()> {
        match &mut self.storage {
            TensorStorage::Cpu(_) => self.bytes_mut().fill(0),
            TensorStorage::Cuda(_) => self.cuda_buffer_mut().fill(0)?,
        }
        Ok(())
    }

    /// Its elements; `T` must be its type and the host its device.
    pub fn slice<T: Element>(&self) -> &[T] {
        assert_eq!(T::DTYPE, self.dtype, "a tensor was read as another type");
        bytemuck::cast_slice(self.bytes())
    }

    /// Its elements for writing; `T` must be its type, the host its device and this its only owner.
    pub fn slice_mut<T: Element>(&mut self) -> &mut [T] {
        assert_eq!(T::DTYPE, self.dtype, "a tensor was written as another type");
        bytemuck::cast_slice_mut(self.bytes_mut())
    }

    /// Its bytes; the host must be its device.
    pub fn bytes(&self) -> &[u8] {
        match &self.storage {
            TensorStorage::Cpu(buffer) => buffer.bytes(),
            TensorStorage::Cuda(_) => {
                panic!("the host was to read a tensor {:?} that is on a GPU", self.shape)
            }
        }
    }

    /// Its bytes for writing; as [`Tensor::bytes`].
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.storage {
            TensorStorage::Cpu(buffer) => only(buffer).bytes_mut(),
            TensorStorage::Cuda(_) => {
                panic!("the host was to write a tensor {:?} that is on a GPU", self.shape)
            }
        }
    }

    /// Where a GPU keeps it, as long as it lives: recorded work knows tensors by that. None on the host.
    pub fn cuda_address(&self) -> Option<u64> {
        match &self.storage {
            TensorStorage::Cuda(buffer) => Some(buffer.address()),
            TensorStorage::Cpu(_) => None,
        }
    }

    /// Its buffer on a GPU, which must be its device.
    pub fn cuda_buffer(&self) -> &cuda::buffer::CudaBuffer {
        match &self.storage {
            TensorStorage::Cuda(buffer) => buffer,
            TensorStorage::Cpu(_) => {
                panic!("a GPU was to read a tensor {:?} that is on the host", self.shape)
            }
        }
    }

    /// Its buffer on a GPU for writing; as [`Tensor::cuda_buffer`].
    pub fn cuda_buffer_mut(&mut self) -> &mut cuda::buffer::CudaBuffer {
        match &mut self.storage {
            TensorStorage::Cuda(buffer) => only(buffer),
            TensorStorage::Cpu(_) => {
                panic!("a GPU was to write a tensor {:?} that is on the host", self.shape)
            }
        }
    }

    /// Its bytes on the host: borrowed where the device is the host, a copy otherwise. What a GPU failed at before
    /// shows here.
    pub fn read_bytes(&self) -> Result<Cow<'_, [u8]>> {
        match &self.storage {
            TensorStorage::Cpu(buffer) => Ok(Cow::Borrowed(buffer.bytes())),
            TensorStorage::Cuda(buffer) => {
                let mut bytes = vec![0; buffer.len()];
                buffer.download(&mut bytes)?;
                Ok(Cow::Owned(bytes))
            }
        }
    }

    /// As [`Tensor::read_bytes`], for tests and tools to which a broken GPU is the end.
    ///
    /// # Panics
    /// Where the GPU failed in work queued before, as it then has no bytes to give.
    pub fn host_bytes(&self) -> Cow<'_, [u8]> {
        self.read_bytes().unwrap_or_else(|e| panic!("{e}"))
    }

    /// Overwrites it with bytes of the host.
    pub fn copy_from_host(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.storage {
            TensorStorage::Cpu(_) => self.bytes_mut().copy_from_slice(bytes),
            TensorStorage::Cuda(_) => self.cuda_buffer_mut().upload(bytes)?,
        }
        Ok(())
    }

    /// Counts its memory under another category: what an operation made as workspace may be kept. This must be
    /// its only owner.
    pub fn tag_memory(&mut self, category: Category) {
        match &mut self.storage {
            TensorStorage::Cpu(buffer) => only(buffer).tag_memory(category),
            TensorStorage::Cuda(buffer) => only(buffer).tag_memory(category),
        }
    }

    /// Counts its buffer as what a backward pass waits for: see [`StashedTensor`](crate::StashedTensor).
    pub(crate) fn save(&self) {
        match &self.storage {
            TensorStorage::Cpu(buffer) => buffer.save(),
            TensorStorage::Cuda(buffer) => buffer.save(),
        }
    }

    /// The end of that.
    pub(crate) fn release(&self) {
        match &self.storage {
            TensorStorage::Cpu(buffer) => buffer.release(),
            TensorStorage::Cuda(buffer) => buffer.release(),
        }
    }

    /// Whether nobody else holds its buffer, so that it may be written to.
    pub fn is_unique(&mut self) -> bool {
        match &mut self.storage {
            TensorStorage::Cpu(buffer) => Arc::get_mut(buffer).is_some(),
            TensorStorage::Cuda(buffer) => Arc::get_mut(buffer).is_some(),
        }
    }

    /// A floating-point tensor's elements, widened, on the host.
    pub fn read_f32(&self) -> Result<Vec<f32>> {
        let bytes = self.read_bytes()?;
        let mut wide = vec![0.0; self.len()];
        with_float!(self.dtype, T => converted(&mut wide, |at, wide| {
            // A copy need not be aligned for its elements.
            let numbers = bytes[at.start * size_of::<T>()..at.end * size_of::<T>()].chunks_exact(size_of::<T>());
            let numbers = numbers.map(|x| Float::to_f32(bytemuck::pod_read_unaligned::<T>(x)));
            wide.iter_mut().zip(numbers).for_each(|(wide, x)| *wide = x);
        }));
        Ok(wide)
    }

    /// Its elements, which are of u32.
    pub fn read_u32(&self) -> Result<Vec<u32>> {
        assert_eq!(self.dtype, DType::U32, "whole numbers of {:?}", self.shape);
        Ok(self.read_bytes()?.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
    }

    /// As [`Tensor::read_f32`], counted as the host's workspace for as long as it lives: for tensors that may
    /// be large.
    pub fn copy_to_host(&self) -> Result<HostCopy<f32>> {
        Ok(HostCopy::new(self.device().host_ledger(), self.read_f32()?))
    }

    /// As [`Tensor::read_f32`], for tests and tools to which a broken GPU is the end.
    ///
    /// # Panics
    /// Where the GPU failed in work queued before.
    pub fn to_f32(&self) -> Vec<f32> {
        self.read_f32().unwrap_or_else(|e| panic!("{e}"))
    }

    /// A tensor of the given floating type from f32 values, rounded where need be.
    pub fn from_f32(
        device: &Device,
        shape: &[usize],
        dtype: DType,
        data: &[f32],
        category: Category,
    ) -> Result<Tensor> {
        with_float!(dtype, T => {
            let mut rounded: Vec<T> = vec![Float::from_f32(0.0); data.len()];
            converted(&mut rounded, |at, rounded| {
                rounded.iter_mut().zip(&data[at]).for_each(|(to, x)| *to = Float::from_f32(*x));
            });
            Tensor::from_slice(device, shape, &rounded, category)
        })
    }
}

/// Runs `task` on ranges of numbers, over rayon's threads where there are so many that these are worth waking.
fn converted<T: Send>(numbers: &mut [T], task: impl Fn(Range<usize>, &mut [T]) + Sync) {
    const MANY: usize = 1 << 17;
    if numbers.len() < MANY {
        task(0..numbers.len(), numbers)
    } else {
        cpu::chunks_over(cpu::over_threads, numbers, MANY, task)
    }
}

/// A tensor that is on its way to its device, while that is at work on others: see [`AsyncUpload::wait`].
#[derive(Debug)]
pub struct AsyncUpload {
    storage: UploadStorage,
    dtype: DType,
    shape: Vec<usize>,
}

#[derive(Debug)]
enum UploadStorage {
    /// The host has nothing to wait for.
    Cpu(Tensor),
    Cuda(cuda::upload::CudaUpload),
}

impl AsyncUpload {
    /// Starts to copy a slice to a device. Any thread may; until it lands it is counted as workspace.
    pub fn send<T: Element>(device: &Device, shape: &[usize], data: &[T]) -> Result<AsyncUpload> {
        assert_eq!(shape.iter().product::<usize>(), data.len(), "a copy of another length");
        let category = Category::Workspace;
        let storage = match device {
            Device::Cpu(_) => UploadStorage::Cpu(Tensor::from_slice(device, shape, data, category)?),
            Device::Cuda(cuda) => UploadStorage::Cuda(cuda.send(bytemuck::cast_slice(data), category)?),
        };
        Ok(AsyncUpload { storage, dtype: T::DTYPE, shape: shape.to_vec() })
    }

    /// The tensor: what is queued from now on waits for it, the host does not.
    pub fn wait(self, category: Category) -> Result<Tensor> {
        let mut tensor = match self.storage {
            UploadStorage::Cpu(tensor) => tensor,
            UploadStorage::Cuda(sent) => Tensor {
                storage: TensorStorage::Cuda(Arc::new(sent.wait()?)),
                dtype: self.dtype,
                shape: self.shape,
            },
        };
        tensor.tag_memory(category);
        Ok(tensor)
    }
}

/// A buffer that is about to be written to.
fn only<B>(buffer: &mut Arc<B>) -> &mut B {
    Arc::get_mut(buffer).expect("a tensor that is written to has one owner")
}
