//! An owned descriptor of cuDNN's: attributes are set, it is finished, and then read or handed to others.

use super::bindings::{self, AttributeValue, CudnnFunctions, DescriptorKind};
use crate::error::{Error, Result};

/// A descriptor, destroyed in the end.
#[derive(Debug)]
pub(super) struct CudnnDescriptor {
    raw: bindings::RawDescriptor,
    cudnn: &'static CudnnFunctions,
}

// SAFETY: descriptors are plain memory of the library's, used by one thread at a time.
unsafe impl Send for CudnnDescriptor {}

impl CudnnDescriptor {
    pub(super) fn new(cudnn: &'static CudnnFunctions, kind: DescriptorKind) -> Result<CudnnDescriptor> {
        let mut raw = bindings::RawDescriptor(std::ptr::null_mut());
        // SAFETY: the library is loaded; it writes the handle.
        let code = unsafe { (cudnn.create_descriptor)(kind as i32, &mut raw) };
        cudnn.check(code, "describing a convolution")?;
        Ok(CudnnDescriptor { raw, cudnn })
    }

    /// With an attribute of several values.
    pub(super) fn with_all<V: AttributeValue>(self, attribute: i32, values: &[V]) -> Result<CudnnDescriptor> {
        let (count, at) = (values.len() as i64, values.as_ptr().cast());
        // SAFETY: the descriptor lives; the library reads `count` values of the type that it is told.
        let code = unsafe { (self.cudnn.set_attribute)(self.raw, attribute, V::TYPE, count, at) };
        self.cudnn.check(code, "describing a convolution")?;
        Ok(self)
    }

    /// With an attribute of one value.
    pub(super) fn with<V: AttributeValue>(self, attribute: i32, value: V) -> Result<CudnnDescriptor> {
        self.with_all(attribute, &[value])
    }

    /// Done: what it describes is checked, and where it is a plan, made.
    pub(super) fn finished(self) -> Result<CudnnDescriptor> {
        // SAFETY: the descriptor lives.
        let code = unsafe { (self.cudnn.finalize)(self.raw) };
        self.cudnn.check(code, "describing a convolution")?;
        Ok(self)
    }

    /// Fills `values` from an attribute; returns how many it has, which may be more than fit.
    pub(super) fn read<V: AttributeValue>(&self, attribute: i32, values: &mut [V]) -> Result<usize> {
        let mut count = 0;
        let capacity = values.len() as i64;
        let at = if values.is_empty() { std::ptr::null_mut() } else { values.as_mut_ptr().cast() };
        // SAFETY: the descriptor lives; the library writes at most `capacity` values of the type that it is told.
        let code =
            unsafe { (self.cudnn.get_attribute)(self.raw, attribute, V::TYPE, capacity, &mut count, at) };
        self.cudnn.check(code, "reading a convolution's description")?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// An attribute of one value.
    pub(super) fn value<V: AttributeValue>(&self, attribute: i32, mut value: V) -> Result<V> {
        match self.read(attribute, std::slice::from_mut(&mut value))? {
            0 => Err(Error::Cuda {
                doing: "reading a convolution's description",
                why: format!("attribute {attribute} has no value"),
            }),
            _ => Ok(value),
        }
    }

    pub(super) fn raw(&self) -> bindings::RawDescriptor {
        self.raw
    }
}

impl Drop for CudnnDescriptor {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once.
        let _ = unsafe { (self.cudnn.destroy_descriptor)(self.raw) };
    }
}
