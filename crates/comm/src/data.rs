//! What messages are made of: tensors, and plain numbers of the host for what ranks must agree on.
//!
//! A message owns its data while it is on its way. That is what makes waiting with a limit sound: a rank that
//! gives up leaves its buffer behind, and whoever is still writing to it writes to memory that nobody else
//! uses.

use std::fmt;

use espalier_tensor::{DType, Device, Tensor};

/// The type of a message's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ElementType {
    F32,
    /// The upper half of an f32; reduced in f32.
    Bf16,
    U32,
    /// 64-bit whole numbers: counts, hashes.
    U64,
    /// 64-bit floating point: norms, losses.
    F64,
}

impl ElementType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            ElementType::Bf16 => 2,
            ElementType::F32 | ElementType::U32 => 4,
            ElementType::U64 | ElementType::F64 => 8,
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ElementType::F32 => "f32",
            ElementType::Bf16 => "bf16",
            ElementType::U32 => "u32",
            ElementType::U64 => "u64",
            ElementType::F64 => "f64",
        })
    }
}

/// The data of a message.
#[derive(Debug)]
pub enum CommBuffer {
    /// A tensor, on whichever device.
    Tensor(Tensor),
    /// Whole numbers of the host.
    U64(Vec<u64>),
    /// Real numbers of the host.
    F64(Vec<f64>),
}

impl CommBuffer {
    /// The type of its elements.
    pub fn element(&self) -> ElementType {
        match self {
            CommBuffer::Tensor(tensor) => match tensor.dtype() {
                DType::F32 => ElementType::F32,
                DType::Bf16 => ElementType::Bf16,
                DType::U32 => ElementType::U32,
                DType::U16 => panic!("the low bits of weights are no message: send the exact weights"),
                DType::U8 => panic!("every rank reads its images itself"),
            },
            CommBuffer::U64(_) => ElementType::U64,
            CommBuffer::F64(_) => ElementType::F64,
        }
    }

    /// The number of its elements.
    pub fn len(&self) -> usize {
        match self {
            CommBuffer::Tensor(tensor) => tensor.len(),
            CommBuffer::U64(numbers) => numbers.len(),
            CommBuffer::F64(numbers) => numbers.len(),
        }
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the host can read it where it is.
    pub(crate) fn on_host(&self) -> bool {
        match self {
            CommBuffer::Tensor(tensor) => matches!(tensor.device(), Device::Cpu(_)),
            CommBuffer::U64(_) | CommBuffer::F64(_) => true,
        }
    }

    /// Its bytes; it must be on the host.
    pub fn bytes(&self) -> &[u8] {
        match self {
            CommBuffer::Tensor(tensor) => tensor.bytes(),
            CommBuffer::U64(numbers) => bytemuck::cast_slice(numbers),
            CommBuffer::F64(numbers) => bytemuck::cast_slice(numbers),
        }
    }

    /// Its bytes for writing; it must be on the host, and nobody else may hold it.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            CommBuffer::Tensor(tensor) => tensor.bytes_mut(),
            CommBuffer::U64(numbers) => bytemuck::cast_slice_mut(numbers),
            CommBuffer::F64(numbers) => bytemuck::cast_slice_mut(numbers),
        }
    }

    /// Panics where it is a tensor that somebody else holds too, and so must not be written to.
    pub(crate) fn claim(&mut self) {
        match self {
            CommBuffer::Tensor(tensor) => match tensor.device() {
                Device::Cpu(_) => drop(tensor.bytes_mut().len()),
                Device::Cuda(_) => drop(tensor.cuda_buffer_mut().len()),
            },
            CommBuffer::U64(_) | CommBuffer::F64(_) => {}
        }
    }
}

/// A type that messages can be made of: what goes in comes out.
pub trait IntoCommBuffer: Sized {
    /// Gives the buffer to the transport, until the message has arrived.
    fn into_buffer(self) -> CommBuffer;
    /// Takes it back; only ever called with what `into_buffer` made.
    fn from_buffer(data: CommBuffer) -> Self;
}

impl IntoCommBuffer for CommBuffer {
    fn into_buffer(self) -> CommBuffer {
        self
    }
    fn from_buffer(data: CommBuffer) -> CommBuffer {
        data
    }
}

macro_rules! message {
    ($type:ty, $variant:ident) => {
        impl IntoCommBuffer for $type {
            fn into_buffer(self) -> CommBuffer {
                CommBuffer::$variant(self)
            }
            fn from_buffer(data: CommBuffer) -> $type {
                match data {
                    CommBuffer::$variant(it) => it,
                    other => panic!("a message of {} came back as another type", other.element()),
                }
            }
        }
    };
}

message!(Tensor, Tensor);
message!(Vec<u64>, U64);
message!(Vec<f64>, F64);
