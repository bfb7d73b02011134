//! GGUF, version 3: the one file that llama.cpp and what is built on it read.
//!
//! A header (how many tensors, how many pairs of key and value), the pairs, a table of tensors, padding, and
//! the numbers of each tensor, padded to 32 bytes. All is little-endian; sizes of a tensor stand innermost
//! first, the reverse of PyTorch's. <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>

use std::io::{self, Write};

use super::quantize::GgufType;

const MAGIC: &[u8; 4] = b"GGUF";
const VERSION: u32 = 3;
/// What every tensor starts at a multiple of, and the first one too.
pub(super) const ALIGNMENT: usize = 32;

/// The value of a key.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum GgufValue {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    Texts(Vec<String>),
}

/// A key with its value.
pub(super) type GgufPair = (String, GgufValue);

/// A tensor as the table has it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct GgufTensor {
    pub(super) name: String,
    /// The outermost dimension first, as everywhere here.
    pub(super) shape: Vec<usize>,
    pub(super) dtype: GgufType,
}

impl GgufTensor {
    pub(super) fn bytes(&self) -> usize {
        self.dtype.bytes(self.shape.iter().product())
    }
}

impl GgufValue {
    /// What the file calls its type, and the same for what an array holds.
    fn kind(&self) -> (u32, Option<u32>) {
        const ARRAY: u32 = 9;
        match self {
            GgufValue::U32(_) => (4, None),
            GgufValue::F32(_) => (6, None),
            GgufValue::Bool(_) => (7, None),
            GgufValue::Text(_) => (8, None),
            GgufValue::I32s(_) => (ARRAY, Some(5)),
            GgufValue::F32s(_) => (ARRAY, Some(6)),
            GgufValue::Texts(_) => (ARRAY, Some(8)),
        }
    }

    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let (kind, items) = self.kind();
        u32(out, kind)?;
        if let Some(items) = items {
            u32(out, items)?;
        }
        match self {
            GgufValue::U32(value) => u32(out, *value),
            GgufValue::F32(value) => out.write_all(&value.to_le_bytes()),
            GgufValue::Bool(value) => out.write_all(&[u8::from(*value)]),
            GgufValue::Text(text) => string(out, text),
            GgufValue::I32s(values) => {
                u64(out, values.len())?;
                values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes()))
            }
            GgufValue::F32s(values) => {
                u64(out, values.len())?;
                values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes()))
            }
            GgufValue::Texts(texts) => {
                u64(out, texts.len())?;
                texts.iter().try_for_each(|text| string(out, text))
            }
        }
    }
}

/// Writes all that stands before the numbers, padded, so that the first tensor follows.
pub(super) fn write_header(
    out: &mut impl Write,
    pairs: &[GgufPair],
    tensors: &[GgufTensor],
) -> io::Result<()> {
    let mut header = Vec::new();
    header.extend(MAGIC);
    u32(&mut header, VERSION)?;
    u64(&mut header, tensors.len())?;
    u64(&mut header, pairs.len())?;
    for (key, value) in pairs {
        string(&mut header, key)?;
        value.write(&mut header)?;
    }
    let mut offset = 0;
    for tensor in tensors {
        string(&mut header, &tensor.name)?;
        u32(&mut header, tensor.shape.len() as u32)?;
        tensor.shape.iter().rev().try_for_each(|size| u64(&mut header, *size))?;
        u32(&mut header, tensor.dtype.code())?;
        u64(&mut header, offset)?;
        offset += tensor.bytes().next_multiple_of(ALIGNMENT);
    }
    write_padded(out, &header)
}

/// Writes bytes, and zeros up to where the next may start.
pub(super) fn write_padded(out: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    out.write_all(bytes)?;
    let padding = bytes.len().next_multiple_of(ALIGNMENT) - bytes.len();
    out.write_all(&[0; ALIGNMENT][..padding])
}

fn u32(out: &mut impl Write, value: u32) -> io::Result<()> {
    out.write_all(&value.to_le_bytes())
}

fn u64(out: &mut impl Write, value: usize) -> io::Result<()> {
    out.write_all(&(value as u64).to_le_bytes())
}

fn string(out: &mut impl Write, text: &str) -> io::Result<()> {
    u64(out, text.len())?;
    out.write_all(text.as_bytes())
}
