//! Messages to test with: small whole numbers, which every element type holds exactly and adds without rounding.

use std::borrow::Cow;
use std::cell::RefCell;
use std::sync::OnceLock;

use espalier_comm::{CommBuffer, ElementType};
use espalier_tensor::{Category, DType, Device, Tensor};

/// All types of elements.
pub const ELEMENTS: [ElementType; 5] =
    [ElementType::F32, ElementType::Bf16, ElementType::U32, ElementType::U64, ElementType::F64];

static HOST: OnceLock<Device> = OnceLock::new();

thread_local! {
    static DEVICE: RefCell<Option<Device>> = const { RefCell::new(None) };
}

fn device() -> Device {
    let host = || HOST.get_or_init(|| Device::cpu(1).unwrap()).clone();
    DEVICE.with_borrow(|device| device.clone().unwrap_or_else(host))
}

/// Puts all tensors of this thread on a device, instead of the host.
pub fn use_device(device: Device) {
    DEVICE.set(Some(device));
}

/// The bytes of a message, wherever it is.
fn bytes(data: &CommBuffer) -> Cow<'_, [u8]> {
    match data {
        CommBuffer::Tensor(tensor) => tensor.host_bytes(),
        _ => Cow::Borrowed(data.bytes()),
    }
}

/// A message of `n` elements, the `i`-th of value `value(i)`.
pub fn message(element: ElementType, n: usize, value: impl Fn(usize) -> u32) -> CommBuffer {
    let category = Category::Communication;
    let floats = |dtype| {
        let values: Vec<f32> = (0..n).map(|i| value(i) as f32).collect();
        CommBuffer::Tensor(Tensor::from_f32(&device(), &[n], dtype, &values, category).unwrap())
    };
    match element {
        ElementType::F32 => floats(DType::F32),
        ElementType::Bf16 => floats(DType::Bf16),
        ElementType::U32 => {
            let values: Vec<u32> = (0..n).map(value).collect();
            CommBuffer::Tensor(Tensor::from_slice(&device(), &[n], &values, category).unwrap())
        }
        ElementType::U64 => CommBuffer::U64((0..n).map(|i| value(i).into()).collect()),
        ElementType::F64 => CommBuffer::F64((0..n).map(|i| value(i).into()).collect()),
    }
}

/// Room for `n` elements, filled with what no test expects.
pub fn receive_buffer(element: ElementType, n: usize) -> CommBuffer {
    message(element, n, |_| 99)
}

/// A tensor of f32.
pub fn floats(values: &[f32]) -> Tensor {
    Tensor::from_slice(&device(), &[values.len()], values, Category::Communication).unwrap()
}

/// Asserts that a message holds `value(i)` everywhere.
#[track_caller]
pub fn assert_holds(what: &str, data: &CommBuffer, n: usize, value: impl Fn(usize) -> u32) {
    let expected = message(data.element(), n, value);
    assert_eq!(data.len(), n, "{what}: length");
    let (got, expected) = (bytes(data), bytes(&expected));
    if got != expected {
        let size = data.element().bytes();
        let wrong = got.chunks(size).zip(expected.chunks(size)).position(|(a, b)| a != b);
        panic!("{what}: element {} of {n} {} is wrong", wrong.unwrap(), data.element());
    }
}
