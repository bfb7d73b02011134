//! Tensors that a backward pass waits for, as PyTorch's saved tensors are.

use crate::tensor::Tensor;

/// A tensor that is kept for a backward pass. While one of these holds it, what would be transient is counted
/// as activations, however many do: so that category is what lies between forward and backward, to the byte.
#[derive(Debug)]
pub struct StashedTensor(Tensor);

impl StashedTensor {
    /// Counts the tensor as an activation until it is taken or dropped.
    pub fn new(tensor: Tensor) -> StashedTensor {
        tensor.save();
        StashedTensor(tensor)
    }

    /// Lets go of it: it is transient again.
    pub fn take(self) -> Tensor {
        self.0.clone()
    }
}

impl Drop for StashedTensor {
    fn drop(&mut self) {
        self.0.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Category, DType, Device};

    #[test]
    fn a_tensor_is_an_activation_for_as_long_as_somebody_waits_for_it() {
        let device = Device::cpu(1).unwrap();
        let bytes_in = |category| device.ledger().current(category);
        let x = Tensor::zeros(&device, &[4], DType::F32, Category::Transient).unwrap();
        let (first, second) = (StashedTensor::new(x.clone()), StashedTensor::new(x.clone().reshape(&[2, 2])));
        assert_eq!((bytes_in(Category::Activations), bytes_in(Category::Transient)), (16, 0), "counted once");
        drop(first);
        assert_eq!(bytes_in(Category::Activations), 16);
        let again = second.take();
        assert_eq!((bytes_in(Category::Activations), bytes_in(Category::Transient)), (0, 16));
        drop((x, again));
        assert_eq!((device.ledger().total(), device.ledger().peak(Category::Activations)), (0, 16));
        // What is no transient stays what it is.
        let weight = Tensor::zeros(&device, &[4], DType::F32, Category::Weights).unwrap();
        let _saved = StashedTensor::new(weight);
        assert_eq!((bytes_in(Category::Weights), bytes_in(Category::Activations)), (16, 0));
    }
}
