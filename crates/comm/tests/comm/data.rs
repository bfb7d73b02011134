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
    message_of(element, &(0..n).map(value).collect::<Vec<_>>())
}

/// The same of its values: compiled once, and not for every closure that a test has.
fn message_of(element: ElementType, values: &[u32]) -> CommBuffer {
    let (shape, category) = ([values.len()], Category::Communication);
    let floats = |dtype| {
        let values: Vec<f32> = values.iter().map(|value| *value as f32).collect();
        Tensor::from_f32(&device(), &shape, dtype, &values, category)
    };
    let tensor = match element {
        ElementType::F32 => floats(DType::F32),
        ElementType::Bf16 => floats(DType::Bf16),
        ElementType::U32 => Tensor::from_slice(&device(), &shape, values, category),
        ElementType::U64 => return CommBuffer::U64(values.iter().map(|value| (*value).into()).collect()),
        ElementType::F64 => return CommBuffer::F64(values.iter().map(|value| (*value).into()).collect()),
    };
    CommBuffer::Tensor(tensor.unwrap())
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
    assert_equal(what, data, &message(data.element(), n, value), n);
}

#[track_caller]
fn assert_equal(what: &str, data: &CommBuffer, expected: &CommBuffer, n: usize) {
    assert_eq!(data.len(), n, "{what}: length");
    let (got, expected) = (bytes(data), bytes(expected));
    if got != expected {
        let size = data.element().bytes();
        let wrong = got.chunks(size).zip(expected.chunks(size)).position(|(a, b)| a != b);
        panic!("{what}: element {} of {n} {} is wrong", wrong.unwrap(), data.element());
    }
}
