//! The arguments of a launch, laid out as a kernel reads them.

use std::ffi::c_void;
use std::marker::PhantomData;

use cudarc::driver::sys::CUdeviceptr;

use super::Cuda;
use super::buffer::CudaBuffer;

/// The most arguments that a kernel takes, and the most 8-byte words that they fill.
const MOST: usize = 32;

/// A kernel's arguments, in its order. Borrows buffers until the launch is queued; after that the stream's
/// order protects them. `tensor::arguments` gives it tensors.
#[derive(Debug, Default)]
pub struct Args<'a> {
    cells: [u64; MOST],
    used: usize,
    /// Each argument's first cell and its bytes.
    offsets: [usize; MOST],
    sizes: [usize; MOST],
    count: usize,
    gpu: Option<&'a Cuda>,
    buffers: PhantomData<&'a mut CudaBuffer>,
}

impl<'a> Args<'a> {
    pub fn new() -> Args<'a> {
        Args::default()
    }

    /// A buffer to read: `const T*`.
    pub fn reads(mut self, buffer: &'a CudaBuffer) -> Args<'a> {
        self.check_same_gpu(buffer.cuda());
        self.push(buffer.address(), 8)
    }

    /// A buffer to write, whose only owner this is: `T*`.
    pub fn writes(mut self, buffer: &'a mut CudaBuffer) -> Args<'a> {
        let address = buffer.address();
        self.check_same_gpu(buffer.cuda());
        self.push(address, 8)
    }

    /// A null pointer, for a buffer that is not there.
    pub fn null(self) -> Args<'a> {
        self.push(0, 8)
    }

    /// A size or an offset: `u64`.
    pub fn size(self, value: usize) -> Args<'a> {
        self.push(value as u64, 8)
    }

    /// `u64`.
    pub fn u64(self, value: u64) -> Args<'a> {
        self.push(value, 8)
    }

    /// `i64`.
    pub fn i64(self, value: i64) -> Args<'a> {
        self.push(value as u64, 8)
    }

    /// `u32`.
    pub fn u32(self, value: u32) -> Args<'a> {
        self.push(value.into(), 4)
    }

    /// `i32`.
    pub fn i32(self, value: i32) -> Args<'a> {
        self.push((value as u32).into(), 4)
    }

    /// `double`.
    pub fn f64(self, value: f64) -> Args<'a> {
        self.push(value.to_bits(), 8)
    }

    /// `float`.
    pub fn f32(self, value: f32) -> Args<'a> {
        self.push(value.to_bits().into(), 4)
    }

    /// An address within memory that the caller keeps until the launch is queued: `T*`. For a tensor that a
    /// kernel both reads and writes, or of which it gets several addresses.
    pub fn pointer(self, address: CUdeviceptr) -> Args<'a> {
        self.push(address, 8)
    }

    /// A struct by value, whose fields are of 4 bytes.
    pub fn fields(mut self, fields: &[u32]) -> Args<'a> {
        let offset = self.used;
        for pair in fields.chunks(2) {
            let high = pair.get(1).copied().unwrap_or_default();
            self = self.cell(u64::from(pair[0]) | u64::from(high) << 32);
        }
        self.argument(offset, 4 * fields.len())
    }

    /// A struct by value, whose fields are of 8 bytes: addresses in memory that the caller keeps until the
    /// launch is queued, and numbers.
    pub fn words(mut self, fields: &[u64]) -> Args<'a> {
        let offset = self.used;
        for field in fields {
            self = self.cell(*field);
        }
        self.argument(offset, 8 * fields.len())
    }

    // The machine is little-endian, so a cell's first bytes are those of a smaller value.
    fn push(self, value: u64, size: usize) -> Args<'a> {
        let offset = self.used;
        self.cell(value).argument(offset, size)
    }

    fn cell(mut self, value: u64) -> Args<'a> {
        assert!(self.used < MOST, "a kernel with more than {} bytes of arguments", 8 * MOST);
        self.cells[self.used] = value;
        self.used += 1;
        self
    }

    fn argument(mut self, offset: usize, size: usize) -> Args<'a> {
        self.offsets[self.count] = offset;
        self.sizes[self.count] = size;
        self.count += 1;
        self
    }

    fn check_same_gpu(&mut self, gpu: &'a Cuda) {
        let first = self.gpu.get_or_insert(gpu);
        assert!(first.is(gpu), "a kernel's arguments are on two GPUs");
    }

    /// Panics where they are not those of a kernel of this GPU, name and parameters.
    pub(super) fn match_kernel(&self, cuda: &Cuda, name: &str, sizes: Option<&[usize]>) {
        assert!(self.gpu.is_none_or(|gpu| gpu.is(cuda)), "{name}: arguments of another GPU");
        if let Some(sizes) = sizes {
            let given = &self.sizes[..self.count];
            assert_eq!(given, sizes, "{name}: the bytes of each argument, given and declared");
        }
    }

    /// Hands them over as the driver wants them: an address for each, of as many cells as it fills.
    pub(super) fn with_pointers<R>(mut self, work: impl FnOnce(*mut *mut c_void) -> R) -> R {
        let mut pointers = [std::ptr::null_mut::<c_void>(); MOST];
        for (pointer, offset) in pointers.iter_mut().zip(&self.offsets[..self.count]) {
            *pointer = (&raw mut self.cells[*offset..]).cast();
        }
        work(pointers.as_mut_ptr())
    }
}
